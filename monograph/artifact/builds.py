"""The builds of a graph that fit it as it is now: what can be saved or exported."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from typing import Any

import torch

from monograph.artifact.pack import Step, built_step
from monograph.artifact.ranges import fits
from monograph.checkpoint.errors import Refused
from monograph.compiler import Build
from monograph.internals.internals import Internals
from monograph.ir.call.dims import Arguments, dims_in
from monograph.ir.call.modes import MODE_NAMES
from monograph.ir.call.modes import modes as torch_modes

Present = tuple[Step, Arguments | None, tuple[Any, ...]]


@contextmanager
def present_steps(graph: Internals) -> Iterator[Iterator[Present]]:
    """The steps of such builds, the newest first, each with the range that it is of and its modes of torch.

    While one is looked at, modules train or evaluate as it does.
    """
    with graph.store.lock, closing(_walk(graph)) as steps:  # closed, it gives modules their modes back
        yield steps


@contextmanager
def newest_step(graph: Internals) -> Iterator[tuple[Step, Arguments | None]]:
    """The first of them, and inside its modes of torch. `Refused` if there is none."""
    with present_steps(graph) as present:
        for step, declared, modes in present:
            with in_torch_modes(graph, modes):
                yield step, declared
            return
        raise nothing_to_save(graph)


def _walk(graph: Internals) -> Generator[Present, None, None]:
    for (tree, keys, same, modes), build in graph.present_builds():
        if _is_of_one_call(same, keys, build):
            continue
        with _in_mode_of(build):
            if build.guards.hold_by_value():
                step = built_step(tree, keys, graph.names, build)
                yield (
                    step,
                    next((item for item in graph.declared if dims_in(item) and fits(item, tree, keys)), None),
                    modes,
                )


def nothing_to_save(graph: Internals) -> Refused:
    """The error for a graph without such a build."""
    known = graph.present_builds()
    if any(_is_of_one_call(same, keys, build) for (_, keys, same, _), build in known):
        return Refused(
            f"{graph.name} was called with one tensor as two arguments, or with state as an argument",
            "call it with arguments of their own before it is saved",
        )
    made = "was changed since its programs were made" if graph.builds else "has no program yet"
    return Refused(f"{graph.name} {made}", "call it, or graph.compile(mg.spec(...)), and save it then")


def _is_of_one_call(same: tuple[int, ...], keys: tuple[Any, ...], build: Build) -> bool:
    """True for a program without an input for some argument, if no other argument must be that tensor again."""
    inputs = [keys[index] for index, first in enumerate(same) if first == index]
    return bool(build.guards.known_arguments) or any(
        inputs.count(keys[index]) > 1 for index, first in enumerate(same) if first != index
    )


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
def in_torch_modes(graph: Internals, recorded: tuple[Any, ...]) -> Iterator[None]:
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


@contextmanager
def first_state_shown(graph: Internals) -> Iterator[None]:
    """Inside, optimizers that have not stepped yet have the state that their first step begins with."""
    waits = bool(graph.first_state.waiting)
    if waits:
        graph.first_state.show()
    try:
        yield
    finally:
        if waits:
            graph.first_state.roll_back()
