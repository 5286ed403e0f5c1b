"""Programs as Python text. The same emitter makes the text that is shown and the code that runs."""

from __future__ import annotations

import builtins
import math
import operator
import os
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from monograph.compat.ops import spelling
from monograph.ir.call.numbers import spell_number
from monograph.ir.meta import computes, grad_mode, origin, output_nodes, value
from monograph.ir.port import Port

Spell = Callable[[Any], str]

_INFIX = {
    operator.add: "+",
    operator.sub: "-",
    operator.mul: "*",
    operator.truediv: "/",
    operator.floordiv: "//",
    operator.mod: "%",
    operator.pow: "**",
    operator.lt: "<",
    operator.le: "<=",
    operator.gt: ">",
    operator.ge: ">=",
    operator.eq: "==",
    operator.ne: "!=",
}
HEADER = """\
import math, operator
import torch
from torch import device
aten = torch.ops.aten
"""


def spell_target(target: Any) -> str:
    """The full Python name of an op."""
    if (op := spelling(target)) is not None:
        return op
    name = target.__name__
    modules: tuple[tuple[Any, str], ...] = (
        (operator, "operator."),
        (math, "math."),
        (torch, "torch."),
        (builtins, ""),
    )
    for module, prefix in modules:
        if getattr(module, name, None) is target:
            return f"{prefix}{name}"
    return f"{target.__module__}.{target.__qualname__}"


def spell_value(item: Any) -> str:
    """An argument as Python source."""
    match item:
        case fx.Node():
            return item.name
        case float() | complex():
            return spell_number(item)
        case list():
            return f"[{', '.join(map(spell_value, item))}]"
        case tuple():
            return f"({', '.join(map(spell_value, item))}{',' if len(item) == 1 else ''})"
        case dict():
            return f"{{{', '.join(f'{key!r}: {spell_value(entry)}' for key, entry in item.items())}}}"
        case slice():
            return f"slice({spell_value(item.start)}, {spell_value(item.stop)}, {spell_value(item.step)})"
    return spelling(item) or repr(item)  # an op that is given to another one


def call_text(node: fx.Node, spell: Spell = spell_target) -> str:
    """The right-hand side of a node: `aten.mm.default(x, t)`, or `1.0 - beta` for scalar arithmetic."""
    sign = _INFIX.get(node.target)  # type: ignore[arg-type]
    if sign is not None and len(node.args) == 2:
        left, right = map(spell_value, node.args)
        if left.startswith("-") and node.target is operator.pow:
            left = f"({left})"  # Python reads -1 ** n as -(1 ** n)
        return f"{left} {sign} {right}"
    if node.target is operator.neg:
        return f"-{spell_value(node.args[0])}"
    if node.target is operator.getitem:
        return f"{spell_value(node.args[0])}[{spell_value(node.args[1])}]"
    if node.op == "call_module":
        return f"{node.target}({', '.join(map(spell_value, node.args))})"
    if node.op == "call_method":
        arguments = ", ".join(map(spell_value, node.args[1:]))
        return f"{spell_value(node.args[0])}.{node.target}({arguments})"
    arguments = ", ".join(
        [*map(spell_value, node.args), *(f"{key}={spell_value(item)}" for key, item in node.kwargs.items())]
    )
    return f"{spell(node.target)}({arguments})"


def short_target(target: object) -> str:
    """`mm` for `aten.mm.default`: the name of an op where there is little room."""
    return spell_target(target).removeprefix("aten.").removesuffix(".default")


def note(node: fx.Node) -> str:
    """The comment after an op: what it makes, its phase, the user's line and module."""
    described, place = value(node), origin(node)
    made = f"({', '.join(map(str, described))})" if isinstance(described, tuple) else str(described or "")
    line = f"{os.path.basename(place.file)}:{place.line}" if place.file else ""
    return "  ".join(part for part in (made, place.phase_text, line, place.module) if part)


def comment(text: str) -> str:
    """A comment to follow code; names of modules may hold anything, also the end of a line."""
    return f"  # {' '.join(text.splitlines())}"


def module_and_phase(node: fx.Node) -> str:
    """What a profiler reports of an op."""
    place = origin(node)
    return f"{place.module or 'build()'} ({place.phase_text})"


def branch_code(module: fx.GraphModule, spell: Spell = spell_target) -> list[str]:
    """The lines of sub-programs (the branches of `torch.cond`), each as a function."""
    lines: list[str] = []
    for node in module.graph.nodes:
        if node.op == "get_attr" and isinstance(branch := getattr(module, str(node.target)), fx.GraphModule):
            lines += branch_code(branch, spell)
            lines += function_code(node.name, branch.graph, spell=spell)
    return lines


def function_code(
    name: str,
    graph: fx.Graph,
    *,
    spell: Spell = spell_target,
    frees: Mapping[str, Sequence[str]] | None = None,
    notes: bool = False,
    ports: tuple[tuple[Port, ...], tuple[Port, ...]] | None = None,
    marks: bool = False,
    instead: Mapping[fx.Node, str] = MappingProxyType({}),
    returned: str = "",
) -> list[str]:
    """The lines of one function; with `frees`, values are dropped after their last use.

    With `marks`, `mark(name)` is called where the module or the phase becomes another one, and with None at the end.
    `instead` has other lines than their own for ops, or none; `returned` is what it gives instead of the outputs.
    """
    marked = ""
    lines = [f"def {name}("]
    inputs = graph.find_nodes(op="placeholder")
    for index, node in enumerate(inputs):
        about = (
            comment(f"{ports[0][index].role:<8} {ports[0][index].path}  {value(node) or ''}") if ports else ""
        )
        lines.append(f"    {node.name},{about}")
    lines.append("):")
    for node in graph.nodes:
        if not computes(node) or instead.get(node) == "":
            continue
        if marks and (place := module_and_phase(node)) != marked:
            lines.append(f"    mark({place!r})")
            marked = place
        about = comment(text) if notes and (text := note(node)) else ""
        mode = "" if (enabled := grad_mode(node)) is None else f"with torch.set_grad_enabled({enabled}): "
        lines.append(f"    {mode}{instead.get(node) or f'{node.name} = {call_text(node, spell)}'}{about}")
        if frees and (dead := frees.get(node.name)):
            lines.append(f"    del {', '.join(dead)}")
    if marks:
        lines.append("    mark(None)")
    results = graph.output_node().args[0]
    if ports is None:
        return [*lines, f"    return {returned or spell_value(results)}"]
    lines.append("    return (")
    for port, item in zip(ports[1], output_nodes(graph), strict=True):
        lines.append(f"        {spell_value(item)},{comment(f'{port.role:<8} {port.path}')}")
    return [*lines, "    )"]


def program_code(
    name: str,
    module: fx.GraphModule,
    inputs: tuple[Port, ...],
    outputs: tuple[Port, ...],
    *,
    notes: bool = False,
) -> str:
    """A program as Python functions that run; with `notes`, each op says what it makes and where it comes from."""
    body = function_code(name, module.graph, notes=notes, ports=(inputs, outputs))
    return "\n".join([*branch_code(module), *body]) + "\n"
