"""The graph as a drawing: DOT for Graphviz, or SVG without it."""

from __future__ import annotations

import html
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import fx

from monograph.errors import DefinitionError
from monograph.inspect.suggestions import nearest
from monograph.ir.meta import TensorMeta, origin, value
from monograph.ir.printer import short_target
from monograph.ir.program import Program
from monograph.passes.inductor.inline_parts import inline_parts

_COLORS = {"forward": "#d3f9d8", "backward": "#ffe3e3", "update": "#e5dbff"}
_OTHER = "#f1f3f5"
_LISTED = 20  # modules, in an error
_WIDTH, _HEIGHT, _GAP_X, _GAP_Y = 190, 34, 16, 26


@dataclass(frozen=True)
class Box:
    """An op, or an input of the drawn part."""

    name: str
    text: str
    below: str  # what it makes
    color: str
    place: str


@dataclass
class Drawing:
    """Boxes by name, and which feeds which."""

    boxes: dict[str, Box] = field(default_factory=dict)
    arrows: list[tuple[str, str]] = field(default_factory=list)


def draw(path: str | Path, program: Program, module: str | None) -> None:
    """Write a drawing of the ops of `module` (of the whole step for None), with what they read from outside of it."""
    target = Path(path)
    drawing = _drawing(inline_parts(program), module)
    if target.suffix == ".dot":
        target.write_text(_dot(drawing))
    elif target.suffix == ".svg":
        target.write_text(_svg(drawing))
    else:
        raise DefinitionError(
            f"draw({str(path)!r}): drawings are DOT or SVG files", hint='draw("step.svg", module="model.fc")'
        )


def _drawing(program: Program, module: str | None) -> Drawing:
    drawing = Drawing()
    inside = {
        node
        for node in program.graph.nodes
        if node.op == "call_function" and (module is None or origin(node).is_in(module))
    }
    if not inside:
        known = {origin(node).module for node in program.graph.nodes if origin(node).module}
        near = nearest(str(module), known) or sorted(known)[:_LISTED]
        raise DefinitionError(
            f"no op belongs to the module {module!r}", hint=f"modules near it: {', '.join(near)}"
        )
    paths = program.input_paths
    for node in program.graph.nodes:
        if node not in inside:
            continue
        drawing.boxes[node.name] = _box(node, paths)
        for item in node.all_input_nodes:
            if item not in inside:
                drawing.boxes.setdefault(item.name, _box(item, paths, outside=True))
            drawing.arrows.append((item.name, node.name))
    return drawing


def _box(node: fx.Node, paths: Mapping[str, str], *, outside: bool = False) -> Box:
    place, described = origin(node), value(node)
    below = str(described) if isinstance(described, TensorMeta) else ""
    if node.op != "call_function":
        return Box(node.name, paths.get(node.name, node.name), below, "#ffffff", "")
    op = short_target(node.target)
    color = "#ffffff" if outside else _COLORS.get(place.phase, _OTHER)
    return Box(node.name, f"{node.name}: {op}", below, color, str(place))


# --- DOT -------------------------------------------------------------------------------------------------------------


def _dot(drawing: Drawing) -> str:
    lines = ["digraph step {", '  node [shape=box, style=filled, fontname="sans-serif", fontsize=10];']
    for box in drawing.boxes.values():
        label = _quoted(f"{box.text}\n{box.below}".strip())
        lines.append(
            f"  {_quoted(box.name)} [label={label}, fillcolor={_quoted(box.color)}, tooltip={_quoted(box.place)}];"
        )
    lines += [f"  {_quoted(a)} -> {_quoted(b)};" for a, b in drawing.arrows]
    return "\n".join([*lines, "}"]) + "\n"


# --- SVG -------------------------------------------------------------------------------------------------------------


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _svg(drawing: Drawing) -> str:
    """Rows by the longest way from an input; in a row each box stands near the middle of what it reads."""
    place = _places(drawing)
    width = max(x for x, _ in place.values()) + _WIDTH + _GAP_X
    height = max(y for _, y in place.values()) + _HEIGHT + _GAP_Y
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" font-size="10">',
        '<defs><marker id="tip" markerWidth="7" markerHeight="6" refX="7" refY="3" orient="auto">'
        '<path d="M0,0 L7,3 L0,6 z" fill="#868e96"/></marker></defs>',
    ]
    for start, end in drawing.arrows:
        (x1, y1), (x2, y2) = place[start], place[end]
        middle = (y1 + _HEIGHT + y2) / 2
        lines.append(
            f'<path d="M{x1 + _WIDTH / 2},{y1 + _HEIGHT} C{x1 + _WIDTH / 2},{middle} {x2 + _WIDTH / 2},{middle} '
            f'{x2 + _WIDTH / 2},{y2}" fill="none" stroke="#adb5bd" marker-end="url(#tip)"/>'
        )
    for box in drawing.boxes.values():
        x, y = place[box.name]
        lines.append(
            f'<g><title>{html.escape(_printable(box.place))}</title><rect x="{x}" y="{y}" width="{_WIDTH}" height="{_HEIGHT}" rx="4" '
            f'fill="{box.color}" stroke="#adb5bd"/><text x="{x + 6}" y="{y + 14}">{html.escape(_cut(box.text))}</text>'
            f'<text x="{x + 6}" y="{y + 27}" fill="#6a737d">{html.escape(_cut(box.below))}</text></g>'
        )
    return "\n".join([*lines, "</svg>"]) + "\n"


def _cut(text: str) -> str:
    text = _printable(text)
    return text if len(text) <= 34 else f"{text[:32]}…"


def _printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else " " for letter in text)


def _places(drawing: Drawing) -> dict[str, tuple[int, int]]:
    sources: dict[str, list[str]] = defaultdict(list)
    for start, end in drawing.arrows:
        sources[end].append(start)
    level: dict[str, int] = {}
    inputs = [name for name in drawing.boxes if not sources[name]]
    ordered = [*inputs, *(name for name in drawing.boxes if sources[name])]
    for name in ordered:  # ops stand in an order in which they can run
        level[name] = max((level[item] + 1 for item in sources[name]), default=0)
    for name in inputs:  # as near as can be to who reads it
        readers = [level[end] for start, end in drawing.arrows if start == name]
        level[name] = max(min(readers, default=1) - 1, 0)
    rows: dict[int, list[str]] = defaultdict(list)
    for name in ordered:
        rows[level[name]].append(name)
    column: dict[str, float] = {}
    place: dict[str, tuple[int, int]] = {}
    for number in sorted(rows):
        names = sorted(
            rows[number], key=lambda name: _middle([column[item] for item in sources[name] if item in column])
        )
        for index, name in enumerate(names):
            column[name] = float(index)
            place[name] = (_GAP_X + index * (_WIDTH + _GAP_X), _GAP_Y + number * (_HEIGHT + _GAP_Y))
    return place


def _middle(columns: Sequence[float]) -> float:
    return sum(columns) / len(columns) if columns else 0.0
