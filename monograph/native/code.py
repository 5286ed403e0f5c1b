"""What every C++ function of our own has: a name, tensors that it takes, and code after headers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True)
class Code:
    """A function that takes pointers to tensors, the results last, and where in its memory each of them begins."""

    name: str
    headers: tuple[str, ...]  # that it depends on
    tensors: tuple[str, ...]
    call: str  # of a template in the headers
    num_results: int = 1
    classes: tuple[str, ...] = ()  # tensors of int64; the others are of float32

    @property
    def pointers(self) -> tuple[str, ...]:
        """The types of its pointers."""
        taken = self.tensors[: -self.num_results]
        kinds = ["const long*" if item in self.classes else "const float*" for item in taken]
        return (*kinds, *["float*"] * self.num_results)

    def _head(self, name: str, *first: str) -> str:
        pointers = [f"{kind} {item}" for kind, item in zip(self.pointers, self.tensors, strict=True)]
        starts = [f"long {item}_start" for item in self.tensors]
        return f'extern "C" void {name}({", ".join([*first, *pointers, *starts])})'

    @property
    def declaration(self) -> str:
        """The head of the function."""
        return self._head(self.name)

    @property
    def definition(self) -> str:
        """The function, after its headers."""
        moved = "".join(f"  {item} += {item}_start;\n" for item in self.tensors)
        return f"{self.declaration} {{\n{moved}  monograph::{self.call};\n}}\n"

    @property
    def repeated(self) -> str:
        """The name of the function that calls it `count` times."""
        return f"{self.name}_repeated"

    @property
    def repetition(self) -> str:
        """That function, after the definition of this one."""
        given = ", ".join([*self.tensors, *(f"{item}_start" for item in self.tensors)])
        loop = f"for (long i = 0; i < count; i++) {self.name}({given});"
        return f"{self._head(self.repeated, 'long count')} {{\n  {loop}\n}}\n"


def text_of(codes: Sequence[Code]) -> str:
    """Functions after the headers that they need, each with one that repeats it."""
    headers = dict.fromkeys(name for code in codes for name in code.headers)
    return "\n".join([*map(header, headers), *(code.definition + code.repetition for code in codes)])


@cache
def header(name: str) -> str:
    """The text of a header of this folder."""
    return Path(__file__).with_name(f"{name}.h").read_text()
