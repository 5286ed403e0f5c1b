"""The one judge of equality: bit for bit, or by the distance to float64.

Every tool that compares a graph with eager mode asks here: tests, the demo, verification, benchmarks.
"""

from __future__ import annotations

import hashlib
import math
import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from monograph.ir.call.sparse import PARTS

_INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PLAIN = (bool, int, float, complex, str, bytes, np.generic, torch.dtype, torch.device)
_ONE_STEP = 10.0  # times the limit of a single tensor
FAULT = (
    30.0  # times as far from float64 as the other side: kernels that sum in another order do not come so far
)
# of n numbers that err by a rounding each the root mean square is rarely larger than one by this, over the root of n
_LUCK = 3.0
_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Difference:
    """The first element at which two values differ, or what else differs."""

    path: str
    expected: Any
    got: Any
    index: tuple[int, ...] = ()

    def __str__(self) -> str:
        place = f"{self.path}{list(self.index)}" if self.index else self.path
        return f"{place}: expected {_told(self.expected)}, got {_told(self.got)}"


def _told(item: Any) -> str:
    """A value in a few words: of a tensor with several elements its form."""
    return _form(item) if isinstance(item, torch.Tensor) and item.numel() != 1 else repr(item)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True if two tensors have one dtype, shape and device and the same bits: -0.0 is not 0.0, NaN equals NaN.

    On the device `meta` there are no bits.
    """
    if a.dtype != b.dtype or a.shape != b.shape or a.device != b.device:
        return False
    if a.is_meta:
        return True
    if a.layout is not torch.strided or b.layout is not torch.strided:
        return a.layout is b.layout and all(map(same_bits, _parts(a), _parts(b)))
    return torch.equal(_bits(a), _bits(b))


def _parts(sparse: torch.Tensor) -> list[torch.Tensor]:
    """The dense tensors that a sparse one is made of."""
    if sparse.layout is torch.sparse_coo:
        sparse = sparse.detach().coalesce()
    return [getattr(sparse.detach(), name)() for name in PARTS[sparse.layout]]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.view(_INTEGER[tensor.element_size()]) if tensor.dtype.is_floating_point else tensor


def differences(expected: Any, got: Any, path: str = "") -> Iterator[Difference]:
    """Where two nested values differ in their bits; tensors give their first differing element."""
    if isinstance(expected, torch.Tensor) and isinstance(got, torch.Tensor):
        if not same_bits(expected, got):
            yield _first_difference(expected, got, path)
    elif isinstance(expected, Mapping) and isinstance(got, Mapping):
        for key in dict.fromkeys((*expected, *got)):
            inner = f"{path}.{key}" if path else str(key)
            if key not in got or key not in expected:
                yield Difference(inner, expected.get(key, "nothing"), got.get(key, "nothing"))
            else:
                yield from differences(expected[key], got[key], inner)
    elif isinstance(expected, (list, tuple)) and isinstance(got, (list, tuple)) and len(expected) == len(got):
        for index, (a, b) in enumerate(zip(expected, got, strict=True)):
            yield from differences(a, b, f"{path}[{index}]")
    elif type(expected) is not type(got) or not _equal(expected, got):
        yield Difference(path, expected, got)


def _equal(expected: Any, got: Any) -> bool:
    if isinstance(expected, (float, complex)):
        return repr(expected) == repr(got)  # -0.0 is not 0.0, and NaN is NaN
    if isinstance(expected, np.ndarray):
        form = (expected.dtype, expected.shape)
        return form == (got.dtype, got.shape) and expected.tobytes() == got.tobytes()
    if "__eq__" not in {name for kind in type(expected).__mro__[:-1] for name in vars(kind)}:
        return True  # it cannot be distinguished from another of its class
    return bool(expected == got)


def _first_difference(expected: torch.Tensor, got: torch.Tensor, path: str) -> Difference:
    dense = expected.layout is got.layout is torch.strided
    if not dense or (expected.dtype, expected.shape, expected.device) != (got.dtype, got.shape, got.device):
        return Difference(path, _form(expected), _form(got))
    unequal = _bits(expected) != _bits(got)
    if expected.is_complex():
        unequal = unequal.any(-1)
    flat = int(unequal.reshape(-1).int().argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), expected.shape))
    return Difference(path, expected[index].item(), got[index].item(), index)


def _form(tensor: torch.Tensor) -> str:
    layout = "" if tensor.layout is torch.strided else f" {tensor.layout}"
    return f"{tensor.dtype} {tuple(tensor.shape)}{layout} on {tensor.device}"


# --- digests: the same bits in another process -----------------------------------------------------------------------


def digests(value: Any, path: str = "") -> dict[str, str]:
    """SHA-256 of every leaf of a nested value, by path: equal for the same bits, dtype and shape, on any device."""
    if isinstance(value, Mapping):
        items = list(value.items())
    elif isinstance(value, (list, tuple)):
        items = list(enumerate(value))
    else:
        return {path: _digest(value)}
    found = {} if items else {path: f"an empty {type(value).__name__}"}
    for key, item in items:
        found |= digests(item, f"{path}/{key}" if path else str(key))
    return found


def _digest(leaf: Any) -> str:
    sha = hashlib.sha256(f"{type(leaf).__module__}.{type(leaf).__qualname__}".encode())
    if isinstance(leaf, torch.Tensor):
        sha.update(f"{leaf.dtype} {tuple(leaf.shape)}".encode())
        leaf = _bits(leaf.cpu()).contiguous().numpy()
    if isinstance(leaf, np.ndarray) and not leaf.dtype.hasobject:
        sha.update(f"{leaf.dtype.str} {leaf.shape}".encode())
        sha.update(np.ascontiguousarray(leaf).reshape(-1).view(np.uint8).data)
    elif isinstance(leaf, (set, frozenset)):
        sha.update(repr(sorted(map(repr, leaf))).encode())
    elif leaf is None or isinstance(leaf, _PLAIN):
        sha.update(repr(leaf).encode())
    else:
        sha.update(pickle.dumps(leaf))
    return sha.hexdigest()


# --- distance to float64 -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Distance:
    """How far eager and graph are from float64 for one tensor: the largest error, and the sum of squares.

    `rounding_squares` is that of one rounding of each exact value to the type of the tensor, at its worst.
    """

    path: str
    eager_max: float
    graph_max: float
    eager_squares: float
    graph_squares: float
    rounding_squares: float
    count: int
    limit: float  # the largest error the graph may have
    moved_squares: tuple[float, ...] = ()  # of each exact result nearby, from the exact one

    @property
    def ok(self) -> bool:
        """True if the graph's largest error is within the limit."""
        return self.graph_max <= self.limit


@dataclass(frozen=True)
class FloatReport:
    """The verdict on one group of tensors: all parameters, all optimizer state, or all outputs."""

    distances: tuple[Distance, ...]
    factor: float

    @property
    def eager_rms(self) -> float:
        """Root mean square of eager's errors against float64."""
        return _root_mean([d.eager_squares for d in self.distances], [d.count for d in self.distances])

    @property
    def graph_rms(self) -> float:
        """Root mean square of the graph's errors against float64."""
        return _root_mean([d.graph_squares for d in self.distances], [d.count for d in self.distances])

    @property
    def rounding_rms(self) -> float:
        """Root mean square of one rounding of each exact value, at its worst: nobody can promise less."""
        return _root_mean([d.rounding_squares for d in self.distances], [d.count for d in self.distances])

    @property
    def moved_rms(self) -> float:
        """Root mean square by which an exact result moves at most for weights that were changed in their last place."""
        counts = [d.count for d in self.distances]
        each = zip(*(d.moved_squares for d in self.distances), strict=True)
        return max((_root_mean(squares, counts) for squares in each), default=0.0)

    @property
    def ok(self) -> bool:
        """True if the graph is as near to float64 as is promised of many steps together."""
        allowed = self.factor * max(self.eager_rms, self.rounding_rms)
        return self.graph_rms <= allowed and all(d.ok for d in self.distances)

    @property
    def ok_for_one_step(self) -> bool:
        """True if the graph is as near to float64 as can be promised of a single step.

        Where an activation is within a rounding of a kink, of ReLU for example, all gradients move at once, and who
        gets there first, eager mode or the graph, is luck: what the last place of the weights moves is granted too. And
        where eager sums in float64, as it does in statistics of batches, a single tensor may err by more than elsewhere.
        Of few numbers, as of a loss alone, eager's may all be exact by luck: more than one rounding stands in for it.
        """
        count = max(sum(distance.count for distance in self.distances), 1)
        rounding = self.rounding_rms * (1 + _LUCK / math.sqrt(count))
        allowed = self.factor * max(self.eager_rms, rounding, self.moved_rms)
        return self.graph_rms <= allowed and all(d.graph_max <= _ONE_STEP * d.limit for d in self.distances)

    @property
    def eager_ok(self) -> bool:
        """True if eager is near, too: float64 values are those of a captured step, and that may be another one."""
        return self.eager_rms <= FAULT * max(self.graph_rms, self.rounding_rms, self.moved_rms)


def against_float64(
    exact: Mapping[str, torch.Tensor],
    eager: Mapping[str, torch.Tensor],
    graph: Mapping[str, torch.Tensor],
    nearby: Sequence[Mapping[str, torch.Tensor]] = (),
) -> FloatReport:
    """Judge a graph by its distance to float64: at most twice eager's, three times for half types.

    The root mean square is taken over all tensors of the group. Where eager happens to err by less than one rounding
    of the result, that rounding counts in its place. A single tensor may err by 10 times eager's
    largest error or by 8 units in the last place of its largest value. `nearby` are exact results too, for weights that
    were changed in their last place: where that moves a result further than eager's luck, 10 times that is allowed.
    Tensors without fractions are left to `differences`.
    """
    floating = [path for path, tensor in eager.items() if tensor.is_floating_point()]
    half = any(eager[path].dtype in _HALF for path in floating)
    distances = tuple(
        _distance(path, exact[path], eager[path], graph[path], [item[path] for item in nearby])
        for path in floating
    )
    return FloatReport(distances, 3.0 if half else 2.0)


def _distance(
    path: str, exact: torch.Tensor, eager: torch.Tensor, graph: torch.Tensor, nearby: Sequence[torch.Tensor]
) -> Distance:
    reference = exact.detach().double()
    errors = _errors(reference, eager, graph)
    moves = [_error(item, reference) for item in nearby]
    reference = reference.where(_error(eager, reference).isfinite(), 0.0)  # no scale for the others
    moved = max((float(move.max()) for move in moves if move.numel()), default=0.0)
    maxima = [float(error.max()) if error.numel() else 0.0 for error in errors]
    squares = [float(error.square().sum()) for error in errors]
    unit = torch.finfo(eager.dtype).eps / 2
    rounding = (
        float((reference.nan_to_num(0.0, 0.0, 0.0) * unit).square().sum()) if reference.numel() else 0.0
    )
    largest = float(reference.abs().nan_to_num(0.0, 0.0, 0.0).max()) if reference.numel() else 0.0
    last_place = torch.finfo(eager.dtype).eps * max(largest, torch.finfo(eager.dtype).tiny)
    limit = max(10 * maxima[0], 10 * moved, 8 * last_place)
    moved_squares = tuple(float(move.square().sum()) for move in moves)
    return Distance(
        path,
        eager_max=maxima[0],
        graph_max=maxima[1],
        eager_squares=squares[0],
        graph_squares=squares[1],
        rounding_squares=rounding,
        count=reference.numel(),
        limit=limit,
        moved_squares=moved_squares,
    )


def _errors(
    reference: torch.Tensor, eager: torch.Tensor, graph: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The errors of both sides. Where eager is infinitely wrong, the graph may be as it is, and that excuses nothing else.

    It overflows in its own type where float64 does not.
    """
    of_eager, of_graph = _error(eager, reference), _error(graph, reference)
    lost = of_eager.isinf()
    as_eager = torch.minimum(of_graph, _error(graph, eager.detach().double()))
    return of_eager.where(~lost, 0.0), torch.where(lost, as_eager, of_graph)


def _error(side: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Absolute errors; equal infinities and NaN where NaN belongs count as none, others as infinite."""
    side = side.detach().double()
    error = (side - reference).abs()
    same = (side == reference) | (side.isnan() & reference.isnan())
    return torch.where(same, 0.0, error).nan_to_num(nan=math.inf, posinf=math.inf)


def _root_mean(squares: Sequence[float], counts: Sequence[int]) -> float:
    return math.sqrt(sum(squares) / max(sum(counts), 1))
