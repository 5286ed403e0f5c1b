"""Several steps of a graph in one call, over arguments that are stacked on a new first dimension.

Where no Python runs between two steps, and a step changes nothing but tensors, the build is looked for once, since what
decides which one fits cannot have changed in between; and compiled steps are made in a loop of C. Schedulers whose
numbers are known beforehand go ahead of the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from monograph.call import call, is_alone, known_build, run_again, run_repeated, schedulers_of
from monograph.compiler import Build
from monograph.errors import MonographError, SignatureError, TornStateError
from monograph.internals.internals import Arguments, Internals, internals_of
from monograph.ir.call.signature import read_call
from monograph.ir.call.tree import Tree, flatten, unflatten
from monograph.runtime.repetition import Repetition
from monograph.schedulers.ahead import Ahead, can_go_ahead
from monograph.state.signals import held_back

_FEWEST = 5  # steps that are worth a loop, which takes as long to begin as a few of them
_PIECE = 32  # steps that schedulers go ahead at first; then as many as are made in some milliseconds
_TRIES = 6  # the flat check of a new build is made once its guards have held


def many_steps(self: Any, *args: Any, **kwargs: Any) -> Any:
    """As many steps as the first dimension of the tensors among the arguments says: each gets the part at its index.

    Other arguments are the same for each step. The results are those of single calls: tensors stacked, None as it is, and
    of anything else a list. An error says in which step it came, counted from 0; the state is that of after the step
    before. Raises SignatureError where there is no tensor, or where tensors are stacked for different numbers of steps.

    >>> import monograph as mg
    >>> mg.trace(lambda x: x * 2).many(torch.ones(3, 2))
    tensor([[2., 2.],
            [2., 2.],
            [2., 2.]])
    """
    graph = internals_of(self)
    graph.check_usable()
    steps = _Steps(graph, *graph.formed(args, kwargs))
    made = _Made()
    with graph.store.lock:
        try:
            _make(self, graph, steps, made)
            return made.results.stacked()
        except MonographError as error:
            error.message += _told(made.number, steps.number, error)
            raise error.brief()
        except Exception as error:
            error.add_note(_told(made.number, steps.number, error).strip(" ()"))
            raise


def _make(self: Any, graph: Internals, steps: _Steps, made: _Made) -> None:
    """Make all steps: one by one, or in the loop of a build that has one."""
    build: Build | None = None
    has_loop, tries = steps.is_plain and steps.number >= _FEWEST, _TRIES
    is_scheduled = any(item.scheduler is not None for item in graph.registry.optimizers)
    while made.number < steps.number:
        if build is not None and not any(item is build for item in graph.cache.newest):
            build = None  # another has taken its place, by other code
        if (
            build is not None
            and has_loop
            and is_scheduled
            and known_build(graph, steps.at(made.number)[0]) is not build
        ):
            build = None  # a scheduler has moved what decides which one fits
        if (
            build is not None
            and has_loop
            and steps.number - made.number >= _FEWEST
            and is_alone(graph, build)
        ):
            piece = _piece(graph, build, steps, made)
            has_loop = piece is not None
            if piece:
                continue
        given, named = steps.at(made.number)
        is_asked = not graph.mistakes.is_young if is_scheduled else has_loop or made.number
        if build is None and tries and not named and is_asked:
            build, tries = _repeatable(graph, given, steps.stacks), tries - 1
            if build is not None and has_loop:
                continue
        if build is None or is_scheduled:
            made.add(call(self, *given, **named))
        else:
            made.add(run_again(graph, build, given))


def _piece(graph: Internals, build: Build, steps: _Steps, made: _Made) -> int | None:
    """Make some steps in a loop, and say how many. None where there is no loop for them.

    If it is 0, the first has failed, of which a call of its own says more.
    """
    schedulers = schedulers_of(graph, build)
    if not schedulers:
        return _in_loop(graph, build, build.executor.repeated(steps.rest(made.number)), made)
    executor, first = build.executor, made.number
    given, _ = steps.at(first)
    with held_back():  # whoever is called for a signal finds schedulers where the steps are
        ahead = Ahead(schedulers)
        try:
            numbers = ahead.foresee(
                min(made.piece, steps.number - first),
                executor.number_places,
                executor.numbers,
                _fitting(graph, build, given),
            )
            if len(numbers) < _FEWEST:
                return None
            loop = executor.repeated(steps.rest(first, len(numbers)), numbers)
            piece = _in_loop(graph, build, loop, made)
            made.piece = 2 * len(numbers) if piece == len(numbers) else max(3 * (piece or 0) // 4, _FEWEST)
            return piece
        finally:
            ahead.settle(made.number - first)


def _fitting(graph: Internals, build: Build, args: tuple[Any, ...]) -> Callable[[], bool]:
    """A question whether a build fits the numbers of now. At first all that decides it is looked at, then branches."""
    asked = iter((lambda: known_build(graph, args) is build,))
    return lambda: next(asked, lambda: build.takes_branches(args))()


def _in_loop(graph: Internals, build: Build, loop: Repetition | None, made: _Made) -> int | None:
    """Make some steps in a loop, if there is one, and say how many."""
    if loop is None:
        return None
    first = made.number
    try:
        run_repeated(graph, build, loop)
    finally:
        made.number = first + loop.made
    if loop.made:
        made.results.add_all(loop.made, *loop.results())
    return loop.made


class _Made:
    """How many steps are made, and what they have given."""

    def __init__(self) -> None:
        self.number = 0
        self.results = _Results()
        self.piece = _PIECE

    def add(self, result: Any) -> None:
        """The result of the next step."""
        self.results.add(result)
        self.number += 1


def _told(number: int, steps: int, error: Exception) -> str:
    if number == steps:
        return ""
    state = "before the call" if number == 0 else f"after step {number - 1}"
    told = "" if isinstance(error, TornStateError) else f": the state is that of {state}"
    return f" (in step {number} of {steps}, counted from 0{told})"


class _Steps:
    """The arguments of each step."""

    def __init__(self, graph: Internals, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        read = read_call(args, kwargs, graph.names)
        self._tree, self._leaves = read.tree, list(read.leaves)
        paths = read.paths()
        found = {path: leaf for path, leaf in zip(paths, read.leaves, strict=True) if _is_tensor(leaf)}
        self.stacks = list({id(leaf): leaf for leaf in found.values()}.values())
        self.number = _common_length(found)
        self.is_plain = not kwargs and all(map(_is_tensor, args))  # tensors alone, by position
        self._args = args

    @cached_property
    def _parts(self) -> dict[int, Sequence[torch.Tensor]]:
        return {id(stack): stack.unbind(0) for stack in self.stacks}

    def rest(self, number: int, most: int | None = None) -> Sequence[torch.Tensor]:
        """The arguments by position for the steps from this one on, `most` of them or all."""
        length = self.number - number if most is None else most
        return [stack.narrow(0, number, length) for stack in self._args]

    def at(self, number: int) -> Arguments:
        """The arguments of one step."""
        if number == 0:  # it may be the only one that is asked for
            parts: dict[int, Sequence[torch.Tensor]] = {id(stack): (stack[0],) for stack in self.stacks}
        else:
            parts = self._parts
        if self.is_plain:
            return tuple(parts[id(stack)][number] for stack in self._args), {}
        leaves = [parts[id(leaf)][number] if id(leaf) in parts else leaf for leaf in self._leaves]
        args, kwargs = unflatten(self._tree, iter(leaves))
        return args, kwargs


def _is_tensor(item: Any) -> bool:
    return isinstance(item, torch.Tensor)


def _common_length(stacks: dict[str, torch.Tensor]) -> int:
    if not stacks:
        raise SignatureError(
            "many() gets no tensor: the first dimension of its tensors says how many steps to run",
            hint="stack the batches: graph.many(torch.stack(batches))",
        )
    lengths: dict[int, str] = {}
    for path, stack in stacks.items():
        whole, _, ending = path.rpartition(".")
        fault = (
            f"{whole} is {'a DTensor' if ending == 'to_local()' else 'sparse'}"
            if ending.endswith("()")
            else f"{path} has no dimension"
            if not stack.dim()
            else f"{path} requires grad"
            if stack.requires_grad
            else ""
        )
        if fault:
            raise SignatureError(
                f"{fault}: many() takes dense tensors without gradients, stacked on a new first dimension",
                hint="stack() and detach() it, or make single calls",
            )
        lengths.setdefault(stack.shape[0], path)
    if len(lengths) > 1:
        told = ", ".join(f"{path} has {length}" for length, path in lengths.items())
        raise SignatureError(
            f"the arguments of many() are stacked for different numbers of steps: {told}",
            hint="stack as many batches of each on a new first dimension",
        )
    (length,) = lengths
    if length == 0:
        raise SignatureError(
            "many() gets no step: the first dimension of its arguments is 0",
            hint="call it with one batch at least",
        )
    return length


def _repeatable(graph: Internals, args: tuple[Any, ...], stacks: Sequence[torch.Tensor]) -> Build | None:
    """The build for all further steps, if it fits the next one and nothing that a step does can change that."""
    is_unlike = graph.cache.has_own or graph.first_state.waiting or graph.settings.buckets
    build = None if is_unlike else known_build(graph, args)
    if build is None or not build.changes_tensors_alone:
        return None
    schedulers = schedulers_of(graph, build)
    if not all(map(can_go_ahead, schedulers)):
        return None
    memory = {stack.untyped_storage().data_ptr() for stack in stacks}
    state = (tensor.untyped_storage().data_ptr() for tensor in build.guards.tensors.values())
    return None if any(place in memory for place in state) else build


@dataclass(frozen=True)
class _Together:
    """A leaf of the results of several steps: a tensor that is stacked already, or what is the same in each."""

    number: int
    leaf: Any

    def each(self) -> list[Any]:
        return list(self.leaf) if _is_tensor(self.leaf) else [self.leaf] * self.number


class _Results:
    """What the steps have given: tensors are stacked, None stays None, and of anything else there is a list."""

    def __init__(self) -> None:
        self._tree: Tree | None = None
        self._leaves: list[list[Any]] = []  # of each step, or of several

    def add(self, result: Any) -> None:
        """The result of the next step. It may be on memory that the one after it changes."""
        leaves: list[Any] = []
        self._check_form(flatten(result, leaves))
        self._leaves.append([leaf.clone() if _is_tensor(leaf) else leaf for leaf in leaves])

    def add_all(self, number: int, last: Any, leaves: Sequence[Any]) -> None:
        """The results of so many next steps: the last of them, and each leaf with the tensors of all."""
        of_last: list[Any] = []
        self._check_form(flatten(last, of_last))
        self._leaves.append([_Together(number, leaf) for _, leaf in zip(of_last, leaves, strict=True)])

    def _check_form(self, tree: Tree) -> None:
        if self._tree is not None and tree != self._tree:
            raise SignatureError(
                "the steps of many() give results of different forms, which cannot be stacked",
                hint="call the graph step by step, or return the same from each",
            )
        self._tree = tree

    def stacked(self) -> Any:
        """All of them."""
        assert self._tree is not None
        return unflatten(self._tree, iter([_stacked(items) for items in zip(*self._leaves, strict=True)]))


def _stacked(items: Sequence[Any]) -> Any:
    leaves = [item.leaf if isinstance(item, _Together) else item for item in items]
    if not all(map(_is_tensor, leaves)):
        found = [leaf for item in items for leaf in (item.each() if isinstance(item, _Together) else (item,))]
        return None if all(leaf is None for leaf in found) else found
    if len({item.leaf.shape[1:] if isinstance(item, _Together) else item.shape for item in items}) > 1:
        raise SignatureError(
            "the steps of many() give tensors of different shapes, which cannot be stacked",
            hint="call the graph step by step, or return the same shapes from each",
        )
    if not any(isinstance(item, _Together) for item in items):
        return torch.stack(leaves)
    pieces = [item.leaf if isinstance(item, _Together) else item.unsqueeze(0) for item in items]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)
