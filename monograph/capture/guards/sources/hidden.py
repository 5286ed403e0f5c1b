"""What objects of C hide from Python: states of generators, texts and bytes in memory, what weak references stand for."""

from __future__ import annotations

import array
import contextvars
import decimal
import io
import random
import sys
import types
import warnings
import weakref
from _random import Random as Twister
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch

from monograph.capture.guards.sources.attributes import isinstance_of
from monograph.capture.guards.sources.places import Source
from monograph.capture.guards.sources.values import ABSENT, is_immutable


@dataclass(eq=False)
class Probe(Source):
    """What an object of another language holds, read by a function that changes nothing."""

    owner: Any
    reader: Reader

    def now(self) -> Mapping[Any, Any]:
        try:
            return {"": self.reader.read(self.owner)}
        except Exception:  # released, or of another thread
            return {}

    def restore(self, key: Any, value: Any) -> bool:
        if self.reader.write is None:
            return False
        try:
            self.reader.write(self.owner, value)
        except (ValueError, TypeError, BufferError):
            return False  # of another size, read only, or without a place that can be set
        return True


@dataclass(frozen=True)
class Reader:
    """How to read what an object hides, and how to put it back where that can be done."""

    read: Callable[[Any], Any]
    write: Callable[[Any, Any], object] | None = None


def _bytes(value: Any) -> bytes:
    return memoryview(value).tobytes()


def _write_bytes(value: Any, content: bytes) -> None:
    if isinstance(value, bytearray):
        value[:] = content
    elif isinstance(value, array.array):
        del value[:]
        value.frombytes(content)
    else:
        memoryview(value).cast("B")[:] = content


def _array(value: Any) -> Any:
    content = tuple(value.ravel().tolist()) if value.dtype.hasobject else value.tobytes()
    return value.shape, value.strides, value.flags.writeable, str(value.dtype), content


def _write_array(value: Any, content: tuple[Any, ...]) -> None:
    if value.dtype.hasobject:
        raise ValueError("an array of objects")
    shape, *_, kind, numbers = content
    value[...] = sys.modules["numpy"].frombuffer(numbers, kind).reshape(shape)


def held_in_array(value: Any) -> list[Any]:
    """The objects that an array of numpy holds; none for any other object."""
    is_array = any(cls.__module__ == "numpy" and cls.__name__ == "ndarray" for cls in type(value).__mro__)
    return list(value.ravel().tolist()) if is_array and value.dtype.hasobject else []


def _frozen(item: Any) -> Any:
    """A state of numpy's as nested tuples, which are compared by value."""
    if isinstance(item, dict):
        return "dict", tuple((key, _frozen(value)) for key, value in item.items())
    return ("array", str(item.dtype), item.tobytes()) if hasattr(item, "tobytes") else item


def _thawed(item: Any) -> Any:
    if not isinstance(item, tuple):
        return item
    if item[0] == "dict":
        return {key: _thawed(value) for key, value in item[1]}
    return sys.modules["numpy"].frombuffer(item[2], item[1])


def _generator_state(value: Any) -> Any:
    return _frozen(value.bit_generator.state)


def _set_generator_state(value: Any, state: Any) -> None:
    value.bit_generator.state = _thawed(state)


def _bits_state(value: Any) -> Any:
    return _frozen(value.state)


def _set_bits_state(value: Any, state: Any) -> None:
    value.state = _thawed(state)


def _legacy_state(value: Any) -> Any:
    return _frozen(value.get_state(legacy=False))


def _set_legacy_state(value: Any, state: Any) -> None:
    value.set_state(_thawed(state))


def _place_of_generator(value: Any) -> Any:
    frame = value.gi_frame
    return None if frame is None else (frame.f_lasti, tuple(map(id, frame.f_locals.values())))


def _place_of_iterator(value: Any) -> Any:
    """Where an iterator is; something new each time for one that does not say, so that no step with it is repeated."""
    if type(value) is count:
        return repr(value)
    if "__reduce__" not in (name for kind in type(value).__mro__[:-1] for name in vars(kind)):
        return object()
    try:
        return _reduced(value.__reduce__())
    except DeprecationWarning:  # of the iterators of itertools since Python 3.12, where warnings are errors
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            return _reduced(value.__reduce__())
    except TypeError:
        return object()


def _set_place(value: Any, place: Any) -> None:
    """Put an iterator over a list, a tuple, a range or a text back to where it was; ValueError for all others."""
    position = place[-1] if isinstance(place, tuple) else None
    if type(position) is int and type(value) in _BY_POSITION:
        value.__setstate__(position)
    if _place_of_iterator(value) != place:
        raise ValueError("an iterator that cannot be put back")


def _reduced(item: Any) -> Any:
    """What an iterator says of its place, as texts and numbers that later ones can be compared with."""
    if isinstance(item, tuple):
        return tuple(map(_reduced, item))
    if type(item) is count:
        return repr(item)
    if type(item) is types.GeneratorType:
        return id(item), _place_of_generator(item)
    if isinstance(item, types.BuiltinMethodType) and not isinstance(item.__self__, (types.ModuleType, type)):
        raise TypeError("a method of C, whose object may move at each call")  # as that of re.finditer()
    if hasattr(type(item), "__next__"):
        return _place_of_iterator(item)
    return item if is_immutable(item) else id(item)


def _written(value: Any) -> Any:
    return value.getvalue(), value.tell()


def _write_anew(value: Any, content: tuple[Any, int]) -> None:
    value.seek(0)
    value.truncate()
    value.write(content[0])
    value.seek(content[1])


def _settings(value: decimal.Context) -> Any:
    return (
        *(value.prec, value.rounding, value.Emin, value.Emax, value.capitals, value.clamp),
        *(str(value.traps), str(value.flags)),
    )


def _value_of_context(value: contextvars.ContextVar[Any]) -> Any:
    return value.get(ABSENT)


def _set_context(value: contextvars.ContextVar[Any], content: Any) -> None:
    value.set(None if content is ABSENT else content)
    if content is ABSENT:
        raise ValueError("what has had no value cannot lose the one it has")


_NUMPY = {
    "ndarray": Reader(_array, _write_array),
    "Generator": Reader(_generator_state, _set_generator_state),
    "BitGenerator": Reader(_bits_state, _set_bits_state),
    "SeedSequence": Reader(lambda value: _frozen(value.state)),
    "RandomState": Reader(_legacy_state, _set_legacy_state),
}
_BY_POSITION = (*map(type, map(iter, ([], (), range(0), "", b"", bytearray()))), type(reversed([])))
_HIDING: tuple[tuple[type, Reader], ...] = (
    (random.SystemRandom, Reader(lambda value: object())),  # has no state, and never gives the same
    # what random.Random hides; its other half, the second of two normal numbers, is an attribute
    (Twister, Reader(Twister.getstate, Twister.setstate)),
    (io.StringIO, Reader(_written, _write_anew)),
    (io.BytesIO, Reader(_written, _write_anew)),
    (decimal.Context, Reader(_settings)),
    (contextvars.Context, Reader(lambda value: tuple(value.items()))),
    (torch.Generator, Reader(torch.Generator.initial_seed)),
    (BaseException, Reader(BaseException.args.__get__)),  # type: ignore[attr-defined]
)
_CONTEXT = Reader(_value_of_context, _set_context)
_GENERATOR = Reader(_place_of_generator)
_ITERATOR = Reader(_place_of_iterator, _set_place)
_BUFFER = Reader(_bytes, _write_bytes)


def reader_of(value: Any) -> Reader | None:
    """How to read what an object hides from Python; None if it hides nothing that is known."""
    kind = type(value)
    for cls in kind.__mro__:
        if cls.__module__.startswith("numpy") and cls.__name__ in _NUMPY:
            return _NUMPY[cls.__name__]
    for hiding, reader in _HIDING:
        if isinstance_of(value, hiding):
            return reader
    if isinstance_of(value, weakref.ref):
        return _WEAK
    if kind in weakref.ProxyTypes:
        return _PROXY
    if kind is contextvars.ContextVar:
        return _CONTEXT
    if kind is types.GeneratorType:
        return _GENERATOR
    if type(getattr(kind, "__next__", None)) is types.WrapperDescriptorType:  # no class of Python defines it
        return _ITERATOR
    try:
        memoryview(value)
    except (TypeError, BufferError, ValueError):
        return None
    return _BUFFER


def shows_memory(probe: Probe) -> bool:
    """True for an array of numpy and for a buffer, which share memory with other objects."""
    return probe.reader.read in (_array, _bytes)


def behind_proxy(value: Any) -> Any:
    """What a proxy of `weakref` stands for; None if that is gone."""
    try:
        return value.__init__.__self__
    except (ReferenceError, AttributeError):
        return None


_WEAK = Reader(weakref.ref.__call__)
_PROXY = Reader(behind_proxy)
