"""What build() changes in what objects consist of: the submodules and hooks of modules, and attributes that it takes away."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch import nn

from monograph.capture.effects.foreign_objects import Effect
from monograph.capture.effects.held_fakes import holds_fakes
from monograph.capture.guards.sources.overlay import Overlay, is_hooks, real_attributes_of
from monograph.capture.guards.sources.places import Content, Entries
from monograph.capture.guards.sources.values import ABSENT
from monograph.compat.autograd import held_by
from monograph.compat.modules import BUFFERS, MARK_OF_PARAMETER, PARAMETERS, SUBMODULES, submodules_of
from monograph.errors import CaptureError, HookError


def submodule_effects(
    modules: Iterable[tuple[str, nn.Module]], overlay: Overlay, made: Mapping[int, Any]
) -> Iterator[Effect]:
    """The tables of submodules that build() leaves otherwise than they were; `made` are the modules that it makes."""
    for path, module in modules:
        there = (real_attributes_of(module) or {}).get(SUBMODULES)
        seen = overlay.attributes(module).get(SUBMODULES)
        if there is None or seen is None or _alike(there, seen):
            continue
        for name, child in seen.items():
            for new in _new_in(child, made):
                _check_without_tensors(f"{path}.{name}", new)
        table = Content(f"{path}.{SUBMODULES}", there)
        yield Effect(f"the submodules of {path}", table, table.now(), Content("", seen).now())


def removed_attributes(
    path: str, owner: Any, seen: Mapping[str, Any], before: Mapping[str, Any]
) -> Iterator[Effect]:
    """Attributes that were there and are not."""
    there = real_attributes_of(owner) or {}
    for name in before:
        if name not in seen and name in there:
            yield Effect(f"{path}.{name}", Entries(path, there, {name}), {name: there[name]}, {})


def tensor_attributes(
    path: str, real: torch.Tensor, fake: torch.Tensor, stored: Collection[str]
) -> Iterator[Effect]:
    """What Python attributes of a tensor have become; `stored` are the names that code gives values to."""
    there, seen = vars(real), vars(fake)
    for name in (there.keys() | (stored & seen.keys())) - {MARK_OF_PARAMETER}:
        before, after = there.get(name, ABSENT), seen.get(name, ABSENT)
        if after is not before:
            now = {} if after is ABSENT else {name: after}
            source = Entries(path, there, {name})
            yield Effect(f"{path}.{name}", source, {} if before is ABSENT else {name: before}, now)


class ModuleHooks:
    """The hooks of modules. To be made before the step runs."""

    def __init__(self, overlay: Overlay, modules: Mapping[str, nn.Module]) -> None:
        self.overlay, self.modules = overlay, modules
        self.handles: list[Any] = []  # weak references to those of hooks that build() registers
        self._before = {path: _hooks_of(real_attributes_of(module) or {}) for path, module in modules.items()}

    def left(self) -> Iterator[Effect]:
        """Hooks that build() leaves on modules are put there once the step has run, if nobody can take them away."""
        for path, module in self.modules.items():
            there, seen = real_attributes_of(module) or {}, self.overlay.attributes(module)
            if _hooks_of(there) != self._before[path]:
                raise _hook_error(path)
            for name in self._before[path]:
                before, after = there[name], seen[name]
                if dict(before) == dict(after):
                    continue
                handles = [handle for reference in self.handles if (handle := reference()) is not None]
                kept = any(handle.hooks_dict_ref() is after for handle in handles)
                if kept or any(map(holds_fakes, chain.from_iterable(map(held_by, after.values())))):
                    raise _hook_error(path)
                table, copy = Content(f"{path}.{name}", before), Content("", after)
                yield Effect(table.label, table, table.now(), copy.now())


def _hooks_of(attributes: Mapping[str, Any]) -> dict[str, dict[int, Any]]:
    """Those that are there: a handle from before the step removes one of these."""
    return {name: dict(table) for name, table in attributes.items() if is_hooks(name, table)}


def _hook_error(path: str) -> HookError:
    return HookError(
        f"build() registers or removes a hook of {path}, which stays after the step",
        hint="register hooks before the first step; a model that does it in its first call "
        "can be called once eagerly, in each process that trains it",
    )


def _alike(there: Mapping[str, Any], seen: Mapping[str, Any]) -> bool:
    return list(there) == list(seen) and all(there[name] is seen[name] for name in seen)


def _new_in(module: nn.Module | None, made: Mapping[int, Any]) -> Iterator[nn.Module]:
    """The modules in one that the step itself makes."""
    if module is not None and id(module) in made:
        yield module
        for child in submodules_of(module).values():
            yield from _new_in(child, made)


def _check_without_tensors(path: str, module: nn.Module) -> None:
    entries = real_attributes_of(module) or {}
    tensors = [tensor for table in (PARAMETERS, BUFFERS) for tensor in entries.get(table, {}).values()]
    if any(tensor is not None for tensor in tensors) or any(
        holds_fakes(value) for name, value in entries.items() if name != SUBMODULES
    ):
        raise CaptureError(
            f"build() makes the module {path}, which has tensors of its own, and leaves it in the model",
            hint="make it before the first step: call the model once in eager mode, then make the optimizer",
        )
