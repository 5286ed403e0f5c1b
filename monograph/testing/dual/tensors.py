"""Random tensors, dtypes and devices of a case."""

from __future__ import annotations

import unittest
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import torch
from hypothesis import strategies as st

from monograph.testing.dual.case import Case, case_for
from monograph.testing.dual.generators import Generator, generated
from monograph.testing.dual.objects import DualTensor
from monograph.testing.strategies import TensorSpec
from monograph.testing.strategies.tensors import SEEDS

_MOST_DIMS, _LONGEST_SIDE = 5, 7
_FLOATING = (torch.float32, torch.float64)
_WHOLE = (torch.int8, torch.int32, torch.int64)
_ARITHMETIC = (*_FLOATING, *_WHOLE)

DTYPES: Final[Mapping[str, tuple[torch.dtype | None, ...]]] = MappingProxyType(
    {
        "None": (None,),
        "bool": (torch.bool,),
        "float": _FLOATING,
        "half": (torch.float16,),
        "bfloat16": (torch.bfloat16,),
        "signed": _WHOLE,
        "unsigned": (torch.uint8,),
        "int": _WHOLE,
        "image": (torch.uint8, torch.float32),
        "index": (torch.int32, torch.int64),
        "complex": (torch.complex64, torch.complex128),
        "arithmetic": _ARITHMETIC,
        "pod": (*_ARITHMETIC, torch.uint8, torch.bool),
        "all": (*_ARITHMETIC, torch.float16, torch.bfloat16),
    }
)
_OF_PYTHON: Final[Mapping[Any, torch.dtype]] = MappingProxyType(
    {float: torch.float32, int: torch.int64, bool: torch.bool, complex: torch.complex64}
)


def random_tensor(
    ndim: Any = None,
    dim0: Any = 1,
    dim1: Any = None,
    dim2: Any = None,
    dim3: Any = None,
    dim4: Any = None,
    low: float | Generator | None = None,
    high: float | Generator | None = None,
    dtype: Any = float,
    requires_grad: bool | Generator = True,
    pin_memory: bool = False,
) -> DualTensor:
    """A random tensor: `ndim` from 1 to 5, sides from 1 to 7 (the first is 1), values in [-1, 1) or [-10, 11).

    `dtype` is float, int, bool, complex or a torch dtype. Whole numbers never require gradients.
    """
    case = case_for("random_tensor()")
    kind = _value(dtype)
    kind = complex if kind is float and case.complex_numbers else kind
    kind = _OF_PYTHON.get(kind, kind)
    differentiable = kind.is_floating_point or kind.is_complex
    spec = TensorSpec(
        _shape(case, ndim, (dim0, dim1, dim2, dim3, dim4)),
        kind,
        values="uniform" if differentiable else "whole",
        low=_bound(low, None if differentiable else -10 if kind.is_signed else 0),
        high=_bound(high, None if differentiable else 2 if kind is torch.bool else 11),
        requires_grad=bool(_value(requires_grad)) and differentiable,
        seed=case.draw(SEEDS, "seed of a tensor"),
    )
    tensor = spec.build()
    if pin_memory:
        tensor = tensor.pin_memory()
    case.program.add_input(tensor, f"build({spec!r})")
    return DualTensor(tensor)


random_pytorch_tensor = random_tensor


def choice_tensor(
    a: int | Sequence[Any],
    size: int | Sequence[int] | None = None,
    replace: bool = True,
    p: Sequence[float] | None = None,
    dtype: Any = int,
    requires_grad: bool | Generator = False,
) -> DualTensor:
    """A tensor of elements chosen out of `a`, or out of range(a), as `numpy.random.choice` chooses."""
    case = case_for("choice_tensor()")
    generator = np.random.default_rng(case.draw(SEEDS, "seed of a choice"))
    kind = _OF_PYTHON.get(dtype, dtype)
    chosen = generator.choice(a, size, replace, p)
    tensor = torch.tensor(np.asarray(chosen).tolist(), dtype=kind)
    tensor.requires_grad_(bool(_value(requires_grad)) and kind.is_floating_point)
    made_by = f"torch.tensor({tensor.tolist()!r}, dtype={kind}, requires_grad={tensor.requires_grad})"
    case.program.add_input(tensor, made_by)
    return DualTensor(tensor)


def random_dtype(names: Sequence[str]) -> torch.dtype | None:
    """One of the dtypes that the names stand for: `random_dtype(["float", "int"])`. `DTYPES` lists the names."""
    case = case_for("random_dtype()")
    found: torch.dtype | None = case.draw(
        st.sampled_from([dtype for name in names for dtype in DTYPES[name]]), "dtype"
    )
    return found


class _Device(Generator):
    """The name of a device, one of those that this machine has."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self._names = names

    def __str__(self) -> str:
        return f"device out of {', '.join(self._names)}"

    def draw(self, case: Case) -> str:
        """The name."""
        there = [name for name in self._names if name == "cpu" or torch.cuda.is_available()]
        if not there:
            raise unittest.SkipTest("this test needs a GPU, and there is none")
        return there[0] if len(there) == 1 else str(case.draw(st.sampled_from(there), "device"))


def random_device() -> Generator:
    """ "cpu", or "cuda" where there is a GPU."""
    return _Device("cpu", "cuda")


def cpu_device() -> Generator:
    """ "cpu"."""
    return _Device("cpu")


def gpu_device() -> Generator:
    """ "cuda"; the test is skipped on a machine without a GPU."""
    return _Device("cuda")


def _shape(case: Case, ndim: Any, dims: Sequence[Any]) -> tuple[int, ...]:
    count = case.draw(st.integers(1, _MOST_DIMS), "ndim") if ndim is None else int(_value(ndim, int))
    side = st.integers(1, _LONGEST_SIDE)
    wanted = [*dims[:count], *[None] * (count - len(dims))]
    free = iter(case.draw(st.tuples(*[side for dim in wanted if dim is None]), "sides"))
    return tuple(next(free) if dim is None else int(_value(dim, int)) for dim in wanted)


def _bound(item: Any, usual: float | None) -> float | None:
    value = _value(item, float)
    return usual if value is None else float(value)


def _value(item: Any, kind: Any = None) -> Any:
    generator = generated(item)
    return (generator.to(kind) if kind is not None else generator).value()
