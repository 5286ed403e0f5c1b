"""A signature of an artifact as clients see it: named tensors in and out, and the batches that it runs."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch

from monograph import ArtifactError
from monograph.artifact.artifact import Artifact
from monograph.artifact.callable_programs import StoredPrograms, StoredSignature
from monograph.artifact.schema.signatures import Signature
from monograph.artifact.schema.tree import Form, ValueForm, plain_name
from monograph.export.batch_independence import rows_are_apart, trials
from monograph.export.triton import DATATYPES
from monograph.ir.call.tree import flatten, leaf_paths, unflatten
from monograph.ir.meta import ScalarMeta, TensorMeta
from monograph.settings import is_compiled

Shape = tuple[int, ...]
Tensors = Sequence[torch.Tensor]
_TensorsOf = Callable[[Signature], list[tuple[str, TensorMeta]]]


@dataclass(frozen=True)
class Field:
    """A tensor that a model takes or gives: -1 in its shape is a size that varies; it has `most` elements at most."""

    name: str
    dtype: torch.dtype
    shape: Shape
    most: int

    def __str__(self) -> str:
        return f"{self.name}: {str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


class ServedModel:
    """A signature that does not train, called with tensors by position.

    `batch_sizes` are the numbers of rows that run as one; it is empty if requests run alone.
    """

    def __init__(self, name: str, signature: StoredSignature, max_batch: int) -> None:
        self.name, self._signature = name, signature
        layouts = list(map(_layout, signature.programs))
        batched = next((item for item in layouts if item.is_batched), None)
        self._main = batched or layouts[0]
        layouts = [item for item in layouts if item.kinds == self._main.kinds]
        _check(name, self._main)
        self.inputs, self.outputs = _fields(layouts, _inputs), _fields(layouts, _outputs)
        rows = sorted({size for item in layouts for size in item.rows}) if batched else []
        self.batch_sizes = tuple(size for size in rows if size <= max_batch)
        self.most_rows = rows[-1] if rows else 0  # of one request
        self.backend, self.note = signature.backend, ""

    def _size_for(self, rows: int) -> int:
        """The batch in which so many rows run; those of one request may be more than are put together."""
        return rows if rows > self.batch_sizes[-1] else self.batch_sizes[bisect_left(self.batch_sizes, rows)]

    def run(self, tensors: Tensors) -> list[torch.Tensor]:
        """The results for one set of inputs, as the artifact gives them."""
        left = iter(tensors)
        arguments = {}
        for parameter in self._main.smallest.parameters:
            leaves = [_given(leaf, left) for leaf in parameter.form.leaves]
            arguments[parameter.name] = unflatten(parameter.form.tree, iter(leaves))
        found: list[Any] = []
        flatten(self._signature(**arguments), found)
        return [leaf for leaf in found if isinstance(leaf, torch.Tensor)]

    def run_together(self, requests: Sequence[Tensors]) -> list[list[torch.Tensor]]:
        """The results for several sets of inputs, whose rows run as one batch, filled up with copies of the last."""
        counts = [len(tensors[0]) for tensors in requests]
        missing = self._size_for(sum(counts)) - sum(counts)
        batch = []
        for parts in zip(*requests, strict=True):
            last = parts[-1][-1:]
            rows = [*parts, last.expand(missing, *last.shape[1:])] if missing else parts
            batch.append(torch.cat(rows) if len(rows) > 1 else rows[0])
        results = self.run(batch)
        ends = accumulate(counts, initial=0)
        return [[item[start:stop] for item in results] for start, stop in pairwise(ends)]

    def prepare(self) -> None:
        """Make programs runnable before the first request, and see that rows do not depend on each other.

        A compiled program takes long to make, so only powers of two remain of its batch sizes.
        """
        for found, what in (
            (self._signature.changes_state, "changes its state"),
            (self._signature.draws, "draws random numbers"),
        ):
            if found:
                self.batch_sizes = ()
                self.note = f"it {what}, so each request runs alone: was model.eval() forgotten?"
                return
        if not self.most_rows:
            self.note = "no mg.Dim is the first size of all its tensors, so each request runs alone"
        if is_compiled(self.backend):
            self.batch_sizes = tuple(
                size for size in self.batch_sizes if size & (size - 1) == 0 or size == self.batch_sizes[-1]
            )
            self.most_rows = self.batch_sizes[-1] if self.batch_sizes else 0
        sizes, self.batch_sizes = self.batch_sizes, ()
        try:
            if not sizes:
                self.run(next(self._trials(None)))
            elif not self._rows_are_apart(sizes):
                self.note = "the rows of a batch depend on each other, so each request runs alone"
            else:
                self.batch_sizes = sizes
                for size in sizes if is_compiled(self.backend) else ():
                    self.run(next(self._trials(size)))
        except Exception as error:  # numbers out of nowhere need not fit a model
            self.note = f"it could not be tried, so each request runs alone: {error}"
        self.backend = self._signature.backend

    def _rows_are_apart(self, sizes: Sequence[int]) -> bool:
        """Whether rows give the same among others as among copies of themselves, as far as a test shows."""
        size = next((size for size in sizes if size > 1), None)
        return size is None or all(rows_are_apart(self.run, batch) for batch in self._trials(size))

    def _trials(self, rows: int | None) -> Iterator[list[torch.Tensor]]:
        """Inputs of the smallest sizes, but for the rows."""
        forms = [form for _, form in self._main.inputs]
        shapes = [form.shape if rows is None else (rows, *form.shape[1:]) for form in forms]
        return trials(self.run, shapes, [form.dtype for form in forms])


def served(name: str, artifact: Artifact, max_batch: int) -> list[ServedModel]:
    """What is served of an artifact: the signatures that do not train, by the artifact's name if it is only one."""
    signatures = {key: item for key, item in artifact.signatures.items() if not item.trains}
    if not signatures:
        raise ArtifactError(f"{artifact.path} only trains", hint="save a graph that infers with it")
    alone = len(signatures) == 1
    return [
        ServedModel(name if alone else f"{name}.{key}", item, max_batch) for key, item in signatures.items()
    ]


@dataclass(frozen=True)
class _Layout:
    """The tensors of one stored program at its smallest and its largest sizes, and the rows of its batches."""

    smallest: Signature
    largest: Signature
    is_batched: bool  # whether one dim is the first size of every tensor, and no other
    rows: Sequence[int]

    @property
    def inputs(self) -> list[tuple[str, TensorMeta]]:
        return _inputs(self.smallest)

    @property
    def outputs(self) -> list[tuple[str, TensorMeta]]:
        return _outputs(self.smallest)

    @property
    def kinds(self) -> list[tuple[str, torch.dtype, int]]:
        return [(name, form.dtype, len(form.shape)) for name, form in self.inputs + self.outputs]


def _layout(programs: StoredPrograms) -> _Layout:
    lows, highs = tuple(low for _, low, _ in programs.dims), tuple(high for _, _, high in programs.dims)
    smallest, largest = programs.signature_at(lows), programs.signature_at(highs)
    for index, (low, high) in enumerate(zip(lows, highs, strict=True)):
        raised = programs.signature_at((*lows[:index], high, *lows[index + 1 :]))
        if low < high and _only_rows_differ(smallest, raised, low, high):
            return _Layout(smallest, largest, True, range(low, high + 1))
    first = {form.shape[:1] for item in (smallest, largest) for _, form in _inputs(item) + _outputs(item)}
    return _Layout(smallest, largest, False, first.pop() if len(first) == 1 else ())


def _only_rows_differ(smallest: Signature, raised: Signature, low: int, high: int) -> bool:
    """Whether a dim is the first size of every tensor, and no other."""
    pairs = zip(_inputs(smallest) + _outputs(smallest), _inputs(raised) + _outputs(raised), strict=True)
    return all(
        a.shape[:1] == (low,) and b.shape[:1] == (high,) and a.shape[1:] == b.shape[1:]
        for (_, a), (_, b) in pairs
    )


def _inputs(signature: Signature) -> list[tuple[str, TensorMeta]]:
    return [pair for item in signature.parameters for pair in _tensors(item.form, item.name)]


def _outputs(signature: Signature) -> list[tuple[str, TensorMeta]]:
    return _tensors(signature.returned, "result")


def _tensors(form: Form, name: str) -> list[tuple[str, TensorMeta]]:
    pairs = zip(leaf_paths(form.tree, name), form.leaves, strict=True)
    return [(plain_name(path), leaf) for path, leaf in pairs if isinstance(leaf, TensorMeta)]


def _fields(layouts: Sequence[_Layout], tensors: _TensorsOf) -> tuple[Field, ...]:
    """The inputs or outputs of programs that take tensors of the same kinds."""
    extremes = [signature for item in layouts for signature in (item.smallest, item.largest)]
    columns = zip(*map(tensors, extremes), strict=True)
    found = []
    for column in columns:
        name, first = column[0]
        shapes = [form.shape for _, form in column]
        sizes = [set(axis) for axis in zip(*shapes, strict=True)]
        shape = tuple(axis.pop() if len(axis) == 1 else -1 for axis in sizes)
        found.append(Field(name, first.dtype, shape, max(map(math.prod, shapes))))
    return tuple(found)


def _check(name: str, layout: _Layout) -> None:
    """Raise ArtifactError for what no client can give or take."""
    for parameter in layout.smallest.parameters:
        if any(isinstance(leaf, ScalarMeta) for leaf in parameter.form.leaves):
            raise ArtifactError(
                f"{name} takes {parameter.name} as a float", hint="let build() take a tensor in its place"
            )
    if not layout.inputs or not layout.outputs:
        raise ArtifactError(f"{name} takes or gives no tensors: there is nothing to serve")
    for key, form in layout.inputs + layout.outputs:
        if form.dtype not in DATATYPES:
            raise ArtifactError(f"{key} of {name} is {form.dtype}, which the protocol does not have")
    for names in ([key for key, _ in layout.inputs], [key for key, _ in layout.outputs]):
        if len(set(names)) < len(names):
            raise ArtifactError(f"two tensors of {name} have one name: {', '.join(names)}")


def _given(leaf: object, left: Any) -> Any:
    """What goes in at a leaf of the arguments."""
    if isinstance(leaf, TensorMeta):
        return next(left).to(leaf.device)
    return leaf.value if isinstance(leaf, ValueForm) else None
