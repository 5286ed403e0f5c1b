"""Where the inputs of a program come from at each call, and where its outputs go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Self

import torch

from monograph.ir.call.tree import Tree, unflatten
from monograph.ir.meta import ScalarMeta, value
from monograph.ir.probes import ProbeLog
from monograph.ir.program import Program


@dataclass(frozen=True)
class Bindable:
    """A record of where a program begins or ends: the objects in it may be replaced by others of the same form."""


@dataclass(frozen=True)
class Fixed(Bindable):
    """An input that is the same object at each call: a state tensor, a captured tensor, a generator."""

    value: Any


@dataclass(frozen=True)
class Argument:
    """An input that is leaf `index` of the call's arguments."""

    index: int


@dataclass(frozen=True)
class Number(Bindable):
    """An input that is read in Python: `container[key]`, or `container[key][index]` for tuples like betas."""

    container: Any
    key: Any
    index: int | None = None

    def read(self) -> Any:
        """The present value."""
        value = self.container[self.key]
        return value if self.index is None else value[self.index]


@dataclass(frozen=True)
class Counted(Number):
    """A number in a Python object that the step itself moves: what it becomes is among the writes."""


@dataclass(frozen=True)
class HeldGradient(Bindable):
    """An input that is the gradient which a parameter has when the step begins."""

    parameter: torch.Tensor


@dataclass(frozen=True)
class CopyToGradient(Bindable):
    """An output that is copied into the gradient of a parameter: backward() added to it."""

    parameter: torch.Tensor


@dataclass(frozen=True)
class Between:
    """An input or output that one subgraph of a program hands to another: no caller sees it."""


Source = Fixed | Argument | Number | HeldGradient | Between


@dataclass(frozen=True)
class Copy(Bindable):
    """An output that is copied into a state tensor."""

    tensor: torch.Tensor


@dataclass(frozen=True)
class CopyToArgument:
    """An output that is copied into leaf `index` of the arguments: build() changed it in place."""

    index: int
    requires_grad: bool = False  # what build() put into it does, so that it is no leaf any more


@dataclass(frozen=True)
class Assign(Bindable):
    """An output that becomes `container[key]`: new optimizer state, a module attribute, a counter."""

    container: Any
    key: Any
    requires_grad: bool = False  # what build() put there does
    argument: int | None = None  # build() put this leaf of the arguments there, itself
    tensor: torch.Tensor | None = None  # build() put this tensor of the state there, itself
    live: LiveView | None = None  # the output shows what the step writes into this tensor


@dataclass(frozen=True)
class AssignPart(Bindable):
    """An output that is what this process has of a DTensor, which becomes `container[key]`; `around` makes it of that."""

    container: Any
    key: Any
    around: Callable[[torch.Tensor], Any]


@dataclass(frozen=True)
class OptimizerEntries(Bindable):
    """The state of one parameter in an optimizer; it may not exist before it is assigned to."""

    optimizer: torch.optim.Optimizer
    owner: Any

    def __setitem__(self, key: str, value: Any) -> None:
        self.optimizer.state[self.owner][key] = value


@dataclass(frozen=True)
class Gradient(Bindable):
    """An output that becomes `tensor.grad`; for an argument (by index) it is added to what is there.

    Of what this process has of a DTensor `around` makes that.
    """

    tensor: torch.Tensor | None
    index: int = -1
    layout: Any = None  # of a gradient that is a DTensor, of which the output is a part


@dataclass(frozen=True)
class Part(Bindable):
    """An output that is one leaf of a nested value; with its last tensor the value becomes `container[key]`."""

    container: Any
    key: Any
    tree: Tree
    leaves: list[Any]  # shared by the parts of one value
    index: int
    last: bool
    tensor: torch.Tensor | None = None  # build() put this tensor of the state there, itself
    live: LiveView | None = None  # the output shows what the step writes into this tensor

    def deliver(self, output: Any) -> None:
        """Put the leaf in its place."""
        output = output if self.tensor is None else self.tensor
        self.leaves[self.index] = output
        if self.last:
            self.container[self.key] = unflatten(self.tree, iter(self.leaves))


@dataclass(frozen=True)
class Recorded:
    """An output that a probe keeps."""

    log: ProbeLog
    path: str


@dataclass(frozen=True)
class ReadAfter:
    """An output that Python reads a number out of once the step has run. Expressions know it by `name`."""

    name: str


Target = (
    Copy
    | CopyToArgument
    | CopyToGradient
    | Assign
    | AssignPart
    | Gradient
    | Part
    | Recorded
    | ReadAfter
    | Between
)


MOVES: Final = " (a number that moves)"


@dataclass(frozen=True)
class Write(Bindable):
    """A plain value that a step puts into `container[key]`, or the expression that computes it."""

    container: Any
    key: Any
    value: Any
    about: str  # "model.mode ('a' to 'b')"
    moves: bool = False  # the value is an expression


@dataclass(frozen=True)
class LiveView(Bindable):
    """A view of a tensor that the step writes, from `distance` of its own elements after its beginning."""

    target: Copy | CopyToArgument
    size: tuple[int, ...]
    stride: tuple[int, ...]
    distance: int
    dtype: torch.dtype | None = None  # another one than that of the tensor
    conjugated: bool = False  # by a bit, if the tensor is not, and the other way round
    negated: bool = False

    @property
    def is_strided(self) -> bool:
        """True if sizes, strides and the distance say all of it."""
        return self.dtype is None and not (self.conjugated or self.negated)


@dataclass(frozen=True)
class Result(Bindable):
    """A leaf of what the call returns: an output of the program, an argument, or a fixed object."""

    kind: str  # "output", "argument" or "fixed"; in a refill also "container"
    index: int = -1
    value: Any = None
    requires_grad: bool = False
    live: LiveView | None = None  # the output shows what the step writes into this tensor


@dataclass(frozen=True)
class Refill(Bindable):
    """What a step leaves in one container among its arguments: its items, or its attributes."""

    container: int  # its position among those of the call
    path: str
    keys: tuple[Any, ...]
    tree: Tree  # of the list of values
    results: tuple[Result, ...]  # their leaves; one of kind "container" is another container of the call
    put: Callable[[Any, Sequence[Any], Sequence[Any]], None]  # lets the container hold values under keys


@dataclass(frozen=True)
class ArgumentChanges(Bindable):
    """What a step leaves in its arguments besides the values of tensors, by the leaf's index."""

    refills: tuple[Refill, ...] = ()
    requires_grad: tuple[tuple[int, bool], ...] = ()
    resized: tuple[tuple[int, tuple[int, ...]], ...] = ()  # empty tensors that get a size

    def __bool__(self) -> bool:
        return bool(self.refills or self.requires_grad or self.resized)


@dataclass(frozen=True)
class BoundProgram:
    """A program, and what its inputs and outputs are bound to at each call."""

    program: Program
    sources: tuple[Source, ...]  # of the inputs
    targets: tuple[Target, ...]  # of the outputs after the results
    writes: tuple[Write, ...]
    results: tuple[Result, ...]  # the leaves of what the call returns
    result_tree: Tree
    changes: ArgumentChanges = field(default_factory=ArgumentChanges, kw_only=True)

    @property
    def held_tensors(self) -> list[torch.Tensor]:
        """The tensors that the step finds by itself, wherever they are kept: state, and others from outside."""
        fixed = (source.value for source in self.sources if isinstance(source, Fixed))
        return [item for item in fixed if isinstance(item, torch.Tensor)]

    @property
    def takes_numbers(self) -> bool:
        """True if it computes with numbers that may be others in the next step."""
        inputs = self.program.graph.find_nodes(op="placeholder")
        return any(isinstance(value(node), ScalarMeta) for node in inputs) or any(
            write.moves for write in self.writes
        )

    @property
    def output_of_each_result(self) -> tuple[int | None, ...]:
        """For each leaf of what a call returns the output of the program that it is; None for what is no output."""
        return tuple(result.index if result.kind == "output" else None for result in self.results)

    def unbound(self) -> Self:
        """The same without what binds it to live tensors."""
        # what steps set stays known
        writes = tuple(replace(write, container={}, value=None) for write in self.writes)
        return replace(self, sources=(), targets=(), writes=writes, results=(), changes=ArgumentChanges())
