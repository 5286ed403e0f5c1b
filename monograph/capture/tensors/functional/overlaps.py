"""What a step writes overlaps nothing else that it is given: it is captured as if nothing overlapped.

A program reads each of its inputs, and writes new values after its last op. That is right for any layout of what is
only read. What is written has to be memory that no other input shares, at capture and at each call.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import torch
from torch import fx

from monograph.capture.tensors.fakes import Input, Inputs
from monograph.compat.ops import named_arguments
from monograph.compat.tensors import may_overlap
from monograph.errors import AliasError, CaptureError
from monograph.ir.call.signature import Call, Spec
from monograph.ir.graph_signature import (
    Argument,
    Copy,
    CopyToArgument,
    CopyToGradient,
    Fixed,
    Gradient,
    HeldGradient,
    Target,
)
from monograph.ir.memory import last_writers, memory_root
from monograph.ir.meta import origin
from monograph.layout import extent
from monograph.sizes.size import varies
from monograph.state.spans import Regions, Span, span
from monograph.state.swap import Swap

_LOOKS_ANYWHERE = (
    torch.ops.aten.as_strided.default,
    torch.ops.aten.as_strided_.default,
    torch.ops.aten.as_strided_copy.default,
    torch.ops.aten.as_strided_scatter.default,
)


@dataclass(frozen=True)
class Piece:
    """Memory that a step is given."""

    name: str
    span: Span
    written: bool
    argument: str = ""  # its path, if it is one


@dataclass(frozen=True)
class _Given:
    """An argument of the step: its position, its path, its bytes, and what the step does with it."""

    index: int
    path: str
    extent: int | None  # None where its sizes vary; it has no gaps then
    written: bool
    adds: bool  # to the gradient that it has
    reaching: bool


@dataclass(frozen=True)
class Apart:
    """What is to be looked at in the arguments of a step that writes none of them."""

    state: frozenset[int]  # the ids of what no argument may be
    plain: Sequence[
        tuple[int, int | None]
    ]  # arguments, by position and with their bytes, if these are known, that must not overlap `written`
    written: Regions


class Overlaps:
    """Where the inputs of one build are, and which of them it writes."""

    def __init__(
        self,
        inputs: Inputs,
        targets: Sequence[Target],
        call: Call,
        reaching: Collection[str],
    ) -> None:
        """`reaching` are the paths of inputs that the step looks beyond: at memory around their own elements."""
        self._met = met = inputs.met  # alive as long as their ids are asked for
        self._without_gradient = {index: call.paths()[index] for index in inputs.asked_for_gradient}
        copied = {id(target.tensor) for target in targets if isinstance(target, Copy)}
        copied_to = {target.index for target in targets if isinstance(target, CopyToArgument)}
        adding = {
            target.index for target in targets if isinstance(target, Gradient) and target.tensor is None
        }
        grown = {id(target.parameter) for target in targets if isinstance(target, CopyToGradient)}
        self._state: list[Piece] = []
        self._given: list[_Given] = []
        self._held: list[tuple[torch.Tensor, str, bool]] = []  # parameters whose gradients are inputs
        self._compared = inputs.compared  # alive as long as their ids are asked for
        self._paths: dict[int, str] = {
            known: f"tensor {index} that build() compares with an argument"
            for index, known in enumerate(self._compared)
        }
        self._unfit: list[str] = []  # what is written, and has two elements in one place
        for item in inputs.items:
            far = item.path in reaching
            match item.source:
                case Fixed(torch.Tensor() as tensor):
                    self._paths[id(tensor)] = item.path
                    written = id(tensor) in copied
                    self._state.append(Piece(item.path, span(tensor, whole=far), written))
                    self._note_unfit(item.path, written, tensor.shape, tensor.stride())
                case Argument(index) if isinstance(item.fake, torch.Tensor):
                    key: Any = call.keys[index]
                    size = None if varies(key.shape) else extent(key.shape, key.stride, key.dtype.itemsize)
                    written, adds = index in copied_to, index in adding
                    if index in met:
                        self._paths[id(met[index])] = "a tensor used in build()"
                    self._given.append(_Given(index, item.path, size, written, adds, far))
                    self._note_unfit(f"argument {item.path}", written, key.shape, key.stride)
                case HeldGradient(parameter):
                    self._held.append((parameter, item.path, id(parameter) in grown))
        self._reaching = frozenset(reaching)
        self._note_regions()
        self._plain = [(given.index, given.extent) for given in self._given if given.extent != 0]
        self._only_reads = not self._held and not any(
            given.written or given.adds or given.reaching for given in self._given
        )

    def without(self, paths: Collection[str]) -> Overlaps:
        """The same without state of these paths, which the step is not given after all."""
        found = copy(self)
        found._paths = {known: path for known, path in self._paths.items() if path not in paths}
        found._state = [piece for piece in self._state if piece.name not in paths]
        found._note_regions()
        return found

    def _note_regions(self) -> None:
        self._written_state = Regions(piece.span for piece in self._state if piece.written)
        self._read_state = Regions(piece.span for piece in self._state if not piece.written)

    def can_bind(self, swap: Swap) -> bool:
        """True if nothing but the elements of the tensors that are replaced is looked at."""
        return not any(self._paths.get(id(old)) in self._reaching for old, _ in swap.tensors())

    def bind(self, swap: Swap) -> None:
        """Know the tensors that have taken the place of others."""
        lying = {self._paths.get(id(old)): span(new) for old, new in swap.tensors()}
        self._state = [
            replace(piece, span=lying[piece.name]) if piece.name in lying else piece for piece in self._state
        ]
        paths = {id(old): self._paths.pop(id(old)) for old, _ in swap.tensors() if id(old) in self._paths}
        self._paths |= {id(new): paths[id(old)] for old, new in swap.tensors() if id(old) in paths}
        self._held = [(swap.of(parameter), path, written) for parameter, path, written in self._held]
        self._note_regions()

    def _note_unfit(self, name: str, written: bool, shape: Sequence[int], strides: Sequence[int]) -> None:
        if written and not varies(shape) and 0 not in shape and may_overlap(shape, strides):
            self._unfit.append(name)

    def state_among(self, call: Call) -> tuple[tuple[int, str], ...]:
        """The arguments that are state themselves, each by its position, with the path of the state."""
        paths = map(self._paths.get, map(id, call.leaves))
        return tuple((index, path) for index, path in enumerate(paths) if path is not None)

    @property
    def apart(self) -> Apart | None:
        """What `hold` and `state_among` look at, if that is all; None if there is more."""
        if not self._only_reads or self._without_gradient:
            return None
        return Apart(frozenset(self._paths), self._plain if self._written_state else (), self._written_state)

    def hold(self, call: Call) -> bool:
        """True if what the step writes overlaps nothing in this call."""
        if any(getattr(call.leaves[index], "grad", None) is not None for index in self._without_gradient):
            return False
        if not self._only_reads:
            return self._lie_apart(list(self._moving(call)))
        leaves, meets = call.leaves, self._written_state.meet
        for index, size in self._plain if self._written_state else ():
            leaf = leaves[index]
            if type(leaf) is Spec:
                continue
            if meets(start := leaf.data_ptr(), start + (leaf.nbytes if size is None else size)):
                return False
        return True

    def _lie_apart(self, moving: Sequence[Piece]) -> bool:
        """`conflict` without a look at each tensor of the state, of which there may be hundreds."""
        return (
            not any(self._written_state.meet(*piece.span) for piece in moving)
            and not any(piece.written and self._read_state.meet(*piece.span) for piece in moving)
            and _first_meeting(moving) is None
        )

    def conflict(self, call: Call) -> tuple[Piece, Piece] | None:
        """Two inputs of this call that overlap, one of which the step writes."""
        return _first_meeting([*self._state, *self._moving(call)])

    def reason(self, call: Call) -> str | None:
        """Why they do not hold for a call, as a sentence."""
        for index, path in self._without_gradient.items():
            if getattr(call.leaves[index], "grad", None) is not None:  # a spec has none
                return f"argument {path} has a gradient, and build() asks for it"
        if (found := self.conflict(call)) is not None:
            return f"{found[0].name} and {found[1].name} share memory, and the step changes it"
        return None

    def check(self, call: Call) -> None:
        """Raise AliasError for memory that is written under one name and given under another too."""
        for name in self._unfit:
            raise AliasError(
                f"{name} shows one place in memory more than once, and the step changes it",
                hint="change a .clone() of it",
            )
        if (found := self.conflict(call)) is None:
            return
        first, second = sorted(found, key=lambda piece: (not piece.argument, piece.name))
        if not first.argument:
            raise AliasError(
                f"{first.name} and {second.name} overlap in memory and the step changes them",
                hint="give each its own memory with .clone(), or tie them as one parameter",
            )
        names = (
            f"arguments {first.argument} and {second.argument}"
            if second.argument
            else f"argument {first.argument} and {second.name}"
        )
        raise AliasError(
            f"{names} share memory, and the step changes it", hint=f"pass a clone of {first.argument}"
        )

    def _moving(self, call: Call) -> Iterator[Piece]:
        """What may be elsewhere in each call."""
        for given in self._given:
            leaf = call.leaves[given.index]
            if type(leaf) is Spec:
                continue
            yield Piece(f"argument {given.path}", span(leaf, whole=given.reaching), given.written, given.path)
            if given.adds and leaf.grad is not None:
                yield Piece(f"the gradient of argument {given.path}", span(leaf.grad), True)
        for parameter, path, written in self._held:
            if parameter.grad is not None:
                yield Piece(path, span(parameter.grad), written)


def looked_beyond(graph: fx.Graph, items: Sequence[Input]) -> set[str]:
    """The paths of the inputs whose memory a recorded step looks at beyond their own elements, by as_strided.

    Raises AliasError for such a one that the step changes: new values of it have memory of their own, which begins
    with them.
    """
    inputs = graph.find_nodes(op="placeholder")
    changed = {inputs[position] for position in last_writers(graph)}
    found = set()
    for node in graph.nodes:
        if node.target not in _LOOKS_ANYWHERE:
            continue
        named = named_arguments(node.target, node.args, node.kwargs)
        root, offset = memory_root(named["self"]), named.get("storage_offset")
        if root.op != "placeholder":
            continue
        own, path = root.meta["val"], items[inputs.index(root)].path
        first = own.storage_offset()
        start = named["self"].meta["val"].storage_offset() if offset is None else offset
        end = start + extent(named["size"], named["stride"], 1)
        dense = torch.ops.aten.is_non_overlapping_and_dense.default(own)
        beyond = not dense or start < first or end > first + own.numel()
        if root in changed and (beyond or (first and offset is not None)):
            raise AliasError(
                f"as_strided looks at the memory of {path}, from which other elements than its own can be seen, "
                "and the step changes it",
                where=origin(node),
                hint="change a .clone() of it",
            )
        if beyond:
            found.add(path)
    return found


def check_own_memory(graph: fx.Graph, items: Sequence[Input]) -> None:
    """Raise CaptureError for `x.set_(y)` on an input: its holder would see other memory from then on."""
    inputs = graph.find_nodes(op="placeholder")
    for node in graph.nodes:
        if getattr(node.target, "overloadpacket", None) is not torch.ops.aten.set_:
            continue
        root = memory_root(node.args[0])
        if root.op == "placeholder":
            raise CaptureError(
                f"build() exchanges the memory of {items[inputs.index(root)].path} by set_()",
                where=origin(node),
                hint="copy_() changes what a tensor holds",
            )


def _first_meeting(pieces: Iterable[Piece]) -> tuple[Piece, Piece] | None:
    open_pieces: list[Piece] = []
    for piece in sorted(pieces, key=attrgetter("span")):
        start, end = piece.span
        if start == end:
            continue
        open_pieces = [other for other in open_pieces if other.span[1] > start]
        for other in open_pieces:
            if piece.written or other.written:
                return other, piece
        open_pieces.append(piece)
    return None
