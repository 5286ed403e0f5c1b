"""Ranks that agree on what they will run, and notice when one is gone, late or does something else.

In: a process group and the collectives of a step. Out: nothing if all ranks agree, else a DistributedError on every
rank. Words go through the store of the group, never through tensors. Imports nothing of ours but the ground floor.
"""

from monograph.distributed.agreement.agreement import Agreement
from monograph.distributed.agreement.beginning import Beginning
from monograph.distributed.agreement.ranks import Ranks
from monograph.distributed.agreement.signature import Signature, signature_of
from monograph.distributed.agreement.watch import Watch

__all__ = ["Agreement", "Beginning", "Ranks", "Signature", "Watch", "signature_of"]
