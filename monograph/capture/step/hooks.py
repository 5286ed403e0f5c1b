"""Hooks of parameters and arguments under the trace: the traced backward finds them at the fakes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from monograph.capture.tensors.fakes import Inputs
from monograph.compat.autograd import parameter_hooks
from monograph.compat.modes import FunctionMode
from monograph.errors import HookError
from monograph.ir.call.signature import Call
from monograph.ir.graph_signature import Argument


def carry_hooks(inputs: Inputs, call: Call, mode: FunctionMode) -> None:
    """Hooks of parameters and arguments go to their fakes. `call` has the arguments that build() gets."""
    for item in inputs.items:
        real = call.leaves[item.source.index] if isinstance(item.source, Argument) else item.owner
        if isinstance(real, torch.Tensor) and real.requires_grad and real.is_leaf:
            before, after = parameter_hooks(real)
            try:
                for hook in before:
                    item.shown.register_hook(within(mode, hook))
                for hook in after:
                    item.shown.register_post_accumulate_grad_hook(within(mode, hook))
            except RuntimeError as error:
                raise HookError(f"a hook of {item.path} cannot be carried into the graph: {error}") from error


def within(mode: FunctionMode, hook: Callable[..., Any]) -> Callable[..., Any]:
    """The same hook under the mode of the trace: backward runs outside of it."""

    def run(*args: Any) -> Any:
        with mode:
            return hook(*args)

    return run
