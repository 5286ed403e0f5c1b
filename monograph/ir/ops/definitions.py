"""All modules that define ops of our own. Importing this one defines every op that a stored program may name."""

from monograph.ir import own_ops
from monograph.ir.call import sparse
from monograph.ir.ops import fused, laid_out, transfers, unrolled

DEFINING = (own_ops, sparse, fused, laid_out, transfers, unrolled)
