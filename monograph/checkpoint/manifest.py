"""The manifest: what a checkpoint or an artifact holds, sealed by a digest of its own bytes.

One key to a line; the last one is the SHA-256 of everything before it, so that no bit of the file can change unseen.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from typing import Any, Final

import numpy as np
import torch

from monograph.checkpoint.bytes import NAMES, Box, Joined, Row, are_sizes
from monograph.checkpoint.errors import Damaged, Refused
from monograph.checkpoint.flatten import MAX_DEPTH
from monograph.checkpoint.leaves import MAX_INT, Json, check
from monograph.layout import contiguous_stride, fills_a_block

ABOUT_KEY: Final = "graph.about"  # of a state: what its graph says of itself
CHECKPOINT: Final = "monograph.checkpoint"
ARTIFACT: Final = "monograph.artifact"
RANKS: Final = "monograph.ranks"  # a checkpoint of many processes
FIRST_LINE: Final = '{{\n"kind": "{}"'  # of a manifest, with its kind
SCHEMA: Final = 1
MAX_MANIFEST_BYTES: Final = 256 << 20
MAX_FILES: Final = 10_000
MAX_TENSORS: Final = 2_000_000
MAX_DOCUMENT_BYTES: Final = 256 << 20
TENSOR_FILE: Final = re.compile(r"tensors-[0-9a-f]{8}-[0-9]{5}\.safetensors")
PROGRAM_FILE: Final = re.compile(r"program-[0-9a-f]{8}-[0-9]{5}\.json")

_MAX_JSON_DEPTH: Final = 4 * MAX_DEPTH + 10
_KEYS: Final = {
    CHECKPOINT: ("kind", "schema", "monograph", "torch", "about", "files", "tree", "digest"),
    ARTIFACT: (
        *("kind", "schema", "monograph", "torch", "about"),
        *("signatures", "documents", "files", "tree", "digest"),
    ),
    RANKS: ("kind", "schema", "monograph", "torch", "about", "ranks", "files", "digest"),
}
_SEAL: Final = re.compile(rb'"digest": "([0-9a-f]{64})"\n}\n')
_SEAL_BYTES: Final = 79
_STRINGS: Final = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"')
_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_MAX_DIGITS: Final = 20
_MAX_ABOUT_DEPTH: Final = 4


@dataclass(frozen=True)
class TensorFile:
    """A file of tensors, in the order in which it holds them; of a rank's, each tensor has a digest, and the file has none."""

    name: str
    num_bytes: int
    sha256: str
    rows: tuple[Row, ...]
    digests: tuple[str, ...] = ()


@dataclass(frozen=True)
class RankStates:
    """The states of many ranks: the tree of each, as they share them, and which tensors are stored in parts.

    Of `own` tensors each rank has its own, in a row with its number.
    """

    trees: tuple[Json, ...]
    tree_of: tuple[int, ...]
    own: frozenset[str] = frozenset()
    joined: Mapping[str, Joined] = field(default_factory=dict)


@dataclass(frozen=True)
class Document:
    """A file of JSON."""

    name: str
    num_bytes: int
    sha256: str


def own_row(name: str, rank: int) -> str:
    """The row that has the tensor of one rank, where each has its own."""
    return f"{name}@{rank}"


@dataclass(frozen=True)
class Manifest:
    """What `manifest.json` says. Only an artifact has signatures, and documents that hold their programs."""

    about: Mapping[str, Any]
    files: tuple[TensorFile, ...]
    tree: Json
    kind: str = CHECKPOINT
    signatures: Json = None
    documents: tuple[Document, ...] = ()
    ranks: RankStates | None = None
    monograph: str = ""
    torch: str = ""

    @property
    def entries(self) -> tuple[TensorFile | Document, ...]:
        """Every file that it names."""
        return (*self.files, *self.documents)


def to_bytes(manifest: Manifest) -> bytes:
    """The text of `manifest.json`."""
    values = {
        "kind": manifest.kind,
        "schema": SCHEMA,
        "monograph": monograph_version(),
        "torch": torch.__version__,
        "about": manifest.about,
        **(_of_artifact(manifest) if manifest.kind == ARTIFACT else {}),
        **({} if manifest.ranks is None else {"ranks": _ranks_to_json(manifest.ranks)}),
        "files": [_file_to_json(file) for file in manifest.files],
        **({"tree": manifest.tree} if manifest.ranks is None else {}),
    }
    lines = ["{"] + [f'"{key}": {_text(value)},' for key, value in values.items()]
    body = ("\n".join(lines) + "\n").encode()
    if len(body) + _SEAL_BYTES > MAX_MANIFEST_BYTES or json_depth(body) > _MAX_JSON_DEPTH:
        raise Refused(
            f"what is not a tensor takes {len(body):,} bytes or is nested too deep",
            "store long lists of numbers as tensors, and large texts in files of their own",
        )
    return body + f'"digest": "{hashlib.sha256(body).hexdigest()}"\n}}\n'.encode()


def from_bytes(raw: bytes) -> Manifest:
    """The manifest in a text; `Damaged` unless it is one that `to_bytes` could have written."""
    seal = _SEAL.fullmatch(raw[-_SEAL_BYTES:])
    if seal is None or hashlib.sha256(raw[:-_SEAL_BYTES]).hexdigest() != seal[1].decode():
        if raw.startswith(b'{\n"kind": "monograph.'):
            raise Damaged("manifest.json was changed or cut off: its digest does not match")
        raise Damaged("manifest.json is not the manifest of a checkpoint or an artifact, or was changed")
    values = parse_json(raw)
    kind, schema = values.get("kind"), values.get("schema")
    if type(kind) is not str or kind not in _KEYS:
        raise Damaged(f"it is no checkpoint and no artifact: its kind is {str(kind)[:80]!r}")
    if type(schema) is int and schema > SCHEMA:
        raise Damaged(
            f"it was written by a newer version of Monograph ({str(values.get('monograph'))[:80]}, "
            f"schema {schema}; this one reads schema {SCHEMA})"
        )
    check(type(schema) is int and schema == SCHEMA, "manifest.json has an unknown schema")
    check(tuple(values) == _KEYS[kind], "manifest.json has unknown or missing keys")
    check(
        type(values["monograph"]) is str and type(values["torch"]) is str, "manifest.json has wrong versions"
    )
    about, files = read_about(values["about"]), _read_files(values["files"])
    documents = _read_documents(values["documents"]) if kind == ARTIFACT else ()
    versions = values["monograph"], values["torch"]
    ranks = _read_ranks(values["ranks"], files) if kind == RANKS else None
    tree = values["tree"] if ranks is None else ranks.trees[ranks.tree_of[0]]
    return Manifest(about, files, tree, kind, values.get("signatures"), documents, ranks, *versions)


def read_about(value: Json) -> Mapping[str, Any]:
    """A dict of plain values, as a graph describes itself; else `Damaged`."""
    check(type(value) is dict and _is_plain(value, _MAX_ABOUT_DEPTH), '"about" is no dict of plain values')
    about: Mapping[str, Any] = value
    return about


def json_depth(raw: bytes) -> int:
    """How deep a JSON text is nested, before a parser runs that would recurse as deep."""
    brackets = np.frombuffer(_STRINGS.sub(b"", raw), np.uint8)
    opens = (brackets == ord("[")) | (brackets == ord("{"))
    closes = (brackets == ord("]")) | (brackets == ord("}"))
    steps = opens.astype(np.int8) - closes.astype(np.int8)
    return int(np.cumsum(steps[steps != 0], dtype=np.int64).max(initial=0))


@cache
def monograph_version() -> str:
    """The version of this package."""
    try:
        return metadata.version("monograph")
    except metadata.PackageNotFoundError:
        return "unknown"


def _text(value: Json) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False, check_circular=False)


def _file_to_json(file: TensorFile) -> Json:
    rows = [
        [row.name, str(row.dtype).removeprefix("torch."), row.shape, *([row.stride] if row.stride else [])]
        for row in file.rows
    ]
    sha256 = list(file.digests) if file.digests else file.sha256
    return {"name": file.name, "bytes": file.num_bytes, "sha256": sha256, "tensors": rows}


def _ranks_to_json(ranks: RankStates) -> Json:
    joined = [
        [name, item.shape, [[box.row, box.offset] for box in item.boxes]]
        for name, item in ranks.joined.items()
    ]
    return {"trees": ranks.trees, "tree_of": ranks.tree_of, "own": sorted(ranks.own), "joined": joined}


def _read_ranks(value: Json, files: tuple[TensorFile, ...]) -> RankStates:
    wrong = "manifest.json has a wrong description of ranks"
    check(type(value) is dict and tuple(value) == ("trees", "tree_of", "own", "joined"), wrong)
    check(all(type(item) is list for item in value.values()), wrong)
    trees, tree_of, own, joined = value.values()
    check(bool(tree_of) and all(type(n) is int and 0 <= n < len(trees) for n in tree_of), wrong)
    check(all(type(name) is str for name in own), wrong)
    rows = {row.name: row for file in files for row in file.rows}
    found: dict[str, Joined] = {}
    for entry in joined:
        check(type(entry) is list and len(entry) == 3 and type(entry[0]) is str, wrong)
        name, shape, boxes = entry
        check(are_sizes(shape) and type(boxes) is list and bool(boxes), wrong)
        for box in boxes:
            check(type(box) is list and len(box) == 2 and type(box[0]) is str and are_sizes(box[1]), wrong)
        found[name] = Joined(tuple(shape), tuple(Box(row, tuple(offset)) for row, offset in boxes))
        found[name].check_filled(name, rows)
    return RankStates(tuple(trees), tuple(tree_of), frozenset(own), found)


def _of_artifact(manifest: Manifest) -> dict[str, Json]:
    documents = [
        {"name": item.name, "bytes": item.num_bytes, "sha256": item.sha256} for item in manifest.documents
    ]
    return {"signatures": manifest.signatures, "documents": documents}


def _read_documents(value: Json) -> tuple[Document, ...]:
    check(type(value) is list and len(value) <= MAX_FILES, "manifest.json has no list of documents")
    found = []
    for entry in value:
        fits = type(entry) is dict and tuple(entry) == ("name", "bytes", "sha256")
        check(fits, "manifest.json has a document with unknown or missing keys")
        name, num_bytes, sha256 = entry.values()
        known = type(name) is str and PROGRAM_FILE.fullmatch(name) is not None
        check(known, f"it has a document named {str(name)[:80]!r}")
        check(type(sha256) is str and _SHA256.fullmatch(sha256) is not None, f"{name} has no SHA-256")
        check(are_sizes([num_bytes]) and num_bytes <= MAX_DOCUMENT_BYTES, f"{name} has no size")
        found.append(Document(name, num_bytes, sha256))
    check(len({item.name for item in found}) == len(found), "manifest.json has a document twice")
    return tuple(found)


def parse_json(raw: bytes, name: str = "manifest.json") -> dict[str, Any]:
    """The object that a JSON text says, with no key twice and no number without bounds; else `Damaged`."""
    check(json_depth(raw) <= _MAX_JSON_DEPTH, f"{name} is nested too deep")
    try:
        values = json.loads(
            raw, object_pairs_hook=_unique, parse_constant=_no_constant, parse_int=_bounded_int
        )
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{name} cannot be parsed: {error}") from None
    check(type(values) is dict, f"{name} is no JSON object")
    found: dict[str, Any] = values
    return found


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    check(len(found) == len(pairs), "it has a key twice in one object")
    return found


def _no_constant(text: str) -> None:
    raise Damaged(f"it has the number {text}")


def _bounded_int(text: str) -> int:
    check(len(text) <= _MAX_DIGITS, "it has a number that is too long")
    return int(text)


def _is_plain(value: Json, depth: int) -> bool:
    """Strings, numbers, bools, None, and so deep lists and dicts of them."""
    if type(value) is list:
        return depth > 0 and all(_is_plain(item, depth - 1) for item in value)
    if type(value) is dict:
        return depth > 0 and all(
            type(key) is str and _is_plain(item, depth - 1) for key, item in value.items()
        )
    if type(value) is int:
        return -MAX_INT <= value <= MAX_INT
    return type(value) in (str, bool, type(None)) or (type(value) is float and math.isfinite(value))


def _read_files(value: Json) -> tuple[TensorFile, ...]:
    check(
        type(value) is list and len(value) <= MAX_FILES,
        "manifest.json has no list of files, or too long a one",
    )
    files = tuple(map(_read_file, value))
    names = [row.name for file in files for row in file.rows]
    check(len(names) <= MAX_TENSORS, "manifest.json has too many tensors")
    check(len(set(names)) == len(names), "manifest.json has a tensor twice")
    check(len({file.name for file in files}) == len(files), "manifest.json has a file twice")
    return files


def _read_file(value: Json) -> TensorFile:
    keys = ("name", "bytes", "sha256", "tensors")
    check(
        type(value) is dict and tuple(value) == keys, "manifest.json has a file with unknown or missing keys"
    )
    name, num_bytes, sha256, rows = value.values()
    check(
        type(name) is str and TENSOR_FILE.fullmatch(name) is not None,
        f"it has a file named {str(name)[:80]!r}",
    )
    check(type(rows) is list, f"{name} has no list of tensors")
    digests = sha256 if type(sha256) is list and len(sha256) == len(rows) and rows else [sha256]
    is_hashed = all(type(item) is str and _SHA256.fullmatch(item) is not None for item in digests)
    check(is_hashed, f"{name} has no SHA-256")
    check(are_sizes([num_bytes]), f"{name} has no size")
    found = tuple(map(_read_row, rows))
    if digests is sha256:
        return TensorFile(name, num_bytes, "", found, tuple(digests))
    return TensorFile(name, num_bytes, sha256, found)


def _read_row(value: Json) -> Row:
    check(type(value) is list and len(value) in (3, 4), "manifest.json has a tensor with a wrong description")
    name, dtype, shape, *strides = value
    check(
        type(name) is str and type(dtype) is str and dtype in NAMES,
        "manifest.json has a tensor of unknown dtype",
    )
    check(are_sizes(shape), f"the tensor {name!r} has a wrong shape")
    if not strides:
        return Row(name, NAMES[dtype], tuple(shape))
    (stride,) = strides
    fits = are_sizes(stride) and len(stride) == len(shape) and fills_a_block(shape, stride)
    check(fits and tuple(stride) != contiguous_stride(shape), f"the tensor {name!r} has wrong strides")
    return Row(name, NAMES[dtype], tuple(shape), tuple(stride))
