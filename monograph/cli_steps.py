"""Commands that look at one step: `monograph show`, `verify`, `profile`, `replay`."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from monograph.errors import MonographError, is_user_file
from monograph.graph import Graph
from monograph.inspect.session import Session
from monograph.resume.factory import factory_name, load_factory
from monograph.resume.proof import prove_resume

FactoryName = Annotated[
    str,
    typer.Argument(
        metavar="FACTORY", help="module:function or file.py:function; it returns a graph and its batches."
    ),
]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    for name, command in (("show", show), ("verify", verify), ("profile", profile), ("replay", replay)):
        app.command(name)(command)


def show(
    factory: FactoryName,
    stage: Annotated[str, typer.Option(help='"final", "capture" or the name of a pass.')] = "final",
    explain: Annotated[
        bool, typer.Option(help="Tell why builds exist and what they stand on instead.")
    ] = False,
) -> None:
    """Print the program of a step as Python that runs."""
    with _mistakes_answered():
        graph, args, kwargs = step_of(factory)
        graph.compile(*args, **kwargs)
        typer.echo(graph.explain() if explain else graph.show(stage))


def verify(
    factory: FactoryName,
    steps: Annotated[
        int, typer.Option(min=1, help="Steps to compare; with --resume those before the checkpoint.")
    ] = 3,
    against: Annotated[str, typer.Option(help='"eager" or "float64".')] = "eager",
    repro: Annotated[
        Path | None, typer.Option(help="Write a script that shows the first difference.")
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            metavar="CKPT",
            help="Prove that training resumes: from this checkpoint if it is there; else it is written after --steps.",
        ),
    ] = None,
    more: Annotated[
        int, typer.Option(min=1, help="Training steps after the checkpoint, which are compared.")
    ] = 3,
    python_random: Annotated[
        bool, typer.Option(help="The random numbers of Python and NumPy are part of the state too.")
    ] = False,
) -> None:
    """Compare steps of a graph with eager mode; with --resume prove that training from a checkpoint gives the same bits."""
    with _mistakes_answered():
        if resume is not None:
            there = resume.exists()
            proof = prove_resume(
                factory,
                start=resume if there else None,
                checkpoint=None if there else resume,
                steps=steps,
                more=more,
                python_random=python_random,
            )
            typer.echo(proof)
            raise typer.Exit(0 if proof.ok else 1)
        graph, args, kwargs = step_of(factory)
        report = graph.verify(*args, steps=steps, against=against, **kwargs)  # type: ignore[arg-type]
        typer.echo(report)
        if repro is not None and report.first is not None:
            report.repro(repro)
            typer.echo(f"{repro} shows it without the model")
        numbers = graph.find_nonfinite(*args, **kwargs)
        if not numbers.ok:
            typer.echo(numbers)
    raise typer.Exit(0 if report.ok and numbers.ok else 1)


def profile(
    factory: FactoryName,
    trace: Annotated[
        Path | None, typer.Option(help="Write a trace (JSON) for chrome://tracing and ui.perfetto.dev.")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with program, times and memory.")] = None,
) -> None:
    """Time a step op by op, summed by phase, module and op."""
    with _mistakes_answered():
        graph, args, kwargs = step_of(factory)
        found = graph.profile(*args, **kwargs)
        typer.echo(found)
        if trace is not None:
            found.trace(trace)
        if html is not None:
            graph.to_html(html, profile=found)


def replay(factory: FactoryName) -> None:
    """Walk through a step, op by op; `help` at the prompt tells the commands."""
    with _mistakes_answered():
        graph, args, kwargs = step_of(factory)
        walk = graph.replay(*args, **kwargs)
    terminal = sys.stdin.isatty()
    session = Session(walk, None if terminal else sys.stdin)
    session.cmdloop()


def step_of(factory: str) -> tuple[Graph, tuple[Any, ...], dict[str, Any]]:
    """The graph that a factory makes, and the arguments of its first step."""
    sys.path.insert(0, os.getcwd())  # where a module of the user's is looked for
    try:
        graph, batches = load_factory(factory_name(factory))()
    except MonographError:
        raise
    except Exception as error:
        stop(f"{factory} failed.\n{_own_traceback(error)}")
    if not isinstance(graph, Graph):
        stop(f"{factory} returns a {type(graph).__name__} first: it has to be a Graph, and then its batches.")
    batch = next(iter(batches), None)
    if batch is None:
        stop(f"{factory} returns no batches: one is needed.")
    if isinstance(batch, Mapping):
        return graph, (), dict(batch)
    return graph, tuple(batch) if isinstance(batch, (tuple, list)) else (batch,), {}


def _own_traceback(error: BaseException) -> str:
    """The traceback from the first line of the user's code on."""
    frames = error.__traceback__
    while frames is not None and not is_user_file(frames.tb_frame.f_code.co_filename):
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames)).rstrip()


@contextmanager
def _mistakes_answered() -> Iterator[None]:
    try:
        yield
    except MonographError as error:
        stop(str(error))


def stop(message: str) -> NoReturn:
    """End the program with a sentence and status 2."""
    typer.echo(message, err=True)
    raise typer.Exit(2)
