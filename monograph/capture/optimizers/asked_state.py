"""The state of an optimizer in a trace, which notes whose state the step asks for.

Eager mode makes no state for a parameter without a gradient, and a step does not ask for it. What nobody asks for is no
input of the program and not guarded.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any


class AskedState(defaultdict[Any, dict[str, Any]]):
    """State by owner, as an optimizer keeps it. Methods of `dict` itself look at it unnoted."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*(args or (dict,)))
        self.whole = False  # the step walks through all of it, or counts it
        self._asked: dict[int, Any] = {}  # alive, so that no id comes again
        self._over = False

    def was_asked_for(self, owner: Any) -> bool:
        """True if the step has looked for the state of this owner."""
        return self.whole or id(owner) in self._asked

    def asked(self) -> list[Any]:
        """The owners whose state the step has looked for, one by one."""
        return list(self._asked.values())

    def close(self) -> None:
        """The step is over: who looks from now on is not noted."""
        self._over = True

    def _note(self, owner: Any) -> None:
        if not self._over:
            self._asked[id(owner)] = owner

    def _note_all(self) -> None:
        self.whole |= not self._over

    def __getitem__(self, owner: Any) -> dict[str, Any]:
        self._note(owner)
        return super().__getitem__(owner)

    def __setitem__(self, owner: Any, entries: dict[str, Any]) -> None:
        self._note(owner)
        super().__setitem__(owner, entries)

    def __delitem__(self, owner: Any) -> None:
        self._note(owner)
        super().__delitem__(owner)

    def __contains__(self, owner: object) -> bool:
        self._note(owner)
        return super().__contains__(owner)

    def get(self, owner: Any, default: Any = None) -> Any:
        self._note(owner)
        return super().get(owner, default)

    def setdefault(self, owner: Any, default: Any = None) -> Any:
        self._note(owner)
        return super().setdefault(owner, default)

    def pop(self, owner: Any, *default: Any) -> Any:
        self._note(owner)
        return super().pop(owner, *default)

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
