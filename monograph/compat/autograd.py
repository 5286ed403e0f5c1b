"""Autograd: nodes of backward, hooks of tensors, what is saved for backward, and regions of `torch.utils.checkpoint`.

Private names of `torch.autograd` and `torch._C`; each function says what happens without its own.
"""

from __future__ import annotations

import importlib
import re
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from itertools import islice
from types import CodeType, MethodType
from typing import Any, TypeAlias

import torch
from torch import fx

from monograph.compat.modes import current_tracer
from monograph.compat.modules import global_hooks
from monograph.compat.patching import in_this_thread, replace, replace_here, replaced


def sequence_number() -> int:
    """The number that the next autograd node gets. Degraded path: origins of backward ops are unknown."""
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]


def backward_sequence_number() -> int | None:
    """The forward number of the autograd node that runs now, None outside of backward."""
    node = torch._C._current_autograd_node()
    return None if node is None else int(node._sequence_nr())


_NODE_OF_OP = re.compile(r"([A-Z]\w*?)Backward\d+")


def differentiated_op() -> str:
    """The op whose gradient the autograd node that runs now computes, as `log`; empty if it is no op of torch.

    What: the name of the node. Degraded path: reports on gradients that are not finite do not name the op.
    """
    node = torch._C._current_autograd_node()
    found = None if node is None else _NODE_OF_OP.fullmatch(node.name())
    return "" if found is None else re.sub(r"(?<!^)(?=[A-Z])", "_", found[1]).lower()


@contextmanager
def autograd_inside() -> Iterator[None]:
    """Inside, autograd works in the kernel of an op of our own, which the dispatcher calls without it.

    Degraded path: none; without these names such an op has no gradients.
    """
    c: Any = torch._C
    excluded = c._dispatch_tls_local_exclude_set()
    for key in (c.DispatchKey.AutogradCPU, c.DispatchKey.ADInplaceOrView):
        excluded = excluded - c.DispatchKeySet(key)
    with c._ForceDispatchKeyGuard(c._dispatch_tls_local_include_set(), excluded):
        yield


_ENGINE: CodeType | None = getattr(
    getattr(torch.autograd.graph, "_engine_run_backward", None), "__code__", None
)


def adding_node() -> int | None:
    """The forward number of the node of backward one of whose gradients autograd may be adding to another gradient now.

    It may also be the node that adds, by the C++ code of its formula; -1 where the node gives several gradients of one value,
    which autograd has to add. None where Python code adds. To be called two calls below the `__torch_dispatch__` that is given the op.

    What: the node that runs, and the frame in which autograd begins. Why: in place it adds under no trace. Degraded
    path: no sum is known, and steps with images of one pixel may have other last bits.
    """
    node = None if torch.is_grad_enabled() else torch._C._current_autograd_node()
    caller = None if node is None else sys._getframe(3).f_back
    if node is None or caller is None or _ENGINE is None or caller.f_code is not _ENGINE:
        return None
    following = [item for item in node.next_functions if item[0] is not None]
    return int(node._sequence_nr()) if len(set(following)) == len(following) else -1


def leaves_behind(roots: Iterable[object]) -> Iterator[torch.Tensor]:
    """The leaves that a backward() from these tensors comes to.

    What: the names of nodes. Why: a function of the user's may have an attribute `variable`, too. Degraded path: none are found.
    """
    with torch._C.DisableTorchFunction():
        tensors = [root for root in roots if isinstance(root, torch.Tensor)]
        yield from (root for root in tensors if root.is_leaf)
        left = [root.grad_fn for root in tensors if root.grad_fn is not None]
        seen = set(left)
        while left:
            node = left.pop()
            if node.name() == "torch::autograd::AccumulateGrad":
                yield node.variable  # type: ignore[attr-defined]
            following = {item for item, _ in node.next_functions if item is not None} - seen
            seen |= following
            left += following


def accumulating_variable() -> torch.Tensor | None:
    """The leaf that the autograd node running now accumulates into."""
    return getattr(torch._C._current_autograd_node(), "variable", None)


def watch_gradient(item: object, see: Callable[[Any], None]) -> None:
    """Show the gradient of a tensor, or of what is made of it later in its place, to `see` whenever it is known."""
    if isinstance(item, torch.Tensor):
        with torch._C.DisableTorchFunction():
            if item.requires_grad and not item.is_leaf:
                item.register_hook(see)


def parameter_hooks(tensor: torch.Tensor) -> tuple[list[Any], list[Any]]:
    """The gradient hooks and the post-accumulate hooks of a tensor."""
    before = getattr(tensor, "_backward_hooks", None) or {}
    after = getattr(tensor, "_post_accumulate_grad_hooks", None) or {}
    return list(before.values()), list(after.values())


@contextmanager
def handles_noted(handles: list[Any]) -> Iterator[None]:
    """Collect weak references to the handles of hooks that this thread registers.

    What: the constructor of torch's handles. Why: who holds one can remove the hook later. Degraded path: none.
    """
    kind, thread = torch.utils.hooks.RemovableHandle, threading.get_ident()
    original = kind.__init__

    def made(handle: Any, *args: Any, **options: Any) -> None:
        original(handle, *args, **options)
        if threading.get_ident() == thread:
            handles.append(weakref.ref(handle))

    with replaced(kind, "__init__", made):
        yield


HOOK_FIELDS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def apply_of(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """What: C's `apply` of an autograd function. Why: torch's own in Python looks for transforms of functorch first, which
    costs some microseconds. Degraded path: that one.
    """
    found: Callable[..., Any] = getattr(super(torch.autograd.Function, function), "apply", function.apply)
    return found


@contextmanager
def watching_backward(around: Callable[..., Any]) -> Iterator[None]:
    """Let `around(run, tensors, grad_tensors, **options)` stand in for each backward() of this thread.

    What: `torch.autograd.backward`, which `Tensor.backward` calls too, replaced for a while. Why: losses are divided
    and scaled, and gradients taken over, where backward begins and ends. Degraded path: none.
    """
    run, thread = torch.autograd.backward, threading.get_ident()

    def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **options: Any) -> Any:
        if threading.get_ident() != thread:
            return run(tensors, grad_tensors, *args, **options)
        return around(run, tensors, grad_tensors, *args, **options)

    with replaced(torch.autograd, "backward", backward):
        yield


TOP_SAVED_TENSORS_HOOKS: Callable[[bool], Any] = getattr(
    torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: None
)


def hooks_on_saved_values() -> tuple[Any, ...]:
    """The functions around this call that pack and unpack what autograd saves."""
    return tuple(TOP_SAVED_TENSORS_HOOKS(True) or ())


def called_by_torch(tensors: Iterable[Any]) -> Iterator[Any]:
    """The functions that torch calls by itself in a step: hooks of tensors, of all modules and on saved values."""
    yield from hooks_on_saved_values()
    for table in global_hooks():
        yield from table.values()
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor):
            before, after = parameter_hooks(tensor)
            yield from (*before, *after)


def held_by(function: Any) -> list[Any]:
    """The objects that a function is a method of, or closes over."""
    cells = getattr(function, "__closure__", None) or ()
    return [function.__self__] if type(function) is MethodType else [cell.cell_contents for cell in cells]


def trace_backward_in_compile() -> None:
    """What: Dynamo's switch for `loss.backward()`, for the whole process. Why: torch.compile of a whole step, a peer
    of the benchmarks. Degraded path: where the switch is gone, torch traces as it does by default."""
    config = importlib.import_module("torch._dynamo.config")
    if hasattr(config, "trace_autograd_ops"):
        setattr(config, "trace_autograd_ops", True)  # noqa: B010 -- no attribute that mypy knows


# --- regions of torch.utils.checkpoint -------------------------------------------------------------------------

ShowsAgain: TypeAlias = Callable[..., Callable[[list[fx.Node]], None] | None]


@contextmanager
def checkpointed_regions(
    shows_again: ShowsAgain, carried: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    """Record regions of `torch.utils.checkpoint` as plain calls: their handling of random state cannot be traced.

    `shows_again` says of the nodes of a region whether its second run, in backward, shows: then that is recorded too,
    with `carried` around its function, and what it has given gets the nodes of that run.

    What: the autograd function of reentrant regions, the generator of the others, and its hooks on saved tensors.
    Since torch 2.14 the generator only calls another one, which takes its options by name. Degraded path: none.
    """
    checkpoint: Any = torch.utils.checkpoint
    choices: list[_Again] = []  # of the region that is about to begin
    generator, by_name = "_checkpoint_without_reentrant_generator", False
    if hasattr(checkpoint, f"{generator}_impl"):
        generator, by_name = f"{generator}_impl", True
    # both are made of torch's own, so before these are replaced
    region = _plain_region(getattr(checkpoint, generator), choices, shows_again, carried, by_name=by_name)
    hook = _hook_that_asks(checkpoint._checkpoint_hook, choices)

    class Plain:
        apply = staticmethod(in_this_thread(_plain_call(shows_again), checkpoint.CheckpointFunction.apply))

    with ExitStack() as stack:
        replace(stack, checkpoint, "CheckpointFunction", Plain)
        replace_here(stack, checkpoint, generator, region)
        replace_here(stack, checkpoint, "_checkpoint_hook", hook)
        yield


def _plain_call(shows_again: ShowsAgain) -> Callable[..., Any]:
    """A reentrant region."""

    def call(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        if not any(isinstance(item, torch.Tensor) and item.requires_grad for item in args):
            with torch.no_grad():
                return function(*args)
        nodes, found = _nodes_from_here(), function(*args)
        if torch.is_grad_enabled():
            shows_again(nodes(), preserves=preserve, reentrant=True)
        return found

    return call


def _plain_region(
    real: Callable[..., Any],
    choices: list[_Again],
    shows_again: ShowsAgain,
    carried: Callable[..., Any],
    *,
    by_name: bool,
) -> Callable[..., Iterator[None]]:
    """Any other region, around torch's own generator, which runs on if its second run shows."""

    def region(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterator[None]:
        if by_name:
            preserve = kwargs.get("preserve_rng_state", True)
            kwargs = {**kwargs, "preserve_rng_state": False}
        else:
            preserve, args = args[0], (False, *args[1:])
        if not torch.is_grad_enabled():
            yield
            return
        again, nodes = _Again(), _nodes_from_here()
        choices.append(again)
        inner = real(again.watched(carried(function)), *args, **kwargs)
        next(inner)
        try:
            yield
            next(inner, None)
        finally:
            inner.close()
        again.look = shows_again(nodes(), preserves=preserve, reentrant=False)

    return region


def _hook_that_asks(kind: Any, choices: list[_Again]) -> Any:
    """The class of a region's hooks on saved tensors, with the choice of its region."""

    class Hook(kind):  # type: ignore[misc]
        def __init__(self, frame: Any) -> None:
            super().__init__(frame)
            if choices:
                choices.pop().enter(self)

    return Hook


class _Again:
    """Whether what a region saves for backward is taken as it is, or computed again by torch's own hooks."""

    def __init__(self) -> None:
        self.look: Callable[[list[fx.Node]], None] | None = None  # at a second run; None if there is none

    def watched(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function of a region, whose second run, which may end early, is looked at."""

        def second_run(*args: Any, **kwargs: Any) -> Any:
            nodes = _nodes_from_here()
            try:
                return function(*args, **kwargs)
            finally:
                if self.look is not None:
                    self.look(nodes())

        return second_run

    def enter(self, hook: Any) -> None:
        """Let the hook ask when backward takes a tensor; what it then finds has no history, as autograd wants it."""
        pack, unpack = hook.pack_hook, hook.unpack_hook
        hook.pack_hook = lambda tensor: (tensor.detach(), pack(tensor))
        vars(hook.pack_hook).update(vars(pack))  # by which torch 2.14 knows its own hooks
        hook.unpack_hook = lambda packed: unpack(packed[1]) if self.look is not None else packed[0]


def _nodes_from_here() -> Callable[[], list[fx.Node]]:
    """What gives the nodes that are recorded from now on."""
    graph = current_tracer().graph
    known = len(graph.nodes)
    return lambda: list(islice(graph.nodes, known, None))


def keeps_version(tensor: torch.Tensor) -> AbstractContextManager[Any]:
    """Inside, autograd does not notice that a tensor changes, which it may have kept for backward.

    What: its counter of changes. Why: so does DistributedDataParallel with buffers. Degraded path: backward refuses such a tensor.
    """
    found = getattr(torch.autograd, "_unsafe_preserve_version_counter", None)
    return nullcontext() if found is None else found(tensor)
