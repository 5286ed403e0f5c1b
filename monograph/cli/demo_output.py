"""What the demo prints: how far it is, a table of bits, first step and time, and what it means."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from statistics import median

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor

import monograph as mg
from monograph.cli import demo

DEFAULT, FASTEST = "default (auto)", "fastest (inductor)"
PLAIN = "aten"  # op by op
NONE = "-"
COLUMNS = (
    TextColumn("training"),
    BarColumn(),
    MofNCompleteColumn(),
    TimeRemainingColumn(),
    TextColumn("{task.description}"),
)


@dataclass
class DemoRun:
    """The trainers, and the steps that they have taken in turn."""

    eager: demo.Trainer
    graphs: Mapping[str, demo.Trainer]
    images: demo.Images
    batch: int
    reports: list[demo.StepReport] = field(default_factory=list)
    accuracies: dict[str, float] = field(default_factory=dict)

    def train(self, data: Iterable[tuple[Tensor, Tensor]], steps: int, seed: int, console: Console) -> None:
        """Train all with a live line of progress, and try them on the held-out images."""
        with Progress(*COLUMNS, console=console) as progress:
            names = ", ".join((demo.EAGER, *self.graphs))
            progress.console.print(f"Each of {steps} batches trains in turn: {names}.", highlight=False)
            task = progress.add_task("capturing", total=steps)
            for report in demo.train_in_turn(self.eager, self.graphs, data, seed=seed):
                self.reports.append(report)
                for line in self._news():
                    progress.console.print(line, markup=False, highlight=False)
                equal = self._equal(DEFAULT)
                loss = report.eager.loss.item()
                progress.update(
                    task, advance=1, description=f"loss {loss:.4f}, {equal} steps with eager's bits"
                )
                if len(self.reports) + 1 == self._expected_swap(steps):
                    progress.update(task, description="waiting for the compiler")
        trainers = {demo.EAGER: self.eager, **self.graphs}
        self.accuracies = {name: demo.accuracy(each.model, self.images) for name, each in trainers.items()}

    def _expected_swap(self, steps: int) -> int | None:
        """The number of the step at which the fastest code has to be there."""
        return steps // 2 + 1 if FASTEST in self.graphs else None

    def _news(self) -> Iterator[str]:
        """What the last step was the first to show."""
        number = len(self.reports)
        for name in self.graphs:
            outcome = self.reports[-1].graphs[name].outcome
            if number == 1:
                yield f"{name}: the first step, with its capture, took {outcome.seconds:.1f} s"
            elif outcome.backend != self.reports[-2].graphs[name].outcome.backend:
                bits = "the same bits" if outcome.has_to_be_eagers else "roundings of its own"
                yield f"{name}: compiled code from step {number} on, with {bits}; it came in {outcome.seconds:.1f} s"

    def table(self) -> Table:
        """All that was found."""
        threads = torch.get_num_threads()
        title = (
            f"MobileNetV2, one block for each stage: AdamW, {self.batch} images a step, {threads} thread(s)"
        )
        table = Table("", demo.EAGER, *self.graphs, title=title)
        half = len(self.reports) // 2
        rows = {
            "seconds of the first step": [f"{each[0].seconds:.2f}" for each in self._outcomes()],
            "ms per step, median of the first half": [_ms(each[1:half]) for each in self._outcomes()],
            "ms per step, of the second half": [_ms(each[half + 1 :]) for each in self._outcomes()],
            "compiled code runs from step": [NONE, *map(self._swap, self.graphs)],
            "seconds of that step, with the wait": [NONE, *map(self._swap_seconds, self.graphs)],
            "seconds of all steps": [f"{sum(one.seconds for one in each):.1f}" for each in self._outcomes()],
            "steps with eager's bits": [NONE, *map(self._equal_of_promised, self.graphs)],
            "accuracy on held-out images": [f"{share:.2%}" for share in self.accuracies.values()],
            "nodes of the program": [NONE, *(_num_nodes(each) for each in self.graphs.values())],
        }
        for name, cells in rows.items():
            table.add_row(name, *cells)
        return table

    def problems(self) -> Iterator[str]:
        """What is not as promised."""
        for name in self.graphs:
            for number, report in enumerate(self.reports, 1):
                difference = report.graphs[name].difference
                if difference is not None:
                    yield f"Step {number} of {name} differs from eager: {difference}."
                    break
            expected, count = self.accuracies[demo.EAGER], len(self.images.test_y)
            if not demo.is_as_good(self.accuracies[name], expected, count):
                yield f"{name} names {self.accuracies[name]:.2%} of the held-out images rightly, eager {expected:.2%}."

    def words(self) -> Iterator[str]:
        """What the table says, if all is as promised."""
        yield f"{DEFAULT}: all {len(self.reports)} steps have eager's bits: loss, weights, buffers, optimizer, random numbers."
        for name, trainer in self.graphs.items():
            for problem in _refusals(trainer):
                yield f"{name}: it goes on op by op with eager's bits, since {problem}."
        count = self._promised(FASTEST) if FASTEST in self.graphs else len(self.reports)
        if count < len(self.reports):
            yield (
                f"{FASTEST}: {count} steps have eager's bits, while another process compiled; then it rounds in its own way, and "
                f"is as accurate as eager, as far as {len(self.images.test_y)} images show. The next run finds the code."
            )

    def _outcomes(self) -> list[list[demo.Outcome]]:
        """Those of each trainer, eager first."""
        return [
            [report.eager for report in self.reports],
            *([report.graphs[name].outcome for report in self.reports] for name in self.graphs),
        ]

    def _swap(self, name: str) -> str:
        number = self._first_compiled(name)
        return NONE if number is None else f"{number} ({self.reports[-1].graphs[name].outcome.backend})"

    def _swap_seconds(self, name: str) -> str:
        number = self._first_compiled(name)
        return NONE if number is None else f"{self.reports[number - 1].graphs[name].outcome.seconds:.1f}"

    def _first_compiled(self, name: str) -> int | None:
        """The first step that was not run op by op, counted from 1."""
        backends = [report.graphs[name].outcome.backend for report in self.reports]
        return next((number for number, backend in enumerate(backends, 1) if backend != PLAIN), None)

    def _promised(self, name: str) -> int:
        return sum(report.graphs[name].outcome.has_to_be_eagers for report in self.reports)

    def _equal(self, name: str) -> int:
        steps = [report.graphs[name] for report in self.reports]
        return sum(step.outcome.has_to_be_eagers and step.difference is None for step in steps)

    def _equal_of_promised(self, name: str) -> str:
        promised = self._promised(name)
        text = f"{self._equal(name)} of {promised}"
        return text if promised == len(self.reports) else f"{text} before the swap"


def _ms(outcomes: Iterable[demo.Outcome]) -> str:
    """The median time of some steps."""
    seconds = [outcome.seconds for outcome in outcomes]
    return f"{median(seconds) * 1e3:.1f}" if seconds else NONE


def _num_nodes(trainer: demo.Trainer) -> str:
    assert isinstance(trainer.step, mg.Graph)
    return str(len(trainer.step.builds[-1].program.module.graph.nodes))


def _refusals(trainer: demo.Trainer) -> list[str]:
    """Why a graph was not compiled, if that was tried."""
    assert isinstance(trainer.step, mg.Graph)
    return [note for note in trainer.step.builds[-1].notes if "could not be used" in note]
