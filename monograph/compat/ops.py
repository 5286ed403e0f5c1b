"""Ops: their classes and schemas (`torch._ops`), what they write, show and draw, and the op that asserts.

The classes and schemas are needed; each function says what happens without the rest.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import count
from types import BuiltinFunctionType, MethodDescriptorType
from typing import Any

import torch
from torch import fx

from monograph.compat.distributed.ops import communicates, shown_by_collective
from monograph.compat.patching import replace_here

# What: the classes of ops in a graph. Why: to know an op's schema and to spell it.
# Degraded path: none needed, unchanged since 2.0.
OpOverload = torch._ops.OpOverload
HigherOrderOperator = torch._ops.HigherOrderOperator


def has_effect(target: Any) -> bool:
    """True for ops that check values and may raise. Nothing reads them, and they must stay."""
    return isinstance(target, OpOverload) and not target._schema.returns and not target._schema.is_mutable


def direct_call(target: Any) -> Callable[..., Any]:
    """What: the C++ entry of an op. Why: saves a Python frame per op. Degraded path: the op itself."""
    call: Callable[..., Any] = getattr(target, "_op", target) if isinstance(target, OpOverload) else target
    return call


def python_functions(op: Any) -> list[Callable[..., Any]]:
    """The functions in C by which torch's Python calls ops of this name, if there are some.

    What: the bindings of `torch.add`, `torch.nn.functional.gelu` and methods of tensors. Why: they take 0.3 µs less than
    `direct_call`. Degraded path: none, and ops are called directly.
    """
    name = "item" if op.namespace == "aten" and op._opname == "_local_scalar_dense" else op._opname
    homes = (getattr(torch._C, "_VariableFunctions", None), getattr(torch._C, "_nn", None), torch.Tensor)
    found = [getattr(home, name, None) for home in homes] if op.namespace == "aten" and not _draws(op) else []
    return [item for item in found if isinstance(item, (BuiltinFunctionType, MethodDescriptorType))]


def spelling(target: Any) -> str | None:
    """How Python reaches an op: `aten.mm.default`; None for anything but ops."""
    if isinstance(target, OpOverload):
        name = f"{target._opname}.{target._overloadname}"
        return f"aten.{name}" if target.namespace == "aten" else f"torch.ops.{target.namespace}.{name}"
    if isinstance(target, HigherOrderOperator):
        return f"torch.ops.higher_order.{target.name()}"
    return None


def is_profiler_mark(target: Any) -> bool:
    """True for the ops by which torch marks the spans of its profiler."""
    return isinstance(target, OpOverload) and target.namespace == "profiler"


def op_name(op: Any) -> str:
    """The exact name of an op: `aten::add.Tensor`, `aten::mm.default`."""
    return f"{op.namespace}::{op._opname}.{op._overloadname}"


def schema_of(target: Any) -> Any:
    """The schema of an op, whose fields are public; None for any other function."""
    return getattr(target, "_schema", None)


def overload_name(op: Any) -> str:
    """The part of an op's name after the dot: `Tensor`, and nothing for `default`."""
    name: str = op._overloadname
    return name


# What: the class of what `torch.library.custom_op` makes. Why: it is code, and cannot be copied. Degraded path: none.
CustomOp: type = torch._library.custom_ops.CustomOpDef


def custom_op_name(target: Any) -> str | None:
    """The name of an op that `torch.library.custom_op` has made, None for anything else."""
    return getattr(target, "_qualname", None)


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


def overloads(name: str) -> list[Any]:
    """The ops of aten that share a name; none if there is no such name."""
    packet = getattr(torch.ops.aten, name, None)
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        return []
    return [getattr(packet, overload) for overload in packet.overloads()]


def in_place_name(op: Any) -> tuple[str, str, str]:
    """The exact name that the op has which does the same in place, if there is one: `aten`, `add_`, `Tensor`."""
    return op.namespace, f"{op._opname}_", op._overloadname


def list_ops(op: Any, *, in_place: bool) -> list[Any]:
    """The ops of aten that do for lists of tensors what `op` does for one, by their names.

    What: `torch._foreach_*`. Why: a call for many small tensors takes little longer than one for one of them. Degraded path:
    none are found, and ops are called one by one.
    """
    return overloads(f"_foreach_{op._opname}{'_' if in_place else ''}") if op.namespace == "aten" else []


@cache
def is_pointwise(target: Any) -> bool:
    """True for ops of torch that compute each element by itself, and draw nothing."""
    pointwise = isinstance(target, OpOverload) and target.namespace == "aten"
    return pointwise and torch.Tag.pointwise in target.tags and not _draws(target)


def copies_its_result(op: Any) -> bool:
    """True for an op that torch generates from another: it copies what that one makes into the memory that it is given."""
    return torch.Tag.generated in op.tags


@cache
def is_composite(op: Any) -> bool:
    """True for ops that functional tensors see as others, in terms of which they are written.

    What: the table of kernels, and the ops that torch calls unsafe. Why: what they write and show is known by running
    them. Degraded path: every op that may be written so is.
    """
    if not op._can_decompose():
        return False
    is_unsafe = getattr(torch._decomp, "_should_decompose_because_unsafe_op", lambda _op: True)
    marked = any(item.alias_info is not None for item in op._schema.arguments)
    return marked or is_unsafe(op) or not op.has_kernel_for_dispatch_key(torch._C.DispatchKey.CPU)


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
        replace_here(stack, torch, "any", none)
        yield


@contextmanager
def only_fault(number: int) -> Iterator[None]:
    """Of the questions `torch.any(fault)` in torch's own Python, that of this number is answered with yes."""
    numbers = count()
    with ExitStack() as stack:
        replace_here(stack, torch, "any", lambda _: next(numbers) == number)
        yield


def is_random(target: Any) -> bool:
    """True for ops that draw from a random generator."""
    return isinstance(target, OpOverload) and _draws(target)


@cache
def _draws(op: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in op.tags


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
    if makes_memory(target):
        return (frozenset(),)
    if communicates(target):
        return shown_by_collective(target)
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


def makes_memory(target: Any) -> bool:
    """True for functions of our own whose results are in memory of their own: they say so."""
    return bool(getattr(target, "makes_memory", False))


def _share(argument: Any, result: Any) -> bool:
    """True if two alias marks name one set; a list of views is marked `(a -> *)` at the argument only."""
    return result is not None and ("*" in argument.after_set or bool(argument.before_set & result.before_set))


def named_arguments(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call of an op by their names."""
    return dict(zip(_argument_names(target), args, strict=False)) | dict(kwargs)


@cache
def _argument_names(op: Any) -> tuple[str, ...]:
    return tuple(item.name for item in op._schema.arguments)


def looks_at_grad_mode(target: Any) -> bool:
    """True for the fused CPU recurrent layer: without grad mode it takes another kernel and keeps no workspace."""
    return target is torch.ops.aten.mkldnn_rnn_layer.default


_OWN_NAMESPACES = frozenset({"aten", "prims", "prim", "mkldnn", "quantized", "c10d", "_c10d_functional"})


def is_custom(target: Any) -> bool:
    """True for ops that do not come with torch, whose fake kernels may report anything."""
    return isinstance(target, OpOverload) and target.namespace not in _OWN_NAMESPACES


def operator_schemas(name: str) -> list[list[tuple[str, str, bool]]]:
    """For each overload of an aten operator its parameters: name, type as text, keyword only or not.

    What: the table of schemas of torch's builtins. Why: builtins have no annotations that say what a random
    argument must be. Degraded path: none are found, and tests name the types themselves.
    """
    schemas = torch._C._jit_get_schemas_for_operator(f"aten::{name}")
    return [[(a.name, str(a.type), a.kwarg_only) for a in schema.arguments] for schema in schemas]


def has_flops(target: Any) -> bool:
    """True for an op that `flops_of` has a formula for."""
    return getattr(target, "_overloadpacket", None) in _formulas()


def flops_of(target: Any, args: Any, kwargs: Any, made: Any) -> int:
    """Floating point operations of a matrix product, convolution or attention; 0 for any other op.

    What: torch's registry of formulas. Why: the share of the roofline. For the backward of a convolution the formula of its forward is
    taken, once for each of the two gradients: that for the weight's counts all groups for each group (2.13). Degraded path: 0.
    """
    if target is torch.ops.aten.convolution_backward.default and not kwargs:
        gradient, x, weight, _, *how, wanted = args
        forward = flops_of(torch.ops.aten.convolution.default, (x, weight, None, *how), {}, gradient)
        return forward * sum(map(bool, wanted[:2]))
    formula = _formulas().get(getattr(target, "_overloadpacket", None))
    if formula is None:
        return 0
    try:
        return int(formula(*args, **kwargs, out_val=made))
    except (TypeError, ValueError, AssertionError):  # another form of the op than the formula knows
        return 0


def _formulas() -> Any:
    return getattr(importlib.import_module("torch.utils.flop_counter"), "flop_registry", {})


def named_input(graph: fx.Graph, name: str) -> fx.Node:
    """A new placeholder that is called `name`.

    What: `create_node` with a name. Why: `Graph.placeholder` writes a name in its own way, `myNet` as `my_net` and `X` as `x`,
    which is not the name of the port then. Degraded path: none needed, public.
    """
    return graph.create_node("placeholder", name, name=name)
