"""The updates of parameters as C++ functions of pointers. Their text depends on the kind of update, sizes are arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

_HEADERS = ("update",)
_PIECE = 8192  # elements of a loop for one thread


@dataclass(frozen=True)
class Update:
    """Writes new state into the old, element by element; `computed` gives the new state of tensors and a row of numbers apart."""

    name: str
    types: tuple[str, ...]  # of the elements of each tensor
    numbers: str  # code that computes numbers for the loop, and writes single elements
    loop: str  # code for `count` elements from `start` on
    num_made: int
    computed: Callable[[Sequence[torch.Tensor], torch.Tensor], list[torch.Tensor]]

    @property
    def headers(self) -> tuple[str, ...]:
        """What it depends on."""
        return _HEADERS

    @property
    def pointers(self) -> tuple[str, ...]:
        """The types of its pointers: to tensors, and to a row of numbers."""
        return (*(f"{kind}*" for kind in self.types), "const double*")

    @property
    def declaration(self) -> str:
        """The head of the function: pointers, where each of them begins, and how many elements there are."""
        starts = [f"long s{index}" for index in range(len(self.pointers))]
        return f'extern "C" void {self.name}({", ".join([*self._pointers, *starts, "long count"])})'

    @property
    def definition(self) -> str:
        """The function, after its headers."""
        loop, given = f"{self.name}_loop", [*self._names, "made"]
        moved = "".join(f"  {name} += s{index};\n" for index, name in enumerate(self._names))
        return f"""\
#define AT(slot, type) ((type*)q##slot)
static WITH_VECTORS void {loop}({", ".join([*self._pointers, "const double* made"])}, long start, long count) {{
  using namespace monograph;
{self.loop}}}
{self.declaration} {{
  using namespace monograph;
  double made[{self.num_made + 1}];
{moved}  {{
{self.numbers}  }}
  if (count <= {_PIECE}) return {loop}({", ".join(given)}, 0, count);
  #pragma omp parallel for
  for (long start = 0; start < count; start += {_PIECE})
    {loop}({", ".join(given)}, start, count - start < {_PIECE} ? count - start : {_PIECE});
}}
#undef AT
"""

    @property
    def _names(self) -> list[str]:
        return [*(f"q{index}" for index in range(len(self.types))), "given"]

    @property
    def _pointers(self) -> list[str]:
        return [f"{kind} {name}" for kind, name in zip(self.pointers, self._names, strict=True)]


UPDATES: dict[str, Update] = {}  # those of this process by name, which says all of their text
