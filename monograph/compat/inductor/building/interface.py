"""The parts of a library: the interface of a model, compiled once and linked, and what is compiled at the same time.

Private API of `torch._inductor`, like `compat/inductor/loading.py`; nothing of it is imported before the first compilation.
"""

from __future__ import annotations

import copy
import importlib
import os
import shlex
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from monograph.compat.patching import replaced

# The file that a function makes from a text, made now if it is not there.
Keep = Callable[[str, Callable[[Path], None]], Path]
# What a step's code includes; AOTInductor adds eager's tensors, for a way to call models that steps do not have.
HEADERS = tuple(
    f"torch/csrc/inductor/{name}.h"
    for name in ("aoti_include/cpu", "aoti_runtime/arrayref_tensor", "aoti_runtime/thread_local")
)
INCLUDES = "\n".join(f"#include <{name}>" for name in HEADERS)
MODEL = "namespace torch::aot_inductor {{ {} class AOTInductorModelBase<AOTInductorModel>; }}"
WRITES = "_write_aoti_interface_header"
CALL = "container->run("
# Its functions are weak: a program in C++ that runs the library has no interpreter.
UNLOCKED = """\
extern "C" {
__attribute__((weak)) int PyGILState_Check();
__attribute__((weak)) void* PyEval_SaveThread();
__attribute__((weak)) void PyEval_RestoreThread(void*);
}
struct MonographUnlocked {
    void* thread = PyGILState_Check && PyGILState_Check() ? PyEval_SaveThread() : nullptr;
    ~MonographUnlocked() { if (thread) PyEval_RestoreThread(thread); }
};
"""
PRINTED = r"""std::cerr << "Error: " << e.what() << '\n';"""


@contextmanager
def interface_apart(keep: Keep) -> Iterator[None]:
    """Link what is the same in every library, the interface of a model, as an object that is compiled once and kept.

    AOTInductor compiles it with each step: 6 of the 8 s that g++ takes for the code around the kernels of a small one.
    The object is known by its code, the command that makes it and the compiler's version. It does not print what it
    raises. The code around the kernels is compiled beside them, and the object from when Inductor begins to write code.
    This thread waits for the compiler of the kernels, the longest, so that an interrupt ends it.
    What: Inductor's functions that write the interface and name headers, and its class that calls the compiler, are
    replaced. Degraded path: if one is missing, nothing is; if the compiler refuses, `compile_to_library` goes without.
    """
    codecache: Any = importlib.import_module("torch._inductor.codecache")
    wrapper: Any = importlib.import_module("torch._inductor.codegen.cpp_wrapper_cpu").CppWrapperCpu
    with_stack = importlib.import_module("torch._inductor.codegen.cpp_wrapper_cpu_array_ref")
    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(cores()))
        interface = _Interface(keep, pool)
        replacements: list[tuple[Any, str, Callable[[Any], Any]]] = [
            (wrapper, WRITES, interface.only_declared),
            (with_stack.CppWrapperCpuArrayRef, "get_device_include_path_aot", _few_headers),
            (codecache, "_get_cpp_wrapper_header", lambda theirs: lambda *args, **options: HEADERS[0]),
            (codecache, "CppBuilder", interface.linked),
        ]
        if all(hasattr(owner, name) for owner, name, _ in replacements):
            for owner, name, ours in replacements:
                stack.enter_context(replaced(owner, name, ours(getattr(owner, name))))
        yield


@contextmanager
def without_interpreter_lock() -> Iterator[None]:
    """What is compiled inside does not hold the interpreter's lock while it runs; torch's runner of libraries does.

    The threads of a process group need the lock: to free a tensor that a collective has read, or because the group is written in
    Python. A step that holds the lock while it waits for a collective may wait for ever.
    What: Inductor's function that writes the interface of a model. Raises RuntimeError if it has another form: then the
    step runs on the aten backend.
    """
    wrapper: Any = importlib.import_module("torch._inductor.codegen.cpp_wrapper_cpu").CppWrapperCpu
    theirs: Any = getattr(wrapper, WRITES, None)
    if theirs is None:
        raise RuntimeError("the interface of compiled models is not where it is expected")

    def write(writer: Any) -> None:
        header, writer.header = writer.header, type(writer.header)()
        theirs(writer)
        code = writer.header.getvalue()
        if code.count(CALL) != 1:
            raise RuntimeError("the interface of compiled models is not as expected")
        writer.header = header
        header.splice(UNLOCKED + code.replace(CALL, f"MonographUnlocked unlocked; {CALL}"))

    with replaced(wrapper, WRITES, write):
        yield


def cores() -> int:
    """How many compilers may run at once."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Interface:
    """The interface of the model that is being compiled."""

    def __init__(self, keep: Keep, pool: ThreadPoolExecutor) -> None:
        self._keep, self._pool, self._code = keep, pool, ""
        self._begun: dict[str, Future[Path]] = {}  # objects of the interface, by code and command
        self._object: Future[Path] | None = None  # the one to link
        self._running: list[Future[Any]] = []

    def only_declared(self, theirs: Any) -> Callable[..., None]:
        """Take the code for the object; the wrapper's code declares that what both use of templates is there."""

        def write(wrapper: Any) -> None:
            header, wrapper.header = wrapper.header, type(wrapper.header)()
            theirs(wrapper)
            code = wrapper.header.getvalue().replace(PRINTED, "")
            self._code = f"{INCLUDES}\n{code}\n{MODEL.format('template')}\n"
            wrapper.header = header
            header.splice(MODEL.format("extern template"))
            self._begin(_usual_options())

        return write

    def linked(self, theirs: Any) -> Any:
        """The class of compiler calls that makes the object with the flags of the wrapper, and links it."""
        interface = self

        class Builder(theirs):  # type: ignore[misc]
            def __init__(
                self, name: str, sources: str | list[str], BuildOption: Any, output_dir: str = ""
            ) -> None:
                self._is_wrapper = isinstance(sources, str) and sources.endswith(".wrapper.cpp")
                self._links = isinstance(sources, list)
                if isinstance(sources, list) and interface._object is not None:  # the objects of a library
                    sources = [*sources, shlex.quote(str(interface._object.result()))]
                elif self._is_wrapper:
                    interface._object = interface._begin(BuildOption)
                super().__init__(name, sources, BuildOption, output_dir)

            def build(self) -> None:
                if self._is_wrapper:  # whose object is not looked at before all are linked
                    interface._running.append(interface._pool.submit(super().build))
                    return
                for part in interface._running if self._links else ():
                    part.result()
                super().build()

        return Builder

    def _begin(self, options: Any) -> Future[Path]:
        """The object of the interface for these options of the compiler, which may be on its way already."""
        builder: Any = importlib.import_module("torch._inductor.cpp_builder")
        plain = copy.copy(options)
        plain.precompiled_header = None  # so that it is one object, with compiled headers and without
        command = builder.CppBuilder("interface", "interface.cpp", plain).get_command_line()
        what = "\n".join([self._code, command, builder.get_compiler_version_info(options.get_compiler())])

        def make(goal: Path) -> None:
            source = goal.with_name("interface.cpp")
            source.write_text(self._code)
            call = builder.CppBuilder("interface", str(source), plain, str(goal.parent))
            call.build()
            shutil.move(call.get_target_file_path(), goal)
            source.unlink()

        if what not in self._begun:
            self._begun[what] = self._pool.submit(self._keep, what, make)
        return self._begun[what]


def _usual_options() -> Any:
    """What the compiler gets for the code around the kernels of a step."""
    builder: Any = importlib.import_module("torch._inductor.cpp_builder")
    return builder.CppTorchDeviceOptions(
        vec_isa=importlib.import_module("torch._inductor.cpu_vec_isa").pick_vec_isa(),
        device_type="cpu",
        aot_mode=True,
        compile_only=True,
        min_optimize=True,
    )


def _few_headers(_theirs: Any) -> Any:
    return staticmethod(lambda device: INCLUDES)
