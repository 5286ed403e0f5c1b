"""What differs between two records: forms, kinds of tensors, sharing of memory, values, random state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from monograph.ir.call.tree import Attributed, Tree
from monograph.numerics.judge import FloatReport, against_float64, differences
from monograph.testing.alignment.record import LEFT, Record, sharing

_GRADIENT, _OPTIMIZER = "gradient of", "optimizer"
_IN_ORDER = ("result", _GRADIENT, "")  # how the paths of what is compared begin
_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


@dataclass(frozen=True)
class Tolerance:
    """How near values must be: bit for bit or by the distance to float64, or `close` as `assert_close` means it."""

    rtol: float | None = None
    atol: float | None = None
    check_dtype: bool = True
    close: bool = False  # with torch's own tolerances of the dtype if none are given

    def numbers(self) -> tuple[float | None, float | None]:
        """For `torch.testing.assert_close`, which wants both or none."""
        if self.rtol is None and self.atol is None:
            return None, None
        return self.rtol or 0.0, self.atol or 0.0


def compare(
    expected: Record, got: Record, tolerance: Tolerance, exact: Record | None = None, reference: str = "eager"
) -> Iterator[str]:
    """Each difference as a sentence: results, gradients, then state; `exact` is what float64 gives, `reference` what is expected of."""
    others = {
        path: f"{path} has another form: expected {_spelled(form)}, got {_spelled(got.forms[path])}"
        for path, form in expected.forms.items()
        if form != got.forms[path]
    }
    for path, text in others.items():
        if not path.startswith(_OPTIMIZER):  # whose state follows from what else differs
            yield text
            return
    unasked = {path for path, leaf in got.leaves.items() if path.endswith(LEFT) and leaf is None}
    unasked |= {path for path in expected.leaves | got.leaves if path.startswith(tuple(others))}
    missing = (expected.leaves.keys() ^ got.leaves.keys()) - unasked
    for path in sorted(missing):
        yield f"{path} is {'missing' if path in expected.leaves else f'there, but not in {reference}'}"
    paths = [path for path in expected.leaves if path not in missing | unasked]
    for kinds in _IN_ORDER:
        pairs = {path: (expected.leaves[path], got.leaves[path]) for path in paths if _order(path) == kinds}
        for path, pair in pairs.items():
            yield from _kinds(path, *pair, tolerance, reference)
        yield from _values(pairs, tolerance, exact)
    yield from others.values()
    shared, seen = sharing(expected), sharing(got)
    for path in (path for path in shared if path in seen):
        alone = seen[path][0] == path
        if shared[path] != seen[path] and not (alone and path.startswith(_GRADIENT)):
            # eager mode lets gradients share memory by chance; not to share it is no fault
            yield f"{path} {_memory(path, *seen[path])}; in {reference} it {_memory(path, *shared[path])}"
    for path in sorted(expected.kept - got.kept):
        yield f"{path} is another tensor than before the call; in {reference} it is the same one"
    if not same_states(expected.random_states, got.random_states):
        yield "the random state afterwards is another one: other random numbers were drawn"


def same_states(expected: Sequence[torch.Tensor], got: Sequence[torch.Tensor]) -> bool:
    """True if the same random numbers come next."""
    return len(expected) == len(got) and all(map(torch.equal, expected, got))


def _order(path: str) -> str:
    """Which of `_IN_ORDER` a path belongs to."""
    return next((kind for kind in _IN_ORDER if path.startswith(kind)), "")


def _kinds(path: str, expected: Any, got: Any, tolerance: Tolerance, reference: str) -> Iterator[str]:
    """What can be said of a value without its numbers."""
    if path.startswith(_GRADIENT) and (expected is None) != (got is None):
        yield f"{path} is {'missing' if got is None else f'there, but not in {reference}'}"
        return
    if not (isinstance(expected, torch.Tensor) and isinstance(got, torch.Tensor)):
        if type(expected) is not type(got):
            yield f"{path} has another type: expected {_told(expected)}, got {_told(got)}"
        return
    loose = tolerance.close and not tolerance.check_dtype
    gradient = path.startswith(_GRADIENT)  # which autograd may hand out lazily conjugated, by chance
    for what, of in _FACTS.items():
        if gradient and what in ("is_conj", "is_neg"):
            continue
        if (a := of(expected)) != (b := of(got)) and not (loose and what == "dtype"):
            yield f"{path} has another {what}: expected {a}, got {b}"


def _stride(tensor: torch.Tensor) -> Any:
    """Strides where they mean something: of dimensions with more than one element."""
    if tensor.layout is not torch.strided or tensor.numel() == 0:
        return None
    return tuple(step if size > 1 else None for size, step in zip(tensor.shape, tensor.stride(), strict=True))


_JUDGED = (torch.strided, torch.sparse_coo, *_COMPRESSED)
_FACTS: Mapping[str, Callable[[torch.Tensor], Any]] = {
    "type": type,
    "dtype": lambda tensor: tensor.dtype,
    "shape": lambda tensor: tuple(tensor.shape),
    "layout": lambda tensor: tensor.layout,
    "device": lambda tensor: tensor.device,
    "stride": _stride,
    "requires_grad": lambda tensor: tensor.requires_grad,
    "is_leaf": lambda tensor: tensor.is_leaf,
    "is_conj": lambda tensor: tensor.is_conj(),
    "is_neg": lambda tensor: tensor.is_neg(),
    "is_coalesced": lambda tensor: tensor.is_coalesced() if tensor.layout is torch.sparse_coo else None,
}


def _values(
    pairs: Mapping[str, tuple[Any, Any]], tolerance: Tolerance, exact: Record | None
) -> Iterator[str]:
    tensors: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for path, (a, b) in pairs.items():
        if not isinstance(a, torch.Tensor):
            yield from (str(found) for found in differences(a, b, path) if type(a) is type(b))
        elif isinstance(b, torch.Tensor) and a.shape == b.shape:
            tensors[path] = (a.detach(), b.detach())
    if exact is not None:
        yield from _by_distance(tensors, exact)
        return
    for path, (a, b) in tensors.items():
        if tolerance.close or a.layout not in _JUDGED:
            yield from _close(path, a, b, tolerance)
        elif a.dtype == b.dtype and a.device == b.device:
            yield from (f"{found}{_extent(a, b)}" for found in differences(a, b, path))


def _close(path: str, expected: torch.Tensor, got: torch.Tensor, tolerance: Tolerance) -> Iterator[str]:
    rtol, atol = tolerance.numbers() if tolerance.close else (0.0, 0.0)
    try:
        torch.testing.assert_close(
            got, expected, rtol=rtol, atol=atol, equal_nan=True, check_dtype=False, check_stride=False
        )
    except AssertionError as error:
        yield f"{path}: {error}"


def _by_distance(tensors: Mapping[str, tuple[torch.Tensor, torch.Tensor]], exact: Record) -> Iterator[str]:
    """Groups of tensors of one kind are judged together, as the promise is given."""
    groups: dict[str, list[str]] = {}
    for path, (a, b) in tensors.items():
        if _has_fractions(a) and _has_fractions(b):
            groups.setdefault(path.split(" ")[0].split("[")[0], []).append(path)
        elif a.dtype == b.dtype:
            yield from (str(found) for found in differences(a, b, path))
    for name, paths in groups.items():
        report = against_float64(
            {path: _real(exact.leaves[path]) for path in paths},
            {path: _real(tensors[path][0]) for path in paths},
            {path: _real(tensors[path][1]) for path in paths},
        )
        if not report.ok:
            yield _told_distance(name, report)


def _has_fractions(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _real(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor if tensor.layout is torch.strided else tensor.to_dense()
    return torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor


def _told_distance(name: str, report: FloatReport) -> str:
    worst = max(report.distances, key=lambda distance: distance.graph_max / (distance.limit or 1e-300))
    return (
        f"{name}: further from float64 than eager: root mean square {report.graph_rms:.3g} against "
        f"{report.eager_rms:.3g} (allowed {report.factor:g} times); worst {worst.path}: largest error "
        f"{worst.graph_max:.3g} against {worst.eager_max:.3g} (allowed {worst.limit:.3g})"
    )


def _extent(expected: torch.Tensor, got: torch.Tensor) -> str:
    """How many elements differ, and by how much at most."""
    if expected.numel() < 2 or expected.layout is not torch.strided or expected.shape != got.shape:
        return ""
    if fractions := _has_fractions(expected):
        wide = torch.complex128 if expected.is_complex() else torch.float64
        expected, got = expected.to(wide), got.to(wide)
    unequal = (expected != got) & ~((expected != expected) & (got != got))
    if not unequal.any():
        return " (equal numbers with other bits)"
    message = f" ({int(unequal.sum())} of {expected.numel()} elements differ"
    if fractions:
        message += f", by {float((expected - got).abs().nan_to_num(0.0).max()):.3g} at most"
    return message + ")"


def _memory(path: str, owner: str, distance: int, same: bool) -> str:
    if owner == path:
        return "has memory of its own"
    if same:
        return f"is {owner} itself"
    return f"shares the memory of {owner}, {distance} elements further on"


def _spelled(tree: Tree) -> str:
    """A form as one would write it, with `_` for each leaf."""
    if tree.kind is None:
        return "_"
    inner = [_spelled(child) for child in tree.children]
    if tree.kind is Attributed:
        return f"{inner[0]} with {', '.join(tree.keys)}"
    if tree.keys:
        inner = [f"{key!r}: {child}" for key, child in zip(tree.keys, inner, strict=True)]
    if tree.kind in (list, dict):
        opened, closed = "[]" if tree.kind is list else "{}"
        return opened + ", ".join(inner) + closed
    return f"{'' if tree.kind is tuple else tree.kind.__name__}({', '.join(inner)})"


def _told(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of {value.dtype}"
    return f"{type(value).__name__} {value!r}"
