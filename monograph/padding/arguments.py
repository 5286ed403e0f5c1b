"""The arguments of a call, padded to buckets: which tensors are meant, what their sizes become, and the masks that are made."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from monograph.compat.tensors import version_of
from monograph.errors import ConfigError, SignatureError
from monograph.ir.call.parameters import argument_names, path_parts
from monograph.ir.call.signature import Replicated, Spec, call_paths
from monograph.ir.call.tree import Tree, flatten, unflatten
from monograph.padding.declaration import Buckets
from monograph.padding.resize import is_without_gaps, resized

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Fit(NamedTuple):
    """The size of a group of arguments in one call, and the one that it is padded to."""

    group: str  # the first of its arguments
    present: int
    padded: int
    is_larger: bool = False  # than the largest bucket, so that it stays as it is


class _Row(NamedTuple):
    """A leaf that is padded in one dimension."""

    leaf: int
    buckets: Buckets
    group: int


@dataclass(frozen=True, eq=False)
class Form:
    """The arguments of calls of one form: the leaves that are padded."""

    tree: Tree
    rows: tuple[_Row, ...]

    def leaves_in(self, given: Sequence[Any], sizes: Sequence[int]) -> list[Any]:
        """The leaves with these sizes, by group: cut, or padded."""
        leaves = list(given)
        made: dict[Hashable, Any] = {}
        for index, item, group in self.rows:
            leaf = leaves[index]
            if leaf is None:
                continue
            tensor, size = _plain(leaf), sizes[group]
            if tensor.shape[item.dim] == size and is_without_gaps(tensor):
                continue
            key = id(tensor), item.dim % len(tensor.shape), size, item.pad  # one tensor stays one
            if key not in made:
                made[key] = tensor, resized(tensor, item.dim, size, item.pad)
            found = made[key][1]
            leaves[index] = Replicated(found) if tensor is not leaf else found
        return leaves

    def with_sizes(self, arguments: Arguments, sizes: Sequence[int]) -> Arguments:
        """The arguments with these sizes, by group."""
        leaves: list[Any] = []
        flatten(arguments, leaves, ())
        found: Arguments = unflatten(self.tree, iter(self.leaves_in(leaves, sizes)))
        return found


class Padded(NamedTuple):
    """The arguments of a call as they are given, with the masks that are made, and padded."""

    form: Form
    given: Arguments
    arguments: Arguments
    fits: tuple[Fit, ...]
    copies: tuple[tuple[torch.Tensor, torch.Tensor, int], ...]  # given, padded, the version of that
    elements: int  # of the arguments that have buckets, padded
    added: int  # those of them that are padding

    @property
    def is_padded(self) -> bool:
        """True if a size is not that of its bucket."""
        return any(fit.present != fit.padded for fit in self.fits)

    @property
    def key(self) -> Hashable:
        """What calls have in common whose results follow the sizes in the same way."""
        return self.form, tuple([(fit.padded, fit.present == fit.padded) for fit in self.fits])

    @property
    def bucket(self) -> tuple[int, ...]:
        """The bucket of each group, 0 for one that is larger than the largest."""
        return tuple([0 if fit.is_larger else fit.padded for fit in self.fits])

    @property
    def text(self) -> str:
        """Which sizes are padded, and to what."""
        return ", ".join(
            f"{fit.group} from {fit.present} to {fit.padded}"
            for fit in self.fits
            if fit.present != fit.padded
        )

    def with_sizes(self, sizes: Sequence[int]) -> Arguments:
        """What was given, with other sizes by group."""
        return self.form.with_sizes(self.given, sizes)

    @property
    def given_by_copy(self) -> dict[int, torch.Tensor]:
        """The tensors that were given, by the ids of their copies."""
        return {id(copy): given for given, copy, _ in self.copies}

    def write_back(self) -> None:
        """Put into the tensors that were given what the step has written into their padded copies."""
        for given, copy, version in self.copies:
            if version_of(copy) != version:
                with torch.no_grad():
                    given.copy_(copy[tuple(map(slice, given.shape))])


class Reader:
    """Reads the arguments of calls of one build() by the buckets of a configuration."""

    def __init__(self, buckets: tuple[Buckets, ...], build: Callable[..., Any]) -> None:
        self.buckets = buckets
        self._names = argument_names(build)
        self._parameters = inspect.signature(build).parameters
        self._makes_masks = any(item.mask is not None for item in buckets)
        self._forms: dict[Tree, Form] = {}

    def read(
        self, arguments: Arguments, formed: Callable[[tuple[Any, ...], dict[str, Any]], Arguments]
    ) -> Padded:
        """The arguments of a call, padded. `formed` gives the form in which a call is known."""
        leaves: list[Any] = []
        form = self._form(flatten(arguments, leaves, ()), leaves)
        if self._makes_masks:
            masked = arguments
            for item in self.buckets:
                if item.mask is not None and (row := _row_of(form, item)) is not None:
                    masked = self._with_mask(masked, item, leaves[row.leaf], formed)
            if masked is not arguments:
                arguments, leaves = masked, []
                form = self._form(flatten(arguments, leaves, ()), leaves)
        fits = _fits(form, leaves)
        found = _tensors(form, leaves)
        given = [_plain(leaves[index]) for index in found]
        elements = sum([tensor.numel() for tensor in given])
        sizes = [fit.padded for fit in fits]
        if sizes == [fit.present for fit in fits] and all(map(is_without_gaps, given)):
            return Padded(form, arguments, arguments, fits, (), elements, 0)
        padded = form.leaves_in(leaves, sizes)
        copies = []
        added = 0
        for index, tensor in zip(found, given, strict=True):
            copy = _plain(padded[index])
            if copy is not tensor:
                copies.append((tensor, copy, version_of(copy)))
                added += copy.numel() - tensor.numel()
        result: Arguments = unflatten(form.tree, iter(padded))
        return Padded(form, arguments, result, fits, tuple(copies), elements + added, added)

    def _form(self, tree: Tree, leaves: Sequence[Any]) -> Form:
        form = self._forms.get(tree)
        if form is None:
            form = Form(tree, tuple(self._rows(tree, leaves)))
            self._forms[tree] = form
        return form

    def _rows(self, tree: Tree, leaves: Sequence[Any]) -> list[_Row]:
        paths = call_paths(tree, self._names)
        by_parts = {path_parts(path): index for index, path in enumerate(paths)}
        without_data = {
            tuple(part for part in parts if part != "data"): index for parts, index in by_parts.items()
        }
        groups: dict[Hashable, int] = {}
        rows = []
        for item in (*self.buckets, *self._masks_of_buckets()):
            self._check_name(item, item.parts[0])
            if item.mask is not None:
                self._check_name(item, item.mask)
            index = by_parts.get(item.parts, without_data.get(item.parts))
            if index is not None:
                rows.append(_Row(index, item, groups.setdefault(item.tied_by, len(groups))))
                continue
            inside = [path for path, parts in zip(paths, by_parts, strict=True) if parts[0] == item.parts[0]]
            if inside and not all(leaves[by_parts[path_parts(path)]] is None for path in inside):
                raise ConfigError(
                    f"buckets of {item.argument}: there is no such tensor in this call",
                    where=item.where,
                    hint=f"what there is: {', '.join(inside)}",
                )
        return rows

    def _check_name(self, item: Buckets, name: str) -> None:
        takes_all = any(p.kind is p.VAR_KEYWORD for p in self._parameters.values())
        if name not in self._parameters and not takes_all:
            raise ConfigError(
                f"buckets of {item.argument}: build() has no argument {name}",
                where=item.where,
                hint=f"it has {', '.join(self._parameters) or 'none'}",
            )

    def _masks_of_buckets(self) -> list[Buckets]:
        """Buckets of the masks that go with others and have none of their own: they are padded with zeros."""
        declared = {item.parts for item in self.buckets}
        found: dict[tuple[str, int], Buckets] = {}
        for item in self.buckets:
            if item.mask is None or (item.mask,) in declared:
                continue
            for other in self.buckets:
                if other.parts == item.parts and (other is item or other.dim == 0):
                    dim = -1 if other is item else 0
                    made = Buckets(item.mask, dim, other.sizes, 0, None, other.group, item.where)
                    found.setdefault((item.mask, dim), made)
        return list(found.values())

    def _with_mask(
        self, arguments: Arguments, item: Buckets, leaf: Any, formed: Callable[..., Arguments]
    ) -> Arguments:
        """The arguments with a mask of ones, if there is none."""
        args, kwargs = arguments
        assert item.mask is not None
        place = self._names.index(item.mask) if item.mask in self._names else len(args)
        given = args[place] if place < len(args) else kwargs.get(item.mask)
        if given is not None or leaf is None:
            return arguments
        whole, tensor = isinstance(leaf, Replicated), _plain(leaf)
        dim = _dim(item, tensor)
        shape = tuple(tensor.shape[:1]) * (dim > 0) + (tensor.shape[dim],)
        mask: Any = (
            Spec(shape, torch.bool, tensor.device)
            if isinstance(tensor, Spec)
            else torch.ones(shape, dtype=torch.bool, device=tensor.device)
        )
        mask = Replicated(mask) if whole else mask
        if place < len(args):
            return (*args[:place], mask, *args[place + 1 :]), kwargs
        return formed(args, {**kwargs, item.mask: mask})


def _row_of(form: Form, item: Buckets) -> _Row | None:
    return next((row for row in form.rows if row.buckets is item), None)


def _plain(leaf: Any) -> Any:
    return leaf.value if isinstance(leaf, Replicated) else leaf


def _tensors(form: Form, leaves: Sequence[Any]) -> list[int]:
    """The leaves that are tensors and have buckets, each once."""
    return [
        index
        for index in dict.fromkeys(row.leaf for row in form.rows)
        if isinstance(_plain(leaves[index]), torch.Tensor)
    ]


def _fits(form: Form, leaves: Sequence[Any]) -> tuple[Fit, ...]:
    """The size of each group. Raises SignatureError where arguments of one have several."""
    found: dict[int, tuple[int, Buckets]] = {}
    for row in form.rows:
        leaf, item = _plain(leaves[row.leaf]), row.buckets
        if leaf is None:
            continue
        _check_tensor(item, leaf)
        size = leaf.shape[_dim(item, leaf)]
        first = found.setdefault(row.group, (size, item))
        if first[0] != size:
            raise SignatureError(
                f"{first[1]} has the size {first[0]}, and {item} has {size}: arguments that are tied to one bucket "
                "have to be of one size",
                hint=f'pad one of them before the call, or let {item.argument} go to buckets of its own: mg.buckets("'
                f'{item.argument}", ..., group="{item.argument}")',
            )
    rows = {row.group: found.get(row.group) for row in form.rows}
    return tuple([_fit(rows[group]) for group in sorted(rows)])


def _fit(found: tuple[int, Buckets] | None) -> Fit:
    if found is None:  # all of its arguments are None
        return Fit("", 0, 0)
    size, item = found
    padded = item.of(size)
    return Fit(item.name, size, size if padded is None else padded, padded is None)


def _dim(item: Buckets, leaf: Any) -> int:
    dims = len(leaf.shape)
    if not -dims <= item.dim < dims:
        raise ConfigError(
            f"buckets of {item.argument}: there is no dimension {item.dim} in a tensor of {dims}",
            where=item.where,
            hint=f"its shape is {tuple(leaf.shape)}",
        )
    return item.dim % dims


def _check_tensor(item: Buckets, leaf: Any) -> None:
    if not isinstance(leaf, (torch.Tensor, Spec)):
        raise ConfigError(
            f"buckets of {item.argument}: it is a {type(leaf).__name__} in this call, and no tensor",
            where=item.where,
            hint="sizes of tensors are padded",
        )
    item.check_pad(leaf.dtype)
    if isinstance(leaf, Spec):
        return
    if type(leaf) is not torch.Tensor or leaf.layout is not torch.strided or leaf.is_quantized:
        raise SignatureError(
            f"{item.argument} has buckets, and is a {type(leaf).__name__} of layout {leaf.layout}",
            hint="dense tensors are padded; pad others before the call",
        )
    if leaf.requires_grad:
        raise SignatureError(
            f"{item.argument} has buckets, and requires grad, which would end at its padded copy",
            hint="pad it before the call, or pass x.detach()",
        )
