"""Does an object hold tensors or numbers of a trace, which mean nothing once the trace is over?"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Iterator
from functools import partial
from types import FrameType, FunctionType, MethodType
from typing import Any

from torch import nn

from monograph.capture.guards.sources.attributes import slots_of
from monograph.capture.guards.sources.closures import closure_of
from monograph.capture.guards.sources.places import Slots
from monograph.capture.guards.sources.values import items_of
from monograph.compat.fakes import is_fake
from monograph.compat.symbolic_numbers import is_symbolic
from monograph.errors import CaptureError
from monograph.user_code.files import is_installed_file
from monograph.user_code.lines import Origin, source_of

_DEPTH = 4  # of nesting; an object may hold anything, even itself


def holds_fakes(item: Any, depth: int = _DEPTH, *, with_numbers: bool = True) -> bool:
    """True if fake tensors or symbolic numbers are reached through containers, attributes, closures or iterators."""
    if type(item) in weakref.ProxyTypes:  # what it stands for is held by others, or gone
        return False
    if is_fake(item) or isinstance(item, Iterator):  # which gives its items only once
        return True
    if is_symbolic(item):
        return with_numbers
    return depth > 0 and any(
        holds_fakes(inner, depth - 1, with_numbers=with_numbers) for inner in _inside(item)
    )


def holds_numbers_alone(item: Any) -> bool:
    """True for what holds symbolic numbers, and no fake tensors."""
    return holds_fakes(item) and not holds_fakes(item, with_numbers=False)


def forget_cached(caches: Iterable[tuple[Any, str]]) -> list[str]:
    """Clear the caches of `functools.lru_cache` that got tensors of the trace; gives the labels of their functions.

    A cache without a limit is a dict, which others look after.
    """
    forgotten = []
    for cache, label in caches:
        limited = cache.cache_parameters()["maxsize"] is not None
        results = [item for item in gc.get_referents(cache) if not isinstance(item, (type, FunctionType))]
        if limited and any(item is not vars(cache) and holds_fakes(item) for item in results):
            cache.cache_clear()
            forgotten.append(label)
    return forgotten


def caches_of_libraries(caches: Iterable[tuple[Any, str]]) -> frozenset[int]:
    """The ids of the dicts in which caches of functions of libraries hold what was computed."""
    found = set[int]()
    for cache, _ in caches:
        code = getattr(getattr(cache, "__wrapped__", None), "__code__", None)
        if code is not None and is_installed_file(code.co_filename):
            found |= {
                id(item) for item in gc.get_referents(cache) if type(item) is dict and item is not vars(cache)
            }
    return frozenset(found)


def not_repeatable(
    label: str,
    where: Origin | None,
    *,
    of_numbers: bool = False,
    in_parts: bool = False,
    is_deque: bool = False,
    used_at: Origin | None = None,
) -> CaptureError:
    """The error for a place where a step leaves what no replay can make; `of_numbers` if that holds no tensors.

    `where` is the line that does so, and `used_at` one that does more with a list than to add to it, if they are known. With
    `in_parts` each micro-batch of the step does so.
    """
    if in_parts:
        what = "numbers that it reads out of tensors" if of_numbers else "an object that holds tensors"
        return CaptureError(
            f"build() puts {what} of the step into {label}, and no replay can do that for each micro-batch",
            where=where,
            hint="return the tensor, which has a value for each micro-batch, and put it there after the call; or hold it in a "
            "buffer of a module, which the micro-batches change one after the other: buffer.add_(loss.detach())",
        )
    if of_numbers:
        name, then = (f"{label}, a deque", f": {label}.append(loss.item())") if is_deque else (label, "")
        holder = label.partition("[")[0]
        of_holder = f", or with {holder} than to take entries by their keys" if holder != label else ""
        why = (
            ""
            if used_at is None
            else f": {_line(used_at, where)} does more with {label} than to call its append(){of_holder}"
        )
        return CaptureError(
            f"build() puts numbers that it reads out of tensors of the step into {name}, in a way that no replay can repeat{why}",
            where=where,
            hint=f"return the tensor, and keep its number after the step{then}; build() may append() to a list that it does not "
            "read (and extend() it, where += would replace it), where it writes self.numbers.append(loss.item()) itself and gives the list "
            "to no function, and move a list of fixed length in place: numbers.append(new); "
            "del numbers[0]; the last ones fit into a buffer: last.copy_(torch.cat([last[1:], loss.detach().view(1)]))",
        )
    return CaptureError(
        f"build() puts an object that holds tensors of the step into {label}, and no replay can do that",
        where=where,
        hint="keep the tensors themselves there: in an attribute of the graph or a module, a list, a tuple, a dict, a "
        "dataclass or an object without __slots__; take a batch of a loader before the call, and pass it as an argument",
    )


def _line(place: Origin, shown: Origin | None) -> str:
    """What to call a line beside one that is shown."""
    if shown is not None and (place.file, place.line) == (shown.file, shown.line):
        return "this line"
    name = f"line {place.line}" if shown is not None and place.file == shown.file else place.place
    return f"{name}, {source_of(place)!r}," if source_of(place) else name


def _inside(item: Any) -> Iterable[Any]:
    if isinstance(item, (nn.Module, type, str, bytes)):
        return ()  # what modules hold is looked after elsewhere
    if isinstance(item, FunctionType):
        return [*closure_of(item).values(), *(item.__defaults__ or ())]
    if isinstance(item, MethodType):
        return (item.__self__,)
    if isinstance(item, BaseException):
        locals_of = (value for frame in _frames(item) for value in frame.f_locals.values())
        return [*item.args, item.__cause__, item.__context__, *vars(item).values(), *locals_of]
    if isinstance(item, partial):
        return [item.func, *item.args, *item.keywords.values()]
    found = [entry for _, entry in items_of(item)]
    found += Slots("", item, slots_of(type(item))).now().values()
    return found + list(vars(item).values()) if hasattr(item, "__dict__") else found


def _frames(error: BaseException) -> Iterator[FrameType]:
    traceback = error.__traceback__
    while traceback is not None:
        yield traceback.tb_frame
        traceback = traceback.tb_next
