"""How the processes of a placement share a tensor: split along a dimension, the same on each, or summands."""

from monograph.distributed.sbp import broadcast, partial_sum, sbp, split

__all__ = ["broadcast", "partial_sum", "sbp", "split"]
