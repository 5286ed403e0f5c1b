"""Arguments that no graph takes, and tensors from before a step that no backward() of it passes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

import torch

from monograph.compat.distributed.tensors import is_sharded
from monograph.compat.modes import outside_of_function_modes, outside_of_modes
from monograph.compat.tensors import is_transformed
from monograph.errors import GraphBoundaryError, SignatureError
from monograph.ir.call.reason import FUNCTIONS
from monograph.ir.call.sparse import HELD


def check_tensor(tensor: torch.Tensor, path: str) -> None:
    if is_transformed(tensor):
        raise GraphBoundaryError(
            f"argument {path} is inside of a torch.func transform, such as vmap or grad",
            hint="use the transform in build(), around the functions that it calls",
        )
    if tensor.is_inference():
        raise SignatureError(
            f"argument {path} was made under torch.inference_mode()",
            hint="make it under torch.no_grad(), or pass a clone made outside of inference_mode",
        )
    if tensor.is_nested:
        raise SignatureError(
            f"argument {path} is a nested tensor",
            hint="pass what it holds: a list of tensors, tensor.unbind(), or a padded tensor and a mask, "
            "tensor.to_padded_tensor(0.0)",
        )
    if tensor.layout in HELD and tensor.requires_grad:
        raise SignatureError(
            f"argument {path} is a {tensor.layout} tensor that requires grad",
            hint="pass its indices and its values, and put them together in build(): torch.sparse_coo_tensor(indices, "
            "values, size); the values get a gradient",
        )
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise SignatureError(
            f"argument {path} is a {'quantised' if tensor.is_quantized else tensor.layout} tensor",
            hint="static graphs take dense tensors: call .to_dense() or .dequantize() first",
        )
    if is_sharded(tensor):
        raise SignatureError(
            f"argument {path} is a DTensor that requires grad",
            hint="pass its detach(); of its part alone, its to_local(), a step gives the gradient",
        )
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        raise SignatureError(
            f"argument {path} is a {type(tensor).__module__}.{type(tensor).__qualname__}, a subclass of Tensor",
            hint="pass a plain torch.Tensor",
        )
    if tensor.requires_grad and not tensor.is_leaf and torch.is_grad_enabled():
        raise GraphBoundaryError(
            f"argument {path} is part of a graph of autograd outside; its backward could not go on there",
            hint="compute it in build(), pass a detach() of it, or call the graph under torch.no_grad()",
        )


def _last_name(path: str) -> str:
    """The name that an argument or an entry of one can have as an attribute."""
    return str(re.findall(r"[^\W\d]\w*", path)[-1])


def refuse(leaf: object, path: str) -> None:
    kind = type(leaf)
    if kind in FUNCTIONS:
        raise SignatureError(
            f"argument {path} is a {'method' if kind is MethodType else 'function'}, which a graph cannot take",
            hint=f"put it on the graph once, before the first call, as in self.{_last_name(path)} = ..., and call it there "
            "in build(); mg.train_graph(model, loss, optimizer) takes a loss function",
        )
    advice = (
        "pass tensors, None, numbers, strings, or lists, tuples, dicts, dataclasses and plain objects of them"
    )
    if kind.__module__ == "numpy":
        advice = (
            "convert it with torch.from_numpy"
            if kind.__name__ == "ndarray"
            else "convert it with its .item()"
        )
    elif kind is set:
        advice = "pass a sorted tuple"
    elif isinstance(leaf, Mapping):
        advice = "pass dict(batch)"
    elif not hasattr(leaf, "__dict__") and any(vars(base).get("__slots__") for base in kind.__mro__):
        advice = "it has __slots__, and no graph looks into these: pass what it holds as a tuple, a dict or a dataclass"
    raise SignatureError(
        f"argument {path} is a {kind.__module__}.{kind.__qualname__}, which a graph cannot take", hint=advice
    )


class _BeforeStep(torch.autograd.Function):
    """What was computed before a step: it requires grad, and a backward() of the step that comes to it raises."""

    @staticmethod
    def forward(ctx: Any, fake: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
        ctx.form = f"{tuple(map(int, fake.shape))} {fake.dtype}".replace("torch.", "")
        return fake.data

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise GraphBoundaryError(
            f"backward() comes to a tensor {ctx.form} that was computed before the step: it is part of a graph of autograd "
            "outside, and could not go on there",
            hint="compute it in build(), or use its detach(); docs/porting.md shows it for reinforcement learning",
        )


def without_history(real: torch.Tensor, make: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """A fake of a tensor that is no leaf of autograd, made by `make` of its values, as one that no backward() passes."""
    with outside_of_modes(), outside_of_function_modes(), torch.enable_grad():
        fake: Any = make(real.detach())
        made: Any = _BeforeStep.apply(fake, torch.zeros((), requires_grad=True))  # type: ignore[no-untyped-call]
    if hasattr(fake, "real_tensor"):
        made.real_tensor = fake.real_tensor
    return made  # type: ignore[no-any-return]
