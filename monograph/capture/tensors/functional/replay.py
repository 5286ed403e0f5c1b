"""Ops of a recorded step under functional tensors: torch turns their views round, and branches inside of ops too."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import fx

from monograph.capture.numbers.copies import placed
from monograph.capture.tensors.functional.lifting import record_generators
from monograph.compat.fakes import example_view
from monograph.compat.modes import kernel_grad_mode
from monograph.compat.ops import has_effect
from monograph.compat.symbolic_numbers import REPEATED, is_symbolic, node_of_number
from monograph.compat.traces.functional import (
    call_beneath_functional_mode,
    has_other_bits,
    has_other_strides,
    lay_out,
    python_dispatcher,
    without_functional,
)
from monograph.compat.traces.nodes import let_stand_for, traced_node
from monograph.errors import AliasError
from monograph.ir.memory import memory_root, views_its_input, written_by
from monograph.ir.meta import add_label, come_from, grad_mode, labels, origin


class Replay(fx.Interpreter):
    """Runs ops of a recorded step under a second trace and hands each op's origin on."""

    def __init__(
        self, module: fx.GraphModule, tracer: Any, wrap: Callable[[Any], Any], inputs: Mapping[fx.Node, Any]
    ) -> None:
        super().__init__(module, garbage_collect_values=False)  # what a view is taken from is asked for
        self.tracer, self._wrap, self._values = tracer, wrap, dict(inputs)
        self.current: fx.Node | None = None  # the recorded op that is worked for
        self._recorded: dict[
            int, torch.Tensor
        ] = {}  # by the id of a tensor what eager mode has in its place now
        create = tracer.create_node

        def create_node(*args: Any, **kwargs: Any) -> fx.Node:
            node: fx.Node = create(*args, **kwargs)
            if self.current is not None and node.op in ("call_function", "call_method"):
                come_from(node, self.current)
            return node

        tracer.create_node = create_node
        record_generators(tracer)

    def take(self, node: fx.Node, new: fx.Node) -> None:
        """Let `new`, of the second trace, be the value of a recorded node from now on."""
        made = self._wrap(self.value_of(new, node.meta.get("val")))
        self.env[node] = made
        if isinstance(recorded := node.meta.get("val"), torch.Tensor):
            self._recorded[id(made)] = recorded

    def value_of(self, new: fx.Node, like: Any) -> Any:
        """What stands for a node of the second trace that no kernel has made. It looks `like` the recorded value."""
        if new not in self._values and isinstance(like, torch.Tensor):
            self._values[new] = fake = example_view(like)
            let_stand_for(new, fake, self.tracer)
        elif new not in self._values and is_symbolic(like):
            self._values[new] = placed(like, new, self.tracer)
        return self._values.get(new, like)

    def node_of(self, node: fx.Node) -> fx.Node:
        """The node of the second trace that has the value of a recorded one now, laid out as in eager mode."""
        if isinstance(recorded := node.meta.get("val"), torch.Tensor):
            lay_out(self.env[node], recorded)
        value = without_functional(self.env[node])
        if is_symbolic(value):
            return node_of_number(value, self.tracer)
        found = traced_node(value, self.tracer)
        assert found is not None, f"the second trace does not know {node}"
        return found

    def run_node(self, n: fx.Node) -> Any:
        """Run an op; its value, and what it has written, are laid out as in eager mode."""
        node = n
        with _explained(node):
            if not views_its_input(node):
                for item in node.all_input_nodes:
                    if isinstance(as_recorded := item.meta.get("val"), torch.Tensor):
                        lay_out(self.env[item], as_recorded)
            with kernel_grad_mode(grad_mode(node)):
                self.env[node] = made = super().run_node(node)
            if isinstance(recorded := node.meta.get("val"), torch.Tensor):
                self._recorded[id(made)] = recorded
            for written in written_by(node):
                self._lie_as_recorded(written)
        if labels(node) and (new := traced_node(without_functional(made), self.tracer)) is not None:
            for label in labels(node):
                add_label(new, label)
        return made

    def _lie_as_recorded(self, written: fx.Node) -> None:
        """An op in place keeps strides and bits; its functional form chooses them for a view, and so for what it shows."""
        root = self.env[memory_root(written)]
        view, whole = self._recorded.get(id(self.env[written])), self._recorded.get(id(root))
        if view is None or whole is None:
            return
        if has_other_strides(self.env[written], view) or has_other_bits(root, whole):
            lay_out(root, whole, with_views=True)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if has_effect(target):
            return call_beneath_functional_mode(target, args, kwargs)
        if target is torch.ops.aten.bernoulli_.float and not args[0].is_contiguous():
            return _draw_in_memory_order(*args, **kwargs)
        if target is torch.ops.aten.copy_.default and args[1].is_neg() and not args[0].is_neg():
            return _copy_negated(*args)
        with _formulas_for_sizes(args):
            return super().call_function(REPEATED.get(target, target), args, kwargs)


def _copy_negated(tensor: torch.Tensor, source: torch.Tensor, _non_blocking: bool = False) -> torch.Tensor:
    """`copy_` of what is a negation by a bit alone: kernels convert to another dtype first, and negate all of it then.

    The imaginary parts of a complex copy are -0.0. The functional form negates first.
    """
    if tensor.dtype == source.dtype:
        return tensor.copy_(source)
    return tensor.copy_(torch.ops.aten._neg_view.default(source)).neg_()


def _draw_in_memory_order(tensor: torch.Tensor, p: float = 0.5, *, generator: Any = None) -> torch.Tensor:
    """`bernoulli_` draws in the order of memory, but its functional form gives the numbers to a contiguous tensor.

    Other random ops keep the strides of what they fill. Met by dropout after a transpose.
    """
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    drawn = torch.ops.aten.bernoulli.p(tensor.permute(order), p, generator=generator)
    return tensor.copy_(drawn.permute(sorted(range(tensor.dim()), key=order.__getitem__)))


def _formulas_for_sizes(args: Sequence[Any]) -> AbstractContextManager[Any]:
    """Inside, C++ that looks for the form of a result by an op on tensors without data asks Python, if sizes vary."""
    vary = any(isinstance(item, torch.Tensor) and any(map(is_symbolic, item.shape)) for item in args)
    return python_dispatcher() if vary else nullcontext()


@contextmanager
def _explained(node: fx.Node) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if "functionaliz" not in str(error):
            raise
        raise AliasError(
            "memory is changed in place through a chain of views that a static graph cannot turn round",
            where=origin(node),
            hint="change the tensor that they are views of, or make it contiguous() before the views are taken",
        ) from error
