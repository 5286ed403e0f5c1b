"""Which bytes a tensor owns: its dtype as safetensors spells it, and the order of its elements in memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import torch

from monograph.checkpoint.errors import Damaged
from monograph.layout import MAX_NUMBER, contiguous_stride, fills_a_block

MAX_DIMS: Final = 64

# Where safetensors has no such dtype, the bytes are stored as parts of one that it has.
CODES: Final[Mapping[torch.dtype, str]] = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e8m0fnu: "U8",
    torch.float4_e2m1fn_x2: "U8",
    torch.complex64: "C64",
    torch.complex32: "F16",
    torch.complex128: "F64",
}
PAIRS: Final = (torch.complex32, torch.complex128)  # stored with a last dimension of two
NAMES: Final[Mapping[str, torch.dtype]] = {str(dtype).removeprefix("torch."): dtype for dtype in CODES}
RAW: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


@dataclass(frozen=True, slots=True)
class Row:
    """What the manifest says of one stored tensor; `stride` only where it is not the one of its shape."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None = None
    num_bytes: int = field(init=False)  # of its elements; kept, since it is asked for many times

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_bytes", math.prod(self.shape) * self.dtype.itemsize)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape under which safetensors knows it: the dimensions in the order of memory."""
        shape = self.shape
        if self.stride is not None:
            stride = self.stride
            shape = tuple(shape[d] for d in sorted(range(len(shape)), key=lambda d: -stride[d]))
        return (*shape, 2) if self.dtype in PAIRS else shape


@dataclass(frozen=True, slots=True)
class Box:
    """A part of a tensor: the row that holds it, and where in the tensor it begins."""

    row: str
    offset: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Joined:
    """A tensor that is stored in parts."""

    shape: tuple[int, ...]
    boxes: tuple[Box, ...]

    def check_filled(self, name: str, rows: Mapping[str, Row]) -> None:
        """`Damaged` unless the parts are there, in its bounds, and as many elements as it has."""
        for box in self.boxes:
            row = rows.get(box.row)
            fits = (
                row is not None
                and row.dtype == rows[self.boxes[0].row].dtype
                and len(row.shape) == len(box.offset) == len(self.shape)
                and all(o + n <= size for o, n, size in zip(box.offset, row.shape, self.shape, strict=True))
            )
            if not fits:
                raise Damaged(f"a part of the tensor {name!r} has no place in it")
        if sum(math.prod(rows[box.row].shape) for box in self.boxes) != math.prod(self.shape):
            raise Damaged(f"the parts of the tensor {name!r} are not all of it")

    def of(self, rows: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The whole tensor."""
        parts = [(rows[box.row], box.offset) for box in self.boxes]
        dtype = parts[0][0].dtype
        raw = RAW[dtype.itemsize]
        whole = torch.zeros(self.shape, dtype=raw, device="cpu")
        for part, offset in parts:
            place = tuple(slice(o, o + n) for o, n in zip(offset, part.shape, strict=True))
            whole[place].copy_(part.view(raw))
        return whole.view(dtype)


def row_of(name: str, tensor: torch.Tensor) -> Row:
    """The row of a tensor: with its strides if its elements fill a block of memory, else without."""
    shape, stride = tuple(tensor.shape), tensor.stride()
    if stride == contiguous_stride(shape) or not fills_a_block(shape, stride):
        return Row(name, tensor.dtype, shape)
    return Row(name, tensor.dtype, shape, stride)


def on_host(tensor: torch.Tensor, row: Row, *, copy: bool = False) -> torch.Tensor:
    """The tensor in host memory, its elements in the order of its row; without `copy` itself where possible."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    if not plain.is_cpu:
        plain = plain.cpu()
    stride = row.stride or contiguous_stride(row.shape)
    if plain.stride() == stride and not (copy and plain.data_ptr() == tensor.data_ptr()):
        return plain
    # some dtypes have no kernel that copies, so integers of the same size move the bits
    raw = RAW[plain.dtype.itemsize]
    copied = torch.empty_strided(row.shape, stride, dtype=raw, device="cpu").copy_(plain.view(raw))
    return copied.view(plain.dtype)


def are_sizes(value: object) -> bool:
    """True for a list of numbers that a shape or strides may have, as JSON has it."""
    return (
        type(value) is list
        and len(value) <= MAX_DIMS
        and set(map(type, value)) <= {int}
        and (not value or (min(value) >= 0 and max(value) < MAX_NUMBER))
    )
