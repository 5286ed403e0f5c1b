"""Signature: what a call must match. Leaves of the arguments, modes of torch, and errors that name a path."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import nn

from monograph.compat.autograd import parameter_hooks
from monograph.compat.distributed.tensors import is_sharded
from monograph.compat.global_state import Itself
from monograph.compat.tensors import is_transformed
from monograph.errors import SignatureError
from monograph.ir.call.numbers import bits, exactly, is_plain_subclass, of_bits
from monograph.ir.call.parameters import argument_name
from monograph.ir.call.refusals import check_tensor, refuse
from monograph.ir.call.sparse import HELD, PARTS, is_sparse
from monograph.ir.call.tree import LEAF, Tree, flatten, leaf_paths, unflatten, with_parts
from monograph.layout import contiguous_stride
from monograph.settings import Settings

_PLAIN_KINDS = frozenset(
    {
        type(None), bool, int, str, bytes, type(Ellipsis), torch.dtype, torch.device, torch.layout, torch.Size,
        torch.memory_format, torch.Generator,
    }
)  # fmt: skip


# The tree of the arguments, their keys, which are the same tensor, and the modes of torch.
Signature = tuple[Tree, tuple[Hashable, ...], tuple[int, ...], tuple[Hashable, ...]]


class Spec:
    """A tensor argument without data: shape, dtype and device."""

    __slots__ = ("device", "dtype", "shape")

    def __init__(self, shape: Sequence[Any], dtype: torch.dtype, device: torch.device) -> None:
        self.shape = tuple(shape)  # of numbers, and of dims until compile() puts numbers in their place
        self.dtype = dtype
        self.device = device

    def __repr__(self) -> str:
        return f"spec({self.shape}, {self.dtype}, {str(self.device)!r})"

    def size(self, dim: int) -> int:
        """The size of a dimension, as of a tensor."""
        return int(self.shape[dim])

    @property
    def strides(self) -> tuple[int, ...]:
        """The strides of a contiguous tensor of this shape."""
        return contiguous_stride(self.shape)


class Replicated:
    """An argument that gradient accumulation does not split."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


def replicated(item: Any) -> Any:
    """Mark the tensors in an argument as no batch: each micro-batch of gradient accumulation gets them whole.

    `item` may be a tensor, a spec, or nested containers of them. Without accumulation it is passed as it is.
    """
    leaves: list[Any] = []
    tree = flatten(item, leaves)
    marked = [Replicated(leaf) if isinstance(leaf, (torch.Tensor, Spec)) else leaf for leaf in leaves]
    return unflatten(tree, iter(marked))


def spec(
    shape: Sequence[Any], dtype: torch.dtype = torch.float32, device: torch.device | str | None = None
) -> Spec:
    """Describe a tensor argument for `Graph.compile` without making one. A size is a number or a `Dim`.

    Raises SignatureError for a text or a float as a size.

    >>> spec((8, 3), torch.int64)
    spec((8, 3), torch.int64, 'cpu')
    """
    wrong = next((size for size in shape if isinstance(size, (str, float))), None)
    if wrong is not None:
        raise SignatureError(
            f"mg.spec({tuple(shape)!r}): {wrong!r} is no size",
            hint='a size is a whole number, or mg.Dim("rows", max=64) for one that varies',
        )
    return Spec(shape, dtype, torch.device(device if device is not None else torch.get_default_device()))


class TensorKey(NamedTuple):
    """What must be the same of a tensor argument for a build to serve it."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    hooks: tuple[Any, ...] = ()
    unresolved: tuple[bool, bool] = (False, False)  # conjugation and negation that a view only promises
    is_parameter: bool = False
    attributes: tuple[tuple[str, Any], ...] = ()  # that Python code has given it

    @property
    def keeps_sizes(self) -> str:
        """What the tensor is or has, so that its sizes are numbers in each build; empty if they may vary."""
        if self.requires_grad:
            return "requires grad"
        if self.hooks:
            return "has hooks"
        if self.is_parameter:
            return "is a parameter"
        if self.attributes:
            return "has attributes of Python"
        return "is a conjugated or negated view" if any(self.unresolved) else ""

    @property
    def in_numbers(self) -> TensorKey:
        """The same with numbers in the place of sizes that vary."""
        return self._replace(shape=tuple(map(int, self.shape)), stride=tuple(map(int, self.stride)))

    def __str__(self) -> str:
        grad = ", requires_grad" if self.requires_grad else ""
        grad += f", {len(self.hooks)} hooks" if self.hooks else ""
        grad += ", conjugated" if self.unresolved[0] else ""
        grad += ", negated" if self.unresolved[1] else ""
        grad += ", a parameter" if self.is_parameter else ""
        grad += f", with {', '.join(name for name, _ in self.attributes)}" if self.attributes else ""
        return f"{tuple(self.shape)} {str(self.dtype).removeprefix('torch.')} on {self.device}{grad}"


class Version(int):
    """How often what a graph holds was changed, and what was added or replaced in turn."""

    changed: tuple[str, ...] = ()

    def after(self, what: str) -> Version:
        """The next one."""
        version = Version(self + 1)
        version.changed = (*self.changed, what)
        return version


class Key(NamedTuple):
    """What a call must match for a build to serve it."""

    signature: Signature
    settings: Settings
    version: Version  # of what the graph holds


NO_KEY = Key((LEAF, (), (), ()), Settings(), Version())


class Call(NamedTuple):
    """The arguments of one call: their form, their leaves, and the path of each leaf for messages."""

    tree: Tree
    leaves: tuple[Any, ...]
    keys: tuple[Hashable, ...]
    same: tuple[int, ...]  # for each leaf the first leaf that is the same tensor; empty if all are different
    names: tuple[str, ...]  # names of the positional arguments, for paths
    replicated: frozenset[int] = frozenset()  # the leaves that gradient accumulation does not split
    key: Key = NO_KEY  # of the builds that may serve it

    def paths(self) -> list[str]:
        """The path of each leaf as the user would write it."""
        return call_paths(self.tree, self.names)

    def num_parts(self, leaf: int, dim: int) -> int:
        """Into how many parts gradient accumulation splits an argument along a dimension."""
        return 1 if dim or leaf in self.replicated else self.key.settings.accumulation_steps

    def constants(self) -> list[tuple[str, Any]]:
        """The arguments that a build is made for, by path: all but tensors and numbers that move."""
        return [
            (path, constant_of(key))
            for path, key in zip(self.paths(), self.keys, strict=True)
            if type(key) is tuple
        ]


def call_paths(tree: Tree, names: tuple[str, ...]) -> list[str]:
    """The path of each leaf of a call of this form; `names` are those of the positional arguments."""
    args, kwargs = tree.children
    paths = [
        path
        for index, child in enumerate(args.children)
        for path in leaf_paths(child, argument_name(names, index))
    ]
    for name, child in zip(kwargs.keys, kwargs.children, strict=True):
        paths += leaf_paths(child, name)
    return paths


def read_call(args: tuple[Any, ...], kwargs: Mapping[str, Any], names: tuple[str, ...]) -> Call:
    """Flatten the arguments of a call and describe each leaf."""
    leaves: list[Any] = []
    return _described(flatten((args, kwargs), leaves, ()), leaves, names)


def _described(tree: Tree, leaves: list[Any], names: tuple[str, ...]) -> Call:
    """The call of this form, whose leaves are described."""
    keys: list[Hashable] = []
    tensors: list[int] = []  # their ids, 0 for other leaves
    whole: list[int] = []
    for index, leaf in enumerate(leaves):
        kind = type(leaf)
        if kind is Replicated:
            whole.append(index)
            leaf = leaves[index] = leaf.value
            kind = type(leaf)
        if isinstance(leaf, torch.Tensor):
            if _is_odd(leaf):
                if _is_taken_apart(leaf):
                    return _described(*_with_parts(tree, leaves, whole), names)
                check_tensor(leaf, Call(tree, (), (), (), names).paths()[index])
            keys.append(_tensor_key(leaf))
            tensors.append(id(leaf))
            continue
        tensors.append(0)
        if kind is float or (isinstance(leaf, float) and kind.__module__ == "numpy"):
            leaves[index] = float(leaf)  # of numpy too, whose float64 is a float
            keys.append(float if math.isfinite(leaf) else (float, bits(leaf)))  # symbols of torch are finite
        elif kind is Spec:
            keys.append(TensorKey(torch.Size(leaf.shape), leaf.strides, leaf.dtype, leaf.device, False))
        elif kind is complex or (isinstance(leaf, complex) and kind.__module__ == "numpy"):
            leaves[index] = complex(leaf)
            keys.append((complex, bits(leaf)))
        elif kind in _PLAIN_KINDS or is_plain_subclass(leaf):
            keys.append((kind, leaf))
        elif isinstance(leaf, Enum):
            keys.append((kind, Itself(leaf)))
        else:
            refuse(leaf, Call(tree, (), (), (), names).paths()[index])
    return Call(tree, tuple(leaves), tuple(keys), first_equal(tensors), names, frozenset(whole))


def constant_of(key: tuple[type, Any]) -> Any:
    """The argument that a key which is no tensor's and no moving number's stands for."""
    kind, held = key
    if kind is float or kind is complex:
        return of_bits(kind, held)
    return held.item if isinstance(held, Itself) else held


def _is_taken_apart(tensor: torch.Tensor) -> bool:
    """True for a sparse tensor that is taken as the dense ones that it is made of, and for a DTensor, of which a part is here."""
    is_kind = is_sharded(tensor) or (type(tensor) is torch.Tensor and tensor.layout in HELD)
    return is_kind and not (tensor.requires_grad or tensor.is_inference())


def _with_parts(tree: Tree, leaves: Sequence[Any], whole: Sequence[int]) -> tuple[Tree, list[Any]]:
    """The same arguments with the dense parts of sparse tensors and DTensors in their place, marked as the whole was.

    `whole` are the leaves whose mark was taken off already.
    """
    marked = [index in whole or isinstance(leaf, Replicated) for index, leaf in enumerate(leaves)]
    plain = [leaf.value if isinstance(leaf, Replicated) else leaf for leaf in leaves]
    found: list[Any] = []
    chosen: list[bool] = []

    for leaf, mark in zip(plain, marked, strict=True):
        parts = len(PARTS[leaf.layout]) if is_sparse(leaf) and _is_taken_apart(leaf) else 1
        chosen += [mark] * parts
    form = with_parts(tree, iter(plain), _is_taken_apart, found)
    return form, [Replicated(leaf) if mark else leaf for leaf, mark in zip(found, chosen, strict=True)]


def first_equal(ids: Sequence[int]) -> tuple[int, ...]:
    """For each id the position of the first equal one, 0 standing for nothing; empty if no two are equal."""
    if len(ids) < 2:
        return ()
    first: dict[int, int] = {}
    groups = tuple(first.setdefault(key, index) if key else index for index, key in enumerate(ids))
    return groups if groups != tuple(range(len(ids))) else ()


def _tensor_key(tensor: torch.Tensor) -> TensorKey:
    hooks: tuple[Any, ...] = ()
    if tensor.requires_grad:
        before, after = parameter_hooks(tensor)
        hooks = (*before, *after)
    unresolved = tensor.is_conj(), tensor.is_neg()
    is_parameter = type(tensor) is not torch.Tensor and isinstance(tensor, nn.Parameter)
    own = tensor.__dict__
    return TensorKey(
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
        tensor.device,
        tensor.requires_grad,
        hooks,
        unresolved,
        is_parameter,
        tuple([(name, exactly(value)) for name, value in own.items()]) if own else (),
    )


def _is_odd(tensor: torch.Tensor) -> bool:
    """True for tensors that need a closer look; most do not."""
    return (
        type(tensor) is not torch.Tensor
        or tensor.layout is not torch.strided
        or tensor.is_quantized
        or tensor.is_nested
        or tensor.is_inference()
        or is_transformed(tensor)
        or (tensor.requires_grad and not tensor.is_leaf and torch.is_grad_enabled())
    )
