"""Settings that all tests share."""

from __future__ import annotations

import torch
from hypothesis import settings

torch.set_num_threads(1)  # the tensors are small: threads would only wait for each other

pytest_plugins = ["monograph.testing.plugin"]


def pytest_configure() -> None:
    settings.load_profile("monograph")
