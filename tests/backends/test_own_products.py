"""Small matrix products by code of our own: right for every size and layout, and chosen where they are faster."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import monograph as mg
from monograph.backends import candidates_own
from monograph.backends import choices as choices_module
from monograph.backends.candidates import forms_of
from monograph.backends.candidates_own import compiled, product_of
from monograph.backends.kernels import COMPILED
from monograph.backends.trial import seconds_of
from monograph.ir.meta import tensor_meta
from monograph.runtime.judge import against_float64
from tests.backends.test_kernels import aten, program_of

SIZES = st.integers(1, 70)


@pytest.fixture(autouse=True)
def own_memory(tmp_path, monkeypatch):
    """Each test begins knowing nothing."""
    monkeypatch.setenv("MONOGRAPH_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(choices_module, "_IN_PROCESS", {})


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
    described = product_of(*map(tensor_meta, (a, b, *bias)))
    assert described.can_be_made
    got = compiled(described).once(a, b, *bias)
    assert_near(got, a, b, *bias)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("columns", [128, 200, 320])
def test_several_threads_share_the_columns(columns, transposed):
    a, b = torch.randn(48, 96), matrix(96, columns, transposed=transposed, gap=0)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        described = product_of(tensor_meta(a), tensor_meta(b))
        assert described.used_threads == 2
        shared = compiled(described).once(a, b)
    finally:
        torch.set_num_threads(before)
    alone = compiled(replace(described, threads=1)).once(a, b)
    assert torch.equal(shared, alone)
    assert_near(alone, a, b)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (torch.randn(512, 512), torch.randn(512, 512)),  # large
        (torch.randn(0, 4), torch.randn(4, 5)),
        (torch.randn(4, 4), torch.randn(8, 8)[::2, ::2]),  # neither rows nor columns lie whole
        (torch.randn(2, 4096), torch.randn(64, 4096).t()),  # too much to copy to the stack
    ],
)
def test_what_it_is_not_made_for(a, b):
    assert not product_of(tensor_meta(a), tensor_meta(b)).can_be_made


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


def test_a_compiled_step(monkeypatch):
    last = {"own": 1.0}
    monkeypatch.setattr(
        "monograph.backends.kernels.seconds_of",
        lambda forms, inputs: {form.name: last.get(form.name, 2.0) for form in forms},
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
    assert "own" in seconds_of(forms, described)
    monkeypatch.setattr(candidates_own, "compile_to_functions", fail)
    assert "own" not in seconds_of(forms, described)
