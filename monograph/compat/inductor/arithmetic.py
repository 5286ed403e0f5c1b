"""Compiled arithmetic is eager's up to rounding: NaN, infinities, signs of zeros, denormals, casts to half types.

Inductor drops what a cast rounds away, takes a product with 0 for 0, writes functions by formulas that lose digits or
make infinities, and lets the C++ compiler forget signs of zeros. Each is undone where it is made.
Private API of `torch._inductor`, like `compat/inductor/codegen.py`; nothing of it is imported before the first compilation.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import fx

from monograph.compat.patching import replaced

aten = torch.ops.aten
Formula = Callable[..., Any]

# A cast to a half type rounds, also in a loop that goes on in float32, and so does each op on half types.
OPTIONS: Mapping[str, Any] = {"emulate_precision_casts": True}
_HALF = (torch.bfloat16, torch.float16)
_SMALL = (torch.int8, torch.uint8, torch.int16)


@contextmanager
def eagers_arithmetic() -> Iterator[None]:
    """Compile arithmetic as eager mode computes it while the block runs.

    What: formulas of ops, code of single functions, the folding of constants, and flags of the C++ compiler are
    replaced. Degraded path: what a version of torch does not have is left alone.
    """
    table = importlib.import_module("torch._inductor.decomposition").decompositions
    before = {op: table.get(op) for op in _FORMULAS}
    with ExitStack() as stack:
        for name, make in _REPLACEMENTS.items():
            module, *path, last = name.split(".")
            owner: Any = importlib.import_module(f"torch._inductor.{module.replace('/', '.')}")
            for part in path:
                owner = getattr(owner, part, None)
            if hasattr(owner, last):
                stack.enter_context(replaced(owner, last, make(getattr(owner, last))))
        table.update(
            {op: partial(_on_cpu, before[op] or _none, formula) for op, formula in _FORMULAS.items()}
        )
        try:
            yield
        finally:
            for op, old in before.items():
                if old is None:
                    del table[op]
                else:
                    table[op] = old


def _none(*_args: Any, **_kwargs: Any) -> Any:
    """No formula: the op stays."""
    return NotImplemented


# --- formulas --------------------------------------------------------------------------------------------------------


def _computed_wide(formula: Formula, *, round_numbers: bool = False) -> Formula:
    """The formula on numbers of half types in float32, rounded once, as eager's kernels do.

    With `round_numbers` what is no tensor is rounded to the half type before.
    """

    def compute(theirs: Formula, *args: Any, **kwargs: Any) -> Any:
        dtype = torch.result_type(*args[:2])
        for item in args[2:]:
            dtype = torch.promote_types(dtype, item.dtype)
        if not dtype.is_floating_point:
            return theirs(*args, **kwargs)
        wide = torch.float32 if dtype in _HALF else dtype
        if round_numbers:
            args = tuple(item if isinstance(item, torch.Tensor) else _rounded(item, dtype) for item in args)
        given = [item.to(wide) if isinstance(item, torch.Tensor) else item for item in args]
        return formula(*given, **kwargs).to(dtype)

    return compute


def _rounded(number: Any, dtype: torch.dtype) -> Any:
    """A number as one of a half type."""
    is_plain = isinstance(number, float) and dtype in _HALF
    return torch.tensor(number, dtype=dtype).item() if is_plain else number


def _on_cpu(theirs: Formula, formula: Formula, *args: Any, **kwargs: Any) -> Any:
    """Kernels of other devices compute in ways of their own, which Inductor's formulas follow."""
    devices = {item.device.type for item in args if isinstance(item, torch.Tensor)}
    return theirs(*args, **kwargs) if devices - {"cpu"} else formula(theirs, *args, **kwargs)


def _remainder(a: Any, b: Any) -> Any:
    """`a - floor(a / b) * b` is NaN for an infinite `b`."""
    a, b = _tensors(a, b)
    rest = torch.fmod(a, b)
    return torch.where((rest != 0) & ((b < 0) != (rest < 0)), rest + b, rest)


def _floor_quotient(a: Any, b: Any) -> Any:
    """`floor(a / b)` rounds twice, and to the wrong side for quotients that are almost whole."""
    a, b = _tensors(a, b)
    exact = a / b
    rest = torch.fmod(a, b)
    whole = (torch.where((exact.abs() == math.inf) & (a.abs() != math.inf), a, a - rest)) / b
    whole = torch.where((rest != 0) & ((b < 0) != (rest < 0)), whole - 1, whole)
    floor = whole.floor()
    floor = torch.where(whole - floor > 0.5, floor + 1, floor)
    floor = torch.where(whole == 0, torch.copysign(torch.zeros_like(floor), exact), floor)
    return torch.where(b == 0, exact, floor)


def _quotient(theirs: Formula, a: Any, b: Any, *, rounding_mode: str | None = None) -> Any:
    """Quotients of integers towards 0 come from those towards negative infinity, which report divisors that are 0.

    In C++, a division by 0 would end the process, and so would that of the least number by -1.
    """
    rounded = partial(theirs, rounding_mode=rounding_mode)
    if rounding_mode == "floor":
        return _computed_wide(_floor_quotient)(rounded, a, b)
    if rounding_mode is not None and torch.result_type(a, b) in _HALF:
        return _computed_wide(lambda a, b: torch.div(a, b).trunc())(rounded, a, b)
    if (
        rounding_mode is None
        or torch.result_type(a, b).is_floating_point
        or (type(b) is int and b not in (0, -1))
    ):
        return rounded(a, b)
    a, b = _tensors(a, b)
    down = torch.div(a, b, rounding_mode="floor")
    return torch.where((a != down * b) & ((a < 0) != (b < 0)), down + 1, down)


def _tensors(a: Any, b: Any) -> tuple[Any, Any]:
    like = a if isinstance(a, torch.Tensor) else b
    dtype = torch.result_type(a, b)
    return tuple(
        item.to(dtype) if isinstance(item, torch.Tensor) else like.new_full((), item, dtype=dtype)
        for item in (a, b)
    )  # type: ignore[return-value]


def _add_product(x: Any, a: Any, b: Any, *, value: Any = 1) -> Any:
    """The number times the first factor comes first: 0 times an overflow would be NaN."""
    return x + (a if value == 1 else a * value) * b


def _add_quotient(x: Any, a: Any, b: Any, *, value: Any = 1) -> Any:
    return x + (a if value == 1 else a * value) / b


def _power(theirs: Formula, x: torch.Tensor, exponent: Any) -> Any:
    """Roots of -0.0 and of negative infinity are those of `sqrt`, but in float16, where they are those of `pow`."""
    if x.dtype is torch.float16 and exponent in (0.5, -0.5):
        return torch.pow(x.float(), torch.full((), exponent, device=x.device)).to(x.dtype)
    if x.is_floating_point() and exponent == -0.5:
        return x.rsqrt()
    return theirs(x, exponent)


def _scaled(_theirs: Formula, x: torch.Tensor, exponent: torch.Tensor) -> Any:
    """The power of 2 is a number of the type, in half types 0 or infinite where the product need not be."""
    return x * torch.pow(2.0, exponent)


def _next_number(theirs: Formula, a: Any, b: Any) -> Any:
    """In half types from the bits: in float32, in which their loops compute, the next number rounds to the same one."""
    dtype = torch.result_type(a, b)
    if dtype not in _HALF:
        return theirs(a, b)
    a, b = a.to(dtype), b.to(dtype)
    away = torch.where((b > a) == (a > 0), 1, -1)
    moved = (a.view(torch.int16).to(torch.int32) + away).to(torch.int16).view(dtype)
    limits = torch.finfo(dtype)
    least = torch.copysign(torch.full_like(b, limits.smallest_normal * limits.eps), b)
    moved = torch.where(a == 0, least, moved)
    return torch.where(a.isnan() | b.isnan(), a + b, torch.where(a == b, b, moved))


def _rounded_to_decimals(theirs: Formula, x: torch.Tensor, *, decimals: int = 0) -> Any:
    """By a power of ten that is a whole number: a product with its inverse rounds twice, and may overflow."""
    if not x.is_floating_point():
        return theirs(x, decimals=decimals)
    power = 10.0 ** abs(decimals)
    wide = x.float() if x.dtype in _HALF else x
    return ((wide / power).round() * power if decimals < 0 else (wide * power).round() / power).to(x.dtype)


def _converted(theirs: Formula, x: Any, *, dtype: torch.dtype | None = None, **options: Any) -> Any:
    """Floats that a small integer type does not hold are whole numbers modulo its size, as on x86 in eager mode.

    C++ leaves that open: vectors of Inductor take the largest number instead.
    """
    if dtype in _SMALL and x.is_floating_point():
        x = theirs(x, dtype=torch.int32)
    return theirs(x, dtype=dtype, **options)


_FORMULAS: dict[Any, Formula] = {
    aten.remainder.Tensor: _computed_wide(_remainder),
    aten.remainder.Scalar: _computed_wide(_remainder, round_numbers=True),
    aten.remainder.Scalar_Tensor: _computed_wide(_remainder, round_numbers=True),
    aten.div.Tensor_mode: _quotient,
    aten.div.Scalar_mode: _quotient,
    aten.addcmul.default: _computed_wide(_add_product),
    aten.addcdiv.default: _computed_wide(_add_quotient),
    aten.pow.Tensor_Scalar: _power,
    aten.ldexp.Tensor: _scaled,
    aten.nextafter.default: _next_number,
    aten.round.decimals: _rounded_to_decimals,
    aten._to_copy.default: _converted,
}


# --- constants -------------------------------------------------------------------------------------------------------


def _no_product_with_zero(theirs: Formula) -> Formula:
    """A product with 0 is 0 for integers only."""

    def add_patterns(folder: Any) -> None:
        theirs(folder)
        for node in list(folder.node_replacements):
            if not _is_whole(node):
                for known in (
                    folder.node_replacements,
                    folder.node_replacements_shapes,
                    folder.constant_data_ptrs,
                ):
                    known.pop(node, None)

    return add_patterns


def _zeros_have_signs(theirs: Formula) -> Formula:
    """`x + 0` is `x` for integers only: of -0.0 it is 0.0."""
    return lambda module, zeros, ones: theirs(module, type(zeros)(filter(_is_whole, zeros)), ones)


def _is_whole(node: fx.Node) -> bool:
    made = node.meta.get("val")
    return isinstance(made, torch.Tensor) and not (made.is_floating_point() or made.is_complex())


# --- code ------------------------------------------------------------------------------------------------------------


def _with_signed_zeros(theirs: Formula) -> Formula:
    return lambda: [flag for flag in theirs() if flag != "fno-signed-zeros"]


# erf(x) is x * P(x^2) / Q(x^2) up to 4, from where it is 1: coefficients of x^0, x^2, ... with the least largest relative
# error (3.3e-8, by a linear program over a grid) that give more than 1 at 4.
_ERF_P = (1.12837916, 0.175260825, 0.0509899115, 0.00318437327, 0.000283976404, 2.32737461e-06)
_ERF_Q = (1.0, 0.488654433, 0.108071897, 0.0137931576, 0.00104432149, 4.09112642e-05)


def _erf(theirs: Formula) -> Any:
    """By a quotient of polynomials, without `exp`: Inductor's formula loses all digits of small results."""

    def erf(x: Any) -> str:
        if x.dtype is torch.float64:
            return str(theirs(x))
        t = f"decltype({x})"

        def polynomial(factors: tuple[float, ...]) -> str:
            *lower, total = (f"{t}({factor!r})" for factor in factors)
            for factor in reversed(lower):
                total = f"at::vec::fmadd({total}, square, {factor})"
            return total

        within = f"auto near = at::vec::clamp({x}, {t}(-4.0), {t}(4.0)); auto square = near * near"
        quotient = f"near * {polynomial(_ERF_P)} / {polynomial(_ERF_Q)}"
        return f"[&]() {{ {within}; return at::vec::clamp({quotient}, {t}(-1.0), {t}(1.0)); }}()"

    return staticmethod(erf)


def _free_there_and_back(theirs: Formula) -> Any:
    """A half type made wide and then narrow again is what it was: no code for what rounds nothing."""
    virtualized: Any = importlib.import_module("torch._inductor.virtualized").V

    def to_dtype(x: Any, dtype: Any, src_dtype: Any = None, use_compute_types: bool = True) -> Any:
        made = theirs(x, dtype, src_dtype, use_compute_types)
        narrow = x.dtype if src_dtype is None else src_dtype
        if narrow in _HALF and dtype is torch.float32 and hasattr(virtualized.kernel, "cache_dtype_convert"):
            virtualized.kernel.cache_dtype_convert(x, narrow, made, dtype)
        return made

    return staticmethod(to_dtype)


def _code(text: str) -> Callable[[Formula], Any]:
    """Code for vectors of a function of one argument, `x`."""
    return lambda _theirs: staticmethod(lambda x: text.format(x=x, t=f"decltype({x})"))


_ACOSH = "{t}::blendv({x}.acosh(), {x}.log() + {t}({log2}), {x} > {t}(1e16))".replace(
    "{log2}", repr(math.log(2))
)


# --- variances -------------------------------------------------------------------------------------------------------


def _shifted_variance(theirs: Formula) -> Formula:
    """The variance in two passes over the numbers less the first of each row: exactly 0 where all are the same.

    The second pass also adds up what rounding has left in the mean. What a mean adds up is divided before: sums of large
    numbers overflow in float32, and eager's norms add up in float64. Their squares overflow in both.
    """
    lowering: Any = importlib.import_module("torch._inductor.lowering")

    def var_mean(x: Any, axis: Any, correction: Any, keepdim: bool, return_mean: bool) -> Any:
        dims = lowering._validate_reduction_axis(x, axis)
        sizes = [x.get_size()[dim] for dim in dims]
        if x.get_device().type != "cpu" or not all(str(size).isdigit() and int(size) for size in sizes):
            return theirs(x, axis, correction, keepdim, return_mean)
        count = math.prod(map(int, sizes))
        first = x
        for dim in dims:
            first = lowering.slice_(first, dim, 0, 1)
        first = lowering.clone(first)
        first.realize()
        total = partial(lowering.sum_, axis=dims, keepdims=True)
        mean = lowering.add(first, total(lowering.mul(lowering.sub(x, first), 1.0 / count)))
        mean.realize()
        apart = lowering.sub(x, mean)
        left = total(lowering.mul(apart, 1.0 / count))
        squares = total(lowering.square(apart))
        less = lowering.sub(squares, lowering.mul(lowering.square(left), float(count)))
        squares = lowering.where(lowering.isinf(squares), squares, less)
        zero = lowering.full_like(squares, 0.0)
        degrees = max(count - (1 if correction is None else correction), 0)
        variance = lowering.div(lowering.maximum(squares, zero), float(degrees))
        variance.realize()  # once for each row, and not for each number that it scales
        mean = lowering.add(mean, left)  # NaN if a number is infinite, as eager's
        mean.realize()
        results = (variance, mean) if return_mean else (variance,)
        return results if keepdim else tuple(lowering.squeeze(item, dims) for item in results)

    return var_mean


def _always_in_two_steps(theirs: Formula) -> Formula:
    """Not by Welford's way, which has no code for half types in float64; it is slower, too."""

    def use_two_steps(x: Any, axis: Any, keepdim: bool, input_dtype: torch.dtype) -> bool:
        return x.get_device().type == "cpu" or bool(theirs(x, axis, keepdim, input_dtype))

    return use_two_steps


# --- numbers ---------------------------------------------------------------------------------------------------------


def _numbers_round(theirs: Formula) -> Formula:
    """A number in a loop over half types is one of that type, though the loop computes in float32."""

    def legalize(kernel: Any, body: Any) -> Any:
        for block in (body.root_block, *body.subblocks.values()):
            for node in block.graph.nodes:
                if node.target == "constant":
                    ops, number, dtype = node.args
                    node.args = (ops, _rounded(number, dtype), dtype)
        return theirs(kernel, body)

    return legalize


_REPLACEMENTS: Mapping[str, Callable[[Formula], Any]] = {
    "fx_passes/joint_graph.UniformValueConstantFolder._add_peephole_patterns": _no_product_with_zero,
    "fx_passes/joint_graph.remove_no_ops": _zeros_have_signs,
    "cpp_builder._get_ffast_math_flags": _with_signed_zeros,
    "codegen/cpp.CppOverrides.to_dtype": _free_there_and_back,
    "codegen/cpp.CppVecOverrides.to_dtype": _free_there_and_back,
    "codegen/cpp.CppVecOverrides.expm1": _code("{x}.expm1()"),
    "codegen/cpp.CppVecOverrides.atanh": _code("{x}.atanh()"),
    "codegen/cpp.CppVecOverrides.acosh": _code(_ACOSH),
    "codegen/cpp.CppVecOverrides.erf": _erf,
    "codegen/cpp.CppKernelProxy.legalize_lowp_fp_dtype_loopbody": _numbers_round,
    "lowering.use_two_step_variance": _always_in_two_steps,
    "lowering.var_mean_sum_": _shifted_variance,
}
