"""The names in a piece of Python code: what it can look up in objects, globals and modules, by name."""

from __future__ import annotations

import builtins
import dis
import operator
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from string import Formatter
from types import CodeType
from typing import Any

from monograph.user_code.lines import Origin

_LOOKS_BY_NAME = {"getattr", "hasattr"}  # their second argument is the name
# what looks for attributes under names that are made at run time, or at all attributes of an object
_COMPUTES = {
    "vars", "dir", "setattr", "delattr", "globals", "locals", "eval", "exec", "attrgetter", "methodcaller",
    "__getattribute__", "__getattr__", "__reduce__", "__reduce_ex__", "__getstate__", "dumps", "dump",
    "get_referents", "get_referrers", "get_objects",
}  # fmt: skip
# what makes texts of objects, by functions of theirs that C code may be
_MAKES_TEXTS = {"repr", "str", "ascii", "format", "print", "__repr__", "__str__", "__format__"}
_BUILTINS = {"builtins", "__builtins__"}
_LOADS = {"LOAD_FAST", "LOAD_FAST_BORROW"}
_BY_KEY = {"get", "pop", "setdefault"}
# the same as objects, for code that knows them under other names
_COMPUTING = frozenset(
    map(
        id,
        (
            getattr, hasattr, vars, dir, setattr, delattr, globals, locals, eval, exec,
            operator.attrgetter, operator.methodcaller, object.__getattribute__,
        ),
    )
)  # fmt: skip


@dataclass(frozen=True)
class CodeNames:
    """What a code object names. `computed` if it may look for attributes under names that no constant spells.

    `whole` if it may make a text of an object, or compare two objects: C code does that without any name.
    `handed_on` are arguments that it looks for as they are given, `getattr(item, name)`: their values are names.
    `asked` are the texts that it does look for: `getattr(item, "depth")`, a pattern `Model(depth=depth)`.
    """

    attributes: frozenset[str]
    stored: frozenset[str]  # attributes that it gives values
    globals: frozenset[str]
    imports: frozenset[str]
    keys: frozenset[str]  # of `__dict__`, where they are spelled out
    spelled_by: frozenset[str]  # globals whose texts are names of attributes: `getattr(cls, _FIELDS)`
    computed: bool
    whole: bool
    handed_on: frozenset[str]
    asked: frozenset[str]

    def may_look_for(self, name: str, constant: Any) -> bool:
        """True if a constant of the code, which no code takes for a name that is made up, lets it look for an attribute."""
        if self.computed:
            return name in str(constant)  # a text may spell it in many ways
        return name in self.asked or any(name in attributes_in_format(text) for text in _texts(constant))


_known: dict[int, tuple[CodeType, CodeNames]] = {}  # a cache: by id of the code, which it keeps alive


def names_of(code: CodeType) -> CodeNames:
    """The names in a code object, without those of the functions that are defined in it."""
    found = _known.get(id(code))
    if found is None:
        found = _known[id(code)] = (code, _names_of(code))
    return found[1]


def looks_by_name(value: object, name: object) -> bool:
    """True for `getattr` and the like under another `name`: code that calls it by that looks for names that it does not spell."""
    return id(value) in _COMPUTING and not (type(name) is str and name in _COMPUTES)


def is_computing(name: str, value: object) -> bool:
    """True if `value` looks for attributes by computed names, and its `name` does not say so."""
    return id(value) in _COMPUTING and getattr(builtins, name, None) is not value and name not in _COMPUTES


def _names_of(code: CodeType) -> CodeNames:
    instructions = list(dis.get_instructions(code))
    attributes: set[str] = set()
    named: set[str] = set()
    imports: set[str] = set()
    stored: set[str] = set()
    keys: set[str] = set()
    spelled_by: set[str] = set()
    asked: set[str] = set()
    computed = whole = False
    kept, handed_on = _kept_arguments(code, instructions), set[str]()
    for index, item in enumerate(instructions):
        operation, name = item.opname, item.argval
        whole |= operation.startswith("FORMAT_") or (isinstance(name, str) and name in _MAKES_TEXTS)
        if operation == "CONTAINS_OP" or (operation == "COMPARE_OP" and name in ("==", "!=")):
            whole |= instructions[index - 1].opname != "LOAD_CONST"
        if operation in ("LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_NAME"):
            named.add(name)
            if name in _LOOKS_BY_NAME:
                second = _second_argument(instructions, index, kept)
                if second is not None and second.opname in _LOADS:
                    handed_on.add(second.argval)
                elif second is not None and second.opname == "LOAD_GLOBAL":
                    spelled_by.add(second.argval)
                elif second is not None:
                    asked.add(second.argval)
                computed |= second is None
            computed |= name in _COMPUTES or name in _BUILTINS
        elif operation in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR", "IMPORT_FROM", "DELETE_ATTR"):
            attributes.add(name)
            given = _asked_of(kept, instructions[index + 1 :]) if name == "__getattr__" else ""
            handed_on.update((given,) if given else ())
            computed |= name in _COMPUTES and name != "eval" and not given  # eval() sets a mode of modules
            if name == "__dict__":
                key = _constant_key(instructions, index)
                keys.update(() if key is None else (key,))
                computed |= key is None
        elif operation == "STORE_ATTR":
            stored.add(name)
        elif operation == "IMPORT_NAME":
            imports.add(name)
            attributes.update(name.split("."))
            computed |= name in _BUILTINS
        elif operation == "MATCH_CLASS":
            computed |= bool(item.arg)  # patterns by position: the names are in __match_args__
            asked.update(_texts(instructions[index - 1].argval))
        elif operation in ("LOAD_CONST", "RETURN_CONST"):
            attributes.update(_spelled(name))
            computed |= name == "__dict__"  # `vars(cls)["__dict__"]` gives all attributes of an object
    return CodeNames(
        frozenset(attributes),
        frozenset(stored),
        frozenset(named),
        frozenset(imports),
        frozenset(keys),
        frozenset(spelled_by),
        computed,
        whole,
        frozenset(handed_on),
        frozenset(asked),
    )


def _kept_arguments(code: CodeType, instructions: Sequence[dis.Instruction]) -> frozenset[str]:
    """The arguments of a function that keep their values; none where it compares objects by `is`, which is watched otherwise."""
    behind = pairwise(instructions)
    if any(item.opname == "IS_OP" and last.opname != "LOAD_CONST" for last, item in behind):
        return frozenset()
    changes = ("STORE", "DELETE", "MAKE_CELL")
    changed = {item.argval for item in instructions if item.opname.startswith(changes)}
    return frozenset(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]) - changed


def _asked_of(kept: frozenset[str], following: Sequence[dis.Instruction]) -> str:
    """The argument with which these instructions call a method, alone or after another variable; empty if they do not."""
    found = [item for item in following[:5] if item.opname not in ("PUSH_NULL", "PRECALL", "CACHE")]
    call = next((at for at, item in enumerate(found) if item.opname == "CALL"), 0)
    loads = found[:call]
    fits = 1 <= len(loads) <= 2 and all(item.opname in _LOADS for item in loads)
    return str(loads[-1].argval) if fits and loads[-1].argval in kept else ""


def _spelled(constant: Any) -> Iterator[str]:
    """The names that a constant may spell: `"depth"`, `("depth", "width")`, `"{0.depth}"`."""
    for text in _texts(constant):
        if text.isidentifier():
            yield text
        elif "{" in text or "." in text:
            yield from filter(str.isidentifier, text.split("."))
            for field in _fields(text):
                yield from filter(str.isidentifier, field.replace("[", ".").replace("]", "").split("."))


def _texts(constant: Any) -> Iterator[str]:
    """The texts in a constant: itself, or those in a tuple or a set."""
    if isinstance(constant, str):
        yield constant
    elif isinstance(constant, (tuple, frozenset)):
        for item in constant:
            yield from _texts(item)


def attributes_in_format(text: str) -> Iterator[str]:
    """The attributes that `format` looks for: `"{0.depth}"`."""
    for field in _fields(text):
        yield from re.findall(r"\.([^\W\d]\w*)", field)


def _fields(text: str) -> Iterator[str]:
    """What stands in the braces of a text, and in braces inside of those; nothing if it is no format."""
    try:
        found = [(field, inner) for _, field, inner, _ in Formatter().parse(text) if field is not None]
    except ValueError:
        return
    for field, inner in found:
        yield field
        yield from _fields(inner or "")


def _constant_key(instructions: Sequence[dis.Instruction], index: int) -> str | None:
    """The key with which `__dict__`, loaded at `index`, is used; None if it is not spelled out."""
    following = [item for item in instructions[index + 1 : index + 4] if item.opname != "PUSH_NULL"]
    if len(following) < 2:
        return None
    first, second = following[:2]
    if first.opname == "CONTAINS_OP":
        key = instructions[index - 2]
    elif first.opname in ("LOAD_METHOD", "LOAD_ATTR") and first.argval in _BY_KEY:
        key = second
    elif second.opname in ("BINARY_SUBSCR", "STORE_SUBSCR", "DELETE_SUBSCR"):
        key = first
    else:
        return None
    return str(key.argval) if _is_text(key) else None


def _second_argument(
    instructions: Sequence[dis.Instruction], index: int, kept: frozenset[str]
) -> dis.Instruction | None:
    """What loads the second argument of the function at `index`: a text, a global or what is handed on; else None."""
    depth = 0
    named: dis.Instruction | None = None
    for item in instructions[index + 1 :]:
        if item.opname in ("PRECALL", "CALL") and depth == item.arg:
            return named if depth in (2, 3) else None
        if item.opcode in dis.hasjrel or item.opcode in dis.hasjabs:
            return None
        before, depth = depth, depth + dis.stack_effect(item.opcode, item.arg, jump=False)
        if depth < 1 or (named is not None and depth <= 2):  # something else is made of the name
            return None
        if before == 1 and depth == 2:
            is_handed_on = item.opname in _LOADS and item.argval in kept
            named = item if _is_text(item) or item.opname == "LOAD_GLOBAL" or is_handed_on else None
    return None


def _is_text(item: dis.Instruction) -> bool:
    return item.opname == "LOAD_CONST" and isinstance(item.argval, str)


def line_naming(codes: Iterable[CodeType], label: str) -> Origin | None:
    """The line that gives a value to what `label` ends with, an attribute or a variable; else the last that names it."""
    names = re.findall(r"[^\W\d]\w*", re.sub(r"\[[^]]*\]", "", label))
    found: Origin | None = None
    for code in codes:
        for item in dis.get_instructions(code):
            if names and item.argval == names[-1] and item.positions and item.positions.lineno:
                found = Origin(code.co_filename, item.positions.lineno)
                if item.opname.startswith("STORE_"):
                    return found
    return found
