"""What a saved path contains, by its manifest and its programs; tensors are not read."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from monograph.artifact.schema.text import described
from monograph.checkpoint.archive import opened_entries
from monograph.checkpoint.leaves import Json, check
from monograph.checkpoint.load import loading
from monograph.checkpoint.manifest import ARTIFACT, Manifest, from_bytes, parse_json
from monograph.checkpoint.read import manifest_bytes, read_documents


@dataclass(frozen=True)
class Description:
    """An artifact or a checkpoint. `tensors` are rows of a name, dtype and shape, and bytes."""

    kind: str
    monograph: str
    torch: str
    num_bytes: int  # of all files
    signatures: tuple[str, ...]
    ops: dict[str, int]
    tensors: tuple[tuple[str, str, int], ...]

    @property
    def tensor_bytes(self) -> int:
        """Of the elements of all tensors."""
        return sum(size for _, _, size in self.tensors)

    def summary(self) -> str:
        """One line."""
        what = self.kind.removeprefix("monograph.")
        parts = [f"{what} of monograph {self.monograph}, torch {self.torch}"]
        parts.append(f"{len(self.tensors):,} tensors of {self.tensor_bytes:,} bytes")
        if self.tensor_bytes:
            parts.append(f"all files {self.num_bytes / self.tensor_bytes:.3f} times that")
        if self.signatures:
            parts.append(f"{sum(self.ops.values()):,} ops")
        return "; ".join(parts)

    def as_json(self) -> dict[str, Any]:
        """The same for programs."""
        tensors = [{"name": name, "type": kind, "bytes": size} for name, kind, size in self.tensors]
        return {
            "kind": self.kind,
            "monograph": self.monograph,
            "torch": self.torch,
            "bytes": self.num_bytes,
            "signatures": list(self.signatures),
            "ops": self.ops,
            "tensors": tensors,
        }


def describe(path: str | os.PathLike[str]) -> Description:
    """What an artifact or a checkpoint holds. Raises CheckpointError and ArtifactError."""
    path = Path(path)
    with loading(path), opened_entries(path) as entries:
        raw = manifest_bytes(entries)
        manifest = from_bytes(raw)
        documents = read_documents(entries, manifest)
        ops: Counter[str] = Counter()
        for name, document in documents.items():
            for program in _with_parts(parse_json(document, name)):
                ops.update(str(node[1]) for node in program["nodes"] if type(node[1]) is str)
        return Description(
            manifest.kind,
            manifest.monograph,
            manifest.torch,
            len(raw) + sum(file.num_bytes for file in manifest.entries),
            tuple(_signatures(manifest)),
            dict(ops.most_common()),
            tuple(
                (row.name, f"{str(row.dtype).removeprefix('torch.')}{list(row.shape)}", row.num_bytes)
                for file in manifest.files
                for row in file.rows
            ),
        )


def _with_parts(program: Json) -> list[Json]:
    fits = type(program) is dict and type(program.get("nodes")) is list and type(program.get("parts")) is list
    check(
        fits and all(type(node) is list and len(node) > 1 for node in program["nodes"]),
        "a program is damaged",
    )
    return [program, *(item for part in program["parts"] for item in _with_parts(part))]


def _signatures(manifest: Manifest) -> list[str]:
    if manifest.kind != ARTIFACT:
        return []
    check(type(manifest.signatures) is dict, "the signatures are damaged")
    lines = []
    for name, entry in manifest.signatures.items():
        check(type(entry) is dict and type(entry.get("programs")) is list, "the signatures are damaged")
        for row in entry["programs"]:
            dims = [tuple(dim) for dim in row["dims"]]
            lines.append(f"{name}{described(row, dims)}  [{entry.get('backend')}]")
    return lines
