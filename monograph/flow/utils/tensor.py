"""From and to PyTorch's tensors, which these are."""

from torch import Tensor


def from_torch(torch_tensor: Tensor) -> Tensor:
    """The tensor itself."""
    return torch_tensor


def to_torch(flow_tensor: Tensor) -> Tensor:
    """The tensor itself."""
    return flow_tensor
