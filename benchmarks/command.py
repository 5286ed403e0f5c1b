"""The command `monograph bench`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from rich.console import Console

from benchmarks import chart as charts
from benchmarks.client import available_cores
from benchmarks.peers import all_peers
from benchmarks.run import Options, run
from benchmarks.stored import read_report, write_report
from benchmarks.tables import all_tables, machine_lines, write_markdown
from benchmarks.workloads import all_workloads
from monograph.cli.steps import stop

app = typer.Typer(add_completion=False)
console = Console()
Item = TypeVar("Item")


@app.command()
def run_bench(
    workload: Annotated[
        list[str] | None, typer.Option(help="A workload; may be repeated. All if absent.")
    ] = None,
    peer: Annotated[
        list[str] | None, typer.Option(help="A competitor; may be repeated. All if absent.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds in which all competitors take turns.")] = 5,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads and cores; all cores if absent.")
    ] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write all samples here.")] = None,
    chart: Annotated[Path | None, typer.Option(help="Write a bar chart (SVG) here.")] = None,
    markdown: Annotated[
        Path | None, typer.Option(help="Write the tables here, into the marked place of a page.")
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            help="Keep what the file of --json already holds, if machine, code and command are the same."
        ),
    ] = False,
    cache: Annotated[Path | None, typer.Option(help="Keep compiled code here for the next run.")] = None,
    quick: Annotated[
        bool, typer.Option(help="Of each competitor only the setting that is the fastest most often.")
    ] = False,
    smoke: Annotated[bool, typer.Option(help="Tiny sizes, one round: does it run?")] = False,
) -> None:
    """Time whole training steps: PyTorch eager and compiled, JAX, and Monograph on each backend."""
    if resume and json_path is None:
        stop("--resume goes on from the file of --json: name one.")
    options = Options(
        workloads=chosen(all_workloads(smoke=smoke), workload, "workload"),
        peers=chosen(all_peers(), peer, "peer"),
        rounds=1 if smoke else rounds,
        threads=threads or available_cores(),
        smoke=smoke,
        quick=quick,
        cache=cache,
        command=" ".join(["monograph", *sys.argv[1:]]),
    )
    earlier = read_report(json_path) if resume and json_path is not None else None
    for report in run(options, lambda text: console.print(text, markup=False, highlight=False), earlier):
        # after each workload, so that a run that is broken off has not been for nothing
        if json_path is not None:
            write_report(report, json_path)
        if chart is not None:
            chart.write_text(charts.chart(report))
        if markdown is not None:
            write_markdown(report, markdown)
    for line in machine_lines(report):
        console.print(line, markup=False, highlight=False)
    wide = console if console.is_terminal else Console(width=200)  # of a file, which has no width
    for table in all_tables(report):
        wide.print(table.rich())


def chosen(items: Mapping[str, Item], names: Sequence[str] | None, what: str) -> tuple[Item, ...]:
    """The named ones, or all; ends the program if there is no such name."""
    for name in names or ():
        if name not in items:
            stop(f"There is no {what} {name!r}: choose from {', '.join(items)}.")
    return tuple(items[name] for name in names or items)
