"""Numbers that move from step to step: SymInt, SymFloat, and their symbols (`torch.fx.experimental.symbolic_shapes`).

Without it such numbers are constants, and each value of one is a build.
"""

from __future__ import annotations

import importlib
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import fx

from monograph.compat.modes import current_tracer
from monograph.compat.patching import replace_here

# What: the class of torch's symbolic numbers. Why: ours compute as Python does. Degraded path: none.
SymNode: Any = torch.fx.experimental.sym_node.SymNode


# What: the operations that C++ asks of a symbolic number, by the name of the method. Why: ours answer all of them. Degraded path:
# those that are known here.
METHODS_OF_NUMBERS: dict[str, Callable[..., Any]] = {
    name: act
    for name, act in getattr(torch.fx.experimental.sym_node, "METHOD_TO_OPERATOR", {}).items()
    if name not in ("and", "or", "sym_not", "sym_ite")
}


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


def plain_expression(number: float) -> Any:
    """What: a plain number in torch's algebra. Why: torch asks for the symbols in it where it looks for a known result.
    Degraded path: none.
    """
    return importlib.import_module("sympy").sympify(number)


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


def another_unknown(number: Any) -> Any:
    """A number without a value, of the kind of one that torch has read out of a tensor.

    What: ShapeEnv's unbacked symbols. Why: ops that are copied read numbers of their own. Degraded path: none.
    """
    environment = number.node.shape_env
    is_float = isinstance(number, torch.SymFloat)
    with environment.ignore_fresh_unbacked_symbols():  # no kernel will return them
        return environment.create_unbacked_symfloat() if is_float else environment.create_unbacked_symint()


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
            replace_here(stack, torch.SymFloat, name, function)
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

# how recorded arithmetic on symbolic numbers is repeated, where torch's own way records something else
REPEATED = {torch.sym_max: larger, torch.sym_min: smaller}


def is_overflow(error: BaseException) -> bool:
    """True if a kernel has refused a number that its tensor has no room for.

    What: the text of c10's `Scalar::to`. Why: the class of the error is RuntimeError, as of any. Degraded path: such an
    error is reported as it is.
    """
    return isinstance(error, RuntimeError) and "without overflow" in str(error)
