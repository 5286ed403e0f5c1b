"""Whatever a directory holds, `load` returns what was saved or raises a `CheckpointError` that says what is wrong."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import sys

import pytest
import torch

import monograph as mg
from monograph.checkpoint import manifest
from monograph.checkpoint import write as writing


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.setattr(writing, "SHARD_BYTES", 100)
    state = {"a": torch.arange(20.0), "b": torch.arange(16.0).view(4, 4).t(), "n": {1: [2, "x"]}}
    return mg.save(state, tmp_path / "checkpoint")


def refused(path, *reasons: str) -> str:
    with pytest.raises(mg.CheckpointError) as caught:
        mg.load(path)
    message = caught.value.message
    assert message.startswith(f'cannot load "{path}": ')
    assert all(reason in message for reason in reasons), message
    return message


def files(path):
    return sorted(path.glob("*.safetensors"))


def edit(path, change) -> None:
    """Change the manifest and seal it anew, as somebody with bad intent would."""
    values = json.loads((path / "manifest.json").read_bytes())
    values = change(values) or values
    values.pop("digest", None)
    seal(path, json.dumps(values)[:-1] + ",\n")


def seal(path, body: str | bytes) -> None:
    raw = body.encode() if isinstance(body, str) else body
    (path / "manifest.json").write_bytes(
        raw + b'"digest": "%s"\n}\n' % hashlib.sha256(raw).hexdigest().encode()
    )


def test_every_bit_of_the_manifest_counts(path):
    raw = (path / "manifest.json").read_bytes()
    for position in range(len(raw)):
        changed = bytearray(raw)
        changed[position] ^= 1 << position % 8
        (path / "manifest.json").write_bytes(changed)
        refused(path, "manifest.json")
    for other in (raw + b"\n", raw[:-1], b" " + raw, raw.replace(b": ", b":  ", 1), b"", b"{}", raw[:40]):
        (path / "manifest.json").write_bytes(other)
        refused(path, "manifest.json")


def test_every_byte_of_a_file_counts(path):
    file = files(path)[0]
    raw = file.read_bytes()
    for position in range(len(raw)):
        changed = bytearray(raw)
        changed[position] ^= 1 << position % 8
        file.write_bytes(changed)
        refused(path, file.name)


def test_wrong_sizes(path):
    file = files(path)[0]
    raw = file.read_bytes()
    for other in (raw[:-1], raw + b"\0", b"", raw[:8]):
        file.write_bytes(other)
        refused(path, f"{file.name} has {len(other)} bytes instead of {len(raw)}")


def test_missing_and_additional_files(path):
    (path / "notes.txt").write_text("x")
    refused(path, "'notes.txt', which is no part of it")
    (path / "notes.txt").unlink()
    (path / "folder").mkdir()
    refused(path, "'folder', which is no part of it")
    (path / "folder").rmdir()
    mg.load(path)
    files(path)[0].unlink()
    refused(path, f"it has no {files(path)[0].name[:16]}")
    (path / "manifest.json").unlink()
    refused(path, "it has no manifest.json")


def test_swapped_files(path):
    first, second = files(path)
    raw = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(raw)
    refused(path)


def test_a_file_of_another_checkpoint(path, tmp_path):
    other = mg.save({**mg.load(path), "a": torch.zeros(20)}, tmp_path / "other")
    for file, another in zip(files(path), files(other), strict=True):
        shutil.copy(another, file)
    refused(path, "was changed: its SHA-256 does not match")


def test_no_directory(path, tmp_path):
    refused(tmp_path / "nothing", "No such file or directory")
    refused(path / "manifest.json", "Not a directory")
    refused(tmp_path, "it has no manifest.json")
    (tmp_path / "pipe").touch()
    (tmp_path / "pipe").unlink()
    os.mkfifo(tmp_path / "pipe")
    refused(tmp_path / "pipe", "Not a directory")
    refused(tmp_path / "nul\0", "ValueError")


def test_members_that_are_no_files(path, tmp_path):
    file = files(path)[0]
    shutil.move(file, tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    refused(path, f"{file.name} is a symbolic link")
    file.unlink()
    os.mkfifo(file)
    refused(path, f"{file.name} is no plain file")
    file.unlink()
    file.mkdir()
    refused(path, f"{file.name} is no plain file")
    (path / "manifest.json").unlink()
    os.mkfifo(path / "manifest.json")
    refused(path, "manifest.json is no plain file")
    (path / "manifest.json").unlink()
    (path / "manifest.json").symlink_to("/dev/zero")
    refused(path, "manifest.json is a symbolic link")


def test_a_link_to_a_checkpoint_is_fine(path, tmp_path):
    (tmp_path / "latest").symlink_to(path)
    assert mg.load(tmp_path / "latest")["n"] == {1: [2, "x"]}


def test_unreadable(path, monkeypatch):
    plain = os.open

    def deny(name, flags, mode=0o777, *, dir_fd=None):
        if str(name) == files(path)[0].name:
            raise PermissionError(errno.EACCES, "Permission denied", name)
        return plain(name, flags, mode, dir_fd=dir_fd)

    monkeypatch.setattr("os.open", deny)
    refused(path, "cannot be opened: Permission denied")


def test_reading_fails(path, monkeypatch):
    def fail(*_args):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("os.readv", fail)
    refused(path, "Input/output error")


def test_no_memory(path, monkeypatch):
    def fail(*_args, **_options):
        raise MemoryError("no memory")

    monkeypatch.setattr("mmap.mmap", fail)
    refused(path, "MemoryError")


def test_a_huge_manifest(path):
    with open(path / "manifest.json", "r+b") as file:
        file.truncate(manifest.MAX_MANIFEST_BYTES + 1)  # no bytes are written
    refused(path, "more than it may have")


def first(values):
    return values["files"][0]


def row(values):
    return values["files"][1]["tensors"][0]


def put(target, key, value):
    target[key] = value


# A change to the manifest, sealed anew, and what the refusal says.
EDITS = {
    "newer": (lambda v: put(v, "schema", 2), "written by a newer version of Monograph"),
    "older": (lambda v: put(v, "schema", 0), "unknown schema"),
    "true": (lambda v: put(v, "schema", True), "unknown schema"),
    "other kind": (lambda v: put(v, "kind", "monograph.other"), "its kind is 'monograph.other'"),
    "no kind": (lambda v: v.pop("kind") and None, "its kind is 'None'"),
    "unknown key": (lambda v: put(v, "more", 1), "unknown or missing keys"),
    "missing key": (lambda v: v.pop("about") and None, "unknown or missing keys"),
    "order of keys": (lambda v: dict(reversed(v.items())), "unknown or missing keys"),
    "version": (lambda v: put(v, "torch", 2), "wrong versions"),
    "about": (lambda v: put(v, "about", [1]), '"about"'),
    "about a graph": (lambda v: put(v, "about", {"graph": "Other"}), "what it says of the graph"),
    "no files": (lambda v: put(v, "files", None), "no list of files"),
    "parent": (lambda v: put(first(v), "name", "../x.safetensors"), "a file named '../x.safetensors'"),
    "absolute": (lambda v: put(first(v), "name", "/etc/passwd"), "a file named '/etc/passwd'"),
    "own name": (lambda v: put(first(v), "name", "manifest.json"), "a file named 'manifest.json'"),
    "name with an end": (lambda v: put(first(v), "name", first(v)["name"] + "\n"), "a file named"),
    "number as a name": (lambda v: put(first(v), "name", 3), "a file named"),
    "one file twice": (lambda v: put(first(v), "name", v["files"][1]["name"]), "a file twice"),
    "hash": (lambda v: put(first(v), "sha256", "A" * 64), "no SHA-256"),
    "other hash": (lambda v: put(first(v), "sha256", "0" * 64), "SHA-256 does not match"),
    "size": (lambda v: put(first(v), "bytes", 1 << 30), "instead of 1,073,741,824"),
    "more than memory": (lambda v: put(first(v), "bytes", 1 << 47), "it takes 140,737,488,"),
    "huge size": (lambda v: put(first(v), "bytes", 1 << 63), "no size"),
    "negative size": (lambda v: put(first(v), "bytes", -1), "no size"),
    "size as text": (lambda v: put(first(v), "bytes", "1"), "no size"),
    "file key": (lambda v: put(first(v), "x", 1), "unknown or missing keys"),
    "file as a list": (lambda v: put(v, "files", [[1]]), "unknown or missing keys"),
    "tensors": (lambda v: put(first(v), "tensors", {}), "no list of tensors"),
    "row": (lambda v: put(first(v), "tensors", [[]]), "wrong description"),
    "one tensor twice": (lambda v: put(first(v), "tensors", first(v)["tensors"] * 2), "a tensor twice"),
    "one tensor less": (lambda v: put(first(v), "tensors", []), "its size is not that of its tensors"),
    "dtype": (lambda v: put(row(v), 1, "float31"), "unknown dtype"),
    "other dtype": (lambda v: put(row(v), 1, "int32"), "header is not"),
    "other name": (lambda v: put(row(v), 0, "z"), "header is not"),
    "shape": (lambda v: put(row(v), 2, [1 << 62]), "wrong shape"),
    "bomb": (lambda v: (put(row(v), 2, [1 << 40]), row(v).pop())[0], "its size is not that of its tensors"),
    "product": (
        lambda v: (put(row(v), 2, [1 << 60] * 60), row(v).pop())[0],
        "its size is not that of its tensors",
    ),
    "bomb by strides": (lambda v: (put(row(v), 2, [1 << 40]), put(row(v), 3, [0]))[0], "wrong strides"),
    "negative shape": (lambda v: put(row(v), 2, [-4, -4]), "wrong shape"),
    "bool shape": (lambda v: put(row(v), 2, [True, 16]), "wrong shape"),
    "dims": (lambda v: put(row(v), 2, [1] * 100), "wrong shape"),
    "overlap": (lambda v: put(row(v), 3, [1, 1]), "wrong strides"),
    "holes": (lambda v: put(row(v), 3, [1, 8]), "wrong strides"),
    "zero": (lambda v: put(row(v), 3, [0, 0]), "wrong strides"),
    "negative": (lambda v: put(row(v), 3, [-1, 4]), "wrong strides"),
    "huge stride": (lambda v: put(row(v), 3, [1, 1 << 62]), "wrong strides"),
    "few strides": (lambda v: put(row(v), 3, [1]), "wrong strides"),
    "needless strides": (lambda v: put(row(v), 3, [4, 1]), "wrong strides"),
    "tree": (lambda v: put(v, "tree", [{"tensor": "a"}, {"tensor": "b"}]), "its tree is no dict"),
    "empty tree": (lambda v: put(v, "tree", {"dict": {}}), "nothing in the tree is the tensor"),
}

# A value of the tree, and what the refusal says.
NODES = {
    "unknown kind": ({"exec": "print()"}, "the unknown kind 'exec'"),
    "two kinds": ({"int": "0x1", "float": "00"}, "does not say one kind"),
    "no kind": ({}, "does not say one kind"),
    "unknown tensor": ({"tensor": "zz"}, "a tensor 'zz' that is not stored"),
    "tensor by number": ({"tensor": 0}, "a int where a str belongs"),
    "number": (10**19, "a number that is too large"),
    "int": ({"int": "0x1_0"}, "where another text belongs"),
    "float": ({"float": "00"}, "bits of a wrong number"),
    "hex": ({"float": "0" * 15 + "g"}, "where another text belongs"),
    "complex": ({"complex": []}, "a list where a str belongs"),
    "text": ({"str": "ff"}, "bytes that are no text"),
    "bytes": ({"bytes": "é"}, "not base64"),
    "dict": ({"dict": []}, "a list where a dict belongs"),
    "items": ({"items": [[1]]}, "no pair"),
    "same key": ({"items": [[1, 2], [True, 3]]}, "a key twice"),
    "key": ({"items": [[[1], 2]]}, "a key of type list"),
    "key in a tuple": ({"items": [[{"tuple": [[1]]}, 2]]}, "a key of type tuple"),
    "set": ({"set": [1, True]}, "a member of a set twice"),
    "set of lists": ({"set": [[]]}, "a key of type list"),
    "ordered": ({"ordered": []}, "a wrong length"),
    "counter": ({"counter": {}}, "a dict where a list belongs"),
    "factory": ({"defaultdict": ["eval", []]}, "a defaultdict of the unknown 'eval'"),
    "deque": ({"deque": [-1, []]}, "without a length"),
    "long deque": ({"deque": [1, [1, 2]]}, "too long"),
    "size": ({"size": [1.5]}, "a wrong shape"),
    "dtype": ({"dtype": "onnx"}, "the unknown dtype 'onnx'"),
    "device": ({"device": "nowhere"}, "the unknown device"),
    "device text": ({"device": "cpu;x"}, "where another text belongs"),
    "array": ({"array": ["<f4", [1], "C", "a"]}, "an array without bytes"),
    "object array": ({"array": ["|O", [1], "C", "a"]}, "where another text belongs"),
    "array size": ({"array": ["<f4", [1 << 40], "C", "raw"]}, "a wrong number of bytes"),
    "array order": ({"array": ["|u1", [4], "K", "raw"]}, "unknown order"),
    "array dtype": ({"array": ["<f3", [4], "C", "raw"]}, "unknown numpy dtype"),
    "scalar": ({"scalar": ["<f8", "00"]}, "bits of a wrong number"),
    "scalar text": ({"scalar": ["U", 3]}, "a int where a str belongs"),
}


@pytest.mark.every_case
@pytest.mark.parametrize("name", EDITS)
def test_an_edited_manifest(name, path):
    change, reason = EDITS[name]
    edit(path, change)
    refused(path, reason)


@pytest.mark.every_case
@pytest.mark.parametrize("name", NODES)
def test_an_edited_tree(name, tmp_path):
    node, reason = NODES[name]
    path = mg.save(
        {"a": torch.ones(1), "raw": torch.ones(4, dtype=torch.uint8), "x": 0}, tmp_path / "checkpoint"
    )
    edit(path, lambda values: put(values["tree"]["dict"], "x", node))
    refused(path, reason)


def test_json_that_is_not_ours(path):
    for body, reason in {
        '{"a": 1, "a": 2,': "a key twice",
        '{"a": NaN,': "the number NaN",
        '{"a": 1e999999, "kind": "x",': "its kind is 'x'",
        '{"a": ' + "9" * 100_000 + ",": "a number that is too long",
        '{"a": ' + "[" * 100_000 + "]" * 100_000 + ",": "nested too deep",
        '{"a": ' + "[" * 100_000: "nested too deep",
        '{"a": ': "cannot be parsed",
        "[1,": "cannot be parsed",
        b'{"a": "\xff",': "cannot be parsed",
        "": "cannot be parsed",
    }.items():
        seal(path, body)
        refused(path, reason)


def test_deep_json_is_no_matter_of_the_recursion_limit(path):
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(10**6)
    try:
        seal(path, '{"a": ' + "[" * 3_000_000)
        refused(path, "nested too deep")
    finally:
        sys.setrecursionlimit(limit)


def test_a_hostile_header_behind_a_right_hash(path):
    """The manifest decides; the file's own header is only compared."""
    file = files(path)[0]
    raw = bytearray(file.read_bytes())
    raw[8:16] = b'{"x":[]}'
    file.write_bytes(raw)
    edit(path, lambda v: put(first(v), "sha256", hashlib.sha256(raw).hexdigest()))
    refused(path, "its header is not the one that the manifest describes")
    raw[:8] = (2**63).to_bytes(8, "little")
    file.write_bytes(raw)
    edit(path, lambda v: put(first(v), "sha256", hashlib.sha256(raw).hexdigest()))
    refused(path, "its header is not the one that the manifest describes")


def test_a_file_that_shrinks_while_it_is_read(path, monkeypatch):
    monkeypatch.setattr("os.readv", lambda fd, views: 0)
    refused(path, "it became shorter while it was read")


def test_loading_imports_and_runs_nothing(path, tmp_path):
    """In a fresh interpreter whose pickle, eval and exec would raise."""
    import subprocess

    code = (
        "import monograph as mg, sys, pickle, builtins\n"
        "load = mg.load  # which imports what reads files, before there is one\n"
        "def no(*args, **options): raise SystemError('executed')\n"
        "pickle.load = pickle.loads = pickle.Unpickler = no\n"
        "before = set(sys.modules); builtins.eval = builtins.exec = builtins.compile = no\n"
        f"load({str(path)!r})\n"
        "print(sorted(set(sys.modules) - before))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
