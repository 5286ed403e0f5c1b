"""A gradient scaler that the graph does not know must not take part in a step: it would keep tensors of the trace."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from monograph.compat.patching import replaced
from monograph.errors import CaptureError


@contextmanager
def foreign_scalers_refused(known: object) -> Iterator[None]:
    """Inside, an enabled `GradScaler` other than `known` raises when it is used in this thread."""
    thread = threading.get_ident()

    def only_known(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(scaler: Any, *args: Any, **kwargs: Any) -> Any:
            if scaler is not known and scaler.is_enabled() and threading.get_ident() == thread:
                raise CaptureError(
                    "build() uses a gradient scaler that the graph does not know",
                    hint="call self.set_grad_scaler(scaler) in __init__, and write loss.backward() in build()",
                )
            return original(scaler, *args, **kwargs)

        return run

    with ExitStack() as stack:
        for name in ("scale", "unscale_", "step", "update"):
            original = getattr(torch.amp.GradScaler, name)
            stack.enter_context(replaced(torch.amp.GradScaler, name, only_known(original)))
        yield
