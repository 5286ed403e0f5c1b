"""Graphs as files for other runtimes: ONNX, Triton's repositories, and native code."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from monograph.artifact.builds import first_state_shown, newest_step
from monograph.checkpoint import save as checkpoint
from monograph.errors import ArtifactError
from monograph.export.aoti import write_package
from monograph.export.flat import flat_module
from monograph.export.onnx import Exported, write_onnx
from monograph.export.triton import write_triton
from monograph.graph import Graph
from monograph.internals.internals import internals_of


def export_onnx(graph: Graph, path: str | os.PathLike[str], state: Mapping[str, Any] | None = None) -> Path:
    """Write the inference of a graph as one ONNX file, weights inside, and compare it with eager on onnxruntime.

    The arguments are those of its newest build; sizes that were declared with `Dim` vary. Parameters keep their names.
    `state` is stored with them, and comes back from `load_onnx_weights`. An existing file is replaced. Needs the extra
    `onnx`. Raises ArtifactError if the graph trains, or if the file computes something else.

    >>> mg.export_onnx(graph, "classifier.onnx", state={"epoch": 3})  # doctest: +SKIP
    """
    path = _path_of("export_onnx", graph, path)
    return _export("export_onnx", graph, path, partial(write_onnx, path=path, state=state))


def export_triton(graph: Graph, path: str | os.PathLike[str]) -> Path:
    """Write the inference of a graph as a model for Triton's server: its folder in a repository, with an ONNX file in it.

    The name of the folder is that of the model. Tensors are called as `monograph serve` calls them. Triton puts rows of
    requests together if all tensors begin with one declared `Dim` and rows do not depend on each other. Files of an
    older export are replaced. Needs the extra `onnx`. Raises ArtifactError, like `export_onnx`.

    >>> mg.export_triton(graph, "repository/classifier")  # doctest: +SKIP
    """
    path = _path_of("export_triton", graph, path)
    return _export("export_triton", graph, path, partial(write_triton, path=path))


def export_aoti(graph: Graph, path: str | os.PathLike[str]) -> Path:
    """Write the newest program of a graph as native code with its state inside: a `.pt2` package for C++ and Python.

    libtorch alone runs it (`AOTIModelPackageLoader`); each run of a graph that trains is a step, and changes the state
    in the loaded package. Sizes are those of the newest build, also where a `Dim` was declared. Schedulers are not included:
    the learning rate is a number of the state, to be set by hand. The code is for processors like this one, and for the
    version of torch that is installed. An existing file is replaced. Needs a C++ compiler. Raises ArtifactError,
    also for ops that Python implements and for steps that a later one may part from.

    >>> mg.export_aoti(graph, "step.pt2")  # doctest: +SKIP
    >>> mg.load("step.pt2", trust=True)(x, y)  # doctest: +SKIP
    """
    path = _path_of("export_aoti", graph, path)
    if not isinstance(graph, Graph):
        raise ArtifactError(f"export_aoti() got a {type(graph).__name__}", hint="give it a graph")
    inside = internals_of(graph)
    with (
        checkpoint.saving(path, ArtifactError),
        inside.store.lock,
        first_state_shown(inside),
        newest_step(inside) as (step, _),
    ):
        write_package(step, inside.settings, path)
    return path


def _path_of(name: str, graph: object, path: object) -> Path:
    """The path of a file to write. Raises ArtifactError where it is none, or where the two are the other way round."""
    if isinstance(path, (str, os.PathLike)):
        return Path(path)
    hint = (
        f"write mg.{name}(graph, path): the graph comes first"
        if isinstance(path, Graph)
        else "give it a path"
    )
    raise ArtifactError(f"{name}() got a {type(path).__name__} as its path", hint=hint)


def _export(name: str, graph: Graph, path: Path, write: Callable[[Exported], None]) -> Path:
    """Hand the newest step of a graph that infers to a writer."""
    if not isinstance(graph, Graph) or graph.training:
        what = "a graph that trains" if isinstance(graph, Graph) else f"a {type(graph).__name__}"
        raise ArtifactError(
            f"{name}() got {what}",
            hint="make a graph that only infers, over the same model, and compile it",
        )
    inside = internals_of(graph)
    with (
        checkpoint.saving(path, ArtifactError),
        newest_step(inside) as (step, declared),
        inside.in_build(),
    ):
        write(flat_module(graph.build, inside.owned(), step, declared))
    return path
