"""Chains of element-wise ops on `exact`: forward and backward have the bits of plain PyTorch."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.profiler import profile

import monograph as mg
from monograph.internals import upgrades
from tests.backends.drawn_chains import Drawn
from tests.backends.test_exact import Make
from tests.support.seen import Seen

Shape = tuple[int, ...]
_BITS = {torch.float32: torch.int32, torch.float64: torch.int64, torch.bfloat16: torch.int16}
ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "mish": lambda x: x * torch.tanh(F.softplus(x)),
    "gelu": lambda x: 0.5 * x * (1 + torch.tanh(0.7978845608 * (x + 0.044715 * x**3))),
    "squared relu": lambda x: F.relu(x) ** 2,
    "hard swish": lambda x: x * (x + 3).clamp(0, 6) / 6,
    "quick gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "softsign": lambda x: x / (1 + x.abs()),
}


class Block(nn.Module):
    """A gated unit between a norm and a scale that is learnt."""

    def __init__(self, activation: str, width: int = 33) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[activation]
        self.norm = nn.Parameter(torch.ones(width))
        self.up, self.gate, self.down = (nn.Linear(width, width) for _ in range(3))
        self.scale = nn.Parameter(torch.full((width,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        h = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.norm
        made: Tensor = x + self.scale * self.down(self.activation(self.gate(h)) * self.up(h))
        return made


class Dropped(nn.Module):
    """Random ops between the others."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(33, 33)

    def forward(self, x: Tensor) -> Tensor:
        h = F.dropout(self.layer(x) * 2 - x, 0.3)
        return h * torch.rand_like(h) + (x - h).abs()


class Images(nn.Module):
    """A convolution, and arithmetic on what it gives."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.shift = nn.Parameter(torch.ones(5, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        return (h * 0.5 + self.shift).clamp(-1, 1) * h - h.abs()


class Tail(nn.Module):
    """Arithmetic on its argument as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x > 0, x * self.factor + 1, x / 3 - self.factor) * x


def loss_of(made: Tensor) -> Tensor:
    """One written by hand."""
    far = made.abs()
    return torch.where(far < 1.0, 0.5 * made * made, far - 0.5).mean()


class Step(mg.Graph):
    """A training step on one argument."""

    def __init__(self, model: nn.Module, make: Make) -> None:
        super().__init__()
        self.model = model
        self.add_optimizer(make(model.parameters()))

    def build(self, x: Tensor) -> list[Tensor]:
        return trained(self.model, x)


def trained(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Forward and backward."""
    made = model(x)
    results = made if isinstance(made, list) else [made]
    loss = loss_of(results[0])
    loss.backward()
    return [loss.detach(), *(item.detach() for item in results)]


def same(one: Tensor, other: Tensor) -> bool:
    """The same form and bits, but for the payload of NaN."""
    if (one.shape, one.stride(), one.dtype) != (other.shape, other.stride(), other.dtype):
        return False
    equal = one.contiguous().view(_BITS[one.dtype]) == other.contiguous().view(_BITS[one.dtype])
    return bool((equal | (one.isnan() & other.isnan())).all())


def sgd(parameters: Iterable[Tensor]) -> Optimizer:
    """An optimizer."""
    return torch.optim.SGD(parameters, lr=0.1)


def check(model: nn.Module, *batches: Tensor, make: Make = sgd) -> mg.Graph:
    """Steps by plain PyTorch and by a graph have the same bits."""
    plain = copy.deepcopy(model)
    optimizer = make(plain.parameters())
    graph = Step(model, make)
    graph.config.backend("exact")
    for x in batches:
        state = torch.get_rng_state()
        optimizer.zero_grad()
        expected = trained(plain, x)
        optimizer.step()
        torch.set_rng_state(state)
        for one, other in zip(expected, graph(x), strict=True):
            assert same(one, other)
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        assert same(one.detach(), other.detach())
    assert graph.backend == "exact"
    return graph


def chained_ops(graph: mg.Graph) -> int:
    """How many ops of the newest build are in chains."""
    (note,) = [note for note in graph.builds[-1].notes if note.startswith("exact: ")]
    return sum(int(item.split()[0]) for item in note.removeprefix("exact: ").split(", ") if " chain" in item)


def drawn(*shapes: Shape, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Tensors of these shapes."""
    source = torch.Generator().manual_seed(2)
    return [torch.randn(shape, generator=source, dtype=torch.float64).to(dtype) for shape in shapes]


@pytest.mark.one_case
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float64, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "activation",
    [
        name if name in ("mish", "hard swish") else pytest.param(name, marks=pytest.mark.long)
        for name in ACTIVATIONS
    ],
)
def test_models_with_many_chains(activation: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Block(activation), Block(activation)).to(dtype)
    graph = check(model, *drawn((7, 33), (7, 33), (7, 33), dtype=dtype))
    assert chained_ops(graph) > 30


@pytest.mark.parametrize(
    "seed",
    [
        *range(4),
        *(pytest.param(n, marks=pytest.mark.long) for n in range(4, 18)),
        *(pytest.param(n, marks=pytest.mark.search) for n in range(18, 60)),
    ],
)
def test_random_programs(seed: int) -> None:
    shape: Shape = [(5, 33), (3, 7, 64), (1, 16), (16, 1), (129, 72), (2, 3)][seed % 6]
    dtype = torch.float32 if seed % 4 else torch.float64
    first, second, third = drawn(shape, shape, shape, dtype=dtype)
    second.view(-1)[0], second.view(-1)[-1] = float("inf"), float("nan")
    check(Drawn(seed, shape, dtype), first, third, second)


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 1e38, 1e-38, 1e-45, 0.0, -0.0])
def test_values_of_all_sorts(value: float) -> None:
    torch.manual_seed(0)
    first, second = drawn((7, 33), (7, 33))
    second[0, :5] = value
    second[:, 7] = -value
    graph = check(Block("hard swish"), first, second)
    assert chained_ops(graph) > 15


def test_denormal_numbers_that_are_flushed() -> None:
    """Then some of eager's kernels give zeros, and others the number itself."""
    first, second = drawn((7, 33), (7, 33))
    second[:, ::2] *= 1e-39
    model = Block("squared relu")
    check(copy.deepcopy(model), first, second)
    assert torch.set_flush_denormal(True)
    try:
        check(model, first, second)
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.one_case
@pytest.mark.parametrize(
    "shape",
    [(7, 33), (1,), (0, 5), (), (3, 1), (20000,)],
    ids=lambda shape: "x".join(map(str, shape)) or "none",
)
def test_shapes(shape: Shape) -> None:
    graph = check(Tail(), *drawn(shape, shape))
    assert (chained_ops(graph) > 0) == (0 not in shape)


def test_steps_that_do_not_fill_a_block() -> None:
    (wide,) = drawn((40, 66))
    for x in (wide.t(), wide[:, ::2], wide[3:9], wide[:1].expand(40, 66)):
        check(Tail(), x, x * 2)


def test_channels_last() -> None:
    torch.manual_seed(0)
    images = [item.to(memory_format=torch.channels_last) for item in drawn((2, 3, 8, 9), (2, 3, 8, 9))]
    graph = check(Images(), *images)
    assert chained_ops(graph) > 3
    check(Images(), *drawn((2, 3, 8, 9), (2, 3, 8, 9)))


def test_chains_for_several_threads() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        check(Drawn(5, (300, 301), torch.float32), *drawn((300, 301), (300, 301)))
        check(Tail(), *drawn((70001,), (70001,)))
    finally:
        torch.set_num_threads(threads)


def test_random_ops_draw_what_they_draw_in_eager_mode() -> None:
    torch.manual_seed(0)
    graph = check(Dropped(), *drawn((7, 33), (7, 33), (7, 33)))
    assert chained_ops(graph) > 3


def test_an_argument_whose_memory_holds_other_numbers() -> None:
    (x,) = drawn((300,))
    negated = torch.complex(x, x).conj().imag
    assert negated.is_neg()
    check(Tail(), x, negated, x)


def test_a_value_whose_memory_holds_other_numbers() -> None:
    class Negated(Tail):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(torch.complex(x, x).conj().imag) + torch.complex(x, x).conj().imag * 0.5

    graph = check(Negated(), *drawn((300,), (300,)))
    assert chained_ops(graph) > 3


def test_who_looks_at_ops_sees_all_of_them() -> None:
    first, second = drawn((7, 33), (7, 33))
    graph = check(Tail(), first)
    with Seen() as seen:
        graph(second)
    ops = [str(node.target) for node in graph.builds[-1].program.ops()]
    assert 0 < ops.count("aten.where.self") == seen.ops["where"]
    with profile() as profiled:
        graph(second)
    assert "aten::where" in {event.key for event in profiled.key_averages()}


def test_an_error_names_the_line_and_changes_nothing() -> None:
    class Looked(mg.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(5, 33)
            self.add_optimizer(torch.optim.SGD(self.table.parameters(), lr=0.1))

        def build(self, index: Tensor, x: Tensor) -> Tensor:
            h = (x * 2 + 1).abs()
            found = self.table(index)  # here
            loss = loss_of(found * h - x)
            loss.backward()
            return loss.detach()

    step = Looked()
    step.config.backend("exact")
    (x,) = drawn((4, 33))
    good = torch.tensor([0, 1, 2, 3])
    step(good, x)
    assert chained_ops(step) > 5
    before = step.table.weight.detach().clone()
    with pytest.raises(IndexError) as caught:
        step(good + 3, x)
    lines = Path(__file__).read_text().splitlines()
    line = next(number for number, text in enumerate(lines, 1) if text.endswith("(index)  # here"))
    assert any(f"line {line}," in note for note in caught.value.__notes__)
    assert torch.equal(before, step.table.weight)


def test_the_default_goes_on_by_chains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upgrades, "_WORTH_IT", 0.0)
    torch.manual_seed(0)
    model, plain = Block("softsign"), Block("softsign")
    plain.load_state_dict(model.state_dict())
    graph, optimizer = Step(model, sgd), sgd(plain.parameters())
    end = time.monotonic() + 120
    while graph.backend != "exact" and time.monotonic() < end:
        for x in drawn((7, 33), (7, 33)):
            optimizer.zero_grad()
            expected = trained(plain, x)
            optimizer.step()
            assert all(map(same, expected, graph(x)))
    assert graph.backend == "exact"
    assert chained_ops(graph) > 10


@pytest.mark.one_case
@pytest.mark.parametrize(
    "masked",
    [
        torch.mul,
        torch.add,
        torch.maximum,
        lambda m, n: torch.where(m, n, m),
        lambda m, n: m.masked_fill(n, 1),
        lambda m, n: torch.sign(m) != n,
        lambda m, n: m / n > 0.5,
        lambda m, n: (m == 0.999999999999) & n,  # float32 has no such number
        lambda m, n: (m * 0.7 + n) / 3 > 0.3,
    ],
)
def test_masks_alone(masked: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Ops that are given nothing else compute in a type that no argument says."""

    def chosen(x: Tensor, y: Tensor) -> Tensor:
        return torch.where(masked(x > 0, y > 0), x * 2, y) + 1

    for default in (torch.float32, torch.float64):
        torch.set_default_dtype(default)
        try:
            for dtype in (torch.float32, torch.float64):
                graph = mg.trace(chosen)
                graph.config.backend("exact")
                for _ in range(2):
                    x, y = drawn((7, 33), (7, 33), dtype=dtype)
                    assert same(graph(x, y), chosen(x, y))
                assert chained_ops(graph) > 1
        finally:
            torch.set_default_dtype(torch.float32)


def test_without_an_update() -> None:
    def activated(x: Tensor) -> Tensor:
        return x * (x + 3).clamp(0, 6) / 6

    graph = mg.trace(activated)
    graph.config.backend("exact")
    (x,) = drawn((7, 33))
    assert same(graph(x), activated(x))
    assert chained_ops(graph) == 4


def test_an_update_that_is_not_compiled_is_in_place_all_the_same() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = nn.Parameter(torch.ones(33, dtype=torch.bfloat16))

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.factor.float() + 1).abs() * x

    for make in (sgd, lambda p: torch.optim.AdamW(p, fused=True)):
        graph = check(Half(), *drawn((7, 33), (7, 33), (7, 33)), make=make)
        assert chained_ops(graph) > 3
        places = {port.path: place for place, port in enumerate(graph.builds[0].program.outputs)}
        assert places["model.factor"] in graph.builds[0].executor._runner.written
        with Seen() as seen:
            graph(*drawn((7, 33)))
        assert seen.ops["abs"]


def test_beside_an_update_that_cannot_be_compiled() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = nn.Parameter(
                torch.tensor(1.5)
            )  # AdamW calls its root, which no loop of one element does

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.factor + 1).abs() * x

    graph = check(Scaled(), *drawn((7, 33), (7, 33), (7, 33)), make=torch.optim.AdamW)
    assert chained_ops(graph) > 3
    assert graph.backend == "exact"
