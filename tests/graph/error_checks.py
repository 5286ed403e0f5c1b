"""How an error is reported: its parts, the user's line, and a way out."""

from __future__ import annotations

import sys
import warnings

import torch
from torch import nn

import monograph as mg
from tests.support.steps import line_of


def check(error: BaseException, *parts: str, at: str | None = None, is_clear: bool = False) -> None:
    """The error is reported well: it names its parts, a line of the caller's file (the one marked `at`), and a way out.

    One that is clear has no hint.
    """
    here = sys._getframe(1).f_code.co_filename
    assert isinstance(error, mg.MonographError)
    for part in parts:
        assert part in str(error), f"{part!r} is not in:\n{error}"
    assert bool(error.hint) is not is_clear, f"a hint where it is clear, or none: {error}"
    assert error.where is not None, f"no place: {error}"
    assert error.where.file == here, error.where
    assert f'"{here}", line {error.where.line}' in str(error)
    if at is not None:
        assert error.where.line == line_of(at, here), f"{error.where.line} is not {at}"


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def quantised() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.ones(5, 3), 0.1, 0, torch.qint8)


class Tagged(torch.Tensor):
    """A subclass of Tensor."""


def forward(self, x):
    return self.model(x)


def trained(self, x):
    loss = self.model(x).sum()
    loss.backward()
    return loss
