"""Small matrix products by C++ code of our own: for compiled steps, and for trials on its own."""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx

from monograph._inductor import compile_to_functions
from monograph._products import HEADER, Product
from monograph.backends.candidates import Candidate, Emit, Table
from monograph.ir.meta import TensorMeta, value
from monograph.ir.own_ops import PRODUCT

aten = torch.ops.aten


def product_of(a: TensorMeta, b: TensorMeta, bias: TensorMeta | None = None) -> Product:
    """The product of two matrices that are described."""
    (m, k), (_, n) = a.shape, b.shape
    threads = torch.get_num_threads()
    return Product(m, k, n, a.stride, b.stride, has_bias=bias is not None, threads=threads)


def product_at(node: fx.Node) -> Product:
    """What a node with our op multiplies."""
    operands = [value(item) for item in node.args if isinstance(item, fx.Node)]
    return product_of(*(item for item in operands if isinstance(item, TensorMeta)))


@dataclass(frozen=True, eq=False)
class Compiled:
    """A product as a function of tensors, for trials."""

    product: Product
    _once: Callable[..., None]
    _often: Callable[..., None]

    def once(self, *operands: torch.Tensor) -> torch.Tensor:
        """The product of two matrices, plus a bias."""
        made = torch.empty(self.product.m, self.product.n)
        self._once(*_pointers(*operands, made))
        return made

    def repeat(self, count: int, *operands: torch.Tensor) -> None:
        """Multiply so many times in one call: from Python a call takes longer than a small product."""
        made = torch.empty(self.product.m, self.product.n)
        self._often(count, *_pointers(*operands, made))


def _pointers(*tensors: torch.Tensor) -> tuple[int, ...]:
    """Where the tensors lie, and where to begin in them."""
    return *(item.data_ptr() for item in tensors), *(0 for _ in tensors)


def compiled(product: Product) -> Compiled:
    """Compile a product. Raises RuntimeError if that cannot be done."""
    with tempfile.TemporaryDirectory(prefix="monograph-") as folder:
        library = Path(folder) / "product.so"
        try:
            compile_to_functions(f"{HEADER}\n{product.definition}{product.repeated}", library)
        except (OSError, subprocess.CalledProcessError) as error:
            raise RuntimeError(f"a matrix product cannot be compiled: {error}") from error
        loaded = ctypes.CDLL(str(library))
    count = 4 if product.has_bias else 3
    operands = [ctypes.c_void_p] * count + [ctypes.c_long] * count
    once, often = getattr(loaded, product.name), loaded.monograph_repeated
    once.restype, once.argtypes = None, operands
    often.restype, often.argtypes = None, [ctypes.c_long, *operands]
    return Compiled(product, once, often)


def _fits(a: Any, b: Any) -> bool:
    return _is_plain(a) and _is_plain(b) and product_of(a, b).can_be_made


def _fits_sum(bias: Any, a: Any, b: Any) -> bool:
    return _fits(a, b) and _is_plain(bias) and bias.shape == b.shape[-1:] and bias.stride == (1,)


def _is_plain(item: Any) -> bool:
    return isinstance(item, TensorMeta) and item.dtype is torch.float32 and item.device.type == "cpu"


def _mm(emit: Emit, a: Any, b: Any) -> Any:
    return emit(PRODUCT, a, b)


def _addmm(emit: Emit, bias: Any, a: Any, b: Any) -> Any:
    return emit(PRODUCT, a, b, bias)


OWN: Table = {
    aten.mm.default: (Candidate("own", _fits, _mm),),
    aten.addmm.default: (Candidate("own", _fits_sum, _addmm),),
}
