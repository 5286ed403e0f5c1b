"""A LightningModule under GraphStrategy trains to the bits of Lightning's own loop, with its counters and its logs."""

from __future__ import annotations

import doctest
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torchmetrics
from lightning.pytorch.callbacks import (
    Callback,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset

import monograph as mg
from monograph.integrations import lightning as ours
from monograph.integrations.lightning import GraphStrategy

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:lightning", "ignore::FutureWarning")
BATCHES = 4  # of an epoch, the last one smaller


class Net(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(
            nn.Linear(20, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 3)
        )

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = cross_entropy(self.net(x), y)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Full(Net):
    """A schedule, a metric that keeps state, validation by a graph, and the norm of the gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=3, average="macro")
        self.evaluate = Evaluate(self.net)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        predictions = self.net(x)
        loss = cross_entropy(predictions, y)
        self.accuracy(predictions, y)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.log_dict({"loss": loss, "twice": 2 * loss}, on_epoch=True, batch_size=len(x))
        return {"loss": loss, "predictions": predictions.detach()}

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norm = nn.utils.get_total_norm([p.grad for p in self.net.parameters() if p.grad is not None])
        self.log("norm", norm)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("largest", outputs["predictions"].max())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("validation", self.evaluate(*batch))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        schedule = OneCycleLR(optimizer, 0.01, total_steps=5 * BATCHES)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class TwoMetrics(Full):
    """Metrics of training and of validation, which begin anew with each epoch, and a list of all losses."""

    def __init__(self) -> None:
        super().__init__()
        self.losses = list[torch.Tensor]()
        self.validated = torchmetrics.Accuracy("multiclass", num_classes=3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        made = super().training_step(batch, batch_idx)
        self.losses.append(made["loss"].detach())
        return made

    def on_train_epoch_end(self) -> None:
        self.log("mean", torch.stack(self.losses).mean())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.validated(self.net(batch[0]), batch[1])
        self.log("validated", self.validated)


class Evaluate(mg.Graph):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def build(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return cross_entropy(self.model(x), y)


class ByCounters(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if batch_idx % 2 == 0:
            self.log("even", loss * (1 + self.global_step))
        return loss / (1 + batch_idx + self.current_epoch)


class Remembering(Net):
    """A weight that a hook moves, a counter, the last loss, and a list of all."""

    def __init__(self) -> None:
        super().__init__()
        self.alpha, self.calls, self.losses = 1.0, 0, list[torch.Tensor]()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        self.calls = self.calls + 1
        loss = cross_entropy(self.net(x), y) * self.alpha / self.calls
        self.last = loss.detach()
        self.losses.append(loss.detach())
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        self.alpha *= 0.9
        self.log("last", self.last)

    def on_train_epoch_end(self) -> None:
        self.log("mean", torch.stack(self.losses).mean())
        self.log("calls", float(self.calls))
        self.losses.clear()


class Clipping(Callback):
    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        trainer.gradient_clip_val = 0.01


class WarmedUp(Net):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.001 * (1 + self.global_step)
        optimizer.step(closure=closure)


class OnPlateau(Net):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": ReduceLROnPlateau(optimizer, patience=0), "monitor": "loss"},
        }


class Searched(Net):
    lr = 0.01

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)

    def train_dataloader(self) -> Any:
        return loader()


class Cleared(Net):
    """Where averaged weights run once more for their BatchNorms, Lightning steps with the gradients of the last batch."""

    def on_train_batch_end(self, *args: Any) -> None:
        self.zero_grad()


class Rows(Logger):
    def __init__(self) -> None:
        super().__init__()
        self.rows: list[Any] = []

    @property
    def name(self) -> str:
        return "rows"

    version = name

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.rows.append((step, metrics))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...


def loader() -> Any:
    made = torch.Generator().manual_seed(0)
    rows = TensorDataset(torch.randn(100, 20, generator=made), torch.randint(3, (100,), generator=made))
    return DataLoader(rows, batch_size=32, shuffle=True)


def trainer(folder: Path, **options: Any) -> Any:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "log_every_n_steps": 1}
    defaults = {"max_epochs": 2, "accelerator": "cpu", "logger": Rows(), "enable_checkpointing": False}
    return L.Trainer(**{**quiet, **defaults, "default_root_dir": folder, **options})


def fitted(module: Any, folder: Path, ckpt_path: Path | None = None, **options: Any) -> Any:
    """The trainer after training; its module is at `lightning_module`."""
    made = trainer(folder, **options)
    torch.manual_seed(5)
    validation = loader() if hasattr(module, "evaluate") else None
    made.fit(module, loader(), validation, ckpt_path=ckpt_path)
    return made


def assert_alike(plain: Any, graphed: Any) -> None:
    expected, got = plain.lightning_module.state_dict(), graphed.lightning_module.state_dict()
    assert [name for name, value in expected.items() if not torch.equal(value, got[name])] == []
    torch.testing.assert_close(
        plain.optimizers[0].state_dict(), graphed.optimizers[0].state_dict(), rtol=0, atol=0
    )
    scaler = plain.precision_plugin.state_dict()
    assert scaler == graphed.precision_plugin.state_dict()
    assert not scaler or scaler["scale"] < SCALE
    assert plain.logger.rows == graphed.logger.rows
    assert plain.callback_metrics == graphed.callback_metrics
    assert plain.global_step == graphed.global_step > 0


SCALE = 2.0**20  # so that some steps are skipped


def float16() -> MixedPrecision:
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=SCALE))


CASES: dict[str, tuple[type[Net], Callable[[], dict[str, Any]]]] = {
    "all that a module has": (Full, dict),
    "metrics in each of five epochs": (TwoMetrics, lambda: {"max_epochs": 5}),
    "clipped by norm": (Net, lambda: {"gradient_clip_val": 0.1}),
    "clipped by value": (Net, lambda: {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "bfloat16": (Net, lambda: {"precision": "bf16-mixed"}),
    "float16 with a scaler": (
        Net,
        lambda: {"gradient_clip_val": 0.1, "plugins": float16()},
    ),
    "counters": (ByCounters, dict),
    "accumulation, float16": (
        Net,
        lambda: {"accumulate_grad_batches": 2, "plugins": float16(), "max_epochs": 4},
    ),
    "accumulation": (Full, lambda: {"accumulate_grad_batches": 3, "gradient_clip_val": 0.1}),
    "accumulation from the second epoch on": (
        Net,
        lambda: {"callbacks": [GradientAccumulationScheduler({1: 2})], "precision": "bf16-mixed"},
    ),
    "a warm-up in optimizer_step": (WarmedUp, dict),
    "what hooks and callbacks change": (
        Remembering,
        lambda: {"gradient_clip_val": 0.5, "callbacks": [Clipping()]},
    ),
    "a schedule by a metric": (OnPlateau, dict),
    "averaged weights": (
        Cleared,
        lambda: {"callbacks": [WeightAveraging(), StochasticWeightAveraging(0.01, 1)]},
    ),
    "a rate that is searched first": (
        Searched,
        lambda: {"callbacks": [LearningRateFinder(num_training_steps=4)]},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_bits_counters_and_logs_are_those_of_lightning(case: str, tmp_path: Path) -> None:
    kind, options = CASES[case]
    graphed = fitted(kind(), tmp_path, strategy=GraphStrategy(), **options())
    assert_alike(fitted(kind(), tmp_path, **options()), graphed)
    most = {Full: 4, TwoMetrics: 4, ByCounters: 6, Searched: 4, Remembering: 5}.get(
        kind, 2
    )  # a metric has a value from its second step on
    most = most + 4 if "accumulation" in case else most
    assert len(graphed.strategy.graph.builds) <= most, graphed.strategy.graph.builds


@pytest.mark.parametrize("graphed", [False, True])
def test_training_goes_on_from_a_file_of_lightning(graphed: bool, tmp_path: Path) -> None:
    """Each kind of loop goes on from the file of the other."""

    def strategy(mine: bool) -> dict[str, Any]:
        return {"strategy": GraphStrategy()} if mine else {}

    first = fitted(Full(), tmp_path, max_epochs=1, **strategy(graphed))
    first.save_checkpoint(path := tmp_path / "first.ckpt")
    runs = [fitted(Full(), tmp_path, ckpt_path=path, **strategy(mine)) for mine in (False, True)]
    assert_alike(*runs)


def test_the_state_of_the_graph_can_be_saved(tmp_path: Path) -> None:
    """It has the random numbers as well, which a file of Lightning does not have."""

    class Going(Callback):
        def on_fit_start(self, trainer: Any, module: Any) -> None:
            trainer.strategy.graph.load_state_dict(mg.load(tmp_path / "state"))

    first = fitted(Net(), tmp_path, max_epochs=1, strategy=GraphStrategy())
    mg.save(first.strategy.graph.state_dict(), tmp_path / "state")
    going_on = fitted(Net(), tmp_path, max_epochs=1, strategy=GraphStrategy(), callbacks=Going())
    through = fitted(Net(), tmp_path, max_epochs=2)
    for name, value in through.lightning_module.state_dict().items():
        assert torch.equal(value, going_on.lightning_module.state_dict()[name]), name


def test_the_graph_is_configured_and_looked_at(tmp_path: Path) -> None:
    strategy = GraphStrategy(configure=lambda config: config.backend("aten"))
    made = fitted(Net(), tmp_path, max_epochs=1, strategy=strategy)
    assert strategy.graph.backend == "aten"
    first = strategy.graph
    assert first.verify(next(iter(loader())), 0, True).ok
    report = strategy.verify()
    assert report.ok, report
    assert not report.made  # by the build that made the last step
    with pytest.raises(mg.DefinitionError, match="made no step"):
        GraphStrategy().verify()
    made.fit_loop.max_epochs = 2
    made.fit(made.lightning_module, loader())
    assert strategy.graph is not first  # each fit() has an optimizer of its own
    assert strategy.graph.backend == "aten"


def test_the_last_step_is_verified_with_all_of_its_batches(tmp_path: Path) -> None:
    strategy = GraphStrategy()
    options = {"accumulate_grad_batches": 2, "max_epochs": 2}
    made = fitted(Net(), tmp_path, strategy=strategy, **options)
    plain, count = fitted(Net(), tmp_path, **options), len(strategy.graph.builds)
    report = strategy.verify()
    assert report.ok, report
    assert not report.made
    assert len(strategy.graph.builds) == count
    assert_alike(plain, made)


def test_a_module_has_its_hooks_again(tmp_path: Path) -> None:
    """After training with accumulation, which clears gradients itself."""
    modules = [Net(), Net()]
    fitted(modules[0], tmp_path, accumulate_grad_batches=2, strategy=GraphStrategy())
    fitted(modules[1], tmp_path, accumulate_grad_batches=2)
    assert_alike(*(fitted(module, tmp_path) for module in modules))


# --- manual optimization ------------------------------------------------------------------------------------------------


class Manual(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        self.clip_gradients(optimizer, 0.1, "norm")
        optimizer.step()


class ManualStep(mg.Graph):
    def __init__(self, model: nn.Module, optimizer: Any) -> None:
        super().__init__()
        self.model = model
        self.add_optimizer(optimizer)

    def build(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = cross_entropy(self.model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        return loss


class ManualByGraph(Manual):
    def on_fit_start(self) -> None:
        self.step = ManualStep(self.net, self.optimizers())  # a LightningOptimizer, which counts the steps

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.step(*batch), on_step=True, on_epoch=True)


def test_manual_optimization_by_a_graph_of_the_module(tmp_path: Path) -> None:
    graphed = fitted(ManualByGraph(), tmp_path)
    assert_alike(fitted(Manual(), tmp_path), graphed)
    assert len(graphed.lightning_module.step.builds) == 2


class SavesItsList(TwoMetrics):
    def on_save_checkpoint(self, checkpoint: Any) -> None:
        checkpoint["losses"] = self.losses

    def on_load_checkpoint(self, checkpoint: Any) -> None:
        self.losses = checkpoint["losses"]


class RandomNumbers(Callback):
    """As the page on Lightning has it."""

    state = None

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: Any) -> None:
        checkpoint["random"] = torch.get_rng_state()

    def on_load_checkpoint(self, trainer: Any, module: Any, checkpoint: Any) -> None:
        self.state = checkpoint["random"]

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        if self.state is not None:
            torch.set_rng_state(self.state)


@pytest.mark.parametrize("kind", [SavesItsList, ManualByGraph])
def test_a_run_from_a_file_with_random_numbers_has_the_bits_of_one_without_a_break(
    kind: type[Net], tmp_path: Path
) -> None:
    def run(folder: str, **options: Any) -> Any:
        strategy = {} if kind is ManualByGraph else {"strategy": GraphStrategy()}
        kept = ModelCheckpoint(tmp_path / folder, "{epoch}", save_top_k=-1)
        options |= strategy | {"callbacks": [RandomNumbers(), kept], "enable_checkpointing": True}
        return fitted(kind(), tmp_path, max_epochs=4, **options)

    whole = run("whole")
    resumed = run("resumed", ckpt_path=tmp_path / "whole" / "epoch=1.ckpt")
    rows = whole.logger.rows
    assert resumed.logger.rows == rows[len(rows) - len(resumed.logger.rows) :]
    resumed.logger.rows[:] = rows
    assert_alike(whole, resumed)


# --- what is refused -----------------------------------------------------------------------------------------------------


class Watching(Callback):
    def on_after_backward(self, *args: Any) -> None: ...


class Clearing(Net):
    def optimizer_zero_grad(self, *args: Any) -> None: ...


class NoOptimizer(Net):
    def configure_optimizers(self) -> None: ...


class Skipping(Net):
    def training_step(self, batch: Any, batch_idx: int) -> None: ...


class ByIterator(Net):
    def training_step(self, dataloader_iter: Any) -> None: ...  # type: ignore[override]


class ByLBFGS(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


REFUSED: dict[str, tuple[type[Net], dict[str, Any], str]] = {
    "clears gradients": (Clearing, {"accumulate_grad_batches": 2}, "Clearing has optimizer_zero_grad"),
    "half": (Net, {"precision": "bf16-true"}, "precision 'bf16-true' \\(HalfPrecision\\)"),
    "double": (Net, {"precision": "64-true"}, "precision '64-true' \\(DoublePrecision\\)"),
    "devices": (Net, {"devices": 2}, "was given 2 devices and 1 nodes"),
    "nodes": (Net, {"num_nodes": 2}, "was given 1 devices and 2 nodes"),
    "anomaly": (Net, {"detect_anomaly": True}, "detect_anomaly looks at autograd"),
    "a hook of a callback": (Net, {"callbacks": Watching()}, "the callback Watching has on_after_backward"),
    "manual": (Manual, {}, "Manual has manual optimization"),
    "no optimizer": (NoOptimizer, {}, "NoOptimizer.configure_optimizers\\(\\) gives no optimizer"),
    "no loss": (Skipping, {}, "Skipping.training_step\\(\\) gave None"),
    "an iterator": (ByIterator, {}, "ByIterator.training_step\\(\\) takes an iterator"),
    "LBFGS": (ByLBFGS, {}, "LBFGS cannot be captured"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_graph_would_not_heed_is_refused_by_name(case: str, tmp_path: Path) -> None:
    kind, options, message = REFUSED[case]
    torch.autograd.set_detect_anomaly(False)
    with pytest.raises(mg.MonographError, match=message) as error:
        fitted(kind(), tmp_path, strategy=GraphStrategy(), **options)
    assert error.value.hint
    if type(error.value) is mg.DefinitionError:
        assert error.value.where.file == __file__


class Wrong(Net):
    """What is wrong in each, and met through Lightning."""

    def on_train_batch_end(self, *args: Any) -> None:
        self.clip_gradients(self.optimizers(), 0.1, "norm")


class InEvalMode(Net):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.train(batch_idx != 1)


class ValidatesByTraining(Net):
    evaluate = True

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.trainer.strategy.graph(batch, batch_idx, True)


@pytest.mark.parametrize(
    ("kind", "message"), [(Wrong, "gradients are clipped after"), (InEvalMode, "in eval\\(\\) mode")]
)
def test_silent_mistakes_are_told_at_the_users_line(kind: type[Net], message: str, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=message) as told:
        fitted(kind(), tmp_path, strategy=GraphStrategy())
    assert [item.filename for item in told if "Lightning" in str(item.message)] == [__file__]


def test_validation_through_the_training_graph_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(mg.CaptureError, match="to validate, use a Graph without optimizer"):
        fitted(ValidatesByTraining(), tmp_path, strategy=GraphStrategy(), num_sanity_val_steps=1)


def test_the_docstrings_run() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert doctest.testmod(ours).failed == 0
