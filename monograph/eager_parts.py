"""Parameters in parts in an eager step: modules see them whole, by DTensor's own rules, as a user of these would write it.

At stages 1 and 2 of ZeRO a step begins as at stage 3: each process has its part of a parameter, and at the end all have the whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Final

import torch
from torch import nn

from monograph.capture.optimizers.on_parts import FusedOnParts
from monograph.compat.distributed.fully_shard import ShardedModule, ShardedParameter
from monograph.compat.distributed.tensors import local_of, mean_as, whole_here
from monograph.compat.modes import outside_of_modes
from monograph.compat.modules import flat_weights_of, parameters_of
from monograph.compat.optimizers import clipping_by_one_norm
from monograph.compat.patching import replace_here
from monograph.compat.tensors import changes_of
from monograph.distributed.whole_parameters import WholeParameters, modules_of_zero
from monograph.distributed.zero import parts_of_whole, places_of_parameters, put_into_optimizers
from monograph.settings import Settings
from monograph.state.exchanged import calls_with
from monograph.state.find import Owned


class EagerParts:
    """The parts of one eager step. `whole` has by id of a part the memory of the parameter, if that stays whole."""

    kept: Final = frozenset[int]()  # there are parts alone

    def __init__(self, whole: Mapping[int, torch.Tensor], *, sums_whole: bool) -> None:
        self._whole, self._sums_whole = whole, sums_whole
        # the changes of those when all had the whole
        self._known = {key: changes_of(item) for key, item in whole.items()}

    def seen(self, parameter: Any) -> Any:
        """A parameter outside of modules."""
        return parameter

    def changes(self, item: ShardedParameter) -> int:
        """How often it was changed."""
        return changes_of(local_of(item.sharded))

    def whole(self, _known: ShardedModule, item: ShardedParameter) -> torch.Tensor:
        """All of a parameter. Backward leaves the part of the mean of its gradients."""
        there = self._whole.get(id(item.sharded))
        if there is None or not self._sums_whole:
            apply: Any = _Whole.apply
            made: torch.Tensor = apply(item.sharded, there)
            return made
        if self._known[id(item.sharded)] != changes_of(there):
            self.renew(item.sharded)
        return there

    def renew(self, part: Any) -> None:
        """Let a parameter that stays whole have what others have updated."""
        there = self._whole[id(part)]
        with torch.no_grad():
            there.copy_(whole_here(part))
        self._known[id(part)] = changes_of(there)

    def summed(self, parameter: torch.Tensor) -> torch.Tensor:
        """The tensor whose gradients are added over micro-batches: at stage 1 they are whole."""
        return self._whole.get(id(parameter), parameter) if self._sums_whole else parameter

    def mean(self, part: Any, total: torch.Tensor) -> Any:
        """The part of the mean of whole sums."""
        with torch.no_grad():
            return mean_as(total, part)


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Any, like: torch.Tensor | None) -> torch.Tensor:
        ctx.part = part
        whole = whole_here(part)
        return whole if like is None else torch.empty_like(like).copy_(whole)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return mean_as(gradient, ctx.part), None


@contextmanager
def in_parts(owned: Owned, settings: Settings) -> Iterator[EagerParts]:
    """Inside, modules and optimizers have the parts that this process updates, and modules that run have whole parameters."""
    if settings.zero is None:
        yield EagerParts({}, sums_whole=False)
        return
    with outside_of_modes():  # what watches the step
        updated = parts_of_whole(owned, settings)
    stays = {id(item): item for _, _, item in places_of_parameters(owned) if id(item) in updated}
    made = {key: nn.Parameter(updated[key], requires_grad=item.requires_grad) for key, item in stays.items()}
    whole = {
        id(part): stays[key].detach().requires_grad_(part.requires_grad)  # the same memory
        for key, part in made.items()
    }
    parts = EagerParts(whole, sums_whole=settings.zero.stage == 1 and settings.accumulation_steps > 1)
    with ExitStack() as stack:
        _exchange(owned, made)
        stack.callback(_exchange, owned, {id(part): stays[key] for key, part in made.items()})
        for key, part in made.items():
            part.grad = stays[key].grad
            stack.callback(_hand_gradient_on, part, stays[key])
        modules = owned.named_modules().values()
        for module in modules:
            stack.callback(vars(module).update, flat_weights_of(module))
        seen = WholeParameters(modules_of_zero(modules, ()), parts)
        if seen:
            replace_here(stack, nn.Module, "__getattr__", partial(seen.read, nn.Module.__getattr__))
            call = partial(_called, seen, nn.Module.__call__)
            replace_here(stack, nn.Module, "__call__", call)
        if any(owned.whole.values()):
            stack.enter_context(clipping_by_one_norm())
        if made:
            stack.enter_context(calls_with(made))
        stack.enter_context(FusedOnParts())
        yield parts
        for part in made.values():
            parts.renew(part)


def _hand_gradient_on(part: torch.Tensor, whole: torch.Tensor) -> None:
    whole.grad = part.grad


def _exchange(owned: Owned, made: Mapping[int, torch.Tensor]) -> None:
    """Put others in the place of parameters, by id of these."""
    for module, name, parameter in places_of_parameters(owned):
        if id(parameter) in made:
            parameters_of(module)[name] = made[id(parameter)]  # type: ignore[assignment]
    put_into_optimizers(owned, made, lambda entry: entry)


def _called(seen: WholeParameters, call: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return seen.run(call, module, args, kwargs)
