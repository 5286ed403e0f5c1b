"""Where each op of a trace comes from: phase, module path, and the user's file and line.

Forward ops are known by the stack of modules and frames. Backward ops inherit from the forward op whose autograd
node they run for, by its sequence number.
"""

from __future__ import annotations

import sys
import threading
from bisect import bisect_right
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import islice
from types import FrameType
from typing import Any

import torch
from torch import fx, nn

from monograph.capture.guards.sources.code_watch import CodeWatch
from monograph.capture.guards.sources.overlay import real_attributes_of
from monograph.capture.step.observer import SILENT, Observer
from monograph.capture.tensors.checkpoint_regions import mark_region
from monograph.compat.autograd import (
    accumulating_variable,
    backward_sequence_number,
    differentiated_op,
    sequence_number,
    watch_gradient,
)
from monograph.compat.ops import looks_at_grad_mode
from monograph.compat.traces.nodes import traced_node
from monograph.ir.call_text import (
    Leaf,
    ModuleCall,
    describe_arguments,
    describe_leaves,
    forward_names,
    leaves,
)
from monograph.ir.meta import add_label, come_from, set_grad_mode, set_origin
from monograph.ir.port import gradient_path
from monograph.user_code.lines import Origin, stack_of, user_line, user_place_in_backward


def _call(call: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
    return call(module, *args, **kwargs)


class OriginRecorder:
    """Stamps each node of a trace as it is made. One per capture; used in one thread."""

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        variables: Mapping[int, str],
        observer: Observer = SILENT,
        checkpointed: Container[str] = (),
    ) -> None:
        self._observer = observer
        self.run: Callable[..., Any] = _call  # how a module is called, by what calls it
        self._checkpointed = checkpointed  # the paths of modules each of whose calls is a region
        self.paths = {id(module): path for path, module in modules.items()}
        self.variables = variables  # id of a fake → path of its parameter
        self.stack: list[str] = []
        self.doing: tuple[str, str] | None = None  # what works outside of the user's code, and the phase
        self.calls: dict[str, list[ModuleCall]] = {}  # of held modules, by path
        self._names: dict[type, tuple[str, ...]] = {}  # of the parameters of `forward`
        self._tracer: Any = None
        self._by_number: dict[int, Origin] = {}
        self._made: dict[tuple[str, int, str, str], Origin] = {}  # many ops have the same
        self._numbers: list[int] = []
        self._saw_backward = False
        self.makers: dict[fx.Node, int] = {}  # by op of backward the number of the node that made it

    def attach(self, tracer: Any) -> None:
        """Stamp every node that `tracer` makes from now on."""
        self._tracer = tracer
        create = tracer.create_node

        def create_node(*args: Any, **kwargs: Any) -> fx.Node:
            node: fx.Node = create(*args, **kwargs)
            if node.op in ("call_function", "call_method"):
                number = backward_sequence_number()
                set_origin(node, self._now(number))
                if number is not None:
                    self.makers[node] = number
                self._observer.op(node)
            if looks_at_grad_mode(node.target):
                set_grad_mode(node, torch.is_grad_enabled())
            return node

        tracer.create_node = create_node

    def _now(self, number: int | None) -> Origin:
        """The origin of an op that is recorded at this moment, for the node of backward with this number if there is one."""
        if self.doing is not None:
            return self._remember(self._at(sys._getframe(2), *self.doing))
        if number is not None:
            self._saw_backward = True
            return self._remember(self._inherit(number, sys._getframe(2)))
        outside = self._saw_backward and not self.stack and not torch.is_grad_enabled()
        module = self.stack[-1] if self.stack else ""
        phase = "clip" if outside else "forward"
        return self._remember(self._at(sys._getframe(2), module, phase))

    def repeated(self, node: fx.Node, like: fx.Node) -> None:
        """A node is a copy of another one."""
        come_from(node, like)
        self._observer.op(node)

    def _at(self, frame: FrameType, module: str, phase: str) -> Origin:
        """The user's line, with those that called it if the observer wants them."""
        key = (*user_line(frame), module, phase)
        if depth := self._observer.stack_depth:
            return Origin(*key, stack_of(frame, depth, only_user=self._observer.only_user_frames))
        if (found := self._made.get(key)) is None:
            found = self._made[key] = Origin(*key)
        return found

    def label(self, label: str, item: object) -> None:
        """Note under which name the user knows a value of the trace."""
        if (node := traced_node(item, self._tracer)) is not None:
            add_label(node, label)

    def label_gradient(self, parameter: torch.Tensor) -> None:
        """Note that a fake has its gradient now."""
        if (path := self.variables.get(id(parameter))) is not None:
            self.label(gradient_path(path), parameter.grad)

    def _remember(self, origin: Origin) -> Origin:
        number = sequence_number() - 1
        if number not in self._by_number:
            if not self._numbers or number > self._numbers[-1]:
                self._numbers.append(number)
            self._by_number[number] = origin
        return origin

    def _inherit(self, number: int, frame: FrameType) -> Origin:
        variable = accumulating_variable()
        if variable is not None and (path := self.variables.get(id(variable))) is not None:
            return Origin(module=path.rpartition(".")[0], phase="backward")
        found = self._by_number.get(number)
        if found is None and self._numbers:
            index = bisect_right(self._numbers, number) - 1
            found = self._by_number[self._numbers[max(index, 0)]]
        found = found or Origin()
        own = user_place_in_backward(frame) or found
        place = own.file, own.line, found.module, "backward", found.stack
        return Origin(*place, gradient_of=differentiated_op())

    @contextmanager
    def phase(self, phase: str, what: str = "") -> Iterator[None]:
        """Inside, ops belong to this phase: the step of the optimizer `what`, scaling, averaging."""
        before, self.doing = self.doing, (what, phase)
        try:
            yield
        finally:
            self.doing = before

    @contextmanager
    def watch_modules(self, watch: CodeWatch) -> Iterator[None]:
        """Keep the stack of modules whose forward runs, and describe what goes in and out. `watch` is of the step alone."""
        thread = threading.get_ident()
        call = nn.Module.__call__
        paths, stack = self.paths, self.stack

        def watched_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != thread:
                return call(module, *args, **kwargs)
            reporting = watch.pause()
            try:
                path = paths.get(id(module))
                inputs = () if path is None else self._begin(path, module, args, kwargs)
                stack.append(type(module).__name__ if path is None else path)
                begun = len(self._tracer.graph.nodes)
                watch.resume(reporting)
                try:
                    returned = self.run(call, module, args, kwargs)
                finally:
                    watch.pause()
                    stack.pop()
                if path is not None:
                    self._end(path, module, inputs, returned)
                if path in self._checkpointed:
                    mark_region(list(islice(self._tracer.graph.nodes, begun, None)))
                return returned
            finally:
                watch.resume(reporting)

        watched_call.__wrapped__ = call  # type: ignore[attr-defined]  # what paused() goes back to
        nn.Module.__call__ = watched_call  # type: ignore[method-assign]
        try:
            yield
        finally:
            nn.Module.__call__ = call  # type: ignore[method-assign]

    def _begin(
        self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Leaf, ...]:
        kind = type(module)
        own = real_attributes_of(module) or ()
        names = self._names.get(kind) if "forward" not in own else forward_names(module)
        if names is None:
            names = self._names[kind] = forward_names(module)
        inputs = describe_arguments(names, args, kwargs)
        self._observer.module_called(path, module, inputs)
        return inputs

    def _end(self, path: str, module: nn.Module, inputs: tuple[Leaf, ...], returned: Any) -> None:
        made = ModuleCall(inputs, describe_leaves([("", returned)]))
        self.calls.setdefault(path, []).append(made)
        self._observer.module_returned(path, module, made.outputs)
        for name, leaf in leaves(returned, path):
            self.label(name, leaf)
            watch_gradient(leaf, partial(self.label, gradient_path(name)))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside of watch_modules(), let modules run unwatched: Dynamo cannot trace through the watching call."""
        watched = nn.Module.__call__
        nn.Module.__call__ = watched.__wrapped__  # type: ignore[attr-defined,method-assign]
        try:
            yield
        finally:
            nn.Module.__call__ = watched  # type: ignore[method-assign]
