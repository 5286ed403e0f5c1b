"""What is raised for a run that failed before its outputs were there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from monograph.errors import BackendError, MonographError, TornStateError
from monograph.runtime.runner import Runner


def raise_in_place_of(
    error: BaseException, runner: Runner, inputs: Sequence[Any], restore_random: Callable[[], object]
) -> None:
    """Raise the error for a run that failed, if that is not the error itself.

    To find it the ops may run once more, one by one; then the random state is restored.
    """
    if runner.written and (runner.has_begun is None or runner.has_begun()):
        raise _torn(error) from error
    if runner.failure is None or isinstance(error, (MonographError, torch.OutOfMemoryError)):
        return
    failure = runner.failure(inputs)
    restore_random()
    if failure is not None:
        raise failure from None
    raise BackendError(
        f"the compiled step failed before it changed anything: {_first_line(error)}",
        hint='op by op, the step does not fail with these arguments: graph.config.backend("aten")',
    ) from error


def _torn(error: BaseException) -> TornStateError:
    return TornStateError(
        f"the step failed in the middle, where it had begun to change parameters: {_first_line(error)}",
        hint="load a checkpoint with graph.load_state_dict(); the state of before the step is gone",
    )


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
