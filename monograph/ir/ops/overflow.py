"""What takes the result of an op out of the finite numbers: inputs that are too large, or that the op has no value for."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import fx

from monograph.compat.ops import OpOverload, packet_name
from monograph.ir.meta import TensorMeta, metas, origin, value


@dataclass(frozen=True)
class Span:
    """The finite elements of an input: the least, the largest, and of a divisor the one nearest to 0."""

    low: float
    high: float
    nearest_to_zero: float | None = None

    @property
    def magnitude(self) -> float:
        """The largest absolute value."""
        return max(abs(self.low), abs(self.high))


@dataclass(frozen=True)
class Exit:
    """Why a result is not finite, in words. `is_overflow` says that inputs are too large for the dtype."""

    text: str
    is_overflow: bool


@dataclass(frozen=True)
class _Domain:
    """The inputs that an op has finite results for."""

    text: str
    holds: Callable[[Span], bool]


_ABOVE_ZERO: Final = _Domain("above 0", lambda span: span.low > 0.0)
_FROM_ZERO: Final = _Domain("of 0 or more", lambda span: span.low >= 0.0)
_FROM_ONE_TO_ONE: Final = _Domain("from -1 to 1", lambda span: span.magnitude <= 1.0)
_DOMAINS: Final = {
    "log": _ABOVE_ZERO,
    "log2": _ABOVE_ZERO,
    "log10": _ABOVE_ZERO,
    "log1p": _Domain("above -1", lambda span: span.low > -1.0),
    "sqrt": _FROM_ZERO,
    "rsqrt": _ABOVE_ZERO,
    "acos": _FROM_ONE_TO_ONE,
    "asin": _FROM_ONE_TO_ONE,
    "atanh": _Domain("between -1 and 1", lambda span: span.magnitude < 1.0),
}
_LARGEST: Final[Mapping[str, Callable[[float], float]]] = {  # the input, of the dtype's largest number
    "exp": math.log,
    "expm1": math.log,
    "exp2": math.log2,
    "sinh": lambda largest: math.log(largest) + math.log(2.0),
    "cosh": lambda largest: math.log(largest) + math.log(2.0),
    "square": math.sqrt,
}
_ONE_SIDED: Final = frozenset({"exp", "expm1", "exp2"})  # finite below any limit
_DIVISIONS: Final = {"div": 1, "reciprocal": 0}  # the position of the divisor
# in a sum of products: how far below the root of the largest number they may begin to overflow
_TERMS: Final = 4096
_POSITIVE: Final = frozenset({"sqrt", "rsqrt", "log", "log2", "log10", "pow"})
_WITHOUT_GRADIENT_AT_ZERO: Final = frozenset({"sqrt", "log", "log2", "log10", "pow"})
# what to write for an op that divides by 0 or has no value for its input, or for an op with such a gradient
_REMEDIES: Final = {
    "sqrt": "torch.sqrt(x + 1e-12) has a finite gradient, and torch.linalg.vector_norm(x) in place of torch.sqrt(x.square().sum())",
    "pow": "(x + 1e-12) ** n has a finite gradient",
    "linalg_eigh": "eigenvectors have a gradient only where all eigenvalues differ",
    "linalg_svd": "singular vectors have a gradient only where all singular values differ",
    **{
        op: f"torch.{op}(x.clamp(min=1e-12)) has a finite gradient"
        for op in ("log", "log2", "log10", "rsqrt")
    },
    **{
        op: f"torch.{op}(x.clamp(-1 + 1e-6, 1 - 1e-6)) has a finite gradient"
        for op in ("acos", "asin", "atanh")
    },
    **dict.fromkeys(
        ("div", "reciprocal"),
        "y / (x + 1e-12) is finite for x of 0 or more, y / torch.where(x == 0, 1, x) for all",
    ),
}
_FOR_OVERFLOW: Final = {"exp": "torch.log_softmax() and torch.logsumexp() do not overflow where exp() does"}
_CHOSEN: Final = "choose the input too, as in torch.where(x > 0, {of_chosen}, 0)"
_OTHER_BRANCH: Final = (
    f"the gradient is 0 there, as where torch.where() takes the other value, and 0 / 0 is NaN: {_CHOSEN}"
)
_OUTSIDE: Final = (
    f"{{of_clamped}} is finite, and so is its gradient; where torch.where() takes the other value, {_CHOSEN}"
)
# of ops that make a NaN of infinities: why, and what to write
_ROWS: Final = ("a row of nothing but -Inf has no softmax", "leave at least one finite number in each row")
_PRODUCTS: Final = ("0 * Inf is NaN, and so is Inf - Inf", "")
_OF_INFINITIES: Final = {
    "mul": ("0 * Inf is NaN", "torch.where(mask, x, 0) chooses, where x * mask multiplies"),
    "div": ("Inf / Inf is NaN", ""),
    **dict.fromkeys(("add", "sub", "sum", "mean"), ("Inf - Inf is NaN", "")),
    **dict.fromkeys(("mm", "bmm", "addmm", "baddbmm", "dot", "mv"), _PRODUCTS),
    **dict.fromkeys(("_softmax", "_log_softmax"), _ROWS),
}


def nan_of_infinities(node: fx.Node) -> str:
    """Why an op with infinities and no NaN among its inputs gives a NaN, in words; empty where that is not known."""
    return _OF_INFINITIES.get(_name(node), ("", ""))[0]


def remedy(node: fx.Node, exit_: Exit | None, *, made_nan: bool) -> str:
    """What to write instead, so that an op or the gradient of one is finite; empty where no general rule is known."""
    of, name = origin(node).gradient_of, _name(node)
    if exit_ is None:
        return _OF_INFINITIES.get(name, ("", ""))[1] if made_nan else ""
    if exit_.is_overflow:
        return _FOR_OVERFLOW.get(name, "")
    of_chosen = _called(of or name, "torch.where(x > 0, x, 1)")
    if made_nan and of in _WITHOUT_GRADIENT_AT_ZERO:
        return _OTHER_BRANCH.format(of_chosen=of_chosen)
    if not of and name in _POSITIVE:  # 0 has a root, and a gradient alone that is not finite
        return _OUTSIDE.format(of_clamped=_called(name, "x.clamp(min=1e-12)"), of_chosen=of_chosen)
    return _REMEDIES.get(of or name, "")


def _called(op: str, of: str) -> str:
    """An op of something, as users write it."""
    return f"torch.{op}({of}{', n' if op == 'pow' else ''})"


def divisor(node: fx.Node) -> fx.Node | None:
    """What an op divides by."""
    position = 0 if (_exponent(node) or 0.0) < 0.0 else _DIVISIONS.get(_name(node))
    found = None if position is None else node.args[position]
    return found if isinstance(found, fx.Node) else None


def exit_of(node: fx.Node, spans: Mapping[fx.Node, Span]) -> Exit | None:
    """Why an op gives a NaN or an infinity for finite inputs; None where their range does not show it."""
    made = next(metas(value(node)), None)
    if made is None or not made.dtype.is_floating_point:
        return None
    name, operand, below = _name(node), next(iter(node.args), None), divisor(node)
    first = spans.get(operand) if isinstance(operand, fx.Node) else None
    if first is not None and (domain := _domain(node, name)) is not None and not domain.holds(first):
        return _outside(name, domain, first)
    if first is not None and name in _DOMAINS:
        return None
    if first is not None and (limit := _limit(node, name, made.dtype)) is not None:
        size = first.high if name in _ONE_SIDED else first.magnitude
        return (
            _overflow(f"{name} overflows {_short(made)} above {limit:.6g}", size) if size >= limit else None
        )
    nearest = spans[below].nearest_to_zero if below is not None and below in spans else None
    if nearest == 0.0:
        of = origin(node).gradient_of
        more = f": {of} of 0 has no finite gradient" if of in _WITHOUT_GRADIENT_AT_ZERO else ""
        return Exit(f"it divides by 0{more}", is_overflow=False)
    near = _near_the_end(made, [span for item, span in spans.items() if is_floating(item)])
    if near is None and nearest is not None:
        return Exit(f"the divisor nearest to 0 is {nearest:.6g}", is_overflow=False)
    return near


def _exponent(node: fx.Node) -> float | None:
    """The number that an op raises its input to."""
    number = node.args[1] if _name(node) == "pow" else None
    return float(number) if isinstance(number, (int, float)) else None


def _domain(node: fx.Node, name: str) -> _Domain | None:
    exponent = _exponent(node)
    if exponent is None or exponent.is_integer():
        return _DOMAINS.get(name)
    return _ABOVE_ZERO if exponent < 0.0 else _FROM_ZERO


def _near_the_end(made: TensorMeta, spans: Sequence[Span]) -> Exit | None:
    """Of any op: an input so large that products of two such inputs overflow."""
    size, largest = max((span.magnitude for span in spans), default=0.0), torch.finfo(made.dtype).max
    return (
        _overflow(f"{_short(made)} ends at {largest:.6g}", size)
        if size >= math.sqrt(largest / _TERMS)
        else None
    )


def _outside(name: str, domain: _Domain, span: Span) -> Exit:
    ends = f"{span.low:.6g}" if span.low == span.high else f"{span.low:.6g} to {span.high:.6g}"
    return Exit(f"{name} needs inputs {domain.text}, and has {ends}", is_overflow=False)


def _overflow(text: str, size: float) -> Exit:
    return Exit(f"{text}, and the largest input is {size:.6g}", is_overflow=True)


def _limit(node: fx.Node, name: str, dtype: torch.dtype) -> float | None:
    """The largest input with a finite result, of an op that has one."""
    largest = torch.finfo(dtype).max
    if name == "pow" and isinstance(node.args[1], (int, float)) and node.args[1] > 1:
        return float(largest ** (1.0 / node.args[1]))
    found = _LARGEST.get(name)
    return None if found is None else found(largest)


def _short(made: TensorMeta) -> str:
    return str(made).partition("[")[0]


def _name(node: fx.Node) -> str:
    if not isinstance(node.target, OpOverload):
        return ""
    namespace, _, name = packet_name(node.target).partition("::")
    return name if namespace == "aten" else ""


def is_floating(node: fx.Node) -> bool:
    """True for a value with floating-point numbers in it."""
    return any(item.dtype.is_floating_point for item in metas(value(node)))
