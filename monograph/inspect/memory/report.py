"""What `graph.memory()` gives: the bytes of a step, and a table of who holds them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from monograph.errors import DefinitionError
from monograph.inspect.memory.chart import drawn
from monograph.inspect.memory.holders import GIVEN, Holding, by_module
from monograph.inspect.memory.point import Point
from monograph.ir.text import Displayed, bytes_text, count_text, table

_SHOWN: Final = 12  # rows of a table


@dataclass(frozen=True)
class PassMemory:
    """The peak of the program after a pass, and by how much that is less than before it."""

    name: str
    peak_bytes: int
    saved_bytes: int


@dataclass(frozen=True, repr=False)
class MemoryReport(Displayed):
    """The memory of one step, known before it runs. `str()` of it is a table.

    `peak_bytes` is what the step itself holds when it holds most, above `state_bytes`, which parameters, buffers and
    optimizer state take, and `argument_bytes`. `by_device` has that peak for each device, at its own moment. `holders` are
    all that is held at the peak: they sum up to `total_bytes`. Where a step runs op by op on a CPU, kernels of libraries take up to
    `kernel_bytes` more for themselves; compiled code counts those. What no op of the step reads is not counted.
    """

    graph: str
    backend: str
    peak_bytes: int
    state_bytes: int
    argument_bytes: int
    by_device: Mapping[str, int]
    peak: Point
    timeline: tuple[Point, ...]
    holders: tuple[Holding, ...]
    passes: tuple[PassMemory, ...]
    notes: tuple[str, ...] = ()
    kernel_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """All at the peak: state, arguments, and what the step holds."""
        return self.state_bytes + self.argument_bytes + self.peak_bytes

    def by_kind(self) -> Mapping[str, int]:
        """Bytes at the peak by kind: parameters, optimizer state, gradients, activations ...; the most first."""
        return _summed((item.kind, item.nbytes) for item in self.holders)

    def by_phase(self) -> Mapping[str, int]:
        """Bytes at the peak by the phase that made them; what is held during the whole step has none."""
        return _summed((item.phase, item.nbytes) for item in self.holders)

    def by_module(self) -> Mapping[str, Mapping[str, int]]:
        """Bytes at the peak by module and kind, each module with all that is inside of it; the most first."""
        return by_module(self.holders)

    def to_dict(self) -> dict[str, Any]:
        """All of it, of dicts, lists, strings and ints, for JSON."""
        return {
            "graph": self.graph,
            "backend": self.backend,
            "peak_bytes": self.peak_bytes,
            "state_bytes": self.state_bytes,
            "argument_bytes": self.argument_bytes,
            "total_bytes": self.total_bytes,
            "kernel_bytes": self.kernel_bytes,
            "by_device": dict(self.by_device),
            "peak": self.peak.to_dict(),
            "holders": [asdict(item) for item in self.holders],
            "passes": [asdict(item) for item in self.passes],
            "timeline": [item.to_dict() for item in self.timeline],
            "notes": list(self.notes),
        }

    def plot(self, path: str | Path) -> None:
        """Draw the bytes over the step, and who holds the peak, into a .svg or .png file. Raises DefinitionError for others."""
        target = Path(path)
        if target.suffix == ".svg":
            target.write_text(drawn(self).svg())
        elif target.suffix == ".png":
            target.write_bytes(drawn(self).png())
        else:
            raise DefinitionError(
                f"plot({str(path)!r}): pictures are SVG or PNG files", hint='plot("memory.svg")'
            )

    def _head(self) -> str:
        return (
            f"{bytes_text(self.total_bytes)} at the peak: {bytes_text(self.state_bytes)} of state, "
            f"{bytes_text(self.argument_bytes)} of arguments, {bytes_text(self.peak_bytes)} that the step makes"
        )

    def __str__(self) -> str:
        lines = [f"{self.graph} on {self.backend}: {self._head()}"]
        if self.peak.op:
            lines.append(f"the peak is at {self.peak.op}, {self.peak.where}".rstrip(", "))
        if self.kernel_bytes:
            lines.append(f"kernels take up to {bytes_text(self.kernel_bytes)} more for themselves")
        if len(self.by_device) > 1:
            devices = [f"{bytes_text(count)} on {name}" for name, count in self.by_device.items()]
            lines.append(f"the step makes at most {', '.join(devices)}")
        lines += self.notes
        tables = [self._kinds(), self._modules()]
        return "\n\n".join(["\n".join(lines), *tables, *self._passes()])

    def _kinds(self) -> str:
        """What is held at the peak."""
        counts = _summed((item.kind, item.tensors) for item in self.holders)
        rows = [
            (kind, str(counts[kind]), bytes_text(nbytes), _share(nbytes, self.total_bytes))
            for kind, nbytes in self.by_kind().items()
        ]
        rows.append(("all", str(sum(counts.values())), bytes_text(self.total_bytes), ""))
        return table(("held at the peak", "tensors", "bytes", "of all"), rows)

    def _modules(self) -> str:
        """Who holds it."""
        modules = self.by_module()
        rows = [(name or "build()", *_columns(kinds)) for name, kinds in list(modules.items())[:_SHOWN]]
        more = f"\nand {count_text(len(modules) - _SHOWN, 'more module')}" if len(modules) > _SHOWN else ""
        titles = ("module, with those inside", "state", "gradients", "activations", "other", "all")
        return table(titles, rows) + more

    def _passes(self) -> Sequence[str]:
        """What the passes save, if one of them does."""
        changed = [item for item in self.passes if item.saved_bytes]
        rows = [(item.name, bytes_text(item.peak_bytes), _signed(item.saved_bytes)) for item in changed]
        return [table(("pass", "peak after it", "saved"), rows)] if rows else []


def _columns(kinds: Mapping[str, int]) -> Sequence[str]:
    state = sum(nbytes for kind, nbytes in kinds.items() if kind in GIVEN and kind != "gradients")
    known = [state, kinds.get("gradients", 0), kinds.get("activations", 0)]
    everything = sum(kinds.values())
    return [bytes_text(count) if count else "" for count in (*known, everything - sum(known), everything)]


def _share(nbytes: int, total: int) -> str:
    return f"{nbytes / total:.1%}" if total else ""


def _signed(count: int) -> str:
    return f"-{bytes_text(-count)}" if count < 0 else bytes_text(count) if count else ""


def _summed(items: Iterable[tuple[str, int]]) -> Mapping[str, int]:
    found: dict[str, int] = {}
    for name, count in items:
        found[name] = found.get(name, 0) + count
    return dict(sorted(found.items(), key=lambda entry: -entry[1]))
