"""What a step has made and changed: results, changed arguments, gradients, parameters, buffers, optimizer and random state."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from monograph.compat.tensors import storage_key
from monograph.ir.call.tree import Tree, flatten, leaf_paths
from monograph.testing.alignment.arguments import Arguments
from monograph.testing.alignment.step import Returned

LEFT = ", left behind"  # of the gradient of a parameter: a graph need not leave one
State: TypeAlias = Mapping[str, tuple[torch.Tensor, torch.Tensor]]
_PLAIN = (bool, int, float, complex, str, torch.dtype, torch.device, type(None))
_OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"training"}


@dataclass(frozen=True)
class Record:
    """All that can be seen after one call, by path. The tensors are the real ones, not copies."""

    forms: dict[str, Tree]  # of what is nested
    leaves: dict[str, Any]
    random_states: tuple[torch.Tensor, ...]  # of Python, NumPy, the CPU, and each GPU in use
    kept: frozenset[str] = field(
        default_factory=frozenset
    )  # parameters and buffers that are the tensors of before

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Each tensor with its path."""
        return ((path, leaf) for path, leaf in self.leaves.items() if isinstance(leaf, torch.Tensor))

    def of_the_call(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors that belong to the caller of this one call: results, arguments, their gradients."""
        mine = ("result", "args", "kwargs", "argument ", "gradient of ")
        return ((path, x) for path, x in self.tensors() if path.startswith(mine) and not path.endswith(LEFT))

    def beside(self) -> Record:
        """What another implementation can answer for: its attributes, and gradients that it leaves, are its own."""

        def stays(path: str) -> bool:
            return not path.startswith("attribute ") and not path.endswith(LEFT)

        return replace(self, leaves={path: leaf for path, leaf in self.leaves.items() if stays(path)})

    def results(self) -> Record:
        """Only what the call returned."""
        kept = {path: leaf for path, leaf in self.leaves.items() if path.startswith("result")}
        return Record({}, kept, self.random_states)


def record(
    returned: Returned,
    arguments: Arguments,
    module: nn.Module | None,
    optimizer: Optimizer | None,
    before: State,
    *,
    whole: bool,
) -> Record:
    """Look at everything that a call may have changed since the state was `before`; `whole` is false if no gradient was taken."""
    forms: dict[str, Tree] = {}
    leaves: dict[str, Any] = {}

    def add(path: str, item: Any) -> None:
        found: list[Any] = []
        forms[path] = flatten(item, found)
        leaves.update(zip(leaf_paths(forms[path], path), found, strict=True))

    add("result", returned.result)
    forms |= {"args": flatten(arguments.args, []), "kwargs": flatten(arguments.kwargs, [])}
    for path, leaf in arguments.leaves():
        leaves[f"{path} afterwards"] = leaf.get_state() if isinstance(leaf, torch.Generator) else leaf
        if whole and isinstance(leaf, torch.Tensor) and leaf.is_leaf:
            leaves[f"gradient of {path}"] = leaf.grad
    for index, clone in enumerate(returned.clones):
        leaves[f"argument {index} that takes a gradient, afterwards"] = clone
    for name, gradient in returned.parameter_gradients.items():
        leaves[f"gradient of {name}"] = gradient
    if module is not None:
        now = state_of(module)
        leaves.update((path, tensor) for path, (tensor, _) in now.items())
        leaves.update((f"gradient of {name}{LEFT}", p.grad) for name, p in module.named_parameters())
        leaves.update(_attributes(module))
        kept = frozenset(path for path in now.keys() & before.keys() if _stayed(before[path], now[path]))
    else:
        kept = frozenset()
    if optimizer is not None:
        add("optimizer state", list(optimizer.state.values()))
        add(
            "optimizer groups",
            [{**group, "params": len(group["params"])} for group in optimizer.param_groups],
        )
    leaves.update((f"setting {name}", value) for name, value in _settings().items())
    return Record(forms, leaves, random_states(), kept)


def state_of(module: nn.Module | None) -> State:
    """Parameters and buffers by path, and a view of each that keeps its memory: `.data` may be exchanged."""
    if module is None:
        return {}
    found: dict[str, torch.Tensor] = {}
    found |= {f"parameter {name}": value for name, value in module.named_parameters()}
    found |= {f"buffer {name}": value for name, value in module.named_buffers()}
    return {path: (tensor, tensor.detach()) for path, tensor in found.items() if not is_lazy(tensor)}


def _stayed(before: tuple[torch.Tensor, torch.Tensor], now: tuple[torch.Tensor, torch.Tensor]) -> bool:
    """True for the same object on the same memory."""
    if before[0] is not now[0] or before[1].layout is not torch.strided:
        return before[0] is now[0]
    return storage_key(before[1]) == storage_key(now[1])


def _attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Plain values and tensors in the attributes of a module and of those in it."""
    for prefix, part in module.named_modules():
        for name, value in vars(part).items():
            if name not in _OF_EVERY_MODULE:
                found: list[Any] = []
                place = f"attribute {prefix}.{name}" if prefix else f"attribute {name}"
                paths = leaf_paths(flatten(value, found), place)
                for path, leaf in zip(paths, found, strict=True):
                    if isinstance(leaf, torch.Tensor):  # a graph keeps no autograd history in attributes
                        yield path, leaf.detach()
                    elif isinstance(leaf, _PLAIN):
                        yield path, leaf


def _settings() -> dict[str, Any]:
    """What holds for all of torch, and is to be left as it is."""
    return {
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "default dtype": torch.get_default_dtype(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "threads": torch.get_num_threads(),
    }


def random_states() -> tuple[torch.Tensor, ...]:
    """The random numbers that come next."""
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    of_numpy: Any = np.random.get_state()
    return (
        torch.get_rng_state(),
        torch.tensor(random.getstate()[1]),
        torch.tensor([*of_numpy[1].tolist(), of_numpy[2]]),
        *devices,
    )


def sharing(record: Record) -> dict[str, tuple[str, int, bool]]:
    """For each tensor the first path on the same memory, how far it begins from there, and if it is the same object."""
    first: dict[int, tuple[str, torch.Tensor]] = {}
    found = {}
    for path, tensor in record.tensors():
        strided = tensor.layout is torch.strided and tensor.numel() > 0
        owner, origin = first.setdefault(storage_key(tensor) if strided else id(tensor), (path, tensor))
        distance = int(tensor.storage_offset() - origin.storage_offset()) if strided else 0
        found[path] = (owner, distance, tensor is origin)
    return found
