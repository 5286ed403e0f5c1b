"""accelerate: accumulation over batches, clipping, a schedule, a metric, and a checkpoint to go on from.

python examples/integrations/accelerate_accumulation.py --epochs 6
"""

import argparse
from tempfile import TemporaryDirectory

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import Accuracy

import monograph as mg


class TrainStep(mg.Graph):
    def __init__(self, accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__()
        self.accelerator = accelerator
        self.model = model
        self.add_optimizer(optimizer, manual=True)
        self.optimizer = optimizer
        self.config.keep_gradients()  # from one batch to the next

    def build(self, x: torch.Tensor, y: torch.Tensor, update: bool) -> tuple[torch.Tensor, torch.Tensor]:
        predictions = self.model(x)
        loss = cross_entropy(predictions, y)
        self.accelerator.backward(loss)
        if update:
            self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()  # nothing, where accelerate accumulates
        self.optimizer.zero_grad()
        return loss, predictions.detach()


def main(epochs: int, folder: str) -> None:
    set_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=2)
    x = torch.randn(1024, 16)
    rows = TensorDataset(x, x[:, :4].argmax(1))
    model = nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * 8)
    model, optimizer, scheduler, loader = accelerator.prepare(
        model, optimizer, scheduler, DataLoader(rows, 64, shuffle=True)
    )
    step = TrainStep(accelerator, model, optimizer)
    accuracy = Accuracy("multiclass", num_classes=4).to(accelerator.device)
    for epoch in range(epochs):
        accuracy.reset()
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss, predictions = step(inputs, targets, accelerator.sync_gradients)
                scheduler.step()
            accuracy.update(predictions, targets)
        accelerator.print(f"epoch {epoch}: loss {loss.item():.3f}, {accuracy.compute():.0%} right")
        accelerator.save_state(folder)  # accelerator.load_state(folder) goes on from here
    accelerator.print(f"{len(step.builds)} builds")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=6)
    with TemporaryDirectory() as made:
        main(parser.parse_args().epochs, made)
