"""The graph signature of a program: the names of its inputs and outputs, and what they are bound to."""

from __future__ import annotations

import builtins
import keyword
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from monograph.capture.accumulation.batches import batch_paths
from monograph.capture.accumulation.first_buffers import TakenOver
from monograph.capture.accumulation.program import two_programs
from monograph.capture.numbers.moving import is_moving
from monograph.capture.numbers.taken import Taken
from monograph.capture.step.request import Request
from monograph.capture.step.traced_step import TracedStep
from monograph.capture.tensors.conditions import Conditions, read_outs, scalar_conditions, symbols_read_out
from monograph.capture.tensors.fakes import Input, Inputs
from monograph.capture.tensors.functional.functionalise import Functional
from monograph.capture.tensors.functional.lifting import lift_generators
from monograph.capture.tensors.functional.overlaps import Overlaps
from monograph.capture.tensors.functional.views import live_results, live_targets, views_of_inputs
from monograph.distributed.replicas import Replica
from monograph.ir.graph_signature import (
    Argument,
    ArgumentChanges,
    Between,
    Copy,
    CopyToArgument,
    CopyToGradient,
    Fixed,
    HeldGradient,
    LiveView,
    ReadAfter,
    Recorded,
    Result,
    Target,
)
from monograph.ir.meta import compute_nodes, forget_torch_meta, origin, set_origin
from monograph.ir.port import Port, Role
from monograph.ir.program import Program
from monograph.user_code.lines import Origin

# names that mean something else in the text of a program, or that fx gives to no node
_SIGNS = re.compile(r"[^0-9A-Za-z]")  # what no name of a placeholder has
_MEANT_OTHERWISE = frozenset(
    {"aten", "torch", "math", "operator", "device", "inf", "nan", "NoneType", "pytree", "fx_pytree"}
    | {"accumulate", "update", "self"}
    | set(keyword.kwlist)
    | set(dir(builtins))
)


@dataclass(frozen=True)
class GraphSignature:
    """A program, where its outputs after the results go, and the branches it depends on.

    `unraised` are those branches, and that no arithmetic of the program raises.
    """

    program: Program
    targets: tuple[Target, ...]
    results: tuple[Result, ...]
    changes: ArgumentChanges
    conditions: Conditions
    unraised: Conditions
    overlaps: Overlaps
    fixed: Mapping[str, Origin]  # sizes that only the present number fits, and the user's line for each
    taken: Mapping[str, Taken]  # of other numbers that could move, by their paths

    def all_results(self) -> list[Result]:
        """The leaves of what a call returns, and of what it leaves in its arguments."""
        return [*self.results, *(item for refill in self.changes.refills for item in refill.results)]


def graph_signature(
    request: Request,
    step: TracedStep,
    recorded: fx.GraphModule,
    functional: Functional,
    *,
    reaching: Collection[str],
) -> GraphSignature:
    """Name the inputs and outputs of a functional graph, and say where its new state belongs.

    `reaching` are the paths of inputs whose memory the step looks at beyond their own elements.
    """
    module, inputs = functional.module, step.inputs
    for generator in lift_generators(module):
        inputs.add(generator, Role.RNG, f"generator.{len(inputs.items)}", Fixed(generator))
    changed = [inputs.items[position] for position in functional.changed]
    live = _live_forms(step, functional, changed)
    of_changed, views = _views(step, recorded.graph, functional)
    _sums_last(module.graph, inputs)
    conditions, unraised = _conditions(step, recorded.graph, module.graph)
    targets, updates = _new_state(step, functional, changed)
    num_results = functional.num_results - len(step.side_effects.state_outputs)
    targets = live_targets(targets, updates, views, num_results)
    overlaps = Overlaps(inputs, targets, request.call, reaching).without(
        _unread(module.graph, inputs, targets)
    )
    overlaps.check(request.call)
    program = _program(request, step, module, num_results, list(zip(targets, updates, strict=True)))
    outside = tuple(target for target in targets if target != Between())
    whole = request.settings.accumulation_steps == 1  # no view can be a joined result of micro-batches
    shown = (of_changed, functional.shown) if whole else ({}, {})
    results = live_results(step.side_effects.results, *shown, live)
    refills = tuple(
        replace(refill, results=live_results(refill.results, *shown, live))
        for refill in step.results.argument_changes.refills
    )
    changes = replace(step.results.argument_changes, refills=refills)
    at, items = inputs.symbols, inputs.items
    taken = {items[at[name]].path: where for name, where in inputs.moving.taken.items() if name in at}
    fixed = dict(inputs.moving.fixed)
    return GraphSignature(program, outside, results, changes, conditions, unraised, overlaps, fixed, taken)


def _conditions(step: TracedStep, recorded: fx.Graph, functional: fx.Graph) -> tuple[Conditions, Conditions]:
    """The branches that the step depends on; and those with what says that none of its arithmetic raises."""
    inputs, noted, call = step.inputs, step.conditions, step.request.call
    sizes = inputs.sizes(call)
    noted.note_later(sizes)
    read_out = dict(zip(symbols_read_out(recorded), read_outs(functional), strict=True))
    paths = [item.path for item in inputs.items]
    about = (inputs.symbols, read_out, step.readings, inputs.roles, paths, sizes)
    conditions = scalar_conditions(noted.branches, *about)
    if not noted.unraised:
        return conditions, conditions
    return conditions, scalar_conditions([*noted.branches, *noted.unraised], *about)


def _program(
    request: Request,
    step: TracedStep,
    module: fx.GraphModule,
    num_results: int,
    new_state: Sequence[tuple[Target, str]],
) -> Program:
    """The program with its ports. `new_state` has the target and the path of each output after the results."""
    out_ports = [Port(f"out{index}", Role.USER, f"result.{index}") for index in range(num_results)]
    out_ports += [
        Port(f"out{index}", _role_of(target), path)
        for index, (target, path) in enumerate(new_state, num_results)
    ]
    items = step.inputs.items
    _rename(module.graph, items)
    for node in compute_nodes(module.graph):
        if not origin(node).phase and is_moving(node.meta.get("val")):
            set_origin(
                node, Origin(phase="forward")
            )  # arithmetic on sizes, which is written where a trace asks for it
    for node in module.graph.nodes:
        forget_torch_meta(node)
    nodes = [node for node in module.graph.nodes if node.op == "placeholder"]
    in_ports = [Port(node.name, item.role, item.path) for node, item in zip(nodes, items, strict=True)]
    module.recompile()
    name = "train_step" if request.owned.optimizers else "infer_step"
    program = Program(name, module, tuple(in_ports), tuple(out_ports))
    if (steps := request.settings.accumulation_steps) > 1:
        split = batch_paths(request.call)
        program = two_programs(
            program, steps=steps, split=split, moved=step.moved(), taken_over=taken_over(step.replicas)
        )
    return program


def taken_over(replicas: Iterable[Replica]) -> list[TakenOver]:
    """Buffers of modules that several processes have copies of."""
    return [
        TakenOver(item.path, item.group, tuple(path for path, _ in item.buffers()))
        for item in replicas
        if item.syncs_buffers
    ]


def _role_of(target: Target) -> Role:
    if isinstance(target, (Recorded, ReadAfter)):
        return Role.PROBE
    return Role.GRAD if target == Between() else Role.STATE


def _sums_last(graph: fx.Graph, inputs: Inputs) -> None:
    """Put the inputs that only subgraphs of the program see after those that a call gives."""
    nodes = [node for node in graph.nodes if node.op == "placeholder"]
    inside = [index for index, item in enumerate(inputs.items) if item.source == Between()]
    last = nodes[-1] if nodes else None
    for node in (nodes[index] for index in inside):
        if last is not None and last is not node:
            last.append(node)
        last = node
    moved = [inputs.items[index] for index in inside]
    inputs.items = [item for item in inputs.items if item.source != Between()] + moved


def _new_state(
    step: TracedStep, functional: Functional, changed: Sequence[Input]
) -> tuple[list[Target], list[str]]:
    """Where each output after the results goes, and its path. An input that build() replaced is not written."""
    targets: list[Target] = [state_output.target for state_output in step.side_effects.state_outputs]
    inputs = {id(item.real): item.path for item in step.inputs.items if item.real is not None}
    paths = [  # state has one path, as an input and as an output: items of a list are inputs of other names
        inputs.get(id(state_output.target.tensor), state_output.path)
        if isinstance(state_output.target, Copy)
        else state_output.path
        for state_output in step.side_effects.state_outputs
    ]
    reassigned = {id(target.tensor) for target in targets if isinstance(target, Copy)}
    output = functional.module.graph.output_node()
    outputs = list(output.args[0])  # type: ignore[arg-type]
    kept = outputs[: functional.num_results]
    for item, value in zip(changed, outputs[functional.num_results :], strict=True):
        replaced = id(item.real) in reassigned or (item.role is Role.GRAD and item.path in paths)
        if not replaced and item.source != Between():
            targets.append(_place_of(item))
            paths.append(item.path)
            kept.append(value)
    output.args = (kept,)
    return targets, paths


def _live_forms(
    step: TracedStep, functional: Functional, changed: Sequence[Input]
) -> dict[int, tuple[Target, torch.Tensor]]:
    """By position of the output what new state is written into, and a tensor of its form."""
    state_outputs = [state_output.target for state_output in step.side_effects.state_outputs]
    first = functional.num_results - len(state_outputs)
    found: dict[int, tuple[Target, torch.Tensor]] = {
        position: (target, target.tensor)
        for position, target in enumerate(state_outputs, first)
        if isinstance(target, Copy)
    }
    for position, item in enumerate(changed, functional.num_results):
        if isinstance(item.fake, torch.Tensor) and item.source != Between():
            found[position] = (_place_of(item), item.fake)
    return found


def _views(
    step: TracedStep, recorded: fx.Graph, functional: Functional
) -> tuple[dict[int, LiveView], dict[int, LiveView]]:
    """By position the outputs that are views of an input which is changed in place, and those that are views of any.

    What is replaced after that is none of these: a view shows what was there.
    """
    state_outputs = [state_output.target for state_output in step.side_effects.state_outputs]
    replaced = {id(target.tensor) for target in state_outputs if isinstance(target, Copy)}
    kept = {
        position: _place_of(item)
        for position, item in enumerate(step.inputs.items)
        if isinstance(item.source, (Fixed, Argument))
        and isinstance(item.fake, torch.Tensor)
        and item.whole is None
        and id(item.real) not in replaced
    }
    found = views_of_inputs(recorded, kept)
    changed = {id(kept[position]) for position in functional.changed if position in kept}
    return {at: view for at, view in found.items() if id(view.target) in changed}, found


def _unread(graph: fx.Graph, inputs: Inputs, targets: Sequence[Target]) -> set[str]:
    """The paths of inputs that the step neither reads nor writes: what it puts others in the place of."""
    written = {id(target.tensor) for target in targets if isinstance(target, Copy)}
    nodes = graph.find_nodes(op="placeholder")
    pairs = zip(nodes, inputs.items, strict=True)
    return {item.path for node, item in pairs if not node.users and id(item.real) not in written}


def _place_of(item: Input) -> Target:
    """Where the new value of an input goes that the step changed in place."""
    match item.source:
        case Argument(index):
            return CopyToArgument(index, item.fake.requires_grad and not item.fake.is_leaf)
        case HeldGradient(parameter):
            return CopyToGradient(parameter)
    return Copy(item.real)


def _rename(graph: fx.Graph, items: Sequence[Input]) -> None:
    """Give placeholders names that a reader knows."""
    used: set[str] = set()
    for node in graph.nodes:
        if node.op != "placeholder":
            used.add(node.name)
    nodes = [node for node in graph.nodes if node.op == "placeholder"]
    for node, item in zip(nodes, items, strict=True):
        path = item.path.replace("/", "__")
        name = _SIGNS.sub("_", path).strip("_")
        name = f"{item.role.value}_{name}" if not name[:1].isalpha() or name in _MEANT_OTHERWISE else name
        while name in used:
            name += "_"
        used.add(name)
        node.name = node.target = name
