"""debug(): reports what a compilation does while it does it, so that an error comes after what led to it."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import distributed, fx, nn

from monograph.capture.step.observer import SILENT, Observer
from monograph.compat.modules import buffers_of, parameters_of
from monograph.errors import DefinitionError, shown
from monograph.inspect.printed.text import one_line, state_text, value_text
from monograph.inspect.printed.tree import wrapped
from monograph.inspect.printed.waiting import FootLine, Waiting, is_silenced
from monograph.ir.call_text import Leaf
from monograph.ir.meta import TensorMeta, describe, origin
from monograph.ir.printer import call_text

LOGGER = logging.getLogger("monograph.debug")
OFF, STAGES, MODULES, OPS, LINES = -1, 0, 1, 2, 3
_REFRESH = 0.2  # seconds between two looks of the progress line
_ALL_RANKS = -1


@dataclass(frozen=True)
class DebugOptions:
    """How much is reported, and on which ranks."""

    v_level: int = OFF
    ranks: tuple[int, ...] = (0,)  # none: all
    max_py_stack_depth: int = 2
    only_user_py_stack: bool = True
    op_repr_with_py_stack: bool = False


def debug_options(
    v_level: int,
    ranks: int | Sequence[int] | None,
    max_py_stack_depth: int,
    only_user_py_stack: bool,
    op_repr_with_py_stack: bool,
) -> DebugOptions:
    """The options of a call of `debug`; DefinitionError for those that there are not."""
    problem = None
    if type(v_level) is not int or not OFF <= v_level <= LINES:
        problem, hint = (
            f"v_level={shown(v_level)}",
            "levels: -1 off, 0 stages, 1 modules, 2 ops, 3 ops with lines",
        )
    elif type(max_py_stack_depth) is not int or max_py_stack_depth < 0:
        problem, hint = f"max_py_stack_depth={shown(max_py_stack_depth)}", "a number of frames from 0 on"
    listed = (ranks,) if isinstance(ranks, int) else (0,) if ranks is None else tuple(ranks)
    if not all(type(rank) is int for rank in listed):
        problem, hint = f"ranks={shown(ranks)}", "a rank, a list of ranks, or -1 for all"
    if problem is not None:
        raise DefinitionError(f"debug({problem})", hint=hint)
    chosen = () if _ALL_RANKS in listed else listed
    return DebugOptions(v_level, chosen, max_py_stack_depth, only_user_py_stack, op_repr_with_py_stack)


def observer_for(options: DebugOptions, name: str, kind: str, number: int) -> Observer:
    """The observers of the compilation of a build."""
    silent = options.v_level == OFF or bool(options.ranks and _rank() not in options.ranks)
    if silent and not options.op_repr_with_py_stack:
        return SILENT if is_silenced() else Waiting(name, number)
    return Teller(options, f"(GRAPH:{name}:{kind})", silent=silent)


def _rank() -> int:
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank()
    return int(os.environ.get("RANK", "0"))


class Teller(Observer):
    """Writes to the terminal and to the log `monograph.debug`."""

    def __init__(self, options: DebugOptions, graph: str, *, silent: bool = False) -> None:
        self._level = OFF if silent else options.v_level
        self._graph = graph
        lines = self._level >= LINES or options.op_repr_with_py_stack
        self.stack_depth = options.max_py_stack_depth if lines else 0
        self.only_user_frames = options.only_user_py_stack
        self._waiting: fx.Node | None = None  # an op whose result is not known yet
        self._count = 0
        self._progress = _Progress(on=self._level == STAGES)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Report that it begins, and the seconds when it is over, or that it failed."""
        self._tell(STAGES, f"{self._graph} start {name}.")
        self._count, start = 0, time.perf_counter()
        try:
            yield
        except BaseException as error:
            self._flush()
            self._tell(STAGES, f"[ERROR]{self._graph} {name} failed: {type(error).__name__}")
            raise
        finally:
            self._progress.end()
        self._flush()
        ops = f", {self._count} ops" if self._count else ""
        self._tell(STAGES, f"{self._graph} {name} done: {time.perf_counter() - start:.2f} s{ops}.")

    def module_called(self, path: str, module: nn.Module, inputs: Sequence[Leaf]) -> None:
        """A module with its inputs, parameters and buffers."""
        self._flush()
        self._tell(MODULES, f"(MODULE:{path}:{one_line(module)})")
        self._crossing("INPUT", path, "input.", inputs)
        for tag, table in (("PARAMETER", parameters_of(module)), ("BUFFER", buffers_of(module))):
            for name, tensor in table.items():
                if tensor is not None:
                    self._tell(MODULES, f"({tag}:{path}.{name}:{state_text(tensor)})")

    def module_returned(self, path: str, module: nn.Module, outputs: Sequence[Leaf]) -> None:
        """Its outputs."""
        self._flush()
        self._crossing("OUTPUT", path, "output", outputs)

    def _crossing(self, tag: str, path: str, what: str, leaves: Sequence[Leaf]) -> None:
        for leaf in leaves:
            self._tell(MODULES, f"({tag}:_{path}_{what}{leaf.path}:{value_text(leaf.value)})")

    def op(self, node: fx.Node) -> None:
        """An op; it is reported when the next thing happens, since its result is known then."""
        self._flush()
        self._waiting = node
        self._count += 1
        self._progress.at(self._count, origin(node).module)

    def _flush(self) -> None:
        node, self._waiting = self._waiting, None
        if node is None or self._level < OPS:
            return
        place = origin(node)
        made = _made(describe(node.meta.get("val")))
        text = f"(OPERATOR: {node.name} = {call_text(node)} -> {made}, {place.phase} in {place.module or 'build()'})"
        if self._level >= LINES and place.file:
            frames = place.stack or (f"{os.path.basename(place.file)}:{place.line}",)
            text = f"{text[:-1]}, location=({'; '.join(map(str, frames))}))"
        self._tell(OPS, text)

    def _tell(self, level: int, text: str) -> None:
        if self._level < level:
            return
        self._progress.hide()
        LOGGER.info(text)
        if _log_is_shown():
            return
        for line in wrapped(text, ""):
            print(line, flush=True)


def _log_is_shown() -> bool:
    """True if the log goes to the terminal already, as `logging.basicConfig(level="INFO")` has it."""
    logger: logging.Logger | None = LOGGER if LOGGER.isEnabledFor(logging.INFO) else None
    shown = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
    while logger is not None:
        for handler in logger.handlers:
            stream = getattr(handler, "stream", None) or getattr(
                getattr(handler, "console", None), "file", None
            )
            if handler.level <= logging.INFO and any(stream is item for item in shown if item is not None):
                return True
        logger = logger.parent if logger.propagate else None
    return False


def _made(described: Any) -> str:
    """The form of a result with its device and where it is placed."""
    if isinstance(described, tuple):
        return f"({', '.join(map(_made, described))})"
    if isinstance(described, TensorMeta):
        device = described.device
        return f'{described} device={device}, placement=(type="{device.type}", ranks=[{_rank()}])'
    return str(described or "nothing")


class _Progress:
    """How many ops are recorded, at the foot of a terminal while a stage lasts."""

    def __init__(self, *, on: bool) -> None:
        self._line, self._last = FootLine(sys.stdout if on else None), time.perf_counter()
        self.hide = self.end = self._line.hide

    def at(self, count: int, module: str) -> None:
        """So many ops are done."""
        now = time.perf_counter()
        if now - self._last > _REFRESH:
            self._last = now
            self._line.show(f"{count} ops, {module}")
