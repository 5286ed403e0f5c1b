"""`flow.save` and `flow.load`: states, and graphs for deployment."""

from __future__ import annotations

import os
import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import monograph as mg
from monograph import CheckpointError, DistributedError
from monograph.compat.distributed.tensors import is_sharded
from monograph.flow.tensors.shared import placement
from monograph.flow.tensors.world import rank, size
from monograph.ir.call.tree import flatten, unflatten

_OF_ONEFLOW = ("model.mlir", "pickled_data", "snapshot_done")  # files in directories that OneFlow writes
_HEAD = 1 << 16  # bytes of a pickle, where the first class is named
_OBJECT = "flow.object"  # the key under which what is no dict is stored


def save(
    obj: Any,
    path_or_buffer: str | os.PathLike[str],
    global_dst_rank: int | None = None,
    save_as_external_data: bool = False,
) -> None:
    """Save a state, or a graph for deployment; what is at the path already is replaced.

    A dict becomes a checkpoint and a Graph an artifact, as by `mg.save`: directories that hold no code. Tensors,
    numbers, lists and tuples are stored too. Raises CheckpointError and ArtifactError, for a path that holds something
    else too.

    Of several processes each that calls it saves by itself; a state with tensors that they share is saved by all together,
    or with `global_dst_rank`, which all call, by that process alone, with whole tensors.
    """
    _check_rank(global_dst_rank)
    path = _path(path_or_buffer, "save")
    if global_dst_rank is not None and size() > 1:
        obj = _whole(obj)
        if rank() != global_dst_rank:
            return
    if isinstance(obj, torch.nn.Module):
        raise CheckpointError(
            f"flow.save() got a {type(obj).__name__}: code is not saved",
            hint="save module.state_dict(), or a Graph that holds the module",
        )
    if isinstance(obj, mg.Graph):
        mg.save(obj, path, overwrite=os.path.lexists(path))
        return
    what = obj if isinstance(obj, Mapping) else {_OBJECT: obj}
    mg.save(what, path, overwrite=os.path.lexists(path), together=_is_shared(what))


def load(
    path: str | os.PathLike[str],
    global_src_rank: int | None = None,
    map_location: Any = None,
    *,
    support_pytorch_format: bool = True,
) -> Any:
    """Load what `save` wrote: a state as a dict, a graph as an artifact that is called like build().

    A file of `torch.save` is read too, as far as it holds tensors and plain values. `map_location` is a device.
    Nothing is executed. Raises CheckpointError and ArtifactError.
    """
    _check_rank(global_src_rank)
    place = _path(path, "load")
    if place.is_file() and support_pytorch_format and place.suffix != ".pt2" and _is_of_torch(place):
        return _load_of_torch(place, map_location)
    if any((place / name).exists() for name in _OF_ONEFLOW):
        raise _written_by_oneflow(place)
    loaded = mg.load(place)
    if not isinstance(loaded, dict):
        return loaded
    content = loaded[_OBJECT] if set(loaded) == {_OBJECT} else loaded
    return content if map_location is None else _moved(content, _device(map_location))


def _path(path: object, what: str) -> Path:
    if isinstance(path, (str, os.PathLike)):
        return Path(path)
    raise CheckpointError(
        f"flow.{what}() got a {type(path).__name__} as its path",
        hint="pass a path: a state is a directory, so that no crash leaves half of one",
    )


def _check_rank(asked: int | None) -> None:
    if asked is not None and not 0 <= asked < size():
        raise DistributedError(
            f"rank {asked}, and there are {size()} processes"
            if size() > 1
            else f"rank {asked}, and there is one process, of rank 0",
            hint="leave the rank out: all processes save and load together",
        )


def _whole(obj: Any) -> Any:
    leaves: list[Any] = []
    form = flatten(obj, leaves)
    whole = [leaf.full_tensor() if is_sharded(leaf) else leaf for leaf in leaves]
    return unflatten(form, iter(whole))


def _is_shared(state: Any) -> bool:
    leaves: list[Any] = []
    flatten(state, leaves)
    return any(map(is_sharded, leaves))


def _is_of_torch(path: Path) -> bool:
    """True for what torch.save writes: a zip with a pickle in it, or in old files the pickle alone."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            return any(name.endswith("/data.pkl") for name in archive.namelist())
    with path.open("rb") as file:
        return file.read(1) == pickle.PROTO


def _load_of_torch(path: Path, map_location: Any) -> Any:
    try:
        return torch.load(path, map_location=map_location, weights_only=True)
    except Exception as error:
        if b"oneflow" in path.read_bytes()[:_HEAD]:
            raise _written_by_oneflow(path) from None
        reason = " ".join(str(error).split())[:200]
        if isinstance(error, pickle.UnpicklingError):  # whose text advises to run the file
            reason = "it asks for more than tensors and plain values"
        raise CheckpointError(
            f'cannot load "{path}": {reason}',
            hint="only tensors and plain values are loaded; let the program that wrote it save a state_dict()",
        ) from error


def _written_by_oneflow(path: Path) -> CheckpointError:
    return CheckpointError(
        f'"{path}" was written by OneFlow, whose files only OneFlow reads',
        hint="where OneFlow runs, save the tensors by numpy.savez, and load that here; docs/oneflow.md shows both",
    )


def _device(place: Any) -> torch.device:
    place = place.type if isinstance(place, placement) else place
    if not isinstance(place, (str, int, torch.device)):
        raise CheckpointError(
            f"map_location is a {type(place).__name__}", hint='give a device, such as "cpu"'
        )
    return torch.device(place)


def _moved(content: Any, device: torch.device) -> Any:
    if isinstance(content, torch.Tensor):
        return content.to(device)
    if isinstance(content, dict):
        return {key: _moved(value, device) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return type(content)(_moved(item, device) for item in content)
    return content
