"""What a step reads of its Trainer and writes there: at each step, as the Trainer's own loop does it."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Seq2SeqTrainer, Trainer, TrainerCallback

import monograph as mg
from monograph.integrations.transformers import GraphTrainer
from tests.integrations.test_transformers import assert_alike, gpt, trained

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


class Numbers(Trainer):  # type: ignore[misc]
    """Numbers of its own, of its state and of its arguments; and a counter, an average, and lists."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.alpha, self.calls, self.counts = 1.0, 0, {"batches": 0}
        self.average, self.last = torch.zeros(()), torch.zeros(())
        self.losses: list[torch.Tensor] = []

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        self.counts["batches"] += 1
        self.calls = self.calls + 1
        loss = super().compute_loss(model, inputs, *args, **options) * self.alpha
        loss = loss * (1 + 0.1 * self.state.global_step) / self.calls
        if self.state.epoch >= 0.5:
            loss = 2 * loss
        self.average = 0.9 * self.average + 0.1 * loss.detach()
        self.last = loss.detach()
        self.losses.append(loss.detach())
        return loss + self.average

    @property
    def left(self) -> list[Any]:
        tensors = [self.average, self.last, *self.losses]
        return [self.calls, self.counts, [tensor.item() for tensor in tensors]]


class Teacher(Trainer):  # type: ignore[misc]
    """Another model and a tensor, both replaced now and then."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.teacher, self.weights = gpt().eval(), torch.ones(50)

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        logits = model(input_ids=inputs["input_ids"]).logits
        with torch.no_grad():
            expected = self.teacher(input_ids=inputs["input_ids"]).logits
        return ((logits - 3 * expected).square() * self.weights).mean()


class Moving(TrainerCallback):  # type: ignore[misc]
    """What users change between two steps."""

    def __init__(self) -> None:
        self.trainer: Any = None

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        trainer = self.trainer
        if hasattr(trainer, "alpha"):
            trainer.alpha *= 0.8
        if trainer.label_smoother is not None and state.global_step == 2:
            args.max_grad_norm = 0.01
            trainer.label_smoother.epsilon = 0.5
        if hasattr(trainer, "teacher") and state.global_step % 2 == 0:
            trainer.teacher, trainer.weights = copy.deepcopy(model).eval(), trainer.weights * 0.9


def moved(kind: Any, folder: Path, **options: Any) -> Any:
    """A trainer of this kind after training, while a callback changed it."""
    moving = Moving()

    class Known(kind):  # type: ignore[misc]
        def __init__(self, **given: Any) -> None:
            super().__init__(**given)
            moving.trainer = self

    return trained(Known, folder, callbacks=[moving], **options)


def graphed(kind: Any) -> Any:
    return type("Graphed", (kind, GraphTrainer), {})


def test_what_users_change_between_steps_and_what_a_loss_leaves(tmp_path: Path) -> None:
    options = {"learning_rate": 1e-3}
    plain, made = (moved(kind, tmp_path, **options) for kind in (Numbers, graphed(Numbers)))
    assert_alike(plain, made)
    assert plain.left == made.left
    assert len(made.graph.builds) <= 5, made.graph.builds


def test_clipping_and_smoothing_change_with_what_they_are_set_to(tmp_path: Path) -> None:
    """Of a Trainer that is nobody's own."""
    options = {"label_smoothing_factor": 0.1, "max_steps": 4}
    plain, made = (moved(kind, tmp_path, **options) for kind in (Seq2SeqTrainer, GraphTrainer))
    assert_alike(plain, made)
    assert len(made.graph.builds) == 2, made.graph.builds


def test_another_model_and_a_replaced_tensor_of_the_trainer(tmp_path: Path) -> None:
    plain, made = (moved(kind, tmp_path, max_steps=4) for kind in (Teacher, graphed(Teacher)))
    assert_alike(plain, made)
    assert len(made.graph.builds) == 2, made.graph.builds


def test_what_only_the_loop_moves_leads_to_no_build(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Counters of the Trainer in accumulated steps: builds come of gradients and of updates, which nobody is to change."""
    with caplog.at_level(logging.INFO, "monograph"):
        made = trained(GraphTrainer, tmp_path, gradient_accumulation_steps=3, max_steps=2)
    assert len(made.graph.builds) == 3, made.graph.builds
    said = [item for item in caplog.records if "TrainerStep" in item.message and ": build " in item.message]
    assert [item.levelname for item in said] == ["INFO"] * 2
    assert not any("pass a tensor" in item.message or "give the same" in item.message for item in said)


def test_verify_takes_the_last_step_and_the_build_that_made_it(tmp_path: Path) -> None:
    made = trained(GraphTrainer, tmp_path, max_steps=2)
    made.save_model(str(tmp_path))  # which writes into the configuration of the model
    made.model.eval()
    report = made.verify()
    assert report.ok, report
    assert not report.made
    assert not made.model.training
    assert len(made.graph.builds) == 1
    inputs = made.data_collator(made.train_dataset[:4])
    other = made.graph.verify(inputs, None, True)
    assert other.ok
    assert other.made.startswith("build 1 was made for it (")
    assert "no build of the graph served this call: build 1 was made for it" in str(other)


def test_verify_before_the_first_step_is_told(tmp_path: Path) -> None:
    made = trained(GraphTrainer, tmp_path, max_steps=0, num_train_epochs=0)
    with pytest.raises(mg.DefinitionError, match="made no step"):
        made.verify()


class Holding(Trainer):  # type: ignore[misc]
    """Leaves an object of its own in a list."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.kept: list[Any] = []

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        loss = super().compute_loss(model, inputs, *args, **options)
        self.kept.append(self.held(loss.detach()))
        return loss

    def held(self, loss: torch.Tensor) -> Any:
        return SimpleNamespace(loss=loss)


class HoldingFunctions(Holding):
    """Leaves functions there that know the loss."""

    def held(self, loss: torch.Tensor) -> Any:
        return lambda: loss


def test_objects_in_a_list_hold_the_losses_of_their_steps(tmp_path: Path) -> None:
    plain, made = (trained(kind, tmp_path, max_steps=4) for kind in (Holding, graphed(Holding)))
    assert_alike(plain, made)
    assert [item.loss.item() for item in plain.kept] == [item.loss.item() for item in made.kept]
    assert len(made.graph.builds) == 1, made.graph.builds


def test_what_no_replay_can_leave_is_told_at_a_line_of_the_user(tmp_path: Path) -> None:
    with pytest.raises(mg.CaptureError, match=r"into graph\.trainer\.kept, and no replay") as caught:
        trained(graphed(HoldingFunctions), tmp_path, max_steps=1)
    assert "tests/integrations" in caught.value.where.file
