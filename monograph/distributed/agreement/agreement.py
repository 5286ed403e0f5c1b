"""All ranks confirm that they are about to run the same collectives, before they do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from monograph.distributed.agreement.ranks import RESTART, Ranks
from monograph.distributed.agreement.signature import Signature, difference
from monograph.distributed.agreement.watch import Watch
from monograph.errors import DistributedError


class Agreement:
    """What a group of ranks has agreed on so far; made on every rank.

    The first build asks all ranks. Later a step asks only if its signature is new, and once there are several, which
    of them it is: collectives that do not fit each other give wrong numbers, or end the process, without any error.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.watch = Watch(ranks)
        self._agreed: set[str] = set()  # the same on all ranks

    @contextmanager
    def step(self, step: int, build: int, signature: Signature) -> Iterator[None]:
        """Inside, a step of a build runs its collectives. Raises DistributedError before it or at its end.

        After one no step runs any more: what this rank has is of no use without the others.
        """
        self.confirm(signature)
        with self.watch.step(step, build, signature.digest):
            yield

    def confirm(self, signature: Signature) -> None:
        """Return when all ranks are about to run these collectives. Raises DistributedError on all ranks if not."""
        if self._agreed == {signature.digest}:
            return
        ranks = self.ranks
        if signature.digest not in self._agreed:
            ranks.store.set(f"signature/{signature.digest}", signature.text)
        others = self.watch.others(signature.digest)
        try:
            digests = ranks.meet(signature.digest, "to agree on the collectives of this step", others)
            if len(set(digests)) > 1:
                raise self._disagreement(digests)
        except RuntimeError as error:  # the store is gone
            raise self.watch.failed(error) from error
        except DistributedError as error:
            raise self.watch.failed(error) from None
        self._agreed.add(signature.digest)

    def _disagreement(self, digests: list[str]) -> DistributedError:
        store = self.ranks.store
        deviating, what = difference([store.get(f"signature/{digest}").decode() for digest in digests])
        return DistributedError(
            f"{self.ranks.named(deviating)} would run other collectives than the others: {what}",
            hint="every rank needs the same model, optimizer, settings and kind of batch; " + RESTART,
        )
