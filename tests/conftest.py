"""Settings that all tests share."""

from __future__ import annotations

import torch
from hypothesis import settings

torch.set_num_threads(1)  # the tensors are small: threads would only wait for each other

settings.register_profile(
    "monograph", deadline=None, derandomize=True
)  # no time limits, the same cases each run
settings.load_profile("monograph")
