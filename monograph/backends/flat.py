"""The form that compilers take: tensors in, tensors out, new state copied into the old at the end."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import getitem
from typing import Any

import torch
from torch import fx

from monograph.compat.inductor.written.memory_lines import notes_of
from monograph.compat.ops import named_input
from monograph.errors import BackendError
from monograph.ir.meta import TensorMeta, origin, output_nodes, value
from monograph.ir.own_ops import APART
from monograph.ir.program import Program
from monograph.plan.alias import Aliases, aliases
from monograph.sizes.place import SizePlace, size_places

_COPY = torch.ops.aten.copy_.default
_ONE = torch.ops.aten.full.default


@dataclass(frozen=True)
class Source:
    """Where a view is taken from: an input of the step, or a result of the compiled function."""

    is_input: bool
    index: int


@dataclass(frozen=True)
class Flat:
    """A program for a compiler, and how its outputs are made.

    Each output of the program is written into its input (`written`), is a result (`returned`: position, index), or
    aliases an input or another output, which compiled code does not keep: `views` takes it from `sources`.
    With `is_flagged`, a number is the last input: 1 is written into it before anything else is written.
    """

    module: fx.GraphModule
    apart: Callable[[], fx.GraphModule]  # makes the same, with what is written computed first and then copied
    inputs: tuple[TensorMeta, ...]
    written: frozenset[int]
    returned: tuple[tuple[int, int], ...]
    viewed: tuple[int, ...]
    sources: tuple[Source, ...]
    views: fx.GraphModule | None
    is_flagged: bool

    @property
    def text(self) -> str:
        """The code to compile."""
        code: str = self.module.code
        return code

    @property
    def examples(self) -> list[tuple[Any, ...]]:
        """Shape, stride, type and device of each input."""
        flag = [((), (), torch.int64, torch.device("cpu"))] if self.is_flagged else []
        return [*((item.shape, item.stride, item.dtype, item.device) for item in self.inputs), *flag]

    @property
    def places(self) -> Mapping[str, SizePlace]:
        """Where each size that varies is found."""
        return size_places(meta.shape for meta in self.inputs)

    @property
    def sizes(self) -> Mapping[str, int]:
        """The sizes that vary as they are now."""
        return {
            name: int(self.inputs[position].shape[dim]) // parts
            for name, (position, dim, parts) in self.places.items()
        }

    def holds(self, condition: str) -> bool:
        """True if a condition over the names of sizes holds for these."""
        return bool(eval(condition, {"math": math}, dict(self.sizes)))

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        devices = {item.device for item in self.inputs if item.device.type != "cpu"}
        return next(iter(devices), torch.device("cpu"))


def flatten(program: Program, in_place: Collection[int], *, flagged: bool = False) -> Flat:
    """Give a program whose numbers are tensors the form that compilers take; with a flag if it writes, and on CPUs."""
    inputs = list(program.graph.find_nodes(op="placeholder"))
    outputs = output_nodes(program.graph)
    roots = _roots(program, in_place)
    compiled: list[fx.Node] = []  # what the compiled function returns
    returned, viewed = [], []
    for position, item in enumerate(outputs):
        if not isinstance(item, fx.Node) or position in in_place:
            continue
        root = roots.get(item, item)
        if root not in compiled and root.op != "placeholder":
            compiled.append(root)
        if item in roots:
            viewed.append(position)
        else:
            returned.append((position, compiled.index(item)))
    starts = list(dict.fromkeys(roots[outputs[position]] for position in viewed))
    sources = [
        Source(True, inputs.index(node)) if node.op == "placeholder" else Source(False, compiled.index(node))
        for node in starts
    ]
    written = [(outputs[position], program.outputs[position].path) for position in sorted(in_place)]
    metas = tuple(map(described, inputs))
    flagged = flagged and bool(in_place) and all(item.device.type == "cpu" for item in metas)
    return Flat(
        _module(program, compiled, written, flagged=flagged),
        partial(_module, program, compiled, written, flagged=flagged, apart=True),
        metas,
        frozenset(in_place),
        tuple(returned),
        tuple(viewed),
        tuple(sources),
        _views(program, starts, [outputs[position] for position in viewed]) if viewed else None,
        flagged,
    )


def described(node: fx.Node) -> TensorMeta:
    """What is known of an input, a tensor."""
    meta = value(node)
    if not isinstance(meta, TensorMeta):
        raise BackendError("a torch.Generator as an argument cannot be compiled", where=origin(node))
    return meta


def _roots(program: Program, in_place: Collection[int]) -> Mapping[fx.Node, fx.Node]:
    """For each output that aliases an input or another output, the value that it is a view of."""
    known = aliases(program)
    outputs = list(enumerate(output_nodes(program.graph)))
    shown = [known.possible[item.name] for _, item in outputs if isinstance(item, fx.Node)]
    found = {}
    for position, item in outputs:
        if not isinstance(item, fx.Node) or position in in_place:
            continue
        root = item
        while _is_view(root, known):
            root = root.args[0]  # type: ignore[assignment]
        together = sum(bool(known.possible[item.name] & other) for other in shown) > 1
        if root.op == "placeholder" or (root is not item and together):
            found[item] = root
    return found


def _is_view(node: fx.Node, known: Aliases) -> bool:
    """True for a view of the first argument; one of several results is one if its op gives views."""
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], fx.Node):
        return False
    return _is_view(node.args[0], known) if node.target is getitem else node.name in known.views


def _module(
    program: Program,
    compiled: Sequence[fx.Node],
    written: Sequence[tuple[fx.Node, str]],
    *,
    flagged: bool,
    apart: bool = False,
) -> fx.GraphModule:
    graph, new = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in program.graph.find_nodes(op="placeholder"):
        new[node] = named_input(graph, node.name)
    if flagged:
        begun = named_input(graph, "monograph_begun")
        graph.call_function(_COPY, (begun, graph.call_function(_ONE, ((), 1), {"dtype": torch.int64})))
    for node in program.graph.nodes:
        if node.op not in ("placeholder", "output"):
            new[node] = graph.node_copy(node, new.__getitem__)
            new[node].meta = notes_of(node.name)
    ports = zip(program.inputs, program.graph.find_nodes(op="placeholder"), strict=True)
    by_path = {port.path: new[node] for port, node in ports}
    for node, path in written:
        made = graph.call_function(APART, (new[node], len(graph.nodes))) if apart else new[node]
        graph.call_function(_COPY, (by_path[path], made))
    graph.output(tuple(new[node] for node in compiled))
    return fx.GraphModule(program.module, graph)


def _views(program: Program, starts: Sequence[fx.Node], ends: Sequence[fx.Node]) -> fx.GraphModule:
    """What takes the values at `starts` to their views at `ends`."""
    graph, new = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in starts:
        new[node] = named_input(graph, node.name)

    def made(node: fx.Node) -> fx.Node:
        if node not in new:
            made(node.args[0])  # type: ignore[arg-type]
            new[node] = graph.node_copy(node, new.__getitem__)
        return new[node]

    graph.output(tuple(made(node) for node in ends))
    return fx.GraphModule(program.module, graph)
