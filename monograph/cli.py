"""The command line: `monograph demo`, `monograph verify`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from pickle import UnpicklingError
from statistics import median
from typing import Annotated, NoReturn

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from monograph import demo
from monograph.errors import MonographError
from monograph.resume.proof import prove_resume

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


@app.command("verify")
def verify(
    factory: Annotated[
        str, typer.Argument(help="module:function or file.py:function; it returns a graph and its batches.")
    ],
    resume: Annotated[
        Path,
        typer.Option(
            metavar="CKPT",
            help="Checkpoint: training starts from it if it is there; if not, it is written after --steps.",
        ),
    ],
    steps: Annotated[int, typer.Option(min=1, help="Training steps before the checkpoint.")] = 3,
    more: Annotated[int, typer.Option(min=1, help="Training steps after it, which are compared.")] = 3,
    python_random: Annotated[
        bool, typer.Option(help="The random numbers of Python and NumPy are part of the state too.")
    ] = False,
) -> None:
    """Prove that training from a checkpoint gives the bits of training without a break, in two new processes."""
    there = resume.exists()
    sys.path.insert(0, os.getcwd())  # where a module of the user's is looked for
    try:
        report = prove_resume(
            factory,
            start=resume if there else None,
            checkpoint=None if there else resume,
            steps=steps,
            more=more,
            python_random=python_random,
        )
    except MonographError as error:
        stop(error.message)
    typer.echo(report)
    raise typer.Exit(0 if report.ok else 1)


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


def stop(message: str) -> NoReturn:
    """End the program with a sentence and status 2."""
    typer.echo(message, err=True)
    raise typer.Exit(2)
