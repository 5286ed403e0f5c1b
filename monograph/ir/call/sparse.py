"""Sparse tensors as the dense tensors that they are made of.

A program holds dense tensors alone. A sparse one goes in and comes out in parts: indices and values, with its layout, its
size and whether it is coalesced in the form of the call. What PyTorch computes on sparse tensors is one op of ours: it
puts the parts together, calls PyTorch's op, and gives the parts of what that gives.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Final, NamedTuple

import torch

from monograph.compat.fakes import is_fake
from monograph.compat.ops import schema_of
from monograph.compat.tensors import coo_parts, num_elements, storage_key
from monograph.errors import CaptureError
from monograph.user_code.lines import user_place

PARTS: Final[Mapping[torch.layout, tuple[str, ...]]] = {
    torch.sparse_coo: ("indices", "values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}
HELD: Final = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc)  # the layouts that a program can work on
_KNOWN = "_sparse_parts"  # where a fake keeps its own


class SparseForm(NamedTuple):
    """What a sparse tensor is besides its parts."""

    layout: torch.layout
    size: tuple[int, ...]
    coalesced: bool  # what is compressed always is

    def __str__(self) -> str:
        return str(self.layout).removeprefix("torch.")


def is_sparse(item: object) -> bool:
    """True for tensors of a layout that parts are known of."""
    return isinstance(item, torch.Tensor) and item.layout in PARTS


def form_of(tensor: torch.Tensor) -> SparseForm:
    """What a sparse tensor is besides its parts."""
    known = _known(tensor)
    if known is not None:
        return known[0]
    coalesced = tensor.layout is not torch.sparse_coo or tensor.is_coalesced()
    return SparseForm(tensor.layout, tuple(tensor.shape), coalesced)


def parts_of(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The dense tensors of a sparse one, which are on its memory."""
    known = _known(tensor)
    if known is not None:
        return known[1]
    if tensor.layout is torch.sparse_coo:
        return coo_parts(tensor)
    tensor = tensor.detach()
    return tuple(getattr(tensor, name)() for name in PARTS[tensor.layout])


def _known(tensor: torch.Tensor) -> tuple[SparseForm, tuple[torch.Tensor, ...]] | None:
    """What a fake is made of; None for real tensors. Raises CaptureError for a fake that nobody has said it of.

    Its parts would be constants of the program, without values.
    """
    known: tuple[SparseForm, tuple[torch.Tensor, ...]] | None = vars(tensor).get(_KNOWN)
    if known is None and is_fake(tensor):
        raise CaptureError(
            "an op makes a sparse tensor, and a graph does not know of which parts",
            where=user_place(),
            hint="let the op give a dense tensor, for example sparse=False in the module; an embedding with sparse=True may be "
            "used once in a step: look all rows up at once, emb(torch.cat([a, b]))",
        )
    return known


def know_parts(fake: torch.Tensor, form: SparseForm, parts: Sequence[torch.Tensor]) -> None:
    """Say what a fake is made of."""
    setattr(fake, _KNOWN, (form, tuple(parts)))


def joined(
    form: SparseForm, parts: Sequence[torch.Tensor], *, check_invariants: bool = False
) -> torch.Tensor:
    """The sparse tensor of these parts, on their memory."""
    layout, size, coalesced = form
    if layout is torch.sparse_coo:
        indices, values = parts
        return torch.sparse_coo_tensor(
            indices,
            values,
            size,
            is_coalesced=coalesced,
            check_invariants=check_invariants,
            device=values.device,
        )
    compressed, plain, values = parts
    return torch.sparse_compressed_tensor(
        compressed,
        plain,
        values,
        size,
        dtype=values.dtype,
        layout=layout,
        device=values.device,
        check_invariants=check_invariants,
    )


def count_of(form: SparseForm, parts: Sequence[torch.Tensor]) -> int:
    """How many elements are stored."""
    return int(parts[1].shape[0] if form.layout is not torch.sparse_coo else parts[0].shape[1])


# --- calls as text, for the op that makes them -------------------------------------------------------------------------

_NAMED: Final[Mapping[type, str]] = {
    torch.dtype: "dtype",
    torch.layout: "layout",
    torch.memory_format: "memory_format",
}


def written(
    item: Any, parts: list[torch.Tensor], numbers: list[Any], is_moving: Callable[[Any], bool]
) -> Any:
    """An argument as JSON, its tensors and moving numbers put after the others; TypeError for what has no text."""
    if is_sparse(item):
        form, place = form_of(item), len(parts)
        parts += parts_of(item)
        return {"sparse": str(form), "size": list(form.size), "coalesced": form.coalesced, "at": place}
    if isinstance(item, torch.Tensor):
        parts.append(item)
        return {"tensor": len(parts) - 1}
    if is_moving(item):
        numbers.append(item)
        return {"number": len(numbers) - 1}
    if item is None or isinstance(item, (bool, int, float, str)):
        return item
    if isinstance(item, (list, tuple)):
        return [written(entry, parts, numbers, is_moving) for entry in item]
    if type(item) in _NAMED:
        return {_NAMED[type(item)]: str(item).removeprefix("torch.")}
    if isinstance(item, torch.device):
        return {"device": str(item)}
    raise TypeError(f"a {type(item).__name__} is no argument of an op on sparse tensors")


def read(item: Any, parts: Sequence[torch.Tensor], numbers: Sequence[Any]) -> Any:
    """An argument from its JSON."""
    if isinstance(item, list):
        return [read(entry, parts, numbers) for entry in item]
    if not isinstance(item, dict):
        return item
    if "sparse" in item:
        form = SparseForm(getattr(torch, item["sparse"]), tuple(item["size"]), item["coalesced"])
        at = item["at"]
        return joined(form, parts[at : at + len(PARTS[form.layout])])
    ((kind, value),) = item.items()
    if kind == "tensor":
        return parts[value]
    if kind == "number":
        return numbers[value] if numbers else 1
    return torch.device(value) if kind == "device" else getattr(torch, value)


class Given(NamedTuple):
    """One tensor that a call gives, or one part of it."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Given:
        """What a tensor is, without gaps and with each element in a place of its own."""
        stride = torch.empty_like(tensor, device="meta").stride()
        return cls(tuple(tensor.shape), stride, tensor.dtype, tensor.device)

    def text(self) -> list[Any]:
        """As JSON."""
        dtype = str(self.dtype).removeprefix("torch.")
        return [list(self.shape), list(self.stride), dtype, str(self.device)]


@cache
def given_by(text: str) -> tuple[Given, ...]:
    """What a call gives, from its text."""
    return tuple(
        Given(tuple(shape), tuple(stride), getattr(torch, dtype), torch.device(device))
        for shape, stride, dtype, device in json.loads(text)
    )


def op_of(name: str) -> Any:
    """An op of PyTorch that changes nothing, by its name."""
    base, _, overload = name.partition(".")
    op = getattr(getattr(torch.ops.aten, base), overload)
    if schema_of(op).is_mutable:
        raise RuntimeError(f"{name} changes its arguments")
    return op


_MAKE_SPARSE: Final = ("_to_sparse", "to_sparse", "_embedding_bag_backward")  # of dense tensors


@cache
def _call(text: str) -> tuple[Any, Any, Any]:
    call = json.loads(text)
    described = json.dumps([call["args"], call["kwargs"]])
    if '"sparse' not in described and not call["op"].startswith(_MAKE_SPARSE):
        raise RuntimeError(f"{call['op']} is called on no sparse tensor")
    return op_of(call["op"]), call["args"], call["kwargs"]


def _results(text: str, parts: Sequence[torch.Tensor], numbers: Sequence[Any]) -> list[torch.Tensor]:
    op, args, kwargs = _call(text)
    args = read(args, parts, numbers)
    made = op(*args, **{name: read(value, parts, numbers) for name, value in kwargs.items()})
    return list(made) if isinstance(made, (list, tuple)) else [made]


def taken_apart(results: Sequence[Any]) -> Iterator[torch.Tensor]:
    """Dense tensors in the place of sparse ones."""
    for result in results:
        if is_sparse(result):
            yield from parts_of(result)
        elif isinstance(result, torch.Tensor):  # others are numbers, or nothing at all
            yield result


# --- the ops ---------------------------------------------------------------------------------------------------------

_LIBRARY: Final = torch.library.Library("monograph", "FRAGMENT")
# compiled steps cannot hold an empty list: without numbers that move there is none
_LIBRARY.define("on_sparse(str call, Tensor[] parts, Scalar[]? numbers, str gives) -> Tensor[]")
_LIBRARY.define("count_sparse(str call, Tensor[] parts, Scalar[]? numbers, int results) -> Tensor")


def _on_sparse(
    call: str, parts: list[torch.Tensor], numbers: list[Any] | None, gives: str
) -> list[torch.Tensor]:
    made = []
    held = {storage_key(part) for part in parts}
    for tensor, expected in zip(
        taken_apart(_results(call, parts, numbers or ())), given_by(gives), strict=True
    ):
        if tuple(tensor.shape) != expected.shape or tensor.dtype != expected.dtype:
            raise RuntimeError(
                f"{json.loads(call)['op']} gives {tuple(tensor.shape)} {tensor.dtype} where the step was captured with "
                f"{expected.shape} {expected.dtype}"
            )
        if tensor.stride() != expected.stride:
            laid = torch.empty_strided(
                expected.shape, expected.stride, dtype=tensor.dtype, device=tensor.device
            )
            tensor = laid.copy_(tensor)
        made.append(tensor.clone() if storage_key(tensor) in held else tensor)
        held.add(storage_key(made[-1]))
    return made


def _count_sparse(
    call: str, parts: list[torch.Tensor], numbers: list[Any] | None, results: int
) -> torch.Tensor:
    counts = [num_elements(result) for result in _results(call, parts, numbers or ()) if is_sparse(result)]
    return torch.tensor(counts)


def _on_sparse_described(
    _call: str, _parts: list[torch.Tensor], _numbers: list[Any] | None, gives: str
) -> list[torch.Tensor]:
    return [
        torch.empty_strided(item.shape, item.stride, dtype=item.dtype, device=item.device)
        for item in given_by(gives)
    ]


def _count_described(
    _call: str, _parts: list[torch.Tensor], _numbers: list[Any] | None, results: int
) -> torch.Tensor:
    return torch.empty(results, dtype=torch.int64)


_LIBRARY.impl("on_sparse", _on_sparse, "CompositeExplicitAutograd")
_LIBRARY.impl("count_sparse", _count_sparse, "CompositeExplicitAutograd")
torch.library.register_fake("monograph::on_sparse", _on_sparse_described, lib=_LIBRARY)
torch.library.register_fake("monograph::count_sparse", _count_described, lib=_LIBRARY)
ON_SPARSE: Final = torch.ops.monograph.on_sparse.default
COUNT_SPARSE: Final = torch.ops.monograph.count_sparse.default
