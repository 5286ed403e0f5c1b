"""What an artifact holds of a graph: its programs, where their inputs come from and their outputs go, and its state.

Nothing of it is code: a place in the state is a list of keys, a tensor of the state has a path.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from monograph.artifact.programs.conditions import branches_to_json
from monograph.artifact.programs.serialize import program_to_json
from monograph.artifact.programs.size_ranges import ranges, sizes_in
from monograph.artifact.programs.templates import by_names
from monograph.artifact.schema import call as called
from monograph.artifact.schema import tree as forms
from monograph.artifact.schema.tree import INT
from monograph.artifact.state.schedules import kind_to_json
from monograph.capture.captured import Captured
from monograph.capture.tensors.conditions import Conditions
from monograph.checkpoint.bytes import row_of
from monograph.checkpoint.errors import Refused
from monograph.checkpoint.leaves import LEAVES_TO_JSON, Json
from monograph.compiler import Build
from monograph.ir.call.signature import Call, TensorKey
from monograph.ir.call.tree import Tree
from monograph.ir.graph_signature import (
    Argument,
    ArgumentChanges,
    Assign,
    BoundProgram,
    Copy,
    CopyToArgument,
    Fixed,
    Gradient,
    LiveView,
    Number,
    OptimizerEntries,
    ReadAfter,
    Recorded,
    Result,
    Source,
    Target,
)
from monograph.ir.meta import origin, value
from monograph.ir.port import Port, Role
from monograph.ir.program import Program
from monograph.ir.size_numbers import at_present_sizes, sizes_written
from monograph.layout import contiguous_stride
from monograph.passes.dce import dce
from monograph.passes.run import Pass, Stage, run_passes
from monograph.passes.table import pipeline
from monograph.settings import Settings
from monograph.sizes.place import size_places
from monograph.sizes.size import varies
from monograph.state.averages import Average
from monograph.state.find import Owned
from monograph.state.random import read_generators


@dataclass(frozen=True)
class PackedProgram:
    """One program: its arguments and results for the manifest, the program itself, and the tensors that it finds.

    With `dims`, names with the smallest and the largest size, the JSON has expressions where the sizes decide.
    """

    arguments: Json
    results: Json
    program: Json
    tensors: dict[str, torch.Tensor]
    dims: tuple[tuple[str, int, int], ...] = ()


@dataclass(frozen=True)
class PackedGraph:
    """What is stored of one graph. Schedulers and averages move in Python after a step."""

    backend: str
    kernel_selection: bool | None
    programs: tuple[PackedProgram, ...]
    state: Mapping[str, Any]
    schedulers: Json
    averages: Json


@dataclass(frozen=True)
class Step:
    """A captured step: the arguments that it was made for, described by their keys, and the program after its passes."""

    tree: Tree
    keys: tuple[Any, ...]
    names: tuple[str, ...]
    bound: BoundProgram
    program: Program
    conditions: Conditions
    steps: Mapping[str, int]
    ones: Collection[frozenset[str]] = ()  # names of sizes that may be 1

    @property
    def in_numbers(self) -> Step:
        """The same for the sizes of its capture alone."""
        keys = tuple(key.in_numbers if isinstance(key, TensorKey) else key for key in self.keys)
        if not any(isinstance(key, TensorKey) and varies(key.shape) for key in self.keys):
            return self
        bound = replace(self.bound, program=at_present_sizes(self.bound.program))
        return replace(self, keys=keys, bound=bound, program=at_present_sizes(self.program))


def built_step(tree: Tree, keys: tuple[Any, ...], names: tuple[str, ...], build: Build) -> Step:
    """The step of a build."""
    captured = build.captured
    program = (
        plain_program(captured.program, build.settings) if build.settings.is_compiled else build.plan.program
    )
    bound, conditions = build.executor.bound, build.guards.conditions
    return Step(tree, keys, names, bound, program, conditions, captured.steps, build.ones)


def captured_step(call: Call, captured: Captured, settings: Settings, without: Collection[Pass] = ()) -> Step:
    """The step of a capture that nothing runs, after the plain passes but for those it is to be `without`."""
    program = plain_program(captured.program, settings, without=without)
    conditions = captured.unraised if settings.is_compiled else captured.guards.conditions
    return Step(call.tree, call.keys, call.names, captured, program, conditions, captured.steps)


def plain_program(program: Program, settings: Settings, *, without: Collection[Pass] = ()) -> Program:
    """A captured program after the passes that change no bit, whatever backend it runs on."""
    passes = [item for item in pipeline(settings.plain()) if item not in without]
    return run_passes(Stage("capture", program, 0.0), passes)[-1].program


def pack_graph(
    programs: Sequence[PackedProgram], settings: Settings, owned: Owned, state: Mapping[str, Any]
) -> PackedGraph:
    """Everything of a graph that runs without its code; `Refused` for what cannot."""
    return PackedGraph(settings.backend, settings.kernel_selection, tuple(programs), state, *_hosts(owned))


def pack(step: Step, places: Places) -> PackedProgram:
    """One program of a graph; `Refused` if it cannot run without the code of the model."""
    return _Packing(step, places).packed()


def _hosts(owned: Owned) -> tuple[Json, Json]:
    schedulers = {
        f"scheduler.{index}": [held.name, kind_to_json(held.scheduler)]
        for index, held in enumerate(owned.optimizers)
        if held.scheduler is not None
    }
    averages: dict[str, float] = {}
    for average in owned.averages:
        if callable(average.decay):
            raise Refused(
                f"the average of {average.path} decays by a function, which an artifact cannot hold",
                "give add_ema() a number",
            )
        averages[average.path] = float(average.decay)
    return schedulers, averages


class Places:
    """Where the containers that a step reads and writes stand in the state dict."""

    def __init__(self, owned: Owned, state: Mapping[str, Any]) -> None:
        self._keys: dict[int, list[Any]] = {}
        for registered in owned.optimizers:
            for index, group in enumerate(registered.optimizer.param_groups):
                self._keys[id(group)] = [registered.name, "param_groups", index]
            parts: Mapping[Any, Any] = state[registered.name]["state"]
            for key, entries in parts.items():
                self._walk(entries, [registered.name, "state", key])

    def _walk(self, container: Any, keys: list[Any]) -> None:
        if isinstance(container, (dict, list)):
            self._keys[id(container)] = keys
            for key, item in container.items() if isinstance(container, dict) else enumerate(container):
                self._walk(item, [*keys, key])

    def of(self, container: Any, what: str) -> Json:
        """The keys that lead to a container; `Refused` if it is no part of the state."""
        if isinstance(container, Average):
            return {"average": container.path}
        if isinstance(container, OptimizerEntries):
            container = container.optimizer.state.get(container.owner)
        keys = self._keys.get(id(container))
        if keys is None or not all(type(key) in (str, int) for key in keys):
            raise Refused(f"the step reads or sets {what}, which has no place in the state of the graph")
        return keys


@dataclass
class _Packing:
    """One build on its way into an artifact."""

    step: Step
    places: Places
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)

    def packed(self) -> PackedProgram:
        bound, program = self.step.bound, sizes_written(self.step.program)
        check_arguments(bound.changes)
        results = [port for port in program.outputs if port.role is Role.USER]
        targets: dict[str, Json] = {}
        dropped: set[str] = set()
        for target, port in zip(bound.targets, program.outputs[len(results) :], strict=False):
            kept = isinstance(target, Gradient) and target.tensor is not None
            if kept or isinstance(target, (Recorded, ReadAfter)):
                dropped.add(port.name)
            else:
                targets[port.name] = self._target(target, port)
        program = _without_outputs(program, dropped)
        _check_ints(program)
        stored = {
            **program_to_json(program),
            "sources": [self._source(*pair) for pair in zip(bound.sources, program.inputs, strict=True)],
            "targets": [targets.get(port.name) for port in program.outputs[len(results) :]],
            "returns": [self._result(index, result) for index, result in enumerate(bound.results)],
            "conditions": branches_to_json(self.step.conditions, sizes_in(program)),
            "steps": dict(self.step.steps),
        }
        arguments = called.arguments_to_json(self.step.tree, self.step.keys, self.step.names)
        returned = forms.to_json(called.returned(bound, program, self.step.keys))
        packed = PackedProgram(arguments, returned, stored, self.tensors)
        return for_sizes(packed, self.step.keys, self.step.ones)

    def _source(self, source: Source, port: Port) -> Json:
        match source:
            case Fixed(torch.Tensor() as tensor):
                row = row_of(port.path, tensor)
                if tensor.stride() != (row.stride or contiguous_stride(row.shape)):
                    raise Refused(
                        f"{port.path} is in memory with gaps, or shows elements twice: its strides are {tensor.stride()}",
                        "hold its contiguous() form, and call the graph once before it is saved",
                    )
                self.tensors[port.path] = tensor
                return {"state": port.path}
            case Fixed(torch.Generator() as generator):
                (self.tensors[port.path],) = read_generators([generator])
                return {"generator": [port.path, str(generator.device)]}
            case Argument(index):
                return {"argument": index}
            case Number(container, key, index):
                return {"number": [self.places.of(container, port.path), key, index]}
        raise Refused(
            f"the step begins with {port.path}, which is outside of its state",
            "keep_gradients(False), and pass tensors as arguments",
        )

    def _target(self, target: Target, port: Port) -> Json:
        match target:
            case Copy(tensor):
                return {"state": self._known(tensor, port.path)}
            case CopyToArgument(index):
                return {"argument": index}
            case Gradient(None, index):
                return {"gradient": index}
            case Assign(container, key):
                if type(key) in (str, int):
                    return {"place": [self.places.of(container, port.path), key]}
        raise Refused(f"the step sets {port.path}, which has no place in an artifact")

    def _known(self, tensor: torch.Tensor, path: str) -> str:
        """The path of a tensor of the state; one that no program reads gets one now."""
        for known, other in self.tensors.items():
            if other is tensor:
                return known
        self.tensors[path] = tensor
        return path

    def _result(self, number: int, result: Result) -> Json:
        if result.live is not None:
            return {"view": self._view(result.live)}
        if result.kind == "output":
            return {"output": result.index}
        if result.kind == "argument":
            return {"argument": result.index}
        if isinstance(result.value, torch.Tensor):
            return {"state": self._known(result.value, f"result.{number}")}
        encode = LEAVES_TO_JSON.get(type(result.value))
        if encode is None:
            raise Refused(f"build() returns a {type(result.value).__name__}, which no artifact can hold")
        return {"value": encode(result.value)}

    def _view(self, live: LiveView) -> Json:
        check_view(live)
        match live.target:
            case Copy(tensor):
                whole: Json = {"state": self._known(tensor, "viewed")}
            case CopyToArgument(index):
                whole = {"argument": index}
        return [whole, list(live.size), list(live.stride), live.distance]


def for_sizes(packed: PackedProgram, keys: Sequence[Any], ones: Collection[frozenset[str]]) -> PackedProgram:
    """The same as a template, if sizes of the arguments vary; `keys` are those of the arguments, `ones` names that may be 1."""
    shapes = [key.shape for key in keys if isinstance(key, TensorKey)]
    places = size_places(shapes)
    present = {name: int(shapes[place.position][place.dim]) // place.parts for name, place in places.items()}
    if not present:
        return packed
    arguments, results, program = (
        by_names(part, list(present)) for part in (packed.arguments, packed.results, packed.program)
    )
    return PackedProgram(arguments, results, program, packed.tensors, ranges(program, present, ones))


def check_view(live: LiveView) -> None:
    """Refuse a result that shows what the step changes in a way that sizes and strides do not say."""
    if not live.is_strided:
        raise Refused(
            "build() returns a view of what it changes, by another dtype or conjugated",
            "return a clone of it",
        )


def check_arguments(changes: ArgumentChanges) -> None:
    """Raise Refused for a step that goes on in its arguments: an artifact takes things out of none and puts none in."""
    for refill in changes.refills:
        if any(result.kind in ("output", "fixed") for result in refill.results):
            raise Refused(
                f"the step puts new content into argument {refill.path}, where an artifact leaves it as it is",
                "return it from build(), and pass it to the next call",
            )
    if changes.resized:
        raise Refused("the step gives an empty argument a size", "return a new tensor from build()")


def _check_ints(program: Program) -> None:
    """Refuse products of ints that move: whoever loads the program does not know how long they take."""
    for node in program.ops():
        if node.target in (operator.mul, operator.pow) and value(node) == INT:
            raise Refused(f"the step multiplies ints at {origin(node)}", "make one a float: 1.0 * n")


def _without_outputs(program: Program, names: set[str]) -> Program:
    if not names:
        return program
    kept = [index for index, port in enumerate(program.outputs) if port.name not in names]
    copied = program.rebuilt()
    output = copied.graph.output_node()
    results: Any = output.args[0]
    output.args = ([results[index] for index in kept],)
    ports = tuple(program.outputs[index] for index in kept)
    return dce(replace(copied, outputs=ports))
