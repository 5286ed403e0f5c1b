"""What is looked at before each call of a build, in one flat check: a few comparisons in C.

The parts of the guards say what there is to look at: words of memory, tensors, lists, and what Python has to be asked.
Where this check fails, the guards look closer (`guards.py`): many differences are none.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import is_
from typing import Any, NamedTuple

import torch
from torch.utils.hooks import RemovableHandle

from monograph.capture.guards.objects import ObjectGuards
from monograph.capture.guards.owned import OwnedGuards
from monograph.capture.tensors.functional.overlaps import Apart
from monograph.compat.global_state import QUICK_MODES
from monograph.compat.tensors import quick_metadata_guard, words_at
from monograph.ir.call.signature import Call, TensorKey
from monograph.ir.call.tree import LEAF
from monograph.layout import contiguous_stride
from monograph.settings import Settings
from monograph.sizes.expression import SMALLEST
from monograph.sizes.place import SizePlace, places_in
from monograph.sizes.size import Size


@dataclass(frozen=True)
class TensorChecks:
    """Functions of C over the tensors of a build."""

    tensors: tuple[torch.Tensor, ...]
    metadata: Callable[..., bool]
    read_pointers: Callable[[], Any]
    pointers: Any

    def hold(self) -> bool:
        """True if all have the metadata and the memory that they had."""
        return self.metadata(*self.tensors) and bool(self.read_pointers() == self.pointers)


class SizesCheck(NamedTuple):
    """Of sizes that vary: the same ones are equal, none is special, and no tensor has gaps."""

    places: Sequence[Sequence[SizePlace]]  # for each size the tensors and dimensions that have it
    layouts: Sequence[tuple[int, Sequence[int]]]  # tensors, each with the order of its dimensions in memory
    contiguous: Sequence[int]

    @classmethod
    def of(cls, call: Call) -> SizesCheck:
        """That of calls like this one, which is known by names."""
        places: dict[str, list[SizePlace]] = {}
        shapes = [key.shape if isinstance(key, TensorKey) else () for key in call.keys]
        for name, place in places_in(shapes):
            places.setdefault(name, []).append(place)
        layouts, contiguous = [], []
        for index, key in enumerate(call.keys):
            if not (isinstance(key, TensorKey) and _varying(key)):
                continue
            if 1 not in key.shape and key.stride == contiguous_stride(key.shape):
                contiguous.append(index)  # of a size of 1 any stride would be
            else:
                steps = [*zip(map(int, key.stride), map(int, key.shape), strict=True)]
                layouts.append((index, sorted(range(len(steps)), key=steps.__getitem__)))
        return cls(list(places.values()), layouts, contiguous)

    def hold(self, args: Sequence[torch.Tensor]) -> bool:
        """True if they do for these arguments, of the dtypes and numbers of dimensions that are expected."""
        for (first, dim, parts), *others in self.places:
            size = args[first].size(dim)
            if parts != 1:
                if size % parts:
                    return False
                size //= parts
            if size < SMALLEST:
                return False
            for index, dim, parts in others:
                if args[index].size(dim) != size * parts:
                    return False
        for index, order in self.layouts:
            shape, stride, step = args[index].shape, args[index].stride(), 1
            for dim in order:
                if stride[dim] != step:
                    return False
                step *= shape[dim]
        return all([args[index].is_contiguous() for index in self.contiguous])  # noqa: C419  # few


def _varying(key: Any) -> tuple[int, ...]:
    """The dimensions of an argument whose sizes vary."""
    if not isinstance(key, TensorKey):
        return ()
    return tuple([dim for dim, size in enumerate(key.shape) if type(size) is Size])


class FormCheck(NamedTuple):
    """What gives a call the key of a build: arguments that are tensors alone, modes of torch, and the graph's own."""

    alike: Callable[..., bool]
    num_args: int
    modes: Sequence[Any]
    settings: Settings
    version: int
    sizes: SizesCheck | None = None  # of sizes that vary

    @classmethod
    def of(cls, call: Call) -> FormCheck | None:
        """That of calls like this one; None if C alone cannot say which are: not all is tensors by position."""
        args, kwargs = call.tree.children
        (_, _, _, (_, gradients, *_)), settings, version = call.key
        leaves, modes = call.leaves, [read() for read in QUICK_MODES]
        by_position = (
            not kwargs.keys and all(child == LEAF for child in args.children) and not call.replicated
        )
        if not by_position or call.same or gradients is not None or modes[0]:
            return None
        if not all(
            type(item) is torch.Tensor and not (item.requires_grad or item.__dict__) for item in leaves
        ):
            return None
        varying = [_varying(key) for key in call.keys]
        alike = quick_metadata_guard(leaves, varying)
        sizes = SizesCheck.of(call) if any(varying) else None
        return None if alike is None else cls(alike, len(leaves), modes, settings, version, sizes)


class FlatCheck:
    """The check of one build, made when all its guards hold. `holds()` is True only if they still do."""

    def __init__(
        self,
        objects: ObjectGuards,
        held: OwnedGuards,
        tensors: TensorChecks,
        hooks_hold: Callable[[], bool],
        asked: Sequence[Callable[[], bool]],
        apart: Apart,
        *,
        has_branches: bool,
    ) -> None:
        """`hooks_hold` is asked once there are new hooks, `asked` at each call; memory is `apart`.

        `has_branches`: who calls has to look at the branches that Python took.
        """
        self.form: FormCheck | None = None
        self.has_branches = has_branches
        self._take = words_at([*objects.places, *held.places])
        self._words = objects.words + (held.words or b"")
        self._roots, self._lists, self._items = held.roots, held.lists, held.items
        ask_held = () if held.covers_all else (held.hold if held.words is None else held.rest_holds,)
        ask_objects = () if objects.covers_all else (objects.rest_holds,)
        self._asked = (*ask_objects, *ask_held, *asked)
        self._tensors = tensors
        self._hooks, self._hooks_hold = RemovableHandle.next_id, hooks_hold  # torch numbers every hook
        self._state, self._plain = apart.state, apart.plain
        self._starts, self._ends = apart.written.starts, apart.written.ends

    def serves(self, args: tuple[Any, ...], settings: Settings, version: int) -> bool:
        """True if a call with these arguments by position has the key of the build, and its check holds."""
        if self.form is None:
            return False
        alike, num_args, modes, known_settings, known_version, sizes = self.form
        return (
            len(args) == num_args
            and version == known_version
            and settings is known_settings
            and alike(*args)
            and (sizes is None or sizes.hold(args))
            and not any([tensor.__dict__ for tensor in args])  # noqa: C419  # of one or two a list is faster
            and [read() for read in QUICK_MODES] == modes
            and self.holds(args)
        )

    def holds(self, leaves: Sequence[Any]) -> bool:
        """True if nothing has changed that the build depends on, and the memory of the arguments is as it takes them."""
        if (
            self._take().tobytes() != self._words
            or not self._tensors.hold()
            or not all(map(is_, chain.from_iterable(self._lists), self._items))
            or not self._state.isdisjoint(map(id, leaves))
        ):
            return False
        for optimizer, state, groups in self._roots:
            if optimizer.state is not state or optimizer.param_groups is not groups:
                return False
        for index, size in self._plain:
            start = leaves[index].data_ptr()
            before = bisect_left(self._starts, start + (leaves[index].nbytes if size is None else size))
            if before and self._ends[before - 1] > start:
                return False
        if self._hooks != RemovableHandle.next_id:
            if not self._hooks_hold():
                return False
            self._hooks = RemovableHandle.next_id
        return not self._asked or all(ask() for ask in self._asked)
