"""Give `nn.Lazy*` modules their shapes before a capture, from shapes alone."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy

from monograph.capture.errors import translated
from monograph.capture.step.request import Request
from monograph.compat.fakes import fake_mode, import_capture_modules, is_fake, make_fake
from monograph.compat.modes import outside_of_modes
from monograph.compat.modules import buffers_of, parameters_of, waits_for_input
from monograph.errors import UnsupportedTensorError
from monograph.ir.call.signature import Spec
from monograph.ir.call.tree import unflatten
from monograph.state.find import Owned, module_slots
from monograph.state.random import cpu_state, set_cpu_state
from monograph.state.snapshot import take_snapshot


class _Reached(BaseException):
    """All lazy modules have their shapes: the dry run may stop."""


def initialise_lazy(request: Request) -> None:
    """Run build() once on fakes up to the last lazy module, and initialise each as its first forward would."""
    modules = request.owned.named_modules()
    lazy = {path: m for path, m in modules.items() if isinstance(m, LazyModuleMixin) and waits_for_input(m)}
    if not lazy:
        return
    import_capture_modules()
    others = {path: module for path, module in modules.items() if path not in lazy}
    held = request.owned
    snapshot = take_snapshot(Owned(held.owner, {}, held.optimizers, table=held.table), others)
    random: list[torch.Tensor] = []
    try:
        _dry_run(request, lazy, random)
    except Exception as error:
        raise translated(error, request.owned) from error
    finally:
        snapshot.restore()
        if random:
            set_cpu_state(random[0])
    left = [path for path, module in lazy.items() if _has_lazy(module)]
    if left:
        raise UnsupportedTensorError(
            f"{left[0]} is a lazy module that build() does not reach: its parameters have no shape",
            hint="leave it out of the graph, or give it its shapes",
        )


def _dry_run(request: Request, lazy: Mapping[str, Any], random: list[torch.Tensor]) -> None:
    """Run build() on fakes until no module of `lazy` waits for its shapes; `random` gets the state after that."""
    mode = fake_mode()
    swapped: list[tuple[Any, Any, torch.Tensor]] = []

    def swap(tables: Mapping[str, Any]) -> None:
        """Let modules see fakes: the dry run must not touch their tensors."""
        for slot in module_slots(tables):
            if not is_lazy(slot.tensor) and not is_fake(slot.tensor):
                swapped.append((slot.container, slot.key, slot.tensor))
                slot.container[slot.key] = make_fake(mode, slot.tensor)

    def initialise(module: Any, *args: Any, **kwargs: Any) -> None:
        """Takes the place of `initialize_parameters`, which must run on real tensors."""
        with outside_of_modes():
            real = [_real(item) for item in args], {key: _real(item) for key, item in kwargs.items()}
            type(module).initialize_parameters(module, *real[0], **real[1])
        del module.initialize_parameters
        random[:] = [cpu_state()]

    def before(module: Any, _args: Any) -> None:
        swap({"": module})

    def after(_module: Any, _args: Any, _output: Any) -> None:
        if not any(map(waits_for_input, lazy.values())):
            raise _Reached

    handles = []
    for module in lazy.values():
        module.initialize_parameters = partial(initialise, module)
        handles += [module.register_forward_pre_hook(before), module.register_forward_hook(after)]
    swap(request.owned.named_modules())
    try:
        with mode:
            args, kwargs = unflatten(
                request.call.tree, iter([_fake(leaf, mode) for leaf in request.call.leaves])
            )
            request.build(*args, **kwargs)
    except _Reached:
        return
    finally:
        for handle in handles:
            handle.remove()
        for module in lazy.values():
            vars(module).pop("initialize_parameters", None)
        for table, key, tensor in reversed(swapped):
            table[key] = tensor


def _real(item: Any) -> Any:
    """A tensor with data, whatever it is, of the shape of a fake."""
    if not isinstance(item, torch.Tensor):
        return item
    return torch.empty(item.shape, dtype=item.dtype, device=item.device)


def _has_lazy(module: Any) -> bool:
    return any(
        is_lazy(p) for p in (*parameters_of(module).values(), *buffers_of(module).values()) if p is not None
    )


def _fake(leaf: Any, mode: Any) -> Any:
    if isinstance(leaf, Spec):
        with mode:
            return torch.empty(leaf.shape, dtype=leaf.dtype, device=leaf.device)
    return make_fake(mode, leaf) if isinstance(leaf, torch.Tensor) else leaf
