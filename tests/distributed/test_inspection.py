"""What looks at a graph, on two ranks: all at once, and one alone."""

from __future__ import annotations

import contextlib
import copy
import io
import time
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import monograph as mg
from tests.distributed.processes import Group
from tests.distributed.training import Case, Wrong, assert_right, local, num_unawaited
from tests.support import assert_same

NAN = float("nan")


class Step(mg.Graph):
    """A step of a net with a buffer that ranks share: wrapped, or with a stage of ZeRO."""

    def __init__(self, stage: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(40, 32), nn.BatchNorm1d(32), nn.Linear(32, 4))
        self.model = net if stage else DistributedDataParallel(net)
        self.add_optimizer(torch.optim.AdamW(net.parameters(), 0.01))
        self.config.backend("aten")
        if stage:
            self.config.enable_zero(stage=stage)

    def build(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.model(x).square().mean()
        loss.backward()
        return loss

    def values(self) -> list[torch.Tensor]:
        """Copies of the state of the model."""
        return [local(item).clone() for item in self.model.to(nn.Module).state_dict().values()]


def batch(rank: int, index: int = 0) -> torch.Tensor:
    return torch.randn(8, 40, generator=torch.Generator().manual_seed(2 * index + rank))


def _looks(rank: int, stage: int) -> None:
    """Each look is right on both ranks, and changes nothing."""
    step, twin, x = Step(stage), Step(stage), batch(rank)
    for _ in range(2):
        assert_same(step(x).detach(), twin(x).detach())
    before = step.values()
    texts: list[Any] = [str(step.show()), str(step.diff("merge_collectives")), str(step.show("capture"))]
    both: list[Any] = [None, None]
    dist.all_gather_object(both, texts)
    assert (both[0] == both[1]) is (stage not in (1, 2))  # whose views are of other rows
    collective = "reduce_scatter" if stage else "all_reduce"
    assert collective in texts[0]
    assert "1 build(s)" in step.explain()
    page = Path(mkdtemp()) / "page.html"
    step.to_html(page)
    assert collective in page.read_text()
    assert min(step.memory(x).peak_bytes, step.memory(x).state_bytes) > 0
    assert any("reduce" in op.op for op in step.profile(x).ops)
    walk = step.replay(x)
    _walked(walk)
    assert step.find_nonfinite(x).found is None
    report = str(step.find_nonfinite(x * NAN if rank == 1 else x))
    assert ("comes from another process" if rank == 0 else "it came in with x") in report
    for against in ("eager", "float64"):
        assert step.verify(x, against=against).ok
    assert num_unawaited() == 0
    assert_same(before, step.values())
    expected = torch.stack([twin(batch(rank, index)).detach() for index in range(3)])
    assert_same(expected, step.many(torch.stack([batch(rank, index) for index in range(3)])).detach())
    assert_same(twin.values(), step.values())


def _walked(walk: Any) -> None:
    """It can be left after any op, and what a collective gives is what its wait gives."""
    made = {}
    while (op := walk.op) is not None:
        walk.step()
        assert num_unawaited() == 0
        made[op.name] = copy.deepcopy(walk.value(op.name))
    assert any("wait_tensor" in name for name in made)
    for name, value in made.items():
        assert_same(value, walk.value(name), name)


def _moved_on(rank: int) -> None:
    """A state that one step has goes into another, and a whole one into parts."""
    first, x = Step(3), batch(rank)
    first(x)
    path = [mkdtemp() + "/state" if rank == 0 else ""]
    dist.broadcast_object_list(path, 0)
    mg.save(first.state_dict(), path[0])
    for built in (False, True):
        for like in (False, True):
            other = Step(3)
            if built:
                other(batch(rank, 5))
            state = mg.load(path[0], like=first.state_dict()) if like else mg.load(path[0])
            other.load_state_dict(state)
            assert_same(_whole(first), _whole(other))
    first(x)
    other(x)
    assert_same(_whole(first), _whole(other))


def _whole(step: Step) -> list[torch.Tensor]:
    found = step.model.to(nn.Module).state_dict().values()
    return [item.full_tensor() if hasattr(item, "full_tensor") else item.clone() for item in found]


def _debug(rank: int) -> None:
    """Which ranks report: the first by itself, others by their numbers, -1 for all."""
    for ranks, reporting in ((None, [0]), (1, [1]), ([0, 1], [0, 1]), (-1, [0, 1])):
        step, said = Step(), io.StringIO()
        step.debug(0, ranks=ranks)
        with contextlib.redirect_stdout(said):
            step(batch(rank))
        assert bool(said.getvalue()) is (rank in reporting), (ranks, said.getvalue())


QUICK: dict[str, Case] = {
    "wrapped": partial(_looks, stage=0),
    "zero 3": partial(_looks, stage=3),
    "moved on": _moved_on,
    "debug": _debug,
}
LONG: dict[str, Case] = {"zero 1": partial(_looks, stage=1)}


@pytest.mark.every_case
@pytest.mark.parametrize("case", QUICK)
def test_inspection(case: str, quick: Wrong) -> None:
    assert_right(case, quick)


@pytest.mark.long
@pytest.mark.parametrize("case", LONG)
def test_more_inspection(case: str, long: Wrong) -> None:
    assert_right(case, long)


def _alone() -> list[str]:
    """The first rank looks while the second does not, or steps."""
    step, rank, said = Step(), dist.get_rank(), []
    x = batch(rank)
    step(x)
    before = step.values()
    if rank == 1:
        while not step_is_wanted():
            time.sleep(0.05)
        step(x)
        return []
    for look in (step.profile, step.verify, step.eager):
        with pytest.raises(mg.DistributedError) as caught:
            look(x)
        assert "on every rank" in caught.value.hint
        said.append(caught.value.message)
        assert_same(before, step.values())
    torch.distributed.group.WORLD.get_group_store().set("wanted", "1")
    step(x)  # nothing was sent yet: ranks may go on
    return said


def step_is_wanted() -> bool:
    store: Any = torch.distributed.group.WORLD.get_group_store()
    return bool(store.check(["wanted"]))


def test_one_rank_alone_is_told() -> None:
    first, last = Group(_alone, 2, seconds=2.0).results()
    assert first.error is None, first.error
    assert last.error is None, last.error
    for name, message in zip(("profile", "verify", "eager"), first.value, strict=True):
        assert f"graph.{name}() waits for all ranks: rank 1 did not come" in message
