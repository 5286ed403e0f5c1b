"""Inductor, torch's compiler, as far as Monograph uses it: a flat graph in, a loaded function out.

Private or version-dependent API of `torch._inductor`; outside of `compat` nothing else may touch it.
Importing this file imports none of it: that costs over a second and waits for the first compilation.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import logging
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import fx

from monograph.compat.fake_values import results_by_value
from monograph.compat.fakes import LOGGER_OF_FAKES
from monograph.compat.inductor.arithmetic import OPTIONS as EAGERS_ARITHMETIC
from monograph.compat.inductor.arithmetic import eagers_arithmetic
from monograph.compat.inductor.building.interface import Keep, interface_apart, without_interpreter_lock
from monograph.compat.inductor.building.processor import instructions_taken_as_told
from monograph.compat.inductor.building.waits import short_waits
from monograph.compat.inductor.codegen import POINTERS, can_keep_results_off_the_stack, own_rules
from monograph.compat.inductor.directories import out_of_room, room_for_torch
from monograph.compat.inductor.headers import are_worth_compiling, headers_with_the_rest
from monograph.compat.inductor.less_work import less_work
from monograph.compat.inductor.lowerings import with_own_linear
from monograph.compat.inductor.write_order import OF_COLLECTIVES, UnorderedError, can_order, order_of
from monograph.compat.inductor.written.memory_lines import memory_noted
from monograph.compat.patching import quiet
from monograph.compat.tensors import PointerGuard, pointer_guard
from monograph.compat.traces.size_symbols import fake_inputs

LOGGER = logging.getLogger("monograph")

Call = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]

_FOR_SPEED: Mapping[str, Any] = {  # each torch has some of them
    "aot_inductor.allow_stack_allocation": True,  # in small steps, where malloc takes as long as the work
    "layout_optimization": False,  # images are laid out as the program says, whose kernels were timed so
    "cpp.use_two_step_variance_threshold": 1 << 62,  # Welford's way is slower, and no nearer to float64
    "cpp.min_chunk_size": 4096,  # elements for each thread of a loop; fewer take as long as waking the threads
    "aot_inductor.enable_frame_pointer": False,  # these two are for profilers
    "aot_inductor.enable_line_tables": False,
}
OPTIONS: Mapping[str, Any] = {
    **EAGERS_ARITHMETIC,
    "fallback_random": True,  # eager's kernels draw eager's numbers, in eager's order
    **_FOR_SPEED,
}
ASSUMED = ".sizes"  # of the file beside a library that has what it takes for granted of sizes that vary
MEMORY = ".memory"  # of the one that has the memory that it takes and gives back, if that is known
_LIBTORCH = ("aten", "prims", "mkldnn", "mkl", "quantized")  # whose ops need no Python


def compile_to_library(
    module: fx.GraphModule,
    examples: Sequence[tuple[Any, ...]],
    device: torch.device,
    goal: Path,
    keep: Keep,
    allocated_by: Callable[..., int],
    *,
    flagged: bool = False,
    copied: bool = False,
) -> None:
    """Compile a flat graph that may write into its inputs to a shared library at `goal`.

    `examples` are (shape, stride, dtype, device) of its inputs; no data is needed. What the code takes for granted of sizes
    that vary, as Python over their names, is in a file beside it, and in another one the memory that it takes and gives back, at
    the sizes that these examples have. `keep` keeps what libraries share; `allocated_by` says what the kernel of a call takes.
    Kernels that can fail come before the first write; if it is `flagged`, the first is that into the last input.
    `is_unordered` recognises the error if that cannot be; it can with `copied`, where the graph computes all apart.
    What: `torch._inductor.aot_compile`. Degraded path: if it is the compiler that refuses, or nothing can be kept, once
    more without what is kept; any other error, and the step then runs on the aten backend.
    """
    kept = keep if device.type == "cpu" else None
    with (
        tempfile.TemporaryDirectory(prefix="monograph-", dir=goal.parent) as folder,
        memory_noted(allocated_by) as noted,
        _compiled(
            module,
            examples,
            {"aot_inductor.output_path": folder},
            {},
            kept,
            flagged=flagged,
            copied=copied,
        ) as (made, assumed),
    ):
        library = Path(str(made))
        shutil.copy2(library, goal)
        goal.with_suffix(ASSUMED).write_text(json.dumps(assumed()))
        goal.with_suffix(MEMORY).write_text(json.dumps([item.as_json() for item in noted]))
        nodes = library.with_suffix(".json")  # names the ops without a C interface to the runner
        if nodes.exists():
            shutil.copy2(nodes, goal.with_suffix(".json"))


def compile_to_package(
    module: fx.GraphModule,
    names: Mapping[str, str],
    examples: Sequence[tuple[Any, ...]],
    notes: Mapping[str, str],
    goal: Path,
    keep: Keep,
    *,
    copied: bool = False,
) -> tuple[str, ...]:
    """Compile a flat graph with its state, buffers that it may write into, to a package of AOTInductor at `goal`.

    `names` are those that the buffers get, by their names in the module; `notes` are texts stored beside the code.
    `copied` is that of `compile_to_library`. Gives the ops that the package does not bring along and that libtorch does not have.
    What: `aot_compile` and its packager; `dynamo_flat_name_to_original_fqn`, where export keeps names; options that
    keep state which is one number from being taken for a constant. Degraded path: that of `compile_to_library`.
    """
    options = {
        "aot_inductor.package": True,
        "joint_graph_constant_folding": False,
        "always_keep_tensor_constants": True,
    }
    packager: Any = importlib.import_module("torch.export.pt2_archive._package")
    meta = {"dynamo_flat_name_to_original_fqn": dict(names)}
    devices = {tensor.device.type for tensor in module.buffers()} | {device.type for *_, device in examples}
    with _compiled(module, examples, options, meta, keep if devices <= {"cpu"} else None, copied=copied) as (
        files,
        _,
    ):
        packager.package_pt2(str(goal), aoti_files=files, extra_files=dict(notes))
        called = [name for file in files if file.endswith(".wrapper.json") for name in _called_by_name(file)]
    return tuple(name for name in called if name.split("::")[0] not in _LIBTORCH)


def _called_by_name(nodes: str) -> list[str]:
    """The ops that a library calls by their names (`aten::mm.out`), for want of a C interface."""
    return [item["node"]["target"] for item in json.loads(Path(nodes).read_text())["nodes"]]


@contextmanager
def _compiled(
    module: fx.GraphModule,
    examples: Sequence[tuple[Any, ...]],
    more: Mapping[str, Any],
    meta: Mapping[str, Any],
    keep: Keep | None,
    *,
    flagged: bool = False,
    copied: bool = False,
) -> Iterator[Any]:
    """What `aot_compile` gives, our way, as long as the block runs, and what gives what it assumes of sizes.

    `more` are options, `meta` belongs to the graph.
    """
    with ExitStack() as stack:
        stack.enter_context(room_to_compile())
        for name in ("torch._higher_order_ops.triton_kernel_wrap", "torch._inductor.compile_fx"):
            importlib.import_module(name)  # a fresh process does not have them, and aot_compile fails without
        inputs, mode, assumed = fake_inputs(examples)  # state is there, arguments are not
        stack.enter_context(headers_with_the_rest())
        stack.enter_context(own_rules(packaged=bool(meta), flagged=flagged, copied=copied))
        stack.enter_context(eagers_arithmetic())
        stack.enter_context(less_work())
        stack.enter_context(results_by_value(mode, lambda tensor: None))  # some shapes do not hang on values
        stack.enter_context(torch.no_grad())
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # of torch about torch
        stack.enter_context(quiet("torch._inductor.ir"))  # that an op has no C interface
        stack.enter_context(quiet(LOGGER_OF_FAKES))  # that a kernel takes no size that varies: a formula does
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="monograph-"))
        options = {"aot_inductor.output_path": folder, **OPTIONS, **order_of(module.graph), **more}
        for name in (_FOR_SPEED.keys() | OF_COLLECTIVES.keys()) - set(torch._inductor.list_options()):
            options.pop(name, None)
        if not can_keep_results_off_the_stack():
            options.pop("aot_inductor.allow_stack_allocation", None)
        if not are_worth_compiling():
            options["aot_inductor.precompile_headers"] = False
        yield _made(module, meta, inputs, options, keep if _is_gcc() else None), assumed


def compile_to_functions(code: str, goal: Path) -> None:
    """Compile C++ code that needs no headers of torch to a shared library, with the flags of a compiled step.

    Raises OSError or CalledProcessError. It is called in `room_to_compile()`, from any thread.
    What: Inductor's compiler and flags. Degraded path: those errors.
    """
    builder: Any = importlib.import_module("torch._inductor.cpp_builder")
    try:
        compiler = builder.get_cpp_compiler()
        flags = builder.get_cpp_options(compiler, do_link=True, warning_all=False)[2]
    except Exception as error:
        raise OSError(f"no C++ compiler: {error}") from error
    source = goal.with_suffix(".cpp")
    source.write_text(code)
    threads = [] if sys.platform == "darwin" else ["-fopenmp"]  # without it code for threads runs on one
    command = [*compiler.split(), *(f"-{flag}" for flag in flags), *threads, str(source), "-o", str(goal)]
    subprocess.run(command, check=True, capture_output=True)


def room_to_compile() -> AbstractContextManager[None]:
    """Temporary files and Inductor's are where they can be inside; for the whole process, so in one thread."""
    return room_for_torch(_torchs_directory)


def load_library(path: Path, device: torch.device) -> Call:
    """The function in a compiled library. Takes under a millisecond, without inductor."""
    run: Call = _runner(path, device).run
    return run


class NativeState:
    """A compiled library with its state inside: called with the arguments, it changes the state.

    What: AOTInductor's runners, and their maps of constants. Degraded path: none is needed, torch has had them since
    before the oldest version that is supported.
    """

    def __init__(self, path: Path, device: torch.device) -> None:
        self._runner = _runner(path, device)
        self.run: Call = self._runner.run

    def read(self) -> dict[str, torch.Tensor]:
        """Copies of the state by its paths: what the runner gives is in memory that dies with it."""
        found: dict[str, torch.Tensor] = self._runner.extract_constants_map(False)
        return {path: found[path].clone() for path in sorted(found)}

    def write(self, values: Mapping[str, torch.Tensor]) -> None:
        """Copy values into the state. They have its paths, types, shapes and strides."""
        for path, live in self._runner.extract_constants_map(False).items():
            if path in values:
                live.copy_(values[path])


def _runner(path: Path, device: torch.device) -> Any:
    runners = torch._C._aoti
    if device.type == "cuda":
        return runners.AOTIModelContainerRunnerCuda(str(path), 1, str(device))
    return runners.AOTIModelContainerRunnerCpu(str(path), 1)


def pointer_guard_in(path: Path) -> PointerGuard:
    """What makes a check that tensors keep their data pointers, by the code for it in a compiled library.

    A tenth of the time of `Tensor.data_ptr`, tensor by tensor. What: the reader of a Python tensor's pointer that
    Inductor gives to C++ code. Degraded path: `_torch.pointer_guard`.
    """
    try:
        read = ctypes.c_void_p(
            importlib.import_module("torch._C._dynamo.guards")._torchinductor_pyobject_tensor_data_ptr
        )
        same = getattr(ctypes.PyDLL(str(path)), POINTERS)
    except (ImportError, AttributeError, OSError, TypeError):
        return pointer_guard
    same.restype = ctypes.c_bool

    def guard(tensors: Sequence[torch.Tensor]) -> tuple[Callable[[], Any], Any]:
        array = ctypes.c_void_p * len(tensors)
        held, pointers = array(*map(id, tensors)), array(*(tensor.data_ptr() for tensor in tensors))
        return partial(same, held, pointers, ctypes.c_long(len(tensors)), read), True

    return guard


def called_kernels(path: Path) -> tuple[str, ...]:
    """The ops that a compiled library leaves to torch's own kernels, by name.

    What: the names of AOTInductor's C functions in the library. Degraded path: none are named.
    """
    found = re.findall(rb"aoti_torch_(?:cpu|cuda|mps|xpu)_(\w+)\0", path.read_bytes())
    return tuple(sorted({name.decode() for name in found}))


def compiler_missing() -> str | None:
    """Why no C++ code can be compiled here; None if it can."""
    try:
        importlib.import_module("torch._inductor.cpp_builder").get_cpp_compiler()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _made(
    module: fx.GraphModule,
    meta: Mapping[str, Any],
    inputs: tuple[Any, ...],
    options: dict[str, Any],
    keep: Keep | None,
) -> Any:
    own = with_own_linear(module)
    own.meta.update(meta)
    try:
        with ExitStack() as stack:
            if keep is not None:
                stack.enter_context(instructions_taken_as_told())
            stack.enter_context(short_waits())
            stack.enter_context(without_interpreter_lock() if order_of(module.graph) else nullcontext())
            if keep is not None:
                stack.enter_context(interface_apart(keep))
            return torch._inductor.aot_compile(own, inputs, options=options)
    except Exception as error:
        if keep is None or not _is_of_the_compiler(error) or out_of_room(error):
            raise
        cause = str(error).partition("\n")[0]
    made = _made(module, meta, inputs, options, None)
    LOGGER.warning("compiled a step without the object that steps share: %s", cause)
    return made


def _torchs_directory() -> str:
    """Where Inductor keeps its files; torch has made it a function of this module since before the oldest supported."""
    return str(importlib.import_module("torch._inductor.runtime.cache_dir_utils").default_cache_dir())


def _is_gcc() -> bool:
    return bool(importlib.import_module("torch._inductor.cpp_builder").is_gcc())


def _is_of_the_compiler(error: Exception) -> bool:
    """True if a compiler or a file is at fault, and not the graph."""
    refused: Any = importlib.import_module("torch._inductor.exc").CppCompileError
    return isinstance(getattr(error, "inner_exception", error), (refused, OSError))


def writes_come_last() -> bool:
    """True if compiled code writes into its inputs only when nothing is left that can fail."""
    return can_order()


def is_unordered(error: BaseException) -> bool:
    """True if a graph could not be compiled because a kernel of it both writes into an input and can fail."""
    return isinstance(getattr(error, "inner_exception", error), UnorderedError)


def op_at_fault(error: BaseException) -> str | None:
    """The name of the op that Inductor could not compile, as far as its error says."""
    match = re.search(r"target: (\S+)|\b(aten\.\w+\.\w+)|\baten::(\w+)", str(error))
    if match is None:
        return None
    return match[1] or match[2] or f"aten.{match[3]}.default"
