"""Trains MobileNetV2 on small images of digits, each step as one static graph.

Run it with `python examples/train_mobilenet.py`; the digits come from scikit-learn.
"""

import torch
from data.images import load_digits
from models.mobilenet_v2 import MobileNetV2
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR

import monograph as mg

EPOCHS = 12
BATCH = 64


class TrainStep(mg.Graph):
    """Forward, loss, backward and the update of the optimizer."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, scheduler: LRScheduler) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = nn.CrossEntropyLoss()
        self.add_optimizer(optimizer, lr_sch=scheduler)

    def build(self, x: Tensor, y: Tensor) -> Tensor:
        loss = self.loss_fn(self.model(x), y)
        loss.backward()
        return loss


def main() -> None:
    torch.manual_seed(0)
    images = load_digits()
    steps_per_epoch = len(images.train_x) // BATCH
    model = MobileNetV2()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    scheduler = OneCycleLR(optimizer, max_lr=0.1, total_steps=EPOCHS * steps_per_epoch)
    step = TrainStep(model, optimizer, scheduler)

    for epoch in range(EPOCHS):
        order = torch.randperm(len(images.train_x))
        for chosen in order[: steps_per_epoch * BATCH].split(BATCH):
            loss = step(images.train_x[chosen], images.train_y[chosen])
        print(f"epoch {epoch + 1:2}  loss {loss.item():.4f}")

    model.eval()
    with torch.no_grad():
        accuracy = (model(images.test_x).argmax(1) == images.test_y).float().mean()
    print(f"held-out accuracy {accuracy:.1%}")


if __name__ == "__main__":
    main()
