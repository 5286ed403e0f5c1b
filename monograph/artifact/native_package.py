"""Packages of native code, as Python calls them. Nothing of a file is run, or written out, before it is trusted."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch

from monograph.artifact.schema.arguments import Arguments
from monograph.artifact.schema.signatures import read_signature
from monograph.artifact.schema.text import described
from monograph.artifact.schema.tree import ValueForm
from monograph.checkpoint.archive import is_archive, opened_archive
from monograph.checkpoint.errors import Damaged
from monograph.checkpoint.files import MANIFEST
from monograph.checkpoint.leaves import LEAVES_FROM_JSON, Json, check, list_of, typed
from monograph.checkpoint.manifest import MAX_MANIFEST_BYTES, parse_json
from monograph.checkpoint.save import reason_of
from monograph.compat.inductor.loading import NativeState
from monograph.errors import ArtifactError, SignatureError
from monograph.ir.call.tree import unflatten
from monograph.ir.graph_signature import Argument, CopyToArgument
from monograph.ir.meta import ScalarMeta
from monograph.ir.text import Brief

KIND: Final = "monograph.package"
SCHEMA: Final = 1
SUFFIX: Final = ".pt2"
NOTE: Final = "monograph.json"  # what Monograph says of the code, among torch's extra files
_ONE_SIZE: Final = "a package has the sizes of one build: export_aoti() once for each size"
_NOTE_AT: Final = f"/extra/{NOTE}"
_KEYS: Final = (
    *("kind", "schema", "monograph", "torch", "device"),
    *("inputs", "outputs", "changed", "conditions", "arguments", "results"),
)


class Package(Brief):
    """A graph as native code, with its state inside: `package(x)` is a step, and changes the state if the graph trains.

    Results are plain tensors in the structure that build() gave them.
    """

    def __init__(self, path: Path, note: dict[str, Json], native: NativeState) -> None:
        self.path = path
        self.conditions = tuple(
            map(str, list_of(note["conditions"]))
        )  # of the numbers: what has to go on to hold
        self._text = described(note, ())
        self._signature = read_signature({key: note[key] for key in ("arguments", "results")})
        changed = [CopyToArgument(typed(index, int)) for index in list_of(note["changed"])]
        leaves = [leaf for item in self._signature.parameters for leaf in item.form.leaves]
        self._given = [index for index, leaf in enumerate(leaves) if not isinstance(leaf, ValueForm)]
        self._arguments = Arguments(
            self._signature, map(Argument, self._given), changed, other_sizes=_ONE_SIZE
        )
        self._native, self._lock = native, threading.RLock()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it once: arguments by position or by name, as build() had them."""
        try:
            leaves = self._arguments.leaves(args, kwargs)
        except SignatureError as error:
            raise error.brief()
        with self._lock, torch.no_grad():
            try:
                outputs = iter(self._native.run([_tensor(leaves[index]) for index in self._given]))
            except RuntimeError as error:
                hint = "look at the values of the arguments; if memory ran out, load it again: part of a step may be done"
                reason = str(error).partition("\n")[0]  # then follows where C++ was
                raise ArtifactError(f'"{self.path}" failed: {reason}', hint=hint) from error
            made: list[Any] = []
            for leaf in self._signature.returned.leaves:
                if isinstance(leaf, ValueForm):
                    made.append(leaf.value)
                else:
                    made.append(next(outputs).item() if isinstance(leaf, ScalarMeta) else next(outputs))
        return unflatten(self._signature.returned.tree, iter(made))

    def __str__(self) -> str:
        return f"Package {self.path}\n  {self._text}"

    def state(self) -> dict[str, torch.Tensor]:
        """Copies of parameters, buffers, optimizer state and hyperparameters, by their paths; numbers have no dimension."""
        with self._lock:
            return self._native.read()

    def load_state(self, values: Mapping[str, torch.Tensor | float]) -> None:
        """Copy values into the state, all of it or a part: `{"optimizer.0/group0/lr": 0.01}`. Raises SignatureError."""
        with self._lock, torch.no_grad():
            known = self._native.read()
            fitting = {path: _fitting(path, value, known) for path, value in values.items()}
            self._native.write(fitting)


def is_package(path: Path) -> bool:
    """True for a file that holds native code, by its entries; for one that cannot be read, by its name."""
    if not path.is_file():
        return False
    if is_archive(path):
        try:
            with _opened(path) as archive:
                names = archive.namelist()
        except (Damaged, OSError):
            return path.suffix == SUFFIX
        if MANIFEST in names:
            return False
        return path.suffix == SUFFIX or any(name.endswith(_NOTE_AT) for name in names)
    return path.suffix == SUFFIX


def load_package(path: Path, *, trust: bool) -> Package:
    """What `export_aoti` wrote. Raises ArtifactError; without trust for every file."""
    if not trust:
        raise ArtifactError(
            f'cannot load "{path}": it is native code, which would be run as it is',
            hint="mg.load(path, trust=True) runs it, if you trust who made it",
        )
    try:
        with _opened(path) as archive:
            note = _note(archive)
            with tempfile.TemporaryDirectory(prefix="monograph-") as folder:
                library = _extracted(archive, Path(folder))
                return Package(path, note, NativeState(library, LEAVES_FROM_JSON["device"](note["device"])))
    except Exception as error:
        reason = str(error) if isinstance(error, Damaged) else reason_of(error)
        hint = "export the graph again with mg.export_aoti(graph, path)"
        raise ArtifactError(f'cannot load "{path}": {reason}', hint=hint) from error


@contextmanager
def _opened(path: Path) -> Iterator[zipfile.ZipFile]:
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        with opened_archive(fd) as archive:
            yield archive
    finally:
        os.close(fd)


def _note(archive: zipfile.ZipFile) -> dict[str, Json]:
    entries = [entry for entry in archive.infolist() if entry.filename.endswith(_NOTE_AT)]
    check(len(entries) == 1, f"it has no {NOTE}: Monograph did not write it")
    check(entries[0].file_size <= MAX_MANIFEST_BYTES, f"{NOTE} is longer than it may be")
    note = parse_json(archive.read(entries[0]), NOTE)
    check(note.get("kind") == KIND, f"{NOTE} is of another kind")
    check(note.get("schema") == SCHEMA, f"it has schema {note.get('schema')!r}, and {SCHEMA} is known here")
    check(tuple(note) == _KEYS, f"{NOTE} has unknown or missing keys")
    return note


def _extracted(archive: zipfile.ZipFile, folder: Path) -> Path:
    """The library, and beside it what it calls by name. Each entry is compared with its CRC while it is read."""
    libraries = [entry.filename for entry in archive.infolist() if entry.filename.endswith(".so")]
    check(len(libraries) == 1, "it has no library, or several")
    calls = libraries[0].removesuffix(".so") + ".json"
    for name in (libraries[0], calls):
        if name in archive.namelist():
            with archive.open(name) as source, open(folder / f"step{Path(name).suffix}", "wb") as target:
                shutil.copyfileobj(source, target)
    return folder / "step.so"


def _tensor(leaf: Any) -> torch.Tensor:
    if isinstance(leaf, torch.Tensor):
        return leaf.detach()
    return torch.tensor(leaf, dtype=torch.int64 if type(leaf) is int else torch.float64)


def _fitting(path: str, value: torch.Tensor | float, known: Mapping[str, torch.Tensor]) -> torch.Tensor:
    if path not in known:
        raise SignatureError(f"the package has no state {path!r}", hint="package.state() has all paths")
    live = known[path]
    given = value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=live.dtype)
    if (given.shape, given.dtype) != (live.shape, live.dtype):
        raise SignatureError(
            f"{path} is {given.dtype} {tuple(given.shape)}; the package has {live.dtype} {tuple(live.shape)}"
        )
    return given
