"""Special values in compiled steps: NaN, infinities, zeros with signs, denormals, limits of integers, casts to half types.

`make sweep-special` goes through torch's database of ops; this is a selection of it, in few compiled steps.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch.nn import functional

import monograph as mg
from monograph.compat.inductor.decompositions import LEFT_TO_KERNELS, own_decompositions
from monograph.ir.program import Program
from monograph.passes.inductor.wide_variances import wide_variances
from monograph.passes.run import Stage, run_passes
from tests.support import new_cache
from tests.support.choice import only_quick
from tests.sweep.special import Call, call_of, disagreement, outcomes_of, pairs

INF, NAN = float("inf"), float("nan")

FLOATS = """
    x*0; x*zeros; x-x; x+zeros; x-negative zeros; 0-x; -(a-b); x**0; x**0.5; x**-0.5; x**2; where(isnan,0,x);
    maximum(x,0); nan_to_num(x*0); isnan(x*0); signbit(0-x); remainder(1,x); x//0.1; 1//x; addcmul 0; addcdiv 0; addcdiv;
    softshrink; x.half().float(); x.bfloat16().float(); half product and quotient; bfloat16 sum and difference;
    var of large constants; layer norm of constants; softmax masked
"""
INTEGERS = """
    x*0; x+zeros; x**3; shift left; shift right; x//-3; remainder(x,-3); div floor; int8; int16; int overflow; abs(int);
    x.long().float(); int to half
"""
HALVES = "x*0; 1//x; x*x/x; half products; x**0.5; isfinite(x+x)"


def chains(names: str) -> list[str]:
    """Short chains of ops by their names."""
    return [f"chain {' '.join(name.split())}" for name in names.split(";")]


SELECTIONS = {
    "float32": [
        *chains(FLOATS),
        *[
            "acosh",
            "atanh",
            "expm1",
            "erf",
            "nn.functional.elu",
            "nn.functional.gelu",
            "char",
            "remainder",
        ],
    ],
    "float16": [*chains(HALVES), "expm1", "std", "ldexp"],
    "bfloat16": [
        *chains(HALVES),
        "nextafter",
        "round.decimals_3",
        "round.decimals_neg_3",
        "chain lerp(a,b,.3)",
    ],
    "int32": [*chains(INTEGERS), "floor_divide", "remainder", "div.trunc_rounding"],
}


@pytest.mark.parametrize("kind", only_quick(SELECTIONS, "int32"))
def test_special_values_are_eagers(kind: str) -> None:
    calls = [call_of(kind, name) for name in SELECTIONS[kind]]
    assert [call for call in calls if not isinstance(call, Call)] == []
    found = outcomes_of([call for call in calls if isinstance(call, Call)])
    wrong = [f"{name}: {item.shows}: {item.message}" for name, item in found.items() if not item.passes]
    assert not wrong, "\n".join(wrong)


# --- integers --------------------------------------------------------------------------------------------------------

QUOTIENTS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "floor": torch.floor_divide,
    "remainder": torch.remainder,
    "fmod": torch.fmod,
    "trunc": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
}


def quotients(a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
    return [divide(a, b) for divide in QUOTIENTS.values()]


@pytest.mark.long
def test_integer_divisions_do_not_end_the_process() -> None:
    """The least number by -1, whose quotient towards 0 ends eager mode's process; a division by 0 is eager's error."""
    least = torch.iinfo(torch.int64).min
    a = torch.tensor([least, least + 1, -7, 7, 0] * 7)
    b = torch.tensor([-1, -1, 2, -2, 3] * 7)
    graph = mg.trace(quotients)
    graph.config.backend("inductor")
    made = graph(a, b)
    assert graph.backend == "inductor"
    for (name, divide), result in zip(QUOTIENTS.items(), made, strict=True):
        if (
            name == "trunc"
        ):  # towards 0, the least number stays what it is, as in the other kernels of eager mode
            assert result[0] == least
            a, b = a.clone(), b.clone()
            a[::5], result[::5] = 1, -1
        assert torch.equal(result, divide(a, b)), name
    for divisor in (torch.zeros_like(b), torch.where(b == 3, 0, b)):
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):
            graph(a, divisor)


# --- half types ------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_next_numbers_of_half_types_are_the_next_ones() -> None:
    """Bit by bit: in float32 the next number is so near that it rounds to the same one."""
    given = [*pairs(torch.bfloat16), *pairs(torch.float16)]

    def next_numbers(
        a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor
    ) -> list[torch.Tensor]:
        return [torch.nextafter(a, b), torch.nextafter(c, d)]

    graph = mg.trace(next_numbers)
    graph.config.backend("inductor")
    made = graph(*given)
    assert graph.backend == "inductor"
    for result, expected in zip(made, next_numbers(*given), strict=True):
        torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(result.signbit()[~result.isnan()], expected.signbit()[~result.isnan()])


ROUNDED_ONCE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "silu backward": lambda a, b: torch.ops.aten.silu_backward(b, a),
    "mish backward": lambda a, b: torch.ops.aten.mish_backward(b, a),
    "lerp": lambda a, b: torch.lerp(a, b, 0.3),
    "lerp by a tensor": lambda a, b: torch.lerp(a, b, b.sigmoid()),
    "glu": lambda a, b: functional.glu(torch.cat((a, b))),
}


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_ops_on_half_types_round_once(dtype: torch.dtype) -> None:
    """As near to float64 as eager's, where sums cancel too: a part that is rounded errs by many units there."""
    torch.manual_seed(0)
    a, b = torch.randn(4000).to(dtype), torch.randn(4000).to(dtype)
    graph = mg.trace(lambda a, b: [function(a, b) for function in ROUNDED_ONCE.values()])
    graph.config.backend("inductor")
    results = graph(a, b)
    assert graph.backend == "inductor"
    for (name, function), result in zip(ROUNDED_ONCE.items(), results, strict=True):
        exact = function(a.double(), b.double())
        weights = torch.finfo(dtype).eps * exact.abs().clamp(min=torch.finfo(dtype).smallest_normal)
        ours, eagers = (
            ((item.double() - exact) / weights).square().mean().sqrt() for item in (result, function(a, b))
        )
        assert ours < 1.1 * eagers, (name, ours, eagers)


@pytest.mark.every_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_gradient_of_softmax_is_rounded_once(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    output, given = torch.randn(500, 7).softmax(-1).to(dtype), torch.randn(500, 7).to(dtype)
    eager = torch.ops.aten._softmax_backward_data.default
    with own_decompositions():
        ours = import_module("torch._inductor.decomposition").decompositions[eager]
    exact = eager(given.double(), output.double(), -1, torch.float64)
    errors = [(make(given, output, -1, dtype) - exact).square().mean() for make in (ours, eager)]
    assert errors[0] <= 1.1 * errors[1]


# --- the comparison --------------------------------------------------------------------------------------------------


def as_call(function: Callable[..., torch.Tensor], values: list[float]) -> Call:
    return Call("it", function, ((torch.tensor(values),),), elementwise=True)


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("values", "expected", "got", "good"),
    [
        ([1.0], [NAN], [NAN], True),
        ([1.0], [NAN], [0.0], False),
        ([1.0], [INF], [-INF], False),
        ([1.0], [INF], [3e38], False),
        ([1.0], [-0.0], [0.0], False),
        ([1.0], [1.0], [1.000001], True),
        ([1.0], [1.0], [1.0001], False),
        ([1.0], [2.9e-39], [0.0], False),
    ],
)
def test_what_is_no_rounding_is_seen(
    values: list[float], expected: list[float], got: list[float], good: bool
) -> None:
    call = as_call(lambda x: torch.tensor(expected, dtype=x.dtype), values)
    assert (disagreement(call, call.at(0), [torch.tensor(got)]) is None) == good


def test_where_eagers_kernels_disagree_either_is_right() -> None:
    """`softshrink` of -0.0 is 0.0 in vectors and -0.0 in single elements."""
    call = as_call(functional.softshrink, [-0.0] * 17)
    given = call.at(0)
    assert len({bool(item) for item in functional.softshrink(given[0]).signbit()}) == 2
    assert disagreement(call, given, [torch.full((17,), -0.0)]) is None
    assert disagreement(call, given, [torch.full((17,), 1.0)]) is not None


# --- numbers beside half types ---------------------------------------------------------------------------------------

BESIDE_NUMBERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda x: x + 0.1,
    "difference": lambda x: 0.1 - x,
    "sum with a single element": lambda x: x + torch.tensor(1 / 3),
    "product": lambda x: x * 0.3,
    "product with a single element": lambda x: x * torch.tensor(1 / 3, dtype=torch.float64),
    "a single element first": lambda x: torch.tensor(1 / 3) * x,
    "quotient": lambda x: x / 0.3,
    "quotient of a number": lambda x: 0.3 / x,
    "quotient towards zero": lambda x: torch.div(x, 0.1, rounding_mode="trunc"),
    "quotient downwards": lambda x: x // 0.1,
    "fmod": lambda x: x.fmod(0.1),
    "remainder": lambda x: x.remainder(0.1),
    "addcmul": lambda x: x.addcmul(x, x + 1, value=0.1),
    "comparisons": lambda x: (x >= 0.1) * x + (x == 0.1) * 2,
    "clamped": lambda x: x.clamp(-0.1, 0.1),
    "full": lambda x: x - torch.full_like(x, 0.1),
    "masked": lambda x: x.masked_fill(x > 0.2, 0.3) + x,
    "padded": lambda x: functional.pad(x, (1, 1), value=0.1) * 3,
    "margin": lambda x: functional.margin_ranking_loss(x, x * 0, torch.ones_like(x), 0.1, reduction="none"),
}


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_numbers_beside_half_types_round_as_in_eager_mode(dtype: torch.dtype) -> None:
    """Some ops take them as they are, others round them to the half type first: the bits tell."""
    near = torch.tensor([0.1], dtype=dtype)
    around = [torch.nextafter(near, near + step) for step in (-1, 0, 1)]
    # whole vectors: what is left over, eager mode computes one by one and rounds more often
    x = torch.cat([*around, *(-item for item in around), torch.randn(218).to(dtype)])

    class Numbers(mg.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.ParameterDict(
                {name: torch.nn.Parameter(x.clone()) for name in ("threshold", "taken", "sgd")}
            )
            self.add_optimizer(moving := torch.optim.SGD(self.weight.parameters(), lr=0.3))
            self.group = moving.param_groups[0]
            self.config.backend("inductor")

        def build(self, x: torch.Tensor) -> list[torch.Tensor]:
            losses(self.weight).backward()
            return [function(x) for function in BESIDE_NUMBERS.values()]

    def losses(weight: torch.nn.ParameterDict) -> torch.Tensor:
        taken = weight["taken"].index_select(0, torch.tensor([0, 2, 2, 5]))
        return (
            functional.threshold(weight["threshold"], 0.1, 0.3).sum()
            + taken.sum()
            + weight["sgd"].square().sum()
        )

    graph = Numbers()
    plain = torch.nn.ParameterDict({name: item.detach().clone() for name, item in graph.weight.items()})
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.3)
    for lr in (0.3, 0.7, 0.1):
        optimizer.param_groups[0]["lr"] = graph.group["lr"] = lr
        made = graph(x)
        optimizer.zero_grad()
        losses(plain).backward()
        optimizer.step()
    assert graph.backend == "inductor", graph.builds[-1].notes
    for (name, function), got in zip(BESIDE_NUMBERS.items(), made, strict=True):
        torch.testing.assert_close(
            got, function(x), rtol=0, atol=0, equal_nan=True, msg=lambda text, name=name: f"{name}: {text}"
        )
    for name in plain:
        if name == "sgd" and torch.backends.cpu.get_cpu_capability() == "DEFAULT":
            continue  # without vectors eager mode computes all one by one
        torch.testing.assert_close(
            graph.weight[name], plain[name], rtol=0, atol=0, msg=lambda text, name=name: f"{name}: {text}"
        )


# --- variances -------------------------------------------------------------------------------------------------------


@pytest.mark.one_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_variances_are_computed_wide(dtype: torch.dtype) -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (x.var(1), x.std(), *torch.var_mean(x, 0), *torch.std_mean(x, 1, keepdim=True), x.sum())

    x = torch.randn(5, 7).to(dtype)
    graph = mg.trace(function)
    graph(x)
    first = graph.builds[0].plan.program
    wide: Program = run_passes(Stage("plan", first, 0.0), (wide_variances,))[-1].program
    assert (wide is first) == (dtype is torch.float64)
    for made, expected in zip(wide.module(x), function(x), strict=True):
        assert made.dtype == expected.dtype
        torch.testing.assert_close(made, expected)
    large = torch.full((5, 7), 1e20 if dtype is not torch.float64 else 1.0).to(dtype)
    large[:, ::2] *= -1
    assert wide.module(large)[1].isfinite()


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_means_in_norms_do_not_overflow(dtype: torch.dtype) -> None:
    rows = torch.tensor([[3e38, 1.0, 2.0, 3.0], [1e38, -1e38, 1e38, 1e38], [1e20, -1e20, 2e20, 0.0]])

    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return functional.instance_norm(x), functional.batch_norm(x, None, None, training=True)

    class Norms(mg.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.config.backend("inductor")

        def build(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return function(x)

    x = rows.to(dtype).reshape(1, 3, 4)
    for made, expected in zip(Norms()(x), function(x), strict=True):
        assert expected.isfinite().all()
        torch.testing.assert_close(made, expected, rtol=0, atol=0)


@pytest.mark.long
def test_erf_keeps_its_digits() -> None:
    class Erf(mg.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.config.backend("inductor")

        def build(self, x: torch.Tensor) -> torch.Tensor:
            return torch.erf(x)

    tiny = torch.logspace(-44, -1, 8_000)
    x = torch.cat([torch.linspace(-6, 6, 1_000_000), tiny, -tiny])
    made, exact = Erf()(x), torch.erf(x.double())
    assert ((made - exact).abs() <= exact.abs() * 4e-7 + 2e-45).all()
    assert (made[x.abs() >= 4] == x[x.abs() >= 4].sign()).all()


@pytest.mark.long
def test_small_types_are_those_of_eager_mode() -> None:
    whole = [torch.tensor(v, dtype=torch.uint8) for v in (5, 0, [5], [0, 3, 0], [[1, 0], [0, 0]])]
    tables = [*whole, *(item.bool() for item in whole), *(item.float() for item in whole)]

    def reduced(x: torch.Tensor) -> list[torch.Tensor]:
        return [
            x.any(), x.all(), x.any(-1), x.all(-1), torch.any(x, -1, keepdim=True), torch.any(x, dim=(0,)),
            torch.all(x, dim=(0,)), torch.all(x, dim=()), torch.any(x, dim=()),
        ]  # fmt: skip

    def sums(x: torch.Tensor) -> list[torch.Tensor]:
        return [torch.add(x, ~x, alpha=alpha) for alpha in (0, 1, 2, True, False)]

    def step(*given: torch.Tensor) -> list[torch.Tensor]:
        found = [reduced(x) + (sums(x) if x.dtype is torch.bool else []) for x in given]
        return [item for items in found for item in items]

    graph = mg.trace(step)
    graph.config.backend("inductor")
    got = graph(*tables)
    assert graph.backend == "inductor"
    for one, other in zip(step(*tables), got, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert torch.equal(one, other)


@pytest.mark.long
@pytest.mark.parametrize("ci", ["", "1"])
def test_targets_mean_what_they_do_in_eager_mode(
    ci: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CI", ci)  # where it is set, Inductor refuses kernels for ops that have a formula
    monkeypatch.setenv("MONOGRAPH_CACHE_DIR", new_cache(tmp_path / "cache"))  # each case compiles,
    for op in LEFT_TO_KERNELS:  # as if no step had had such an op before
        monkeypatch.delitem(import_module("torch._inductor.lowering").lowerings, op, raising=False)

    def losses(x: torch.Tensor, several: torch.Tensor, one: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (
            functional.multilabel_margin_loss(x, several, reduction="none"),
            functional.multi_margin_loss(x, one.clamp(0), reduction="none"),
            functional.cross_entropy(x, one, ignore_index=-1, reduction="none"),
            functional.nll_loss(x, one, ignore_index=-1),
        )

    step = mg.trace(losses)
    step.config.backend("inductor")
    torch.manual_seed(0)
    x = torch.randn(4, 5)
    for behind in range(-1, 5):  # -1 ends the targets of a row
        several = torch.tensor(
            [[3, -1, behind, 0, -1], [-1, 2, behind, 1, 0], [0, 1, 2, 3, 4], [4, behind, 0, -1, 1]]
        )
        for one in (torch.tensor([0, -1, 2, behind]), torch.full((4,), behind)):
            for got, expected in zip(step(x, several, one), losses(x, several, one), strict=True):
                torch.testing.assert_close(got, expected, equal_nan=True)
    assert [build.backend for build in step.builds] == ["inductor"]
