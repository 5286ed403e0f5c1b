"""C++ code of small matrix products: one function for each combination of sizes and steps."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

HEADER = Path(__file__).with_name("_product.h").read_text()
REPEATED = "monograph_repeated"

_MOST_MULTIPLICATIONS = 1 << 24
_FEWEST_FOR_THREADS = 1 << 18  # multiplications; fewer take one thread as long as waking another
_MOST_COLUMNS = 64  # of the right operand that are written row by row at a time, at most
_MOST_COPIED = 1 << 15  # numbers of such a block, which lies on the stack


@dataclass(frozen=True)
class Product:
    """The sizes of `c = a b + bias`, the steps from one row and from one column to the next in `a` and `b`, and threads."""

    m: int
    k: int
    n: int
    a_steps: tuple[int, ...]
    b_steps: tuple[int, ...]
    has_bias: bool = False
    threads: int = 1

    @property
    def _numbers(self) -> tuple[int, ...]:
        """The arguments of the template."""
        return self.m, self.k, self.n, *self.a_steps, *self.b_steps, self.used_threads

    @property
    def used_threads(self) -> int:
        """How many threads share the columns."""
        blocks = -(-self.n // _MOST_COLUMNS)
        return min(self.threads, blocks) if self.m * self.k * self.n >= _FEWEST_FOR_THREADS else 1

    @property
    def can_be_made(self) -> bool:
        """True if there is code for it: not large, not empty, and `b` lies row by row or column by column."""
        sizes = 0 < self.m * self.k * self.n <= _MOST_MULTIPLICATIONS
        copied = 0 if self.b_steps[1] == 1 else self.k * min(self.n, _MOST_COLUMNS)
        return sizes and 1 in self.b_steps and copied <= _MOST_COPIED

    @property
    def name(self) -> str:
        """The name of its function."""
        return "_".join(["monograph_product", *map(str, self._numbers), *(["bias"] * self.has_bias)])

    @property
    def _tensors(self) -> tuple[str, ...]:
        return "a", "b", *(["bias"] * self.has_bias), "c"

    def _head(self, name: str, *first: str) -> str:
        tensors = [f"{'float' if item == 'c' else 'const float'}* {item}" for item in self._tensors]
        starts = [f"long {item}_start" for item in self._tensors]
        return f'extern "C" void {name}({", ".join([*first, *tensors, *starts])})'

    @property
    def declaration(self) -> str:
        """Its function: takes `a`, `b`, `bias` if there is one, `c`, and where each of them begins."""
        return self._head(self.name)

    @property
    def definition(self) -> str:
        """The code of its function, behind HEADER."""
        bias = "bias + bias_start" if self.has_bias else "nullptr"
        call = f"product<{', '.join(map(str, self._numbers))}>(a + a_start, b + b_start, {bias}, c + c_start)"
        return f"{self.declaration} {{\n  monograph::{call};\n}}\n"

    @property
    def repetition(self) -> str:
        """The code of the function REPEATED, which calls its function `count` times; behind its definition."""
        given = ", ".join([*self._tensors, *(f"{item}_start" for item in self._tensors)])
        loop = f"for (long i = 0; i < count; i++) {self.name}({given});"
        return f"{self._head(REPEATED, 'long count')} {{\n  {loop}\n}}\n"
