"""What the step finds through weak references."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from torch.optim import Optimizer

from monograph.capture.guards.sources.attributes import is_changeable, isinstance_of
from monograph.capture.guards.sources.libraries import is_library_module
from monograph.compat.fakes import is_fake


class WeaklyHeld:
    """The objects that weak references stand for: a build must not keep them alive. `owner` is the Graph."""

    def __init__(self, owner: Any) -> None:
        self.objects: list[Any] = []
        self._owner = owner

    def note(self, found: Any) -> None:
        """An object that a weak reference stands for; None if it is gone."""
        stays = any(isinstance_of(found, kind) for kind in (Optimizer, ModuleType)) or is_fake(found)
        if isinstance_of(found, type):
            stays = not is_changeable(found) or is_library_module(found.__module__)
        if found is not None and found is not self._owner and not stays:
            self.objects.append(found)
