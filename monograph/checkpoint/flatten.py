"""A nested state taken apart: plain JSON that says every type, and the tensors that it names.

None, bool, str, an int of 64 bits, a finite float and a list are themselves in JSON. Everything else is an object with
one key, its kind: {"tuple": [...]}, {"tensor": "model/fc.weight"}. `checkpoint/rebuild.py` is the way back.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
import torch

from monograph.checkpoint.bytes import CODES
from monograph.checkpoint.errors import Path, Refused, path_text, refusal, too_deep
from monograph.checkpoint.leaves import LEAVES_TO_JSON, Json, is_text
from monograph.compat.modules import VERSIONS
from monograph.ir.call.sparse import HELD, PARTS, form_of, parts_of

MAX_DEPTH: Final = 100
MAX_NODES: Final = 20_000_000
ARRAY_KINDS: Final = "biufcSUmM"
FACTORIES: Final[Mapping[str, Callable[[], object] | None]] = {
    "none": None,
    "list": list,
    "dict": dict,
    "set": set,
    "int": int,
    "float": float,
}
_RESERVED: Final = "__metadata__"  # a name that safetensors keeps for itself


@dataclass(frozen=True)
class Flat:
    """The tree, and the tensors by name: each stored once, however often the tree names it."""

    tree: Json
    tensors: Mapping[str, torch.Tensor]


LocalOf: TypeAlias = Callable[[object], torch.Tensor | None]


def no_local(value: object) -> None:
    """In a process by itself no tensor is spread over several."""


def flatten(state: object, local_of: LocalOf = no_local) -> Flat:
    """Take a state apart; `Refused` names the path of the first leaf that has no place in a checkpoint.

    Of a tensor that is spread over processes `local_of` gives the part of this one; None for anything else.
    """
    store = _Store(local_of)
    try:
        return Flat(_encode(state, (), store), store.tensors)
    except RecursionError:
        raise too_deep((), MAX_DEPTH) from None


class _Store:
    """The tensors found so far; one with the same memory, shape and strides as another is the same."""

    def __init__(self, local_of: LocalOf) -> None:
        self.local_of = local_of
        self.tensors: dict[str, torch.Tensor] = {}
        self.num_nodes = 0
        self._names: dict[object, str] = {}

    def add(self, tensor: torch.Tensor, path: Path) -> str:
        # memory says nothing of tensors that are spread: one rank may have no element of two that others have
        key = _identity(tensor) if self.local_of(tensor) is None else id(tensor)
        name = self._names.get(key)
        if name is None:
            name = self._new_name(path)
            self._names[key] = name
            self.tensors[name] = tensor
        return name

    def _new_name(self, path: Path) -> str:
        base = name = path_text(path).encode("utf-8", "replace").decode()
        number = 1
        while name in self.tensors or name == _RESERVED:
            number += 1
            name = f"{base}#{number}"
        return name


def _identity(tensor: torch.Tensor) -> object:
    if tensor.numel() == 0:
        return id(tensor)  # no memory of its own to know it by
    return (
        tensor.untyped_storage().data_ptr(),
        tensor.storage_offset(),
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
        tensor.device,
        tensor.is_conj(),
        tensor.is_neg(),
    )


def _encode(value: Any, path: Path, store: _Store) -> Json:
    store.num_nodes += 1
    if len(path) > MAX_DEPTH:
        raise too_deep(path, MAX_DEPTH)
    if store.num_nodes > MAX_NODES:
        raise Refused(
            f"the state has more than {MAX_NODES:,} parts", "store long lists of numbers as tensors"
        )
    leaf = LEAVES_TO_JSON.get(type(value))
    if leaf is not None:
        return leaf(value)
    encode = _ENCODERS.get(type(value))
    if encode is not None:
        return encode(value, path, store)
    if isinstance(value, np.generic):
        return _scalar(value, path, store)
    local = store.local_of(value)
    if local is not None:
        _check_stored(local, path)
        return {"tensor": store.add(value, path)}
    raise refusal(value, path)


# --- one encoder for each type that is no leaf ---------------------------------------------------------------------------------


def _list(value: list[Any], path: Path, store: _Store) -> Json:
    return [_encode(item, (*path, index), store) for index, item in enumerate(value)]


def _tuple(value: tuple[Any, ...], path: Path, store: _Store) -> Json:
    return {"tuple": [_encode(item, (*path, index), store) for index, item in enumerate(value)]}


def _dict(value: dict[Any, Any], path: Path, store: _Store) -> Json:
    if all(type(key) is str and is_text(key) for key in value):
        return {"dict": {key: _encode(item, (*path, key), store) for key, item in value.items()}}
    return {"items": _items(value, path, store)}


def _items(value: Mapping[Any, Any], path: Path, store: _Store) -> Json:
    return [[_key(key, path, store), _encode(item, (*path, key), store)] for key, item in value.items()]


def _key(key: object, path: Path, store: _Store) -> Json:
    if type(key) is tuple:
        return {"tuple": [_key(part, path, store) for part in key]}
    if type(key) not in (str, int, float, bool, bytes, type(None)):
        kind = type(key).__qualname__
        raise Refused(
            f"{path_text(path)} has a key of type {kind}, which a checkpoint cannot hold",
            "use keys that are strings, numbers, bools, None or tuples of them",
        )
    return _encode(key, path, store)


def _ordered(value: OrderedDict[Any, Any], path: Path, store: _Store) -> Json:
    """With the `_metadata` that `Module.state_dict` leaves on it: `load_state_dict` reads versions there."""
    extra = vars(value)
    unknown = next((name for name in extra if name != VERSIONS), None)
    if unknown is not None:
        raise Refused(f"{path_text(path)} has an attribute {unknown!r}", "store it as an entry of its own")
    metadata = _encode(extra.get(VERSIONS), (*path, VERSIONS), store)
    return {"ordered": [_items(value, path, store), metadata]}


def _counter(value: Counter[Any], path: Path, store: _Store) -> Json:
    return {"counter": _items(value, path, store)}


def _defaultdict(value: defaultdict[Any, Any], path: Path, store: _Store) -> Json:
    for name, factory in FACTORIES.items():
        if value.default_factory is factory:
            return {"defaultdict": [name, _items(value, path, store)]}
    raise Refused(
        f"{path_text(path)} is a defaultdict of {value.default_factory!r}, which a checkpoint cannot hold",
        f"turn it into a dict, or use one of {', '.join(FACTORIES)}",
    )


def _set(value: set[Any] | frozenset[Any], path: Path, store: _Store) -> Json:
    return {type(value).__name__: [_key(item, path, store) for item in value]}


def _deque(value: deque[Any], path: Path, store: _Store) -> Json:
    items = [_encode(item, (*path, index), store) for index, item in enumerate(value)]
    return {"deque": [value.maxlen, items]}


def _tensor(value: torch.Tensor, path: Path, store: _Store) -> Json:
    if value.layout in HELD and type(value) is torch.Tensor:
        return _sparse(value, path, store)
    _check_stored(value, path)
    return {"tensor": store.add(value, path)}


def _check_stored(value: torch.Tensor, path: Path) -> None:
    """`Refused` for a tensor without a place in a file."""
    if value.layout is not torch.strided or value.is_quantized:
        kind = "quantized" if value.is_quantized else str(value.layout).removeprefix("torch.")
        raise Refused(
            f"{path_text(path)} is a {kind} tensor", "store a dense one: .to_dense() or .dequantize()"
        )
    if value.is_meta:
        raise Refused(
            f"{path_text(path)} is a tensor on the meta device and has no data", "materialise it first"
        )
    if value.dtype not in CODES:
        raise Refused(f"{path_text(path)} is a tensor of {value.dtype}", "store it as one of another dtype")


def _sparse(value: torch.Tensor, path: Path, store: _Store) -> Json:
    form = form_of(value)
    names = PARTS[form.layout]
    parts = [_tensor(part, (*path, name), store) for name, part in zip(names, parts_of(value), strict=True)]
    return {"sparse": [str(form), list(form.size), form.coalesced, parts]}


def _array(value: np.ndarray[Any, Any], path: Path, store: _Store) -> Json:
    if value.dtype.kind not in ARRAY_KINDS or value.dtype.itemsize == 0:
        raise Refused(
            f"{path_text(path)} is a numpy array of {value.dtype}, which a checkpoint cannot hold",
            "store its fields as arrays of numbers, bools or strings",
        )
    data = value.tobytes("A")  # in Fortran's order if the array is in that one only
    raw = torch.from_numpy(np.frombuffer(bytearray(data), np.uint8))
    order = "F" if value.flags.fnc else "C"
    return {"array": [value.dtype.str, list(value.shape), order, store.add(raw, path)]}


def _scalar(value: np.generic, path: Path, store: _Store) -> Json:
    if isinstance(value, np.str_):  # str() and .item() drop zeros at the end
        return {"scalar": ["U", _encode(str.__str__(value), path, store)]}
    if isinstance(value, np.bytes_):
        return {"scalar": ["S", _encode(bytes(value), path, store)]}
    if value.dtype.kind not in ARRAY_KINDS or value.dtype.type is not type(value):
        raise refusal(value, path)
    return {"scalar": [value.dtype.str, value.tobytes().hex()]}


_ENCODERS: Final[Mapping[type, Callable[[Any, Path, _Store], Json]]] = {
    list: _list,
    tuple: _tuple,
    dict: _dict,
    OrderedDict: _ordered,
    Counter: _counter,
    defaultdict: _defaultdict,
    set: _set,
    frozenset: _set,
    deque: _deque,
    torch.Tensor: _tensor,
    torch.nn.Parameter: _tensor,
    np.ndarray: _array,
}
