"""What a user should know of a traced step: what is constant in it, and what no replay does again."""

from __future__ import annotations

import dis
from collections.abc import Iterator, Sequence
from types import CodeType
from typing import Final

from monograph.capture.effects.foreign_objects import Effects
from monograph.capture.guards.sources.code_names import names_of
from monograph.capture.step.traced_step import TracedStep
from monograph.errors import CaptureError
from monograph.state.threads import alone
from monograph.user_code.files import is_installed_file, is_user_file
from monograph.user_code.lines import Origin

_JUMPS: Final = frozenset({*dis.hasjrel, *dis.hasjabs})
_INSTEAD: Final = {"the text of a tensor": "; to print values, return the tensor and print it after the call"}


def check_strict(step: TracedStep) -> None:
    """Raise CaptureError in strict mode for what is read unguarded, and for what only a new capture does again."""
    unguarded = _unguarded(step)
    if step.request.settings.strict and (found := [*unguarded, *_repeated(step.effects)]):
        raise CaptureError(
            found[0],
            where=next(iter(step.reach.unguarded.values()), Origin()) if unguarded else Origin(),
            hint="pass what is read as an argument; config.strict(False) makes this a warning",
        )


def notes_of(step: TracedStep, moved: Sequence[str], *, why_still: str) -> list[str]:
    """One sentence for each. `moved` are random generators."""
    notes = [*_draws(moved), *_repeated(step.effects)]
    if step.still:
        names = ", ".join(sorted(step.still))
        notes.append(
            f"another value of {names} needs another build: code takes no number that moves ({why_still})"
        )
    notes += _unguarded(step)
    notes += _prints(step) if "the text of a tensor" not in step.reach.unguarded else ()
    notes += [
        f"build() calls {name}, whose cache got tensors of the step: they are forgotten, and each step computes them; "
        "call it once before the first step, and it gives what it has kept"
        for name in step.forgotten
    ]
    if step.results.changes_arguments:
        notes.append(
            "build() changes a list, a dict, an object or requires_grad among its arguments, and with gradient "
            "accumulation each micro-batch has its own: the caller's stays as it is"
        )
    return notes


def _draws(moved: Sequence[str]) -> Iterator[str]:
    drawing = "build() draws" if alone() else "build() or another thread draws"
    yield from (f"{drawing} from {name}: the numbers drawn at capture are constants" for name in moved)


def _repeated(effects: Effects) -> list[str]:
    return [
        f"build() changes {name} in a way that only a new capture can repeat: each step that does so is captured anew"
        for name in effects.once
    ]


def _prints(step: TracedStep) -> Iterator[str]:
    """One for each piece of the user's code that ran, and that prints whatever its branches take."""
    for code in step.reach.own_codes():
        is_users = is_user_file(code.co_filename) and not is_installed_file(code.co_filename)
        line = _printing_line(code) if is_users else None
        if line is not None:
            yield (
                f"build() prints ({Origin(code.co_filename, line)}): that is printed when a build is made, and not at each step; "
                "to print at each step, return the value and print it after the call"
            )


def _printing_line(code: CodeType) -> int | None:
    """The first line of code that calls `print`, and that no jump leaves out; None if there is none."""
    if "print" not in names_of(code).globals:
        return None
    after_jumps = 0
    for item in dis.get_instructions(code):
        if item.offset >= after_jumps and "GLOBAL" in item.opname and item.argval == "print":
            return item.positions.lineno if item.positions else None
        if isinstance(item.argval, int) and item.opcode in _JUMPS:
            after_jumps = max(after_jumps, item.argval)
    return None


def _unguarded(step: TracedStep) -> list[str]:
    return [
        f"build() asks for {what} ({where}): what it gets there is a constant of this build{_INSTEAD.get(what, '')}"
        for what, where in step.reach.unguarded.items()
    ]
