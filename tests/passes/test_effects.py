"""Which values of a program may become one."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import fx

from monograph.passes.effects import Memory, copies_in_vain
from tests.passes.programs import Sketch, numbers

aten = torch.ops.aten


def made(write: Any) -> tuple[Memory, fx.Node, fx.Node]:
    """The memory of a program, and the two of its values that `write` gives first; it returns the others."""
    sketch = Sketch()
    node, other, *returned = write(sketch, sketch.input("x", numbers(3, 3)))
    sketch.finish(*returned)
    return Memory(sketch.graph), node, other


def copy_of_an_input(sketch: Sketch, x: fx.Node) -> list[fx.Node]:
    copy = sketch.op(aten.clone.default, x)
    return [copy, x, sketch.op(aten.mul.Tensor, copy, 2)]


def copy_of_an_input_for_a_product(sketch: Sketch, x: fx.Node) -> list[fx.Node]:
    copy = sketch.op(aten.clone.default, x)
    return [copy, x, sketch.op(aten.mm.default, copy, copy)]


def copy_of_an_input_returned(sketch: Sketch, x: fx.Node) -> list[fx.Node]:
    copy = sketch.op(aten.clone.default, x)
    return [copy, x, copy]


def copy_of_one_of_several_results(sketch: Sketch, x: fx.Node) -> list[fx.Node]:
    whole = sketch.op(aten.sort.default, x)
    values, indices = (sketch.op(operator.getitem, whole, index) for index in (0, 1))
    copy = sketch.op(aten.clone.default, values)
    return [copy, values, sketch.op(aten.mul.Tensor, copy, 2), indices]


def copy_of_one_of_several_results_that_is_returned(sketch: Sketch, x: fx.Node) -> list[fx.Node]:
    whole = sketch.op(aten.sort.default, x)
    values = sketch.op(operator.getitem, whole, 0)
    copy = sketch.op(aten.clone.default, values)
    return [copy, values, sketch.op(aten.mm.default, copy, copy), values]


def copy_of_one_of_several_views(sketch: Sketch, x: fx.Node) -> list[fx.Node]:
    whole = sketch.op(aten.split.Tensor, x, 1)
    first = sketch.op(operator.getitem, whole, 0)
    copy = sketch.op(aten.clone.default, first)
    return [copy, first, sketch.op(aten.exp.default, copy)]


def copy_of_a_result_returned(sketch: Sketch, x: fx.Node) -> list[fx.Node]:
    result = sketch.op(aten.exp.default, x)
    copy = sketch.op(aten.clone.default, result)
    return [copy, result, copy]


def copy_of_a_result_both_returned(sketch: Sketch, x: fx.Node) -> list[fx.Node]:
    result = sketch.op(aten.exp.default, x)
    copy = sketch.op(aten.clone.default, result)
    return [copy, result, copy, result]


@pytest.mark.parametrize(
    ("write", "in_vain"),
    [
        (copy_of_an_input, True),
        (copy_of_an_input_for_a_product, False),
        (copy_of_an_input_returned, False),
        (copy_of_a_result_returned, True),
        (copy_of_a_result_both_returned, False),
        (copy_of_one_of_several_results, True),
        (copy_of_one_of_several_results_that_is_returned, False),
        (copy_of_one_of_several_views, False),
    ],
)
def test_a_copy_is_in_vain_if_nobody_can_tell_it_from_what_it_copies(write: Any, in_vain: bool) -> None:
    memory, node, source = made(write)
    assert copies_in_vain(node, source, memory) is in_vain


def test_two_results_of_the_program_stay_two() -> None:
    def write(sketch: Sketch, x: fx.Node) -> list[fx.Node]:
        first, second = sketch.op(aten.exp.default, x), sketch.op(aten.exp.default, x)
        return [first, second, first, second]

    memory, first, second = made(write)
    assert not memory.can_merge(first, second)


def test_ops_of_several_results_are_one_only_if_all_of_them_may_be() -> None:
    def write(sketch: Sketch, x: fx.Node) -> list[fx.Node]:
        first, second = sketch.op(aten.sort.default, x), sketch.op(aten.sort.default, x)
        return [first, second, *(sketch.op(operator.getitem, item, 0) for item in (first, second))]

    memory, first, second = made(write)
    assert not memory.can_merge(first, second)


def test_merging_makes_the_memory_visible_that_leaves_the_program() -> None:
    def write(sketch: Sketch, x: fx.Node) -> list[fx.Node]:
        first, second = sketch.op(aten.exp.default, x), sketch.op(aten.exp.default, x)
        return [first, second, sketch.op(aten.t.default, first), sketch.op(aten.mul.Tensor, second, 2)]

    memory, first, second = made(write)
    assert memory.is_visible(first)
    assert not memory.is_visible(second)
    assert memory.can_merge(first, second)
    memory.merge(first, second)
    assert memory.is_visible(second)
    assert memory.owner(first) is memory.owner(second)
