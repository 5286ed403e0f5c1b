"""A module and an input that fits it, as data: enough to make both again with the same bits."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import nn

from monograph.testing.strategies.spec import TensorSpec


@dataclass(frozen=True, repr=False)
class Construction:
    """A call of a class of `torch.nn`, not made yet. Its repr is the call of `make` that gives it."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __repr__(self) -> str:
        arguments = [repr(self.name), *map(repr, self.args)]
        arguments += [f"{name}={value!r}" for name, value in self.kwargs.items()]
        return f"make({', '.join(arguments)})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))

    def build(self) -> nn.Module:
        """The module; parameters are drawn from torch's random numbers."""
        args = [arg.build() if isinstance(arg, Construction) else arg for arg in self.args]
        module: nn.Module = getattr(nn, self.name)(*args, **self.kwargs)
        return module


def make(name: str, *args: Any, **kwargs: Any) -> Construction:
    """The construction of the module `torch.nn.<name>` from these arguments, which may be constructions too.

    >>> make("Sequential", make("Linear", 2, 3), make("ReLU")).build()[1]
    ReLU()
    """
    return Construction(name, args, kwargs)


@dataclass(frozen=True, repr=False)
class ModuleCase:
    """A module and its inputs; the repr is Python code that makes the same case.

    >>> case = ModuleCase(make("Linear", 2, 3), (TensorSpec((4, 2)),))
    >>> case.module()(*case.args()).shape
    torch.Size([4, 3])
    """

    construction: Construction
    inputs: tuple[Any, ...]  # TensorSpecs, or tuples of them
    _: KW_ONLY
    training: bool = True
    seed: int = 0

    def __repr__(self) -> str:
        training = "" if self.training else ", training=False"
        return f"ModuleCase({self.construction!r}, {self.inputs!r}{training}, seed={self.seed})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))

    def module(self) -> nn.Module:
        """A new module, with the same parameters each time."""
        with torch.random.fork_rng():
            torch.manual_seed(self.seed)
            return self.construction.build().train(self.training)

    def args(self) -> tuple[Any, ...]:
        """New inputs, with the same bits each time."""
        built = _built(self.inputs)
        assert isinstance(built, tuple)
        return built


def _built(item: Any) -> Any:
    if isinstance(item, TensorSpec):
        return item.build()
    return tuple(_built(child) for child in item) if isinstance(item, tuple) else item
