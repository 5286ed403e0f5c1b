"""Buckets: the sizes that a dimension of an argument is padded to, as a user declares them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import pairwise
from numbers import Integral
from typing import Any

import torch

from monograph.errors import ConfigError, shown
from monograph.ir.call.parameters import PATH, path_parts
from monograph.user_code.lines import Origin, user_place

_EXAMPLE = 'mg.buckets("input_ids", dim=1, sizes=[32, 64, 128], pad=0)'


@dataclass(frozen=True)
class Buckets:
    """What `mg.buckets` gives, for `config.buckets(...)`."""

    argument: str
    dim: int
    sizes: tuple[int, ...]
    pad: float | int | bool = 0
    mask: str | None = None
    group: str | None = None
    where: Origin = field(default=Origin(), compare=False, repr=False)

    @cached_property
    def parts(self) -> tuple[str, ...]:
        """The path of the argument as names and keys: `batch["ids"]` and `batch.ids` are the same."""
        return path_parts(self.argument)

    @cached_property
    def name(self) -> str:
        """The argument with its dimension."""
        return f"{self.argument} (dim {self.dim})"

    @cached_property
    def tied_by(self) -> Hashable:
        """What those have in common that go to one bucket."""
        return self.sizes, self.group

    def of(self, size: int) -> int | None:
        """The smallest bucket for a size; None if it is larger than the largest."""
        index = bisect_left(self.sizes, size)
        return self.sizes[index] if index < len(self.sizes) else None

    def check_pad(self, dtype: torch.dtype) -> None:
        """Raise ConfigError if a tensor of this type cannot hold the padding."""
        if not _fits(self.pad, dtype):
            raise ConfigError(
                f"buckets of {self.argument}: pad={shown(self.pad)} is a {type(self.pad).__name__}, and "
                f"{self.argument} is a tensor of {dtype}, which cannot hold it",
                where=self.where,
                hint=f"pad with {_advice(dtype)}",
            )

    def __str__(self) -> str:
        return self.name


def buckets(
    argument: str,
    dim: int,
    sizes: Sequence[int],
    pad: float | int | bool = 0,
    *,
    mask: str | None = None,
    group: str | None = None,
) -> Buckets:
    """Say to which sizes a dimension of an argument is padded, for `config.buckets(...)`.

    `argument` is the name of a parameter of build(), or the path of a tensor in it: `batch["input_ids"]`. Arguments with the
    same `sizes` are padded to the same one, and have to be of the same size, if they have no `group` of their own. `mask` is
    the parameter that says where data is: it is made if a call leaves it out, else padded with zeros. Raises ConfigError.

    >>> buckets("input_ids", dim=1, sizes=[32, 64, 128]).sizes
    (32, 64, 128)
    """
    said = f"buckets({shown(argument)}, ...)"
    if not isinstance(argument, str) or not PATH.fullmatch(argument):
        raise ConfigError(
            f"buckets({shown(argument)}, ...): the first argument is the name of one of build()",
            hint=f"{_EXAMPLE}, and 'batch[\"input_ids\"]' for what is inside of one",
        )
    if type(dim) is not int:
        raise ConfigError(f"{said}: dim={shown(dim)} is no number of a dimension", hint=_EXAMPLE)
    fault = _fault_of(sizes)
    if fault is not None:
        raise ConfigError(
            f"{said}: {fault}", hint=f"whole numbers from 1 on, each larger than the one before: {_EXAMPLE}"
        )
    if not isinstance(pad, (bool, int, float)):
        raise ConfigError(f"{said}: pad={shown(pad)} is a {type(pad).__name__}, and no number", hint=_EXAMPLE)
    if mask is not None and (not isinstance(mask, str) or not mask.isidentifier() or mask == argument):
        raise ConfigError(
            f"{said}: mask={shown(mask)} is not the name of another argument of build()",
            hint='mask="attention_mask", with def build(self, input_ids, attention_mask=None)',
        )
    if group is not None and not isinstance(group, str):
        raise ConfigError(f"{said}: group={shown(group)} is no name", hint='group="source"')
    return Buckets(argument, dim, tuple(map(int, sizes)), pad, mask, group, user_place())


def checked(known: Sequence[Buckets], added: Iterable[Any]) -> tuple[Buckets, ...]:
    """The buckets of a configuration with others. Raises ConfigError."""
    found = list(known)
    for item in added:
        if not isinstance(item, Buckets):
            raise ConfigError(
                f"config.buckets() takes what mg.buckets() gives, got a {type(item).__name__}",
                hint=f"config.buckets({_EXAMPLE})",
            )
        if any(item.parts == other.parts and item.dim == other.dim for other in found):
            raise ConfigError(
                f"{item} has buckets already",
                where=item.where,
                hint="config.buckets(None) takes away those that there are",
            )
        found.append(item)
    return tuple(found)


def _fault_of(sizes: Any) -> str | None:
    if isinstance(sizes, (str, bytes)) or not isinstance(sizes, Sequence):
        return f"sizes={shown(sizes)} is no list of sizes"
    if not sizes:
        return "there are no sizes"
    if odd := [size for size in sizes if isinstance(size, bool) or not isinstance(size, Integral)]:
        return f"{shown(odd[0])} is no size"
    if min(sizes) < 1:
        return f"{min(sizes)} is no size"
    for before, after in pairwise(sizes):
        if after <= before:
            return f"{after} comes after {before}"
    return None


@lru_cache(typed=True)
def _fits(pad: float | int | bool, dtype: torch.dtype) -> bool:
    if dtype is torch.bool:
        return isinstance(pad, bool) or (type(pad) is int and pad in (0, 1))
    if isinstance(pad, bool):
        return False
    if not (dtype.is_floating_point or dtype.is_complex):
        return type(pad) is int and torch.iinfo(dtype).min <= pad <= torch.iinfo(dtype).max
    if isinstance(pad, int) and abs(pad) > 1 << 64:
        return False
    held = torch.tensor(float(pad), dtype=torch.float64).to(dtype).to(torch.complex128).real.item()
    if isinstance(pad, float):
        return held == pad or abs(held) != float("inf")  # rounded, but not to an infinity
    return bool(held == pad)


def _advice(dtype: torch.dtype) -> str:
    if dtype is torch.bool:
        return "True or False"
    if dtype.is_floating_point or dtype.is_complex:
        return "a number of its range: 0.0"
    return "a whole number of its range: 0, or -100 for labels that cross_entropy ignores"
