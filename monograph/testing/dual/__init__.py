"""AutoTest: random tests that compare eager mode with graphs, for people who know OneFlow's.

>>> from monograph.testing.dual import *
>>> @autotest(n=2)
... def test_matmul(test_case):
...     k = random(1, 6)
...     x = random_tensor(ndim=2, dim1=k).to(random_device())
...     y = random_tensor(ndim=2, dim0=k).to(random_device())
...     return torch.matmul(x, y)
>>> test_matmul()
"""

from __future__ import annotations

import torch as _torch

import monograph.testing._hypothesis  # noqa: F401  says plainly what to install
from monograph.testing.dual.decorator import autotest
from monograph.testing.dual.excluded import EXCLUDED
from monograph.testing.dual.generators import (
    constant,
    nothing,
    oneof,
    random,
    random_bool,
    random_or_nothing,
)
from monograph.testing.dual.objects import dual
from monograph.testing.dual.tensors import (
    choice_tensor,
    cpu_device,
    gpu_device,
    random_device,
    random_dtype,
    random_pytorch_tensor,
    random_tensor,
)
from monograph.testing.timing import profile

torch = dual(_torch, "torch")

__all__ = [
    "EXCLUDED",
    "autotest",
    "choice_tensor",
    "constant",
    "cpu_device",
    "dual",
    "gpu_device",
    "nothing",
    "oneof",
    "profile",
    "random",
    "random_bool",
    "random_device",
    "random_dtype",
    "random_or_nothing",
    "random_pytorch_tensor",
    "random_tensor",
    "torch",
]
