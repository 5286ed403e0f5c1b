"""Autocast of a step, by `config.enable_amp`: on in build(), off in backward and in optimizers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from monograph.compat.tensors import planned_device
from monograph.settings import Settings
from monograph.state.find import Owned, module_slots


class Casting:
    """Turns autocast on and off on the devices of the held modules; nothing without `enable_amp`."""

    def __init__(self, owned: Owned, settings: Settings) -> None:
        self._dtype = settings.amp
        modules = owned.modules.values() if self._dtype else ()
        devices = {planned_device(p.device).type for module in modules for p in module.parameters()}
        self._devices = sorted(devices or {"cpu"}) if self._dtype else []

    @contextmanager
    def on(self) -> Iterator[None]:
        """To be entered around build()."""
        with ExitStack() as stack:
            for device in self._devices:
                stack.enter_context(torch.autocast(device, dtype=self._dtype))
            yield

    @contextmanager
    def off(self) -> Iterator[None]:
        """To be entered around what is not in an autocast block of eager code."""
        with ExitStack() as stack:
            for device in self._devices:
                stack.enter_context(torch.autocast(device, enabled=False))
            yield

    def end(self) -> None:
        """Forget the casts of weights, as the end of a block does: eager code ends it before backward() and step()."""
        if self._devices:
            torch.clear_autocast_cache()


def about_kept_casts(owned: Owned) -> list[str]:
    """A sentence for a step that updates weights inside of an autocast block which may hold several calls."""
    devices = {planned_device(slot.tensor.device).type for slot in module_slots(owned.named_modules())}
    is_on = any(map(torch.is_autocast_enabled, sorted(devices)))
    if not (owned.optimizers and is_on and torch.is_autocast_cache_enabled()):
        return []
    return [
        "autocast is on around the call: where one block holds several steps, eager mode goes on with the casts that it "
        "made of the weights before their update, and each step of a graph casts the present weights; enter it in "
        "build(), by config.enable_amp() or anew for each call"
    ]
