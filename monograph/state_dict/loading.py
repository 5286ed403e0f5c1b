"""The state of a graph as one nested dict, and back: all of it is loaded, or nothing is.

A graph's state is a list of parts, each under its key. Loading goes through all parts first: what could fail happens
there and can be undone. Only then values are copied into the live tensors, which stay the objects they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

from monograph.compat.distributed.tensors import laid_out_alike
from monograph.errors import CheckpointError
from monograph.state.random import RandomState
from monograph.state.signals import interruptible
from monograph.state.snapshot import Snapshot
from monograph.user_code.lines import user_place_of

_SHOWN = 20  # faults of one kind in a message


class Stateful(Protocol):
    """What has a state of its own: a scaler, a data loader, a counter of the user's."""

    def state_dict(self) -> Any:
        """The state."""

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Take it over."""


def _snapshot() -> Snapshot:
    return Snapshot(RandomState.now(touched=True))


@dataclass
class Loading:
    """What one load has found so far, what it will do if nothing is wrong, and what was there before."""

    strict: bool = True
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    copies: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)  # live ← loaded
    commits: list[Callable[[], object]] = field(default_factory=list)  # cannot fail, may run twice
    undo: list[Callable[[], object]] = field(default_factory=list)
    set_by_objects: set[torch.Generator] = field(default_factory=set)  # by their own load_state_dict()
    before: Snapshot = field(default_factory=_snapshot)

    def known(self, name: str, own: Mapping[str, Any], value: Any) -> dict[str, Any]:
        """The entries that are given and known, the present ones for those that are not given; the others are noted."""
        given = mapping(value)
        self.missing += [f"{name}/{key}" for key in own if key not in given]
        self.unexpected += [f"{name}/{key}" for key in given if key not in own]
        return {key: given.get(key, own[key]) for key in own}

    def commit(self) -> None:
        """Put the loaded values in place. Doing it twice does the same."""
        if self.copies:
            with torch.no_grad():
                copies = [laid_out_alike(live, loaded) for live, loaded in self.copies]
                torch._foreach_copy_([live for live, _ in copies], [loaded for _, loaded in copies])
        for action in self.commits:
            action()

    def roll_back(self, error: BaseException) -> None:
        """Put everything back as it was; what cannot be put back is noted in the error."""
        for action in reversed(self.undo):
            try:
                action()
            except BaseException as trouble:  # the rest is put back all the same
                error.add_note(f"while the state before was put back: {trouble!r}")
        self.before.restore()


@dataclass(frozen=True)
class Part:
    """One part of a graph's state. `load` checks a value, and notes in the Loading what is wrong or to be done.

    An optional part is left out of the state while it is None, and `load` gets None if the state has none.
    """

    read: Callable[[], Any]
    load: Callable[[Any, Loading], object]
    optional: bool = False


def read_parts(parts: Mapping[str, Part]) -> dict[str, Any]:
    """The state dict."""
    found = {key: part.read() for key, part in parts.items()}
    return {key: value for key, value in found.items() if value is not None or not parts[key].optional}


class LeftOut(NamedTuple):
    """What a load without `strict` has left as it was, and what it has not looked at; named as by `nn.Module`."""

    missing_keys: list[str]
    unexpected_keys: list[str]


def load_parts(parts: Mapping[str, Part], state_dict: Mapping[str, Any], *, strict: bool) -> LeftOut:
    """Load a state dict. On any fault CheckpointError lists all of them, and everything is as it was."""
    if not isinstance(state_dict, Mapping):
        raise CheckpointError(
            f"load_state_dict() takes the dict of state_dict(), got a {type(state_dict).__name__}",
            hint="pass what state_dict() gave, or mg.load(path)",
        )
    loading = Loading(strict)
    loading.missing += [key for key, part in parts.items() if key not in state_dict and not part.optional]
    loading.unexpected += [str(key) for key in state_dict if key not in parts]
    if not strict and state_dict and not parts.keys() & state_dict.keys():
        loading.wrong.append(f"none of its entries is one of this graph's: {_listed(list(parts))}")
    fits, grad_mode = False, torch.is_grad_enabled()
    with interruptible() as hold:
        try:
            for key, part in parts.items():
                if key in state_dict or part.optional:
                    _load_part(key, part, state_dict.get(key), loading)
            if faults := _faults(loading):
                raise _misfit(state_dict, faults, parts, loading)
            hold.on = fits = True
            loading.commit()
        except BaseException as error:
            hold.on = True
            if fits:  # an interrupt of another kind than a signal: there must be no half of a state
                loading.commit()
            else:
                loading.roll_back(error)
            torch.set_grad_enabled(grad_mode)  # an interrupt may fall between the lines that would do it
            raise
    return LeftOut(loading.missing, loading.unexpected)


def mapping(value: Any, what: str = "a state dict") -> Mapping[Any, Any]:
    """The value if it is a mapping; TypeError otherwise."""
    if not isinstance(value, Mapping):
        raise TypeError(f"expected {what}, got a {type(value).__name__}")
    return value


def _load_part(key: str, part: Part, value: Any, loading: Loading) -> None:
    try:
        part.load(value, loading)
    except Exception as error:  # torch's, or of the user's own load_state_dict: what it says is the reason
        text, place = " ".join(str(error).split()) or type(error).__name__, user_place_of(error)
        if key.startswith("state.") and place.file:  # of their own code
            text = f"{text} ({type(error).__name__}, {place.file}:{place.line})"
        loading.wrong.append(f"{key}: {text}")


def _faults(loading: Loading) -> list[str]:
    lists = [("missing", loading.missing), ("unexpected", loading.unexpected)] if loading.strict else []
    more = len(loading.wrong) - _SHOWN
    return [
        *loading.wrong[:_SHOWN],
        *([f"and {more} more that are wrong"] if more > 0 else []),
        *(f"{what}: {_listed(items)}" for what, items in lists if items),
    ]


def _listed(items: Sequence[str]) -> str:
    more = f", and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
    return ", ".join(items[:_SHOWN]) + more


def _misfit(
    state_dict: Mapping[str, Any], faults: Sequence[str], parts: Mapping[str, Part], loading: Loading
) -> CheckpointError:
    path = getattr(state_dict, "path", None)
    origin = f"the state in {path}" if path is not None else "the state"
    hint = "make the graph as it was when the state was saved"
    if loading.strict and not loading.wrong:
        hint += "; strict=False loads what is there by its name"
    elif (good := _part_that_fits(state_dict, parts, loading)) is not None:
        hint += f"; a part that fits is loaded alone: graph.{good}.load_state_dict(state[{good!r}])"
    inside = next(
        (
            key
            for key, item in state_dict.items()
            if isinstance(item, Mapping) and not parts.keys().isdisjoint(item)
        ),
        None,
    )
    if inside is not None:
        hint = f"the state of a graph is in it: graph.load_state_dict(state[{inside!r}])"
    elif faults and all(fault.startswith("unexpected") for fault in faults):
        hint = (
            'keep your own values beside the state of the graph: {"step": step.state_dict(), "epoch": 3}; '
            "strict=False loads what is there by its name"
        )
    elif state_dict and all(isinstance(item, torch.Tensor) for item in state_dict.values()):  # as of a module
        first = next(iter(parts), "model")
        hint = (
            f"if this is the state of a module, load it there, as by graph.{first}.load_state_dict(state); it has no "
            "optimizer and no random numbers"
        )
    return CheckpointError(
        f"{origin} does not fit this graph, and nothing was loaded\n  " + "\n  ".join(faults), hint=hint
    )


def _part_that_fits(state_dict: Mapping[str, Any], parts: Mapping[str, Part], loading: Loading) -> str | None:
    """The first module of which nothing is wrong, missing or unexpected."""
    faults = [fault.partition(":")[0] for fault in loading.wrong] + loading.missing + loading.unexpected
    return next(
        (
            key
            for key in parts
            if key.isidentifier()
            and isinstance(state_dict.get(key), Mapping)
            and not any(fault == key or fault.startswith((f"{key}.", f"{key}/")) for fault in faults)
        ),
        None,
    )
