"""The way back from a tree of JSON and its tensors to the nested state. Only makes values; runs nothing."""

from __future__ import annotations

import math
import re
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, TypeAlias, cast

import numpy as np
import torch

from monograph.checkpoint.bytes import MAX_DIMS
from monograph.checkpoint.errors import Damaged
from monograph.checkpoint.flatten import ARRAY_KINDS, FACTORIES
from monograph.checkpoint.leaves import LEAVES_FROM_JSON, MAX_INT, Json, bits, check, list_of, matching, typed
from monograph.compat.modules import VERSIONS
from monograph.ir.call.sparse import HELD, PARTS, SparseForm, joined
from monograph.layout import MAX_NUMBER

_ARRAY_DTYPE: Final = re.compile(rf"[<>|=][{ARRAY_KINDS}][0-9]{{1,9}}(\[[0-9]{{0,9}}[A-Za-z]{{1,7}}\])?")


def rebuild(tree: Json, tensors: Mapping[str, torch.Tensor]) -> object:
    """The state; every tensor must be named in the tree. `Damaged` for whatever `flatten` would not have made."""
    reader = _Reader(tensors)
    state = reader.read(tree)
    unread = next((name for name in tensors if name not in reader.named), None)
    check(unread is None, f"nothing in the tree is the tensor {unread!r}")
    return state


def tensor_names(tree: Json) -> Iterator[str]:
    """The tensors that a tree names; of a tree that is damaged, some."""
    nodes = [tree]
    while nodes:
        node = nodes.pop()
        if type(node) is list:
            nodes += node
        elif type(node) is dict and len(node) == 1:
            ((tag, payload),) = node.items()
            if tag == "tensor" and type(payload) is str:
                yield payload
            elif tag == "array" and type(payload) is list and len(payload) == 4:
                yield str(payload[3])
            elif tag == "dict" and type(payload) is dict:
                nodes += payload.values()
            elif type(payload) is list:
                nodes += payload


def with_keys_of(tree: Json, other: Json) -> Json:
    """A tree, and in its dicts what only another one has."""
    if type(tree) is not dict or type(other) is not dict or tree.keys() != other.keys() or len(tree) != 1:
        return tree
    ((tag, payload),) = tree.items()
    more = other[tag]
    if tag == "dict" and type(payload) is type(more) is dict:
        return {tag: more | {key: with_keys_of(item, more.get(key)) for key, item in payload.items()}}
    if tag == "items" and type(payload) is type(more) is list:
        return {tag: _joined_items(payload, more)}
    if tag == "ordered" and type(payload) is type(more) is list and len(payload) == len(more) == 2:
        (items, versions), (more_items, more_versions) = payload, more
        return {tag: [_joined_items(items, more_items), with_keys_of(versions, more_versions)]}
    return tree


def _joined_items(items: Json, more: Json) -> Json:
    """Pairs of key and node, those of `items` first."""
    others = {repr(key): (key, node) for key, node in more}
    joined = [[key, with_keys_of(node, others.pop(repr(key), (key, None))[1])] for key, node in items]
    return joined + [[key, node] for key, node in others.values()]


class _Reader:
    """Reads one tree and remembers which tensors it named."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = tensors
        self.named: set[str] = set()

    def read(self, node: Json) -> Any:
        kind = type(node)
        if kind is dict:
            check(len(node) == 1, "the tree has an object that does not say one kind")
            ((tag, payload),) = node.items()
            leaf = LEAVES_FROM_JSON.get(tag)
            if leaf is not None:
                return leaf(payload)
            decode = _DECODERS.get(tag)
            check(decode is not None, f"the tree has a value of the unknown kind {tag!r}")
            return decode(payload, self)  # type: ignore[misc]
        if kind is list:
            return [self.read(item) for item in node]
        check(kind is not float or math.isfinite(node), "the tree has a number that is too large")
        check(kind is not int or -MAX_INT <= node <= MAX_INT, "the tree has a number that is too large")
        return node

    def items(self, payload: Json) -> list[tuple[Any, Any]]:
        """Pairs for a dict: no key twice."""
        pairs = []
        for pair in list_of(payload):
            check(type(pair) is list and len(pair) == 2, "the tree has an entry that is no pair")
            pairs.append((self.key(pair[0]), self.read(pair[1])))
        check(len(dict(pairs)) == len(pairs), "the tree has a key twice")
        return pairs

    def key(self, node: Json) -> Any:
        key = self.read(node)
        check(_is_key(key), f"the tree has a key of type {type(key).__name__}")
        return key

    def tensor(self, name: Json) -> torch.Tensor:
        tensor = self.tensors.get(typed(name, str))
        if tensor is None:
            raise Damaged(f"the tree names a tensor {name!r} that is not stored")
        self.named.add(name)
        return tensor


def _is_key(key: object) -> bool:
    if type(key) is tuple:
        return all(_is_key(part) for part in key)
    return type(key) in (str, int, float, bool, bytes, type(None))


# --- one decoder for each kind ---------------------------------------------------------------------------------


def _dict(payload: Json, reader: _Reader) -> dict[str, Any]:
    return {key: reader.read(item) for key, item in typed(payload, dict).items()}


def _ordered(payload: Json, reader: _Reader) -> OrderedDict[Any, Any]:
    items, metadata = list_of(payload, 2)
    ordered = OrderedDict(reader.items(items))
    if metadata is not None:
        setattr(ordered, VERSIONS, reader.read(metadata))
    return ordered


def _counter(payload: Json, reader: _Reader) -> Counter[Any]:
    return Counter(dict(reader.items(payload)))


def _defaultdict(payload: Json, reader: _Reader) -> defaultdict[Any, Any]:
    name, items = list_of(payload, 2)
    check(typed(name, str) in FACTORIES, f"the tree has a defaultdict of the unknown {name!r}")
    return defaultdict(FACTORIES[name], reader.items(items))


def _members(payload: Json, reader: _Reader) -> set[Any]:
    members = [reader.key(item) for item in list_of(payload)]
    check(len(set(members)) == len(members), "the tree has a member of a set twice")
    return set(members)


def _deque(payload: Json, reader: _Reader) -> deque[Any]:
    limit, items = list_of(payload, 2)
    check(
        limit is None or (type(limit) is int and 0 <= limit <= MAX_INT),
        "the tree has a deque without a length",
    )
    check(limit is None or len(list_of(items)) <= limit, "the tree has a deque that is too long")
    return deque((reader.read(item) for item in list_of(items)), maxlen=limit)


def _array(payload: Json, reader: _Reader) -> np.ndarray[Any, Any]:
    """Over the memory of the stored bytes, whose number must be right."""
    name, shape, order, raw = list_of(payload, 4)
    dtype, sizes, tensor = _numpy_dtype(name), _shape(shape), reader.tensor(raw)
    check(order in ("C", "F"), "the tree has an array in an unknown order")
    check(tensor.dtype is torch.uint8 and tensor.dim() == 1, "the tree has an array without bytes")
    check(
        math.prod(sizes) * dtype.itemsize == tensor.numel(),
        "the tree has an array with a wrong number of bytes",
    )
    return np.ndarray(sizes, dtype, buffer=tensor.numpy(), order=order)


def _sparse(payload: Json, reader: _Reader) -> torch.Tensor:
    """Of parts that are looked at first: torch would read beyond them."""
    name, size, coalesced, held = list_of(payload, 4)
    layout = next((layout for layout in HELD if str(layout) == f"torch.{name}"), None)
    if layout is None or type(coalesced) is not bool:
        raise Damaged("the tree has a sparse tensor of an unknown kind")
    parts = [reader.read(part) for part in list_of(held, len(PARTS[layout]))]
    check(all(isinstance(part, torch.Tensor) for part in parts), "the tree has a sparse tensor without parts")
    form = SparseForm(layout, tuple(_shape(size)), coalesced)
    try:
        return joined(form, parts, check_invariants=True)
    except (RuntimeError, TypeError, IndexError) as error:
        raise Damaged(
            f"the parts of a sparse tensor do not fit: {str(error).partition(chr(10))[0]}"
        ) from error


def _shape(value: Json) -> list[int]:
    numbers = list_of(value)
    check(
        len(numbers) <= MAX_DIMS and all(type(size) is int and 0 <= size < MAX_NUMBER for size in numbers),
        "the tree has an array of a wrong shape",
    )
    return numbers


def _scalar(payload: Json, reader: _Reader) -> np.generic:
    name, data = list_of(payload, 2)
    if name == "U":
        return np.str_(typed(reader.read(data), str))
    if name == "S":
        return np.bytes_(typed(reader.read(data), bytes))
    dtype = _numpy_dtype(name)
    scalar: Any = np.ndarray((), dtype, buffer=bits(data, dtype.itemsize))[()]
    return cast(np.generic, scalar)


def _numpy_dtype(name: Json) -> np.dtype[Any]:
    try:
        dtype = np.dtype(matching(name, _ARRAY_DTYPE))
    except (TypeError, ValueError):
        raise Damaged(f"the tree has the unknown numpy dtype {name!r}") from None
    check(dtype.kind in ARRAY_KINDS and not dtype.hasobject, f"the tree has the numpy dtype {name!r}")
    return dtype


_Decoder: TypeAlias = Callable[[Json, _Reader], Any]

_DECODERS: Final[Mapping[str, _Decoder]] = {
    "tensor": lambda payload, reader: reader.tensor(payload),
    "array": _array,
    "sparse": _sparse,
    "scalar": _scalar,
    "tuple": lambda payload, reader: tuple(reader.read(item) for item in list_of(payload)),
    "dict": _dict,
    "items": lambda payload, reader: dict(reader.items(payload)),
    "ordered": _ordered,
    "counter": _counter,
    "defaultdict": _defaultdict,
    "set": _members,
    "frozenset": lambda payload, reader: frozenset(_members(payload, reader)),
    "deque": _deque,
}
