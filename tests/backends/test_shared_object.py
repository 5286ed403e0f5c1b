"""What all compiled steps share lies in the cache as an object, compiled once; without it the bits are the same."""

from __future__ import annotations

import logging
import threading
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn

import monograph as mg
from monograph.backends import inductor
from monograph.compat.inductor import loading
from monograph.compat.inductor.disk_cache import cache_directory, clear_cache, entries, kept


def weights(width: int) -> tuple[torch.Tensor, ...]:
    """A small model after two compiled steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, 8), nn.Tanh(), nn.Linear(8, 2))
    step = mg.train_graph(model, nn.MSELoss(), torch.optim.Adam(model.parameters(), lr=0.1))
    step.config.backend("inductor")
    step.config.enable_kernel_selection(False)
    for _ in range(2):
        step(torch.randn(4, width), torch.randn(4, 2))
    assert step.backend == "inductor"
    return tuple(item.detach() for item in model.parameters())


def objects() -> list[tuple[Path, int]]:
    """The objects in the cache, and when they were written."""
    return [(path, path.stat().st_mtime_ns) for path in sorted(cache_directory().glob("shared/*/shared.o"))]


@pytest.mark.long
def test_later_compilations_use_the_object_and_without_it_the_bits_are_the_same(
    tmp_path, monkeypatch, caplog
):
    first = weights(3)
    before = objects()
    assert before
    weights(5)
    assert objects() == before

    monkeypatch.setenv("MONOGRAPH_CACHE_DIR", str(tmp_path))
    (tmp_path / "no.o").write_text("no object")
    monkeypatch.setattr(inductor, "kept", lambda what, make: tmp_path / "no.o")
    with caplog.at_level(logging.WARNING, "monograph"):
        again = weights(3)
    assert "without the object that steps share: CppCompileError" in caplog.text
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))


@pytest.mark.parametrize("error", [None, OSError("it has gone too")])
def test_one_warning_tells_of_what_went_wrong(monkeypatch, caplog, error):
    """That the step is compiled once more is told when that has helped; else its caller tells why it is not compiled."""
    outcomes = iter([OSError("the object has gone"), error])

    def compile_once(*_args, **_options) -> str:
        if (outcome := next(outcomes)) is not None:
            raise outcome
        return "made"

    monkeypatch.setattr(torch._inductor, "aot_compile", compile_once)
    monkeypatch.setattr(loading, "short_waits", nullcontext)
    module = torch.fx.symbolic_trace(nn.Identity())
    with nullcontext() if error is None else pytest.raises(OSError, match="gone too"):
        loading._made(module, {}, (), {}, lambda *_: Path())
    told = [record.getMessage() for record in caplog.records]
    assert told == (
        [] if error else ["compiled a step without the object that steps share: the object has gone"]
    )


def test_what_is_kept_is_made_once_and_again_if_it_is_damaged_or_another(tmp_path, monkeypatch):
    monkeypatch.setenv("MONOGRAPH_CACHE_DIR", str(tmp_path))
    made = []

    def make(path: Path) -> None:
        made.append(path)
        path.write_bytes(b"object" * 1000)

    path = kept("code", make)
    assert kept("code", make) == path
    assert len(made) == 1
    path.write_bytes(b"half")
    assert kept("code", make) == path
    assert path.read_bytes() == b"object" * 1000
    assert len(made) == 2
    assert kept("other code", make) != path
    monkeypatch.setattr("monograph.compat.inductor.disk_cache.machine", lambda: ("another",))
    assert kept("code", make) != path
    assert len(entries()) == 3
    clear_cache()
    assert entries() == []


def test_several_may_make_it_at_once(tmp_path, monkeypatch):
    monkeypatch.setenv("MONOGRAPH_CACHE_DIR", str(tmp_path))
    threads = [
        threading.Thread(target=kept, args=("code", lambda path: path.write_bytes(b"object" * 10_000)))
        for _ in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (found,) = objects()
    assert found[0].read_bytes() == b"object" * 10_000
    assert len(entries()) == 1
