"""How many threads tests compute with: one, since the tensors are small, unless the run is told another number."""

from __future__ import annotations

import os

import torch


def set_threads() -> None:
    """Also in the second processes of a test: with another number, sums are taken in another order."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
