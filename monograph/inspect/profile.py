"""profile(): where the time of a step goes, by op, module, line and phase, and how near that is to what the machine can do."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import fx

from monograph.compat.distributed.ops import awaited, communicates
from monograph.compiler import Build
from monograph.errors import DefinitionError
from monograph.inspect.roofline import Roofline, measured_roofline, wait_for
from monograph.inspect.walk import Walk, own_inputs
from monograph.ir.call.nested import tensors_in
from monograph.ir.meta import origin
from monograph.ir.ops.arithmetic import flops_of_call
from monograph.ir.printer import call_text, short_target
from monograph.ir.text import Displayed, Rows, table
from monograph.runnable import why_not_in_place
from monograph.settings import PLAIN
from monograph.state.random import cpu_state, set_cpu_state
from monograph.user_code.lines import Origin

_REPEATS = 5
_SHOWN = 12


@dataclass(frozen=True)
class OpTime:
    """An op of the step. `share` is the least time that its work needs on this machine, over the time it took."""

    name: str
    op: str
    text: str
    where: Origin
    seconds: float
    flops: int
    nbytes: int  # read and written
    share: float


@dataclass(frozen=True)
class Group:
    """Ops that have something in common."""

    name: str
    count: int
    seconds: float
    flops: int
    nbytes: int
    share: float


@dataclass(frozen=True, repr=False)
class Profile(Displayed):
    """What `profile` measured: each op of the step on its own, and the step as it runs."""

    graph: str
    backend: str
    step_seconds: float  # of the build, as it runs
    roofline: Roofline
    ops: tuple[OpTime, ...]
    costs: tuple[str, ...] = ()  # lines of the user's that make it slower
    build: int = 0  # its number

    @property
    def seconds(self) -> float:
        """All ops one by one."""
        return sum(op.seconds for op in self.ops)

    def by_op(self) -> tuple[Group, ...]:
        """Ops of one kind together, the longest first."""
        return self._grouped(lambda op: (op.op,))

    def by_phase(self) -> tuple[Group, ...]:
        """Forward, backward, update."""
        return self._grouped(lambda op: (op.where.phase,))

    def by_module(self, depth: int | None = None) -> tuple[Group, ...]:
        """Modules with all that is inside of them; `depth` limits how deep paths go."""
        return self._grouped(lambda op: _prefixes(op.where, depth))

    def by_line(self) -> tuple[Group, ...]:
        """Lines of the user's code, each with the backward of what it computes. Updates are of no line."""
        return self._grouped(
            lambda op: (op.where.place,) if op.where.place and op.where.phase != "update" else ()
        )

    def _grouped(self, keys: Callable[[OpTime], Iterable[str]]) -> tuple[Group, ...]:
        members: dict[str, list[OpTime]] = defaultdict(list)
        for op in self.ops:
            for key in keys(op):
                members[key].append(op)
        groups = [_group(name, ops) for name, ops in members.items()]
        return tuple(sorted(groups, key=lambda group: -group.seconds))

    def trace(self, path: str | Path) -> None:
        """Write the ops, one after the other and inside of their modules, for chrome://tracing and ui.perfetto.dev."""
        target = Path(path)
        if target.suffix != ".json":
            raise DefinitionError(f"trace({str(path)!r}): a trace is a JSON file", hint='trace("step.json")')
        target.write_text(json.dumps({"traceEvents": _events(self.ops), "displayTimeUnit": "ms"}))

    def __str__(self) -> str:
        head = (
            f"{self.graph} on {self.backend}: a step takes {self.step_seconds * 1e3:.3f} ms; "
            f"its {len(self.ops)} ops one by one {self.seconds * 1e3:.3f} ms"
        )
        if self.backend != PLAIN:
            head += f"\nThe tables list the ops as captured, one by one; {self.backend} runs them as compiled code."
        parts = [head, str(self.roofline)]
        for title, groups in (
            ("phase", self.by_phase()),
            ("module, with those inside", self.by_module()),
            ("line, with its backward", self.by_line()),
            ("op", self.by_op()),
        ):
            rows = [
                (
                    group.name or "build()",
                    str(group.count),
                    f"{group.seconds * 1e3:.3f}",
                    f"{group.seconds / self.seconds:.1%}" if self.seconds else "",
                    f"{group.flops / 1e6:.2f}",
                    f"{group.nbytes / 1e6:.2f}",
                    f"{group.share:.0%}",
                )
                for group in groups[:_SHOWN]
            ]
            columns = (title, "ops", "ms", "of all", "MFLOP", "MB", "of the roofline")
            more = f"\nand {len(groups) - _SHOWN} more" if len(groups) > _SHOWN else ""
            parts.append(table(columns, rows) + more)
        parts += self.costs
        return "\n\n".join(parts)


def profile(name: str, build: Build, inputs: Sequence[Any]) -> Profile:
    """Time the captured program op by op on these inputs, and the build as a whole."""
    walk = _TimedWalk(build.stages[0].program, inputs, keep=False)
    walk.run()
    roofline = measured_roofline(_device(inputs))
    ops = Rows(_op_time(node, walk.measured[node], roofline) for node in walk.nodes)
    seconds = []
    for _ in range(_REPEATS):
        copies = own_inputs(inputs)
        with torch.random.fork_rng(devices=()):
            start = perf_counter()
            build.executor.rehearse(copies)
            _finish(copies)
            seconds.append(perf_counter() - start)
    return Profile(
        name,
        build.backend,
        min(seconds),
        roofline,
        ops,
        tuple(why_not_in_place(build.executor.bound, build.backend)),
        build.number,
    )


class _TimedWalk(Walk):
    """Runs each op several times, which gives the same each time, and what communicates once, as other ranks do."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.measured: dict[fx.Node, tuple[float, int, int]] = {}  # seconds, FLOPs, bytes
        super().__init__(*args, **kwargs)

    def computed(self, node: fx.Node) -> Any:
        """What an op gives, with the median of its times."""
        state = cpu_state()
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), self.values.__getitem__)
        target: Callable[..., Any] = node.target  # type: ignore[assignment]
        if node.op != "call_function":
            return super().computed(node)
        seconds = []
        for _ in range(1 if communicates(target) else _REPEATS):
            set_cpu_state(state)
            start = perf_counter()
            made = awaited(target, target(*args, **kwargs))
            _finish(made)
            seconds.append(perf_counter() - start)
        read = [item.nbytes for item in tensors_in([*args, *kwargs.values()])]
        written = [item.nbytes for item in tensors_in(made)]
        shown = {item.untyped_storage().data_ptr() for item in tensors_in([*args])}
        views = all(item.untyped_storage().data_ptr() in shown for item in tensors_in(made))
        nbytes = 0 if views else sum(read) + sum(written)
        self.measured[node] = median(seconds), flops_of_call(node.target, args, kwargs, made), nbytes
        return made


def _finish(made: Any) -> None:
    """Wait for what devices have to do for it."""
    for tensor in tensors_in(made):
        wait_for(tensor)


def _device(inputs: Sequence[Any]) -> torch.device:
    """Where most of what the step reads is."""
    held: dict[torch.device, int] = defaultdict(int)
    for tensor in tensors_in(inputs):
        held[tensor.device] += tensor.nbytes
    return max(held, key=held.__getitem__, default=torch.device("cpu"))


def _op_time(node: fx.Node, measured: tuple[float, int, int], roofline: Roofline) -> OpTime:
    seconds, flops, nbytes = measured
    share = min(roofline.least_seconds(flops, nbytes) / seconds, 1.0) if seconds else 0.0
    op = short_target(node.target)
    return OpTime(node.name, op, call_text(node), origin(node), seconds, flops, nbytes, share)


def _group(name: str, ops: Sequence[OpTime]) -> Group:
    seconds = sum(op.seconds for op in ops)
    share = sum(op.share * op.seconds for op in ops) / seconds if seconds else 0.0
    return Group(name, len(ops), seconds, sum(op.flops for op in ops), sum(op.nbytes for op in ops), share)


def _prefixes(where: Origin, depth: int | None) -> list[str]:
    """A module and those around it; an update belongs to an optimizer, whose name has no parts."""
    parts = [where.module] if where.phase == "update" else where.module.split(".")
    longest = len(parts) if depth is None else min(depth, len(parts))
    return [".".join(parts[: index + 1]) for index in range(longest)]


def _events(ops: Sequence[OpTime]) -> list[dict[str, Any]]:
    """Each op after the one before; a module lasts as long as ops that follow each other are inside of it."""
    events: list[dict[str, Any]] = []
    open_: list[tuple[str, float]] = []  # what has begun: phase, then modules
    now = 0.0

    def close(count: int) -> None:
        while len(open_) > count:
            name, begun = open_.pop()
            events.append(_event(name, begun, now - begun, "module", {}))

    for op in ops:
        inside = [op.where.phase or "step", *(_prefixes(op.where, None) if op.where.module else ())]
        common = 0
        while common < min(len(open_), len(inside)) and open_[common][0] == inside[common]:
            common += 1
        close(common)
        open_ += [(name, now) for name in inside[common:]]
        about = {"line": str(op.where), "MFLOP": op.flops / 1e6, "MB": op.nbytes / 1e6}
        events.append(_event(op.text[:120], now, op.seconds, "op", about))
        now += op.seconds
    close(0)
    return sorted(events, key=lambda event: (event["ts"], -event["dur"]))


def _event(name: str, start: float, seconds: float, kind: str, args: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": name, "cat": kind, "ph": "X", "ts": start * 1e6, "dur": seconds * 1e6, "pid": 1, "tid": 1, "args": args,
    }  # fmt: skip
