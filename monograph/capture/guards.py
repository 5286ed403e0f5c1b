"""Guards: the facts of the outside world that a build stands on, checked before each call.

A fact is the identity of an object at a known place. All places are gathered into one flat list at C speed and
compared with what capture saw; tensors are checked for metadata and storage besides. A failed check says which
fact changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import Any

import torch
from torch import nn

from monograph._torch import HOOK_FIELDS, MODULE_HOOK_FIELDS, metadata_guard
from monograph.capture.reads import MISSING, Reads, is_plain
from monograph.capture.state import HeldOptimizer, Holdings

_POINTER = torch.Tensor.data_ptr
_HOOKS = tuple(attrgetter(name) for name in HOOK_FIELDS)
_MODULE_TABLES = ("_modules", "_parameters", "_buffers")
_ABSENT = type("Absent", (), {"__repr__": lambda _self: "absent"})()


@dataclass(frozen=True)
class Condition:
    """A branch that Python took on numbers that may move: `text` over numbers that `read` finds among the inputs."""

    text: str
    check: Callable[..., bool]
    read: Callable[[Sequence[Any]], Sequence[Any]]

    def holds(self, inputs: Sequence[Any]) -> bool:
        """True if the same branch would be taken with these inputs of the program."""
        return bool(self.check(*self.read(inputs)))


def condition(text: str, names: Sequence[str], read: Callable[[Sequence[Any]], Sequence[Any]]) -> Condition:
    """Compile the text of a recorded branch, which torch wrote, into a check."""
    scope = {"__builtins__": {}, "max": max, "min": min, "abs": abs, "int": int, "float": float}
    check = eval(
        f"lambda {', '.join(names)}: {text}", scope
    )  # text of our own trace, never loaded from a file
    return Condition(text, check, read)


class _Attributes:
    """Attributes of one object that build() read."""

    def __init__(self, table: dict[str, Any], label: str, names: Sequence[str]) -> None:
        self.table, self.label, self.names = table, label, tuple(names)
        self._get = itemgetter(*self.names)

    def values(self) -> Sequence[Any]:
        try:
            found = self._get(self.table)
        except KeyError:
            return [self.table.get(name, _ABSENT) for name in self.names]
        return found if len(self.names) > 1 else (found,)


class Guards:
    """The facts of one build. `hold()` is the fast check, `reason()` names the fact that changed."""

    def __init__(
        self,
        holdings: Holdings,
        modules: Mapping[str, nn.Module],
        reads: Reads,
        tensors: Mapping[str, torch.Tensor],
        conditions: Sequence[Condition],
    ) -> None:
        self._modules = dict(modules)
        self._optimizers = holdings.optimizers
        self._tables = [module.__dict__[name] for module in modules.values() for name in _MODULE_TABLES]
        self._attributes = list(_attributes(holdings, modules, reads))
        self._absent = [
            (owner.__dict__, name) for owner, name, value in _class_facts(reads) if value is MISSING
        ]
        self._class_facts = [
            (owner, name, value) for owner, name, value in _class_facts(reads) if value is not MISSING
        ]
        hooks = [module.__dict__[name] for module in modules.values() for name in MODULE_HOOK_FIELDS]
        self._no_hooks = [table for table in hooks if not table]
        self._hooks = [table for table in hooks if table]
        self._tensors = dict(tensors)
        self._flat = tuple(tensors.values())
        leaves = [tensor for tensor in self._flat if isinstance(tensor, nn.Parameter)]
        self._leaves = leaves
        self.conditions = tuple(conditions)
        self.settle()

    def settle(self) -> None:
        """Take the present facts as those that must hold."""
        self._expected = self._gather()
        self._labels: dict[str, Any] = dict(self._labelled())
        self._pointers = list(map(_POINTER, self._flat))
        self._metadata = metadata_guard(self._flat) if self._flat else _always
        self._described = {path: _describe(tensor) for path, tensor in self._tensors.items()}
        self._leaf_hooks = self._gather_leaf_hooks()

    def hold(self) -> bool:
        """True if nothing that the build stands on has changed."""
        now, expected = self._gather(), self._expected
        return (
            len(now) == len(expected)
            and all(map(is_, now, expected))
            and self._metadata(*self._flat)
            and list(map(_POINTER, self._flat)) == self._pointers
            and not any(self._no_hooks)
            and self._gather_leaf_hooks() == self._leaf_hooks
            and not any(name in table for table, name in self._absent)
            and all(getattr(owner, name) is value for owner, name, value in self._class_facts)
        )

    def conditions_hold(self, inputs: Sequence[Any]) -> bool:
        """True if every recorded branch would be taken with these inputs of the program."""
        return all(item.holds(inputs) for item in self.conditions)

    def _gather(self) -> list[Any]:
        values = list(chain.from_iterable(map(dict.values, self._tables)))
        for facts in self._attributes:
            values.extend(facts.values())
        values.extend(chain.from_iterable(map(dict.values, self._hooks)))
        for held in self._optimizers:
            values.extend(_optimizer_facts(held))
        return values

    def _gather_leaf_hooks(self) -> list[tuple[Any, ...] | None]:
        found = []
        for get in _HOOKS:
            for hooks in map(get, self._leaves):
                if hooks:
                    found.append(tuple(map(id, hooks.values())))
        return found  # type: ignore[return-value]

    # --- the slow path: which fact? ---------------------------------------------------------------------------

    def reason(self, inputs: Sequence[Any]) -> str | None:
        """The first fact that changed, as a sentence; None if facts only changed to equal values."""
        now = dict(self._labelled())
        for label in [*self._labels, *now]:
            before, after = self._labels.get(label, _ABSENT), now.get(label, _ABSENT)
            if before is not after and not _equal(before, after):
                return f"{label} changed from {_show(before)} to {_show(after)}"
        for path, tensor in self._tensors.items():
            before, after = self._described[path], _describe(tensor)
            for what, old, new in zip(
                ("dtype", "device", "shape", "strides", "requires_grad"), before, after, strict=True
            ):
                if old != new:
                    return f"{what} of {path} changed from {old} to {new}"
        if list(map(_POINTER, self._flat)) != self._pointers:
            moved = [
                path
                for path, pointer in zip(self._tensors, self._pointers, strict=True)
                if self._tensors[path].data_ptr() != pointer
            ]
            return f"storage of {moved[0]} was replaced"
        if any(self._no_hooks):
            return "a module hook was registered"
        if self._gather_leaf_hooks() != self._leaf_hooks:
            return "hooks of a parameter changed"
        for table, name in self._absent:
            if name in table:
                return f"{name} of a module was replaced"
        for owner, name, value in self._class_facts:
            if getattr(owner, name) is not value and not _equal(getattr(owner, name), value):
                return f"{type(owner).__name__}.{name} changed from {value!r} to {getattr(owner, name)!r}"
        for item in self.conditions:
            if not item.holds(inputs):
                return f"the branch `{item.text}` is no longer taken"
        return None

    def facts(self) -> list[str]:
        """The guarded facts that have a plain value, for `explain()`."""
        plain = [f"{label} = {value!r}" for label, value in self._labels.items() if is_plain(value)]
        return plain + [item.text for item in self.conditions]

    def _labelled(self) -> Iterator[tuple[str, Any]]:
        for path, module in self._modules.items():
            for table in _MODULE_TABLES:
                for name, value in module.__dict__[table].items():
                    yield f"{path}.{name}", value
        for facts in self._attributes:
            for name, value in zip(facts.names, facts.values(), strict=True):
                yield f"{facts.label}.{name}", value
        for index, value in enumerate(chain.from_iterable(map(dict.values, self._hooks))):
            yield f"module hook {index}", value
        for held in self._optimizers:
            yield from _labelled_optimizer_facts(held)


def _attributes(holdings: Holdings, modules: Mapping[str, nn.Module], reads: Reads) -> Iterator[_Attributes]:
    paths = {id(module): path for path, module in modules.items()} | {id(holdings.owner): "graph"}
    read: dict[int, list[str]] = {id(module): ["training"] for module in modules.values()}
    objects: dict[int, Any] = {id(module): module for module in modules.values()} | reads.objects
    for owner, name in reads.facts:
        read.setdefault(owner, []).append(name)
    for owner, names in read.items():
        held = objects[owner]
        present = [name for name in dict.fromkeys(names) if name in vars(held)]
        tensors = [name for name, value in vars(held).items() if isinstance(value, torch.Tensor)]
        if present or tensors:
            yield _Attributes(vars(held), paths.get(owner, type(held).__name__), [*present, *tensors])


def _class_facts(reads: Reads) -> list[tuple[Any, str, Any]]:
    return [(reads.objects[owner], name, value) for (owner, name), value in reads.class_facts.items()]


def _fact_keys(group: Mapping[str, Any]) -> list[str]:
    return [key for key, value in group.items() if key != "params" and not _moves(key, value)]


def _moves(key: str, value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return any(type(item) is float for item in value)
    return type(value) is float or (key in ("lr", "initial_lr") and isinstance(value, (int, float)))


def _optimizer_facts(held: HeldOptimizer) -> list[Any]:
    optimizer = held.optimizer
    values: list[Any] = list(optimizer.param_groups)
    for group in optimizer.param_groups:
        values.extend(group["params"])
        values.extend(value for key, value in group.items() if key != "params" and not _moves(key, value))
    for entries in optimizer.state.values():
        values.extend(_entries(entries))
    return values


def _entries(entries: Any) -> Iterable[Any]:
    for entry in entries.values() if isinstance(entries, dict) else entries:
        kind = type(entry)
        if kind is torch.Tensor:
            yield entry
        elif kind is dict or kind is list:
            yield from _entries(entry)
        elif kind is int or kind is float:
            yield kind
        else:
            yield entry


def _labelled_optimizer_facts(held: HeldOptimizer) -> Iterator[tuple[str, Any]]:
    optimizer = held.optimizer
    for index, group in enumerate(optimizer.param_groups):
        yield f"{held.name}/group{index}", group
        for position, parameter in enumerate(group["params"]):
            yield f"{held.name}/group{index}/params/{position}", parameter
        for key in _fact_keys(group):
            yield f"{held.name}/group{index}/{key}", group[key]
    for index, entries in enumerate(optimizer.state.values()):
        for position, entry in enumerate(_entries(entries)):
            yield f"{held.name} state {index}/{position}", entry


def _describe(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.device, tuple(tensor.shape), tensor.stride(), tensor.requires_grad


def _equal(before: Any, after: Any) -> bool:
    return is_plain(before) and is_plain(after) and type(before) is type(after) and bool(before == after)


def _show(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return repr(value) if is_plain(value) or value is _ABSENT else f"a {type(value).__name__}"


def _always(*_tensors: torch.Tensor) -> bool:
    return True
