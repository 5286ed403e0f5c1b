"""Inductor writes the same C++ where its Python is spared work: every character of it."""

from __future__ import annotations

import importlib
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import monograph as mg
from monograph.compat.inductor import codegen, less_work, loading, write_order
from tests.support import new_cache


class Mixed(nn.Module):
    """Layers whose loops are whole vectors or not, with sums inside, scattered reads, and parameters of many sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 32)
        self.first, self.norm, self.second = nn.Linear(32, 33), nn.LayerNorm(33), nn.Linear(33, 16)
        self.images = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.Hardtanh())

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden = self.second(torch.softmax(self.norm(self.first(self.embedding(words))), -1))
        return self.images(hidden[:, None]).mean((2, 3))


class Written(Exception):
    """The code is there, and nobody compiles it."""


def code_of(monkeypatch: pytest.MonkeyPatch, make_optimizer) -> list[str]:
    """What Inductor writes for a step of the model."""
    found: list[str] = []

    def keep(graph, wrapper_code, kernel_code, *_args, **_options):
        found.extend((wrapper_code, kernel_code))
        raise Written

    compiler = importlib.import_module("torch._inductor.codecache").AotCodeCompiler
    monkeypatch.setattr(compiler, "compile", keep)
    torch.manual_seed(0)
    model = Mixed()
    step = mg.train_graph(model, nn.MSELoss(), make_optimizer(model.parameters()))
    step.config.backend("inductor")
    step.config.enable_kernel_selection(False)
    step(torch.zeros(4, 8, dtype=torch.long), torch.ones(4, 16))
    assert found
    return found


@pytest.mark.long
@pytest.mark.parametrize(
    "make_optimizer",
    [
        lambda given: torch.optim.SGD(given, lr=0.1, momentum=0.9),
        lambda given: torch.optim.AdamW(given, lr=0.1),
    ],
    ids=["sgd", "adamw"],
)
@pytest.mark.usefixtures("caplog")
def test_the_code_is_the_same(monkeypatch, tmp_path, make_optimizer):
    monkeypatch.setenv("MONOGRAPH_CACHE_DIR", str(new_cache(tmp_path / "cache")))
    spared = code_of(monkeypatch, make_optimizer)
    monkeypatch.setattr(loading, "less_work", nullcontext)
    monkeypatch.setattr(write_order, "are_apart", lambda one, other: False)
    assert code_of(monkeypatch, make_optimizer) == spared


@pytest.mark.long
def test_pairs_of_loops_are_refused_at_a_glance(monkeypatch, tmp_path):
    """Those that Inductor would refuse, and no other."""
    monkeypatch.setenv("MONOGRAPH_CACHE_DIR", str(new_cache(tmp_path / "cache")))
    scheduler = importlib.import_module("torch._inductor.scheduler").Scheduler
    asked, wrong = [], []
    can_fuse = scheduler.can_fuse

    def noted(self, one, other, *args, **options):
        answer = can_fuse(self, one, other, *args, **options)
        if less_work.are_apart(one, other):
            asked.append((one, other))
            wrong.extend([(one, other)] if answer else [])
        return answer

    monkeypatch.setattr(scheduler, "can_fuse", noted)
    monkeypatch.setattr(write_order, "are_apart", lambda one, other: False)
    code_of(monkeypatch, lambda given: torch.optim.AdamW(given, lr=0.1))
    assert asked
    assert not wrong


@pytest.mark.long
@pytest.mark.parametrize("long", [False, True])
def test_the_calls_of_a_long_step_alone_are_not_optimised(monkeypatch, tmp_path, long):
    """What says so stands before the function that calls the kernels, and nowhere else; kernels are as they were."""
    monkeypatch.setenv("MONOGRAPH_CACHE_DIR", str(new_cache(tmp_path / "cache")))
    monkeypatch.setattr(codegen, "_LONG", 10 if long else 10_000)
    calls, kernels = code_of(monkeypatch, lambda given: torch.optim.SGD(given, lr=0.1))
    before, _, _ = calls.partition("void AOTInductorModel::run_impl(")
    assert before != calls
    assert before.rstrip().endswith('__attribute__((optimize("O0")))') is long
    assert (calls + kernels).count('optimize("O0")') == int(long)


def test_what_a_version_of_torch_lacks_is_left_alone(monkeypatch):
    monkeypatch.setattr(
        less_work,
        "_REPLACEMENTS",
        {"torch._inductor.scheduler:NoSuch.name": pytest.fail, "math:none": pytest.fail},
    )
    with less_work.less_work():
        pass


def test_sets_are_joined_in_order():
    ordered = importlib.import_module("torch.utils._ordered_set").OrderedSet
    with less_work.less_work():
        assert list(ordered([3, 1]) | ordered([2, 3])) == [3, 1, 2]
        assert list(ordered([3, 1]) | {1}) == [3, 1]
        assert type(ordered([3]) | ordered([2])) is ordered
