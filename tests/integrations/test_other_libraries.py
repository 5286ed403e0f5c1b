"""Loops of accelerate have the same bits by a graph, and logs and metrics of other libraries have its numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import set_seed
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.tensorboard import SummaryWriter
from torchmetrics import Accuracy

import monograph as mg

EPOCHS = 2


def rows() -> TensorDataset:
    made = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(100, 20, generator=made), torch.randint(3, (100,), generator=made))


class Accelerated:
    """What `prepare()` gives, and a loop over it: by `step`, or plain."""

    def __init__(self, graph: type[mg.Graph] | None, **options: Any) -> None:
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        self.accelerator = Accelerator(cpu=True, **options)
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 3))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        schedule = OneCycleLR(optimizer, 0.01, total_steps=40)
        loader: Any = DataLoader(rows(), 16, shuffle=True)
        prepared = self.accelerator.prepare(model, optimizer, loader, schedule)
        self.model, self.optimizer, self.loader, self.schedule = prepared
        self.step: Any = graph and graph(self.accelerator, self.model, self.optimizer)  # type: ignore[call-arg]
        self.seen: list[tuple[float, float]] = []
        set_seed(5)

    def epoch(self) -> None:
        for x, y in self.loader:
            with self.accelerator.accumulate(self.model):
                if self.step is None:
                    loss = cross_entropy(self.model(x), y)
                    self.accelerator.backward(loss)
                    if self.accelerator.sync_gradients:
                        self.accelerator.clip_grad_norm_(self.model.parameters(), 0.1)
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                else:
                    loss = self.step(x, y, self.accelerator.sync_gradients)
                self.schedule.step()
            self.seen.append((loss.item(), self.optimizer.param_groups[0]["lr"]))


class Step(mg.Graph):
    def __init__(self, accelerator: Any, model: nn.Module, optimizer: Any) -> None:
        super().__init__()
        self.accelerator, self.model = accelerator, model
        self.add_optimizer(optimizer)

    def build(self, x: torch.Tensor, y: torch.Tensor, update: bool) -> torch.Tensor:
        loss = cross_entropy(self.model(x), y)
        self.accelerator.backward(loss)
        self.accelerator.clip_grad_norm_(self.model.parameters(), 0.1)
        return loss


class Accumulating(mg.Graph):
    def __init__(self, accelerator: Any, model: nn.Module, optimizer: Any) -> None:
        super().__init__()
        self.accelerator, self.model = accelerator, model
        self.add_optimizer(optimizer, manual=True)
        self.optimizer = optimizer
        self.config.keep_gradients()

    def build(self, x: torch.Tensor, y: torch.Tensor, update: bool) -> torch.Tensor:
        loss = cross_entropy(self.model(x), y)
        self.accelerator.backward(loss)
        if update:
            self.accelerator.clip_grad_norm_(self.model.parameters(), 0.1)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss


@pytest.mark.parametrize(
    ("graph", "options", "most"),
    [
        (Step, {}, 3),
        (Step, {"mixed_precision": "bf16"}, 3),
        (Accumulating, {"gradient_accumulation_steps": 3}, 6),
    ],
)
def test_the_loop_of_accelerate(graph: Any, options: dict[str, Any], most: int) -> None:
    runs = []
    for kind in (None, graph):
        runs.append(made := Accelerated(kind, **options))
        for _ in range(EPOCHS):
            made.epoch()
    plain, graphed = runs
    assert plain.seen == graphed.seen
    assert all(map(torch.equal, plain.model.state_dict().values(), graphed.model.state_dict().values()))
    assert len(graphed.step.builds) <= most, graphed.step.builds


def test_training_goes_on_from_what_accelerate_has_saved(tmp_path: Path) -> None:
    through = Accelerated(Step)
    through.epoch()
    through.accelerator.save_state(str(tmp_path / "state"))
    through.epoch()
    going_on = Accelerated(Step)
    going_on.accelerator.load_state(str(tmp_path / "state"))
    going_on.epoch()
    assert through.seen[-len(going_on.seen) :] == going_on.seen
    assert all(map(torch.equal, through.model.parameters(), going_on.model.parameters()))


def test_wrappers_that_do_not_fit_are_told_with_what_to_pass() -> None:
    made = Accelerated(None)
    with pytest.raises(mg.OptimizerError, match="got a AcceleratedScheduler") as caught:
        mg.train_graph(made.model, cross_entropy, made.optimizer, lr_sch=made.schedule)
    assert "lr_sch=scheduler.scheduler" in caught.value.hint
    made.accelerator.scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(mg.CaptureError, match="a gradient scaler that the graph does not know") as told:
        Step(made.accelerator, made.model, made.optimizer)(*next(iter(made.loader)), True)
    assert "self.set_grad_scaler(scaler)" in told.value.hint


def test_a_scheduler_given_and_stepped_through_accelerate_is_told() -> None:
    made = Accelerated(None)
    step = mg.train_graph(made.model, cross_entropy, made.optimizer, lr_sch=made.schedule.scheduler)
    x, y = next(iter(made.loader))
    step(x, y)
    made.schedule.step()
    with pytest.warns(UserWarning, match="the learning rate moves twice"):
        step(x, y)


def test_logs_of_tensorboard_and_a_metric_in_the_step(tmp_path: Path) -> None:
    class Counting(mg.Graph):
        def __init__(self, model: nn.Module, optimizer: Any) -> None:
            super().__init__()
            self.model = model
            self.right = Accuracy("multiclass", num_classes=3)
            self.add_optimizer(optimizer)

        def build(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            predictions = self.model(x)
            self.right.update(predictions, y)
            loss = cross_entropy(predictions, y)
            loss.backward()
            return loss

    def train(graphed: bool) -> tuple[list[float], torch.Tensor]:
        torch.manual_seed(1)
        model = nn.Linear(20, 3)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        step: Any = Counting(model, optimizer)
        with SummaryWriter(str(tmp_path / str(graphed))) as writer:
            for index, (x, y) in enumerate(DataLoader(rows(), 32)):
                optimizer.zero_grad()
                writer.add_scalar("loss", (step if graphed else step.eager)(x, y), index)
        return read(tmp_path / str(graphed)), step.right.compute()

    def read(folder: Path) -> list[float]:
        events = EventAccumulator(str(folder))
        events.Reload()
        return [event.value for event in events.Scalars("loss")]

    expected, got = train(False), train(True)
    assert expected == got
    assert len(got[0]) == 4
