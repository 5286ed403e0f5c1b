"""Nested containers of tensors that processes share."""

from monograph.flow.names import forwarding
from monograph.flow.tensors.shared import to_global, to_local

__all__ = ["to_global", "to_local"]
__getattr__ = forwarding("utils.global_view", None)
