"""What build() changes in the containers and tensors that it was given, so that the caller's change as well.

A trace works on containers that are made anew. Each is compared afterwards with what it held, and what it holds now is
computed by each step and put into the container that the caller has given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from monograph.capture.effects.containers import Pairs, Put, content_of, located, set_attributes, set_items
from monograph.capture.effects.held_fakes import holds_fakes
from monograph.capture.numbers.moving import is_moving, plain
from monograph.compat.tensors import is_view, storage_key
from monograph.errors import CaptureError
from monograph.ir.call.parameters import argument_name
from monograph.ir.call.signature import Call
from monograph.ir.call.tree import Tree
from monograph.ir.graph_signature import ArgumentChanges


class GivenContainer:
    """In what build() leaves in an argument: a container that it was given, by its position among those of the call."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


@dataclass(frozen=True)
class NewContent:
    """What a container holds after build(), its items or its attributes, and what puts them there."""

    container: int
    path: str
    keys: tuple[Any, ...]
    values: tuple[Any, ...]
    put: Put


class Given:
    """The containers that a trace is given in the place of the caller's, and what they hold at its beginning."""

    def __init__(self, call: Call, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        found = _located(call.tree, call.names, args, kwargs)
        self._containers = [(path, item, content_of(item)) for path, item in found]
        self._positions = {id(item): index for index, (_, item, _) in enumerate(self._containers)}

    def new_content(self) -> list[NewContent]:
        """What those hold that build() has changed."""
        found = []
        for index, (path, item, before) in enumerate(self._containers):
            now = content_of(item)
            if now.factory is not before.factory:
                raise CaptureError(
                    f"build() changes the default factory of argument {path}",
                    hint="set it before the call",
                )
            for old, new, put in (
                (before.items, now.items, set_items),
                (before.attributes, now.attributes, set_attributes),
            ):
                if not new.is_as(old):
                    found.append(self._described(index, path, new, put))
        return found

    def _described(self, index: int, path: str, pairs: Pairs, put: Put) -> NewContent:
        keys = tuple(plain(key) if is_moving(key) else key for key in pairs.keys)
        if any(map(holds_fakes, keys)):
            raise CaptureError(
                f"build() puts a tensor of the step into argument {path} as a key",
                hint="use plain values as keys: numbers, strings",
            )
        values = tuple(map(self._by_position, pairs.values))
        return NewContent(index, path, keys, values, put)

    def _by_position(self, value: Any) -> Any:
        """A value in which positions stand for the containers of the call."""
        if id(value) in self._positions:
            return GivenContainer(self._positions[id(value)])
        kind = type(value)
        if kind is list or kind is tuple:
            return kind([self._by_position(item) for item in value])
        if kind is dict:
            return {key: self._by_position(item) for key, item in value.items()}
        if isinstance(value, tuple) and hasattr(kind, "_fields"):
            return tuple.__new__(kind, [self._by_position(item) for item in value])
        return value


def _located(
    tree: Tree, names: tuple[str, ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> list[tuple[str, Any]]:
    """The containers of a call with their paths. The dict of its keywords is none: build() gets another."""
    positional, named = tree.children
    pairs = zip(positional.children, args, strict=True)
    found = [
        pair
        for index, (child, item) in enumerate(pairs)
        for pair in located(child, item, argument_name(names, index))
    ]
    for name, child in zip(named.keys, named.children, strict=True):
        found += located(child, kwargs[name], name)
    return found


def given_containers(
    changes: ArgumentChanges,
    call: Call,
    arguments: tuple[tuple[Any, ...], Mapping[str, Any]],
    is_known: Callable[[Any], bool],
) -> Sequence[Any]:
    """The caller's containers by position, for a step that changes some; `is_known` says what it finds elsewhere.

    Raises CaptureError for one that is to be changed and is known by another name too.
    """
    if not changes.refills:
        return ()
    found = _located(call.tree, call.names, *arguments)
    containers = [item for _, item in found]
    for refill in changes.refills:
        item = containers[refill.container]
        paths = [path for path, other in found if other is item]
        if len(paths) > 1:
            raise CaptureError(
                f"build() changes argument {paths[0]}, and argument {paths[1]} is the same object",
                hint="pass two, or one alone",
            )
        if is_known(item):
            raise CaptureError(
                f"build() changes argument {refill.path}, and finds the same object outside of its arguments too",
                hint="let build() find it in one of these places alone",
            )
    return containers


def check_leaves(changes: ArgumentChanges, call: Call, held: Iterable[torch.Tensor]) -> None:
    """Raise CaptureError for tensors that a step could not leave as eager mode does; `held` are those of the graph."""
    for index, requires_grad in changes.requires_grad:
        if not (call.leaves[index].is_leaf or requires_grad):
            raise CaptureError(
                f"build() stops the gradient of argument {call.paths()[index]}, which is no leaf of autograd",
                hint="pass its detach()",
            )
    for index, _ in changes.resized:
        leaf = call.leaves[index]
        others = [*held, *(item for item in call.leaves if item is not leaf)]
        if is_view(leaf) or leaf.storage_offset() or any(_is_on_one_memory(leaf, o) for o in others):
            raise CaptureError(
                f"build() gives argument {call.paths()[index]} a size, and it shares the memory of another tensor",
                hint="pass torch.empty(0)",
            )


def _is_on_one_memory(empty: torch.Tensor, other: Any) -> bool:
    tensor = isinstance(other, torch.Tensor) and other.layout is torch.strided
    return tensor and empty.untyped_storage().nbytes() > 0 and storage_key(empty) == storage_key(other)
