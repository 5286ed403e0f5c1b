"""Functions that run in a copy of this process, so that nothing here is changed by them."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Generic, TypeVar

import torch

from monograph.errors import DistributedError

T = TypeVar("T")


@dataclass(frozen=True)
class _Said(Generic[T]):
    value: T | None = None
    error: BaseException | None = None


def in_children(jobs: Sequence[Callable[[], T]]) -> list[T]:
    """What each of some functions gives, run beside each other; raises the first error of one.

    A child has all objects of this process, and no threads but its own; so it cannot use a GPU that this process uses.
    """
    check_can_fork()
    with ExitStack() as stack:
        children = [stack.enter_context(_Child(job)) for job in jobs]
        return [child.result() for child in children]


def check_can_fork() -> None:
    """Raise DistributedError where there are no copies of a process."""
    if not hasattr(os, "fork"):
        raise DistributedError(
            "plan() needs copies of this process, which this system does not make",
            hint="plan on Linux or macOS",
        )
    if torch.cuda.is_initialized():
        raise DistributedError(
            "plan() after CUDA was used: no copy of this process can use it",
            hint='plan in a process of its own, with the model on the device "meta": with torch.device("meta"): ...',
        )


class _Child(Generic[T]):
    def __init__(self, job: Callable[[], T]) -> None:
        context = multiprocessing.get_context("fork")
        self._there, here = context.Pipe(duplex=False)
        self._process = context.Process(target=_run, args=(job, here), daemon=True)
        with warnings.catch_warnings():  # of threads that a child does not have: it waits for none
            warnings.simplefilter("ignore", DeprecationWarning)
            self._process.start()
        here.close()

    def __enter__(self) -> _Child[T]:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.is_alive():
            self._process.kill()
        self._process.join()
        self._there.close()

    def result(self) -> T:
        try:
            said: _Said[T] = pickle.loads(self._there.recv_bytes())
        except EOFError:
            self._process.join()
            raise DistributedError(
                f"the process that planned a rank has ended with exit code {self._process.exitcode}",
                hint='with a model on the device "meta" a plan needs little memory',
            ) from None
        self._process.join()
        if said.error is not None:
            raise said.error
        return said.value  # type: ignore[return-value]


def _run(job: Callable[[], Any], there: Connection) -> None:
    torch.set_num_threads(1)
    try:
        said = _Said[Any](value=job())
    except BaseException as error:
        said = _Said[Any](error=error)
    try:
        raw = pickle.dumps(said)
    except Exception:  # an error of the user's that cannot be sent
        raw = pickle.dumps(_Said[Any](error=RuntimeError(f"{type(said.error).__name__}: {said.error}")))
    there.send_bytes(raw)
    there.close()
