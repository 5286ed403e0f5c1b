"""Functional tensors, under which writes become values: `torch._subclasses.functional_tensor`.

Without FunctionalTensorMode nothing is captured; each function says what happens without the rest.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from monograph.compat.tensors import may_overlap


@contextmanager
def functional_tensors() -> Iterator[tuple[Callable[[Any], Any], Callable[[Any], Any]]]:
    """What: FunctionalTensorMode. Why: bitwise, unlike `torch.func.functionalize`. Gives wrap and unwrap."""
    functional = torch._subclasses.functional_tensor

    def wrap(item: Any) -> Any:
        return functional.FunctionalTensor.to_functional(item) if isinstance(item, torch.Tensor) else item

    with functional.FunctionalTensorMode(pre_dispatch=False):
        yield wrap, without_functional


def python_dispatcher() -> AbstractContextManager[Any]:
    """What: `enable_python_dispatcher`. Why: functional tensors run an op in place on tensors without data, and some kernels
    in C++ take no sizes that vary. Degraded path: such a step has a build for each size.
    """
    dispatch: Any = importlib.import_module("torch._dispatch.python")
    made: AbstractContextManager[Any] = dispatch.enable_python_dispatcher()
    return made


def without_functional(item: Any) -> Any:
    """What stands in a functional tensor now; anything else as it is."""
    if not isinstance(item, torch._subclasses.functional_tensor.FunctionalTensor):
        return item
    torch._sync(item)  # type: ignore[attr-defined, no-untyped-call]
    return torch._from_functional_tensor(item.elem)


def has_other_strides(item: Any, like: torch.Tensor) -> bool:
    """True for a functional tensor whose value has not the layout of `like`, which eager mode has in its place."""
    inner = without_functional(item)
    with torch._C.DisableTorchFunction():
        pairs = zip(inner.shape, inner.stride(), like.stride(), strict=True)
        return inner.shape == like.shape and any(now != wanted for size, now, wanted in pairs if size > 1)


def has_other_bits(item: Any, like: torch.Tensor) -> bool:
    """True for a functional tensor whose value is conjugated or negated by a bit where `like` is not, or not where it is."""
    inner = without_functional(item)
    with torch._C.DisableTorchFunction():
        return (inner.is_conj(), inner.is_neg()) != (like.is_conj(), like.is_neg())


def lay_out(item: Any, like: torch.Tensor, *, with_views: bool = False) -> None:
    """Give a functional tensor the strides and the bits of `like`, which is what eager mode has in its place.

    `with_views`: its views are made anew.

    What: the value inside of a FunctionalTensor. Why: an op in place keeps the strides of what it changes, its
    functional form chooses them, and torch's vectorised kernels round otherwise on another layout (met by GRUCell,
    which works in place on chunks). A write through a conjugate view leaves the bit on what it is a view of, where
    `numpy()` and `view_as_real` refuse it. Degraded path: without it such steps have other last bits, and results that
    some functions refuse.
    """
    if not isinstance(item, torch._subclasses.functional_tensor.FunctionalTensor):
        return
    inner = without_functional(item)
    with torch._subclasses.functional_tensor.disable_functional_mode():
        laid_out = with_bits(_with_strides(inner, like), like)
    if laid_out is inner:
        return
    torch._functionalize_replace(item.elem, laid_out)
    if with_views:
        torch._functionalize_commit_update(item.elem)
        torch._functionalize_sync(item.elem)


def _with_strides(inner: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    sizes, strides = like.shape, like.stride()
    if not has_other_strides(inner, like) or not inner.numel() or may_overlap(sizes, strides):
        return inner
    memory = torch.empty_strided(sizes, strides, dtype=inner.dtype, device=inner.device)
    laid_out: torch.Tensor = torch.ops.aten.copy.default(memory, inner)
    return laid_out


def with_bits(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The same numbers, conjugated and negated by a bit where `like` is, and nowhere else."""
    if not has_other_bits(tensor, like):
        return tensor
    aten = torch.ops.aten
    plain = aten._conj.default(tensor) if tensor.is_conj() else tensor
    plain = _negated(aten._neg_view.default(plain)) if tensor.is_neg() else plain
    if tensor.is_conj() != like.is_conj():
        plain = aten._conj_physical.default(plain)
    plain = aten._neg_view.default(_negated(plain)) if like.is_neg() else plain
    return aten._conj.default(plain) if like.is_conj() else plain


def _negated(tensor: torch.Tensor) -> torch.Tensor:
    """`neg`, of complex numbers part by part: the kernel for them subtracts from zero, and makes 0.0 of 0.0."""
    if tensor.is_complex():
        return torch.view_as_complex(_negated(torch.view_as_real(tensor)))
    return torch.neg(tensor)


def call_beneath_functional_mode(target: Any, args: Any, kwargs: Any) -> Any:
    """What: an op with an effect, recorded as it is. Why: functional mode asks for tokens that keep such ops in
    order, but the order of a program's nodes is kept anyway. Degraded path: none.
    """
    args, kwargs = torch.utils._pytree.tree_map(without_functional, (args, kwargs))
    with torch._subclasses.functional_tensor.disable_functional_mode():
        return target(*args, **kwargs)
