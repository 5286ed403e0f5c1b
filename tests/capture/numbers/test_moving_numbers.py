"""Numbers that move behave as Python's: every way to look at one ends as eager's result, or as an error with a name."""

from __future__ import annotations

import copy
import decimal
import fractions
import importlib
import json
import logging
import math
import numbers
import operator
import random
import re
import statistics
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

import monograph as mg
from monograph.errors import MonographError
from tests.support.choice import only_quick
from tests.support.float_expressions import bits, outcome
from tests.support.warm import run_module

VALUES = (0.3, 0.7, -0.3, 0.0, -0.0, 1e16, 2.5, 9007199254740992.0, 0.3)


def matched(w: float) -> int:
    match w:
        case float():
            return 2
        case _:
            return 3


Step = Callable[[torch.Tensor, float], Any]
TYPES: dict[str, Step] = {
    "type is": lambda x, w: x * 2 if type(w) is float else x * 3,
    "type of a result": lambda x, w: x * 2 if type(w * 2) is float else x * 3,
    "two types": lambda x, w: x * 2 if type(w) is float else x * 3,
    "type in": lambda x, w: x * 2 if type(w) in (int, float) else x * 3,
    "table of types": lambda x, w: x * {float: 2, int: 3}[type(w)],
    "name of the type": lambda x, w: x * 2 if type(w).__name__ == "float" else x * 3,
    "subclass": lambda x, w: x * 2 if issubclass(type(w), float) else x * 3,
    "class": lambda x, w: x * 2 if w.__class__ is float else x * 3,
    "isinstance": lambda x, w: x * 2 if isinstance(w, float) else x * 3,
    "isinstance of int": lambda x, w: x * 2 if isinstance(w, (int, str)) else x * 3,
    "Number": lambda x, w: x * 2 if isinstance(w, numbers.Number) else x * 3,
    "Real": lambda x, w: x * 2 if isinstance(w + 1, numbers.Real) else x * 3,
    "numpy.isscalar": lambda x, w: x * 2 if np.isscalar(w) else x * 3,
    "match": lambda x, w: x * matched(w),
}
ARITHMETIC: dict[str, Step] = {
    "sum": lambda x, w: x * sum([w, 0.1, 0.2]),
    "a third": lambda x, w: x * (w / 3 + w * 0.1 - 1e-3),
    "mod": lambda x, w: x * (w % -0.3),
    "whole power": lambda x, w: x * w**3,
    "negated": lambda x, w: x / -w,
    "absolute": lambda x, w: x * abs(w),
    "power of two": lambda x, w: x * 2.0 ** (w % 1),
    "root": lambda x, w: x * math.sqrt(abs(w)),
    "sine": lambda x, w: x * math.sin(w),
    "exp": lambda x, w: x * math.exp(w % 3),
    "full": lambda x, w: x * torch.full((3,), w),
    "tensor": lambda x, w: x * torch.tensor(w),
    "clamp": lambda x, w: x.clamp(-w, w),
    "copied": lambda x, w: x * copy.deepcopy([w])[0],
    "returned": lambda x, w: (x, w * 2),
}  # in one build for all values
BRANCHES: dict[str, Step] = {
    "not algebra": lambda x, w: x * 2 if w + 0.1 - 0.1 == w else x * 3,
    "absorbed": lambda x, w: x * 2 if (w + 1e16) - 1e16 > 0 else x * 3,
    "int beyond floats": lambda x, w: x * 2 if w == 9007199254740993 else x * 3,
    "int beside floats": lambda x, w: x * 2 if w == 9007199254740992 else x * 3,
    "chained": lambda x, w: x * 2 if 0 < w < 1 else x * 3,
    "truth": lambda x, w: x * 2 if w else x * 3,
    "not": lambda x, w: x * 2 if not w else x * 3,
    "among": lambda x, w: x * 2 if w in (0.3, 0.7) else x * 3,
    "isnan": lambda x, w: x * 2 if math.isnan(w * 0.0) else x * 3,
    "is_integer": lambda x, w: x * 2 if w.is_integer() else x * 3,
    "sign of zero": lambda x, w: x * math.copysign(1.0, w),
    "tensor of a truth": lambda _x, w: torch.tensor(w > 0.3),
    "and": lambda x, w: x * (w and 2.0),
    "max": lambda x, w: x * max(w, 0.4),
    "sorted": lambda x, w: x * sorted([w, 0.4, 0.1])[1],
    "range": lambda x, w: x * len(range(int(w) % 5)),
    "root of a negative": lambda x, w: (abs(w) + x) * abs(w) ** 0.5,
    "own power": lambda x, w: x * w**w if w > 0 else x,
}
READ_OUT: dict[str, Step] = {
    "type of a floor": lambda x, w: x * 2 if type(math.floor(w)) is int else x * 3,
    "float": lambda x, w: x * float(w),
    "floor division": lambda x, w: x * (w // 0.1),
    "divmod": lambda x, w: x * divmod(w, 0.2)[1],
    "round": lambda x, w: x * round(w, 1),
    "round to an int": lambda x, w: x * round(w),
    "int": lambda x, w: x * int(w),
    "floor": lambda x, w: x * math.floor(w) + math.ceil(w) - math.trunc(w),
    "size": lambda x, w: x.repeat(int(abs(w)) % 3 + 1)[: math.floor(w) % 3],
    "ints in a list": lambda x, w: (
        x.sum() + torch.tensor([math.trunc(w), 1.0]) + x.new_tensor([math.floor(w), 2])
    ),
    "hash": lambda x, w: x * (hash(w) % 7),
    "key": lambda x, w: x * {0.3: 5.0, 0.0: 2.0}.get(w, 3.0),
    "set": lambda x, w: x * len({w, 0.3, 0.7}),
    "ratio": lambda x, w: x * (w.as_integer_ratio()[1] % 7),
    "hex": lambda x, w: x * len(w.hex()),
    "text": lambda x, w: x * float(f"{w:.3f}") + float(str(w)),
    "percent": lambda x, w: x * float("%f" % w) + float("%d" % w),  # noqa: UP031 -- another way to ask
    "struct": lambda x, w: x * struct.unpack("d", struct.pack("d", w))[0],
    "json": lambda x, w: x * json.loads(json.dumps({"a": w}))["a"],
    "frexp": lambda x, w: x * math.frexp(w)[0],
    "fsum": lambda x, w: x * math.fsum([w, 0.1, 0.2]),
    "atan2": lambda x, w: x * math.atan2(w, -1),
    "numpy.float64": lambda x, w: x * float(np.float64(w)) + float(np.float64(2.5) * w),
    "numpy array": lambda x, w: x * torch.from_numpy(np.array([w, 1.0, 2.0])),
    "numpy promotion": lambda x, w: x + torch.from_numpy(w * np.ones(3, dtype=np.float32)),
    "numpy function": lambda x, w: x * float(np.clip(w, -0.5, 0.5)) + float(np.sqrt(np.abs(w))),
    "tensor of a list": lambda x, w: x.sum() + torch.tensor([w, 1.0]),
    "new tensor": lambda x, w: x * x.new_tensor(w) + torch.Tensor([w, 2.0])[0] + torch.asarray(w),
    "Decimal": lambda x, w: x * float(decimal.Decimal(w)),
    "Fraction": lambda x, w: x * float(fractions.Fraction(w)),
    "statistics": lambda x, w: x * statistics.mean([w, 1.0, 0.5]),
    "seed": lambda x, w: x * random.Random(w).random(),
    "method of float": lambda x, w: x * float.__mul__(w, 2.0) * float.is_integer(w),
    "layer_norm": lambda x, w: torch.nn.functional.layer_norm(x, (3,), eps=abs(w)),
    "arange": lambda _x, w: torch.arange(0, abs(w) % 3, 0.5),
}
RAISING: dict[str, Step] = {
    "division": lambda x, w: x * (1 / w),
    "division whose result nobody takes": lambda x, w: (1 / w, x * 2)[1],
    "modulo": lambda x, w: x * (1.0 % w),
    "overflow": lambda x, w: x * w**400,
    "logarithm": lambda x, w: x * math.log(w),
    "root of a negative": lambda x, w: x * math.sqrt(w),
    "index": lambda x, w: x * operator.index(w),
    "complex": lambda x, w: (x * w**0.5).real,
}
ALL = {**TYPES, **ARITHMETIC, **BRANCHES, **READ_OUT, **RAISING}


def results(step: Step) -> tuple[mg.Graph, list[Any], list[Any]]:
    """What eager and one graph give for all values."""

    class Called(mg.Graph):
        def build(self, x: torch.Tensor, w: float) -> Any:
            return step(x, w)

    graph, x = Called(), torch.tensor([0.25, -1.5, 3.0])
    eager = [outcome(lambda w=w: step(x, w)) for w in VALUES]  # type: ignore[misc]
    return graph, eager, [outcome(lambda w=w: graph(x, w)) for w in VALUES]  # type: ignore[misc]


@pytest.mark.parametrize("name", ALL)
def test_an_argument_is_a_float(name: str) -> None:
    graph, eager, got = results(ALL[name])
    for value, expected, made in zip(VALUES, eager, got, strict=True):
        if isinstance(expected, Exception) or (name == "complex" and isinstance(made, Exception)):
            assert isinstance(made, (MonographError, type(expected))), (value, expected, made)
        else:
            assert _bits(expected) == _bits(made), (value, expected, made)
    if name in TYPES or name in ARITHMETIC:
        assert len(graph.builds) == 1


@pytest.mark.long
def test_a_module_imported_between_two_captures_knows_the_types(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    x = torch.ones(3)
    for name in ("imported_first", "imported_second"):
        Path(tmp_path, f"{name}.py").write_text("def factor(w):\n    return 2 if type(w) is float else 3\n")
        monkeypatch.setitem(sys.modules, name, importlib.import_module(name))

        class Imported(mg.Graph):
            def build(self, x: torch.Tensor, w: float) -> torch.Tensor:
                return x * sys.modules[name].factor(w)  # noqa: B023  # it is called in this round

        assert torch.equal(Imported()(x, 0.5), x * 2)


def _bits(result: Any) -> Any:
    return tuple(map(bits, result)) if isinstance(result, tuple) else bits(result)


class TypedLr(torch.optim.Optimizer):
    """Looks at what its numbers are."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr, "power": 2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            rate = group["lr"]
            if type(rate) is not float or not isinstance(rate, numbers.Real):
                rate = 0.0
            scale = {True: 1.0, False: 2.0}[rate + 0.1 - 0.1 == rate]
            for parameter in group["params"]:
                count = self.state[parameter].setdefault("count", 0)
                kind = 1.0 if type(count) is int and isinstance(count, int) else 3.0
                parameter.sub_(parameter.grad, alpha=rate * scale * kind / (1 - 0.9 ** (count + 1)))
                self.state[parameter]["count"] = count + 1


def test_numbers_of_an_optimizer_are_what_they_are_in_eager_mode() -> None:
    def trail(graph: bool) -> tuple[list[bytes], int]:
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2)
        optimizer = TypedLr(model.parameters(), 0.1)

        class Train(mg.Graph):
            def __init__(self) -> None:
                super().__init__()
                self.model = model
                self.add_optimizer(optimizer)

            def build(self, x: torch.Tensor) -> None:
                self.model(x).square().mean().backward()

        step, found = Train(), []
        for number, x in enumerate(torch.randn(8, 4, 3)):
            optimizer.param_groups[0]["lr"] = (0.1, 0.25, 0.3, 0.7)[number % 4]
            step(x) if graph else step.eager(x)
            found.append(model.weight.detach().numpy().tobytes())
        return found, len(step.builds)

    expected, _ = trail(graph=False)
    got, builds = trail(graph=True)
    assert got == expected
    assert builds == 2  # 0.1 + 0.1 - 0.1 is 0.1, and 0.7 + 0.1 - 0.1 is not 0.7


class Counting(torch.optim.Optimizer):
    """Keeps a plain int and uses it in every way."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["count"] = state.get("count", 0) + 1
            count = state["count"]
            window = torch.zeros(count % 3 + 1).sum() + parameter[: count % 2].sum()
            rate = 0.1 / (1 - 0.9**count) + count // 2 + torch.tensor(count) + torch.tensor([count, 2]).sum()
            parameter.sub_(parameter.grad * rate, alpha=count / 100).add_(window)


def test_a_plain_counter_counts_and_measures() -> None:
    def trail(graph: bool) -> list[bytes]:
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2)
        optimizer, found = Counting(model.parameters()), []

        class Train(mg.Graph):
            def __init__(self) -> None:
                super().__init__()
                self.model = model
                self.add_optimizer(optimizer)

            def build(self, x: torch.Tensor) -> None:
                self.model(x).square().mean().backward()

        step = Train()
        for x in torch.randn(7, 4, 3):
            step(x) if graph else step.eager(x)
            found.append(model.weight.detach().numpy().tobytes())
        return found

    assert trail(graph=True) == trail(graph=False)


def test_code_that_takes_no_moving_number_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="monograph"):
        graph, _, _ = results(READ_OUT["json"])
    assert "another value of w needs another build" in caplog.text
    assert "not JSON serializable" in caplog.text
    assert len(graph.builds) == len(set(map(str, VALUES)))


@pytest.mark.parametrize(
    "arithmetic",
    [lambda b: 1.0 / b, lambda b: 2 - b, lambda b: 3.0 * b, lambda b: 2.0**b, lambda b: 5 % b],
    ids=["divided", "taken from", "times", "to the power", "modulo"],
)
def test_kernels_of_torch_compute_with_a_plain_number_on_the_left(arithmetic: Callable[[Any], Any]) -> None:
    """They have the number in torch's own form, in no trace and under no function mode."""

    def body(x: torch.Tensor, b: float) -> torch.Tensor:
        number: Any = torch.SymFloat(b.node) if hasattr(b, "node") else b
        with disable_proxy_modes_tracing(), torch._C.DisableTorchFunction():
            small = bool(arithmetic(number) < 1.5)
        return x * 2 if small else x * b

    step, x = mg.trace(body), torch.ones(2)
    for b in (0.4, 0.45, 1.7, 0.4):
        assert torch.equal(step(x, b), body(x, b)), b
    assert len(step.builds) == 2, [build.reason for build in step.builds]


def test_a_comparison_of_two_numbers() -> None:
    class Compared(mg.Graph):
        def build(self, x: torch.Tensor, a: float, b: float) -> torch.Tensor:
            return x * a if a < b <= 2 * a else x * b

    graph, x = Compared(), torch.ones(2)
    for a, b in ((1.0, 2.0), (3.0, 4.0), (2.0, 1.0), (1.0, 3.0), (0.1, 0.2), (-0.0, 0.0)):
        assert torch.equal(graph(x, a, b), x * a if a < b <= 2 * a else x * b)


@pytest.mark.parametrize("seeds", only_quick([range(6), range(6, 60)], range(6)), ids=str)
def test_random_expressions(seeds: range) -> None:
    """In a process where little lives: `make stress` tries many more."""
    done = run_module("tests.stress.float_expressions", "--trials", len(seeds), "--seed", seeds.start)
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(rf"{len(seeds)} trials, (\d+) calls: 0 wrong, (\d+) refused", done.stdout)
    assert found is not None, done.stdout
    assert int(found[2]) < int(found[1]) / 20


# --- powers of negative numbers, which Python reads as negated powers where they are written without parentheses --------


def alternating(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.n += 1
    return x * (-1) ** self.n


def alternating_branch(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.n += 1
    return x + 1 if (-1) ** self.n + self.n * 0 > 0 else x - 1


def alternating_sum(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.n += 1
    self.total = self.total + (-2) ** self.n
    return x * self.total


@pytest.mark.parametrize(
    ("build", "backend"),
    [
        (alternating, "aten"),
        (alternating_branch, "aten"),
        (alternating_sum, "aten"),
        (alternating_sum, "inductor"),
    ],
)
def test_powers_of_negative_numbers(build: Callable[..., Any], backend: str) -> None:
    graph, plain = type("Step", (mg.Graph,), {"build": build})(), SimpleNamespace(n=0, total=0)
    graph.n = graph.total = 0
    graph.config.backend(backend)
    for _ in range(6):
        assert torch.equal(build(plain, torch.ones(2)), graph(torch.ones(2)))


@pytest.mark.long
def test_powers_of_zero_raise_what_they_raise_in_eager_mode() -> None:
    graph, x = mg.trace(lambda x, a: x * math.pow(a - a, a)), torch.ones(2)
    assert torch.equal(x * 0.0, graph(x, 3.0))
    for a in (-3.0, -5e-324):
        with pytest.raises(ValueError, match="math domain error"):
            graph(x, a)
    with pytest.raises(ZeroDivisionError):
        mg.trace(lambda x, a: x / (1 / a))(x, 0.0)
    assert torch.equal(x * 0.0, graph(x, 2.0))


def test_powers_of_negative_zero() -> None:
    graph, x = mg.trace(lambda x, a: x * math.pow(math.copysign(a, a), a)), torch.ones(2)
    for a in (1.0, -0.0, 0.0, 2.0, -0.0):
        assert torch.equal(x * math.pow(math.copysign(a, a), a), graph(x, a))
