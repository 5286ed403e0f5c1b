"""Which Python code runs while a step is captured."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from types import CodeType, FrameType
from typing import Any

from monograph.capture.guards.sources.same_objects import compares_objects
from monograph.user_code.files import is_user_file

Trace = Callable[[FrameType, str, Any], Any]


class Verdict(Enum):
    """What becomes of a code object that starts."""

    TAKEN = "its names are known"
    FOLLOWED = "its names are known, and its frames are to be followed"
    TRACING = "it traces, and is no part of the step"
    LATER = "it was called by what traces; the step itself may call it yet"
    AGAIN = "it is reported each time that it starts"
    SINK = "it takes what a step writes, and gives nothing back; neither does what it calls"


class CodeWatch:
    """Reports every code object of this thread before it runs for the first time.

    It uses the trace function of the thread, which CPython calls at the start of every frame. A debugger or a coverage
    tool that has set one goes on to be called. Frames that one of the `followed` code objects runs in are reported
    line by line, together with what the Python functions that they call return: `seen(values)` gets the objects.
    Code of the user that compares by `is` is shown to `look(frame)` before each instruction.
    """

    def __init__(
        self, started: Callable[[CodeType, FrameType], Verdict], seen: Callable[[CodeType, list[Any]], None]
    ) -> None:
        self._started, self._seen = started, seen
        self._look: Callable[[FrameType], None] | None = (
            None  # errors of users hold this object, and not the trace
        )
        self._comparing: set[int] = set()
        self._known: dict[int, CodeType] = {}  # the codes stay alive, so that no id is given twice
        self._plain: set[int] = set()  # those of them with nothing more to see
        self._followed: set[int] = set()
        self._tracing: set[int] = set()
        self._later: dict[int, CodeType] = {}
        self._sinks: dict[int, CodeType] = {}
        self._aside: dict[int, CodeType] = {}  # sinks whoever calls them
        self._other: Trace | None = None

    @contextmanager
    def on(self, look: Callable[[FrameType], None]) -> Iterator[None]:
        """Inside, code that starts is reported."""
        before: Any = sys.gettrace()
        self._look = look
        self._other = before
        for callback in gc.callbacks:  # they run whenever memory is collected, and are no part of the step
            code = getattr(callback, "__code__", getattr(type(callback).__call__, "__code__", None))
            if code is not None:
                self._aside[id(code)] = code
        sys.settrace(self._trace if before is not None else self._quick())
        try:
            yield
        finally:
            sys.settrace(before)
            self._look = None

    @contextmanager
    def off(self) -> Iterator[Any]:
        """Inside, nothing is reported: what runs there is torch's tracing, not the user's step. Gives what `resume` takes."""
        reporting = self.pause()
        try:
            yield reporting
        finally:
            self.resume(reporting)

    def pause(self) -> Any:
        """Report nothing from now on: what runs is no code of the step. Gives what `resume` takes."""
        reporting = sys.gettrace()
        sys.settrace(self._other)
        return reporting

    resume = staticmethod(sys.settrace)

    def call(self, reporting: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Inside of `off`, call what belongs to the step: report it as before."""
        self.resume(reporting)
        try:
            return function(*args, **kwargs)
        finally:
            self.pause()

    def _quick(self) -> Trace:
        """`_trace` where no other tool looks: most calls are of known code, and end after a look at sets."""
        tracing, plain, sinks, followed, look_closer = (
            *(self._tracing, self._plain, self._sinks, self._followed),
            self._trace,
        )

        def trace(frame: FrameType, event: str, argument: Any) -> Any:
            known = id(frame.f_code)
            if known in tracing:
                return None
            if known in plain and (caller := frame.f_back) is not None:
                calling = id(caller.f_code)
                if calling not in sinks and calling not in followed:
                    return None
            return look_closer(frame, event, argument)

        return trace

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        known = id(frame.f_code)
        if known in self._tracing and self._other is None:
            return None
        code, caller = frame.f_code, frame.f_back
        calling = 0 if caller is None else id(caller.f_code)
        if calling in self._sinks or known in self._aside:
            self._sinks[known] = code
        elif known not in self._known and not (known in self._later and self._is_aside(calling)):
            self._judge(code, frame)
        other = None if self._other is None else self._other(frame, event, argument)
        if known in self._followed:
            self._seen(code, list(frame.f_locals.values()))
            local: Trace | None = self._follower(code, other)
        elif calling in self._followed and caller is not None:
            frame.f_trace_lines = other is not None
            local = self._answering(caller.f_code, other)
        else:
            local = other
        return self._looking(frame, local) if known in self._comparing else local

    def _is_aside(self, calling: int) -> bool:
        """True for code that traces, and for code that up to now only such code has called."""
        return calling in self._tracing or (calling in self._later and calling not in self._known)

    def _judge(self, code: CodeType, frame: FrameType) -> None:
        verdict = self._started(code, frame)
        if verdict is Verdict.AGAIN:
            return
        if verdict is Verdict.LATER:
            self._later[id(code)] = code
            return
        if verdict is Verdict.SINK:
            self._aside[id(code)] = self._sinks[id(code)] = code
            return
        self._known[id(code)] = code
        if verdict is Verdict.FOLLOWED:
            self._followed.add(id(code))
        elif verdict is Verdict.TRACING:
            self._tracing.add(id(code))
        else:
            self._plain.add(id(code))
        if verdict is not Verdict.TRACING and is_user_file(code.co_filename) and compares_objects(code):
            self._comparing.add(id(code))
            self._plain.discard(id(code))

    def _looking(self, frame: FrameType, local: Trace | None) -> Trace:
        """A local trace function for a frame that compares by `is`, around another one."""
        frame.f_trace_opcodes = True

        def trace(frame: FrameType, event: str, argument: Any) -> Any:
            nonlocal local
            if event == "opcode":
                if self._look is not None:
                    self._look(frame)
            elif local is not None:
                local = local(frame, event, argument)
            return trace

        return trace

    def _follower(self, code: CodeType, other: Any) -> Trace:
        """A local trace function for a frame whose variables are to be seen."""

        def trace(frame: FrameType, event: str, argument: Any) -> Any:
            self._seen(code, list(frame.f_locals.values()))
            if other is not None:
                other(frame, event, argument)
            return trace

        return trace

    def _answering(self, caller: CodeType, other: Any) -> Trace:
        """A local trace function for a frame whose result goes to a followed one."""

        def trace(frame: FrameType, event: str, argument: Any) -> Any:
            if event == "return":
                self._seen(caller, [argument])
            if other is not None:
                other(frame, event, argument)
            return trace

        return trace
