"""Cross-entropy of rows of float32, with its gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from monograph.layout import Layout
from monograph.native.code import Code

_FEWEST_FOR_THREADS = 1 << 16  # numbers
_PART = 256  # rows that a thread takes at once, as in the header


@dataclass(frozen=True)
class CrossEntropy:
    """The loss of each row of logits, and their gradient where that of each loss is known."""

    logits: Layout
    ignored: int
    threads: int = 1
    sums: bool = False  # of the logarithms of the softmax as well, each of which has a gradient besides

    @classmethod
    def of(cls, operands: Sequence[Layout], options: Sequence[Any], threads: int) -> CrossEntropy:
        """From logits, the class of each row, and the gradient of each loss, and of each sum; the option is the class that counts as none."""
        (ignored,) = options
        return cls(operands[0], ignored, threads, len(operands) == 4)

    @property
    def _rows(self) -> int:
        return self.logits.shape[0]

    @property
    def results(self) -> tuple[Layout, ...]:
        """What it gives: losses, sums of the logarithms if it makes them, and the gradient of the logits."""
        return *[Layout.contiguous(self._rows)] * (1 + self.sums), Layout.contiguous(*self.logits.shape)

    @property
    def operands(self) -> tuple[Layout, ...]:
        """What it has to be given: the numbers of a row side by side."""
        is_by_rows = self.logits.stride[1] == 1 and self.logits.stride[0] >= self.logits.shape[1]
        logits = self.logits if is_by_rows else self.results[-1]
        return logits, *[self.results[0]] * (2 + self.sums)

    @property
    def can_be_made(self) -> bool:
        """True if there is code for it: nothing is empty or beyond an int's reach."""
        reached = all(item.is_in_reach for item in (self.logits, *self.results))
        return len(self.logits.shape) == 2 and min(self.logits.shape) > 0 and reached

    @property
    def used_threads(self) -> int:
        """How many threads share it."""
        rows, classes = self.logits.shape
        return min(self.threads, -(-rows // _PART)) if rows * classes >= _FEWEST_FOR_THREADS else 1

    @property
    def code(self) -> Code:
        """Its function."""
        numbers = [
            *self.logits.shape,
            self.operands[0].stride[0],
            self.ignored,
            str(self.sums).lower(),
            self.used_threads,
        ]
        name = "_".join(["monograph_cross_entropy", *map(str, numbers)]).replace("-", "minus")
        more = ("uniform", "sums") if self.sums else ("nullptr", "nullptr")
        given = ("logits", "target", "scale", more[0], "losses", more[1], "made")
        tensors = tuple(item for item in given if item != "nullptr")
        call = f"CrossEntropy<{', '.join(map(str, numbers))}>::of({', '.join(given)})"
        return Code(
            name,
            ("rows", "cross_entropy"),
            tensors,
            call,
            num_results=len(self.results),
            classes=("target",),
        )
