"""Artifacts: programs and the state that they share, run without the code of the model."""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from monograph.artifact.callable_programs import NotTakenError, StoredProgram, StoredPrograms, StoredSignature
from monograph.artifact.pack import PackedGraph
from monograph.artifact.programs.conditions import branches_from_json
from monograph.artifact.programs.templates import Sizes, instance
from monograph.artifact.schema.signatures import Signature
from monograph.artifact.state.python_state import Hyperparameters, PythonState, entry_of, is_dict, items_of
from monograph.artifact.unpack import Environment, unpack
from monograph.checkpoint.errors import Damaged
from monograph.checkpoint.leaves import Json, check, list_of
from monograph.checkpoint.manifest import parse_json
from monograph.checkpoint.read import Content
from monograph.checkpoint.write import Parts, Programs, prepare
from monograph.errors import ArtifactError
from monograph.ir.text import Brief
from monograph.settings import BACKENDS, Settings
from monograph.state.random import set_cpu_state

_OF_SIGNATURE: Final = ("backend", "kernel_selection", "schedulers", "averages", "programs")


class Artifact(Brief):
    """A saved graph, or several over one state: `artifact(x)`, `artifact.infer(x)`, `artifact.train(x, y)`.

    It needs no code of the model. `train` goes on where the graph stopped; what it changes the other signatures see.
    """

    def __init__(
        self,
        path: Path,
        signatures: Mapping[str, StoredSignature],
        hosts: Mapping[str, PythonState],
        stored: _Stored,
    ) -> None:
        self.path = path
        self.signatures = dict(signatures)
        self._hosts, self._stored = dict(hosts), stored

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the only signature."""
        if len(self.signatures) != 1:
            names = ", ".join(self.signatures)
            raise ArtifactError(
                f"the artifact has several signatures: {names}",
                hint=f"call artifact.{names.split(', ')[0]}(...)",
            )
        (signature,) = self.signatures.values()
        return signature(*args, **kwargs)

    def __getattr__(self, name: str) -> StoredSignature:
        signatures: Mapping[str, StoredSignature] = self.__dict__.get("signatures", {})
        if name not in signatures:
            raise AttributeError(f"the artifact has no signature {name!r}; it has {', '.join(signatures)}")
        return signatures[name]

    def __str__(self) -> str:
        return "\n".join([f"Artifact {self.path}", *(f"  {item}" for item in self.signatures.values())])

    @property
    def hyperparameters(self) -> Hyperparameters:
        """The numbers that may be another one at each step; setting one takes effect with the next call."""
        programs = [item for signature in self.signatures.values() for item in signature.programs]
        return Hyperparameters(
            {path: number for item in programs for path, number in item.smallest.numbers.items()}
        )

    def state_dict(self) -> dict[str, Any]:
        """The state as the `state_dict()` of the graph would give it; its tensors are the live ones.

        With several signatures it is that of the one that trains, and what only others have.
        """
        trains = {name: self.signatures[name].trains for name in self._hosts}
        found: dict[str, Any] = {}
        for name in sorted(self._hosts, key=lambda name: trains[name]):
            found |= self._state_of(name)
        return found

    def _state_of(self, name: str) -> dict[str, Any]:
        """The present state of one signature."""
        tensors = {key: item for group in self._stored.tensors[name] for key, item in group.items()}
        return self._hosts[name].state_dict(tensors)

    def restore_random_state(self) -> None:
        """Set torch's generator as it was when a graph that draws from it was saved, if training goes on here."""
        for name, signature in self.signatures.items():
            state = entry_of(self._hosts[name].state, "graph.rng", "cpu")
            if signature.draws and signature.trains and state is not None:
                try:
                    set_cpu_state(state)
                except (RuntimeError, TypeError) as error:
                    check(False, f"the state of the random generator is wrong: {error}")

    def parts(self) -> Parts:
        """What is written to save it, with its present state."""
        stored = self._stored
        states = {name: self._state_of(name) for name in self._hosts}
        flat = prepare({"state": states, "tensors": stored.tensors})
        return replace(flat, programs=_renamed(stored))


@dataclass(frozen=True)
class _Stored:
    """What an artifact was read from, to be written again."""

    signatures: Json
    documents: Mapping[str, bytes]
    tensors: Mapping[str, list[dict[str, Any]]]


def artifact_parts(graphs: Mapping[str, PackedGraph]) -> Parts:
    """What is written for these graphs, by the names of their signatures."""
    state = {name: packed.state for name, packed in graphs.items()}
    tensors = {name: [item.tensors for item in packed.programs] for name, packed in graphs.items()}
    parts = prepare({"state": state, "tensors": tensors})
    programs = [item for packed in graphs.values() for item in packed.programs]
    documents = tuple(
        (json.dumps(item.program, separators=(",", ":"), allow_nan=False) + "\n").encode()
        for item in programs
    )

    def signatures(names: Sequence[str]) -> Json:
        left = iter(names)
        return {
            name: {
                "backend": packed.backend,
                "kernel_selection": packed.kernel_selection,
                "schedulers": packed.schedulers,
                "averages": packed.averages,
                "programs": [
                    {
                        "program": next(left),
                        "dims": [list(dim) for dim in item.dims],
                        "arguments": item.arguments,
                        "results": item.results,
                    }
                    for item in packed.programs
                ],
            }
            for name, packed in graphs.items()
        }

    return replace(parts, programs=Programs(signatures, documents))


def _renamed(stored: _Stored) -> Programs:
    """The same programs under new names of files."""

    def signatures(names: Sequence[str]) -> Json:
        new = dict(zip(stored.documents, names, strict=True))
        found = copy.deepcopy(stored.signatures)
        for entry in found.values():
            for program in entry["programs"]:
                program["program"] = new[program["program"]]
        return found

    return Programs(signatures, tuple(stored.documents.values()))


def read_artifact(path: Path, content: Content, *, backend: str | None, trust: bool) -> Artifact:
    """The artifact that was read. `Damaged` for whatever does not fit together."""
    state = content.state
    check(tuple(state) == ("state", "tensors"), "its tree has unknown or missing keys")
    entries = content.manifest.signatures
    names = [name for name, _ in items_of(entries)]
    check(
        bool(names) and all(name.isidentifier() for name in names),
        "it has no signatures, or one without a name",
    )
    check(all(is_dict(state[key]) and list(state[key]) == names for key in state), "a signature has no state")
    lock = threading.RLock()
    hosts: dict[str, PythonState] = {}
    signatures: dict[str, StoredSignature] = {}
    used: list[str] = []
    for name, entry in entries.items():
        check(is_dict(entry) and tuple(entry) == _OF_SIGNATURE, f"the signature {name} is not described")
        known, selection = entry["backend"], entry["kernel_selection"]
        check(
            known in BACKENDS and selection in (None, True, False),
            f"the signature {name} has unknown settings",
        )
        check(is_dict(state["state"][name]), f"the signature {name} has no state")
        python_state = PythonState(state["state"][name], entry["schedulers"], entry["averages"])
        programs = _programs(entry["programs"], content, state["tensors"][name], python_state, trust=trust)
        used += [program["program"] for program in entry["programs"]]
        hosts[name] = python_state
        settings = Settings(backend=backend or known, kernel_selection=selection)
        signatures[name] = StoredSignature(name, programs, settings, python_state, lock)
    check(sorted(used) == sorted(content.documents), "a program belongs to no signature, or to two")
    stored = _Stored(entries, {name: content.documents[name] for name in used}, state["tensors"])
    return Artifact(path, signatures, hosts, stored)


def _programs(
    value: Json, content: Content, tensors: Any, python_state: PythonState, *, trust: bool
) -> tuple[StoredPrograms, ...]:
    rows = list_of(value)
    fits = type(tensors) is list and len(tensors) == len(rows) > 0 and all(map(is_dict, tensors))
    check(fits, "a signature has no programs, or no tensors for them")
    for group in tensors:
        for path, average in python_state.averages.items():
            average.find_pairs(path, group)
    environment = Environment(python_state.state, python_state.averages)
    return tuple(
        StoredPrograms(row, partial(_at_sizes, content.documents, group, environment, trust))
        for row, group in zip(rows, tensors, strict=True)
    )


def _at_sizes(
    documents: Mapping[str, bytes],
    tensors: Mapping[str, Any],
    environment: Environment,
    trust: bool,
    name: Json,
    signature: Signature,
    sizes: Sizes,
) -> StoredProgram:
    check(type(name) is str and name in documents, "a program is not stored")
    stored = instance(parse_json(documents[name], name), sizes)
    try:
        return StoredProgram(unpack(stored, signature, tensors, environment, trust=trust))
    except Damaged as error:
        if (broken := _broken(stored, trust=trust)) is not None:
            raise NotTakenError(broken) from error
        raise


def _broken(stored: Json, *, trust: bool) -> str | None:
    """The branch by sizes that is not taken at these, with which nothing of the program need fit."""
    try:
        branches = branches_from_json(stored["conditions"], len(stored["sources"]), trust=trust)
    except (Damaged, KeyError, TypeError):
        return None
    return branches.broken_by_sizes()
