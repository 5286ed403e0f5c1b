"""Another way to compute attention in half types: by the kernels for float32.

Processors without instructions for a half type, and kernels that do not use them, take longer than two conversions.
"""

from __future__ import annotations

import operator
from typing import Any

import torch

from monograph.ir.meta import TensorMeta
from monograph.kernels.candidates import Candidate, Emit, Table, as_described

aten = torch.ops.aten
FORWARD = aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def _forward(emit: Emit, query: Any, *given: Any, **options: Any) -> Any:
    made = _in_float32(emit, FORWARD, query, *given, **options)
    result, sums = (emit(operator.getitem, made, position) for position in range(2))
    return _like(emit, result, query), sums


def _backward(emit: Emit, grad: Any, *given: Any, **options: Any) -> Any:
    made = _in_float32(emit, BACKWARD, grad, *given, **options)
    return tuple(_like(emit, emit(operator.getitem, made, position), grad) for position in range(3))


def _in_float32(emit: Emit, op: Any, *given: Any, **options: Any) -> Any:
    def wide(item: Any) -> Any:
        return (
            emit(aten._to_copy.default, item, dtype=torch.float32) if _is_half(as_described(item)) else item
        )

    return emit(op, *map(wide, given), **{name: wide(item) for name, item in options.items()})


def _like(emit: Emit, result: Any, operand: Any) -> Any:
    return emit(aten._to_copy.default, result, dtype=as_described(operand).dtype)


def _is_half(item: Any) -> bool:
    return isinstance(item, TensorMeta) and item.is_half and item.device.type == "cpu"


def _fits(first: Any, *_given: Any, **_options: Any) -> bool:
    return _is_half(first)


ATTENTION: Table = {
    FORWARD: (Candidate("float32", _fits, _forward, takes_options=True),),
    BACKWARD: (Candidate("float32", _fits, _backward, takes_options=True),),
}
