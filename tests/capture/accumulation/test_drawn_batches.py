"""Programs put together by chance under gradient accumulation, at batches and lengths drawn by chance: eager mode's bits.

`MONOGRAPH_EXAMPLES=100 pytest -m long tests/capture/accumulation/test_drawn_batches.py` draws a hundred programs.
"""

from __future__ import annotations

import os
from functools import reduce
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import monograph as mg
from tests.graph.sized_programs import Sized
from tests.graph.test_drawn_sizes import PARTS
from tests.support import assert_same


class Step(mg.Graph):
    """A micro-step of parts; what it gives is joined."""

    def __init__(self, model: Sized, steps: int) -> None:
        super().__init__()
        self.model = model
        self.add_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        self.config.backend("aten")
        self.config.set_gradient_accumulation_steps(steps)

    def build(self, x: torch.Tensor, weights: torch.Tensor) -> Any:
        return micro_step(self.model, x, weights)


def micro_step(model: Sized, x: torch.Tensor, weights: torch.Tensor, steps: int = 1) -> Any:
    made = model(x)
    loss = (made.mean((1, 2)).sum() * weights.mean()) / weights.shape[0]
    (loss / steps).backward()
    return loss, made.flatten(), weights * 2


def eager_step(model: Sized, optimizer: Any, x: torch.Tensor, weights: torch.Tensor, steps: int) -> Any:
    optimizer.zero_grad()
    parts = zip(x.chunk(steps), weights.chunk(steps), strict=True)
    made = [micro_step(model, *part, steps) for part in parts]
    optimizer.step()
    losses, results, doubled = zip(*made, strict=True)
    return torch.stack(losses), torch.cat(results), torch.cat(doubled)


def outcome(run: Any, seed: int) -> tuple[Any, str]:
    """What a step gives, or the text of its error."""
    torch.manual_seed(seed)
    try:
        return [item.detach().clone() for item in run()], ""
    except Exception as error:
        return None, str(error)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:a result of shape")
@settings(
    max_examples=int(os.environ.get("MONOGRAPH_EXAMPLES", "12")),
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
@given(
    names=st.lists(st.sampled_from(sorted(PARTS)), min_size=1, max_size=4),
    steps=st.sampled_from([2, 3, 4]),
    sizes=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 9)), min_size=3, max_size=6),
)
def test_drawn_batches(names: list[str], steps: int, sizes: list[tuple[int, int]]) -> None:
    def program(model: Sized, x: torch.Tensor) -> torch.Tensor:
        return reduce(lambda made, name: PARTS[name](model, made), names, model.linear(x))

    plain, traced = Sized(program), Sized(program)
    optimizer, step = torch.optim.SGD(plain.parameters(), lr=0.1), Step(traced, steps)
    source = torch.Generator().manual_seed(1)
    for seed, (rows, length) in enumerate(sizes):
        x = torch.randn(rows * steps, length, 8, generator=source)
        weights = torch.randn(rows * steps, generator=source)
        before = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
        expected, refused = outcome(
            lambda given=(x, weights): eager_step(plain, optimizer, *given, steps), seed
        )
        got, error = outcome(lambda given=(x, weights): step(*given), seed)
        about = f"{names} at {rows} x {steps} rows of {length}"
        assert bool(refused) == bool(error), f"{about}: {refused or 'no error'} against {error or 'no error'}"
        if refused:
            plain.load_state_dict(before)
        else:
            assert_same(
                [torch.nan_to_num(item) for item in expected], list(map(torch.nan_to_num, got)), about
            )
        assert_same(plain.state_dict(), traced.state_dict(), f"state after {about}")
