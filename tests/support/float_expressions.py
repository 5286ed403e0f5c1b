"""Random steps over numbers: the plain function is the reference, and knows nothing of Monograph."""

from __future__ import annotations

import math
import numbers
import random
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

VALUES = (
    0.0, -0.0, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0, -1.0, 1.5, 2.0, 2.5, -0.3, -2.0, 3.0, 5e-324, -5e-324, 2.2e-308, 1e-300,
    1e16, -1e16, 9007199254740992.0, 9007199254740994.0, 1.7e308, -1.7e308, 1e200, 1e-9, 0.30000000000000004,
    math.inf, -math.inf, math.nan, 7.0, 12.25, 100.0,
)  # fmt: skip
CONSTANTS = (
    "0.1",
    "0.3",
    "-0.3",
    "1.0",
    "2",
    "3",
    "-1",
    "0",
    "1e16",
    "9007199254740993",
    "1e308",
    "5e-324",
    "0.5",
    "True",
)
NAMES = {"math": math, "numbers": numbers, "np": np, "struct": struct, "torch": torch}

UNARY = (
    "-{a}", "abs({a})", "+{a}", "({a} * 2)", "({a} + 1)", "float({a})", "round({a}, 1)", "math.sqrt(abs({a}))",
    "math.exp(min({a}, 3))", "math.sin({a})", "math.tanh({a})", "math.floor({a})", "int({a})", "round({a})",
    "math.log({a})", "math.copysign(1.0, {a})", "math.fabs({a})", "math.atan2({a}, -1)", "struct.unpack('d', struct.pack('d', {a}))[0]",
    "float(np.float64({a}))", "float('%.3f' % {a})", "float(format({a}, '.2e'))", "float(repr({a}))", "float(np.abs({a}))",
    "({a}).as_integer_ratio()[0]", "math.frexp({a})[0]", "math.modf({a})[0]", "math.trunc({a})", "math.isqrt(abs(int({a})))",
    "float(hash({a} if {a} == {a} else 0) % 7)", "({a}) ** 2", "({a}) ** 0.5", "({a}) ** -1", "1 / {a}", "({a}).real", "float.fromhex(({a} + 0.0).hex())",
    "[0.5, {a}][1]", "{{'k': {a}}}['k']", "sum([{a}, 0.1, 1e16])", "math.fsum([{a}, 0.1])", "math.prod([{a}, 3])", "divmod({a}, 0.3)[1]",
)  # fmt: skip
BINARY = (
    "({a} + {b})", "({a} - {b})", "({a} * {b})", "({a} / {b})", "({a} // {b})", "({a} % {b})", "({a} ** {b})",
    "max({a}, {b})", "min({a}, {b})", "math.hypot({a}, {b})", "math.pow({a}, {b})", "sorted([{a}, {b}])[0]",
    "math.fmod({a}, {b})", "divmod({a}, {b})[0]", "({a} or {b})", "({a} and {b})", "float(np.maximum({a}, {b}))",
    "math.copysign({a}, {b})", "({a} if {a} > {b} else {b})", "float(np.float64({a}) + {b})",
)  # fmt: skip
TESTS = (
    "{a} < {b}", "{a} <= {b}", "{a} > {b}", "{a} == {b}", "{a} != {b}", "{a} + 0.1 - 0.1 == {a}", "({a} + 1e16) - 1e16 > 0",
    "0 < {a} < {b}", "{a} in (0.1, 0.3, {b})", "{a} not in [1.0, 2]", "type({a}) is float", "type({a}) in (int, float)",
    "isinstance({a}, float)", "isinstance({a}, numbers.Real)", "isinstance({a}, (int, bool))", "np.isscalar({a})", "math.isnan({a})",
    "math.isfinite({a})", "math.isinf({a})", "bool({a})", "not {a}", "{a}", "{a} == 9007199254740993", "{a} >= 1 and {b} < 2",
    "{{0.1: 1, 2.0: 2}}.get({a}, 0)", "len({{{a}, {b}}}) == 2", "math.isclose({a}, {b})", "float({a}).is_integer()", "str({a}).startswith('-')",
    "({a}).__class__ is float", "isinstance({a}, torch.Tensor)", "math.copysign(1, {a}) > 0", "any([{a} > 1, {b} > 1])", "list(range(int({a}) % 4)) == [0]",
    "type({a}).__name__ == 'float'", "type({a}) is type({b})",
)  # fmt: skip
OPS = (
    "x * ({e})", "x + ({e})", "x.add(x, alpha=({e}))", "torch.where(x > ({e}), x, x * 2)", "x.clamp(max=({e})) + x", "torch.full((3,), {e}) + x",
    "torch.tensor({e}) * x", "torch.tensor([{e}, 1.0]).sum() + x", "x / ({e})", "({e}) - x", "x.new_full((3,), {e}) * x", "x + torch.tensor({t})",
    "torch.where(torch.tensor(({e}) > 0.3), x, -x)", "x.abs() ** ({e})", "torch.as_tensor({e}) + x", "torch.lerp(x, x * 2, {e})", "x.addcmul(x, x, value=({e}))",
)  # fmt: skip


ERRORS = (
    "ZeroDivisionError", "ArithmeticError", "(ValueError, OverflowError)", "(ArithmeticError, ValueError)",
)  # fmt: skip


@dataclass(frozen=True)
class Program:
    """The text of a function `f(x, *numbers)`, and the values that its numbers take, call by call."""

    text: str
    num_numbers: int
    calls: tuple[tuple[float, ...], ...]

    def function(self) -> Callable[..., Any]:
        """The function, in a module of its own."""
        scope: dict[str, Any] = dict(NAMES)
        exec(compile(self.text, "float_expression.py", "exec"), scope)
        made: Callable[..., Any] = scope["f"]
        return made


def draw(seed: int) -> Program:
    """One random program, the same for the same seed."""
    rng = random.Random(seed)
    names = ["a", "b", "c"][: rng.randint(1, 3)]

    def expression(depth: int) -> str:
        kind = rng.random()
        if depth == 0 or kind < 0.25:
            return rng.choice(names) if rng.random() < 0.75 else rng.choice(CONSTANTS)
        if kind < 0.55:
            return "(" + rng.choice(UNARY).format(a=expression(depth - 1)) + ")"
        return rng.choice(BINARY).format(a=expression(depth - 1), b=expression(depth - 1))

    def test() -> str:
        return rng.choice(TESTS).format(
            a=f"({expression(rng.randint(0, 2))})", b=f"({expression(rng.randint(0, 1))})"
        )

    lines = [f"def f(x, {', '.join(names)}):"]
    for index in range(rng.randint(0, 2)):
        lines.append(f"    d{index} = {expression(2)}")
        names.append(f"d{index}")
    for _ in range(rng.randint(0, 2)):
        lines += [f"    if {test()}:", f"        x = {rng.choice(OPS).format(e=expression(1), t=test())}"]
        if rng.random() < 0.5:
            lines += ["    else:", f"        x = {rng.choice(OPS).format(e=expression(1), t=test())}"]
    if seed % 3 == 0:  # what raises may be caught
        lines += ["    try:", f"        x = {rng.choice(OPS).format(e=expression(2), t=test())}"]
        if rng.random() < 0.3:
            lines += [f"        e = {expression(2)}"]
        lines += [f"    except {rng.choice(ERRORS)}:", "        x = x - 1"]
        if rng.random() < 0.3:
            lines += ["    else:", "        x = x + 1"]
    lines.append(f"    return {rng.choice(OPS).format(e=expression(2), t=test())}")
    num_numbers = sum(name in ("a", "b", "c") for name in names)
    near = [rng.choice(VALUES) for _ in range(3)]
    calls = tuple(
        tuple(rng.choice(near if rng.random() < 0.4 else VALUES) for _ in range(num_numbers))
        for _ in range(rng.randint(3, 6))
    )
    return Program("\n".join(lines) + "\n", num_numbers, calls)


class OwnOptimizer(torch.optim.Optimizer):
    """Its step computes an update by a random function of its numbers."""

    def __init__(self, parameters: Any, function: Callable[..., Any], first: tuple[float, ...]) -> None:
        super().__init__(parameters, {f"n{index}": value for index, value in enumerate(first)})
        self.function = function

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            values = [group[f"n{index}"] for index in range(len(group) - 1)]
            for parameter in group["params"]:
                parameter.sub_(self.function(parameter.grad, *values))


def eager_calls(program: Program) -> list[Any]:
    """What each call gives: a tensor, or the kind of the error that it raises."""
    function, x = program.function(), torch.tensor([0.25, -1.5, 3.0])
    return [outcome(lambda call=call: function(x, *call)) for call in program.calls]  # type: ignore[misc]


def eager_steps(program: Program) -> list[Any]:
    """The parameter after each step, or the kind of the error; after an error the parameter begins anew."""
    parameter = torch.nn.Parameter(torch.tensor([0.25, -1.5, 3.0]))
    optimizer = OwnOptimizer([parameter], program.function(), program.calls[0])
    return [
        stepped(call, parameter, optimizer, lambda: eager_step(parameter, optimizer))
        for call in program.calls
    ]


def eager_step(parameter: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    (parameter * parameter).sum().backward()
    optimizer.step()


def stepped(call: tuple[float, ...], parameter: torch.Tensor, optimizer: Any, step: Callable[[], Any]) -> Any:
    """What one step with these numbers makes of the parameter, which is as in the first step before."""
    with torch.no_grad():
        parameter.copy_(torch.tensor([0.25, -1.5, 3.0]))
    optimizer.param_groups[0].update({f"n{index}": value for index, value in enumerate(call)})
    return outcome(lambda: (step(), parameter.detach().clone())[1])


def outcome(run: Callable[[], Any]) -> Any:
    """What a function gives, or the error that it raises."""
    try:
        return run()
    except Exception as error:
        return error


def bits(item: Any) -> Any:
    """All that can be told of a result, NaNs alike."""
    if isinstance(item, torch.Tensor):
        plain = (
            torch.where(item.isnan(), torch.full_like(item, math.nan), item)
            if item.is_floating_point()
            else item
        )
        return item.dtype, tuple(item.shape), plain.detach().numpy().tobytes()
    return type(item), repr(item)
