"""Save a state: a directory of safetensors files and a manifest that names and hashes each.

What goes wrong becomes an error here, with the path: `checkpoint/write.py` knows no errors of users.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from monograph.checkpoint.errors import Refused
from monograph.checkpoint.flatten import LocalOf, no_local
from monograph.checkpoint.write import Parts, existing, prepare, write
from monograph.compat.modules import copy_versions
from monograph.errors import CheckpointError, MonographError


class Checkpoint(dict[str, Any]):
    """The dict that was saved, with `path` and `about`: what the graph that made it said of itself."""

    def __init__(self, state: Mapping[str, Any], path: Path, about: Mapping[str, Any]) -> None:
        super().__init__(state)
        self.path = path
        self.about: Mapping[str, Any] = dict(about)
        copy_versions(state, self)


def save(state_dict: Mapping[str, Any], path: str | os.PathLike[str], overwrite: bool = False) -> Path:
    """Write a state to a directory, so that a crash at any moment leaves the old checkpoint or the new one.

    The state is dicts, lists and tuples of tensors, numbers, strings and what else a `state_dict()` of torch holds;
    nothing is pickled. An existing path is an error unless `overwrite`.

    >>> import tempfile
    >>> model = nn.Linear(2, 2)
    >>> path = mg.save({"model": model.state_dict(), "epoch": 3}, tempfile.mkdtemp() + "/checkpoint")
    >>> mg.load(path)["epoch"]
    3
    """
    path = path_of_state(path)
    with saving(path):
        if not overwrite and os.path.lexists(path):
            raise existing(overwrite)  # before a large state is looked through
        write(take_apart(state_dict), path, overwrite=overwrite)
    return path


def path_of_state(path: object) -> Path:
    """What `save()` got as its path; CheckpointError for what is none."""
    if isinstance(path, (str, os.PathLike)):
        return Path(path)
    raise CheckpointError(
        f"save() got a {type(path).__name__} as its path", hint="write mg.save(state_dict, path)"
    )


def take_apart(state_dict: Mapping[str, Any], local_of: LocalOf = no_local) -> Parts:
    """What `write` writes; `Refused` for a state that has no place in a checkpoint."""
    if not isinstance(state_dict, dict):
        raise Refused(
            f"the state is a {type(state_dict).__name__}, not a dict",
            "save a dict of what belongs together, such as model.state_dict(); to run a model without its code, save a Graph "
            "that calls it",
        )
    if not isinstance(state_dict, Checkpoint):
        return prepare(state_dict, local_of)
    state: OrderedDict[str, Any] = OrderedDict(state_dict)
    copy_versions(state_dict, state)
    return prepare(state, local_of)


@contextmanager
def saving(path: Path, kind: type[MonographError] = CheckpointError) -> Iterator[None]:
    """The boundary: whatever stops a save is an error of this kind that names the path."""
    try:
        yield
    except Refused as error:
        raise kind(f'cannot save "{path}": {error}', hint=error.hint) from None
    except (OSError, MemoryError, RuntimeError, ValueError) as error:
        raise kind(f'cannot save "{path}": {reason_of(error)}') from error


def reason_of(error: Exception) -> str:
    """What went wrong, without the path that the system repeats."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return f"{type(error).__name__}: {error}"
