"""Chains: which ops become one, how arguments may be spread, how much memory is held, and who checks their code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import monograph as mg
from monograph.backends.chained import chains_in, with_chains
from monograph.elementwise import chain_code
from monograph.elementwise.chain_calls import call_of, has_eagers_bits
from monograph.elementwise.chain_code import ChainCode, code_of
from monograph.elementwise.chains import Chain, place_of
from monograph.elementwise.compiling import compiled
from monograph.elementwise.proof import choice_at, form_at, prove, same_bits, unproved
from monograph.layout import Layout
from monograph.plan.plan import Plan, make_plan


def plan_of(function: Callable[..., Any], *arguments: Any) -> Plan:
    """The plan of a function."""
    graph = mg.trace(function)
    graph.config.backend("aten")
    graph(*arguments)
    return make_plan(graph.builds[-1].program)


def found_in(function: Callable[..., Any], *arguments: Any) -> list[Chain]:
    """Its chains."""
    return chains_in(plan_of(function, *arguments), lambda _: True)


def ops_of(chain: Chain) -> list[str]:
    """The names of a chain's ops."""
    return [node.target.__name__.partition(".")[0] for node in chain.nodes]  # type: ignore[union-attr]


def coded(chain: Chain) -> tuple[ChainCode, Any]:
    """A chain with its code, compiled."""
    prove(unproved([chain]))
    text, (code,) = code_of([chain], choice_at)
    (library,) = compiled([text])
    return code, library


X, Y = torch.randn(6, 40), torch.randn(6, 40)


@pytest.mark.parametrize(
    ("given", "kind", "width"),
    [
        (Layout.contiguous(6, 5, 4), "whole", 0),
        (Layout.contiguous(4), "row", 4),
        (Layout.contiguous(5, 4), "row", 20),
        (Layout.contiguous(6, 5, 1), "column", 4),
        (Layout.contiguous(6, 1, 1), "column", 20),
        (Layout.contiguous(1, 1), "single", 0),
        (Layout.contiguous(), "single", 0),
        (Layout((6, 5, 4), (0, 0, 0)), "single", 0),
        (Layout((6, 5, 4), (5, 1, 0)), "column", 4),
        (Layout((6, 5, 4), (20, 1, 5)), None, 0),
        (Layout((6, 5, 4), (40, 8, 2)), None, 0),
        (Layout.contiguous(6, 1, 4), None, 0),
        (Layout.contiguous(5, 1), None, 0),
    ],
)
def test_how_arguments_are_spread(given: Layout, kind: str | None, width: int) -> None:
    place = place_of(given, Layout.contiguous(6, 5, 4))
    assert (place.kind, place.width) == (kind, width) if place is not None else kind is None


def test_a_row_of_channels_in_images_that_are_channels_last() -> None:
    images = Layout.channels_last(2, 5, 3, 4)
    assert place_of(Layout.contiguous(5, 1, 1), images).width == 5  # type: ignore[union-attr]
    assert place_of(Layout.contiguous(5, 1, 1), Layout.contiguous(2, 5, 3, 4)) is None


def test_no_path_leaves_a_chain_and_comes_back() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        first = x * y
        around = first.sum(0)
        return (first + 1) * around - y

    assert [ops_of(chain) for chain in found_in(function, X, Y)] == [["add", "mul", "sub"]]


def test_ops_with_others_between_them_are_one_chain() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        first = x * y
        return (first + y.cumsum(0)) * 2

    (chain,) = found_in(function, X, Y)
    assert ops_of(chain) == ["mul", "add", "mul"]
    assert [node.name for node in chain.results] == [chain.nodes[-1].name]


def test_ops_of_several_forms_or_types_are_several_chains() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        column = x.sum(1, keepdim=True).abs() + 1
        return (x * column + 1).double() * y.double() - 1

    assert [ops_of(chain) for chain in found_in(function, X, Y)] == [
        ["abs", "add"],
        ["mul", "add"],
        ["mul", "sub"],
    ]


def test_rows_of_several_widths_are_several_chains() -> None:
    def function(x: Tensor, short: Tensor, long: Tensor, column: Tensor) -> Tensor:
        return (x * short + 1) * long + column

    shapes = ((4, 6, 40), (40,), (6, 40), (4, 1, 1))
    chains = found_in(function, *map(torch.randn, shapes))
    assert [(ops_of(chain), chain.width) for chain in chains] == [(["mul", "add"], 40), (["mul", "add"], 240)]


def test_rows_of_few_elements_are_left_alone() -> None:
    assert not found_in(lambda x, y: x * y + 1, torch.randn(6, 3), torch.randn(3))
    assert found_in(lambda x, y: x * y + 1, torch.randn(6, 16), torch.randn(16))


def test_a_chain_that_would_hold_more_memory_is_left_alone() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        first = x.cumsum(0) * x.cumsum(1)  # of the two nothing is left
        large = torch.cat([y] * 8).cumsum(0).sum(0)
        return first + large

    def freed(x: Tensor, y: Tensor) -> Tensor:
        first = x.cumsum(0) * y
        large = torch.cat([y] * 8).cumsum(0).sum(0)
        return first + large

    assert found_in(function, X, Y) == []
    assert len(found_in(freed, X, Y)) == 1


def test_code_with_a_fault_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    (chain,) = found_in(lambda x, y: (x * y + 1) * y - x, X, Y)
    assert has_eagers_bits(*coded(chain))
    right = chain_code._Writer._value
    monkeypatch.setattr(chain_code._Writer, "_value", lambda *given: f"({right(*given)}) * (T)1.0000001f")
    code, library = coded(chain)
    assert not has_eagers_bits(code, library)
    plan, calls = with_chains(plan_of(lambda x, y: x * y, X, Y), [code], library)
    assert not calls
    assert [str(node.target) for node in plan.program.ops()] == ["aten.mul.Tensor"]


def test_a_call_gives_all_that_others_read() -> None:
    def function(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        first = x * y
        return first > 0, (first - 1) * x

    (chain,) = found_in(function, X, Y)
    code, library = coded(chain)
    call = call_of(code, library, lambda *given: pytest.fail("the ops run one by one"))
    for one, other in zip(call(X, Y), function(X, Y), strict=True):
        assert same_bits(one, other)


def test_numbers_that_eager_mode_refuses_are_left_to_the_ops() -> None:
    def function(x: Tensor, y: Tensor, scale: float) -> Tensor:
        return torch.add(x, y, alpha=scale) * x

    (chain,) = found_in(function, X, Y, 0.5)
    code, library = coded(chain)
    call = call_of(code, library, lambda *given: ("op by op",))
    assert same_bits(call(X, Y, 0.25), function(X, Y, 0.25))
    for number in (1e300, float("inf"), float("nan")):
        assert call(X, Y, number) == "op by op"


def test_what_one_element_stands_for_is_proved_as_that() -> None:
    """Eager's loops may multiply such an element beforehand, and round once more than for others."""
    (chain,) = found_in(
        lambda x, y, z: torch.sub(x, y, alpha=0.7) * z, X, torch.ones(6, 1), torch.tensor(2.0)
    )
    assert [form_at(node).repeated for node in chain.nodes] == [("other",), ("other",)]
    (chain,) = found_in(lambda x, y: x * y + 1, X, torch.ones(40))
    assert [form_at(node).repeated for node in chain.nodes] == [(), ()]


def test_memory_that_holds_other_numbers_is_left_to_the_ops() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        return (x + y) * x

    (chain,) = found_in(function, X, Y)
    code, library = coded(chain)
    call = call_of(code, library, lambda *given: ("op by op",))
    negated = torch.complex(Y, Y).conj().imag
    assert negated.is_neg()
    assert call(X, negated) == "op by op"
    assert same_bits(call(X, negated.resolve_neg()), function(X, negated))


def test_chains_that_are_alike_share_their_code() -> None:
    def function(x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        return (x * y + 1).sum(), (z * 2.0 * z + 1).sum(), (y * x + 1).sum()

    chains = found_in(function, X, Y, torch.randn(9, 50))
    prove(unproved(chains))
    _text, codes = code_of(chains, choice_at)
    assert len(codes) == 3
    assert codes[0].name == codes[2].name != codes[1].name
