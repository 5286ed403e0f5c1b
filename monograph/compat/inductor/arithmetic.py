"""Compiled arithmetic is eager's up to rounding: NaN, infinities, signs of zeros, denormals, casts to half types.

Inductor drops what a cast rounds away, takes a product with 0 for 0, writes functions by formulas that lose digits or
make infinities, and lets the C++ compiler forget signs of zeros. Each is undone where it is made.
The formulas of ops are in `eager_formulas.py`.
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

from monograph.compat.inductor.eager_formulas import FORMULAS, HALF, Formula, rounded_number
from monograph.compat.patching import replaced

# A cast to a half type rounds, also in a loop that goes on in float32, and so does each op on half types.
OPTIONS: Mapping[str, Any] = {"emulate_precision_casts": True}


@contextmanager
def eagers_arithmetic() -> Iterator[None]:
    """Compile arithmetic as eager mode computes it while the block runs.

    What: formulas of ops, code of single functions, the folding of constants, and flags of the C++ compiler are
    replaced. Degraded path: what a version of torch does not have is left alone.
    """
    table = importlib.import_module("torch._inductor.decomposition").decompositions
    before = {op: table.get(op) for op in FORMULAS}
    with ExitStack() as stack:
        for name, make in _REPLACEMENTS.items():
            module, *path, last = name.split(".")
            owner: Any = importlib.import_module(f"torch._inductor.{module.replace('/', '.')}")
            for part in path:
                owner = getattr(owner, part, None)
            if hasattr(owner, last):
                stack.enter_context(replaced(owner, last, make(getattr(owner, last))))
        table.update({op: partial(_on_cpu, before[op] or _none, formula) for op, formula in FORMULAS.items()})
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


def _on_cpu(theirs: Formula, formula: Formula, *args: Any, **kwargs: Any) -> Any:
    """Kernels of other devices compute in ways of their own, which Inductor's formulas follow."""
    devices = {item.device.type for item in args if isinstance(item, torch.Tensor)}
    return theirs(*args, **kwargs) if devices - {"cpu"} else formula(theirs, *args, **kwargs)


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
        if narrow in HALF and dtype is torch.float32 and hasattr(virtualized.kernel, "cache_dtype_convert"):
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

    def use_two_steps(x: Any, *args: Any, **options: Any) -> bool:  # torch 2.13 gives a dtype, too
        return x.get_device().type == "cpu" or bool(theirs(x, *args, **options))

    return use_two_steps


# --- numbers ---------------------------------------------------------------------------------------------------------


def _numbers_round(theirs: Formula) -> Formula:
    """A number in a loop over half types is one of that type, though the loop computes in float32."""

    def legalize(kernel: Any, body: Any) -> Any:
        for block in (body.root_block, *body.subblocks.values()):
            for node in block.graph.nodes:
                if node.target == "constant":
                    ops, number, dtype = node.args
                    node.args = (ops, rounded_number(number, dtype), dtype)
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
