"""What did build() read from Python objects? That is guarded: a later change means a new build."""

from __future__ import annotations

import sys
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from enum import Enum
from types import BuiltinFunctionType, CodeType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from monograph.capture.guards.sources.hidden import behind_proxy
from monograph.capture.guards.sources.libraries import is_watched, reading_frame, takes_apart
from monograph.capture.guards.sources.overlay import Overlay, Patch, put_on, real_attributes_of, taken_off
from monograph.capture.guards.sources.values import CONTAINERS, is_namespace, is_plain, items_of
from monograph.compat.modules import MODULE_TABLES, SUBMODULES
from monograph.compat.optimizers import attributes_of_optimizers
from monograph.state.find import Owned
from monograph.state.snapshot import Snapshot

# what torch keeps for itself in every module and optimizer: state and hooks, which are guarded apart
_OF_MODULES = frozenset(vars(nn.Module())) - {"training"}
MISSING = object()
_NOT_WATCHED = (torch.Tensor, type, ModuleType, FunctionType, MethodType, BuiltinFunctionType, Enum)
_GROWING = frozenset({list, dict, defaultdict})  # what a step may only add to
_WHOLE = frozenset({"__dict__", "__getstate__", "__reduce__", "__reduce_ex__"})  # give all attributes away


@dataclass(frozen=True)
class Entered:
    """An object whose attributes build() may set besides those of the held modules, and what they were."""

    owner: Any
    label: str
    before: dict[str, Any]


@dataclass
class Reads:
    """What was read first and what was written first, by object and attribute name."""

    overlay: Overlay = field(default_factory=Overlay)
    instance_values: dict[tuple[int, str], Any] = field(default_factory=dict)  # when first read
    class_values: dict[tuple[type, str], Any] = field(default_factory=dict)  # found on the class
    absent: set[tuple[int, str]] = field(default_factory=set)  # not in the instance, though asked for
    written: set[tuple[int, str]] = field(default_factory=set)
    objects: dict[int, Any] = field(default_factory=dict)
    labels: dict[int, str] = field(default_factory=dict)  # how the user would reach an object
    entered: dict[int, Entered] = field(default_factory=dict)
    made: dict[int, Any] = field(default_factory=dict)  # modules that build() itself makes
    pause: Callable[[], Any] = lambda: None  # what is looked up here is no code of the step
    resume: Callable[[Any], Any] = lambda _: None
    settled: set[tuple[int, str]] = field(default_factory=set)  # reading them again changes nothing
    # ids of objects of which each read is known: watched from the beginning, and never taken apart
    exact: set[int] = field(default_factory=set)
    unread: list[tuple[Any, str]] = field(default_factory=list)  # of those, when the step has run
    begun: set[int] = field(default_factory=set)  # ids of objects that were watched from the beginning
    # where code has read a list or a dict, by the id of its object and its name: the code, and the place in it
    sites: dict[tuple[int, str], set[tuple[CodeType, int]]] = field(default_factory=dict)
    _seen: set[tuple[int, str]] = field(default_factory=set)
    _names: set[str] = field(default_factory=set)
    _walked: dict[int, Any] = field(default_factory=dict)
    _patches: list[Patch] = field(default_factory=list)
    _watch: Callable[[type], None] = lambda _cls: None
    _keep: Callable[[str, Any], None] = lambda _label, _owner: None

    def note_read(self, owner: Any, name: str, value: Any) -> None:
        """Remember the first value seen of an attribute, unless build() itself wrote it before."""
        key = (id(owner), name)
        self.settled.add(key)
        if key in self._seen or key in self.written or not self.is_in_instance(owner, name):
            return
        self._seen.add(key)
        value = self.overlay.there(value)
        label = f"{self.labels.get(id(owner), type(owner).__name__)}.{name}"
        entries = self._entries(owner)
        if entries is not None and name in entries:
            if not (isinstance(value, torch.Tensor) and isinstance(owner, nn.Module)):
                self._note_value(owner, name, value)
                self.walk(value, label)
            return
        home = next((cls for cls in type(owner).__mro__ if name in cls.__dict__), None)
        if home is None:
            return
        if type(home.__dict__[name]) is MemberDescriptorType:  # a slot
            self._note_value(owner, name, value)
            self.walk(value, label)
        elif name == "forward" or is_watched(home.__module__):
            self._note_class_fact(owner, name)

    def _note_value(self, owner: Any, name: str, value: Any) -> None:
        self.instance_values[id(owner), name] = value
        self.objects[id(owner)] = owner

    def _note_class_fact(self, owner: Any, name: str) -> None:
        cls = type(owner)
        if isinstance(cls.__dict__.get(name), property):
            return  # what it reads is seen
        self.note_absent(owner, name)
        value = getattr(cls, name)
        if value is getattr(cls, name):  # not so for class methods, which are made at each look
            self.class_values[cls, name] = value

    def note_absent(self, owner: Any, name: str) -> None:
        """Remember that an attribute was asked for and is not in the instance."""
        entries = self._entries(owner)
        if entries is None or name in entries or (id(owner), name) in self.written:
            return
        if not self.is_in_instance(owner, name):
            return
        tables = MODULE_TABLES if isinstance(owner, nn.Module) else ()
        if not any(name in entries[table] for table in tables if table in entries):
            self.absent.add((id(owner), name))
            self.objects[id(owner)] = owner

    def note_write(self, owner: Any, name: str) -> None:
        """Remember that build() set an attribute."""
        self.written.add((id(owner), name))

    def value_read(self, owner: Any, name: str) -> Any:
        """The value that build() read first; MISSING if it did not read the attribute."""
        return self.instance_values.get(
            (id(owner), name), self.class_values.get((type(owner), name), MISSING)
        )

    def was_read(self, owner: Any, name: str) -> bool:
        """True if build() read the attribute before it wrote it."""
        return (id(owner), name) in self.instance_values or (
            (type(owner), name) in self.class_values and (id(owner), name) in self.absent
        )

    def found_on_class(self, owner: Any, name: str) -> bool:
        """True if build() read the attribute and found it on the class: `lazy = None`."""
        return (id(owner), name) not in self.instance_values and self.was_read(owner, name)

    def was_asked_for(self, owner: Any, name: str) -> bool:
        """True if build() read the attribute before it wrote it, or found that it is not there."""
        return (id(owner), name) in self._seen | self.absent

    def was_written_first(self, owner: Any, name: str) -> bool:
        """True if build() set the attribute before it asked for it."""
        return (id(owner), name) in self.written and not self.was_asked_for(owner, name)

    def end(self) -> None:
        """The code of the step has run. What it has not asked for of the objects that are known exactly does not count."""
        touched = self.settled | self.absent | self.written
        for owner in map(self.objects.__getitem__, self.exact):
            of_step = [name for name in self._entries(owner) if self.is_in_instance(owner, name)]
            self.unread += [(owner, name) for name in of_step if (id(owner), name) not in touched]

    def written_first(self) -> Iterator[tuple[Any, str]]:
        """The objects and names of attributes that build() set before it asked for them."""
        asked = self._seen | self.absent
        for owner, name in self.written:
            found = self.objects.get(owner)
            if found is not None and (owner, name) not in asked and self.is_in_instance(found, name):
                yield found, name

    def sites_of(self, table: dict[str, Any], name: str) -> set[tuple[CodeType, int]] | None:
        """Where code has read an attribute, which is in `table`; None if that may have gone unseen, or if it was set."""
        owner = next((id_ for id_ in self.begun if real_attributes_of(self.objects[id_]) is table), None)
        if owner is None or name[:2] == "__" or (owner, name) in self.written:
            return None
        return self.sites.get((owner, name), set())

    def walk(self, value: Any, label: str) -> None:
        """Watch the objects of the user's own classes that are reached through `value`."""
        if type(value) in weakref.ProxyTypes:
            value = behind_proxy(value)
        if id(value) in self._walked or id(value) in self.labels or id(value) in self.made:
            return
        if isinstance(value, nn.Module):
            self.enter_modules(value, label)
        elif isinstance(value, (*CONTAINERS, tuple)) or is_namespace(value):
            self._walked[id(value)] = value
            if not is_plain(value):
                for key, item in items_of(value):
                    self.walk(item, f"{label}.{key}" if is_namespace(value) else f"{label}[{key!r}]")
        elif _is_users(value):
            self._watch(type(value))
            self.enter(value, label)

    def enter_modules(self, module: nn.Module, label: str) -> None:
        """Follow a module that the graph does not hold, and those inside."""
        if id(module) not in self.labels and id(module) not in self.made:
            self.enter(module, label)
            # past the attributes, which are being watched
            for name, child in (self._entries(module) or {}).get(SUBMODULES, {}).items():
                if child is not None:
                    self.enter_modules(child, f"{label}.{name}")

    def enter(self, owner: Any, label: str, *, kept: bool = False) -> None:
        """Follow an object that is not among the held modules; `kept` if others put it back after the trace."""
        if id(owner) in self.labels or id(owner) in self.made:
            return
        while label in self._names:
            label += "'"
        self._names.add(label)
        self.labels[id(owner)] = label
        self.objects[id(owner)] = owner
        entries = self._entries(owner)
        if entries is not None:
            self.entered[id(owner)] = Entered(owner, label, dict(entries))
            if not kept:
                self._keep(label, owner)

    def enter_held(self, owner: Any, names: Iterable[str]) -> None:
        """Follow what the Graph holds under these names, and what that holds, from the beginning: all reads are known."""
        held = [(f"graph.{name}", item) for name in names if _has_class(item := vars(owner)[name])]
        parts = [(f"{at}.{name}", p) for at, item in held for name, p in (self._entries(item) or {}).items()]
        for label, item in [*held, *parts]:
            if _has_class(item) and not isinstance(item, (nn.Module, Optimizer, root_class(owner))):
                self._watch(type(item))
                if any(patch.cls in type(item).__mro__ for patch in self._patches):
                    self.enter(item, label)
                    self.exact |= {id(item)} & self.entered.keys()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Watch nothing for a while: Dynamo cannot look through what watches."""
        for known in (self.exact, self.begun):
            known.clear()
        with taken_off(self._patches), self.overlay.paused():
            yield

    def _entries(self, owner: Any) -> Any:
        return self.overlay.of(real_attributes_of(owner))

    def is_in_instance(self, owner: Any, name: str) -> bool:
        """False for what torch keeps for itself in modules and optimizers."""
        if isinstance(owner, nn.Module):
            return name not in _OF_MODULES
        if isinstance(owner, Optimizer):
            of_torch = type(owner).__module__.startswith("torch.optim")
            return name not in attributes_of_optimizers() and not of_torch
        return True


@contextmanager
def record_reads(
    owned: Owned, modules: Mapping[str, nn.Module], snapshot: Snapshot, overlay: Overlay
) -> Iterator[Reads]:
    """Record reads and writes of attributes of modules, of the graph, its optimizers, and of objects they hold."""
    thread = threading.get_ident()
    if owned.optimizers:
        attributes_of_optimizers()  # made before the trace: its code is none of the step's
    with ExitStack() as stack:
        reads, spied, own = Reads(overlay), set(), {id(module) for module in modules.values()}

        def watched(item: Any) -> bool:
            if threading.get_ident() != thread:
                return False
            if id(item) in reads.labels:
                return True
            if isinstance(item, nn.Module):
                reads.enter_modules(item, type(item).__name__)
            return id(item) in reads.labels

        def watch(cls: type) -> None:
            if not any(base in spied for base in cls.__mro__):
                spied.add(cls)
                overlay.watch(stack, cls)
                _spy(stack, cls, reads, thread, watched)

        overlay.covers = lambda item: id(item) in reads.labels
        reads._watch, reads._keep = watch, snapshot.add_object
        reads.labels.update({id(module): path for path, module in modules.items()})
        reads._names.update(modules)
        reads.objects.update({id(module): module for module in modules.values()})
        reads.enter(owned.owner, "graph", kept=True)
        for registered in owned.optimizers:
            reads.enter(registered.optimizer, registered.name, kept=True)
        for cls in (nn.Module, Optimizer, root_class(owned.owner)):
            watch(cls)
        reads.enter_held(owned.owner, [name for name in vars(owned.owner) if name not in owned.private])
        reads.exact.update({id(owned.owner)}, own)
        reads.begun.update(reads.labels)
        _note_made(stack, reads, own, thread)
        yield reads


def _is_users(value: Any) -> bool:
    """True for objects of the user's own classes, such as a loss that is no module or a configuration."""
    return not isinstance(value, _NOT_WATCHED) and not is_plain(value) and is_watched(type(value).__module__)


def _has_class(value: Any) -> bool:
    """True for objects of the user's own classes that Python code can put methods on."""
    return type(value) not in weakref.ProxyTypes and not is_namespace(value) and _is_users(value)


def root_class(owner: Any) -> type:
    """The class right under object: patching it reaches every subclass."""
    return type(owner).__mro__[-2]


def _note_made(stack: ExitStack, reads: Reads, own: set[int], thread: int) -> None:
    initialise = nn.Module.__init__

    def noting(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        if threading.get_ident() == thread and id(self) not in own:
            reads.made[id(self)] = self
        initialise(self, *args, **kwargs)

    put_on(stack, nn.Module, reads._patches, {"__init__": noting})


def _spy(stack: ExitStack, cls: type, reads: Reads, thread: int, watched: Callable[[Any], bool]) -> None:
    get: Any = cls.__getattribute__
    put: Any = cls.__setattr__
    settled, exact, here = reads.settled, reads.exact, threading.get_ident

    def spying_get(self: Any, name: str) -> Any:
        if name[:2] == "__" or here() != thread:
            if here() != thread or (name in _WHOLE and takes_apart(sys._getframe(1))):
                exact.discard(id(self))
            return get(self, name)
        is_settled = (id(self), name) in settled
        if not (is_settled or watched(self)):
            return get(self, name)
        try:
            value = get(self, name)
        except AttributeError:
            reads.note_absent(self, name)
            raise
        if not is_settled:
            reporting = reads.pause()
            try:
                reads.note_read(self, name, value)
            finally:
                reads.resume(reporting)
        if type(value) in _GROWING:
            reader = reading_frame(sys._getframe(1))
            reads.sites.setdefault((id(self), name), set()).add((reader.f_code, reader.f_lasti))
        return value

    def spying_put(self: Any, name: str, value: Any) -> None:
        if watched(self):
            reads.note_write(self, name)
        put(self, name, value)

    put_on(stack, cls, reads._patches, {"__getattribute__": spying_get, "__setattr__": spying_put})
