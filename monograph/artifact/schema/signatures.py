"""The arguments and results of a stored program."""

from __future__ import annotations

from dataclasses import dataclass

from monograph.artifact.schema import tree as forms
from monograph.artifact.schema.tree import Form
from monograph.checkpoint.leaves import Json, check, list_of, typed


@dataclass(frozen=True)
class Parameter:
    """An argument of a signature."""

    name: str
    form: Form


@dataclass(frozen=True)
class Signature:
    """The arguments of a program, and the form of what it returns.

    `sizes` are those of each leaf of the arguments for people: a name where the size varies.
    """

    positional: tuple[Parameter, ...]
    named: tuple[Parameter, ...]
    returned: Form
    sizes: tuple[tuple[str, ...], ...] = ()

    def __str__(self) -> str:
        return f"({', '.join(item.name for item in self.parameters)})"

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """All of them, in the order of their leaves."""
        return self.positional + self.named


def read_signature(value: Json) -> Signature:
    """The arguments and results that the manifest lists for a program."""
    check(
        type(value) is dict and tuple(value) == ("arguments", "results"),
        "a program is not described",
    )
    arguments = value["arguments"]
    fits = type(arguments) is dict and tuple(arguments) == ("positional", "named")
    check(fits, "the arguments of a program are not described")
    positional, named = (tuple(map(_parameter, list_of(rows))) for rows in arguments.values())
    names = [item.name for item in positional + named]
    check(len(set(names)) == len(names), "two arguments have one name")
    return Signature(positional, named, forms.from_json(value["results"]))


def _parameter(row: Json) -> Parameter:
    name, described = list_of(row, 2)
    return Parameter(typed(name, str), forms.from_json(described))
