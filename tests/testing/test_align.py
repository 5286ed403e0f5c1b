"""The tool that everything else is checked with: what is right passes, what is wrong is found and told."""

from __future__ import annotations

import functools
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import monograph as mg
from monograph.testing import Alignment, AlignmentError, Mode, align
from monograph.testing.alignment.arguments import Arguments, wants_gradients
from tests.support.choice import only_quick
from tests.support.warm import run_script
from tests.testing.wrong import WRONG, Wrong, after, weights, with_result


@pytest.fixture(autouse=True)
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MONOGRAPH_TEST_SCRIPTS", str(tmp_path))
    return tmp_path


_BY_NAME = {wrong.name: wrong for wrong in WRONG}
QUICK = [
    _BY_NAME[name]
    for name in ("one unit in the last place", "shared output buffer", "random numbers drawn besides")
]

# --- what is wrong is found ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", only_quick(WRONG, *QUICK), ids=str)
def test_a_wrong_mode_is_found(wrong: Wrong) -> None:
    arguments = wrong.arguments()
    assert align(wrong.target, *arguments, kwargs=wrong.kwargs)
    with pytest.raises(AlignmentError) as caught:
        align(wrong.target, *arguments, kwargs=wrong.kwargs, modes=[wrong.mode])
    assert wrong.told in str(caught.value)
    assert caught.value.mode == wrong.mode.name


def counted(x: torch.Tensor, calls: list[int] = [0]) -> torch.Tensor:  # noqa: B006  the point of it
    calls[0] += 1
    return x * calls[0]


def test_a_baked_constant_is_found() -> None:
    with pytest.raises(AlignmentError, match="counted in mode aten: result"):
        align(counted, torch.randn(3))


def test_a_wrong_implementation_of_a_reference_is_found() -> None:
    def softmax(x: torch.Tensor) -> torch.Tensor:
        return x.exp() / x.exp().sum(1, keepdim=True)

    def slightly_wrong(x: torch.Tensor) -> torch.Tensor:
        return x.exp() / (x.exp().sum(1, keepdim=True) + 1e-3)

    def reference(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x, 1)

    assert align(softmax, torch.randn(3, 4), against=reference, modes=["eager", "aten"])
    with pytest.raises(AlignmentError, match="not close"):
        align(slightly_wrong, torch.randn(3, 4), against=reference)


def appending(items: list[torch.Tensor]) -> torch.Tensor:
    items.append(items[0] * 2)
    return items[0] + 1


class Other(nn.Module):
    """Two layers, of which the first may be cut off from backward."""

    def __init__(self, cut: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.cut = nn.Linear(4, 6), nn.Linear(6, 2), cut

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        return self.last(hidden.detach() if self.cut else hidden)  # type: ignore[no-any-return]


def test_a_gradient_that_is_missing_comes_before_state_that_follows_from_it() -> None:
    def reference(x: torch.Tensor) -> torch.Tensor:
        return x.exp()

    with pytest.raises(
        AlignmentError, match=r"Other in mode aten against Other: gradient of first\.bias is mis"
    ):
        align(Other(cut=True), torch.randn(3, 4), against=Other(cut=False), modes=["aten"])
    with pytest.raises(
        AlignmentError,
        match=r"Other in mode aten against Other: gradient of first\.bias is there, but not in Ot",
    ):
        align(Other(cut=False), torch.randn(3, 4), against=Other(cut=True), modes=["aten"])
    with pytest.raises(AlignmentError, match="in mode aten against reference: "):
        align(torch.sin, torch.randn(3, 4), against=reference, modes=["aten"])


def test_the_first_module_of_two_versions_that_differs_is_named():
    def version(**changed: Any) -> nn.Module:
        inner = nn.Sequential(nn.Linear(16, 16), nn.GELU(**changed), nn.Dropout(0.1))
        return nn.Sequential(nn.Linear(8, 16), nn.GELU(), inner, nn.Linear(16, 2))

    old, new = version(), version(approximate="tanh")
    new.load_state_dict(old.state_dict())
    with pytest.raises(AlignmentError, match=r"\n  module     2\.1 \(GELU\) is the first module"):
        align(new, torch.randn(4, 8), against=old)
    shared = nn.Tanh()
    one = nn.Sequential(shared, nn.Linear(8, 8), shared)
    other = nn.Sequential(shared, nn.Linear(8, 8), shared)
    other[1].weight = nn.Parameter(one[1].weight.detach() + 1)
    with pytest.raises(AlignmentError, match=r"\n  module     1 \(Linear\) is"):
        align(other, torch.randn(4, 8), against=one)
    with pytest.raises(AlignmentError) as caught:  # parts of other names have no counterpart
        align(nn.Sequential(nn.ReLU()), torch.randn(4, 8), against=nn.Tanh())
    assert "\n  module " not in str(caught.value)


def test_a_changed_list_is_found() -> None:
    def shortened(_graph: Any, args: Any, *_: Any) -> None:
        args[0].pop()

    assert align(appending, [torch.randn(3)])
    with pytest.raises(AlignmentError, match=r"args has another form: expected \(\[_, _\]\), got \(\[_\]\)"):
        align(appending, [torch.randn(3)], modes=[Mode("wrong", after(shortened))])


def test_a_changed_setting_is_found() -> None:
    def without_gradients(graph: mg.Graph) -> Any:
        return after(lambda *_: torch.use_deterministic_algorithms(True))(graph)

    try:
        with pytest.raises(AlignmentError, match="setting deterministic algorithms"):
            align(torch.sin, torch.randn(3), modes=[Mode("wrong", without_gradients)])
    finally:
        torch.use_deterministic_algorithms(False)


# --- what is told ----------------------------------------------------------------------------------------------------


def shifted(result: torch.Tensor, _args: Any, _count: int) -> torch.Tensor:
    return result + 1.0


def off_by_one(graph: mg.Graph) -> Any:
    def run(*args: Any) -> Any:
        returned = graph(*args)
        returned.result.data.add_(1.0)
        return returned

    return run


def scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
    return F.gelu(x * factor)


def failure(target: Any, *args: Any, **options: Any) -> AlignmentError:
    with pytest.raises(AlignmentError) as caught:
        align(target, *args, modes=[Mode("off_by_one", off_by_one)], **options)
    return caught.value


def test_a_failure_tells_everything() -> None:
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    error = failure(scaled, x, 0.5, seed=7)
    text = str(error)
    assert text.startswith("scaled in mode off_by_one: result[0, 0]: expected ")
    assert "(4 of 4 elements differ, by 1 at most)" in text
    assert "call       1 of 3 (given values), forward" in text
    assert "seed       7" in text
    assert "argument   args[0]: float32[2, 2] [[1.0, 2.0], [3.0, 4.0]]" in text
    assert "argument   args[1]: 0.5" in text
    assert "aten.gelu.default" in text
    assert error.what.startswith("result[0, 0]: expected ")
    assert error.seed == 7


@pytest.mark.parametrize(
    ("target", "args"),
    [
        (scaled, (torch.randn(3, 4).t(), 2.0)),
        (lambda x: x.sin() * 2, (torch.randn(3),)),
        (torch.sin, (torch.randn(300),)),
        (nn.Linear(4, 2), (torch.randn(3, 4),)),
    ],
    ids=["function", "lambda", "builtin", "module"],
)
def test_the_script_fails_alone(target: Any, args: tuple[Any, ...], tmp_path: Path) -> None:
    fails_alone(target, args, tmp_path)


def fails_alone(target: Any, args: tuple[Any, ...], tmp_path: Path, **options: Any) -> None:
    error = failure(target, *args, **options)
    assert error.script is not None
    assert str(error.script) in str(error)
    done = run_script([str(error.script)], cwd=tmp_path, env=os.environ)
    assert done.returncode == 1
    assert f"AlignmentError: {str(error).splitlines()[0]}" in done.stderr


def doubled(x: torch.Tensor) -> torch.Tensor:
    return sum((once(x) for _ in range(2)), x)


def once(x: torch.Tensor) -> torch.Tensor:
    return F.relu(x)


def plus_one(function: Any) -> Any:
    @functools.wraps(function)
    def run(*args: Any) -> Any:
        return function(*args) + 1

    return run


@plus_one
def decorated(x: torch.Tensor, steps: int = 2) -> torch.Tensor:
    return x if steps == 0 else decorated(x, steps - 1)


def closed(factor: float, inner: Any) -> Any:
    def nested(x: torch.Tensor, *, added: float = factor) -> torch.Tensor:
        return inner(x) * factor + added

    return nested


class Scaled:
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def method(self, x: torch.Tensor) -> torch.Tensor:
        return x * 3


@pytest.mark.parametrize(
    ("target", "args", "options"),
    [
        (doubled, (torch.randn(3),), {}),
        (decorated, (torch.randn(3),), {}),
        (closed(1.5, once), (torch.randn(3),), {}),
        (functools.partial(closed(1.5, once), added=0.5), (torch.randn(3),), {}),
        (Scaled(), (torch.randn(3),), {}),
        (Scaled().method, (torch.randn(3),), {}),
        (nn.Linear(3, 2).forward, (torch.randn(2, 3),), {"optimizer": torch.optim.AdamW}),
        (torch.Tensor.sin, (torch.randn(3),), {"more": [(torch.ones(2),)]}),
        (torch.ops.aten.sin.default, (torch.randn(3),), {"against": torch.sin}),
    ],
    ids=["generator", "decorator", "closure", "partial", "object", "method", "optimizer", "more", "op"],
)
def test_scripts_of_many_targets(
    target: Any, args: tuple[Any, ...], options: dict[str, Any], tmp_path: Path
) -> None:
    fails_alone(target, args, tmp_path, **options)


def test_no_script_where_there_can_be_none() -> None:
    class Local(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    error = failure(Local(), torch.randn(2))
    assert error.script is None
    assert "script     none: a Local cannot be stored" in str(error)


def test_an_exception_of_the_mode_is_the_cause() -> None:
    with pytest.raises(AlignmentError, match="it raised DataDependentError") as caught:
        align(torch.unique_consecutive, torch.tensor([1, 2, 2]))
    assert isinstance(caught.value.__cause__, mg.DataDependentError)


def test_an_optimizer_that_a_graph_refuses_is_the_cause() -> None:
    with pytest.raises(AlignmentError, match="it raised OptimizerError") as caught:
        align(nn.Linear(4, 2), torch.randn(3, 4), optimizer=torch.optim.LBFGS)
    assert isinstance(caught.value.__cause__, mg.CaptureError)


def test_a_function_of_autograd_has_the_name_of_its_class() -> None:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return grads[0] * 2

    assert align(Doubled.apply, torch.randn(3)).name == "Doubled.apply"


def test_an_exception_of_eager_mode_passes_through() -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        align(torch.matmul, torch.randn(2, 3), torch.randn(2, 3))
    assert not isinstance(caught.value, AlignmentError)
    assert "eager mode raised it" in caught.value.__notes__[0]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: align(3), "takes a function or an nn.Module, got a int"),
        (lambda: align(mg.trace(torch.sin), torch.randn(2)), "got the graph sin_graph"),
        (lambda: align(torch.sin, torch.randn(2), calls=0), "needs at least one call"),
        (
            lambda: align(torch.sin, torch.randn(2), modes=["other"]),
            "there is no mode 'other'; choose from aten",
        ),
        (lambda: align(torch.sin, torch.randn(2), modes="aten"), r"modes=\['aten'\]"),
        (lambda: align(torch.sin, torch.randn(2), modes=()), "needs at least one mode"),
        (lambda: align(torch.sin, torch.randn(2), modes=("aten", "aten")), "two modes with the name 'aten'"),
        (lambda: align(torch.sin, torch.randn(2), against="float32"), 'against is "eager", "float64" or a'),
        (lambda: align(torch.sin, torch.randn(2), calls="3"), "calls is a whole number, got '3'"),
        (lambda: align(torch.sin, torch.randn(2), seed="3"), "seed is a whole number"),
        (lambda: align(torch.sin, torch.randn(2), rtol=-1), "rtol and atol are numbers from 0"),
        (lambda: align(torch.sin, torch.randn(2), kwargs=[1]), "kwargs is a dict"),
        (lambda: align(torch.sin, torch.randn(2), more=[torch.randn(2)]), "more is a list of tuples"),
        (lambda: align(torch.sin, torch.randn(2), more=[()]), r"more\[0\] has 0 tensors"),
        (lambda: align(nn.Linear, 3, 2), r"got the class Linear: pass Linear\(...\)"),
        (lambda: align(torch.stack, iter([torch.randn(2)])), r"args\[0\] is a list_iterator"),
        (lambda: align(nn.Linear(2, 2), torch.randn(2), optimizer="sgd"), "optimizer is a function"),
        (lambda: align(nn.Linear(2, 2), torch.randn(2), optimizer=lambda p: None), "gave a NoneType"),
        (
            lambda: align(torch.sin, torch.randn(2), modes=[Mode("m", lambda _: None)]),
            "make of mode 'm' gave",
        ),
    ],
)
def test_a_wrong_use_is_told(wrong: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        wrong()


# --- what is right passes --------------------------------------------------------------------------------------------


def check(target: Any, *args: Any, **options: Any) -> Alignment:
    return align(target, *args, modes=("eager", "aten"), **options)


@pytest.mark.parametrize(
    ("target", "args", "kwargs"),
    [
        (torch.matmul, (torch.randn(3, 4), torch.randn(4, 2)), {}),
        (torch.cat, ([torch.randn(2, 3), torch.randn(1, 3)],), {"dim": 0}),
        (torch.max, (torch.randn(3, 4),), {"dim": 1}),
        (torch.Tensor.add_, (torch.randn(3, 4), torch.randn(4)), {"alpha": 2}),
        (torch.Tensor.view, (torch.randn(3, 4), -1), {}),
        (torch.Tensor.expand, (torch.randn(3, 1), 3, 4), {}),
        (F.dropout, (torch.randn(3, 4),), {"p": 0.25}),
        (F.embedding, (torch.randint(0, 5, (2, 3)), torch.randn(5, 4)), {}),
        (torch.linalg.cholesky, (torch.eye(3) * 2,), {}),
        (torch.fft.fft, (torch.randn(4),), {}),
        (lambda x: (x.mul_(2), None)[1], (torch.randn(3),), {}),
        (lambda x, y: x * y, (torch.randn(0, 3), torch.tensor(2.0)), {}),
        (lambda x: {"a": [x + 1, None, 3, "text"], "b": x}, (torch.randn(2),), {}),
        (lambda x: x.shape, (torch.randn(2, 3),), {}),
        (torch.conj, (torch.randn(3, dtype=torch.complex64),), {}),
    ],
)
def test_operators(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    assert check(target, *args, kwargs=kwargs)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.GELU(), nn.Linear(6, 2))


@pytest.mark.parametrize(
    "optimizer",
    [None, lambda p: torch.optim.AdamW(p, lr=0.1), lambda p: torch.optim.RAdam(p)],
    ids=["default", "adamw", "radam"],
)
def test_modules(optimizer: Any) -> None:
    model = net()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = check(model, torch.randn(5, 4), optimizer=optimizer, calls=4)
    assert found.backward
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_method_of_a_module() -> None:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.count = nn.Buffer(torch.zeros(()))

        def encode(self, x: torch.Tensor) -> torch.Tensor:
            self.count += 1
            return x * self.count

    encoder = Encoder()
    check(encoder.encode, torch.randn(3))
    assert encoder.count == 0
    linear = nn.Linear(4, 2)
    check(linear.forward, torch.randn(3, 4))
    with pytest.raises(AlignmentError, match="parameter weight"):
        align(linear.forward, torch.randn(3, 4), modes=[Mode("wrong", after(weights))])


def test_a_function_that_reaches_a_module_is_refused() -> None:
    model, activation = net(), nn.ReLU()
    assert align(lambda x: activation(x) * 2, torch.randn(5, 4))
    with pytest.raises(TypeError, match="reaches model from outside"):
        align(lambda x: model(x), torch.randn(5, 4))

    def helper(x: torch.Tensor) -> torch.Tensor:
        return model(x)

    class Holder:
        def __init__(self) -> None:
            self.inside = model

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return self.inside(x)

    for target in (lambda x: helper(x), Holder(), functools.partial(lambda m, x: m(x), model)):
        with pytest.raises(TypeError, match="from outside"):
            align(target, torch.randn(5, 4))
    assert model[1].num_batches_tracked == 0


def test_tensors_from_outside() -> None:
    weight, count = torch.randn(3, requires_grad=True), torch.zeros(())
    assert check(lambda x: x * weight, torch.randn(3))
    assert weight.grad is None
    with pytest.raises(TypeError, match="the function changes count from outside"):
        align(lambda x: x * count.add_(1), torch.randn(3))
    assert count == 0


def test_random_numbers_of_all_kinds() -> None:
    def drawn(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        return x + torch.rand(3, generator=generator)

    before = random.getstate()
    assert check(drawn, torch.randn(3), torch.Generator().manual_seed(5))
    assert align(lambda x: x * random.random(), torch.randn(3), modes=["eager"])
    assert random.getstate() == before


def test_sparse_results() -> None:
    assert check(torch.Tensor.to_sparse, torch.eye(3), grad=False, against="float64")


def test_what_cannot_be_copied_is_told() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].kept = model[0].weight * 2
    with pytest.raises(
        mg.UnsupportedTensorError, match=r"works on copies, and copy.deepcopy of 0.kept failed"
    ):
        align(model, torch.randn(2))


@torch.library.custom_op("tests_of_align::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    """A custom op."""
    return x * 2


twice.register_fake(torch.empty_like)
twice.register_autograd(lambda _ctx, gradient: gradient * 2)


@pytest.mark.parametrize(
    ("op", "name"),
    [
        (twice, ""),
        ({"twice": [twice]}, ""),
        (torch.ops.tests_of_align.twice, ""),
        (torch.ops.tests_of_align.twice.default, ""),
        (torch.ops.tests_of_align, "twice"),
        (torch.nn.functional, "relu"),
    ],
)
def test_ops_are_shared_by_copies(op: Any, name: str) -> None:
    class Holds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.op, self.body = op, nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found = getattr(self.op, name) if name else self.op
            found = found["twice"][0] if isinstance(found, dict) else found
            return found(self.body(x))

    assert align(Holds(), torch.randn(2, 2)).backward


def test_gradients_for_the_tensors_that_ask() -> None:
    x, y = torch.randn(3, requires_grad=True), torch.randn(3)
    seen: list[tuple[bool, bool]] = []

    def watched(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        seen.append((a.requires_grad, b.requires_grad))
        return a * b

    assert align(watched, x, y).backward
    assert set(seen) == {(False, False), (True, False)}
    seen.clear()
    assert align(watched, x.detach(), y).backward
    assert set(seen) == {(False, False), (True, True)}
    assert x.grad is None


def test_no_gradient_to_compare() -> None:
    assert not align(torch.argmax, torch.randn(3)).backward
    assert not align(torch.sin, torch.randn(3), grad=False).backward


def test_values_are_fresh_where_the_operator_takes_them() -> None:
    assert align(torch.sin, torch.randn(3)).calls == ("given", "shuffled", "shuffled, other numbers")
    assert align(torch.linalg.cholesky, torch.eye(4) * 3).calls[1:] == ("nudged", "nudged")
    assert align(torch.sin, torch.randn(3), calls=1, more=[(torch.ones(3),)]).calls == ("given", "more")


def test_the_callers_random_state_stays() -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    align(F.dropout, torch.randn(4, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(torch.rand(2), expected)


def test_arguments_that_share_memory_share_it_on_both_sides() -> None:
    base = torch.randn(6)
    found = check(lambda a, b: (a + b, a), base[:4], base[2:])
    assert found.builds["aten"] == 1
    with pytest.raises(AlignmentError, match="AliasError"):
        align(lambda a, b: a.mul_(2) + b, base[:4], base[2:], grad=False)


def test_tolerances_and_dtypes() -> None:
    near = Mode("near", with_result(lambda result, *_: result * (1 + 1e-5)))
    wide = Mode("wide", with_result(lambda result, *_: result.double()))
    x = torch.randn(3, 4)
    assert align(torch.sin, x, modes=[near], rtol=1e-4, atol=1e-6, grad=False)
    with pytest.raises(AlignmentError, match="not close"):
        align(torch.sin, x, modes=[near], rtol=1e-7, grad=False)
    with pytest.raises(AlignmentError, match="another dtype"):
        align(torch.sin, x, modes=[wide], rtol=1e-4, grad=False)
    assert align(torch.sin, x, modes=[wide], rtol=1e-4, check_dtype=False, grad=False)


def test_the_distance_to_float64_judges_modes_that_round_otherwise() -> None:
    def in_pieces(graph: mg.Graph) -> Any:
        """Another order of additions: other last bits, as near to the truth."""
        return with_result(lambda result, args, _: in_order(result, args[0]))(graph)

    def in_order(result: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            result.data.copy_(x.flip(1).cumsum(1)[:, -1])
        return result

    x, row_sums = torch.randn(40, 300), lambda x: x.sum(1)
    with pytest.raises(AlignmentError):
        align(row_sums, x, modes=[Mode("pieces", in_pieces)])
    with pytest.raises(AlignmentError, match="further from float64"):
        align(
            row_sums, x, modes=[Mode("far", with_result(lambda r, *_: r * 1.001), bitwise=False)], grad=False
        )
    assert align(row_sums, x, against="float64")
    assert align(torch.fft.fft, torch.randn(8), against="float64")
    assert align(F.dropout, x, against="float64")  # other random numbers in float64: judged by tolerances
    assert align(net().eval(), torch.randn(5, 4), against="float64")


def test_verbose_prints_the_graph_and_the_results(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    align(torch.sin, torch.randn(2))
    assert capsys.readouterr().out == ""
    monkeypatch.setenv("MONOGRAPH_TEST_VERBOSE", "1")
    align(torch.sin, torch.ones(2))
    shown = capsys.readouterr().out
    assert "aten.sin.default" in shown
    assert "tensor([0.8415, 0.8415]" in shown


def test_floating_and_complex_arguments_are_differentiated_unless_some_ask_for_it() -> None:
    real, whole, plane = torch.ones(2), torch.ones(2, dtype=torch.int64), torch.ones(2, dtype=torch.complex64)
    assert wants_gradients(Arguments((real, whole, plane), {})) == (True, False, True)
    asking = torch.ones(2, requires_grad=True)
    assert wants_gradients(Arguments((real, plane), {"z": asking})) == (False, False, True)
