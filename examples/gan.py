"""Two networks, two optimizers, one graph: a GAN learns a ring of points. Losses are printed in the step, by `.item()`.

Run it with `python examples/gan.py`.
"""

import torch
from torch import nn

import monograph as mg


def layers(given, made):
    return nn.Sequential(nn.Linear(given, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, made))


class Train(mg.Graph):
    """A step of both: the critic learns to tell points from made ones, then the maker learns to mislead it."""

    def __init__(self, maker, critic):
        super().__init__()
        self.maker, self.critic = maker, critic
        self.add_optimizer(torch.optim.Adam(maker.parameters(), lr=1e-3, betas=(0.5, 0.999)), manual=True)
        self.add_optimizer(torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.999)), manual=True)

    def build(self, points, noise):
        return points, noise


def main(steps=1000):
    torch.manual_seed(0)


if __name__ == "__main__":
    main()
