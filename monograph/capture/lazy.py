"""Give `nn.Lazy*` modules their shapes before a capture, from shapes alone."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy

from monograph._torch import fake_mode, import_capture_modules, make_fake, outside_of_modes
from monograph.capture.signature import Spec
from monograph.capture.step import Request
from monograph.capture.transaction import take_snapshot
from monograph.ir.tree import unflatten


class _Reached(BaseException):
    """All lazy modules have their shapes: the dry run may stop."""


def initialise_lazy(request: Request) -> None:
    """Run build() once on fakes up to the last lazy module, and initialise each as its first forward would."""
    modules = request.holdings.named_modules()
    waiting = {id(m) for m in modules.values() if isinstance(m, LazyModuleMixin) and _has_lazy(m)}
    if not waiting:
        return
    import_capture_modules()
    mode = fake_mode()
    lazy = [m for m in modules.values() if id(m) in waiting]
    others = {path: m for path, m in modules.items() if id(m) not in waiting}
    snapshot = take_snapshot(
        type(request.holdings)(request.holdings.owner, {}, request.holdings.optimizers), others
    )
    random: list[torch.Tensor] = []

    def initialise(module: Any, args: Any, kwargs: Any = None) -> None:
        with outside_of_modes():
            real = [
                torch.empty(a.shape, dtype=a.dtype, device=a.device) if isinstance(a, torch.Tensor) else a
                for a in args
            ]
            module._infer_parameters(module, tuple(real), kwargs or {})
        random[:] = [torch.get_rng_state()]
        waiting.discard(id(module))
        if not waiting:
            raise _Reached

    handles = [
        module.register_forward_pre_hook(initialise, with_kwargs=True, prepend=True) for module in lazy
    ]
    leaves = [_fake(leaf, mode) for leaf in request.call.leaves]
    try:
        with mode:
            args, kwargs = unflatten(request.call.tree, iter(leaves))
            request.build(*args, **kwargs)
    except _Reached:
        pass
    finally:
        for handle in handles:
            handle.remove()
        snapshot.restore()
        if random:
            torch.set_rng_state(random[0])


def _has_lazy(module: Any) -> bool:
    return any(is_lazy(p) for p in (*module._parameters.values(), *module._buffers.values()) if p is not None)


def _fake(leaf: Any, mode: Any) -> Any:
    if isinstance(leaf, Spec):
        with mode:
            return torch.empty(leaf.shape, dtype=leaf.dtype, device=leaf.device)
    return make_fake(mode, leaf) if isinstance(leaf, torch.Tensor) else leaf
