"""The command `monograph serve`. The HTTP libraries are imported when it runs: they belong to the extra `serve`."""

from __future__ import annotations

import importlib
import os
import re
from collections import Counter
from pathlib import Path
from typing import Annotated

import torch
import typer

import monograph as mg
from monograph.artifact.artifact import Artifact
from monograph.cli.steps import mistakes_answered, stop
from monograph.serving.limits import Limits, is_local
from monograph.serving.models import ServedModel, served


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("serve")(serve)


def serve(
    artifacts: Annotated[
        list[str], typer.Argument(help="Artifacts, each PATH or NAME=PATH.", metavar="ARTIFACT...")
    ],
    host: Annotated[
        str, typer.Option(help="Where to listen. Beyond this machine a token is needed.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="0: one that is free; the log names it.")
    ] = 8000,
    token_file: Annotated[
        Path | None, typer.Option(help="A file with the bearer token that requests have to show.")
    ] = None,
    backend: Annotated[str | None, typer.Option(help="aten or inductor; by default as it was saved.")] = None,
    max_batch: Annotated[
        int, typer.Option(min=0, help="Rows of several requests that run together; 0: none do.")
    ] = 32,
    delay_ms: Annotated[
        float, typer.Option(min=0, max=60_000, help="How long a request waits for others to join it.")
    ] = 0,
    queue: Annotated[int, typer.Option(min=1, help="Requests inside at a time; more get status 429.")] = 256,
    deadline: Annotated[
        float, typer.Option(min=0.001, max=86_400, help="Seconds until a request gets status 504.")
    ] = 30,
    max_mib: Annotated[int, typer.Option(min=1, max=512, help="The largest request.")] = 64,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of one op.")] = None,
) -> None:
    """Answer requests over HTTP by the Open Inference Protocol, version 2, until the process is asked to end.

    Only signatures that do not train are served. Needs the extra `serve`.
    """
    # torch asks for huge pages: half of the time went into small ones
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    with mistakes_answered():
        try:
            app = importlib.import_module("monograph.serving.app")
        except ModuleNotFoundError as error:
            stop(f"{error.name} is missing: pip install 'monograph[serve]'.")
        limits = Limits(queue, max_batch, delay_ms / 1e3, deadline, max_mib << 20)
        token = None if token_file is None else _read_token(token_file)
        if token is None and not is_local(host):
            stop(f"{host} can be reached from other machines: give --token-file FILE, with a token in it.")
        if threads is not None:
            torch.set_num_threads(threads)
        models = _models(artifacts, backend, max_batch)
        try:
            app.serve(models, limits, host=host, port=port, token=token)
        except OSError as error:
            stop(f"{host}:{port} cannot be used: {error.strerror}.")


def _models(artifacts: list[str], backend: str | None, max_batch: int) -> list[ServedModel]:
    """What is served, each under a name of its own."""
    models = [model for text in artifacts for model in _models_of(text, backend, max_batch)]
    for name, count in Counter(model.name for model in models).items():
        if count > 1:
            stop(f"Two models are called {name}: write NAME=PATH.")
    return models


def _models_of(text: str, backend: str | None, max_batch: int) -> list[ServedModel]:
    """What is served of one argument of the command."""
    name, sign, path = ("", "", text) if Path(text).exists() else text.rpartition("=")
    if sign and not re.fullmatch(r"[\w.-]{1,100}", name):
        stop(f"{name!r} is no name for a model: it has letters, digits, and . _ -")
    artifact = mg.load(path, backend=backend)
    if not isinstance(artifact, Artifact):
        stop(f"{path} is a checkpoint: there is nothing to serve.")
    return served(name if sign else Path(path).stem, artifact, max_batch)


def _read_token(file: Path) -> str:
    try:
        token = file.read_text("ascii").strip()
    except (OSError, ValueError) as error:
        stop(f"{file} cannot be read: {error}.")
    if not token:
        stop(f"{file} is empty.")
    return token
