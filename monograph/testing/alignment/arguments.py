"""Arguments of a case: independent copies with the same layout, and fresh values of the same signature."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from monograph.compat.tensors import storage_key
from monograph.ir.call.tree import flatten, leaf_paths, unflatten

# how far the values of a further call are from those given: not every operator takes any values
Freshness = Literal["given", "nudged", "shuffled", "shuffled, other numbers"]
FRESHNESS: tuple[Freshness, ...] = ("shuffled, other numbers", "shuffled", "nudged", "given")


class Arguments(NamedTuple):
    """What a callable is called with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def leaves(self) -> list[tuple[str, Any]]:
        """The path and the value of each leaf: `args[0]["mask"]`."""
        found: list[Any] = []
        tree = flatten(self.args, found)
        named: list[Any] = []
        names = flatten(self.kwargs, named)
        paths = [*leaf_paths(tree, "args"), *leaf_paths(names, "kwargs")]
        return list(zip(paths, [*found, *named], strict=True))

    def tensors(self) -> list[torch.Tensor]:
        """The tensors among the leaves."""
        return [leaf for _, leaf in self.leaves() if isinstance(leaf, torch.Tensor)]

    def mapped(self, change: Callable[[Any], Any]) -> Arguments:
        """The same form with each leaf changed."""
        leaves: list[Any] = []
        tree = flatten((self.args, self.kwargs), leaves)
        return Arguments(*unflatten(tree, iter([change(leaf) for leaf in leaves])))

    def copied(self, *, shifted: bool = False) -> Arguments:
        """Tensors of their own, with the same bits, strides and sharing; `shifted` moves them in their memory."""
        return self.mapped(_Copier(shifted))

    def fresh(self, freshness: Freshness, generator: torch.Generator) -> Arguments:
        """Copies with other values of the same domain, as far as `freshness` goes."""
        copies = self.copied()
        if freshness == "given":
            return copies
        for tensor, shared in _by_memory(copies.tensors()):
            _refill(tensor, shared, shuffle=freshness != "nudged", generator=generator)
        return copies.mapped(_other_number) if freshness == "shuffled, other numbers" else copies

    def requiring(self, wanted: tuple[bool, ...]) -> Arguments:
        """These very tensors, requiring gradients or not, in the order of `tensors`."""
        for tensor, wants in zip(self.tensors(), wanted, strict=True):
            tensor.requires_grad_(wants)
        return self


def wants_gradients(arguments: Arguments) -> tuple[bool, ...]:
    """Which tensors take gradients: those that require them if any does, else all that can."""
    tensors = arguments.tensors()
    chosen = any(tensor.requires_grad for tensor in tensors)
    return tuple(
        tensor.requires_grad if chosen else tensor.is_floating_point() or tensor.is_complex()
        for tensor in tensors
    )


@dataclass
class _Copier:
    """Copies tensors; those that share memory share it afterwards, and one object stays one object."""

    shifted: bool
    _objects: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    _memory: dict[int, torch.UntypedStorage] = field(default_factory=dict)

    def __call__(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Generator):
            return torch.Generator(leaf.device).set_state(leaf.get_state())
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) not in self._objects:
            self._objects[id(leaf)] = (leaf, self._copy(leaf))
        return self._objects[id(leaf)][1]

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        plain = tensor.detach()
        if tensor.layout is not torch.strided or type(plain) is not torch.Tensor:
            copy = plain.clone()
        elif plain.is_conj():
            copy = self._moved(plain.conj()).conj()
        elif plain.is_neg():
            copy = self._moved(-plain)
        else:
            copy = self._moved(plain)
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(copy, tensor.requires_grad)
        return copy.requires_grad_(tensor.requires_grad)

    def _moved(self, tensor: torch.Tensor) -> torch.Tensor:
        """On other memory, with the same strides; one element further if shifted."""
        storage, key = tensor.untyped_storage(), storage_key(tensor)
        skipped = (
            16 if self.shifted else 0
        )  # one element of the widest dtype, four of float32: no longer aligned
        if key not in self._memory:
            # zeros: as_strided may look at what is before
            taken = torch.zeros(storage.nbytes() + skipped, dtype=torch.uint8, device=tensor.device)
            source = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            taken[skipped:].copy_(source)
            self._memory[key] = taken.untyped_storage()
        offset = tensor.storage_offset() + skipped // tensor.element_size()
        made = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return made.set_(self._memory[key], offset, tensor.size(), tensor.stride())


def _by_memory(tensors: list[torch.Tensor]) -> Iterator[tuple[torch.Tensor, bool]]:
    """One tensor for each piece of memory, and whether it stands for all of that memory's elements."""
    seen: set[int] = set()
    for tensor in tensors:
        strided = tensor.layout is torch.strided
        key = storage_key(tensor) if strided else id(tensor)
        if key not in seen:
            seen.add(key)
            yield tensor, strided


def _refill(tensor: torch.Tensor, whole: bool, *, shuffle: bool, generator: torch.Generator) -> None:
    """Other values in place: shuffled and made smaller, or moved by a thousandth; whole numbers are only shuffled."""
    values = tensor.detach()
    if not whole:
        values = values.coalesce().values() if values.layout is torch.sparse_coo else values.values()
    else:
        values = torch.empty(0, dtype=values.dtype, device=values.device).set_(values.untyped_storage())
    flat = values.reshape(-1)
    if flat.is_quantized or flat.numel() == 0:
        return
    new = flat[torch.randperm(flat.numel(), generator=generator).to(flat.device)] if shuffle else flat.clone()
    if new.is_floating_point() or new.is_complex():
        reach = 0.5 if shuffle else 1e-3
        factors = 1 - reach * torch.rand(new.shape, generator=generator, dtype=torch.float64)
        new = new * factors.to(new.device, new.real.dtype if new.is_complex() else new.dtype)
    values.copy_(new.view_as(values))


def _other_number(leaf: Any) -> Any:
    """A float argument a little smaller: a graph must not keep the first one."""
    return leaf * (1 - 2**-10) if type(leaf) is float else leaf
