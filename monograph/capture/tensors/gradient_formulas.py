"""Gradients for which torch's autograd takes another formula when it sees a tensor subclass, as in a trace.

Eager mode looks at values there: whether a factor is zero, which elements a mask takes. The functions below record a
backward that computes the same bits without Python asking for a value. Where the gradient itself is differentiated
(`create_graph=True`) they leave it to torch's formula for traces.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from monograph.compat.tensors import is_transformed
from monograph.ir.own_ops import INDEXED_SUM, MASKED_SUM, TAKEN

Function = Callable[..., Any]


def _product_of(x: torch.Tensor, dim: tuple[int, ...], keepdim: bool) -> torch.Tensor:
    return torch.prod(x, dim[0], keepdim=keepdim) if dim else torch.prod(x)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: tuple[int, ...], keepdim: bool) -> torch.Tensor:
        result = _product_of(x, dim, keepdim)
        ctx.save_for_backward(x, result)
        ctx.dim, ctx.keepdim = dim, keepdim
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,), (x, result), dim = grads, ctx.saved_tensors, ctx.dim
        twice = torch.is_grad_enabled()
        with torch.enable_grad():
            factors = x if twice else x.detach().requires_grad_()
            again = _product_of(factors, dim, ctx.keepdim)
        # what torch takes for a trace is what it takes for factors that are zero
        (with_zeros,) = torch.autograd.grad(again, factors, grad, create_graph=twice)
        if twice:
            return with_zeros, None, None
        zeros = (x == 0).sum()
        if dim and not ctx.keepdim and x.dim():
            grad, result = grad.unsqueeze(*dim), result.unsqueeze(*dim)
        without = grad * (result / x).conj()
        if not dim:
            with_zeros = torch.where(zeros > 1, torch.zeros_like(x), with_zeros)
        return torch.where(zeros == 0, without, with_zeros), None, None


class _MaskedFill(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mask: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(mask)
        return x.masked_fill(mask, value)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,), (mask,) = grads, ctx.saved_tensors
        of_value = torch.where(mask, grad, 0).sum() if torch.is_grad_enabled() else MASKED_SUM(grad, mask)
        return grad.masked_fill(mask, 0), None, of_value


class _IndexFill(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, dim: int, index: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(index)
        ctx.dim = dim
        return x.index_fill(dim, index, value)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,), (index,) = grads, ctx.saved_tensors
        if torch.is_grad_enabled():
            of_value = grad.index_select(ctx.dim, torch.unique(index, sorted=False)).sum()
        else:
            of_value = INDEXED_SUM(grad, ctx.dim, index)
        return grad.index_fill(ctx.dim, index, 0), None, None, of_value


class _IndexPut(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, values: torch.Tensor, accumulate: bool, *indices: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.save_for_backward(values, *indices)
        ctx.accumulate = accumulate
        return x.index_put(indices, values, accumulate)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,), (values, *indices) = grads, ctx.saved_tensors
        of_x = grad if ctx.accumulate else grad.index_put(indices, torch.zeros_like(values), False)
        twice = torch.is_grad_enabled()
        taken = torch.ops.aten.index(grad, indices) if twice else TAKEN(grad, indices, values.shape)
        return of_x, taken, None, *(None for _ in indices)


def product(
    x: torch.Tensor, dim: int | None = None, keepdim: bool = False, *, dtype: Any = None
) -> torch.Tensor:
    """`torch.prod`, with eager's gradient whether or not a factor is zero."""
    x = x if dtype is None else x.to(dtype)
    return _applied(_Product, x, () if dim is None else (dim,), keepdim)


def masked_fill(input: torch.Tensor, mask: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """`torch.masked_fill`, with eager's gradient of `value`."""
    return _applied(_MaskedFill, input, mask, value)


def index_fill(input: torch.Tensor, dim: int, index: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """`torch.index_fill`, with a gradient of `value` although it depends on which positions are named twice."""
    return _applied(_IndexFill, input, dim, index, value)


def index_put(
    input: torch.Tensor, indices: Any, values: torch.Tensor, accumulate: bool = False
) -> torch.Tensor:
    """`torch.index_put`, with a gradient of `values` although a mask takes as many elements as it has true ones."""
    return _applied(_IndexPut, input, values, accumulate, *indices)


def _applied(function: Any, *args: Any) -> torch.Tensor:
    found: torch.Tensor = function.apply(*args)
    return found


# for each function of torch the one above, and which argument's gradient it is for
FORMULAS: Final[Mapping[Any, tuple[Function, int, str]]] = {
    torch.prod: (product, 0, "input"),
    torch.Tensor.prod: (product, 0, "self"),
    torch.masked_fill: (masked_fill, 2, "value"),
    torch.Tensor.masked_fill: (masked_fill, 2, "value"),
    torch.index_fill: (index_fill, 3, "value"),
    torch.Tensor.index_fill: (index_fill, 3, "value"),
    torch.index_put: (index_put, 2, "values"),
    torch.Tensor.index_put: (index_put, 2, "values"),
}


def with_formula(_mode: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call one of FORMULAS; the function as it is where its gradient is not asked for."""
    formula, position, name = FORMULAS[func]
    decides = args[position] if len(args) > position else kwargs.get(name)
    if not isinstance(decides, torch.Tensor) or is_transformed(decides) or "out" in kwargs:
        return func(*args, **kwargs)
    wanted = decides.requires_grad and torch.is_grad_enabled()
    return (formula if wanted else func)(*args, **kwargs)
