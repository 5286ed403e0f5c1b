"""Replay: a captured step, op by op, forwards and back, with every value to look at. Live state never changes."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from monograph.errors import DefinitionError, shown
from monograph.inspect.nonfinite import find_nonfinite
from monograph.inspect.nonfinite_report import NonfiniteReport
from monograph.inspect.suggestions import nearest
from monograph.inspect.summary import Summary, summary
from monograph.inspect.walk import Walk
from monograph.ir.meta import labels, origin, output_nodes
from monograph.ir.port import gradient_path
from monograph.ir.printer import call_text
from monograph.ir.text import Displayed, Rows
from monograph.user_code.lines import Origin

_AROUND = 3  # ops shown before and after the present one


@dataclass(frozen=True)
class Op:
    """An op of the step: its name in the program, its text, and where it comes from."""

    number: int
    name: str
    text: str
    where: Origin

    def __str__(self) -> str:
        return f"{self.number:5} {self.name} = {self.text}  # {self.where}"


@dataclass(repr=False)
class Watch(Displayed):
    """Values whose name, module or line fits a pattern, as they are made."""

    pattern: str
    seen: list[tuple[Op, Summary]] = field(default_factory=list)

    def __str__(self) -> str:
        return "\n".join(f"{op.name} ({op.where}): {found}" for op, found in self.seen)


class Replay(Displayed):
    """A step to walk through. It stands in front of the op that would run next.

    Values are those of the captured program, which give eager's numbers; for a compiled build it is the same step
    before it was compiled. Going back forgets nothing, so that going forward again is quick, and random numbers stay as
    drawn.
    """

    def __init__(self, name: str, walk: Walk, tied: Mapping[str, str]) -> None:
        """`tied` has the path by which the program knows a tensor, for its other paths."""
        self._name, self._walk, self._tied = name, walk, tied
        self._position = 0
        self._watches: list[Watch] = []
        self._numbers = {node: number for number, node in enumerate(self._walk.nodes)}
        self._ops = [
            Op(number, node.name, call_text(node), origin(node))
            for number, node in enumerate(self._walk.nodes)
        ]

    # --- going -------------------------------------------------------------------------------------------------------

    @property
    def position(self) -> int:
        """How many ops have run."""
        return self._position

    @property
    def ops(self) -> tuple[Op, ...]:
        """All ops in their order."""
        return Rows(self._ops)

    @property
    def op(self) -> Op | None:
        """The op that runs next; None at the end of the step."""
        return self._ops[self._position] if self._position < len(self._ops) else None

    def step(self, count: int = 1) -> Op | None:
        """Run the next ops; gives the one to come."""
        return self._go(self._position + count)

    def back(self, count: int = 1) -> Op | None:
        """Stand before an earlier op."""
        return self._go(self._position - count)

    def run(self) -> None:
        """Go to the end of the step."""
        self._go(len(self._ops))

    def run_to(self, place: str, *, phase: str | None = None) -> Op:
        """Stand before the next op that belongs to a place: a module path, "file.py:41" or the name of an op.

        A module stands for those inside of it too. With `phase` ("forward", "backward", "update", ...) only ops of that
        phase count. Where the walk stands already counts: step() first to go on. Raises DefinitionError if none comes.
        """
        for op in self._ops[self._position :]:
            if _is_at(op, place) and phase in (None, op.where.phase):
                self._go(op.number)
                return op
        behind = any(_is_at(op, place) and phase in (None, op.where.phase) for op in self._ops)
        raise DefinitionError(
            f"no op {'ahead ' if behind else ''}belongs to {shown(place)}{f' in {phase}' if phase else ''}",
            hint="go back first" if behind else self._places_like(place),
        )

    def _go(self, position: int) -> Op | None:
        position = min(max(position, 0), len(self._ops))
        if position > self._walk.position:
            self._walk.advance(position - self._walk.position)
        for op in self._ops[self._position : position]:
            for watch in self._watches:
                if _fits(op, watch.pattern):
                    watch.seen.append((op, summary(self._made(op))))
        self._position = position
        return self.op

    # --- looking -----------------------------------------------------------------------------------------------------

    def value(self, which: str, *, call: int = -1) -> Any:
        """The value of an op, of what a module returned, of a state tensor before the step, or of an argument.

        `which` is a name in the program (`addmm_1`), a module path (`encoder.block.2`), or the path of a tensor
        (`model.fc.weight`). Of a module that ran several times `call` picks one; the last by default.
        """
        nodes = self._nodes(which)
        known = [node for node in nodes if self._is_known(node)]
        if not known:
            if nodes:
                raise DefinitionError(
                    f"{which} is not known yet, {self._distance(nodes)} ops ahead",
                    hint=f'run_to("{nodes[0].name}") and step(), or run()',
                )
            raise DefinitionError(f"the step has no value {shown(which)}", hint=self._places_like(which))
        return self._walk.values[self._call(known, call, which)]

    def grad_of(self, path: str, *, call: int = -1) -> Any:
        """The gradient of a parameter as its optimizer gets it, or of what a module returned in one of its calls."""
        path = self._tied.get(path, path)
        label = gradient_path(path)
        found: list[fx.Node] = []
        behind: list[
            fx.Node
        ] = []  # the calls of a forward, which backward() goes through from the last to the first
        for node in self._walk.nodes:
            if path in labels(node):
                found, behind = found + behind[::-1], []
            elif label in labels(node):
                behind.append(node)
        found += behind[::-1]
        if len(found) < 2:
            return self.value(label)
        return self.value(self._call(found, call, label).name)

    def new(self, path: str) -> Any:
        """The value of a state tensor after the step; known when its update has run."""
        ports = dict(zip((port.path for port in self._walk.program.outputs), self._outputs(), strict=True))
        path = self._tied.get(path, path)
        if path not in ports:
            raise DefinitionError(f"the step does not change {shown(path)}", hint=self._places_like(path))
        item = ports[path]
        if isinstance(item, fx.Node):
            return self.value(item.name)
        return item

    def find_nonfinite(self) -> NonfiniteReport:
        """The first op of the whole step that makes a NaN or an infinity, wherever one stands now."""
        return find_nonfinite(self._name, self._walk.again(keep=False))

    def watch(self, pattern: str) -> Watch:
        """Note the range of each value that is made from now on, if its name, module or line fits the pattern."""
        self._watches.append(Watch(pattern))
        return self._watches[-1]

    def operands(self) -> dict[str, Any]:
        """What the next op reads, by name."""
        if self.op is None:
            return {}
        node = self._walk.nodes[self._position]
        return {item.name: self._walk.values[item] for item in node.all_input_nodes}

    def __str__(self) -> str:
        first = max(self._position - _AROUND, 0)
        lines = [f"{self._name}: {self._position} of {len(self._ops)} ops have run"]
        for op in self._ops[first : self._position + _AROUND + 1]:
            mark = "->" if op.number == self._position else "  "
            made = f"  {summary(self._made(op))}" if op.number < self._position else ""
            lines.append(f"{mark}{op}{made}")
        return "\n".join(lines)

    # --- inside ------------------------------------------------------------------------------------------------------

    def _call(self, nodes: Sequence[fx.Node], call: int, which: str) -> fx.Node:
        if not -len(nodes) <= call < len(nodes):
            raise DefinitionError(
                f"{which} has no call {call}", hint=f"{len(nodes)} are known, counted from 0"
            )
        return nodes[call]

    def _made(self, op: Op) -> Any:
        return self._walk.values[self._walk.nodes[op.number]]

    def _outputs(self) -> tuple[Any, ...]:
        return output_nodes(self._walk.program.graph)

    def _is_known(self, node: fx.Node) -> bool:
        return self._numbers.get(node, -1) < self._position

    def _distance(self, nodes: Sequence[fx.Node]) -> int:
        return min(self._numbers[node] for node in nodes) - self._position + 1

    def _nodes(self, which: str) -> list[fx.Node]:
        """The nodes that go by a name, in their order."""
        which = self._tied.get(which, which)
        program = self._walk.program
        paths = program.input_paths
        found = [
            node
            for node in program.graph.nodes
            if node.op != "output" and (which in (node.name, *labels(node)) or paths.get(node.name) == which)
        ]
        for port, item in zip(program.outputs, self._outputs(), strict=True):
            if port.path == which and isinstance(item, fx.Node) and item not in found and not found:
                found.append(item)
        return found

    def _places_like(self, place: str) -> str:
        known = {op.where.module for op in self._ops if op.where.module}
        known |= {f"{os.path.basename(op.where.file)}:{op.where.line}" for op in self._ops if op.where.file}
        known |= {label for node in self._walk.nodes for label in labels(node)}
        known |= {port.path for port in self._walk.program.inputs}
        near = nearest(place, known)
        return (
            f"near it: {', '.join(near)}" if near else "print(replay) shows ops; replay.ops has all of them"
        )


def _is_at(op: Op, place: str) -> bool:
    if place == op.name or op.where.is_in(place):
        return True
    file, _, line = place.rpartition(":")
    return (
        line.isdigit()
        and int(line) == op.where.line
        and bool(op.where.file)
        and (op.where.file == file or op.where.file.endswith(os.sep + file))
    )


def _fits(op: Op, pattern: str) -> bool:
    places = (op.name, op.where.module, f"{os.path.basename(op.where.file)}:{op.where.line}")
    return any(fnmatch.fnmatchcase(place, pattern) for place in places if place)
