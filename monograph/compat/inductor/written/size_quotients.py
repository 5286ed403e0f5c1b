"""Quotients of sizes that vary, in Inductor's kernels: computed once for a call and not for each element.

Private API of `torch._inductor`, like `compat/inductor/loading.py`; this is about the code that it writes.
"""

from __future__ import annotations

import re
from typing import Final

_QUOTIENT: Final = "c10::div_floor_integer("
# A sum of products of sizes, divided by a number: that never fails.
_OF_SIZES: Final = re.compile(
    re.escape(_QUOTIENT)
    + r"static_cast<int64_t>\((?:\b(?:ks|kq)\d+\b|\b\d+L\b|[-+*() ])+\), static_cast<int64_t>\([1-9]\d*L\)\)"
)
_FIRST_LINE: Final = "std::atomic<int> inductor_cpu_integer_div_error{0};"


def with_quotients_first(kernel: str) -> str:
    """The code of a kernel with numbers for the quotients of its sizes; what it computes stays the same.

    An image's side after three layers is a quotient of quotients, and stands many times in each index. The compiler does not move
    divisions out of loops. A kernel that is written otherwise than Inductor writes them is left alone.
    """
    head, first_line, body = kernel.partition(_FIRST_LINE)
    if not first_line or _QUOTIENT not in body:
        return kernel
    names: dict[str, str] = {}
    while (text := _inner_quotient(body)) is not None:  # in which there is none
        names[text] = f"kq{len(names)}"
        body = body.replace(text, names[text])
    lines = "".join(f"\n    const int64_t {name} = {text};" for text, name in names.items())
    return f"{head}{first_line}{lines}{body}"


def _inner_quotient(code: str) -> str | None:
    found = (match[0] for match in _OF_SIZES.finditer(code))
    return next((text for text in found if text.count("(") == text.count(")")), None)
