"""Lowerings of our own: ops with code of our own, updates of parameters, oneDNN's product, elements of rows of numbers.

Private API of `torch._inductor`, like `compat/inductor/loading.py`; nothing of it is imported before the first compilation.
"""

from __future__ import annotations

import copy
import importlib
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import fx

from monograph.compat.patching import replaced
from monograph.layout import Layout
from monograph.native import KERNELS, Kernel
from monograph.native.code import Code, header
from monograph.native.update import UPDATES, Update

_COPY = torch.ops.aten.copy_.default
_FOR_KNOWN_SIZES = (
    torch.ops.aten.convolution_backward.default,  # which learns an order of dimensions
    torch.ops.aten.upsample_nearest2d_backward.default,
    torch.ops.aten._adaptive_avg_pool2d.default,
    torch.ops.aten.adaptive_max_pool2d.default,
)
_LAST_PASS = "reinplace_inplaceable_ops_core"


def with_own_linear(module: fx.GraphModule) -> fx.GraphModule:
    """The graph with oneDNN's product under our name: Inductor would fuse it in ways that take constant weights."""
    graph = copy.deepcopy(module.graph)
    for node in graph.find_nodes(op="call_function", target=torch.ops.mkldnn._linear_pointwise.default):
        node.target = torch.ops.monograph.linear.default
    return fx.GraphModule(module, graph)


@contextmanager
def own_lowerings() -> Iterator[None]:
    """Lower ops with code of our own, oneDNN's product, and elements of rows of numbers our way in this compilation."""
    lowering = importlib.import_module("torch._inductor.lowering")
    importlib.import_module("torch._inductor.mkldnn_lowerings")
    table = lowering.lowerings
    ours = _lowerings(table)
    before = {op: table.get(op) for op in ours}
    table.update(ours)
    try:
        yield
    finally:
        for op, old in before.items():
            if old is None:
                del table[op]
            else:
                table[op] = old


def _lowerings(table: Mapping[Any, Callable[..., Any]]) -> dict[Any, Callable[..., Any]]:
    select = torch.ops.aten.select.int
    ours: dict[Any, Callable[..., Any]] = {}
    if select in table:
        ours[select] = partial(_select, table[select])
    ours |= {op: partial(_for_known_sizes, op, table[op]) for op in _FOR_KNOWN_SIZES if op in table}
    ours[torch.ops.monograph.linear.default] = _linear
    ours[torch.ops.monograph.apart.default] = partial(_apart, table[torch.ops.aten.clone.default])
    ours[torch.ops.monograph.laid_out.default] = lambda x, _like: table[torch.ops.aten.clone.default](x)
    ours[torch.ops.monograph.update.default] = partial(_updated, table[torch.ops.aten.clone.default])
    for name in KERNELS:
        op = getattr(torch.ops.monograph, name.removeprefix("monograph::")).default
        ours[op] = partial(_native, name)
    for name in ("cross_entropy", "smooth_cross_entropy"):
        op = getattr(torch.ops.monograph, name).default
        ours[op] = partial(_losses, table[torch.ops.aten.empty_strided.default], f"monograph::{name}")
    return ours


def _select(inductors: Callable[..., Any], x: Any, dim: int, index: Any) -> Any:
    """An element; a row of float64 numbers is computed once, and not again in each loop that takes one of them."""
    if len(x.get_size()) == 1 and x.get_dtype() == torch.float64:
        x.realize()
    return inductors(x, dim, index)


def _for_known_sizes(op: Any, inductors: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """By eager's kernel where sizes vary: these lowerings are for the sizes that they see, or fail for symbols."""
    leaves = torch.utils._pytree.tree_leaves((args, kwargs))
    sizes = [size for item in leaves for size in (item.get_size() if hasattr(item, "get_size") else [item])]
    if all(getattr(size, "is_number", True) for size in sizes):
        return inductors(*args, **kwargs)
    lowering = importlib.import_module("torch._inductor.lowering")
    return lowering.fallback_handler(op, add_to_fallback_set=False)(*args, **kwargs)


def _apart(clone: Callable[..., Any], x: Any, _number: int) -> Any:
    """A copy in memory of its own."""
    copied = clone(x)
    copied.realize()
    return copied


def _linear(x: Any, weight: Any, bias: Any, attribute: str, scalars: Any, algorithm: Any) -> Any:
    """`mkldnn._linear_pointwise` on operands as in memory; Inductor's own lowering and fusions expect constants."""
    ir = importlib.import_module("torch._inductor.ir")
    onednn = importlib.import_module("torch._inductor.mkldnn_ir")
    operands = [ir.ExternKernel.realize_input(item) for item in (x, weight, bias) if item is not None]
    constants = [attribute, scalars or [-1], algorithm]
    if bias is None:
        constants.insert(0, None)
    size = [*x.get_size()[:-1], weight.get_size()[0]]
    layout = ir.FixedLayout(device=x.get_device(), dtype=x.get_dtype(), size=size)
    packed = onednn.LinearUnary(layout=layout, inputs=operands, constant_args=constants)
    return ir.TensorBox.create(onednn._create_output_node(packed))


def _native(name: str, *args: Any) -> Any:
    """An op by a function of our own in the compiled library; operands that it cannot read are copied."""
    ir = importlib.import_module("torch._inductor.ir")
    operands, kernel = _operands_and_kernel(name, args)
    made = kernel.results[0]
    layout = ir.FixedLayout(
        device=operands[0].get_device(), dtype=operands[0].get_dtype(), size=made.shape, stride=made.stride
    )
    node = _native_node(ir.ExternKernelOut)(layout=layout, inputs=operands)
    node.kernel = kernel
    return ir.TensorBox.create(node)


def _operands_and_kernel(name: str, args: Sequence[Any]) -> tuple[list[Any], Kernel]:
    ir = importlib.import_module("torch._inductor.ir")
    operands = [ir.ExternKernel.realize_input(item) for item in args if isinstance(item, ir.TensorBox)]
    options = [item for item in args if not (item is None or isinstance(item, ir.TensorBox))]
    layouts = [_layout(ir.as_storage_and_layout(item, freeze=True)[1]) for item in operands]
    wanted = KERNELS[name](layouts, options, 1).operands
    for i, given in enumerate(layouts):
        if not wanted[i].is_like(given):  # it was laid out otherwise than in the program
            operands[i] = ir.ExternKernel.require_exact_strides(operands[i], wanted[i].stride)
    return operands, KERNELS[name](wanted, options, torch.get_num_threads())


def _losses(empty: Callable[..., Any], name: str, logits: Any, *others: Any) -> list[Any]:
    """Cross-entropy with its gradient: the gradient is written over the logits where nothing else reads them any more."""
    graph: Any = importlib.import_module("torch._inductor.virtualized").V.graph
    logits.realize()
    operands, kernel = _operands_and_kernel(name, [logits, *others])
    made = [
        empty(item.shape, item.stride, dtype=torch.float32, device=logits.get_device())
        for item in kernel.results
    ]
    ir = importlib.import_module("torch._inductor.ir")
    if _may_be_lost(graph, operands[0]) and kernel.results[-1].is_like(kernel.operands[0]):
        made[-1] = logits
    written = [ir.ExternKernel.realize_input(item) for item in made]
    code = kernel.code
    _node_class()(graph, code, [*operands, *written], written)
    return made


def _may_be_lost(graph: Any, operand: Any) -> bool:
    """True if what is in the memory of the first operand of the op at hand is of no use after it."""
    node: fx.Node = graph.current_node
    source: Any = node.args[0]
    name, storage = operand.get_name(), _storage(source)
    if storage is None or name in graph.graph_inputs or name in graph.constants:
        return False
    alike = [item for item in node.graph.nodes if _storage(item) == storage]
    made_here = all(item.op == "call_function" for item in alike)
    return made_here and _last_reads_of(graph, node)[storage] is node


def _layout(layout: Any) -> Layout:
    return Layout(tuple(map(int, layout.size)), tuple(map(int, layout.stride)))


def _native_node(base: Any) -> Any:
    """The class of nodes that call a function of our own; Inductor's classes are there only once it is imported."""

    class NativeNode(base):  # type: ignore[misc]
        kernel: Kernel

        def codegen(self, wrapper: Any) -> None:
            code = self.kernel.code
            _define(wrapper, code)
            layouts = [item.get_layout() for item in self.inputs]
            starts = [str(layout.offset) for layout in (*layouts, self.get_layout())]
            wrapper.generate_kernel_call(
                code.name,
                [*(item.get_name() for item in self.inputs), self.get_name(), *starts],
                triton=False,
                arg_types=[*code.pointers, *["long"] * len(starts)],
            )

    return NativeNode


def _define(wrapper: Any, function: Update | Code) -> None:
    """Write a function and the headers that it needs, each once."""
    for name, body, declaration in (
        *((f"monograph_{item}", header(item), "") for item in function.headers),
        (function.name, function.definition, f"{function.declaration};\n"),
    ):
        if name not in wrapper.src_to_kernel:
            wrapper.src_to_kernel[name] = name
            wrapper.define_kernel(name, body, gpu=False, cpp_definition=declaration)


# --- updates of parameters -----------------------------------------------------------------------------------


def _updated(
    clone: Callable[..., Any], tensors: Sequence[Any], numbers: Any, written: Sequence[int], name: str
) -> list[Any]:
    """`monograph.update`: what it writes are inputs of the graph themselves where that is what the graph does last with them.

    Otherwise, it writes into copies of them.
    """
    ir = importlib.import_module("torch._inductor.ir")
    graph: Any = importlib.import_module("torch._inductor.virtualized").V.graph
    node: fx.Node = graph.current_node
    given: Any = node.args[0]
    whole = max((tensors[index] for index in written), key=lambda item: len(item.get_size()))
    size, strides = list(whole.get_size()), whole.get_stride()
    operands = list(tensors)
    for index, item in enumerate(tensors):
        if index in written and not _may_be_written(graph, node, written.index(index), given[index]):
            operands[index] = clone(item)
            operands[index].realize()
        if size and list(item.get_size()) == size:
            operands[index] = ir.ExternKernel.require_exact_strides(operands[index], strides)
    inputs = [ir.ExternKernel.realize_input(item) for item in (*operands, numbers)]
    _node_class()(graph, UPDATES[name], inputs, [inputs[index] for index in written], whole.get_numel())
    return [operands[index] for index in written]


@contextmanager
def updates_at_the_end() -> Iterator[None]:
    """Inside, updates stay after all that reads old state: Inductor moves ops towards those that read their results.

    What: the last function that rewrites a graph. Degraded path: an update that has moved writes into copies.
    """
    passes: Any = importlib.import_module("torch._inductor.fx_passes.reinplace")
    if not hasattr(passes, _LAST_PASS):
        yield
        return
    theirs = getattr(passes, _LAST_PASS)

    def rewrite(graph: fx.Graph) -> None:
        _move_to_the_end(graph)
        theirs(graph)

    with replaced(passes, _LAST_PASS, rewrite):
        yield


def _move_to_the_end(graph: fx.Graph) -> None:
    """Move updates, and the copies of what they give, after all other ops."""
    end = graph.output_node()
    for node in graph.find_nodes(op="call_function", target=torch.ops.monograph.update.default):
        results = list(node.users)
        copies = [user for result in results for user in result.users]
        if all(copy.target is _COPY for copy in copies):
            for moved in (node, *results, *copies):
                end.prepend(moved)


def _may_be_written(graph: Any, node: fx.Node, place: int, state: fx.Node) -> bool:
    """True if a result replaces an input of the graph, and nothing after it reads what that input was."""
    results = [user for user in node.users if user.target is operator.getitem and user.args[1] == place]
    users = [user for result in results for user in result.users]
    if (
        state.op != "placeholder"
        or [user.target for user in users] != [_COPY]
        or users[0].args[0] is not state
    ):
        return False
    storage = _storage(state)
    alike = [item for item in node.all_input_nodes if _storage(item) == storage]
    return storage is not None and alike == [state] and _last_reads_of(graph, node)[storage] is node


def _last_reads_of(graph: Any, node: fx.Node) -> Mapping[int | None, fx.Node]:
    """`_last_reads` of the graph that is lowered, in which `node` is; looked for once."""
    if getattr(graph, "monograph_last_reads", None) is None:
        graph.monograph_last_reads = _last_reads(node.graph)
    reads: Mapping[int | None, fx.Node] = graph.monograph_last_reads
    return reads


def _last_reads(graph: fx.Graph) -> dict[int | None, fx.Node]:
    """By memory the last node that reads it; a copy does not read what it copies into."""
    found: dict[int | None, fx.Node] = {}
    for node in graph.nodes:
        read: list[fx.Node] = []
        fx.map_arg(node.args[1:] if node.target is _COPY else (node.args, node.kwargs), read.append)
        found |= dict.fromkeys(map(_storage, read), node)
    return found


def _storage(node: fx.Node) -> int | None:
    """Which memory a node shows, as far as the trace of the graph says."""
    described = node.meta.get("val")
    if not isinstance(described, torch.Tensor) or described.layout is not torch.strided:
        return None
    address: int = described.untyped_storage()._cdata
    return address


@cache
def _node_class() -> Any:
    """The class of nodes whose functions write into buffers; Inductor's classes are there only once it is imported."""
    ir: Any = importlib.import_module("torch._inductor.ir")

    class WritingNode(ir.ExternKernel):  # type: ignore[misc]
        def __init__(
            self, graph: Any, function: Update | Code, inputs: list[Any], written: list[Any], *numbers: Any
        ) -> None:
            nothing = ir.NoneLayout(device=torch.device("cpu"))
            super().__init__(None, nothing, self.unwrap_storage(inputs))
            self.function, self.numbers = function, numbers
            self.name = graph.register_buffer(self)
            graph.register_operation(self)
            self.mutation_outputs = [ir.MutationOutput(nothing, item, self) for item in written]

        def get_outputs(self) -> list[Any]:
            return [self, *self.mutation_outputs]

        def get_mutation_names(self) -> list[str]:
            return []  # its other outputs say what it writes

        def should_allocate(self) -> bool:
            return False

        def codegen(self, wrapper: Any) -> None:
            function: Update | Code = self.function
            _define(wrapper, function)
            starts = [str(item.get_layout().offset) for item in self.inputs]
            wrapper.generate_kernel_call(
                function.name,
                [*(item.get_name() for item in self.inputs), *starts, *map(str, self.numbers)],
                triton=False,
                arg_types=[*function.pointers, *["long"] * (len(starts) + len(self.numbers))],
            )

    return WritingNode
