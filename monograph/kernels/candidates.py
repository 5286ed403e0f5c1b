"""What a matrix product or convolution can be computed with: rows of a table, each written as ordinary ops."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from monograph.compat.ops import named_input
from monograph.ir.call.nested import leaves_in
from monograph.ir.evaluate import computed
from monograph.ir.meta import TensorMeta, form, output_nodes, plain, set_value, value

Emit = Callable[..., Any]

aten = torch.ops.aten
DEFAULT = "aten"  # the name of an op as it is
_FLOATS = frozenset((torch.float32, torch.bfloat16, torch.float16))
_MOST_PRODUCTS = 8  # in a batch that is computed one by one


@dataclass(frozen=True)
class Candidate:
    """A way to compute what an op computes: for which arguments it is worth timing, and the ops it is written with."""

    name: str
    fits: Callable[..., bool]
    write: Callable[..., Any]  # emit(op, *args) makes an op; returns what the op itself would give
    takes_options: bool = False  # what an op is given by name; if not, such ops are left alone


Table = Mapping[Any, tuple[Candidate, ...]]  # for each op


@dataclass(frozen=True)
class Form:
    """An op written in one way: a graph whose placeholders are the tensors among the op's arguments."""

    name: str
    graph: fx.Graph

    @property
    def results(self) -> tuple[Any, ...]:
        """The nodes that it gives, one for each result of the op."""
        return output_nodes(self.graph)

    @property
    def described(self) -> tuple[TensorMeta | None, ...]:
        """What it gives, as descriptions."""
        return tuple(form(item) if isinstance(item, fx.Node) else None for item in self.results)


def arguments_of(node: fx.Node) -> tuple[Any, ...]:
    """The arguments of a node, with descriptions for its tensors."""
    return tuple(map(as_described, node.args))


def options_of(node: fx.Node) -> dict[str, Any]:
    """What a node is given by name, with descriptions for tensors."""
    return {name: as_described(item) for name, item in node.kwargs.items()}


def as_described(item: Any) -> Any:
    """An argument: of a tensor what is known, anything else as it is."""
    return form(item) if isinstance(item, fx.Node) else item


def operands_of(node: fx.Node) -> list[fx.Node]:
    """The tensors that a node is given, each as often as it is given, in the order of the placeholders of forms."""
    return [item for item in (*node.args, *node.kwargs.values()) if isinstance(item, fx.Node)]


def fitting(node: fx.Node, candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """The candidates that are worth timing for a node."""
    arguments, options = arguments_of(node), options_of(node)
    return tuple(
        item
        for item in candidates
        if (not options or item.takes_options) and item.fits(*arguments, **options)
    )


def forms_of(node: fx.Node, candidates: Sequence[Candidate]) -> tuple[Form, ...]:
    """What a node computes: as it is, and in every other form that gives tensors of the same layout and type."""
    expected = list(leaves_in(plain(value(node))))
    found = [_as_it_is(node)]
    for candidate in candidates:
        other = form_of(node, candidate)
        if len(other.results) == len(expected) and all(map(_same, other.described, expected)):
            found.append(other)
    return tuple(found)


def _as_it_is(node: fx.Node) -> Form:
    graph = fx.Graph()
    arguments, options = _inputs(graph, node)
    graph.output((graph.call_function(node.target, arguments, options),))  # type: ignore[arg-type]
    return Form(DEFAULT, graph)


def form_of(node: fx.Node, candidate: Candidate) -> Form:
    """A node as a candidate writes it."""
    graph = fx.Graph()
    arguments, options = _inputs(graph, node)

    def emit(op: Any, *args: Any, **kwargs: Any) -> Any:
        made = graph.create_node("call_function", op, args, kwargs, name=op.__name__.partition(".")[0])
        set_value(made, computed(made))
        return made

    made = candidate.write(emit, *arguments, **options)
    graph.output(tuple(made) if isinstance(made, Sequence) else (made,))
    return Form(candidate.name, graph)


def _inputs(graph: fx.Graph, node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments and options of a node, with placeholders for its tensors."""

    def taken(item: Any) -> Any:
        if not isinstance(item, fx.Node):
            return item
        made = named_input(graph, item.name)
        set_value(made, form(item))
        return made

    return tuple(map(taken, node.args)), {name: taken(item) for name, item in node.kwargs.items()}


def _same(one: TensorMeta | None, other: TensorMeta | None) -> bool:
    """True for tensors of one type and layout."""
    if one is None or other is None:
        return one is other
    return one.dtype == other.dtype and one.layout.is_like(other.layout)


# --- matrix products --------------------------------------------------------------------------------------------------


def linear(emit: Emit, x: Any, weight: Any, bias: Any = None) -> Any:
    """`x` times the transpose of `weight`, plus `bias`, by oneDNN."""
    return emit(torch.ops.mkldnn._linear_pointwise.default, x, weight, bias, "none", [], "")


def transposed(emit: Emit, x: Any) -> Any:
    """A matrix with rows and columns exchanged."""
    return emit(aten.t.default, x)


def _mm_onednn(emit: Emit, a: Any, b: Any) -> Any:
    return linear(emit, a, transposed(emit, b))


def _mm_onednn_transposed(emit: Emit, a: Any, b: Any) -> Any:
    """b.T times a.T, transposed: copies the right operand and the result to a good layout, not the left one."""
    product = linear(emit, transposed(emit, b), a)
    return emit(aten.clone.default, transposed(emit, product), memory_format=torch.contiguous_format)


def _addmm_onednn(emit: Emit, c: Any, a: Any, b: Any) -> Any:
    return linear(emit, a, transposed(emit, b), c)


def _addmm_onednn_add(emit: Emit, c: Any, a: Any, b: Any) -> Any:
    return emit(aten.add.Tensor, _mm_onednn(emit, a, b), c)


def _addmm_onednn_transposed(emit: Emit, c: Any, a: Any, b: Any) -> Any:
    product = linear(emit, transposed(emit, b), a)
    return emit(aten.add.Tensor, c, transposed(emit, product))


def _bmm_onednn(emit: Emit, a: Any, b: Any) -> Any:
    count = shape_of(a)[0]
    pairs = [(emit(aten.select.int, a, 0, i), emit(aten.select.int, b, 0, i)) for i in range(count)]
    return emit(aten.stack.default, [_mm_onednn(emit, *pair) for pair in pairs])


def _baddbmm_onednn(emit: Emit, c: Any, a: Any, b: Any) -> Any:
    return emit(aten.add.Tensor, _bmm_onednn(emit, a, b), c)


def products(*operands: Any) -> bool:
    """True for operands that oneDNN takes: floats of one type on a CPU, none empty, and no further arguments."""
    tensors = [item for item in operands if isinstance(item, TensorMeta)]
    return (
        len(tensors) == len(operands)
        and {item.device.type for item in tensors} == {"cpu"}
        and len({item.dtype for item in tensors}) == 1
        and multiplies(tensors[0].dtype)
        and all(item.nbytes for item in tensors)
    )


@functools.cache
def multiplies(dtype: torch.dtype) -> bool:
    """True if oneDNN has products of this type on this processor: not every one has those of 16 bits."""
    if dtype not in _FLOATS or not torch.backends.mkldnn.is_available():
        return False
    ones = torch.ones(2, 2, dtype=dtype)
    try:
        torch.ops.mkldnn._linear_pointwise.default(ones, ones, None, "none", [], "")
    except RuntimeError:
        return False
    return True


def _strided_left(a: Any, b: Any) -> bool:
    """True if the left operand is transposed in memory: oneDNN copies that one."""
    return products(a, b) and a.stride[-1] != 1


def _bias(c: Any, a: Any, b: Any) -> bool:
    """True for a sum with one number per column; oneDNN reads others wrongly where they have gaps."""
    return products(c, a, b) and c.shape == b.shape[-1:] and c.stride == (1,)


def _matrix(c: Any, a: Any, b: Any) -> bool:
    return products(c, a, b) and c.dtype is torch.float32 and not _bias(c, a, b)


def _strided_left_matrix(c: Any, a: Any, b: Any) -> bool:
    return products(c) and c.dtype is torch.float32 and _strided_left(a, b)


def _small_batch(a: Any, b: Any) -> bool:
    return products(a, b) and a.shape[0] <= _MOST_PRODUCTS


def _small_batch_sum(c: Any, a: Any, b: Any) -> bool:
    return products(c) and c.dtype is torch.float32 and _small_batch(a, b)


def shape_of(node: Any) -> tuple[int, ...]:
    """The shape of the tensor that a node makes."""
    described = value(node)
    assert isinstance(described, TensorMeta)
    return described.shape


PRODUCTS: Table = {
    aten.mm.default: (
        Candidate("onednn", products, _mm_onednn),
        Candidate("onednn_transposed", _strided_left, _mm_onednn_transposed),
    ),
    aten.addmm.default: (
        Candidate("onednn", _bias, _addmm_onednn),
        Candidate("onednn_add", _matrix, _addmm_onednn_add),
        Candidate("onednn_transposed", _strided_left_matrix, _addmm_onednn_transposed),
    ),
    aten.bmm.default: (Candidate("onednn", _small_batch, _bmm_onednn),),
    aten.baddbmm.default: (Candidate("onednn_add", _small_batch_sum, _baddbmm_onednn),),
}
