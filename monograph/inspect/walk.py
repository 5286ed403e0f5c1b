"""A step op by op, on inputs of its own: every value can be looked at, and nothing that lives is touched."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

from monograph.compat.amp import without_autocast
from monograph.compat.distributed.ops import awaited
from monograph.compat.ops import OpOverload, packet_name
from monograph.ir.meta import TensorMeta, compute_nodes, grad_mode, output_nodes, value
from monograph.ir.program import Program
from monograph.layout import extent
from monograph.passes.inductor.inline_parts import inline_parts
from monograph.plan.lifetime import frees
from monograph.state.random import RandomState, copied_generator

_ALIGNMENT = 64  # bytes: what torch gives to new memory, and what kernels look at


def own_inputs(bound: Sequence[Any]) -> list[Any]:
    """The same inputs in memory of their own: values, strides and alignment are equal, so that kernels do the same."""
    copies: dict[int, Any] = {}
    return [copies.setdefault(id(item), _own(item)) for item in bound]


def _own(item: Any) -> Any:
    if isinstance(item, torch.Generator):
        return copied_generator(item)
    if not isinstance(item, torch.Tensor):
        return item
    item = item.detach()
    if item.layout is not torch.strided or item.is_conj() or item.is_neg() or not item.numel():
        return item.clone()
    span = extent(item.shape, item.stride())
    shift = item.data_ptr() % _ALIGNMENT // item.element_size()
    memory = torch.empty(shift + span, dtype=item.dtype, device=item.device)
    memory[shift:].copy_(item.as_strided((span,), (1,)))
    return memory.as_strided(item.shape, item.stride(), shift)


def is_defined(node: fx.Node) -> bool:
    """False for memory that nobody has written yet: it may hold anything."""
    name = packet_name(node.target).partition("::")[2] if isinstance(node.target, OpOverload) else ""
    return not name.removeprefix("new_").startswith("empty")


class Walk:
    """One run of a program. `values` has what each node made so far; going on runs the next ops.

    Inputs stay as they are, generators too.
    The program is walked with its subgraphs inlined. Random ops draw what the step would draw from the present state of
    the generators, which is left as it is.
    """

    def __init__(
        self, program: Program, inputs: Sequence[Any], *, keep: bool = True, random: RandomState | None = None
    ) -> None:
        """With `keep=False` a value is let go of when nothing reads it any more; `random` takes the present's place."""
        self.program = inline_parts(program)
        self.nodes = tuple(compute_nodes(self.program.graph))
        self._dead = {} if keep else self._frees()
        self.position = 0  # how many of them have run
        self._inputs = inputs
        self._interpreter = fx.Interpreter(self.program.module, garbage_collect_values=False)
        self._random = self._first_random = random or RandomState.now(touched=True)
        for node, item in zip(self.program.graph.find_nodes(op="placeholder"), inputs, strict=True):
            self.values[node] = self.taken(node, _own(item) if isinstance(item, torch.Generator) else item)
        for node in self.program.graph.find_nodes(op="get_attr"):
            self.values[node] = self._interpreter.run_node(node)

    @property
    def values(self) -> dict[fx.Node, Any]:
        """What is known so far, by node."""
        return self._interpreter.env

    def taken(self, node: fx.Node, item: Any) -> Any:
        """An input as this walk computes with it. A compiled program has numbers as tensors."""
        described = value(node)
        if isinstance(described, TensorMeta) and not isinstance(item, torch.Tensor):
            return torch.tensor(item, dtype=described.dtype, device=described.device)
        return item

    def computed(self, node: fx.Node) -> Any:
        """What an op gives. A collective is waited for at once: values can be looked at, and a walk may end anywhere."""
        return awaited(node.target, self._interpreter.run_node(node))

    def next(self) -> fx.Node | None:
        """The op that would run now; None at the end."""
        return self.nodes[self.position] if self.position < len(self.nodes) else None

    def advance(self, count: int = 1, see: Callable[[fx.Node, Any], object] | None = None) -> None:
        """Run the next ops; `see` is given each with what it made. The error of an op names its place."""
        with self._surroundings():
            for node in self.nodes[self.position : self.position + count]:
                with torch.set_grad_enabled(bool(grad_mode(node))):
                    self.values[node] = made = self.computed(node)
                self.position += 1
                if see is not None:
                    see(node, made)
                for item in self._dead.get(node, ()):
                    del self.values[item]

    def run(self, see: Callable[[fx.Node, Any], object] | None = None) -> list[Any]:
        """Run all that is left; gives the outputs of the program."""
        self.advance(len(self.nodes) - self.position, see)
        return self.outputs()

    def outputs(self) -> list[Any]:
        """The outputs, in the order of the program's ports."""
        return [
            self.values[item] if isinstance(item, fx.Node) else item
            for item in output_nodes(self.program.graph)
        ]

    def once_more(self, node: fx.Node) -> Any:
        """What an op gives on copies of its operands, with the random numbers that this walk begins with."""
        return self._run_on(node, {item: own_inputs([made])[0] for item, made in self.operands(node)})

    def left_by(self, node: fx.Node) -> Mapping[fx.Node, Any]:
        """What an op leaves in copies of its operands."""
        copies = {item: own_inputs([made])[0] for item, made in self.operands(node)}
        self._run_on(node, copies)
        return copies

    def _run_on(self, node: fx.Node, copies: Mapping[fx.Node, Any]) -> Any:
        args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), copies.__getitem__)
        now, self._random = self._random, self._first_random
        try:
            with self._surroundings():
                return self._interpreter.call_function(node.target, args, kwargs)
        finally:
            self._random = now

    def again(self, *, keep: bool = True) -> Walk:
        """The same walk before its first op, with the same random numbers."""
        return Walk(self.program, self._inputs, keep=keep, random=self._first_random)

    def operands(self, node: fx.Node) -> Iterator[tuple[fx.Node, Any]]:
        """The nodes that an op reads, with their values."""
        return ((item, self.values[item]) for item in node.all_input_nodes)

    def _frees(self) -> dict[fx.Node, list[fx.Node]]:
        by_name = {node.name: node for node in self.nodes}
        dead = frees(self.program.graph)
        return {by_name[reader]: [by_name[name] for name in names] for reader, names in dead.items()}

    @contextmanager
    def _surroundings(self) -> Iterator[None]:
        outside = RandomState.now(touched=True)
        self._random.restore()
        try:
            with torch.no_grad(), without_autocast():
                yield
        finally:
            self._random = RandomState.now(touched=True)
            outside.restore()
