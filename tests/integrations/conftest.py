"""No network, and quiet libraries."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

# read by the libraries when they are imported, which is after this file
os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
os.environ |= {"TOKENIZERS_PARALLELISM": "false", "WANDB_MODE": "offline", "WANDB_SILENT": "true"}

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState

# some libraries import torchvision where it is installed
import tests.support.torchvision_ops  # noqa: F401

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def accelerator_anew() -> None:
    """Its settings belong to the process, and cannot be changed."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
