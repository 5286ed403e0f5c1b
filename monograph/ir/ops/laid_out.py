"""A new value in the place of one that eager mode changes in place, laid out as that one is.

Ops in place keep strides, and their pure forms choose them. Along dimensions of one element, fakes and kernels disagree
about that choice, so strides cannot be compared before the step runs: the op takes them from the value that it replaces.
"""

from __future__ import annotations

from typing import Any, Final

import torch

_LIBRARY: Final = torch.library.Library("monograph", "FRAGMENT")
_LIBRARY.define("laid_out(Tensor x, Tensor like) -> Tensor")


def _laid_out(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(like).copy_(x)


def _described(_x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(like)


_LIBRARY.impl("laid_out", _laid_out, "CompositeExplicitAutograd")
torch.library.register_fake("monograph::laid_out", _described, lib=_LIBRARY)
LAID_OUT: Final[Any] = torch.ops.monograph.laid_out.default
