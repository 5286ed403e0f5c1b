"""Everything that code does with a counter, a list or a number out of a tensor is as in eager mode."""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import monograph as mg
from tests.capture.numbers.books import (
    X,
    _outside_as_before,  # noqa: F401
    sides,
)
from tests.support import assert_same

# --- everything that code does with a number ----------------------------------------------------------------


USES = """
x * sum(self.d.values()) | x * len(json.dumps(self.d)) | x * len(repr(self.d)) | x * tuple(self.d.items())[0][1]
x * float(self.d == {"a": 3}) | x * copy.deepcopy(self.d)["a"] | x * len(str(self.box)) | x * copy.copy(self.box).n
x * len(pickle.dumps(self.d)) | x[0] * torch.tensor(list(self.d.values())) | x[0] * np.array(list(self.d.values())).sum()
x * len("%s" % (self.n * 40,)) | x * (hash((self.n, 1)) % 101) | x * list({self.n: 1})[0] | x * sorted([self.n, 3])[0]
x * float(self.n in [1, 2]) | x * [1, 2, 3, 4, 5, 6].index(self.n) | x * len([0] * self.n) | x * len("a" * self.n)
x * len(bytes(self.n)) | x[self.n % 2] | x.roll(self.n) | x.view(-1)[self.n % 6] | torch.arange(self.n) | x.sum(self.n % 2)
x.clamp(max=self.n / 4) | x**self.n | torch.pow(self.n, x) | x.add(x, alpha=self.n) | torch.where(x > 0, self.n, 0.5)
torch.full_like(x, self.n) | x.clone().fill_(self.n) | x * np.float32(self.n) | x * math.sqrt(self.n) | x * math.gcd(self.n, 4)
x * self.n.bit_length() | x * float(isinstance(self.n, numbers.Integral)) | x * operator.index(self.n) | x * round(self.n / 3, 1)
x * abs(complex(self.n, 1)) | x * float(fractions.Fraction(self.n, 3)) | x * float(decimal.Decimal(self.n))
x * datetime.timedelta(seconds=self.n).total_seconds() | x * next(enumerate([1], start=self.n))[0]
x * struct.pack("i", self.n)[0] | x * float(self.n is None) | x * float(hasattr(self.n, "__dict__")) | x * (type(self.n)() + 2) | x * max(self.n, 2) | x * min(self.n, 2.5)
x * (self.n & 1) | x * ~self.n | x * (self.n << 2) | x * random.Random(self.n).random() | x * np.random.default_rng(self.n).random()
x * np.random.RandomState(self.n).rand() | x * divmod(self.n, 3)[1] | x * (self.n // 2 - -self.n // 2) | x * (self.n % -4) | -x * -self.n
x * (2**self.n) | x * 2 ** (-self.n) | x * (self.n**0.5) | x * math.floor(self.n / 2) | x * int(self.n / 2) | x * float(self.n)
x * bool(self.n - 3) | x * (not self.n - 3) | x * (self.n > 2 and self.n) | x * (1 if self.n == 3.0 else 2) | x * sum([self.n, 1, 0.5])
x * math.exp(-self.n) | x * math.fsum([self.n, 0.1]) | x * math.factorial(self.n) | x * statistics.mean([self.n, 4]) | x * (self.n - 0.1 - self.n)
x * torch.tensor(self.n) | x * torch.tensor(float(self.n)) | x * torch.tensor([self.n, 1, 2]) | x * torch.as_tensor(self.n) | x.new_tensor(self.n)
x * torch.scalar_tensor(self.n) | torch.linspace(0, self.n, 3) | x.repeat(self.n, 1) | x.reshape(-1)[: self.n] | x.unfold(1, 1 + self.n % 3, 1)
nn.functional.dropout(x, 0.1 * self.n) | nn.functional.leaky_relu(x, 0.1 * self.n) | x.lerp(x * 2, self.n / 10) | x.to(torch.int64) // self.n
x.to(torch.int64) * self.n | x > self.n / 8 | x.softmax(self.n % 2) | torch.addcmul(x, x, x, value=self.n) | x * np.sin(self.n) | x / self.n
(x * 4).floor_divide(self.n) | x.remainder(self.n) | x == self.n | x * len(f"{self.n:05d}") | x * len(f"{self.n!r}{self.n * 9}") | x * len(str(self.n * 9))
x * int(f"{self.n}") | x * {1: 5, 2: 6}.get(self.n, 7) | x * (lambda *a: len(a))(*range(self.n)) | x * np.array([1, 2, 3, 4])[self.n % 4]
x * np.arange(8)[: self.n].sum() | x * as_if(self.n) | x * sum(1 for _ in zip(range(self.n), "abcd")) | x * matched(self.n) | x * array.array("i", [self.n])[0]
x * functools.reduce(operator.mul, range(1, self.n + 1)) | x * tried(self.n) | x * cached(self.n) | x * self.n.real | x * self.n.__add__(2) | x * int.__add__(self.n, 2)
"""


def as_if(n: int) -> int:
    return int("12345678"[n])


MODULES = [
    "array",
    "copy",
    "datetime",
    "decimal",
    "fractions",
    "json",
    "math",
    "numbers",
    "operator",
    "pickle",
    "random",
    "statistics",
    "struct",
]


def matched(n: int) -> int:
    match n:
        case 1 | 2:
            return 5
        case int():
            return n * 2
    return 0


def tried(n: int) -> int:
    try:
        return [1, 2, 3][n]
    except IndexError:
        return 9


@functools.cache
def cached(n: int) -> int:
    return n * 3


@pytest.mark.parametrize(
    "use", [use.strip() for line in USES.strip().split("\n") for use in line.split(" | ")]
)
def test_all_that_code_does_with_a_counter(use: str) -> None:
    names: dict[str, Any] = globals() | {name: importlib.import_module(name) for name in MODULES}
    names["np"] = np
    text = f"def build(self, x):\n    self.n += 1\n    self.d['a'] += 1\n    self.box.n = self.n\n    return {use}\n"
    exec(text, names)
    graph, plain = sides(names["build"])
    for side in (graph, plain):
        side.d = {"a": 0}
    for step in range(5):
        torch.manual_seed(step)
        expected = plain.build(X)
        torch.manual_seed(step)
        assert_same(expected, graph(X), f"step {step}")
        assert repr((plain.n, plain.d, plain.box)) == repr((graph.n, graph.d, graph.box))


READS = """
len(self.losses) | sum(self.losses) | float(bool(self.losses)) | getattr(self, "losses")[-1] | vars(self)["losses"][-1] | other(self)
len(list(iter(self.losses))) | (lambda xs: xs[-1])(self.losses) | sum(x for x in self.losses) | len([*self.losses]) | self.losses.count(2.0)
operator.attrgetter("losses")(self)[-1] | len(getattr(self, "los" + "ses")) | self.alias[-1] | len(self.held[0]) | len("{0.losses}".format(self))
len(copy.copy(self.losses)) | float(self.losses == [2.0]) | len(repr(self.losses)) | self.last() | next(reversed(self.losses)) | self.method(3.0) or len(self.alias)
sum(map(len, [v for v in vars(self).values() if type(v) is list])) | self.losses.pop() | (self.losses.sort() or self.losses[0]) | len(self.losses.__add__([1]))
"""


def other(owner: Any) -> float:
    log = owner.losses
    return float(log[-1])


@pytest.mark.parametrize(
    "read", [read.strip() for line in READS.strip().split("\n") for read in line.split(" | ")]
)
def test_a_list_that_is_read_in_any_way_is_a_fact(read: str) -> None:
    names: dict[str, Any] = globals() | {name: importlib.import_module(name) for name in ("copy", "operator")}
    exec(f"def build(self, x):\n    self.losses.append(2.0)\n    return x * ({read})\n", names)
    graph, plain = sides(names["build"])
    for side in (graph, plain):
        log: list[float] = []
        side.losses = side.alias = log
        side.held, side.method, side.last = (log, 1), log.append, log.__len__
    for step in range(5):
        assert_same(plain.build(X), graph(X), f"step {step}")
        assert plain.losses == graph.losses
        plain.losses.append(step)
        graph.losses.append(step)


@pytest.mark.parametrize("backend", ["aten", "inductor"])
def test_numbers_beyond_the_bits_of_compiled_code(backend: str) -> None:
    def build(self: Any, x: torch.Tensor) -> Any:
        self.n += 1
        self.average = self.average * 1.5 - self.n
        return x * self.average + (self.n * self.n % 7)

    graph, plain = sides(build)
    graph.config.backend(backend)
    graph.average = plain.average = 1.0
    changes = {2: 2**40, 4: 2**70, 6: 5}
    for step in range(8):
        if step in changes:
            graph.n = plain.n = changes[step]
        torch.testing.assert_close(plain.build(X), graph(X), rtol=1e-6, atol=0.0)
        assert repr((graph.n, graph.average)) == repr((plain.n, plain.average))


def test_a_number_that_is_none_is_neither_less_nor_more() -> None:
    def build(self: Any, x: torch.Tensor) -> torch.Tensor:
        large = self.rate * 1e308
        return x * 2 if large - large < 1 else x * 3  # infinity less infinity

    graph, plain = sides(build)
    for rate in (0.5, 20.0, 30.0, 0.25, 40.0):
        graph.rate = plain.rate = rate
        assert_same(plain.build(X), graph(X))
    assert len(graph.builds) == 3, [item.reason for item in graph.builds]


class Whole(TorchDispatchMode):
    """Limits are whole numbers. It sees numbers as torch hands them on."""

    def __init__(self, rounded: Callable[[float], int]) -> None:
        super().__init__()
        self.rounded = rounded

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.clamp_max.default:
            args = (args[0], self.rounded(args[1]))
        return func(*args, **(kwargs or {}))


@pytest.mark.every_case
@pytest.mark.parametrize("rounded", [math.floor, math.ceil, math.trunc])
def test_numbers_that_a_dispatch_mode_rounds(rounded: Callable[[float], int]) -> None:
    def build(self: Any, x: torch.Tensor) -> torch.Tensor:
        with Whole(rounded):
            return x.clamp_max(self.limit)

    graph, plain = sides(build)
    for limit in (-2.5, -1.5, -1.25, -1.75, -1.125):
        graph.limit = plain.limit = limit
        assert_same(plain.build(X), graph(X))
    assert len(graph.builds) == 2, [item.reason for item in graph.builds]


# --- numbers read out of tensors ----------------------------------------------------------------------------


class Reader:
    """Keeps what it reads out of its argument."""

    def __init__(self) -> None:
        self.total, self.last, self.positive, self.seen = 0.0, 0.0, 0, []

    def read(self, x: torch.Tensor) -> torch.Tensor:
        self.total = self.total + x.sum().item()
        self.last = x.max().item()
        self.positive += int((x > 0).sum())
        self.seen.append(x.min().item())
        return x * 2


def test_numbers_read_out_of_arguments_are_kept() -> None:
    class Step(mg.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.reader = Reader()

        def build(self, x: torch.Tensor) -> torch.Tensor:
            return self.reader.read(x)

    graph, plain = Step(), Reader()
    for index in range(4):
        x = torch.randn(3, generator=torch.Generator().manual_seed(index))
        assert torch.equal(plain.read(x), graph(x))
        assert vars(plain) == vars(graph.reader)
    assert len(graph.builds) <= 2


def test_a_sum_of_tensors_in_a_buffer() -> None:
    class Step(mg.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Linear(2, 2)
            self.model.register_buffer("total", torch.zeros(()))

        def build(self, x: torch.Tensor) -> torch.Tensor:
            loss = self.model(x).sum()
            self.model.total.add_(loss.detach())
            return loss

    graph = Step()
    expected = torch.zeros(())
    for _ in range(5):
        expected = expected + graph.model(torch.ones(1, 2)).sum().detach()
        graph(torch.ones(1, 2))
        assert torch.equal(expected, graph.model.total)
    assert len(graph.builds) == 1


@pytest.mark.parametrize(
    "use", [use.strip() for line in USES.strip().split("\n") for use in line.split(" | ")]
)
def test_all_that_code_does_with_an_argument(use: str) -> None:
    names: dict[str, Any] = globals() | {name: importlib.import_module(name) for name in MODULES}
    names |= {"np": np, "SimpleNamespace": SimpleNamespace}
    use = use.replace("self.box", "SimpleNamespace(n=n)").replace("self.d", "{'a': n}").replace("self.n", "n")
    exec(f"def build(self, x, n):\n    return {use}\n", names)
    graph, plain = sides(names["build"])
    for step, n in enumerate([1, 2, 3, 4, 2, 5]):
        torch.manual_seed(step)
        expected = plain.build(X, n)
        torch.manual_seed(step)
        assert_same(expected, graph(X, n), f"step {step}")
