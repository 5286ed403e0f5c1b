"""ZeRO: parameters, and with them gradients and optimizer state, in parts over the processes that train copies of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch
from torch import nn

from monograph.compat.distributed.fully_shard import is_sharded_module
from monograph.compat.distributed.groups import mesh_of_all, mesh_of_group, num_processes
from monograph.compat.distributed.tensors import is_copied, is_sharded, part_laid_out, with_rows_apart
from monograph.compat.modules import parameters_of
from monograph.distributed.columns import group_of_copies
from monograph.errors import DistributedError
from monograph.settings import Settings, Zero
from monograph.state.find import Owned

ZERO_DIM: Final = "zero"  # the name of the dimension of a mesh over which a graph itself lays parameters out


def shard_parameters(owned: Owned, settings: Settings) -> None:
    """Let each process keep its part of each parameter, with the state of optimizers and averages: ZeRO 3.

    The copies have to be alike. What has fewer elements than the settings say stays whole. Parameters that are DTensors already,
    of which processes have copies, are laid out by rows at each stage: what modules make of them is up to torch's rules.
    """
    zero = settings.zero
    if zero is None:
        return
    _lay_out_copies(owned, zero)
    if zero.stage < 3:
        return
    if num_processes() == 1:
        raise DistributedError(
            "enable_zero() in a single process",
            hint="start the script with torchrun, and call torch.distributed.init_process_group() before the first step",
        )
    whole = _kept_whole(owned)
    plain = [
        item for item in places_of_parameters(owned) if not is_sharded(item[2]) and id(item[2]) not in whole
    ]
    if not plain:
        return
    made: dict[int, Any] = {}
    parts = PartsUpdated(settings)

    def part(tensor: torch.Tensor) -> Any:
        return parts.of(tensor).clone(memory_format=torch.contiguous_format)

    for module, name, parameter in plain:
        if id(parameter) not in made:
            made[id(parameter)] = nn.Parameter(part(parameter), requires_grad=parameter.requires_grad)
        parameters_of(module)[name] = made[id(parameter)]
    put_into_optimizers(owned, made, part)
    for average in owned.averages:
        named = dict(average.module.named_parameters())
        average.weights.update(
            {
                name: part(item)
                for name, item in average.weights.items()
                if not is_sharded(item) and is_of_zero(named.get(name))
            }
        )


def _lay_out_copies(owned: Owned, zero: Zero) -> None:
    made, whole = dict[int, Any](), _kept_whole(owned)
    for module, name, parameter in places_of_parameters(owned):
        splits = is_copied(parameter) and _is_split(parameter, zero.shard_min_size)
        if splits and id(parameter) not in whole and not is_sharded_module(module):
            if id(parameter) not in made:
                requires_grad = parameter.requires_grad
                made[id(parameter)] = nn.Parameter(with_rows_apart(parameter), requires_grad=requires_grad)
            parameters_of(module)[name] = made[id(parameter)]
    put_into_optimizers(owned, made, lambda entry: with_rows_apart(entry) if is_copied(entry) else entry)
    for average in owned.averages:
        copied = {name: item for name, item in average.weights.items() if is_copied(item)}
        named = dict(average.module.named_parameters())
        average.weights.update(
            {
                name: with_rows_apart(item)
                for name, item in copied.items()
                if _is_split(item, zero.shard_min_size) and id(named.get(name)) not in whole
            }
        )


def shard_state(owned: Owned, settings: Settings) -> None:
    """Let each process keep its part of what optimizers have for a parameter already, as loaded or made beforehand: ZeRO 1 and 2."""
    parts = parts_of_whole(owned, settings)
    for registered in owned.optimizers:
        for owner, entries in registered.optimizer.state.items():
            if (part := parts.get(id(owner))) is None or not isinstance(entries, dict):
                continue
            for key, entry in entries.items():
                if isinstance(entry, torch.Tensor) and not is_sharded(entry) and entry.shape == owner.shape:
                    made = part_laid_out(
                        entry.detach(), part.device_mesh, is_split=bool(part.placements[-1].is_shard())
                    )
                    entries[key] = made.clone(memory_format=torch.contiguous_format)


def parts_of_whole(owned: Owned, settings: Settings) -> dict[int, Any]:
    """By id of each parameter that stays whole the part of it that this process updates: ZeRO 1 and 2."""
    zero = settings.zero
    if zero is None or zero.stage == 3 or num_processes() == 1:
        return {}
    found: dict[int, Any] = {}
    whole, parts = _kept_whole(owned), PartsUpdated(settings)
    for _, _, parameter in places_of_parameters(owned):
        if not (is_sharded(parameter) or id(parameter) in found or id(parameter) in whole):
            found[id(parameter)] = parts.of(parameter)
    return found


class PartsUpdated:
    """The parts that this process updates, of parameters and of what belongs to them: DTensors that show these."""

    def __init__(self, settings: Settings) -> None:
        assert settings.zero is not None
        self._from = settings.zero.shard_min_size
        self._batches: Any = None if settings.data_parallel is None else settings.data_parallel.mesh
        self._meshes: dict[str, Any] = {}  # by type of device

    def of(self, tensor: torch.Tensor) -> Any:
        """The part of a tensor; all of it where it has few elements."""
        is_split = _is_split(tensor, self._from)
        return part_laid_out(tensor.detach(), self._mesh(tensor.device.type), is_split=is_split)

    def _mesh(self, device: str) -> Any:
        if device not in self._meshes and self._batches is None:
            self._meshes[device] = mesh_of_all(device, ZERO_DIM)
        elif device not in self._meshes and (self._batches.mesh_dim_names or ("",))[-1] == ZERO_DIM:
            self._meshes[device] = self._batches  # of a plan: copies along its first dimension
        elif device not in self._meshes:
            self._meshes[device] = mesh_of_group(group_of_copies(self._batches), device, ZERO_DIM)
        return self._meshes[device]


def _is_split(tensor: torch.Tensor, least: int) -> bool:
    return tensor.numel() >= least and tensor.dim() > 0


def _kept_whole(owned: Owned) -> set[int]:
    """The parameters of optimizers that do not run on parts."""
    return {id(p) for item in owned.optimizers if owned.whole.get(item.name) for p in item.parameters}


def places_of_parameters(owned: Owned) -> Iterator[tuple[nn.Module, str, Any]]:
    """Each place in a module where a parameter is: the module, the name, the parameter."""
    for module in owned.named_modules().values():
        for name, parameter in list(parameters_of(module).items()):
            if parameter is not None:
                yield module, name, parameter


def put_into_optimizers(owned: Owned, made: Mapping[int, Any], part: Callable[[Any], Any]) -> None:
    """The same parameters in optimizers, with the `part` of what they keep for each that has its form."""
    for registered in owned.optimizers:
        optimizer = registered.optimizer
        for group in optimizer.param_groups:
            group["params"] = [made.get(id(item), item) for item in group["params"]]
        for owner in [item for item in optimizer.state if id(item) in made]:
            entries = optimizer.state.pop(owner)
            optimizer.state[made[id(owner)]] = {
                key: part(entry) if isinstance(entry, torch.Tensor) and entry.shape == owner.shape else entry
                for key, entry in entries.items()
            }


def is_of_zero(parameter: object) -> bool:
    """True for a parameter that a graph has laid out itself."""
    names = getattr(getattr(parameter, "device_mesh", None), "mesh_dim_names", None)
    return is_sharded(parameter) and names is not None and names[-1] == ZERO_DIM
