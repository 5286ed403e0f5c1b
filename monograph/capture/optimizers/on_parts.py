"""Whether optimizers run on parts of their parameters. One that does not gets whole ones, as in one process."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from monograph.capture.optimizers.trial_steps import double_of, group_of, step_without_hooks
from monograph.capture.tensors.functions import FUSED_FUNCTIONS, parts_laid_out_alike
from monograph.compat.distributed.tensors import forms_without_symbols, is_sharded, local_of, with_local
from monograph.compat.fake_values import fake_values
from monograph.compat.fakes import fake_mode, import_capture_modules
from monograph.compat.optimizers import lists_for_fakes
from monograph.compat.tensors import planned_form
from monograph.distributed.zero import PartsUpdated
from monograph.errors import first_line
from monograph.settings import Settings
from monograph.state.find import Owned, RegisteredOptimizer

_STEPS = 2  # the first makes state, the second uses it


def try_on_parts(owned: Owned, settings: Settings) -> None:
    """Note in `owned.whole` for each optimizer that is new there why it does not run on parts; nothing if it does.

    Its own step runs on parts without data, so that the answer is the same in all processes and none asks another.
    """
    for registered in owned.optimizers if settings.zero is not None else ():
        if registered.name not in owned.whole:
            owned.whole[registered.name] = _refusal(registered, settings)


def about_whole(owned: Owned) -> Iterator[str]:
    """What to say of optimizers that do not run on parts."""
    for registered in owned.optimizers:
        if why := owned.whole.get(registered.name):
            yield (
                f"{registered.name} ({type(registered.optimizer).__name__}) keeps its parameters and its state whole in each "
                f"process, since its step does not run on DTensors: {why}"
            )


def _refusal(registered: RegisteredOptimizer, settings: Settings) -> str:
    import_capture_modules()
    mode, optimizer = fake_mode(), registered.optimizer
    groups = [
        group_of(group, group["params"][0], _without_data(mode, group["params"], settings))
        for group in optimizer.param_groups
        if group["params"]
    ]
    double = double_of(optimizer, state=defaultdict(dict), param_groups=groups)
    try:
        with torch.no_grad(), fake_values(mode), lists_for_fakes(), forms_without_symbols(), FusedOnParts():
            for _ in range(_STEPS):
                step_without_hooks(double)
    except Exception as error:
        return first_line(error)
    return ""


class FusedOnParts(TorchFunctionMode):
    """Fused updates get what this process has, as in a trace."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in FUSED_FUNCTIONS:
            return func(*args, **kwargs)
        given = parts_laid_out_alike({**dict(enumerate(args)), **kwargs})
        return func(*(given[place] for place in range(len(args))), **{name: given[name] for name in kwargs})


def _without_data(mode: Any, parameters: Sequence[Any], settings: Settings) -> list[Any]:
    """One parameter of each form with a gradient, in parts of which no process has anything."""
    found: dict[Any, Any] = {}
    parts = PartsUpdated(settings)
    for parameter in parameters:
        if is_sharded(parameter) or not parameter.requires_grad:
            continue
        part = parts.of(parameter)
        form = part.dtype, part.device, part.shape, part.placements
        if form not in found:
            found[form], gradient = (
                with_local(part, planned_form(mode, local_of(part)), requires_grad=False) for _ in range(2)
            )
            found[form].requires_grad_().grad = gradient
    return list(found.values())
