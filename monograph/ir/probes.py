"""Probes: values from inside a step, recorded while it runs compiled. They cost no retrace and no wait per step."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from monograph.compat.tensors import is_transformed
from monograph.errors import CaptureError, DefinitionError
from monograph.ir.text import Brief, Displayed
from monograph.user_code.lines import user_place

STATISTICS = ("mean", "std", "min", "max", "norm", "nonfinite")
VALUES = "values"
_KEPT_STEPS = 1000  # of statistics; of values only the newest
_SINK = threading.local()  # where the probes of the step that runs in this thread go
Sink = Callable[[str, str, torch.Tensor], object]  # name of the probe, what of it, the tensor


def probe(name: str, tensor: torch.Tensor, *, keep: str = "statistics") -> torch.Tensor:
    """Record a tensor of the step under a name; gives the tensor back, so that it can stand in an expression.

    With `keep="statistics"` its mean, standard deviation, least and largest element, norm, and the number of elements
    that are not finite are kept for the last 1000 steps; with `keep="values"` the tensor of the newest step.
    `graph.probes()` has them. Gradients are seen from a hook: `x.register_hook(lambda g: mg.probe("grad", g))`. Outside
    of a Graph, and in a branch of torch.cond, it does nothing. Raises CaptureError for what is no tensor, and inside of
    torch.vmap and the transforms of torch.func.

    >>> probe("hidden", torch.ones(2))
    tensor([1., 1.])
    """
    if not isinstance(tensor, torch.Tensor) or keep not in ("statistics", VALUES):
        what = f"keep={keep!r}" if isinstance(tensor, torch.Tensor) else f"a {type(tensor).__name__}"
        raise CaptureError(
            f"probe({name!r}): {what}",
            where=user_place(),
            hint='pass a tensor, and keep="statistics" or keep="values"',
        )
    if torch.compiler.is_dynamo_compiling():
        return tensor
    sink: Sink | None = getattr(_SINK, "sink", None)
    if sink is not None and is_transformed(tensor):
        raise CaptureError(
            f"probe({name!r}) inside of torch.vmap or a transform of torch.func",
            where=user_place(),
            hint="probe what the transform gives",
        )
    if sink is not None:
        with torch.no_grad():
            found = {VALUES: tensor.detach().clone()} if keep == VALUES else _statistics(tensor.detach())
        for what, item in found.items():
            sink(name, what, item)
    return tensor


def _statistics(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    wide = tensor.abs() if tensor.is_complex() else tensor
    wide = wide if wide.dtype in (torch.float32, torch.float64) else wide.float()
    some = wide if wide.numel() else wide.new_zeros(1)
    return {
        "mean": some.mean(),
        "std": some.std(correction=0),
        "min": some.min(),
        "max": some.max(),
        "norm": torch.linalg.vector_norm(some),
        "nonfinite": (~torch.isfinite(some)).sum(),
    }


@contextmanager
def probes_go_to(sink: Sink | None) -> Iterator[None]:
    """Inside, in this thread, probes are given to `sink`, or to nobody."""
    before = getattr(_SINK, "sink", None)
    _SINK.sink = sink
    try:
        yield
    finally:
        _SINK.sink = before


def numbered(name: str, what: str, taken: Mapping[str, Any]) -> str:
    """`name/what`, or `name#1/what` for the second probe of that name in a step, and so on."""
    number = 0
    while (path := f"{name}{f'#{number}' if number else ''}/{what}") in taken:
        number += 1
    return path


class ProbeLog:
    """What the probes of a graph recorded, by step. Tensors stay where they are until somebody looks."""

    def __init__(self) -> None:
        self._records: dict[str, OrderedDict[int, torch.Tensor]] = {}
        self.step = 0  # the step that is recorded next

    def put(self, path: str, tensor: torch.Tensor) -> None:
        """Record for the present step; twice is once. After a return to an earlier step, later ones are forgotten."""
        entries = self._records.setdefault(path, OrderedDict())
        while entries and next(reversed(entries)) > self.step:
            entries.popitem()
        entries[self.step] = tensor
        while len(entries) > (1 if path.endswith(f"/{VALUES}") else _KEPT_STEPS):
            entries.popitem(last=False)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """What is recorded inside is forgotten at the end."""
        before, step = {path: entries.copy() for path, entries in self._records.items()}, self.step
        try:
            yield
        finally:
            self._records, self.step = before, step

    def read(self) -> dict[str, ProbeHistory]:
        """All records by the name of their probe."""
        found: dict[str, dict[str, OrderedDict[int, torch.Tensor]]] = {}
        for path, entries in self._records.items():
            name, _, what = path.rpartition("/")
            found.setdefault(name, {})[what] = entries
        return {name: ProbeHistory(name, records) for name, records in found.items()}


class ProbeHistory(Displayed):
    """What one probe recorded: `steps`, and for each statistic a tensor with an entry for each step."""

    def __init__(self, name: str, records: Mapping[str, Mapping[int, torch.Tensor]]) -> None:
        self.name = name
        self._records = {what: dict(entries) for what, entries in records.items()}

    @property
    def steps(self) -> list[int]:
        """The numbers of the steps, from 0 on."""
        return list(next(iter(self._records.values()), {}))

    @property
    def statistics(self) -> dict[str, torch.Tensor]:
        """By name a tensor of one entry per step; of steps with micro-batches a row, filled up with NaN."""
        return {
            what: _rows(list(entries.values())).cpu()
            for what, entries in self._records.items()
            if what != VALUES
        }

    @property
    def value(self) -> torch.Tensor:
        """The tensor of the newest step. Raises CaptureError if statistics were kept."""
        if VALUES not in self._records:
            raise CaptureError(
                f"the probe {self.name!r} keeps statistics",
                hint='values are kept by probe(..., keep="values")',
            )
        return next(reversed(self._records[VALUES].values()))

    def __str__(self) -> str:
        if VALUES in self._records:
            return f"{self.name}: {tuple(self.value.shape)} {self.value.dtype} of step {self.steps[-1]}"
        newest = {what: item[-1] for what, item in self.statistics.items()}
        values = ", ".join(f"{what} {item.float().nanmean().item():.4g}" for what, item in newest.items())
        return f"{self.name}: {len(self.steps)} steps, the newest: {values}"


def _rows(entries: list[torch.Tensor]) -> torch.Tensor:
    if len({entry.shape for entry in entries}) == 1:
        return torch.stack(entries)
    return torch.nn.utils.rnn.pad_sequence(
        [entry.float().reshape(-1) for entry in entries], batch_first=True, padding_value=float("nan")
    )


class Probes(Brief, dict[str, ProbeHistory]):
    """All probes of a graph by name."""

    def __missing__(self, name: str) -> ProbeHistory:
        raise DefinitionError(
            f"no probe {name!r} has recorded anything", hint=f"probes: {', '.join(self) or 'none'}"
        )

    def to_tensorboard(self, writer: Any, *, after: int = -1) -> int:
        """Write the statistics of steps after `after` as scalars `name/mean` and so on, and values as histograms.

        `writer` is a `torch.utils.tensorboard.SummaryWriter`, or anything with its `add_scalar` and `add_histogram`.
        Gives the number of the newest step, to be `after` the next time.
        """
        for name, history in self.items():
            for what, entries in history._records.items():
                for step, item in entries.items():
                    if step <= after:
                        continue
                    if what == VALUES:
                        writer.add_histogram(name, item, step)
                    else:
                        writer.add_scalar(f"{name}/{what}", item.float().mean().item(), step)
        return max((history.steps[-1] for history in self.values() if history.steps), default=after)

    def __str__(self) -> str:
        return "\n".join(map(str, self.values())) or "no probes: mg.probe(name, tensor) in build() makes one"
