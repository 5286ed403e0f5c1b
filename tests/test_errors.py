"""Each mistake of a user gives its named error: what happened, at which line of theirs, and what to do."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, distribute_tensor, init_device_mesh
from torch.nn import functional
from torch.testing._internal.distributed.fake_pg import FakeStore

import monograph as mg
from tests.support import assert_same

HERE = str(Path(__file__))
LINES = Path(__file__).read_text().splitlines()


def line_of(mark: str) -> int:
    """The line of this file that carries a comment."""
    (found,) = (number for number, line in enumerate(LINES, 1) if line.endswith(f"  # at: {mark}"))
    return found


def check(error: BaseException, *parts: str, at: str | None = None) -> None:
    """The error is told well: it names its parts, the user's line (the one marked `at`), and a way out."""
    assert isinstance(error, mg.MonographError)
    for part in parts:
        assert part in str(error), f"{part!r} is not in:\n{error}"
    assert error.hint, f"no hint: {error}"
    assert error.where is not None, f"no place: {error}"
    assert error.where.file == HERE, error.where
    assert f'"{HERE}", line {error.where.line}' in str(error)
    if at is not None:
        assert error.where.line == line_of(at), f"{error.where.line} is not {at}"


def graph(build: Callable[..., Any], **attributes: Any) -> mg.Graph:
    """A graph with this build() and these attributes."""
    step = type("Step", (mg.Graph,), {"build": build})()
    for name, value in attributes.items():
        setattr(step, name, value)
    return step


def linear(seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(4, 3)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


# --- arguments ----------------------------------------------------------------------------------------------------


class Masked(mg.Graph):
    def __init__(self) -> None:
        super().__init__()
        self.model = linear()

    def build(self, x, y, scale=1.0):
        out = self.model(x)  # at: model
        return (out * y[0]["mask"]).sum() * scale  # at: mask


def good() -> tuple[Any, ...]:
    return torch.ones(5, 4), [{"mask": torch.ones(5, 3), "label": torch.ones(5)}]


class Thing:
    """Something that no graph can take."""


def with_mask(mask: Any) -> tuple[Any, ...]:
    return good()[0], [{"mask": mask, "label": torch.ones(5)}]


MISFITS: dict[str, tuple[Callable[[], tuple[Any, ...]], list[str], str]] = {
    "shape of a nested tensor": (
        lambda: with_mask(torch.ones(5, 7)),
        ['y[0]["mask"]', "(5, 7)", "(5, 3)"],
        "mask",
    ),
    "shape": (lambda: (torch.ones(5, 6), good()[1]), ["argument x", "(5, 6)", "(5, 4)"], "model"),
    "number of dimensions": (lambda: (torch.ones(()), good()[1]), ["argument x", "()", "(5, 4)"], "model"),
    "dtype": (
        lambda: (torch.ones(5, 4, dtype=torch.float64), good()[1]),
        ["argument x", "float64", "float32", f"line {line_of('model')}"],
        "misfit",  # the fake kernel takes it, the real one does not
    ),
    "device": (
        lambda: (torch.ones(5, 4, device="meta"), good()[1]),
        ["argument x", "on meta", "on cpu"],
        "model",
    ),
    "None for a tensor": (lambda: with_mask(None), ['y[0]["mask"]', "None", "(5, 3)"], "mask"),
    "an int for a tensor": (lambda: (3, good()[1]), ["argument x", "3 (int)", "(5, 4)"], "model"),
    "a string for a float": (lambda: (*good(), "big"), ["argument scale", "'big' (str)", "a float"], "mask"),
    "a list for a dict": (
        lambda: (good()[0], [[torch.ones(5, 3)]]),
        ["argument y[0]", "list", "dict"],
        "mask",
    ),
    "a key is missing": (
        lambda: (good()[0], [{"label": torch.ones(5)}]),
        ["argument y[0]", '"mask"'],
        "mask",
    ),
}


@pytest.mark.parametrize("name", MISFITS)
def test_an_argument_that_does_not_fit_after_a_good_call(name):
    make, parts, at = MISFITS[name]
    step = Masked()
    first = step(*good(), 1.0)
    with pytest.raises(mg.SignatureError) as caught:
        step(*make(), *([1.0] if len(make()) == 2 else []))  # at: misfit
    check(caught.value, *parts, at=at)
    assert_same(first, step(*good(), 1.0))
    assert len(step.builds) == 1


def test_a_misfit_that_only_the_first_call_has_is_told_by_its_line():
    step = Masked()
    with pytest.raises(mg.CaptureError) as caught:
        step(torch.ones(5, 6), good()[1])
    check(caught.value, "[5, 6]", at="model")


COUNTS: dict[str, tuple[tuple[Any, ...], dict[str, Any], list[str]]] = {
    "too few": ((good()[0],), {}, ["missing", "'y'", "build(x, y, scale=1.0)"]),
    "too many": ((*good(), 1.0, 2.0), {}, ["too many", "4 positional"]),
    "an unknown keyword": (good(), {"scales": 1.0}, ["'scales'"]),
    "twice": (good(), {"x": torch.ones(5, 4)}, ["'x'"]),
}


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("name", COUNTS)
def test_the_count_of_arguments(name, first):
    args, kwargs, parts = COUNTS[name]
    step = Masked()
    if not first:
        step(*good())
    with pytest.raises(mg.SignatureError) as caught:
        step(*args, **kwargs)  # at: count
    check(caught.value, *parts, at="count")


def inference_tensor() -> torch.Tensor:
    with torch.inference_mode():
        return torch.ones(5, 3)


def quantised() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.ones(5, 3), 0.1, 0, torch.qint8)


class Tagged(torch.Tensor):
    """A subclass of Tensor."""


def masked_tensor() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.masked.masked_tensor(torch.ones(5, 3), torch.ones(5, 3, dtype=torch.bool))


UNTAKEN: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "a numpy array": (lambda: np.ones((5, 3)), ["numpy.ndarray", "torch.from_numpy"]),
    "a numpy number": (lambda: np.float32(1), ["numpy.float32"]),
    "an object": (Thing, ["Thing"]),
    "a set": (lambda: {1, 2}, ["set", "sorted tuple"]),
    "a function": (lambda: len, ["builtin_function_or_method"]),
    "a module": (lambda: linear(), ["Linear"]),
    "an iterator": (lambda: iter([1]), ["list_iterator"]),
    "a tensor made under inference_mode": (inference_tensor, ["inference_mode"]),
    "a sparse tensor of blocks": (lambda: torch.ones(4, 4).to_sparse_bsr((2, 2)), ["sparse", "to_dense"]),
    "a sparse tensor that is trained": (
        lambda: torch.ones(5, 3).to_sparse().requires_grad_(),
        ["requires grad", "torch.sparse_coo_tensor(indices, values, size)"],
    ),
    "a quantised tensor": (quantised, ["quantised", "dequantize"]),
    "a subclass of Tensor": (lambda: torch.ones(5, 3).as_subclass(Tagged), ["Tagged", "subclass"]),
    "a masked tensor": (masked_tensor, ["MaskedTensor"]),
    "a nested tensor": (
        lambda: torch.nested.nested_tensor([torch.ones(2, 3)], layout=torch.jagged),
        ["argument"],
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", UNTAKEN)
def test_an_argument_that_no_graph_takes(name):
    make, parts = UNTAKEN[name]
    step = Masked()
    with pytest.raises(mg.SignatureError) as caught:
        step(*with_mask(make()))  # at: untaken
    check(caught.value, 'y[0]["mask"]', *parts, at="untaken")


def test_a_graph_is_an_argument_that_no_graph_takes():
    with pytest.raises(mg.SignatureError) as caught:
        Masked()(Masked(), [])
    check(caught.value, "argument x", "Masked")


def test_an_argument_with_a_history_outside():
    outer = torch.ones(5, 4, requires_grad=True)
    step = Masked()
    with pytest.raises(mg.GraphBoundaryError) as caught:
        step(outer * 2, good()[1])  # at: history
    check(caught.value, "argument x", "detach()", at="history")
    with torch.no_grad():
        step(outer * 2, good()[1])
        mixed = torch.ones(5, 4, requires_grad=True).expand(5, 4)
        assert mixed.grad_fn is None or mixed.requires_grad
    with torch.no_grad():
        assert_same(step(outer * 2, good()[1]), step((outer * 2).detach(), good()[1]))


@pytest.mark.parametrize("transform", [torch.vmap, torch.func.grad, torch.func.jacrev])
def test_a_call_inside_of_a_functional_transform(transform):
    step = graph(lambda self, x: (x * 2).sum())
    with pytest.raises(mg.GraphBoundaryError) as caught:
        transform(step)(torch.ones(2))
    check(caught.value, "argument x", "torch.func")


def test_a_spec_is_for_compile():
    step = Masked()
    with pytest.raises(mg.SignatureError) as caught:
        step(mg.spec((5, 4)), good()[1])  # at: spec
    check(caught.value, "spec", "compile()", at="spec")
    assert not step.builds


# --- what crosses the border on the way out -----------------------------------------------------------------------


def forward(self, x):
    return self.model(x)


def test_an_output_in_a_backward_outside():
    step = graph(forward, model=linear())
    out = step(torch.ones(2, 4))
    assert out.requires_grad
    with pytest.raises(mg.GraphBoundaryError) as caught:
        out.sum().backward()  # at: boundary
    check(caught.value, "backward()", "build()", at="boundary")


def test_an_output_mixed_into_a_graph_of_autograd_outside():
    step = graph(forward, model=linear())
    w = torch.ones(3, requires_grad=True)
    with pytest.raises(mg.GraphBoundaryError) as caught:
        (step(torch.ones(2, 4)) * w).sum().backward()  # at: mixed
    check(caught.value, "backward()", "detach()", at="mixed")
    (step(torch.ones(2, 4)).detach() * w).sum().backward()
    assert w.grad is not None


def test_the_loss_of_a_step_has_no_second_backward():
    def build(self, x):
        loss = self.model(x).sum()
        loss.backward()
        return loss

    step = graph(build, model=(model := linear()))
    step.add_optimizer(sgd(model))
    loss = step(torch.ones(2, 4))
    with pytest.raises(mg.GraphBoundaryError) as caught:
        loss.backward()
    check(caught.value)


UNRETURNED: dict[str, Callable[[torch.Tensor], Any]] = {
    "a distribution": lambda x: torch.distributions.Normal(x, x.abs() + 1),
    "a set of tensors": lambda x: {x * 2},
    "an iterator": lambda x: iter([x * 2]),
    "a generator": lambda x: (item for item in [x * 2]),
    "a closure": lambda x: lambda: x * 2,
    "an object": lambda x: vars(thing := Thing()).update(value=[x * 2]) or thing,
}


@pytest.mark.parametrize("name", UNRETURNED)
def test_a_result_that_cannot_be_returned(name):
    step = graph(lambda self, x: UNRETURNED[name](x))
    with pytest.raises(mg.CaptureError) as caught:
        step(torch.ones(2))
    check(caught.value, "build() returns a")


def test_results_that_are_no_tensors_are_returned_as_they_are():
    thing = Thing()
    step = graph(lambda self, x: (thing, "text", None, 3, {1, 2}, len, x.shape, x.dtype), thing=thing)
    for _ in range(2):
        assert step(torch.ones(2)) == (thing, "text", None, 3, {1, 2}, len, torch.Size([2]), torch.float32)


def test_an_output_that_requires_grad_can_be_changed_in_place():
    step = graph(forward, model=(model := linear()))
    out = step(torch.ones(2, 4))
    out /= 2
    out += 1
    assert_same((model(torch.ones(2, 4)) / 2 + 1).detach(), out.detach())
    with pytest.raises(mg.GraphBoundaryError):
        out.sum().backward()


def test_an_output_changed_in_place_by_the_user_is_theirs():
    step = graph(forward, model=linear())
    first = step(torch.ones(2, 4))
    kept = first.detach().clone()
    with torch.no_grad():
        first.mul_(0)
    assert_same(kept, step(torch.ones(2, 4)).detach())


# --- how a Graph is written ------------------------------------------------------------------------------------------


def test_super_init_is_forgotten():
    class Forgetful(mg.Graph):
        def __init__(self) -> None:
            self.model = linear()  # at: forgotten

        def build(self, x):
            return x

    with pytest.raises(mg.DefinitionError) as caught:
        Forgetful()
    check(caught.value, "Forgetful", "super().__init__()", at="forgotten")
    assert isinstance(caught.value, AttributeError)


@pytest.mark.parametrize(
    "use",
    [
        lambda step: step(torch.ones(1)),
        lambda step: step.compile(torch.ones(1)),
        lambda step: step.add_optimizer(sgd(linear())),
        lambda step: step.model,
    ],
)
def test_super_init_is_forgotten_and_nothing_is_set(use):
    class Forgetful(mg.Graph):
        def __init__(self) -> None:
            pass

        def build(self, x):
            return x

    with pytest.raises(mg.DefinitionError) as caught:
        use(Forgetful())
    check(caught.value, "super().__init__()")


def test_build_is_missing():
    class Empty(mg.Graph):
        pass

    step = Empty()
    with pytest.raises(mg.MissingBuildError) as caught:
        step(torch.ones(1))  # at: no build
    check(caught.value, "Empty", "build()", at="no build")
    assert isinstance(caught.value, NotImplementedError)
    with pytest.raises(mg.MissingBuildError):
        step.compile(torch.ones(1))


@pytest.mark.parametrize(
    ("make", "parts"),
    [
        (lambda: sgd(linear()), ["optimizer", "'thing'", "add_optimizer"]),
        (lambda: torch.ones(2).requires_grad_(), ["tensor", "'thing'", "nn.Module"]),
        (lambda: nn.Parameter(torch.ones(2)), ["tensor", "'thing'", "nn.Module"]),
    ],
)
def test_an_attribute_that_a_graph_cannot_have(make, parts):
    step = graph(forward)
    with pytest.raises(mg.DefinitionError) as caught:
        step.thing = make()  # at: attribute
    check(caught.value, *parts, at="attribute")
    assert not hasattr(step, "thing")


def test_an_attribute_with_the_name_of_a_property():
    step = graph(forward)
    with pytest.raises(mg.DefinitionError) as caught:
        step.training = True
    check(caught.value, "'training'", "property")


def test_an_attribute_that_is_not_there():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = graph(forward).nothing


def test_build_called_directly_warns_and_runs_eagerly():
    step = graph(forward, model=linear())
    with pytest.warns(UserWarning, match=r"build\(\) of .* was called directly"):
        out = step.build(torch.ones(2, 4))
    assert_same(linear()(torch.ones(2, 4)), out)
    assert not step.builds
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(torch.ones(2, 4))
        step.eager(torch.ones(2, 4))


def test_a_graph_inside_the_build_of_another():
    inner = graph(forward, model=linear())

    def build(self, x):
        return self.inner(x)  # at: nested

    outer = graph(build, inner=inner, model=linear())
    with pytest.raises(mg.CaptureError) as caught:
        outer(torch.ones(2, 4))
    check(caught.value, "nested", outer.name, inner.name, at="nested")
    assert_same(linear()(torch.ones(2, 4)), inner(torch.ones(2, 4)).detach())


def test_too_many_builds():
    step = graph(forward, model=linear())
    step.config.max_builds(1)
    step(torch.ones(2, 4))
    with pytest.raises(mg.CaptureError) as caught:
        step(torch.ones(3, 4))  # at: max builds
    check(caught.value, "build 2", "argument x", "max_builds", at="max builds")


@pytest.mark.parametrize(
    "use",
    [
        lambda step: step.config.backend("tpu"),
        lambda step: step.config.max_builds(0),
        lambda step: step.show(),
        lambda step: step.show("nothing"),
    ],
)
def test_a_wrong_setting(use):
    step = graph(forward)
    with pytest.raises(mg.DefinitionError) as caught:
        use(step)
    check(caught.value)


# --- optimizers ---------------------------------------------------------------------------------------------------------


def trained(self, x):
    loss = self.model(x).sum()
    loss.backward()
    return loss


def test_backward_without_an_optimizer():
    step = graph(trained, model=linear())
    with pytest.raises(mg.OptimizerError) as caught:
        step(torch.ones(2, 4))
    check(caught.value, "backward()", "add_optimizer", "keep_gradients")


def test_an_optimizer_without_backward():
    step = graph(forward, model=(model := linear()))
    step.add_optimizer(sgd(model))
    before = model.weight.clone()
    with pytest.raises(mg.OptimizerError) as caught:
        step(torch.ones(2, 4))
    check(caught.value, "optimizer.0", "SGD", "loss.backward()")
    assert_same(before, model.weight)


def test_a_manual_optimizer_that_is_never_stepped():
    step = graph(trained, model=(model := linear()))
    step.add_optimizer(sgd(model), manual=True)
    with pytest.raises(mg.OptimizerError) as caught:
        step(torch.ones(2, 4))
    check(caught.value, "optimizer.0", "manual=True", "optimizer.step()")


@pytest.mark.parametrize(
    ("stray", "told"), [(nn.Parameter(torch.ones(7)), "(7,)"), (nn.LazyLinear(7).weight, "a lazy parameter")]
)
def test_a_parameter_that_no_module_holds(stray, told):
    step = graph(trained, model=(model := linear()))
    step.add_optimizer(torch.optim.SGD([*model.parameters(), stray], lr=0.1))
    with pytest.raises(mg.OptimizerError) as caught:
        step(torch.ones(2, 4))
    check(caught.value, "optimizer.0", told, "group 0, position 2", "self.model = model")
    with pytest.raises(mg.OptimizerError) as caught:
        step.add_optimizer(torch.optim.SGD([stray], lr=0.1))  # at: stray
    check(caught.value, told, "optimizer.0", at="stray")


CHANGED_GROUPS = {
    "another": (
        lambda optimizer, other: optimizer.add_param_group({"params": [other.weight]}),
        "from 1 to 2",
    ),
    "none": (lambda optimizer, other: optimizer.param_groups.clear(), "from 1 to 0"),
    "an option": (lambda optimizer, other: optimizer.param_groups[0].update(amsgrad=True), "max_exp_avg_sq"),
}


@pytest.mark.parametrize("manual", [False, True], ids=["automatic", "manual"])
@pytest.mark.parametrize("name", CHANGED_GROUPS)
def test_param_groups_that_build_changes(name, manual):
    change, told = CHANGED_GROUPS[name]

    def build(self, x):
        change(optimizer, self.other)
        loss = trained(self, x)
        if manual:
            optimizer.step()
        return loss

    step = graph(build, model=(model := linear()), other=linear(1))
    optimizer = torch.optim.Adam(model.parameters())
    step.add_optimizer(optimizer, manual=manual)
    with pytest.raises(mg.OptimizerError) as caught:
        step(torch.ones(2, 4))
    check(caught.value, "build()", "optimizer.0", "Adam", told)
    assert len(optimizer.param_groups) == 1
    assert not optimizer.param_groups[0]["amsgrad"]


@pytest.mark.parametrize("model", [linear(), nn.LazyLinear(3)], ids=["linear", "lazy"])
def test_a_parameter_in_two_optimizers(model):
    step = graph(trained, model=model)
    step.add_optimizer(sgd(model))
    with pytest.raises(mg.OptimizerError) as caught:
        step.add_optimizer(torch.optim.Adam([model.bias]))  # at: twice
    check(caught.value, "model.bias", "optimizer.0", at="twice")
    step(torch.ones(2, 4))


def test_a_parameter_added_to_two_optimizers_later():
    model, other = linear(), linear(1)
    step = graph(lambda self, x: trained(self, x) + 0 * self.other(x).sum(), model=model, other=other)

    def build(self, x):
        loss = (self.model(x) + self.other(x)).sum()
        loss.backward()
        return loss

    step = graph(build, model=model, other=other)
    first, second = sgd(model), sgd(other)
    step.add_optimizer(first)
    step.add_optimizer(second)
    step(torch.ones(2, 4))
    second.add_param_group({"params": [model.bias]})
    with pytest.raises(mg.OptimizerError) as caught:
        step(torch.ones(2, 4))
    check(caught.value, "model.bias", "optimizer.0")


def test_the_same_optimizer_twice():
    model = linear()
    step = graph(trained, model=model)
    optimizer = sgd(model)
    step.add_optimizer(optimizer)
    with pytest.raises(mg.OptimizerError) as caught:
        step.add_optimizer(optimizer)
    check(caught.value, "model.weight")


@pytest.mark.parametrize(
    ("make", "parts"),
    [
        (lambda model: torch.optim.LBFGS(model.parameters()), ["LBFGS", "closure"]),
        (lambda model: torch.optim.SparseAdam(model.parameters()), ["SparseAdam", "sparse"]),
        (
            lambda model: torch.optim.Adam(model.parameters(), differentiable=True),
            ["differentiable=True"],
        ),
        (lambda model: model, ["torch.optim.Optimizer", "Linear"]),
        (lambda model: None, ["torch.optim.Optimizer", "NoneType"]),
    ],
)
def test_an_optimizer_that_cannot_be_captured(make, parts):
    step = graph(trained, model=(model := linear()))
    with pytest.raises(mg.OptimizerError) as caught:
        step.add_optimizer(make(model))  # at: refused optimizer
    check(caught.value, *parts, at="refused optimizer")
    assert not step.training


def test_schedulers_that_cannot_be_stepped_by_the_graph():
    step = graph(trained, model=(model := linear()))
    optimizer, other = sgd(model), sgd(linear())
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    with pytest.raises(mg.OptimizerError) as caught:
        step.add_optimizer(optimizer, lr_sch=plateau)  # at: plateau
    check(caught.value, "ReduceLROnPlateau", "scheduler.step(metric)", at="plateau")
    with pytest.raises(mg.OptimizerError) as caught:
        step.add_optimizer(optimizer, lr_sch=torch.optim.lr_scheduler.StepLR(other, 1))
    check(caught.value, "another optimizer")
    with pytest.raises(mg.OptimizerError) as caught:
        step.add_optimizer(optimizer, lr_sch=0.1)
    check(caught.value, "lr_sch", "float")
    step.add_optimizer(optimizer)
    step(torch.ones(2, 4))


# --- what a graph cannot hold --------------------------------------------------------------------------------------------


@pytest.fixture
def process_group():
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def buffered(make: Callable[[], torch.Tensor]) -> Callable[[], nn.Module]:
    def module() -> nn.Module:
        inner = linear()
        inner.register_buffer("table", make())
        return nn.Sequential(inner)

    return module


def made_in_inference_mode() -> nn.Module:
    with torch.inference_mode():
        return nn.Sequential(linear())


def with_dtensor() -> nn.Module:
    model = nn.Sequential(linear())
    mesh = init_device_mesh("cpu", (1,))
    model[0].weight = nn.Parameter(distribute_tensor(torch.ones(3, 4), mesh, [Replicate()]))
    return model


def with_subclass() -> nn.Module:
    model = nn.Sequential(linear())
    model[0].weight = nn.Parameter(torch.ones(3, 4).as_subclass(Tagged))
    return model


def with_subclass_attribute() -> nn.Module:
    model = nn.Sequential(linear())
    model[0].table = torch.ones(3).as_subclass(Tagged)
    return model


def wrapped_by_ddp() -> nn.Module:
    return nn.Sequential(nn.parallel.DistributedDataParallel(linear()))


UNHELD: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "a DTensor": (with_dtensor, ["model.0.weight", "DTensor"]),
    "another subclass": (with_subclass, ["model.0.weight", "Tagged"]),
    "a subclass as an attribute": (with_subclass_attribute, ["model.0.table", "Tagged"]),
    "a quantised buffer": (buffered(quantised), ["model.0.table", "quantised"]),
    "a sparse buffer of blocks": (
        buffered(lambda: torch.ones(2, 2).to_sparse_bsr((1, 1))),
        ["model.0.table", "sparse"],
    ),
    "an inference tensor": (made_in_inference_mode, ["model.0.weight", "inference_mode"]),
    "DistributedDataParallel": (wrapped_by_ddp, ["model.0", "DistributedDataParallel", ".module"]),
    "DataParallel": (
        lambda: nn.Sequential(nn.DataParallel(linear())),
        ["model.0", "DataParallel", ".module"],
    ),
    "a TorchScript module": (
        lambda: nn.Sequential(torch.jit.trace(linear(), torch.ones(1, 4))),
        ["model.0", "TorchScript"],
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", UNHELD)
def test_a_module_that_no_graph_holds(name, process_group):
    make, parts = UNHELD[name]
    model = make()
    step = graph(trained, model=model)
    parameters = [p for p in model.parameters() if p.is_leaf]
    step.add_optimizer(torch.optim.SGD(parameters, lr=0.1))
    with pytest.raises(mg.UnsupportedTensorError) as caught:
        step(torch.ones(2, 4))  # at: unheld
    check(caught.value, *parts, at="unheld")


def test_a_sparse_embedding_in_inference_is_fine():
    torch.manual_seed(0)
    model = nn.Embedding(3, 2, sparse=True)
    x = torch.tensor([0, 2])
    assert_same(model(x).detach(), graph(forward, model=model)(x).detach())


def test_a_free_tensor_of_a_subclass():
    table = torch.ones(3).as_subclass(Tagged)

    def build(self, x):
        return x + table  # at: free

    with pytest.raises(mg.UnsupportedTensorError) as caught:
        graph(build)(torch.ones(3))
    check(caught.value, "Tagged", at="free")


# --- what build() may not do to state ---------------------------------------------------------------------------------------


class Rebel(nn.Module):
    """Does one forbidden thing in its forward."""

    def __init__(self, deed: Callable[[Any], None]) -> None:
        super().__init__()
        self.fc = linear()
        self.register_buffer("table", torch.ones(3))
        self.deed = deed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.deed(self)  # at: deed
        return self.fc(x) * (1 if self.table is None else self.table)


def replace_parameter(self: Rebel) -> None:
    self.fc.weight = nn.Parameter(torch.ones(3, 4))


def widen_buffer(self: Rebel) -> None:
    self.table = torch.ones(2, 3)


def retype_buffer(self: Rebel) -> None:
    self.table = self.table.double()


def drop_buffer(self: Rebel) -> None:
    self.table = None


def register_later(self: Rebel) -> None:
    self.register_buffer("late", torch.ones(3))


def retype_data(self: Rebel) -> None:
    self.fc.weight.data = self.fc.weight.data.double()


DEEDS: dict[str, tuple[Callable[[Any], None], list[str]]] = {
    "replace a parameter": (replace_parameter, ["model.fc.weight"]),
    "change the shape of a buffer": (widen_buffer, ["model.table", "(2, 3)", "(3,)"]),
    "change the dtype of a buffer": (retype_buffer, ["model.table", "float64", "float32"]),
    "remove a buffer": (drop_buffer, ["model.table"]),
    "register a buffer": (register_later, ["model.late"]),
    "change the dtype of .data": (retype_data, [".data", "float64", "float32"]),
}


@pytest.mark.parametrize("name", DEEDS)
def test_what_build_may_not_do_to_state(name):
    deed, parts = DEEDS[name]
    model = Rebel(deed)
    before = {key: id(value) for key, value in model.state_dict(keep_vars=True).items()}
    step = graph(forward, model=model)
    with torch.no_grad(), pytest.raises(mg.CaptureError) as caught:
        step(torch.ones(2, 4))
    check(caught.value, *parts)
    assert {key: id(value) for key, value in model.state_dict(keep_vars=True).items()} == before


# --- the user's own exceptions ------------------------------------------------------------------------------------------------


class Own(Exception):
    """An exception of the user's own."""


class Raising(nn.Module):
    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise self.error


@pytest.mark.parametrize(
    "error",
    [
        ValueError("mine"),
        Own("mine"),
        KeyError("mine"),
        RuntimeError("mine"),
        NotImplementedError("mine: Metadata"),
        AttributeError("mine"),
        AssertionError("mine"),
        StopIteration("mine"),
        KeyboardInterrupt("mine"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_exceptions_of_the_user_pass_through(error):
    step = graph(forward, model=Raising(error))
    with pytest.raises(type(error), match="mine") as caught:
        step(torch.ones(2, 4))
    assert caught.value is error
    assert not step.builds


def test_an_exception_raised_in_a_library_that_the_user_calls():
    def build(self, x):
        return x * int("three")

    with pytest.raises(ValueError, match="invalid literal"):
        graph(build)(torch.ones(2))

    def parse(self, x):
        return x * inspect.signature(3)  # raised inside the standard library

    with pytest.raises(TypeError, match="callable"):
        graph(parse)(torch.ones(2))


def test_an_exception_in_a_backward_hook_passes_through():
    model = linear()

    def hook(_gradient: torch.Tensor) -> None:
        raise Own("in the hook")

    handle = model.weight.register_hook(hook)
    step = graph(trained, model=model)
    step.add_optimizer(sgd(model))
    with pytest.raises(Own, match="in the hook"):
        step(torch.ones(2, 4))
    handle.remove()
    step(torch.ones(2, 4))


def test_an_error_of_torch_names_the_line():
    def build(self, x):
        y = x + 1
        return functional.linear(y, torch.ones(3, 9))  # at: torch error

    with pytest.raises(mg.CaptureError) as caught:
        graph(build)(torch.ones(2, 4))
    assert caught.value.where.line == line_of("torch error")
    assert "RuntimeError" in str(caught.value)
    assert isinstance(caught.value.cause, RuntimeError)


def test_an_error_at_run_time_names_the_line():
    def build(self, x):
        y = x + 1
        return functional.embedding(y, torch.ones(3, 2))  # at: run time

    step = graph(build)
    step(torch.tensor([0, 1]))
    with pytest.raises(IndexError, match="out of range") as caught:
        step(torch.tensor([5, 5]))
    assert f"line {line_of('run time')}" in "\n".join(caught.value.__notes__)
    assert len(step.builds) == 1


def test_a_graph_without_a_class_names_the_line_of_the_call():
    model = nn.Linear(2, 2)
    step = mg.train_graph(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(mg.MonographError) as caught:
        step(torch.randn(3, 5), torch.randn(3, 2))
    assert caught.value.where.file == __file__
