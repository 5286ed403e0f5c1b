"""Every optimizer and scheduler of torch continues from a state of the graph as if there had been no break."""

from __future__ import annotations

import copy
import pickle
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import monograph as mg
from tests.capture.optimizers import test_optimizers, test_schedulers
from tests.capture.optimizers.test_optimizers import Row
from tests.checkpoint.continuation import check_continuation, compiled, trained, untouched, whole
from tests.support import assert_same
from tests.support.small import (
    Classifier,
    PartlyTrained,
    TrainStep,
    WithScale,
    batches,
    eager_trail,
    graph_trail,
    make_side,
    one_thread,  # noqa: F401
)


def optimizer_rows() -> list[Row]:
    """Of each kind the configuration with the most options; of some also several param groups, and a tensor as lr."""
    rows = test_optimizers.ROWS
    chosen = []
    for kind in dict.fromkeys(row.kind for row in rows):
        own = [row for row in rows if row.kind is kind]
        plain = [row for row in own if not isinstance(row.options.get("lr"), torch.Tensor)]
        chosen += [max(plain, key=lambda row: len(row.options))]
        if kind in (torch.optim.Adam, torch.optim.ASGD, torch.optim.SGD, torch.optim.Muon):
            chosen.append(next(row for row in own if row.groups is test_optimizers.two_groups))
        if kind in (torch.optim.Adam, torch.optim.Adafactor, torch.optim.Rprop):
            chosen.append(next(row for row in own if row not in plain))
    dampened = [row for row in rows if "dampening" in row.options]
    return [*chosen, dampened[0], rows[-1]]


@pytest.mark.one_case
@pytest.mark.parametrize("row", optimizer_rows(), ids=str)
def test_every_optimizer_continues(row: Row) -> None:
    place = trained if row.groups is nn.Module.parameters else compiled
    check_continuation(lambda: make_side(row.make, model=row.model), places=(place,))


@pytest.mark.one_case
@pytest.mark.parametrize("name", test_schedulers.ROWS)
def test_every_scheduler_continues(name: str) -> None:
    row, number = test_schedulers.ROWS[name], list(test_schedulers.ROWS).index(name)
    optimizer = row.optimizers[number % len(row.optimizers)]
    check_continuation(lambda: make_side(optimizer, row.make), places=((untouched, trained)[number % 2],))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


class Dropping(Classifier):
    """A classifier that draws random numbers."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(super().forward(tokens), 0.3, self.training)


@pytest.mark.one_case
@pytest.mark.parametrize("model", [Dropping, PartlyTrained, WithScale])
def test_random_numbers_frozen_and_unused_parameters_continue(model: type[nn.Module]) -> None:
    check_continuation(lambda: make_side(adamw, model=model))


def test_a_state_before_the_first_step_starts_again() -> None:
    data = batches(4)
    expected = eager_trail(make_side(adamw, model=Dropping), data)
    for place in (untouched, compiled, trained):
        side, step = untouched(partial(make_side, adamw, model=Dropping), TrainStep)
        saved = copy.deepcopy(step.state_dict())
        side, step = place(partial(make_side, adamw, model=Dropping), TrainStep)
        step.load_state_dict(saved)
        assert_same(expected, graph_trail(side, step, data), place.__name__)


def test_keys_are_those_of_attributes_and_not_of_instances() -> None:
    first, second = (TrainStep(make_side(adamw)) for _ in range(2))
    assert first.name != second.name
    assert list(first.state_dict()) == list(second.state_dict())
    assert list(first.state_dict()) == [
        "model", "optimizer.0", "scheduler.0", "graph.steps", "graph.rng", "graph.about",
    ]  # fmt: skip
    assert first.name not in str(first.state_dict()["graph.about"])


def test_the_parts_have_torchs_own_format() -> None:
    side, step = trained(lambda: make_side(adamw), TrainStep)
    state = step.state_dict()
    assert_same(dict(side.model.state_dict()), dict(state["model"]))
    plain = make_side(adamw)
    plain.model.load_state_dict(state["model"])
    plain.optimizer.load_state_dict(state["optimizer.0"])
    plain.scheduler.load_state_dict(state["scheduler.0"])
    assert_same(side.state(), plain.state())
    again = TrainStep(make_side(adamw))
    again.load_state_dict({"model": plain.model.state_dict()}, strict=False)
    assert_same(dict(plain.model.state_dict()), dict(again.state_dict()["model"]))


def test_the_state_of_an_eager_optimizer_is_loaded_by_its_name(tmp_path: Path) -> None:
    data = batches(6)
    eager = make_side(adamw)
    expected = eager_trail(eager, data[:3])
    torch.save(
        [side_part.state_dict() for side_part in (eager.model, eager.optimizer, eager.scheduler)],
        tmp_path / "eager",
    )
    expected = eager_trail(eager, data[3:])
    side, step = compiled(lambda: make_side(adamw), TrainStep)
    model, optimizer, scheduler = torch.load(tmp_path / "eager")
    step.load_state_dict({"optimizer.0": optimizer}, strict=False)
    step.load_state_dict({"model": model, "scheduler.0": scheduler}, strict=False)
    assert_same(expected, graph_trail(side, step, data[3:]))
    assert len(step.builds) == 1


def test_plain_loading_beside_a_live_graph_stays_right() -> None:
    """torch puts other tensors into the optimizer: the graph follows, and its own loading comes after that too."""
    data = batches(6)
    expected = eager_trail(make_side(adamw), data)
    side, step = untouched(lambda: make_side(adamw), TrainStep)
    graph_trail(side, step, data[:3])
    saved = copy.deepcopy(step.state_dict())
    graph_trail(side, step, data[:2])
    side.model.load_state_dict(saved["model"])
    side.optimizer.load_state_dict(copy.deepcopy(saved["optimizer.0"]))  # torch trains in the tensors it gets
    side.scheduler.load_state_dict(saved["scheduler.0"])
    torch.set_rng_state(saved["graph.rng"]["cpu"])
    assert_same(expected[3:], graph_trail(side, step, data[3:]))
    builds = len(step.builds)
    step.load_state_dict(saved)
    assert_same(expected[3:], graph_trail(side, step, data[3:]))
    assert len(step.builds) == builds


def test_a_loaded_dict_stays_the_users_own() -> None:
    """Training goes on without changing what was loaded, so that it can be loaded again."""
    _, step = trained(lambda: make_side(adamw), TrainStep)
    saved = copy.deepcopy(step.state_dict())
    kept = copy.deepcopy(saved)
    fresh = TrainStep(make_side(adamw))
    fresh.load_state_dict(saved)
    for batch in batches(3):
        fresh(*batch)
    assert_same(kept, saved)


def falling(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)


def test_copied_and_pickled_graphs_continue() -> None:
    data = batches(6)
    expected = eager_trail(make_side(adamw, falling), data)
    side, step = untouched(lambda: make_side(adamw, falling), TrainStep)
    graph_trail(side, step, data[:3])
    losses = [item["loss"] for item in expected[3:]]
    for other in (copy.deepcopy(step), pickle.loads(pickle.dumps(step))):
        assert_same(whole(step), whole(other))
        assert_same(losses, [other(*batch).detach() for batch in data[3:]])
        other.load_state_dict(step.state_dict())
        assert_same(losses, [other(*batch).detach() for batch in data[3:]])


def test_a_state_goes_through_a_file(tmp_path: Path) -> None:
    _, step = trained(lambda: make_side(adamw, model=Dropping), TrainStep)
    mg.save(step.state_dict(python_random=True), tmp_path / "state")
    state, losses = whole(step), [step(*batch) for batch in batches(2)]
    _, fresh = compiled(lambda: make_side(adamw, model=Dropping), TrainStep)
    fresh.load_state_dict(mg.load(tmp_path / "state"))
    assert_same(state, whole(fresh))
    assert_same(losses, [fresh(*batch) for batch in batches(2)])


def test_a_state_that_has_moved_with_its_graph_is_warned_of(recwarn: pytest.WarningsRecorder) -> None:
    _, step = trained(lambda: make_side(adamw), TrainStep)
    live, copied = step.state_dict(), copy.deepcopy(step.state_dict())
    step.load_state_dict(live)  # of now: nothing has moved
    step(*batches(1)[0])
    step.load_state_dict(copied)
    assert not [item for item in recwarn if "live tensors" in str(item.message)]
    step(*batches(1)[0])
    with pytest.warns(
        UserWarning, match=r"the graph's own tensors, as of step \d+, with the counters of"
    ) as caught:
        step.load_state_dict(live)
    assert [item.filename for item in caught if "own tensors" in str(item.message)] == [__file__]
