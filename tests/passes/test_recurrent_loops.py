"""Recurrent layers that train are written as products and a loop, which give what torch's layer gives."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import fx

from monograph.ir.own_ops import RECURRENCE, RECURRENCE_BACKWARD, RECURRENT_LAYER
from monograph.ir.program import Program
from monograph.ir.verify import verify
from monograph.passes.inductor.recurrent import recurrent
from tests.passes.programs import Sketch, aten, numbers, run

STEPS, ROWS, NUMBERS, UNITS = 4, 3, 5, 6
LSTM = 2


def calls_of(program: Program, target: Any) -> int:
    return sum(node.target is target for node in program.ops())


class Layers:
    """A program with layers of torch's op and their backwards, and all that these give."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.sketch, self.dtype, self.results = Sketch(), dtype, list[fx.Node]()

    def input(self, *shape: int) -> fx.Node:
        """Numbers, each time others."""
        count = len(self.sketch.inputs)
        return self.sketch.input(f"x{count}", numbers(*shape, seed=count).to(self.dtype))

    def layer(self, x: fx.Node, *, reverse: bool = False, biases: bool = True) -> tuple[Any, ...]:
        """A call of the layer: its arguments, and its results."""
        wide = 4 * UNITS
        weights = [self.input(wide, self.sketch.shape(x)[-1]), self.input(wide, UNITS)]
        weights += [self.input(wide), self.input(wide)]
        states = [self.input(ROWS, UNITS), self.input(ROWS, UNITS)]
        given = (x, *weights, *states, reverse, [], LSTM, UNITS, 1, biases, False, False)
        made = self.sketch.op(aten.mkldnn_rnn_layer.default, *given, True)
        return given, [self.sketch.op(operator.getitem, made, place) for place in range(4)]

    def back(self, given: Any, made: Any, grads: Any) -> list[fx.Node]:
        """A call of its backward."""
        *tensors, reverse, lengths, mode, units, count, biases, both_ways, batch_first = given
        numbers_ = (reverse, mode, units, count, biases, True, both_ways, lengths, batch_first)
        node = self.sketch.op(
            aten.mkldnn_rnn_layer_backward.default, *tensors, *made[:3], *grads, *numbers_, made[3]
        )
        places = [place for place in range(7) if biases or place not in (3, 4)]
        return [self.sketch.op(operator.getitem, node, place) for place in places]

    def grads(self, given: str) -> list[fx.Node | None]:
        """Gradients of the states, of the last one, and of the last cells, where they are asked for."""
        sizes = {"states": (STEPS, ROWS, UNITS), "last": (ROWS, UNITS), "cells": (ROWS, UNITS)}
        return [self.input(*size) if name in given else None for name, size in sizes.items()]

    def check(self, results: list[fx.Node], loops: int) -> Program:
        """The program after the pass, which gives what torch's ops gave."""
        after = recurrent(self.sketch.finish(*results))
        verify(after, after="the pass")
        assert calls_of(after, RECURRENCE) == calls_of(after, RECURRENCE_BACKWARD) == loops
        if loops:
            for got, result in zip(run(after, self.sketch.inputs), results, strict=True):
                torch.testing.assert_close(got, self.sketch.made[result], rtol=1e-4, atol=1e-5)
        return after


@pytest.mark.every_case
@pytest.mark.parametrize("biases", [True, False])
@pytest.mark.parametrize("reverse", [True, False])
@pytest.mark.parametrize("grads", ["states", "last", "states last cells"])
def test_a_layer_and_its_backward(grads: str, reverse: bool, biases: bool) -> None:
    layers = Layers()
    given, made = layers.layer(layers.input(STEPS, ROWS, NUMBERS), reverse=reverse, biases=biases)
    layers.check([*made[:3], *layers.back(given, made, layers.grads(grads))], loops=1)


def test_a_layer_on_another_one() -> None:
    layers = Layers()
    first, below = layers.layer(layers.input(STEPS, ROWS, NUMBERS))
    second, above = layers.layer(below[0])
    of_second = layers.back(second, above, layers.grads("states"))
    of_first = layers.back(first, below, [of_second[0], None, None])
    layers.check([above[0], *of_second[1:], *of_first], loops=2)


def test_two_backwards_of_a_layer() -> None:
    layers = Layers()
    given, made = layers.layer(layers.input(STEPS, ROWS, NUMBERS))
    both = [layers.back(given, made, layers.grads("states")) for _ in range(2)]
    after = recurrent(layers.sketch.finish(*both[0], *both[1]))
    assert calls_of(after, RECURRENCE_BACKWARD) == 2
    for got, result in zip(run(after, layers.sketch.inputs), (*both[0], *both[1]), strict=True):
        torch.testing.assert_close(got, layers.sketch.made[result], rtol=1e-4, atol=1e-5)


def test_last_states_are_memory_of_their_own() -> None:
    """A user who changes the last state in place does not change all states."""
    layers = Layers()
    given, made = layers.layer(layers.input(STEPS, ROWS, NUMBERS))
    after = layers.check([*made[:3], *layers.back(given, made, layers.grads("states"))], loops=1)
    states, last, cells, *_ = run(after, layers.sketch.inputs)
    addresses = {item.untyped_storage().data_ptr() for item in (states, last, cells)}
    assert len(addresses) == 3


def test_layers_that_stay_one_op() -> None:
    half = Layers(torch.bfloat16)
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        given, made = half.layer(half.input(STEPS, ROWS, NUMBERS))
        after = half.check([made[0], *half.back(given, made, half.grads("states"))], loops=0)
        assert calls_of(after, RECURRENT_LAYER) == 1
    alone = Layers()
    _, made = alone.layer(alone.input(STEPS, ROWS, NUMBERS))  # no backward takes what it keeps
    assert calls_of(alone.check([made[0]], loops=0), RECURRENT_LAYER) == 1
    shown = Layers()
    given, made = shown.layer(shown.input(STEPS, ROWS, NUMBERS))
    after = shown.check([made[3], *shown.back(given, made, shown.grads("states"))], loops=0)
    assert calls_of(after, RECURRENT_LAYER) == 1
