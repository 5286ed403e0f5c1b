"""Products and convolutions by code of our own: right for every size and layout, and chosen where they are faster."""

from __future__ import annotations

import operator
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import monograph as mg
from monograph.ir.meta import tensor_meta
from monograph.kernels import compile as workshop_module
from monograph.kernels.candidates import forms_of
from monograph.kernels.compile import KernelCompiler
from monograph.kernels.select import COMPILED
from monograph.kernels.trials import seconds_of
from monograph.layout import Layout
from monograph.native import KERNELS, Depthwise, Product
from monograph.numerics.judge import against_float64
from tests.kernels.programs import (
    aten,
    images,
    needs_onednn,
    program_of,
    rewritten,
    run,
    steps,
    targets,
    with_code,
)

SIZES = st.integers(1, 70)


def matrix(rows: int, columns: int, *, transposed: bool, gap: int) -> torch.Tensor:
    """Numbers that lie row by row, or column by column, with a gap behind each row or column."""
    if transposed:
        return matrix(columns, rows, transposed=False, gap=gap).t()
    return torch.randn(rows, columns + gap)[:, :columns]


def assert_near(
    got: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None
) -> None:
    """A product is about as near to float64 as eager's."""
    exact = a.double() @ b.double() + (bias.double() if bias is not None else 0)
    eager = torch.addmm(bias, a, b) if bias is not None else a @ b
    assert got.shape == exact.shape
    size = exact.abs().max().clamp(min=1)
    assert (got - exact).abs().max() <= 4 * (eager - exact).abs().max() + 4e-7 * size


def kernel(name: str, *operands: torch.Tensor, threads: int = 1):
    """Our code for tensors."""
    return KERNELS[f"monograph::{name}"](
        [Layout(item.shape, item.stride()) for item in operands], [], threads
    )


@pytest.mark.long
@settings(max_examples=12, deadline=None)
@given(
    sizes=st.tuples(SIZES, SIZES, SIZES),
    lies=st.tuples(st.booleans(), st.booleans()),
    gaps=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    with_bias=st.booleans(),
)
def test_every_size_and_layout(sizes, lies, gaps, with_bias):
    m, k, n = sizes
    a = matrix(m, k, transposed=lies[0], gap=gaps[0])
    b = matrix(k, n, transposed=lies[1], gap=gaps[1])
    bias = [torch.randn(n)] if with_bias else []
    described = kernel("product", a, b, *bias)
    assert described.can_be_made
    assert_near(KernelCompiler().compiled(described).once(a, b, *bias), a, b, *bias)


# few and many rows and columns, shared as rows and as columns, in one piece and in several, none of them even
LARGE = [(400, 130, 70), (900, 300, 33), (250, 700, 250), (70, 1000, 300)]


@pytest.fixture(scope="module")
def large():
    """Large products of each layout, and code for them on one and three threads, compiled together."""
    torch.manual_seed(0)
    cases = []
    for sizes, left, right in product(LARGE, (False, True), (False, True)):
        (m, k, n) = sizes
        a, b = matrix(m, k, transposed=left, gap=0), matrix(k, n, transposed=right, gap=1)
        cases.append((a, b, [kernel("product", a, b, threads=threads) for threads in (1, 3)]))
    return cases, KernelCompiler(item for *_, kernels in cases for item in kernels)


@pytest.mark.long
def test_large_products_however_many_threads_share_them(large):
    cases, workshop = large
    for a, b, kernels in cases:
        alone, shared = (workshop.compiled(item).once(a, b) for item in kernels)
        assert_near(alone, a, b)
        assert torch.equal(shared, alone)
    assert {item.used_threads for *_, kernels in cases for item in kernels} == {1, 3}


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (torch.empty(1 << 11, 1 << 10), torch.empty(1 << 10, 1 << 10)),  # huge
        (torch.randn(0, 4), torch.randn(4, 5)),
        (torch.randn(4, 4), torch.randn(8, 8)[::2, ::2]),  # neither rows nor columns lie whole
    ],
)
def test_what_it_is_not_made_for(a, b):
    assert not kernel("product", a, b).can_be_made


def test_what_an_int_cannot_reach_is_left_alone():
    near, far = Layout((2, 8), (1 << 30, 1)), Layout((4, 8), (1 << 30, 1))
    assert Product(near, Layout.contiguous(8, 8)).can_be_made
    assert not Product(far, Layout.contiguous(8, 8)).can_be_made
    sides = ((3, 3), (1, 1), (1, 1))
    assert Depthwise("forward", (64, 32, 512, 512), *sides).can_be_made
    assert not Depthwise("forward", (64, 129, 512, 512), *sides).can_be_made


def test_little_work_is_not_shared():
    """Waking another thread takes as long."""
    small, large = (Layout.contiguous(size, size) for size in (8, 256))
    assert [Product(item, item, threads=3).used_threads for item in (small, large)] == [1, 3]
    sides = ((3, 3), (1, 1), (1, 1), 3)
    shapes = ((1, 4, 8, 8), (16, 32, 64, 64))
    assert [Depthwise("forward", shape, *sides).used_threads for shape in shapes] == [1, 3]


# batch, channels, height and width; filter, stride, padding; with a bias or without
CONVOLUTIONS = [
    ((2, 20, 5, 8), (3, 5), (2, 1), (1, 2), False),
    ((5, 64, 2, 2), (3, 3), (1, 1), (1, 1), True),
    ((64, 3, 1, 1), (3, 3), (1, 1), (1, 1), False),
    ((3, 70, 9, 6), (3, 3), (2, 2), (1, 1), True),
    ((2, 16, 7, 7), (5, 5), (1, 1), (2, 2), False),
    ((1, 1, 4, 9), (1, 2), (1, 3), (0, 0), True),
    ((66, 8, 6, 6), (2, 2), (3, 3), (0, 1), False),
]


@pytest.mark.one_case
@needs_onednn
@pytest.mark.parametrize(("size", "filters", "stride", "padding", "bias"), CONVOLUTIONS)
def test_a_filter_for_each_channel(size, filters, stride, padding, bias):
    channels = size[1]
    x, weight = images(*size), torch.randn(channels, 1, *filters)
    biases = [torch.randn(channels)] if bias else []
    options = (list(stride), list(padding), [1, 1], False, [0, 0], channels)

    def both(emit, x, weight, grad, *bias):
        y = emit(aten.convolution.default, x, weight, *(bias or [None]), *options)
        mask = [True, True, bool(bias)]
        made = emit(aten.convolution_backward.default, grad, x, weight, [channels], *options, mask)
        return y, *(emit(operator.getitem, made, i) for i in range(2 + len(bias)))

    grad = torch.randn_like(aten.convolution(x, weight, None, *options))
    tensors = (x, weight, grad, *biases)
    chosen = rewritten(program_of(both, *tensors))
    assert not any("convolution" in name for name in targets(chosen))
    shown = run(chosen, *tensors)  # our ops by torch's kernels, for what they mean
    code = run(with_code(chosen), *tensors)
    exact = run(chosen, *(item.double() for item in tensors))
    for i, (result, eager, wanted) in enumerate(zip(code, shown, exact, strict=True)):
        assert steps(result) == steps(eager), i
        torch.testing.assert_close(result.double(), wanted, rtol=2e-5, atol=2e-5 * float(wanted.abs().max()))


@pytest.mark.parametrize("options", [{"dilation": 2}, {"groups": 4}, {"kernel_size": 7, "padding": 3}])
def test_other_convolutions_are_left_alone(options):
    layer = nn.Conv2d(8, 8, **{"kernel_size": 3, "groups": 8, **options})
    x = images(2, 8, 12, 12)
    program = program_of(
        lambda emit, x, weight, bias: emit(
            aten.convolution.default,
            x,
            weight,
            bias,
            [1, 1],
            list(layer.padding),
            list(layer.dilation),
            False,
            [0, 0],
            layer.groups,
        ),
        x,
        layer.weight.detach(),
        layer.bias.detach(),
    )
    assert targets(rewritten(program)) == ["convolution.default"]


class Products(nn.Module):
    """Products of parameters, of views that begin inside of a tensor, and of a matrix with itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(24, 20), nn.Linear(10, 7, bias=False)
        self.square = nn.Parameter(torch.randn(20, 20) / 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Seven numbers for each row."""
        h = self.first(x).tanh()
        h = h @ (self.square @ self.square)
        left, right = h[:, :10], h[:, 10:]
        return self.last(left * 2) + self.last(right) + left @ right.t()[:, :7]


def trained(dtype: torch.dtype, backend: str | None = None):
    """The losses of four steps and the state afterwards, and the graph."""
    torch.manual_seed(0)
    model = Products().to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batches = [(torch.randn(32, 24).to(dtype), torch.randn(32, 7).to(dtype)) for _ in range(4)]
    graph = mg.train_graph(model, nn.MSELoss(), optimizer)
    graph.config.backend(backend or "aten")
    losses = [graph(*batch).detach().clone() for batch in batches]
    return {f"loss.{i}": item for i, item in enumerate(losses)} | model.state_dict(), graph


@pytest.mark.long
def test_a_compiled_step(monkeypatch):
    last = {"own": 1.0}
    monkeypatch.setattr(
        "monograph.kernels.select.seconds_of",
        lambda forms, *_: {form.name: last.get(form.name, 2.0) for form in forms},
    )
    exact, eager = trained(torch.float64)[0], trained(torch.float32)[0]
    state, graph = trained(torch.float32, "inductor")
    assert graph.backend == "inductor"
    assert sum(choice.winner == "own" for choice in graph.builds[0].choices) >= 8
    assert "torch.ops.monograph.product.default(" in graph.show("kernels")
    assert "aten.mm." not in graph.show("kernels")
    assert against_float64(exact, eager, state).ok


def test_on_aten_there_is_no_such_kernel():
    model = nn.Linear(4, 4)
    graph = mg.train_graph(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1))
    graph.config.enable_kernel_selection()
    graph(torch.randn(4, 4), torch.randn(4, 4))
    assert graph.builds[0].choices
    assert all("own" not in choice.seconds for choice in graph.builds[0].choices)


def test_without_a_compiler_it_is_left_out(monkeypatch):
    def fail(code, goal):
        raise OSError("no compiler")

    program = program_of(lambda emit, a, b: emit(aten.mm.default, a, b), torch.randn(4, 4), torch.randn(4, 4))
    node = next(node for node in program.ops() if node.target is aten.mm.default)
    forms = forms_of(node, COMPILED[aten.mm.default])
    described = [tensor_meta(torch.randn(4, 4))] * 2
    assert "own" in seconds_of(forms, described, KernelCompiler())
    monkeypatch.setattr(workshop_module, "compile_to_functions", fail)
    assert "own" not in seconds_of(forms, described, KernelCompiler())
