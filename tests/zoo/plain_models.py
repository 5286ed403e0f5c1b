"""Models of torch itself that no library above brings along."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from tests.zoo.model import (
    ADAM_CLIP,
    ADAM_CYCLE,
    ADAMW,
    ADAMW_WARMUP,
    RMSPROP,
    SGD,
    SGD_DECAY,
    Batch,
    ZooModel,
)

WORDS = 23


class Tagger(nn.Module):
    """Words into tags by a recurrent network in both directions."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 8, padding_idx=0)
        self.layers = kind(8, 8, num_layers=2, bidirectional=True, dropout=0.2, batch_first=True)
        self.tags = nn.Linear(16, 5)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.tags(self.layers(self.words(words))[0]).transpose(1, 2)


class Translator(nn.Module):
    """nn.Transformer between two vocabularies."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 16)
        self.layers = nn.Transformer(16, 2, 1, 1, 32, batch_first=True, norm_first=True)
        self.head = nn.Linear(16, WORDS)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        return self.head(self.layers(self.words(source), self.words(target), tgt_mask=mask))


class Mixer(nn.Module):
    """MLP-Mixer: patches are mixed across places, then across channels."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 4, 4)
        self.places = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
        self.channels = nn.Sequential(
            nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 16)
        )
        self.head = nn.Linear(16, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(x).flatten(2)
        x = (x + self.places(x)).transpose(1, 2)
        return self.head((x + self.channels(x)).mean(1))


class UNet(nn.Module):
    """Down, up, and a bridge between."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.LeakyReLU(0.1))
        self.deep = nn.Sequential(
            nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1), nn.InstanceNorm2d(16, affine=True), nn.SiLU()
        )
        self.up = nn.ConvTranspose2d(16, 8, 2, 2)
        self.head = nn.Sequential(nn.Dropout2d(0.2), nn.Conv2d(16, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = self.down(x)
        return self.head(torch.cat([wide, self.up(self.deep(wide))], dim=1))


class Flow(nn.Module):
    """Two affine couplings; gives what comes out and the logarithm of the determinant."""

    def __init__(self) -> None:
        super().__init__()
        self.nets = nn.ModuleList(
            nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 4)) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = x.new_zeros(x.shape[0])
        for net in self.nets:
            still, moved = x.chunk(2, dim=1)
            scale, shift = net(still).tanh().chunk(2, dim=1)
            x = torch.cat([moved * scale.exp() + shift, still], dim=1)
            total = total + scale.sum(1)
        return x, total


def sentences(generator: torch.Generator) -> Batch:
    return torch.randint(WORDS, (3, 6), generator=generator), torch.randint(5, (3, 6), generator=generator)


def translations(generator: torch.Generator) -> Batch:
    return torch.randint(WORDS, (2, 5), generator=generator), torch.randint(
        WORDS, (2, 6), generator=generator
    )


def pictures(generator: torch.Generator) -> Batch:
    return torch.randn(4, 3, 8, 8, generator=generator), torch.randint(2, (4,), generator=generator)


def cells(generator: torch.Generator) -> Batch:
    return torch.randn(2, 1, 8, 8, generator=generator), (
        torch.rand(2, 1, 8, 8, generator=generator) > 0.5
    ).float()


def points(generator: torch.Generator) -> Batch:
    return (torch.rand(16, 2, generator=generator),)


def vectors(generator: torch.Generator) -> Batch:
    return (torch.randn(8, 4, generator=generator),)


def classes(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y, label_smoothing=0.1)


def next_words(model: nn.Module, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(source, target[:, :-1]).transpose(1, 2), target[:, 1:])


def masks(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Cross entropy and the Dice loss."""
    said = model(x)
    shown = said.sigmoid()
    dice = 1 - 2 * (shown * y).sum() / (shown.sum() + y.sum())
    return F.binary_cross_entropy_with_logits(said, y) + dice


def burgers(model: nn.Module, places: torch.Tensor) -> torch.Tensor:
    """A physics-informed network: u_t + u u_x = 0.1 u_xx, and u = -sin(pi x) at the start."""
    places = places.clone().requires_grad_()
    u = model(places)
    first = torch.autograd.grad(u.sum(), places, create_graph=True)[0]
    second = torch.autograd.grad(first[:, 0].sum(), places, create_graph=True)[0][:, 0]
    start = model(places.detach() * torch.tensor([1.0, 0.0]))[:, 0] + torch.sin(torch.pi * places[:, 0])
    return (first[:, 1] + u[:, 0] * first[:, 0] - 0.1 * second).square().mean() + start.square().mean()


def likelihood(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    z, log_determinant = model(x)
    return (0.5 * z.square().sum(1) - log_determinant).mean()


def smooth(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A critic whose gradient is to have length one: the penalty of a Wasserstein GAN."""
    x = x.clone().requires_grad_()
    said = model(x)
    gradient = torch.autograd.grad(said.sum(), x, create_graph=True)[0]
    return said.mean() + (gradient.norm(dim=1) - 1).square().mean()


def pinn() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))


def critic() -> nn.Module:
    layers = nn.utils.parametrizations.spectral_norm
    return nn.Sequential(layers(nn.Linear(4, 16)), nn.Softplus(), layers(nn.Linear(16, 1)))


TORCH = "torch"
MODELS = [
    ZooModel("LSTM tagger", TORCH, lambda: Tagger(nn.LSTM), sentences, classes, ADAMW_WARMUP),
    ZooModel("GRU tagger", TORCH, lambda: Tagger(nn.GRU), sentences, classes, ADAM_CLIP),
    ZooModel("RNN tagger", TORCH, lambda: Tagger(nn.RNN), sentences, classes, RMSPROP),
    ZooModel("nn.Transformer", TORCH, Translator, translations, next_words, ADAMW),
    ZooModel("MLP-Mixer", TORCH, Mixer, pictures, classes, SGD_DECAY),
    ZooModel("U-Net", TORCH, UNet, cells, masks, ADAM_CYCLE),
    ZooModel("PINN", TORCH, pinn, points, burgers, ADAMW),
    ZooModel("coupling flow", TORCH, Flow, vectors, likelihood, ADAMW),
    ZooModel("critic with penalty", TORCH, critic, vectors, smooth, SGD),
]
