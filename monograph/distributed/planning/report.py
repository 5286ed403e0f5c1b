"""What `graph.plan()` gives: what ranks hold and send, and how long a step would take on machines of given speeds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from monograph.distributed.planning.events import Work
from monograph.distributed.planning.mesh import Mesh
from monograph.distributed.planning.order import RankSteps, RankTimes, acted_out
from monograph.distributed.planning.rank import RankPlan
from monograph.errors import DefinitionError
from monograph.ir.text import Brief, Displayed, bytes_text, count_text, table

FLOPS_PER_SECOND: Final = 1e14
MEMORY_BYTES_PER_SECOND: Final = 1e12
LINK_BYTES_PER_SECOND: Final = 1e10
LATENCY_SECONDS: Final = 1e-5


@dataclass(frozen=True, repr=False)
class Prediction(Displayed):
    """How long a step takes by a model of the machines: ops take what their work takes at least, one after the other.

    `work_seconds` is that of the rank that works longest. `communication_seconds` is what all that it sends takes, and
    `exposed_seconds` by how much a step is longer for it. `bubble` is the share of time in which ranks would wait for each other
    even if nothing took time to be sent.
    """

    step_seconds: float
    work_seconds: float
    communication_seconds: float
    exposed_seconds: float
    bubble: float

    @property
    def exposed(self) -> float:
        """The share of communication that no work hides."""
        return self.exposed_seconds / self.communication_seconds if self.communication_seconds else 0.0

    def __str__(self) -> str:
        return (
            f"{self.step_seconds * 1e3:.3g} ms a step: {self.work_seconds * 1e3:.3g} ms of work, "
            f"{self.communication_seconds * 1e3:.3g} ms of communication of which {self.exposed:.0%} is exposed, "
            f"bubble {self.bubble:.1%}"
        )


@dataclass(frozen=True, repr=False)
class RanksPlan(Brief):
    """The plan of a step of many ranks. `str()` of it is a table; `ranks` are those that were planned.

    Of ranks with parts of tensors the first holds the most; those that differ in nothing are planned once. Of a pipeline of more
    than eight ranks the memory of the first, the last and one in the middle is planned. Bytes are those of a step that runs op by
    op, on the backend `aten`. `steps` is what ranks do in a step.
    """

    graph: str
    mesh: Mesh
    ranks: tuple[RankPlan, ...]
    steps: Mapping[int, RankSteps] = field(compare=False)

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.mesh.size

    @property
    def peak_bytes(self) -> int:
        """All that the rank holds at its peak that holds the most: state, arguments, and what the step makes."""
        return max(item.total_bytes for item in self.ranks)

    @property
    def payload_bytes(self) -> int:
        """What the rank sends in a step that sends the most."""
        return max(item.payload_bytes for item in self.ranks)

    def predict(
        self,
        *,
        flops_per_second: float = FLOPS_PER_SECOND,
        memory_bytes_per_second: float = MEMORY_BYTES_PER_SECOND,
        link_bytes_per_second: float | Mapping[str, float] = LINK_BYTES_PER_SECOND,
        latency_seconds: float = LATENCY_SECONDS,
    ) -> Prediction:
        """The time of a step, if ops and links are as fast as that.

        An op takes what its arithmetic takes, or its bytes if that is more; a collective or message a latency, and its payload
        over the speed of the links, which a dict has by dimension of the mesh. Raises DefinitionError.
        """
        links = self._links(link_bytes_per_second)
        for name, speed in (
            ("flops", flops_per_second),
            ("memory_bytes", memory_bytes_per_second),
            *links.items(),
        ):
            if not speed > 0:
                raise DefinitionError(
                    f"predict(): {name} per second are {speed!r}", hint="give a number above 0"
                )

        def work(item: Work) -> float:
            if (found := known.get(id(item.ops))) is None:
                found = known[id(item.ops)] = sum(
                    max(flops / flops_per_second, nbytes / memory_bytes_per_second)
                    for flops, nbytes in item.ops
                )
            return found

        def sending(ranks: tuple[int, ...], nbytes: int) -> float:
            if ranks not in slowest:
                slowest[ranks] = min(links[self.mesh.names[dim]] for dim in self.mesh.along(ranks) or (-1,))
            return latency_seconds + nbytes / slowest[ranks]

        known: dict[int, float] = {}
        slowest: dict[tuple[int, ...], float] = {}
        real, free = acted_out(self.steps, work, sending), acted_out(self.steps, work)
        return _prediction(real, free)

    def _links(self, speed: float | Mapping[str, float]) -> Mapping[str, float]:
        names = self.mesh.names
        if not isinstance(speed, Mapping):
            return dict.fromkeys(names, speed)
        if missing := [name for name in names if name not in speed]:
            raise DefinitionError(
                f"predict(): there is no speed of links for the dimension {missing[0]!r}",
                hint=f"link_bytes_per_second={{{', '.join(f'{name!r}: 1e10' for name in names)}}}",
            )
        return speed

    def __str__(self) -> str:
        grid = " x ".join(
            f"{name} {size}" for name, size in zip(self.mesh.names, self.mesh.sizes, strict=True)
        )
        first = self.ranks[0]
        head = (
            f"{self.graph} on {count_text(self.world_size, 'rank')} ({grid}): a rank holds at most "
            f"{bytes_text(self.peak_bytes)} and sends {bytes_text(self.payload_bytes)} a step"
        )
        speeds = (
            f"at {FLOPS_PER_SECOND / 1e12:.0f} TFLOP/s, {MEMORY_BYTES_PER_SECOND / 1e9:.0f} GB/s of memory and "
            f"{LINK_BYTES_PER_SECOND / 1e9:.0f} GB/s between ranks; predict() takes others"
        )
        columns = (
            "rank",
            "like it",
            "parameters",
            "optimizer",
            "all state",
            "arguments",
            "step",
            "at the peak",
            "sent",
        )
        rows = [
            (
                str(item.rank),
                str(item.like),
                *map(
                    bytes_text,
                    (
                        item.parameter_bytes,
                        item.optimizer_bytes,
                        item.state_bytes,
                        item.argument_bytes,
                        item.peak_bytes,
                    ),
                ),
                bytes_text(item.total_bytes),
                bytes_text(item.payload_bytes),
            )
            for item in self.ranks
        ]
        sent = [
            (item.collective, item.dimension, str(item.count), bytes_text(item.payload_bytes))
            for item in first.sent
        ]
        return "\n\n".join([
            f"{head}\n{self.predict()}, {speeds}",
            table(columns, rows),
            table((f"what rank {first.rank} sends", "over", "times", "bytes"), sent),
        ])  # fmt: skip


def _prediction(real: Mapping[int, RankTimes], free: Mapping[int, RankTimes]) -> Prediction:
    step, without = (max(item.step_seconds for item in times.values()) for times in (real, free))
    worked = sum(item.work_seconds for item in free.values())
    return Prediction(
        step_seconds=step,
        work_seconds=max(item.work_seconds for item in real.values()),
        communication_seconds=max(item.sent_seconds for item in real.values()),
        exposed_seconds=step - without,
        bubble=1 - worked / (without * len(free)) if without else 0.0,
    )
