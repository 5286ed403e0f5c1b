"""Which op gives as new tensors what another one leaves in its arguments, and how views are turned round."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import torch
from torch import fx

from monograph.compat.ops import HigherOrderOperator, OpOverload, is_composite, overloads, schema_of

aten = torch.ops.aten
_NORM: Final = aten.native_batch_norm.default
Call = tuple[Any, tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class PureForm:
    """The op that stands for one that writes: its results are those of the latter, then one for each argument written."""

    op: Any
    written: tuple[str, ...]
    num_results: int  # of the op that writes, those with memory of their own
    asked_for: int = 0  # positional arguments without a default
    defaults: tuple[Any, ...] = ()  # of the last of these, for the op that writes
    left_out: tuple[str, ...] = ()  # what the pure op has no argument for: where the result goes

    def all_asked_for(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The positional arguments, with those that only the op that writes has a default for."""
        missing = max(0, self.asked_for - len(args))
        return (*args, *self.defaults[len(self.defaults) - missing :])


@cache
def pure_form(op: Any) -> PureForm | None:
    """The pure form of an op that writes; None if it has none with the same arguments.

    torch names them alike: `add_` and `add`, `_foreach_mul_` and `_foreach_mul`, `_native_batch_norm_legit` and
    `_native_batch_norm_legit_functional`.
    """
    if not isinstance(op, OpOverload) or op.namespace != "aten" or torch.Tag.inplace_view in op.tags:
        return None
    schema = schema_of(op)
    plain = schema.name.removeprefix("aten::").removesuffix("_")
    candidates = [*overloads(plain), *overloads(f"{plain}_functional")]
    found = [form for other in candidates if (form := _paired(schema, other)) is not None]
    return found[0] if len(found) == 1 else None


def _paired(schema: Any, other: Any) -> PureForm | None:
    pure = schema_of(other)
    written = [item for item in schema.arguments if item.alias_info and item.alias_info.is_write]
    left_out = tuple(item.name for item in written if item.kwarg_only)
    arguments = [item for item in schema.arguments if item.name not in left_out]
    if list(map(_described, arguments)) != list(map(_described, pure.arguments)) or pure.is_mutable:
        return None
    added: list[Any] = []
    for one, two in zip(arguments, pure.arguments, strict=True):
        if one.has_default_value() and not two.has_default_value() and not one.kwarg_only:
            added.append(one.default_value)
        elif one.default_value != two.default_value:
            return None
    results = [result for result in schema.returns if result.alias_info is None]
    if len(results) == 1 or any(str(result.type) != "Tensor" for result in results):
        return None
    if any(item.alias_info for item in pure.arguments) or len(pure.returns) != len(results) + len(written):
        return None
    asked_for = sum(not (item.has_default_value() or item.kwarg_only) for item in pure.arguments)
    names = tuple(item.name for item in written)
    return PureForm(other, names, len(results), asked_for, tuple(added), left_out)


def _described(argument: Any) -> tuple[str, str, bool]:
    return argument.name, str(argument.real_type), argument.kwarg_only


def written_call(node: fx.Node) -> Call:
    """An op as torch spells it where it makes steps pure: its norm keeps silent about the statistics that it changes."""
    if node.target is aten.lift_fresh_copy.default:
        return aten.clone.default, node.args, dict(node.kwargs)
    if node.target is not _NORM:
        return node.target, node.args, dict(node.kwargs)
    tensors, means, (training, *rest) = node.args[:3], node.args[3:5], node.args[5:]
    if means == (None, None):
        return aten._native_batch_norm_legit.no_stats, (*tensors, training, *rest), {}
    if training:
        return aten._native_batch_norm_legit.default, (*tensors, *means, training, *rest), {}
    return aten._native_batch_norm_legit_no_training.default, (*tensors, *means, *rest), {}


def is_understood(op: Any) -> bool:
    """True for ops that read, show or write as their schemas say, and for Python's arithmetic on numbers."""
    if not isinstance(op, OpOverload):
        return not isinstance(op, HigherOrderOperator)
    return op is _NORM or not is_composite(op)


# --- views turned round ------------------------------------------------------------------------------------------

# from a view, what it was taken from, that as it is now and the new value of the view; None if it is the value itself
Inverse = Callable[[fx.Node, fx.Node, Any, Any], Call | None]


def _same(*_: Any) -> None: ...


def _swapped(view: fx.Node, _base: fx.Node, _now: Any, new: Any) -> Call:
    return view.target, (new, *view.args[1:]), {}


def _permuted(view: fx.Node, base: fx.Node, _now: Any, new: Any) -> Call:
    rank = base.meta["val"].dim()
    order: list[int] = [int(dim) % rank for dim in view.args[1]]  # type: ignore[union-attr, arg-type]
    return view.target, (new, [order.index(dim) for dim in range(rank)]), {}


def _viewed(view: fx.Node, base: fx.Node, _now: Any, new: Any) -> Call:
    return view.target, (new, list(base.meta["val"].shape)), {}


def _unexpanded(_view: fx.Node, base: fx.Node, _now: Any, new: Any) -> Call:
    shape = list(base.meta["val"].shape)  # eager mode refuses to write to what shows an element several times
    return aten.view.default, (new, shape), {}


def _squeezed(view: fx.Node, _base: fx.Node, _now: Any, new: Any) -> Call:
    return aten.squeeze.dim, (new, view.args[1]), {}


def _unsqueezed(view: fx.Node, base: fx.Node, _now: Any, new: Any) -> Call | None:
    shape: Any = base.meta["val"].shape
    return (aten.unsqueeze.default, (new, view.args[1]), {}) if shape and shape[view.args[1]] == 1 else None


def _selected(view: fx.Node, _base: fx.Node, now: Any, new: Any) -> Call:
    return aten.select_scatter.default, (now, new, *view.args[1:]), {}


def _sliced(view: fx.Node, _base: fx.Node, now: Any, new: Any) -> Call:
    return aten.slice_scatter.default, (now, new, *view.args[1:]), {}


INVERSES: Final[Mapping[Any, Inverse]] = {
    aten.alias.default: _swapped,
    aten.detach.default: _same,
    aten.t.default: _swapped,
    aten.transpose.int: _swapped,
    aten.permute.default: _permuted,
    aten.view.default: _viewed,
    aten._unsafe_view.default: _viewed,
    aten.expand.default: _unexpanded,
    aten.unsqueeze.default: _squeezed,
    aten.squeeze.dim: _unsqueezed,
    aten.select.int: _selected,
    aten.slice.Tensor: _sliced,
}
PARTS: Final = (aten.select.int, aten.slice.Tensor)  # views that show not all of what they are taken from
TAKEN_ANEW: Final = tuple(INVERSES)  # views that can be taken anew after a write to what they show
