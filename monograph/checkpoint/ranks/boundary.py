"""What goes wrong on any rank becomes one CheckpointError on all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.distributed.checkpoint.api import CheckpointException

from monograph.checkpoint.errors import Damaged, Refused
from monograph.checkpoint.save import reason_of
from monograph.distributed.agreement import Ranks, Watch
from monograph.errors import CheckpointError, DistributedError


@contextmanager
def on_all_ranks(verb: str, path: Path, hint: str = "") -> Iterator[None]:
    """The boundary, in a group: names the path and the ranks that failed, or that are gone."""
    watch = Watch(Ranks("checkpoint"))
    try:
        with watch.step(0, 0):
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
