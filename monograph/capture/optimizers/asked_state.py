"""The state of an optimizer in a trace, which notes whose state the step asks for.

Eager mode makes no state for a parameter without a gradient, and a step does not ask for it. What nobody asks for is no
input of the program and not guarded. State that the step itself makes comes with the step of the optimizer: code before
it finds none, as in eager mode.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any


class AskedState(defaultdict[Any, dict[str, Any]]):
    """State by owner, as an optimizer keeps it. Methods of `dict` itself look at it unnoted."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*(args or (dict,)))
        self.whole = False  # the step walks through all of it, or counts it
        self._asked: dict[int, Any] = {}  # alive, so that no id comes again
        self._over = False
        self.is_asked_early = False  # for what is not there yet
        self._later: dict[Any, dict[str, Any]] = {}
        self._fake: Callable[[Any], Any] = lambda owner: owner

    def begin(self, later: Mapping[Any, dict[str, Any]], fake: Callable[[Any], Any]) -> None:
        """Hold back what comes with the optimizer's own step. `fake` gives the key for a parameter."""
        self._later, self._fake = dict(later), fake

    def come(self) -> None:
        """The optimizer steps: all is there."""
        for owner, entries in self._later.items():
            if not dict.get(self, owner):
                dict.__setitem__(self, owner, entries)
        self._later = {}

    def was_asked_for(self, owner: Any) -> bool:
        """True if the step has looked for the state of this owner."""
        return self.whole or id(owner) in self._asked

    def asked(self) -> list[Any]:
        """The owners whose state the step has looked for, one by one."""
        return list(self._asked.values())

    def close(self) -> None:
        """The step is over: who looks from now on is not noted."""
        self.come()
        self._over = True

    def _note(self, owner: Any) -> Any:
        """The key for an owner, whose state is asked for."""
        owner = self._fake(owner)
        if not self._over:
            self.is_asked_early |= any(owner is item for item in self._later)
            self._asked[id(owner)] = owner
        return owner

    def _note_all(self) -> None:
        if not self._over:
            self.is_asked_early |= bool(self._later)
            self.whole = True

    def __getitem__(self, owner: Any) -> dict[str, Any]:
        return super().__getitem__(self._note(owner))

    def __setitem__(self, owner: Any, entries: dict[str, Any]) -> None:
        super().__setitem__(self._note(owner), entries)

    def __delitem__(self, owner: Any) -> None:
        super().__delitem__(self._note(owner))

    def __contains__(self, owner: object) -> bool:
        return super().__contains__(self._note(owner))

    def get(self, owner: Any, default: Any = None) -> Any:
        return super().get(self._note(owner), default)

    def setdefault(self, owner: Any, default: Any = None) -> Any:
        return super().setdefault(self._note(owner), default)

    def pop(self, owner: Any, *default: Any) -> Any:
        return super().pop(self._note(owner), *default)

    def __iter__(self) -> Iterator[Any]:
        self._note_all()
        return super().__iter__()

    def __len__(self) -> int:
        self._note_all()
        return super().__len__()


def _walking(name: str) -> Any:
    method = getattr(defaultdict, name)

    def walk(self: AskedState, *args: Any) -> Any:
        self._note_all()
        return method(self, *args)

    return walk


for _name in (
    *("keys", "values", "items", "copy", "popitem", "clear", "update"),
    *(
        "__eq__",
        "__ne__",
        "__or__",
        "__ror__",
        "__ior__",
        "__reversed__",
        "__repr__",
        "__reduce__",
        "__copy__",
    ),
):
    setattr(AskedState, _name, _walking(_name))
