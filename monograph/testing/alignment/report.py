"""The message of a failed alignment: the difference, the inputs, the seed, the mode, the graph, a script."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from monograph import Graph
from monograph.testing.alignment.calls import Call, Calls
from monograph.testing.alignment.case import Case
from monograph.testing.alignment.first_module import first_that_differs
from monograph.testing.alignment.script import write_script
from monograph.testing.modes import Mode

_MANY_LINES = 60  # of a program, in a message
_MANY_ELEMENTS = 40  # of a tensor, in a message


class AlignmentError(AssertionError):
    """A mode did not give what eager mode gives. If the mode raised an exception, that is the `__cause__`."""

    def __init__(self, message: str, *, what: str, mode: str, seed: int, script: Path | None) -> None:
        super().__init__(message)
        self.what = what  # the first difference
        self.mode = mode
        self.seed = seed
        self.script = script  # a stand-alone script that fails in the same way


@dataclass(frozen=True)
class Failure:
    """Where an alignment failed, and how."""

    case: Case
    mode: Mode
    calls: Calls
    number: int  # of the call
    findings: Sequence[str]
    graph: Graph | None

    def error(self) -> AlignmentError:
        """The exception; its script is written now."""
        path, note = write_script(self.case, self.mode, self.findings[0])
        against = f" against {self.case.reference_name}" if callable(self.case.against) else ""
        lines = [f"{self.case.name} in mode {self.mode.name}{against}: {self.findings[0]}", *self._told(note)]
        return AlignmentError(
            "\n".join(lines), what=self.findings[0], mode=self.mode.name, seed=self.case.seed, script=path
        )

    def _told(self, note: str) -> list[str]:
        call = self.calls.items[self.number]
        step = "forward" if self.calls.backward is None else "forward, backward and update"
        lines = [
            f"  call       {self.number + 1} of {len(self.calls.items)} ({call.origin} values), {step}",
            f"  seed       {self.case.seed}",
        ]
        lines += [f"  argument   {line}" for line in told_arguments(call)]
        if callable(self.case.against) and (first := first_that_differs(self.case, call)) is not None:
            lines.insert(0, f"  module     {first}")
        lines += [f"  besides    {finding}" for finding in self.findings[1:]]
        lines.append(f"  script     {note}")
        return [*lines, *self._program()]

    def _program(self) -> list[str]:
        if self.graph is None or not self.graph.builds:
            return ["  graph      none was built"]
        text = self.graph.builds[-1].program.text.splitlines()
        rest = [f"... {len(text) - _MANY_LINES} more lines"] if len(text) > _MANY_LINES else []
        return ["  graph", *(f"    {line}" for line in (*text[:_MANY_LINES], *rest))]


def told_arguments(call: Call) -> list[str]:
    """A line for each argument: what it is, and its values if they are few."""
    return [f"{path}: {_told(leaf)}" for path, leaf in call.copied().leaves()]


def _told(leaf: Any) -> str:
    if not isinstance(leaf, torch.Tensor):
        return repr(leaf)
    text = f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"
    if leaf.layout is not torch.strided:
        return f"{text} {leaf.layout}"
    if not leaf.is_contiguous():
        text += f" strides {leaf.stride()}"
    if leaf.requires_grad:
        text += " requires_grad"
    return f"{text} {leaf.tolist()}" if leaf.numel() <= _MANY_ELEMENTS else text


def print_step(case: Case, mode: Mode, calls: Calls, graph: Graph, returned: Any) -> None:
    """What `verbose` shows of a step: the graph with its program, the arguments, the results."""
    print(f"--- {case.name} in mode {mode.name} {'with backward' if calls.backward else 'forward'} ---")
    print(repr(graph))
    if graph.builds:
        print(graph.builds[-1].program.text)
    print(*(f"{line}" for line in told_arguments(calls.items[-1])), sep="\n")
    print("results:", returned)
