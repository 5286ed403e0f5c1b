"""A compilation beside another process that was stopped while it compiled the same, and has kept its locks."""

from __future__ import annotations

import importlib
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from torch import nn

import monograph as mg
from monograph.compat.inductor import loading
from monograph.compat.inductor.building import waits
from tests.support import new_cache

filelock = importlib.import_module("filelock")


@pytest.fixture
def codecache(monkeypatch):
    """Inductor's file of that name; nobody tries out the processor."""
    monkeypatch.setattr(importlib.import_module("torch._inductor.cpu_vec_isa"), "pick_vec_isa", lambda: None)
    return importlib.import_module("torch._inductor.codecache")


def test_the_locks_of_a_compilation_are_its_own(codecache, monkeypatch):
    found = []
    monkeypatch.setattr(
        torch._inductor, "aot_compile", lambda *_, **__: found.append(codecache.get_lock_dir())
    )
    before = codecache.get_lock_dir()
    module = torch.fx.symbolic_trace(nn.Identity())
    for _ in range(2):
        loading._made(module, {}, (), {}, None)
    assert len({before, *found}) == 3
    assert codecache.get_lock_dir() == before
    assert not any(map(os.path.exists, found))


def test_other_threads_keep_the_common_locks(codecache):
    before = codecache.get_lock_dir()
    with waits.short_waits(), ThreadPoolExecutor(1) as pool:
        assert pool.submit(codecache.get_lock_dir).result() == before


def test_a_header_that_a_stopped_process_compiles_is_gone_without(codecache, monkeypatch, tmp_path):
    lock, made = str(tmp_path / "header.lock"), []

    def precompile(header: str) -> str:
        codecache._worker_compile_cpp(lock, ())
        made.append(header)
        return header

    monkeypatch.setattr(codecache, "_precompile_header", precompile)
    monkeypatch.setattr(waits, "_HEADER_SECONDS", 0.01)
    with waits.short_waits():
        assert codecache._precompile_header("one") == "one"
        with filelock.FileLock(lock):
            assert codecache._precompile_header("two") is None
    assert made == ["one"]


@pytest.mark.long
def test_a_step_compiles_while_all_its_common_locks_are_kept(monkeypatch, tmp_path):
    """Each step has one lock: what a first compilation takes is kept from a second one of the same step."""
    monkeypatch.setenv("MONOGRAPH_CACHE_DIR", str(new_cache(tmp_path / "cache")))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "torch"))
    monkeypatch.setattr(waits, "_HEADER_SECONDS", 0.01)
    taken: list[str] = []
    acquire = filelock.FileLock.acquire

    def noted(self, *args, **options):
        taken.append(self.lock_file)
        return acquire(self, *args, **options)

    def train() -> str:
        model = nn.Linear(3, 4)
        step = mg.train_graph(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1))
        step.config.backend("inductor")
        step.config.enable_kernel_selection(False)
        step(torch.ones(2, 3), torch.ones(2, 4))
        return step.backend

    header_of = importlib.import_module("torch._inductor.codecache")._precompile_header
    header_of.cache_clear()  # of the steps that other tests have compiled
    monkeypatch.setattr(filelock.FileLock, "acquire", noted)
    assert train() == "inductor"
    common = {path for path in taken if Path(path).is_relative_to(tmp_path / "torch")}
    assert common, taken  # of headers
    assert all(os.path.basename(os.path.dirname(path)) == "locks" for path in common)
    monkeypatch.setenv("MONOGRAPH_CACHE_DIR", str(new_cache(tmp_path / "another")))
    header_of.cache_clear()
    with ExitStack() as stack:
        for path in common:
            stack.enter_context(filelock.FileLock(path))
        assert train() == "inductor"
