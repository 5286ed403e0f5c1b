"""What to write against further builds: a line for each cause, said aloud once for each graph."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Final

from monograph.capture.captured import Captured
from monograph.capture.guards.sources.values import Moves
from monograph.capture.trace import LOGGER
from monograph.compiler import Build
from monograph.errors import MonographError, hint_line
from monograph.internals.advice_lines import (
    ALL_FURTHER,
    LINES,
    Thing,
    about_answer,
    about_numbers,
    about_scheduler,
    is_not_finite,
    needs,
    thing_of,
)
from monograph.internals.together import sizes_vary
from monograph.ir.call.parameters import is_part_of
from monograph.ir.call.reason import FIXED, Cause, Reason
from monograph.ir.call.signature import Call, TensorKey
from monograph.ir.call.varying import Varying, has_gaps
from monograph.ir.text import shortened
from monograph.sizes.expression import SMALLEST
from monograph.user_code.lines import Origin, makes_text, user_place_of

_MANY_BUILDS: Final = 8  # from here on something probably changes at every call: said aloud, and again when there are twice as many
_COST: Final = "the {count} builds so far have taken {seconds:.1f} s"
_REPEATED: Final = 4  # builds with one advice: it was not heard, or not followed
_LIMIT: Final = "these are {count} builds for one thing, and config.max_builds(n) makes more than n an error"
_DROP_LAST: Final = "DataLoader(..., drop_last=True)"
_SHOWN: Final = 4  # sizes
_NAMES_SETTING: Final = re.compile(r"(?<![\w.])config\.\w+\(")  # and not model.config.name
_TEXT: Final = "{line} makes a text of it: make the text after the call, or leave it out"
# what users can write otherwise, also beside what was said before
_DEBUGGING: Final = 'docs/debugging.md, "Debugging a graph"'  # the titles are what a reader of the site finds
_REBUILDS: Final = 'docs/rebuilds.md, "Why does it rebuild?"'
_LEADING: Final = (Cause.VALUE, Cause.BRANCH)
# where something besides sizes differs from each build that there is
_NEXT_FOR_ALL: Final = "the next size makes a build for any size, and nobody has to do anything"


@dataclass
class Advised:
    """What builds were made for that the log of a graph has named at the level that shows by default."""

    things: set[Thing] = field(default_factory=set)
    notes: set[str] = field(default_factory=set)  # of captures, which repeat them
    ours: set[Cause] = field(default_factory=set)  # of builds that a tool makes: nobody has to write anything
    expected: set[str] = field(
        default_factory=set
    )  # arguments that a tool gives: a build for each value is meant
    drop_last: str = _DROP_LAST  # what leaves out a smaller last batch
    configured: str = ""  # how users of an integration reach the config of the graph, and its page
    is_quiet: bool = False  # while a tool makes builds that it reports itself
    logged: dict[str, int] = field(default_factory=dict)  # advice, and the build whose line in the log has it
    counts: Counter[tuple[Thing, str]] = field(default_factory=Counter)  # of builds, by advice
    seconds: float = 0.0  # that all builds have taken

    def about(self, reason: Reason, call: Call, stays: str) -> Reason:
        """The reason for a build with what to write against it; `stays` says why sizes do not vary in it.

        Of several reasons that are named, the advice is about the first that is new.
        """
        named = [item for item in reason.others if item in reason and item.cause in (reason.cause, *_LEADING)]
        if self._knows(reason) and (new := next((item for item in named if not self._knows(item)), None)):
            reason = reason.led_by(new)
        is_meant = reason.cause is Cause.CONSTANT_GIVEN and reason.place in self.expected
        return reason if is_meant else reason.advised(advice(reason, call, stays, drop_last=self.drop_last))

    def note(self, graph: str, notes: Sequence[str]) -> None:
        """Log what a user should know of a capture, once for each graph."""
        for note in dict.fromkeys(notes):
            if note not in self.notes:
                self.notes.add(note)
                LOGGER.warning("%s: %s", graph, note)

    def log(self, graph: str, build: Build, call: Call) -> None:
        """Log a build, which is for calls like this one: aloud where what it is for is new, or where there are many.

        The first one of a graph is only counted.
        """
        number, reason = build.number, build.reason
        self.seconds += build.seconds
        if not number:
            return
        if self.is_quiet:
            LOGGER.info("%s: build %d: %s", graph, number, reason)
            return
        thing = thing_of(reason)
        serves_all = (
            reason.cause is Cause.SIZE
            and Varying.in_key(call.key) is not None
            and not _has_other_gaps(reason, call)
        )
        # there has to be something to write, and one for all sizes, such as that of a smaller last batch, is the last one
        quiet = ("", _NEXT_FOR_ALL)
        is_new = thing not in self.things and reason.advice not in quiet and not serves_all
        self.counts[thing, reason.advice] += 1
        repeats = (
            self.counts[thing, reason.advice] == _REPEATED and reason.advice not in quiet and not serves_all
        )
        is_many = number >= _MANY_BUILDS and number & (number - 1) == 0
        aloud = (is_new or repeats or is_many) and reason.cause not in self.ours
        self.things |= {thing, *(thing_of(item) for item in reason.others if item.cause is reason.cause)}
        level = logging.WARNING if aloud else logging.INFO
        said = self._in_line_of(number, reason) if aloud or serves_all else ""
        said = f"; {_LIMIT.format(count=_REPEATED)}{said}" if aloud and repeats else said
        said = (
            f"; {_COST.format(count=number + 1, seconds=self.seconds)}{said}" if aloud and is_many else said
        )
        LOGGER.log(level, "%s: build %d: %s%s", graph, number, reason, said)

    @contextmanager
    def quietly(self) -> Iterator[None]:
        """Inside, builds are logged as information: a tool makes them, and reports them itself."""
        before, self.is_quiet = self.is_quiet, True
        try:
            yield
        finally:
            self.is_quiet = before

    def _knows(self, reason: Reason) -> bool:
        cause, place = thing_of(reason)
        return (cause, place) in self.things or (
            cause is Cause.NUMBER and (Cause.FIXED, place) in self.things
        )

    def configured_by(self, argument: str, page: str) -> None:
        """Let advice on settings say how users of an integration reach the config of the graph."""
        self.configured = f"config is what {argument} gives to your function; see {page}"

    def _in_line_of(self, number: int, reason: Reason) -> str:
        """What the line of a build says of what to write: all of it once, then where to find it."""
        advice = reason.advice
        if not advice:
            return ""
        first = self.logged.setdefault(advice, number)
        if first != number:
            return f"; what to write is in the line of build {first}"
        configured = self.configured if _NAMES_SETTING.search(advice) else ""
        page = _DEBUGGING if is_not_finite(reason) else _REBUILDS
        return hint_line(f"{advice}; {configured or f'see {page}'}")


def size_needed_by(error: Exception) -> str:
    """Why no step could be captured for all sizes, with the line of the user's."""
    if isinstance(error, MonographError):
        return f"{_line(error.where)} needs one size ({shortened(error.message)})"
    return f"{_line(user_place_of(error))} needs one size ({shortened(str(error))})"


def why_fixed(fixed: Mapping[str, Origin]) -> dict[str, str]:
    """Why sizes of these names are numbers, by the user's line that needs them to be."""
    return {name: f"{_line(where)} needs one size" for name, where in fixed.items()}


def advice(reason: Reason, call: Call, stays: str = "", *, drop_last: str = _DROP_LAST) -> str:
    """What to write so that there is no such build, or that it is the last; `stays` says why sizes do not vary in it.

    `drop_last` is what leaves out a smaller last batch.
    """
    if reason.cause is Cause.SIZE:
        varying = Varying.in_key(call.key)
        with_gaps, why = _with_gaps(reason, call), _why_sizes_stay(reason, call) or stays
        if varying is not None:
            if _has_other_gaps(reason, call):
                return _about_parts(with_gaps, is_declared=bool(call.key[1].sizes))
            return _about_varying(varying, call.paths()) + _about_strides(with_gaps)
        if with_gaps and not why:
            return _about_gaps(with_gaps)
        return _about_sizes(reason, why, drop_last) if why else _NEXT_FOR_ALL
    if reason.cause is Cause.NUMBER_GIVEN and int in call.keys:
        return about_numbers(reason)
    if text := about_scheduler(reason):
        return text
    line = LINES.get(reason.cause)
    return "" if line is None else line(reason)


def after_capture(build: Build, call: Call, *, drop_last: str) -> Build:
    """The build, with other advice where the capture has shown that a number or a size which changes cannot be an input."""
    reason, fixed = build.reason, build.captured.fixed
    if about_scheduler(reason):
        return build
    if reason.cause in (Cause.NUMBER, Cause.FIXED) and not _is_input(build, reason.place):
        text = _why_fixed(reason, build.captured)
        return replace(
            build, reason=Reason(reason, Cause.FIXED, reason.place, advice=text, others=reason.others)
        )
    place = str(reason).partition(" changed from ")[0]
    if reason.cause is Cause.VALUE and reason.what == "object" and _is_input(build, place):
        return replace(build, reason=reason.advised(ALL_FURTHER.format(place=place)))
    varying = Varying.in_key(call.key)
    if reason.cause is Cause.SIZE and fixed and varying is not None:
        where = next(iter(fixed.values()))
        line = _line(where)
        if makes_text(where):
            return replace(build, reason=reason.advised(f"each size has a build: {_TEXT.format(line=line)}"))
        rest = varying.without(fixed)
        text = (
            _about_sizes(reason, f"{line} needs one size", drop_last)
            if rest is None
            else f"{_about_varying(rest, call.paths())}, but for what {line} needs to be one size"
        )
        return replace(build, reason=reason.advised(text))
    return build


def _with_gaps(reason: Reason, call: Call) -> list[str]:
    """The arguments of other sizes that are parts of larger tensors."""
    keys, differing = zip(call.paths(), call.keys, strict=True), [path for path, _ in reason.sizes]
    return [path for path, key in keys if path in differing and isinstance(key, TensorKey) and has_gaps(key)]


def _has_other_gaps(reason: Reason, call: Call) -> bool:
    """True if strides differ that do not follow from sizes: a build for any size has one set of them."""
    return reason.what == "stride" and bool(_with_gaps(reason, call))


def _why_sizes_stay(reason: Reason, call: Call) -> str:
    _, settings, _ = call.key
    if not settings.dynamic:
        return "config.dynamic(False) keeps sizes numbers"
    if not sizes_vary(settings):
        return "the processes of a pipeline send what has one size"
    keys = {path: (leaf, key) for leaf, (path, key) in enumerate(zip(call.paths(), call.keys, strict=True))}
    leaf, key = keys.get(reason.place, (0, None))
    if isinstance(key, TensorKey):
        if key.keeps_sizes:
            return f"it {key.keeps_sizes}"
        special = [dim for dim in reason.dims if key.shape[dim] // call.num_parts(leaf, dim) < SMALLEST]
        if special:
            of_part = call.num_parts(leaf, special[0]) > 1
            return "micro-batches of 0 and 1 rows are special" if of_part else "sizes of 0 and 1 are special"
    declared = [size for size in settings.sizes if is_part_of(reason.place, size.argument)]
    shape = key.shape if isinstance(key, TensorKey) else ()
    rank = len(shape)
    outside = any(-rank <= size.dim < rank and not size.takes(shape[size.dim]) for size in declared)
    if outside and not _with_gaps(reason, call):
        return "it is outside of what was declared"
    return ""


def _is_moving(build: Build, place: str) -> bool:
    moving = (
        source.item_label(key)
        for source in build.guards.sources
        for key, value in source.recorded.items()
        if issubclass(type(value), Moves)
    )
    return any(place == label or place.startswith(f"{label}[") for label in moving)


def _is_input(build: Build, place: str) -> bool:
    word = _word(place)
    conditions = build.guards.conditions.about
    return _is_moving(build, place) and not any(
        found is not None and word.search(found[1]) for found in map(FIXED.match, conditions)
    )


def _word(place: str) -> re.Pattern[str]:
    """What finds a place in the words of a condition, and none that is longer."""
    return re.compile(rf"(?<![\w.\]]){re.escape(place)}(?![\w.\[])")


def _about_varying(varying: Varying, paths: Sequence[str]) -> str:
    places = [
        f"{_quoted(path)}, {dim}"
        for path, names in zip(paths, varying.names, strict=True)
        for dim, name in enumerate(names)
        if name is not None
    ]
    more = ", ..." if len(places) > _SHOWN else ""
    calls = ", ".join(f"config.dynamic({place})" for place in places[:_SHOWN])
    return f"a build for any size takes over; {calls}{more} makes it at the first call"


def _about_sizes(reason: Reason, why: str, drop_last: str) -> str:
    last = f"{drop_last} leaves out a smaller last batch, " if 0 in reason.dims else ""
    padded = [f"mg.buckets({_quoted(path)}, dim={dims[-1]}, sizes=[...])" for path, dims in reason.sizes]
    more = ", ..." if len(padded) > _SHOWN else ""
    buckets = f"config.buckets({', '.join(padded[:_SHOWN])}{more})"
    return f"each size has a build, since {why}; {last}{buckets} pads to a few sizes"


def _about_gaps(paths: Sequence[str]) -> str:
    strides, mended = " and ".join(paths), _contiguous(paths)
    return f"each size has a build, since the strides of {strides} do not follow from sizes: pass {mended}"


def _about_strides(paths: Sequence[str]) -> str:
    """Of parts of larger tensors, in a build for any size."""
    strides, mended = " and ".join(paths), _contiguous(paths)
    return f", with the strides of {strides}; {mended} has one build for all strides" if paths else ""


def _about_parts(paths: Sequence[str], *, is_declared: bool) -> str:
    """Of parts with other strides than any build for any size has."""
    names, mended = " and ".join(paths), _contiguous(paths)
    slices = "are slices of larger tensors" if len(paths) > 1 else "is a slice of a larger tensor"
    declared = ", whatever config.dynamic() says of sizes" if is_declared else ""
    return (
        f"{names} {slices}, and a build goes with the strides of {names}{declared}; {mended} has one build for all "
        "strides"
    )


def _contiguous(paths: Sequence[str]) -> str:
    return " and ".join(f"{path}.contiguous()" for path in paths)


def _why_fixed(reason: Reason, captured: Captured) -> str:
    """What keeps a number that has changed a constant of the step, as its capture has found."""
    if answer := about_answer(reason):
        return answer
    place = reason.place
    taken = [found for path, found in captured.taken.items() if _word(path).search(place)]
    if taken or captured.why_plain in ("", place):
        where, function = taken[0] if taken else (None, "")
        is_text = where is not None and makes_text(where)
        why = _TEXT.format(line=_line(where)) if is_text else f"{_line(where)} {needs(reason, function)}"
    else:
        why = (
            f"numbers stay what they are in this build ({captured.why_plain}); as a float argument it has one build, if the "
            "step only computes with it"
        )
    return f"each value of {place} has a build: {why}"


def _quoted(path: str) -> str:
    return f"'{path}'" if '"' in path else f'"{path}"'


def _line(where: Origin | None) -> str:
    return f"{where.file}:{where.line}" if where is not None and where.file else "code of the step"
