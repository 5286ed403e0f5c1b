"""What build() may take and return, and what a call that does not fit is told."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

import monograph.flow as flow
from monograph.errors import CaptureError, DataDependentError, OptimizerError, SignatureError
from tests.flow.steps import TrainStep, batches, check_told, graph, loss_of, net, sgd, weights
from tests.support import assert_same

Pair = namedtuple("Pair", ["first", "second"])
Same = type("Same", (OrderedDict,), {})


@dataclass
class Batch:
    x: torch.Tensor
    count: int = 1
    weight: torch.Tensor | None = None


class Output(OrderedDict):
    """A dict whose entries are attributes as well, as model libraries have them."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


# --- containers and leaves -------------------------------------------------------------------------------------------


def doubled(item: Any) -> Any:
    """The structure with each tensor doubled."""
    if isinstance(item, torch.Tensor):
        return item * 2
    if isinstance(item, dict):
        return type(item)((key, doubled(value)) for key, value in item.items())
    if isinstance(item, Batch):
        return Batch(doubled(item.x), item.count, doubled(item.weight))
    if isinstance(item, tuple) and hasattr(item, "_fields"):
        return type(item)(*map(doubled, item))
    if isinstance(item, (list, tuple)):
        return type(item)(map(doubled, item))
    return item


@pytest.mark.every_case
@pytest.mark.parametrize(
    "value",
    [
        torch.ones(2),
        None,
        (torch.ones(2),),
        [torch.ones(2)],
        {"only": torch.ones(2)},
        {"b": torch.ones(1), "a": [torch.ones(2), (None, torch.ones(3))]},
        OrderedDict(z=torch.ones(1), y=torch.ones(2)),
        Same(z=torch.ones(1), y=None),
        Output(loss=torch.ones(1), logits=torch.ones(2)),
        Pair(torch.ones(2), None),
        Batch(torch.ones(2), 3),
        [Batch(torch.ones(2), 3, torch.zeros(1)), {"pair": Pair(1, torch.ones(1))}],
        [],
        {},
        (),
        [1, 2.5, "text", True, None, torch.float32, torch.ones(1)],
    ],
    ids=lambda value: type(value).__name__,
)
def test_any_nesting_goes_in_and_comes_out(value: Any) -> None:
    step = graph(lambda self, item: doubled(item))
    for _ in range(2):
        got, expected = step(value), doubled(value)
        assert type(got) is type(expected)
        if isinstance(expected, Batch):
            got, expected = vars(got), vars(expected)
        if isinstance(expected, list) and expected and isinstance(expected[0], Batch):
            got, expected = [vars(got[0]), got[1]], [vars(expected[0]), expected[1]]
        assert_same(expected, got)


def test_several_results_are_a_tuple() -> None:
    step = graph(lambda self, x: (x + 1, {"square": x * x}, None))
    first, second, third = step(torch.full((2,), 3.0))
    assert (first.tolist(), second["square"].tolist(), third) == ([4.0, 4.0], [9.0, 9.0], None)


def test_no_result() -> None:
    assert graph(lambda self, x: None)(torch.ones(1)) is None


def test_keyword_arguments_and_defaults() -> None:
    def build(self, x, *, scale=2, shift=None):
        return x * scale if shift is None else x * scale + shift

    step, x = graph(build), torch.ones(2)
    assert step(x).tolist() == [2.0, 2.0]
    assert step(x, scale=3).tolist() == [3.0, 3.0]
    assert step(x=x, shift=torch.ones(2)).tolist() == [3.0, 3.0]
    assert step(scale=4, x=x).tolist() == [4.0, 4.0]


def test_other_leaves_are_values_and_not_dropped() -> None:
    """An int, a string or None is a fact of the call: another one gives another build, and none becomes None."""
    step, x = graph(lambda self, x, mode, n: (x * n if mode == "scale" else x - n, mode, n)), torch.ones(2)
    assert step(x, "scale", 3)[0].tolist() == [3.0, 3.0]
    assert step(x, "minus", 3)[0].tolist() == [-2.0, -2.0]
    assert step(x, "minus", 4)[0].tolist() == [-3.0, -3.0]
    assert step(x, "scale", 3)[1:] == ("scale", 3)
    assert len(step.builds) == 3


class Foreign:
    pass


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("value", "path", "kind", "hint"),
    [
        (Foreign(), "item", "Foreign", "dataclasses"),
        ([torch.ones(1), {"key": Foreign()}], 'item[1]["key"]', "Foreign", "tensors"),
        ({1, 2}, "item", "set", "sorted tuple"),
        (np.ones(2), "item", "numpy.ndarray", "torch.from_numpy"),
    ],
    ids=["object", "nested", "set", "array"],
)
def test_what_a_graph_cannot_take_is_named_by_path_and_type(
    value: Any, path: str, kind: str, hint: str
) -> None:
    step = graph(lambda self, item: None)
    with pytest.raises(SignatureError) as caught:
        step(value)
    check_told(caught.value, f"argument {path} is a ", kind, "which a graph cannot take", hint=hint)


# --- calls that do not fit ----------------------------------------------------------------------------------------------


def test_another_shape_is_another_build() -> None:
    model = net()
    step = graph(lambda self, x: self.model(x), model=model)
    for rows in (2, 5, 2):
        x = torch.randn(rows, 3)
        assert_same(model(x).detach(), step(x).detach())
    assert len(step.builds) == 2


def test_a_shape_that_cannot_be_is_told_with_both_shapes() -> None:
    step = graph(lambda self, x, y: self.model(x) + y, model=net())
    step(torch.ones(2, 3), torch.ones(2, 2))
    with pytest.raises(SignatureError) as caught:
        step(torch.ones(2, 4), torch.ones(2, 2))
    told = (
        "argument x is a tensor (2, 4) float32 on cpu; the graph was built for a tensor (2, 3) float32 on cpu"
    )
    check_told(caught.value, "cannot be multiplied", hint=told)
    assert caught.value.where.module == "model.0"
    step(torch.ones(2, 3), torch.ones(2, 2))


def test_a_dtype_that_cannot_be_is_told_with_both() -> None:
    step = graph(lambda self, x: self.model(x), model=net())
    step(torch.ones(2, 3))
    with pytest.raises(SignatureError, match="Double and Float") as caught:
        step(torch.ones(2, 3, dtype=torch.float64))
    assert isinstance(caught.value, RuntimeError)
    assert "argument x is a tensor (2, 3) float64" in caught.value.hint
    assert "built for a tensor (2, 3) float32" in caught.value.hint


@pytest.mark.parametrize(
    ("args", "kwargs", "told", "hint"),
    [
        (3, {}, "too many positional arguments", "got 3 positional arguments"),
        (0, {}, "missing a required argument: 'x'", "pass a batch"),
        (1, {"z": 1}, "unexpected keyword argument 'z'", "got 1 positional and ['z'] keyword arguments"),
    ],
)
def test_a_wrong_number_of_arguments_names_the_argument(args: int, kwargs: Any, told: str, hint: str) -> None:
    step = graph(lambda self, x, y=None: x * 2)
    step(torch.ones(1))
    with pytest.raises(SignatureError) as caught:
        step(*[torch.ones(1)] * args, **kwargs)
    check_told(caught.value, "the call does not fit build(x, y=None)", told, hint=hint)


# --- what build() may do ------------------------------------------------------------------------------------------------


@pytest.mark.every_case
@pytest.mark.parametrize(
    "read",
    [
        lambda t: t.numpy(),
        lambda t: float(t),
        lambda t: int(t),
        lambda t: bool(t),
        lambda t: 1 if t > 3 else 2,
        lambda t: f"{t:.3f}",
    ],
    ids=["numpy", "float", "int", "bool", "if", "format"],
)
def test_values_that_the_step_computes_cannot_be_read_in_build(read: Any) -> None:
    def build(self, x):
        read(self.model(x).sum())
        return x

    step = graph(build, model=torch.nn.Linear(3, 3))
    with pytest.raises(DataDependentError) as caught:
        step(torch.ones(3))
    check_told(caught.value, "Python asked for the value of a tensor", hint="torch.where")


def test_a_value_that_moves_a_branch_by_item_is_told() -> None:
    def build(self, x):
        return x if self.model(x).sum().item() > 2 else -x

    with pytest.raises(DataDependentError) as caught:
        graph(build, model=torch.nn.Linear(3, 3))(torch.ones(3))
    check_told(caught.value, "Python asked for the value", hint="torch.cond")


def test_print_in_build_shows_the_shape(capsys: pytest.CaptureFixture[str]) -> None:
    def build(self, x):
        print(x)
        return x

    graph(build)(torch.ones(3, 2))
    assert "size=(3, 2)" in capsys.readouterr().out


def test_a_branch_on_values_by_cond() -> None:
    step = graph(lambda self, x: torch.cond(x.sum() > 0, lambda a: a + 1, lambda a: a - 1, (x,)))
    assert step(torch.ones(2)).tolist() == [2.0, 2.0]
    assert step(-torch.ones(2)).tolist() == [-2.0, -2.0]
    assert len(step.builds) == 1


def test_a_loss_that_is_no_scalar_is_told() -> None:
    def build(self, x):
        loss = self.model(x)
        loss.backward()
        return loss

    model = net()
    with pytest.raises(CaptureError) as caught:
        graph(build, sgd(model), model=model)(torch.ones(2, 3))
    check_told(caught.value, "only for scalar outputs", hint="loss.sum() or loss.mean()")


def trained_by(backward: Any) -> dict[str, torch.Tensor]:
    """The weights after two steps of the plain loop with this backward, which a graph has to have as well."""

    def build(self, x):
        return backward(self.model, x)

    reference, model = net(), net()
    optimizer, step = sgd(reference), graph(build, sgd(model), model=model)
    for x in batches(2):
        optimizer.zero_grad()
        backward(reference, x)
        optimizer.step()
        step(x)
    assert_same(weights(reference), weights(model))
    return weights(model)


def test_backward_may_keep_its_graph_and_run_twice() -> None:
    def backward(model, x):
        loss = loss_of(model, x)
        loss.backward(retain_graph=True)
        loss.backward()
        return loss

    trained_by(backward)


def test_two_losses_add_up() -> None:
    def backward(model, x):
        first, second = loss_of(model, x), model(x).square().mean()
        first.backward()
        second.backward()
        return first, second

    trained_by(backward)


def test_gradients_of_gradients() -> None:
    def backward(model, x):
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        loss = loss_of(model, x) + (slope.norm(dim=1) - 1).square().mean()
        loss.backward()
        return loss

    trained_by(backward)


def test_the_gradient_of_an_input_is_a_result() -> None:
    model, x = net(), batches(1)[0]
    step = graph(lambda self, x: torch.autograd.grad(self.model(x).sum(), x)[0], model=model)
    argument, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    assert_same(torch.autograd.grad(model(other).sum(), other)[0], step(argument))


def test_an_optimizer_without_backward_is_told() -> None:
    model = net()
    with pytest.raises(OptimizerError) as caught:
        graph(lambda self, x: self.model(x).sum(), sgd(model), model=model)(torch.ones(2, 3))
    check_told(caught.value, "optimizer.0 (SGD) has no gradient", hint="call loss.backward() in build()")


def test_backward_without_an_optimizer_is_told() -> None:
    def build(self, x):
        loss = loss_of(self.model, x)
        loss.backward()
        return loss

    step = graph(build, model=net())
    with pytest.raises(OptimizerError) as caught:
        step(torch.ones(2, 3))
    check_told(caught.value, "no optimizer that would use the gradients", hint="config.keep_gradients(True)")


def test_a_parameter_of_a_foreign_module_is_told() -> None:
    with pytest.raises(OptimizerError) as caught:
        TrainStep(net(), sgd(torch.torch.nn.Linear(5, 6)))(torch.ones(2, 3))
    check_told(
        caught.value, "(6, 5)", "group 0, position 0", "no module of the graph holds", hint="self.model"
    )


def test_a_parameter_in_two_optimizers_is_told() -> None:
    model = net()
    step = TrainStep(model, sgd(model))
    with pytest.raises(OptimizerError) as caught:
        step.add_optimizer(flow.optim.Adam(model[2].parameters()))
    check_told(caught.value, "model.2.weight belongs to optimizer.0 already", hint="its own parameters")


def test_parameters_without_a_gradient_are_left_and_listed() -> None:
    class Unused(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = net(), torch.torch.nn.Linear(2, 2)

        def forward(self, x):
            return self.used(x)

    model = Unused()
    before = model.unused.weight.detach().clone()
    step = TrainStep(model, sgd(model, weight_decay=0.1))
    step(batches(1)[0])
    assert_same(before, model.unused.weight.detach())
    assert "model.unused.weight" in step.explain()
