"""Code of our own as functions of tensors, for autotuning before there is a compiled step."""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx

from monograph.compat.inductor.building.interface import cores
from monograph.compat.inductor.loading import compile_to_functions, room_to_compile
from monograph.ir.meta import TensorMeta, value
from monograph.ir.own_ops import NATIVE
from monograph.layout import Layout
from monograph.native import KERNELS, Kernel
from monograph.native.code import text_of

_FEW = 8  # functions that are not worth another compiler: what they include takes it as long


@dataclass(frozen=True, eq=False)
class Compiled:
    """A function of tensors."""

    results: tuple[Layout, ...]
    _run: Callable[..., None]

    def once(self, *args: Any) -> Any:
        """What it gives, several results as a tuple; arguments that are no tensors are known to it."""
        return self.repeat(1, *args)

    def repeat(self, count: int, *args: Any) -> Any:
        """The same, computed so many times: from Python a call takes longer than a small product."""
        made = tuple(torch.empty_strided(item.shape, item.stride) for item in self.results)
        tensors = [*(item for item in args if isinstance(item, torch.Tensor)), *made]
        self._run(count, *(item.data_ptr() for item in tensors), *(0 for _ in tensors))
        return made if len(made) > 1 else made[0]


class KernelCompiler:
    """Compiles code of our own: all that was ordered when the first is asked for, on all cores."""

    def __init__(self, ordered: Iterable[Kernel] = ()) -> None:
        self._ordered = dict.fromkeys(ordered)
        self._made: dict[Kernel, Compiled] = {}

    def compiled(self, kernel: Kernel) -> Compiled:
        """A kernel as a function. Raises RuntimeError if it cannot be compiled."""
        if kernel not in self._made:
            ordered = list(self._ordered | {kernel: None})
            self._ordered.clear()
            with room_to_compile():
                for part in _shared_among(cores(), ordered):
                    self._made |= part
        return self._made[kernel]


def kernel_at(node: fx.Node) -> Kernel:
    """What an op with code of our own computes at a node."""
    operands = [value(item) for item in node.all_input_nodes]
    layouts = [item.layout for item in operands if isinstance(item, TensorMeta)]
    options = [item for item in node.args if not (item is None or isinstance(item, fx.Node))]
    return KERNELS[node.target.name()](layouts, options, torch.get_num_threads())  # type: ignore[union-attr]


def kernels_in(graph: fx.Graph) -> list[Kernel]:
    """What code of our own computes in a graph."""
    return [kernel_at(node) for node in graph.nodes if node.op == "call_function" and node.target in NATIVE]


def _shared_among(most: int, kernels: Sequence[Kernel]) -> list[dict[Kernel, Compiled]]:
    count = min(most, -(-len(kernels) // _FEW))
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(_library, [kernels[i::count] for i in range(count)]))


def _library(kernels: Sequence[Kernel]) -> dict[Kernel, Compiled]:
    codes = [kernel.code for kernel in kernels]
    try:
        with tempfile.TemporaryDirectory(prefix="monograph-") as folder:
            path = Path(folder) / "own.so"
            compile_to_functions(text_of(list(dict.fromkeys(codes))), path)
            library = ctypes.CDLL(str(path))
    except (OSError, subprocess.CalledProcessError) as error:
        raise RuntimeError(f"code of our own cannot be compiled: {error}") from error
    made = {}
    for kernel, code in zip(kernels, codes, strict=True):
        run, count = getattr(library, code.repeated), len(code.tensors)
        run.restype = None
        run.argtypes = [ctypes.c_long, *[ctypes.c_void_p] * count, *[ctypes.c_long] * count]
        made[kernel] = Compiled(kernel.results, run)
    return made
