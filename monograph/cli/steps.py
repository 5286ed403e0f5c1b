"""Commands that look at one step: `monograph show`, `verify`, `memory`, `profile`, `replay`."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain, islice
from json import dumps
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from monograph import Graph, MonographError, NonfiniteError
from monograph.inspect.replay_prompt import Session
from monograph.internals.internals import internals_of
from monograph.ir.call.reason import Cause
from monograph.resume.factory import FactoryError, factory_name, made_by
from monograph.resume.proof import prove_resume
from monograph.user_code.files import is_user_file
from monograph.user_code.tracebacks import with_own_frames

Batch = tuple[tuple[Any, ...], dict[str, Any]]  # the arguments of a step
After = Annotated[int, typer.Option(min=0, help="Train on so many batches first.")]
FactoryName = Annotated[
    str,
    typer.Argument(
        metavar="FACTORY", help="module:function or file.py:function; it returns a graph and its batches."
    ),
]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (show, verify, memory, profile, replay):
        app.command(command.__name__)(command)


def show(
    factory: FactoryName,
    stage: Annotated[str, typer.Option(help='"final", "capture" or the name of a pass.')] = "final",
    module: Annotated[str | None, typer.Option(help='Only its ops: "model.blocks.0".')] = None,
    explain: Annotated[
        bool, typer.Option(help="Show why builds exist and what they depend on instead.")
    ] = False,
) -> None:
    """Print the program of a step as Python that runs."""
    with mistakes_answered():
        graph, batches = training(factory)
        args, kwargs = next(batches)
        graph.compile(*args, **kwargs)
        typer.echo(graph.explain() if explain else graph.show(stage, module=module))


def verify(
    factory: FactoryName,
    steps: Annotated[
        int, typer.Option(min=1, help="Steps to compare; with --resume those before the checkpoint.")
    ] = 3,
    against: Annotated[str, typer.Option(help='"eager" or "float64".')] = "eager",
    after: After = 0,
    train: Annotated[
        int,
        typer.Option(min=0, help="Steps to train then, in search of one that makes a NaN or an infinity."),
    ] = 100,
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
    with mistakes_answered():
        if resume is not None:
            is_proven = _proves(factory, resume, steps=steps, more=more, python_random=python_random)
            raise typer.Exit(0 if is_proven else 1)
        graph, batches = training(factory, after)
        args, kwargs = first = next(batches)
        report = graph.verify(*args, steps=steps, against=against, **kwargs)  # type: ignore[arg-type]
        typer.echo(report)
        if repro is not None and report.first is not None:
            report.repro(repro)
            typer.echo(f"{repro} shows it without the model")
        finite = _trains(graph, islice(chain([first], batches), train))
        if finite and train:
            typer.echo("no NaN and no infinity in the steps after them")
    raise typer.Exit(0 if report.ok and finite else 1)


def _proves(factory: str, resume: Path, *, steps: int, more: int, python_random: bool) -> bool:
    """Print the proof that training resumes from a checkpoint, which is written if it is not there; True if it does."""
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
    return proof.ok


def _trains(graph: Graph, batches: Iterator[Batch]) -> bool:
    """Train until a step makes a NaN or an infinity, and report which; False if one does."""
    graph.config.detect_nonfinite()
    internals_of(graph).advised.ours.add(Cause.SETTING)
    for args, kwargs in batches:
        try:
            graph(*args, **kwargs)
        except NonfiniteError as error:
            typer.echo(f"{error.message}\n{error.hint}")
            return False
    return True


def memory(
    factory: FactoryName,
    plot: Annotated[Path | None, typer.Option(help="Draw the bytes over the step: .svg or .png.")] = None,
    json: Annotated[
        Path | None, typer.Option(help="Write all numbers, those of each op too, as JSON.")
    ] = None,
) -> None:
    """Print what a step will hold, and who holds it where it is most; nothing runs.

    A batch may be of `mg.spec`s, and model and optimizer on the device meta: then no memory is needed.
    """
    with mistakes_answered():
        _check_folders(plot, json)
        graph, batches = training(factory)
        args, kwargs = next(batches)
        report = graph.memory(*args, **kwargs)
        typer.echo(report)
        if plot is not None:
            report.plot(plot)
        if json is not None:
            json.write_text(dumps(report.to_dict(), indent=1))


def profile(
    factory: FactoryName,
    trace: Annotated[
        Path | None, typer.Option(help="Write a trace (JSON) for chrome://tracing and ui.perfetto.dev.")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with program, times and memory.")] = None,
    after: After = 0,
) -> None:
    """Time a step op by op, summed by phase, module and op."""
    with mistakes_answered():
        _check_folders(trace, html)
        graph, batches = training(factory, after)
        args, kwargs = next(batches)
        found = graph.profile(*args, **kwargs)
        typer.echo(found)
        if trace is not None:
            found.trace(trace)
        if html is not None:
            graph.to_html(html, profile=found)


def replay(factory: FactoryName, after: After = 0) -> None:
    """Walk through a step, op by op; `help` at the prompt lists the commands."""
    with mistakes_answered():
        graph, batches = training(factory, after)
        args, kwargs = next(batches)
        walk = graph.replay(*args, **kwargs)
    Session(walk, None if sys.stdin.isatty() else sys.stdin).cmdloop()


def _check_folders(*paths: Path | None) -> None:
    """Stop before the work where its result could not be written."""
    for path in paths:
        if path is not None and not path.parent.is_dir():
            stop(f"there is no folder {path.parent}")


def training(factory: str, after: int = 0) -> tuple[Graph, Iterator[Batch]]:
    """The graph that a factory makes, trained on the first batches, and the batches that follow: one at least."""
    sys.path.insert(0, os.getcwd())  # where a module of the user's is looked for
    graph, given = made_by(factory_name(factory), Graph)
    batches = map(_arguments, given)
    for args, kwargs in islice(batches, after):
        graph(*args, **kwargs)
    first = next(batches, None)
    if first is None:
        stop(f"{factory} returns too few batches: {after + 1} or more are needed.")
    return graph, chain([first], batches)


def _arguments(batch: Any) -> Batch:
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return tuple(batch) if isinstance(batch, (tuple, list)) else (batch,), {}


@contextmanager
def mistakes_answered() -> Iterator[None]:
    """A mistake is reported in a sentence, an error of the user's code with their own lines."""
    try:
        yield
    except FactoryError as error:
        stop(error.message)
    except MonographError as error:
        stop(str(error))
    except typer.Exit:
        raise
    except Exception as error:
        frames = with_own_frames(error).__traceback__
        while frames is not None and not is_user_file(frames.tb_frame.f_code.co_filename):
            frames = frames.tb_next
        if frames is None:  # no code of the user's ran: the fault is here
            raise
        stop("".join(traceback.format_exception(type(error), error, frames)).rstrip())


def stop(message: str) -> NoReturn:
    """End the program with a sentence and status 2."""
    typer.echo(message, err=True)
    raise typer.Exit(2)
