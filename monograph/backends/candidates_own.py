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
from monograph._products import HEADER, REPEATED, Product
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
    _run: Callable[..., None]

    def once(self, *operands: torch.Tensor) -> torch.Tensor:
        """The product of two matrices, plus a bias."""
        return self.repeat(1, *operands)

    def repeat(self, count: int, *operands: torch.Tensor) -> torch.Tensor:
        """The same, multiplied so many times: from Python a call takes longer than a small product."""
        made = torch.empty(self.product.m, self.product.n)
        tensors = (*operands, made)
        self._run(count, *(item.data_ptr() for item in tensors), *(0 for _ in tensors))
        return made


def compiled(product: Product) -> Compiled:
    """Compile a product. Raises RuntimeError if that cannot be done."""
    with tempfile.TemporaryDirectory(prefix="monograph-") as folder:
        library = Path(folder) / "product.so"
        try:
            compile_to_functions(f"{HEADER}\n{product.definition}{product.repetition}", library)
        except (OSError, subprocess.CalledProcessError) as error:
            raise RuntimeError(f"a matrix product cannot be compiled: {error}") from error
        run = getattr(ctypes.CDLL(str(library)), REPEATED)
    count = 4 if product.has_bias else 3
    run.restype = None
    run.argtypes = [ctypes.c_long, *[ctypes.c_void_p] * count, *[ctypes.c_long] * count]
    return Compiled(product, run)


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
