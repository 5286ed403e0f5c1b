"""A graph that a function under `torch.compile` calls, or that is given to it, trains as ever."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import monograph as mg
from tests.support import assert_same


def _step() -> mg.Graph:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    return mg.train_graph(model, nn.MSELoss(), torch.optim.AdamW(model.parameters()))


@pytest.fixture(autouse=True)
def _dynamo() -> None:
    """Dynamo replaces `nn.Module.__init__` when it compiles first, of which a graph takes notice."""
    torch.compile(torch.relu, backend="eager")(torch.ones(1))


@pytest.mark.long  # Dynamo is imported
def test_a_compiled_function_calls_it() -> None:
    plain, step = _step(), _step()
    compiled = torch.compile(lambda x, y: step(torch.relu(x), y) + 1, backend="eager")
    for index in range(3):
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(index))
        assert_same(plain(torch.relu(x), x) + 1, compiled(x, x))
    assert_same(plain.state_dict(), step.state_dict())
    assert len(step.builds) == 1


@pytest.mark.long
def test_a_compiled_function_that_must_be_whole_says_why_not() -> None:
    step = _step()
    compiled = torch.compile(lambda x: step(x, x) * 2, backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="a graph is one program already"):
        compiled(torch.ones(5, 4))


@pytest.mark.long
def test_it_is_compiled_itself() -> None:
    plain, step = _step(), _step()
    compiled = torch.compile(step, backend="eager")
    many = torch.compile(step.many, backend="eager")
    x = torch.randn(2, 5, 4)
    for part in x:
        assert_same(plain(part, part), compiled(part, part))
    assert_same(plain.many(x, x), many(x, x))
    assert len(step.builds) == 1
