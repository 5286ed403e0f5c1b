"""How `torch.cond` and its like let Dynamo find what their branches close over (`torch._higher_order_ops.utils`).

Without it Dynamo looks through what watches a trace, and refuses.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeAlias

import torch

from monograph.compat.modes import without_function_mode
from monograph.compat.patching import replace_here

Around: TypeAlias = Callable[[Callable[..., Any]], Callable[..., Any]]


@contextmanager
def branches_compiled(around: Around) -> Iterator[None]:
    """Let `around` wrap the function that calls Dynamo: it gets the function to trace, and its arguments as a tuple.

    What: `_hop_compile_and_call`. Why: what watches a step has to step aside for Dynamo. Degraded path: torch 2.11
    has none; there each op of this kind prepares by `setup_compilation_env`, and then calls `torch.compile`.
    """
    higher_order: Any = importlib.import_module("torch._higher_order_ops.utils")
    compile_branches = getattr(higher_order, "_hop_compile_and_call", None)
    with ExitStack() as stack:
        if compile_branches is not None:
            replace_here(stack, higher_order, "_hop_compile_and_call", around(compile_branches))
        else:
            prepared = higher_order.setup_compilation_env
            replace_here(
                stack, higher_order, "setup_compilation_env", lambda: _next_compiled(prepared, around)
            )
        yield


@contextmanager
def _next_compiled(prepared: Callable[[], Any], around: Around) -> Iterator[Any]:
    """Inside, the next call of `torch.compile` is that of a function with branches."""
    theirs: Any = torch.compile
    with prepared() as backend, ExitStack() as stack:

        def compiled(function: Any, **options: Any) -> Callable[..., Any]:
            def call(function: Any, args: tuple[Any, ...]) -> Any:
                return theirs(function, **options)(*args)

            stack.close()
            return lambda *args: around(call)(function, args)

        replace_here(stack, torch, "compile", compiled)
        yield backend


@contextmanager
def unseen_function_mode() -> Iterator[None]:
    """What: attention layers hidden from function modes, branches of `torch.cond` compiled without ours. Why: an eager
    step under our mode takes the kernels of one without. Degraded path: none.
    """

    def around(compile_branches: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            with without_function_mode():
                return compile_branches(*args)

        return run

    with ExitStack() as stack:
        replace_here(stack, torch.overrides, "has_torch_function", lambda _arguments: False)
        stack.enter_context(branches_compiled(around))
        yield
