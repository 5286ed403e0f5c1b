"""Every private or version-dependent piece of torch that Monograph uses, each with its degraded path.

Meant for torch 2.11 to 2.15; 2.13 is what is tested. Nothing else in the package may touch names with an
underscore in torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import fx
from torch.overrides import TorchFunctionMode

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


def fake_mode() -> Any:
    """What: FakeTensorMode. Why: capture without data. Degraded path: none, capture needs it."""
    environment = torch.fx.experimental.symbolic_shapes.ShapeEnv(allow_dynamic_output_shape_ops=False)
    mode = torch._subclasses.fake_tensor.FakeTensorMode(shape_env=environment, allow_non_fake_inputs=True)
    return mode


def make_fake(mode: Any, tensor: torch.Tensor, *, with_value: bool = False) -> torch.Tensor:
    """A fake of a real tensor with static sizes; `with_value` gives it data for branches and missing kernels."""
    shapes = torch.fx.experimental.symbolic_shapes
    context = shapes.StatelessSymbolicContext(
        dynamic_sizes=[shapes.DimDynamic.STATIC] * tensor.dim(), constraint_sizes=[None] * tensor.dim()
    )
    fake: torch.Tensor = mode.from_tensor(tensor, symbolic_context=context)
    if with_value:
        fake.real_tensor = tensor.detach().clone()  # type: ignore[attr-defined]
    return fake


def is_fake(tensor: object) -> bool:
    """True for tensors without data."""
    return isinstance(tensor, torch._subclasses.fake_tensor.FakeTensor)


@contextmanager
def fake_values(mode: Any, *, infer_kernels: bool = False) -> Iterator[None]:
    """Ops on fakes that carry values compute real values too.

    What: `propagate_real_tensors` of FakeTensorMode, switched on for a stretch. Why: optimizers that branch on
    their step counter need its value; with `infer_kernels` an op without a (right) fake kernel takes the
    description of its real result. Degraded path: without the flag such optimizers are refused.
    """
    fakes, config = torch._subclasses.fake_tensor, torch._functorch.config
    before = mode.propagate_real_tensors, mode.cache_enabled, fakes._infer_fake_from_real_tensor
    mode.propagate_real_tensors, mode.cache_enabled = True, False
    if infer_kernels:
        fakes._infer_fake_from_real_tensor = _fake_like_real
    try:
        with config.patch(generate_fake_kernels_from_real_mismatches=infer_kernels):
            yield
    finally:
        mode.propagate_real_tensors, mode.cache_enabled, fakes._infer_fake_from_real_tensor = before


def _fake_like_real(mode: Any, _op: Any, real: torch.Tensor) -> torch.Tensor:
    with mode:
        return torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device=real.device)


def symbolic_number(mode: Any, name: str, number: float) -> Any:
    """A backed SymFloat or SymInt: an input of the trace that takes a plain number at run time."""
    environment, shapes = mode.shape_env, torch.fx.experimental.symbolic_shapes
    source = torch._dynamo.source.ConstantSource(name)
    symbol = environment.create_unspecified_symbol(
        number, source=source, dynamic_dim=shapes.DimDynamic.DYNAMIC
    )
    make = environment.create_symfloatnode if isinstance(number, float) else environment.create_symintnode
    return make(symbol, hint=number, source=source)


def symbol_name(number: Any) -> str:
    """The name of the symbol behind a symbolic number, or of its expression."""
    expression = number.node.expr
    if isinstance(number, torch.SymBool) and len(expression.free_symbols) == 1:
        (expression,) = expression.free_symbols  # a truth value read out of a tensor is `u0 == 1`
    return str(expression)


def is_symbolic(number: object) -> bool:
    """True for numbers that are computed at run time."""
    return isinstance(number, (torch.SymInt, torch.SymFloat, torch.SymBool))


def is_constant(number: Any) -> bool:
    """True for a symbolic number that is a plain one in disguise."""
    return bool(number.node.expr.is_number)


def hint_of(number: Any) -> Any:
    """The example value of a symbolic number."""
    return number.node.hint if is_symbolic(number) else number


def recorded_conditions(mode: Any) -> list[tuple[str, tuple[str, ...]]]:
    """The branches that Python took on symbolic numbers: a Python expression, and the symbols in it."""
    printer = torch.utils._sympy.printers.PythonPrinter()
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


# --- tracing ---------------------------------------------------------------------------------------------------


def trace(function: Callable[..., Any], mode: Any, inputs: Sequence[Any]) -> fx.GraphModule:
    """What: make_fx on fakes. Why: it records real autograd and real optimizers. Degraded path: none."""
    with mode:
        traced: fx.GraphModule = torch.fx.experimental.proxy_tensor.make_fx(
            function, tracing_mode="real", _allow_non_fake_inputs=True, _allow_fake_constant=True
        )(*inputs)
    return traced


def current_tracer() -> Any:
    """The tracer of the trace that is running in this thread."""
    mode = torch.fx.experimental.proxy_tensor.get_proxy_mode()
    assert mode is not None, "only called while tracing"
    return mode.tracer


@contextmanager
def functional_tensors() -> Iterator[tuple[Callable[[Any], Any], Callable[[Any], Any]]]:
    """What: FunctionalTensorMode. Why: bitwise, unlike `torch.func.functionalize`. Gives wrap and unwrap."""
    functional = torch._subclasses.functional_tensor

    def wrap(item: Any) -> Any:
        return functional.FunctionalTensor.to_functional(item) if isinstance(item, torch.Tensor) else item

    def unwrap(item: Any) -> Any:
        if not isinstance(item, functional.FunctionalTensor):
            return item
        torch._sync(item)
        return torch._from_functional_tensor(item.elem)

    with functional.FunctionalTensorMode(pre_dispatch=False):
        yield wrap, unwrap


def sequence_number() -> int:
    """The number that the next autograd node gets. Degraded path: origins of backward ops are unknown."""
    return int(torch.autograd._get_sequence_nr())


def backward_sequence_number() -> int | None:
    """The forward number of the autograd node that runs now, None outside of backward."""
    node = torch._C._current_autograd_node()
    return None if node is None else int(node._sequence_nr())


def accumulating_variable() -> torch.Tensor | None:
    """The leaf that the autograd node running now accumulates into."""
    return getattr(torch._C._current_autograd_node(), "variable", None)


@contextmanager
def tracing_patches() -> Iterator[None]:
    """Pieces of torch that a trace cannot see through, replaced for its duration.

    Checkpointed regions are recorded as plain calls (their RNG handling is not traceable); modules wrapped by
    `torch.compile` run their own Python; Adafactor's `max` and `min` stay inside the program.
    """
    checkpoint, adafactor = torch.utils.checkpoint, importlib.import_module("torch.optim._adafactor")
    dynamo = importlib.import_module("torch._dynamo.config")

    class Plain:
        @staticmethod
        def apply(function: Callable[..., Any], _preserve: bool, *args: Any) -> Any:
            return function(*args)

    def plain_region(*_args: Any, **_kwargs: Any) -> Iterator[None]:
        yield

    with ExitStack() as stack:
        stack.enter_context(dynamo.patch(error_on_nested_fx_trace=False))
        for owner, name, value in (
            (checkpoint, "CheckpointFunction", Plain),
            (checkpoint, "_checkpoint_without_reentrant_generator", plain_region),
            (adafactor, "max", larger),
            (adafactor, "min", smaller),
        ):
            _replace(stack, owner, name, value)
        yield


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


ORDERED = {torch.sym_max: larger, torch.sym_min: smaller}

_ABSENT = object()


def _replace(stack: ExitStack, owner: Any, name: str, value: Any) -> None:
    before = owner.__dict__.get(name, _ABSENT)
    setattr(owner, name, value)

    def put_back() -> None:
        if before is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, before)

    stack.callback(put_back)


class FunctionMode(TorchFunctionMode):
    """A mode that shows every torch function with its arguments to `see`, which may replace the call."""

    def __init__(self, see: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> None:
        super().__init__()
        self._see = see

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._see(func, args, kwargs or {})


GRAD_SETTER = torch.Tensor.grad.__set__
DATA_SETTER = torch.Tensor.data.__set__

# --- parameters, buffers, hooks --------------------------------------------------------------------------------


def mark_parameter(tensor: torch.Tensor) -> None:
    """Make `isinstance(tensor, nn.Parameter)` true for a stand-in."""
    tensor._is_param = True  # type: ignore[attr-defined]


def parameter_hooks(tensor: torch.Tensor) -> tuple[list[Any], list[Any]]:
    """The gradient hooks and the post-accumulate hooks of a tensor."""
    before = getattr(tensor, "_backward_hooks", None) or {}
    after = getattr(tensor, "_post_accumulate_grad_hooks", None) or {}
    return list(before.values()), list(after.values())


HOOK_FIELDS = ("_backward_hooks", "_post_accumulate_grad_hooks")
MODULE_HOOK_FIELDS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


# --- running -----------------------------------------------------------------------------------------------------


def direct_call(target: Any) -> Callable[..., Any]:
    """What: the C++ entry of an op. Why: saves a Python frame per op. Degraded path: the op itself."""
    call: Callable[..., Any] = getattr(target, "_op", target) if isinstance(target, OpOverload) else target
    return call


def metadata_guard(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """A check that tensors keep type, dtype, device, sizes, strides and requires_grad.

    What: the C++ TensorGuards. Why: 8 µs for 200 tensors. Degraded path: the same comparison in Python.
    """
    try:
        module = importlib.import_module("torch._C._dynamo.guards")
        fixed = [[None] * tensor.dim() for tensor in tensors]
        guards = module.TensorGuards(*tensors, dynamic_dims_sizes=fixed, dynamic_dims_strides=fixed)
        check: Callable[..., bool] = guards.check
        return check
    except (ImportError, AttributeError, TypeError):
        expected = [_description(tensor) for tensor in tensors]
        return lambda *now: [_description(tensor) for tensor in now] == expected


def _description(tensor: torch.Tensor) -> tuple[Any, ...]:
    return type(tensor), tensor.dtype, tensor.device, tensor.shape, tensor.stride(), tensor.requires_grad


def same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True if two tensors share a storage."""
    return bool(a.untyped_storage()._cdata == b.untyped_storage()._cdata)


def storage_key(tensor: torch.Tensor) -> int:
    """A number that tensors on one storage share."""
    return int(tensor.untyped_storage()._cdata)


def spelling(target: Any) -> str | None:
    """How Python reaches an op: `aten.mm.default`; None for anything but ops."""
    if isinstance(target, OpOverload):
        name = f"{target._opname}.{target._overloadname}"
        return f"aten.{name}" if target.namespace == "aten" else f"torch.ops.{target.namespace}.{name}"
    if isinstance(target, HigherOrderOperator):
        return f"torch.ops.higher_order.{target.name()}"
    return None


def is_random(target: Any) -> bool:
    """True for ops that draw from a random generator."""
    return isinstance(target, OpOverload) and torch.Tag.nondeterministic_seeded in target.tags


def writes_to_inputs(target: Any) -> bool:
    """True for ops that change one of their arguments."""
    return isinstance(target, OpOverload) and target._schema.is_mutable


def step_was_called(optimizer: Any) -> None:
    """Tell learning-rate schedulers that the optimizer has stepped, which they check once."""
    optimizer._opt_called = True


def autocast_state() -> Mapping[str, Any]:
    """The autocast settings of this thread, by device type."""
    devices = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    return {
        device: torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        for device in devices
    }


@contextmanager
def _visible() -> Iterator[None]:
    yield


def hidden_from_dispatch_modes() -> Any:
    """What: a guard that switches TorchDispatchModes off. Why: a mode sees the program's ops and nothing else,
    while write-backs belong to the executor. Degraded path: modes see the write-backs too.
    """
    guard = getattr(torch._C, "_DisableTorchDispatch", None)
    return guard() if guard is not None else _visible()


def needs_grad_mode(target: Any) -> bool:
    """True for the fused CPU recurrent layer: without grad mode it keeps no workspace for its backward."""
    return target is torch.ops.aten.mkldnn_rnn_layer.default


@contextmanager
def outside_of_modes() -> Iterator[None]:
    """What: dispatch modes off. Why: real work in the middle of a fake run. Degraded path: none."""
    modes = torch.utils._python_dispatch
    with modes._disable_current_modes():
        yield
