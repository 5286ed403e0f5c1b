"""What to write against further builds: a line for each cause, said aloud once for each graph."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from monograph.capture.captured import Captured
from monograph.capture.guards.sources.values import Moves
from monograph.capture.trace import LOGGER
from monograph.compiler import Build
from monograph.errors import MonographError
from monograph.internals.together import sizes_vary
from monograph.ir.call.modes import GRADIENTS_THERE
from monograph.ir.call.reason import FIXED, OF_GROUP, Cause, Reason
from monograph.ir.call.signature import Call, TensorKey
from monograph.ir.call.varying import Varying, has_gaps
from monograph.ir.text import shortened
from monograph.sizes.expression import SMALLEST
from monograph.user_code.lines import Origin, user_place_of

_MANY_BUILDS: Final = 8  # from here on something probably changes at every call, and each build is said aloud
_SHOWN: Final = 4  # sizes
_NEEDS: Final = (
    "needs the number itself, as a size, an index, a key, a range, a text, torch.tensor([...]) and the rate of a dropout do; "
    "for one build, use a fixed size and a mask, or a size of a tensor, such as x.shape[0]; give torch.tensor([...]) as an "
    "argument; arithmetic alone has one build for all values"
)
# where something besides sizes differs from each build that there is
_NEXT_FOR_ALL: Final = "the next size makes a build for any size, and nobody has to do anything"


@dataclass
class Advised:
    """The causes of builds that the log of a graph has named at the level that shows by default."""

    causes: set[Cause] = field(default_factory=set)
    ours: set[Cause] = field(default_factory=set)  # of builds that a tool makes: nobody has to write anything
    expected: set[str] = field(
        default_factory=set
    )  # arguments that a tool gives: a build for each value is meant

    def about(self, reason: Reason, call: Call, stays: str) -> Reason:
        """The reason for a build with what to write against it; `stays` says why sizes do not vary in it."""
        is_meant = reason.cause is Cause.CONSTANT_GIVEN and reason.place in self.expected
        return reason if is_meant else reason.advised(advice(reason, call, stays))

    def log(self, graph: str, number: int, reason: Reason, call: Call) -> None:
        """Log a build after the first, which is for calls like this one: aloud where its cause is new, or where there are many."""
        serves_all = reason.cause is Cause.SIZE and Varying.in_key(call.key) is not None
        # there has to be something to write, and one for all sizes, such as that of a smaller last batch, is the last one
        quiet = ("", _NEXT_FOR_ALL)
        is_new = reason.cause not in self.causes and reason.advice not in quiet and not serves_all
        aloud = (is_new or number >= _MANY_BUILDS) and reason.cause not in self.ours
        self.causes.add(reason.cause)
        level = logging.WARNING if aloud else logging.INFO
        said = f"; {reason.advice}" if (aloud or serves_all) and reason.advice else ""
        LOGGER.log(level, "%s: build %d: %s%s", graph, number, reason, said)


def size_needed_by(error: Exception) -> str:
    """Why no step could be captured for all sizes, with the line of the user's."""
    if isinstance(error, MonographError):
        return f"{_line(error.where)} needs one size ({shortened(error.message)})"
    return f"{_line(user_place_of(error))} needs one size ({shortened(str(error))})"


def why_fixed(fixed: Mapping[str, Origin]) -> dict[str, str]:
    """Why sizes of these names are numbers, by the user's line that needs them to be."""
    return {name: f"{_line(where)} needs one size" for name, where in fixed.items()}


def advice(reason: Reason, call: Call, stays: str = "") -> str:
    """What to write so that there is no such build, or that it is the last; `stays` says why sizes do not vary in it."""
    if reason.cause is Cause.SIZE:
        varying = Varying.in_key(call.key)
        if varying is not None:
            return _about_varying(varying, call.paths())
        if with_gaps := _with_gaps(reason, call):
            return _about_gaps(with_gaps)
        why = _why_sizes_stay(reason, call) or stays
        return _about_sizes(reason, why) if why else _NEXT_FOR_ALL
    if reason.cause is Cause.NUMBER_GIVEN and int in call.keys:
        return _about_numbers(reason)
    line = _LINES.get(reason.cause)
    return "" if line is None else line(reason)


def after_capture(build: Build, call: Call) -> Build:
    """The build, with other advice where the capture has shown that a number or a size which changes cannot be an input."""
    reason, fixed = build.reason, build.captured.fixed
    if reason.cause in (Cause.NUMBER, Cause.FIXED) and not _is_input(build, reason.place):
        text = _why_fixed(reason.place, build.captured)
        return replace(build, reason=Reason(reason, Cause.FIXED, reason.place, advice=text))
    varying = Varying.in_key(call.key)
    if reason.cause is Cause.SIZE and fixed and varying is not None:
        line = _line(next(iter(fixed.values())))
        rest = varying.without(fixed)
        text = (
            _about_sizes(reason, f"{line} needs one size")
            if rest is None
            else f"{_about_varying(rest, call.paths())}, but for what {line} needs to be one size"
        )
        return replace(build, reason=reason.advised(text))
    return build


def _with_gaps(reason: Reason, call: Call) -> list[str]:
    """The arguments of other sizes whose strides keep all sizes numbers, where nothing else does."""
    _, settings, _ = call.key
    if not settings.dynamic or _why_sizes_stay(reason, call):
        return []
    keys, differing = zip(call.paths(), call.keys, strict=True), [path for path, _ in reason.sizes]
    return [path for path, key in keys if path in differing and isinstance(key, TensorKey) and has_gaps(key)]


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
    if any(size.argument == reason.place for size in settings.sizes):
        return "it is outside of what was declared"
    return ""


def _is_input(build: Build, place: str) -> bool:
    moving = (
        source.item_label(key)
        for source in build.guards.sources
        for key, value in source.recorded.items()
        if issubclass(type(value), Moves)
    )
    is_moving = any(place == label or place.startswith(f"{label}[") for label in moving)
    word = _word(place)
    conditions = build.guards.conditions.about
    return is_moving and not any(
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


def _about_sizes(reason: Reason, why: str) -> str:
    last = "DataLoader(..., drop_last=True) leaves out a smaller last batch, " if 0 in reason.dims else ""
    padded = [f"mg.buckets({_quoted(path)}, dim={dims[-1]}, sizes=[...])" for path, dims in reason.sizes]
    more = ", ..." if len(padded) > _SHOWN else ""
    buckets = f"config.buckets({', '.join(padded[:_SHOWN])}{more})"
    return f"each size has a build, since {why}; {last}{buckets} pads to a few sizes"


def _about_gaps(paths: Sequence[str]) -> str:
    mended = " and ".join(f"{path}.contiguous()" for path in paths)
    strides = " and ".join(paths)
    return f"each size has a build, since the strides of {strides} do not follow from sizes, as in x[::2]: pass {mended}"


def _about_form(reason: Reason) -> str:
    if not reason.place:
        return "pass tensors that share no memory and begin where it begins: x.clone()"
    line = _OF_FORMS.get(reason.what, "tensors of one kind")
    return f"each form has a build: pass {line.format(place=reason.place)}"


def _about_whole_numbers(reason: Reason) -> str:
    return f"each value of {reason.place} has a build: code of the step {_NEEDS}"


def _about_numbers(reason: Reason) -> str:
    return f"one build serves all further values of {reason.place}: nothing to do; a float argument has it from the first call on"


def _about_fixed(reason: Reason) -> str:
    return f"each value of {reason.place} has a build: code of the step {_NEEDS}"


def _why_fixed(place: str, captured: Captured) -> str:
    """What keeps a number that has changed a constant of the step, as its capture has found."""
    taken = [where for path, where in captured.taken.items() if _word(path).search(place)]
    if taken or captured.why_plain in ("", place):
        why = f"{_line(taken[0] if taken else None)} {_NEEDS}"
    else:
        why = (
            f"numbers stay what they are in this build ({captured.why_plain}); as a float argument it has one build, if the "
            "step only computes with it"
        )
    return f"each value of {place} has a build: {why}"


def _about_values(reason: Reason) -> str:
    if " changed from absent to " in reason:
        return f"{reason.place} came with the first step: give it a value in __init__(), and there is no such build"
    return _OF_VALUES.get(reason.what, _OF_VALUES["object"]).format(place=reason.place)


def _about_hyperparameters(reason: Reason) -> str:
    if reason.what == "fixed":
        return _about_fixed(reason)
    if reason.what == "branch":
        return "each side has a build, and both stay; on one side numbers move without a build"
    found = OF_GROUP.search(f"{reason.place} {reason}")
    place = (
        f'optimizer.param_groups[{found[2]}]["{found[3]}"]' if found else "what the optimizer is made with"
    )
    return f"set {place} before the first call, and keep its type: floats move without a build"


def _about_structure(reason: Reason) -> str:
    """Gradients are there or not, as in accumulation: nobody has to write anything against that."""
    if reason.place == GRADIENTS_THERE:
        return ""
    return "each choice of arguments has a build: give the same ones in each call"


def _always(text: str) -> Callable[[Reason], str]:
    return lambda reason: text.format(place=reason.place)


def _about_branch(reason: Reason) -> str:
    """Of a branch, which is torch's own where build() has none on that size."""
    on_size = ".size(" in reason.place
    torchs = "torch has some of its own, as in convolutions, and for one of yours " if on_size else ""
    return f"each way of a branch has a build, and both stay; {torchs}torch.where(condition, a, b) has one for both"


_OF_FORMS: Final = {  # what to pass in the place of an argument, by the field of its key that differs
    "shape": "{place} with one number of dimensions",
    "stride": "{place}.contiguous()",
    "dtype": "{place}.to(dtype)",
    "device": "{place}.to(device)",
    "requires_grad": "{place}.detach(), unless its gradient is asked for",
    "hooks": "{place} without hooks of its own",
    "unresolved": "{place}.resolve_conj().resolve_neg()",
    "attributes": "{place} without attributes of its own",
}
_OF_VALUES: Final = {  # what to write in the place of a value, by its kind
    "number": "each value of {place} has a build: what changes from step to step can be a tensor or a float argument",
    "bool": "each value of {place} has a build, and both stay; for one build pass a tensor, by which torch.where(it, a, b) chooses",
    "text": "each value of {place} has a build, and all stay: few texts need nothing; keep a text that is another one at each "
    "step, such as the name of a file, out of the step",
    "function": "each function has a build: make that in {place} once, since a lambda or a partial that is made anew is another "
    "one each time",
    "None": "there is a build with {place} and one without it, and both stay; for one build, give it a value from the first step on",
    "option": "each value of {place} has a build, and all stay",
    "kinds": "each kind of value in {place} has a build: let it be of one kind, such as a tensor or a float",
    "tensor": "write into the tensor in {place}, as {place}.copy_(new) does; one that has another shape at each step can be an "
    "argument",
    "object": "each object in {place} has a build: keep the same one there, and change its tensors, and the numbers that the "
    "step only computes with; give numbers for torch.tensor([...]) as an argument, a tensor made outside of build()",
}
_LINES: Final[Mapping[Cause, Callable[[Reason], str]]] = {
    Cause.FORM: _about_form,
    Cause.NUMBER_GIVEN: _about_whole_numbers,
    Cause.CONSTANT_GIVEN: _about_values,
    Cause.STRUCTURE: _about_structure,
    Cause.IDENTITY: _always("pass x.clone() where two arguments, or an argument and state, are to be apart"),
    Cause.NUMBER: _about_numbers,
    Cause.VALUE: _about_values,
    Cause.HYPERPARAMETER: _about_hyperparameters,
    Cause.TRAINING: _always(
        "each mode has a build, and both stay: going back and forth makes no further one"
    ),
    Cause.TORCH_MODE: _always(
        "each mode has a build, and both stay; for one build, enter `with torch.no_grad():` and the like in build()"
    ),
    Cause.SETTING: _always("set graph.config before the first call"),
    Cause.MEMBER: _always("set modules and add optimizers in __init__, or before the first call"),
    Cause.STATE: _always(
        "write into the tensor that is there: parameter.data.copy_(new), load_state_dict(...)"
    ),
    Cause.STATE_FORM: _always(
        "set requires_grad, dtype and device of parameters and buffers before the first call"
    ),
    Cause.HOOK: _always("register hooks before the first call"),
    Cause.READ: _always(
        "what differs at each step can stay a tensor: torch.where(condition, a, b) for a branch, a fixed size and a mask for "
        "a size"
    ),
    Cause.BRANCH: _about_branch,
    Cause.FIXED: _about_fixed,
    Cause.ONCE: _always("move what changes {place} out of build()"),
    Cause.ROOM: _always(
        'config.max_builds(n, keep="recent") with a larger n keeps all builds that are in use'
    ),
}


def _quoted(path: str) -> str:
    return f"'{path}'" if '"' in path else f'"{path}"'


def _line(where: Origin | None) -> str:
    return f"{where.file}:{where.line}" if where is not None and where.file else "code of the step"
