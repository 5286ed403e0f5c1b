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
from torch.utils.hooks import RemovableHandle

from monograph._torch import HOOK_FIELDS, MODULE_HOOK_FIELDS, metadata_guard
from monograph.capture.reads import MISSING, Reads, is_plain
from monograph.capture.state import HeldOptimizer, Holdings

_POINTER = torch.Tensor.data_ptr
_HOOKS = tuple(attrgetter(name) for name in HOOK_FIELDS)
_MODULE_TABLES = ("_modules", "_parameters", "_buffers")
_ABSENT = type("Absent", (), {"__repr__": lambda _self: "absent"})()


@dataclass(frozen=True)
class Condition:
    """A branch that Python took on numbers that may move: `text` over numbers that `read` finds among the inputs.

    `about` is the same text with the paths of the inputs in place of symbols, for people.
    """

    text: str
    check: Callable[..., bool]
    read: Callable[[Sequence[Any]], Sequence[Any]]
    about: str

    def holds(self, inputs: Sequence[Any]) -> bool:
        """True if the same branch would be taken with these inputs of the program."""
        return bool(self.check(*self.read(inputs)))


def condition(
    text: str, names: Sequence[str], read: Callable[[Sequence[Any]], Sequence[Any]], *, about: str
) -> Condition:
    """Compile the text of a recorded branch, which torch wrote, into a check."""
    scope = {"__builtins__": {}, "max": max, "min": min, "abs": abs, "int": int, "float": float}
    check = eval(
        f"lambda {', '.join(names)}: {text}", scope
    )  # text of our own trace, never loaded from a file
    return Condition(text, check, read, about)


@dataclass(frozen=True)
class _Attributes:
    """Attributes of one object that build() read."""

    table: dict[str, Any]
    label: str
    names: tuple[str, ...]


def _reader(attributes: Sequence[_Attributes]) -> Callable[[], list[Any]]:
    """One generated function that reads all of them: half the cost of a call per object."""
    scope = {f"d{index}": facts.table for index, facts in enumerate(attributes)}
    items = [f"d{index}[{name!r}]" for index, facts in enumerate(attributes) for name in facts.names]
    reader: Callable[[], list[Any]] = eval(f"lambda: [{', '.join(items)}]", scope)
    return reader


def _any_present(absent: Sequence[tuple[dict[str, Any], str]]) -> Callable[[], bool]:
    scope = {f"d{index}": table for index, (table, _) in enumerate(absent)}
    items = [f"{name!r} in d{index}" for index, (_, name) in enumerate(absent)]
    present: Callable[[], bool] = eval(f"lambda: {' or '.join(items) or 'False'}", scope)
    return present


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
        tables = [module.__dict__[name] for module in modules.values() for name in _MODULE_TABLES]
        self._tables = [table for table in tables if table]
        self._attributes = list(_attributes(holdings, modules, reads))
        self._read_attributes = _reader(self._attributes)
        self._all_tensors = {
            held.name: all(map(_only_tensors, held.optimizer.state.values())) for held in holdings.optimizers
        }
        self._absent = [
            (owner.__dict__, name) for owner, name, value in _class_facts(reads) if value is MISSING
        ]
        self._any_present = _any_present(self._absent)
        self._class_facts = [
            (owner, name, value) for owner, name, value in _class_facts(reads) if value is not MISSING
        ]
        hooks = [module.__dict__[name] for module in modules.values() for name in MODULE_HOOK_FIELDS]
        self._empty = [table for table in (*tables, *hooks) if not table]
        self._hooks = [table for table in hooks if table]
        self.tensors = dict(tensors)
        self._flat = tuple(tensors.values())
        leaves = [tensor for tensor in self._flat if isinstance(tensor, nn.Parameter)]
        self._leaves = leaves
        self.conditions = tuple(conditions)
        self.settle()

    def settle(self) -> None:
        """Take the present facts as those that must hold."""
        self._expected = self._gather()
        self._lookalikes = _lookalikes(self._expected)
        self._labels: dict[str, Any] = dict(self._labelled())
        self._pointers = list(map(_POINTER, self._flat))
        self._metadata = metadata_guard(self._flat) if self._flat else _always
        self._described = {path: _describe(tensor) for path, tensor in self.tensors.items()}
        self._leaf_hooks = self._gather_leaf_hooks()
        self._handles = RemovableHandle.next_id

    def hold(self) -> bool:
        """True if nothing that the build stands on has changed."""
        expected = self._expected
        try:
            now = self._gather()
        except KeyError:  # an attribute is gone
            return False
        return (
            _same_objects(now, expected, self._lookalikes)
            and self._metadata(*self._flat)
            and list(map(_POINTER, self._flat)) == self._pointers
            and not any(self._empty)
            and self._leaf_hooks_hold()
            and not self._any_present()
            and all(getattr(owner, name) is value for owner, name, value in self._class_facts)
        )

    def release(self) -> None:
        """Drop every reference to tensors; the guards hold no more."""
        self.tensors, self._flat, self._leaves, self._labels = {}, (), [], {}
        self._expected, self._lookalikes, self._metadata = [_ABSENT], _lookalikes([]), _always
        self._modules, self._optimizers, self._attributes, self._hooks = {}, (), [], []

    def conditions_hold(self, inputs: Sequence[Any]) -> bool:
        """True if every recorded branch would be taken with these inputs of the program."""
        return all(item.holds(inputs) for item in self.conditions)

    def _gather(self) -> list[Any]:
        values = list(chain.from_iterable(map(dict.values, self._tables)))
        values.extend(self._read_attributes())
        values.extend(chain.from_iterable(map(dict.values, self._hooks)))
        for held in self._optimizers:
            values.extend(_group_facts(held))
            state = held.optimizer.state.values()
            if self._all_tensors[held.name]:
                values.extend(chain.from_iterable(map(dict.values, state)))
            else:
                values.extend(chain.from_iterable(map(_entries, state)))
        return values

    def _leaf_hooks_hold(self) -> bool:
        if not self._leaf_hooks and self._handles == RemovableHandle.next_id:
            return True  # torch numbers every hook: none was registered anywhere since the last look
        if self._gather_leaf_hooks() != self._leaf_hooks:
            return False
        self._handles = RemovableHandle.next_id
        return True

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
        for path, tensor in self.tensors.items():
            before, after = self._described[path], _describe(tensor)
            for what, old, new in zip(
                ("dtype", "device", "shape", "strides", "requires_grad"), before, after, strict=True
            ):
                if old != new:
                    return f"{what} of {path} changed from {old} to {new}"
        if list(map(_POINTER, self._flat)) != self._pointers:
            moved = [
                path
                for path, pointer in zip(self.tensors, self._pointers, strict=True)
                if self.tensors[path].data_ptr() != pointer
            ]
            return f"storage of {moved[0]} was replaced"
        if any(self._empty):
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
                return f"the branch `{item.about}` is no longer taken"
        return None

    def facts(self) -> list[str]:
        """The guarded facts that have a plain value, for `explain()`."""
        plain = [f"{label} = {value!r}" for label, value in self._labels.items() if is_plain(value)]
        return plain + [item.about for item in self.conditions]

    def _labelled(self) -> Iterator[tuple[str, Any]]:
        for path, module in self._modules.items():
            for table in _MODULE_TABLES:
                for name, value in module.__dict__[table].items():
                    yield f"{path}.{name}", value
        for facts in self._attributes:
            for name in facts.names:
                yield f"{facts.label}.{name}", facts.table.get(name, _ABSENT)
        for index, value in enumerate(chain.from_iterable(map(dict.values, self._hooks))):
            yield f"module hook {index}", value
        for held in self._optimizers:
            yield from _labelled_optimizer_facts(held)


Lookalikes = tuple[Callable[[Sequence[Any]], tuple[Any, ...]], tuple[Any, ...]]


def _lookalikes(values: Sequence[Any]) -> Lookalikes:
    """A getter for those facts that another object could equal, and their values."""
    positions = [index for index, value in enumerate(values) if _may_equal_another(value)]
    getter = itemgetter(*positions) if len(positions) > 1 else itemgetter(*(positions * 2 or [0, 0]))
    return getter, getter(values) if values else ()


def _may_equal_another(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() < 2
    return value is not None and not isinstance(value, nn.Module)


def _same_objects(now: list[Any], expected: list[Any], lookalikes: Lookalikes) -> bool:
    """True if both lists hold the same objects.

    Comparing lists is identity first, in C. It may go on only past objects that are equal without being the same,
    which are looked at apart; tensors of two elements or more have no truth value and raise.
    """
    try:
        if now != expected:
            return False
    except RuntimeError:
        return False
    getter, values = lookalikes
    return not values or all(map(is_, getter(now), values))


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
            label = paths.get(owner, type(held).__name__)
            yield _Attributes(vars(held), label, (*present, *tensors))


def _class_facts(reads: Reads) -> list[tuple[Any, str, Any]]:
    return [(reads.objects[owner], name, value) for (owner, name), value in reads.class_facts.items()]


def _fact_keys(group: Mapping[str, Any]) -> list[str]:
    return [key for key, value in group.items() if key != "params" and not _moves(key, value)]


def _moves(key: str, value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return any(type(item) is float for item in value)
    return type(value) is float or (key in ("lr", "initial_lr") and isinstance(value, (int, float)))


def _group_facts(held: HeldOptimizer) -> list[Any]:
    values: list[Any] = []
    for group in held.optimizer.param_groups:
        values.append(group)
        values.extend(group["params"])
        values.extend([value for key, value in group.items() if key != "params" and not _moves(key, value)])
    return values


def _only_tensors(entries: Any) -> bool:
    return isinstance(entries, dict) and all(type(entry) is torch.Tensor for entry in entries.values())


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
