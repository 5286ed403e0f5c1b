"""Is a list only added to? That follows from the code that ran.

A list can be got at through the places that hold it. If the one place is an attribute of an object that was watched, it is
known which instructions have read it, and each must do one thing with what it finds there: call its `append` or `extend`,
by way of a variable or not, or ask if it is None.
Elsewhere that must hold for each piece of code that ran and spells the name of the attribute, of the global or of the
variable of a closure. A text may spell a name only for code that looks for attributes by texts. If the list is an entry of a
dict or list, and that one perhaps of another, all of this holds for the name of the outermost one, of which code must take one
entry after the other and add to the last, or use another entry.
"""

from __future__ import annotations

import dis
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import CodeType
from typing import Any, Final, NamedTuple, TypeAlias

from monograph.capture.guards.sources.code_names import CodeNames, names_of
from monograph.capture.guards.sources.places import Closure, Content, Entries
from monograph.capture.guards.sources.reach.reach import Reach
from monograph.capture.guards.sources.reads import Reads
from monograph.user_code.lines import Origin

HOLDERS: Final = (dict, defaultdict, list)  # of lists
_KEYS = frozenset({"LOAD_CONST", "LOAD_FAST", "LOAD_DEREF", "LOAD_GLOBAL"})
# what computes a key from what is loaded for it, and takes nothing that was loaded before
_OF_KEYS = (
    "LOAD_CONST",
    "LOAD_SMALL_INT",
    "LOAD_FAST",
    "LOAD_DEREF",
    "LOAD_GLOBAL",
    "LOAD_ATTR",
    "FORMAT_",
    "CONVERT_VALUE",
    "BUILD_STRING",
    "BUILD_TUPLE",
    "BINARY_",
)
# an operator since Python 3.14; no other takes one key and gives a list
_SUBSCRIPTS = frozenset({"BINARY_SUBSCR", "BINARY_OP"})
_ADDING = frozenset({"append", "extend"})
# since Python 3.12, which has the name of the old instruction, and never writes it
_METHOD_IS_A_FLAG = "LOAD_METHOD" not in {
    item.opname for item in dis.get_instructions(compile("items.append()", "", "eval"))
}
_REACH = 24  # instructions from a dict to the method of its list: of a key that is put together, too
# what gets at the variables of functions and frames by other ways than their names
_OF_VARIABLES = frozenset({"__closure__", "cell_contents", "f_locals"})
_OF_LOCALS = frozenset({"f_locals"})  # of functions alone that are running
_OF_FRAMES = frozenset({"locals", "vars", "eval", "exec"})
# of variables and arguments, which are no attributes
_LOCAL = ("FAST", "DEREF", "CLOSURE", "CLASSDEREF", "CELL")


Path: TypeAlias = tuple[
    Any, ...
]  # the keys from what is loaded to the list; none where it is the list itself


def is_only_added_to(content: list[Any], reach: Reach, reads: Reads) -> bool:
    """True if all that the code which ran can have done with a list is to add to it."""
    return not any(True for _ in other_uses(content, reach, reads))


def other_uses(content: list[Any], reach: Reach, reads: Reads) -> Iterator[Origin | None]:
    """The lines that may do something else with a list than to add to it; None for what has no line."""
    if reach.has_iterators:
        yield None
    way = way_to(content, reach)
    source, name, path = way.source, way.key, way.path
    if isinstance(source, Closure):
        yield from _other_uses_of_variable(source, reach, path=path)
        return
    if not isinstance(source, Entries) or type(name) is not str:
        yield None
        return
    if source.whole or name in reach.keys:
        yield None
    sites = None if reach.looks_by_names else reads.sites_of(source.entries, name)
    if sites is not None:
        for code, place in sites:
            if not _adds_at(code, place, name, reach, path=path):
                yield _line(code, _at(_instructions(code), place)[0])
        if not sites:
            yield None
        return
    table = source.entries if "__builtins__" in source.entries else None  # else no global name leads there
    by_attributes = table is None or reach.knows_module(table)
    for code in reach.codes():
        is_global = table is not None and reach.may_have_globals(code, table)
        if is_global or by_attributes:
            yield from _other_uses_in(code, name, reach, _Ways(is_global, by_attributes), path=path)
    if (by_attributes and name in reach.stored) or name in reach.made_up:
        yield None


class _Ways(NamedTuple):
    """How a piece of code may get at a name: as a global of its own, as an attribute."""

    by_globals: bool
    by_attributes: bool

    def count(self, opname: str) -> bool:
        """True if such an instruction may get there."""
        if "GLOBAL" in opname or opname == "LOAD_NAME":
            return self.by_globals
        return self.by_attributes or not ("ATTR" in opname or "METHOD" in opname)


@dataclass(frozen=True)
class Way:
    """The only source and key that lead to a container, or to the outermost of the dicts and lists that it is in; then the keys."""

    source: Any
    key: Any
    path: Path
    holders: Sequence[Any]  # those dicts and lists, from the innermost on


def way_to(content: Any, reach: Reach) -> Way:
    """How a container is got at, as long as one way alone leads there."""
    source, key = _only_way(content, reach)
    path: Path = ()
    holders: list[Any] = []
    while isinstance(source, Content) and type(source.content) in HOLDERS:
        holders.append(source.content)
        items = holders[-1].items() if isinstance(holders[-1], dict) else enumerate(holders[-1])
        path = (next((key for key, entry in items if entry is content), None), *path)
        content = holders[-1]
        source, key = _only_way(content, reach)
    return Way(source, key, path, holders)


def _only_way(container: Any, reach: Reach) -> tuple[Any, Any]:
    """The source and the key that hold a container, if nothing else does."""
    ways = list(reach.ways.get(id(container), ()))
    return ways[0] if len(ways) == 1 and isinstance(ways[0], tuple) else (None, "")


def _other_uses_of_variable(source: Closure, reach: Reach, *, path: Path) -> Iterator[Origin | None]:
    """The same of a list or dict in a variable that functions share."""
    names = reach.names_of_variable(source.cell)
    if _spell(reach.codes(), _OF_VARIABLES) or not names:
        yield None
    for code in reach.codes():
        if names.isdisjoint(code.co_freevars + code.co_cellvars):
            continue
        yield from _not_to_add(code, names, path=path)
        if names_of(code).globals & _OF_FRAMES:
            yield None


def _spell(codes: Iterable[CodeType], attributes: Collection[str]) -> bool:
    """True if one of these pieces of code spells one of these attributes."""
    return any(not names_of(code).attributes.isdisjoint(attributes) for code in codes)


def _not_to_add(code: CodeType, names: Collection[str], *, path: Path) -> Iterator[Origin]:
    """Where code does not add to what is in variables of these names. It may hand them to functions inside."""
    instructions = _instructions(code)
    for at, item in enumerate(instructions):
        if "DEREF" in item.opname and item.argval in names:
            adds = _is_added_to(instructions[at + 1 : at + _REACH], path=path)
            if item.opname != "LOAD_DEREF" or not adds:
                yield _line(code, item)


def _instructions(code: CodeType) -> list[dis.Instruction]:
    return [item for item in dis.get_instructions(code) if item.opname != "CACHE"]


def _adds_at(code: CodeType, place: int, name: str, reach: Reach, *, path: Path) -> bool:
    """True if the instruction of code that runs at this place reads the attribute, and the next ones add to it."""
    instructions = _instructions(code)
    item, following = _at(instructions, place)
    if item.opname != "LOAD_ATTR" or item.argval != name or _is_called(item) or not following:
        return False
    for taken, behind in _along(following, path):
        if taken < len(path) and _uses_another(behind, path[taken]):
            return True
        if behind[0].opname == "STORE_FAST":
            is_own = not _spell(reach.own_codes(), _OF_LOCALS) and not names_of(code).globals & _OF_FRAMES
            return is_own and _only_adds_to_local(instructions, behind[0].argval, path=path[taken:])
    return _asks_for_none(following) or _is_added_to(following, path=path)


def _at(instructions: Sequence[dis.Instruction], place: int) -> tuple[dis.Instruction, list[dis.Instruction]]:
    """The instruction that runs at this place of the code, and those after it."""
    at = max(index for index, item in enumerate(instructions) if item.offset <= place)
    return instructions[at], list(instructions[at + 1 : at + _REACH])


def _line(code: CodeType, item: dis.Instruction) -> Origin:
    line = item.positions.lineno if item.positions else None
    return Origin(code.co_filename, line or code.co_firstlineno)


def _asks_for_none(following: Sequence[dis.Instruction]) -> bool:
    """True for `is None`, which looks at nothing that a list holds."""
    if following[0].opname.endswith(("_IF_NONE", "_IF_NOT_NONE")):
        return True
    names = [item.opname for item in following[:2]]
    return names == ["LOAD_CONST", "IS_OP"] and following[0].argval is None


def _only_adds_to_local(instructions: Sequence[dis.Instruction], variable: str, *, path: Path) -> bool:
    """True if code only adds to what is in a variable of its own: `kept = self.kept`."""
    for at, item in enumerate(instructions):
        found = item.argval if isinstance(item.argval, tuple) else (item.argval,)  # some instructions use two
        if "FAST" not in item.opname or variable not in found or item.opname in ("STORE_FAST", "DELETE_FAST"):
            continue
        following = list(instructions[at + 1 : at + _REACH])
        is_read = item.opname == "LOAD_FAST" and bool(following)
        if not is_read or not (_asks_for_none(following) or _is_added_to(following, path=path)):
            return False
    return True


def _other_uses_in(code: CodeType, name: str, reach: Reach, ways: _Ways, *, path: Path) -> Iterator[Origin]:
    """Where code that spells the name does something else with what it finds."""
    names = names_of(code)
    if name not in names.attributes | names.globals | names.stored | names.imports:
        return
    if reach.looks_by_names:
        names = replace(names, computed=True)
    instructions = _instructions(code)
    for at, item in enumerate(instructions):
        if ways.count(item.opname) and not _is_harmless(
            item, instructions[at + 1 : at + _REACH], name, names, path=path
        ):
            yield _line(code, item)


def _is_harmless(
    item: dis.Instruction, following: list[dis.Instruction], name: str, names: CodeNames, *, path: Path
) -> bool:
    """True if an instruction of code with these names does not look for the name, calls what it finds, or has it added to."""
    if item.opname in ("LOAD_CONST", "RETURN_CONST"):
        return not names.may_look_for(name, item.argval)
    if item.argval != name or any(kind in item.opname for kind in _LOCAL) or item.opname == "KW_NAMES":
        return True
    if _is_called(item):  # a list is not callable
        return True
    found = item.opname == "LOAD_ATTR" or (item.opname == "LOAD_GLOBAL" and not (item.arg or 0) & 1)
    return found and _is_added_to(following, path=path)


def _is_added_to(following: list[dis.Instruction], *, path: Path) -> bool:
    """True if these instructions add to the list that is at the end of a path, or leave the path."""
    for taken, behind in _along(following, path):
        if taken == len(path):
            return _is_called(behind[0]) and behind[0].argval in _ADDING
        if _uses_another(behind, path[taken]):
            return True
    return False


def _along(following: list[dis.Instruction], path: Path) -> Iterator[tuple[int, list[dis.Instruction]]]:
    """How many keys of a path have been taken, and the instructions that come then, as long as there are some."""
    for taken in range(len(path) + 1):
        if not following:
            return
        yield taken, following
        following = _behind_entry(following)


def _uses_another(following: list[dis.Instruction], key: Any) -> bool:
    """True if of the dict or list that is loaded before these instructions another entry is taken, set or added to."""
    names = [item.opname for item in following]
    if names[:1] not in (["LOAD_CONST"], ["LOAD_SMALL_INT"]) or following[0].argval == key:
        return False
    if isinstance(key, int) and (
        type(following[0].argval) is not int or following[0].argval < 0
    ):  # of a list, from its end
        return False
    if names[1:3] == ["COPY", "COPY"]:  # `d[key] += n` takes the entry, and sets it at the end
        names = names[2:]
    return len(names) > 1 and (names[1] in _SUBSCRIPTS or names[1] == "STORE_SUBSCR")


def _behind_entry(following: list[dis.Instruction]) -> list[dis.Instruction]:
    """What comes when one entry of a dict has been taken, by `[key]` or `.setdefault(key, [])`; nothing if none is."""
    if behind := _behind_key(following):
        return behind
    names = [item.opname for item in following]
    makes_it = names[1:2] and names[1] in _KEYS and names[2:3] == ["BUILD_LIST"] and following[2].arg == 0
    if makes_it and _is_called(following[0]) and following[0].argval == "setdefault":
        return [item for item in following[3:] if item.opname not in ("PRECALL", "CALL")]
    return []


def _behind_key(following: list[dis.Instruction]) -> list[dis.Instruction]:
    """What comes when a key has been computed, as by `self.name` or `f"{name}/loss"`, and its entry been taken."""
    depth = 0  # of the values that were loaded after the dict
    for at, item in enumerate(following):
        if depth == 1 and item.opname in _SUBSCRIPTS:
            return following[at + 1 :]
        if not item.opname.startswith(_OF_KEYS):
            break
        depth += dis.stack_effect(item.opcode, item.arg)
        if depth < 1:
            break
    return []


def _is_called(item: dis.Instruction) -> bool:
    """True if an attribute is loaded as a method, which is then called."""
    return item.opname == "LOAD_METHOD" or (
        _METHOD_IS_A_FLAG and item.opname == "LOAD_ATTR" and bool((item.arg or 0) & 1)
    )
