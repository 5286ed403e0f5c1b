"""How OneFlow moves tensors between processes: in one process nothing is moved."""

from monograph.flow.boxing import nccl

__all__ = ["nccl"]
