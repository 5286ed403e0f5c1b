"""What Monograph changes in Inductor while it compiles a step: lowerings, formulas, and the C++ code around kernels.

Private API of `torch._inductor`, like `compat/inductor/loading.py`; nothing of it is imported before the first compilation.
"""

from __future__ import annotations

import copy
import importlib
import math
import re
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import fx

from monograph.compat.inductor.error_codes import checked_calls
from monograph.compat.inductor.formulas import own_decompositions
from monograph.compat.inductor.parallel_checks import with_caught_checks
from monograph.compat.inductor.write_order import writes_last
from monograph.compat.ops import is_random
from monograph.compat.patching import replaced
from monograph.layout import Layout
from monograph.native import KERNELS, Kernel
from monograph.native.code import header

# All kernels of a step are in one file. GCC's limits on the growth of a file would leave the helpers that they share
# out of line, for any size and unvectorised: MobileNetV2 takes 14 % longer with them.
FLAGS: tuple[str, ...] = (
    "-param=inline-unit-growth=10000",
    "-param=large-unit-insns=10000000",
    "-param=large-function-growth=10000",
    "-param=large-stack-frame=100000",
    "-param=large-stack-frame-growth=100000",
)
LONG_SUM, PIECE = 1024, 64  # elements; shorter sums lose little, and shorter pieces take time
POINTERS = "monograph_same_pointers"  # guards of a build that has a compiled library look at pointers with it
_CHECKS = "generate_input_output_runtime_checks"
_ON_STACK = "can_stack_allocate_buffer"
# The file that a function makes from a text, made now if it is not there.
Keep = Callable[[str, Callable[[Path], None]], Path]
# What a step's code includes; AOTInductor adds eager's tensors, for a way to call models that steps do not have.
HEADERS = tuple(
    f"torch/csrc/inductor/{name}.h"
    for name in ("aoti_include/cpu", "aoti_runtime/arrayref_tensor", "aoti_runtime/thread_local")
)
MODEL = "namespace torch::aot_inductor {{ {} class AOTInductorModelBase<AOTInductorModel>; }}"
PRINTED = r"""std::cerr << "Error: " << e.what() << '\n';"""


@contextmanager
def own_rules(*, packaged: bool = False, flagged: bool = False, copied: bool = False) -> Iterator[None]:
    """Compile our way while the block runs. What is `packaged` keeps torch's checks of inputs, which callers ask for.

    With `flagged`, a write into the last input comes before all other writes; with `copied`, all writes are copies.
    """
    with (
        _own_lowerings(),
        own_decompositions(),
        _own_layouts(),
        _own_code(packaged),
        checked_calls(),
        writes_last(flagged=flagged, copied=copied),
    ):
        yield


@contextmanager
def interface_apart(keep: Keep) -> Iterator[None]:
    """Link what is the same in every library, the interface of a model, as an object that is compiled once and kept.

    AOTInductor compiles it with each step: 6 of the 8 s that g++ takes for the code around the kernels of a small one.
    The object is known by its code, the command that makes it and the compiler's version. It does not print what it
    raises.
    What: Inductor's functions that write the interface and name headers, and its class that calls the compiler, are
    replaced. Degraded path: if one is missing, nothing is; if the compiler refuses, `compile_to_library` goes without.
    """
    codecache: Any = importlib.import_module("torch._inductor.codecache")
    wrapper: Any = importlib.import_module("torch._inductor.codegen.cpp_wrapper_cpu").CppWrapperCpu
    interface = _Interface(keep)
    replacements: list[tuple[Any, str, Callable[[Any], Any]]] = [
        (wrapper, "_write_aoti_interface_header", interface.only_declared),
        (_wrapper_with_stack(), "get_device_include_path_aot", _few_headers),
        (codecache, "_get_cpp_wrapper_header", lambda theirs: lambda *args, **options: HEADERS[0]),
        (codecache, "CppBuilder", interface.linked),
    ]
    with ExitStack() as stack:
        if all(hasattr(owner, name) for owner, name, _ in replacements):
            for owner, name, ours in replacements:
                stack.enter_context(replaced(owner, name, ours(getattr(owner, name))))
        yield


def with_own_linear(module: fx.GraphModule) -> fx.GraphModule:
    """The graph with oneDNN's product under our name: Inductor would fuse it in ways that take constant weights."""
    graph = copy.deepcopy(module.graph)
    for node in graph.find_nodes(op="call_function", target=torch.ops.mkldnn._linear_pointwise.default):
        node.target = torch.ops.monograph.linear.default
    return fx.GraphModule(module, graph)


@contextmanager
def _own_lowerings() -> Iterator[None]:
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


@contextmanager
def _own_layouts() -> Iterator[None]:
    """Hand random ops tensors with the layout of the program: their kernels draw in the order of the memory.

    Inductor lays a tensor that it computes, even a copy made for its layout, as it likes, but for `native_dropout`.
    What: the function that says what layouts an op needs is replaced. Degraded path: without it, the numbers of other
    random ops may come in another order than in eager mode.
    """
    graph: Any = importlib.import_module("torch._inductor.graph")
    name = "maybe_layout_constraints"
    if not hasattr(graph, name):
        yield
        return
    as_in_program = importlib.import_module("torch._inductor.lowering").constrain_to_fx_strides
    theirs = getattr(graph, name)
    with replaced(graph, name, lambda op: theirs(op) or (as_in_program if is_random(op) else None)):
        yield


@contextmanager
def _own_code(packaged: bool) -> Iterator[None]:
    """Have the C++ code of this compilation made our way: helpers inlined, no checks of inputs.

    The checks are for debugging; the signature is checked before a call. Without them MobileNetV2 compiles in 10 s
    less. Packages keep them: they have few inputs, and in C++ nothing else checks a call. Results that are on the stack
    would be copied to memory that the next call writes over, so none do. Long sums are summed in short pieces: eager's
    kernels for statistics of images sum in float64. A check that fails in a parallel loop raises.
    What: functions of Inductor's are replaced. Degraded path: without them, its own code is used, without the stack;
    checks that fail in parallel loops then end the process.
    """
    builder: Any = importlib.import_module("torch._inductor.cpp_builder")
    wrapper: Any = importlib.import_module("torch._inductor.codegen.cpp_wrapper_cpu").CppWrapperCpu
    kernel: Any = importlib.import_module("torch._inductor.codegen.cpp").CppKernel
    group: Any = importlib.import_module("torch._inductor.codegen.cpp").KernelGroup
    flags: Any = getattr(builder, "_get_optimization_cflags", None)

    def more_flags(compiler: str, min_optimize: bool = False) -> tuple[list[str], list[str]]:
        compile_flags, link_flags = flags(compiler, min_optimize)
        inlined = () if min_optimize or not builder._is_gcc(compiler) else FLAGS
        return [*compile_flags, *inlined], link_flags

    with ExitStack() as stack:
        if flags is not None:
            stack.enter_context(replaced(builder, "_get_optimization_cflags", more_flags))
        if not packaged and hasattr(wrapper, _CHECKS):
            stack.enter_context(replaced(wrapper, _CHECKS, _only_pointers))
        for owner, name, ours in (
            (_wrapper_with_stack(), _ON_STACK, _not_for_results),
            (kernel, "need_use_acc_helper", _for_long_sums),
            (kernel, "_acc_helper_init", _in_short_pieces),
            (group, "codegen_group", _raising_checks),
        ):
            if hasattr(owner, name):
                stack.enter_context(replaced(owner, name, ours(getattr(owner, name))))
        yield


def can_keep_results_off_the_stack() -> bool:
    """True if Inductor asks, where it can be answered, which buffers are on the stack."""
    return hasattr(_wrapper_with_stack(), _ON_STACK)


def _wrapper_with_stack() -> Any:
    return importlib.import_module("torch._inductor.codegen.cpp_wrapper_cpu_array_ref").CppWrapperCpuArrayRef


class _Interface:
    """The interface of the model that is being compiled."""

    def __init__(self, keep: Keep) -> None:
        self._keep, self._code = keep, ""
        self._objects: list[str] = []

    def only_declared(self, theirs: Any) -> Callable[..., None]:
        """Take the code for the object; the wrapper's code declares that what both use of templates is there."""

        def write(wrapper: Any) -> None:
            header, wrapper.header = wrapper.header, type(wrapper.header)()
            theirs(wrapper)
            code = wrapper.header.getvalue().replace(PRINTED, "")
            self._code = f"{code}\n{MODEL.format('template')}\n"
            wrapper.header = header
            header.splice(MODEL.format("extern template"))

        return write

    def linked(self, theirs: Any) -> Any:
        """The class of compiler calls that makes the object with the flags of the wrapper, and links it."""
        interface = self

        class Builder(theirs):  # type: ignore[misc]
            def __init__(
                self, name: str, sources: str | list[str], BuildOption: Any, output_dir: str = ""
            ) -> None:
                if isinstance(sources, list):  # the objects of a library
                    sources = [*sources, *interface._objects]
                elif sources.endswith(".wrapper.cpp"):
                    interface._objects = [interface._object(theirs, BuildOption, output_dir)]
                super().__init__(name, sources, BuildOption, output_dir)

        return Builder

    def _object(self, builder: Any, options: Any, folder: str) -> str:
        versions: Any = importlib.import_module("torch._inductor.cpp_builder").get_compiler_version_info
        source = Path(folder) / "interface.cpp"
        call = builder("interface", str(source), options, folder)

        def make(goal: Path) -> None:
            source.write_text(self._code)
            call.build()
            shutil.move(call.get_target_file_path(), goal)

        command = call.get_command_line().replace(folder, "")
        return shlex.quote(
            str(self._keep("\n".join([self._code, command, versions(options.get_compiler())]), make))
        )


def _few_headers(_theirs: Any) -> Any:
    return staticmethod(lambda device: "\n".join(f"#include <{name}>" for name in HEADERS))


def _only_pointers(wrapper: Any) -> None:
    """No checks of inputs in a call; instead a function that looks at pointers, for guards to call."""
    wrapper.prefix.splice_aot(
        f"""
        static bool _check_aoti_runtime_check_inputs_env() {{ return false; }}
        static void __check_inputs_outputs(AtenTensorHandle*, AtenTensorHandle*) {{}}
        extern "C" __attribute__((visibility("default")))
        bool {POINTERS}(void** tensors, void** pointers, long count, void* (*read)(void*)) {{
            for (long i = 0; i < count; i++) if (read(tensors[i]) != pointers[i]) return false;
            return true;
        }}
        """
    )


def _for_long_sums(theirs: Any) -> Callable[..., bool]:
    def need_use_acc_helper(kernel: Any, reduction_type: str, dtype: torch.dtype, use_scalar: bool) -> bool:
        if reduction_type != "sum" or dtype != torch.float32:
            return bool(theirs(kernel, reduction_type, dtype, use_scalar))
        sizes = kernel.call_ranges[kernel.reduction_depth :]
        return all(size.is_number for size in sizes) and math.prod(map(int, sizes)) >= LONG_SUM

    return need_use_acc_helper


def _in_short_pieces(theirs: Any) -> Callable[..., str]:
    def acc_helper_init(kernel: Any, reduction_type: str, *args: Any, **kwargs: Any) -> str:
        line: str = theirs(kernel, reduction_type, *args, **kwargs)
        return re.sub(r", \d+>", f", {PIECE}>", line) if reduction_type == "sum" else line

    return acc_helper_init


def _raising_checks(theirs: Any) -> Callable[..., str]:
    return lambda *args, **kwargs: with_caught_checks(theirs(*args, **kwargs))


def _not_for_results(theirs: Any) -> Callable[..., bool]:
    virtualized: Any = importlib.import_module("torch._inductor.virtualized").V
    ir: Any = importlib.import_module("torch._inductor.ir")

    def may_lie_on_the_stack(wrapper: Any, buffer: Any) -> bool:
        # a result may take over the memory of any buffer of its size, and so may what eager's kernels draw into
        graph = virtualized.graph
        drawn = [item for item in graph.operations if isinstance(item, ir.InplaceBernoulliFallback)]
        names = [*graph.get_output_names(), *(name for item in drawn for name in item.get_mutation_names())]
        results = [made for name in names if (made := graph.try_get_buffer(name)) is not None]
        alike = any(
            item.get_dtype() == buffer.get_dtype() and item.get_numel() == buffer.get_numel()
            for item in results
        )
        return not alike and bool(theirs(wrapper, buffer))

    return may_lie_on_the_stack


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
    options = [item for item in args if isinstance(item, (list, tuple))]
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
