"""Modes: the ways to run a step that can be compared with eager mode."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from monograph import Graph


@dataclass(frozen=True)
class Mode:
    """A way to run the step of a Graph. `make` gives what is called in the Graph's place, with the same arguments.

    `bitwise` says what the mode promises: the bits of eager, or a distance to float64 of at most twice eager's.

    >>> def in_place_of(graph):
    ...     graph.config.backend("aten")
    ...     return graph
    >>> Mode("mine", in_place_of).bitwise
    True
    """

    name: str
    make: Callable[[Graph], Callable[..., Any]]
    bitwise: bool = True


def _aten(graph: Graph) -> Callable[..., Any]:
    graph.config.backend("aten")
    return graph


def _inductor(graph: Graph) -> Callable[..., Any]:
    graph.config.backend("inductor")
    return graph


def _eager(graph: Graph) -> Callable[..., Any]:
    return graph.eager


MODES: Final[Mapping[str, Mode]] = MappingProxyType(
    {
        mode.name: mode
        for mode in (Mode("aten", _aten), Mode("inductor", _inductor, bitwise=False), Mode("eager", _eager))
    }
)


def find_mode(mode: str | Mode) -> Mode:
    """The mode of a name; a Mode is its own. Raises ValueError for an unknown name."""
    if isinstance(mode, Mode):
        return mode
    if mode not in MODES:
        raise ValueError(f"there is no mode {mode!r}; choose from {', '.join(MODES)}, or pass a Mode")
    return MODES[mode]
