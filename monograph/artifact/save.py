"""save(): a state dict becomes a checkpoint, a graph or several become an artifact that needs no code of theirs."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from monograph.artifact.artifact import Artifact, artifact_parts
from monograph.artifact.builds import first_state_shown, in_torch_modes, nothing_to_save, present_steps
from monograph.artifact.pack import (
    PackedGraph,
    PackedProgram,
    Places,
    Step,
    captured_step,
    pack,
    pack_graph,
)
from monograph.artifact.programs.templates import Sizes, instance
from monograph.artifact.ranges import NotOneProgram, beside, fits, packed_templates
from monograph.artifact.unpack import check_readable
from monograph.capture.trace import capture
from monograph.checkpoint import save as checkpoint
from monograph.checkpoint.errors import Damaged, Refused
from monograph.checkpoint.ranks.group import in_group, save_together
from monograph.checkpoint.write import Parts, existing, write
from monograph.errors import ArtifactError
from monograph.graph import Graph
from monograph.internals.internals import Internals, internals_of
from monograph.ir.call.dims import Arguments, dims_in, with_sizes
from monograph.ir.call.signature import read_call
from monograph.ir.ops.random import draws
from monograph.passes.cse import cse
from monograph.passes.run import Pass
from monograph.state.find import Owned
from monograph.state_dict.parts import read_state
from monograph.user_code.lines import warn_at_user_line

_NUM_SHOWN = 3  # names in a warning


def save(
    what: Mapping[str, Any] | Graph | Artifact,
    path: str | os.PathLike[str],
    overwrite: bool = False,
    *,
    signatures: Sequence[str] | None = None,
    together: bool | None = None,
) -> Path:
    """Write a state, or a graph with its state, so that a crash at any moment leaves the old one or the new one.

    A state dict becomes a checkpoint, a directory: dicts, lists and tuples of tensors, numbers, strings and what else a
    `state_dict()` of torch holds. A `Graph`, or a dict of several such as `{"train": step, "infer": evaluate}`, becomes
    an artifact that `load` runs without the code of the model, every program that the graph has for its present
    state in it; a path that ends in `.zip` becomes one file. A single graph is stored as `train` if it has an
    optimizer, else as `infer`; `signatures=(name,)` gives it another name. Nothing is pickled. An existing path is
    an error unless `overwrite`. Raises CheckpointError and ArtifactError.

    In a process group every rank saves its state dict, at the same path in a file system that all see:
    one checkpoint holds them all, DTensors in parts, or none. `together=False` saves the state of this rank alone.

    >>> import tempfile
    >>> model = nn.Linear(2, 2)
    >>> path = mg.save({"model": model.state_dict(), "epoch": 3}, tempfile.mkdtemp() + "/checkpoint")
    >>> mg.load(path)["epoch"]
    3
    """
    graphs = _graphs(what, signatures)
    if graphs is None and not isinstance(what, Artifact):
        if in_group() if together is None else together:
            save_together(what, checkpoint.path_of_state(path), lambda: overwrite)
            return Path(path)
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
    return artifact_parts({name: _packed(internals_of(graph)) for name, graph in what.items()})


def _packed(graph: Internals) -> PackedGraph:
    """What is stored of a graph: a template for each declared range of sizes, and the builds for other sizes."""
    with graph.store.lock, first_state_shown(graph), present_steps(graph) as present:
        settings, owned, state = graph.settings, graph.owned(), read_state(graph)
        places = Places(owned, state)
        programs: list[PackedProgram] = []
        done: list[Arguments] = []
        seen: set[object] = set()
        for step, declared, modes in present:
            what = step.tree, step.keys, step.conditions.about
            if what in seen:
                continue
            seen.add(what)
            _look_at_mode(graph.name, step, owned)
            if declared is None or settings.accumulation_steps > 1:  # of which captures at any size are none
                programs.append(pack(step, places))
            elif declared not in done:
                done.append(declared)
                with in_torch_modes(graph, modes):
                    for item in (declared, *beside(declared, _without_builds(graph))):
                        programs += _templates(graph, item, places)
        if not programs:
            raise nothing_to_save(graph)
        for program in programs:
            _check_readable(program)
        return pack_graph(programs, settings, owned, state)


def _check_readable(program: PackedProgram) -> None:
    """Raise Refused for a program that `load` would refuse: torch describes some ops otherwise when a step is captured."""
    try:
        check_readable(instance(program.program, tuple(low for _, low, _ in program.dims)))
    except Damaged as error:
        raise Refused(
            f"load() would refuse the program: {error}",
            "return what that op reads, and use the op after the call",
        ) from error


def _without_builds(graph: Internals) -> list[Arguments]:
    """Calls that were compiled and have no build of their own, since one for ranges serves them."""
    own = [(tree, keys) for (tree, keys, *_), _ in graph.present_builds()]
    return [item for item in graph.declared if not any(fits(item, *form) for form in own)]


def _look_at_mode(name: str, step: Step, owned: Owned) -> None:
    """Warn of a graph without optimizer whose modules train: of dropout that stays, of statistics that move."""
    if owned.optimizers or not any(module.training for module in owned.named_modules().values()):
        return
    what = ["draws random numbers"] * any(map(draws, step.program.ops()))
    if moved := [port.path for _, port in step.program.updates()]:
        what.append(f"changes {', '.join(moved[:_NUM_SHOWN])}")
    if what:
        warn_at_user_line(
            f"{name} is saved as it was called in train() mode: it {' and '.join(what)}; if it is to predict, call "
            "model.eval(), then the graph, and save it before model.train()"
        )


def _templates(graph: Internals, declared: Arguments, places: Places) -> list[PackedProgram]:
    """The programs for every size in the declared ranges."""
    dims = dims_in(declared)

    def sampled(sizes: Sizes, without: Collection[Pass] = ()) -> PackedProgram:
        named = dict(zip((dim.name for dim in dims), sizes, strict=True))
        args, kwargs = with_sizes(declared, named)
        call = read_call(args, kwargs, graph.names)
        request = replace(graph.request(call), for_many_sizes=True)
        with graph.in_build():
            captured = capture(request)
        try:
            return pack(captured_step(call, captured, request.settings, without=without), places)
        finally:
            captured.undo()

    ranges = [(dim.name, dim.min, dim.max) for dim in dims]
    try:
        return packed_templates(cache(sampled), ranges)
    except NotOneProgram:
        # where two sizes are equal, two ops may be: cse would take them for one
        return packed_templates(cache(partial(sampled, without=(cse,))), ranges)
