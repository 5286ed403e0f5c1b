"""Import this, and torchvision can be imported beside a torch that it was not built for.

Its compiled operators cannot be loaded then, and it asks for the schemas of two that neither models nor transforms call.
"""

from __future__ import annotations

import torch

try:
    import torchvision  # noqa: F401
except RuntimeError:
    OPERATORS = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        OPERATORS.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
except ImportError:
    pass
