"""The dual `torch`: everything in it works as in torch, and each call that computes is aligned with a graph."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from types import MethodType, ModuleType
from typing import Any, Final

import torch
from torch import nn
from torch.overrides import is_tensor_method_or_property

from monograph.testing.dual.calls import Callee, noted, perform
from monograph.testing.dual.real_values import settled

_PLAIN_ATTRIBUTES: Final = (
    bool,
    int,
    float,
    str,
    type(None),
    torch.dtype,
    torch.Size,
    torch.device,
    torch.layout,
)
_COMPUTED_ATTRIBUTES: Final = ("T", "mT", "H", "mH", "real", "imag")


class Dual:
    """A proxy of an object of torch. `pytorch` is that object."""

    __slots__ = ("_name", "pytorch")
    _name: str
    pytorch: Any

    def __init__(self, item: Any, name: str = "") -> None:
        object.__setattr__(self, "pytorch", item)
        object.__setattr__(self, "_name", name)

    @property
    def oneflow(self) -> Any:
        """The same object as `pytorch`: the name that tests for OneFlow use for the other side."""
        return self.pytorch

    def __repr__(self) -> str:
        return f"dual {self.pytorch!r}"

    def __setattr__(self, name: str, item: Any) -> None:
        setattr(self.pytorch, name, settled(item))

    def __dir__(self) -> list[str]:
        return dir(self.pytorch)

    def __deepcopy__(self, memo: dict[int, Any]) -> Dual:
        return type(self)(
            noted("copy.deepcopy({})", self.pytorch, copy.deepcopy(self.pytorch, memo)), self._name
        )


class DualNamespace(Dual):
    """A module of torch, such as `torch.nn.functional`."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        return dual(getattr(self.pytorch, name), f"{self._name}.{name}")


class DualFunction(Dual):
    """A function of torch. Calling it runs it in eager mode, and aligns a graph of it."""

    __slots__ = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return dual(perform(Callee(self._name, self.pytorch), args, kwargs))

    def __getattr__(self, name: str) -> Any:
        return dual(getattr(self.pytorch, name), f"{self._name}.{name}")


class DualClass(Dual):
    """A class of torch. Calling it makes an instance, a dual one if it is a module or a tensor."""

    __slots__ = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return dual(perform(Callee(self._name, self.pytorch, aligned=False), args, kwargs))

    def __getattr__(self, name: str) -> Any:
        return dual(getattr(self.pytorch, name), f"{self._name}.{name}")

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(settled(instance), self.pytorch)

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return (self.pytorch,)


class DualModule(Dual):
    """An `nn.Module`. Calling it runs it in eager mode, and aligns a graph of a copy made before the call."""

    __slots__ = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return dual(perform(Callee(".__call__", self.pytorch, of=self.pytorch), args, kwargs))

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.pytorch, name)
        if inspect.isroutine(found):
            return _ModuleMethod(found, name)
        return dual(noted(f"{{}}.{name}", self.pytorch, found), name)

    def __getitem__(self, index: Any) -> Any:
        place = settled(index)
        return dual(noted(f"{{}}[{place!r}]", self.pytorch, self.pytorch[place]))

    def __len__(self) -> int:
        return len(self.pytorch)

    def __iter__(self) -> Iterator[Any]:
        return iter([self[index] for index in range(len(self.pytorch))])


class _ModuleMethod(Dual):
    """A method of a module; only `forward` computes, the others change or describe the module."""

    __slots__ = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        owner = getattr(self.pytorch, "__self__", None)
        aligned = self._name == "forward"
        target = owner if aligned and isinstance(owner, nn.Module) else self.pytorch
        callee = Callee(f".{self._name}", target, of=owner, aligned=aligned)
        return dual(perform(callee, args, kwargs))


class DualTensor(Dual):
    """A tensor. Methods and operators run in eager mode, and a graph of each is aligned."""

    __slots__ = ()
    __hash__ = object.__hash__

    @classmethod
    def __torch_function__(
        cls, function: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Functions of the real torch, and modules of the user's own, take dual tensors too."""
        short = getattr(function, "__name__", "function")
        name = f".{short}" if is_tensor_method_or_property(function) else f"torch.{short}"
        callee = Callee(name, function)
        return dual(perform(callee, args, kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        if name in _COMPUTED_ATTRIBUTES:
            return self._computed(name)
        found = getattr(self.pytorch, name)
        if not callable(found):
            return dual(found, name)

        def method(*args: Any, **kwargs: Any) -> Any:
            function = getattr(torch.Tensor, name, None) or getattr(type(self.pytorch), name)
            return dual(perform(Callee(f".{name}", function), (self, *args), kwargs))

        return method

    def _computed(self, name: str) -> Any:
        def look(tensor: torch.Tensor) -> Any:
            return getattr(tensor, name)

        look.__name__ = name
        return dual(perform(Callee(f".{name}", look, is_attribute=True), (self,), {}))

    def __getitem__(self, index: Any) -> Any:
        return dual(perform(Callee(".__getitem__", torch.Tensor.__getitem__), (self, index), {}))

    def __len__(self) -> int:
        return len(self.pytorch)

    def __iter__(self) -> Iterator[Any]:
        return iter([self[index] for index in range(len(self.pytorch))])

    def __bool__(self) -> bool:
        return bool(self.pytorch)

    def __int__(self) -> int:
        return int(self.pytorch)

    def __index__(self) -> int:
        return int(self.pytorch.__index__())

    def __float__(self) -> float:
        return float(self.pytorch)

    def __complex__(self) -> complex:
        return complex(self.pytorch)

    def __format__(self, spec: str) -> str:
        return format(self.pytorch, spec)

    def __contains__(self, item: Any) -> bool:
        return settled(item) in self.pytorch


_OPERATORS: Final = (
    *("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "floordiv", "rfloordiv"),
    *("mod", "rmod", "pow", "rpow", "matmul", "rmatmul", "and", "rand", "or", "ror", "xor", "rxor"),
    *("lshift", "rlshift", "rshift", "rrshift", "lt", "le", "gt", "ge", "eq", "ne"),
    *("neg", "pos", "abs", "invert", "setitem"),
    *("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor"),
)


def _operator(name: str) -> Any:
    def apply(self: DualTensor, *args: Any) -> Any:
        function = getattr(torch.Tensor, name)
        return dual(perform(Callee(f".{name}", function), (self, *args), {}))

    apply.__name__ = name
    return apply


for _short in _OPERATORS:
    setattr(DualTensor, f"__{_short}__", _operator(f"__{_short}__"))


def dual(item: Any, name: str = "") -> Any:
    """The dual of a tensor, a module, a function or a class of torch; of what tuples, lists and dicts hold too.

    Plain values and duals are themselves. Use it for modules and functions of your own.
    """
    if isinstance(item, (Dual, *_PLAIN_ATTRIBUTES)):
        return item
    if isinstance(item, torch.Tensor):
        return DualTensor(item, name)
    if isinstance(item, nn.Module):
        return DualModule(item, name)
    if isinstance(item, ModuleType):
        return DualNamespace(item, name)
    if inspect.isclass(item):
        return item if issubclass(item, BaseException) else DualClass(item, name)
    if isinstance(item, (tuple, list, dict)):
        return _of_container(item)
    if inspect.isroutine(item) or isinstance(item, MethodType) or type(item).__module__ == "torch._ops":
        return DualFunction(item, name or getattr(item, "__name__", "function"))
    return item


def _of_container(item: Any) -> Any:
    if isinstance(item, dict):
        return type(item)((key, dual(value)) for key, value in item.items())
    parts = [dual(part) for part in item]
    if type(item) in (tuple, list):
        return type(item)(parts)
    # results with names: a namedtuple takes its parts one by one, those made in C take a sequence
    return type(item)(*parts) if hasattr(item, "_fields") else type(item)(parts)
