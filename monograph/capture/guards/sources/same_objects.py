"""A fake and the tensor that it stands for are one object to the code of a step.

Modules, param groups and arguments show fakes; sets, lists, keys and globals hold the real ones. Lookups find the one
by the other (they have one hash), `id()` gives the id of the real one, and `is` gets a variable that holds a real tensor
with the fake in it. A comparison by `is` that would go wrong all the same is an error.
"""

from __future__ import annotations

import dis
import weakref
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import torch

from monograph.capture.guards.sources.places import Content, Source
from monograph.capture.guards.sources.values import ABSENT
from monograph.compat.fakes import is_fake, stands_for
from monograph.errors import CaptureError
from monograph.ir.call.tree import dict_class
from monograph.user_code.lines import frame_behind, user_place


def identity(item: object, /) -> int:
    """`id` as code of the step sees it."""
    return stands_for(item) or id(item)


def in_lookup(passing: Container[str]) -> bool:
    """True if a container asks whether two tensors are equal, not an `==` in code outside of the files `passing`."""
    frame = frame_behind(passing)
    return frame is not None and dis.opname[frame.f_code.co_code[frame.f_lasti]] != "COMPARE_OP"


class RealObjects:
    """Puts real tensors in the place of fakes where a step has kept those: as keys, in sets, and parameters anywhere.

    Other state may get another value in its place, so what a step keeps of it is the value that it had.
    """

    def __init__(self, real_of: Callable[[object], torch.Tensor | None]) -> None:
        self._real_of = real_of

    def put_into(self, sources: Iterable[Source]) -> None:
        """Into the containers of these sources."""
        for source in sources:
            if isinstance(source, Content):
                self._inside(source.content)

    def instead_of(self, value: Any, depth: int = 4) -> Any:
        """A value with real parameters: another one for tensors and tuples, the same for lists and dicts."""
        if is_fake(value):
            found = self._real_of(value)
            return found if isinstance(found, torch.nn.Parameter) else value
        if depth and type(value) is tuple:
            parts = [self.instead_of(part, depth - 1) for part in value]
            return tuple(parts) if _differ(parts, value) else value
        if depth and isinstance(value, (dict, list, set, deque)):
            self._inside(value, depth - 1)
        return value

    def _inside(self, content: Any, depth: int = 0) -> None:
        if isinstance(content, dict):
            kind = dict_class(content)
            items = list(kind.items(content))
            names = [self._key(name) for name, _ in items]
            if _differ(names, [name for name, _ in items]):
                kind.clear(content)
                kind.update(content, zip(names, (value for _, value in items), strict=True))
            for name, (_, value) in zip(names, items, strict=True):
                if (new := self.instead_of(value, depth)) is not value:
                    kind.__setitem__(content, name, new)
        elif isinstance(content, set):
            items = list(set.__iter__(content))
            if _differ(names := list(map(self._key, items)), items):
                set.clear(content)
                set.update(content, names)
        else:
            for index, value in enumerate(list(content)):
                if (new := self.instead_of(value, depth)) is not value:
                    content[index] = new

    def _key(self, key: Any) -> Any:
        if type(key) is tuple:
            parts = list(map(self._key, key))
            return tuple(parts) if _differ(parts, key) else key
        found = self._real_of(key) if is_fake(key) else None
        return key if found is None else found


def _differ(new: Sequence[Any], old: Sequence[Any]) -> bool:
    return any(one is not other for one, other in zip(new, old, strict=True))


# --- `is` ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Operand:
    """How code gets at what it compares: a variable, and attributes, items or the call of a weak reference from there on."""

    kind: str  # of the first instruction
    name: Any
    steps: tuple[tuple[str, Any], ...]

    @property
    def is_variable(self) -> bool:
        """True for a variable of the function, or one that it closes over."""
        return not self.steps and self.kind in _LOCALS | _CELLS

    def value(self, frame: FrameType) -> Any:
        """What it is now; ABSENT if that cannot be known without running code of the user."""
        spaces: Sequence[Any] = (frame.f_locals,)
        if self.kind == "LOAD_GLOBAL":
            spaces = (frame.f_globals, frame.f_builtins)
        found = next((space[self.name] for space in spaces if self.name in space), ABSENT)
        for kind, name in self.steps:
            found = _STEPS[kind](found, name)
        return found


def _attribute(owner: Any, name: str) -> Any:
    """An attribute that is stored in the object itself."""
    in_class = next((base.__dict__[name] for base in type(owner).__mro__ if name in base.__dict__), None)
    if hasattr(type(in_class), "__get__") or isinstance(owner, torch.Tensor):
        return ABSENT
    return getattr(owner, name, ABSENT)


def _item(owner: Any, key: Any) -> Any:
    if type(owner) is dict:
        return owner.get(key, ABSENT)
    inside = type(owner) in (list, tuple) and type(key) is int and -len(owner) <= key < len(owner)
    return owner[key] if inside else ABSENT


def _call(owner: Any, _: Any) -> Any:
    return owner() if type(owner) is weakref.ref else ABSENT


_STEPS: dict[str, Callable[[Any, Any], Any]] = {"attribute": _attribute, "item": _item, "call": _call}
_LOCALS = frozenset({"LOAD_FAST", "LOAD_FAST_CHECK", "LOAD_FAST_BORROW"})
_CELLS = frozenset({"LOAD_DEREF", "LOAD_CLASSDEREF"})
_CONSTANTS = frozenset({"LOAD_CONST", "LOAD_SMALL_INT", "LOAD_COMMON_CONSTANT"})
_VARIABLES = _LOCALS | _CELLS | {"LOAD_NAME", "LOAD_GLOBAL"}


@dataclass(frozen=True)
class _Looks:
    """Where a code object compares by `is`, by offset: a variable and what it is compared with, and both operands."""

    loads: dict[int, list[tuple[_Operand, _Operand | None]]]
    compares: dict[int, tuple[_Operand | None, _Operand | None]]


_looks: dict[int, tuple[CodeType, _Looks]] = {}  # a cache: by id of the code, which it keeps alive


def _looks_of(code: CodeType) -> _Looks:
    found = _looks.get(id(code))
    if found is None:
        found = _looks[id(code)] = (code, _find_looks(code))
    return found[1]


def _find_looks(code: CodeType) -> _Looks:
    items = list(_single(dis.get_instructions(code)))
    looks = _Looks({}, {})
    for index, item in enumerate(items):
        if item.opname != "IS_OP":
            continue
        right, start = _operand(items, index)
        left, begin = _operand(items, start)
        constant = any(items[at - 1].opname in _CONSTANTS for at in (index, start))
        if constant or (left is None and right is None):
            continue
        for operand, at, other in ((right, start, left), (left, begin, right)):
            if operand is not None and operand.is_variable:
                looks.loads.setdefault(items[at].offset, []).insert(0, (operand, other))
        looks.compares[item.offset] = left, right
    return looks


def _single(items: Iterable[dis.Instruction]) -> Iterator[dis.Instruction]:
    """Instructions as they were before CPython 3.13, which loads two variables by one."""
    for item in items:
        if item.opname.startswith("LOAD_FAST") and isinstance(item.argval, tuple):
            for name in item.argval:
                yield item._replace(opname="LOAD_FAST", opcode=dis.opmap["LOAD_FAST"], argval=name)
        elif item.opname != "EXTENDED_ARG":
            yield item


def _operand(items: Sequence[dis.Instruction], end: int) -> tuple[_Operand | None, int]:
    """What the instructions before `end` leave on the stack, and where they begin."""
    steps: list[tuple[str, Any]] = []
    index = end - 1
    while index >= 0:
        item = items[index]
        if item.opname in _VARIABLES:
            if steps and steps[-1][0] == "call" and index and items[index - 1].opname == "PUSH_NULL":
                index -= 1
            return _Operand(item.opname, item.argval, tuple(reversed(steps))), index
        if item.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            steps.append(("attribute", item.argval))
        elif item.opname == "BINARY_SUBSCR" and items[index - 1].opname == "LOAD_CONST":
            index -= 1
            steps.append(("item", items[index].argval))
        elif item.opname == "CALL" and item.arg == 0:
            steps.append(("call", None))
        elif item.opname not in ("PRECALL", "PUSH_NULL"):
            break
        index -= 1
    return None, _begin(items, end)


def _begin(items: Sequence[dis.Instruction], end: int) -> int:
    """Where the instructions begin that leave one object more on the stack, if none of them jumps; else 0."""
    more = 0
    for index in range(end - 1, -1, -1):
        item = items[index]
        if item.opcode in dis.hasjrel or item.opcode in dis.hasjabs:
            return 0
        more += dis.stack_effect(item.opcode, item.arg if item.opcode >= dis.HAVE_ARGUMENT else None)
        if more == 1:
            return index
    return 0


def compares_objects(code: CodeType) -> bool:
    """True if code compares objects by `is`, one of them at least by its name."""
    return bool(_looks_of(code).compares)


class Comparisons:
    """Lets `is` find a fake and its real tensor to be one object: one variable has the other's for a moment."""

    def __init__(
        self,
        fakes: Mapping[int, torch.Tensor],
        note: Callable[[torch.Tensor, torch.Tensor], None],
        note_others: Callable[[Any, Any], None],
    ) -> None:
        """`fakes` are by id of the real tensor. `note(fake, real)` is called with tensors that are compared, and
        `note_others(left, right)` with all that is compared, which may be ABSENT.
        """
        self._fakes, self._note, self._note_others = fakes, note, note_others
        self._kept: dict[tuple[int, str], Any] = {}  # what variables held, by frame and name

    def look(self, frame: FrameType) -> None:
        """An instruction of code that compares by `is` is about to run."""
        looks = _looks_of(frame.f_code)
        for operand, other in looks.loads.get(frame.f_lasti, ()):
            self._kept.pop(
                (id(frame), operand.name), None
            )  # of a comparison that an error has kept from taking place
            held, wanted = operand.value(frame), None
            found = ABSENT if other is None else other.value(frame)
            if found is not ABSENT:
                wanted = found if self._are_one(held, found) or self._are_one(found, held) else None
            elif _is_real(held):
                wanted = self._fake(held)
            if wanted is not None:
                self._kept[id(frame), operand.name] = held
                frame.f_locals[operand.name] = wanted  # CPython puts it into the frame after this
        if (operands := looks.compares.get(frame.f_lasti)) is not None:
            for operand in filter(None, operands):
                if (id(frame), operand.name) in self._kept:
                    frame.f_locals[operand.name] = self._kept.pop((id(frame), operand.name))
                    return
            left, right = (ABSENT if item is None else item.value(frame) for item in operands)
            self._note_others(left, right)
            self._check(left, right, frame)

    def _fake(self, real: torch.Tensor) -> torch.Tensor | None:
        return self._fakes.get(id(real))

    def _check(self, left: Any, right: Any, frame: FrameType) -> None:
        one = self._are_one(left, right) or self._are_one(right, left)
        unseen = any(
            other is ABSENT and _is_real(item) and self._fake(item) is not None
            for item, other in ((left, right), (right, left))
        )
        if one or unseen:
            raise CaptureError(
                "build() compares by `is` a tensor that it has found in two places: a capture cannot see that",
                where=user_place(frame),
                hint="compare id(a) == id(b), or put one into a variable first",
            )

    def _are_one(self, real: Any, fake: Any) -> bool:
        if not (_is_real(real) and is_fake(fake)):
            return False
        self._note(fake, real)
        return self._fake(real) is fake


def _is_real(item: object) -> bool:
    return isinstance(item, torch.Tensor) and not is_fake(item)
