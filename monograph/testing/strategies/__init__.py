"""Hypothesis strategies for tensors, arguments that fit each other, and modules with inputs.

>>> from hypothesis import given
>>> from monograph.testing import align
>>> from monograph.testing.strategies import broadcastable
>>> @given(broadcastable(2))
... def test_add(pair):
...     align(torch.add, *pair)
"""

from __future__ import annotations

import monograph.testing._hypothesis  # noqa: F401  says plainly what to install
from monograph.testing.strategies.arguments import (
    broadcastable,
    gather_arguments,
    matmul_pairs,
    same_shape,
    tensor_and_dim,
    tensor_and_index,
)
from monograph.testing.strategies.module_case import Construction, ModuleCase, make
from monograph.testing.strategies.modules import MODULES, modules
from monograph.testing.strategies.spec import TensorSpec, build
from monograph.testing.strategies.tensors import (
    COMPLEX,
    DTYPES,
    FLOATS,
    INTEGERS,
    LAYOUTS,
    shapes,
    tensor_specs,
    tensors,
)
from monograph.testing.strategies.values import VALUES, special_numbers

__all__ = [
    "COMPLEX",
    "DTYPES",
    "FLOATS",
    "INTEGERS",
    "LAYOUTS",
    "MODULES",
    "VALUES",
    "Construction",
    "ModuleCase",
    "TensorSpec",
    "broadcastable",
    "build",
    "gather_arguments",
    "make",
    "matmul_pairs",
    "modules",
    "same_shape",
    "shapes",
    "special_numbers",
    "tensor_and_dim",
    "tensor_and_index",
    "tensor_specs",
    "tensors",
]
