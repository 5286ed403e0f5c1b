"""A run of a plan without data: which value is in which block of memory, and who overwrites what when."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from typing import Any, Final

import torch
from torch import fx

from monograph.compat.distributed.ops import communicates, reads_until_awaited, waits
from monograph.distributed.programs.collectives import has_a_copy
from monograph.errors import PlanError
from monograph.ir.call.nested import leaves_in
from monograph.ir.meta import TensorMeta, metas, value
from monograph.ir.ops.fused import left_as_they_are, written_over
from monograph.plan.evaluate import Probe, tensor_arguments
from monograph.plan.plan import Plan

_COPY: Final = torch.ops.aten.copy.default


@dataclass(eq=False, slots=True)
class Block:
    """A piece of memory: whose it is, how many tensors hold it, and who wrote into it last."""

    nbytes: int
    of_caller: bool = False
    holders: int = 0
    writer: str | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """A block as a tensor shows it: with what its `writer` left there."""

    block: Block
    writer: str | None


@dataclass(frozen=True, slots=True)
class View:
    """A tensor: the place where it is, and others where it may be instead."""

    place: Place
    others: tuple[Place, ...] = ()

    def places(self) -> tuple[Place, ...]:
        """All of them."""
        return (self.place, *self.others)


Tensors = list[View]  # of one value, in order


@dataclass
class Simulation:
    """Acts a plan out. Raises PlanError at a read of what is gone, or of memory that was written meanwhile."""

    plan: Plan
    probe: Probe
    parts: Mapping[str, Simulation]
    inputs: list[Tensors] = field(default_factory=list)
    outputs: list[Tensors] = field(default_factory=list)
    held_bytes: int = 0
    peak_bytes: int = 0

    def __post_init__(self) -> None:
        self._values: dict[str, Tensors] = {}
        self._results: dict[str, list[Tensors]] = {}  # of a value that is a list, one by one
        self._writes: dict[str, list[int]] = {}
        self._coming: dict[Block, str] = {}  # what a collective is still to leave there
        self._sent: dict[str, Tensors] = {}  # what collectives go on reading, by their names
        self._copied: set[str] = set()  # those of them that read a copy
        for index, place in self.plan.in_place.items():
            self._writes.setdefault(place.early, []).append(index)

    def act(self) -> Simulation:
        """Run node by node, and return."""
        for node in self.plan.program.graph.nodes:
            if node.op != "output":
                for needed in node.all_input_nodes:
                    self._find(needed, node.name)
                self._run(node)
        results: Any = self.plan.program.graph.output_node().args[0]
        for index, item in enumerate(results):
            is_held = isinstance(item, fx.Node) and index not in self.plan.written
            self.outputs.append(self._read(item, "the caller") if is_held else [])
        for index in self.plan.written:
            self._check_written(index)
        for node_name in self._writes:
            raise PlanError(f"new state is to be written after {node_name}, which never runs")
        for node_name in self._coming.values():
            raise PlanError(f"nothing waits for {node_name}, a collective")
        return self

    def _run(self, node: fx.Node) -> None:
        before = self.held_bytes
        made = self._values[node.name] = self._made(node)
        if node.op == "placeholder":
            self.inputs.append(made)
        for view in made:
            self._hold(view.place.block)
        self._communicate(node, made)
        inside = self.parts[str(node.target)].peak_bytes if node.op == "call_module" else 0
        self.peak_bytes = max(self.peak_bytes, self.held_bytes, before + inside)
        for name in self.plan.frees.get(node.name, ()):
            self._free(name, node.name)
        for index in self._writes.pop(node.name, ()):
            self._write(index, node.name)

    def _communicate(self, node: fx.Node, made: Tensors) -> None:
        """A collective begins, or is done: until then what it is given stays as it is, and what it makes is not there."""
        if waits(node.target):
            for block in (view.place.block for view in made):
                if (collective := self._coming.pop(block, None)) is None:
                    raise PlanError(f"{node.name} waits for what no collective makes")
                self._check_sent(collective, node.name)
        elif communicates(node.target):
            self._coming |= {view.place.block: node.name for view in made}
            if reads_until_awaited(node.target):
                arguments = dict.fromkeys(tensor_arguments(node))
                self._sent[node.name] = [view for item in arguments for view in self._values[item.name]]
                self._copied |= {node.name} if has_a_copy(node) else set()

    def _check_sent(self, collective: str, wait: str) -> None:
        for place in (place for view in self._sent.get(collective, ()) for place in view.places()):
            if place.block.writer != place.writer:
                raise PlanError(
                    f"{place.block.writer} has overwritten what {collective} reads until {wait} is done"
                )
            if not (place.block.holders or place.block.of_caller or collective in self._copied):
                raise PlanError(f"what {collective} reads until {wait} is done is freed before")

    # --- what a node makes ---------------------------------------------------------------------------------------

    def _made(self, node: fx.Node) -> Tensors:
        described = value(node)
        if node.op in ("placeholder", "get_attr"):
            return [View(Place(Block(_nbytes(meta), of_caller=True), None)) for meta in metas(described)]
        if node.op == "call_module":
            return self._called(node)
        if node.target is operator.getitem:
            return self._item(node)
        if node.name in self.plan.into:
            return self._written_over(node)
        forms = list(metas(described))
        sharing = self.probe.sharing(node) if forms else ()
        if not (forms and sharing and all(sharing)):  # a view reads nothing, and shows what its source shows
            self._read_all(node)
        if sharing is not None and not any(sharing):
            return [View(_new(meta)) for meta in forms]
        arguments = [view for item in tensor_arguments(node) for view in self._values[item.name]]
        if sharing is None:
            others = tuple(place for view in arguments for place in view.places())
            return [View(_new(meta), others) for meta in forms]
        return [
            _together([arguments[index] for index in sorted(shown)]) if shown else View(_new(meta))
            for meta, shown in zip(forms, sharing, strict=True)
        ]

    def _item(self, node: fx.Node) -> Tensors:
        """One of several results, or a slice of them."""
        source, index = node.args
        described = value(source) if isinstance(source, fx.Node) else None
        if not isinstance(source, fx.Node) or not isinstance(described, tuple):
            return []
        results = self._results.get(source.name)
        if results is None:
            left = iter(self._values[source.name])
            results = [list(islice(left, len(list(metas(item))))) for item in described]
            self._results[source.name] = results
        if isinstance(index, slice):
            return [view for tensors in results[index] for view in tensors]
        return results[int(index)]  # type: ignore[arg-type]

    def _written_over(self, node: fx.Node) -> Tensors:
        """What an op makes that writes over one of its arguments, or over lists of them."""
        over = self._values.get(self.plan.into[node.name], [])
        if node.target is _COPY and over:  # of what an op has left there: nothing runs
            made = self._read(node.all_input_nodes[-1], node.name)
            if [view.place.block for view in made] == [view.place.block for view in over]:
                return made
        several = written_over(node)
        for needed in node.all_input_nodes:
            if node.target is not _COPY or needed.name != self.plan.into[node.name]:
                self._read(needed, node.name)
        if several is not None:
            return self._several_written_over(node, list(leaves_in(several)))
        if len(over) != 1:
            raise PlanError(
                f"{node.name} is to write over {self.plan.into[node.name]}, which is not there alone"
            )
        source = next(item for item in node.all_input_nodes if item.name == self.plan.into[node.name])
        return [self._overwritten(node, source, over[0])]

    def _several_written_over(self, node: fx.Node, items: list[fx.Node]) -> Tensors:
        """The same of lists, of which an op may leave some as they are."""
        left = left_as_they_are(node)
        views = [(item, view) for item in items for view in self._find(item, node.name)]
        blocks = [view.place.block for item, view in views if item not in left]
        if len(set(blocks)) != len(blocks):
            raise PlanError(f"{node.name} is to write over memory twice")
        return [view if item in left else self._overwritten(node, item, view) for item, view in views]

    def _overwritten(self, node: fx.Node, source: fx.Node, view: View) -> View:
        """What is left in the memory of a value that fills a block, or is a part of one of the caller's."""
        block = view.place.block
        sizes = {_nbytes(meta) for meta in metas(value(node))}
        held = block.nbytes
        if block.of_caller:
            held = max(map(_nbytes, metas(value(source))))
        if view.others or held not in sizes:
            raise PlanError(f"{node.name} does not fit into what it is to write over")
        block.writer = node.name
        return View(Place(block, node.name))

    def _called(self, node: fx.Node) -> Tensors:
        """What a part returns: what it was given, or new memory."""
        self._read_all(node)
        part = self.parts[str(node.target)]
        found: dict[Block, tuple[Place, ...]] = {}
        for inner, argument in zip(part.inputs, node.args, strict=True):
            outer = self._values[argument.name] if isinstance(argument, fx.Node) else []
            for within, view in zip(inner, outer, strict=True):
                found[within.place.block] = view.places()

        def outside(place: Place) -> tuple[Place, ...]:
            if place.block not in found:
                found[place.block] = (Place(Block(place.block.nbytes), None),)
            return found[place.block]

        made = []
        for view in (item for output in part.outputs for item in output):
            first, *others = (item for place in view.places() for item in outside(place))
            made.append(View(first, tuple(others)))
        return made

    # --- what happens to values ----------------------------------------------------------------------------------

    def _find(self, node: fx.Node, reader: str) -> Tensors:
        if node.name not in self._values:
            raise PlanError(f"{reader} reads {node.name}, which is not there")
        return self._values[node.name]

    def _read(self, node: fx.Node, reader: str) -> Tensors:
        tensors = self._find(node, reader)
        for view in tensors:
            for place in (view.place, *view.others) if view.others else (view.place,):
                if place.block in self._coming:
                    raise PlanError(f"{reader} reads {node.name} before {self._coming[place.block]} is done")
                if place.block.writer != place.writer:
                    raise PlanError(
                        f"{reader} reads {node.name}, whose memory {place.block.writer} has overwritten"
                    )
        return tensors

    def _read_all(self, node: fx.Node) -> None:
        for needed in node.all_input_nodes:
            self._read(needed, node.name)

    def _hold(self, block: Block) -> None:
        if not block.holders and not block.of_caller:
            self.held_bytes += block.nbytes
        block.holders += 1

    def _free(self, name: str, after: str) -> None:
        if name not in self._values:
            raise PlanError(f"{name} is freed after {after}, but it is not there")
        self._results.pop(name, None)
        for view in self._values.pop(name):
            block = view.place.block
            block.holders -= 1
            if not block.holders and not block.of_caller:
                self.held_bytes -= block.nbytes

    def _check_written(self, index: int) -> None:
        """The memory of a piece of state holds its new value at the end."""
        program = self.plan.program
        nodes = program.graph.find_nodes(op="placeholder")
        path = program.outputs[index].path
        places = [place for place, port in enumerate(program.inputs) if port.path == path]
        new: Any = program.graph.output_node().args[0][index]  # type: ignore[index]
        blocks = [view.place.block for place in places for view in self.inputs[place]]
        if len(blocks) != 1 or not isinstance(new, fx.Node) or blocks[0].writer not in self._same_as(new):
            raise PlanError(
                f"output {index}, {path}, is not in the memory of {nodes[places[0]].name if places else 'an input'}"
            )

    def _same_as(self, node: fx.Node) -> set[str]:
        """The names of a value: those of what takes it out of a list, too."""
        names = {node.name}
        while node.target in (operator.getitem, _COPY):
            node = node.all_input_nodes[-1]
            names.add(node.name)
        return names

    def _write(self, index: int, after: str) -> None:
        """Copy an output into the memory of the input that it replaces."""
        place = self.plan.in_place[index]
        new = self.plan.program.graph.output_node().args[0][index]  # type: ignore[index]
        old = self._values.get(place.input)
        if not isinstance(new, fx.Node) or not old:
            raise PlanError(f"output {index} is to be written into {place.input}, which is not there")
        self._read(new, f"the write into {place.input} after {after}")
        block = old[0].place.block
        if block.writer is not None:
            raise PlanError(
                f"the memory of {place.input} is written twice, for {block.writer} and for {new.name}"
            )
        block.writer = new.name


def _together(sights: list[View]) -> View:
    """A tensor that shows all of these."""
    first, *others = (place for view in sights for place in view.places())
    return View(first, tuple(others))


def _new(meta: TensorMeta) -> Place:
    return Place(Block(_nbytes(meta)), None)


def _nbytes(meta: TensorMeta) -> int:
    return _held(tuple(map(int, meta.shape)), tuple(map(int, meta.stride)), meta.dtype)


@lru_cache(maxsize=1000)
def _held(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> int:
    return int(torch.empty_strided(shape, stride, dtype=dtype, device="meta").untyped_storage().nbytes())
