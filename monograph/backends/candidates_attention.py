"""Another way to compute attention in half types: by the kernels for float32.

Processors without instructions for a half type, and kernels that do not use them, take longer than two conversions.
"""

from __future__ import annotations

import operator
from typing import Any

import torch

from monograph.backends.candidates import Candidate, Emit, Table
from monograph.ir.meta import TensorMeta, form

aten = torch.ops.aten
_FORWARD = aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_HALF = (torch.bfloat16, torch.float16)


def _forward(emit: Emit, query: Any, *given: Any, **options: Any) -> Any:
    made = _in_float32(emit, _FORWARD, query, *given, **options)
    result, sums = (emit(operator.getitem, made, position) for position in range(2))
    return _narrow(emit, result, query), sums


def _backward(emit: Emit, grad: Any, *given: Any, **options: Any) -> Any:
    made = _in_float32(emit, _BACKWARD, grad, *given, **options)
    return tuple(_narrow(emit, emit(operator.getitem, made, position), grad) for position in range(3))


def _in_float32(emit: Emit, op: Any, *given: Any, **options: Any) -> Any:
    def wide(item: Any) -> Any:
        is_half = _is_half(form(item)) if isinstance(item, torch.fx.Node) else False
        return emit(aten._to_copy.default, item, dtype=torch.float32) if is_half else item

    return emit(op, *map(wide, given), **{name: wide(item) for name, item in options.items()})


def _narrow(emit: Emit, item: Any, like: Any) -> Any:
    described = form(like)
    assert described is not None
    return emit(aten._to_copy.default, item, dtype=described.dtype)


def _is_half(item: Any) -> bool:
    return isinstance(item, TensorMeta) and item.dtype in _HALF and item.device.type == "cpu"


def _fits(first: Any, *_given: Any, **_options: Any) -> bool:
    return _is_half(first)


ATTENTION: Table = {
    _FORWARD: (Candidate("float32", _fits, _forward, takes_options=True),),
    _BACKWARD: (Candidate("float32", _fits, _backward, takes_options=True),),
}
