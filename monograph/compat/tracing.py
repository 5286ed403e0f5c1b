"""make_fx, the proxies of its traces, and functional tensors: `torch.fx.experimental.proxy_tensor` and what it patches.

Without make_fx and FunctionalTensorMode nothing is captured; each function says what happens without the rest.
"""

from __future__ import annotations

import gc
import importlib
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import cache
from types import FunctionType, MappingProxyType
from typing import Any, cast

import torch
from torch import fx

from monograph.compat.fake_values import KnownValue, results_by_value
from monograph.compat.fakes import LOGGER_OF_FAKES, is_fake
from monograph.compat.modes import current_tracer
from monograph.compat.patching import replace_here, replaced
from monograph.compat.symbolic_numbers import exact_arithmetic
from monograph.compat.tensors import may_overlap


def _about_fake_kernels(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith("failed while attempting to run meta")


def trace(
    function: Callable[..., Any], mode: Any, inputs: Sequence[Any], known_value: KnownValue
) -> fx.GraphModule:
    """What: make_fx on fakes. Why: it records real autograd and real optimizers. Degraded path: none.

    `known_value(tensor, tracer)` gives the value of a tensor that is the same at each step, else None.
    """
    logger = logging.getLogger(LOGGER_OF_FAKES)  # what it prints is reported here
    logger.addFilter(_about_fake_kernels)
    cached = torch.is_autocast_cache_enabled()
    held = [function]  # not by a closure: frames of torch hold it as long as somebody keeps an error
    tracers: list[Any] = []

    def run(*fakes: Any) -> Any:
        # make_fx switches it off, and each use of a weight would be cast apart
        torch.set_autocast_cache_enabled(cached)
        tracer = current_tracer()
        tracers.append(tracer)
        with results_by_value(mode, lambda tensor: known_value(tensor, tracer)):
            return held[0](*fakes)

    try:
        with mode, _code_on_demand(), _modules_left_alone():
            traced: fx.GraphModule = torch.fx.experimental.proxy_tensor.make_fx(
                run, tracing_mode="real", _allow_non_fake_inputs=True, _allow_fake_constant=True
            )(*inputs)
    except BaseException as error:
        for node in (node for tracer in tracers for node in tracer.graph.nodes):
            node.meta.clear()  # of their fakes
        _forget_inputs(error)
        raise
    finally:
        held.clear()
        logger.removeFilter(_about_fake_kernels)
    return traced


def _forget_inputs(error: BaseException) -> None:
    """What: the variable in which a closure of make_fx holds what it traces with. Why: whoever keeps the error keeps its
    frames, and these their functions. Degraded path: the fakes of a failed capture live as long as its error."""
    traceback = error.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename == torch.fx.experimental.proxy_tensor.__file__:
            functions = [item for item in gc.get_referents(traceback.tb_frame) if type(item) is FunctionType]
            for cell in (cell for function in functions for cell in function.__closure__ or ()):
                with suppress(ValueError):  # without a value
                    held = cell.cell_contents
                    if type(held) in (tuple, list) and any(map(is_fake, held)):
                        cell.cell_contents = ()
        traceback = traceback.tb_next


@contextmanager
def _modules_left_alone() -> Iterator[None]:
    """What: the patcher of fx for make_fx's own trace, replaced by one that patches nothing. Why: it would wrap the
    calls of all modules, and functions in the globals of their code, for every thread, and make_fx needs none of that.
    Besides, what `torch.compile` has wrapped runs its own Python: Dynamo asks a flag of the process, and would raise in
    other threads. Degraded path: other threads run through those wrappers, which do nothing there.
    """
    dynamo: Any = importlib.import_module("torch._dynamo.config")
    symbolic: Any = importlib.import_module("torch.fx._symbolic_trace")
    with ExitStack() as stack:
        stack.enter_context(dynamo.patch(error_on_nested_fx_trace=False))
        if hasattr(symbolic, "_Patcher") and hasattr(symbolic, "_new_patcher"):

            class Idle(symbolic._Patcher):  # type: ignore[misc]
                def patch(self, *_args: Any, **_kwargs: Any) -> None: ...
                def patch_method(self, *_args: Any, **_kwargs: Any) -> None: ...
                def visit_once(self, _thing: object) -> bool:
                    return False

            usual, idle = symbolic._new_patcher, [Idle()]  # a trace by the user, inside of ours, has its own
            replace_here(stack, symbolic, "_new_patcher", lambda: idle.pop() if idle else usual())
        yield


def _code_on_demand() -> Any:
    """What: traced modules write their Python when it is asked for. Why: a trace writes it several times over, a tenth
    of the capture of a small step. Degraded path: it is written at once.
    """
    module = sys.modules.get("torch.fx._lazy_graph_module")
    lazily: Any = getattr(module, "_use_lazy_graph_module", None)
    return nullcontext() if lazily is None else lazily(True)


def traced_node(tensor: object, tracer: Any) -> fx.Node | None:
    """The node of an unfinished trace that made a tensor, None for a tensor that the trace does not know."""
    get_slot: Any = torch.fx.experimental.proxy_tensor.get_proxy_slot
    slot = get_slot(tensor, tracer, None) if isinstance(tensor, torch.Tensor) else None
    node: fx.Node | None = None if slot is None else slot.proxy.node
    return node


def last_node(graph: fx.Graph) -> fx.Node:
    """The last node of a graph that has some."""
    found: fx.Node = next(
        iter(reversed(graph.nodes))
    )  # torch 2.11 gives a list there, later ones an iterator
    return found


def let_stand_for(node: fx.Node, tensor: torch.Tensor, tracer: Any) -> None:
    """What: the place of a fake in a trace. Why: nodes that are copied have written it. Degraded path: none."""
    proxies: Any = torch.fx.experimental.proxy_tensor
    proxies.set_proxy_slot(tensor, tracer, proxies._ProxyTensor(fx.Proxy(node, tracer), None))


def new_node(graph: fx.Graph, target: Any, args: Any, kwargs: Any = MappingProxyType({})) -> fx.Node:
    """A call of an op at the end of a graph, which may be an unfinished trace, named as make_fx names it.

    What: what `Graph.create_node` does, but for a look into every argument that no program has; and how a graph spells
    the name of an op. Why: programs have the same names in whichever way they are made, and most nodes are made here.
    Degraded path: `create_node`.
    """
    private: Any = graph
    try:
        names, listed = private._graph_namespace, private._find_nodes_lookup_table
        create_name, by_node, insert = names.create_name, names._obj_to_name, private._insert
        _ = private._len
    except AttributeError:
        return graph.create_node("call_function", target, args, dict(kwargs), name=_spelled(target))
    name = create_name(_spelled(target), None)
    new = fx.Node(graph, name, "call_function", target, args, dict(kwargs))
    by_node[new] = name
    insert(new)
    listed.insert(new)
    private._len += 1
    return new


@cache
def _spelled(target: Any) -> str:
    """How a graph names what an op makes."""
    packet = getattr(target, "overloadpacket", None)
    return fx.Graph()._target_to_str(target if packet is None else packet.__name__)


@contextmanager
def functional_tensors() -> Iterator[tuple[Callable[[Any], Any], Callable[[Any], Any]]]:
    """What: FunctionalTensorMode. Why: bitwise, unlike `torch.func.functionalize`. Gives wrap and unwrap."""
    functional = torch._subclasses.functional_tensor

    def wrap(item: Any) -> Any:
        return functional.FunctionalTensor.to_functional(item) if isinstance(item, torch.Tensor) else item

    with functional.FunctionalTensorMode(pre_dispatch=False):
        yield wrap, without_functional


def without_functional(item: Any) -> Any:
    """What stands in a functional tensor now; anything else as it is."""
    if not isinstance(item, torch._subclasses.functional_tensor.FunctionalTensor):
        return item
    torch._sync(item)  # type: ignore[attr-defined, no-untyped-call]
    return torch._from_functional_tensor(item.elem)


def has_other_strides(item: Any, like: torch.Tensor) -> bool:
    """True for a functional tensor whose value has not the layout of `like`, which eager mode has in its place."""
    inner = without_functional(item)
    with torch._C.DisableTorchFunction():
        pairs = zip(inner.shape, inner.stride(), like.stride(), strict=True)
        return inner.shape == like.shape and any(now != wanted for size, now, wanted in pairs if size > 1)


def has_other_bits(item: Any, like: torch.Tensor) -> bool:
    """True for a functional tensor whose value is conjugated or negated by a bit where `like` is not, or not where it is."""
    inner = without_functional(item)
    with torch._C.DisableTorchFunction():
        return (inner.is_conj(), inner.is_neg()) != (like.is_conj(), like.is_neg())


def lay_out(item: Any, like: torch.Tensor, *, with_views: bool = False) -> None:
    """Give a functional tensor the strides and the bits of `like`, which is what eager mode has in its place.

    `with_views`: its views are made anew.

    What: the value inside of a FunctionalTensor. Why: an op in place keeps the strides of what it changes, its
    functional form chooses them, and torch's vectorised kernels round otherwise on another layout (met by GRUCell,
    which works in place on chunks). A write through a conjugate view leaves the bit on what it is a view of, where
    `numpy()` and `view_as_real` refuse it. Degraded path: without it such steps have other last bits, and results that
    some functions refuse.
    """
    if not isinstance(item, torch._subclasses.functional_tensor.FunctionalTensor):
        return
    inner = without_functional(item)
    with torch._subclasses.functional_tensor.disable_functional_mode():
        laid_out = with_bits(_with_strides(inner, like), like)
    if laid_out is inner:
        return
    torch._functionalize_replace(item.elem, laid_out)
    if with_views:
        torch._functionalize_commit_update(item.elem)
        torch._functionalize_sync(item.elem)


def _with_strides(inner: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    sizes, strides = like.shape, like.stride()
    if not has_other_strides(inner, like) or not inner.numel() or may_overlap(sizes, strides):
        return inner
    memory = torch.empty_strided(sizes, strides, dtype=inner.dtype, device=inner.device)
    laid_out: torch.Tensor = torch.ops.aten.copy.default(memory, inner)
    return laid_out


def with_bits(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The same numbers, conjugated and negated by a bit where `like` is, and nowhere else."""
    if not has_other_bits(tensor, like):
        return tensor
    aten = torch.ops.aten
    plain = aten._conj.default(tensor) if tensor.is_conj() else tensor
    plain = _negated(aten._neg_view.default(plain)) if tensor.is_neg() else plain
    if tensor.is_conj() != like.is_conj():
        plain = aten._conj_physical.default(plain)
    plain = aten._neg_view.default(_negated(plain)) if like.is_neg() else plain
    return aten._conj.default(plain) if like.is_conj() else plain


def _negated(tensor: torch.Tensor) -> torch.Tensor:
    """`neg`, of complex numbers part by part: the kernel for them subtracts from zero, and makes 0.0 of 0.0."""
    if tensor.is_complex():
        return torch.view_as_complex(_negated(torch.view_as_real(tensor)))
    return torch.neg(tensor)


def call_beneath_functional_mode(target: Any, args: Any, kwargs: Any) -> Any:
    """What: an op with an effect, recorded as it is. Why: functional mode asks for tokens that keep such ops in
    order, but the order of a program's nodes is kept anyway. Degraded path: none.
    """
    args, kwargs = torch.utils._pytree.tree_map(without_functional, (args, kwargs))
    with torch._subclasses.functional_tensor.disable_functional_mode():
        return target(*args, **kwargs)


@contextmanager
def tracing_patches(around_branches: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Pieces of torch that a trace cannot see through, replaced for its duration.

    Modules wrapped by `torch.compile` run their own Python.
    `torch.cond` and its like let Dynamo find what their branches close over: `around_branches` wraps the function
    that does so.
    `module.to(...)` of a module that is there already moves nothing, where torch would exchange its fake parameters.
    Attention and encoder layers ask for function modes and for make_fx before they take their fused inference
    kernels; they see neither, since eager mode has none and its fused kernels round differently.
    """
    attention = importlib.import_module("torch.nn.modules.activation")
    higher_order = importlib.import_module("torch._higher_order_ops.utils")
    compile_branches: Any = getattr(higher_order, "_hop_compile_and_call", None)
    with ExitStack() as stack:
        stack.enter_context(exact_arithmetic())
        for owner, name, value in (
            (torch.nn.Module, "_apply", _move_if_needed(torch.nn.Module._apply)),
            (torch.overrides, "has_torch_function", lambda _arguments: False),
            (attention, "_is_make_fx_tracing", lambda: False),
            (higher_order, "_hop_compile_and_call", around_branches(compile_branches)),
        ):
            replace_here(stack, owner, name, value)
        # what parametrize.cached() keeps is for all code, which must find no fakes there
        stack.enter_context(replaced(torch.nn.utils.parametrize, "_cache", {}))
        yield


def _move_if_needed(move: Any) -> Callable[..., Any]:
    def apply(module: Any, function: Callable[[Any], Any], recurse: bool = True) -> Any:
        tensors = [*module.parameters(recurse), *module.buffers(recurse)]
        if all(function(tensor) is tensor for tensor in tensors):
            return module
        return move(module, function, recurse)

    return apply


def graph_module(root: torch.nn.Module, graph: fx.Graph) -> fx.GraphModule:
    """What: a GraphModule whose Python code is written when it is first called. Why: the passes make many that nothing
    calls, and the code of one takes as long as the pass. Degraded path: `fx.GraphModule`.
    """
    try:
        kind: Any = importlib.import_module("torch.fx._lazy_graph_module")._LazyGraphModule
    except (ImportError, AttributeError):
        kind = fx.GraphModule
    module: fx.GraphModule = kind(root, graph)
    return module


def copied_graph(nodes: Sequence[fx.Node], instead: Mapping[fx.Node, Any]) -> fx.Graph:
    """A graph of copies. What reads a key of `instead` reads the copy of its value, or the number that it is.

    What: what `Graph.node_copy` does, but for a look into every argument that no program has, and for new names, since
    those of one graph differ already. Why: each pass copies, and that takes a fourth of the time.
    Degraded path: `node_copy`.
    """
    graph = fx.Graph()
    try:
        copied = _copier(graph, nodes)
    except AttributeError:
        graph = fx.Graph()
        copied = graph.node_copy
    made: dict[fx.Node, Any] = {}
    for node in nodes:
        if node in instead:
            other = instead[node]
            made[node] = made[other] if isinstance(other, fx.Node) else other
        else:
            made[node] = copied(node, made.__getitem__)
    return graph


def _copier(graph: Any, nodes: Sequence[fx.Node]) -> Callable[[fx.Node, Callable[[fx.Node], Any]], fx.Node]:
    """`node_copy` of an empty graph, for nodes whose names are taken already."""
    names, listed, insert = graph._graph_namespace, graph._find_nodes_lookup_table.insert, graph._insert
    by_node, length = names._obj_to_name, graph._len
    names._used_names.update(node.name for node in nodes)
    if nodes:
        names._base_count.update(cast(Any, nodes[0].graph)._graph_namespace._base_count)

    def copied(node: fx.Node, of: Callable[[fx.Node], Any]) -> fx.Node:
        nonlocal length
        args, kwargs = fx.map_arg(node.args, of), fx.map_arg(node.kwargs, of)
        new = fx.Node(graph, node.name, node.op, node.target, args, kwargs, node.type)
        new.meta.update(node.meta)
        insert(new)
        listed(new)
        by_node[new] = node.name
        length += 1
        graph._len = length
        return new

    return copied
