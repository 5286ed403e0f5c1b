"""What Monograph changes in Inductor while it compiles a step, all in one block, and the C++ code around kernels.

Private API of `torch._inductor`, like `compat/inductor/loading.py`; nothing of it is imported before the first compilation.
"""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from monograph.compat.inductor.checks.error_codes import checked_calls
from monograph.compat.inductor.checks.parallel import with_caught_checks
from monograph.compat.inductor.decompositions import own_decompositions
from monograph.compat.inductor.lowerings import own_lowerings, updates_at_the_end
from monograph.compat.inductor.write_order import writes_last
from monograph.compat.inductor.written.size_quotients import with_quotients_first
from monograph.compat.ops import is_random
from monograph.compat.patching import replaced

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
_LONG = 1000  # ops in Inductor's sense; those that are fused count as well
SAME_POINTERS = f"""\
bool {POINTERS}(void** tensors, void** pointers, long count, void* (*read)(void*)) {{
    for (long i = 0; i < count; i++) if (read(tensors[i]) != pointers[i]) return false;
    return true;
}}
"""
IN_ONE_PIECE = "monograph_in_one_piece"  # by which a library gets what it calls when it begins and ends
_RUNS = """\
static bool (*monograph_begin)(void*) = nullptr;
static void (*monograph_end)(bool) = nullptr;
static void* monograph_places = nullptr;
"""
_IN_ONE_PIECE = f"""\
void {IN_ONE_PIECE}(bool (*begin)(void*), void (*end)(bool), void* places) {{
    monograph_begin = begin; monograph_end = end; monograph_places = places;
}}
"""
_WHILE_IT_RUNS = """\
struct MonographRun {
    bool is_on = monograph_begin && monograph_begin(monograph_places);
    ~MonographRun() { if (is_on) monograph_end(!std::uncaught_exceptions()); }
};
#define __check_inputs_outputs(inputs, outputs) MonographRun monograph_run
"""
_CHECKS = "generate_input_output_runtime_checks"
_ON_STACK = "can_stack_allocate_buffer"


@contextmanager
def own_rules(*, packaged: bool = False, flagged: bool = False, copied: bool = False) -> Iterator[None]:
    """Compile our way while the block runs. What is `packaged` keeps torch's checks of inputs, which callers ask for.

    With `flagged`, a write into the last input comes before all other writes; with `copied`, all writes are copies.
    """
    with (
        own_lowerings(),
        updates_at_the_end(),
        own_decompositions(),
        _own_layouts(),
        _own_code(packaged),
        checked_calls(),
        writes_last(flagged=flagged, copied=copied),
    ):
        yield


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
            (wrapper_with_stack(), _ON_STACK, _not_for_results),
            (kernel, "need_use_acc_helper", _for_long_sums),
            (kernel, "_acc_helper_init", _in_short_pieces),
            (group, "codegen_group", _our_kernel),
        ):
            if hasattr(owner, name):
                stack.enter_context(replaced(owner, name, ours(getattr(owner, name))))
        yield


def can_keep_results_off_the_stack() -> bool:
    """True if Inductor asks, where it can be answered, which buffers are on the stack."""
    return hasattr(wrapper_with_stack(), _ON_STACK)


def wrapper_with_stack() -> Any:
    """Inductor's class that writes the code around the kernels."""
    return importlib.import_module("torch._inductor.codegen.cpp_wrapper_cpu_array_ref").CppWrapperCpuArrayRef


def _only_pointers(wrapper: Any) -> None:
    """No checks of inputs in a call; instead a function that looks at pointers, for guards to call.

    Where the checks would be, it calls what it has been given to call when it begins, and later when it ends.
    """
    prefix = wrapper.prefix
    splice = getattr(prefix, "splice_aot", prefix.splice)  # torch 2.11 has one buffer for all code
    splice(
        f"""
        static bool _check_aoti_runtime_check_inputs_env() {{ return false; }}
        extern "C" __attribute__((visibility("default")))
        {SAME_POINTERS}
        {_RUNS}
        extern "C" __attribute__((visibility("default")))
        {_IN_ONE_PIECE}
        {_WHILE_IT_RUNS}
        {_calls_as_they_are()}
        """
    )


def _calls_as_they_are() -> str:
    """What stands before the function that calls the kernels: in a long one, that calls are not optimised.

    The time for that grows faster than the function, 6 s in MobileNetV2's, and the calls take microseconds.
    What: Inductor's graph. Degraded path: it is optimised.
    """
    graph: Any = importlib.import_module("torch._inductor.virtualized").V.graph
    is_long = len(getattr(graph, "operations", ())) > _LONG
    is_gcc = importlib.import_module("torch._inductor.cpp_builder").is_gcc()
    return '__attribute__((optimize("O0")))' if is_long and is_gcc else ""


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


def _our_kernel(theirs: Any) -> Callable[..., str]:
    return lambda *args, **kwargs: with_caught_checks(with_quotients_first(theirs(*args, **kwargs)))


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
