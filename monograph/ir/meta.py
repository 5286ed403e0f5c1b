"""The customs office: typed access to what `torch.fx` keeps in `node.meta`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import fx

from monograph.compat.ops import looks_at_grad_mode
from monograph.compat.symbolic_numbers import hint_of
from monograph.ir.call.nested import leaves_in
from monograph.ir.call.numbers import exactly
from monograph.layout import Layout, extent
from monograph.sizes.size import Size, varies
from monograph.user_code.lines import Origin

_SHORT = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "b8",
    torch.complex64: "c64",
    torch.complex128: "c128",
}
_NOWHERE = Origin()
UPDATE_PHASE: Final = "update"  # of what optimizers do
_OF_KIND = {"float": torch.float64, "int": torch.int64, "bool": torch.bool}  # of Python's numbers


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """What is known of a tensor without its data."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    stride: tuple[int, ...]
    device: torch.device
    requires_grad: bool = False

    @property
    def layout(self) -> Layout:
        """The layout."""
        return Layout(self.shape, self.stride)

    @property
    def varies(self) -> bool:
        """True if a size or a stride of it varies."""
        return varies(self.shape) or varies(self.stride)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements, with the sizes of the capture; strides with gaps are not counted."""
        return math.prod(map(int, self.shape)) * self.dtype.itemsize

    @property
    def extent(self) -> int:
        """Bytes from the first element to the end of the last, with the sizes of the capture."""
        return extent([*map(int, self.shape)], [*map(int, self.stride)], self.dtype.itemsize)

    def empty(self, device: str | None = None) -> torch.Tensor:
        """A tensor of this form, there or on another device; its elements are not set."""
        return torch.empty_strided(
            [*map(int, self.shape)], [*map(int, self.stride)], dtype=self.dtype, device=device or self.device
        )

    @property
    def is_half(self) -> bool:
        """True for floats of two bytes."""
        return self.dtype in (torch.float16, torch.bfloat16)

    def __str__(self) -> str:
        return f"{_SHORT.get(self.dtype, str(self.dtype).removeprefix('torch.'))}{list(self.shape)}"


@dataclass(frozen=True, slots=True)
class ScalarMeta:
    """A Python number that is computed at run time."""

    kind: str  # "int", "float" or "bool"

    @property
    def as_tensor(self) -> TensorMeta:
        """The tensor without dimensions that compilers take for it."""
        return TensorMeta((), _OF_KIND[self.kind], (), torch.device("cpu"))

    def __str__(self) -> str:
        return self.kind


Value = TensorMeta | ScalarMeta | None


def tensor_meta(tensor: torch.Tensor) -> TensorMeta:
    """The description of a tensor, real or fake."""
    return TensorMeta(
        tuple(map(size_in, tensor.shape)),
        tensor.dtype,
        tuple(map(size_in, tensor.stride())),
        tensor.device,
        tensor.requires_grad,
    )


def size_in(item: Any) -> int:
    """A size of a tensor; one that varies is a `Size`."""
    expression = _expression(item)
    return int(item) if expression is None else Size(hint_of(item), expression)


def is_described(item: Any) -> bool:
    """True for a size that is a number, or computed from sizes of arguments: not from values."""
    return type(item) is int or _expression(item) is not None


def _expression(item: Any) -> Any:
    return None if type(item) is int else getattr(item.node, "expression", None)


def describe(example: Any) -> Value | tuple[Any, ...]:
    """Turn an example value of a trace into its description; sequences keep their form."""
    match example:
        case torch.Tensor():
            return tensor_meta(example)
        case torch.SymBool() | bool():
            return ScalarMeta("bool")
        case torch.SymInt() | int():
            return ScalarMeta("int")
        case torch.SymFloat() | float():
            return ScalarMeta("float")
        case list() | tuple():
            return tuple(describe(item) for item in example)
    return None


def metas(described: Any) -> Iterator[TensorMeta]:
    """The tensors in a description, in order."""
    if isinstance(described, TensorMeta):
        return iter((described,))
    return (item for item in leaves_in(described) if isinstance(item, TensorMeta))


def forget_torch_meta(node: fx.Node) -> None:
    """Replace torch's own entries, which keep fake tensors alive, by our description."""
    described = describe(node.meta.get("val"))
    kept = {key: node.meta[key] for key in ("grad_mode", "labels") if key in node.meta}
    node.meta = {"value": described, "origin": node.meta.get("origin", _NOWHERE)} | kept


def set_value(node: fx.Node, value: Value | tuple[Any, ...]) -> None:
    """Describe what `node` makes."""
    node.meta["value"] = value


def value(node: fx.Node) -> Value | tuple[Any, ...]:
    """The description of what `node` makes: one value, or a tuple for ops with several results."""
    described: Value | tuple[Any, ...] = node.meta.get("value")
    return described


def form(node: fx.Node) -> TensorMeta | None:
    """The tensor that `node` makes, without what autograd noted of it; None for anything else."""
    described = node.meta.get("value")
    if type(described) is not TensorMeta:
        return None
    return described if not described.requires_grad else replace(described, requires_grad=False)


def plain(described: Any) -> Any:
    """A description without what autograd noted."""
    if isinstance(described, TensorMeta):
        return replace(described, requires_grad=False) if described.requires_grad else described
    return tuple(map(plain, described)) if isinstance(described, tuple) else described


def set_origin(node: fx.Node, origin: Origin) -> None:
    """Say where `node` comes from."""
    node.meta["origin"] = origin


def is_late(node: fx.Node) -> bool:
    """True for an op of an update or an average, which comes after the gradients are final."""
    return origin(node).phase in (UPDATE_PHASE, "average")


def write_op(
    graph: fx.Graph, target: Any, args: tuple[Any, ...], made: Any, where: Origin, name: str | None = None
) -> fx.Node:
    """Add an op at the place where a graph is written; `made` describes what it gives."""
    node = graph.create_node("call_function", target, args, {}, name=name)
    set_value(node, made)
    set_origin(node, where)
    return node


def origin(node: fx.Node) -> Origin:
    """Where `node` comes from; an empty Origin if nothing is known."""
    found: Origin = node.meta.get("origin", _NOWHERE)
    return found


def set_grad_mode(node: fx.Node, enabled: bool) -> None:
    """Say in which grad mode `node` has to run; only for ops whose kernel looks at it."""
    node.meta["grad_mode"] = enabled


def grad_mode(node: fx.Node) -> bool | None:
    """The grad mode that `node` has to run in; None if it does not matter."""
    enabled: bool | None = node.meta.get("grad_mode")
    return enabled


def come_from(node: fx.Node, like: fx.Node) -> None:
    """Let `node` have the origin of another one, and the grad mode of that if its kernel looks at it."""
    set_origin(node, origin(like))
    if looks_at_grad_mode(node.target) and (enabled := grad_mode(like)) is not None:
        set_grad_mode(node, enabled)


def add_label(node: fx.Node, label: str) -> None:
    """Say what else the user knows the value of `node` as: the path of a module that returned it, or of a gradient."""
    if label not in labels(node):
        node.meta["labels"] = (*labels(node), label)


def labels(node: fx.Node) -> tuple[str, ...]:
    """What the user knows the value of `node` as; only as captured, since passes put other nodes in its place."""
    found: tuple[str, ...] = node.meta.get("labels", ())
    return found


def frozen(item: Any, of_node: Callable[[fx.Node], Any]) -> Any:
    """An argument as something that equals another one only if an op cannot tell them apart: 1 is not 1.0."""
    kind = type(item)
    if kind is fx.Node:
        return of_node(item)
    if issubclass(kind, (list, tuple)):
        return kind, *[frozen(entry, of_node) for entry in item]
    if issubclass(kind, dict):
        return tuple([(key, frozen(entry, of_node)) for key, entry in item.items()])
    if kind is slice:
        return slice, *[frozen(entry, of_node) for entry in (item.start, item.stop, item.step)]
    return exactly(item)


def computed_by(node: fx.Node, of_node: Callable[[fx.Node], Any]) -> tuple[Any, ...]:
    """The op of a node and what it is given, by which nodes with the same value are found."""
    named = frozen(node.kwargs, of_node) if node.kwargs else ()
    return node.target, frozen(node.args, of_node), named


def computes(node: fx.Node) -> bool:
    """True for what runs: ops, functions, and calls of parts."""
    return node.op in ("call_function", "call_method", "call_module")


def compute_nodes(graph: fx.Graph) -> Iterator[fx.Node]:
    """The nodes that do something: no placeholders, no output, no access to sub-programs."""
    return (node for node in graph.nodes if node.op == "call_function")


def needed_by(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Nodes, and all that they depend on."""
    needed: set[fx.Node] = set()
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if node not in needed:
            needed.add(node)
            pending += node.all_input_nodes
    return needed


def output_nodes(graph: fx.Graph) -> tuple[Any, ...]:
    """What the program returns, in port order: nodes, or plain numbers."""
    return tuple(graph.output_node().args[0])  # type: ignore[arg-type]
