"""Ops whose formulas in Inductor are not used: those of eager's kernels, or better ones, take their place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any

import torch

from monograph.compat.patching import replace_here

LEFT_TO_KERNELS = (
    # `target * grad * (sigmoid(target * input) - 1)` cancels for large products
    torch.ops.aten.soft_margin_loss_backward.default,
    # the formula counts targets after the -1 that ends them
    torch.ops.aten.multilabel_margin_loss_forward.default,
    # the formulas take indices that are out of range
    torch.ops.aten.max_unpool2d.default,
    torch.ops.aten.max_unpool3d.default,
)
PROMISED_ZEROS = torch.ops.aten._efficientzerotensor.default
CAT = torch.ops.aten.cat.default
SOFTMAX_BACKWARD = torch.ops.aten._softmax_backward_data.default


@contextmanager
def own_decompositions() -> Iterator[None]:
    """Leave ops to eager's kernels whose formulas in Inductor are wrong or lose digits, or give them a better formula.

    Zeros without memory, which some gradients are, become zeros.
    What: entries of Inductor's table, torch's own formulas in Python for ops that are left to kernels, and what Inductor
    asks whether an op has one. Degraded path: where torch has none of them, nothing is taken away.
    """
    table = import_module("torch._inductor.decomposition").decompositions
    ours = {SOFTMAX_BACKWARD: _softmax_backward, PROMISED_ZEROS: torch.zeros}
    if CAT in table:
        ours[CAT] = _laid_out_as_eagers(table[CAT])
    before = {op: table.pop(op) for op in (*LEFT_TO_KERNELS, *ours) if op in table}
    table.update(ours)
    try:
        with ExitStack() as stack:
            # with the environment variable CI, Inductor refuses kernels of ops that have a formula
            replace_here(
                stack, import_module("torch._inductor.lowering"), "get_decompositions", lambda _ops: {}
            )
            for op in LEFT_TO_KERNELS:
                stack.enter_context(_without_formula(op))
            yield
    finally:
        for op in ours:
            del table[op]
        table.update(before)


@contextmanager
def _without_formula(op: Any) -> Iterator[None]:
    """Take away what torch computes in Python for an op whose arguments may have gradients."""
    key = torch._C.DispatchKey.Autograd
    formulas: dict[Any, Any] = getattr(op, "py_kernels", {})
    if key not in formulas:
        yield
        return
    formula = formulas.pop(key)
    op._dispatch_cache.clear()
    try:
        yield
    finally:
        formulas[key] = formula
        op._dispatch_cache.clear()


def _laid_out_as_eagers(cat: Callable[..., Any]) -> Callable[..., Any]:
    """Inductor's formula keeps the strides of the only tensor that is not empty; eager's kernel does not, as views show."""
    formats = torch._prims_common.suggest_memory_format

    def joined(tensors: list[torch.Tensor], dim: int = 0) -> Any:
        made = cat(tensors, dim)
        if not isinstance(made, torch.Tensor):
            return made
        found = {formats(tensor) for tensor in tensors}
        return made.contiguous(memory_format=found.pop() if len(found) == 1 else torch.contiguous_format)

    return joined


def _softmax_backward(
    given: torch.Tensor, output: torch.Tensor, dim: int, input_dtype: torch.dtype
) -> torch.Tensor:
    """The gradient of softmax as eager's kernel computes it; Inductor's formula rounds once more."""
    wide = torch.float32 if given.dtype in (torch.bfloat16, torch.float16) else given.dtype
    given, output = given.to(wide), output.to(wide)
    gradient = (given - (given * output).sum(dim, keepdim=True)) * output
    return gradient.to(input_dtype).contiguous()
