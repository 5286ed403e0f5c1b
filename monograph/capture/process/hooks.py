"""The hooks that a step has in it, by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from monograph.compat.autograd import parameter_hooks
from monograph.compat.modules import MODULE_HOOK_FIELDS


def hooks_of(modules: Mapping[str, nn.Module], tensors: Mapping[str, torch.Tensor]) -> tuple[str, ...]:
    """`model.fc: forward hook keep_output`, one line for each hook of a module or of a tensor that is trained."""
    return (*_of_modules(modules), *_of_tensors(tensors))


def _of_modules(modules: Mapping[str, nn.Module]) -> Iterator[str]:
    for path, module in modules.items():
        for table in MODULE_HOOK_FIELDS:
            kind = table.strip("_").removesuffix("s").replace("_", " ")
            yield from (f"{path}: {kind} {_name(hook)}" for hook in module.__dict__[table].values())


def _of_tensors(tensors: Mapping[str, torch.Tensor]) -> Iterator[str]:
    for path, tensor in tensors.items():
        if tensor.requires_grad and tensor.is_leaf:
            before, after = parameter_hooks(tensor)
            yield from (f"{path}: gradient hook {_name(hook)}" for hook in before)
            yield from (f"{path}: hook after the gradient {_name(hook)}" for hook in after)


def _name(hook: Any) -> str:
    return str(getattr(hook, "__qualname__", type(hook).__qualname__))
