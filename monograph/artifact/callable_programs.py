"""The programs of an artifact as they are called: found by the arguments, made runnable at the first call."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import torch

from monograph.artifact.bounds.checks import without_forms
from monograph.artifact.bounds.describe import check_peak, check_values
from monograph.artifact.programs.templates import Sizes, instance
from monograph.artifact.schema.arguments import Arguments, is_plain_tensor
from monograph.artifact.schema.signatures import Signature, read_signature
from monograph.artifact.schema.text import ANY_SIZE, described, range_text, size_places, sizes_text
from monograph.artifact.state.python_state import PythonState, is_dict
from monograph.artifact.unpack import Unpacked
from monograph.capture.trace import LOGGER
from monograph.checkpoint.errors import Damaged
from monograph.checkpoint.leaves import Json, check, list_of
from monograph.errors import ArtifactError, BackendError, MonographError, SignatureError, TornStateError
from monograph.ir.graph_signature import CopyToArgument, Number
from monograph.ir.ops.random import draws
from monograph.ir.port import Role
from monograph.ir.program import Program
from monograph.ir.text import Displayed
from monograph.layout import MAX_NUMBER
from monograph.passes.run import Stage, run_passes
from monograph.passes.table import pipeline
from monograph.plan.check import check_plan
from monograph.plan.plan import Plan, make_plan
from monograph.runnable import make_runnable
from monograph.runtime.executor import Executor
from monograph.settings import Settings

_SAVE_AGAIN: Final = "save the graph again, or load another artifact"
_KEPT_SIZES: Final = 64  # programs of one range, made for different sizes


class NotTakenError(Damaged):
    """A program does not fit together at sizes at which its step would take another branch."""

    def __init__(self, branch: str) -> None:
        super().__init__(f"`{branch}` does not hold")
        self.branch = branch


class StoredSignature(Displayed):
    """One way to call an artifact, such as `artifact.train` or `artifact.infer`."""

    def __init__(
        self,
        name: str,
        programs: tuple[StoredPrograms, ...],
        settings: Settings,
        python_state: PythonState,
        lock: threading.RLock,
    ) -> None:
        self.name = name
        self.programs = programs
        self._settings, self._host, self._lock = settings, python_state, lock
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

    @property
    def draws(self) -> bool:
        """True if a call draws random numbers."""
        return any(any(map(draws, item.smallest.program.ops())) for item in self.programs)

    @property
    def changes_state(self) -> bool:
        """True if a call leaves something that the next one finds."""
        return any(item.smallest.changes_state for item in self.programs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it once: arguments by position or by name, as build() had them."""
        try:
            with self._lock:
                return self._run(args, kwargs)
        except MonographError as error:
            raise error.brief()

    def __str__(self) -> str:
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
            except NotTakenError as error:
                broken = error.branch
                continue
            try:
                executor, inputs = program.bind(leaves, self._settings)
                broken = program.broken(inputs)
            except Exception as error:  # a program that no graph has made may fail anywhere
                raise ArtifactError(f"{self.name} is damaged: {error}", hint=_SAVE_AGAIN) from None
            if broken is None:
                try:
                    return executor.run(leaves, self._host.after(program.steps), inputs=inputs)
                except TornStateError as error:
                    self._torn = error.message
                    raise
                except Exception as error:
                    raise _failure(self.name, error)  # the error has what it came from
        if broken is not None:
            raise ArtifactError(
                f"{self.name} was captured for steps in which `{broken}` holds, and this one needs another program",
                hint="save a graph that has made steps with such arguments, or that was compiled with mg.spec() and an mg.Dim for the "
                "sizes that vary; or use the code of the model",
            )
        if len(faults) == 1:
            raise faults[0]
        message = "\n  ".join(error.message for error in faults)
        raise SignatureError(
            f"the call fits no program of {self.name}\n  {message}",
            hint=next((error.hint for error in faults if error.hint), ""),
        )


def _failure(name: str, error: Exception) -> Exception:
    """The error for a call that failed: by a wrong file, or in an op, whose place is noted."""
    if isinstance(error, (MonographError, torch.OutOfMemoryError)):
        return error
    if isinstance(error, Damaged):
        return ArtifactError(f"{name} is damaged: {error}", hint=_SAVE_AGAIN)
    message = " ".join([str(error), *getattr(error, "__notes__", ())])
    failure = ArtifactError(f"{name} failed: {message}", hint="look at the values of the arguments")
    failure.cause = error
    return failure


def _outside(name: str, low: int, high: int, size: int) -> str:
    """What to do about a size outside of a range."""
    if size == 0:
        return "leave out the call: an artifact has no program for a size of 0"
    largest = "..." if high >= ANY_SIZE else max(high, size)  # none was declared
    dim = f'mg.Dim("{name}", min={min(low, size)}, max={largest})'
    return (
        f"compile the graph with {dim} in its mg.spec, and save it again, if the model takes such sizes: a table of it, as of positions, "
        "may end before"
    )


class StoredPrograms:
    """A program for every size in its ranges, of which one is made for each size that is called. With no ranges, one."""

    def __init__(self, row: Json, make: Callable[[Json, Signature, Sizes], StoredProgram]) -> None:
        """`row` describes it in the manifest, `make` unpacks the file that it names at some sizes."""
        keys = ("program", "dims", "arguments", "results")
        check(is_dict(row) and tuple(row) == keys, "a program is not described")
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
        if found is None:
            found = self._make(self._row["program"], self.signature_at(sizes), sizes)
        self._made[sizes] = found
        if len(self._made) > _KEPT_SIZES:
            self._made.popitem(last=False)
        return found

    def signature_at(self, sizes: Sizes) -> Signature:
        """What it takes and gives at these sizes."""
        signature = read_signature(instance({key: self._row[key] for key in ("arguments", "results")}, sizes))
        return replace(
            signature, sizes=sizes_text(self._row["arguments"], [name for name, _, _ in self.dims])
        )

    def fitting(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[StoredProgram, tuple[Any, ...]]:
        """The program for a call, and the leaves of its arguments. Raises SignatureError."""
        if not self.dims:
            return self.smallest, self.smallest.arguments.leaves(args, kwargs)
        flat = self.smallest.arguments.flat(args, kwargs)
        sizes = []
        for (name, low, high), (index, axis, parts) in zip(self.dims, self._places, strict=True):
            leaf: Any = flat[index] if index >= 0 else None
            size = (
                leaf.shape[axis]
                if is_plain_tensor(leaf) and leaf.dim() == self.smallest.arguments.rank(index)
                else low * parts
            )
            if size % parts or not low * parts <= size <= high * parts:
                path = self.smallest.arguments.paths[index]
                taken = range_text(name, low, high)
                if parts > 1:
                    taken = range_text(f"multiples of {parts}", low * parts, high * parts)
                raise SignatureError(
                    f"argument {path} has size {size} in dimension {axis}; the artifact takes {taken}",
                    hint="" if size % parts else _outside(name, low, high, size // parts),
                )
            sizes.append(size // parts)
        try:
            found = self.at(tuple(sizes))
        except NotTakenError:
            raise
        except Damaged as error:
            raise ArtifactError(f"the artifact is damaged: {error}", hint=_SAVE_AGAIN) from None
        return found, found.arguments.leaves(args, kwargs)

    def __str__(self) -> str:
        of_sizes = [about for about in self.smallest.branches if ".size(" in about]
        return described(self._row, self.dims) + (f", where {' and '.join(of_sizes)}" if of_sizes else "")


class StoredProgram:
    """A program at some sizes; it is made runnable when it is first called."""

    def __init__(self, unpacked: Unpacked) -> None:
        self._unpacked = unpacked
        self._executor: Executor | None = None
        self.arguments = Arguments(unpacked.signature, unpacked.bound.sources, unpacked.bound.targets)
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
    def changes_state(self) -> bool:
        """True if a call leaves something that the next one finds."""
        return any(not isinstance(target, CopyToArgument) for target in self._unpacked.bound.targets)

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

    @property
    def branches(self) -> tuple[str, ...]:
        """The branches of its capture, as text."""
        return tuple(about for about, _ in self._unpacked.branches.checks)

    def broken(self, inputs: Sequence[Any]) -> str | None:
        """The first branch of its capture that would not be taken with these inputs."""
        return self._unpacked.branches.broken(inputs)

    def _made(self, leaves: Sequence[Any], settings: Settings) -> Executor:
        try:
            return self._runnable(self._plan_for(settings), settings, leaves)
        except BackendError as error:
            if settings == settings.plain():
                raise
            why = error
        executor = self._runnable(self._plan_for(settings.plain()), settings.plain(), leaves)
        LOGGER.warning("%s; the artifact runs on the aten backend", why)
        return executor

    def _plan_for(self, settings: Settings) -> Plan:
        program = self._unpacked.bound.program
        if not settings.is_compiled:
            plan = make_plan(program)  # checked when it was captured
            check_peak(plan)
            return plan
        check_values(program)  # compiled code relies on strides too
        stages = run_passes(Stage("artifact", without_forms(program), 0.0), pipeline(settings))
        plan = make_plan(stages[-1].program)
        check_plan(plan)
        return plan

    def _runnable(self, plan: Plan, settings: Settings, leaves: Sequence[Any]) -> Executor:
        made = make_runnable(self._unpacked.bound, plan, settings, leaves)
        self.backend = made.lowered.backend
        return made.executor


def _range(value: Json) -> tuple[str, int, int]:
    name, low, high = list_of(value, 3)
    fits = type(name) is str and name.isidentifier() and type(low) is int and type(high) is int
    check(fits and 1 <= low <= high < MAX_NUMBER, "a program has a dim without a range")
    return name, low, high
