"""The command line. Commands that look at a step are in `steps.py`, those for what is deployed in `artifacts.py` and `serve.py`."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from pickle import UnpicklingError
from statistics import median
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from monograph.cli import artifacts as cli_artifacts
from monograph.cli import demo, doctor
from monograph.cli import serve as cli_serve
from monograph.cli.steps import register, stop

DEFAULT_STEPS = 264  # twelve epochs of the digits in batches of 64

app = typer.Typer(add_completion=False, no_args_is_help=True, help="PyTorch training steps as static graphs.")
console = Console()


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


@app.command(
    "bench",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    add_help_option=False,  # the suite has its own
)
def run_bench(context: typer.Context) -> None:
    """Time whole training steps of PyTorch, JAX and Monograph, in a checkout of the repository."""
    if find_spec("benchmarks") is None:
        sys.path.append(os.getcwd())  # where a console script does not look
    try:
        suite = import_module("benchmarks.command")
    except ModuleNotFoundError as error:
        if error.name not in ("benchmarks", "benchmarks.command"):
            raise
        stop(
            "The benchmarks are in the repository and not in the installed package: "
            "run `monograph bench` in the top folder of a checkout."
        )
    suite.app(context.args, prog_name=context.command_path)


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
