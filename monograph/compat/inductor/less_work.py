"""What Inductor's Python does in vain, or again and again, left out: the code that it writes stays the same.

Private API of `torch._inductor`, like `compat/inductor/loading.py`; nothing of it is imported before the first compilation.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any

from monograph.compat.patching import in_this_thread, replaced

_Function = Callable[..., Any]


@contextmanager
def less_work() -> Iterator[None]:
    """Inside, Inductor makes tables once, joins sets by their dicts, writes no code for no elements, and notes no lines.

    What: functions and classes of `torch._inductor` and of what it uses. Degraded path: those that a version of torch
    does not have are left alone, and all takes as long as it did.
    """
    with ExitStack() as stack:
        for place, ours in _REPLACEMENTS.items():
            module, _, path = place.partition(":")
            owner: Any = importlib.import_module(module)
            *outer, name = path.split(".")
            for part in outer:
                owner = getattr(owner, part, None)
            if hasattr(owner, name):
                stack.enter_context(replaced(owner, name, ours(getattr(owner, name))))
        yield


def _made_once(theirs: _Function) -> _Function:
    """The rules by which types follow from types: one object, which its class fills again whenever it is asked for."""
    return cache(theirs)


def _joined_dicts(theirs: _Function) -> _Function:
    """Two ordered sets as one: the first one's elements and then the second one's, without a generator for both."""

    def join(one: Any, other: Any) -> Any:
        if type(one) is type(other) and hasattr(one, "_from_dict"):
            return one._from_dict(one._dict | other._dict)
        return theirs(one, other)

    return join


def _none_for_no_elements(theirs: _Function) -> _Function:
    """No vector code for the last elements of a loop that whole vectors fill; it would be written and then dropped.

    Inductor asks whether there are enough of them to be worth it only where much of the loop is masked or scattered.
    Loops that sum up are left alone: they have sums of their own for the last elements.
    """

    def select_tiling(select: Any, bodies: Sequence[Any], sizes: Sequence[Any]) -> Any:
        made = theirs(select, bodies, sizes)
        *tiling, facts = made
        if len(tiling) == 2 and hasattr(facts, "OVERHEAD_RATIO_THRESHOLD"):
            factors, places = tiling
            ranges = {tuple(ranges) for ranges, _ in sizes}
            if len(places) == 1 and len(ranges) == 1 and not any(sums for _, sums in sizes):
                size = next(iter(ranges))[places[0]]
                if getattr(size, "is_number", True) and int(size) % int(factors[0]) == 0:
                    facts.OVERHEAD_RATIO_THRESHOLD = -1.0
        return made

    return select_tiling


def _no_lines(theirs: Any) -> Any:
    """Traces note at each op which lines of Python have made it: here those are torch's own."""
    nothing = SimpleNamespace(summary=lambda: None)
    return SimpleNamespace(extract=in_this_thread(lambda *_, **__: nothing, theirs.extract))


_REPLACEMENTS: Mapping[str, _Function] = {
    "torch._inductor.codegen.common:DtypePropagationOpsHandler": _made_once,
    "torch.utils._ordered_set:OrderedSet.__or__": _joined_dicts,
    "torch._inductor.codegen.cpp:TilingSelect.select_tiling": _none_for_no_elements,
    "torch.fx.proxy:CapturedTraceback": _no_lines,
}


# --- fusions -------------------------------------------------------------------------------------------------------

_PLAIN = ("SchedulerNode", "FusedSchedulerNode")  # loops, of one kernel or of several


def are_apart(one: Any, other: Any) -> bool:
    """True for two kernels of a CPU that do not need each other and loop over different numbers of elements.

    The updates of all parameters read the learning rate, so that each is compared with many. Inductor refuses such pairs,
    but looks at the memory that both would share before.
    """
    counts = _elements(one), _elements(other)
    return None not in counts and counts[0] != counts[1] and not one.get_operation_names() & other.ancestors


def _elements(node: Any) -> int | None:
    """The elements that a kernel loops over, if these are plain loops of known lengths on the CPU."""
    known = getattr(node, "monograph_elements", None)
    if known is None or known[0] is not node.group:
        known = node.group, _counted(node)
        node.monograph_elements = known
    count: int | None = known[1]
    return count


def _counted(node: Any) -> int | None:
    if type(node).__name__ not in _PLAIN or node.is_template() or node.is_foreach():
        return None
    device, sizes = node.group
    if getattr(device, "type", None) != "cpu":
        return None
    try:
        return math.prod(int(size) for part in sizes for size in part)
    except TypeError:  # a symbol
        return None
