"""Cross-entropy by code of our own: as near to float64 as torch's kernels, and chosen where all that reads it is known."""

from __future__ import annotations

import math

import pytest
import torch

from monograph.ir.own_ops import cross_entropy_of_torch, smooth_cross_entropy_of_torch
from monograph.kernels import compile as workshop_module
from monograph.kernels.compile import KernelCompiler
from monograph.layout import Layout
from monograph.native import CrossEntropy

COMPILER = KernelCompiler()  # of this processor: what several tests use is compiled once


def code(logits: torch.Tensor, ignored: int = -100, threads: int = 1, smooth: bool = False) -> CrossEntropy:
    """Our code for logits."""
    layout = Layout(logits.shape, logits.stride())
    return CrossEntropy.of([layout] * (3 + smooth), [ignored], threads)


def ours(logits, *others, ignored=-100, threads=1, compiler=COMPILER):
    """Losses and gradient by our code; with a gradient for each logarithm, their sums too."""
    smooth = len(others) == 3
    return compiler.compiled(code(logits, ignored, threads, smooth)).once(logits, *others)


def torchs(*given, ignored=-100):
    """The same by torch's kernels."""
    return (smooth_cross_entropy_of_torch if len(given) == 4 else cross_entropy_of_torch)(*given, ignored)


def numbers(rows: int, classes: int, gap: int = 0):
    """Logits with a gap after each row, a class for each, and the scale of the gradient; the first row has no class."""
    target = torch.randint(classes, (rows,))
    scale = torch.rand(rows) / rows
    target[0], scale[0] = -100, 0
    return 4 * torch.randn(rows, classes + gap)[:, :classes], target, scale


def assert_near(*given, ignored=-100, compiler=COMPILER) -> None:
    """Each result is about as near to float64 as torch's."""
    exact = torchs(*(item.double() if item.is_floating_point() else item for item in given), ignored=ignored)
    theirs = torchs(*given, ignored=ignored)
    logits, _, scale, *uniform = given
    sizes = [max(1.0, logits.abs().max().item()), *(item * logits.shape[1] for item in (scale, *uniform))]
    for got, known, wanted in zip(
        ours(*given, ignored=ignored, compiler=compiler), theirs, exact, strict=True
    ):
        assert got.shape == wanted.shape
        largest = wanted.abs().max() if wanted.dim() == 1 else 0.0
        largest = max(largest, sizes[0]) if wanted.dim() == 1 else sum(item.abs().max() for item in sizes[1:])
        assert (got - wanted).abs().max() <= 2 * (known - wanted).abs().max() + 2e-7 * largest


SIZES = [  # rows, classes, the gap after a row, and the class that counts as none
    *((5, classes, 0, -100) for classes in (1, 2, 7, 8, 15, 16, 17, 31, 64, 65, 83, 128, 1000)),
    (1, 20, 0, -100),
    (30, 40, 3, 0),
    (9, 130, 1, 2),
]


def given_for(rows: int, classes: int, gap: int, ignored: int, smooth: bool):
    """What our code takes for one of the sizes."""
    logits, target, scale = numbers(rows, classes, gap)
    target[0] = ignored
    counts = target != ignored
    return logits, target, counts * scale, *([counts * scale / (-9.0 * classes)] if smooth else [])


@pytest.mark.one_case
@pytest.mark.parametrize("missing", [[], ["__AVX512F__"], ["__AVX512F__", "__AVX2__"]])
def test_every_size_and_layout(missing, monkeypatch):
    """Also with registers of half the width, and with none."""
    compile_as_it_is = workshop_module.compile_to_functions
    without = "".join(f"#undef {name}\n" for name in missing)
    monkeypatch.setattr(
        workshop_module, "compile_to_functions", lambda text, goal: compile_as_it_is(without + text, goal)
    )
    cases = [(given_for(*size, smooth), size[-1], smooth) for size in SIZES for smooth in (False, True)]
    compiler = KernelCompiler(code(given[0], ignored, 1, smooth) for given, ignored, smooth in cases)
    for given, ignored, _ in cases:
        assert_near(*given, ignored=ignored, compiler=compiler)


SPECIAL = {
    "NaN": (1, 2, math.nan),
    "NaN after whole registers": (1, 33, math.nan),
    "NaN of a row without a class": (0, 2, math.nan),
    "infinite": (1, 2, math.inf),
    "minus infinite": (1, 2, -math.inf),
    "a row of minus infinite": (1, slice(None), -math.inf),
    "large": (slice(None), 5, 3e38),
    "small": (slice(None), slice(None), -3e38),
}


@pytest.mark.every_case
@pytest.mark.parametrize("smooth", [False, True])
@pytest.mark.parametrize("case", SPECIAL)
def test_what_is_not_finite(case, smooth):
    row, column, number = SPECIAL[case]
    logits, target, scale = numbers(4, 35)
    target[1] = 2  # the class itself
    logits[row, column] = number
    given = (logits, target, scale, *([-scale / 300] if smooth else []))
    for got, known in zip(ours(*given), torchs(*given), strict=True):
        torch.testing.assert_close(got, known, rtol=1e-5, atol=1e-6, equal_nan=True)


def test_the_gradient_may_be_written_over_the_logits():
    logits, target, scale = numbers(6, 83)
    losses, gradient = ours(logits, target, scale)
    other = torch.empty(6)
    pointers = [item.data_ptr() for item in (logits, target, scale, other, logits)]
    COMPILER.compiled(code(logits))._run(1, *pointers, *[0] * 5)
    assert torch.equal(other, losses)
    assert torch.equal(logits, gradient)


def test_classes_out_of_range_are_none():
    """The program asserts that there are none; nothing outside is read or written on the way."""
    logits, target, scale = numbers(4, 20)
    target[:] = torch.tensor([20, -1, 1 << 40, -(1 << 40)])
    losses, gradient = ours(logits, target, scale)
    assert torch.equal(losses, torch.zeros(4))
    torch.testing.assert_close(gradient, logits.softmax(1) * scale[:, None])


@pytest.mark.long
def test_threads_share_rows():
    given = numbers(700, 100)  # enough work for several
    for alone, shared in zip(ours(*given), ours(*given, threads=3), strict=True):
        assert torch.equal(alone, shared)
    assert code(given[0], threads=3).used_threads == 3
    assert code(given[0][:9], threads=3).used_threads == 1


def test_what_it_is_not_made_for():
    assert CrossEntropy(Layout.contiguous(3, 5), -100).can_be_made
    for shape in ((0, 5), (3, 0), (3,), (2, 3, 5), (1 << 20, 1 << 20)):
        assert not CrossEntropy(Layout.contiguous(*shape), -100).can_be_made
    by_columns = CrossEntropy(Layout((3, 5), (1, 3)), -100)
    assert by_columns.operands[0] == Layout.contiguous(3, 5)
