"""A step as a package of native code: its state inside, its arguments and results as tensors in their order."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch

from monograph.artifact.native_package import KIND, NOTE, SCHEMA, SUFFIX
from monograph.artifact.pack import Step, check_arguments, check_view
from monograph.artifact.schema import call as called
from monograph.artifact.schema import tree as forms
from monograph.artifact.schema.signatures import read_signature
from monograph.artifact.schema.tree import Leaf, ValueForm
from monograph.backends.package import Given, PackageInterface, Place, compile_package
from monograph.checkpoint.errors import Refused
from monograph.checkpoint.files import in_place_of
from monograph.checkpoint.leaves import Json
from monograph.checkpoint.manifest import monograph_version
from monograph.compat.tensors import storage_key
from monograph.errors import ArtifactError, BackendError
from monograph.export.branches import branches, check_branches
from monograph.ir.call.tree import leaf_paths
from monograph.ir.graph_signature import (
    Argument,
    Assign,
    Copy,
    CopyToArgument,
    Counted,
    Fixed,
    Gradient,
    Number,
    ReadAfter,
    Recorded,
    Result,
    Source,
    Target,
)
from monograph.ir.meta import ScalarMeta, TensorMeta, plain, value
from monograph.ir.port import Port, Role
from monograph.passes.run import Stage, run_passes
from monograph.passes.table import pipeline
from monograph.settings import Settings
from monograph.state.averages import Average

_NOT_TO_REPEAT: Final = "make more steps before it is exported, or deploy it with mg.save(graph, path)"


def write_package(step: Step, settings: Settings, path: Path) -> None:
    """Compile a step and write it to a file. `Refused` for what only Python can do; ArtifactError with the user's line."""
    if path.suffix != SUFFIX:
        raise Refused(f"the name of a package ends in {SUFFIX}", f'write "{path.with_suffix(SUFFIX).name}"')
    settings, step = replace(settings, backend="inductor"), step.in_numbers
    binding = _Binding(step)
    interface = binding.interface()
    note = json.dumps(binding.note(interface), allow_nan=False)
    program = run_passes(Stage("capture", step.bound.program, 0.0), pipeline(settings))[-1].program
    with tempfile.TemporaryDirectory(prefix="monograph-") as folder:
        made = Path(folder, f"model{SUFFIX}")
        try:
            compile_package(program, settings, interface, {NOTE: note}, made)
        except BackendError as error:
            message = f'cannot save "{path}": {error.message}'
            raise ArtifactError(message, where=error.where, hint=error.hint) from error
        with in_place_of(path) as beside:
            shutil.copyfile(made, beside)


class _Binding:
    """Where the inputs and outputs of a step are, seen from outside of Python."""

    def __init__(self, step: Step) -> None:
        self._step, self._bound = step, step.bound
        arguments = called.arguments_to_json(step.tree, step.keys, step.names)
        self._returned = called.returned(step.bound, step.program, step.keys)
        self._forms: dict[str, Json] = {"arguments": arguments, "results": forms.to_json(self._returned)}
        parameters = read_signature(self._forms).parameters
        paths = (path for item in parameters for path in leaf_paths(item.form.tree, item.name))
        leaves = (leaf for item in parameters for leaf in item.form.leaves)
        given = {
            index: (path, leaf)
            for index, (path, leaf) in enumerate(zip(paths, leaves, strict=True))
            if not isinstance(leaf, ValueForm)
        }
        self._inputs = list(given.values())
        self._numbers = {index: number for number, index in enumerate(given)}  # of inputs, by their leaf
        self._state: dict[str, torch.Tensor] = {}
        self._held: dict[str, torch.Tensor] = {}  # the live tensors of the same paths

    def interface(self) -> PackageInterface:
        """For the compiler. `Refused` for what has no place outside of Python."""
        bound, program = self._bound, self._bound.program
        check_arguments(bound.changes)
        inputs = zip(bound.sources, program.inputs, program.graph.find_nodes(op="placeholder"), strict=True)
        sources = tuple(self._source(source, port, value(node)) for source, port, node in inputs)
        first = sum(port.role is Role.USER for port in program.outputs)
        targets = enumerate(zip(bound.targets, program.outputs[first:], strict=True), first)
        placed = [(position, self._target(target, port)) for position, (target, port) in targets]
        writes = tuple((position, place) for position, place in placed if place is not None)
        results = tuple(
            self._result(number, result)
            for number, (result, leaf) in enumerate(zip(bound.results, self._returned.leaves, strict=True))
            if not isinstance(leaf, ValueForm)
        )
        self._check({place for _, place in writes}, sources)
        arguments = tuple(_described(leaf) for _, leaf in self._inputs)
        return PackageInterface(arguments, sources, self._state, writes, results)

    def note(self, interface: PackageInterface) -> Json:
        """What is stored beside the code."""
        outputs = zip(leaf_paths(self._returned.tree, "result"), self._returned.leaves, strict=True)
        written = {place for _, place in interface.writes}
        devices = [item.device for item in interface.state.values()] + [
            item.device for item in interface.arguments
        ]
        others = [str(device) for device in devices if device.type != "cpu"]
        return {
            "kind": KIND,
            "schema": SCHEMA,
            "monograph": monograph_version(),
            "torch": torch.__version__,
            "device": others[0] if others else "cpu",
            "inputs": [path for path, _ in self._inputs],
            "outputs": [path for path, leaf in outputs if not isinstance(leaf, ValueForm)],
            "changed": [index for index, number in self._numbers.items() if number in written],
            "conditions": list(self._step.conditions.about),
            **self._forms,
        }

    def _source(self, source: Source, port: Port, described: Any) -> Place:
        match source:
            case Argument(index):
                return self._numbers[index]
            case Fixed(torch.Tensor() as tensor):
                return self._known(tensor, port.path)
            case Number(Average(updates=0)):
                raise Refused(
                    f"{port.path} starts with the next step", "call the graph once, and export it then"
                )
            case Counted():
                raise Refused(f"the step counts in Python, in {port.path}", "count in a buffer")
            case Number() if isinstance(described, ScalarMeta):
                self._state[port.path] = torch.tensor(source.read(), dtype=described.as_tensor.dtype)
                return port.path
        raise Refused(
            f"the step begins with {port.path}, which is outside of its state",
            "keep_gradients(False), draw from torch's own generator, and pass tensors as arguments",
        )

    def _target(self, target: Target, port: Port) -> Place | None:
        match target:
            case Copy(tensor):
                return self._known(tensor, port.path)
            case CopyToArgument(index):
                return self._numbers[index]
            case Assign() if port.path in self._state and port.path not in self._held:
                return port.path  # a number
            case Recorded() | ReadAfter() | Gradient(torch.Tensor()):
                return None
            case Gradient():
                raise Refused(
                    f"the step leaves {port.path}, a gradient of an argument", "return it from build()"
                )
        raise Refused(f"the step makes {port.path} anew, and the next one would find it", _NOT_TO_REPEAT)

    def _known(self, tensor: torch.Tensor, path: str) -> str:
        """The path of a tensor of the state, whose present values are kept."""
        for known, other in self._held.items():
            if other is tensor:
                return known
        kept = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        self._state[path], self._held[path] = kept.copy_(tensor.detach()), tensor
        return path

    def _result(self, number: int, result: Result) -> Given:
        if result.live is not None:
            live, whole = result.live, result.live.target
            check_view(live)
            place = (
                self._known(whole.tensor, f"result.{number}")
                if isinstance(whole, Copy)
                else self._numbers[whole.index]
            )
            return Given(place=place, view=(live.size, live.stride, live.distance))
        if result.kind == "output":
            return Given(output=result.index)
        if result.kind == "argument":
            return Given(place=self._numbers[result.index])
        return Given(place=self._known(result.value, f"result.{number}"))

    def _check(self, written: set[Place], sources: tuple[Place, ...]) -> None:
        """State has memory of its own in a package, and one program serves for every step."""
        storages = Counter(map(storage_key, self._held.values()))
        for path, tensor in self._held.items():
            if path in written and storages[storage_key(tensor)] > 1:
                raise Refused(
                    f"{path} shares memory with other state, and the step changes it", "clone one of them"
                )
        check_branches(self._step)
        for about, positions in branches(self._step.conditions):
            if any(sources[position] in written for position in positions):
                raise Refused(
                    f"`{about}` holds in this step, and a later one may need another program",
                    "deploy it with mg.save(graph, path)",
                )


def _described(leaf: Leaf) -> TensorMeta:
    """An input. A float is a tensor of one number."""
    assert isinstance(leaf, (TensorMeta, ScalarMeta))
    return plain(leaf) if isinstance(leaf, TensorMeta) else leaf.as_tensor
