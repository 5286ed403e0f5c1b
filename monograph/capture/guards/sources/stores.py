"""Which lines of the user's give an attribute or a global its value, among the functions that a step has called."""

from __future__ import annotations

import dis
from collections.abc import Iterable, Iterator
from types import CodeType

from monograph.capture.guards.sources.places import Function, Source
from monograph.user_code.files import is_user_file
from monograph.user_code.lines import Origin

_STORES = frozenset({"STORE_ATTR", "STORE_GLOBAL", "STORE_NAME"})


def lines_that_store(sources: Iterable[Source], name: str) -> list[Origin]:
    """The lines in code of the user's, among these sources, that store under a name."""
    found: dict[Origin, None] = {}
    for source in sources:
        if isinstance(source, Function):
            for code in _codes(source.function.__code__):
                if is_user_file(code.co_filename):
                    found |= {Origin(code.co_filename, line): None for line in _stores(code, name)}
    return list(found)


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for item in code.co_consts:
        if isinstance(item, CodeType):
            yield from _codes(item)


def _stores(code: CodeType, name: str) -> Iterator[int]:
    if name not in code.co_names:
        return
    for item in dis.get_instructions(code):
        if item.opname in _STORES and item.argval == name and item.positions is not None:
            yield item.positions.lineno or code.co_firstlineno
