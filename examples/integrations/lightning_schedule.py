"""Lightning with a schedule, a metric, validation by a graph, and a run that goes on from a checkpoint.

python examples/integrations/lightning_schedule.py --epochs 5
"""

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory

import lightning as L
import torch
import torchmetrics
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import monograph as mg
from monograph.integrations.lightning import GraphStrategy


class Evaluate(mg.Graph):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def build(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)


class Classifier(L.LightningModule):
    def __init__(self, total_steps: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 4))
        self.evaluate = Evaluate(self.net)
        self.right = torchmetrics.Accuracy("multiclass", num_classes=4)
        self.total_steps = total_steps

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = cross_entropy(self.net(x), y)
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        x, y = batch
        self.right(self.evaluate(x), y)
        self.log("right", self.right)

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=self.total_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main(epochs: int, folder: Path) -> float:
    L.seed_everything(0)
    x = torch.randn(1100, 16)
    rows = TensorDataset(x, x[:, :4].argmax(1))
    training, validation = torch.utils.data.random_split(rows, [1000, 100])
    loaders = DataLoader(training, 64, shuffle=True), DataLoader(validation, 64)
    steps = epochs * len(loaders[0])

    options = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    first = L.Trainer(max_epochs=max(epochs // 2, 1), strategy=GraphStrategy(), **options)
    first.fit(Classifier(steps), *loaders)
    first.save_checkpoint(folder / "half.ckpt")

    second = L.Trainer(max_epochs=epochs, strategy=GraphStrategy(), **options)
    second.fit(Classifier(steps), *loaders, ckpt_path=folder / "half.ckpt")
    right = float(second.callback_metrics["right"])
    print(f"{second.global_step} steps, {right:.0%} right, {len(second.strategy.graph.builds)} builds")
    return right


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    with TemporaryDirectory() as made:
        main(parser.parse_args().epochs, Path(made))
