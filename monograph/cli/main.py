"""The command line. Commands for a step are in `steps.py`, those for what is deployed in `artifacts.py` and `serve.py`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from pickle import UnpicklingError
from statistics import median
from typing import Annotated, TypeVar

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from monograph import bench, demo
from monograph.cli import artifacts as cli_artifacts
from monograph.cli import doctor
from monograph.cli import serve as cli_serve
from monograph.cli.steps import register, stop

DEFAULT_STEPS = 264  # twelve epochs of the digits in batches of 64

app = typer.Typer(add_completion=False, no_args_is_help=True, help="PyTorch training steps as static graphs.")
console = Console()
Item = TypeVar("Item")


@app.command("demo")
def run_demo(
    data: Annotated[
        Path | None, typer.Option(help="Folder of CIFAR-10 (cifar-10-batches-py) in place of the digits.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = DEFAULT_STEPS,
    batch: Annotated[int, typer.Option(min=2, help="Images per step.")] = 64,
    seed: Annotated[int, typer.Option(help="Seed of weights, batches and dropout.")] = 0,
    threads: Annotated[int, typer.Option(min=1, help="Threads of one op.")] = 1,
) -> None:
    """Train MobileNetV2 eagerly and as a graph from one seed, and compare every bit after each step."""
    images = load_images(data)
    if batch > len(images.train_x):
        stop(f"--batch {batch} is more than the {len(images.train_x)} training images.")
    # one thread by default: several wait for each other at every small op, for long if the machine is busy
    torch.set_num_threads(threads)
    with torch.random.fork_rng(devices=[]):
        eager = demo.eager_trainer(demo.make_model(seed), steps=steps)
        graph = demo.graph_trainer(demo.make_model(seed), steps=steps)
        reports = train(eager, graph, images, steps=steps, batch=batch, seed=seed)
    console.print(summary(eager, graph, images, reports))
    different = [(number, report) for number, report in enumerate(reports, 1) if report.difference]
    if different:
        number, report = different[0]
        console.print(f"[red]Step {number} is the first that differs from eager: {report.difference}.[/red]")
        raise typer.Exit(1)


@app.command("doctor")
def run_doctor(
    clear_cache: Annotated[bool, typer.Option(help="Remove compiled steps and kernel choices.")] = False,
) -> None:
    """Show what decides how steps run on this machine, and what is cached on disk."""
    if clear_cache:
        doctor.clear_cache()
    found = list(doctor.findings())
    for finding in found:
        typer.echo(f"{finding.what:20} {finding.value}" + f"  <- {finding.problem}" * bool(finding.problem))
    raise typer.Exit(1 if any(finding.problem for finding in found) else 0)


@app.command("bench")
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
            help="Take over what is in the file of --json, if machine, code and command are the same."
        ),
    ] = False,
    cache: Annotated[Path | None, typer.Option(help="Keep compiled code here for the next run.")] = None,
    quick: Annotated[bool, typer.Option(help="Only the first setting of each competitor.")] = False,
    smoke: Annotated[bool, typer.Option(help="Tiny sizes, one round: does it run?")] = False,
) -> None:
    """Time whole training steps: PyTorch eager and compiled, JAX, and Monograph on each backend."""
    if resume and json_path is None:
        stop("--resume goes on from the file of --json: name one.")
    options = bench.Options(
        workloads=chosen(bench.all_workloads(smoke=smoke), workload, "workload"),
        peers=chosen(bench.all_peers(), peer, "peer"),
        rounds=1 if smoke else rounds,
        threads=threads or bench.available_cores(),
        smoke=smoke,
        quick=quick,
        cache=cache,
        command=" ".join(["monograph", *sys.argv[1:]]),
    )
    earlier = bench.read_report(json_path) if resume and json_path is not None else None
    for report in bench.run(
        options, lambda text: console.print(text, markup=False, highlight=False), earlier
    ):
        # after each workload, so that a run that is broken off has not been for nothing
        if json_path is not None:
            bench.write_report(report, json_path)
        if chart is not None:
            chart.write_text(bench.chart(report))
        if markdown is not None:
            bench.write_markdown(report, markdown)
    for line in bench.machine_lines(report):
        console.print(line, markup=False, highlight=False)
    for table in bench.all_tables(report):
        console.print(table.rich(), width=console.width if console.is_terminal else 160)


def chosen(items: Mapping[str, Item], names: Sequence[str] | None, what: str) -> tuple[Item, ...]:
    """The named ones, or all; ends the program if there is no such name."""
    for name in names or ():
        if name not in items:
            stop(f"There is no {what} {name!r}: choose from {', '.join(items)}.")
    return tuple(items[name] for name in names or items)


def main() -> None:
    """The entry point of the `monograph` command."""
    app()


def load_images(data: Path | None) -> demo.Images:
    """The images to train on; ends the program with one sentence if they are not there."""
    try:
        return demo.load_images(data)
    except ModuleNotFoundError as error:
        if error.name != "sklearn":
            raise
        stop("The digits of the demo come from scikit-learn: run `pip install scikit-learn`.")
    except FileNotFoundError as error:
        stop(f"CIFAR-10 is not in {data}: there is no file {error.filename}.")
    except (UnpicklingError, ValueError) as error:
        stop(f"The files in {data} are not CIFAR-10: {error}")


def train(
    eager: demo.Trainer, graph: demo.Trainer, images: demo.Images, *, steps: int, batch: int, seed: int
) -> list[demo.StepReport]:
    """Train both with a live line of progress."""
    columns = (
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    reports: list[demo.StepReport] = []
    equal = 0
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("capturing", total=steps)
        data = demo.batches(images, steps=steps, size=batch, seed=seed)
        for report in demo.train_both(eager, graph, data, seed=seed):
            reports.append(report)
            equal += report.difference is None
            loss = report.graph.loss.item()
            progress.update(task, advance=1, description=f"loss {loss:.4f}, {equal} steps bitwise equal")
    return reports


def summary(
    eager: demo.Trainer, graph: demo.Trainer, images: demo.Images, reports: list[demo.StepReport]
) -> Table:
    """What the demo found, in one table."""
    timed = reports[1:] or reports  # the first step of the graph captures
    eager_ms = [report.eager.seconds * 1e3 for report in timed]
    graph_ms = [report.graph.seconds * 1e3 for report in timed]
    equal = sum(report.difference is None for report in reports)
    table = Table("", "eager", "graph", title=f"MobileNetV2 on {torch.get_num_threads()} thread(s)")
    table.add_row("steps", str(len(reports)), str(len(reports)))
    table.add_row("steps bitwise equal to eager", "", f"{equal} of {len(reports)}")
    accuracies = (demo.accuracy(trainer.model, images) for trainer in (eager, graph))
    table.add_row("accuracy on held-out images", *(f"{share:.2%}" for share in accuracies))
    table.add_row("ms per step, median", f"{median(eager_ms):.1f}", f"{median(graph_ms):.1f}")
    table.add_row("ms per step, minimum", f"{min(eager_ms):.1f}", f"{min(graph_ms):.1f}")
    if isinstance(graph.step, demo.TrainStep):
        builds = graph.step.builds
        seconds = sum(stage.seconds for build in builds for stage in build.stages)
        table.add_row("builds", "", str(len(builds)))
        table.add_row("seconds to capture", "", f"{seconds:.2f}")
        table.add_row("nodes of the program", "", str(len(builds[-1].program.module.graph.nodes)))
    return table


register(app)
cli_artifacts.register(app)
cli_serve.register(app)
