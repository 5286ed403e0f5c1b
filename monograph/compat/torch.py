"""Every private or version-dependent piece of torch that Monograph uses, each with its degraded path.

Meant for torch 2.11 to 2.15; 2.13 is what is tested. Nothing else in the package may touch names with an
underscore in torch.
"""

from __future__ import annotations

import builtins
import gc
import importlib
import inspect
import logging
import math
import operator
import os
import struct
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cache, partial, wraps
from itertools import count, islice
from types import FunctionType, MethodType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from monograph.compat.numpy import calls_of_each

# What: the classes of ops in a graph. Why: to know an op's schema and to spell it.
# Degraded path: none needed, unchanged since 2.0.
OpOverload = torch._ops.OpOverload
HigherOrderOperator = torch._ops.HigherOrderOperator


def import_capture_modules() -> None:
    """Import what capture needs. Costs over a second, so it waits for the first capture."""
    for name in (
        "torch._dynamo.source",
        "torch._functorch.config",
        "torch._subclasses.fake_tensor",
        "torch._subclasses.functional_tensor",
        "torch.fx.experimental.proxy_tensor",
        "torch.fx.experimental.symbolic_shapes",
        "torch.utils._sympy.printers",
        "torch.utils.checkpoint",
    ):
        importlib.import_module(name)


# --- fake tensors and symbolic numbers -----------------------------------------------------------------------


@contextmanager
def quiet(logger: str) -> Iterator[None]:
    """Inside, a logger of torch is off. What: the names of its loggers. Degraded path: what it logs is seen."""
    found = logging.getLogger(logger)
    before, found.disabled = found.disabled, True
    try:
        yield
    finally:
        found.disabled = before


def fake_mode() -> Any:
    """What: FakeTensorMode. Why: capture without data. Degraded path: none, capture needs it."""
    environment = torch.fx.experimental.symbolic_shapes.ShapeEnv(allow_dynamic_output_shape_ops=False)
    mode = torch._subclasses.fake_tensor.FakeTensorMode(shape_env=environment, allow_non_fake_inputs=True)
    _keep_from_cache(mode)
    return mode


def _keep_from_cache(mode: Any) -> None:
    """What: a hook of FakeTensorMode that says what may come from its cache of results.

    Why: an op that gives one tensor twice, for the two biases of a recurrent layer, gives two from the cache, and a
    second capture would be another program than the first. Degraded path: it is one, with the same numbers.
    """
    right = getattr(mode, "_validate_cache_key", None)
    if right is None:
        return

    def validated(func: Any, args: Any, kwargs: Any) -> None:
        if func is torch.ops.aten.mkldnn_rnn_layer_backward.default:
            raise torch._subclasses.fake_tensor._BypassDispatchCache("one tensor twice")
        right(func, args, kwargs)

    mode._validate_cache_key = validated


def make_fake(mode: Any, tensor: torch.Tensor, *, with_value: bool = False) -> torch.Tensor:
    """A fake of a real tensor with static sizes; `with_value` gives it data for branches and missing kernels."""
    shapes = torch.fx.experimental.symbolic_shapes
    context: Any = shapes.StatelessSymbolicContext(
        dynamic_sizes=[shapes.DimDynamic.STATIC] * tensor.dim(), constraint_sizes=[None] * tensor.dim()
    )
    # from_tensor would fake the base of a view too, and a gradient, with sizes that no trace knows: one that is there,
    # or one that a backward() in another thread puts there meanwhile
    with outside_of_modes():  # a tensor may be met in the middle of a trace
        plain = tensor.data if tensor._is_view() or tensor.is_leaf else tensor
    if tensor.requires_grad and plain is not tensor:
        plain.requires_grad_(True)
    fake: torch.Tensor = mode.from_tensor(plain, symbolic_context=context)
    if with_value:
        fake.real_tensor = tensor.detach().clone()  # type: ignore[attr-defined]
    return fake


def make_sparse_fake(mode: Any, form: Any, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """A fake sparse tensor: to autograd a sparse one of this size, without elements.

    What: the constructor of FakeTensor, around a sparse tensor of the device meta. Why: torch's own fakes of sparse
    tensors know no kernels, and lose how many elements there are. Degraded path: none.
    """
    layout, size, coalesced = form
    with outside_of_modes(), torch._C.DisableTorchFunction():
        empty = [torch.empty(part.shape, dtype=part.dtype, device="meta") for part in parts]
        options = {"is_coalesced": coalesced} if layout is torch.sparse_coo else {"layout": layout}
        make: Any = torch.sparse_coo_tensor if layout is torch.sparse_coo else torch.sparse_compressed_tensor
        held = make(*empty, size, check_invariants=False, **options)
        fake: torch.Tensor = torch._subclasses.fake_tensor.FakeTensor(mode, held, parts[-1].device)
    return fake


_STANDS_FOR = "_monograph_stands_for"


def bind_fake(fake: torch.Tensor, real: torch.Tensor) -> None:
    """Let a fake have the hash of a real tensor, so that sets and dicts find the one by the other.

    What: `__hash__` of FakeTensor, for those marked here. Why: `p in self.no_decay` of a parameter. Degraded path: none.
    """
    fakes: Any = torch._subclasses.fake_tensor.FakeTensor
    fakes.__hash__ = _hash_of_fake
    setattr(fake, _STANDS_FOR, (id(fake), id(real)))


def stands_for(item: object) -> int | None:
    """The id of the real tensor that a fake stands for; None for all else, copies of a fake among it."""
    if not is_fake(item):
        return None
    own, real = vars(item).get(_STANDS_FOR, (0, None))
    return real if own == id(item) else None


def _hash_of_fake(fake: torch.Tensor) -> int:
    return stands_for(fake) or id(fake)


def is_fake(tensor: object) -> bool:
    """True for tensors without data."""
    # of the type: a proxy of `weakref` whose object is gone has no class
    return issubclass(type(tensor), torch._subclasses.fake_tensor.FakeTensor)


def is_transformed(tensor: torch.Tensor) -> bool:
    """True for the wrappers that `torch.vmap` and `torch.func.grad` put around values of a trace."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


@contextmanager
def fake_values(mode: Any, *, infer_kernels: bool = False) -> Iterator[None]:
    """Ops on fakes that carry values compute real values too.

    What: `propagate_real_tensors` of FakeTensorMode, switched on for a stretch. Why: optimizers that branch on
    their step counter need its value; with `infer_kernels` an op without a (right) fake kernel takes the
    description of its real result. Degraded path: without the flag such optimizers are refused.
    """
    fakes: Any = torch._subclasses.fake_tensor
    config = torch._functorch.config
    before = mode.propagate_real_tensors, mode.cache_enabled, fakes._infer_fake_from_real_tensor
    mode.propagate_real_tensors, mode.cache_enabled = True, False
    if infer_kernels:
        fakes._infer_fake_from_real_tensor = _fake_like_real
    logger = logging.getLogger("torch.fx.experimental.symbolic_shapes")
    logger.addFilter(_about_branches)
    try:
        with ExitStack() as stack:
            stack.enter_context(config.patch(generate_fake_kernels_from_real_mismatches=infer_kernels))
            if infer_kernels:
                _compare_strides(stack)
                _take_real_results(stack, mode)
            yield
    finally:
        mode.propagate_real_tensors, mode.cache_enabled, fakes._infer_fake_from_real_tensor = before
        logger.removeFilter(_about_branches)


def _about_branches(record: logging.LogRecord) -> bool:
    """Drop torch's warning that a branch was taken on a real value: here it becomes a guard."""
    return not str(record.msg).startswith("propagate_real_tensors")


def _compare_strides(stack: ExitStack) -> None:
    """Let torch compare the strides of fake and real results too, but of views, which must stay what they show."""
    utils = importlib.import_module("torch._subclasses.fake_utils")
    compare = utils._check_fake_real_tensors

    def with_strides(real: torch.Tensor, fake: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        compare(real, fake, *args, **{**kwargs, "strides": not fake._is_view()})

    _replace(stack, utils, "_check_fake_real_tensors", with_strides)


def _fake_like_real(mode: Any, _op: Any, real: torch.Tensor) -> torch.Tensor:
    with mode:
        return torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device=real.device)


def value_constant(mode: Any, tensor: Any, known: Callable[[Any], Any]) -> Any:
    """Let a tensor that was made from Python numbers carry its value while `mode` computes values.

    torch remembers a single number only; `known` gives the value of the others.
    Degraded path: a counter that such a tensor is added to keeps its old value, which the conditions then refuse.
    """
    if mode.propagate_real_tensors and is_fake(tensor):
        constant = tensor.constant
        if constant is None and tensor.real_tensor is None:
            constant = known(tensor)
        if constant is not None:
            with outside_of_modes():
                tensor.real_tensor = constant.clone()
    return tensor


# What: the class of torch's symbolic numbers. Why: ours compute as Python does. Degraded path: none.
SymNode: Any = torch.fx.experimental.sym_node.SymNode


def opaque_symbol(environment: Any, name: str, number: float | None) -> Any:
    """What: a symbol for a number, of which torch's algebra knows nothing but the present value, or not even that. Why:
    torch asks for one where it hands a number to a kernel. Degraded path: none.
    """
    sympy = importlib.import_module("sympy")
    if number is None:
        return sympy.Symbol(f"zuf_{name}")  # torch knows by such names that there is no value
    symbol = sympy.Symbol(name)
    environment.backed_var_to_val[symbol] = (
        sympy.Float(number) if isinstance(number, float) else sympy.Integer(number)
    )
    return symbol


class _Recorded:
    """The place of a number in a trace, as torch looks it up."""

    def __init__(self, proxy: Any) -> None:
        self._proxy = proxy

    def force(self) -> Any:
        return self._proxy


def is_recorded(number: Any) -> bool:
    """True for a number that the running trace knows, or if none runs."""
    mode = torch.fx.experimental.proxy_tensor.get_proxy_mode()
    return mode is None or number in mode.tracer.symnode_tracker


def record_number(number: Any, target: Any, operands: Sequence[Any]) -> Any:
    """What: a node for arithmetic on numbers in the running trace; gives it. Why: torch records that of its own
    numbers only. Degraded path: none.
    """
    tracer, proxies = current_tracer(), torch.fx.experimental.proxy_tensor
    args = tuple(
        proxies.get_proxy_slot(item, tracer).force().node if is_symbolic(item) else item for item in operands
    )
    if target is operator.pow and not isinstance(args[0], fx.Node) and math.copysign(1.0, args[0]) < 0:
        # fx would write `-1 ** n`, which Python reads as -(1 ** n)
        base = tracer.create_node("call_function", operator.neg, (-args[0],), {})
        base.meta["val"] = args[0]
        args = (base, args[1])
    node = tracer.create_node("call_function", target, args, {})
    place_number(number, node, tracer)
    return node


def place_number(number: Any, node: fx.Node, tracer: Any) -> None:
    """Let a number stand for the value of `node` in a trace."""
    node.meta["val"] = number
    tracer.symnode_tracker[number] = _Recorded(fx.Proxy(node, tracer))


def node_of_number(number: Any, tracer: Any) -> fx.Node:
    """The node of a trace that made a number."""
    node: fx.Node = torch.fx.experimental.proxy_tensor.get_proxy_slot(number, tracer).force().node
    return node


def symbol_name(number: Any) -> str:
    """The name of the symbol of a symbolic number, or of its expression."""
    expression = number.node._expr  # `expr` is the plain number once a branch has asked `symbol == number`
    if isinstance(number, torch.SymBool) and len(expression.free_symbols) == 1:
        (expression,) = expression.free_symbols  # a truth value read out of a tensor is `u0 == 1`
    return str(expression)


def is_symbolic(number: object) -> bool:
    """True for numbers that are computed at run time."""
    return issubclass(type(number), (torch.SymInt, torch.SymFloat, torch.SymBool))


def is_constant(number: Any) -> bool:
    """True for a symbolic number that is a plain one in disguise."""
    return bool(number.node.expr.is_number)


def hint_of(number: Any) -> Any:
    """The example value of a symbolic number."""
    return number.node.hint if is_symbolic(number) else number


def recorded_conditions(mode: Any) -> list[tuple[str, tuple[str, ...]]]:
    """The branches that Python took on symbolic numbers: a Python expression, and the symbols in it."""
    printer = importlib.import_module("torch.utils._sympy.printers").PythonPrinter()
    environment = mode.shape_env
    expressions = [guard.expr for guard in environment.guards]
    expressions += [item.expr for items in environment.deferred_runtime_asserts.values() for item in items]
    unique = dict.fromkeys(expressions)
    return [(printer.doprint(e), tuple(sorted(map(str, e.free_symbols)))) for e in unique]


DATA_DEPENDENT = (
    "GuardOnDataDependentSymNode",
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "PendingUnbackedSymbolNotFound",
)


def missing_fake_kernel(error: BaseException) -> bool:
    """True if a trace failed for want of a fake kernel, not for the user's fault."""
    return type(error).__name__ in (
        "UnsupportedOperatorException",
        "MissingOpProfile",
        "NotImplementedError",
    ) or ("fake impl" in str(error) or "meta kernel" in str(error).lower() or "Meta" in str(error))


def refused_by_fake_kernel(error: BaseException) -> bool:
    """True if a fake kernel refused its arguments; the real one may be less strict (seen: grouped matmul)."""
    traceback, file = error.__traceback__, ""
    while traceback is not None:
        file, traceback = traceback.tb_frame.f_code.co_filename, traceback.tb_next
    inside = ("_meta_registrations.py", "fake_impls.py", "_prims_common" + os.sep + "__init__.py")
    return type(error) is RuntimeError and file.endswith((*inside, "torch" + os.sep + "__init__.py"))


def _take_real_results(stack: ExitStack, mode: Any) -> None:
    """An op that its fake kernel refuses takes the description of its real result."""
    dispatch, tree = mode._dispatch_impl, torch.utils._pytree

    def fake_of(real: torch.Tensor) -> torch.Tensor:
        fake = _fake_like_real(mode, None, real)
        fake.real_tensor = real  # type: ignore[attr-defined]
        return fake

    def rescued(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        try:
            return dispatch(func, types, args, kwargs)
        except RuntimeError as error:
            if not refused_by_fake_kernel(error) or func._schema.is_mutable:
                raise
            real_args, real_kwargs = tree.tree_map(_value_of, (args, kwargs))
            with outside_of_modes():
                made = func(*real_args, **real_kwargs)
            return tree.tree_map_only(torch.Tensor, fake_of, made)

    _replace(stack, mode, "_dispatch_impl", rescued)


KnownValue: TypeAlias = Callable[[torch.Tensor, Any], torch.Tensor | None]


@contextmanager
def results_by_value(mode: Any, value_of: Callable[[torch.Tensor], torch.Tensor | None]) -> Iterator[None]:
    """Ops whose result depends on values (`item`, `nonzero`) work where `value_of` knows the values that decide.

    What: FakeTensorMode's dispatch, wrapped. Why: torch's own C++ code reads masks and numbers that are constant.
    Degraded path: without it such a step is refused as data-dependent.
    """
    dispatch, tree = mode._dispatch_impl, torch.utils._pytree
    fakes: Any = torch._subclasses.fake_tensor
    unknown = (fakes.DataDependentOutputException, fakes.DynamicOutputShapeException)
    aten = torch.ops.aten
    values_do_not_decide = {  # the positions of arguments whose values the form of the result does not depend on
        aten.masked_select.default: (0,),
        aten.index.Tensor: (0,),
        aten.linalg_lstsq.default: (0, 1),  # if the matrix has full rank, as the fakes have
    }

    def real(func: Any, args: Any, kwargs: Any) -> Any:
        """The result on known values, None if one is not known."""
        free, complete = [args[position] for position in values_do_not_decide.get(func, ())], True

        def value(item: Any) -> Any:
            nonlocal complete
            known = value_of(item)
            if known is None and any(item is other for other in free):
                known = torch.zeros(item.shape, dtype=item.dtype, device=item.device)
                if item.dim() > 1 and item.is_floating_point():
                    known.diagonal(dim1=-2, dim2=-1).fill_(1)
            complete = complete and known is not None
            return known

        with outside_of_modes():
            values = tree.tree_map_only(torch.Tensor, value, (args, kwargs))
            return func(*values[0], **values[1]) if complete else None

    def known(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if func is aten._local_scalar_dense.default and (number := real(func, args, kwargs)) is not None:
            return number
        try:
            return dispatch(func, types, args, kwargs)
        except unknown:
            if func in (aten._ctc_loss.default, aten._ctc_loss.Tensor):
                return _fake_ctc_loss(mode, *args[:4])
            made = real(func, args, kwargs)
            if made is None:
                raise
            return tree.tree_map_only(torch.Tensor, lambda item: _fake_like_real(mode, None, item), made)

    with ExitStack() as stack:
        _replace(stack, mode, "_dispatch_impl", known)
        yield


@contextmanager
def checks_as_assertions(mode: Any, tracer: Any, is_known: Callable[[torch.Tensor], bool]) -> Iterator[None]:
    """C++ of torch that asks whether values are right gets the answer that they are, and the program asserts it.

    `value <= 0` asks for a fault, any other comparison for what is right. Degraded path: see `results_by_value`.
    """
    dispatch, aten = mode._dispatch_impl, torch.ops.aten
    get_slot: Any = torch.fx.experimental.proxy_tensor.get_proxy_slot

    def answered(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if func is not aten.equal.default or is_known(args[0]):  # with a tensor that says true
            return dispatch(func, types, args, kwargs)
        condition = get_slot(args[0], tracer).proxy
        fault = condition.node.target is aten.le.Scalar
        if fault:
            condition = tracer.create_proxy("call_function", aten.logical_not.default, (condition,), {})
        message = "a check of values in a function of torch has failed"
        tracer.create_proxy("call_function", aten._assert_async.msg, (condition, message), {})
        return not fault

    with ExitStack() as stack:
        _replace(stack, mode, "_dispatch_impl", answered)
        yield
    for node in reversed(tracer.graph.nodes):  # the questions themselves, which nobody could answer again
        if node.target is aten.equal.default and not node.users:
            tracer.graph.erase_node(node)


def _fake_ctc_loss(mode: Any, log_probs: Any, targets: Any, _lengths: Any, target_lengths: Any) -> Any:
    """The loss of each sequence, and a workspace that only backward reads: of unknown lengths the largest."""
    time, batch = log_probs.shape[:2]
    unknown = isinstance(target_lengths, torch.Tensor)
    longest = targets.shape[-1] if unknown else max(target_lengths, default=0)
    with mode:
        return log_probs.new_empty(batch), log_probs.new_empty(batch, time, 2 * longest + 1)


def _about_fake_kernels(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith("failed while attempting to run meta")


def _value_of(item: Any) -> Any:
    value = item.real_tensor if is_fake(item) else hint_of(item)
    if is_fake(item) and value is None:
        raise RuntimeError("an op whose fake kernel refuses its arguments works on values that are not known")
    return value


# --- tracing ---------------------------------------------------------------------------------------------------


def trace(
    function: Callable[..., Any], mode: Any, inputs: Sequence[Any], known_value: KnownValue
) -> fx.GraphModule:
    """What: make_fx on fakes. Why: it records real autograd and real optimizers. Degraded path: none.

    `known_value(tensor, tracer)` gives the value of a tensor that is the same at each step, else None.
    """
    logger = logging.getLogger(
        "torch._subclasses.fake_tensor"
    )  # prints whole traces of what is reported here
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
            _replace_here(stack, symbolic, "_new_patcher", lambda: idle.pop() if idle else usual())
        yield


def _code_on_demand() -> Any:
    """What: traced modules write their Python when it is asked for. Why: a trace writes it several times over, a tenth
    of the capture of a small step. Degraded path: it is written at once.
    """
    module = sys.modules.get("torch.fx._lazy_graph_module")
    lazily: Any = getattr(module, "_use_lazy_graph_module", None)
    return nullcontext() if lazily is None else lazily(True)


def current_tracer() -> Any:
    """The tracer of the trace that is running in this thread."""
    mode = torch.fx.experimental.proxy_tensor.get_proxy_mode()
    assert mode is not None, "only called while tracing"
    return mode.tracer


def traced_node(tensor: object, tracer: Any) -> fx.Node | None:
    """The node of an unfinished trace that made a tensor, None for a tensor that the trace does not know."""
    get_slot: Any = torch.fx.experimental.proxy_tensor.get_proxy_slot
    slot = get_slot(tensor, tracer, None) if isinstance(tensor, torch.Tensor) else None
    node: fx.Node | None = None if slot is None else slot.proxy.node
    return node


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
    pairs = zip(inner.shape, inner.stride(), like.stride(), strict=True)
    return inner.shape == like.shape and any(now != wanted for size, now, wanted in pairs if size > 1)


def lay_out(item: Any, like: torch.Tensor, *, with_views: bool = False) -> None:
    """Give a functional tensor the strides of `like`, which is what eager mode has in its place.

    `with_views`: its views are made anew.

    What: the value inside of a FunctionalTensor. Why: an op in place keeps the strides of what it changes, its
    functional form chooses them, and torch's vectorised kernels round otherwise on another layout (met by GRUCell,
    which works in place on chunks). Degraded path: without it such steps have other last bits.
    """
    if not isinstance(item, torch._subclasses.functional_tensor.FunctionalTensor):
        return
    inner = without_functional(item)
    sizes, strides = like.shape, like.stride()
    if not has_other_strides(item, like) or not inner.numel() or may_overlap(sizes, strides):
        return
    with torch._subclasses.functional_tensor.disable_functional_mode():
        memory = torch.empty_strided(sizes, strides, dtype=inner.dtype, device=inner.device)
        laid_out = torch.ops.aten.copy.default(memory, inner)
    torch._functionalize_replace(item.elem, laid_out)
    if with_views:
        torch._functionalize_commit_update(item.elem)
        torch._functionalize_sync(item.elem)


def may_overlap(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """True if two elements may share one place: such memory cannot be written."""
    reach = 0
    dimensions = [(size, stride) for size, stride in zip(sizes, strides, strict=True) if size > 1]
    for size, stride in sorted(dimensions, key=lambda dimension: dimension[1]):
        if stride <= reach:
            return True
        reach += (size - 1) * stride
    return False


def has_effect(target: Any) -> bool:
    """True for ops that check values and may raise. Nothing reads them, and they must stay."""
    return isinstance(target, OpOverload) and not target._schema.returns and not target._schema.is_mutable


def call_beneath_functional_mode(target: Any, args: Any, kwargs: Any) -> Any:
    """What: an op with an effect, recorded as it is. Why: functional mode asks for tokens that keep such ops in
    order, but the order of a program's nodes is kept anyway. Degraded path: none.
    """
    args, kwargs = torch.utils._pytree.tree_map(without_functional, (args, kwargs))
    with torch._subclasses.functional_tensor.disable_functional_mode():
        return target(*args, **kwargs)


def sequence_number() -> int:
    """The number that the next autograd node gets. Degraded path: origins of backward ops are unknown."""
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]


def backward_sequence_number() -> int | None:
    """The forward number of the autograd node that runs now, None outside of backward."""
    node = torch._C._current_autograd_node()
    return None if node is None else int(node._sequence_nr())


def accumulating_variable() -> torch.Tensor | None:
    """The leaf that the autograd node running now accumulates into."""
    return getattr(torch._C._current_autograd_node(), "variable", None)


@contextmanager
def tracing_patches(
    around_branches: Callable[[Callable[..., Any]], Callable[..., Any]],
    shows_again: Callable[..., bool],
    carried: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> Iterator[None]:
    """Pieces of torch that a trace cannot see through, replaced for its duration.

    Checkpointed regions are recorded as plain calls (their RNG handling is not traceable), unless `shows_again` says of
    the nodes of one that its second run, in backward, shows: that is recorded too, with `carried` around its function.
    Modules wrapped by `torch.compile` run their own Python.
    `torch.cond` and its like let Dynamo find what their branches close over: `around_branches` wraps the function
    that does so.
    `module.to(...)` of a module that is there already moves nothing, where torch would exchange its fake parameters.
    Attention and encoder layers ask for function modes and for make_fx before they take their fused inference
    kernels; they see neither, since eager mode has none and its fused kernels round differently.
    """
    attention = importlib.import_module("torch.nn.modules.activation")
    checkpoint = torch.utils.checkpoint
    higher_order = importlib.import_module("torch._higher_order_ops.utils")
    compile_branches: Any = getattr(higher_order, "_hop_compile_and_call", None)

    region: Any = checkpoint._checkpoint_without_reentrant_generator
    choices: list[_Again] = []  # of the region that is about to begin

    def plain_call(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        if not any(isinstance(item, torch.Tensor) and item.requires_grad for item in args):
            with torch.no_grad():
                return function(*args)
        nodes, found = _nodes_from_here(), function(*args)
        if torch.is_grad_enabled():
            shows_again(nodes(), preserves=preserve, reentrant=True)
        return found

    class Plain:
        apply = staticmethod(_in_this_thread(plain_call, checkpoint.CheckpointFunction.apply))

    class Hook(checkpoint._checkpoint_hook):
        def __init__(self, frame: Any) -> None:
            super().__init__(frame)
            if choices:
                choices.pop().enter(self)

    def plain_region(
        function: Callable[..., Any], preserve: bool, *args: Any, **kwargs: Any
    ) -> Iterator[None]:
        if not torch.is_grad_enabled():
            yield
            return
        again, nodes = _Again(), _nodes_from_here()
        choices.append(again)
        real = region(carried(function), False, *args, **kwargs)
        next(real)
        try:
            yield
            next(real, None)
        finally:
            real.close()
        again.chosen = shows_again(nodes(), preserves=preserve, reentrant=False)

    with ExitStack() as stack:
        stack.enter_context(exact_arithmetic())
        _replace(stack, checkpoint, "CheckpointFunction", Plain)
        for owner, name, value in (
            (checkpoint, "_checkpoint_without_reentrant_generator", plain_region),
            (checkpoint, "_checkpoint_hook", Hook),
            (torch.nn.Module, "_apply", _move_if_needed(torch.nn.Module._apply)),
            (torch.overrides, "has_torch_function", lambda _arguments: False),
            (attention, "_is_make_fx_tracing", lambda: False),
            (higher_order, "_hop_compile_and_call", around_branches(compile_branches)),
        ):
            _replace_here(stack, owner, name, value)
        # what parametrize.cached() keeps is for all code, which must find no fakes there
        stack.enter_context(replaced(torch.nn.utils.parametrize, "_cache", {}))
        yield


class _Again:
    """Whether what a region saves for backward is taken as it is, or computed again by torch's own hooks."""

    def __init__(self) -> None:
        self.chosen = False

    def enter(self, hook: Any) -> None:
        """Let the hook ask when backward takes a tensor; what it then finds has no history, as autograd wants it."""
        pack, unpack = hook.pack_hook, hook.unpack_hook
        hook.pack_hook = lambda tensor: (tensor.detach(), pack(tensor))
        hook.unpack_hook = lambda packed: unpack(packed[1]) if self.chosen else packed[0]


def _nodes_from_here() -> Callable[[], list[fx.Node]]:
    """What gives the nodes that are recorded from now on."""
    graph = current_tracer().graph
    known = len(graph.nodes)
    return lambda: list(islice(graph.nodes, known, None))


def _move_if_needed(move: Any) -> Callable[..., Any]:
    def apply(module: Any, function: Callable[[Any], Any], recurse: bool = True) -> Any:
        tensors = [*module.parameters(recurse), *module.buffers(recurse)]
        if all(function(tensor) is tensor for tensor in tensors):
            return module
        return move(module, function, recurse)

    return apply


@contextmanager
def exact_arithmetic() -> Iterator[None]:
    """What: arithmetic of symbolic floats as Python does it. Why: torch records `floor(a / b)` for `a // b`, which is
    another number, so that floor division makes constants here; and it refuses powers of negative numbers.
    Degraded path: none.
    """
    with ExitStack() as stack:
        for name, function in (
            ("__floordiv__", lambda a, b: float(a) // b),
            ("__rfloordiv__", lambda a, b: b // float(a)),
            ("__divmod__", lambda a, b: divmod(float(a), b)),
            ("__pow__", _power(torch.SymFloat.__pow__)),
        ):
            _replace_here(stack, torch.SymFloat, name, function)
        yield


def _power(general: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """A whole exponent takes any base; torch asks for one that is not negative."""
    return lambda base, power: base.__float_pow__(power) if _is_whole(power) else general(base, power)


def _is_whole(number: Any) -> bool:
    if is_symbolic(number):
        return is_constant(number) and float(number.node.expr).is_integer()
    return isinstance(number, (int, float)) and float(number).is_integer()


def larger(a: Any, b: Any) -> Any:
    """Python's `max` without a branch on symbolic numbers; tensors are compared as in eager."""
    return _choose(torch.sym_max, max, a, b)


def smaller(a: Any, b: Any) -> Any:
    """Python's `min` without a branch on symbolic numbers; tensors are compared as in eager."""
    return _choose(torch.sym_min, min, a, b)


def _choose(symbolic: Callable[..., Any], plain: Callable[..., Any], a: Any, b: Any) -> Any:
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor) or not (is_symbolic(a) or is_symbolic(b)):
        return plain(a, b)
    # torch.sym_max(1.0, x) records sym_max(x, 1.0): with a NaN the order decides, as it does in Python
    return torch.fx.experimental.proxy_tensor.handle_sym_dispatch(symbolic, (a, b), {})


# What: functions of `math` that take symbolic numbers, by their names there. Why: `math.sqrt(1 - beta2**step)` would be
# a constant, and another build at each step. Degraded path: that.
SYMBOLIC_MATH: dict[str, Any] = {
    name: getattr(torch, f"_sym_{name}")
    for name in ("sqrt", "sin", "cos", "tan", "sinh", "cosh", "tanh", "asin", "acos", "atan", "log2")
    if hasattr(torch, f"_sym_{name}")
}
# What: the module of an optimizer that takes `max` and `min` of numbers. Why: to see them there.
ADAFACTOR = "torch.optim._adafactor"


# how recorded arithmetic on symbolic numbers is repeated, where torch's own way records something else
REPEATED = {torch.sym_max: larger, torch.sym_min: smaller}

_ABSENT = object()


def _replace(stack: ExitStack, owner: Any, name: str, value: Any) -> None:
    before = owner.__dict__.get(name, _ABSENT)
    setattr(owner, name, value)

    def put_back() -> None:
        if before is not _ABSENT:
            setattr(owner, name, before)
        elif name in owner.__dict__:
            delattr(owner, name)

    stack.callback(put_back)
    stack.callback(put_back)  # twice: an interrupt may cut the first one short


def _replace_here(stack: ExitStack, owner: Any, name: str, function: Any) -> None:
    """Replace a function for this thread alone: others go on with the one that is there."""
    elsewhere = getattr(owner, name, None) or getattr(builtins, name, None)
    _replace(stack, owner, name, function if elsewhere is None else _in_this_thread(function, elsewhere))


def _in_this_thread(here: Callable[..., Any], elsewhere: Callable[..., Any]) -> Callable[..., Any]:
    thread = threading.get_ident()

    def chosen(*args: Any, **kwargs: Any) -> Any:
        return (here if threading.get_ident() == thread else elsewhere)(*args, **kwargs)

    return chosen


@contextmanager
def without_function_mode() -> Iterator[None]:
    """What: our function mode off the stack. Why: Dynamo cannot trace through it. Degraded path: none."""
    with torch.fx.experimental.proxy_tensor._make_temp_remove_mode_context_manager(FunctionMode)():
        yield


def outside_of_function_modes() -> Any:
    """What: no function mode sees what runs inside. Why: properties of real tensors, asked for in the middle of a trace.
    Degraded path: none.
    """
    return torch._C.DisableTorchFunction()


@contextmanager
def unseen_function_mode() -> Iterator[None]:
    """What: attention layers hidden from function modes, branches of `torch.cond` compiled without ours. Why: an eager
    step under our mode takes the kernels of one without. Degraded path: none.
    """
    higher_order = importlib.import_module("torch._higher_order_ops.utils")
    compile_branches: Any = getattr(higher_order, "_hop_compile_and_call", None)

    def run(*args: Any) -> Any:
        with without_function_mode():
            return compile_branches(*args)

    with ExitStack() as stack:
        _replace_here(stack, torch.overrides, "has_torch_function", lambda _arguments: False)
        _replace_here(stack, higher_order, "_hop_compile_and_call", run)
        yield


@contextmanager
def unrecorded() -> Iterator[None]:
    """What: tracing off, fakes on. Why: to run Python for what it reads. Degraded path: none."""
    with torch.fx.experimental.proxy_tensor.disable_proxy_modes_tracing():
        yield


class FunctionMode(TorchFunctionMode):
    """A mode that shows every torch function with its arguments to `see`, which may replace the call."""

    def __init__(self, see: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> None:
        super().__init__()
        self._see = see

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._see(_called(func), args, kwargs or {})


_TORCH = os.path.dirname(torch.__file__) + os.sep
_OURS = os.path.dirname(os.path.dirname(__file__)) + os.sep
_THEIRS = (_TORCH, _OURS)  # ours are in places of torch's while a step is captured


def _called(func: Any) -> Any:
    """The function that was called. Torch reports what has its name now, where somebody may have put another."""
    if type(func) is not FunctionType or func.__code__.co_filename.startswith(_THEIRS):
        return func
    frame = sys._getframe(2)
    caller = frame.f_back
    theirs: Any = None
    if caller is not None and frame.f_code.co_filename.startswith(
        _TORCH
    ):  # torch.overrides: a function in Python
        if caller.f_code is not func.__code__:
            theirs = FunctionType(caller.f_code, caller.f_globals, caller.f_code.co_name)
    else:  # a method in C++
        names = [name for name, value in vars(torch.Tensor).items() if value is func]
        theirs = getattr(torch._C.TensorBase, names[0], None) if names else None
    if theirs is None:
        return func

    def called(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():  # other modes would see the same
            return theirs(*args, **kwargs)

    return called


GRADIENT_GETTER: Any = vars(torch._C.TensorBase)["grad"].__get__
GRADIENT_SETTER: Any = vars(torch._C.TensorBase)["grad"].__set__
DATA_GETTER: Any = vars(torch._C.TensorBase)["data"].__get__
DATA_SETTER: Any = vars(torch._C.TensorBase)["data"].__set__
STOPS_GRADIENT: Any = (
    torch.Tensor.detach_,
    torch.Tensor.requires_grad_,
    vars(torch._C.TensorBase)["requires_grad"].__set__,
)
EQUALITY: Any = torch.Tensor.__eq__
VERSION_GETTER: Any = vars(torch._C.TensorBase)["_version"].__get__


def _addresses(table: dict[Any, Any]) -> Any:
    return (*map(id, table), *map(id, table.values()))


def _dict_version() -> Callable[[dict[Any, Any]], Any]:
    """What changes whenever a dict does. What: the version tag that Dynamo reads. Why: 40 ns for a dict of any size.
    Degraded path: the addresses of its keys and values.
    """
    try:
        found: Callable[[dict[Any, Any]], Any] = importlib.import_module(
            "torch._C._dynamo.guards"
        ).dict_version
        probe: dict[str, int] = {}
        first = found(probe)
        probe["a"] = 1
        return found if found(probe) != first else _addresses
    except (ImportError, AttributeError, TypeError):
        return _addresses


dict_version = _dict_version()


def is_overflow(error: BaseException) -> bool:
    """True if a kernel has refused a number that its tensor has no room for.

    What: the text of c10's `Scalar::to`. Why: the class of the error is RuntimeError, as of any. Degraded path: such an
    error is reported as it is.
    """
    return isinstance(error, RuntimeError) and "without overflow" in str(error)


@contextmanager
def around_dispatch(around: Callable[[], Any], answer: Callable[..., Any], unknown: object) -> Iterator[None]:
    """Put a context manager around each operation that is recorded by this thread.

    `answer(run, func, args, kwargs)` may give the result of an operation itself, or `unknown`; `run` records another.
    What: the method of the tracing mode. Why: only there torch's tracing begins, and its Python is none of the
    step's. Degraded path: that Python is taken for the step's too, which costs time.
    """
    mode = torch.fx.experimental.proxy_tensor.ProxyTorchDispatchMode
    thread, original = threading.get_ident(), mode.__torch_dispatch__
    held = [answer]  # not by the closure: a frame of it lives as long as somebody keeps an error

    def dispatch(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def run(func: Any, args: Any, kwargs: Any) -> Any:
            return original(self, func, types, args, kwargs)

        if threading.get_ident() != thread:
            return original(self, func, types, args, kwargs)
        with around():
            answered = held[0](run, func, args, kwargs or {})
            return answered if answered is not unknown else run(func, args, kwargs)

    try:
        with replaced(mode, "__torch_dispatch__", dispatch):
            yield
    finally:
        held.clear()


@contextmanager
def other_threads_reported(
    mode: Any, used: Callable[[], None], started: Callable[[], None]
) -> Iterator[None]:
    """Call `used()` in any other thread that works with a fake of `mode`, or with tensors in a thread that this one
    has started, and `started()` when it starts one.

    What: the dispatch of FakeTensorMode, and the function of `threading` that starts threads. Why: torch's modes are
    those of a thread, so that a trace sees nothing of what others do. Degraded path: their results are constants.
    """
    thread, dispatch, running = threading.get_ident(), mode.dispatch, [True]

    def dispatched(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread:
            used()
        return dispatch(*args, **kwargs)

    def report() -> None:
        if running:
            used()

    def starting(start: Callable[..., Any]) -> Callable[..., Any]:
        def begin(run: Any, *args: Any, **kwargs: Any) -> Any:
            if type(getattr(run, "__self__", None)).__module__.startswith(_OWN_THREADS):
                return start(run, *args, **kwargs)
            started()

            def watched(*given: Any) -> Any:
                with OtherThread(report):
                    return run(*given)

            return start(watched, *args, **kwargs)

        return begin

    with ExitStack() as stack:
        _replace(stack, mode, "dispatch", dispatched)
        for name in ("_start_new_thread", "_start_joinable_thread"):
            if (start := getattr(threading, name, None)) is not None:
                _replace_here(stack, threading, name, starting(start))
        try:
            yield
        finally:
            running.clear()


_OWN_THREADS = ("tqdm._monitor", "torch.")


class OtherThread(TorchDispatchMode):
    """Reports each op in a thread."""

    def __init__(self, report: Callable[[], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._report = report

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._report()
        return func(*args, **(kwargs or {}))


@contextmanager
def lists_by(answer: Callable[[Any], Any], unknown: object) -> Iterator[None]:
    """Let `answer(tensor)` give what `tolist()` of a fake gives in this thread, unless it is `unknown`.

    What: the method of fake tensors. Why: torch's own reads a number for each element. Degraded path: so it does.
    """
    fakes: Any = torch._subclasses.fake_tensor
    thread, original = threading.get_ident(), fakes.FakeTensor.tolist

    def listed(tensor: Any) -> Any:
        answered = unknown if threading.get_ident() != thread else answer(tensor)
        return original(tensor) if answered is unknown else answered

    with replaced(fakes.FakeTensor, "tolist", listed):
        yield


# --- parameters, buffers, hooks --------------------------------------------------------------------------------


def mark_parameter(tensor: torch.Tensor) -> None:
    """Make `isinstance(tensor, nn.Parameter)` true for a fake."""
    tensor._is_param = True


def watch_gradient(item: object, see: Callable[[Any], None]) -> None:
    """Show the gradient of a tensor, or of what is made of it later in its place, to `see` whenever it is known."""
    if isinstance(item, torch.Tensor) and item.requires_grad and not item.is_leaf:
        with torch._C.DisableTorchFunction():
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
MODULE_HOOK_FIELDS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
OPTIMIZER_HOOK_FIELDS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def global_hooks() -> list[dict[int, Any]]:
    """The tables of hooks that run for every module and every optimizer."""
    module, optimizer = torch.nn.modules.module, importlib.import_module("torch.optim.optimizer")
    tables = [getattr(module, f"_global{name}", None) for name in MODULE_HOOK_FIELDS]
    tables += [getattr(optimizer, f"_global_optimizer_{when}_hooks", None) for when in ("pre", "post")]
    return [table for table in tables if table is not None]


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


# --- running -----------------------------------------------------------------------------------------------------


def direct_call(target: Any) -> Callable[..., Any]:
    """What: the C++ entry of an op. Why: saves a Python frame per op. Degraded path: the op itself."""
    call: Callable[..., Any] = getattr(target, "_op", target) if isinstance(target, OpOverload) else target
    return call


def metadata_guard(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """A check that tensors keep type, dtype, device, sizes, strides and requires_grad."""
    if (found := quick_metadata_guard(tensors)) is not None:
        return found
    expected = [_description(tensor) for tensor in tensors]
    return lambda *now: [_description(tensor) for tensor in now] == expected


def quick_metadata_guard(tensors: Sequence[torch.Tensor]) -> Callable[..., bool] | None:
    """The same in C, for as many objects of any kind; it also sees conjugation, inference tensors and functorch's.

    What: the C++ TensorGuards. Why: 8 µs for 200 tensors. Degraded path: None.
    """
    if not tensors:
        return lambda: True
    try:
        module = importlib.import_module("torch._C._dynamo.guards")
        # None would stand for a size that is not looked at
        sizes = [list(tensor.shape) for tensor in tensors]
        strides = [_strides_to_check(tensor) for tensor in tensors]
        guards = module.TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
        check: Callable[..., bool] = guards.check
        return check
    except (ImportError, AttributeError, TypeError):
        return None


def _strides_to_check(tensor: torch.Tensor) -> list[int | None]:
    return list(tensor.stride()) if tensor.layout is torch.strided else [None] * tensor.dim()


# For tensors a function, and what it gives as long as all keep their data pointers. The tensors must stay alive.
PointerGuard = Callable[[Sequence[torch.Tensor]], tuple[Callable[[], Any], Any]]


def pointer_guard(tensors: Sequence[torch.Tensor]) -> tuple[Callable[[], Any], Any]:
    """A check that tensors keep their data pointers.

    What: the reader of a Python tensor's pointer that Inductor gives to C++ code. Why: a tenth of the time of
    `Tensor.data_ptr`, tensor by tensor, which is the degraded path.
    """
    simple = [tensor for tensor in tensors if _is_simple(tensor) and tensor.data_ptr()]
    known = set(map(id, simple))
    others = [tensor for tensor in tensors if id(tensor) not in known]
    fast = _read_pointers(simple)
    if fast is not None and not others:
        return fast, fast()

    def read() -> tuple[Any, list[int]]:
        return None if fast is None else fast(), [t.data_ptr() for t in (tensors if fast is None else others)]

    return read, read()


def _is_simple(tensor: torch.Tensor) -> bool:
    """True for tensors whose memory is their own; a wrapper's is no pointer, and asking for it is an error."""
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided


def _read_pointers(tensors: Sequence[torch.Tensor]) -> Callable[[], bytes] | None:
    """What gives the data pointers of tensors as bytes; None where the means for it are not there."""
    try:
        reader = importlib.import_module("torch._C._dynamo.guards")._torchinductor_pyobject_tensor_data_ptr
    except (ImportError, AttributeError):
        return None
    found = calls_of_each(reader, tensors)
    expected = struct.pack(f"{len(tensors)}P", *map(torch.Tensor.data_ptr, tensors))
    return found if found is not None and found() == expected else None


def _description(tensor: torch.Tensor) -> tuple[Any, ...]:
    kind = type(tensor), tensor.dtype, tensor.device, tensor.layout, tensor.requires_grad
    return *kind, tensor.is_conj(), tensor.is_neg(), tensor.shape, *_strides_to_check(tensor)


def generator_key(generator: torch.Generator) -> int:
    """A number that the Python objects of one random generator share."""
    return int(generator._cdata)  # type: ignore[attr-defined]


def users_of_storage(tensor: torch.Tensor) -> int:
    """How many tensors share the memory of this one, and what else keeps it alive.

    What: `torch._C._storage_Use_Count`. Why: a view that a user keeps is a user of the memory. Degraded path: always 0.
    """
    count: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)
    return 0 if count is None else count(tensor.untyped_storage()._cdata)


def storage_key(tensor: torch.Tensor) -> int:
    """A number that tensors on one storage share; a sparse tensor has several, and is alone."""
    if tensor.layout is not torch.strided:
        return id(tensor)
    return int(tensor.untyped_storage()._cdata)


def spelling(target: Any) -> str | None:
    """How Python reaches an op: `aten.mm.default`; None for anything but ops."""
    if isinstance(target, OpOverload):
        name = f"{target._opname}.{target._overloadname}"
        return f"aten.{name}" if target.namespace == "aten" else f"torch.ops.{target.namespace}.{name}"
    if isinstance(target, HigherOrderOperator):
        return f"torch.ops.higher_order.{target.name()}"
    return None


def op_name(op: Any) -> str:
    """The exact name of an op: `aten::add.Tensor`, `aten::mm.default`."""
    return f"{op.namespace}::{op._opname}.{op._overloadname}"


def packet_name(op: Any) -> str:
    """The name that the overloads of an op share: `aten::add`."""
    return f"{op.namespace}::{op._opname}"


@dataclass(frozen=True)
class SchemaArgument:
    """An argument of an op: its name, its type as the schema spells it, and its default."""

    name: str
    kind: str
    default: Any


@cache
def schema_arguments(op: Any) -> tuple[SchemaArgument, ...]:
    """The arguments of an op in order.

    What: its schema. Why: a file's arguments are looked at by their names. Degraded path: none.
    """
    return tuple(
        SchemaArgument(item.name, str(item.real_type), item.default_value) for item in op._schema.arguments
    )


def find_op(namespace: str, name: str, overload: str) -> Any:
    """The op of an exact name; None if no library has registered it."""
    packet = getattr(getattr(torch.ops, namespace), name, None)
    found = getattr(packet, overload, None) if isinstance(packet, torch._ops.OpOverloadPacket) else None
    return found if isinstance(found, OpOverload) else None


# What: the check of torch.distributions' arguments, `if not torch._is_all_true(valid): raise`. Why: a branch on
# data, which becomes an assertion in the program. Degraded path: such arguments are data-dependent errors.
ALL_TRUE: Any = getattr(torch, "_is_all_true", None)


# What: the question whether a padding mask leaves only the ends of sequences out. Why: nn.TransformerEncoder asks it
# to pack them as nested tensors in eval mode. Degraded path: a data-dependent error without its own hint.
LEFT_ALIGNED: Any = getattr(torch, "_nested_tensor_from_mask_left_aligned", None)


_VALUE_ERROR = "ValueError: "  # what the message of an assertion begins with that is no RuntimeError


def record_assertion(
    condition: torch.Tensor, message: str, kind: type[RuntimeError | ValueError] = RuntimeError
) -> None:
    """Let the program raise an error of this kind if `condition` is false."""
    whole = _VALUE_ERROR + message if kind is ValueError else message
    torch.ops.aten._assert_async.msg(condition, whole)


def failed_assertion(error: Exception) -> Exception:
    """The error that an op of `record_assertion` stands for, which itself can raise RuntimeError alone."""
    text = str(error)
    if isinstance(error, RuntimeError) and text.startswith(_VALUE_ERROR):
        return ValueError(text.removeprefix(_VALUE_ERROR))
    return error


@contextmanager
def assertions_for_any(raised: Callable[[int], ValueError]) -> Iterator[None]:
    """`if torch.any(fault): raise` in torch's own Python becomes an assertion of the program.

    `raised` gives what the function raises at its check of this number.
    """
    true_of_any, numbers = torch.any, count()

    def none(faults: torch.Tensor) -> bool:
        record_assertion(true_of_any(faults).logical_not(), str(raised(next(numbers))), ValueError)
        return False

    with ExitStack() as stack:
        _replace_here(stack, torch, "any", none)
        yield


@contextmanager
def only_fault(number: int) -> Iterator[None]:
    """Of the questions `torch.any(fault)` in torch's own Python, that of this number is answered with yes."""
    numbers = count()
    with ExitStack() as stack:
        _replace_here(stack, torch, "any", lambda _: next(numbers) == number)
        yield


def is_random(target: Any) -> bool:
    """True for ops that draw from a random generator."""
    return isinstance(target, OpOverload) and torch.Tag.nondeterministic_seeded in target.tags


def writes_to_inputs(target: Any) -> bool:
    """True for ops that change one of their arguments."""
    return isinstance(target, OpOverload) and target._schema.is_mutable


# ops whose kernels return a view that their schema keeps silent about
_SILENT_VIEWS = ("_unsafe_view", "unsafe_split", "unsafe_split_with_sizes", "lift")
# where schemas say which results are views; elsewhere a kernel may return what it likes
_MARKING_NAMESPACES = frozenset({"aten", "prims", "mkldnn", "monograph"})


@cache
def aliased_arguments(target: Any) -> tuple[frozenset[str], ...] | None:
    """For each result of an op the names of the arguments whose memory it shows; None if that is not known.

    What: the alias marks of schemas, and the dispatch key of ops that are written in terms of others, which may or
    may not return an argument. Why: memory is planned by who shares it. Degraded path: with None, all may be shared.
    Remembered for each op.
    """
    if not isinstance(target, OpOverload) or target.namespace not in _MARKING_NAMESPACES:
        return None
    keys, has_kernel = torch._C.DispatchKey, target.has_kernel_for_dispatch_key
    if has_kernel(keys.CompositeImplicitAutograd) and not has_kernel(keys.CPU):
        return None
    schema = target._schema
    if target._opname in _SILENT_VIEWS and target.namespace == "aten":
        return (frozenset({schema.arguments[0].name}),) * len(schema.returns)
    marked = [item for item in schema.arguments if item.alias_info is not None]
    return tuple(
        frozenset(item.name for item in marked if _share(item.alias_info, result.alias_info))
        for result in schema.returns
    )


def _share(argument: Any, result: Any) -> bool:
    """True if two alias marks name one set; a list of views is marked `(a -> *)` at the argument only."""
    return result is not None and ("*" in argument.after_set or bool(argument.before_set & result.before_set))


def named_arguments(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call of an op by their names."""
    return dict(zip((item.name for item in target._schema.arguments), args, strict=False)) | dict(kwargs)


class _TellingGenerator:
    """torch's default generator, which reports when it is set."""

    def __init__(self, generator: torch.Generator, report: Callable[[], None]) -> None:
        self._generator, self._report = generator, report

    def __getattr__(self, name: str) -> Any:
        if name in ("manual_seed", "seed", "set_state"):
            self._report()
        return getattr(self._generator, name)


@contextmanager
def seeding_watched(report: Callable[[], None]) -> Iterator[None]:
    """Call `report` whenever torch's random state is set, by this thread or another.

    What: the generator that the functions of `torch.random` use, replaced for a while. Why: threads may draw from it
    meanwhile, so that its state does not say who has set it. Degraded path: seeding is found by the state alone.
    """
    with ExitStack() as stack:
        if "default_generator" in vars(torch.random):
            _replace(
                stack, torch.random, "default_generator", _TellingGenerator(torch.default_generator, report)
            )
        yield


def marking_as_stepped(optimizer: Any) -> Callable[[], None]:
    """Lets learning-rate schedulers know that the optimizer has stepped, which they check once."""
    return partial(setattr, optimizer, "_opt_called", True)


def watch_clipping(wanted: Callable[[], bool], look: Callable[[list[torch.Tensor], float], None]) -> None:
    """Let `look` see the parameters and the limit of each clipping of gradients outside of traces, where it is `wanted`.

    What: the function in `clip_grad_norm_`, which is found anew at each call, whoever has imported that. It stays
    watched: steps that clip would find another function otherwise. Why: to warn of clipping that comes too late.
    Degraded path: nothing is seen.
    """
    module = importlib.import_module("torch.nn.utils.clip_grad")
    places = [
        (module, "_clip_grads_with_norm_"),
        (module, "clip_grad_value_"),
        (torch.nn.utils, "clip_grad_value_"),
    ]
    found = [(holder, name, vars(holder)[name]) for holder, name in places if name in vars(holder)]

    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            if not wanted() or torch.fx.experimental.proxy_tensor.get_proxy_mode() is not None:
                return function(*args, **kwargs)
            given = inspect.signature(function).bind(*args, **kwargs)
            found = given.arguments.get("parameters", ())
            given.arguments["parameters"] = [found] if isinstance(found, torch.Tensor) else list(found)
            limit = given.arguments.get("max_norm", given.arguments.get("clip_value", 0.0))
            look(given.arguments["parameters"], float(limit))
            return function(*given.args, **given.kwargs)

        return run

    ours = {function: watched(function) for _, _, function in found}
    for holder, name, function in found:
        setattr(holder, name, ours[function])


def without_step_hooks(step: Callable[..., Any]) -> Callable[..., Any]:
    """An optimizer's `step` without the wrapper by which torch runs hooks; it wraps that of each class when it is used."""
    own_file = torch.optim.Optimizer.__init__.__code__.co_filename
    while getattr(step, "hooked", False) and step.__code__.co_filename == own_file:
        step = step.__wrapped__  # type: ignore[attr-defined]
    return step


def without_scheduler(step: Any, kind: type) -> Any:
    """The attribute `step` of an optimizer without the wrapper of a scheduler; None if it wraps that of the class.

    What: the mark of the wrapper. Why: schedulers may come and go after a capture. Degraded path: one more build.
    """
    if not getattr(step, "_wrapped_by_lr_sched", False):
        return step
    inner = step.__wrapped__
    return None if inner is getattr(kind, "step", None) else inner


def step_is_noted(optimizer: Any) -> bool:
    """Whether `step()` was called since `forget_step`. Degraded path: yes, where torch does not note it."""
    return not hasattr(optimizer.step, "_wrapped_by_lr_sched") or getattr(optimizer, "_opt_called", False)


def forget_step(optimizer: Any) -> None:
    """Let `step_is_noted` be False until the next `step()`."""
    optimizer._opt_called = False


def autocast_state() -> Mapping[str, Any]:
    """The autocast settings of this thread, by device type."""
    return {device: _autocast_on(device) for device in _AUTOCAST_DEVICES}


def _autocast_on(device: str) -> torch.dtype | None:
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


_AUTOCAST_DEVICES = ("cpu", "cuda") if torch.backends.cuda.is_built() else ("cpu",)


@contextmanager
def autocast_kept() -> Iterator[None]:
    """What: autocast's settings and its count of open blocks, put back at the end. Why: a block that was entered and
    never left would keep old casts of weights for ever. Degraded path: none.
    """
    depth, cached = _autocast_depth(), torch.is_autocast_cache_enabled()
    before = [(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in autocast_state()]
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(cached)
        for device, enabled, dtype in before:
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)
        while _autocast_depth() > depth:
            if torch.autocast_decrement_nesting() == 0:
                torch.clear_autocast_cache()


def _autocast_depth() -> int:
    torch.autocast_increment_nesting()
    return int(torch.autocast_decrement_nesting())


@contextmanager
def without_autocast() -> Iterator[None]:
    """Inside, autocast is off on every device: what runs has its casts among its ops already."""
    with ExitStack() as stack:
        for device, dtype in autocast_state().items():
            if dtype is not None:
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


# What: a guard that switches TorchDispatchModes off. Why: a mode sees the program's ops and nothing else, while
# write-backs belong to the executor. Degraded path: modes see the write-backs too.
hidden_from_dispatch_modes: Callable[[], Any] = getattr(torch._C, "_DisableTorchDispatch", nullcontext)


# torch's own in Python makes an object for each change, which costs a microsecond. Degraded path: that.
set_grad_enabled: Callable[[bool], Any] = getattr(torch._C, "_set_grad_enabled", torch.set_grad_enabled)


def apply_of(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """What: C's `apply` of an autograd function. Why: torch's own in Python looks for transforms of functorch first, which
    costs some microseconds. Degraded path: that one.
    """
    found: Callable[..., Any] = getattr(super(torch.autograd.Function, function), "apply", function.apply)
    return found


def looks_at_grad_mode(target: Any) -> bool:
    """True for the fused CPU recurrent layer: without grad mode it takes another kernel and keeps no workspace."""
    return target is torch.ops.aten.mkldnn_rnn_layer.default


_OWN_NAMESPACES = frozenset({"aten", "prims", "prim", "mkldnn", "quantized", "c10d", "_c10d_functional"})


def is_custom(target: Any) -> bool:
    """True for ops that do not come with torch, whose fake kernels may report anything."""
    return isinstance(target, OpOverload) and target.namespace not in _OWN_NAMESPACES


def watching_results(see: Callable[[Any, Any], None]) -> Any:
    """A mode that shows every op that runs, and its result, to `see`."""

    class Watching(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            see(func, result)
            return result

    return Watching()  # type: ignore[no-untyped-call]


@contextmanager
def watching_draws() -> Iterator[list[Any]]:
    """Gives a list that gets every op inside that draws from a random generator."""
    drawn: list[Any] = []
    with watching_results(lambda op, _result: drawn.append(op) if is_random(op) else None):
        yield drawn


@contextmanager
def outside_of_modes() -> Iterator[None]:
    """What: dispatch modes off. Why: real work in the middle of a fake run. Degraded path: none."""
    modes = torch.utils._python_dispatch
    with modes._disable_current_modes():
        yield


# --- backward and the gradient scaler --------------------------------------------------------------------------


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


def is_dynamic_scaler(scaler: object) -> bool:
    """True for torch's own scaler, whose scale is a tensor that moves."""
    return isinstance(scaler, torch.amp.GradScaler)


def scaler_tables(scaler: Any) -> list[dict[Any, Any]]:
    """The dicts in which a scaler keeps what a step changes, for a snapshot."""
    inside = vars(scaler).get("_per_optimizer_states")
    return [vars(scaler), *([inside] if isinstance(inside, dict) else [])]


def forget_unscaled(scaler: Any) -> None:
    """Let a scaler forget for which optimizers it has unscaled gradients since its last `update()`."""
    for table in scaler_tables(scaler)[1:]:
        table.clear()
    if not is_dynamic_scaler(scaler):
        scaler.update()


_SCALER_FACTS = (
    "_enabled",
    "_scale",
    "_growth_tracker",
    "_growth_factor",
    "_backoff_factor",
    "_growth_interval",
)


def scaler_values(scaler: object) -> dict[str, Any]:
    """What a step knows of a scaler: its tensors, and the numbers by which its scale moves."""
    table = vars(scaler) if scaler is not None else {}
    return {name.strip("_"): table[name] for name in _SCALER_FACTS if name in table}


def make_scale(scaler: Any, device: torch.device) -> None:
    """What: the scale and growth tracker of a GradScaler, made now. Why: it makes them when it first scales, which
    is too late for a graph. Degraded path: none.
    """
    if scaler.is_enabled() and scaler._scale is None:
        scaler._lazy_init_scale_growth_tracker(device)


def found_infinite(optimizer_state: Mapping[str, Any]) -> torch.Tensor:
    """Whether a GradScaler has found infinities in the gradients of an optimizer, as a tensor."""
    first, *others = optimizer_state["found_inf_per_device"].values()
    found: torch.Tensor = first
    for other in others:
        found = found + other.to(found.device)
    return found != 0


# the method of a GradScaler that asks for the value of found_inf before it lets an optimizer step
ASKING_STEP = "_maybe_opt_step"
# what says that an optimizer's step takes the scale, and skips itself: fused ones do
AMP_SCALING = "_step_supports_amp_scaling"


@contextmanager
def symbolic_limits() -> Iterator[None]:
    """What: `clip_grad_norm_` without its `float(max_norm)` where that is symbolic. Why: the limit stays an input.
    Degraded path: it is a constant, and each other limit a build.
    """
    clipping = importlib.import_module("torch.nn.utils.clip_grad")
    with replaced(clipping, "float", lambda limit: limit if is_symbolic(limit) else float(limit)):
        yield


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """An attribute of an object or module, replaced for a while."""
    with ExitStack() as stack:
        _replace(stack, owner, name, value)
        yield


# --- modes -------------------------------------------------------------------------------------------------------


class Setting(NamedTuple):
    """A setting of the process or of this thread: its name for users, and how to read it and to set it."""

    name: str
    read: Callable[[], Any]
    put: Callable[[Any], object]


_READ_BY_OPS = {  # by their getters in torch._C, without `_get_`: an op asks for these when it runs
    "mkldnn_enabled": "mkldnn.enabled",
    "mkldnn_deterministic": "mkldnn.deterministic",
    "nnpack_enabled": "nnpack",
    "cpu_allow_fp16_reduced_precision_reduction": "cpu.allow_fp16_reduced_precision_reduction",
}
_READ_BY_OPS_OF_CUDA = {
    "cudnn_enabled": "cudnn.enabled",
    "cudnn_benchmark": "cudnn.benchmark",
    "cudnn_deterministic": "cudnn.deterministic",
    "cublas_allow_fp16_reduced_precision_reduction": "cuda.matmul.allow_fp16_reduced_precision_reduction",
    "cublas_allow_bf16_reduced_precision_reduction": "cuda.matmul.allow_bf16_reduced_precision_reduction",
    "linalg_preferred_backend": "cuda.preferred_linalg_library",
}
_READ_BY_COMPOSITES = {  # with their setters: torch chooses by them while it records
    "flash_sdp_enabled": "sdp_use_flash",
    "fa3_sdp_enabled": "sdp_use_fa3",
    "math_sdp_enabled": "sdp_use_math",
    "math_sdp_allow_fp16_bf16_reduction": "math_sdp_allow_fp16_bf16_reduction",
    "mem_efficient_sdp_enabled": "sdp_use_mem_efficient",
    "cudnn_sdp_enabled": "sdp_use_cudnn",
    "overrideable_sdp_enabled": "sdp_use_overrideable",
}


def _switches() -> tuple[Callable[[], Any], ...]:
    """What: getters of torch._C for switches between kernels. Why: torch chooses while it records, and compilers look
    at the others. Those of TF32 raise where old and new ways to set it are mixed, so the new one is asked alone.
    Degraded path: a switch that a version does not have is left out.
    """
    names = (*_READ_BY_OPS, *_READ_BY_OPS_OF_CUDA, *_READ_BY_COMPOSITES)
    found = [getattr(torch._C, f"_get_{name}", None) for name in names]
    precision = getattr(torch._C, "_get_fp32_precision_getter", None)
    if precision is not None:
        places = (("generic", "all"), ("mkldnn", "matmul"), ("cuda", "matmul"))
        found += [partial(precision, backend, op) for backend, op in places]
    else:
        found.append(torch.get_float32_matmul_precision)
    return tuple(getter for getter in found if getter is not None) + (
        torch.backends.mha.get_fastpath_enabled,
    )


_SWITCHES = _switches()


def _kernel_choices() -> tuple[Any, ...]:
    return tuple([read() for read in _SWITCHES])


# Lists, which have no hash. Degraded path: an order that nothing changes.
_SDP_ORDER: Callable[[], list[int]] = getattr(torch._C, "_get_sdp_priority_order", list)


# What: the module inside `torch.backends.opt_einsum`. Why: reading its wrapper costs a microsecond and a half.
# Degraded path: that.
_OPT_EINSUM: Any = vars(torch.backends.opt_einsum).get("m", torch.backends.opt_einsum)
_einsum_plan: Callable[[], tuple[Any, ...]] = partial(operator.attrgetter("enabled", "strategy"), _OPT_EINSUM)
_HALF_OF_SMALLEST = (sys.float_info.min, 0.5)


def _denormals_count() -> bool:
    """Torch has no getter for `set_flush_denormal`; Python's own floats obey the same register."""
    smallest, half = _HALF_OF_SMALLEST
    return smallest * half != 0.0


def _default_devices() -> tuple[torch.device, ...]:
    """The devices of `with torch.device(...)` and of `torch.set_default_device`, the outermost first."""
    if not _NUM_FUNCTION_MODES():
        return ()
    return tuple([mode.device for mode in _function_modes() if _is_device_context(mode)])


# What: the stacks of modes of this thread. Why: replayed steps call no torch function, and compiled ones no op.
# Degraded path: modes around a call are not seen.
_NUM_FUNCTION_MODES: Callable[[], int] = getattr(torch._C, "_len_torch_function_stack", int)
num_dispatch_modes: Callable[[], int] = getattr(torch._C, "_len_torch_dispatch_stack", int)


def _function_modes() -> list[Any]:
    return [torch._C._get_function_stack_at(index) for index in range(_NUM_FUNCTION_MODES())]


def _is_device_context(mode: Any) -> bool:
    return type(mode).__module__ == "torch.utils._device"


def foreign_function_mode() -> str | None:
    """The class of a TorchFunctionMode around this call that is not torch's own for default devices."""
    if not _NUM_FUNCTION_MODES():
        return None
    return next((type(mode).__name__ for mode in _function_modes() if not _is_device_context(mode)), None)


def checks_gradients_for_nan() -> bool:
    """True under `torch.autograd.set_detect_anomaly(True)`, which looks at what each function of backward gives."""
    return torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled()


def dispatch_mode() -> str | None:
    """The class of the innermost TorchDispatchMode around this call."""
    found = [torch._C._get_dispatch_stack_at(index) for index in range(num_dispatch_modes())]
    return next((type(mode).__name__ for mode in reversed(found) if type(mode) is not OtherThread), None)


def _saved_tensors_hooks() -> tuple[Any, ...] | None:
    """The hooks through which autograd keeps values for backward, each as its code and what that closes over.

    What: a getter of torch._C._autograd. Why: a capture records what they do; `save_on_cpu()` makes new functions each
    time. Degraded path: hooks around the call are not seen.
    """
    hooks = _TOP_SAVED_TENSORS_HOOKS(True)
    return None if hooks is None else tuple(map(what_runs, hooks))


_TOP_SAVED_TENSORS_HOOKS: Callable[[bool], Any] = getattr(
    torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: None
)


def hooks_on_saved_values() -> tuple[Any, ...]:
    """The functions around this call that pack and unpack what autograd saves."""
    return tuple(_TOP_SAVED_TENSORS_HOOKS(True) or ())


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


class Itself:
    """An object as a part of a key, equal to itself alone, whatever it says of itself."""

    __slots__ = ("item",)

    def __init__(self, item: Any) -> None:
        self.item = item

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Itself) and self.item is other.item

    def __hash__(self) -> int:
        return id(self.item)

    def __repr__(self) -> str:
        return repr(self.item)


def what_runs(function: Any) -> Any:
    """A key that functions share which were made by one `def` with the same surroundings."""
    if type(function) is MethodType:
        return Itself(function.__self__), what_runs(function.__func__)
    if type(function) is not FunctionType or function.__defaults__ or function.__kwdefaults__:
        return Itself(function)
    closed_over = [cell.cell_contents for cell in function.__closure__ or ()]
    parts = [item if isinstance(item, (int, float, str)) else Itself(item) for item in closed_over]
    return function.__code__, tuple(map(type, closed_over)), tuple(parts)


class ModeRow(NamedTuple):
    """A mode of torch that changes what build() would do."""

    name: str
    read: Callable[[], Any]  # a value to be part of a key
    # if `read` is a function of Python: some of C, so that it gives the same as long as these do
    in_c: tuple[Callable[[], Any], ...] | None = None


# What torch is asked for before each call: another answer is another build. A new mode is a row.
MODES: tuple[ModeRow, ...] = (
    ModeRow("grad mode", torch.is_grad_enabled),
    ModeRow("default dtype", torch.get_default_dtype),
    ModeRow("default device", _default_devices, ()),  # none without a function mode, see QUICK_MODES
    ModeRow("deterministic mode", torch._C._get_deterministic_algorithms),
    ModeRow("warnings of deterministic mode", torch._C._get_deterministic_algorithms_warn_only),
    ModeRow("filling of uninitialised memory", torch._C._get_deterministic_fill_uninitialized_memory),
    ModeRow("the choice of kernels in torch.backends", _kernel_choices, _SWITCHES),
    ModeRow("the order of kernels for attention", lambda: tuple(_SDP_ORDER()), (_SDP_ORDER,)),
    ModeRow("the plan of torch.backends.opt_einsum", _einsum_plan),
    ModeRow("denormal numbers", _denormals_count, (partial(operator.mul, *_HALF_OF_SMALLEST),)),
    ModeRow("layouts of gradients", getattr(torch._C, "_is_grad_layout_enforcement_enabled", bool)),
    ModeRow(
        "hooks on values saved for backward", _saved_tensors_hooks, (partial(_TOP_SAVED_TENSORS_HOOKS, True),)
    ),
    ModeRow("autocast's cache of weights", torch.is_autocast_cache_enabled),
    *(
        ModeRow(
            f"autocast on {device}",
            partial(_autocast_on, device),
            (partial(torch.is_autocast_enabled, device), partial(torch.get_autocast_dtype, device)),
        )
        for device in _AUTOCAST_DEVICES
    ),
)
# Functions of C that all give what they gave before if no mode has changed. The first gives the number of function
# modes, without which there is no default device.
QUICK_MODES: tuple[Callable[[], Any], ...] = (
    _NUM_FUNCTION_MODES,
    *(read for row in MODES for read in ((row.read,) if row.in_c is None else row.in_c)),
)


def settings_of_ops() -> tuple[Setting, ...]:
    """What ops ask for when they run: a replay takes the settings of its call, whatever build() had set.

    What: getters and setters of torch._C. Why: most settings have no others. Those of CUDA count once it is in use.
    Degraded path: a setting that a version does not have is left out.
    """
    on_cuda = torch.cuda.is_initialized()
    flags = _READ_BY_OPS | (_READ_BY_OPS_OF_CUDA if on_cuda else {})
    return (
        Setting("torch.set_default_dtype()", torch.get_default_dtype, torch.set_default_dtype),
        Setting("torch.use_deterministic_algorithms()", _determinism, _set_determinism),
        Setting(
            "torch.utils.deterministic.fill_uninitialized_memory",
            torch._C._get_deterministic_fill_uninitialized_memory,
            torch._C._set_deterministic_fill_uninitialized_memory,
        ),
        Setting("torch.set_num_threads()", torch.get_num_threads, torch.set_num_threads),
        Setting("torch.set_flush_denormal()", lambda: not _denormals_count(), torch.set_flush_denormal),
        *_settings_of_precision(on_cuda),
        *(_flag(f"torch.backends.{shown}", name, name) for name, shown in flags.items() if _exists(name)),
    )


def settings_of_recording() -> tuple[Setting, ...]:
    """What a trace records in its ops, so that build() may set it for a while, but not for good."""
    context, layouts = torch._GLOBAL_DEVICE_CONTEXT, "_is_grad_layout_enforcement_enabled"
    return (
        Setting("torch.set_grad_enabled()", torch.is_grad_enabled, torch._C._set_grad_enabled),
        Setting(
            "torch.set_default_device()",
            lambda: getattr(getattr(context, "device_context", None), "device", None),
            torch.set_default_device,
        ),
        Setting(
            "torch.backends.mha.set_fastpath_enabled()",
            torch.backends.mha.get_fastpath_enabled,
            torch.backends.mha.set_fastpath_enabled,
        ),
        Setting("torch.backends.opt_einsum", _einsum_plan, _set_einsum_plan),
        Setting("torch.autograd.graph.saved_tensors_hooks()", hooks_on_saved_values, _pop_hooks_to),
        Setting("torch.autograd.set_detect_anomaly()", torch.is_anomaly_enabled, _set_anomaly),
        Setting("torch.inference_mode()", torch.is_inference_mode_enabled, _left_to_its_block),
        *(
            Setting(f"torch.autocast({device!r})", partial(_autocast, device), _left_to_its_block)
            for device in _AUTOCAST_DEVICES
        ),
        Setting(
            "the order of sdpa_kernel()",
            lambda: tuple(_SDP_ORDER()),
            lambda order: torch._C._set_sdp_priority_order(list(order)),
        ),
        *(
            _flag(f"torch.backends.cuda: {name}", name, setter)
            for name, setter in _READ_BY_COMPOSITES.items()
            if _exists(name)
        ),
        *(
            [
                Setting(
                    "layouts of gradients",
                    getattr(torch._C, layouts),
                    torch._C._set_grad_layout_enforcement_enabled,
                )
            ]
            if hasattr(torch._C, layouts)
            else []
        ),
    )


def _exists(name: str) -> bool:
    return hasattr(torch._C, f"_get_{name}")


def _flag(shown: str, name: str, setter: str) -> Setting:
    put = getattr(torch._C, f"_set_{setter}")
    return Setting(
        shown,
        getattr(torch._C, f"_get_{name}"),
        lambda value: put(*value) if isinstance(value, tuple) else put(value),
    )


def _settings_of_precision(on_cuda: bool) -> Iterator[Setting]:
    """Those of float32, the general ones first: others follow them until they are set themselves."""
    read, put = (getattr(torch._C, f"_{way}_fp32_precision_{way}ter", None) for way in ("get", "set"))
    if read is None or put is None:
        yield Setting(
            "torch.set_float32_matmul_precision()",
            torch.get_float32_matmul_precision,
            torch.set_float32_matmul_precision,
        )
        return
    ops = ("all", "matmul", "conv", "rnn")
    backends = ("mkldnn", "cuda") if on_cuda else ("mkldnn",)
    for backend, op in (("generic", "all"), *((backend, op) for backend in backends for op in ops)):
        own = "" if backend == "generic" else f".{backend}"
        shown = f"torch.backends{own}{'' if op == 'all' else f'.{op}'}.fp32_precision"
        yield Setting(shown, partial(read, backend, op), partial(put, backend, op))


def _determinism() -> tuple[bool, bool]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )


def _set_determinism(value: tuple[bool, bool]) -> None:
    torch._C._set_deterministic_algorithms(value[0], warn_only=value[1])


def _set_einsum_plan(value: tuple[Any, ...]) -> None:
    _OPT_EINSUM.enabled, _OPT_EINSUM.strategy = value


def _pop_hooks_to(hooks: tuple[Any, ...]) -> None:
    while (now := hooks_on_saved_values()) and now != hooks:
        torch._C._autograd._pop_saved_tensors_default_hooks()


def _set_anomaly(on: bool) -> None:
    torch.autograd.set_detect_anomaly(on)


def _autocast(device: str) -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)


def _left_to_its_block(_value: Any) -> None:
    """What a block around a capture puts back."""


# --- test tools --------------------------------------------------------------------------------------------------


def operator_schemas(name: str) -> list[list[tuple[str, str, bool]]]:
    """For each overload of an aten operator its parameters: name, type as text, keyword only or not.

    What: the table of schemas of torch's builtins. Why: builtins have no annotations that say what a random
    argument must be. Degraded path: none are found, and tests name the types themselves.
    """
    schemas = torch._C._jit_get_schemas_for_operator(f"aten::{name}")
    return [[(a.name, str(a.type), a.kwarg_only) for a in schema.arguments] for schema in schemas]


def version_of(tensor: torch.Tensor) -> int:
    """What: the counter of in-place changes. Why: to see which arguments a call has changed. Degraded path: none."""
    return 0 if tensor.is_inference() else tensor._version


def trace_backward_in_compile() -> None:
    """What: Dynamo's switch for `loss.backward()`, for the whole process. Why: torch.compile of a whole step, a peer
    of the benchmarks. Degraded path: where the switch is gone, torch traces as it does by default."""
    config = importlib.import_module("torch._dynamo.config")
    if hasattr(config, "trace_autograd_ops"):
        setattr(config, "trace_autograd_ops", True)  # noqa: B010 -- no attribute that mypy knows


# --- counting work ---------------------------------------------------------------------------------------------


def flops_of(target: Any, args: Any, kwargs: Any, made: Any) -> int:
    """Floating point operations of a matrix product, convolution or attention; 0 for any other op.

    What: torch's registry of formulas. Why: the share of the roofline. Degraded path: 0.
    """
    registry = getattr(importlib.import_module("torch.utils.flop_counter"), "flop_registry", {})
    formula = registry.get(getattr(target, "_overloadpacket", None))
    if formula is None:
        return 0
    try:
        return int(formula(*args, **kwargs, out_val=made))
    except (TypeError, ValueError, AssertionError):  # another form of the op than the formula knows
        return 0


# --- profiling ---------------------------------------------------------------------------------------------------


# True while a profiler of torch watches this thread. Degraded path: False.
profiler_is_on: Callable[[], bool] = getattr(torch._C._autograd, "_profiler_enabled", bool)


@contextmanager
def profiler_marks() -> Iterator[Callable[[str | None], None]]:
    """Gives a function that begins a span of the profiler's trace by its name and ends the one before."""
    spans: list[Any] = []

    def mark(name: str | None) -> None:
        if spans:
            spans.pop().__exit__(None, None, None)
        if name is not None:
            spans.append(torch.profiler.record_function(name))
            spans[-1].__enter__()

    try:
        yield mark
    finally:
        mark(None)
