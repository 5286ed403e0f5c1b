"""Generators: values that are drawn when they are needed, once for each case, and can be computed with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from monograph.testing.dual.case import Case, case_for
from monograph.testing.dual.random_values import strategy_for

_STEPS = 60  # how finely possibilities are told apart


class Generator:
    """A random value. It is drawn at the first use in a case and stays the same to its end.

    `+`, `-`, `*` compute with the value to come, `|` chooses one of two. `to(type)` says of which type it shall be; a
    type that was given is not changed by a later one, so what the callee's annotation says counts only where the
    test says nothing.
    """

    def __init__(self, *parts: Generator) -> None:
        self._parts = parts
        self._drawn: tuple[Case, Any] | None = None

    def value(self) -> Any:
        """The value in the case that runs."""
        case = case_for(str(self))
        if self._drawn is None or self._drawn[0] is not case:
            self._drawn = (case, self.draw(case))
        return self._drawn[1]

    def draw(self, case: Case) -> Any:
        """A new value, drawn from the case."""
        raise NotImplementedError

    def to(self, annotation: Any) -> Generator:
        """Say the type of the value; it can be any annotation, such as `int` or `Union[int, Tuple[int, int]]`."""
        for part in self._parts:
            part.to(annotation)
        return self

    def size(self) -> int:
        """How many alternatives it stands for: `a | b | c` gives each the same chance."""
        return 1

    def __add__(self, other: Any) -> Generator:
        return _Sum(self, generated(other))

    def __radd__(self, other: Any) -> Generator:
        return _Sum(generated(other), self)

    def __sub__(self, other: Any) -> Generator:
        return _Sum(self, _Negative(generated(other)))

    def __rsub__(self, other: Any) -> Generator:
        return _Sum(generated(other), _Negative(self))

    def __mul__(self, other: Any) -> Generator:
        return _Product(self, generated(other))

    def __rmul__(self, other: Any) -> Generator:
        return _Product(generated(other), self)

    def __neg__(self) -> Generator:
        return _Negative(self)

    def __or__(self, other: Any) -> Generator:
        second = generated(other)
        return oneof(self, second, possibility=self.size() / (self.size() + second.size()))

    def __ror__(self, other: Any) -> Generator:
        return generated(other) | self


class Nothing:
    """The value of `nothing()`: an argument that is left out."""


def generated(item: Any) -> Generator:
    """A generator is itself; any other value becomes a constant."""
    return item if isinstance(item, Generator) else constant(item)


# the names of these classes are those that tests for OneFlow use


class constant(Generator):
    """Always the same value."""

    def __init__(self, item: Any) -> None:
        super().__init__()
        self._item = item

    def __str__(self) -> str:
        return repr(self._item)

    def draw(self, case: Case) -> Any:
        """The value."""
        return self._item


class nothing(constant):
    """Leave the argument out."""

    def __init__(self) -> None:
        super().__init__(Nothing())

    def __str__(self) -> str:
        return "nothing()"


class random(Generator):
    """A number in [low, high), or a value of another type: that of `to`, or what the callee's annotation says."""

    def __init__(self, low: Any = 1, high: Any = 6) -> None:
        self._low, self._high = generated(low), generated(high)
        super().__init__(self._low, self._high)
        self._annotation: Any = _UNSAID

    def __str__(self) -> str:
        return f"random({self._low}, {self._high})"

    def to(self, annotation: Any) -> Generator:
        """Say the type, unless it was said before."""
        if self._annotation is _UNSAID:
            self._annotation = annotation
            for bound in self._parts:
                bound.to(float if annotation in (float, complex) else int)
        return self

    def draw(self, case: Case) -> Any:
        """A value of the type."""
        if self._annotation is _UNSAID:
            raise TypeError(f"{self} needs a type here: write {self}.to(int), for example")
        bounds = (self._low.value(), self._high.value())
        return case.draw(strategy_for(self._annotation, bounds), str(self))


class oneof(Generator):
    """One of several; `possibility` is the chance of the first of two, or a chance for each."""

    def __init__(self, *choices: Any, possibility: float | Sequence[float] | None = None) -> None:
        self._choices = tuple(map(generated, choices))
        super().__init__(*self._choices)
        if isinstance(possibility, (int, float)):
            possibility = (possibility, 1 - possibility)
        self._chances = tuple(possibility or (1 / len(choices) for _ in choices))
        if len(self._chances) != len(choices):
            raise ValueError(f"{self} has {len(choices)} choices and {len(self._chances)} possibilities")

    def __str__(self) -> str:
        return f"oneof({', '.join(map(str, self._choices))})"

    def size(self) -> int:
        """As many as all its choices."""
        return sum(choice.size() for choice in self._choices)

    def draw(self, case: Case) -> Any:
        """The value of one of the choices; the others are not drawn."""
        # each choice stands in the list as often as its chance says, so drawing and shrinking need no more
        weighted = [index for index, chance in enumerate(self._chances) for _ in range(_copies(chance))]
        return self._choices[case.draw(st.sampled_from(weighted), f"choice of {self}")].value()


class _Sum(Generator):
    def __str__(self) -> str:
        return " + ".join(map(str, self._parts))

    def draw(self, case: Case) -> Any:
        return self._parts[0].value() + self._parts[1].value()


class _Product(Generator):
    def __str__(self) -> str:
        return " * ".join(f"({part})" for part in self._parts)

    def draw(self, case: Case) -> Any:
        return self._parts[0].value() * self._parts[1].value()


class _Negative(Generator):
    def __str__(self) -> str:
        return f"-({self._parts[0]})"

    def draw(self, case: Case) -> Any:
        return -self._parts[0].value()


def random_bool() -> Generator:
    """True or False."""
    return random().to(bool)


def random_or_nothing(low: Any, high: Any) -> Generator:
    """A number in two cases of three, else the argument is left out."""
    return oneof(random(low, high), nothing(), possibility=2 / 3)


def _copies(chance: float) -> int:
    return max(round(chance * _STEPS), 1) if chance > 0 else 0


_UNSAID = object()
