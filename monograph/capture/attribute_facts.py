"""Facts in attributes: which attributes, classes and containers a build stands on, and how they are read fast."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from monograph.capture.reads import CONTAINERS, Reads, is_array, is_namespace, is_plain, items_of

ABSENT = type("Absent", (), {"__repr__": lambda _self: "absent"})()


@dataclass(frozen=True)
class Attributes:
    """Attributes of one object that build() read. `table` is its dict, or itself if it has slots."""

    table: Any
    label: str
    names: tuple[str, ...]

    def value(self, name: str) -> Any:
        if isinstance(self.table, dict):
            return self.table.get(name, ABSENT)
        return getattr(self.table, name, ABSENT)


@dataclass(frozen=True)
class AbsentName:
    """An attribute that build() asked an instance for, and that the instance does not have."""

    table: dict[str, Any]
    label: str
    name: str


@dataclass(frozen=True)
class ClassFact:
    """What build() found on a class: a method, or a plain value."""

    cls: type
    name: str
    value: Any

    @property
    def now(self) -> Any:
        return getattr(self.cls, self.name, ABSENT)


def attribute_reader(attributes: Sequence[Attributes]) -> Callable[[], list[Any]]:
    """One generated function that reads all of them: half the cost of a call per object."""
    scope = {f"d{index}": facts.table for index, facts in enumerate(attributes)}
    items = [
        f"d{index}[{name!r}]" if isinstance(facts.table, dict) else f"d{index}.{name}"
        for index, facts in enumerate(attributes)
        for name in facts.names
    ]
    reader: Callable[[], list[Any]] = eval(f"lambda: [{', '.join(items)}]", scope)
    return reader


def presence_check(absent: Sequence[AbsentName]) -> Callable[[], bool]:
    """A generated check whether any of these instances has got the attribute now."""
    scope = {f"d{index}": item.table for index, item in enumerate(absent)}
    items = [f"{item.name!r} in d{index}" for index, item in enumerate(absent)]
    present: Callable[[], bool] = eval(f"lambda: {' or '.join(items) or 'False'}", scope)
    return present


def class_reader(facts: Sequence[ClassFact]) -> Callable[[], list[Any]]:
    """One generated function that reads what build() found on classes."""
    scope: dict[str, Any] = {f"c{index}": fact.cls for index, fact in enumerate(facts)} | {"absent": ABSENT}
    items = [f"getattr(c{index}, {fact.name!r}, absent)" for index, fact in enumerate(facts)]
    reader: Callable[[], list[Any]] = eval(f"lambda: [{', '.join(items)}]", scope)
    return reader


def foreign_modules(reads: Reads) -> dict[str, nn.Module]:
    """Modules that build() used though the graph does not hold them."""
    return {e.label: e.owner for e in reads.entered.values() if isinstance(e.owner, nn.Module)}


def read_attributes(reads: Reads, modules: Mapping[str, nn.Module]) -> Iterator[Attributes]:
    """The attributes that build() read, by object; `training` of every module, and tensors in attributes."""
    read: dict[int, list[str]] = {id(module): ["training"] for module in modules.values()}
    for owner, name in reads.facts:
        read.setdefault(owner, []).append(name)
    for owner, names in read.items():
        held = reads.objects[owner]
        label = reads.labels.get(owner, type(held).__name__)
        if not hasattr(held, "__dict__"):
            yield Attributes(held, label, tuple(names))
            continue
        present = [name for name in names if name in vars(held)]
        if isinstance(held, nn.Module):
            present += [name for name, value in vars(held).items() if isinstance(value, torch.Tensor)]
        if present:
            yield Attributes(vars(held), label, tuple(dict.fromkeys(present)))


def read_contents(attributes: Sequence[Attributes], reads: Reads) -> Iterator[tuple[str, Any]]:
    """The lists, dicts, sets and namespaces among the facts, and those inside, each with its label."""
    pending = [(f"{facts.label}.{name}", facts.value(name)) for facts in attributes for name in facts.names]
    pending += [(f"{cls.__name__}.{name}", value) for (cls, name), value in reads.class_facts.items()]
    seen: set[int] = set()
    for label, value in pending:  # grows while it is walked
        if is_plain(value) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, CONTAINERS) or is_array(value):
            yield label, value
        elif is_namespace(value):
            yield label, vars(value)
        elif not isinstance(value, tuple):
            continue
        pending += [(f"{label}{_step(value, key)}", item) for key, item in items_of(value)]


def is_state_view(array: Any, tensors: Mapping[str, torch.Tensor]) -> bool:
    """True if a tensor of the step lies on the memory of a numpy array: its values are read at each step."""
    start, end = array.ctypes.data, array.ctypes.data + array.nbytes
    return any(start <= tensor.data_ptr() < end for tensor in tensors.values())


def _step(container: Any, key: Any) -> str:
    return f".{key}" if is_namespace(container) else f"[{key!r}]"


def labelled_items(label: str, content: Any) -> Iterator[tuple[str, Any]]:
    """The content of a container with labels, for messages and comparison."""
    if isinstance(content, set):  # has no order to compare by
        yield label, tuple(sorted(content, key=repr)) if is_plain(tuple(content)) else tuple(content)
        return
    if is_array(content):
        yield f"the values of {label}", content.tobytes()
        return
    yield f"the length of {label}", len(content)
    for key, item in items_of(content):
        yield f"{label}[{key!r}]", item
