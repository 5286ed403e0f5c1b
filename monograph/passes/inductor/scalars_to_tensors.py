"""Numbers become 0-dimensional tensors: for compilers that take no Python numbers that move, and no round trips to Python.

A float is a float64 tensor, an int an int64 one, so arithmetic on them is that of Python. Where an op takes a number
that moves, it is written with tensors: `addcdiv(x, a, b, value=n)` becomes `x + n * a / b`, with `n` rounded to the
type of `x` once, as the kernel does. Numbers that are computed from sizes stay numbers.
"""

from __future__ import annotations

import builtins
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from monograph.compat.ops import named_arguments, schema_of
from monograph.errors import BackendError
from monograph.ir.meta import ScalarMeta, TensorMeta, origin, set_value, value
from monograph.ir.printer import spell_target
from monograph.ir.program import Program
from monograph.ir.size_numbers import numbers_of_sizes

aten = torch.ops.aten
_CPU = torch.device("cpu")


def scalars_to_tensors(program: Program) -> Program:
    """Rewrite every number that is computed at run time into a 0-dimensional tensor."""
    return _Rewriter(program).rewritten()


class _Rewriter:
    """Builds the new graph node by node. `at` is the node whose place and origin new nodes take."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.graph = fx.Graph()
        self.new: dict[fx.Node, Any] = {}
        self.sizes = numbers_of_sizes(program.graph)
        self.at: fx.Node

    def rewritten(self) -> Program:
        """The program in its new form."""
        for node in self.program.graph.nodes:
            self.at = node
            self.new[node] = self._node(node)
        return self.program.with_graph(self.graph)

    def _node(self, node: fx.Node) -> Any:
        described = value(node)
        if node.op == "placeholder":
            made = self._copied(node)
            if isinstance(described, ScalarMeta):
                set_value(made, described.as_tensor)
            return made
        if node.op != "call_function" or node in self.sizes:
            return self._copied(node)
        if node.target is aten._local_scalar_dense.default:
            return self._read_out(node)
        if isinstance(described, ScalarMeta) and node.target is not operator.getitem:
            return self._arithmetic(node, described)
        if any(
            isinstance(value(used), ScalarMeta) and used not in self.sizes for used in node.all_input_nodes
        ):
            return self._with_tensors(node)
        return self._copied(node)

    def _copied(self, node: fx.Node) -> fx.Node:
        return self.graph.node_copy(node, self.new.__getitem__)

    def emit(self, target: Any, *args: Any, like: Any = None, **kwargs: Any) -> fx.Node:
        """A new node that makes a value described by `like`, by default that of the node being rewritten."""
        made = self.graph.call_function(target, args, kwargs)
        made.meta = dict(self.at.meta)
        set_value(made, value(self.at) if like is None else like)
        return made

    # --- numbers -----------------------------------------------------------------------------------------------------

    def _read_out(self, node: fx.Node) -> fx.Node:
        source = self.new[node.args[0]]  # type: ignore[index]
        kind = value(node)
        assert isinstance(kind, ScalarMeta)
        described = value(source)
        like = replace(kind.as_tensor, device=described.device)  # type: ignore[union-attr]
        if described.shape != ():  # type: ignore[union-attr]
            source = self.emit(aten.view.default, source, [], like=replace(described, shape=(), stride=()))  # type: ignore[type-var]
        if described.dtype == like.dtype:  # type: ignore[union-attr]
            return self.emit(aten.clone.default, source, like=like)
        return self.emit(aten._to_copy.default, source, dtype=like.dtype, like=like)

    def _arithmetic(self, node: fx.Node, kind: ScalarMeta) -> fx.Node:
        make = _ARITHMETIC.get(node.target)
        if make is None:
            raise self._unsupported(node)
        like = kind.as_tensor
        floating = kind.kind == "float" or any(_kind(item) == "float" for item in node.args)
        dtype = torch.float64 if floating else torch.int64
        operands = [self._operand(item, dtype) for item in node.args]
        result = self.emit(
            make, *operands, like=replace(like, dtype=dtype if kind.kind != "bool" else torch.bool)
        )
        if kind.kind == "int" and floating:
            return self.emit(aten._to_copy.default, result, dtype=torch.int64, like=like)
        return result

    def _operand(self, item: Any, dtype: torch.dtype) -> fx.Node:
        """A number of a computation as a tensor of this type; truth values stay what they are."""
        like = TensorMeta((), dtype, (), _CPU)
        if not isinstance(item, fx.Node) or item in self.sizes:
            number = fx.map_arg(item, self.new.__getitem__)
            return self.emit(aten.full.default, [], number, dtype=dtype, like=like)
        made: fx.Node = self.new[item]
        known = value(made)
        assert isinstance(known, TensorMeta)
        if known.dtype in (dtype, torch.bool):
            return made
        return self.emit(aten._to_copy.default, made, dtype=dtype, like=replace(known, dtype=dtype))

    # --- ops that take numbers ---------------------------------------------------------------------------------------

    def _with_tensors(self, node: fx.Node) -> fx.Node:
        make = _OPS.get(node.target)
        if make is None:
            raise self._unsupported(node)
        return make(self, node)

    def argument(self, item: Any) -> Any:
        """An argument of the node in the new graph."""
        if isinstance(item, fx.Node) and self._would_widen(item):
            return self.as_tensor(item)
        return fx.map_arg(item, self.new.__getitem__)

    def _would_widen(self, item: fx.Node) -> bool:
        """True for a number beside tensors without dimensions: as a tensor it would decide the type of the result."""
        number, result = value(item), value(self.at)
        return (
            isinstance(number, ScalarMeta)
            and isinstance(result, TensorMeta)
            and result.shape == ()
            and result.dtype.is_floating_point
        )

    def rounded(self, item: Any) -> Any:
        """A number in the type of the node's result, as its kernel rounds it. Constants stay numbers."""
        if not isinstance(item, fx.Node) or not isinstance(value(item), ScalarMeta):
            return self.argument(item)
        return self.as_tensor(item)

    def as_tensor(self, item: Any) -> Any:
        """An argument in the new graph, numbers as tensors of the type of the node's result."""
        described = value(self.at)
        assert isinstance(described, TensorMeta)
        number = type(item) in (bool, int, float)
        if number or (isinstance(item, fx.Node) and isinstance(value(item), ScalarMeta)):
            return self._operand(item, described.dtype)
        return self.argument(item)

    def _unsupported(self, node: fx.Node) -> BackendError:
        return BackendError(
            f"{spell_target(node.target)} takes a number that changes from step to step, which cannot be compiled",
            where=origin(node),
            hint="pass a constant, or a tensor; the aten backend takes such numbers",
        )


def _kind(item: Any) -> str | None:
    if isinstance(item, fx.Node):
        described = value(item)
        return described.kind if isinstance(described, ScalarMeta) else None
    return type(item).__name__


# --- arithmetic of Python, and its form with tensors -----------------------------------------------------------------

_ARITHMETIC: Mapping[Any, Any] = {
    operator.add: aten.add.Tensor,
    operator.sub: aten.sub.Tensor,
    operator.mul: aten.mul.Tensor,
    operator.truediv: aten.div.Tensor,
    operator.floordiv: aten.floor_divide.default,
    operator.mod: aten.remainder.Tensor,
    operator.pow: aten.pow.Tensor_Tensor,
    operator.neg: aten.neg.default,
    operator.abs: aten.abs.default,
    builtins.abs: aten.abs.default,
    builtins.pow: aten.pow.Tensor_Tensor,
    operator.lt: aten.lt.Tensor,
    operator.le: aten.le.Tensor,
    operator.gt: aten.gt.Tensor,
    operator.ge: aten.ge.Tensor,
    operator.eq: aten.eq.Tensor,
    operator.ne: aten.ne.Tensor,
    operator.and_: aten.bitwise_and.Tensor,
    operator.or_: aten.bitwise_or.Tensor,
    math.sqrt: aten.sqrt.default,
    math.exp: aten.exp.default,
    math.log: aten.log.default,
    math.sin: aten.sin.default,
    math.cos: aten.cos.default,
    math.tanh: aten.tanh.default,
    math.floor: aten.floor.default,
    math.ceil: aten.ceil.default,
    math.trunc: aten.trunc.default,
    torch.sym_max: aten.maximum.default,
    torch.sym_min: aten.minimum.default,
    torch.sym_not: aten.logical_not.default,
    torch.sym_float: aten.alias.default,
    torch.sym_int: aten.trunc.default,
    torch.sym_ite: aten.where.self,
    torch.sym_sqrt: aten.sqrt.default,
}

Make = Callable[[_Rewriter, fx.Node], fx.Node]


def _named(node: fx.Node) -> dict[str, Any]:
    """The arguments of a node by the names of its op's schema, with defaults."""
    schema = schema_of(node.target).arguments
    defaults = {item.name: item.default_value for item in schema if item.has_default_value()}
    return defaults | named_arguments(node.target, node.args, node.kwargs)


def _same(target: Any) -> Make:
    """The op, or an overload of it that takes tensors, with the same arguments in the same places."""

    def make(to: _Rewriter, node: fx.Node) -> fx.Node:
        kwargs = {key: to.argument(item) for key, item in node.kwargs.items()}
        return to.emit(target, *map(to.argument, node.args), **kwargs)

    return make


def _cast(target: Any) -> Make:
    """An overload that takes tensors of one type only."""

    def make(to: _Rewriter, node: fx.Node) -> fx.Node:
        kwargs = {key: to.as_tensor(item) for key, item in node.kwargs.items()}
        return to.emit(target, *map(to.as_tensor, node.args), **kwargs)

    return make


def _plus(target: Any) -> Make:
    """`x + alpha * y`, or with a minus."""

    def make(to: _Rewriter, node: fx.Node) -> fx.Node:
        given = _named(node)
        x, y = to.argument(given["self"]), to.argument(given["other"])
        if isinstance(given["alpha"], fx.Node):
            y = to.emit(aten.mul.Tensor, to.argument(given["other"]), to.rounded(given["alpha"]))
        elif given["alpha"] != 1:
            return to.emit(target, x, y, alpha=given["alpha"])
        return to.emit(target, x, y)

    return make


def _reversed_minus(to: _Rewriter, node: fx.Node) -> fx.Node:
    given = _named(node)
    x, y = to.argument(given["self"]), to.rounded(given["other"])
    if isinstance(given["alpha"], fx.Node) or given["alpha"] != 1:
        x = to.emit(aten.mul.Tensor, x, to.rounded(given["alpha"]))
    return to.emit(aten.add.Tensor, to.emit(aten.neg.default, x), y)


def _add_scaled(combine: Any) -> Make:
    """`x + n * a * b`, or `/ b`, from left to right as the kernel does."""

    def make(to: _Rewriter, node: fx.Node) -> fx.Node:
        given = _named(node)
        scaled = to.emit(aten.mul.Tensor, to.argument(given["tensor1"]), to.rounded(given["value"]))
        change = to.emit(combine, scaled, to.argument(given["tensor2"]))
        return to.emit(aten.add.Tensor, to.argument(given["self"]), change)

    return make


def _filled(to: _Rewriter, node: fx.Node) -> fx.Node:
    given = _named(node)
    described = value(node)
    assert isinstance(described, TensorMeta)
    empty = to.emit(
        aten.full.default, list(described.shape), 0, dtype=described.dtype, device=described.device
    )
    return to.emit(aten.add.Tensor, empty, to.rounded(given.get("fill_value", given.get("value"))))


def _tensor_of(to: _Rewriter, node: fx.Node) -> fx.Node:
    described = value(node)
    assert isinstance(described, TensorMeta)
    number: Any = node.args[0]
    return to.emit(aten._to_copy.default, to.argument(number), dtype=described.dtype, device=described.device)


def _chosen(to: _Rewriter, node: fx.Node) -> fx.Node:
    condition, *choices = node.args
    return to.emit(aten.where.self, to.argument(condition), *map(to.as_tensor, choices))


def _base_to_the(to: _Rewriter, node: fx.Node) -> fx.Node:
    return to.emit(aten.pow.Tensor_Tensor, to.rounded(node.args[0]), to.argument(node.args[1]))


_OPS: Mapping[Any, Make] = {
    aten.add.Tensor: _plus(aten.add.Tensor),
    aten.add.Scalar: _plus(aten.add.Tensor),
    aten.sub.Tensor: _plus(aten.sub.Tensor),
    aten.sub.Scalar: _plus(aten.sub.Tensor),
    aten.rsub.Scalar: _reversed_minus,
    aten.rsub.Tensor: _reversed_minus,
    aten.mul.Tensor: _same(aten.mul.Tensor),
    aten.mul.Scalar: _same(aten.mul.Tensor),
    aten.div.Tensor: _same(aten.div.Tensor),
    aten.div.Scalar: _same(aten.div.Tensor),
    aten.div.Tensor_mode: _same(aten.div.Tensor_mode),
    aten.div.Scalar_mode: _same(aten.div.Tensor_mode),
    aten.floor_divide.default: _same(aten.floor_divide.default),
    aten.floor_divide.Scalar: _same(aten.floor_divide.default),
    aten.remainder.Scalar: _same(aten.remainder.Tensor),
    aten.fmod.Scalar: _same(aten.fmod.Tensor),
    aten.pow.Tensor_Scalar: _same(aten.pow.Tensor_Tensor),
    aten.pow.Scalar: _base_to_the,
    aten.eq.Scalar: _same(aten.eq.Tensor),
    aten.ne.Scalar: _same(aten.ne.Tensor),
    aten.lt.Scalar: _same(aten.lt.Tensor),
    aten.le.Scalar: _same(aten.le.Tensor),
    aten.gt.Scalar: _same(aten.gt.Tensor),
    aten.ge.Scalar: _same(aten.ge.Tensor),
    aten.addcmul.default: _add_scaled(aten.mul.Tensor),
    aten.addcdiv.default: _add_scaled(aten.div.Tensor),
    aten.lerp.Scalar: _cast(aten.lerp.Tensor),
    aten.clamp.default: _cast(aten.clamp.Tensor),
    aten.clamp_min.default: _cast(aten.clamp_min.Tensor),
    aten.clamp_max.default: _cast(aten.clamp_max.Tensor),
    aten.masked_fill.Scalar: _cast(aten.masked_fill.Tensor),
    aten.fill.Scalar: _filled,
    aten.full.default: _filled,
    aten.full_like.default: _filled,
    aten.scalar_tensor.default: _tensor_of,
    aten.where.Scalar: _chosen,
    aten.where.ScalarSelf: _chosen,
    aten.where.ScalarOther: _chosen,
}
