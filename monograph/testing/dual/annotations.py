"""Which type a callee wants at which place: from annotations, or from the schema of an operator."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from torch import nn

from monograph.compat.ops import operator_schemas

UNKNOWN: Final = object()


@dataclass(frozen=True)
class Types:
    """The types of the parameters of a callee, by place and by name."""

    in_order: tuple[Any, ...]
    by_name: Mapping[str, Any]

    def at(self, place: int | str) -> Any:
        """The type at a position or of a keyword, or UNKNOWN."""
        if isinstance(place, str):
            return self.by_name.get(place, UNKNOWN)
        return self.in_order[place] if place < len(self.in_order) else UNKNOWN


def types_of(target: Callable[..., Any], num_args: int, names: Sequence[str]) -> Types:
    """The types for a call with so many positional arguments and these keywords."""
    try:
        return _annotated(target)
    except (TypeError, ValueError):  # a builtin has no signature
        return _of_schema(target, num_args, names)


def _annotated(target: Any) -> Types:
    parameters = inspect.signature(target).parameters.values()
    if inspect.isclass(target):
        source = target.__init__
    else:
        source = target.forward if isinstance(target, nn.Module) else target
    try:
        hints = typing.get_type_hints(source)
    except (NameError, TypeError):  # a name that exists only for type checkers
        hints = {}
    if not hints:
        raise TypeError("no annotations")
    order = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return Types(tuple(hints.get(name, UNKNOWN) for name in order), hints)


def _of_schema(target: Any, num_args: int, names: Sequence[str]) -> Types:
    """Those of the first overload that takes so many arguments of such names."""
    for arguments in operator_schemas(getattr(target, "__name__", "")):
        by_name = {name: _PLAIN.get(kind, UNKNOWN) for name, kind, _ in arguments}
        positional = [name for name, _, keyword_only in arguments if not keyword_only]
        if num_args <= len(positional) and all(name in by_name for name in names):
            kinds = tuple(by_name[name] for name in positional)
            if any(kind is not UNKNOWN for kind in (*kinds[:num_args], *(by_name[name] for name in names))):
                return Types(kinds, by_name)
    return Types((), {})


# the types of operator schemas that a value can be drawn for
_NUMBERS: Final = {"int": int, "float": float, "bool": bool, "number": float, "Scalar": float, "SymInt": int}
_PLAIN: Final[Mapping[str, Any]] = MappingProxyType(
    {
        **_NUMBERS,
        **{f"Optional[{name}]": kind for name, kind in _NUMBERS.items()},
        **dict.fromkeys(("List[int]", "Optional[List[int]]"), int | tuple[int, ...]),
        "List[float]": tuple[float, ...],
    }
)
