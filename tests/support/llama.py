"""A decoder of Llama's shape in plain PyTorch: rotary positions, grouped heads, SwiGLU, RMSNorm."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import monograph as mg


@dataclass(frozen=True)
class Shape:
    """The sizes of a decoder."""

    layers: int
    width: int
    heads: int
    groups: int  # heads of keys and values
    inner: int
    words: int = 32_000
    length: int = 2048


SEVEN_BILLION = Shape(layers=32, width=4096, heads=32, groups=32, inner=11_008)
SEVENTY_BILLION = Shape(layers=80, width=8192, heads=64, groups=8, inner=28_672)


class Attention(nn.Module):
    """Causal attention with rotary positions."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.size = shape.width // shape.heads
        self.query = nn.Linear(shape.width, shape.width, bias=False)
        self.key = nn.Linear(shape.width, shape.groups * self.size, bias=False)
        self.value = nn.Linear(shape.width, shape.groups * self.size, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        query, key, value = (
            made.unflatten(-1, (-1, self.size)).transpose(1, 2)
            for made in (self.query(x), self.key(x), self.value(x))
        )
        query, key = rotated(query, cos, sin), rotated(key, cos, sin)
        mixed = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=key.shape[1] != query.shape[1]
        )
        return self.out(mixed.transpose(1, 2).flatten(2))


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads turned by the angles of their positions."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class Layer(nn.Module):
    """Attention, and a gated layer after it."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm, self.attention = nn.RMSNorm(shape.width), Attention(shape)
        self.last = nn.RMSNorm(shape.width)
        self.gate = nn.Linear(shape.width, shape.inner, bias=False)
        self.up = nn.Linear(shape.width, shape.inner, bias=False)
        self.down = nn.Linear(shape.inner, shape.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x), cos, sin)
        normal = self.last(x)
        return x + self.down(F.silu(self.gate(normal)) * self.up(normal))


class Llama(nn.Module):
    """Words in, logits of the next words out."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.words = nn.Embedding(shape.words, shape.width)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.words, bias=False)
        size = shape.width // shape.heads
        angles = torch.outer(torch.arange(shape.length), 10_000 ** -(torch.arange(0, size, 2) / size)).repeat(
            1, 2
        )
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.head(self.norm(x))


def next_word_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """The loss of each word but the first."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class Training(mg.Graph):
    """A step of a decoder with AdamW, on the device meta."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        with torch.device("meta"):
            self.model = Llama(shape)
            self.add_optimizer(torch.optim.AdamW(self.model.parameters()))

    def build(self, tokens: Tensor) -> Tensor:
        loss = next_word_loss(self.model(tokens), tokens)
        loss.backward()
        return loss
