"""Gradients that are averaged over processes, by the arithmetic of DistributedDataParallel: each is divided, then they are added."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from monograph.compat.tensors import changes_of
from monograph.distributed.replicas import Replica
from monograph.errors import DistributedError
from monograph.layout import fills_a_block

_c10d: Any = torch.ops._c10d_functional

Doing = Callable[[str, str], AbstractContextManager[None]]


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def unnoticed(_phase: str, _what: str) -> AbstractContextManager[None]:
    """What surrounds work of which nobody asks where it comes from."""
    return nullcontext()


class AveragedGradients:
    """Averages the gradients that each backward() leaves. `seen(tensor)` is a parameter as this thread sees it."""

    def __init__(
        self,
        replicas: Sequence[Replica],
        seen: Callable[[torch.Tensor], torch.Tensor] = _itself,
        doing: Doing = unnoticed,
    ) -> None:
        self._doing = doing
        self._waiting = {id(replica) for replica in replicas if replica.wrapper is not None}
        self._of: dict[int, tuple[Replica, str, torch.Tensor]] = {}  # by id of the parameter
        for replica in replicas:
            for path, parameter in replica.parameters() if replica.size > 1 else ():
                shown = seen(parameter)
                self._of.setdefault(id(shown), (replica, path, shown))
        self._done: dict[int, torch.Tensor] = {}  # those of sums over micro-batches, by id of the parameter
        self._replicas = replicas
        self.found: set[str] = set()  # the paths of those that had a gradient
        self.ran: set[str] = set()  # the paths of wrappers that ran

    def begin_forward(self, replica: Replica) -> None:
        """A wrapper runs: from now on gradients are averaged, if it says so."""
        self.ran.add(replica.path)
        if torch.is_grad_enabled() and replica.wrapper is not None:
            syncs = replica.wrapper.require_backward_grad_sync
            (self._waiting.discard if syncs else self._waiting.add)(id(replica))

    @contextmanager
    def around_backward(self) -> Iterator[None]:
        """To be entered around each backward()."""
        before = {key: _state(parameter.grad) for key, (*_, parameter) in self._of.items()}
        yield
        for key, (*_, parameter) in self._of.items():
            gradient = parameter.grad
            if gradient is not None and _state(gradient) != before[key]:
                parameter.grad = self.averaged(parameter, gradient)

    def averaged(self, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """The mean of a gradient over the processes that train a copy of its parameter, and itself for any other."""
        if (known := self._of.get(id(parameter))) is None:
            return gradient
        replica, path, _ = known
        self.found.add(path)
        if id(replica) in self._waiting:
            return gradient
        _check_dense(path, gradient)
        with torch.no_grad(), self._doing("backward", path.rpartition(".")[0]):
            return _mean(gradient, replica)

    def averaged_once(self, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """The same of a sum that several backward() of a micro-batch lead to: it is averaged once."""
        if id(parameter) not in self._done:
            self._done[id(parameter)] = self.averaged(parameter, gradient)
        return self._done[id(parameter)]

    def check_all_found(self) -> None:
        """Raise DistributedError for a parameter of a wrapper that no backward() has reached."""
        if not self.found:
            return
        for replica in self._replicas:
            missing = [path for path, _ in replica.parameters() if path not in self.found]
            if replica.wants_all and replica.size > 1 and missing:
                more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
                raise DistributedError(
                    f"{missing[0]}{more} got no gradient: DistributedDataParallel waits for one of each parameter",
                    hint="wrap the model with find_unused_parameters=True, or freeze what is not used: requires_grad_(False)",
                )


def _state(gradient: torch.Tensor | None) -> tuple[int, int]:
    return (0, 0) if gradient is None else (id(gradient), changes_of(gradient))


def _check_dense(path: str, gradient: torch.Tensor) -> None:
    if gradient.layout is not torch.strided:
        raise DistributedError(
            f"the gradient of {path} is {gradient.layout}: dense ones alone are averaged over processes",
            hint="use sparse=False in the embedding",
        )


def _mean(gradient: torch.Tensor, replica: Replica) -> torch.Tensor:
    """The mean over a group, laid out as the gradient: what collectives make is contiguous."""
    if gradient.is_complex():
        return torch.view_as_complex(_mean(torch.view_as_real(gradient), replica))
    strides = [*gradient.stride()]
    order = sorted(range(gradient.dim()), key=lambda dim: -strides[dim])
    is_moved = order != list(range(gradient.dim()))
    if is_moved and fills_a_block([*gradient.shape], strides):
        back = sorted(range(gradient.dim()), key=order.__getitem__)
        return _mean(gradient.permute(order), replica).permute(back)
    return added(gradient.mul(1.0 / replica.size).contiguous(), replica.group)


def added(share: torch.Tensor, group: str) -> torch.Tensor:
    """The sum of a contiguous tensor over the processes of a group."""
    result: torch.Tensor = _c10d.wait_tensor(_c10d.all_reduce(share, "sum", group))
    return result


def largest(number: torch.Tensor, group: str) -> torch.Tensor:
    """The largest of the numbers that the processes of a group have."""
    result: torch.Tensor = _c10d.wait_tensor(_c10d.all_reduce(number.contiguous(), "max", group))
    return result
