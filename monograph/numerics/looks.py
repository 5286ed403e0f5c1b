"""The ways to look at one step of a graph without changing anything: a walk, the first NaN or infinity, a profile."""

from __future__ import annotations

from typing import Any

from monograph.inspect.nonfinite import nonfinite_report
from monograph.inspect.nonfinite_report import NonfiniteReport
from monograph.inspect.profile import Profile
from monograph.inspect.profile import profile as profile_of
from monograph.inspect.replay import Replay
from monograph.numerics.state import tied_paths
from monograph.numerics.subject import looking_at


def replay(graph: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Replay:
    """The step of this call, to walk through op by op."""
    with looking_at(graph, args, kwargs, "replay") as subject:
        return Replay(graph.name, subject.walk(), tied_paths(subject.owned.named_modules()))


def find_nonfinite(graph: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NonfiniteReport:
    """The first op of this call that makes a NaN or an infinity."""
    with looking_at(graph, args, kwargs, "find_nonfinite") as subject:
        return nonfinite_report(graph.name, *subject.inputs())


def profile(graph: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Profile:
    """How long each op of this call takes."""
    with looking_at(graph, args, kwargs, "profile") as subject:
        return profile_of(graph.name, *subject.inputs())
