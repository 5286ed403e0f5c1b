"""Guards on the tensors of a build: what they are, where they are in memory, and their hooks."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from operator import attrgetter
from typing import Any, Self

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from monograph.capture.guards.flat import TensorChecks
from monograph.capture.guards.reasons import form_changed, form_of
from monograph.capture.tensors.sparse_parts import sparse_layout
from monograph.compat.autograd import HOOK_FIELDS
from monograph.compat.tensors import PointerGuard, metadata_guard, pointer_guard
from monograph.state.swap import Swap

_HOOKS = tuple(attrgetter(name) for name in HOOK_FIELDS)


class TensorGuards:
    """The tensors of one build by path. `checks` and `hooks_hold()` are the fast checks, `changed()` names what differs."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], sparse: Mapping[str, torch.Tensor]) -> None:
        """`sparse` are the tensors whose parts are state. There is nothing to hold before `settle()`."""
        self.by_path, self.sparse = dict(tensors), dict(sparse)
        self._pointer_guard: PointerGuard = pointer_guard
        self._know_tensors()

    def settle(self) -> None:
        """Take the present forms, places in memory and hooks as those that must hold."""
        self._pointers = [tensor.data_ptr() for tensor in self._flat]
        self.checks = TensorChecks(self._flat, metadata_guard(self._flat), *self._pointer_guard(self._flat))
        self._described = {path: form_of(tensor) for path, tensor in self.by_path.items()}
        self.hooks = self._gather_hooks()
        self._handles = RemovableHandle.next_id
        self._sparse_layouts = self._read_sparse_layouts()

    def bind(self, swap: Swap) -> None:
        """Know the tensors that have taken the place of others; `settle()` takes them as they are."""
        self.by_path = {path: swap.of(tensor) for path, tensor in self.by_path.items()}
        self.sparse = {path: swap.of(tensor) for path, tensor in self.sparse.items()}
        self._know_tensors()

    def _know_tensors(self) -> None:
        self._flat = tuple(self.by_path.values())
        self._leaves = [t for t in self._flat if isinstance(t, nn.Parameter) or t.requires_grad]

    def look_at_pointers_by(self, guard: PointerGuard) -> None:
        """Check data pointers by code that the backend has compiled."""
        self._pointer_guard = guard
        self.checks = TensorChecks(self._flat, self.checks.metadata, *guard(self._flat))

    @classmethod
    def released(cls) -> Self:
        """Guards on no tensors, which never hold."""
        found = cls({}, {})
        found.settle()
        found.checks = TensorChecks((), _never, bool, False)
        return found

    def hooks_hold(self) -> bool:
        """True if all have the hooks that they had."""
        if not self.hooks and self._handles == RemovableHandle.next_id:
            return True  # torch numbers every hook: none was registered anywhere since the last look
        if self._gather_hooks() != self.hooks:
            return False
        self._handles = RemovableHandle.next_id
        return True

    def sparse_hold(self) -> bool:
        """True if the parts of sparse tensors are where they were."""
        return self._read_sparse_layouts() == self._sparse_layouts

    # --- which one? ----------------------------------------------------------------------------------------------------

    def changed(self, without: Collection[str] = ()) -> str | None:
        """The first tensor of another form or in other memory, as a sentence; `without` may be in other memory."""
        for path, tensor in self.by_path.items():
            if (found := form_changed(path, self._described[path], form_of(tensor))) is not None:
                return found
        for (path, tensor), pointer in zip(self.by_path.items(), self._pointers, strict=True):
            if tensor.data_ptr() != pointer and path not in without:
                return f"storage of {path} was replaced"
        return None

    def sparse_changed(self) -> str | None:
        """The first sparse tensor with other parts, as a sentence."""
        for path, fact in self._read_sparse_layouts().items():
            if fact != self._sparse_layouts[path]:
                return f"{path} has other elements than before, in other memory"
        return None

    def hooks_changed(self) -> str | None:
        """The first tensor with other hooks, as a sentence."""
        if self._gather_hooks() == self.hooks:
            return None
        known = {id(hooks) for found in self.hooks for hooks in found}
        for path, tensor in self.by_path.items():
            hooks = [hook for get in _HOOKS for hook in (get(tensor) or {}).values()]
            if any(id(hook) not in known for hook in hooks):
                return f"a hook of {path} was registered"
        return "a hook of a parameter was removed"

    def _read_sparse_layouts(self) -> dict[str, Any]:
        return {path: sparse_layout(tensor) for path, tensor in self.sparse.items()}

    def _gather_hooks(self) -> list[tuple[Any, ...]]:
        # the hooks, not their ids: a new one may be where one was
        return [tuple(hooks.values()) for get in _HOOKS for hooks in map(get, self._leaves) if hooks]


def has_hooks(tensor: torch.Tensor) -> bool:
    """True if hooks are registered on a tensor."""
    return any(get(tensor) for get in _HOOKS)


def _never(*_tensors: torch.Tensor) -> bool:
    return False
