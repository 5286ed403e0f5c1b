"""Spoils a checkpoint in many ways: each mutant is refused as a `CheckpointError`, or loads with the saved bits.

Run `OMP_NUM_THREADS=1 .venv/bin/python -m tests.stress.mutate_checkpoint --trials 10000`; the tests run 500.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

import monograph as mg
from monograph.checkpoint import write as writing
from tests.checkpoint.same import difference

# What a mutant did is told by its name, for the report.
Mutation = Callable[[Path, random.Random, Path], str]

NUMBERS = (-1, 0, 1, 2**31, 2**48, 2**62, 2**63, 2**64, 10**30, 1.5, -0.0, 1e300)
HOSTILE = (
    *NUMBERS,
    None,
    True,
    "",
    "..",
    "../tensors-00000000-00000.safetensors",
    "/etc/passwd",
    "manifest.json",
    "\0",
    "x" * 5000,
    [],
    [[]],
    [0] * 100,
    [2**40, 2**40],
    {},
    {"exec": "raise SystemExit"},
    {"dict": {}},
    {"a": 1, "b": 2},
)


def make_state() -> dict[str, Any]:
    """A trained model with its optimizer, tied, transposed, complex and empty tensors, and values of many types."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(torch.randn(5, 2, 4, 4)).square().sum().backward()
    optimizer.step()
    weight = torch.randn(6, 5)
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "tied": [weight, weight],
        "transposed": torch.randn(4, 7).t(),
        "values": (1, -0.0, float("nan"), {1: None, (2, "x"): b"bytes"}, 2**80, {3, 4}, torch.float16),
        "more": [torch.empty(0, 3), torch.ones(3, dtype=torch.complex128), torch.tensor(True)],
        "graph.about": {"graph": "TrainStep", "programs": ["00ff"]},
    }


def save_original(directory: Path) -> tuple[dict[str, Any], Path, Path]:
    """The state, its checkpoint of several files, and a checkpoint of another state of the same form."""
    state = make_state()
    with mock.patch.object(writing, "SHARD_BYTES", 900):
        path = mg.save(state, directory / "original")
        other = {**state, "tied": [torch.zeros(6, 5)] * 2, "transposed": torch.zeros(4, 7).t()}
        return state, path, mg.save(other, directory / "other")


# --- mutations of bytes ----------------------------------------------------------------------------------------


def pick(path: Path, choice: random.Random) -> Path:
    """A file of the checkpoint; the manifest as often as all others."""
    files = sorted(path.glob("*.safetensors"))
    return path / "manifest.json" if choice.random() < 0.5 else choice.choice(files)


def flip_bits(path: Path, choice: random.Random, _other: Path) -> str:
    file = pick(path, choice)
    raw = bytearray(file.read_bytes())
    for _ in range(choice.choice((1, 1, 2, 8))):
        raw[choice.randrange(len(raw))] ^= 1 << choice.randrange(8)
    file.write_bytes(raw)
    return "bit flips"


def cut(path: Path, choice: random.Random, _other: Path) -> str:
    file = pick(path, choice)
    raw = file.read_bytes()
    file.write_bytes(raw[: choice.randrange(len(raw))])
    return "truncation"


def splice(path: Path, choice: random.Random, _other: Path) -> str:
    """Bytes inserted, removed, repeated or zeroed."""
    file = pick(path, choice)
    raw = file.read_bytes()
    start, end = sorted(choice.randrange(len(raw) + 1) for _ in range(2))
    middle = choice.choice((b"", raw[start:end] * 2, bytes(end - start), choice.randbytes(end - start), b" "))
    file.write_bytes(raw[:start] + middle + raw[end:])
    return "splice"


def swap(path: Path, choice: random.Random, other: Path) -> str:
    """Files exchanged, or taken from another checkpoint."""
    first, second = choice.sample(sorted(path.glob("*.safetensors")), 2)
    how = choice.randrange(4)
    if how == 0:
        raw = first.read_bytes()
        first.write_bytes(second.read_bytes())
        second.write_bytes(raw)
    elif how == 1:
        shutil.copy(second, first)
    elif how == 2:
        position = sorted(path.glob("*.safetensors")).index(first)
        shutil.copy(sorted(other.glob("*.safetensors"))[position], first)
    else:
        shutil.copy(other / "manifest.json", path / "manifest.json")
    return "swapped files"


def rearrange(path: Path, choice: random.Random, _other: Path) -> str:
    """Files missing, added, renamed, or something else than files."""
    file = pick(path, choice)
    how = choice.randrange(7)
    if how == 0:
        file.unlink()
    elif how == 1:
        (path / choice.choice(("x", "manifest.json.bak", ".hidden", "tensors-0.safetensors"))).write_bytes(
            b"x"
        )
    elif how == 2:
        file.rename(path / f"tensors-{choice.randbytes(4).hex()}-00000.safetensors")
    elif how == 3:
        target = path.parent / "moved"
        shutil.move(file, target)
        file.symlink_to(target)
    elif how == 4:
        file.unlink()
        choice.choice((os.mkfifo, os.mkdir))(file)
    elif how == 5:
        with open(file, "r+b") as opened:
            opened.truncate(choice.choice((1 << 30, 1 << 40)))
    else:
        (path / f"tensors-{choice.randbytes(4).hex()}-00000.safetensors").write_bytes(
            b"left by a killed saver"
        )
    return "missing, added or strange files"


# --- mutations of the manifest, sealed anew --------------------------------------------------------------------


def edit(path: Path, choice: random.Random, _other: Path) -> str:
    """A hostile value somewhere, under a right digest; never a value of the state itself, which may be anything."""
    values = json.loads((path / "manifest.json").read_bytes())
    values.pop("digest")
    how = choice.choice(("top", "file", "row", "row", "stride", "reference", "tag", "more", "text"))
    file = choice.choice(values["files"])
    row = choice.choice(file["tensors"])
    if how == "top":
        key = choice.choice([key for key in values if key not in ("monograph", "torch", "tree")])
        values[key] = other_than(values[key], choice)
    elif how == "file":
        key = choice.choice(list(file))
        file[key] = other_than(file[key], choice)
    elif how == "row":
        place = choice.randrange(3)
        row[place] = other_than(row[place], choice)
    elif how == "stride":
        row[3:] = [bad_strides(row[2], choice)]
    elif how == "reference":
        reference = choice.choice([node for node in nodes(values["tree"]) if "tensor" in node])
        reference["tensor"] = other_than(reference["tensor"], choice)
    elif how == "tag":
        node = choice.choice(nodes(values["tree"]))
        ((tag, payload),) = node.items()
        del node[tag]
        node[choice.choice(("exec", "pickle", tag.upper(), "", "__class__"))] = payload
    elif how == "more":
        target = choice.choice((values, file, choice.choice(nodes(values["tree"]))))
        target[choice.choice(("x", "__proto__", "use_pickle"))] = choice.choice(HOSTILE)
    body = json.dumps(values)[:-1] + ",\n"
    if how == "text":
        depth = choice.choice((1000, 100_000))
        noise = choice.choice(
            ('"a":' + "[" * depth + "]" * depth, '"kind":1', '"a":NaN', '"a":' + "9" * 9000)
        )
        body = body[:-2] + "," + noise + ",\n"
    (path / "manifest.json").write_bytes(sealed(body.encode()))
    return f"manifest edited and sealed: {how}"


def sealed(body: bytes) -> bytes:
    """With the digest that belongs to it."""
    return body + b'"digest": "' + hashlib.sha256(body).hexdigest().encode() + b'"\n}\n'


def other_than(value: Any, choice: random.Random) -> Any:
    """A hostile value, and not by chance an equal one."""
    return choice.choice([item for item in HOSTILE if json.dumps(item) != json.dumps(value)])


def bad_strides(shape: list[int], choice: random.Random) -> Any:
    """Strides that overlap, leave holes or leave the memory."""
    kinds = (
        [0] * len(shape),
        [-1] * len(shape),
        [2**62] * len(shape),
        [7] * len(shape),
        [1] * (len(shape) + 1),
        "x",
    )
    return choice.choice([kind for kind in kinds if kind])


def nodes(tree: Any) -> list[dict[str, Any]]:
    """The objects of the tree that say a kind."""
    if isinstance(tree, list):
        return [node for item in tree for node in nodes(item)]
    if not isinstance(tree, dict):
        return []
    ((tag, payload),) = tree.items()
    inner = list(payload.values()) if tag == "dict" else payload
    return [tree, *nodes(inner)]


MUTATIONS: tuple[Mutation, ...] = (flip_bits, flip_bits, cut, splice, swap, rearrange, edit, edit, edit)


def run(trials: int, seed: int = 0) -> Counter[str]:
    """How many mutants of each kind were refused or loaded with the same bits; AssertionError for any other."""
    choice = random.Random(seed)
    outcomes: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as root:
        state, original, other = save_original(Path(root))
        for trial in range(trials):
            mutant = Path(root) / f"{trial}" / "mutant"
            shutil.copytree(original, mutant)
            name = choice.choice(MUTATIONS)(mutant, choice, other)
            outcomes[f"{name}: {outcome(mutant, state, f'trial {trial}, seed {seed}, {name}')}"] += 1
            shutil.rmtree(mutant.parent)
    return outcomes


def outcome(mutant: Path, state: dict[str, Any], what: str) -> str:
    """`refused` or `same bits`; everything else fails."""
    error: mg.CheckpointError | None = None
    try:
        loaded = mg.load(mutant)
    except mg.CheckpointError as refusal:
        error = refusal
    if error is None:
        found = difference(state, loaded)
        assert found is None, f"{what}: loaded other data: {found}"
        return "same bits"
    assert str(mutant) in error.message, f"{what}: no path in {error.message!r}"
    # anything but trouble with files would be a fault of the reader that the border hid
    assert error.__cause__ is None or isinstance(error.__cause__, OSError), f"{what}: {error.__cause__!r}"
    return "refused"


def main() -> None:
    """Run and report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    outcomes = run(options.trials, options.seed)
    for name, count in sorted(outcomes.items()):
        print(f"{count:7,}  {name}")
    print(
        f"{sum(outcomes.values()):7,}  mutants, seed {options.seed}: none loaded other data or failed otherwise"
    )


if __name__ == "__main__":
    main()
