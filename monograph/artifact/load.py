"""load(): what `save` wrote, told apart by its manifest: a checkpoint, an artifact, or a package of native code."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from monograph.artifact.artifact import read_artifact
from monograph.artifact.native_package import is_package, load_package
from monograph.checkpoint.load import loading, path_of, read_whole
from monograph.checkpoint.manifest import ARTIFACT
from monograph.checkpoint.ranks.group import load_like, this_process
from monograph.checkpoint.save import Checkpoint
from monograph.checkpoint.steps.leases import HeldPath
from monograph.errors import ArtifactError, CheckpointError
from monograph.settings import BACKENDS

# what reads files of other kinds, by their endings
_READERS = {
    ".onnx": "onnxruntime runs it, and mg.load_onnx_weights(path, module) reads its weights; to serve or load a graph, save it by "
    "mg.save(graph, path)",
    ".safetensors": "safetensors.torch.load_file() reads it",
}


def load(
    path: str | os.PathLike[str],
    *,
    backend: str | None = None,
    trust: bool = False,
    like: Mapping[str, Any] | None = None,
) -> Any:
    """Read what `save` wrote, verified byte by byte: a `Checkpoint`, which is a dict, or an `Artifact`.

    Nothing is executed unless it is trusted. Whatever is wrong is a `CheckpointError` or an `ArtifactError`. Of an artifact, `backend` says
    what runs it, by default what ran the graph; one that goes on training with random numbers sets torch's generator
    as it was. `trust=True` lets it call any op of torch, without checks of indices, and ops of other libraries, which
    this process has imported. A package of
    `export_aoti` is native code, which `trust=True` lets run: a `Package`, called like build().

    Of a checkpoint of several ranks each process gets the state of its own rank, and tensors that were spread over them
    whole. With `like`, such as `graph.state_dict()`, those that are DTensors there become DTensors of that mesh and
    placement, and only the part of this rank is read; every rank of the group calls it.

    >>> import tempfile
    >>> path = mg.save({"weight": torch.ones(2)}, tempfile.mkdtemp() + "/checkpoint")
    >>> mg.load(path)["weight"]
    tensor([1., 1.])
    """
    asked, path = path, path_of(path)
    if backend is not None and backend not in BACKENDS:
        raise ArtifactError(f"unknown backend {backend!r}", hint=f"choose one of {', '.join(BACKENDS)}")
    if is_package(path):
        if backend is not None:
            raise ArtifactError("a package is compiled already", hint="leave backend out")
        return load_package(path, trust=trust)
    if path.suffix in _READERS and path.is_file():
        raise CheckpointError(f'cannot load "{path}": Not a directory', hint=_READERS[path.suffix])
    if like is not None:
        checkpoint = load_like(path, like)
        _note_use(asked)
        return checkpoint
    with loading(path):
        content = read_whole(path, this_process())
        if content.manifest.kind != ARTIFACT:
            _note_use(asked)
            return Checkpoint(content.state, path, content.manifest.about)
        artifact = read_artifact(path, content, backend=backend, trust=trust)
        artifact.restore_random_state()
        return artifact


def _note_use(asked: object) -> None:
    """A checkpoint that was loaded need not be held for long."""
    if isinstance(asked, HeldPath) and asked.hold is not None:
        asked.hold.used = True
