"""What a search for a NaN or an infinity has found, in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from monograph.inspect.summary import Summary
from monograph.ir.text import Displayed
from monograph.user_code.lines import Origin

_SHOWN = 5  # of the places that are reached


@dataclass(frozen=True)
class Named:
    """A value of the step: what the user knows it as, and its range."""

    name: str
    value: Summary

    def __str__(self) -> str:
        return f"{self.name}: {self.value}"


@dataclass(frozen=True, repr=False)
class Nonfinite(Displayed):
    """An op that made a NaN or an Inf, with what went into it and what came out."""

    where: Origin
    kind: str  # "NaN" or "Inf"
    op: str  # as it stands in the text of the program; empty for what came in from outside
    made: Named
    operands: tuple[Named, ...]
    is_state: bool = False  # it was in the state when the step began
    infinite: tuple[Named, ...] = ()  # inputs of the step whose infinities reach the op
    written: tuple[str, ...] = ()  # ops of the step whose infinities do, with their lines
    reason: str = ""  # what of its inputs led to it, where their range shows it
    reaches: tuple[str, ...] = ()  # the results and the new state that are not finite by it

    @property
    def place(self) -> str:
        """The op and its line, in one line."""
        return place_text(self.op, self.where)

    def __str__(self) -> str:
        lines = [f"the first {self.kind} is made by {self.op}"]
        if not self.op:
            lines = [f"the {self.kind} is not of this step: it came in with {self.made.name}"]
        if "_c10d_functional." in self.op:
            lines = [f"the first {self.kind} comes from another process, by {self.op}"]
        if self.where.file:
            lines.append(f'  at "{self.where.file}", line {self.where.line}')
        if self.op and (self.where.module or self.where.phase):
            of = f": the gradient of {self.where.gradient_of}" if self.where.gradient_of else ""
            lines.append(f"  in {self.where.module or 'build()'} ({self.where.phase}{of})")
        lines += [f"  from {operand}" for operand in self.operands]
        lines.append(f"  made {self.made}" if self.op else f"  {self.made}")
        lines += [f"  {self.reason}"] * bool(self.reason)
        lines += [f"  an Inf came in with {item}" for item in self.infinite]
        lines += [f"  an Inf was made by {place}" for place in self.written[:_SHOWN]]
        if not self.op and self.is_state:
            lines.append(
                "  config.detect_nonfinite() stops at the step that makes it, with the state of before"
            )
        return "\n".join(lines)


@dataclass(frozen=True, repr=False)
class NonfiniteReport(Displayed):
    """What `find_nonfinite` found. `ok` says that results and new state are finite."""

    graph: str
    reached: tuple[str, ...]  # the results and the state that are not finite
    found: Nonfinite | None
    backend: str = ""  # set if only the compiled kernels make it, and the same step op by op does not
    is_of_rank: bool = False  # other ranks take a part in the step
    nan: Nonfinite | None = None  # the first op that makes a NaN, where `found` makes an infinity
    state: tuple[str, ...] = ()  # the part of `reached` that is new state
    spared: str = ""  # "the results stay" or "the new state stays", where all of these are finite
    hint: str = ""  # what to do
    meant: tuple[str, ...] = ()  # results and state with infinities that came in or that the code writes
    inside: tuple[Nonfinite, ...] = ()  # of a step that is ok: ops whose NaN or infinity reaches nothing

    @property
    def ok(self) -> bool:
        """True if nothing that the step gives holds a NaN or an Inf."""
        return not self.reached

    @property
    def first(self) -> Origin | None:
        """The user's line, the module and the phase of the first one."""
        return None if self.found is None else self.found.where

    def __str__(self) -> str:
        return self._of_a_finite_step() if self.ok else "\n".join(self._of_another())

    def _of_a_finite_step(self) -> str:
        here = " on this rank" if self.is_of_rank else ""
        text = f"{self.graph}: all results and all new state are finite{here}"
        if self.meant:
            text += f", but for infinities that came in or that the code writes: {_some(self.meant)}"
        if self.inside:
            first, more = self.inside[0], len(self.inside) - 1
            reason = f": {first.reason}" * bool(first.reason)
            others = f", and of {more} more op{'s' * (more > 1)}" * bool(more)
            text += f"\n  reaches none of them: the {first.kind} of {first.place}{reason}{others}"
        return text

    def _of_another(self) -> Iterator[str]:
        yield f"{self.graph}: not finite: {_some(self.reached)}"
        if self.spared:
            yield f"all of {self.spared} finite"
        if self.backend:
            yield f"only in the kernels of {self.backend}: op by op the same step is finite"
        for item in (self.found, self.nan):
            if item is not None:
                yield str(item)
                if item.reaches and set(item.reaches) != set(self.reached):
                    yield f"  it reaches {_some(item.reaches)}"
        if self.hint:
            yield f"hint: {self.hint}"


def _some(places: Sequence[str]) -> str:
    more = f" and {len(places) - _SHOWN} more" * (len(places) > _SHOWN)
    return f"{', '.join(places[:_SHOWN])}{more}"


def place_text(op: str, where: Origin) -> str:
    """An op and the user's line of it, in one line."""
    return f'{op} at "{where.file}", line {where.line}' if where.file else op
