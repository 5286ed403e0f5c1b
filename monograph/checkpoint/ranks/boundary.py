"""What goes wrong on any rank becomes one CheckpointError on all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from torch import distributed
from torch.distributed.checkpoint.api import CheckpointException

from monograph.checkpoint.errors import Damaged, Refused
from monograph.checkpoint.save import reason_of
from monograph.distributed.agreement import Ranks, Watch
from monograph.distributed.agreement.ranks import RESTART
from monograph.errors import CheckpointError, DistributedError, MonographError

_TOGETHER: Final = (
    "every rank of a group saves and loads at the same time, with the same path; mg.save(..., together=False) saves the "
    "state of one rank"
)


@contextmanager
def on_all_ranks(
    verb: str, path: Path, hint: str = "", *, group: distributed.ProcessGroup | None = None
) -> Iterator[None]:
    """The boundary, in a group: names the path and the ranks that failed, or that are gone."""
    ranks = Ranks("checkpoint", group)
    what = f"{verb} {path.name}"
    try:
        words = ranks.meet(what, f'to {verb} "{path}"')
    except DistributedError as error:
        raise CheckpointError(error.message, hint=_TOGETHER) from None
    except RuntimeError as error:  # the store is gone
        raise CheckpointError(f'cannot {verb} "{path}": {reason_of(error)}', hint=RESTART) from error
    if len(set(words)) > 1:
        said = "; ".join(f"{ranks.named([rank])} is about to {word}" for rank, word in enumerate(words))
        raise CheckpointError(f'cannot {verb} "{path}": {said}', hint=_TOGETHER)
    watch = Watch(ranks)
    try:
        with watch.step(-1, -1):
            watch.doing(f"{verb} of {path}")
            yield
    except CheckpointException as error:
        raise failure(verb, path, error, hint) from None
    except DistributedError as error:
        raise CheckpointError(f'cannot {verb} "{path}": {error.message}', hint=error.hint) from None
    finally:
        watch.close()


def failure(
    verb: str, path: Path, error: CheckpointException, hint: str = "", *, alone: bool = False
) -> CheckpointError:
    """One error for those of the ranks, or of a process by itself."""
    own = next((caught for caught, _ in error.failures.values() if isinstance(caught, MonographError)), None)
    if own is not None:
        return CheckpointError(own.message, where=own.where, hint=own.hint)
    said: dict[str, list[int]] = {}
    for rank, (caught, _trace) in sorted(error.failures.items()):
        if isinstance(caught, Refused):
            hint = caught.hint or hint
        reason = str(caught) if isinstance(caught, (Refused, Damaged)) else _reason(caught)
        said.setdefault(reason, []).append(rank)
    parts = []
    for reason, ranks in said.items():
        word = "rank" if len(ranks) == 1 else "ranks"
        parts.append(reason if alone else f"{word} {', '.join(map(str, ranks))}: {reason}")
    return CheckpointError(f'cannot {verb} "{path}": {"; ".join(parts)}', hint=hint)


def _reason(error: BaseException) -> str:
    return reason_of(error) if isinstance(error, Exception) else f"{type(error).__name__}: {error}"
