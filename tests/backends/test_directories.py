"""Where compiled code is kept: another user's place is refused, a bad one has a substitute, and a warning tells so once."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import monograph as mg
from monograph.backends import inductor as backend
from monograph.compat.inductor import directories, headers
from monograph.compat.inductor import loading as _inductor
from monograph.compat.inductor.directories import cache_directories, out_of_room
from monograph.compat.inductor.disk_cache import entry_for
from monograph.kernels import tuned as choices
from monograph.kernels.tuned import remembered
from tests.support import ROOT, assert_same

NOBODY = 12345  # a user without a name and without a home
READS = (
    "--inh-caps=+dac_read_search",
    "--ambient-caps=+dac_read_search",
)  # where the library is another user's
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")


@pytest.fixture(autouse=True)
def untold(monkeypatch, tmp_path):
    monkeypatch.setattr(directories, "_TOLD", set())
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


@pytest.fixture
def asked(tmp_path, monkeypatch) -> Path:
    """The directory that is asked for, not made yet."""
    path = tmp_path / "asked" / "cache"
    monkeypatch.setenv("MONOGRAPH_CACHE_DIR", str(path))
    return path


def private(tmp_path: Path) -> Path:
    return tmp_path / f"monograph-{os.geteuid()}"


def assert_substituted(tmp_path: Path, caplog, *words: str) -> None:
    """The private directory is used, and one warning tells why."""
    for _ in range(2):
        found = cache_directories()
    assert found.write == private(tmp_path)
    assert found.write.stat().st_mode & 0o777 == 0o700
    (record,) = caplog.records
    for word in (*words, str(found.write), "MONOGRAPH_CACHE_DIR"):
        assert word in record.getMessage()


def test_what_is_made_is_its_users_alone(asked):
    before = os.umask(0)
    try:
        assert cache_directories().write == asked
        with entry_for("x", []).written() as library:
            library.write_bytes(b"x")
    finally:
        os.umask(before)
    assert asked.stat().st_mode & 0o777 == 0o700
    assert entry_for("x", []).is_whole()
    assert cache_directories().write == asked


@pytest.mark.every_case
@pytest.mark.parametrize("what", ["", "steps", "kernels", "shared"])
def test_a_cache_that_others_may_write_to_is_refused(asked, tmp_path, caplog, what):
    (asked / what).mkdir(parents=True)
    (asked / what).chmod(0o777)
    assert_substituted(tmp_path, caplog, "may be written to by other users", str(asked / what))
    assert asked not in cache_directories().read


def test_the_group_counts_unless_it_is_the_users_own(asked, tmp_path, caplog):
    asked.mkdir(parents=True)
    asked.chmod(0o770)
    os.chown(asked, -1, os.geteuid())
    assert cache_directories().write == asked
    if os.geteuid() == 0:
        os.chown(asked, -1, NOBODY)
        assert_substituted(tmp_path, caplog, "may be written to by other users")


@needs_root
def test_another_users_cache_is_refused(asked, tmp_path, caplog):
    asked.mkdir(parents=True)
    os.chown(asked, NOBODY, NOBODY)
    assert_substituted(tmp_path, caplog, f"belongs to another user ({NOBODY})")


@needs_root
def test_another_users_entries_are_not_loaded(asked, caplog):
    entry = entry_for("x", [])
    with entry.written() as library:
        library.write_bytes(b"x")
    assert entry.is_whole()
    os.chown(entry.library, NOBODY, NOBODY)
    assert not entry.is_whole()
    remembered(("mm",), ("aten", "other"), lambda: {"aten": 2.0, "other": 1.0})
    (file,) = (asked / "kernels").iterdir()
    os.chown(file, NOBODY, NOBODY)
    directories._TOLD.clear()
    assert choices._read(file, ("aten", "other")) is None
    assert "another user" in caplog.text


def test_a_private_directory_of_somebody_else_is_not_used(asked, tmp_path):
    asked.parent.mkdir()
    asked.write_text("a file")
    (tmp_path / "elsewhere").mkdir()
    private(tmp_path).symlink_to(tmp_path / "elsewhere")
    assert cache_directories().write is None
    private(tmp_path).unlink()
    private(tmp_path).mkdir()
    private(tmp_path).chmod(0o777)
    found = cache_directories()
    assert found.write is None
    assert "is no directory" in found.problem


def test_a_full_disk_has_a_substitute(asked, tmp_path, monkeypatch, caplog):
    usage = directories.shutil.disk_usage

    def full(path):
        return usage(path)._replace(free=3 << 20) if Path(path) == asked else usage(path)

    monkeypatch.setattr("shutil.disk_usage", full)
    assert_substituted(tmp_path, caplog, "is full (3 MiB are free)")
    assert asked in cache_directories().read  # what is there can be used


@pytest.mark.every_case
@pytest.mark.parametrize("part", ["steps", "kernels", "shared", "torch"])
def test_a_part_that_is_no_directory_has_a_substitute(asked, tmp_path, caplog, part):
    asked.mkdir(parents=True)
    (asked / part).touch()
    assert_substituted(tmp_path, caplog, str(asked / part))


def noexec(monkeypatch, *places: Path) -> None:
    """Disks that are mounted so that no code there runs."""
    mount(monkeypatch, *places, f_flag=os.ST_NOEXEC)


def mount(monkeypatch, *places: Path, **facts: int) -> None:
    status = os.statvfs

    def mounted(path):
        found = status(path)
        told = {name: getattr(found, name) for name in dir(found) if name.startswith("f_")}
        return SimpleNamespace(**told | facts) if Path(path) in places else found

    monkeypatch.setattr("os.statvfs", mounted)


def test_a_disk_without_room_for_files_has_a_substitute(asked, tmp_path, monkeypatch, caplog):
    mount(monkeypatch, asked, f_files=1000, f_favail=7)
    assert_substituted(tmp_path, caplog, f"the disk of {asked} is full (it has room for 7 files)")


@pytest.mark.parametrize("there", [False, True])
def test_a_disk_that_lets_no_code_run_has_a_substitute(asked, tmp_path, monkeypatch, caplog, there):
    if there:
        asked.mkdir(parents=True)
    else:
        asked.parent.mkdir()
    noexec(monkeypatch, asked, asked.parent)
    assert_substituted(tmp_path, caplog, f"the disk of {asked} lets no code run")
    assert asked not in cache_directories().read


@pytest.mark.every_case
@pytest.mark.parametrize("name", ["a b", "it's", 'a"b', "a\\b"])
def test_a_name_that_torchs_compiler_does_not_take_has_a_substitute(tmp_path, monkeypatch, caplog, name):
    place = tmp_path / name / "cache"
    monkeypatch.setenv("MONOGRAPH_CACHE_DIR", str(place))
    assert_substituted(tmp_path, caplog, "no spaces, quotes and backslashes", repr(str(place)))
    assert place in cache_directories().read  # what is there can be used


def test_temporary_files_have_a_substitute_while_code_is_compiled(asked, tmp_path, monkeypatch, caplog):
    """Where the directory for them is full, or lets no code run; other files of the process go where they went."""
    temporary, torchs = tmp_path / "temporary", tmp_path / "torchs"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(torchs))
    monkeypatch.setattr("tempfile.tempdir", None)
    with directories.room_for_torch(str):
        assert tempfile.gettempdir() == os.environ["TMPDIR"] == str(temporary)
    noexec(monkeypatch, temporary, torchs)
    for _ in range(2):
        with directories.room_for_torch(str):
            assert tempfile.gettempdir() == os.environ["TMPDIR"] == str(asked / "torch")
        assert tempfile.gettempdir() == os.environ["TMPDIR"] == str(temporary)
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(asked / "torch")
    assert caplog.records == []


def options_of_a_compilation(monkeypatch, tmp_path) -> dict[str, Any]:
    """What Inductor would be told, with the places of its module for headers."""
    told: dict[str, Any] = {}

    def made(module, meta, inputs, options, keep):
        codecache = importlib.import_module("torch._inductor.codecache")
        told.update(options, places=[codecache._HEADER_DIR, codecache._HEADER_LOCK_DIR])
        (tmp_path / "made.so").touch()
        return tmp_path / "made.so"

    monkeypatch.setattr(_inductor, "_made", made)
    module = torch.fx.symbolic_trace(nn.Identity())
    _inductor.compile_to_library(
        module, [], torch.device("cpu"), tmp_path / "step.so", lambda *_: None, lambda *_: 0
    )
    return told


def test_headers_are_compiled_in_inductors_directory(asked, tmp_path, monkeypatch):
    """Torch keeps them among temporary files, whoever may have put some there."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "theirs"))
    place = tmp_path / "theirs" / "precompiled_headers"
    told = options_of_a_compilation(monkeypatch, tmp_path)
    assert told["places"] == [str(place), str(place / "locks")]


@pytest.mark.parametrize(
    ("openssl", "room", "steps"), [(False, True, 3), (True, False, 3), (True, True, 2), (True, True, 3)]
)
def test_headers_are_compiled_where_that_can_be(asked, tmp_path, monkeypatch, openssl, room, steps):
    """Not without openssl, by which torch tells states of them apart, not on a small disk, nor for the first steps."""
    for number in range(steps):
        with entry_for(str(number), []).written() as library:
            library.write_bytes(b"x")
    usage, there = shutil.disk_usage(tmp_path), openssl and room and steps >= 3
    monkeypatch.setattr(headers, "_STEPS", 3)
    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}" if openssl else None)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage._replace(free=1 << (40 if room else 27)))
    told = options_of_a_compilation(monkeypatch, tmp_path)
    assert told.get("aot_inductor.precompile_headers", True) == there


def test_what_a_cache_that_cannot_be_written_holds_is_used(asked, tmp_path, monkeypatch):
    entry = entry_for("x", [])
    with entry.written() as library:
        library.write_bytes(b"x")
    monkeypatch.setattr("os.access", lambda path, mode: Path(path) != asked)
    assert entry_for("x", []).directory == entry.directory
    assert entry_for("y", []).directory.is_relative_to(private(tmp_path))


def test_a_user_without_a_home(tmp_path, monkeypatch, caplog):
    for name in ("MONOGRAPH_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)

    def none():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", none)
    assert_substituted(tmp_path, caplog, "there is no home directory")


def test_errors_of_a_full_disk_are_known():
    full = OSError(28, "No space left on device")
    assert out_of_room(full)
    wrapped = RuntimeError("the compiler")
    wrapped.__cause__ = full
    assert out_of_room(wrapped)
    assert out_of_room(RuntimeError("cc1plus: fatal error: x.o: No space left on device"))
    assert not out_of_room(RuntimeError("something else"))


# --- whole steps -----------------------------------------------------------------------------------------------


def step_and_reference():
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    other = nn.Linear(3, 2)
    other.load_state_dict(model.state_dict())
    graph = mg.train_graph(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1))
    graph.config.backend("inductor")
    x, y = torch.ones(4, 3), torch.ones(4, 2)
    nn.functional.mse_loss(other(x), y).backward()
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    return graph, (x, y), model, other


@pytest.mark.parametrize("where", ["nowhere", "no room while it compiles", "not loaded"])
def test_the_step_runs_on_aten_with_one_warning(asked, tmp_path, monkeypatch, caplog, where):
    graph, batch, model, other = step_and_reference()
    compiled = []

    def compile_(*args, **_options):
        compiled.append(args)
        if where == "not loaded":
            args[3].write_bytes(b"no library")
        else:
            raise RuntimeError("as: x.o: No space left on device")

    if where == "nowhere":
        asked.parent.mkdir()
        asked.write_text("a file")
        private(tmp_path).write_text("a file")
    monkeypatch.setattr(backend._inductor, "compile_to_library", compile_)
    graph.config.enable_kernel_selection(False)
    graph(*batch)
    assert_same(other.weight, model.weight)
    assert graph.backend == "aten"
    (record,) = [item for item in caplog.records if item.levelname == "WARNING"]
    words = {"nowhere": "kept nowhere", "not loaded": "cannot be loaded"}.get(where, "the disk is full")
    for word in (words, "MONOGRAPH_CACHE_DIR", "aten"):
        assert word in record.getMessage()
    assert len(compiled) == (where != "nowhere")


SCRIPT = """
import torch
from torch import nn
import monograph as mg
model = nn.Linear(3, 2)
graph = mg.train_graph(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1))
graph.config.backend("inductor")
graph(torch.ones(4, 3), torch.ones(4, 2))
print(graph.backend)
"""


@pytest.mark.long
@needs_root
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="becomes another user by setpriv")
def test_a_user_without_name_and_home(tmp_path):
    """As in containers whose root cannot be written, with a directory for temporary files."""
    room = Path(tempfile.mkdtemp(dir="/tmp"))
    try:
        os.chown(room, NOBODY, NOBODY)
        env = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(ROOT),
            "TMPDIR": str(room),
            "OMP_NUM_THREADS": "1",
        }
        user = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", *READS]
        done = subprocess.run(
            [*user, sys.executable, "-c", SCRIPT],
            env=env,
            cwd="/",
            capture_output=True,
            text=True,
            check=False,
        )
        if "No module named" in done.stderr or "Permission denied" in done.stderr.partition("\n")[0]:
            pytest.skip("the library cannot be read by other users here")
        assert done.returncode == 0, done.stderr
        assert done.stdout == "inductor\n"
        assert done.stderr.count("MONOGRAPH_CACHE_DIR") == 1
        assert list((room / f"monograph-{NOBODY}" / "steps").glob("*/step.so"))
    finally:
        shutil.rmtree(room)
