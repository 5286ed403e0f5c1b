"""Who holds memory at the peak of a step, summed by kind, module and phase."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import getitem
from typing import Final

import torch
from torch import fx

from monograph.ir.meta import compute_nodes, form, metas, origin, output_nodes, value
from monograph.ir.port import GRADIENTS, Role
from monograph.ir.program import Program
from monograph.plan.alias import Shown
from monograph.plan.lifetime import lifetimes
from monograph.plan.memory import Holder, MemoryPlan
from monograph.plan.plan import Plan

_GIVEN: Final = {
    Role.USER: "arguments",
    Role.PARAM: "parameters",
    Role.BUFFER: "buffers",
    Role.OPTIM: "optimizer state",
    Role.GRAD: "gradients",
    Role.EMA: "averages",
}
_OTHER_STATE: Final = "other state"
_OF_GRADIENTS: Final = ("scale", "clip", "update")  # the phases that read them
_MADE: Final = {"result": "results", "state": "new state", "inside": "workspace", "temporary": "temporaries"}
GIVEN: Final = (*_GIVEN.values(), _OTHER_STATE)  # the kinds of what the caller holds, during the whole step


@dataclass(frozen=True)
class Holding:
    """Tensors of one kind that are held at the peak.

    `module` is the one that they belong to, or that makes them; `phase` is where they are made, empty for what the caller
    holds during the whole step.
    """

    kind: str
    module: str
    phase: str
    nbytes: int
    tensors: int


def by_module(held: Iterable[Holding]) -> Mapping[str, Mapping[str, int]]:
    """Bytes by module and kind, each module with all that is inside of it; the most first."""
    found: dict[str, dict[str, int]] = {}
    for item in held:
        parts = [item.module] if item.module.startswith("optimizer.") else item.module.split(".")
        for end in range(1, len(parts) + 1):
            kinds = found.setdefault(".".join(parts[:end]), {})
            kinds[item.kind] = kinds.get(item.kind, 0) + item.nbytes
    return dict(sorted(found.items(), key=lambda entry: -sum(entry[1].values())))


def holders(plan: Plan, memory: MemoryPlan) -> tuple[Holding, ...]:
    """What is held while the node of the peak runs, the largest first: all of state and arguments, and what the step made."""
    found: dict[tuple[str, str, str], list[int]] = {}
    for kind, module, phase, nbytes in (*_given(plan.program), *_made(plan, memory.holders)):
        if nbytes:
            found.setdefault((kind, module, phase), []).append(nbytes)
    summed = [Holding(*key, sum(sizes), len(sizes)) for key, sizes in found.items()]
    return tuple(sorted(summed, key=lambda item: (-item.nbytes, item.kind, item.module, item.phase)))


def _given(program: Program) -> Iterator[tuple[str, str, str, int]]:
    nodes = program.graph.find_nodes(op="placeholder")
    for port, node in zip(program.inputs, nodes, strict=True):
        nbytes = sum(meta.extent for meta in metas(value(node)))
        module = "" if port.role is Role.USER else _module_of(port.path)
        yield _GIVEN.get(port.role, _OTHER_STATE), module, "", nbytes


def _made(plan: Plan, held: Iterable[Holder]) -> Iterator[tuple[str, str, str, int]]:
    """What the step made; of what a subgraph holds while it runs, what that made."""
    makers, parts = _Makers(plan), {part.program.name: part for part in plan.parts}
    for item in held:
        part = parts.get(makers.calls.get(item.node, ""))
        if item.kind == "inside" and part is not None and item.nbytes == part.memory.peak_bytes:
            yield from _made(part, part.memory.holders)
            continue
        path = makers.path(item)
        module = _module_of(path) if path else item.origin.module
        yield makers.kind(item, path), module, makers.phases.get(item.node, item.origin.phase), item.nbytes


class _Makers:
    """The nodes of a plan: in which phase each runs, in which phase what it makes is read last, and what state that is.

    What one node makes is distinguished by its bytes: where these are the same, so is all that counts here.
    """

    def __init__(self, plan: Plan) -> None:
        nodes = plan.program.graph.nodes
        self.calls = {node.name: str(node.target) for node in nodes if node.op == "call_module"}
        of_parts = {part.program.name: _phase_of(part.program) for part in plan.parts}
        self.phases = {node.name: origin(node).phase or of_parts.get(str(node.target), "") for node in nodes}
        self._last: dict[tuple[str, int], str] = {}
        for storage, life in lifetimes(plan.program.graph, plan.aliases).items():
            self._last.setdefault((storage.maker, storage.nbytes), self.phases.get(life.last_read, ""))
        self._paths: dict[tuple[str, int], list[str]] = {}
        for port, shown in zip(plan.program.outputs, plan.aliases.outputs, strict=True):
            if isinstance(shown, Shown) and port.role in (Role.STATE, Role.GRAD):
                for storage in shown.certain:
                    self._paths.setdefault((storage.maker, storage.nbytes), []).append(port.path)
        gradients = {part.program.name: _gradients_of(part.program) for part in plan.parts}
        for node in nodes:
            for nbytes, paths in gradients.get(self.calls.get(_added_from(node).name, ""), {}).items():
                self._paths.setdefault((node.name, nbytes), []).extend(paths)

    def path(self, item: Holder) -> str:
        """The state or gradient that a holder is the new value of; each is named once."""
        paths = self._paths.get((item.node, item.nbytes))
        return paths.pop(0) if paths else ""

    def kind(self, item: Holder, path: str) -> str:
        """What a holder is to the user."""
        if path.startswith(GRADIENTS):
            return "gradients"
        if item.kind != "temporary":
            return _MADE.get(item.kind, item.kind)
        made, read = self.phases.get(item.node, ""), self._last.get((item.node, item.nbytes), "")
        if made not in ("forward", "update") and read in _OF_GRADIENTS:
            return "gradients"
        return "activations" if (made, read) == ("forward", "backward") else _MADE["temporary"]


def _added_from(node: fx.Node) -> fx.Node:
    """The call of a micro-batch whose gradients a node adds to those before; any other node is itself."""
    if node.target is torch.ops.aten._foreach_add.List:
        added = node.args[1]
        if isinstance(added, fx.Node) and added.target is getitem and isinstance(added.args[0], fx.Node):
            return added.args[0]
    return node


def _gradients_of(program: Program) -> dict[int, list[str]]:
    """The paths of the gradients that a part returns, by their bytes."""
    found: dict[int, list[str]] = {}
    for port, output in zip(program.outputs, output_nodes(program.graph), strict=True):
        described = form(output) if isinstance(output, fx.Node) else None
        if port.role is Role.GRAD and described is not None:
            found.setdefault(described.extent, []).append(port.path)
    return found


def _phase_of(program: Program) -> str:
    """The phase of most of its ops."""
    phases = Counter(origin(node).phase for node in compute_nodes(program.graph))
    return max(phases, key=phases.__getitem__, default="")


def _module_of(path: str) -> str:
    """`optimizer.0/model.fc.weight/exp_avg` -> `model.fc`, `ema/model/fc.weight` -> `model.fc`"""
    owner, *rest = path.split("/")
    match owner, rest:
        case "ema", [module, name]:
            return f"{module}.{name}".rpartition(".")[0]
        case _, [parameter, *_]:
            return parameter.rpartition(".")[0]
    return path.rpartition(".")[0]
