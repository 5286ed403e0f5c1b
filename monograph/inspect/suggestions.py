"""What somebody may have meant by a name that there is not."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from difflib import get_close_matches

from monograph.errors import DefinitionError, shown

_SUGGESTED = 5
_LISTED = 20  # modules, where none is near


def nearest(name: str, known: Collection[str]) -> list[str]:
    """Names that have this one in them, and those that are spelt much like it."""
    inside = sorted(item for item in known if name in item)
    return list(dict.fromkeys([*inside, *get_close_matches(name, known, _SUGGESTED)]))[:_SUGGESTED]


def no_ops_in(module: str, known: Collection[str]) -> DefinitionError:
    """The error for a module that is asked for and has no ops; `known` are the modules of all ops."""
    known = {path for item in known for path in _with_those_around(item)}
    near = nearest(module, known) or sorted(known)[:_LISTED]
    return DefinitionError(
        f"no op belongs to the module {shown(module)}", hint=f"modules near it: {', '.join(near)}"
    )


def _with_those_around(module: str) -> Iterator[str]:
    """A module, and those that it is in."""
    while module:
        yield module
        module = module.rpartition(".")[0]
