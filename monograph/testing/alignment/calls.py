"""The calls of a case, tried in eager mode first: which values they get, and where backward starts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from monograph.testing.alignment.arguments import FRESHNESS, Arguments, Freshness, wants_gradients
from monograph.testing.alignment.case import Case
from monograph.testing.alignment.copies import copied, copied_target
from monograph.testing.alignment.step import (
    Backward,
    Target,
    forward,
    module_of,
    move_state,
    seed_all,
    starts_of,
)


@dataclass(frozen=True)
class Call:
    """One call: its arguments, the gradients that its backward starts from, and the seed before it."""

    arguments: Arguments
    given: tuple[torch.Tensor, ...]
    seed: int
    origin: str  # where the values come from
    wanted: tuple[bool, ...]
    shifted: bool = False  # at other places in memory
    moved: bool = False  # weights, buffers and learning rates were changed before it

    def copied(self) -> Arguments:
        """Arguments for one side; in the last call they have a gradient already, to which a step adds its own."""
        made = self.arguments.copied(shifted=self.shifted).requiring(self.wanted)
        for tensor in made.tensors() if self.shifted else ():
            if tensor.requires_grad and tensor.layout is torch.strided:
                tensor.grad = torch.full_like(tensor, 0.25, requires_grad=False)
        return made


@dataclass(frozen=True)
class Calls:
    """The calls of one graph; `backward` is None if it is a forward only."""

    backward: Backward | None
    items: tuple[Call, ...]


@dataclass(frozen=True)
class _Form:
    """What calls of one signature have in common: the results' shapes and dtypes."""

    leaves: tuple[Any, ...]


def plan_calls(case: Case, *, differentiate: bool) -> Calls | None:
    """The calls, each tried on a copy in eager mode. None if nothing in the result has a gradient.

    An exception of eager mode for the given arguments passes through; fresh values that it refuses are replaced by
    values nearer to the given ones.
    """
    trial = copied_target(case.reference)
    try:
        backward = _find_backward(trial, case) if differentiate else None
        if differentiate and backward is None:
            return None
        wanted = backward.wanted if backward else (False,) * len(case.arguments.tensors())
        first, form = _tried(trial, case, case.arguments, backward, wanted, 0, "given")
        items = [first]
        for number in range(1, case.calls):
            items.append(_fresh_call(trial, case, backward, wanted, number, form))
        for number, args in enumerate(case.more, case.calls):
            arguments = Arguments(args, case.arguments.kwargs)
            items.append(_tried(trial, case, arguments, backward, wanted, number, "more")[0])
    except Exception as error:
        error.add_note(f"eager mode raised it for the arguments that align() was given: {case.name}")
        raise
    return Calls(backward, tuple(items))


def _find_backward(trial: Target, case: Case) -> Backward | None:
    wanted = wants_gradients(case.arguments)

    def starts(through_clones: bool) -> Backward | None:
        seed_all(case.seed)
        arguments = case.arguments.copied().requiring(wanted)
        leaves = starts_of(*forward(trial, arguments, through_clones=through_clones))
        found = tuple(index for index, leaf in enumerate(leaves) if _has_gradient(leaf))
        return Backward(wanted, found, through_clones) if found else None

    try:
        return starts(through_clones=False)
    except RuntimeError as error:
        # what is changed in place cannot be a leaf that requires a gradient
        if "leaf Variable" not in str(error):
            raise
        return starts(through_clones=True)


def _has_gradient(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad and leaf.layout is torch.strided


def _fresh_call(
    trial: Target, case: Case, backward: Backward | None, wanted: tuple[bool, ...], number: int, form: _Form
) -> Call:
    """The call with the freshest values that eager mode takes, and that give results of the same form."""
    last = number == case.calls - 1
    for freshness, moved in _levels(last):
        generator = torch.Generator().manual_seed(case.seed + number)
        arguments = case.arguments.fresh(freshness, generator)
        try:
            call, found = _tried(trial, case, arguments, backward, wanted, number, freshness, moved)
        except Exception:
            if freshness == "given" and not moved:
                raise
            continue
        if found == form or (freshness == "given" and not moved):
            return call
    raise AssertionError("the given values are always taken")


def _levels(last: bool) -> Iterator[tuple[Freshness, bool]]:
    """The last call gets other Python numbers as well, and if eager mode takes it a changed state."""
    levels = [level for level in FRESHNESS if last or "numbers" not in level]
    return ((level, moved) for moved in ((True, False) if last else (False,)) for level in levels)


def _tried(
    trial: Target,
    case: Case,
    arguments: Arguments,
    backward: Backward | None,
    wanted: tuple[bool, ...],
    number: int,
    origin: str,
    moved: bool = False,
) -> tuple[Call, _Form]:
    """A call that eager mode has run, and the form of its results."""
    seed, shifted = case.seed + number, 0 < number == case.calls - 1
    if moved and module_of(trial) is not None:
        trial = copied(trial)
        move_state(module_of(trial), None)
    seed_all(seed)
    through_clones = backward is not None and backward.through_clones
    ready = arguments.copied(shifted=shifted).requiring(wanted)
    leaves = starts_of(*forward(trial, ready, through_clones=through_clones))
    form = _Form(tuple(_form(leaf) for leaf in leaves))
    generator = torch.Generator().manual_seed(seed)
    starts = [leaves[index] for index in backward.starts] if backward else []
    given = tuple(_random_like(start, generator) for start in starts)
    if backward is not None:
        torch.autograd.backward(starts, given)
        if (module := module_of(trial)) is not None:
            module.zero_grad()
    return Call(arguments, given, seed, origin, wanted, shifted, moved), form


def _form(leaf: Any) -> Any:
    return (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, torch.Tensor) else type(leaf)


def _random_like(start: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """A gradient for a result: contiguous, as a loss would give it."""
    wide = torch.complex128 if start.is_complex() else torch.float64
    return torch.randn(start.shape, generator=generator, dtype=wide).to(start.device, start.dtype)
