"""The report as tables of text, for the terminal and for Markdown."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import rich.box
import rich.table
from rich.markup import escape

from benchmarks import analysis
from benchmarks.peers import OWN_PREFIX
from benchmarks.record import Machine, Measured, Report, Result, Trial

MIB = 2**20
BEGIN = "<!-- monograph bench: begin -->"
END = "<!-- monograph bench: end -->"
NONE = "-"


@dataclass(frozen=True)
class Table:
    """Columns and rows of text under a title."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def rich(self) -> rich.table.Table:
        """For the terminal."""
        table = rich.table.Table(title=self.title, title_justify="left", box=rich.box.SIMPLE_HEAD)
        for number, column in enumerate(self.columns):
            is_words = number == 0 or column.startswith("setting")
            table.add_column(column, justify="left" if is_words else "right", overflow="fold")
        for row in self.rows:
            table.add_row(*map(escape, row))
        return table

    def markdown(self) -> str:
        """For a page."""
        lines = [
            f"**{self.title}**",
            "",
            cells(self.columns),
            cells(("---", *("---:" for _ in self.columns[1:]))),
            *(cells(row) for row in self.rows),
        ]
        return "\n".join(lines)


def cells(row: tuple[str, ...]) -> str:
    """A line of a Markdown table."""
    return f"| {' | '.join(one_line(text) for text in row)} |"


def one_line(text: str) -> str:
    """A text that stays in its cell: its first line, without bars."""
    return text.partition("\n")[0].replace("|", "/")


def all_tables(report: Report) -> list[Table]:
    """Summary, one table for each workload, and the settings that were tried."""
    return [
        summary(report),
        *(workload_table(report, result) for result in report.results),
        settings_table(report),
    ]


def summary(report: Report) -> Table:
    """The ratios of each backend to the best peers."""
    names = analysis.own_names(report)
    columns = ["workload", "roofline ms"]
    for name in names:
        short = name.removeprefix(OWN_PREFIX)
        columns += [f"{short}: to best of torch", f"{short}: to best of all", f"{short}: times roofline"]
    rows = [summary_row(report, result, names) for result in report.results]
    means: list[str] = ["geometric mean", ""]
    for name in names:
        means += [decimals(analysis.mean_ratio(report, name, torch_only=flag)) for flag in (True, False)]
        means.append("")
    return Table(
        "How many times as long the best peer takes, and the step as a multiple of its GEMM roofline",
        tuple(columns),
        (*rows, tuple(means)),
    )


def summary_row(report: Report, result: Result, names: list[str]) -> tuple[str, ...]:
    """One workload of the summary."""
    roofline = analysis.roofline_seconds(result, report.machine)
    row = [result.workload, milliseconds(roofline)]
    finished = {measured.peer: measured for measured in analysis.own(result)}
    for name in names:
        ours = finished.get(name)
        if ours is None:
            row += [NONE] * 3
            continue
        for torch_only in (True, False):
            best = analysis.best_peer(result, ours, torch_only=torch_only)
            value = analysis.ratio_to_best(result, ours, torch_only=torch_only)
            row.append(NONE if best is None else f"{decimals(value)} ({best.peer})")
        row.append(decimals(analysis.step_seconds(ours.rounds) / roofline if roofline else None))
    return tuple(row)


def workload_table(report: Report, result: Result) -> Table:
    """All that was measured on one workload."""
    owns = analysis.own(result)
    columns = (
        "",
        "setting",
        "ms",
        "fastest",
        "CPU ms",
        "of roofline",
        "first step s",
        "warm s",
        "capture s",
        "compile s",
        "peak MiB",
        "step MiB",
        *(f"/ {ours.peer.removeprefix(OWN_PREFIX)}" for ours in owns),
    )
    rows = tuple(measured_row(report.machine, result, measured, owns) for measured in result.measured)
    operations = f"{result.flops / 1e9:.3g} GFLOP of products"
    return Table(f"{result.workload}: {result.title}; {operations}", columns, rows)


def measured_row(
    machine: Machine, result: Result, measured: Measured, owns: list[Measured]
) -> tuple[str, ...]:
    """One competitor."""
    if not analysis.finished(measured) or measured.chosen is None or measured.chosen.prepared is None:
        blanks = (NONE,) * (10 + len(owns))
        return (measured.peer, f"excluded: {measured.error}", *blanks)
    prepared, memory, rounds = measured.chosen.prepared, measured.memory, measured.rounds
    return (
        measured.peer,
        measured.chosen.setting,
        milliseconds(analysis.step_seconds(rounds)),
        milliseconds(analysis.fastest_seconds(rounds)),
        milliseconds(analysis.cpu_seconds(rounds)),
        f"{analysis.roofline_share(result, measured, machine):.0%}",
        f"{prepared.first_step_seconds:.2f}",
        decimals(None if measured.warm is None else measured.warm.first_step_seconds),
        decimals(prepared.capture_seconds),
        f"{prepared.compile_seconds:.2f}",
        NONE if memory is None else f"{memory.peak_bytes / MIB:.0f}",
        NONE if memory is None else f"{memory.step_bytes / MIB:.0f}",
        *(decimals(analysis.ratio(rounds, ours.rounds)) for ours in owns),
    )


def settings_table(report: Report) -> Table:
    """Every setting of every peer with its time, or the reason why it has none."""
    rows = [
        (f"{result.workload}: {measured.peer}", "; ".join(trial_text(trial) for trial in measured.trials))
        for result in report.results
        for measured in result.measured
        if measured.trials
    ]
    return Table("Settings tried, ms of the fastest trial round", ("", "settings"), tuple(rows))


def trial_text(trial: Trial) -> str:
    """A setting with its time."""
    if trial.error is not None:
        return f"{trial.setting} failed ({trial.error.splitlines()[0]})"
    seconds = analysis.fastest_round(trial.rounds) or trial.first_seconds
    return f"{trial.setting} {milliseconds(seconds)}"


def machine_lines(report: Report) -> list[str]:
    """Machine, versions and command."""
    machine = report.machine
    speeds = ", ".join(f"{name} {speed / 1e9:.0f}" for name, speed in machine.gemm_flops_per_second.items())
    return [
        f"{machine.cpu}, {machine.threads} of {machine.cores} cores, {machine.memory_bytes / 2**30:.0f} GiB; {machine.system}",
        ", ".join(f"{name} {number}" for name, number in machine.versions.items()),
        f"large float32 matrix products, GFLOP/s: {speeds}",
        f"{', '.join(report.dates)}: {report.command}",
    ]


def write_markdown(report: Report, path: Path) -> None:
    """Put the report into a page, at the place that is marked in it; without one it is the page."""
    text = markdown(report)
    page = path.read_text() if path.exists() else ""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    path.write_text(f"{before}{begin}\n\n{text}\n{end}{after}" if begin and end else text)


def markdown(report: Report) -> str:
    """The whole report as a part of a page."""
    machine = "\n".join(f"- {line}" for line in machine_lines(report))
    tables = "\n\n".join(table.markdown() for table in all_tables(report))
    return f"{machine}\n\n{tables}\n"


def milliseconds(seconds: float) -> str:
    """Milliseconds with three digits."""
    value = seconds * 1e3
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def decimals(value: float | None) -> str:
    """A ratio, or seconds, with two decimals."""
    return NONE if value is None else f"{value:.2f}"
