"""A network learns the solution of a differential equation: u'' = -pi^2 sin(pi x), u(-1) = u(1) = 0, which is sin(pi x).

The loss has second derivatives of the network, and the update differentiates once more. Run it with `python examples/pinn.py`.
"""

import torch
from torch import nn

import monograph as mg


class Train(mg.Graph):
    """A step: how far the network is from the equation inside, and from 0 at both ends."""

    def __init__(self, model, optimizer):
        super().__init__()
        self.model = model
        self.add_optimizer(optimizer)

    def build(self, x, ends):
        x = x.detach().requires_grad_()
        u = self.model(x)
        (first,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
        inside = second + torch.pi**2 * torch.sin(torch.pi * x)
        loss = inside.square().mean() + 10 * self.model(ends).square().mean()
        loss.backward()
        return loss


def main(steps=1500, points=64):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    step = Train(model, torch.optim.Adam(model.parameters(), lr=3e-3))
    ends = torch.tensor([[-1.0], [1.0]])
    losses = []
    for number in range(steps):
        losses.append(step(torch.rand(points, 1) * 2 - 1, ends).item())
        if number % 250 == 0:
            print(f"step {number}: loss {losses[-1]:.4f}")
    x = torch.linspace(-1, 1, 101)[:, None]
    with torch.no_grad():
        error = (model(x) - torch.sin(torch.pi * x)).abs().max()
    print(f"the largest error is {error:.4f}")
    return losses


if __name__ == "__main__":
    main()
