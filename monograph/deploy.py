"""save(): a state dict becomes a checkpoint, a graph or several become an artifact that needs no code of theirs."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from monograph.capture.dims import Arguments, dims_in, with_sizes
from monograph.capture.signature import MODE_NAMES, read_call
from monograph.capture.signature import modes as torch_modes
from monograph.capture.trace import capture
from monograph.compiler import Build
from monograph.errors import ArtifactError
from monograph.graph import Graph
from monograph.storage import checkpoint
from monograph.storage.aoti import write_package
from monograph.storage.artifact import Artifact, artifact_parts
from monograph.storage.faults import Refused
from monograph.storage.flat import flat_module
from monograph.storage.onnx import Exported, write_onnx
from monograph.storage.packing import (
    PackedGraph,
    PackedProgram,
    Places,
    Step,
    built_step,
    captured_step,
    pack,
    pack_graph,
)
from monograph.storage.ranges import fits, packed_templates
from monograph.storage.templates import Sizes
from monograph.storage.triton import write_triton
from monograph.storage.writing import Parts, existing, write


def save(
    what: Mapping[str, Any] | Graph | Artifact,
    path: str | os.PathLike[str],
    overwrite: bool = False,
    *,
    signatures: Sequence[str] | None = None,
) -> Path:
    """Write a state, or a graph with its state, so that a crash at any moment leaves the old one or the new one.

    A state dict becomes a checkpoint, a directory: dicts, lists and tuples of tensors, numbers, strings and what else a
    `state_dict()` of torch holds. A `Graph`, or a dict of several such as `{"train": step, "infer": evaluate}`, becomes
    an artifact that `load` runs without the code of the model, every program that the graph has for its present
    state in it; a path that ends in `.zip` becomes one file. A single graph is stored as `train` if it has an
    optimizer, else as `infer`; `signatures=(name,)` gives it another name. Nothing is pickled. An existing path is
    an error unless `overwrite`. Raises CheckpointError and ArtifactError.

    >>> import tempfile
    >>> model = nn.Linear(2, 2)
    >>> path = mg.save({"model": model.state_dict(), "epoch": 3}, tempfile.mkdtemp() + "/checkpoint")
    >>> mg.load(path)["epoch"]
    3
    """
    graphs = _graphs(what, signatures)
    if graphs is None and not isinstance(what, Artifact):
        return checkpoint.save(what, path, overwrite)  # type: ignore[arg-type]
    if not isinstance(path, (str, os.PathLike)):
        raise ArtifactError(
            f"save() got a {type(path).__name__} as its path", hint="write mg.save(graph, path)"
        )
    path = Path(path)
    with checkpoint.saving(path, ArtifactError):
        if not overwrite and os.path.lexists(path):
            raise existing(overwrite)  # before programs are looked through
        write(_parts(what if graphs is None else graphs), path, overwrite=overwrite)
    return path


def export_onnx(graph: Graph, path: str | os.PathLike[str], state: Mapping[str, Any] | None = None) -> Path:
    """Write the inference of a graph as one ONNX file, weights inside, and compare it with eager on onnxruntime.

    The arguments are those of its newest build; sizes that were declared with `Dim` vary. Parameters keep their names.
    `state` is stored with them, and comes back from `load_onnx_weights`. An existing file is replaced. Needs the extra
    `onnx`. Raises ArtifactError if the graph trains, or if the file computes something else.

    >>> mg.export_onnx(graph, "classifier.onnx", state={"epoch": 3})  # doctest: +SKIP
    """
    path = Path(path)
    return _export("export_onnx", graph, path, partial(write_onnx, path=path, state=state))


def export_triton(graph: Graph, path: str | os.PathLike[str]) -> Path:
    """Write the inference of a graph as a model for Triton's server: its folder in a repository, with an ONNX file in it.

    The name of the folder is that of the model. Tensors are called as `monograph serve` calls them. Triton puts rows of
    requests together if all tensors begin with one declared `Dim` and rows do not depend on each other. Files of an
    older export are replaced. Needs the extra `onnx`. Raises ArtifactError, like `export_onnx`.

    >>> mg.export_triton(graph, "repository/classifier")  # doctest: +SKIP
    """
    path = Path(path)
    return _export("export_triton", graph, path, partial(write_triton, path=path))


def _export(name: str, graph: Graph, path: Path, write: Callable[[Exported], None]) -> Path:
    """Hand the newest step of a graph to a writer."""
    if not isinstance(graph, Graph) or graph.training:
        what = "a graph that trains" if isinstance(graph, Graph) else f"a {type(graph).__name__}"
        raise ArtifactError(
            f"{name}() got {what}",
            hint="make a graph that only infers, over the same model, and compile it",
        )
    with checkpoint.saving(path, ArtifactError), graph._store.lock, closing(_present(graph)) as present:
        for step, declared, modes in present:
            with _in_torch_modes(graph, modes), graph._in_build():
                write(flat_module(graph.build, graph._holdings(), step, declared))
            return path
        raise _nothing_to_save(graph)


def export_aoti(graph: Graph, path: str | os.PathLike[str]) -> Path:
    """Write the newest program of a graph as native code with its state inside: a `.pt2` package for C++ and Python.

    libtorch alone runs it (`AOTIModelPackageLoader`); each run of a graph that trains is a step, and changes the state
    in the loaded package. Sizes are those of the newest build, also where a `Dim` was declared. Schedulers stay behind:
    the learning rate is a number of the state, to be set by hand. The code is for processors like this one, and for the
    version of torch that is installed. An existing file is replaced. Needs a C++ compiler. Raises ArtifactError,
    also for ops that Python implements and for steps that a later one may part from.

    >>> mg.export_aoti(graph, "step.pt2")  # doctest: +SKIP
    >>> mg.load("step.pt2", trust=True)(x, y)  # doctest: +SKIP
    """
    if not isinstance(graph, Graph):
        raise ArtifactError(f"export_aoti() got a {type(graph).__name__}", hint="give it a graph")
    path = Path(path)
    with (
        checkpoint.saving(path, ArtifactError),
        graph._store.lock,
        _first_state_shown(graph),
        closing(_present(graph)) as present,
    ):
        for step, _, modes in present:
            with _in_torch_modes(graph, modes):
                write_package(step, graph._config.settings, path)
            return path
        raise _nothing_to_save(graph)


def _graphs(what: object, signatures: Sequence[str] | None) -> dict[str, Graph] | None:
    """The graphs by the names of their signatures; None for a state or an artifact."""
    if isinstance(what, Graph):
        names = tuple(signatures or (("train",) if what.training else ("infer",)))
        if isinstance(signatures, str) or len(names) != 1:
            raise ArtifactError(
                f"one graph has one signature, not {signatures!r}", hint='signatures=("infer",)'
            )
        return _named({names[0]: what})
    if not isinstance(what, Mapping) or not any(isinstance(item, Graph) for item in what.values()):
        return None
    if signatures is not None:
        raise ArtifactError("signatures are the keys of the dict of graphs", hint="leave signatures out")
    for name, item in what.items():
        if not isinstance(item, Graph):
            raise ArtifactError(
                f"{name!r} is a {type(item).__name__}, not a graph", hint="save states by themselves"
            )
    return _named(dict(what))


def _named(graphs: dict[Any, Graph]) -> dict[str, Graph]:
    for name in graphs:
        if (
            not isinstance(name, str)
            or not name.isidentifier()
            or name.startswith("_")
            or hasattr(Artifact, name)
        ):
            raise ArtifactError(
                f"{name!r} is no name for a signature", hint='such as "train", "eval" or "infer"'
            )
    return graphs


def _parts(what: Any) -> Parts:
    if isinstance(what, Artifact):
        return what.parts()
    return artifact_parts({name: _packed(graph) for name, graph in what.items()})


def _packed(graph: Graph) -> PackedGraph:
    """What is stored of a graph: a template for each declared range of sizes, and the builds for other sizes."""
    with graph._store.lock, _first_state_shown(graph), closing(_present(graph)) as present:
        settings, holdings, state = graph._config.settings, graph._holdings(), graph.state_dict()
        places = Places(holdings, state)
        programs: list[PackedProgram] = []
        done: list[Arguments] = []
        seen: set[object] = set()
        for step, declared, modes in present:
            what = step.tree, step.keys, step.conditions.about
            if what in seen:
                continue
            seen.add(what)
            if declared is None:
                programs.append(pack(step, places))
            elif declared not in done:
                done.append(declared)
                with _in_torch_modes(graph, modes):
                    programs += _templates(graph, declared, places)
        if not programs:
            raise _nothing_to_save(graph)
        return pack_graph(programs, settings, holdings, state)


def _present(graph: Graph) -> Generator[tuple[Step, Arguments | None, tuple[Any, ...]], None, None]:
    """The steps of the builds that stand on the graph as it is, each with the range that it is of and its modes of torch.

    While one is looked at, modules train or evaluate as it does; close it to have them back.
    """
    for (tree, keys, _, modes), build in graph._cache.made_for(graph._config.settings, graph._version):
        with _in_mode_of(build):
            if build.guards.hold():
                step = built_step(tree, keys, graph._names, build)
                yield step, next((item for item in graph._declared if fits(item, step)), None), modes


def _nothing_to_save(graph: Graph) -> Refused:
    made = "was changed since its programs were made" if graph.builds else "has no program yet"
    return Refused(f"{graph.name} {made}", "call it, or graph.compile(mg.spec(...)), and save it then")


@contextmanager
def _in_mode_of(build: Build) -> Iterator[None]:
    """Inside, modules train or evaluate as when the build was made: graphs over one model need not do the same."""
    modes = build.guards.modes()
    before = [module.training for module, _ in modes]
    try:
        for module, training in modes:
            module.training = training
        yield
    finally:
        for (module, _), training in zip(modes, before, strict=True):
            module.training = training


@contextmanager
def _in_torch_modes(graph: Graph, recorded: tuple[Any, ...]) -> Iterator[None]:
    """Inside, gradients are on or off as when a build was made; autocast and the like have to be as they were."""
    grad = MODE_NAMES.index("grad mode")
    now = torch_modes()
    for name, before, after in list(zip(MODE_NAMES, recorded, now, strict=False))[grad + 1 :]:
        if before != after:
            raise Refused(
                f"{name} was {before} when {graph.name} was compiled, and is {after}",
                "save the graph under the modes that it was compiled in",
            )
    with torch.set_grad_enabled(recorded[grad]):
        yield


def _templates(graph: Graph, declared: Arguments, places: Places) -> list[PackedProgram]:
    """The program for every size in the declared ranges; one apart for a size of 1, where that is another program."""
    dims = dims_in(declared)

    def sampled(sizes: Sizes) -> PackedProgram:
        named = dict(zip((dim.name for dim in dims), sizes, strict=True))
        args, kwargs = with_sizes(declared, named)
        call = read_call(args, kwargs, graph._names)
        request = graph._request(call)
        with graph._in_build():
            captured = capture(request)
        try:
            return pack(captured_step(call, captured, request.settings), places)
        finally:
            captured.undo()

    return packed_templates(sampled, [(dim.name, dim.min, dim.max) for dim in dims])


@contextmanager
def _first_state_shown(graph: Graph) -> Iterator[None]:
    """Inside, optimizers that have not stepped yet have the state that their first step begins with."""
    waits = bool(graph._first_state.waiting)
    if waits:
        graph._first_state.show()
    try:
        yield
    finally:
        if waits:
            graph._first_state.take_back()
