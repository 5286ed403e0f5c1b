"""Lowerings of our own: ops with code of our own, oneDNN's product, elements of rows of numbers.

Private API of `torch._inductor`, like `compat/inductor/loading.py`; nothing of it is imported before the first compilation.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import fx

from monograph.layout import Layout
from monograph.native import KERNELS, Kernel
from monograph.native.code import header


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
    ours[torch.ops.monograph.linear.default] = _linear
    ours[torch.ops.monograph.apart.default] = partial(_apart, table[torch.ops.aten.clone.default])
    for name in KERNELS:
        op = getattr(torch.ops.monograph, name.removeprefix("monograph::")).default
        ours[op] = partial(_native, name)
    return ours


def _select(inductors: Callable[..., Any], x: Any, dim: int, index: Any) -> Any:
    """An element; a row of float64 numbers is computed once, and not again in each loop that takes one of them."""
    if len(x.get_size()) == 1 and x.get_dtype() == torch.float64:
        x.realize()
    return inductors(x, dim, index)


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
    operands = [ir.ExternKernel.realize_input(item) for item in args if isinstance(item, ir.TensorBox)]
    options = [item for item in args if not (item is None or isinstance(item, ir.TensorBox))]
    layouts = [_layout(ir.as_storage_and_layout(item, freeze=True)[1]) for item in operands]
    wanted = KERNELS[name](layouts, options, 1).operands
    for i, given in enumerate(layouts):
        if not wanted[i].is_like(given):  # it was laid out otherwise than in the program
            operands[i] = ir.ExternKernel.require_exact_strides(operands[i], wanted[i].stride)
    kernel = KERNELS[name](wanted, options, torch.get_num_threads())
    made = kernel.result
    layout = ir.FixedLayout(
        device=operands[0].get_device(), dtype=operands[0].get_dtype(), size=made.shape, stride=made.stride
    )
    node = _native_node(ir.ExternKernelOut)(layout=layout, inputs=operands)
    node.kernel = kernel
    return ir.TensorBox.create(node)


def _layout(layout: Any) -> Layout:
    return Layout(tuple(map(int, layout.size)), tuple(map(int, layout.stride)))


def _native_node(base: Any) -> Any:
    """The class of nodes that call a function of our own; Inductor's classes are there only once it is imported."""

    class NativeNode(base):  # type: ignore[misc]
        kernel: Kernel

        def codegen(self, wrapper: Any) -> None:
            code = self.kernel.code
            for name, body, declaration in (
                *((f"monograph_{item}", header(item), "") for item in code.headers),
                (code.name, code.definition, f"{code.declaration};\n"),
            ):
                if name not in wrapper.src_to_kernel:
                    wrapper.src_to_kernel[name] = name
                    wrapper.define_kernel(name, body, gpu=False, cpp_definition=declaration)
            layouts = [item.get_layout() for item in self.inputs]
            pointers = ["const float*"] * len(layouts) + ["float*"]
            starts = [str(layout.offset) for layout in (*layouts, self.get_layout())]
            wrapper.generate_kernel_call(
                code.name,
                [*(item.get_name() for item in self.inputs), self.get_name(), *starts],
                triton=False,
                arg_types=[*pointers, *["long"] * len(starts)],
            )

    return NativeNode
