"""The states of random generators: those of the process (torch's, Python's, numpy's), and `torch.Generator` objects.

Nowhere else are they read and set, but in `artifact/state`, a part of the same layer, and in parts that use public names.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, Final

import torch

from monograph.state.threads import alone

_SETTERS: Final = ("graphsafe_set_state", "manual_seed", "seed", "set_state")  # methods of a torch.Generator

# --- torch.Generator objects -----------------------------------------------------------------------------------------


def read_generators(generators: Sequence[torch.Generator]) -> list[torch.Tensor]:
    """The states of generators."""
    return [generator.get_state() for generator in generators]


def restore_generators(generators: Sequence[torch.Generator], states: Sequence[torch.Tensor]) -> None:
    """Put the states back."""
    for generator, state in zip(generators, states, strict=True):
        generator.set_state(state)


class SavedGenerators:
    """Generators with the states that they have now."""

    def __init__(self, generators: Iterable[torch.Generator]) -> None:
        self._generators = list(generators)
        self._states = read_generators(self._generators)

    def restore(self) -> bool:
        """Set back those that have moved; true if any had."""
        pairs = zip(self._generators, self._states, strict=True)
        moved = [(item, state) for item, state in pairs if not torch.equal(item.get_state(), state)]
        for item, state in moved:
            item.set_state(state)
        return bool(moved)


class SetGenerators:
    """Which of these generators code has set to a state: by a method of theirs, or by drawing from them.

    >>> generator = torch.Generator()
    >>> with SetGenerators([generator]) as noted:
    ...     _ = generator.manual_seed(3)
    >>> generator in noted.found
    True
    """

    def __init__(self, generators: Iterable[torch.Generator]) -> None:
        self._generators = list(generators)
        self.found: set[torch.Generator] = set()

    def __enter__(self) -> SetGenerators:
        self._states, self._profile = read_generators(self._generators), sys.getprofile()
        if self._generators:
            sys.setprofile(self._note)  # one that is set to the state it had has not moved
        return self

    def __exit__(self, *_: object) -> None:
        if self._generators:
            sys.setprofile(self._profile)
        pairs = zip(self._generators, self._states, strict=True)
        self.found.update(item for item, state in pairs if not torch.equal(item.get_state(), state))

    def _note(self, _: FrameType, event: str, function: Any) -> None:
        if event == "c_call" and getattr(function, "__name__", "") in _SETTERS:
            setter = getattr(function, "__self__", None)
            if isinstance(setter, torch.Generator):
                self.found.add(setter)


def copied_generator(generator: torch.Generator) -> torch.Generator:
    """Another one that draws the same."""
    copy = torch.Generator(generator.device)
    copy.set_state(generator.get_state())
    return copy


def default_generators(devices: set[torch.device]) -> list[torch.Generator]:
    """The global generators of these devices."""
    found = []
    for device in devices:
        if device.type == "cpu":
            found.append(torch.default_generator)
        elif device.type == "cuda":
            index = device.index if device.index is not None else torch.cuda.current_device()
            found.append(torch.cuda.default_generators[index])
    return found


# --- those of the process --------------------------------------------------------------------------------------------


def cpu_state() -> torch.Tensor:
    """The state of torch's generator of the CPU."""
    return torch.get_rng_state()


def set_cpu_state(state: torch.Tensor) -> None:
    """Set it."""
    torch.set_rng_state(state)


@dataclass
class RandomState:
    """The states of all global random generators."""

    cpu: torch.Tensor
    devices: list[torch.Tensor]
    python: Any
    numpy: Any
    touched: bool = False  # by this thread, which set torch's state or ran real ops

    @staticmethod
    def now(*, touched: bool = False) -> RandomState:
        """Read them. With `touched`, torch's goes back whatever moves it, draws of other threads too."""
        numpy = sys.modules.get("numpy")
        return RandomState(
            torch.get_rng_state(),
            torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
            random.getstate(),
            numpy.random.get_state(legacy=True) if numpy is not None else None,
            touched,
        )

    def restore(self) -> None:
        """Set those back that have moved. What other threads may have drawn stays drawn."""
        moved = [name for name in self.moved() if name == "torch" or alone()]
        if "torch" in moved:
            torch.set_rng_state(self.cpu)
        if self.devices:
            torch.cuda.set_rng_state_all(self.devices)
        if "random" in moved:
            random.setstate(self.python)
        if "numpy.random" in moved:
            sys.modules["numpy"].random.set_state(self.numpy)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Put the states back at the end."""
        try:
            yield
        finally:
            self.restore()

    def moved(self) -> list[str]:
        """Which generators have moved since. Draws of other threads from torch's are not counted."""
        now, names = RandomState.now(), []
        if self.touched or (alone() and not torch.equal(self.cpu, now.cpu)):
            names.append("torch")
        if self.python != now.python:
            names.append("random")
        if self.numpy is not None and not all(map(_same, self.numpy, now.numpy)):
            names.append("numpy.random")
        return names


def set_random_state(states: Mapping[str, Any]) -> None:
    """Set the generators that are named: `cpu`, `cuda` (a list), `python`, `numpy`; those that are here."""
    if "cpu" in states:
        torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        for index, state in enumerate(states["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(state, index)
    if "python" in states:
        random.setstate(states["python"])
    if "numpy" in states and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(states["numpy"])


def _same(a: Any, b: Any) -> bool:
    return bool((a == b).all()) if hasattr(a, "all") else bool(a == b)
