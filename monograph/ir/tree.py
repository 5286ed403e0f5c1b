"""Nested arguments and results: flattened to leaves, rebuilt from leaves, with a path for each leaf."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from monograph.ir.telling import told_misfit


class Tree(NamedTuple):
    """The form of a nested value without its leaves. Hashable, so it can be part of a signature."""

    kind: type | None  # None for a leaf
    keys: tuple[Any, ...] = ()
    children: tuple[Tree, ...] = ()


LEAF = Tree(None)
_SLICE = ("start", "stop", "step")


def flatten(item: Any, leaves: list[Any]) -> Tree:
    """Append the leaves of `item` to `leaves` and return its form."""
    kind = type(item)
    if kind is torch.Tensor:  # the most frequent by far
        leaves.append(item)
        return LEAF
    if kind is tuple or kind is list:
        return Tree(kind, (), tuple([flatten(child, leaves) for child in item]))
    if kind is slice:
        return Tree(kind, _SLICE, tuple([flatten(getattr(item, name), leaves) for name in _SLICE]))
    if isinstance(item, dict):
        return Tree(kind, tuple(item), tuple([flatten(child, leaves) for child in item.values()]))
    if isinstance(item, tuple) and (hasattr(kind, "_fields") or hasattr(kind, "n_sequence_fields")):
        return Tree(kind, (), tuple([flatten(child, leaves) for child in item]))
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        names = tuple(field.name for field in dataclasses.fields(item))
        return Tree(kind, names, tuple([flatten(getattr(item, name), leaves) for name in names]))
    leaves.append(item)
    return LEAF


def unflatten(tree: Tree, leaves: Iterator[Any]) -> Any:
    """Rebuild a nested value of form `tree` from its leaves in order."""
    kind = tree.kind
    if kind is None:
        return next(leaves)
    children = [unflatten(child, leaves) for child in tree.children]
    if kind is list:
        return children
    if kind is tuple or kind is slice:
        return tuple(children) if kind is tuple else slice(*children)
    if issubclass(kind, dict):
        return _mapping(kind, dict(zip(tree.keys, children, strict=True)))
    if issubclass(kind, tuple):
        return kind(*children) if hasattr(kind, "_fields") else kind(children)
    rebuilt = object.__new__(kind)
    for name, child in zip(tree.keys, children, strict=True):
        object.__setattr__(rebuilt, name, child)
    return rebuilt


def _field_names(kind: type) -> tuple[str, ...]:
    """The fields of a tuple with names: a namedtuple, or one made in C such as the results of `torch.max`."""
    made_in_c = hasattr(kind, "n_sequence_fields")
    return tuple(getattr(kind, "__match_args__" if made_in_c else "_fields", ()))


def _mapping(kind: type, entries: dict[Any, Any]) -> Any:
    if kind is dict:
        return entries
    if dataclasses.is_dataclass(kind):  # a dict that is a dataclass too fills its entries from its fields
        return kind(**entries)
    rebuilt: Any = kind()
    rebuilt.update(entries)
    return rebuilt


def leaf_paths(tree: Tree, path: str) -> Iterator[str]:
    """The path of each leaf as the user would write it: `y[0]["mask"]`, `batch.labels`."""
    if tree.kind is None:
        yield path
        return
    for child, below in zip(tree.children, _child_paths(tree, path), strict=True):
        yield from leaf_paths(child, below)


def form_difference(expected: Tree, got: Tree, path: str) -> str | None:
    """The first place where two forms differ, as a sentence; None if they do not."""
    if expected == got:
        return None
    if expected.kind is not got.kind:
        return told_misfit(f"argument {path} is", _form(got), _form(expected)) or (
            f"argument {path} is {_form(got)} of another class of that name than the graph was built for"
        )
    if expected.keys != got.keys:
        return told_misfit(f"argument {path} has the keys", _keys(got), _keys(expected)) or (
            f"argument {path} has other keys than the graph was built for, which read the same: {_keys(got)}"
        )
    if len(expected.children) != len(got.children):
        counts = f"{len(got.children)} items", str(len(expected.children))
        return told_misfit(f"argument {path} has", *counts)
    differences = map(form_difference, expected.children, got.children, _child_paths(got, path))
    return next((found for found in differences if found is not None), None)


def _child_paths(tree: Tree, path: str) -> Iterator[str]:
    assert tree.kind is not None, "a leaf has no children"
    names = _field_names(tree.kind)
    for index in range(len(tree.children)):
        if not tree.keys:
            yield path + (f".{names[index]}" if names else f"[{index}]")
        elif issubclass(tree.kind, dict):
            yield f"{path}[{_quoted(tree.keys[index])}]"
        else:
            yield f"{path}.{tree.keys[index]}"


def _form(tree: Tree) -> str:
    return "one value" if tree.kind is None else f"a {tree.kind.__name__}"


def _keys(tree: Tree) -> str:
    return ", ".join(map(_quoted, tree.keys))


def _quoted(key: Any) -> str:
    return f'"{key}"' if isinstance(key, str) else repr(key)
