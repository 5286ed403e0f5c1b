"""The command line. Commands that look at a step are in `steps.py`, those for what is deployed in `artifacts.py` and `serve.py`."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from pickle import UnpicklingError
from typing import Annotated

import torch
import typer
from rich.console import Console

from monograph.cli import artifacts as cli_artifacts
from monograph.cli import demo, doctor
from monograph.cli import serve as cli_serve
from monograph.cli.demo_output import DEFAULT, FASTEST, DemoRun
from monograph.cli.steps import register, stop

DEFAULT_BATCH = 16
DEFAULT_STEPS = 534  # six epochs of the digits

app = typer.Typer(add_completion=False, no_args_is_help=True, help="PyTorch training steps as static graphs.")
console = Console()


@app.command("demo")
def run_demo(
    data: Annotated[
        Path | None, typer.Option(help="Folder of CIFAR-10 (cifar-10-batches-py) in place of the digits.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = DEFAULT_STEPS,
    batch: Annotated[int, typer.Option(min=2, help="Images per step.")] = DEFAULT_BATCH,
    seed: Annotated[int, typer.Option(help="Seed of weights, batches and dropout.")] = 0,
    threads: Annotated[int, typer.Option(min=1, help="Threads of one op.")] = 1,
    fastest: Annotated[
        bool, typer.Option(help="Train on inductor too, which compiles for about a minute.")
    ] = True,
) -> None:
    """Train a small MobileNetV2 eagerly and as graphs from one seed, and compare bits, first step and time."""
    images = load_images(data)
    if batch > len(images.train_x):
        stop(f"--batch {batch} is more than the {len(images.train_x)} training images.")
    # one thread by default: several wait for each other at every small op, for long if the machine is busy
    torch.set_num_threads(threads)
    with torch.random.fork_rng(devices=[]):
        eager = demo.eager_trainer(demo.make_model(seed), steps=steps)
        swaps: dict[str, int | None] = {DEFAULT: None} | ({FASTEST: steps // 2} if fastest else {})
        graphs = {
            name: demo.graph_trainer(demo.make_model(seed), steps=steps, swap_at=swap_at)
            for name, swap_at in swaps.items()
        }
        run = DemoRun(eager, graphs, images, batch)
        run.train(demo.batches(images, steps=steps, size=batch, seed=seed), steps, seed, console)
        console.print(run.table())
    problems = list(run.problems())
    for line in problems or run.words():
        console.print(line, style="red" if problems else None, markup=False, highlight=False)
    if problems:
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


register(app)
cli_artifacts.register(app)
cli_serve.register(app)
