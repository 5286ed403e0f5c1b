"""Compiled steps on disk: a second process finds them, writers do not disturb each other, a broken one is made anew."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import monograph as mg
from monograph.compat.inductor.disk_cache import Entry, clear_cache, entries, entry_for
from tests.support import new_cache
from tests.support.warm import run_script

STEP = """
import sys, torch
from torch import nn
import monograph as mg
torch.set_num_threads(THREADS)
torch.manual_seed(0)
model = nn.Linear(3, 2)
graph = mg.train_graph(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1))
graph.config.backend("inductor")
graph(torch.ones(4, 3), torch.ones(4, 2))
compiler = {"torch._inductor.compile_fx", "torch._inductor.scheduler"} & set(sys.modules)
print(model.weight.detach().numpy().tobytes().hex(), bool(compiler))
print(graph.explain())
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The step as a file."""
    path = tmp_path_factory.mktemp("script") / "step.py"
    path.write_text(STEP.replace("THREADS", str(torch.get_num_threads())))  # which are a part of the key
    return path


def in_a_process(script: Path, cache: Path, **environment: str) -> tuple[str, str, str]:
    """What the step says in a process of its own: its weights, whether it had the compiler, and what explain() tells.

    A process that is to find another compiler begins from nothing: torch reads that variable when it is imported.
    """
    env = {**os.environ, "MONOGRAPH_CACHE_DIR": str(cache), **environment}
    if environment:
        done = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True, check=False)
    else:
        done = run_script([str(script)], cwd=script.parent, env=env)
    assert done.returncode == 0, done.stderr
    first, _, rest = done.stdout.partition("\n")
    weights, compiler = first.split()
    return weights, compiler, rest + done.stderr


@pytest.fixture(scope="module")
def compiled(script: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The cache of a process that compiled the step, and the weights that it told."""
    cache = tmp_path_factory.mktemp("cache")
    new_cache(cache)
    weights, compiler, told = in_a_process(script, cache)
    assert compiler == "True"
    assert "compiled in" in told
    return cache, weights


@pytest.mark.long
def test_a_second_process_starts_without_the_compiler_and_a_broken_entry_is_compiled_anew(
    script, compiled, tmp_path
):
    cache, weights = shutil.copytree(compiled[0], tmp_path / "cache"), compiled[1]
    again, compiler, told = in_a_process(script, cache, CXX="no-such-compiler")
    assert again == weights
    assert compiler == "False"
    assert "found in the cache" in told

    (library,) = cache.glob("steps/*/step.so")
    library.write_bytes(library.read_bytes()[:-100])
    again, _, told = in_a_process(script, cache)
    assert again == weights
    assert "is broken" in told
    assert "compiled in" in told
    assert "found in the cache" in in_a_process(script, cache)[2]


@pytest.mark.long
def test_without_a_compiler_the_step_runs_on_aten(script, tmp_path):
    weights, _, told = in_a_process(script, tmp_path, CXX="no-such-compiler")
    assert "no C++ code can be compiled here" in told
    assert "on aten" in told
    assert not list(tmp_path.glob("steps/*"))
    model = nn.Linear(3, 2)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model.reset_parameters()
    nn.functional.mse_loss(model(torch.ones(4, 3)), torch.ones(4, 2)).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert model.weight.detach().numpy().tobytes().hex() == weights


def write(entry: Entry, content: bytes) -> None:
    """Fill an entry."""
    with entry.written() as library:
        library.write_bytes(content)


def test_an_entry_appears_whole_or_not_at_all(tmp_path):
    entry = Entry(tmp_path / "steps" / "key")

    def fail_halfway() -> None:
        with entry.written() as library:
            library.write_bytes(b"half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail_halfway()
    assert not entry.is_whole()
    assert list((tmp_path / "steps").iterdir()) == []
    write(entry, b"whole")
    assert entry.is_whole()


@pytest.mark.parametrize("spoil", ["library", "sums", "empty sums", "no library"])
def test_a_spoilt_entry_is_not_whole_and_is_replaced(tmp_path, spoil):
    entry = Entry(tmp_path / "steps" / "key")
    write(entry, b"whole")
    match spoil:
        case "library":
            entry.library.write_bytes(b"Whole")
        case "sums":
            (entry.directory / "sums.json").write_text("{")
        case "empty sums":
            (entry.directory / "sums.json").write_text(json.dumps({}))
        case "no library":
            entry.library.unlink()
    assert not entry.is_whole()
    write(entry, b"new")
    assert entry.is_whole()
    assert entry.library.read_bytes() == b"new"


def test_writers_at_the_same_time_leave_one_whole_entry(tmp_path):
    entry = Entry(tmp_path / "steps" / "key")
    threads = [threading.Thread(target=write, args=(entry, b"the same" * 1000)) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert entry.is_whole()
    assert [path.name for path in (tmp_path / "steps").iterdir()] == ["key"]


def test_the_key_tells_programs_inputs_threads_and_processors_apart(monkeypatch):
    examples = [((2, 3), (3, 1), torch.float32, torch.device("cpu"))]
    known = {entry_for("x", examples).directory}
    known.add(entry_for("y", examples).directory)
    known.add(entry_for("x", [((2, 3), (1, 2), torch.float32, torch.device("cpu"))]).directory)
    known.add(entry_for("x", [((2, 3), (3, 1), torch.float64, torch.device("cpu"))]).directory)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    known.add(entry_for("x", examples).directory)
    monkeypatch.setattr("monograph.compat.inductor.disk_cache.machine", lambda: ("another",))
    known.add(entry_for("x", examples).directory)
    assert len(known) == 6


def test_the_cache_tells_its_size_and_is_cleared(tmp_path, monkeypatch):
    monkeypatch.setenv("MONOGRAPH_CACHE_DIR", str(tmp_path))
    for number in range(3):
        write(entry_for(str(number), []), b"x" * 1000)
    found = entries()
    assert len(found) == 3
    assert all(size >= 1000 for _, size in found)
    clear_cache()
    assert entries() == []


@pytest.mark.long
def test_an_entry_that_another_graph_runs_may_be_cleared(compiled, tmp_path, monkeypatch, caplog):
    cache = shutil.copytree(compiled[0], tmp_path / "cache")
    monkeypatch.setenv("MONOGRAPH_CACHE_DIR", str(cache))
    model = nn.Linear(3, 2)
    graph = mg.train_graph(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1))
    graph.config.backend("inductor")
    with caplog.at_level(logging.WARNING, "monograph"):
        graph(torch.ones(4, 3), torch.ones(4, 2))
        assert entries()
        clear_cache()
        graph(torch.ones(4, 3), torch.ones(4, 2))
    assert graph.backend == "inductor"
    assert "found in the cache" in graph.explain()
    assert not [record for record in caplog.records if record.name == "monograph"]
