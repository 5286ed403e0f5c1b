"""Channels-last images that have shrunk to one pixel: kernels choose by strides that say nothing about memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import monograph as mg


class Block(nn.Module):
    """An inverted residual of MobileNetV2, whose input gets two gradients."""

    def __init__(self, kind: int, activation: nn.Module) -> None:
        super().__init__()
        convolution, norm = LAYERS[kind]
        self.widen, self.norm = convolution(16, 48, 1, bias=False), norm(48)
        self.filter = convolution(48, 48, 3, padding=1, groups=48)
        self.narrow, self.last = convolution(48, 16, 1), norm(16)
        self.activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.activation(self.norm(self.widen(x)))
        return x + self.last(self.narrow(self.activation(self.filter(h))))


LAYERS = {2: (nn.Conv2d, nn.BatchNorm2d), 3: (nn.Conv3d, nn.BatchNorm3d)}
FORMATS = {2: torch.channels_last, 3: torch.channels_last_3d}


def model(kind: int, activation: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    convolution, norm = LAYERS[kind]
    layers = [convolution(3, 16, 3, 2, 1), norm(16), activation, convolution(16, 16, 3, 2, 1), activation]
    blocks = [Block(kind, activation), Block(kind, activation)]
    head = [convolution(16, 16, 1), activation, nn.Flatten(), nn.Linear(16, 5)]
    return nn.Sequential(*layers, *blocks, *head).to(memory_format=FORMATS[kind])  # type: ignore[call-overload]


def loss(prediction: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(prediction, y)


def train(
    kind: int,
    activation: nn.Module,
    stepping: Callable[[nn.Module, torch.optim.Optimizer], Callable[..., torch.Tensor]],
    batches: Sequence[int] = (8, 8, 8),
) -> list[torch.Tensor]:
    net = model(kind, activation)
    step = stepping(net, torch.optim.SGD(net.parameters(), 0.1, momentum=0.9))
    generator = torch.Generator().manual_seed(1)
    losses = []
    for rows in batches:
        x = torch.randn(rows, 3, *[4] * kind, generator=generator).contiguous(memory_format=FORMATS[kind])
        losses.append(step(x, torch.randint(5, (rows,), generator=generator)).detach().clone())
    return [*losses, *net.state_dict().values()]


def eager(net: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[..., torch.Tensor]:
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        found = loss(net(x), y)
        found.backward()
        optimizer.step()
        return found

    return step


def graph(net: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[..., torch.Tensor]:
    return mg.train_graph(net, loss, optimizer)


@pytest.mark.parametrize("activation", [nn.ReLU6(inplace=True), nn.ReLU(), nn.SiLU(inplace=True)], ids=str)
@pytest.mark.parametrize("kind", [2, 3])
def test_images_of_one_pixel_keep_eager_bits(kind: int, activation: nn.Module) -> None:
    for expected, found in zip(train(kind, activation, eager), train(kind, activation, graph), strict=True):
        assert torch.equal(expected, found)


def test_batches_of_other_sizes_do_too() -> None:
    sides = [train(2, nn.SiLU(), stepping, (8, 8, 5, 7, 3)) for stepping in (eager, graph)]
    for expected, found in zip(*sides, strict=True):
        assert torch.equal(expected, found)
