"""What is known of a value, as JSON: of a tensor its dtype, shape and strides, of a number its kind."""

from __future__ import annotations

from typing import Any, Final

import torch

from monograph.checkpoint.bytes import NAMES, are_sizes
from monograph.checkpoint.leaves import LEAVES_FROM_JSON, Json, check, list_of
from monograph.ir.meta import ScalarMeta, TensorMeta

_MAX_DEPTH: Final = 20


def value_to_json(item: Any) -> Json:
    """What is known of a value: a dtype, shape and strides, the kind of a number, or several of them."""
    match item:
        case TensorMeta():
            row = [str(item.dtype).removeprefix("torch."), list(item.shape), list(item.stride)]
            return row if item.device.type == "cpu" else [*row, str(item.device)]
        case ScalarMeta(kind):
            return kind
        case tuple():
            return {"tuple": [value_to_json(part) for part in item]}
    return None


def value_from_json(value: Json, depth: int = _MAX_DEPTH) -> Any:
    """The description that a JSON says."""
    check(depth > 0, "a value is nested too deep")
    if value is None:
        return None
    if type(value) is str:
        check(value in ("float", "int", "bool"), f"a value is of the unknown kind {value[:40]!r}")
        return ScalarMeta(value)
    if type(value) is dict:
        check(tuple(value) == ("tuple",), "a value is of an unknown kind")
        return tuple(value_from_json(item, depth - 1) for item in list_of(value["tuple"]))
    check(type(value) is list and len(value) in (3, 4), "a value is not described")
    dtype, shape, stride, *device = value
    fits = type(dtype) is str and dtype in NAMES and are_sizes(shape) and are_sizes(stride)
    check(fits and len(shape) == len(stride), "a value is not described")
    on = LEAVES_FROM_JSON["device"](device[0]) if device else torch.device("cpu")
    return TensorMeta(tuple(shape), NAMES[dtype], tuple(stride), on)
