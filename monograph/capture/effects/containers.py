"""The containers in nested values that code can change: of arguments in the order of their form, with what each holds."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from monograph.capture.guards.sources.attributes import attributes_of, slots_of
from monograph.capture.guards.sources.places import Slots
from monograph.capture.guards.sources.values import ABSENT
from monograph.ir.call.tree import Attributed, Tree, child_paths, dict_class, flatten

Put = Callable[[Any, Sequence[Any], Sequence[Any]], None]  # lets a container hold values under keys


@dataclass(frozen=True)
class Pairs:
    """Keys with their values, in order; the keys of a list are positions."""

    keys: tuple[Any, ...]
    values: tuple[Any, ...]

    def is_as(self, other: Pairs) -> bool:
        """True if both have the same keys in one order, and the very same values."""
        same_keys = len(self.keys) == len(other.keys) and all(map(_is_one_key, self.keys, other.keys))
        return same_keys and all(a is b for a, b in zip(self.values, other.values, strict=True))


@dataclass(frozen=True)
class Contents:
    """What a container holds; `items` are none for an object that has attributes alone."""

    items: Pairs
    attributes: Pairs
    factory: Any = None  # by which a defaultdict makes entries


def located(tree: Tree, item: Any, path: str) -> Iterator[tuple[str, Any]]:
    """The lists, dicts and objects in a nested value of this form, each before those inside of it, with their paths."""
    kind = tree.kind
    if kind is None or kind is torch.Tensor or kind is slice:
        return
    if kind is Attributed:
        inner, *others = tree.children
        yield from located(inner, item, path)
        own = object.__getattribute__(item, "__dict__")
        for name, child in zip(tree.keys, others, strict=True):
            yield from located(child, own[name], f"{path}.{name}")
        return
    if not issubclass(kind, tuple) or attributes_of(item) is not None:
        yield path, item
    for child, value, below in zip(
        tree.children, _children(tree, kind, item), child_paths(tree, path), strict=True
    ):
        if child.kind is not None:
            yield from located(child, value, below)


def content_of(item: Any) -> Contents:
    """What a container holds now."""
    items = Pairs((), ())
    if type(item) is list:
        items = Pairs(tuple(range(len(item))), tuple(item))
    elif isinstance(item, dict):
        pairs = tuple(dict_class(item).items(item))
        items = Pairs(tuple(key for key, _ in pairs), tuple(value for _, value in pairs))
    factory = item.default_factory if isinstance(item, defaultdict) else None
    return Contents(items, _attributes(item), factory)


def set_items(item: Any, keys: Sequence[Any], values: Sequence[Any]) -> None:
    """Let a list or a dict hold these values, a dict under these keys in this order."""
    if type(item) is list:
        item[:] = values
        return
    base = dict_class(item)
    there = {key: key for key in base.keys(item)}  # the caller's own keys stay
    base.clear(item)
    base.update(item, zip([there.get(key, key) for key in keys], values, strict=True))


def set_attributes(item: Any, names: Sequence[str], values: Sequence[Any]) -> None:
    """Let an object have these attributes, and no others."""
    found = dict(zip(names, values, strict=True))
    slots = _slots(item)
    for name in slots.slots:
        slots.restore(name, found.pop(name, ABSENT))
    own = attributes_of(item)
    if own is not None:
        own.clear()
        own.update(found)


def _is_one_key(key: Any, other: Any) -> bool:
    return key is other or (type(key) is type(other) and key == other)


def _children(tree: Tree, kind: type, item: Any) -> Sequence[Any]:
    if issubclass(kind, dict):
        return list(dict_class(item).values(item))
    if issubclass(kind, (list, tuple)):
        return list(item)
    return [getattr(item, name) for name in tree.keys]


def _attributes(item: Any) -> Pairs:
    found = {**_slots(item).now(), **(attributes_of(item) or {})}
    return Pairs(tuple(found), tuple(found.values()))


def _slots(item: Any) -> Slots:
    return Slots("", item, slots_of(type(item)))


def containers_in(value: Any) -> Iterator[Any]:
    """The containers in a value, itself among them."""
    if issubclass(type(value), (list, tuple, dict, set, deque)):  # a dead proxy has no class of its own
        yield value
        for item in list(value.values()) if isinstance(value, dict) else list(value):
            yield from containers_in(item)


def objects_in(values: Iterable[Any]) -> Iterator[Any]:
    """Some values, and the containers, tensors and other objects that they hold."""
    for value in values:
        leaves: list[Any] = []
        flatten(value, leaves, ())
        yield from containers_in(value)
        yield from leaves
