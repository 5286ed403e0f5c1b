"""Why a build is needed: a sentence that knows its cause, and what to write against it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from enum import Enum, auto
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, Final, Self, TypeAlias

import torch

OF_GROUP: Final = re.compile(r"(optimizer\.\w+)/group(\d+)/(\w+)")  # the path of a hyperparameter
_OF_PARAMETER: Final = re.compile(r"(?<=optimizer\.)\d+/[^\s()]+(?= as updated)")  # of the state of one
FIXED: Final = re.compile(r"(.+) = (\S+)$")  # the condition that a number which could move stays what it is
_NAMED: Final = 3
_OF_OPTIMIZER: Final = re.compile(r"optimizer\.\w+/\S+ is (?:gone|new)$|the order of param groups")
_OF_STATE: Final = re.compile(r"(?:storage of )?(\S+) (?:was|is) (?:replaced|gone|new)|is another tensor")


class Cause(Enum):
    """What a build is needed for."""

    FIRST = auto()
    SIZE = auto()  # of an argument
    FORM = auto()  # of an argument: dtype, device, strides, number of dimensions
    NUMBER_GIVEN = auto()  # an int among the arguments
    CONSTANT_GIVEN = auto()  # a bool, a text or the like among the arguments
    STRUCTURE = auto()  # of the arguments: one is left out, a dict has other keys
    IDENTITY = auto()  # two arguments are one tensor
    NUMBER = auto()  # in an object of Python: an attribute, a global, an entry
    VALUE = auto()  # anything else there
    HYPERPARAMETER = auto()  # of an optimizer
    COUNTED = auto()  # an optimizer that goes another way after some steps
    TRAINING = auto()  # the mode of a module
    TORCH_MODE = auto()
    SETTING = auto()
    MEMBER = auto()  # a module or an optimizer of the graph
    STATE = auto()  # a tensor in the place of another
    OPTIMIZER = auto()  # its state or its param groups are there, or gone
    STATE_FORM = auto()  # dtype, shape, requires_grad of a tensor of the state
    HOOK = auto()
    READ = auto()  # the value of a tensor
    BRANCH = auto()  # on numbers that move
    FIXED = auto()  # a number that code needs itself: an index, a range, a text
    ONCE = auto()  # what no replay would do
    OFTEN = auto()  # a size comes often: a build for it alone
    ROOM = auto()  # its build was dropped, for others
    OTHER = auto()


FUNCTIONS: Final = (FunctionType, MethodType, BuiltinFunctionType, partial)
_KINDS: Final[tuple[tuple[str, tuple[type, ...]], ...]] = (
    ("None", (type(None),)),
    ("bool", (bool,)),
    ("number", (int, float, complex)),
    ("text", (str, bytes)),
    ("function", FUNCTIONS),
    ("tensor", (torch.Tensor,)),
    ("option", (torch.dtype, torch.device, torch.layout, torch.memory_format)),
)


def kind_of_change(before: Any, now: Any) -> str:
    """What kind of value has become another one, as the advice knows it: "None" if one is none, "kinds" if they differ."""
    kinds = [
        next((name for name, classes in _KINDS if issubclass(type(item), classes)), "object")
        for item in (before, now)
    ]
    return "None" if "None" in kinds else kinds[0] if kinds[0] == kinds[1] else "kinds"


Sizes: TypeAlias = tuple[tuple[str, tuple[int, ...]], ...]  # arguments of other sizes, and their dimensions
_OF_MANY: Final = (Cause.TRAINING, Cause.HOOK)


class Reason(str):
    """The sentence. `place` is what it is about, `what` of it differs; `advice` is a line to write against such builds.

    `others` are those that it was joined of, but for the first.
    """

    __slots__ = ("advice", "cause", "others", "place", "sizes", "what")

    def __new__(
        cls,
        text: str,
        cause: Cause = Cause.OTHER,
        place: str = "",
        *,
        what: str = "",
        sizes: Sizes = (),
        advice: str = "",
        others: tuple[Reason, ...] = (),
    ) -> Self:
        made = super().__new__(cls, text)
        made.cause, made.place, made.what, made.sizes, made.advice = cause, place, what, sizes, advice
        made.others = others
        return made

    cause: Cause
    place: str
    what: str
    sizes: Sizes
    advice: str
    others: tuple[Reason, ...]

    @property
    def dims(self) -> tuple[int, ...]:
        """The dimensions of other sizes of the argument that it is about."""
        return next((dims for path, dims in self.sizes if path == self.place), ())

    def after(self, text: str) -> Reason:
        """The same with more before it."""
        return self._with(f"{text}{self}")

    def followed_by(self, text: str) -> Reason:
        """The same with more at its end."""
        return self._with(f"{self}{text}")

    def advised(self, advice: str) -> Reason:
        """The same with what to write against it."""
        return self._with(self, advice=advice)

    def joined_of(self, others: tuple[Reason, ...]) -> Reason:
        """The same, as one of several reasons for a build."""
        return self._with(self, others=others)

    def led_by(self, reason: Reason) -> Reason:
        """The same sentence, about what another one is about that it was joined of."""
        others = tuple(item for item in (self, *self.others) if item is not reason)
        return Reason(self, reason.cause, reason.place, what=reason.what, sizes=self.sizes, others=others)

    def _with(
        self, text: str, *, advice: str | None = None, others: tuple[Reason, ...] | None = None
    ) -> Reason:
        return Reason(
            text,
            self.cause,
            self.place,
            what=self.what,
            sizes=self.sizes,
            advice=self.advice if advice is None else advice,
            others=self.others if others is None else others,
        )


def joined(reasons: Iterable[Reason], worded: Callable[[Reason], Reason] | None = None) -> Reason | None:
    """Several reasons for one build as one: the first, whose cause it has, and two more, each place once; None if there are none.

    `worded` may change the text of those that are named.
    """
    found: list[Reason] = []
    others, unnamed = set[object](), list[Reason]()  # which are counted
    for reason in reasons:
        if any(_says(known, reason) for known in found):
            continue
        if len(found) < _NAMED and not any(_is_like(known, reason) for known in found):
            found.append(reason)
        else:
            unnamed.append(reason)
            others.add(reason.cause if reason.cause in _OF_MANY else reason.place or str(reason))
    if not found:
        return None
    rest = (*found[1:], *unnamed)
    found = list(map(worded, found)) if worded is not None else found
    more = [*found[1:], *([f"and {len(others)} more"] if others else [])]
    return found[0].followed_by("".join(f"; {text}" for text in more)).joined_of(rest) if more else found[0]


def _says(known: Reason, reason: Reason) -> bool:
    """True if a reason says what another one has said: about the same place or a part of it, or of a mode for all modules."""
    if reason.cause in _OF_MANY and reason.cause is known.cause:
        return True
    inside = bool(known.place) and (
        reason.place == known.place or reason.place.startswith((f"{known.place}.", f"{known.place}["))
    )
    return inside or str(reason) == str(known)


def _is_like(known: Reason, reason: Reason) -> bool:
    """True for a branch that an optimizer has for each parameter, of another parameter."""
    one, other = (_OF_PARAMETER.subn("", text) for text in (known, reason))
    return known.startswith("the branch ") and one == other and one[1] > 0


def caused(text: str | None, cause: Cause, place: str = "") -> Reason | None:
    """A sentence with its cause, unless it has one; None if there is none."""
    if text is None or isinstance(text, Reason):
        return text
    return Reason(text, cause, place)


def of_owned(text: str) -> Reason:
    """A sentence about what the graph owns: state, and the numbers of its optimizers."""
    if isinstance(text, Reason):
        return text
    if found := OF_GROUP.search(text):
        return Reason(text, Cause.HYPERPARAMETER, found[0])
    if "hook" in text:
        return Reason(text, Cause.HOOK)
    if _OF_OPTIMIZER.match(text):
        return Reason(text, Cause.OPTIMIZER)
    return Reason(text, Cause.STATE if _OF_STATE.search(text) else Cause.STATE_FORM)
