"""What takes sizes that vary: one build for all of them, with the bits of eager mode at each."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import monograph as mg
from tests.support import assert_same

Program = Callable[[nn.Module, torch.Tensor], torch.Tensor]
SIZES = [(2, 3, 8, 8), (2, 3, 12, 10), (2, 3, 5, 7), (2, 3, 31, 6)]
SMOOTH = ("bilinear", "bicubic")
DOUBLED = {"scale_factor": 2}
PARTS = {"scale_factor": (1.5, 0.5)}
COMPUTED = {"scale_factor": (1.5, 2.5), "recompute_scale_factor": True}


def resized(mode: str, **options: Any) -> Program:
    return lambda m, x: F.interpolate(m(x), mode=mode, **options)


def resized_to(mode: str, **options: Any) -> Program:
    return lambda m, x: F.interpolate(m(x)[:, :, ::2, ::2], size=x.shape[2:], mode=mode, **options) + m(x)


def padded(*pad: int, **options: Any) -> Program:
    return lambda m, x: F.pad(m(x), pad, **options)


def with_channels_last(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return F.interpolate(m(x.contiguous(memory_format=torch.channels_last)), scale_factor=2, mode="bilinear")


def patched(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Padded to whole windows, cut into them, and put together again."""
    made = m(x)
    made = F.pad(made, (0, -x.shape[3] % 2, 0, -x.shape[2] % 2))
    high, wide = made.shape[2:]
    windows = made.view(-1, 4, high // 2, 2, wide // 2, 2).permute(0, 2, 4, 3, 5, 1).reshape(-1, 4, 4)
    return windows.softmax(1).view(-1, high // 2, wide // 2, 2, 2, 4)


PROGRAMS: dict[str, Program] = {
    **{f"{mode} by 2": resized(mode, **DOUBLED) for mode in ("nearest", "nearest-exact", "area", *SMOOTH)},
    **{f"{mode} by parts": resized(mode, **PARTS) for mode in ("nearest", "area", *SMOOTH)},
    **{f"{mode} by parts that are computed": resized(mode, **COMPUTED) for mode in ("nearest", *SMOOTH)},
    **{f"{mode} to a size": resized_to(mode) for mode in ("nearest", "nearest-exact", "area", *SMOOTH)},
    **{f"{mode}, corners": resized_to(mode, align_corners=True) for mode in SMOOTH},
    **{f"{mode}, antialias": resized_to(mode, antialias=True) for mode in SMOOTH},
    "nearest from a table": lambda m, x: F.interpolate(m.weight, size=(x.shape[2] + 1, x.shape[3])) * x.mean(),
    "bicubic from a table": lambda m, x: F.interpolate(m.weight, size=x.shape[2:], mode="bicubic") * x.mean(),
    "channels last": with_channels_last,
    "padded": padded(1, 2, 0, 3, value=-1.0),
    "cut": padded(-1, 2),
    "reflected": padded(1, 1, 2, 0, mode="reflect"),
    "round": padded(1, 2, 2, 1, mode="circular"),
    "round, and cut": padded(1, 0, 0, 1, mode="circular"),
    "round in one dimension": lambda m, x: F.pad(m(x).flatten(2), (2, 1), mode="circular"),
    "cut across": lambda m, x: torch.cat([*m(x).split(3, 1), *m(x).chunk(2, 1), *m(x).tensor_split(3, 1)], 1),
    "unbound across": lambda m, x: torch.stack(m(x).unbind(1)[::2]),
    "fft": lambda m, x: torch.fft.fftn(m(x), dim=(2, 3)).abs(),
    "rfft": lambda m, x: torch.fft.irfft2(torch.fft.rfft2(m(x)), s=x.shape[2:]),
    "drawn": lambda m, x: m(x) * torch.randn(x.shape[2:], generator=None),
    "unfolded": lambda m, x: m(x).unfold(2, 3, 1),
    "half, upwards": lambda m, x: m(x)[:, :, : math.ceil(x.shape[2] / 2)],
    "half, downwards": lambda m, x: m(x)[:, :, : math.floor(x.shape[2] / 2)] * math.ceil(x.shape[3] * 1.5),
    "to whole fours": lambda m, x: F.pad(m(x), (0, math.ceil(x.shape[3] / 4) * 4 - x.shape[3])),
}  # fmt: skip


class TrainStep(mg.Graph):
    """Forward, backward, update."""

    def __init__(self, model: nn.Module, program: Program) -> None:
        super().__init__()
        self.model, self.program = model, program
        self.add_optimizer(torch.optim.AdamW(model.parameters()))
        self.config.backend("aten")

    def build(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.program(self.model, x).square().mean()
        loss.backward()
        return loss


def trained(program: Program, sizes: list[tuple[int, ...]], model: nn.Module | None = None) -> TrainStep:
    torch.manual_seed(0)
    model = model or nn.Conv2d(3, 4, 3, padding=1)
    plain = copy.deepcopy(model)
    optimizer, step = torch.optim.AdamW(plain.parameters()), TrainStep(model, program)
    for seed, size in enumerate(sizes):
        torch.manual_seed(seed)
        x = torch.randn(size)
        optimizer.zero_grad()
        drawn = torch.get_rng_state()
        expected = program(plain, x).square().mean()
        expected.backward()
        optimizer.step()
        torch.set_rng_state(drawn)
        assert_same(expected.detach(), step(x).detach(), f"loss at {size}")
        assert_same(plain.state_dict(), model.state_dict(), f"state after {size}")
    return step


@pytest.mark.every_case
@pytest.mark.parametrize("name", list(PROGRAMS))
def test_one_build_serves_all_sizes(name: str) -> None:
    step = trained(PROGRAMS[name], SIZES)
    assert len(step.builds) == 2, step.builds


def test_a_factor_that_rounds_is_a_number_of_each_build() -> None:
    step = trained(resized("nearest", scale_factor=1 / 3), SIZES)
    assert len(step.builds) == len(SIZES)
    tens = [(2, 3, rows, 8) for rows in (8, 12, 10, 20, 30)]  # of which 0.7 is less, and as floats as much
    step = trained(lambda m, x: m(x)[:, :, : math.floor(x.shape[2] * 0.7)], tens)
    assert len(step.builds) == len(tens)


def test_windows_have_a_build_for_each_padding() -> None:
    even = [(2, 3, 8, 8), (2, 3, 12, 10), (2, 3, 4, 6), (2, 3, 30, 16)]
    assert len(trained(patched, even).builds) == 2
    assert len(trained(patched, [*even, (2, 3, 7, 8), (2, 3, 31, 4)]).builds) <= 4


def moved_within(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The last rows over the first ones, which are others from six rows on."""
    made = m(x)
    shown = made.detach()
    shown[:, :, :3].copy_(shown[:, :, -3:])
    return made * shown


def test_a_copy_within_a_tensor_is_refused_at_sizes_where_it_reads_what_it_writes() -> None:
    many = [(2, 3, 8, 8), (2, 3, 12, 10), (2, 3, 6, 7), (2, 3, 30, 16)]
    step = trained(moved_within, many)
    assert len(step.builds) == 2
    with pytest.raises(mg.AliasError, match="copy_ reads memory that it writes"):
        step(torch.randn(2, 3, 5, 7))


def unrolled(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A cell over four steps, whose number does not vary."""
    state: Any = None
    for at in range(4):
        state = m(x[:, at], state)
    return state if isinstance(state, torch.Tensor) else torch.cat(state)


@pytest.mark.parametrize("cell", [nn.GRUCell, nn.LSTMCell, nn.RNNCell])
@pytest.mark.parametrize("bias", [True, False])
def test_a_cell_serves_all_batches(cell: type[nn.Module], bias: bool) -> None:
    sizes = [(batch, 4, 6) for batch in (3, 5, 2, 17, 64)]
    assert len(trained(unrolled, sizes, cell(6, 8, bias=bias)).builds) == 2
    assert len(trained(unrolled, [*sizes, (1, 4, 6), (9, 4, 6)], cell(6, 8, bias=bias)).builds) <= 3


def test_a_cell_refuses_what_torch_refuses() -> None:
    def mixed(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = m(x[:, 0], x[: x.shape[0] // 2, 1])
        return found

    step = TrainStep(nn.GRUCell(6, 6), mixed)
    step.config.dynamic("x", 0)
    with pytest.raises(mg.CaptureError, match="Input batch size 4 doesn't match hidden0 batch size 2"):
        step(torch.randn(4, 4, 6))


@pytest.mark.long
def test_gradients_of_resized_tensors_are_compiled() -> None:
    def resized_each_way(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        made = m(x)
        ways = [
            (mode, options)
            for mode in SMOOTH
            for options in ({}, {"antialias": True}, {"align_corners": True})
        ]
        found = [F.interpolate(made, scale_factor=2, mode=mode, **options) for mode, options in ways]
        found += [
            F.interpolate(made, scale_factor=2, mode=mode) for mode in ("nearest", "nearest-exact", "area")
        ]
        found.append(F.adaptive_avg_pool2d(made, 3))
        found.append(F.interpolate(made.unsqueeze(1), scale_factor=2, mode="trilinear"))
        found.append(F.interpolate(made[:, :, 0], scale_factor=2, mode="linear"))
        return torch.cat([item.flatten() for item in found])

    torch.manual_seed(0)
    model = nn.Conv2d(3, 4, 3, padding=1)
    plain, step = copy.deepcopy(model), TrainStep(model, resized_each_way)
    step.config.backend("inductor")
    step.config.dynamic("x", 2)
    step.config.dynamic("x", 3)
    optimizer = torch.optim.AdamW(plain.parameters())
    for size in SIZES:
        x = torch.randn(size)
        optimizer.zero_grad()
        expected = resized_each_way(plain, x).square().mean()
        expected.backward()
        optimizer.step()
        torch.testing.assert_close(step(x), expected)
        torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=0, atol=1e-5)
    assert [build.backend for build in step.builds] == ["inductor"]


def sized_by_itself(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A size that is computed at more and more length."""
    count = x.shape[2]
    for _ in range(12):
        count = count * count // (count + 1) + x.shape[3] % count
    return m(x)[:, :, : 1 + count % 3]


def test_a_size_that_is_computed_at_length_ends() -> None:
    trained(sized_by_itself, SIZES)


class Counting(nn.Module):
    """Counts what it has seen, in rows, in elements, and the share of its last batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.rows, self.elements, self.share = 0, 0, 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.rows += x.shape[0]
        self.elements += x.shape[0] * x.shape[1]
        self.share = x.shape[0] / self.rows
        return self.layer(x).square().mean()


@pytest.mark.parametrize("backend", ["aten", "inductor"])
def test_counters_of_rows_have_one_build_for_all_sizes(backend: str) -> None:
    model, plain = Counting(), Counting()
    step = mg.train_graph(model, lambda loss, _: loss, torch.optim.SGD(model.parameters(), lr=0.1))
    step.config.backend(backend)
    for rows in (8, 5, 7, 3, 6, 1, 8):
        x = torch.randn(rows, 4)
        plain(x)
        step(x, torch.zeros(()))
        assert (model.rows, model.elements, model.share) == (plain.rows, plain.elements, plain.share)
    assert len(step.builds) <= 3  # for the first size, for all, and for one row
