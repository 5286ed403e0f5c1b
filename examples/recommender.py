"""A recommender: tables of embeddings for users and items, bags of tags, and gradients of the rows that a batch touches.

Run it with `python examples/recommender.py`.
"""

import torch
from torch import nn

import monograph as mg

USERS, ITEMS, TAGS = 200, 100, 30


class Recommender(nn.Module):
    """Does this user like this item? A small DLRM."""

    def __init__(self, width=16):
        super().__init__()
        self.user = nn.Embedding(USERS, width, sparse=True)
        self.item = nn.Embedding(ITEMS, width, sparse=True)
        self.tags = nn.EmbeddingBag(TAGS, width, mode="mean", sparse=True)
        self.top = nn.Sequential(nn.Linear(3 * width + 3, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, user, item, tags):
        parts = torch.stack([self.user(user), self.item(item), self.tags(tags)], 1)
        crossed = (parts @ parts.mT)[:, [0, 0, 1], [1, 2, 2]]  # how each pair fits
        return self.top(torch.cat([parts.flatten(1), crossed], 1)).squeeze(1)


class Train(mg.Graph):
    """One step of two optimizers: one for the tables, one for the layers on top."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        tables = [*model.user.parameters(), *model.item.parameters(), *model.tags.parameters()]
        self.add_optimizer(torch.optim.SGD(tables, lr=20.0))
        self.add_optimizer(torch.optim.AdamW(model.top.parameters(), lr=0.01))

    def build(self, user, item, tags, liked):
        loss = nn.functional.binary_cross_entropy_with_logits(self.model(user, item, tags), liked)
        loss.backward()
        return loss


def main(steps=600, batch=256):
    torch.manual_seed(0)
    taste, kind = torch.randn(USERS, 2), torch.randn(ITEMS, 2)
    tags_of = torch.randint(TAGS, (ITEMS, 3))

    def drawn(number):
        user, item = torch.randint(USERS, (number,)), torch.randint(ITEMS, (number,))
        return user, item, tags_of[item], ((taste[user] * kind[item]).sum(1) > 0).float()

    model = Recommender()
    step = Train(model)
    losses = []
    for number in range(steps):
        losses.append(step(*drawn(batch)).item())
        if number % 100 == 0:
            print(f"step {number}: loss {losses[-1]:.3f}")
    with torch.no_grad():
        *inputs, liked = drawn(2000)
        right = ((model(*inputs) > 0).float() == liked).float().mean()
    print(f"{right:.1%} of new pairs are right")
    return losses


if __name__ == "__main__":
    main()
