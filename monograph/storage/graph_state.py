"""The state of a graph as one nested dict, and back: all of it is loaded, or nothing is.

A graph's state is a list of parts, each under its key. Loading goes through all parts first: what could fail happens
there and can be undone. Only then values are copied into the live tensors, which stay the objects they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from monograph.errors import CheckpointError

_SHOWN = 20  # faults of one kind in a message


class Stateful(Protocol):
    """What has a state of its own: a scaler, a data loader, a counter of the user's."""

    def state_dict(self) -> Any:
        """The state."""

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Take it over."""


@dataclass
class Loading:
    """What one load has found so far, and what it will do if nothing is wrong."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    copies: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)  # live ← loaded
    commits: list[Callable[[], object]] = field(default_factory=list)  # cannot fail, may run twice
    undo: list[Callable[[], object]] = field(default_factory=list)

    def commit(self) -> None:
        """Put the loaded values in place. Doing it twice does the same."""
        if self.copies:
            with torch.no_grad():
                torch._foreach_copy_([live for live, _ in self.copies], [loaded for _, loaded in self.copies])
        for action in self.commits:
            action()


@dataclass(frozen=True)
class Part:
    """One part of a graph's state. `load` checks a value, and notes in the Loading what is wrong or to be done."""

    read: Callable[[], Any]
    load: Callable[[Any, Loading], object]
    optional: bool = False  # left out of the state while it is None, and not missed when a state is loaded


def read_parts(parts: Mapping[str, Part]) -> dict[str, Any]:
    """The state dict."""
    found = {key: part.read() for key, part in parts.items()}
    return {key: value for key, value in found.items() if value is not None or not parts[key].optional}


def load_parts(parts: Mapping[str, Part], state_dict: Mapping[str, Any], *, strict: bool) -> None:
    """Load a state dict. On any fault CheckpointError tells all of them, and everything is as it was."""
    if not isinstance(state_dict, Mapping):
        raise CheckpointError(
            f"load_state_dict() takes the dict of state_dict(), got a {type(state_dict).__name__}",
            hint="pass what state_dict() gave, or mg.load(path)",
        )
    loading = Loading()
    loading.missing += [key for key, part in parts.items() if key not in state_dict and not part.optional]
    loading.unexpected += [str(key) for key in state_dict if key not in parts]
    try:
        for key in [key for key in parts if key in state_dict]:
            _load_part(key, parts[key], state_dict[key], loading)
        if faults := _faults(loading, strict=strict):
            raise _misfit(state_dict, faults)
    except BaseException:
        for action in reversed(loading.undo):
            action()
        raise
    try:
        loading.commit()
    except BaseException:  # an interrupt: loading is completed, so that there is no half of a state
        loading.commit()
        raise


def _load_part(key: str, part: Part, value: Any, loading: Loading) -> None:
    try:
        part.load(value, loading)
    except (
        Exception
    ) as error:  # torch's, or that of the user's own load_state_dict: what it says is the reason
        text = " ".join(str(error).split())
        loading.wrong.append(f"{key}: {text or type(error).__name__}")


def _faults(loading: Loading, *, strict: bool) -> list[str]:
    lists = [("missing", loading.missing), ("unexpected", loading.unexpected)] if strict else []
    return [*loading.wrong[:_SHOWN], *(f"{what}: {_listed(items)}" for what, items in lists if items)]


def _listed(items: Sequence[str]) -> str:
    more = f", and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
    return ", ".join(items[:_SHOWN]) + more


def _misfit(state_dict: Mapping[str, Any], faults: Iterable[str]) -> CheckpointError:
    path = getattr(state_dict, "path", None)
    origin = f"the state in {path}" if path is not None else "the state"
    return CheckpointError(
        f"{origin} does not fit this graph, and nothing was loaded\n  " + "\n  ".join(faults),
        hint="make the graph as it was when the state was saved; strict=False loads what is there by its name",
    )


# --- kinds of parts --------------------------------------------------------------------------------------------------


def module_part(name: str, module: torch.nn.Module) -> Part:
    """Parameters and buffers under torch's own keys."""

    def load(value: Any, loading: Loading) -> None:
        before = {
            key: item.detach().cpu().clone() if isinstance(item, torch.Tensor) else item
            for key, item in module.state_dict().items()
        }
        loading.undo.append(lambda: module.load_state_dict(before, strict=False))
        keys = module.load_state_dict(dict(_mapping(value)), strict=False)
        loading.missing += [f"{name}.{key}" for key in keys.missing_keys]
        loading.unexpected += [f"{name}.{key}" for key in keys.unexpected_keys]

    return Part(module.state_dict, load)


def scheduler_part(name: str, scheduler: Any) -> Part:
    """A learning-rate scheduler, with those inside of it."""

    def load(value: Any, loading: Loading) -> None:
        known, given = set(scheduler.state_dict()), set(_mapping(value))
        loading.missing += sorted(f"{name}.{key}" for key in known - given)
        loading.unexpected += sorted(f"{name}.{key}" for key in given - known)
        before = [(item, dict(vars(item))) for item in _schedulers_in(scheduler)]

        def undo() -> None:
            for item, attributes in before:
                vars(item).clear()
                vars(item).update(attributes)

        loading.undo.append(undo)
        scheduler.load_state_dict(dict(value))

    return Part(scheduler.state_dict, load)


def _schedulers_in(scheduler: Any) -> list[Any]:
    inside = getattr(scheduler, "_schedulers", ())
    return [scheduler, *(item for inner in inside for item in _schedulers_in(inner))]


def object_part(item: Stateful) -> Part:
    """An object with a `state_dict` of its own."""

    def load(value: Any, loading: Loading) -> None:
        before = item.state_dict()
        loading.undo.append(lambda: item.load_state_dict(before))
        item.load_state_dict(value)
        # a data loader makes its iterator now, and draws what it draws for that before the random state is set
        item.state_dict()

    return Part(item.state_dict, load)


def value_part(read: Callable[[], Any], write: Callable[[Any], object], kind: type) -> Part:
    """A plain value."""

    def load(value: Any, loading: Loading) -> None:
        if type(value) is not kind:
            raise TypeError(f"expected {kind.__name__}, got {type(value).__name__}")
        loading.commits.append(lambda: write(value))

    return Part(read, load)


def _mapping(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise TypeError(f"expected a state dict, got a {type(value).__name__}")
    return value
