"""The run: workers are prepared one after the other, checked against eager, and then timed in turn."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean

from benchmarks.analysis import fastest_round, step_seconds
from benchmarks.client import Client, Home, WorkerError, available_cores, pinned
from benchmarks.job import Job
from benchmarks.machine import machine
from benchmarks.peers import REFERENCE, Peer, missing
from benchmarks.record import Measured, Prepared, Report, Result, Round, Trial, joined
from benchmarks.setting import Setting
from benchmarks.workload import Workload

LOSS_TOLERANCE = 1e-3  # relative, for each of the first steps
MOVEMENT_TOLERANCE = 0.1  # relative to how far eager's parameter went, or parameters on average
TRIAL_TURNS = 6

Say = Callable[[str], None]


@dataclass(frozen=True)
class Options:
    """What to run and how thoroughly."""

    workloads: tuple[Workload, ...]
    peers: tuple[Peer, ...]
    rounds: int
    threads: int
    smoke: bool = False
    quick: bool = False  # the first setting of each peer only
    cache: Path | None = None  # kept, so that compile times are those of a second run
    command: str = ""

    @property
    def turn_seconds(self) -> float:
        """How long a turn should take at least."""
        return 0.02 if self.smoke else 0.5

    @property
    def turns(self) -> int:
        """The turns that make a round."""
        return 1 if self.smoke else 8

    def choices(self, peer: Peer, workload: Workload) -> Sequence[Setting]:
        """The settings of the peer to try."""
        choices = peer.choices(workload)
        return choices[:1] if self.smoke or self.quick else choices


@dataclass(frozen=True)
class Contender:
    """A peer with the worker of its best setting, or with none if every setting failed."""

    measured: Measured
    client: Client | None = None


def run(options: Options, say: Say, earlier: Report | None = None) -> Iterator[Report]:
    """Measure every workload; gives the report so far after each. `say` is called with what goes on.

    A run that goes on from an `earlier` one keeps the workloads of that report.
    """
    cores = available_cores()
    with ExitStack() as stack:
        stack.enter_context(pinned(options.threads))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="monograph-bench-")))
        home = Home(folder, options.cache)
        report = Report((), options.command, machine(cores, options.threads, {}), ())
        if earlier is not None and is_of_this_run(earlier, report):
            report = earlier
            say(f"Kept from before: {', '.join(result.workload for result in report.results)}.")
            yield report
        elif earlier is not None:
            say("The report that is there is of another machine, code or command: all is measured anew.")
        kept = {result.workload for result in report.results}
        remaining = [workload for workload in options.workloads if workload.name not in kept]
        if remaining:
            report = replace(report, dates=(*report.dates, datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")))
        for workload in remaining:
            speeds = dict(report.machine.gemm_flops_per_second)
            for way, speed in measure_gemm(options, home).items():
                speeds[way] = max(speed, speeds.get(way, 0.0))
            result = WorkloadRun(options, workload, home, say).result()
            report = replace(
                report,
                machine=replace(report.machine, gemm_flops_per_second=speeds),
                results=(*report.results, result),
            )
            yield report


def is_of_this_run(earlier: Report, report: Report) -> bool:
    """Whether machine, code and command are the same; the memory of a virtual machine may be a page more or less."""
    one, other = (
        replace(each.machine, memory_bytes=0, gemm_flops_per_second={}) for each in (earlier, report)
    )
    return one == other and earlier.command == report.command


def measure_gemm(options: Options, home: Home) -> dict[str, float]:
    """The speed of matrix products at this moment."""
    client = Client(reference_job(options, options.workloads[0]), home)
    try:
        return client.gemm()
    finally:
        client.close()


def reference_job(options: Options, workload: Workload) -> Job:
    """The job of the worker that says what is right."""
    return Job(workload.name, REFERENCE, Setting(), options.threads, options.smoke)


@dataclass(frozen=True)
class WorkloadRun:
    """One workload with all its peers."""

    options: Options
    workload: Workload
    home: Home
    say: Say

    def result(self) -> Result:
        """Prepare every peer, take the rounds in turn, then look at memory, and at the first steps with filled caches."""
        reference, flops = self.reference()
        contenders = []
        try:
            for peer in self.options.peers:
                contenders.append(self.contender(peer, reference))
            found = zip(self.measure(contenders), contenders, strict=True)
            measured = [self.with_warm(measured, contender) for measured, contender in found]
        finally:
            for contender in contenders:
                if contender.client is not None:
                    contender.client.close()
        return Result(self.workload.name, self.workload.title, flops, reference.losses, tuple(measured))

    def reference(self) -> tuple[Prepared, int]:
        """The first steps of eager PyTorch, and the operations of a step."""
        client = Client(reference_job(self.options, self.workload), self.home)
        try:
            return client.prepare(), client.flops()
        finally:
            client.close()

    def contender(self, peer: Peer, reference: Prepared) -> Contender:
        """The peer at the fastest of its settings."""
        empty = Measured(peer.name, peer.title, peer.is_torch, peer.is_own)
        absent = missing(peer)
        if peer.name == "jax" and self.workload.jax_port is None:
            absent = "this workload has no port to JAX"
        if absent is not None:
            self.say(f"{self.workload.name}: {peer.name}: {absent}")
            return Contender(replace(empty, error=absent))
        trials: list[Trial] = []
        alive: dict[int, Client] = {}
        try:
            for setting in self.options.choices(peer, self.workload):
                trial, client = self.prepared(peer, setting, reference)
                if client is not None:
                    alive[len(trials)] = client
                trials.append(trial)
            self.try_in_turn(trials, alive)
            return self.chosen(empty, trials, alive)
        finally:
            for client in alive.values():
                client.close()

    def prepared(self, peer: Peer, setting: Setting, reference: Prepared) -> tuple[Trial, Client | None]:
        """A worker after its first steps, unless it failed or its steps are not those of eager."""
        job = Job(self.workload.name, peer.name, setting, self.options.threads, self.options.smoke)
        client = Client(job, self.home)
        try:
            prepared = client.prepare()
        except WorkerError as error:
            trial = Trial(str(setting), error=str(error))
        else:
            trial = Trial(str(setting), difference(prepared, reference), prepared)
        if trial.error is not None or trial.prepared is None:
            client.close()
            self.say(f"{self.workload.name}: {peer.name} [{setting}] failed: {trial.error}")
            return trial, None
        self.say(
            f"{self.workload.name}: {peer.name} [{setting}] first step {trial.prepared.first_step_seconds:.1f} s, "
            f"then {trial.prepared.step_seconds * 1e3:.3f} ms"
        )
        return trial, client

    def try_in_turn(self, trials: list[Trial], alive: dict[int, Client]) -> None:
        """Time the settings of one peer against each other, and note failures."""
        if len(alive) < 2:
            return
        for _ in range(TRIAL_TURNS):
            for number, client in list(alive.items()):
                trial = trials[number]
                try:
                    rounds = (*trial.rounds, client.round(self.num_steps(trial)))
                    trials[number] = replace(trial, rounds=rounds)
                except WorkerError as error:
                    trials[number] = replace(trial, error=str(error))
                    alive.pop(number).close()

    def chosen(self, empty: Measured, trials: list[Trial], alive: dict[int, Client]) -> Contender:
        """The fastest setting with its worker, which leaves `alive`."""
        measured = replace(empty, trials=tuple(trials))
        if not alive:
            return Contender(replace(measured, error=first_error(trials)))
        best = min(alive, key=lambda number: fastest_round(trials[number].rounds))
        return Contender(replace(measured, chosen=trials[best]), alive.pop(best))

    def measure(self, contenders: Sequence[Contender]) -> list[Measured]:
        """Rounds of many short turns, so that all see the same moods of the machine; memory after them."""
        found = [contender.measured for contender in contenders]
        for number in range(self.options.rounds):
            turns: list[list[Round]] = [[] for _ in contenders]
            for _ in range(self.options.turns):
                for place, contender in enumerate(contenders):
                    found[place] = self.one_turn(found[place], contender.client, turns[place])
            found = [with_round(measured, taken) for measured, taken in zip(found, turns, strict=True)]
            self.say(f"{self.workload.name}: round {number + 1} of {self.options.rounds}")
        for place, contender in enumerate(contenders):
            if contender.client is not None and found[place].error is None:
                found[place] = with_memory(found[place], contender.client)
        return found

    def with_warm(self, measured: Measured, contender: Contender) -> Measured:
        """The peer with the first steps of a second process, which finds the caches of the first one."""
        if contender.client is None or measured.error is not None or measured.chosen is None:
            return measured
        contender.client.close()  # what it compiles beside its steps is kept by now, or never
        job = contender.client.job
        client = Client(job, replace(self.home, shared_cache=contender.client.cache))
        try:
            warm = client.prepare()
        except WorkerError as error:
            self.say(f"{self.workload.name}: {measured.peer}: a second process failed: {error}")
            return measured
        finally:
            client.close()
        self.say(
            f"{self.workload.name}: {measured.peer} [{job.setting}] first step of a second process "
            f"{warm.first_step_seconds:.1f} s"
        )
        return replace(measured, warm=warm)

    def one_turn(self, measured: Measured, client: Client | None, taken: list[Round]) -> Measured:
        """Add a turn to those of this round, if the peer still runs."""
        if client is None or measured.error is not None or measured.chosen is None:
            return measured
        try:
            taken.append(client.round(self.num_steps(measured.chosen)))
        except WorkerError as error:
            return replace(measured, error=str(error))
        return measured

    def num_steps(self, trial: Trial) -> int:
        """Enough steps for a turn that can be timed."""
        seconds = step_seconds(trial.rounds) if trial.rounds else trial.first_seconds
        return max(1, math.ceil(self.options.turn_seconds / seconds))


def with_round(measured: Measured, turns: Sequence[Round]) -> Measured:
    """The peer with one more round, if it went through all of its turns."""
    if measured.error is not None or not turns:
        return measured
    return replace(measured, rounds=(*measured.rounds, joined(turns)))


def with_memory(measured: Measured, client: Client) -> Measured:
    """The peer with its memory; what it measured before stands even if this fails."""
    try:
        return replace(measured, memory=client.memory())
    except WorkerError:
        return measured


def difference(prepared: Prepared, reference: Prepared) -> str | None:
    """What is wrong with the first steps of a peer, if something is: other losses, or parameters that went elsewhere."""
    return losses_differ(prepared.losses, reference.losses) or movement_differs(
        prepared.moved, reference.moved
    )


def movement_differs(moved: Mapping[str, float], expected: Mapping[str, float]) -> str | None:
    """The first parameter that went much farther or less far than eager's. One that hardly moves may go anywhere."""
    typical = fmean(expected.values())
    for name, right in expected.items():
        if not abs(moved[name] - right) <= MOVEMENT_TOLERANCE * max(right, typical):
            return f"{name} moved by {moved[name]:.3g} in the first steps, and by {right:.3g} in eager mode"
    return None


def losses_differ(losses: Sequence[float], expected: Sequence[float]) -> str | None:
    """What is wrong with the first losses, if something is."""
    pairs = list(zip(losses, expected, strict=True))
    if all(abs(loss - right) <= LOSS_TOLERANCE * abs(right) for loss, right in pairs):
        return None
    return f"losses {shown(losses)} differ from eager's {shown(expected)}"


def shown(losses: Sequence[float]) -> str:
    """Losses with six digits."""
    return ", ".join(f"{loss:.6g}" for loss in losses)


def first_error(trials: Sequence[Trial]) -> str:
    """Why no setting works."""
    return next(trial.error for trial in trials if trial.error is not None)
