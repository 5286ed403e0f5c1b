"""The interface of a compiled model, the same in every library: compiled once, and linked.

Private API of `torch._inductor`, like `compat/inductor/loading.py`; nothing of it is imported before the first compilation.
"""

from __future__ import annotations

import importlib
import shlex
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from monograph.compat.inductor.codegen import wrapper_with_stack
from monograph.compat.patching import replaced

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
        (wrapper_with_stack(), "get_device_include_path_aot", _few_headers),
        (codecache, "_get_cpp_wrapper_header", lambda theirs: lambda *args, **options: HEADERS[0]),
        (codecache, "CppBuilder", interface.linked),
    ]
    with ExitStack() as stack:
        if all(hasattr(owner, name) for owner, name, _ in replacements):
            for owner, name, ours in replacements:
                stack.enter_context(replaced(owner, name, ours(getattr(owner, name))))
        yield


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
