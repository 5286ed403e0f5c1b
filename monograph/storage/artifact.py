"""Artifacts: programs and the state that they share, run without the code of the model."""

from __future__ import annotations

import copy
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from monograph._torch import is_random
from monograph.capture.bindings import Number
from monograph.capture.trace import LOGGER
from monograph.compiler import make_runnable
from monograph.config import BACKENDS, Settings
from monograph.errors import ArtifactError, BackendError, MonographError, SignatureError, TornStateError
from monograph.ir.port import Role
from monograph.ir.program import Program
from monograph.passes import Stage, pipeline, run_passes
from monograph.plan.check import check_plan
from monograph.plan.plan import make_plan
from monograph.runtime.executor import Executor
from monograph.storage.arguments import Arguments
from monograph.storage.averages import StoredAverage
from monograph.storage.describe import check_values
from monograph.storage.faults import Damaged
from monograph.storage.forms import described, size_places
from monograph.storage.layout import MAX_NUMBER
from monograph.storage.leaves import Json, check, list_of
from monograph.storage.manifest import parse_json
from monograph.storage.packing import PackedGraph
from monograph.storage.reading import Content
from monograph.storage.schedules import scheduler_from
from monograph.storage.templates import Sizes, instance
from monograph.storage.unpacking import Outside, Signature, Unpacked, read_signature, unpack
from monograph.storage.writing import Parts, Programs, prepare

_SAVE_AGAIN: Final = "save the graph again, or load another artifact"
_KEPT_SIZES: Final = 64  # programs of one range, made for different sizes
_OF_SIGNATURE: Final = ("backend", "kernel_selection", "schedulers", "averages", "programs")


class StoredProgram:
    """A program at some sizes; it is made runnable when it is first called."""

    def __init__(self, unpacked: Unpacked) -> None:
        self._unpacked = unpacked
        self._executor: Executor | None = None
        self.arguments = Arguments(unpacked.signature, unpacked.bound)
        self.backend: str | None = None

    @property
    def signature(self) -> Signature:
        """What it takes and gives."""
        return self._unpacked.signature

    @property
    def program(self) -> Program:
        """The program as it was stored."""
        return self._unpacked.bound.program

    @property
    def steps(self) -> Mapping[str, int]:
        """How often each optimizer steps in one call."""
        return self._unpacked.steps

    @property
    def numbers(self) -> dict[str, Number]:
        """The hyperparameters that it reads before each call, by path."""
        bound = self._unpacked.bound
        pairs = zip(bound.program.inputs, bound.sources, strict=True)
        return {
            port.path: source
            for port, source in pairs
            if isinstance(source, Number) and port.role is Role.HYPER and isinstance(source.container, dict)
        }

    def bind(self, leaves: Sequence[Any], settings: Settings) -> tuple[Executor, list[Any]]:
        """What runs it, and its inputs."""
        if self._executor is None:
            self._executor = self._made(leaves, settings)
        return self._executor, self._executor.bind(leaves)

    def broken(self, inputs: Sequence[Any]) -> str | None:
        """The first branch of its capture that would not be taken with these inputs."""
        return self._unpacked.branches.broken(inputs)

    def _made(self, leaves: Sequence[Any], settings: Settings) -> Executor:
        bound = self._unpacked.bound
        try:
            if settings.backend == "aten":
                return self._on_aten(leaves, settings)
            check_values(bound.program)  # compiled code relies on strides too
            program = run_passes(Stage("artifact", bound.program, 0.0), pipeline(settings))[-1].program
            plan = make_plan(program)
            check_plan(plan)
            made = make_runnable(bound, plan, settings, leaves)
        except BackendError as error:
            if settings.backend == "aten":
                raise
            LOGGER.warning("%s; the artifact runs on the aten backend", error)
            return self._on_aten(leaves, replace(settings, backend="aten"))
        self.backend = made.lowered.backend
        return made.executor

    def _on_aten(self, leaves: Sequence[Any], settings: Settings) -> Executor:
        bound = self._unpacked.bound
        plan = make_plan(bound.program)  # checked when it was captured
        made = make_runnable(bound, plan, settings, leaves)
        self.backend = made.lowered.backend
        return made.executor


class StoredPrograms:
    """A program for every size in its ranges, of which one is made for each size that is called. With no ranges, one."""

    def __init__(self, row: Json, make: Callable[[Json, Sizes], StoredProgram]) -> None:
        """`row` describes it in the manifest, `make` unpacks it at some sizes."""
        keys = ("program", "dims", "arguments", "results")
        check(_is_dict(row) and tuple(row) == keys, "a program is not described")
        self.dims = tuple(map(_range, list_of(row["dims"])))
        self._row, self._make = row, make
        self._made: OrderedDict[Sizes, StoredProgram] = OrderedDict()
        self._places = size_places(row["arguments"], len(self.dims))
        self.smallest = self.at(tuple(low for _, low, _ in self.dims))

    @property
    def latest(self) -> StoredProgram:
        """The one that was made or called last."""
        return next(reversed(self._made.values()))

    def at(self, sizes: Sizes) -> StoredProgram:
        """The program at these sizes. `Damaged` if it does not work out."""
        found = self._made.pop(sizes, None)
        self._made[sizes] = found = self._make(self._row, sizes) if found is None else found
        if len(self._made) > _KEPT_SIZES:
            self._made.popitem(last=False)
        return found

    def fitting(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[StoredProgram, tuple[Any, ...]]:
        """The program for a call, and the leaves of its arguments. Raises SignatureError."""
        if not self.dims:
            return self.smallest, self.smallest.arguments.leaves(args, kwargs)
        flat = self.smallest.arguments.flat(args, kwargs)
        sizes = []
        for (name, low, high), (index, axis) in zip(self.dims, self._places, strict=True):
            leaf = flat[index] if index >= 0 else None
            size = leaf.shape[axis] if isinstance(leaf, torch.Tensor) and leaf.dim() > axis else low
            if not low <= size <= high:
                path = self.smallest.arguments.paths[index]
                raise SignatureError(
                    f"argument {path} has size {size} in dimension {axis}; the artifact takes {name} from {low} to {high}"
                )
            sizes.append(size)
        try:
            found = self.at(tuple(sizes))
        except Damaged as error:
            raise ArtifactError(f"the artifact is damaged: {error}", hint=_SAVE_AGAIN) from None
        return found, found.arguments.leaves(args, kwargs)

    def __str__(self) -> str:
        return described(self._row, self.dims)


class StoredSignature:
    """One way to call an artifact, such as `artifact.train` or `artifact.infer`."""

    def __init__(
        self,
        name: str,
        programs: tuple[StoredPrograms, ...],
        settings: Settings,
        host: _Host,
        lock: threading.RLock,
    ) -> None:
        self.name = name
        self.programs = programs
        self._settings, self._host, self._lock = settings, host, lock
        self._torn = ""

    @property
    def backend(self) -> str:
        """What runs it; before the first call, what is asked for."""
        return next(
            (item.latest.backend for item in self.programs if item.latest.backend), self._settings.backend
        )

    @property
    def trains(self) -> bool:
        """True if a call lets an optimizer step."""
        return any(item.smallest.steps for item in self.programs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it once: arguments by position or by name, as build() had them."""
        try:
            with self._lock:
                return self._run(args, kwargs)
        except MonographError as error:
            raise error.brief()  # noqa: B904  # it is the same error

    def __repr__(self) -> str:
        return "\n".join(f"{self.name}{item}" for item in self.programs)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._torn:
            raise TornStateError(self._torn, hint="load the artifact again")
        faults: list[SignatureError] = []
        broken = None
        for item in self.programs:
            try:
                program, leaves = item.fitting(args, kwargs)
            except SignatureError as error:
                faults.append(error)
                continue
            try:
                executor, inputs = program.bind(leaves, self._settings)
                broken = program.broken(inputs)
            except Exception as error:  # a program that no graph has made may fail anywhere
                raise ArtifactError(f"{self.name} is damaged: {error}", hint=_SAVE_AGAIN) from None
            if broken is None:
                try:
                    return executor.run(inputs, leaves, self._host.after(program.steps))
                except TornStateError as error:
                    self._torn = error.message
                    raise
                except Exception as error:
                    raise _failure(self.name, error)  # noqa: B904  # the error has what it came from
        if broken is not None:
            raise ArtifactError(
                f"{self.name} was captured for steps in which `{broken}` holds, and this one needs another program",
                hint="make more steps before the graph is saved, or train with the code of the model",
            )
        if len(faults) == 1:
            raise faults[0]
        told = "\n  ".join(error.message for error in faults)
        raise SignatureError(f"the call fits no program of {self.name}\n  {told}", hint=faults[0].hint)


def _failure(name: str, error: Exception) -> Exception:
    """What a user is told of a call that failed: by a wrong file, or in an op, whose place is noted."""
    if isinstance(error, (MonographError, torch.OutOfMemoryError)):
        return error
    if isinstance(error, Damaged):
        return ArtifactError(f"{name} is damaged: {error}", hint=_SAVE_AGAIN)
    told = " ".join([str(error), *getattr(error, "__notes__", ())])
    failure = ArtifactError(f"{name} failed: {told}", hint="look at the values of the arguments")
    failure.cause = error
    return failure


class _Host:
    """What moves on the host after a step, and the state of one signature."""

    def __init__(self, state: dict[str, Any], schedulers: Json, averages: Json) -> None:
        self.state = state
        self.averages = {
            path: StoredAverage(decay, state.get(f"ema.{path}")) for path, decay in _items(averages)
        }
        self.schedulers: dict[str, tuple[str, Any]] = {}
        for name, entry in _items(schedulers):
            optimizer, kind = list_of(entry, 2)
            groups = _entry(state, optimizer, "param_groups")
            check(isinstance(groups, list) and all(map(_is_dict, groups)), f"{name} has no optimizer")
            self.schedulers[name] = (optimizer, scheduler_from(kind, state.get(name), groups))
        steps = state.get("graph.steps")
        check(type(steps) is int and steps >= 0, "the state has no number of steps")

    def after(self, steps: Mapping[str, int]) -> list[Callable[[], object]]:
        """What comes after a call in which each optimizer steps so often. Each action may be done twice."""
        counted = self.state["graph.steps"] + 1
        actions: list[Callable[[], object]] = [partial(self.state.__setitem__, "graph.steps", counted)]
        for name, (optimizer, scheduler) in self.schedulers.items():
            actions += [partial(_step, name, scheduler)] * steps.get(optimizer, 0)
        if steps:
            actions += [partial(average.finish, average.updates) for average in self.averages.values()]
        return actions

    def state_dict(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """The state as `Graph.state_dict()` gives it: its tensors are the live ones."""
        memo = {id(item): item for item in _tensors_in(self.state)}
        found: dict[str, Any] = copy.deepcopy(self.state, memo)
        for name, (_, scheduler) in self.schedulers.items():
            found[name] = copy.deepcopy(scheduler.state_dict())
        scaler: Any = found.get("graph.scaler")
        if _is_dict(scaler) and "scaler/scale" in tensors:
            scaler["scale"] = float(tensors["scaler/scale"])
            if "_growth_tracker" in scaler and "scaler/growth_tracker" in tensors:
                scaler["_growth_tracker"] = int(tensors["scaler/growth_tracker"])
        if _entry(found, "graph.rng", "cpu") is not None:
            found["graph.rng"]["cpu"] = torch.get_rng_state()
        return found


def _step(name: str, scheduler: Any) -> None:
    try:
        scheduler.step()
    except Exception as error:  # it computes with what the file says
        raise Damaged(f"{name} cannot step: {error}") from None


class Hyperparameters(MutableMapping[str, float]):
    """The numbers that may be another one at each step, such as `optimizer.0/group0/lr`, by their paths."""

    def __init__(self, numbers: Mapping[str, Number]) -> None:
        self._numbers = dict(numbers)

    def __getitem__(self, path: str) -> float:
        number: float = self._numbers[path].read()
        return number

    def __setitem__(self, path: str, value: float) -> None:
        number = self._numbers[path]
        if type(value) not in (int, float):
            raise SignatureError(f"{path} is a number, not a {type(value).__name__}")
        if number.index is None:
            number.container[number.key] = value
        else:
            items = list(number.container[number.key])
            items[number.index] = value
            number.container[number.key] = tuple(items)

    def __delitem__(self, path: str) -> None:
        raise SignatureError(f"{path} is read by the step and cannot be taken away")

    def __iter__(self) -> Iterator[str]:
        return iter(self._numbers)

    def __len__(self) -> int:
        return len(self._numbers)

    def __repr__(self) -> str:
        return repr(dict(self))


class Artifact:
    """A saved graph, or several over one state: `artifact(x)`, `artifact.infer(x)`, `artifact.train(x, y)`.

    It needs no code of the model. `train` goes on where the graph stopped; what it changes the other signatures see.
    """

    def __init__(
        self,
        path: Path,
        signatures: Mapping[str, StoredSignature],
        hosts: Mapping[str, _Host],
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

    def __repr__(self) -> str:
        return "\n".join([f"Artifact {self.path}", *(f"  {item!r}" for item in self.signatures.values())])

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
            tensors = {key: item for group in self._stored.tensors[name] for key, item in group.items()}
            found |= self._hosts[name].state_dict(tensors)
        return found

    def parts(self) -> Parts:
        """What is written to save it, with its present state."""
        stored = self._stored
        states: dict[str, Any] = {}
        for name, host in self._hosts.items():
            tensors = {key: item for group in stored.tensors[name] for key, item in group.items()}
            states[name] = host.state_dict(tensors)
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
    names = [name for name, _ in _items(entries)]
    check(
        bool(names) and all(name.isidentifier() for name in names),
        "it has no signatures, or one without a name",
    )
    check(
        all(_is_dict(state[key]) and list(state[key]) == names for key in state), "a signature has no state"
    )
    lock = threading.RLock()
    hosts: dict[str, _Host] = {}
    signatures: dict[str, StoredSignature] = {}
    used: list[str] = []
    for name, entry in entries.items():
        check(_is_dict(entry) and tuple(entry) == _OF_SIGNATURE, f"the signature {name} is not described")
        known, selection = entry["backend"], entry["kernel_selection"]
        check(
            known in BACKENDS and selection in (None, True, False),
            f"the signature {name} has unknown settings",
        )
        check(_is_dict(state["state"][name]), f"the signature {name} has no state")
        host = _Host(state["state"][name], entry["schedulers"], entry["averages"])
        programs = _programs(entry["programs"], content, state["tensors"][name], host, trust=trust)
        used += [program["program"] for program in entry["programs"]]
        hosts[name] = host
        settings = Settings(backend=backend or known, kernel_selection=selection)
        signatures[name] = StoredSignature(name, programs, settings, host, lock)
    check(sorted(used) == sorted(content.documents), "a program belongs to no signature, or to two")
    stored = _Stored(entries, {name: content.documents[name] for name in used}, state["tensors"])
    return Artifact(path, signatures, hosts, stored)


def restore_random_state(artifact: Artifact) -> None:
    """Set torch's generator as it was when a graph that draws from it was saved, if the artifact goes on training."""
    for name, signature in artifact.signatures.items():
        draws = any(
            is_random(node.target) for item in signature.programs for node in item.smallest.program.ops()
        )
        state = _entry(artifact._hosts[name].state, "graph.rng", "cpu")
        if draws and signature.trains and state is not None:
            try:
                torch.set_rng_state(state)
            except (RuntimeError, TypeError) as error:
                check(False, f"the state of the random generator is wrong: {error}")


def _programs(
    value: Json, content: Content, tensors: Any, host: _Host, *, trust: bool
) -> tuple[StoredPrograms, ...]:
    rows = list_of(value)
    fits = type(tensors) is list and len(tensors) == len(rows) > 0 and all(map(_is_dict, tensors))
    check(fits, "a signature has no programs, or no tensors for them")
    for group in tensors:
        for path, average in host.averages.items():
            average.find_pairs(path, group)
    outside = Outside(host.state, host.averages)
    return tuple(
        StoredPrograms(row, partial(_at_sizes, content.documents, group, outside, trust))
        for row, group in zip(rows, tensors, strict=True)
    )


def _at_sizes(
    documents: Mapping[str, bytes],
    tensors: Mapping[str, Any],
    outside: Outside,
    trust: bool,
    row: Json,
    sizes: Sizes,
) -> StoredProgram:
    name = row["program"]
    check(type(name) is str and name in documents, "a program is not stored")
    signature = read_signature(instance({key: row[key] for key in ("arguments", "results")}, sizes))
    stored = instance(parse_json(documents[name], name), sizes)
    return StoredProgram(unpack(stored, signature, tensors, outside, trust=trust))


def _range(value: Json) -> tuple[str, int, int]:
    name, low, high = list_of(value, 3)
    fits = type(name) is str and name.isidentifier() and type(low) is int and type(high) is int
    check(fits and 1 <= low <= high < MAX_NUMBER, "a program has a dim without a range")
    return name, low, high


def _items(value: Json) -> list[tuple[str, Json]]:
    check(_is_dict(value), "a signature is not described")
    return list(value.items())


def _entry(state: Mapping[str, Any], part: Json, key: str) -> Any:
    """What a part of the state has under a key; None if there is no such part."""
    found = state.get(part) if type(part) is str else None
    return found.get(key) if isinstance(found, dict) else None


def _is_dict(value: object) -> bool:
    return type(value) is dict


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors_in(item)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for item in value:
            yield from _tensors_in(item)
