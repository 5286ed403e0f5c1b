"""Two networks, two optimizers, one graph: a GAN learns a ring of points. The step keeps its losses in a list, by `.item()`.

Run it with `python examples/gan.py`.
"""

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as cross_entropy

import monograph as mg


def layers(given, made):
    return nn.Sequential(nn.Linear(given, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, made))


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.5, 0.999))


class Train(mg.Graph):
    """A step of both: the critic learns to tell points from made ones, then the maker learns to mislead it."""

    def __init__(self, maker, critic):
        super().__init__()
        self.maker, self.critic = maker, critic
        maker_adam, critic_adam = adam(maker), adam(critic)
        self.add_optimizer(maker_adam, manual=True)  # build() steps both
        self.add_optimizer(critic_adam, manual=True)
        self.maker_adam, self.critic_adam = maker_adam, critic_adam
        self.losses = []

    def build(self, points, noise):
        made = self.maker(noise)
        true, false = torch.ones(len(points), 1), torch.zeros(len(points), 1)
        critic_loss = cross_entropy(self.critic(points), true) + cross_entropy(
            self.critic(made.detach()), false
        )
        self.critic_adam.zero_grad()
        critic_loss.backward()
        self.critic_adam.step()

        maker_loss = cross_entropy(self.critic(made), true)
        self.maker_adam.zero_grad()
        maker_loss.backward()
        self.maker_adam.step()
        self.losses.append((critic_loss.item(), maker_loss.item()))


def ring(number):
    angles = torch.rand(number) * 2 * torch.pi
    return torch.stack([angles.cos(), angles.sin()], 1)


def main(steps=1000, batch=128):
    torch.manual_seed(0)
    maker, critic = layers(8, 2), layers(2, 1)
    step = Train(maker, critic)
    for number in range(steps):
        step(ring(batch), torch.randn(batch, 8))
        if number % 100 == 0:
            print("step {}: critic {:.3f}, maker {:.3f}".format(number, *step.losses[-1]))
    with torch.no_grad():
        radius = maker(torch.randn(1000, 8)).norm(dim=1)
    print(
        f"the made points are {radius.mean():.2f} (+- {radius.std():.2f}) from the middle; the ring is at 1"
    )
    return step.losses


if __name__ == "__main__":
    main()
