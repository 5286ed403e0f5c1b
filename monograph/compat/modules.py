"""The tables inside of `nn.Module`: parameters, buffers, submodules and hooks, as the class keeps them in its instances.

They are there since the first releases; nothing goes without them.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

MODULE_HOOK_FIELDS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def global_hooks() -> list[dict[int, Any]]:
    """The tables of hooks that run for every module and every optimizer."""
    module, optimizer = torch.nn.modules.module, importlib.import_module("torch.optim.optimizer")
    tables = [getattr(module, f"_global{name}", None) for name in MODULE_HOOK_FIELDS]
    tables += [getattr(optimizer, f"_global_optimizer_{when}_hooks", None) for when in ("pre", "post")]
    return [table for table in tables if table is not None]
