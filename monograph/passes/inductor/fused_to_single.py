"""The updates of fused optimizers by torch's formulas for single tensors: compilers fuse those their own way.

A fused op holds the updates of all parameters together until the last gradient is there.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from operator import getitem
from typing import Any, cast

import torch
from torch import fx

from monograph.compat.ops import named_arguments, schema_of
from monograph.ir.memory import marked_names
from monograph.ir.meta import ScalarMeta, set_value
from monograph.ir.ops.fused import FUSED
from monograph.ir.program import Program
from monograph.passes.inductor.rewrite import calls_like, rewritten

aten = torch.ops.aten


def fused_to_single(program: Program) -> Program:
    """Write `fused_adamw([a, b], ...)` and its like as the formulas of the optimizer for `a` and for `b`."""
    return rewritten(program, _is_taken_apart, _write_out)


def _is_taken_apart(node: fx.Node) -> bool:
    """True for the update of a fused optimizer of whose results only single tensors are read."""
    lists = list(node.users)
    return node.target in _FORMULAS and all(
        user.target is getitem for item in [lists, *(list(item.users) for item in lists)] for user in item
    )


def _write_out(node: fx.Node) -> None:
    formula, names = _FORMULAS[node.target]
    update = _Update(node)
    with node.graph.inserting_before(node):
        made = [update.written(index, formula) for index in range(len(update.given["self"]))]
    for results in list(node.users):
        name = names[cast(int, results.args[1])]
        for result in list(results.users):
            _replace(result, made[cast(int, result.args[1])][name])
        node.graph.erase_node(results)
    node.graph.erase_node(node)


def _replace(result: fx.Node, new: fx.Node) -> None:
    """Put another node in the place of a result. A counter that the op gives back is not copied into itself."""
    result.replace_all_uses_with(new)
    result.graph.erase_node(result)
    for reader in list(new.users):
        if reader.target is aten.copy.default and reader.args == (new, new):
            reader.replace_all_uses_with(new)
            reader.graph.erase_node(reader)


class _Update:
    """One fused op. Its formulas are written before it, in the numbers and tensors that it is given."""

    def __init__(self, node: fx.Node) -> None:
        self.node = node
        self.given: Mapping[str, Any] = named_arguments(node.target, node.args, node.kwargs)
        self.op = calls_like(node)

    def plus(self, a: fx.Node, b: fx.Node, factor: Any) -> fx.Node:
        """`a + factor * b`."""
        plain = not isinstance(factor, fx.Node) and factor == 1
        return self.op(aten.add.Tensor, a, b, **({} if plain else {"alpha": factor}))

    @property
    def decays(self) -> bool:
        """False for a weight decay that is always zero."""
        decay = self.given["weight_decay"]
        return isinstance(decay, fx.Node) or decay != 0

    def number(self, target: Callable[..., Any], *operands: Any) -> Any:
        """Arithmetic of Python; on numbers that do not move its result."""
        moves = any(isinstance(item, fx.Node) for item in operands)
        return self.op(target, *operands) if moves else target(*operands)

    def read(self, tensor: fx.Node) -> fx.Node:
        """The number in a tensor."""
        made = self.op(aten._local_scalar_dense.default, tensor)
        set_value(made, ScalarMeta("float"))
        return made

    def written(self, index: int, formula: Formula) -> dict[str, fx.Node]:
        """The new tensors of one parameter, by the names of the lists that the op changes."""
        old = {name: items[index] for name, items in self.given.items() if isinstance(items, list) and items}
        gradient = old["grads"]
        if self._inverse_scale is not None:
            gradient = self.op(aten.mul.Tensor, gradient, self._inverse_scale)
        seen = self.op(aten.neg.default, gradient) if self.given["maximize"] else gradient
        new = {**old, "grads": gradient, **formula(self, old, seen)}
        return {name: self._unless_skipped(item, old[name]) for name, item in new.items()}

    def _unless_skipped(self, new: fx.Node, old: fx.Node) -> fx.Node:
        if self._is_skipped is None or new is old:
            return new
        return self.op(aten.where.self, self._is_skipped, old, new)

    @cached_property
    def rate(self) -> Any:
        """The learning rate as a number."""
        rate = self.given["lr"]
        return self.read(rate) if schema_of(self.node.target).overload_name == "tensor_lr" else rate

    @cached_property
    def _inverse_scale(self) -> fx.Node | None:
        """What gradients are multiplied by, as a scaler computes it."""
        if (scale := self.given.get("grad_scale")) is None:
            return None
        wide = self.op(aten.reciprocal.default, self.op(aten._to_copy.default, scale, dtype=torch.float64))
        return self.op(aten._to_copy.default, wide, dtype=torch.float32)

    @cached_property
    def _is_skipped(self) -> fx.Node | None:
        found = self.given.get("found_inf")
        return None if found is None else self.op(aten.ne.Scalar, found, 0)


Formula = Callable[[_Update, Mapping[str, fx.Node], fx.Node], dict[str, fx.Node]]


def _adam(
    update: _Update, old: Mapping[str, fx.Node], gradient: fx.Node, *, decoupled: bool
) -> dict[str, fx.Node]:
    given, op, number = update.given, update.op, update.number
    parameter, decay, betas = old["self"], given["weight_decay"], (given["beta1"], given["beta2"])
    if decoupled and update.decays:
        kept = number(operator.sub, 1, number(operator.mul, update.rate, decay))
        parameter = op(aten.mul.Tensor, parameter, kept)
    elif update.decays:
        gradient = update.plus(gradient, parameter, decay)
    rest = [number(operator.sub, 1, beta) for beta in betas]
    average = op(aten.lerp.Scalar, old["exp_avgs"], gradient, rest[0])
    squares = op(aten.mul.Tensor, old["exp_avg_sqs"], betas[1])
    squares = op(aten.addcmul.default, squares, gradient, gradient, value=rest[1])
    new = {"exp_avgs": average, "exp_avg_sqs": squares}
    step = update.read(old["state_steps"])
    corrections = [number(operator.sub, 1, number(operator.pow, beta, step)) for beta in betas]
    size = number(operator.truediv, update.rate, corrections[0])
    if given["amsgrad"]:
        squares = new["max_exp_avg_sqs"] = op(aten.maximum.default, old["max_exp_avg_sqs"], squares)
    root = op(aten.div.Tensor, op(aten.sqrt.default, squares), number(operator.pow, corrections[1], 0.5))
    root = op(aten.add.Tensor, root, given["eps"])
    new["self"] = op(aten.addcdiv.default, parameter, average, root, value=number(operator.neg, size))
    return new


def _sgd(update: _Update, old: Mapping[str, fx.Node], gradient: fx.Node) -> dict[str, fx.Node]:
    given, op, number = update.given, update.op, update.number
    new = {}
    if update.decays:
        gradient = update.plus(gradient, old["self"], given["weight_decay"])
    if (buffer := old.get("momentum_buffer_list")) is not None:
        if given["is_first_step"]:
            buffer = op(aten.clone.default, gradient)
        else:
            buffer = op(aten.mul.Tensor, buffer, given["momentum"])
            buffer = update.plus(buffer, gradient, number(operator.sub, 1, given["dampening"]))
        new["momentum_buffer_list"] = buffer
        gradient = update.plus(gradient, buffer, given["momentum"]) if given["nesterov"] else buffer
    return {"self": update.plus(old["self"], gradient, number(operator.neg, update.rate)), **new}


def _adagrad(update: _Update, old: Mapping[str, fx.Node], gradient: fx.Node) -> dict[str, fx.Node]:
    given, op, number = update.given, update.op, update.number
    if update.decays:
        gradient = update.plus(gradient, old["self"], given["weight_decay"])
    before = number(operator.sub, update.read(old["state_steps"]), 1)
    slower = number(operator.add, 1, number(operator.mul, before, given["lr_decay"]))
    rate = number(operator.neg, number(operator.truediv, update.rate, slower))
    squares = op(aten.addcmul.default, old["state_sums"], gradient, gradient)
    root = op(aten.add.Tensor, op(aten.sqrt.default, squares), given["eps"])
    new = op(aten.addcdiv.default, old["self"], gradient, root, value=rate)
    return {"self": new, "state_sums": squares}


_BY_NAME: Mapping[str, Formula] = {
    "fused_adam": partial(_adam, decoupled=False),
    "fused_adamw": partial(_adam, decoupled=True),
    "fused_sgd": _sgd,
    "fused_adagrad": _adagrad,
}
_FORMULAS: Mapping[Any, tuple[Formula, Sequence[str]]] = {
    op: (_BY_NAME[schema_of(op).name.removeprefix("monograph::")], marked_names(in_place, writes=True))
    for in_place, op in FUSED.items()
}
