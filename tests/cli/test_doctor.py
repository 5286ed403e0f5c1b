"""`monograph doctor`: what it finds, what it says is wrong, and the cache that it clears."""

from __future__ import annotations

import torch
from typer.testing import CliRunner

from monograph.cli import doctor
from monograph.cli.main import app
from monograph.compat.inductor.disk_cache import entries, entry_for


def run(*arguments: str) -> tuple[int, str]:
    """The exit status and the words of the command."""
    result = CliRunner().invoke(app, ["doctor", *arguments])
    return result.exit_code, result.output


def test_it_tells_versions_compiler_and_the_size_of_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MONOGRAPH_CACHE_DIR", str(tmp_path))
    with entry_for("x", []).written() as library:
        library.write_bytes(b"x" * 2**20)
    status, told = run()
    assert status == 0
    assert torch.__version__ in told
    assert str(tmp_path) in told
    assert "1 compiled steps, 1.0 MiB" in told


def test_it_clears_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MONOGRAPH_CACHE_DIR", str(tmp_path))
    with entry_for("x", []).written() as library:
        library.write_bytes(b"x")
    status, told = run("--clear-cache")
    assert (status, entries()) == (0, [])
    assert "0 compiled steps" in told


def test_what_is_wrong_has_words_and_an_exit_status(monkeypatch):
    monkeypatch.setattr(doctor, "compiler_missing", lambda: "InvalidCxxCompiler: none")
    monkeypatch.setattr(torch, "__version__", "2.9.1")
    status, told = run()
    assert status == 1
    assert "install g++" in told
    assert "torch 2.11 to 2.15" in told
