"""What varies of arguments: dimensions, each with the name of its size, and ints. A call is known by names, not numbers."""

from __future__ import annotations

import re
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from monograph.compat.tensors import may_overlap
from monograph.ir.call.parameters import is_part_of
from monograph.ir.call.signature import Call, Key, TensorKey
from monograph.layout import Layout, contiguous_stride, fills_a_block
from monograph.settings import DynamicSize
from monograph.sizes.expression import SMALLEST, Expression
from monograph.sizes.place import size_places
from monograph.sizes.size import Size

Place = tuple[int, int]  # a leaf by position, and one of its dimensions


@dataclass(frozen=True)
class Varying:
    """For each leaf of a call the name of the size of each dimension; None for sizes that stay, () for leaves without others.

    Where gradient accumulation splits a dimension, the name is that of the size of a part.
    `numbers` are the leaves that are ints which move: of these a key has the type alone, as of floats.
    """

    names: tuple[tuple[str | None, ...], ...]
    numbers: frozenset[int] = frozenset()

    @staticmethod
    def in_key(key: Key) -> Varying | None:
        """Those of a key; None if it has numbers alone."""
        return Varying.in_keys(key.signature[1])

    @staticmethod
    def in_keys(keys: Sequence[Hashable]) -> Varying | None:
        """The same of the keys of leaves."""
        rows = [
            tuple([size.name_and_parts[0] if isinstance(size, Size) else None for size in leaf.shape])
            if isinstance(leaf, TensorKey)
            else ()
            for leaf in keys
        ]
        numbers = frozenset([index for index, leaf in enumerate(keys) if leaf is int])
        return _of_rows(rows, numbers)

    def without(self, gone: Collection[str] = (), ints: Collection[int] = ()) -> Varying | None:
        """The same with numbers for some names, and with ints that stay what they are; None if nothing is left."""
        rows = [tuple([None if name in gone else name for name in row]) for row in self.names]
        return _of_rows(rows, self.numbers.difference(ints))

    def with_names(self, more: Varying) -> Varying:
        """The same, with the names of another one for sizes that stay, and its ints."""
        rows = zip(self.names, more.names, strict=True)
        names = [tuple([a or b for a, b in zip_longest(row, other)]) for row, other in rows]
        return Varying(tuple(names), more.numbers)

    def fewer(self) -> Iterator[Varying]:
        """The same, then with ints that move alone, then with sizes that vary alone."""
        yield self
        if self.numbers and any(self.names):
            yield replace(self, names=((),) * len(self.names))
            yield replace(self, numbers=frozenset())

    def places(self, names: Collection[str]) -> Iterator[Place]:
        """Where sizes of these names are."""
        for leaf, row in enumerate(self.names):
            yield from ((leaf, dim) for dim, name in enumerate(row) if name in names)

    def of(self, call: Call, *, with_ones: bool = False) -> Call | None:
        """The call by names; None for one that has other dimensions, or a size that is special: 0, and if not `with_ones` 1."""
        if len(call.keys) != len(self.names):
            return None
        sizes: dict[str, int] = {}
        keys, smallest = list(call.keys), 1 if with_ones else SMALLEST
        for index in self.numbers:
            if keys[index] is not int and not _is_int(keys[index]):
                return None
            keys[index] = int
        for index, names in enumerate(self.names):
            if not names:
                continue
            key = keys[index]
            if not isinstance(key, TensorKey) or len(key.shape) != len(names) or key.keeps_sizes:
                return None
            shape = list(key.shape)
            for dim, name in enumerate(names):
                if name is None:
                    continue
                parts = call.num_parts(index, dim)
                size = _of_part(shape[dim], parts)
                if size < smallest or sizes.setdefault(name, size) != size:
                    return None
                shape[dim] = Size(shape[dim], Expression.of(name) * Expression.of(parts))
            stride = _strides(shape, key.stride)
            if stride is None:
                return None
            keys[index] = key._replace(shape=tuple(shape), stride=stride)
        return _with_keys(call, keys)


def _of_rows(rows: Iterable[tuple[str | None, ...]], numbers: frozenset[int]) -> Varying | None:
    names = tuple([row if any(row) else () for row in rows])
    return Varying(names, numbers) if numbers or any(names) else None


def _with_keys(call: Call, keys: Sequence[Hashable]) -> Call:
    tree, _, same, modes = call.key.signature
    key = call.key._replace(signature=(tree, tuple(keys), same, modes))
    return call._replace(keys=tuple(keys), key=key)


def _present_sizes(call: Call) -> dict[str, int]:
    """The present sizes of a call that is known by their names."""
    shapes = [key.shape if isinstance(key, TensorKey) else () for key in call.keys]
    return {
        name: int(shapes[place.position][place.dim]) // place.parts
        for name, place in size_places(shapes).items()
    }


def ones_in(call: Call) -> frozenset[str]:
    """The names of those that are sizes of one."""
    return frozenset([name for name, size in _present_sizes(call).items() if size < SMALLEST])


def by_numbers(call: Call) -> Call:
    """A call that is known by the names of sizes as what it is by its sizes."""
    return _with_keys(call, [key.in_numbers if isinstance(key, TensorKey) else key for key in call.keys])


def vary(
    call: Call, known: Iterable[Key], fixed: Collection[Place] = (), *, sizes: bool = True
) -> Varying | None:
    """The sizes and ints in which a call differs from one of these keys, if it differs in nothing else; the fewest.

    The sizes at `fixed` stay numbers. Without `sizes` it differs in ints alone.
    """
    found = [
        (_count(form, key), form)
        for key in known
        if (form := _differences(call, key, fixed)) is not None and (sizes or not any(form.names))
    ]
    return min(found, key=lambda item: item[0])[1] if found else None


def declared(call: Call, sizes: Iterable[DynamicSize], fixed: Collection[Place] = ()) -> Varying | None:
    """The sizes of a call that were declared to vary; equal ones of different arguments have one name."""
    paths = call.paths()
    names: dict[Place, str] = {}
    first: dict[tuple[int, int | str], str] = {}
    for declared in sizes:
        for leaf, key in enumerate(call.keys):
            if not is_part_of(paths[leaf], declared.argument) or not isinstance(key, TensorKey):
                continue
            dim = declared.dim % len(key.shape) if key.shape else 0
            if len(key.shape) <= dim or (leaf, dim) in fixed or key.keeps_sizes:
                continue
            size = _of_part(key.shape[dim], call.num_parts(leaf, dim))
            if size >= SMALLEST and declared.takes(key.shape[dim]):
                names[leaf, dim] = first.setdefault((size, declared.name or dim), _name(paths, (leaf, dim)))
    rows = [
        tuple([names.get((leaf, dim)) for dim in range(len(key.shape))]) if isinstance(key, TensorKey) else ()
        for leaf, key in enumerate(call.keys)
    ]
    return _of_rows(rows, frozenset())


def tied_to_names(call: Call) -> Call | None:
    """A call by names in which sizes of other arguments that equal one with a name have that name, too; None if none does."""
    form = Varying.in_key(call.key)
    if form is None:
        return None
    sizes = _present_sizes(call)
    rows = [
        row if any(row) or not isinstance(key, TensorKey) or key.keeps_sizes else _tied(call, leaf, sizes)
        for leaf, (row, key) in enumerate(zip(form.names, call.keys, strict=True))
    ]
    tied = _of_rows(rows, form.numbers)
    return None if tied is None or tied == form else tied.of(by_numbers(call))


def _tied(call: Call, leaf: int, sizes: Mapping[str, int]) -> tuple[str | None, ...]:
    key = call.keys[leaf]
    assert isinstance(key, TensorKey)
    parts = [_of_part(size, call.num_parts(leaf, dim)) for dim, size in enumerate(key.shape)]
    return tuple([next((name for name, size in sizes.items() if size == part), None) for part in parts])


def _count(form: Varying, known: Key) -> tuple[int, int]:
    """How many do not vary yet in a key; of two alike the one comes first in which more vary."""
    keys = known.signature[1]
    places = [(leaf, dim) for leaf, row in enumerate(form.names) for dim, name in enumerate(row) if name]
    new = sum(keys[index] is not int for index in form.numbers)
    for leaf, dim in places:
        key = keys[leaf]
        new += isinstance(key, TensorKey) and not isinstance(key.shape[dim], Size)
    return new, -len(places) - len(form.numbers)


def _differences(call: Call, known: Key, fixed: Collection[Place]) -> Varying | None:
    tree, keys, *others = call.key.signature
    known_tree, known_keys, *known_others = known.signature
    if (known_tree, known_others, known[1:]) != (tree, others, call.key[1:]):
        return None
    groups: dict[tuple[int, int], list[Place]] = {}
    numbers = set[int]()
    for index, (old, new) in enumerate(zip(known_keys, keys, strict=True)):
        if old == new:
            continue
        if _is_int(new) and (old is int or _is_int(old)):
            numbers.add(index)
            continue
        if not (isinstance(old, TensorKey) and isinstance(new, TensorKey) and not new.keeps_sizes):
            return None
        if old[2:] != new[2:] or len(old.shape) != len(new.shape):
            return None
        for dim, (before, now) in enumerate(zip(old.shape, new.shape, strict=True)):
            if (isinstance(before, Size) or before != now) and (index, dim) not in fixed:
                parts = call.num_parts(index, dim)
                groups.setdefault((before // parts, _of_part(now, parts)), []).append((index, dim))
    if not (groups or numbers) or any(now < SMALLEST for _, now in groups):
        return None
    paths = call.paths()
    named = {place: _name(paths, places[0]) for places in groups.values() for place in places}
    rows = []
    for index, key in enumerate(keys):
        row = [named.get((index, dim)) for dim in range(len(key.shape))] if isinstance(key, TensorKey) else []
        rows.append(tuple(row) if any(row) else ())
    return Varying(tuple(rows), frozenset(numbers))


def _of_part(size: int, parts: int) -> int:
    """The size of each of so many parts; 0 if they are not equal."""
    return 0 if size % parts else size // parts


def _is_int(key: object) -> bool:
    """True for what describes an int that stays the same; bools, and ints of other classes, always stay."""
    return type(key) is tuple and key[0] is int


def _name(paths: Sequence[str], place: Place) -> str:
    leaf, dim = place
    return f"{re.sub(r'[^0-9A-Za-z]+', '_', paths[leaf]).strip('_')}_{dim}"


def has_gaps(key: TensorKey) -> bool:
    """True for a part of a larger tensor, as x[:, :n]: its strides, or some of them, do not follow from its sizes."""
    plain = tuple(map(int, key.shape))
    return 0 not in plain and not fills_a_block(plain, tuple(map(int, key.stride)))


def _strides(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...] | None:
    """The strides by names, of what has no gap; numbers beside the gaps of a part, as x[:, :n]; None if neither is known."""
    plain = tuple(map(int, shape))
    if tuple(stride) == contiguous_stride(plain):
        return contiguous_stride(shape)
    if len(shape) == 4 and tuple(stride) == Layout.channels_last(*plain).stride:
        # then ops on names take the other format
        is_contiguous = plain[1] == 1 or plain[2:] == (1, 1)
        return None if is_contiguous else Layout.channels_last(*shape).stride
    if 1 in plain or 0 in plain or may_overlap(plain, stride):
        return None
    found = list(stride)
    step = 1
    for dim in sorted(range(len(shape)), key=lambda dim: stride[dim]):
        found[dim] = step if stride[dim] == int(step) else stride[dim]
        step = found[dim] * shape[dim]
    return tuple(found)
