"""What all compiled steps share lies in the cache as an object, compiled once; without it the bits are the same."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import monograph as mg
from monograph.backends import inductor
from monograph.compat.inductor import headers, loading
from monograph.compat.inductor.building import interface
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

    monkeypatch.setattr(headers, "_STEPS", 3)  # none for a compilation that fails
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


class Compiler:
    """Stands for Inductor's class of compiler calls; notes when each build begins and ends."""

    noted: ClassVar[list[str]] = []
    both = threading.Barrier(2, timeout=60)

    def __init__(self, name: str, sources: str | list[str], BuildOption: Any, output_dir: str = "") -> None:
        self.name, self.sources = name, sources

    def build(self) -> None:
        if self.sources == "refused.wrapper.cpp":
            raise OSError("refused")
        if self.name in ("wrapper", "kernel"):
            self.both.wait()  # until both are being compiled
        self.noted.append(self.name)


@pytest.mark.parametrize("refused", [False, True])
def test_parts_are_compiled_at_once_and_linked_when_all_are_there(monkeypatch, refused):
    """What a part raises comes up before anything is linked."""
    monkeypatch.setattr(Compiler, "noted", [])
    monkeypatch.setattr(Compiler, "both", threading.Barrier(1 if refused else 2, timeout=60))
    monkeypatch.setattr(interface._Interface, "_begin", lambda self, options: self._pool.submit(Path))
    with ThreadPoolExecutor(interface.cores()) as pool:
        made = interface._Interface(lambda *_: Path(), pool).linked(Compiler)
        made("wrapper", "refused.wrapper.cpp" if refused else "x.wrapper.cpp", None).build()
        made("kernel", "x.kernel.cpp", None).build()
        link = made("library", ["x.wrapper.o", "x.kernel.o"], None)
        assert link.sources == ["x.wrapper.o", "x.kernel.o", "."]
        with pytest.raises(OSError, match="refused") if refused else nullcontext():
            link.build()
    assert sorted(Compiler.noted[:2]) == (["kernel"] if refused else ["kernel", "wrapper"])
    assert Compiler.noted[2:] == ([] if refused else ["library"])
