"""Whether this process is one of several, and which one. The rest of this folder is imported only if it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias

from torch import distributed

from monograph.checkpoint.read import ALONE, Process
from monograph.checkpoint.save import Checkpoint

State: TypeAlias = Mapping[str, Any] | Callable[[], Mapping[str, Any]]

_AGREEMENT = "monograph.distributed.agreement"
_SAVING = "monograph.checkpoint.ranks.saving"
_LOADING = "monograph.checkpoint.ranks.loading"


def this_process() -> Process:
    """Which rank of how many this process is."""
    if not distributed.is_available() or not distributed.is_initialized():
        return ALONE
    return Process(distributed.get_rank(), distributed.get_world_size())


def in_group() -> bool:
    """True for a process of a group, also of one alone: its state may hold DTensors."""
    return distributed.is_available() and distributed.is_initialized()


def save_together(state: State, path: Path, may_overwrite: Callable[[], bool]) -> None:
    """Write the states of all ranks as one checkpoint; every rank calls it. Raises CheckpointError on all of them.

    The first rank asks whether an older one may be overwritten before anything is written.
    """
    import_module(_SAVING).save_together(state, path, may_overwrite)


def background() -> Any:
    """A `saving.Background`; every rank calls it."""
    return import_module(_SAVING).Background()


def words_of_all(word: str, purpose: str) -> list[str]:
    """What each rank says; every rank calls it. Raises DistributedError that names who does not."""
    words: list[str] = import_module(_AGREEMENT).Ranks("words").meet(word, purpose)
    return words


def load_like(path: Path, like: Mapping[str, Any]) -> Checkpoint:
    """A state whose tensors are spread as those of `like`. In a group every rank calls it."""
    loaded: Checkpoint = import_module(_LOADING).load_like(path, like)
    return loaded
