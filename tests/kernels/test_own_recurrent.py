"""The loop of a recurrent layer by code of our own: as near to float64 as torch's layers, forward and backward."""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from monograph.kernels import compile as workshop_module
from monograph.kernels.compile import KernelCompiler
from monograph.layout import Layout
from monograph.native import Recurrence
from monograph.native.recurrent import GATES
from monograph.native.recurrent_formulas import recurrence, recurrence_backward

KINDS = tuple(GATES)


def module_of(kind: str, units: int, *, reverse: bool) -> nn.RNNBase:
    """torch's layer of this kind in float64; one that takes steps from the last one is half of one for both ways."""
    if kind in ("tanh", "relu"):
        return nn.RNN(3, units, nonlinearity=kind, bidirectional=reverse).double()
    return {"lstm": nn.LSTM, "gru": nn.GRU}[kind](3, units, bidirectional=reverse).double()


class Case:
    """A layer of torch's, what our loop gets for it, and what it has to give."""

    def __init__(self, kind, steps, rows, units, *, reverse=False):
        torch.manual_seed(0)
        self.kind, self.reverse = kind, reverse
        layer, way = module_of(kind, units, reverse=reverse), "_reverse" * reverse
        names = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")
        of_input, self.weight, bias, of_state = (getattr(layer, name + way).detach() for name in names)
        x = torch.randn(steps, rows, 3, dtype=torch.float64)
        self.first, self.cells, self.last, self.last_cells = torch.randn(4, rows, units, dtype=torch.float64)
        self.grad = torch.randn(steps, rows, units, dtype=torch.float64)
        self.given = x @ of_input.t() + (bias if kind == "gru" else bias + of_state)
        self.other = {"lstm": self.cells, "gru": of_state}.get(kind)
        self.start = {"lstm": self.cells, "gru": self.first}.get(kind)
        given = [item.clone().requires_grad_() for item in (x, self.first, self.cells)]
        both = [torch.stack([item] * (1 + reverse)) for item in given[1:]]
        states, last = layer(given[0], tuple(both) if kind == "lstm" else both[0])
        last, *cells = last if kind == "lstm" else (last,)
        self.states = states[..., -units:].detach()
        loss = (states[..., -units:] * self.grad).sum() + (last[-1] * self.last).sum()
        for item in cells:
            loss = loss + (item[-1] * self.last_cells).sum()
        loss.backward()
        self.of_x, self.of_first, self.of_cells = (item.grad for item in given)
        self.of_input = of_input
        self.of_weight = getattr(layer, names[1] + way).grad

    def taken(self, dtype):
        """What the loop takes, in this type."""
        tensors = [self.given, self.weight, self.first, self.other]
        return [item.to(dtype) for item in tensors if item is not None]

    def taken_back(self, dtype, block):
        """What its backward takes."""
        cells = [self.last_cells] if self.kind == "lstm" else []
        start = [] if self.start is None else [self.start]
        return [item.to(dtype) for item in (self.grad, self.last, *cells, self.weight, *start, block)]

    def code(self, threads=1):
        """Our code, forward and backward."""
        options, dtype = [self.kind, self.reverse], torch.float32
        forward = Recurrence.of([layout(item) for item in self.taken(dtype)], options, threads)
        block = torch.empty(forward.results[0].shape)
        taken = [layout(item) for item in self.taken_back(dtype, block)]
        return forward, Recurrence.of_gradient(taken, options, threads)

    def by_code(self, compiler=None, threads=1):
        """The blocks that our code gives."""
        both = self.code(threads)
        forward, backward = map((compiler or compiler_of(both)).compiled, both)
        block = forward.once(*self.taken(torch.float32))
        return block, backward.once(*self.taken_back(torch.float32, block))

    def by_formulas(self, dtype=torch.float64):
        """The same by ops of torch."""
        taken = self.taken(dtype)
        block = recurrence(*taken, *[None] * (4 - len(taken)), self.kind, self.reverse)
        grad, last, *rest, block = self.taken_back(dtype, block)
        cells = rest.pop(0) if self.kind == "lstm" else None
        weight, *start = rest
        made = recurrence_backward(
            grad, last, cells, weight, *(start or [None]), block, self.kind, self.reverse
        )
        return block, made

    def named(self, block, made):
        """The tensors in both blocks by name."""
        for code, whole in zip(self.code(), (block, made), strict=True):
            pieces = whole.split([*map(math.prod, code.parts.values())])
            for (name, shape), piece in zip(code.parts.items(), pieces, strict=True):
                yield name, piece.view(shape)


@cache
def compiler_of(kernels):
    """A compiler of this processor for kernels, which are compiled once for all tests."""
    return KernelCompiler(kernels)


def layout(item: torch.Tensor) -> Layout:
    return Layout(tuple(item.shape), item.stride())


def assert_near(case: Case, blocks, factor=2) -> None:
    """All that is given is about as near to float64 as the same formulas in float32."""
    exact, plain = dict(case.named(*case.by_formulas())), dict(case.named(*case.by_formulas(torch.float32)))
    for name, got in case.named(*blocks):
        distance, known = ((item - exact[name]).norm() for item in (got, plain[name]))
        assert distance <= factor * known + 1e-7 * exact[name].norm(), name


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_formulas_are_those_of_torchs_layers(kind, reverse):
    case = Case(kind, 4, 3, 5, reverse=reverse)
    made = dict(case.named(*case.by_formulas()))
    torch.testing.assert_close(made["states"], case.states)
    torch.testing.assert_close(made["of_first"], case.of_first)
    torch.testing.assert_close(made["of_input"] @ case.of_input, case.of_x)
    if kind == "lstm":
        torch.testing.assert_close(made["of_cells"], case.of_cells)
    before = [case.first[None], case.states[:-1]]
    if reverse:
        before = [case.states[1:], case.first[None]]
    product = made.get("of_products", made["of_input"]).flatten(0, 1).t() @ torch.cat(before).flatten(0, 1)
    torch.testing.assert_close(product, case.of_weight)


@pytest.mark.long
@settings(max_examples=8, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    steps=st.integers(1, 5),
    rows=st.integers(1, 60),
    units=st.integers(1, 70),
    reverse=st.booleans(),
)
def test_every_size(kind, steps, rows, units, reverse):
    case = Case(kind, steps, rows, units, reverse=reverse)
    assert_near(case, case.by_code())


@pytest.mark.one_case
@pytest.mark.parametrize("case", [("lstm", 2, 5, 300), ("gru", 3, 50, 19), ("relu", 1, 1, 1)])
def test_sums_in_pieces_and_rests_of_rows_and_units(case):
    made = Case(*case)
    assert_near(made, made.by_code())


@pytest.mark.one_case
@pytest.mark.parametrize("missing", [["__AVX512F__"], ["__AVX512F__", "__AVX2__"]])
def test_processors_with_less(missing, monkeypatch):
    """Registers of half the width, and none."""
    compile_as_it_is = workshop_module.compile_to_functions
    without = "".join(f"#undef {name}\n" for name in missing)
    monkeypatch.setattr(
        workshop_module, "compile_to_functions", lambda text, goal: compile_as_it_is(without + text, goal)
    )
    cases = [Case(kind, 3, 14, 21) for kind in KINDS]
    compiler = KernelCompiler(item for case in cases for item in case.code())
    for case in cases:
        assert_near(case, case.by_code(compiler))


@pytest.mark.one_case
@pytest.mark.parametrize("kind", KINDS)
def test_states_of_any_size(kind):
    """Small numbers keep their digits, and large ones reach the ends of the gates."""
    for size in (1e-4, 100.0):
        case = Case(kind, 3, 4, 16)
        case.given = case.given * size
        case.first, case.weight = case.first * size, case.weight * (size if size < 1 else 1)
        assert_near(case, case.by_code(), 2 if size < 1 else 5)  # few gates are not at an end


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_finite(kind, number):
    """It is so where it is in the formulas."""
    case = Case(kind, 3, 4, 16)
    case.given[1, 2, 5] = number
    plain = case.named(*case.by_formulas(torch.float32))
    for (name, got), (_, known) in zip(case.named(*case.by_code()), plain, strict=True):
        torch.testing.assert_close(got, known, rtol=1e-4, atol=1e-5, equal_nan=True, msg=name)


@pytest.mark.long
def test_threads_share_units():
    case = Case("lstm", 3, 20, 70)  # enough work for several
    for alone, shared in zip(case.by_code(), case.by_code(threads=3), strict=True):
        assert torch.equal(alone, shared)
    assert [item.used_threads for item in case.code(threads=3)] == [3, 3]
    assert [item.used_threads for item in Case("tanh", 3, 2, 8).code(threads=3)] == [1, 1]


def test_what_it_is_not_made_for():
    def made(steps, rows, units):
        wide, state = Layout.contiguous(units, units), Layout.contiguous(rows, units)
        return Recurrence.of([Layout.contiguous(steps, rows, units), wide, state], ["tanh", False], 1)

    assert made(3, 2, 4).can_be_made
    assert not made(3, 0, 4).can_be_made
    assert not made(1 << 20, 1 << 10, 4).can_be_made
