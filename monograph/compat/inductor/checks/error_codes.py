"""Errors of the kernels that generated code calls, where Inductor does not ask for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any

from monograph.compat.patching import replaced

_CALLS = ("_generate_scatter_fallback", "_generate_index_put_fallback")
_WRAPPERS = (
    ("torch._inductor.codegen.cpp_wrapper_cpu", "CppWrapperCpu"),
    ("torch._inductor.codegen.cpp_wrapper_cpu_array_ref", "CppWrapperCpuArrayRef"),
)


@contextmanager
def checked_calls() -> Iterator[None]:
    """Have generated code end where a kernel for a scatter or an `index_put` fails.

    A kernel with a C interface returns its error as a number. Inductor writes code that looks at it, but not after
    these calls: a bad index leaves the step running, with what was in the result before.
    What: the functions that write these calls are replaced. Degraded path: those that are missing are left.
    """
    with ExitStack() as stack:
        for module, name in _WRAPPERS:
            wrapper: Any = getattr(import_module(module), name)
            for call in _CALLS:
                if call in vars(wrapper):
                    stack.enter_context(replaced(wrapper, call, _checked(vars(wrapper)[call])))
        yield


def _checked(theirs: Callable[..., None]) -> Callable[..., None]:
    def generate(wrapper: Any, *args: Any, **kwargs: Any) -> None:
        write = wrapper.writeline
        with replaced(wrapper, "writeline", lambda line: write(_with_check(line))):
            theirs(wrapper, *args, **kwargs)

    return generate


def _with_check(line: Any) -> Any:
    if isinstance(line, str) and line.startswith("aoti_torch_") and line.endswith(");"):
        return f"AOTI_TORCH_ERROR_CODE_CHECK({line.removesuffix(';')});"
    return line
