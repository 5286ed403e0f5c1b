"""The tables inside of `nn.Module`: parameters, buffers, submodules and hooks, as the class keeps them in its instances.

They are there since the first releases; nothing goes without them.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn

PARAMETERS, BUFFERS, SUBMODULES = MODULE_TABLES = ("_parameters", "_buffers", "_modules")
# the attribute of a state dict that has the versions of the modules
VERSIONS = "_metadata"
# the set of the names of buffers that `state_dict()` leaves out
NOT_SAVED = "_non_persistent_buffers_set"

# they take the dict of a module apart, and look there for the name that they are given
BY_NAME = frozenset(
    function.__code__
    for function in (
        nn.Module.__getattr__,
        nn.Module.__setattr__,
        nn.Module.__delattr__,
        nn.Module.register_buffer,
        nn.Module.register_parameter,
        nn.Module.add_module,
    )
)


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The table of a module's own parameters."""
    return module._parameters


def buffers_of(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """The table of a module's own buffers."""
    return module._buffers


def submodules_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """The table of the modules that are directly inside of one."""
    return module._modules


MARK_OF_PARAMETER = "_is_param"


def mark_parameter(tensor: torch.Tensor) -> None:
    """Make `isinstance(tensor, nn.Parameter)` true for a tensor. What: the attribute that it looks at."""
    setattr(tensor, MARK_OF_PARAMETER, True)


FLAT_WEIGHTS = "_flat_weights"


def flat_weights_of(module: nn.Module) -> dict[str, Any]:
    """What a recurrent layer keeps of its weights besides the table of its parameters, by the names of its attributes."""
    names = (FLAT_WEIGHTS, "_flat_weight_refs")
    return {name: vars(module)[name] for name in names if name in vars(module)}


def weights_in_order(module: nn.RNNBase, tables: dict[str, Any]) -> list[Any]:
    """The weights of a recurrent layer as its kernels take them, by their names in the table of its parameters."""
    return [tables.get(name) for name in module._flat_weights_names]


def waits_for_input(module: nn.Module) -> bool:
    """True for a lazy module before its first forward, also if its state was loaded.

    What: the hook that makes its parameters. Why: such a module has to see its inputs first. Degraded path: none.
    """
    return "_initialize_hook" in vars(module)


def has_versions(state: Any) -> bool:
    """True for a state dict that knows the versions of the modules that it is of."""
    return hasattr(state, VERSIONS)


def copy_versions(state: Any, to: Any) -> None:
    """Give `to` the versions of the state dict `state`, if it has any: without them torch takes a state for very old."""
    if has_versions(state):
        setattr(to, VERSIONS, getattr(state, VERSIONS))


MODULE_HOOK_FIELDS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def takes_what_forward_takes(module: nn.Module) -> bool:
    """True if a module hands its arguments to `forward` as they are: no hook of its own is called before."""
    return not getattr(module, MODULE_HOOK_FIELDS[0], None) and type(module).__call__ is nn.Module.__call__


def global_hooks() -> list[dict[int, Any]]:
    """The tables of hooks that run for every module and every optimizer."""
    module, optimizer = torch.nn.modules.module, importlib.import_module("torch.optim.optimizer")
    tables = [getattr(module, f"_global{name}", None) for name in MODULE_HOOK_FIELDS]
    tables += [getattr(optimizer, f"_global_optimizer_{when}_hooks", None) for when in ("pre", "post")]
    return [table for table in tables if table is not None]


def hand_attributes_on(real: torch.Tensor, fake: torch.Tensor) -> None:
    """Let a fake have the attributes that Python has given to a tensor: `weight.no_decay = True`."""
    own = vars(fake)
    own.update({name: value for name, value in vars(real).items() if name not in own})
