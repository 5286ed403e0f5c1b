"""The rules of a program, one named check each. Run after capture and after every pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import fx

from monograph.compat.ops import HigherOrderOperator, OpOverload, writes_to_inputs
from monograph.compat.symbolic_numbers import is_symbolic
from monograph.errors import PassError
from monograph.ir.call.nested import leaves_in
from monograph.ir.meta import TensorMeta, compute_nodes, origin, output_nodes, value
from monograph.ir.port import Role
from monograph.ir.printer import spell_target
from monograph.ir.program import Program
from monograph.sizes.size import Size

Rule = Callable[[Program], Iterator[str]]
PHASES = frozenset({"forward", "backward", "scale", "clip", "update", "average"})
_PYTHON = frozenset({"_operator", "operator", "math", "builtins", "torch"})


def verify(program: Program, *, after: str) -> None:
    """Raise PassError naming the rule, the fault and the pass `after` which it is found."""
    for part in program.parts:
        verify(part, after=after)
    for rule in RULES:
        for fault in rule(program):
            name = rule.__name__.replace("_", " ")
            raise PassError(f"after {after}: rule '{name}' is broken: {fault}")


def inputs_match_ports(program: Program) -> Iterator[str]:
    """Each placeholder has its port, in order and of the same name."""
    names = [node.name for node in _placeholders(program)]
    ports = [port.name for port in program.inputs]
    if names != ports:
        yield f"placeholders {names} against ports {ports}"


def outputs_match_ports(program: Program) -> Iterator[str]:
    """There are as many outputs as output ports."""
    outputs = output_nodes(program.graph)
    if len(outputs) != len(program.outputs):
        yield f"{len(outputs)} outputs against {len(program.outputs)} ports"


def paths_are_unique(program: Program) -> Iterator[str]:
    """No two inputs, and no two state outputs, carry one path."""
    for ports in (program.inputs, tuple(port for _, port in program.updates())):
        seen: set[str] = set()
        for port in ports:
            if port.path in seen:
                yield f"path {port.path!r} stands twice"
            seen.add(port.path)


def values_come_before_use(program: Program) -> Iterator[str]:
    """Nodes stand in an order in which they can run."""
    seen: set[fx.Node] = set()
    for node in program.graph.nodes:
        needs = node.all_input_nodes
        if not seen.issuperset(needs):
            for needed in needs:
                if needed not in seen:
                    yield f"{node.name} reads {needed.name} before it is made"
        seen.add(node)


def nothing_is_written(program: Program) -> Iterator[str]:
    """No op changes its inputs: a program is pure, new state leaves through outputs."""
    targets = {id(node.target): node.target for node in compute_nodes(program.graph)}  # few, of many nodes
    writing = {key for key, target in targets.items() if writes_to_inputs(target)}
    for node in compute_nodes(program.graph) if writing else ():
        if id(node.target) in writing:
            yield f"{node.name} = {spell_target(node.target)} changes an input"


def targets_are_known(program: Program) -> Iterator[str]:
    """Every op is a torch op, Python arithmetic on numbers, or a call of one of the program's subgraphs."""
    for node in program.graph.nodes:
        if node.op == "call_function" and isinstance(node.target, OpOverload):
            continue
        if node.op == "call_module" and node.target in [part.name for part in program.parts]:
            continue
        if node.op not in ("placeholder", "output", "call_function", "get_attr", "call_method"):
            yield f"{node.name} is a {node.op}"
        elif node.op == "call_function" and not isinstance(node.target, (OpOverload, HigherOrderOperator)):
            module = getattr(node.target, "__module__", "")
            if module.partition(".")[0] not in _PYTHON:
                yield f"{node.name} calls {node.target}"


def updates_fit_their_state(program: Program) -> Iterator[str]:
    """New state has shape, dtype and device of the state it replaces; only an empty argument may get a shape."""
    inputs = {
        port.path: (port, node) for port, node in zip(program.inputs, _placeholders(program), strict=False)
    }
    outputs = output_nodes(program.graph)
    for index, port in program.updates():
        if port.path not in inputs or not isinstance(outputs[index], fx.Node):
            continue
        given, node = inputs[port.path]
        before, after = value(node), value(outputs[index])
        if not isinstance(before, TensorMeta) or not isinstance(after, TensorMeta):
            continue
        is_empty = given.role is Role.USER and 0 in before.shape
        if (before.dtype, before.device) != (after.dtype, after.device) or (
            before.shape != after.shape and not is_empty
        ):
            yield f"{port.path} is {before} and would become {after}"


def updates_do_not_alias_inputs(program: Program) -> Iterator[str]:
    """New state is never an input itself: write-backs would read what they write."""
    placeholders = set(_placeholders(program))
    outputs = output_nodes(program.graph)
    for index, port in program.updates():
        if outputs[index] in placeholders and isinstance(value(outputs[index]), TensorMeta):
            yield f"the new value of {port.path} is the input {outputs[index].name}"


def values_are_described(program: Program) -> Iterator[str]:
    """Every input that is a tensor or number has a description, and every op a phase."""
    described = (Role.RNG,)
    for port, node in zip(program.inputs, _placeholders(program), strict=False):
        if port.role not in described and value(node) is None:
            yield f"{node.name} has no description"
    for node in compute_nodes(program.graph):
        if origin(node).phase not in PHASES:
            yield f"{node.name} has no phase"


def sizes_are_computed(program: Program) -> Iterator[str]:
    """A size that varies is the result of an op; no op has that of the capture as a number."""
    for node in program.graph.nodes:
        for item in leaves_in([node.args, list(node.kwargs.values())]):
            if isinstance(item, Size) or is_symbolic(item):
                yield f"{node.name} takes the size {item} of the capture"


def _placeholders(program: Program) -> list[fx.Node]:
    return program.graph.find_nodes(op="placeholder")


RULES: tuple[Rule, ...] = (
    inputs_match_ports,
    outputs_match_ports,
    paths_are_unique,
    values_come_before_use,
    nothing_is_written,
    targets_are_known,
    updates_fit_their_state,
    updates_do_not_alias_inputs,
    values_are_described,
    sizes_are_computed,
)
