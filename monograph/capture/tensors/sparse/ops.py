"""Sparse tensors under a trace: fakes of their own kind, whose ops are recorded on the dense parts.

PyTorch's fakes of sparse tensors have hardly any fake kernels, and a graph that holds one can be neither planned
nor compiled. So the trace never sees them: autograd does, which takes the formulas that it takes in eager mode, and
beneath it each op is answered here. What an op gives is found by calling it on small examples: real sparse tensors of the
same size and count, without the values. How many elements it gives may depend on values; then it is read, as any other
value that Python asks for.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from monograph.capture.numbers.moving import is_moving
from monograph.capture.tensors.reading_program import ITEM
from monograph.capture.tensors.readings import UNKNOWN, Readings
from monograph.capture.tensors.sparse.bags import BAG_GRADIENT, bag_gradient
from monograph.capture.tensors.sparse_parts import fake_of
from monograph.compat.modes import outside_of_modes
from monograph.compat.ops import overload_name, packet_name, schema_of, writes_to_inputs
from monograph.errors import CaptureError, DataDependentError
from monograph.ir.call.sparse import (
    COUNT_SPARSE,
    ON_SPARSE,
    PARTS,
    Given,
    SparseForm,
    count_of,
    form_of,
    is_sparse,
    joined,
    parts_of,
    written,
)
from monograph.layout import extent
from monograph.user_code.lines import user_place

Run = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]  # records an op
_aten = torch.ops.aten
_TO_SPARSE = frozenset(
    op
    for name in ("_to_sparse", "_to_sparse_csr", "_to_sparse_csc")
    for op in (getattr(getattr(_aten, name), overload) for overload in getattr(_aten, name).overloads())
    if not writes_to_inputs(op) and "out" not in overload_name(op)
)


def makes_sparse(func: Any) -> bool:
    """True for an op that makes sparse tensors, of dense ones too."""
    return func in _MAKERS or func in _TO_SPARSE or func is BAG_GRADIENT


def is_about_sparse(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True for arguments of an op that are sparse, or ask for a sparse result."""
    return kwargs.get("layout") in PARTS or any(map(_meets_sparse, (*args, *kwargs.values())))


def answer(readings: Readings, run: Run, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of an op that one of these two is true for; `run` records an op on parts.

    UNKNOWN for one that makes sparse tensors at times, and makes none here.
    """
    if func is BAG_GRADIENT:
        return bag_gradient(readings, run, args)
    maker = _MAKERS.get(func)
    if maker is not None:
        form, parts = maker(*args, **kwargs)
        return fake_of(readings.inputs.mode, form, parts)
    if (fact := _FACTS.get(func)) is not None:
        return fact(run, *args)
    if func in _ALIKE:
        of_part = _ALIKE[func]
        parts = [run(of_part, (part,), {}) for part in parts_of(args[0])]
        return fake_of(readings.inputs.mode, form_of(args[0]), parts)
    if schema_of(func).is_mutable:
        return _changed(readings, run, func, args, kwargs)
    return _called(readings, run, func, args, kwargs)


def _meets_sparse(item: Any) -> bool:
    if isinstance(item, torch.Tensor):
        return item.layout is not torch.strided and is_sparse(item)
    return isinstance(item, (list, tuple)) and any(map(_meets_sparse, item))


# --- what is known without an op ---------------------------------------------------------------------------------------


def _coo(
    sparse_dim: int,
    dense_dim: int,
    size: Sequence[int],
    indices: torch.Tensor,
    values: torch.Tensor,
    *,
    is_coalesced: bool | None = None,
    **_options: Any,
) -> tuple[SparseForm, Sequence[torch.Tensor]]:
    return SparseForm(torch.sparse_coo, tuple(size), bool(is_coalesced)), (indices, values)


def _compressed(
    compressed: torch.Tensor,
    plain: torch.Tensor,
    values: torch.Tensor,
    size: Sequence[int],
    *,
    layout: torch.layout | None = None,
    **_options: Any,
) -> tuple[SparseForm, Sequence[torch.Tensor]]:
    return SparseForm(layout or torch.sparse_csr, tuple(size), True), (compressed, plain, values)


_MAKERS: Mapping[Any, Callable[..., tuple[SparseForm, Sequence[torch.Tensor]]]] = {
    _aten._sparse_coo_tensor_with_dims_and_tensors.default: _coo,
    _aten.sparse_compressed_tensor.comp_plain_value_size: _compressed,
    _aten._sparse_compressed_tensor_unsafe.default: _compressed,
}


def _part(name: str) -> Callable[..., Any]:
    def part(run: Run, tensor: torch.Tensor) -> torch.Tensor:
        form, plain = form_of(tensor), name.removeprefix("_")
        names = PARTS[form.layout]
        if plain not in names or (name != plain and form.layout is not torch.sparse_coo):
            raise RuntimeError(f"{name} expected a sparse tensor of another layout, but got {form}")
        if form.layout is torch.sparse_coo and name == plain and not form.coalesced:
            raise RuntimeError(f"Cannot get {name} on an uncoalesced tensor, please call .coalesce() first")
        part: torch.Tensor = run(_aten.detach.default, (parts_of(tensor)[names.index(plain)],), {})
        return part

    return part


_FACTS: Mapping[Any, Callable[..., Any]] = {
    _aten._nnz.default: lambda _run, tensor: count_of(form_of(tensor), parts_of(tensor)),
    _aten.is_coalesced.default: lambda _run, tensor: form_of(tensor).coalesced,
    _aten.sparse_dim.default: lambda _run, tensor: _dims(tensor)[0],
    _aten.dense_dim.default: lambda _run, tensor: _dims(tensor)[1],
    **{
        getattr(_aten, name).default: _part(name)
        for name in ("_indices", "_values", *dict.fromkeys(sum(PARTS.values(), ())))
    },
}
_ALIKE = {  # of each part apart
    _aten.detach.default: _aten.detach.default,
    _aten.alias.default: _aten.detach.default,
    _aten.clone.default: _aten.clone.default,
}


def _dims(tensor: torch.Tensor) -> tuple[int, int]:
    form, parts = form_of(tensor), parts_of(tensor)
    sparse = int(parts[0].shape[0]) if form.layout is torch.sparse_coo else 2
    return sparse, len(form.size) - sparse


# --- other ops ---------------------------------------------------------------------------------------------------------


def _changed(readings: Readings, run: Run, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An op in place: what it computes, copied into the dense tensor that it changes."""
    target = args[0]
    functional = _functional(func)
    if functional is None or not isinstance(target, torch.Tensor) or is_sparse(target):
        raise CaptureError(
            f"build() changes a sparse tensor in place by {func.name().removeprefix('aten::')}",
            where=user_place(),
            hint="compute a new one: adj = adj * 2, or change its values before torch.sparse_coo_tensor()",
        )
    made = _called(readings, run, functional, args, kwargs)
    return run(_aten.copy_.default, (target, made), {})


def _functional(func: Any) -> Any:
    name = packet_name(func).partition("::")[2]
    packet = getattr(_aten, name[:-1], None) if name.endswith("_") else None
    return getattr(packet, overload_name(func) or "default", None)


def _called(readings: Readings, run: Run, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An op of PyTorch, recorded as one of ours on parts."""
    parts: list[torch.Tensor] = []
    numbers: list[Any] = []
    name = func.name().removeprefix("aten::")
    call = {
        "op": name if "." in name else f"{name}.default",
        "args": [written(item, parts, numbers, is_moving) for item in args],
        "kwargs": {key: written(value, parts, numbers, is_moving) for key, value in kwargs.items()},
    }
    text = json.dumps(call)
    (kind, first), *others = [_probed(func, args, kwargs, way) for way in _WAYS]
    tensors = [item for item in first if isinstance(item, Described)]
    if not tensors:  # a number that all sparse tensors of this form have
        return first[0] if kind is None else kind(first)
    counts = _counted(first)
    if any(counts != _counted(results) for _, results in others):
        decides = _indices_of(call) if func not in _TO_SPARSE else range(len(parts))
        counted = [part if place in decides else _zeros(run, part) for place, part in enumerate(parts)]
        counts = _counts(readings, run, name, (text, counted, None, len(counts)))
    gives: list[Given] = []
    known = iter(counts)
    for item in tensors:
        gives += item.parts if item.form is None else _with_count(item.form, item.parts, next(known))
    made = run(ON_SPARSE, (text, parts, numbers or None, json.dumps([item.text() for item in gives])), {})
    results, place = [], 0
    for item in first:
        if not isinstance(item, Described):
            results.append(item)
            continue
        held = made[place : place + len(item.parts)]
        results.append(held[0] if item.form is None else fake_of(readings.inputs.mode, item.form, held))
        place += len(item.parts)
    return results[0] if kind is None else kind(results)


class Described(NamedTuple):
    """What a tensor is that an op gives: dense, or sparse with so many elements."""

    form: SparseForm | None
    parts: tuple[Given, ...]
    elements: int = 0

    @classmethod
    def of(cls, item: Any) -> Any:
        """The description of a real tensor; anything else as it is."""
        if not is_sparse(item):
            return cls(None, (Given.of(item),)) if isinstance(item, torch.Tensor) else item
        form, parts = form_of(item), parts_of(item)
        return cls(form, tuple(map(Given.of, parts)), count_of(form, parts))


def _counted(results: Sequence[Any]) -> list[int]:
    return [item.elements for item in results if isinstance(item, Described) and item.form is not None]


def _with_count(form: SparseForm, parts: Sequence[Given], count: int) -> Iterator[Given]:
    """The parts of a sparse result with that many elements, each without gaps."""
    for name, part in zip(PARTS[form.layout], parts, strict=True):
        shape = list(part.shape)
        if form.layout is torch.sparse_coo and name == "indices":
            shape[1] = count
        elif not name.startswith("c") or name == "col_indices":
            shape[0] = count
        stride = [math.prod([max(size, 1) for size in shape[dim + 1 :]]) for dim in range(len(shape))]
        yield Given(tuple(shape), tuple(stride), part.dtype, part.device)


def _indices_of(item: Any) -> list[int]:
    """The places of the parts that say which elements there are: alone they decide how many there will be."""
    if isinstance(item, list):
        return [place for entry in item for place in _indices_of(entry)]
    if not isinstance(item, dict):
        return []
    if "sparse" not in item:
        return [place for entry in item.values() for place in _indices_of(entry)]
    return list(range(item["at"], item["at"] + len(PARTS[getattr(torch, item["sparse"])]) - 1))


def _zeros(run: Run, part: torch.Tensor) -> torch.Tensor:
    options = {"dtype": part.dtype, "device": part.device}
    zeros: torch.Tensor = run(_aten.zeros.default, (list(part.shape),), options)
    return zeros


def _counts(readings: Readings, run: Run, name: str, call: tuple[Any, ...]) -> list[int]:
    """How many elements the results have: read as a value, since it depends on values."""
    counts = run(COUNT_SPARSE, call, {})
    found = []
    for place in range(call[-1]):
        one = run(_aten.select.int, (counts, 0, place), {})
        count = readings.ask((ITEM,), (one,))
        if count is UNKNOWN:
            raise DataDependentError(
                f"how many elements {name.partition('.')[0]} gives depends on what the step computes",
                where=user_place(),
                hint="coalesce() sparse tensors and add them up before the step, or work on to_dense() here",
            )
        found.append(count)
    return found


# to choose the cells of sparse tensors: row by row, column by column, no two tensors in one cell, all in one
_ROWS, _COLUMNS, _APART, _TOGETHER = _WAYS = range(4)


def _probed(func: Any, args: Any, kwargs: Any, way: int) -> tuple[Any, list[Any]]:
    """What an op gives for real tensors of the same forms: a kind of sequence or None, and its results, described."""
    met = 0

    def real(item: Any) -> Any:
        nonlocal met
        if is_sparse(item):
            met += 1
            return _pattern(item, way, first=met == 1)
        if isinstance(item, torch.Tensor):
            fill = torch.zeros if way == _ROWS else torch.ones
            held = fill(extent(item.shape, item.stride()), dtype=item.dtype, device=item.device)
            return held.as_strided(item.shape, item.stride())
        if isinstance(item, (list, tuple)):
            return [real(entry) for entry in item]
        return 1.0 if is_moving(item) else item

    with outside_of_modes(), torch.no_grad():
        made = func(*map(real, args), **{key: real(value) for key, value in kwargs.items()})
        kind = type(made) if isinstance(made, (list, tuple)) else None
        return kind, [Described.of(made)] if kind is None else list(map(Described.of, made))


def _pattern(tensor: torch.Tensor, way: int, *, first: bool) -> torch.Tensor:
    """A real sparse tensor of the same form and count: of zeros, in other cells for each way."""
    form, parts = form_of(tensor), parts_of(tensor)
    count, values = count_of(form, parts), parts[-1]
    sizes = form.size[: _dims(tensor)[0]]
    cells = max(math.prod(sizes), 1)
    at = torch.arange(count, device=values.device) % cells
    if way == _TOGETHER and not form.coalesced:
        at = at * 0
    elif way == _APART and not first:
        at = cells - 1 - at
    elif way == _COLUMNS:
        places = torch.unravel_index(at, tuple(reversed(sizes))) if sizes else ()
        at = _cells(tuple(reversed(places)), sizes, at)
    if form.layout is torch.sparse_csc:  # it is one by rows, of the other order of dimensions
        sizes = tuple(reversed(sizes))
    places = torch.unravel_index(at.sort().values, sizes) if sizes else ()
    held = torch.zeros(values.shape, dtype=values.dtype, device=values.device)
    if form.layout is torch.sparse_coo:
        return joined(form, (torch.stack(places) if places else at.new_empty((0, count)), held))
    lines, minor = places
    ends = torch.bincount(lines, minlength=sizes[0]).cumsum(0)
    starts = torch.cat([ends.new_zeros(1), ends])
    return joined(form, (starts.to(parts[0].dtype), minor.to(parts[1].dtype), held))


def _cells(places: Sequence[torch.Tensor], sizes: Sequence[int], at: torch.Tensor) -> torch.Tensor:
    """The numbers of cells, row by row."""
    number = torch.zeros_like(at)
    for place, size in zip(places, sizes, strict=True):
        number = number * size + place
    return number
