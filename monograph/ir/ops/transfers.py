"""What one rank sends and another receives, as ops that change nothing which they are given.

`_c10d_functional.wait_tensor` waits for both. What is sent has to be contiguous, and what is received is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch

from monograph.compat.distributed.ops import RECEIVE_NAME, SEND_NAME
from monograph.compat.distributed.transfers import begin_receive, begin_send

_LIBRARY: Final = torch.library.Library("monograph", "FRAGMENT")
_LIBRARY.define(f"{SEND_NAME}(Tensor tensor, int to, int tag, str group_name) -> Tensor")
_LIBRARY.define(
    f"{RECEIVE_NAME}(SymInt[] shape, ScalarType dtype, Device device, int source, int tag, str group_name) -> Tensor"
)


def _sent(tensor: torch.Tensor, *_: Any) -> torch.Tensor:
    return tensor.new_empty(0)


def _received(shape: Sequence[int], dtype: torch.dtype, device: torch.device, *_: Any) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


for _name, _run, _described in ((SEND_NAME, begin_send, _sent), (RECEIVE_NAME, begin_receive, _received)):
    _LIBRARY.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"monograph::{_name}", _described, lib=_LIBRARY)
SEND: Final[Any] = torch.ops.monograph.send.default
RECEIVE: Final[Any] = torch.ops.monograph.receive.default
