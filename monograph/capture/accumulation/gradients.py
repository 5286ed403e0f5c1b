"""What backward() leaves in a trace of one micro-batch is summed outside of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from monograph.capture.tensors.fakes import Inputs
from monograph.compat.autograd import parameter_hooks
from monograph.compat.distributed.tensors import is_sharded, local_of, part_of, spec_of, with_local
from monograph.compat.fakes import make_fake
from monograph.compat.tensors import changes_of
from monograph.errors import CaptureError, DistributedError, HookError
from monograph.ir.graph_signature import Argument, Between
from monograph.ir.port import Role, gradient_path
from monograph.settings import Settings
from monograph.state.find import Owned, Slot, kept_parameters, tensor_paths


def check_no_gradients(owned: Owned, settings: Settings) -> None:
    """Raise CaptureError if gradients that stay from call to call would have to be added to."""
    names = tensor_paths(owned.named_modules())
    for parameter in kept_parameters(owned, settings):
        if parameter.grad is not None:
            raise CaptureError(
                f"{names[id(parameter)]} has a gradient when the step begins: with "
                "set_gradient_accumulation_steps() gradients are summed within one call only",
                hint="clear gradients between calls: model.zero_grad(set_to_none=True)",
            )


def _as_it_is(_parameter: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    return total


class Untouched:
    """Gradients as a backward() left them: they are not complete, so that nobody may change them before the next."""

    def __init__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        self._parameters = parameters
        self._left: dict[str, tuple[torch.Tensor | None, int]] = {}

    def note(self) -> None:
        """To be called when a backward() is done."""
        gradients = {path: parameter.grad for path, parameter in self._parameters.items()}
        self._left = {
            path: (item, -1 if item is None else changes_of(item)) for path, item in gradients.items()
        }

    def check(self) -> None:
        """Raise CaptureError if a gradient is not what the last backward() of this micro-batch left."""
        for path, parameter in self._parameters.items():
            gradient, (left, version) = parameter.grad, self._left.get(path, (None, -1))
            if gradient is not left or (gradient is not None and changes_of(gradient) != version):
                raise CaptureError(
                    f"build() sets, changes or clears the gradient of {path} before its last backward(): "
                    "it is complete only when every micro-batch is done",
                    hint="call every backward() first, then change gradients; the graph clears them by itself",
                )


@dataclass
class MicroGradients:
    """Takes the gradients that each backward() of a trace leaves, and lets the code after it see their sum."""

    inputs: Inputs
    slots: Sequence[Slot]
    whole: Collection[int]  # the arguments that are not split
    taken: dict[str, list[torch.Tensor]] = field(default_factory=dict)  # by path of the parameter
    averaged: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = (
        _as_it_is  # what becomes of a parameter's sum before others see it
    )

    def __post_init__(self) -> None:
        self._parameters: dict[str, torch.Tensor] = {}
        self._sums: dict[str, torch.Tensor] = {}
        self._layouts: dict[str, Any] = {}  # of gradients that are DTensors
        for item in list(self.inputs.items):
            if item.role is Role.PARAM and item.shown.requires_grad:
                self._check_hooks(item.path, item.owner)
                like, leaf = item.owner if item.part is None else item.part, item.shown
                if item.sums_whole:
                    like, leaf = item.real, item.fake
                total = _fake_gradient(self.inputs, part_of(like))
                self._parameters[item.path] = leaf
                self.inputs.add(total, Role.GRAD, gradient_path(item.path), Between())
                whole = with_local(like, total, requires_grad=False) if is_sharded(like) else total
                self._sums[item.path] = whole
        self._left = Untouched(self._parameters)
        self._first = {
            item.path: (item.shown, changes_of(item.shown))
            for item in self.inputs.items
            if item.real is not None and isinstance(item.fake, torch.Tensor)
        }
        self._before_update = self._first
        self._aliases: dict[int, list[torch.Tensor]] = {}  # what `.data` gave, by id of the fake

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
        self._left.check()
        for parameter in self._parameters.values():
            parameter.grad = None
        yield
        for path, parameter in self._parameters.items():
            if parameter.grad is not None:
                _check_final(path, parameter.grad)
                self.taken.setdefault(path, []).append(self._part(path, parameter.grad).detach())
            if path in self.taken:
                parameter.grad = self.averaged(parameter, self._sums[path])
        self._left.note()
        self._before_update = self._present()

    def _part(self, path: str, gradient: torch.Tensor) -> Any:
        """What this process has of a gradient; the sum of those of all micro-batches has the layout of the first one."""
        if is_sharded(gradient):
            layout, total = spec_of(gradient).placements, part_of(self._sums[path])
            if self._layouts.setdefault(path, layout) != layout or local_of(gradient).shape != total.shape:
                raise DistributedError(
                    f"backward() makes a gradient of {path} in the layout {layout}, and the sum over micro-batches has another",
                    hint="call backward() once, of a loss that all gradients come from",
                )
            self._sums[path] = with_local(gradient, total, requires_grad=False)
        return part_of(gradient)

    def _present(self) -> dict[str, tuple[Any, int]]:
        """The tensor at each place of state, with how often it was changed in place."""
        tensors = {path: tensor for path, (tensor, _) in self._first.items()}
        tensors |= {slot.path: slot.container.get(slot.key) for slot in self.slots if slot.path in tensors}
        return {
            path: (item, changes_of(item) + sum(map(changes_of, self._aliases.get(id(item), ()))))
            for path, item in tensors.items()
            if isinstance(item, torch.Tensor)
        }

    def data_was_taken(self, tensor: torch.Tensor, alias: torch.Tensor) -> None:
        """`tensor.data` counts its own changes in place."""
        self._aliases.setdefault(id(tensor), []).append(alias)

    def moved(self) -> set[str]:
        """The paths of state that has another value when the last backward() is done than at the beginning."""
        now = self._before_update
        return {
            path
            for path, (tensor, version) in self._first.items()
            if path not in now or now[path][0] is not tensor or now[path][1] != version
        }

    def check_arguments(self) -> None:
        """Raise CaptureError for a gradient of an argument that every micro-batch gets whole."""
        for item in self.inputs.items:
            whole = isinstance(item.source, Argument) and item.source.index in self.whole
            if whole and isinstance(item.fake, torch.Tensor) and item.fake.grad is not None:
                raise CaptureError(
                    f"backward() makes a gradient of argument {item.path}, which is mg.replicated(): "
                    "gradients of arguments are not summed over micro-batches",
                    hint="make it a parameter of a module, or pass a detach() of it",
                )

    def parts(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The gradients of one micro-batch in the order in which they are summed, with the paths of their sums."""
        rounds = max(map(len, self.taken.values()), default=0)
        for index in range(rounds):
            for path, gradients in self.taken.items():
                if index < len(gradients):
                    yield gradient_path(path), gradients[index]


def _check_final(path: str, gradient: torch.Tensor) -> None:
    if gradient.requires_grad:
        raise CaptureError(
            f"backward(create_graph=True) makes a gradient of {path} to be differentiated again: "
            "the sum over micro-batches has no history",
            hint="use torch.autograd.grad(loss, parameters, create_graph=True) for a penalty, then one backward()",
        )


def _fake_gradient(inputs: Inputs, real: torch.Tensor) -> torch.Tensor:
    """The fake of a gradient: laid out as autograd lays out that of `real`."""
    dense = torch.ops.aten.is_non_overlapping_and_dense.default(real)
    layout = torch.preserve_format if dense else torch.contiguous_format
    with inputs.mode:
        fake = make_fake(inputs.mode, real.detach(), planned=inputs.without_data)
        return torch.empty_like(fake, memory_format=layout)
