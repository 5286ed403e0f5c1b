"""All ranks confirm that they are about to run the same collectives, before they do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from monograph.distributed.agreement.others import UNBUILT, Others, Unbuilt, error_line
from monograph.distributed.agreement.ranks import ALIKE, RESTART, Ranks, in_time
from monograph.distributed.agreement.signature import Signature, difference
from monograph.distributed.agreement.watch import Watch
from monograph.errors import DistributedError

_ALL: Final = "call it on every rank, each with a batch of its own: it sends what a step sends"


class Agreement:
    """What a group of ranks has agreed on so far; made on every rank.

    The first build asks all ranks. Later a step asks only if its signature is new, and once there are several, which
    of them it is: collectives that do not fit each other give wrong numbers, or end the process, without any error.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.watch: Watch | None = None  # once they have met
        self._agreed: set[str] = set()  # the same on all ranks
        self._ready: set[str] = set()  # what this rank could swap, and what all will
        self._set: set[str] = set()
        self._failure: DistributedError | None = None
        self._asked = self._unbuilt = 0  # times

    @contextmanager
    def step(self, step: int, build: int, signature: Signature) -> Iterator[None]:
        """Inside, a step of a build runs its collectives. Raises DistributedError before it or at its end.

        After one no step runs any more: what this rank has is of no use without the others.
        """
        with self.confirm(signature).step(step, build, signature.digest):
            yield

    def confirm(self, signature: Signature) -> Watch:
        """Return when all ranks are about to run these collectives. Raises DistributedError on all ranks if not."""
        if self.watch is not None and self._agreed == {signature.digest}:
            return self.watch
        if self._failure is not None:
            raise DistributedError(self._failure.message, hint=RESTART)
        try:
            self._ask(signature)
        except DistributedError as error:
            self._failure = error
            if self.watch is not None:
                self.watch.failed(error)
            raise
        except RuntimeError as error:  # the store is gone
            if self.watch is None:
                raise
            raise self.watch.failed(error) from error
        self._agreed.add(signature.digest)
        self.watch = self.watch or Watch(self.ranks)
        return self.watch

    def swaps(self, what: str, step: int, *, is_ready: bool) -> bool:
        """True from the step on at which all ranks go over to something else, at the same step.

        That is two steps after the first rank has found that it `is_ready` on all: these cannot be further by then, since each
        step has collectives.
        """
        store = self.ranks.store
        if store is None:  # they have not met
            return False
        ready, at = f"ready/{what}", f"swap/{what}"
        if is_ready and what not in self._ready:
            self._ready.add(what)
            store.add(ready, 1)
        decides = self.ranks.rank == 0 and is_ready and what not in self._set
        if decides and store.add(ready, 0) == self.ranks.size:
            self._set.add(what)
            store.set(at, str(step + 2))
        return is_ready and store.check([at]) and step >= int(store.get(at))

    def not_built(self, error: BaseException) -> None:
        """Say to those that wait for this rank with their builds that it has none."""
        self._unbuilt += 1
        if (store := self.ranks.store) is not None:
            why = error_line(error)
            said = Unbuilt(self.ranks.rank, self._unbuilt, why).text
            in_time(lambda: bool(store.set(f"{UNBUILT}/{self._asked}", said)))
            if self.watch is not None:
                self.watch.not_built(why)

    def meet(self, what: str) -> None:
        """Return when all ranks are about to do this beside their steps. Raises DistributedError that names who is not."""
        if self._failure is not None:
            raise DistributedError(self._failure.message, hint=RESTART)
        others = None if self.watch is None else self.watch.others(what)
        try:
            said = self.ranks.meet(what, f"for graph.{what}()", others)
        except DistributedError as error:
            raise DistributedError(
                f"graph.{what}() waits for all ranks: {error.message}", hint=_ALL
            ) from error
        if others_do := [rank for rank, word in enumerate(said) if word != what]:
            raise DistributedError(
                f"graph.{what}() waits for all ranks: {self.ranks.named(others_do)} called {said[others_do[0]]}",
                hint=_ALL,
            )

    def say(self, word: str, what: str) -> dict[int, str]:
        """The word of each rank that looks at a step by graph.`what`(). Raises DistributedError that names who says nothing."""
        others = None if self.watch is None else self.watch.others(what)
        said = self.ranks.meet(word, f"to go on with graph.{what}()", others)
        return dict(zip(self.ranks.names, said, strict=True))

    def _ask(self, signature: Signature) -> None:
        others = None
        if self.ranks.store is not None:
            calls = 0 if self.watch is None else self.watch.calls
            others = Others(self.ranks, calls, signature.digest, (f"{UNBUILT}/{self._asked}", self._unbuilt))
        self._asked += 1
        digests = self.ranks.meet(signature.digest, "to agree on the collectives of this step", others)
        if len(set(digests)) == 1:
            return
        is_first = digests.index(signature.digest) == self.ranks.rank  # of those with the same
        said = self.ranks.meet(signature.text if is_first else "", "to say what its collectives are", others)
        texts = [said[digests.index(digest)] for digest in digests]
        deviating, what = difference(texts)
        raise DistributedError(
            f"{self.ranks.named(deviating)} would run other collectives than the others: {what}",
            hint=ALIKE,
        )
