"""Programs put together by chance, at sizes drawn by chance: eager mode's bits at each size, or its refusal.

`MONOGRAPH_EXAMPLES=100 pytest -m long tests/graph/test_drawn_sizes.py` draws a hundred programs.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import reduce

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from tests.graph.sized_programs import Sized
from tests.graph.test_sizes_that_vary import assert_trains_alike

Part = Callable[[Sized, Tensor], Tensor]  # of (rows, length, 8), which has such a result


def attended(_model: Sized, x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], is_causal=True)[:, 0]


def masked(_model: Sized, x: Tensor) -> Tensor:
    above = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
    return (x @ x.transpose(1, 2)).masked_fill(above, 0.0) @ x / x.shape[1]


def placed(model: Sized, x: Tensor) -> Tensor:
    return x + model.table(torch.arange(x.shape[1]) % 50)


def flattened(model: Sized, x: Tensor) -> Tensor:
    rows, length, width = x.shape
    return model.linear(x.reshape(rows * length, width)).view(rows, length, width)


def convolved(model: Sized, x: Tensor) -> Tensor:
    return model.convolution(x.transpose(1, 2)).transpose(1, 2)


def normed(model: Sized, x: Tensor) -> Tensor:
    return model.norm(x.flatten(0, 1)).view_as(x)


def pooled(_model: Sized, x: Tensor) -> Tensor:
    return F.max_pool1d(x.transpose(1, 2), 2, ceil_mode=True).transpose(1, 2)


def branched(_model: Sized, x: Tensor) -> Tensor:
    return x * 2 if x.shape[1] > 5 else x.sin()


def by_parity(_model: Sized, x: Tensor) -> Tensor:
    return x if x.shape[0] % 2 else x.cos()


PARTS: dict[str, Part] = {
    "attended": attended,
    "masked": masked,
    "placed": placed,
    "flattened": flattened,
    "convolved": convolved,
    "normed": normed,
    "pooled": pooled,
    "branched": branched,
    "by_parity": by_parity,
    "linear": lambda model, x: torch.tanh(model.linear(x)),
    "softmax": lambda _model, x: F.softmax(x, 1),
    "turned": lambda _model, x: x.transpose(0, 1),
    "joined": lambda _model, x: torch.cat([x, x[:, :1]], 1),
    "doubled": lambda _model, x: torch.cat([x, -x], 0),
    "shifted": lambda _model, x: F.pad(x[:, :-1], (0, 0, 1, 0)),
    "halved": lambda _model, x: x[:, : (x.shape[1] + 1) // 2],
    "every other": lambda _model, x: x[:, ::2],
    "reversed": lambda _model, x: x.flip(1),
    "rolled": lambda _model, x: x.roll(x.shape[1] // 2, 1),
    "centred": lambda _model, x: x - x.mean(1, keepdim=True),
    "summed": lambda _model, x: x.cumsum(1) / len(x),
    "sorted": lambda _model, x: x.sort(1).values,
    "chosen": lambda _model, x: x.index_select(1, torch.arange(x.shape[1] - 1, -1, -1)),
    "repeated": lambda _model, x: x.repeat_interleave(2, 1)[:, : x.shape[1]],
    "expanded": lambda _model, x: x + x[:, :1].expand(-1, x.shape[1], -1),
    "dropped": lambda model, x: F.dropout(x, 0.25, model.training),
    "scattered": lambda _model, x: torch.zeros_like(x).index_add(1, torch.arange(x.shape[1]) // 2, x),
    "chunks": lambda _model, x: torch.stack(x.chunk(2, 2)).sum(0).repeat(1, 1, 2),
}
SIZES = st.sampled_from([0, 1, 2, 3, 4, 5, 6, 7, 8, 11, 13, 16, 17, 29, 31, 64, 97, 127])
DRAWN = st.tuples(
    st.lists(st.sampled_from(sorted(PARTS)), min_size=1, max_size=5),
    st.lists(st.tuples(SIZES, SIZES), min_size=20, max_size=20),
)


def compare(names: list[str], sizes: list[tuple[int, int]]) -> None:
    def program(model: Sized, x: Tensor) -> Tensor:
        made = reduce(lambda hidden, name: PARTS[name](model, hidden), names, model.linear(x))
        return made.square().sum() / (made.shape[0] * made.shape[1] + 1)

    assert_trains_alike(program, sizes)


@settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(DRAWN)
def test_drawn_programs(drawn: tuple[list[str], list[tuple[int, int]]]) -> None:
    compare(drawn[0], drawn[1][:8])


@pytest.mark.long
@settings(
    max_examples=int(os.environ.get("MONOGRAPH_EXAMPLES", "20")),
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
)
@given(DRAWN)
def test_many_drawn_programs(drawn: tuple[list[str], list[tuple[int, int]]]) -> None:
    compare(*drawn)
