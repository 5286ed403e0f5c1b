"""What a search for a NaN or an infinity has found, in words."""

from __future__ import annotations

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

    def __str__(self) -> str:
        lines = [f"the first {self.kind} is made by {self.op}"]
        if not self.op:
            lines = [f"the {self.kind} is not of this step: it came in with {self.made.name}"]
        if "_c10d_functional." in self.op:
            lines = [f"the first {self.kind} comes from another process, by {self.op}"]
        if self.where.file:
            lines.append(f'  at "{self.where.file}", line {self.where.line}')
        if self.op and (self.where.module or self.where.phase):
            lines.append(f"  in {self.where.module or 'build()'} ({self.where.phase})")
        lines += [f"  from {operand}" for operand in self.operands]
        lines.append(f"  made {self.made}" if self.op else f"  {self.made}")
        lines += [f"  an Inf came in with {item}" for item in self.infinite]
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

    @property
    def ok(self) -> bool:
        """True if nothing that the step gives holds a NaN or an Inf."""
        return not self.reached

    @property
    def first(self) -> Origin | None:
        """The user's line, the module and the phase of the first one."""
        return None if self.found is None else self.found.where

    def __str__(self) -> str:
        if self.ok:
            here = " on this rank" if self.is_of_rank else ""
            return f"{self.graph}: all results and all new state are finite{here}"
        more = f" and {len(self.reached) - _SHOWN} more" * (len(self.reached) > _SHOWN)
        head = f"{self.graph}: not finite: {', '.join(self.reached[:_SHOWN])}{more}"
        if self.backend:
            head += f"\nonly in the kernels of {self.backend}: op by op the same step is finite"
        return head if self.found is None else f"{head}\n{self.found}"
