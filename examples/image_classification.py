"""A convolutional network learns digits: schedule, clipping, accuracy beside the loss, a smaller last batch, a graph for evaluation.

Run it with `python examples/image_classification.py`; the digits come from scikit-learn.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn

import monograph as mg


class Train(mg.Graph):
    """Forward, loss, backward, clipping, the update, and the scheduler."""

    def __init__(self, model, optimizer, scheduler):
        super().__init__()
        self.model = model
        self.add_optimizer(optimizer, lr_sch=scheduler)

    def build(self, x, y):
        predictions = self.model(x)
        loss = nn.functional.cross_entropy(predictions, y)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        return loss, (predictions.argmax(1) == y).sum()


class Evaluate(mg.Graph):
    """How many predictions are right: the same parameters, and no optimizer."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def build(self, x, y):
        return (self.model(x).argmax(1) == y).sum()


def main(epochs=6):
    torch.manual_seed(0)
    digits = load_digits()
    x = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    y = torch.tensor(digits.target)
    model = nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Dropout(0.2), nn.Linear(16 * 16, 10)),
    )
    rows = 1400
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    batches_per_epoch = -(-rows // 64)  # the last one has 56 images
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=epochs * batches_per_epoch)
    train, evaluate = Train(model, optimizer, scheduler), Evaluate(model)
    accuracy = 0.0
    for epoch in range(epochs):
        model.train()
        right = 0
        for chosen in torch.randperm(rows).split(64):
            loss, good = train(x[chosen], y[chosen])
            right += good
        model.eval()
        with torch.no_grad():
            accuracy = evaluate(x[rows:], y[rows:]).item() / len(x[rows:])
        print(f"epoch {epoch}: loss {loss.item():.3f}, {right / rows:.1%} right, held out {accuracy:.1%}")
    return accuracy


if __name__ == "__main__":
    main()
