"""Tensors where OneFlow and PyTorch part: one made of an array is a copy, and a value with a history is still a value."""

from __future__ import annotations

import functools
import sys
from types import FrameType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch

from monograph.compat.distributed.tensors import is_sharded

_Meta: Any = type(torch.Tensor)


class _TensorMeta(_Meta):  # type: ignore[misc]
    """Of a class that is torch.Tensor for everybody who asks, but for a call of it."""

    def __call__(cls, *args: Any, **options: Any) -> Any:
        if cls is not Tensor:
            return super().__call__(*args, **options)
        made = torch.Tensor(*args, **options)
        return made.clone() if args and isinstance(args[0], (np.ndarray, torch.Tensor)) else made

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, torch.Tensor) if cls is Tensor else super().__instancecheck__(instance)

    def __subclasscheck__(cls, kind: type) -> bool:
        return issubclass(kind, torch.Tensor) if cls is Tensor else super().__subclasscheck__(kind)

    def __eq__(cls, other: object) -> bool:  # type(x) == flow.Tensor
        return other is cls or (cls is Tensor and other is torch.Tensor)

    def __hash__(cls) -> int:
        return hash(torch.Tensor) if cls is Tensor else super().__hash__()


class _Overrides:
    """What torch asks arguments for: of `Tensor` that `x.to(Tensor)` is `x`, of its subclasses what torch.Tensor has."""

    def __get__(self, instance: object, owner: type) -> Any:
        if owner is not Tensor:
            return vars(torch.Tensor)["__torch_function__"].__get__(None, owner)
        return _of_the_class_itself


def _of_the_class_itself(func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
    return args[0] if func is torch.Tensor.to and Tensor in args[1:] else NotImplemented


class Tensor(torch.Tensor, metaclass=_TensorMeta):
    """`torch.Tensor`, but that `Tensor(array)` and `Tensor(tensor)` copy, and `x.to(Tensor)` is `x`."""

    __torch_function__ = _Overrides()


class _TypedMeta(type):
    """Of classes that are PyTorch's typed constructors for everybody who asks, but for a call of them."""

    _plain: Any

    def __call__(cls, *args: Any, **options: Any) -> Any:
        made = cls._plain(*args, **options)
        return made.clone() if args and isinstance(args[0], (np.ndarray, torch.Tensor)) else made

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, cls._plain)

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls._plain, name)

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is cls._plain

    def __hash__(cls) -> int:
        return hash(cls._plain)

    def __repr__(cls) -> str:
        return repr(cls._plain)


def _typed(name: str) -> Any:
    plain = getattr(torch, name)
    about = f"`torch.{name}`, but that {name}(array) and {name}(tensor) copy."
    # x.type(FloatTensor) asks a class for its name alone
    return _TypedMeta(f"torch.{name}", (), {"_plain": plain, "__doc__": about, "__module__": __name__})


TYPED = {
    name: _typed(name)
    for name in (
        "BoolTensor",
        "ByteTensor",
        "CharTensor",
        "DoubleTensor",
        "FloatTensor",
        "HalfTensor",
        "IntTensor",
        "LongTensor",
    )
}


def set_default_tensor_type(kind: Any) -> None:
    """`torch.set_default_tensor_type`, which takes these constructors too."""
    torch.set_default_tensor_type(kind._plain if isinstance(kind, _TypedMeta) else kind)


def let_scripts_read_histories() -> None:
    """Let `x.numpy()` give the values of a tensor that requires gradients, to scripts that use `monograph.flow`.

    Of a tensor that processes share, all of it.

    A method of torch.Tensor has to be replaced for it: that is the class of every tensor, also of those that scripts get
    from modules and operators, none of which asks who calls. The replacement is PyTorch's own where no error comes.
    PyTorch's error stays for everybody else, and nothing else changes.
    """
    if getattr(torch.Tensor.numpy, "__module__", None) != __name__:
        torch.Tensor.numpy = _numpy(torch.Tensor.numpy)  # type: ignore[method-assign]


def _numpy(plain: Any) -> Any:
    def numpy(self: torch.Tensor, *, force: bool = False) -> Any:
        if is_sharded(self) and _uses_flow(sys._getframe(1)):
            self = self.full_tensor()  # type: ignore[attr-defined]
        try:
            return plain(self, force=force)
        except RuntimeError:
            if not self.requires_grad or not _uses_flow(sys._getframe(1)):
                raise
        return plain(self.detach(), force=force)

    functools.update_wrapper(numpy, plain, assigned=("__name__", "__qualname__", "__doc__"))
    return numpy


def _uses_flow(frame: FrameType | None) -> bool:
    """True if a function on the stack knows something of `monograph.flow`."""
    while frame is not None:
        if any(map(_is_of_flow, (*frame.f_globals.values(), *frame.f_locals.values()))):
            return True
        frame = frame.f_back
    return False


def _is_of_flow(value: object) -> bool:
    if isinstance(value, ModuleType):
        home = value.__name__
    elif isinstance(value, (type, FunctionType)):
        home = value.__module__
    else:
        return False
    return f"{home}.".startswith("monograph.flow.")
