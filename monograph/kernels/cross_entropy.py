"""Cross-entropy with its gradient in one go, where the scale of the gradient does not depend on the loss.

The gradient comes with the loss: its scale, one over the number of rows or what a loss scaler multiplies with, is moved
before the loss. A program in which more than the loss needs the logarithms of the softmax is left alone.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from monograph.compat.ops import named_input
from monograph.ir.evaluate import fill_meta
from monograph.ir.meta import TensorMeta, compute_nodes, form, set_value
from monograph.ir.own_ops import (
    CROSS_ENTROPY,
    SMOOTH_CROSS_ENTROPY,
    cross_entropy_of_torch,
    smooth_cross_entropy_of_torch,
)
from monograph.ir.program import Program
from monograph.kernels.candidates import DEFAULT, Form
from monograph.kernels.compile import KernelCompiler, kernel_at
from monograph.kernels.trials import seconds_of
from monograph.kernels.tuned import TunedKernel, remembered
from monograph.layout import Layout
from monograph.native import CrossEntropy
from monograph.passes.dce import dce
from monograph.passes.effects import is_pure
from monograph.passes.inductor.rewrite import calls_like

aten = torch.ops.aten
SOFTMAX, SOFTMAX_BACKWARD = aten._log_softmax.default, aten._log_softmax_backward_data.default
LOSS, LOSS_BACKWARD = aten.nll_loss_forward.default, aten.nll_loss_backward.default
_SUMS = aten.sum.dim_IntList
_OWN = "own"
_MEAN, _SUM = 1, 2  # torch's numbers for ways to reduce; 0 is none
_FROM_FORM: Mapping[Any, int] = {
    aten.ones_like.default: 1,
    aten.zeros_like.default: 0,
}  # depend on no number of what they are given


@dataclass(frozen=True)
class _Smooth:
    """The ops that label smoothing adds: sums of the logarithms, and a gradient of all of a row; `uniform` is that of one."""

    sums: fx.Node
    uniform: fx.Node
    both: fx.Node  # the gradients added up


@dataclass(frozen=True)
class _Loss:
    """The ops of one cross-entropy, and those of the scale of its gradient that come after the loss."""

    softmax: fx.Node
    loss: fx.Node
    backward: fx.Node
    gradient: fx.Node
    smooth: _Smooth | None
    moved: tuple[fx.Node, ...]

    @property
    def logits(self) -> TensorMeta:
        """What it is given."""
        described = form(self.softmax.all_input_nodes[0])
        assert described is not None
        return described


def with_cross_entropy(program: Program) -> tuple[Program, tuple[TunedKernel, ...]]:
    """A program in which cross-entropies are computed in the way that is fastest here, and what was chosen."""
    names = [item.softmax.name for item in _losses_in(program.graph)]
    if not names:
        return program, ()
    changed, choices = program.rebuilt(), list[TunedKernel]()
    for name in names:
        # one that was written has moved what it needs, which may be another one, whose scale may need this one
        for loss in [item for item in _losses_in(changed.graph) if item.softmax.name == name]:
            choices.append(_chosen(loss))
            if choices[-1].winner == _OWN:
                _write(loss)
    fill_meta(changed.graph)
    return dce(changed), tuple(choices)


# --- what is replaced -------------------------------------------------------------------------------------------------


def _losses_in(graph: fx.Graph) -> list[_Loss]:
    places = {node: place for place, node in enumerate(graph.nodes)}
    found = (_loss_at(node, places) for node in compute_nodes(graph) if node.target is SOFTMAX)
    return [item for item in found if item is not None]


def _loss_at(softmax: fx.Node, places: dict[fx.Node, int]) -> _Loss | None:
    """The cross-entropy of which this is the first op, if all that reads what it gives is known."""
    readers = {node.target: node for node in softmax.users}
    if len(softmax.users) != len(readers) or set(readers) - {_SUMS} != {
        LOSS,
        LOSS_BACKWARD,
        SOFTMAX_BACKWARD,
    }:
        return None
    loss, backward, gradient = readers[LOSS], readers[LOSS_BACKWARD], readers[SOFTMAX_BACKWARD]
    smooth = _smooth_at(readers[_SUMS], backward, gradient) if _SUMS in readers else None
    if (smooth is None) != (_SUMS not in readers) or (smooth and places[smooth.sums] < places[loss]):
        return None
    whole = backward if smooth is None else smooth.both
    if not (_are_one(softmax, loss, backward, whole, gradient) and _fits(softmax, loss, gradient)):
        return None
    scale, _, _, weight, *_ = backward.args
    needed = (scale, weight, None if smooth is None else smooth.uniform)
    moved = _after(loss, [item for item in needed if isinstance(item, fx.Node)], places)
    return None if moved is None else _Loss(softmax, loss, backward, gradient, smooth, moved)


def _smooth_at(sums: fx.Node, backward: fx.Node, gradient: fx.Node) -> _Smooth | None:
    """What label smoothing adds: `add(expand(unsqueeze(uniform, 1)), backward)`, whose sum has the gradient."""
    both: Any = gradient.args[0]
    if not _is_call(both, aten.add.Tensor) or both.kwargs or backward not in both.args:
        return None
    expanded: Any = both.args[1 if both.args[0] is backward else 0]
    column: Any = expanded.args[0] if _is_call(expanded, aten.expand.default) else None
    if not _is_call(column, aten.unsqueeze.default) or column.args[1] not in (1, -1):
        return None
    summed, uniform = form(sums), form(column.args[0])
    if (
        summed is None
        or uniform is None
        or summed.shape != uniform.shape
        or uniform.dtype is not torch.float32
    ):
        return None
    fits = sums.args[1] in ([1], [-1]) and not sums.kwargs and list(both.users) == [gradient]
    return _Smooth(sums, column.args[0], both) if fits else None


def _is_call(node: Any, target: Any) -> bool:
    return isinstance(node, fx.Node) and node.target is target


def _are_one(softmax: fx.Node, loss: fx.Node, backward: fx.Node, whole: fx.Node, gradient: fx.Node) -> bool:
    """True if the gradient is that of this loss, and nothing else reads what is between them."""
    _, target, weight, reduction, ignored = loss.args
    results = {item.args[1]: item for item in loss.users if item.target is operator.getitem}
    total = results.get(1)
    return (
        not any(node.kwargs for node in (softmax, loss, backward, gradient))
        and len(results) == len(loss.users)
        and backward.args[1:] == (softmax, target, weight, reduction, ignored, total)
        and total is not None
        and list(total.users) == [backward]
        and list(backward.users) == [gradient if whole is backward else whole]
        and gradient.args[:2] == (whole, softmax)
    )


def _fits(softmax: fx.Node, loss: fx.Node, gradient: fx.Node) -> bool:
    """True for matrices of float32 on a CPU, for which there is code."""
    logits, target, made = (form(node) for node in (softmax.args[0], loss.args[1], gradient))  # type: ignore[arg-type]
    if logits is None or target is None or made is None or logits.varies:
        return False
    kernel = CrossEntropy(logits.layout, 0)
    return (
        {logits.dtype, made.dtype} == {torch.float32}
        and target.dtype is torch.int64
        and {item.device.type for item in (logits, target, made)} == {"cpu"}
        and kernel.can_be_made
        and softmax.args[1] in (1, -1)
        and type(loss.args[4]) is int
        and not _was_half(softmax.args[0])
        and target.shape == logits.shape[:1]
        and kernel.results[1].is_like(made.layout)
    )


def _was_half(logits: Any) -> bool:
    """True for numbers that a compiler reads in a half type, without room for them in float32."""
    source = form(logits.args[0]) if logits.target is aten._to_copy.default else None
    return source is not None and source.is_half


def _after(loss: fx.Node, needed: list[fx.Node], places: dict[fx.Node, int]) -> tuple[fx.Node, ...] | None:
    """What of these comes after the loss, in its order; None where it needs the loss, or may not be moved."""
    found, pending = set[fx.Node](), needed
    while pending:
        node = pending.pop()
        if node in found or places[node] < places[loss]:
            continue
        if node is loss or not is_pure(node):
            return None
        found.add(node)
        if not _needs_no_number(node):
            pending += node.all_input_nodes
    return tuple(sorted(found, key=places.__getitem__))


def _needs_no_number(node: fx.Node) -> bool:
    made = form(node)
    plain = made is not None and made.layout.is_like(Layout.contiguous(*made.shape))
    return node.target in _FROM_FORM and plain


# --- what is faster ---------------------------------------------------------------------------------------------------


def _chosen(loss: _Loss) -> TunedKernel:
    logits = loss.logits
    theirs: Any = cross_entropy_of_torch
    ours: Any = CROSS_ENTROPY
    if loss.smooth is not None:
        theirs, ours = smooth_cross_entropy_of_torch, SMOOTH_CROSS_ENTROPY
    names, features = (DEFAULT, _OWN), (str(ours), f"{logits.shape} {logits.stride}")

    def measure() -> dict[str, float]:
        forms = [_form(name, op, loss) for name, op in ((DEFAULT, theirs), (_OWN, ours))]
        (node,) = compute_nodes(forms[1].graph)
        given = [form(item) for item in forms[0].graph.find_nodes(op="placeholder")]
        return seconds_of(
            forms, [item for item in given if item is not None], KernelCompiler([kernel_at(node)])
        )

    verdict = remembered(features, names, measure)
    op = "cross_entropy" if loss.smooth is None else "smooth_cross_entropy"
    nodes = (loss.softmax.name,)
    return TunedKernel(op, (str(logits),), DEFAULT, verdict.winner, verdict.seconds, nodes)


def _form(name: str, op: Any, loss: _Loss) -> Form:
    """Losses and the gradient of logits as one op."""
    graph, logits = fx.Graph(), loss.logits
    of_rows = TensorMeta(logits.shape[:1], torch.float32, (1,), logits.device)
    described = {"logits": logits, "target": replace(of_rows, dtype=torch.int64), "scale": of_rows}
    if loss.smooth is not None:
        described["uniform"] = of_rows
    given = []
    for item, known in described.items():
        given.append(named_input(graph, item))
        set_value(given[-1], known)
    graph.output((graph.call_function(op, (*given, -100)),))
    return Form(name, graph)


# --- how it is written ------------------------------------------------------------------------------------------------


def _write(loss: _Loss) -> None:
    """Put the losses of all rows with the gradient in the place of the ops of a cross-entropy."""
    _move(loss.moved, loss.loss)
    logits: Any = loss.softmax.args[0]
    target: Any = loss.loss.args[1]
    weight, reduction, ignored = loss.loss.args[2:]
    scale: Any = loss.backward.args[0]
    call = calls_like(loss.loss)
    with loss.loss.graph.inserting_before(loss.loss):
        counts = call(aten.ne.Scalar, target, ignored)
        _check(call, target, counts, loss.logits.shape[1])
        weights: Any = _weights(call, target, counts, weight)
        total = call(aten.sum.default, weights)
        of_each = call(aten.div.Tensor, scale, total) if reduction == _MEAN else scale
        of_each = call(aten.where.ScalarOther, counts, call(aten.mul.Tensor, weights, of_each), 0.0)
        if loss.smooth is None:
            made = call(CROSS_ENTROPY, logits, target, of_each, ignored)
        else:
            made = call(SMOOTH_CROSS_ENTROPY, logits, target, of_each, loss.smooth.uniform, ignored)
            loss.smooth.sums.replace_all_uses_with(call(operator.getitem, made, 1))
        result = call(operator.getitem, made, 0)
        if weight is not None:
            result = call(aten.mul.Tensor, result, weights)
        if reduction in (_MEAN, _SUM):
            result = call(aten.sum.default, result)
        if reduction == _MEAN:
            result = call(aten.div.Tensor, result, total)
        gradient = call(operator.getitem, made, 1 if loss.smooth is None else 2)
    for user in list(loss.loss.users):
        if user.args[1] == 0:
            user.replace_all_uses_with(result)
    loss.gradient.replace_all_uses_with(gradient)
    smooth = () if loss.smooth is None else (loss.smooth.sums, loss.smooth.both)
    for node in (loss.gradient, *reversed(smooth), loss.backward, *loss.loss.users, loss.loss, loss.softmax):
        node.graph.erase_node(node)


def _move(nodes: Iterable[fx.Node], before: fx.Node) -> None:
    """Move nodes before another one; those that depend on no number of what comes later are written without it."""
    for node in nodes:
        before.prepend(node)
        if _needs_no_number(node):
            made = form(node)
            assert made is not None
            with node.graph.inserting_before(node):
                full = calls_like(node)(
                    aten.full.default,
                    list(made.shape),
                    _FROM_FORM[node.target],
                    dtype=made.dtype,
                    device=made.device,
                    pin_memory=False,
                )
            set_value(full, made)
            node.replace_all_uses_with(full)
            node.graph.erase_node(node)


def _check(call: Any, target: fx.Node, counts: fx.Node, classes: int) -> None:
    """Assert what torch's kernel asks of the classes: ours takes those that are out of range for none."""
    inside = call(
        aten.logical_and.default, call(aten.ge.Scalar, target, 0), call(aten.lt.Scalar, target, classes)
    )
    fine = call(aten.logical_or.default, inside, call(aten.logical_not.default, counts))
    call(aten._assert_async.msg, call(aten.all.default, fine), "a target is out of bounds")


def _weights(call: Any, target: fx.Node, counts: fx.Node, weight: Any) -> fx.Node:
    """What each row counts: nothing, or as much as its class."""
    if weight is None:
        made: fx.Node = call(aten._to_copy.default, counts, dtype=torch.float32)
        return made
    place = call(aten.where.ScalarOther, counts, target, 0)
    made = call(aten.where.ScalarOther, counts, call(aten.index.Tensor, weight, [place]), 0.0)
    return made
