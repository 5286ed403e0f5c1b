"""What forms say without being read: where the sizes of a range stand, and how a program is described to people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from monograph.checkpoint.leaves import Json, check, list_of
from monograph.sizes.place import SizePlace

ANY_SIZE: Final = (
    1 << 24
)  # nothing is larger in a batch, and products of three still are numbers that a file may have
_MAX_DEPTH: Final = 200


def size_places(arguments: Json, num_dims: int) -> list[SizePlace]:
    """For each dim the first leaf and dimension of an argument that has its size, once or several times; (-1, 0) if none does."""
    shapes = [shape for row in _rows(arguments) for shape in _shapes_in(row)]
    places: dict[int, SizePlace] = {}
    for index, shape in reversed(list(enumerate(shapes))):
        for axis, size in reversed(list(enumerate(shape))):
            match size:
                case {"$size": ["sizes", int() as dim]}:
                    places[dim] = SizePlace(index, axis)
                case {"$size": ["*", int() as parts, ["sizes", int() as dim]]} if parts > 1:
                    places[dim] = SizePlace(index, axis, parts)
    return [places.get(dim, SizePlace(-1, 0)) for dim in range(num_dims)]


def sizes_text(arguments: Json, names: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """For each leaf of the arguments its sizes for people."""
    shapes = [shape for row in _rows(arguments) for shape in _shapes_in(row)]
    return tuple(tuple(_size_text(size, names) for size in shape) for shape in shapes)


def described(row: Json, dims: Sequence[tuple[str, int, int]]) -> str:
    """The arguments and results of a stored program for people, sizes by their names."""
    names = [name for name, _, _ in dims]
    arguments = [f"{name}: {_text(form, names)}" for name, form in _rows(row["arguments"])]
    ranges = "".join(f", {range_text(*dim)}" for dim in dims)
    return f"({', '.join(arguments)}) -> {_text(row['results'], names)}{ranges}"


def range_text(name: str, low: int, high: int) -> str:
    """A range of sizes for people."""
    return f"{name} from {low}" + (f" to {high}" if high < ANY_SIZE else "")


def _rows(arguments: Json) -> list[Json]:
    fits = type(arguments) is dict and tuple(arguments) == ("positional", "named")
    check(fits, "the arguments of a program are not described")
    return [list_of(row, 2) for rows in arguments.values() for row in list_of(rows)]


def _shapes_in(value: Json, depth: int = _MAX_DEPTH) -> Iterator[list[Json]]:
    """The shape of each leaf in order; leaves that are no tensors have none."""
    check(depth > 0, "a form is nested too deep")
    if type(value) is list:
        for item in value:
            yield from _shapes_in(item, depth - 1)
    elif type(value) is dict and ("tensor" in value or "number" in value or "value" in value):
        yield list_of(value.get("shape", []))
    elif type(value) is dict:
        for item in value.values():
            yield from _shapes_in(item, depth - 1)


def _text(value: Json, names: Sequence[str]) -> str:
    """A form for people."""
    match value:
        case {"tensor": dtype, "shape": shape, "device": device}:
            on = "" if device == "cpu" else f" on {device}"
            return f"{dtype}[{', '.join(_size_text(size, names) for size in shape)}]{on}"
        case {"number": str(kind)}:
            return kind
        case {"value": held}:
            return repr(held)
        case {"namedtuple": [name, fields, children]}:
            pairs = zip(fields, children, strict=False)
            return f"{name}({', '.join(f'{key}={_text(item, names)}' for key, item in pairs)})"
        case {"torch": [name, children]}:
            return f"{name}({', '.join(_text(item, names) for item in children)})"
        case {"tuple": items}:
            return f"({', '.join(_text(item, names) for item in items)})"
        case {"list": items}:
            return f"[{', '.join(_text(item, names) for item in items)}]"
        case dict() if len(value) == 1:
            ((_, pairs),) = value.items()
            return f"{{{', '.join(f'{key}: {_text(item, names)}' for key, item in pairs)}}}"
    return "?"


def _size_text(size: Json, names: Sequence[str]) -> str:
    match size:
        case {"$size": expression}:
            return _expression_text(expression, names)
    return str(size)


def _expression_text(value: Json, names: Sequence[str]) -> str:
    match value:
        case ["sizes", int() as index] if 0 <= index < len(names):
            return names[index]
        case [str() as sign, left, right]:
            return f"({_expression_text(left, names)} {sign} {_expression_text(right, names)})"
    return str(value)
