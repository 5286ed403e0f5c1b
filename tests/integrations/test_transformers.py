"""GraphTrainer trains to the bits of transformers' own Trainer, with its counters and its logs."""

from __future__ import annotations

import doctest
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainerCallback,
)

import monograph as mg
from monograph.integrations import transformers as ours
from monograph.integrations.transformers import GraphTrainer

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
TIMES = ("train_runtime", "eval_runtime", "_per_second", "flos")


def gpt() -> Any:
    torch.manual_seed(0)
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 50, "n_positions": 16}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


def t5() -> Any:
    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "vocab_size": 50}
    return T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0))


def rows(count: int) -> list[dict[str, torch.Tensor]]:
    made = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, 50, (count, 8), generator=made)
    return [{"input_ids": row, "labels": row} for row in tokens]


class Logs(TrainerCallback):  # type: ignore[misc]
    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.rows.append({key: value for key, value in logs.items() if not key.endswith(TIMES)})


def trained(
    kind: Any, folder: Path, model: Any = gpt, resume: str | None = None, callbacks: Any = (), **options: Any
) -> Any:
    """The trainer after training, with what it has logged at `logs`."""
    defaults = {
        "num_train_epochs": 1,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "logging_steps": 1,
    }
    quiet = {"report_to": [], "disable_tqdm": True, "save_strategy": "no", "use_cpu": True}
    arguments = Seq2SeqTrainingArguments(output_dir=str(folder), **{**defaults, **quiet, **options})
    logs = Logs()
    made = kind(
        model=model(),
        args=arguments,
        train_dataset=rows(26),
        eval_dataset=rows(6),
        callbacks=[logs, *callbacks],
    )
    made.train(resume_from_checkpoint=resume)
    made.logs = logs.rows
    return made


def assert_alike(plain: Any, graphed: Any) -> None:
    expected, got = plain.model.state_dict(), graphed.model.state_dict()
    assert [name for name, value in expected.items() if not torch.equal(value, got[name])] == []
    torch.testing.assert_close(plain.optimizer.state_dict(), graphed.optimizer.state_dict(), rtol=0, atol=0)
    assert plain.logs == graphed.logs
    assert plain.state.global_step == graphed.state.global_step


CASES: Mapping[str, dict[str, Any]] = {
    "as it is": {},
    "fused, clipped, a schedule, evaluation": {
        "optim": "adamw_torch_fused", "max_grad_norm": 0.1, "lr_scheduler_type": "cosine", "warmup_steps": 2,
        "eval_strategy": "steps", "eval_steps": 3,
    },
    "accumulation, the last step of fewer batches": {"gradient_accumulation_steps": 4, "num_train_epochs": 2},
    "not clipped": {"max_grad_norm": 0},
    "bfloat16 and recomputation": {"bf16": True, "gradient_checkpointing": True},
    "smoothed labels and noise": {"label_smoothing_factor": 0.1, "neftune_noise_alpha": 5},
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_bits_counters_and_logs_are_those_of_the_trainer(case: str, tmp_path: Path) -> None:
    options = CASES[case]
    graphed = trained(GraphTrainer, tmp_path, **options)
    assert_alike(trained(Trainer, tmp_path, **options), graphed)
    assert len(graphed.graph.builds) <= (5 if "accumulation" in case else 2), graphed.graph.builds
    assert any("grad_norm" in row for row in graphed.logs)


def test_a_last_batch_of_one_row_is_left_out_by_an_option_of_the_trainer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trained(GraphTrainer, tmp_path, per_device_train_batch_size=5, max_steps=6)
    (line,) = [record.getMessage() for record in caplog.records if record.name == "monograph"]
    assert "TrainingArguments(dataloader_drop_last=True) leaves out a smaller last batch" in line
    assert line.endswith("gives to your function; see docs/integrations/transformers.md")


def test_another_trainer_with_its_own_loss(tmp_path: Path) -> None:
    class Weighted(Seq2SeqTrainer):  # type: ignore[misc]
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            outputs = model(**inputs)
            loss = outputs.loss + 0.01 * outputs.logits.square().mean()
            return (loss, outputs) if return_outputs else loss

    class ByGraph(GraphTrainer, Weighted):
        pass

    plain, graphed = (trained(kind, tmp_path, t5) for kind in (Weighted, ByGraph))
    assert_alike(plain, graphed)


def test_saving_leads_to_no_builds(tmp_path: Path) -> None:
    made = trained(GraphTrainer, tmp_path, save_strategy="steps", save_steps=1, max_steps=4)
    assert len(made.graph.builds) == 1, made.graph.builds


def test_training_goes_on_from_a_checkpoint_of_either(tmp_path: Path) -> None:
    """In the middle of an epoch, with dropout: the Trainer keeps random numbers itself."""
    through = trained(Trainer, tmp_path / "through")
    for first, second in ((Trainer, GraphTrainer), (GraphTrainer, GraphTrainer), (GraphTrainer, Trainer)):
        folder = tmp_path / f"{first.__name__} then {second.__name__}"
        saved = {"save_strategy": "steps", "save_steps": 4}
        trained(first, folder, **saved)
        going_on = trained(second, folder, resume=str(folder / "checkpoint-4"), **saved)
        for name, value in through.model.state_dict().items():
            assert torch.equal(value, going_on.model.state_dict()[name]), (first, second, name)


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_the_last_step_is_verified_with_all_of_its_batches(steps: int, tmp_path: Path) -> None:
    """While it trains and after; nothing comes of it."""
    reports = []

    class Looking(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2:
                reports.append(made_by[0].verify())

    made_by: list[Any] = []

    class Looked(GraphTrainer):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            made_by.append(self)
            self.losses: list[float] = []  # no part of the state

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            self.losses.append(loss.item())
            return loss

    options = {"gradient_accumulation_steps": steps, "max_steps": 4}
    plain, made = (
        trained(Trainer, tmp_path, **options),
        trained(Looked, tmp_path, callbacks=[Looking()], **options),
    )
    assert_alike(plain, made)
    count, generator = len(made.graph.builds), torch.get_rng_state()
    reports.append(made.verify())
    assert all(report.ok and not report.made for report in reports), reports
    assert len(made.losses) == {1: 4, 2: 7, 3: 10}[steps]  # of 7 batches in an epoch, and of those after it
    assert len(made.graph.builds) == count
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(parameter.grad is None for parameter in made.model.parameters())
    assert_alike(plain, made)


def test_the_graph_is_configured_and_looked_at(tmp_path: Path) -> None:
    class OnAten(GraphTrainer):
        def __init__(self, **options: Any) -> None:
            super().__init__(configure=lambda config: config.backend("aten"), **options)

    made = trained(OnAten, tmp_path, max_steps=2)
    assert made.graph.backend == "aten"
    inputs = {key: torch.stack([row[key] for row in rows(4)]) for key in ("input_ids", "labels")}
    assert made.graph.verify(inputs, None, True).ok
    explained = str(made.graph.explain())
    assert "values in classes, functions and globals of transformers, which build.guards.texts()" in explained
    assert "GPT2PreTrainedModel." not in explained
    assert "PreTrainedModel." in "\n".join(made.graph.builds[0].guards.texts())
    made.train()
    assert made.graph.backend == "aten"


# --- what is refused -----------------------------------------------------------------------------------------------------


class Watching(TrainerCallback):  # type: ignore[misc]
    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None: ...


REFUSED: Mapping[str, tuple[dict[str, Any], str]] = {
    "torch.compile": ({"torch_compile": True}, "torch_compile=True asks for what no graph heeds"),
    "emptied caches": ({"torch_empty_cache_steps": 2}, "torch_empty_cache_steps=2"),
    "a callback": ({"callbacks": [Watching()]}, "the callback Watching has on_pre_optimizer_step"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_graph_would_not_heed_is_refused_by_name(case: str, tmp_path: Path) -> None:
    options, message = REFUSED[case]
    with pytest.raises(mg.DefinitionError, match=message) as error:
        trained(GraphTrainer, tmp_path, **options)
    assert error.value.hint
    assert error.value.where.file == __file__


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_gpu": 2}, "one process and one device; here is 2 devices"),
        ({"distributed_type": "MULTI_GPU"}, "here is MULTI_GPU"),
        ({"distributed_type": "DEEPSPEED"}, "here is DEEPSPEED"),
        ({"scaler": torch.amp.GradScaler("cpu")}, "fp16 scales gradients"),
        ({"optim": "lomo"}, "the optimizer lomo updates while"),
        ({"optim": "galore_adamw_layerwise"}, "galore_adamw_layerwise updates while"),
    ],
)
def test_what_needs_other_machines_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    """By a stand-in for a Trainer that was started so."""
    of_args = {"n_gpu": 1, "optim": "adamw_torch", **changes}
    kind = ours.DistributedType[changes.get("distributed_type", "NO")]
    trainer: Any = SimpleNamespace(
        args=SimpleNamespace(**of_args),
        accelerator=SimpleNamespace(distributed_type=kind, scaler=changes.get("scaler")),
        callback_handler=SimpleNamespace(callbacks=[]),
    )
    with pytest.raises(mg.DefinitionError, match=message):
        ours._check(trainer)


def test_the_docstrings_run() -> None:
    assert doctest.testmod(ours).failed == 0
