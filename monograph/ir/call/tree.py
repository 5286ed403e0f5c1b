"""Nested arguments and results: flattened to leaves, rebuilt from leaves, with a path for each leaf."""

from __future__ import annotations

import dataclasses
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from monograph.compat.distributed.forms import ShardForm, shard_form, shard_of
from monograph.compat.distributed.tensors import awaited_part, is_sharded
from monograph.compat.global_state import what_runs
from monograph.ir.call.differences import misfit_text
from monograph.ir.call.numbers import exactly
from monograph.ir.call.sparse import PARTS, SparseForm, form_of, is_sparse, joined, parts_of


class Tree(NamedTuple):
    """The form of a nested value without its leaves. Hashable, so it can be part of a signature."""

    kind: type | None  # None for a leaf
    keys: tuple[Any, ...] = ()
    children: tuple[Tree, ...] = ()
    exact_keys: tuple[Any, ...] = ()  # where some are no texts: `1`, `1.0` and `True` are equal as keys
    factory: Factory | None = None  # by which a defaultdict makes entries


class Factory:
    """A function without arguments; equal to those which the same `def` has made with the same surroundings."""

    def __init__(self, make: Any) -> None:
        self.make, self._key = make, what_runs(make)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Factory) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        return repr(self.make)


class Attributed:
    """The kind of a container that has attributes besides: its first child is the container, the others are theirs."""


class _Containers(tuple[int, ...]):
    """The ids of containers around an item, where objects are leaves."""


LEAF = Tree(None)
_SLICE = ("start", "stop", "step")
_COMPUTED = (torch.Tensor, torch.SymInt, torch.SymFloat)
_PROXIES = weakref.ProxyTypes
_WRITTEN_IN_PYTHON = 1 << 9  # a flag of types: Py_TPFLAGS_HEAPTYPE


def flatten(item: Any, leaves: list[Any], objects: tuple[int, ...] | None = None) -> Tree:
    """Append the leaves of `item` to `leaves` and return its form.

    With `objects`, the ids of those around it, objects of classes written in Python are looked into as well: a batch
    whose attributes are tensors, or numbers that a step reads out of tensors. Those with attributes of other kinds, and
    those of plain values alone, are leaves.
    """
    kind = type(item)
    if kind is torch.Tensor:  # the most frequent by far
        leaves.append(item)
        return LEAF
    if kind is tuple or kind is list:
        return Tree(kind, (), tuple([flatten(child, leaves, objects) for child in item]))
    if kind is slice:
        return Tree(kind, _SLICE, tuple([flatten(getattr(item, name), leaves) for name in _SLICE]))
    if kind in _PROXIES:  # it has the class of what it stands for, or raises if that is gone
        leaves.append(item)
        return LEAF
    if isinstance(item, dict):
        if kind is dict:
            return mapping(kind, item, tuple([flatten(child, leaves, objects) for child in item.values()]))
        base = dict_class(item)
        values = tuple([flatten(child, leaves, objects) for child in base.values(item)])
        tree = mapping(kind, base.keys(item), values)
        if isinstance(item, defaultdict):
            tree = tree._replace(factory=Factory(item.default_factory))
        return _attributed(tree, item, _besides_entries(item), leaves, objects)
    if isinstance(item, tuple) and (hasattr(kind, "_fields") or hasattr(kind, "n_sequence_fields")):
        tree = Tree(kind, (), tuple([flatten(child, leaves, objects) for child in item]))
        return _attributed(tree, item, getattr(item, "__dict__", {}), leaves, objects)
    if dataclasses.is_dataclass(item) and not isinstance(item, type) and _is_plain_class(kind):
        fields = (field.name for field in dataclasses.fields(item))
        names = tuple([name for name in fields if hasattr(item, name)])
        tree = Tree(kind, names, tuple([flatten(getattr(item, name), leaves, objects) for name in names]))
        besides = {k: v for k, v in getattr(item, "__dict__", {}).items() if k not in names}
        return _attributed(tree, item, besides, leaves, objects)
    if type(objects) is tuple and hasattr(item, "__dict__") and id(item) not in objects and _is_record(kind):
        found: list[Any] = []
        names = tuple(vars(item))
        children = tuple([flatten(child, found, (*objects, id(item))) for child in vars(item).values()])
        if any(isinstance(leaf, _COMPUTED) for leaf in found) and all(map(_is_plain, found)):
            leaves.extend(found)
            return Tree(kind, names, children)
    leaves.append(item)
    return LEAF


def _besides_entries(item: dict[Any, Any]) -> dict[str, Any]:
    """The attributes of a dict that its entries do not show; a dataclass that is a dict has its entries as attributes."""
    besides: dict[str, Any] = getattr(item, "__dict__", {})
    if besides and dataclasses.is_dataclass(item):
        fields = {field.name: _default(field) for field in dataclasses.fields(item)}
        shown = {name: dict.get(item, name, default) for name, default in fields.items()}
        return {name: value for name, value in besides.items() if shown.get(name, fields) is not value}
    return besides


def _default(field: dataclasses.Field[Any]) -> Any:
    return None if field.default is dataclasses.MISSING else field.default


def dict_class(item: dict[Any, Any]) -> Any:
    """The class by whose methods a dict is read and filled: one of its own may give other values."""
    return OrderedDict if isinstance(item, OrderedDict) else dict


def _attributed(
    tree: Tree, item: Any, besides: dict[str, Any], leaves: list[Any], objects: tuple[int, ...] | None
) -> Tree:
    if not besides or id(item) in (objects or ()):
        return tree
    around = (*(objects or ()), id(item))
    inside = around if type(objects) is tuple else _Containers(around)
    children = [flatten(value, leaves, inside) for value in besides.values()]
    return Tree(Attributed, tuple(besides), (tree, *children))


def mapping(kind: type, keys: Iterable[Any], children: tuple[Tree, ...]) -> Tree:
    """The form of a dict."""
    names = tuple(keys)
    exact = () if all(type(key) is str for key in names) else tuple(map(exactly, names))
    return Tree(kind, names, children, exact)


def _is_plain_class(kind: type) -> bool:
    """True for a class written in Python, as are its bases: `object.__new__` makes an instance."""
    return all(cls.__flags__ & _WRITTEN_IN_PYTHON for cls in kind.__mro__[:-1])


def _is_record(kind: type) -> bool:
    """True for classes written in Python whose instances are made of their attributes alone."""
    classes = kind.__mro__[:-1]
    ours = kind.__module__.partition(".")[0] in ("torch", "monograph", "numpy")
    acts = any(
        name in vars(cls) for cls in classes for name in ("__next__", "__call__", "__getattr__", "__fspath__")
    )
    plain = _is_plain_class(kind) and not any(vars(cls).get("__slots__") for cls in classes)
    return kind is SimpleNamespace or (plain and not ours and not acts)


def _is_plain(leaf: object) -> bool:
    return leaf is None or isinstance(
        leaf, (*_COMPUTED, int, float, complex, str, bytes, torch.dtype, torch.device)
    )


def with_parts(
    tree: Tree, leaves: Iterator[Any], choose: Callable[[torch.Tensor], bool], found: list[Any]
) -> Tree:
    """The form in which the sparse tensors and DTensors that are chosen are made of others; appends all leaves to `found`."""
    if tree.kind is None:
        leaf = next(leaves)
        form: SparseForm | ShardForm
        parts: Sequence[torch.Tensor]
        if is_sharded(leaf) and choose(leaf):
            form, parts = shard_form(leaf), (awaited_part(leaf),)
        elif is_sparse(leaf) and choose(leaf):
            form, parts = form_of(leaf), parts_of(leaf)
        else:
            found.append(leaf)
            return tree
        found += parts
        return Tree(torch.Tensor, tuple(form), (LEAF,) * len(parts))
    if not tree.children:
        return tree
    return tree._replace(
        children=tuple([with_parts(child, leaves, choose, found) for child in tree.children])
    )


def unflatten(tree: Tree, leaves: Iterator[Any]) -> Any:
    """Rebuild a nested value of form `tree` from its leaves in order."""
    kind = tree.kind
    if kind is None:
        return next(leaves)
    children = [unflatten(child, leaves) for child in tree.children]
    if kind is list:
        return children
    if kind is torch.Tensor:
        form = tensor_form(tree)
        return shard_of(form, children) if isinstance(form, ShardForm) else joined(form, children)
    if kind is tuple or kind is slice:
        return tuple(children) if kind is tuple else slice(*children)
    if kind is Attributed:
        for name, child in zip(tree.keys, children[1:], strict=True):
            object.__getattribute__(children[0], "__dict__")[name] = child
        return children[0]
    if issubclass(kind, dict):
        return _mapping(tree, kind, dict(zip(tree.keys, children, strict=True)))
    if issubclass(kind, tuple):
        return tuple.__new__(kind, children) if hasattr(kind, "_fields") else kind(children)
    rebuilt = kind.__new__(kind) if kind is SimpleNamespace else object.__new__(kind)
    for name, child in zip(tree.keys, children, strict=True):
        object.__setattr__(rebuilt, name, child)
    return rebuilt


def tensor_form(tree: Tree) -> SparseForm | ShardForm:
    """What a tensor is besides the parts that it is made of, from their form."""
    return SparseForm(*tree.keys) if isinstance(tree.keys[0], torch.layout) else ShardForm(*tree.keys)


def _field_names(kind: type) -> tuple[str, ...]:
    """The fields of a tuple with names: a namedtuple, or one made in C such as the results of `torch.max`."""
    made_in_c = hasattr(kind, "n_sequence_fields")
    return tuple(getattr(kind, "__match_args__" if made_in_c else "_fields", ()))


def _mapping(tree: Tree, kind: type, entries: dict[Any, Any]) -> Any:
    if kind is dict:
        return entries
    made: Any = kind
    rebuilt = made.__new__(made)
    put: Any = OrderedDict.__setitem__ if issubclass(kind, OrderedDict) else dict.__setitem__
    for name, value in entries.items():
        put(rebuilt, name, value)
    if tree.factory is not None:
        rebuilt.default_factory = tree.factory.make
    if dataclasses.is_dataclass(kind):  # a dict that is a dataclass too has its entries as attributes
        vars(rebuilt).update({f.name: entries.get(f.name, _default(f)) for f in dataclasses.fields(kind)})
    return rebuilt


def kinds_in(tree: Tree) -> Iterator[type]:
    """The classes of the containers and objects in a form."""
    if tree.kind is not None and tree.kind is not Attributed:
        yield tree.kind
    for child in tree.children:
        yield from kinds_in(child)


def leaf_paths(tree: Tree, path: str) -> Iterator[str]:
    """The path of each leaf as the user would write it: `y[0]["mask"]`, `batch.labels`."""
    if tree.kind is None:
        yield path
        return
    for child, below in zip(tree.children, child_paths(tree, path), strict=True):
        yield from leaf_paths(child, below)


def tensor_forms(tree: Tree) -> Iterator[SparseForm | ShardForm | None]:
    """For each leaf the form of the tensor that it is a part of; None for one that is whole."""
    if tree.kind is None:
        yield None
    elif tree.kind is torch.Tensor:
        yield from (tensor_form(tree) for _ in tree.children)
    else:
        for child in tree.children:
            yield from tensor_forms(child)


def form_difference(expected: Tree, got: Tree, path: str) -> str | None:
    """The first place where two forms differ, as a sentence; None if they do not."""
    if expected == got:
        return None
    if expected.factory != got.factory:
        return misfit_text(
            f"argument {path} has the default factory", repr(got.factory), repr(expected.factory)
        ) or (f"argument {path} has another default factory than the graph was built for")
    if expected.kind is not got.kind:
        return misfit_text(f"argument {path} is", _form(got), _form(expected)) or (
            f"argument {path} is {_form(got)} of another class of that name than the graph was built for"
        )
    if expected.keys != got.keys and got.kind is torch.Tensor:
        forms = (_tensor_text(tensor_form(item)) for item in (got, expected))
        return misfit_text(f"argument {path} is", *forms) or f"argument {path} is coalesced, or no longer is"
    if (expected.keys, expected.exact_keys) != (got.keys, got.exact_keys):
        return misfit_text(f"argument {path} has the keys", _keys(got), _keys(expected)) or (
            f"argument {path} has other keys than the graph was built for, which read the same: {_keys(got)}"
        )
    if len(expected.children) != len(got.children):
        counts = f"{len(got.children)} items", str(len(expected.children))
        return misfit_text(f"argument {path} has", *counts)
    differences = map(form_difference, expected.children, got.children, child_paths(got, path))
    return next((found for found in differences if found is not None), None)


def child_paths(tree: Tree, path: str) -> Iterator[str]:
    """The path of each child of a form, as the user would write it."""
    assert tree.kind is not None, "a leaf has no children"
    if tree.kind is torch.Tensor:
        form = tensor_form(tree)
        names = ("to_local",) if isinstance(form, ShardForm) else PARTS[form.layout]
        yield from (f"{path}.{name}()" for name in names)
        return
    if tree.kind is Attributed:
        yield path
        yield from (f"{path}.{name}" for name in tree.keys)
        return
    names = _field_names(tree.kind)
    for index in range(len(tree.children)):
        if not tree.keys:
            yield path + (f".{names[index]}" if names else f"[{index}]")
        elif issubclass(tree.kind, dict):
            yield f"{path}[{_quoted(tree.keys[index])}]"
        else:
            yield f"{path}.{tree.keys[index]}"


def _tensor_text(form: SparseForm | ShardForm) -> str:
    return str(form) if isinstance(form, ShardForm) else f"a {form} tensor {form.size}"


def _form(tree: Tree) -> str:
    if tree.kind is Attributed:
        return f"{_form(tree.children[0])} with the attributes {', '.join(tree.keys)}"
    if tree.kind is torch.Tensor:
        return _tensor_text(tensor_form(tree))
    return "a single value (a tensor, a number, None)" if tree.kind is None else f"a {tree.kind.__name__}"


def _keys(tree: Tree) -> str:
    return ", ".join(map(_quoted, tree.keys))


def _quoted(key: Any) -> str:
    return f'"{key}"' if isinstance(key, str) else repr(key)
