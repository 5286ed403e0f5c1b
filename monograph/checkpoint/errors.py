"""What goes wrong inside the storage, before the caller adds the path of the checkpoint."""

from __future__ import annotations

import enum
import functools
import inspect
from collections.abc import Mapping
from typing import TypeAlias

import numpy as np
import torch

Path: TypeAlias = tuple[object, ...]


class Refused(Exception):
    """A state that cannot be saved: why, and what to do about it."""

    def __init__(self, reason: str, hint: str = "") -> None:
        super().__init__(reason)
        self.hint = hint


class Taken(Refused):
    """A path at which there is something already."""


class Damaged(Exception):
    """A directory that is not what `save` wrote. `hint` is what to do, where that is known."""

    def __init__(self, reason: str, hint: str | None = None) -> None:
        super().__init__(reason)
        self.hint = hint


def path_text(path: Path) -> str:
    """optimizer/state/3/exp_avg"""
    return "/".join(map(str, path)) or "the state itself"


def too_deep(path: Path, depth: int) -> Refused:
    """The refusal of a state without a bottom."""
    where = f"{path_text(path[:4])}/..." if path else "the state"
    return Refused(f"{where} is nested more than {depth} deep, or contains itself", "store a flatter state")


def refusal(value: object, path: Path) -> Refused:
    """The refusal of a leaf whose type has no place in a checkpoint, with what to store instead."""
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    return Refused(f"{path_text(path)} is of type {kind}, which a checkpoint cannot hold", _instead_of(value))


def _instead_of(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return "store a plain torch.Tensor made from it"
    if isinstance(value, torch.nn.Module | torch.optim.Optimizer):
        return "store its state_dict()"
    if isinstance(value, enum.Enum):
        return "store its .value"
    if inspect.isroutine(value) or inspect.ismodule(value) or isinstance(value, type | functools.partial):
        return "leave it out and build it anew after loading: a checkpoint holds no code"
    if isinstance(value, tuple | Mapping | np.ndarray) or hasattr(value, "__dataclass_fields__"):
        return "turn it into a plain tuple, dict or array before saving"
    return "store it as tensors, numbers, strings, lists, tuples or dicts"
