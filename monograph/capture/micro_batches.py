"""One call is a mini-batch; what build() sees is a micro-batch, and what backward() leaves is summed outside of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from monograph._torch import parameter_hooks
from monograph.capture.bindings import Between
from monograph.capture.signature import Call, Spec
from monograph.capture.standins import Inputs
from monograph.errors import CaptureError, HookError, SignatureError
from monograph.ir.port import Role, gradient_path


def micro_call(call: Call, steps: int, index: int = 0) -> Call:
    """The call with one of `steps` equal parts of each batch along dimension 0; replicated arguments stay whole."""
    paths = call.paths()
    parts: dict[int, Any] = {}  # by id of the leaf: a tensor passed twice is one batch
    for position, leaf in enumerate(call.leaves):
        if isinstance(leaf, (torch.Tensor, Spec)) and position not in call.replicated:
            _check_divisible(leaf, paths[position], steps)
            parts.setdefault(id(leaf), _part(leaf, steps, index))
    leaves = [
        leaf if position in call.replicated else parts.get(id(leaf), leaf)
        for position, leaf in enumerate(call.leaves)
    ]
    return call._replace(leaves=tuple(leaves))


def batch_paths(call: Call) -> set[str]:
    """The paths of the arguments that are split."""
    return {
        path
        for position, (leaf, path) in enumerate(zip(call.leaves, call.paths(), strict=True))
        if isinstance(leaf, (torch.Tensor, Spec)) and position not in call.replicated
    }


def _check_divisible(leaf: Any, path: str, steps: int) -> None:
    if not leaf.shape or leaf.shape[0] % steps:
        what = f"has {leaf.shape[0]} rows" if leaf.shape else "has no dimension"
        raise SignatureError(
            f"argument {path} {what}: it cannot be split into {steps} equal micro-batches",
            hint="pass a batch whose size is a multiple of set_gradient_accumulation_steps(), "
            f"or mg.replicated({path}) if it is no batch",
        )


def _part(leaf: Any, steps: int, index: int) -> Any:
    size = leaf.shape[0] // steps
    if isinstance(leaf, Spec):
        return Spec((size, *leaf.shape[1:]), leaf.dtype, leaf.device)
    part = leaf.detach().narrow(0, index * size, size)
    return part.requires_grad_(leaf.requires_grad) if leaf.requires_grad else part


@dataclass
class MicroGradients:
    """Takes the gradients that each backward() of a trace leaves, and lets the code after it see their sum."""

    inputs: Inputs
    taken: dict[str, list[torch.Tensor]] = field(default_factory=dict)  # by path of the parameter

    def __post_init__(self) -> None:
        self._parameters: dict[str, torch.Tensor] = {}
        self._sums: dict[str, torch.Tensor] = {}
        self._versions: dict[str, int] = {}
        for item in list(self.inputs.items):
            if item.role is Role.PARAM and item.stand_in.requires_grad:
                self._check_hooks(item.path, item.real)
                total = self.inputs.fake_like(item.real)
                self._parameters[item.path], self._sums[item.path] = item.stand_in, total
                self.inputs.add(total, Role.GRAD, gradient_path(item.path), Between())
        self._state = [
            item for item in self.inputs.items if item.real is not None and _is_tensor(item.stand_in)
        ]
        self._before = self._middle = [item.stand_in._version for item in self._state]

    def _check_hooks(self, path: str, parameter: torch.Tensor) -> None:
        if parameter_hooks(parameter)[1]:
            raise HookError(
                f"{path} has a hook that runs when its gradient is accumulated: with "
                "set_gradient_accumulation_steps() that is outside of build()",
                hint="use a tensor hook (register_hook), or accumulate by hand with config.keep_gradients()",
            )

    @contextmanager
    def around_backward(self) -> Iterator[None]:
        """backward() finds no gradients; when it is done, the sum of all micro-batches is there."""
        self._begin()
        yield
        self._end()

    def _begin(self) -> None:
        for path, parameter in self._parameters.items():
            gradient = parameter.grad
            if gradient is None:
                continue
            if gradient is not self._sums[path] or gradient._version != self._versions[path]:
                raise CaptureError(
                    f"build() changes the gradient of {path} between two backward() calls: "
                    "it is complete only when every micro-batch is done",
                    hint="call every backward() first, then change gradients",
                )
            parameter.grad = None

    def _end(self) -> None:
        for path, parameter in self._parameters.items():
            if parameter.grad is not None:
                self.taken.setdefault(path, []).append(parameter.grad.detach())
            if path in self.taken:
                parameter.grad = self._sums[path]
                self._versions[path] = self._sums[path]._version
        self._middle = [item.stand_in._version for item in self._state]

    def check(self) -> None:
        """Raise CaptureError for state that is changed both for each micro-batch and in the update."""
        for item, before, middle in zip(self._state, self._before, self._middle, strict=True):
            if before != middle != item.stand_in._version:
                raise CaptureError(
                    f"build() changes {item.path} before backward() and again after it: with gradient accumulation "
                    "the one is done for each micro-batch, the other once",
                    hint="change it on one side only",
                )

    def parts(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The gradients of one micro-batch in the order in which they are summed, with the paths of their sums."""
        rounds = max(map(len, self.taken.values()), default=0)
        for index in range(rounds):
            for path, gradients in self.taken.items():
                if index < len(gradients):
                    yield gradient_path(path), gradients[index]


def _is_tensor(item: Any) -> bool:
    return isinstance(item, torch.Tensor)
