"""A step over flat tensors, as exporters take it: build() in a module that takes and gives tensors by position."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from monograph.artifact.pack import Step
from monograph.artifact.schema.tree import plain_name
from monograph.checkpoint.errors import Refused
from monograph.export.branches import check_branches
from monograph.export.onnx import Exported
from monograph.ir.call.dims import Arguments, Dim
from monograph.ir.call.signature import Spec, TensorKey, call_paths, constant_of
from monograph.ir.call.tree import Tree, flatten, leaf_paths, unflatten
from monograph.sizes.place import SizePlace, size_places
from monograph.sizes.size import Size
from monograph.state.find import Owned

_MOST = 1 << 20  # of a size that varies


class _Flat(nn.Module):
    """Holds the modules of a graph under their names, and calls its build()."""

    def __init__(self, build: Callable[..., Any], owned: Owned, tree: Tree, leaves: tuple[Any, ...]) -> None:
        super().__init__()
        for name, module in owned.modules.items():
            self.add_module(name, module)
        self.training = False  # its own flag: modules stay as they are
        self._build, self._tree, self._leaves = build, tree, leaves

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The tensors that build() returns."""
        return tuple(item for _, item in self.results(*tensors))

    def results(self, *tensors: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        """The same with their paths."""
        left = iter(tensors)
        given = [next(left) if isinstance(leaf, TensorKey) else leaf for leaf in self._leaves]
        args, kwargs = unflatten(self._tree, iter(given))
        leaves: list[Any] = []
        tree = flatten(self._build(*args, **kwargs), leaves)
        pairs = zip(leaf_paths(tree, "result"), leaves, strict=True)
        return [(path, item) for path, item in pairs if isinstance(item, torch.Tensor)]


def flat_module(build: Callable[..., Any], owned: Owned, step: Step, declared: Arguments | None) -> Exported:
    """What is exported of a step. `Refused` for arguments that have no place among tensors."""
    leaves = []
    for key in step.keys:
        if key is float or key is int:
            what = "a float" if key is float else "an int that differs between calls"
            raise Refused(
                f"build() takes {what}, which no exported file does", "pass it as a tensor of one element"
            )
        leaves.append(key if isinstance(key, TensorKey) else constant_of(key))
    check_branches(step)
    module = _Flat(build, owned, step.tree, tuple(leaves))
    keys = [key for key in leaves if isinstance(key, TensorKey)]
    names = [
        name
        for name, key in zip(call_paths(step.tree, step.names), leaves, strict=True)
        if isinstance(key, TensorKey)
    ]
    specs = _specs(declared, leaves)
    dims = tuple(
        {axis: (size.name, size.min, size.max) for axis, size in enumerate(spec) if isinstance(size, Dim)}
        for spec in specs
    )
    ranges = {name: (low, high) for found in dims for name, low, high in found.values()}
    chosen = [{name: _between(low, high) for name, (low, high) in ranges.items()}]
    chosen += [{name: low for name, (low, _) in ranges.items()}] if ranges else []
    samples = tuple(tuple(map(_sample, keys, specs, [sizes] * len(keys))) for sizes in chosen)
    with torch.no_grad():
        outputs = tuple(plain_name(path) for path, _ in module.results(*samples[0]))
    return Exported(module, tuple(map(plain_name, names)), outputs, dims, samples)


def _specs(declared: Arguments | None, leaves: list[Any]) -> list[tuple[Any, ...]]:
    """The shape of each tensor, with the dims that were declared, or with sizes that vary as dims from that of the step on."""
    if declared is None:
        shapes = [key.shape for key in leaves if isinstance(key, TensorKey)]
        places = size_places(shapes)
        return [tuple([_dim(size, places) for size in shape]) for shape in shapes]
    items: list[Any] = []
    flatten(declared, items)
    return [tuple(item.shape) for item in items if isinstance(item, (Spec, torch.Tensor))]


def _dim(size: int, places: Mapping[str, SizePlace]) -> int | Dim:
    if not isinstance(size, Size):
        return size
    name, parts = size.name_and_parts
    return Dim(name if parts == places[name].parts else f"{name}_{parts}", int(size), _MOST)


def _between(low: int, high: int) -> int:
    """A size at which nothing is special, and not the smallest."""
    return min(high, max(low + 2, 3))


def _sample(key: TensorKey, shape: tuple[Any, ...], sizes: Mapping[str, int]) -> torch.Tensor:
    """Numbers of a kind that any model takes: small ones, and zero where they count or choose."""
    numbers = [sizes[size.name] if isinstance(size, Dim) else size for size in shape]
    if key.dtype.is_floating_point:
        return torch.rand(numbers, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(
            key.dtype
        )
    return torch.zeros(numbers, dtype=key.dtype)
