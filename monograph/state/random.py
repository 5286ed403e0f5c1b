"""The random state that a step can move, read before it and put back if it fails."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def read_generators(generators: Sequence[torch.Generator]) -> list[torch.Tensor]:
    """The states of generators."""
    return [generator.get_state() for generator in generators]


def restore_generators(generators: Sequence[torch.Generator], states: Sequence[torch.Tensor]) -> None:
    """Put the states back."""
    for generator, state in zip(generators, states, strict=True):
        generator.set_state(state)


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
