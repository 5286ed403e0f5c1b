"""The forms of arguments and results as JSON: containers without the classes of the user, and what each leaf is.

A named tuple comes back as one with the same fields, a dataclass as a `Record` with the same attributes.
"""

from __future__ import annotations

import collections
import keyword
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from monograph.checkpoint.bytes import NAMES, are_sizes
from monograph.checkpoint.errors import Refused
from monograph.checkpoint.leaves import LEAVES_FROM_JSON, LEAVES_TO_JSON, MAX_INT, Json, check, list_of, typed
from monograph.ir.call.tree import LEAF, Attributed, Tree, mapping
from monograph.ir.meta import ScalarMeta, TensorMeta

_MAX_DEPTH: Final = 50
_FIELD: Final = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,200}")
_RETURN_TYPES: Final = {
    name: kind for name, kind in vars(torch.return_types).items() if isinstance(kind, type)
}


class Record:
    """What a dataclass of the user comes back as: its fields as attributes."""

    def __repr__(self) -> str:
        return f"Record({', '.join(f'{key}={value!r}' for key, value in vars(self).items())})"


class Entries(dict[str, Any]):
    """What a dataclass that is a dict comes back as: its entries are attributes too."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


@dataclass(frozen=True)
class ValueForm:
    """A leaf that is the same plain value in each call."""

    value: Any


FLOAT: Final = ScalarMeta("float")  # a leaf that may be another number in each call
INT: Final = ScalarMeta("int")
Leaf = TensorMeta | ScalarMeta | ValueForm


@dataclass(frozen=True)
class Form:
    """A nested value: its form, and what each leaf of it is."""

    tree: Tree
    leaves: tuple[Leaf, ...]

    @property
    def is_plain(self) -> bool:
        """True if there is nothing to give: every leaf is the same value in each call."""
        return all(isinstance(leaf, ValueForm) for leaf in self.leaves)


def plain_name(path: str) -> str:
    """A path to a leaf as clients and files of other runtimes call it."""
    return re.sub(r"\W+", "_", path).strip("_")


def to_json(form: Form) -> Json:
    """A form as JSON; `Refused` for containers and leaves that no artifact can hold."""
    return _tree_to_json(form.tree, iter(form.leaves))


def from_json(value: Json) -> Form:
    """The form that a JSON says."""
    leaves: list[Leaf] = []
    tree = _tree_from_json(value, leaves, _MAX_DEPTH)
    return Form(tree, tuple(leaves))


# --- to JSON ---------------------------------------------------------------------------------------------------


def _tree_to_json(tree: Tree, leaves: Iterator[Leaf]) -> Json:
    kind = tree.kind
    if kind is None:
        return _leaf_to_json(next(leaves))
    children = [_tree_to_json(child, leaves) for child in tree.children]
    if kind is torch.Tensor:
        raise Refused(
            "the step takes or gives a sparse tensor, which an artifact cannot",
            "pass its indices and its values, and put it together in build(): torch.sparse_coo_tensor()",
        )
    if kind is Attributed:
        raise Refused(
            f"a container among arguments or results has attributes besides its items: {', '.join(tree.keys)}",
            "pass and return plain lists, tuples and dicts",
        )
    if kind in (tuple, list, slice):
        return {kind.__name__: children}
    if issubclass(kind, tuple):
        if kind is _RETURN_TYPES.get(kind.__name__):
            return {"torch": [kind.__name__, children]}
        fields = list(getattr(kind, "_fields", ()))
        _check_fields(fields, kind)
        return {"namedtuple": [_plain_name(kind), fields, children]}
    if issubclass(kind, dict):
        if not all(type(key) in (str, int, bool, type(None)) for key in tree.keys):
            raise Refused("a dict among arguments or results has keys that are no strings and no integers")
        tag = "ordered" if kind is OrderedDict else "dict" if kind is dict else "entries"
        return {tag: [[key, child] for key, child in zip(tree.keys, children, strict=True)]}
    _check_fields(tree.keys, kind)
    return {"record": [[key, child] for key, child in zip(tree.keys, children, strict=True)]}


def _check_fields(names: Sequence[str], kind: type) -> None:
    for name in names:
        if not _is_field(name):
            raise Refused(f"the field {name!r} of {kind.__name__} is no plain name")


def _is_field(name: object) -> bool:
    return type(name) is str and _FIELD.fullmatch(name) is not None and not keyword.iskeyword(name)


def _plain_name(kind: type) -> str:
    return kind.__name__ if _is_field(kind.__name__) else "Named"


def _leaf_to_json(leaf: Leaf) -> Json:
    match leaf:
        case ScalarMeta(kind):
            return {"number": "int" if kind == "int" else "float"}
        case ValueForm(value):
            encode = LEAVES_TO_JSON.get(type(value))
            if encode is None:
                raise Refused(
                    f"an argument or a result is a {type(value).__name__}, which no artifact can hold",
                    "pass tensors, numbers, strings and None",
                )
            return {"value": encode(value)}
        case TensorMeta(shape, dtype, stride, device, requires_grad):
            entry: dict[str, Json] = {"tensor": str(dtype).removeprefix("torch."), "shape": list(shape)}
            entry |= {"stride": list(stride), "device": str(device), "requires_grad": requires_grad}
            return entry


# --- and back --------------------------------------------------------------------------------------------------


def _tree_from_json(value: Json, leaves: list[Leaf], depth: int) -> Tree:
    check(depth > 0, "a form is nested too deep")
    entry = typed(value, dict)
    if len(entry) != 1 or "number" in entry or "value" in entry:
        leaves.append(_leaf_from_json(entry))
        return LEAF
    ((tag, payload),) = entry.items()
    make = _CONTAINERS.get(tag)
    check(make is not None, f"a form has the unknown container {tag!r}")
    return make(payload, lambda item: _tree_from_json(item, leaves, depth - 1))  # type: ignore[misc]


def _leaf_from_json(entry: dict[str, Json]) -> Leaf:
    if entry == {"number": "float"}:
        return FLOAT
    if entry == {"number": "int"}:
        return INT
    if tuple(entry) == ("value",):
        return ValueForm(_plain(entry["value"]))
    check(
        tuple(entry) == ("tensor", "shape", "stride", "device", "requires_grad"), "a form has an unknown leaf"
    )
    name, shape, stride, device, requires_grad = entry.values()
    check(type(name) is str and name in NAMES, "a form has a tensor of unknown dtype")
    check(are_sizes(shape) and are_sizes(stride) and len(shape) == len(stride), "a form has a wrong shape")
    check(type(requires_grad) is bool, "a form does not say whether it requires grad")
    on = LEAVES_FROM_JSON["device"](device)
    return TensorMeta(tuple(shape), NAMES[name], tuple(stride), on, requires_grad)


def _plain(value: Json) -> Any:
    if type(value) is dict:
        check(len(value) == 1, "a form has an unknown value")
        ((tag, payload),) = value.items()
        check(tag in LEAVES_FROM_JSON, "a form has an unknown value")
        return LEAVES_FROM_JSON[tag](payload)
    check(type(value) is not list, "a form has an unknown value")
    check(type(value) is not int or abs(value) <= MAX_INT, "a form has a number that is too large")
    return value


_Read = Callable[[Json], Tree]


def _sequence(kind: type) -> Callable[[Json, _Read], Tree]:
    def make(payload: Json, read: _Read) -> Tree:
        children = tuple(map(read, list_of(payload, 3 if kind is slice else None)))
        return Tree(kind, ("start", "stop", "step") if kind is slice else (), children)

    return make


def _mapping(kind: type) -> Callable[[Json, _Read], Tree]:
    def make(payload: Json, read: _Read) -> Tree:
        pairs = [list_of(pair, 2) for pair in list_of(payload)]
        keys = tuple(key for key, _ in pairs)
        plain = (str,) if kind in (Record, Entries) else (str, int, bool, type(None))
        check(
            all(type(key) in plain for key in keys) and len(set(keys)) == len(keys), "a form has wrong keys"
        )
        check(kind is not Record or all(map(_is_field, keys)), "a form has a field that is no name")
        return mapping(kind, keys, tuple(read(child) for _, child in pairs))

    return make


def _namedtuple(payload: Json, read: _Read) -> Tree:
    name, fields, children = list_of(payload, 3)
    check(_is_field(name) and all(map(_is_field, list_of(fields))), "a form has a field that is no name")
    check(len(set(fields)) == len(fields) == len(list_of(children)), "a form has a wrong number of fields")
    return Tree(collections.namedtuple(name, fields), (), tuple(map(read, children)))


def _return_type(payload: Json, read: _Read) -> Tree:
    name, children = list_of(payload, 2)
    kind = _RETURN_TYPES.get(typed(name, str))
    check(kind is not None, "a form has an unknown type of torch")
    check(
        len(list_of(children)) == getattr(kind, "n_sequence_fields", -1),
        "a form has a wrong number of fields",
    )
    return Tree(kind, (), tuple(map(read, children)))


_CONTAINERS: Final[Mapping[str, Callable[[Json, _Read], Tree]]] = {
    "tuple": _sequence(tuple),
    "list": _sequence(list),
    "slice": _sequence(slice),
    "dict": _mapping(dict),
    "ordered": _mapping(OrderedDict),
    "entries": _mapping(Entries),
    "record": _mapping(Record),
    "namedtuple": _namedtuple,
    "torch": _return_type,
}
