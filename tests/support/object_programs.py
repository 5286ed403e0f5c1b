"""Random object graphs, a build() that reads along random paths in them, and random changes of what it can reach.

`Program(seed)` makes one. Its source is run once; `build` reads numbers out of Python objects and is called on a plain
object and as a graph. Each change is made in place and once, so both see it.
"""

from __future__ import annotations

import array
import contextvars
import functools
import random
import types
import weakref
from collections import ChainMap, OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field, make_dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

LEAVES: tuple[Any, ...] = (
    0.0, -0.0, 1.0, 1, True, False, 2, 2.0, 2.5, -3, 7, None, "", "a", "bb", (1,), (1.0,), (True,), (), (2, 3.0),
    frozenset({1}), frozenset({1.0}), 3 + 0j, float("nan"), float("inf"), b"x", range(3),
)  # fmt: skip
NUMBERS: tuple[float, ...] = (0.0, -0.0, 1.0, 2.0, 2.5, -3.0, 7.0)
KINDS = [bool, int, float, complex, str, bytes, tuple, frozenset, range, type(None)]


def num(value: Any) -> float:
    """A number that tells any two leaves apart that Python tells apart."""
    kind = KINDS.index(type(value)) if type(value) in KINDS else 11
    return float(kind) + sum(map(ord, repr(value))) % 97 / 97.0


def in_order(values: Any) -> float:
    """A number that depends on the values and their order."""
    total = 0.0
    for value in values:
        total = total * 0.5 + num(value) if not hasattr(value, "__dict__") else total * 0.5
    return total


@dataclass
class Node:
    """An object of the graph: how code reads from it, and how it can be changed."""

    value: Any
    reads: list[str] = field(
        default_factory=list
    )  # expressions with {} in place of the object, each gives a number
    children: list[tuple[str, Node]] = field(default_factory=list)  # expressions that give another object
    changes: list[tuple[str, Callable[[], Any]]] = field(default_factory=list)


class Maker:
    """Makes random nodes."""

    def __init__(self, chance: random.Random) -> None:
        self.chance, self.kept = chance, []
        self.kinds = [getattr(self, name) for name in dir(Maker) if name.startswith("make_")]

    def leaf(self) -> Any:
        return self.chance.choice(LEAVES)

    def name(self) -> str:
        return self.chance.choice("abcdefgh") + self.chance.choice(["", "1", "_x"])

    def node(self, depth: int) -> Node:
        node: Node = self.chance.choice(self.kinds)(depth)
        self.kept.append(node)
        return node

    def items(self, depth: int) -> dict[str, Any]:
        """Names with leaves and other objects."""
        found: dict[str, Any] = {self.name(): self.leaf() for _ in range(self.chance.randint(1, 3))}
        if depth > 0:
            for _ in range(self.chance.randint(1, 2)):
                found[self.name()] = self.node(depth - 1)
        return found

    # --- attributes -------------------------------------------------------------------------------------------------------

    def with_attributes(self, owner: Any, depth: int, *, put: Callable[..., Any] = setattr) -> Node:
        """Fill an object with attributes, and say how they are read and changed."""
        node = Node(owner)
        for name, item in self.items(depth).items():
            put(owner, name, item.value if isinstance(item, Node) else item)
            self.attribute(node, name, item)
        absent = "q" + self.name()
        node.reads.append(f"num(getattr({{}}, {absent!r}, 0.25))")
        node.changes.append(("set what was absent", lambda: put(owner, absent, self.leaf())))
        return node

    def attribute(self, node: Node, name: str, item: Any) -> None:
        owner = node.value
        ways = [f"{{}}.{name}", f"getattr({{}}, {name!r})", f"getattr({{}}, {name[:1]!r} + {name[1:]!r})"]
        if isinstance(getattr(owner, "__dict__", None), dict) and name in vars(owner):
            ways += [f"vars({{}})[{name!r}]", f"{{}}.__dict__[{name!r}]", f"{{}}.__dict__.get({name!r})"]
            ways += [
                f"(lambda **kw: kw[{name!r}])(**{{}}.__dict__)",
                f"object.__getattribute__({{}}, {name!r})",
            ]
        way = self.chance.choice(ways)
        if isinstance(item, Node):
            node.children.append((way, item))
            other = self.node(0)
            node.changes.append(
                (f"replace object {name}", lambda: self.swap(owner, name, other.value, item.value))
            )
        else:
            node.reads.append(f"num({way})")
            node.changes.append((f"set {name}", lambda: setattr(owner, name, self.leaf())))

    def swap(self, owner: Any, name: str, other: Any, before: Any) -> None:
        """Another object of another kind would break the paths behind it: only a copy of the same kind is put there."""
        del other
        setattr(owner, name, before)

    def make_namespace(self, depth: int) -> Node:
        return self.with_attributes(types.SimpleNamespace(), depth)

    def make_instance(self, depth: int) -> Node:
        return self.with_attributes(type("Thing", (), {})(), depth)

    def make_module(self, depth: int) -> Node:
        return self.with_attributes(nn.Module(), depth, put=_put_plain)

    def make_module_type(self, depth: int) -> Node:
        return self.with_attributes(types.ModuleType("settings"), depth)

    def make_function(self, depth: int) -> Node:
        return self.with_attributes(types.FunctionType((lambda: 0).__code__, {}, "f"), depth)

    def make_float(self, depth: int) -> Node:
        return self.with_attributes(type("Number", (float,), {})(2.0), depth)

    def make_class(self, depth: int) -> Node:
        return self.with_attributes(type("Config", (), {}), depth)

    def make_instance_of_attributes(self, depth: int) -> Node:
        """Attributes of the class and of a base class, which the instance or the nearer class may come to hide."""
        base = type("Base", (), {})
        cls = type("Child", (base,), {})
        owner, node = cls(), Node(None)
        node.value = owner
        for place in (base, cls):
            name, value = self.name() + "k", self.leaf()
            setattr(place, name, value)
            ways = [f"{{}}.{name}", f"type({{}}).{name}", f"getattr({{}}, {name!r})"]
            node.reads.append(f"num({self.chance.choice(ways)})")
            for target in (place, cls, owner):
                node.changes.append((f"set {name} on {target!r:.20}", _setter(self, target, name)))
        other = type("Other", (cls,), {name: self.leaf()})
        node.changes.append(("__class__", lambda: setattr(owner, "__class__", other)))
        bases = (type("Base2", (base,), {name: self.leaf()}),)
        node.changes.append(("__bases__", lambda: setattr(cls, "__bases__", bases)))
        return node

    def make_slots(self, depth: int) -> Node:
        names = tuple({self.name() for _ in range(3)})
        base = type("Slots", (), {"__slots__": names[:1]})
        owner = type("MoreSlots", (base,), {"__slots__": names[1:]})()
        node = Node(owner)
        for name in names:
            setattr(owner, name, self.leaf())
            node.reads.append(f"num({{}}.{name})")
            node.changes.append((f"set slot {name}", _setter(self, owner, name)))
        return node

    def make_dataclass(self, depth: int) -> Node:
        names = list({self.name() for _ in range(3)})
        cls = make_dataclass("Data", [(name, Any, None) for name in names])
        node = Node(cls(*(self.leaf() for _ in names)))
        node.reads += ["in_order(asdict({}).values())", f"num({{}}.{names[0]})"]
        for name in names:
            node.changes.append((f"set {name}", _setter(self, node.value, name)))
        return node

    def make_property(self, depth: int) -> Node:
        name, hidden = self.name(), "_" + self.name()
        cls = type("WithProperty", (), {})
        exec(f"def get(self): return self.{hidden}", scope := {})
        setattr(cls, name + "p", property(scope["get"]))
        owner = cls()
        setattr(owner, hidden, self.leaf())
        node = Node(owner, [f"num({{}}.{name}p)"])
        node.changes.append(("set behind a property", _setter(self, owner, hidden)))
        value = self.leaf()
        node.changes.append(
            ("replace a property", lambda: setattr(cls, name + "p", property(lambda self: value)))
        )
        return node

    def make_descriptor(self, depth: int) -> Node:
        descriptor = Descriptor(self.leaf())
        owner = type("Described", (), {"field": descriptor})()
        node = Node(owner, ["num({}.field)"])
        node.changes.append(("set in a descriptor", _setter(self, descriptor, "content")))
        return node

    def make_method(self, depth: int) -> Node:
        name = self.name()
        exec(f"def gain(self): return self.{name}\ndef other(self): return self", scope := {})
        cls = type("WithMethod", (), {"gain": scope["gain"]})
        owner = cls()
        setattr(owner, name, self.leaf())
        holder = types.SimpleNamespace(owner=owner, bound=owner.gain, part=functools.partial(owner.gain))
        node = Node(holder, ["num({}.owner.gain())", "num({}.bound())", "num({}.part())"])
        node.changes.append(("set behind a method", _setter(self, owner, name)))
        value = self.leaf()
        node.changes.append(("replace a method", lambda: setattr(cls, "gain", lambda self: value)))
        node.changes.append(
            ("replace a method on the instance", lambda: setattr(owner, "gain", lambda: value))
        )
        code = (lambda self: 4.5).__code__
        node.changes.append(("replace code", lambda: setattr(scope["gain"], "__code__", code)))
        return node

    def make_getattr(self, depth: int) -> Node:
        name = self.name()
        owner = Extra({name: self.leaf()})
        node = Node(owner, [f"num({{}}.{name})"])
        node.changes.append(
            ("set an extra", lambda: object.__getattribute__(owner, "extra").update({name: self.leaf()}))
        )
        return node

    # --- functions and variables --------------------------------------------------------------------------------------------

    def make_closure(self, depth: int) -> Node:
        variable = self.leaf()

        def read() -> Any:
            return variable

        def write(value: Any) -> None:
            nonlocal variable
            variable = value

        node = Node(read, ["num({}())"])
        node.changes.append(("set a closure variable", lambda: write(self.leaf())))
        return node

    def make_default(self, depth: int) -> Node:
        cell = [self.leaf()]

        def function(x: Any = cell) -> Any:
            return x[0]

        node = Node(function, ["num({}())"])
        node.changes.append(("change a default in place", lambda: cell.__setitem__(0, self.leaf())))
        node.changes.append(
            ("replace the defaults", lambda: setattr(function, "__defaults__", ([self.leaf()],)))
        )
        return node

    def make_global(self, depth: int) -> Node:
        name = "G" + self.name()
        scope: dict[str, Any] = {name: self.leaf(), "__name__": "globals_of_a_program"}
        exec(f"def read(): return {name}", scope)
        node = Node(scope["read"], ["num({}())"])
        node.changes.append(("set a global", lambda: scope.update({name: self.leaf()})))
        return node

    def make_variable_of_context(self, depth: int) -> Node:
        variable: contextvars.ContextVar[Any] = contextvars.ContextVar("variable")
        variable.set(self.leaf())
        node = Node(variable, ["num({}.get())"])
        node.changes.append(("set a context variable", lambda: variable.set(self.leaf())))
        return node

    # --- containers --------------------------------------------------------------------------------------------------------

    def mapping(self, depth: int, make: Callable[[dict[str, Any]], tuple[Any, Any]]) -> Node:
        items = self.items(depth)
        table, value = make({k: v.value if isinstance(v, Node) else v for k, v in items.items()})
        node = Node(value)
        for name, item in items.items():
            if isinstance(item, Node):
                node.children.append((f"{{}}[{name!r}]", item))
            else:
                node.reads.append(f"num({{}}[{name!r}])")
                node.changes.append((f"set [{name}]", lambda name=name: table.__setitem__(name, self.leaf())))
                node.changes.append(
                    (f"move [{name}]", lambda name=name: table.__setitem__(name, table.pop(name)))
                )
        node.reads.append("in_order({}.values())")
        node.reads.append("in_order({})")
        node.reads.append("num({}.get('zz'))")
        node.changes.append(("add an entry", lambda: table.__setitem__("zz", self.leaf())))
        return node

    def make_dict(self, depth: int) -> Node:
        return self.mapping(depth, lambda items: (items, items))

    def make_ordered(self, depth: int) -> Node:
        node = self.mapping(depth, lambda items: (o := OrderedDict(items), o))
        node.changes.append(("move_to_end", lambda: node.value.move_to_end(next(iter(node.value)))))
        return node

    def make_default_dict(self, depth: int) -> Node:
        return self.mapping(depth, lambda items: (d := defaultdict(int, items), d))

    def make_user_dict(self, depth: int) -> Node:
        return self.mapping(depth, lambda items: (d := UserDict(items), d))

    def make_dict_of_ones_own(self, depth: int) -> Node:
        return self.mapping(depth, lambda items: (d := type("Table", (dict,), {})(items), d))

    def make_chain(self, depth: int) -> Node:
        return self.mapping(depth, lambda items: (items, ChainMap({}, items)))

    def make_proxy(self, depth: int) -> Node:
        return self.mapping(depth, lambda items: (items, types.MappingProxyType(items)))

    def sequence(self, depth: int, make: Callable[[list[Any]], Any]) -> Node:
        items = [self.leaf() for _ in range(3)]
        value = make(items)
        node = Node(value, ["num({}[0])", "in_order({})", "num(len({}))"])
        node.changes.append(("set [0]", lambda: value.__setitem__(0, self.leaf())))
        node.changes.append(("append", lambda: value.append(self.leaf())))
        node.changes.append(("reverse", lambda: value.reverse()))
        return node

    def make_list(self, depth: int) -> Node:
        return self.sequence(depth, list)

    def make_deque(self, depth: int) -> Node:
        return self.sequence(depth, deque)

    def make_user_list(self, depth: int) -> Node:
        return self.sequence(depth, UserList)

    def make_list_of_ones_own(self, depth: int) -> Node:
        return self.sequence(depth, type("Row", (list,), {}))

    def make_tuple(self, depth: int) -> Node:
        inner = self.node(depth - 1) if depth > 0 else Node(2.0)
        return Node((self.leaf(), inner.value), ["num({}[0])"], [("{}[1]", inner)] if depth > 0 else [])

    def make_set(self, depth: int) -> Node:
        value = {1, 5.0}
        node = Node(value, ["in_order(sorted({}, key=repr))", "num(3 in {})", "in_order({})"])
        node.changes.append(("add to a set", lambda: value.add(3)))
        node.changes.append(("replace in a set", lambda: (value.discard(1), value.add(1.0))))
        return node

    def make_numbers(self, depth: int) -> Node:
        make = self.chance.choice([lambda: np.array([1.0, 2.0]), lambda: array.array("d", [1.0, 2.0])])
        value = make()
        node = Node(value, ["num(float({}[0]))"])
        node.changes.append(("set a number", lambda: value.__setitem__(0, self.chance.choice(NUMBERS))))
        return node

    def make_bytes(self, depth: int) -> Node:
        value = bytearray(b"abc")
        node = Node(value, ["num({}[0])", "num(bytes({}))"])
        node.changes.append(("set a byte", lambda: value.__setitem__(0, self.chance.randrange(256))))
        return node

    def make_weak(self, depth: int) -> Node:
        inner = self.with_attributes(type("Target", (), {})(), 0)
        return Node(weakref.ref(inner.value), [], [("{}()", inner)])

    def make_layers(self, depth: int) -> Node:
        layers = [Scaled(self.chance.choice(NUMBERS)) for _ in range(3)]
        kind = self.chance.choice([nn.ModuleList, nn.Sequential])
        value = kind(layers) if kind is nn.ModuleList else kind(*layers)
        node = Node(value, ["in_order(layer.scale for layer in {})", "num({}[0].scale)", "num({}.training)"])
        node.changes.append(("scale of a layer", lambda: setattr(layers[0], "scale", self.leaf())))
        node.changes.append(("another order", lambda: setattr(value, "_modules", _reordered(value._modules))))
        node.changes.append(("eval", lambda: value.train(not value.training)))
        node.changes.append(("scale of the class", lambda: setattr(layers[1], "scale", self.leaf())))
        return node


class Scaled(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale


class Descriptor:
    def __init__(self, content: Any) -> None:
        self.content = content

    def __get__(self, owner: Any, kind: Any = None) -> Any:
        return self.content


class Extra:
    def __init__(self, extra: dict[str, Any]) -> None:
        object.__setattr__(self, "extra", extra)

    def __getattr__(self, name: str) -> Any:
        try:
            return object.__getattribute__(self, "extra")[name]
        except KeyError:
            raise AttributeError(name) from None


def _reordered(table: dict[str, Any]) -> dict[str, Any]:
    return dict(zip(table, reversed(table.values()), strict=True))


def _put_plain(module: nn.Module, name: str, value: Any) -> None:
    """Sub-modules among the attributes of a module stay plain attributes: their names may be any."""
    object.__setattr__(module, name, value) if isinstance(value, nn.Module) else setattr(module, name, value)


def _setter(maker: Maker, owner: Any, name: str) -> Callable[[], None]:
    return lambda: setattr(owner, name, maker.leaf())


class Program:
    """A random program: `build(self, x)`, the root object that it reads from, and the changes."""

    def __init__(self, seed: int) -> None:
        chance = random.Random(seed)
        maker = Maker(chance)
        root = maker.node(3)
        while not (reads := _paths(root, "{}")):
            root = maker.node(3)
        chosen = chance.sample(reads, min(len(reads), 8))
        places = ["ROOT", "root"] if isinstance(root.value, nn.Module) else ["self.root", "ROOT", "root"]
        place = chance.choice(places)  # a module in a graph is a Block, which has no __dict__
        lines = [f"    total = total * 0.5 + {path.replace('{}', place)}" for path in chosen]
        body = "\n".join(["def build(self, x):", "    total = 0.0", *lines, "    return x + total"])
        if place == "root":  # a variable of a closure
            body = (
                "def outer(root):\n    "
                + body.replace("\n", "\n    ")
                + "\n    return build\nbuild = outer(ROOT)"
            )
        self.source, self.root = body, root.value
        scope: dict[str, Any] = {
            "num": num,
            "in_order": in_order,
            "ROOT": root.value,
            "__name__": "a_program",
        }
        scope["asdict"] = __import__("dataclasses").asdict
        exec(compile(body, f"/program_{seed}.py", "exec"), scope)
        self.build = scope["build"]
        self.changes = [change for node in _nodes(root) for change in node.changes]
        self.chance = chance

    def some_changes(self, count: int) -> list[tuple[str, Callable[[], Any]]]:
        """Random changes, in a random order."""
        return [self.chance.choice(self.changes) for _ in range(count)] if self.changes else []


def _paths(node: Node, path: str) -> list[str]:
    found = [read.replace("{}", path) for read in node.reads]
    for step, child in node.children:
        found += _paths(child, f"({step.replace('{}', path)})")
    return found


def _nodes(node: Node) -> list[Node]:
    return [node, *(item for _, child in node.children for item in _nodes(child))]


_ = torch
