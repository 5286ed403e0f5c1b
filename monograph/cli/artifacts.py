"""Commands for what is deployed: `monograph export`, `inspect`, `run`."""

from __future__ import annotations

import json
import time
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import torch
import typer

import monograph as mg
from monograph.artifact.description import describe
from monograph.cli.steps import FactoryName, mistakes_answered, stop, training
from monograph.ir.call.nested import leaves_by_path
from monograph.ir.meta import TensorMeta

_SHOWN_TENSORS = 20


def register(app: typer.Typer) -> None:
    """Add the commands."""
    for name, command in (("export", export), ("inspect", inspect), ("run", run)):
        app.command(name)(command)


def export(
    factory: FactoryName,
    path: Annotated[
        Path, typer.Argument(help="A directory that does not exist, or a file that ends in .zip.")
    ],
    after: Annotated[int, typer.Option(min=0, help="Train on so many batches first.")] = 0,
    overwrite: Annotated[bool, typer.Option(help="Replace what is there.")] = False,
) -> None:
    """Save the graph that a factory makes as an artifact, which runs without its code."""
    with mistakes_answered():
        graph, batches = training(factory, after)
        args, kwargs = next(batches)
        graph.compile(*args, **kwargs)
        typer.echo(f"{mg.save(graph, path, overwrite)} holds {describe(path).summary()}")


def inspect(
    path: Annotated[Path, typer.Argument(help="An artifact or a checkpoint.")],
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
    all_tensors: Annotated[bool, typer.Option("--all", help="Every tensor, however many there are.")] = False,
) -> None:
    """Show what an artifact or a checkpoint contains; tensors are not read, nothing runs."""
    with mistakes_answered():
        found = describe(path)
    if as_json:
        typer.echo(json.dumps(found.as_json(), indent=2))
        return
    typer.echo(found.summary())
    for line in found.signatures:
        typer.echo(f"  {line}")
    tensors = found.tensors if all_tensors else found.tensors[:_SHOWN_TENSORS]
    for name, kind, size in tensors:
        typer.echo(f"  {kind:24} {size:>12,}  {name}")
    if len(tensors) < len(found.tensors):
        typer.echo(f"  ... and {len(found.tensors) - len(tensors)} more: --all")


def run(
    path: Annotated[Path, typer.Argument(help="An artifact.")],
    signature: Annotated[str | None, typer.Option(help="Which one to call, if there are several.")] = None,
    given: Annotated[
        list[str] | None,
        typer.Option("--input", help="NAME=FILE.npy; may be repeated. What is left out is random."),
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Write the results here: .npz.")] = None,
    backend: Annotated[str | None, typer.Option(help="aten or inductor; by default as it was saved.")] = None,
    repeat: Annotated[int, typer.Option(min=1, help="Call it so often, and report how long it takes.")] = 1,
) -> None:
    """Call an artifact once or several times, on files or on random numbers."""
    with mistakes_answered():
        artifact = mg.load(path, backend=backend)
        if not hasattr(artifact, "signatures"):
            stop(f"{path} is a checkpoint: there is nothing to run.")
        names = list(artifact.signatures)
        if signature not in names and (signature is not None or len(names) != 1):
            stop(f"Choose a signature: --signature {' or '.join(names)}.")
        called = artifact.signatures[signature or names[0]]
        arguments = _arguments(called, dict(_pair(item) for item in given or ()))
        seconds = []
        for _ in range(repeat):
            start = time.perf_counter()
            results = called(**arguments)
            seconds.append(time.perf_counter() - start)
    leaves = dict(leaves_by_path(results, "result", "."))
    for name, leaf in leaves.items():
        typer.echo(f"{name}: {_shown(leaf)}")
    first = f"the first one, which makes the program runnable, {seconds[0] * 1e3:.2f} ms"
    typer.echo(f"{called.backend}: {median(seconds) * 1e3:.2f} ms, median of {repeat}; {first}")
    if output is not None:
        arrays: dict[str, Any] = {
            name: leaf.numpy() for name, leaf in leaves.items() if isinstance(leaf, torch.Tensor)
        }
        np.savez(output, **arrays)


def _pair(text: str) -> tuple[str, Path]:
    name, sign, file = text.partition("=")
    if not sign:
        stop(f"--input {text}: write NAME=FILE.npy.")
    return name, Path(file)


def _arguments(called: Any, files: dict[str, Path]) -> dict[str, Any]:
    """The arguments by name: from files, and random where there is none."""
    found: dict[str, Any] = {}
    for parameter in called.programs[0].smallest.signature.parameters:
        (leaf, *others) = parameter.form.leaves
        file = files.pop(parameter.name, None)
        if file is not None:
            found[parameter.name] = read_array(file)
        elif isinstance(leaf, TensorMeta) and not others and parameter.form.tree.kind is None:
            found[parameter.name] = _random(leaf)
        elif not parameter.form.is_plain:
            stop(f"The argument {parameter.name} has parts or is a number: call the artifact from Python.")
    if files:
        stop(f"There is no argument {next(iter(files))}: it takes {called}.")
    return found


def read_array(file: Path) -> torch.Tensor:
    """The tensor in a file of NumPy's; files with code in them are refused."""
    try:
        return torch.from_numpy(np.load(file, allow_pickle=False))
    except (OSError, ValueError, TypeError) as error:
        stop(f"{file} cannot be read: {error}")


def _random(leaf: TensorMeta) -> torch.Tensor:
    if leaf.dtype.is_floating_point or leaf.dtype.is_complex:
        return torch.randn(leaf.shape, dtype=leaf.dtype, device=leaf.device)
    return torch.zeros(leaf.shape, dtype=leaf.dtype, device=leaf.device)


def _shown(leaf: Any) -> str:
    if not isinstance(leaf, torch.Tensor):
        return repr(leaf)
    dtype = str(leaf.dtype).removeprefix("torch.")
    few = " ".join(f"{value:.6g}" for value in leaf.flatten()[:4].tolist())
    return f"{dtype}{list(leaf.shape)}  {few}{' ...' if leaf.numel() > 4 else ''}"
