"""Small matrix products by C++ code of our own: for compiled steps, and for trials on its own."""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from collections.abc import Callable
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


def compiled(product: Product) -> Callable[..., torch.Tensor]:
    """A product as a function of tensors. Raises RuntimeError if no code can be compiled."""
    with tempfile.TemporaryDirectory(prefix="monograph-") as folder:
        library = Path(folder) / "product.so"
        try:
            compile_to_functions(f"{HEADER}\n{product.definition}", library)
        except (OSError, subprocess.CalledProcessError) as error:
            raise RuntimeError(f"a matrix product cannot be compiled: {error}") from error
        function = getattr(ctypes.CDLL(str(library)), product.name)
    function.restype = None
    count = 4 if product.has_bias else 3
    function.argtypes = [ctypes.c_void_p] * count + [ctypes.c_long] * count
    starts = (0,) * count

    def run(a: torch.Tensor, b: torch.Tensor, *bias: torch.Tensor) -> torch.Tensor:
        made = torch.empty(product.m, product.n)
        function(a.data_ptr(), b.data_ptr(), *(item.data_ptr() for item in bias), made.data_ptr(), *starts)
        return made

    return run


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
