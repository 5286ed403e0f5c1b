"""A capture that fails changes nothing: snapshots of everything build() could touch from Python."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from monograph.compat.amp import autocast_kept, scaler_tables
from monograph.compat.fakes import is_fake
from monograph.compat.global_state import seeding_watched
from monograph.compat.modules import MODULE_TABLES
from monograph.compat.symbolic_numbers import is_symbolic
from monograph.state.find import Owned
from monograph.state.random import RandomState
from monograph.state.threads import alone

_CONTAINERS = (list, dict, set, deque)


@dataclass
class Snapshot:
    """Shallow copies of the tables of modules, optimizers and the graph, and of containers they hold; values by request."""

    random: RandomState
    tables: list[tuple[dict[Any, Any], dict[Any, Any]]] = field(default_factory=list)
    containers: list[tuple[str, Any, Any]] = field(default_factory=list)
    values: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    _known: set[int] = field(
        default_factory=set
    )  # ids of what is copied: the first copy is the one to go back to

    @property
    def covered(self) -> set[int]:
        """The ids of the tables and containers that `restore` puts back."""
        return self._known

    def keep(self, table: dict[Any, Any]) -> None:
        """Copy one table."""
        if id(table) not in self._known:
            self._known.add(id(table))
            self.tables.append((table, dict(table)))

    def add_object(self, path: str, owner: Any) -> None:
        """Copy what an object holds: its attributes, the tables of a module, and its containers."""
        entries = object.__getattribute__(owner, "__dict__")  # reads may be watched
        self.keep(entries)
        for name, value in list(entries.items()):
            if isinstance(owner, nn.Module) and (
                name in MODULE_TABLES or (name.endswith("_hooks") and isinstance(value, dict))
            ):
                self.keep(value)
            else:
                self.add_container(f"{path}.{name}", value)

    def add_container(self, path: str, value: Any) -> None:
        """Copy a list, dict or set, and those inside; nothing for other values."""
        if not issubclass(type(value), _CONTAINERS) or id(value) in self._known:
            return
        self._known.add(id(value))
        self.containers.append((path, value, value.copy()))
        for item in list(value.values() if isinstance(value, dict) else value):
            self.add_container(path, item)

    def keep_values(self, tensor: torch.Tensor) -> None:
        """Copy the numbers of a tensor; without that only the object is put back."""
        self.values.append((tensor, tensor.detach().to("cpu", copy=True)))

    def restore(self) -> list[str]:
        """Put everything back as it was; returns the paths of containers whose content had changed."""
        for live, saved in self.tables:
            if not _identical(live, saved):
                _put_back(live, saved)
        return self._restore_others()

    def roll_back(self) -> list[str]:
        """Put back what this thread has changed, as `restore` does.

        Attributes are seen through an overlay: where there are other threads, those that hold no tensor of the trace
        were set by them.
        """
        if alone():
            return self.restore()
        for live, saved in self.tables:
            for name, value in list(live.items()):
                if not (is_fake(value) or is_symbolic(value)):
                    continue
                if name in saved:
                    live[name] = saved[name]
                else:
                    del live[name]
        return self._restore_others()

    def changed_containers(self) -> list[str]:
        """The paths of containers whose content is no longer what it was."""
        return [path for path, _, _ in self._changed()]

    def _changed(self) -> list[tuple[str, Any, Any]]:
        return [item for item in self.containers if not _identical(*item[1:])]

    def _restore_others(self) -> list[str]:
        with torch.no_grad():
            for live, numbers in self.values:
                live.copy_(numbers)
        self.random.restore()
        changed = self._changed()
        for _, live, saved in changed:
            live.clear()
            live.extend(saved) if isinstance(live, (list, deque)) else live.update(saved)
        return [path for path, _, _ in changed]

    @contextmanager
    def seeding_noted(self) -> Iterator[None]:
        """Notice when this thread sets torch's random state."""
        thread = threading.get_ident()

        def report() -> None:
            self.random.touched |= threading.get_ident() == thread

        with seeding_watched(report):
            yield


def _identical(live: Any, saved: Any) -> bool:
    if len(live) != len(saved):
        return False
    if isinstance(live, dict):
        return all(a is b and x is y for (a, x), (b, y) in zip(live.items(), saved.items(), strict=True))
    if isinstance(live, (list, deque)):
        return all(a is b for a, b in zip(live, saved, strict=True))
    return bool(live == saved)


def _put_back(live: dict[Any, Any], saved: dict[Any, Any]) -> None:
    """Make a table what it was. Other threads may be reading it: it is emptied only if its order has changed."""
    if [id(key) for key in live if key in saved] != [id(key) for key in saved]:
        live.clear()
    live.update(saved)
    for key in [key for key in live if key not in saved]:
        del live[key]


def take_snapshot(owned: Owned, modules: Mapping[str, nn.Module]) -> Snapshot:
    """Copy the tables that build() could change."""
    snapshot = Snapshot(RandomState.now())
    for path, module in modules.items():
        snapshot.add_object(path, module)
    snapshot.keep(owned.owner.__dict__)
    snapshot.keep(owned.table)
    for name, value in list(vars(owned.owner).items()):
        if not name.startswith("_"):
            snapshot.add_container(name, value)
    if owned.scaler is not None:
        for table in scaler_tables(owned.scaler):
            snapshot.keep(table)
    for registered in owned.optimizers:
        snapshot.keep(registered.optimizer.__dict__)
        for name, value in list(vars(registered.optimizer).items()):
            if name not in ("state", "param_groups"):
                snapshot.add_container(f"{registered.name}.{name}", value)
        snapshot.keep(registered.optimizer.state)
        for entries in list(registered.optimizer.state.values()):
            if isinstance(entries, dict):
                snapshot.keep(entries)
        for group in registered.optimizer.param_groups:
            snapshot.keep(group)
    return snapshot


@contextmanager
def torch_modes() -> Iterator[None]:
    """Leave the thread's modes as they were, whatever build() did to them.

    Anomaly detection is off inside: it looks at the values of gradients, which a trace does not have.
    """
    grad, dtype = torch.is_grad_enabled(), torch.get_default_dtype()
    try:
        with (
            torch.inference_mode(False),
            _without_anomalies(),
            torch.autograd.set_multithreading_enabled(
                False
            ),  # backward of a GPU too sees what this thread sees
            torch.set_grad_enabled(grad),
            autocast_kept(),
        ):
            yield
    finally:
        torch.set_grad_enabled(grad)
        if torch.get_default_dtype() != dtype:
            torch.set_default_dtype(dtype)


@contextmanager
def _without_anomalies() -> Iterator[None]:
    """The switch is that of the process: where it is off, it is left alone."""
    if torch.is_anomaly_enabled():
        with torch.autograd.set_detect_anomaly(False):
            yield
        return
    try:
        yield
    finally:
        if torch.is_anomaly_enabled():
            torch.autograd.set_detect_anomaly(False)
