"""Where Python keeps what guards look at: words of memory that move whenever a link, a length or a dict does.

A place is an address inside of an object, and holds as long as the object is alive. Where in an object it is, is tried
out when this is imported, and each place is compared with what Python says before it is used. Without a place, Python
has to be asked each time.
"""

from __future__ import annotations

import ctypes
import struct
import sys
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from types import CellType, FunctionType
from typing import Any

from monograph.capture.guards.sources.attributes import isinstance_of
from monograph.capture.guards.sources.c_attributes import KeptByC
from monograph.capture.guards.sources.places import Bases, Closure, Function, Kind, Source
from monograph.compat.tensors import WORD, dict_version, words_at

_IS_CPYTHON = sys.implementation.name == "cpython"  # where id() is an address
_MANAGED = 1 << 4  # Py_TPFLAGS_MANAGED_DICT: the dict is in front of the object


def words_reader(places: Sequence[int]) -> Callable[[], bytes]:
    """What reads the words at these places, as bytes to compare."""
    return partial(_words, words_at(places))


def _words(read: Callable[[], Any]) -> bytes:
    found: bytes = read().tobytes()
    return found


def places_of(source: Source) -> list[int] | None:
    """Where the objects that `source.now()` gives are linked from, one by one; None where that is not known."""
    offsets: list[int | None] = []
    owner: Any = None
    if isinstance(source, Kind):
        owner, offsets = source.owner, [_TYPE, *([_offset_of_dict(type(source.owner))] * source.has_dict)]
    elif isinstance(source, Closure):
        owner, offsets = source.cell, [_CONTENTS]
    elif isinstance(source, Function):
        owner, offsets = source.function, _PARTS
    elif isinstance(source, Bases):
        owner, offsets = source.cls, [_BASES]
    elif isinstance(source, KeptByC):
        owner = source.owner
        known_parts = _PARTS_OF_CLASSES if isinstance_of(owner, type) else _PARTS_OF_FUNCTIONS
        is_known = type(owner) is FunctionType or isinstance_of(owner, type)
        offsets = [known_parts.get(name) if is_known else None for name in source.parts]
    known = [id(owner) + offset for offset in offsets if offset is not None]
    targets = list(source.now().values())
    if len(known) != len(offsets) or len(known) != len(targets):
        return None
    return known if known and all(map(_links, map(_word, known), targets)) else None


def agree(words: bytes, targets: Sequence[Any], num_lengths: int) -> bool:
    """True if these words begin with the addresses of `targets`, and end with lengths that are all zero."""
    found = struct.unpack(f"{len(words) // WORD}P", words)
    return all(map(_links, found, targets)) and not any(found[len(found) - num_lengths :])


def _links(word: int, target: Any) -> bool:
    """True if a word is the address of an object; for None it may be null."""
    return word == id(target) or (target is None and word == 0)


def place_of_version(table: dict[Any, Any]) -> int | None:
    """Where a dict keeps its version."""
    place = id(table) + (_VERSION or 0)
    return place if _VERSION is not None and _word(place) == dict_version(table) else None


def place_of_length(container: Any) -> int | None:
    """Where a dict, list, set or deque keeps its length."""
    for kind, offset in _LENGTHS.items():
        if isinstance_of(container, kind):
            place = id(container) + offset
            return place if _word(place) == kind.__len__(container) else None
    return None


def _word(address: int) -> int:
    return ctypes.c_int64.from_address(address).value


# --- where in an object? -----------------------------------------------------------------------------------------------


def _offset_of_dict(kind: type) -> int | None:
    if kind.__flags__ & _MANAGED:
        return _DICT
    return kind.__dictoffset__ if kind.__dictoffset__ > 0 else None


def _tried(
    owner: Any, read: Callable[[Any], Any], change: Callable[[Any], object], start: int = 0
) -> int | None:
    """The offset of the address of what `read` gives, before a change and after it; None if not just one."""
    if not _IS_CPYTHON:
        return None
    before = read(owner)
    places = range(start, type(owner).__basicsize__, WORD)
    first = {offset for offset in places if _word(id(owner) + offset) == id(before)}
    change(owner)
    after = read(owner)
    both = {offset for offset in first if _word(id(owner) + offset) == id(after)}
    return both.pop() if len(both) == 1 and before is not after else None


class _Probe:
    pass


class _Other(_Probe):
    pass


def _function(first: float = 0.25, *, second: float = 0.5) -> float:
    return first + second


def _parts_of_functions() -> dict[str, int | None]:
    probe = FunctionType(_function.__code__, {}, "probe", (1.5,))
    probe.__kwdefaults__ = {"second": 2.5}
    texts = dict.fromkeys(("__name__", "__qualname__", "__doc__", "__module__"))
    other = {
        "__code__": _tried.__code__,
        "__defaults__": (3.5,),
        "__kwdefaults__": {"second": 4.5},
        "__annotations__": {"first": int},
        **{name: f"another {name}" for name in texts},
    }

    def offset(name: str) -> int | None:
        setattr(probe, name, f"a {name}") if name in texts else None
        return _tried(probe, lambda item: getattr(item, name), lambda item: setattr(item, name, other[name]))

    return {name: offset(name) for name in other}


def _parts_of_classes() -> dict[str, int | None]:
    probe = type("Probe", (), {})

    def offset(name: str) -> int | None:
        return _tried(
            probe, lambda item: getattr(item, name), lambda item: setattr(item, name, f"another {name}")
        )

    return {name: offset(name) for name in ("__name__", "__qualname__")}


def _version() -> int | None:
    probe: dict[Any, Any] = {}
    offsets = set(range(2 * WORD, dict.__basicsize__, WORD)) if _IS_CPYTHON else set()
    for key, value in ((1, 1), (2, 2), (1, 3), (1, None), (3, {})):
        probe[key] = value
        version = dict_version(probe)
        offsets = {offset for offset in offsets if _word(id(probe) + offset) == version}
    return offsets.pop() if len(offsets) == 1 else None


def _lengths() -> dict[Any, int]:
    found: dict[Any, int] = {}
    kinds: tuple[Any, ...] = (dict, list, set, deque) if _IS_CPYTHON else ()
    for kind in kinds:
        offsets = set(range(2 * WORD, kind.__basicsize__, WORD))
        for size in (0, 1, 2, 5, 70):
            items = [(item, item) for item in range(size + 1)]
            probe: Any = kind(items)
            probe.pop(0) if kind is dict else probe.pop()
            offsets = {offset for offset in offsets if _word(id(probe) + offset) == size}
        if len(offsets) == 1:
            found[kind] = offsets.pop()
    return found


def _owner() -> _Probe:
    probe = _Probe()
    probe.__dict__["value"] = 0
    return probe


_TYPE = _tried(_owner(), type, lambda item: setattr(item, "__class__", _Other))
_DICT = _tried(_owner(), lambda item: item.__dict__, lambda item: setattr(item, "__dict__", {}), -4 * WORD)
_CONTENTS = _tried(
    CellType(0.25), lambda item: item.cell_contents, lambda item: setattr(item, "cell_contents", 0.5)
)
_BASES = _tried(
    type("Probe", (_Probe,), {}),
    lambda item: item.__mro__,
    lambda item: setattr(item, "__bases__", (_Other,)),
)
_PARTS_OF_FUNCTIONS, _PARTS_OF_CLASSES = _parts_of_functions(), _parts_of_classes()
_PARTS = [_PARTS_OF_FUNCTIONS[name] for name in ("__code__", "__defaults__", "__kwdefaults__")]
_VERSION = _version()
_LENGTHS = _lengths()
