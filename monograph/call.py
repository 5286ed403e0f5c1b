"""A call of a graph: the build that fits is found, or made, and run. A hit passes nothing else of the graph.

`call` is the `__call__` of a Graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import methodcaller
from typing import Any

import torch
from torch.optim import Optimizer

from monograph.capture.effects.arguments import check_leaves, given_containers
from monograph.capture.optimizers.wrapped import layers_of
from monograph.capture.process.signals import raised_by_handler
from monograph.capture.trace import LOGGER
from monograph.compat.global_state import checks_gradients_for_nan
from monograph.compat.modes import dispatch_mode, num_dispatch_modes, outside_of_modes
from monograph.compat.optimizers import marking_as_stepped
from monograph.compat.symbolic_numbers import is_overflow
from monograph.compiler import Build
from monograph.errors import (
    DistributedError,
    GraphBoundaryError,
    MonographError,
    NonfiniteError,
    SignatureError,
    TornStateError,
)
from monograph.inspect.nonfinite import nan_in_backward, nonfinite_report
from monograph.inspect.walk import own_inputs
from monograph.internals.eager_call import eager_call
from monograph.internals.frequent_sizes import watch
from monograph.internals.internals import RUNNING, Arguments, Internals
from monograph.internals.other_captures import made_again
from monograph.ir.call.dims import declared_sizes, dims_in, example_sizes, with_declared, with_sizes
from monograph.ir.call.reason import Cause, Reason
from monograph.ir.call.signature import Call, Spec
from monograph.numerics.padded import PaddedStep, read_padded
from monograph.runtime.repetition import Repetition
from monograph.settings import is_compiled
from monograph.user_code.tracebacks import after_interrupt, raised_by_user, with_own_frames

_STATE_OF_BEFORE = "the state is that of before the step"


def call(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Run one step. The first call, and a call that no build fits, captures one."""
    try:
        graph: Internals = self._monograph
        store, first_state = graph.store, graph.first_state
        if store.torn or graph.registry.swapped or getattr(RUNNING, "graph", None) is not None:
            graph.check_usable()
        if kwargs:
            args, kwargs = graph.formed(args, kwargs)
        with store.lock:
            padded = None
            if graph.registry.config.settings.buckets:
                padded = PaddedStep(graph, (args, kwargs))
                args, kwargs = padded.arguments
            if first_state.waiting:
                first_state.show()
            try:
                read = None
                build = None if kwargs or graph.cache.has_own else known_build(graph, args)
                if build is None:
                    graph.check_usable()
                    read = graph.read(args, kwargs)
                    if Spec in map(type, read.leaves):
                        raise SignatureError(
                            "a graph is called with tensors", hint="mg.spec is for compile()"
                        )
                    build = graph.build_for(read, args, kwargs)
                    if not build.executor.has_run:
                        watch(graph, build)
                result = _run(graph, build, read, (args, kwargs))
            except BaseException:
                if not store.torn:  # a step that has failed
                    first_state.roll_back()
                    graph.cache.take_back_own()
                raise
            return result if padded is None else padded.finish(result)
    except MonographError as error:
        raise error.brief()
    except Exception as error:
        raise with_own_frames(error)
    except KeyboardInterrupt as error:
        raise after_interrupt(error)


def compile_only(self: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Make the build for a call of a graph, without running it. What is exported has ranges for dims, and single sizes beside them."""
    build_of_call(self, args, kwargs)
    graph: Internals = self._monograph
    graph.declared = with_declared(graph.declared, graph.formed(args, kwargs))


def build_of_call(self: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Build, Call]:
    """The build for a call of a graph, made now if there is none, and that call with sizes for its dims."""
    try:
        return _build_of_call(self._monograph, args, kwargs)
    except MonographError as error:
        raise error.brief()
    except Exception as error:
        raise with_own_frames(error)
    except KeyboardInterrupt as error:
        raise after_interrupt(error)


def _build_of_call(graph: Internals, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Build, Call]:
    graph.check_usable()
    args, kwargs = graph.formed(args, kwargs)
    declared = args, kwargs
    sizes = declared_sizes(declared, graph.names) if (dims := dims_in(declared)) else None
    if dims:
        args, kwargs = with_sizes(declared, example_sizes(declared, graph.settings.accumulation_steps))
    elif graph.settings.buckets:
        args, kwargs = read_padded(graph, declared).arguments
    read = graph.read(args, kwargs)
    graph.cache.check_repeatable(read, "this captures the step and does not run it")
    with graph.store.lock, graph.first_state.hidden(graph.registry.optimizers):
        build = graph.build_for(read, args, kwargs, sizes)
    if lost := build.captured.effects.lost:
        LOGGER.warning("%s: %s is as after a step, and cannot be put back", graph.name, lost[0])
    return build, read


def run_again(graph: Internals, build: Build, args: tuple[Any, ...]) -> Any:
    """Run a step by a build that fits it."""
    try:
        return _run(graph, build, None, (args, {}))
    except BaseException:
        if not graph.store.torn:
            graph.first_state.roll_back()
        raise


def is_alone(graph: Internals, build: Build) -> bool:
    """True if a step by this build is its program and nothing else: no look for mistakes, no code that is to come."""
    registry, first = graph.registry, graph.first_state
    is_watched = bool(registry.optimizers) and _is_unlike_before(graph, build)
    in_wait = build.number in graph.upgrades.pending or registry.averages or first.waiting or first.shown
    return not (
        build.communicates or is_watched or in_wait or num_dispatch_modes() or torch.is_anomaly_enabled()
    )


def run_repeated(graph: Internals, build: Build, loop: Repetition) -> None:
    """Make some of the steps of a loop. The schedulers are not moved."""
    graph.note_use(build)

    def count(steps: int) -> None:
        _note_steps(graph, steps)
        build.executor.steps += steps
        for action in _actions_of(graph, build):
            action()

    try:
        loop.run(count)
    except TornStateError as error:
        graph.store.torn = error.message
        raise


def call_eagerly(graph: Internals, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the step in eager mode, on the arguments that a step of the graph would have."""
    if not graph.settings.buckets:
        return eager_call(graph, args, kwargs)
    with graph.store.lock:
        padded = PaddedStep(graph, graph.formed(args, kwargs), is_eager=True)
        return padded.finish(eager_call(graph, *padded.arguments))


# --- inside ----------------------------------------------------------------------------------------------------------


def known_build(graph: Internals, args: tuple[Any, ...]) -> Build | None:
    """The build that fits a call by a flat check; None if it takes a closer look."""
    registry = graph.registry
    settings, version = registry.config.settings, registry.version
    for build in graph.cache.newest:
        flat = build.guards.flat
        if (
            flat is not None
            and flat.serves(args, settings, version)
            and (not flat.has_branches or build.takes_branches(args))
        ):
            return build
    return None


def _run(graph: Internals, build: Build, read: Call | None, arguments: Arguments) -> Any:
    """Run a build. A call that it was found for by its flat check is read where more than the leaves is needed."""
    if num_dispatch_modes() and is_compiled(build.backend) and (mode := dispatch_mode()) is not None:
        raise GraphBoundaryError(
            f"{graph.name} is called under {mode}, a TorchDispatchMode, which sees no ops of {build.backend} code",
            hint='graph.config.backend("aten") replays op by op',
        )
    if torch.is_anomaly_enabled() and checks_gradients_for_nan():
        _check_backward(build, read or graph.read(*arguments))
    upgrades = graph.upgrades
    if upgrades.pending or upgrades.frequent:
        leaves = arguments[0] if read is None else read.leaves
        reading = partial(graph.read, *arguments)
        build = upgrades.next_build(graph.cache, build, graph.store.steps, leaves, reading)
    registry = graph.registry
    if registry.optimizers and _is_unlike_before(graph, build):
        steps = build.captured.steps
        if not graph.store.steps:
            graph.mistakes.before_first_step(graph.name)
        graph.mistakes.before_step(graph.name, registry.optimizers, registry.modules, build.number, steps)
    fault = ""
    try:
        return _run_build(graph, build, read, arguments)
    except (TornStateError, DistributedError) as error:
        graph.store.torn = error.message
        raise
    except NonfiniteError:
        inputs = build.executor.bind((read or graph.read(*arguments)).leaves)
        report = nonfinite_report(graph.name, build, own_inputs(inputs))
        message = f"step {graph.store.steps} of the graph, counted from 0, made a NaN or an infinity"
        raise NonfiniteError(message, where=report.first, hint=f"{_STATE_OF_BEFORE}\n{report}") from None
    except (RuntimeError, ArithmeticError, ValueError) as error:
        if isinstance(error, (MonographError, torch.OutOfMemoryError)) or raised_by_handler(error):
            raise
        if isinstance(error, RuntimeError) and not is_overflow(error):
            if build.executor.has_run or build.communicates:
                raise  # one process alone does not take another step
            build = made_again(graph, build, read or graph.read(*arguments), error)
        else:
            numbers = build.executor.undone and build.executor.bound.takes_numbers
            if not numbers or raised_by_user(error):
                raise
            fault = f"{type(error).__name__}: {error}"
    if fault:
        return _run_beside(graph, build, read or graph.read(*arguments), fault, arguments)
    return _run_build(graph, build, read, arguments)


def _is_unlike_before(graph: Internals, build: Build) -> bool:
    """True if the step is to be looked at for mistakes: an early one, or modules changed their mode, or a scheduler moved."""
    mistakes, steps = graph.mistakes, graph.store.steps
    if (watched := mistakes.watched.get(build.number)) is None or mistakes.is_young:
        return True
    ahead = mistakes.ahead
    if ahead is None:
        ahead = mistakes.note_places(graph.registry.optimizers, steps)
    if any(scheduler.last_epoch == steps + more + 1 for scheduler, more in ahead):
        mistakes.look_again(steps)
        return True
    present = [(root(), mode) for root, mode in watched]
    return any(root is None or root.training is not mode for root, mode in present)


def _run_build(graph: Internals, build: Build, read: Call | None, arguments: Arguments) -> Any:
    executor = build.executor
    containers: Sequence[Any] = ()
    if executor.has_changes:
        read = read or graph.read(*arguments)
        containers = _changed_containers(build, read, arguments)
    if graph.store.tensors is not build.guards.tensors:
        graph.note_use(build)
    leaves = arguments[0] if read is None else read.leaves
    if graph.upgrades.pending or graph.upgrades.frequent or build.communicates:
        step = partial(executor.run, leaves, _after(graph, build), containers)
        if build.communicates:
            step = partial(graph.together.run, graph.name, build, graph.store.steps, step)
        return graph.upgrades.timed(step)
    return executor.run(leaves, _after(graph, build), containers)


def _run_beside(graph: Internals, build: Build, read: Call, fault: str, arguments: Arguments) -> Any:
    """Run the step by another build, since arithmetic on numbers has raised an error, which build() may catch.

    If it does not, its own error is reported, at the user's line.
    """
    another = graph.cache.find_beside(build, read)
    if another is None:
        reason = Reason(f"what it computes with numbers raised {fault}", Cause.BRANCH)
        another = graph.make_build(read, reason)
    executor = another.executor
    try:
        return _run_build(graph, another, read, arguments)
    except (RuntimeError, ArithmeticError, ValueError):
        if executor.undone and not executor.has_run:
            graph.cache.drop(another)  # no build can say what these numbers do
        raise


def _check_backward(build: Build, read: Call) -> None:
    """Raise NonfiniteError if this step makes a NaN in backward: `torch.autograd.set_detect_anomaly(True)`."""
    with outside_of_modes():
        found = nan_in_backward(build, own_inputs(build.executor.bind(read.leaves)))
    if found is not None:
        hint = f"{_STATE_OF_BEFORE}\n{found}"
        raise NonfiniteError("detect_anomaly: backward() makes a NaN", where=found.where, hint=hint)


def _after(graph: Internals, build: Build) -> Sequence[Callable[[], Any]]:
    """What Python does once the new state is written: count the step, and move the schedulers."""
    mistakes, registry = graph.mistakes, graph.registry
    _note_steps(graph, 1)
    actions = build.executor.after
    if actions is None or registry.averages:
        moves = [partial(methodcaller("step"), scheduler) for scheduler in schedulers_of(graph, build)]
        averages = [partial(average.finish, average.updates) for average in registry.averages]
        actions = build.executor.after = [*_actions_of(graph, build), *moves, *averages]
    if graph.first_state.shown:
        actions = [*actions, graph.first_state.settle]
    if mistakes.is_young and registry.optimizers:
        updates = build.captured.steps
        actions = [*actions, partial(mistakes.after_step, registry.optimizers, graph.name, updates)]
    return actions


def _note_steps(graph: Internals, steps: int) -> None:
    """Ready what counts so many steps, once they are made."""
    graph.probes.step = graph.store.steps + steps - 1
    graph.counted["steps"] = graph.store.steps + steps


def schedulers_of(graph: Internals, build: Build) -> list[Any]:
    """The schedulers of a graph, each as often as a step by this build moves it."""
    times = build.captured.steps
    found = [item for item in graph.registry.optimizers if item.scheduler is not None]
    return [item.scheduler for item in found for _ in range(times.get(item.name, 0))]


def _actions_of(graph: Internals, build: Build) -> list[Callable[[], Any]]:
    """What is the same after each step of a build, and after several, in functions of C where it can be."""
    actions: list[Callable[[], Any]] = [partial(vars(graph.store).update, graph.counted)]
    actions += [effect.apply for effect in build.captured.effects.found]
    actions += [growth.apply for growth in build.captured.grown]
    if build.captured.put_again.places:
        actions.append(build.captured.put_again.apply)
    for registered in graph.registry.optimizers:
        if build.captured.steps.get(registered.name, 0):
            layers = [registered.optimizer] if registered.wrapper is None else layers_of(registered.wrapper)
            actions += [marking_as_stepped(item) for item in layers if isinstance(item, Optimizer)]
    return actions


def _changed_containers(build: Build, read: Call, arguments: Arguments) -> Sequence[Any]:
    """The containers of a call by position, of which the step changes some. Raises CaptureError where it cannot."""
    changes = build.executor.changes
    check_leaves(changes, read, build.executor.bound.held_tensors)
    return given_containers(changes, read, arguments, build.guards.knows_container)
