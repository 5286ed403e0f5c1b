"""Which values of a program share memory."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from torch import fx

from monograph.compat.distributed.ops import waits
from monograph.ir.call.nested import leaves_in
from monograph.ir.memory import shown_values
from monograph.ir.meta import TensorMeta, output_nodes, value
from monograph.ir.ops.fused import written_over
from monograph.ir.program import Program
from monograph.plan.workspace import result_bytes


@dataclass(frozen=True, slots=True, eq=False)
class Storage:
    """A piece of memory: that of an input, or of a result of an op. `index` tells the results of one op apart.

    It is equal to itself alone: another walk over the program makes others.
    """

    maker: str
    index: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Shown:
    """The memory of a tensor, and memory that it may alias besides, if its op does not say."""

    certain: frozenset[Storage]
    possible: frozenset[Storage]


Form = Shown | tuple["Form", ...] | None  # None for numbers; a tuple for several results
_NOTHING: frozenset[Storage] = frozenset()


@dataclass(frozen=True)
class Aliases:
    """By name of a value its memory; a value of several tensors has that of all of them."""

    certain: Mapping[str, frozenset[Storage]]
    possible: Mapping[str, frozenset[Storage]]  # the certain ones among them
    outputs: tuple[Form, ...]
    views: frozenset[str]  # ops that only alias memory, and read none


def aliases(program: Program, into: Mapping[str, str] = MappingProxyType({})) -> Aliases:
    """Follow memory from the inputs through views to the outputs; `into` has what ops write over, by their names."""
    walk = _Walk({part.name: (part, aliases(part)) for part in program.parts}, into)
    for node in program.graph.nodes:
        if node.op != "output":
            walk.add(node)
    outputs = [
        walk.forms[item] if isinstance(item, fx.Node) else None for item in output_nodes(program.graph)
    ]
    return Aliases(walk.certain, walk.possible, tuple(outputs), frozenset(walk.views))


@dataclass
class _Walk:
    """Visits nodes in order. An op of unknown kind may alias any of its arguments, and has memory of its own too."""

    parts: Mapping[str, tuple[Program, Aliases]]
    into: Mapping[str, str]
    forms: dict[fx.Node, Form] = field(default_factory=dict)
    certain: dict[str, frozenset[Storage]] = field(default_factory=dict)
    possible: dict[str, frozenset[Storage]] = field(default_factory=dict)
    views: list[str] = field(default_factory=list)
    named: dict[str, fx.Node] = field(default_factory=dict)

    def add(self, node: fx.Node) -> None:
        """Find out what `node` shows."""
        self.named[node.name] = node
        form = self.forms[node] = self._form(node)
        if isinstance(form, Shown):
            self.certain[node.name], self.possible[node.name] = form.certain, form.possible
            return
        leaves = [leaf for leaf in leaves_in(form) if leaf is not None]
        self.certain[node.name] = _NOTHING.union(*[leaf.certain for leaf in leaves])
        self.possible[node.name] = _NOTHING.union(*[leaf.possible for leaf in leaves])

    def _form(self, node: fx.Node) -> Form:
        described = value(node)
        if node.op == "placeholder" or node.op == "get_attr":
            return _fresh(node, described)
        if node.op == "call_module" and node.target in self.parts:
            return self._part(node)
        if node.name in self.into:
            return self._written(node)
        if node.target is operator.getitem:
            return self._item(node)
        shown = shown_values(node)
        if shown is None:
            others = (self.possible[needed.name] for needed in node.all_input_nodes)
            return _fresh(node, described, _NOTHING.union(*others))
        if not any(shown):
            return _fresh(node, described)
        if all(shown) and not waits(node.target):  # until then there is nothing to be seen
            self.views.append(node.name)
        results = tuple(map(self._bases_of, shown))
        if len(shown) > 1:
            return _each(node, results, described)
        return _mapped(described, lambda _meta: results[0])

    def _bases_of(self, nodes: Iterable[fx.Node]) -> Shown:
        certain = _NOTHING.union(*(self.certain[node.name] for node in nodes))
        return Shown(certain, certain.union(*(self.possible[node.name] for node in nodes)))

    def _written(self, node: fx.Node) -> Form:
        """The memory that an op writes over: of one value, or of lists of them."""
        over = written_over(node)
        return self._bases_in(self.named[self.into[node.name]] if over is None else over)

    def _bases_in(self, over: Any) -> Form:
        if isinstance(over, tuple):
            return tuple(map(self._bases_in, over))
        return self._bases_of([over])

    def _item(self, node: fx.Node) -> Form:
        """One of several results, or a slice of them."""
        source, index = node.args
        form = self.forms.get(source) if isinstance(source, fx.Node) else None
        if not isinstance(form, tuple):
            return None
        self.views.append(node.name)
        return form[index]  # type: ignore[index]

    def _part(self, node: fx.Node) -> Form:
        """What a part returns: arguments of the call, or memory made inside."""
        part, inside = self.parts[str(node.target)]
        inputs = part.graph.find_nodes(op="placeholder")
        given: dict[Storage, Shown] = {}
        for item, argument in zip(inputs, node.args, strict=True):
            shown = self._bases_of([argument] if isinstance(argument, fx.Node) else [])
            given |= dict.fromkeys(inside.certain[item.name], shown)
        return _Returned(node.name, given).renamed(inside.outputs)


@dataclass
class _Returned:
    """Memory as a part names it, by the names of its caller."""

    call: str
    given: Mapping[Storage, Shown]
    made: dict[Storage, Storage] = field(default_factory=dict)

    def renamed(self, form: Form) -> Form:
        """What the call shows where the part shows `form`."""
        if isinstance(form, tuple):
            return tuple(map(self.renamed, form))
        if form is None:
            return None
        certain = _NOTHING.union(*(self._outside(item).certain for item in _in_order(form.certain)))
        possible = (self._outside(item).possible for item in _in_order(form.possible))
        return Shown(certain, certain.union(*possible))

    def _outside(self, storage: Storage) -> Shown:
        if storage in self.given:
            return self.given[storage]
        new = Storage(self.call, len(self.made), storage.nbytes)
        own = frozenset({self.made.setdefault(storage, new)})
        return Shown(own, own)


def _in_order(storages: frozenset[Storage]) -> list[Storage]:
    return sorted(storages, key=lambda item: (item.maker, item.index))


def _fresh(node: fx.Node, described: Any, others: frozenset[Storage] = _NOTHING) -> Form:
    """New memory for each tensor of a result, which may show `others` instead."""
    numbers = itertools.count()

    def made(meta: TensorMeta) -> Shown:
        number = next(numbers)
        own = frozenset({Storage(node.name, number, result_bytes(node, number, meta))})
        return Shown(own, own | others if others else own)

    return _mapped(described, made)


def _each(node: fx.Node, results: tuple[Shown, ...], described: Any) -> Form:
    """Several results of which some are views and others new."""
    fresh = _fresh(node, described)
    assert isinstance(fresh, tuple)
    return tuple(
        result if isinstance(form, Shown) and result.possible else form
        for result, form in zip(results, fresh, strict=True)
    )


def _mapped(described: Any, made: Callable[[TensorMeta], Shown]) -> Form:
    if isinstance(described, tuple):
        return tuple(_mapped(item, made) for item in described)
    return made(described) if isinstance(described, TensorMeta) else None
