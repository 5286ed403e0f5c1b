"""Schedulers that go ahead of the steps of one loop, so that the numbers of all these steps are known before it begins."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from operator import is_
from typing import Any

from torch.optim import lr_scheduler as of_torch

from monograph.compat.optimizers import SCHEDULERS_INSIDE

# What they set depends on how many steps there have been, and on numbers that they have set before. No code of the user runs.
_BY_NUMBER = (
    of_torch.ConstantLR,
    of_torch.CosineAnnealingLR,
    of_torch.CosineAnnealingWarmRestarts,
    of_torch.ExponentialLR,
    of_torch.LinearLR,
    of_torch.MultiStepLR,
    of_torch.OneCycleLR,
    of_torch.PolynomialLR,
    of_torch.StepLR,
)
_OF_OTHERS = (of_torch.ChainedScheduler, of_torch.SequentialLR)


def can_go_ahead(scheduler: Any) -> bool:
    """True if nothing but the number of steps decides what a scheduler sets, and that is numbers.

    >>> import torch
    >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    >>> can_go_ahead(torch.optim.lr_scheduler.StepLR(optimizer, 10))
    True
    """
    parts = list(_parts(scheduler))
    if any(type(part) not in (*_BY_NUMBER, *_OF_OTHERS) or "step" in vars(part) for part in parts):
        return False
    return all(_is_number(group["lr"]) for part in parts for group in part.optimizer.param_groups)


def _is_number(value: Any) -> bool:
    return type(value) in (float, int)


def _parts(scheduler: Any) -> Iterator[Any]:
    """A scheduler, and those that it steps."""
    yield scheduler
    if type(scheduler) in _OF_OTHERS:
        for part in vars(scheduler).get(SCHEDULERS_INSIDE, (None,)):
            yield from _parts(part)


class Ahead:
    """Schedulers, each as often as a step moves it. They are where the next step finds them until `foresee` is called."""

    def __init__(self, schedulers: Sequence[Any]) -> None:
        self._schedulers = schedulers
        own = [vars(part) for scheduler in schedulers for part in _parts(scheduler)]
        groups = {id(group): group for table in own for group in table["optimizer"].param_groups}
        self._groups = list(groups.values())
        self._tables: list[dict[str, Any]] = [*own, *self._groups]
        self._before = [table.copy() for table in self._tables]
        self._steps = 0

    def foresee(
        self,
        most: int,
        known: Iterable[tuple[int, str]],
        read: Callable[[], list[Any]],
        fits: Callable[[], bool],
    ) -> list[list[Any]]:
        """What `read` gives before each of the next steps, of which there are `most`, or fewer.

        It ends where a scheduler fails, where it changes an entry of a param group that is not `known` by the id of the
        group and its name, and where the step no longer `fits` numbers that have moved. The schedulers are then where
        they are after the last of these steps, until `settle` is called.
        """
        others, found = self._others(set(known)), list[list[Any]]()
        while len(found) < most and all(group.get(key) is value for group, key, value in others):
            found.append(read())
            if len(found) > 1 and not all(map(is_, found[-1], found[-2])) and not fits():
                found.pop()
                break
            try:
                self._go_on()
            except Exception:  # a call of this step shows it again
                found.pop()
                self._put_back()
                break
        self.settle(len(found))
        return found

    def settle(self, made: int) -> None:
        """Let the schedulers be where they are after so many steps."""
        if made < self._steps:
            self._put_back()
        while self._steps < made:
            self._go_on()

    def _others(self, known: Collection[tuple[int, str]]) -> list[tuple[dict[str, Any], str, Any]]:
        return [
            (group, key, value)
            for group in self._groups
            for key, value in group.items()
            if (id(group), key) not in known
        ]

    def _go_on(self) -> None:
        for scheduler in self._schedulers:
            scheduler.step()
        self._steps += 1

    def _put_back(self) -> None:
        for table, before in zip(self._tables, self._before, strict=True):
            for key in table.keys() - before.keys():
                del table[key]
            table.update(before)
        self._steps = 0
