"""Tensors from outside that a step asks for their form, and that its program may not compute with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from monograph.capture.guards.reasons import form_of
from monograph.capture.guards.sources.places import Source


@dataclass(eq=False)
class Form(Source):
    """What code can ask of a tensor besides its values."""

    tensor: torch.Tensor

    def now(self) -> Mapping[Any, Any]:
        return {"form": form_of(self.tensor)}

    def item_label(self, key: Any) -> str:
        return f"the {key} of {self.label}"


@dataclass(eq=False)
class OwnGradient(Source):
    """The gradient that a tensor has; with `whole` the very one, else only whether there is one."""

    tensor: torch.Tensor
    whole: bool

    def now(self) -> Mapping[Any, Any]:
        gradient = self.tensor.grad if self.tensor.is_leaf else None
        return {"gradient": gradient if self.whole else gradient is None}

    def item_label(self, key: Any) -> str:
        return f"the {key} of {self.label}"


@dataclass(eq=False)
class WithoutGradients(Source):
    """Parameters, by their paths, that have no gradient before the step. One place for all: clipping looks at hundreds."""

    parameters: Mapping[str, torch.Tensor]

    def now(self) -> Mapping[Any, Any]:
        return {"": tuple([path for path, item in self.parameters.items() if item.grad is not None])}

    def item_label(self, key: Any) -> str:
        return self.label


def as_guard(source: Source) -> Source:
    """A source, guarded at what is there now."""
    source.recorded = dict(source.now())
    return source
