"""Spoils an artifact in many ways: each mutant is refused as an `ArtifactError`, or does what the original does.

A mutant whose digests are right, as its author would make them, may be another program: then nothing may come of it but
results, an `ArtifactError`, or a `SignatureError` for arguments that it does not take.

Run `OMP_NUM_THREADS=1 .venv/bin/python -m tests.stress.mutate_artifact --trials 10000`; the tests run 300.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import shutil
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import nn

import monograph as mg
from tests.checkpoint.same import difference
from tests.stress.mutate_checkpoint import (
    HOSTILE,
    Mutation,
    cut,
    flip_bits,
    other_than,
    rearrange,
    sealed,
    splice,
)

Results = dict[str, Any]


class Train(mg.Graph):
    """A step with what artifacts hold: branches, a schedule, random numbers, a running state."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        self.add_optimizer(optimizer, lr_sch=torch.optim.lr_scheduler.StepLR(optimizer, 2))

    def build(self, x, scale=1.0):
        loss = (self.model(x) * scale).square().mean()
        loss.backward()
        return {"loss": loss}


class Infer(mg.Graph):
    """A range of batches."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def build(self, x):
        return self.model(x)


X = torch.linspace(-1, 1, 4 * 2 * 6 * 6).view(4, 2, 6, 6)


def save_original(directory: Path) -> tuple[Path, Path]:
    """An artifact as a directory, and one as a file."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.1), nn.Linear(64, 3)
    )
    train, infer = Train(model), Infer(model)
    train(X, scale=1.0)
    train(X, scale=1.0)
    infer.compile(mg.spec((mg.Dim("batch", max=8), 2, 6, 6)))
    graphs = {"train": train, "infer": infer}
    return mg.save(graphs, directory / "original"), mg.save(graphs, directory / "original.zip")


def results(path: Path) -> Results:
    """What an artifact gives."""
    artifact = mg.load(path)
    torch.manual_seed(0)
    inferred = [artifact.infer(X[:count]) for count in (1, 4)]
    losses = [artifact.train(X, scale=0.5) for _ in range(2)]
    return {"inferred": inferred, "losses": losses}


# --- mutations under right digests -----------------------------------------------------------------------------


def edit_program(path: Path, choice: random.Random, _other: Path) -> str:
    """A hostile value somewhere in a program."""
    file = choice.choice(sorted(path.glob("program-*.json")))
    spoil(program := json.loads(file.read_text()), choice)
    file.write_text(json.dumps(program))
    values = json.loads((path / "manifest.json").read_text())
    for document in values["documents"]:
        raw = (path / document["name"]).read_bytes()
        document |= {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
    seal(path, values)
    return "program edited and sealed"


def edit_signatures(path: Path, choice: random.Random, _other: Path) -> str:
    """A hostile value in the description of arguments, results, schedulers or settings."""
    values = json.loads((path / "manifest.json").read_text())
    spoil(values["signatures"], choice)
    seal(path, values)
    return "signatures edited and sealed"


def edit_state(path: Path, choice: random.Random, _other: Path) -> str:
    """A hostile value in the tree of the state."""
    values = json.loads((path / "manifest.json").read_text())
    spoil(values["tree"], choice)
    seal(path, values)
    return "state edited and sealed"


def seal(path: Path, values: dict[str, Any]) -> None:
    """Write a manifest with the digest that belongs to it."""
    values.pop("digest")
    (path / "manifest.json").write_bytes(sealed((json.dumps(values)[:-1] + ",\n").encode()))


def spoil(value: Any, choice: random.Random) -> None:
    """Change one place somewhere inside."""
    places = list(places_in(value))
    container, key = choice.choice(places)
    how = choice.randrange(5)
    if how == 0 and isinstance(container, dict):
        container[choice.choice(("x", "$size", "exec", "state", "tuple"))] = container.pop(key)
    elif how == 1:
        del container[key]
    elif how == 2:
        other, place = choice.choice(places)
        container[key] = json.loads(json.dumps(other[place]))
    else:
        container[key] = other_than(container[key], choice) if choice.random() < 0.7 else choice.choice(NEAR)


NEAR = (
    *HOSTILE,
    0,
    2,
    3,
    -1,
    0.5,
    "x",
    "aten::full.default",
    "aten::from_file.default",
    {"$size": ["**", 9, 9]},
)


def places_in(value: Any) -> Any:
    """Every place in a JSON that holds something."""
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        yield value, key
        if isinstance(item, (dict, list)):
            yield from places_in(item)


SEALED: tuple[Mutation, ...] = (edit_program, edit_program, edit_program, edit_signatures, edit_state)
BLUNT: tuple[Mutation, ...] = (flip_bits, flip_bits, cut, splice, rearrange)


def run(trials: int, seed: int = 0) -> Counter[str]:
    """How many mutants of each kind came to what; AssertionError for any other outcome."""
    choice = random.Random(seed)
    outcomes: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as root:
        original, archive = save_original(Path(root))
        expected = results(original)
        assert difference(expected, results(archive)) is None
        for trial in range(trials):
            mutant = Path(root) / f"{trial}" / "mutant"
            if choice.random() < 0.2:
                mutant = mutant.with_suffix(".zip")
                mutant.parent.mkdir()
                shutil.copy(archive, mutant)
                name = spoil_file(mutant, choice)
                told = outcome(mutant, expected, is_sealed=False, what=f"trial {trial}, seed {seed}, {name}")
            else:
                shutil.copytree(original, mutant)
                mutation = choice.choice(SEALED + BLUNT)
                name = mutation(mutant, choice, original)
                what = f"trial {trial}, seed {seed}, {name}"
                told = outcome(mutant, expected, is_sealed=mutation in SEALED, what=what)
            outcomes[f"{name}: {told}"] += 1
            shutil.rmtree(mutant.parent)
    return outcomes


def spoil_file(mutant: Path, choice: random.Random) -> str:
    """Bit flips, a cut or a splice somewhere in the one file."""
    raw = bytearray(mutant.read_bytes())
    start, end = sorted(choice.randrange(len(raw) + 1) for _ in range(2))
    if choice.random() < 0.5:
        for _ in range(choice.choice((1, 1, 4))):
            raw[choice.randrange(len(raw))] ^= 1 << choice.randrange(8)
    elif choice.random() < 0.5:
        del raw[start:]
    else:
        raw[start:end] = choice.choice((b"", bytes(end - start), raw[start:end] * 2))
    mutant.write_bytes(raw)
    return "one file spoilt"


def outcome(mutant: Path, expected: Results, *, is_sealed: bool, what: str) -> str:
    """`refused`, `same results`, and of sealed mutants `other results` or `other arguments`; everything else fails."""
    found: Results = {}
    refusal: Exception | None = None
    try:
        found = results(mutant)
    except (mg.ArtifactError, mg.SignatureError, AttributeError) as error:
        refusal = error
    if isinstance(refusal, mg.ArtifactError):
        hidden = refusal.__cause__
        # a program that no graph has made may fail anywhere on its way; of spoilt bytes nothing is made
        assert is_sealed or hidden is None or isinstance(hidden, OSError), f"{what}: {hidden!r}"
        return "refused"
    if refusal is None and difference(expected, found) is None:
        return "same results"
    assert is_sealed, f"{what}: {refusal or 'other results'}"
    if isinstance(refusal, AttributeError):
        assert "has no signature" in str(refusal), f"{what}: {refusal!r}"
    return "other results" if refusal is None else "other arguments"


def main() -> None:
    """Run and report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    outcomes = run(options.trials, options.seed)
    for name, count in sorted(outcomes.items()):
        print(f"{count:7,}  {name}")
    print(f"{sum(outcomes.values()):7,}  mutants, seed {options.seed}: none did anything else")


if __name__ == "__main__":
    main()
