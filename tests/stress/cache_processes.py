"""Several processes on one cache of compiled steps: killed, stopped and interrupted ones, and who moves the folders.

In every trial the numbers of a step are those of plain PyTorch. What is in the way costs a compilation, or the compiled
backend, and one warning.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import monograph as mg
from monograph.compat.inductor import disk_cache
from tests.stress.child import Child, Parent
from tests.stress.trials import Trial, fine, make_read_only, mounted
from tests.support import new_cache

SIZE = 2  # of the step that is in the cache that trials copy
OTHER = 5  # of one that is not
STOPPED_SECONDS = 60.0  # that a compilation may take beside one that is stopped

Moment = Callable[[str, tuple[Any, ...]], bool]


@dataclass(frozen=True)
class Facts:
    """How the last step ran."""

    backend: str
    cached: bool


class Twins:
    """A model that a compiled step trains, and one that plain PyTorch trains."""

    def __init__(self, size: int) -> None:
        torch.manual_seed(0)
        self.model, self.other = nn.Linear(3, size), nn.Linear(3, size)
        self.other.load_state_dict(self.model.state_dict())
        self.optimizer = torch.optim.SGD(self.other.parameters(), lr=0.1)
        self.graph = mg.train_graph(
            self.model, nn.MSELoss(), torch.optim.SGD(self.model.parameters(), lr=0.1)
        )
        self.graph.config.backend("inductor")
        self.graph.config.enable_kernel_selection(False)

    def advance(self, *, rows: int = 4) -> None:
        """One step of each, which must agree."""
        x, y = torch.ones(rows, 3), torch.ones(rows, self.model.out_features)
        loss = self.graph(x, y)
        expected = nn.functional.mse_loss(self.other(x), y)
        expected.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(dict(self.model.state_dict()), dict(self.other.state_dict()))

    def facts(self) -> Facts:
        """Where the last step came from."""
        notes = self.graph.builds[-1].notes
        return Facts(self.graph.backend, any("found in the cache" in note for note in notes))


# --- caches ----------------------------------------------------------------------------------------------------


@cache
def filled() -> Path:
    """A cache with one step, and torch's own files; what takes a minute takes it once."""
    importlib.import_module("torch._inductor.compile_fx")  # forked processes have it then
    folder = Path(os.environ["MONOGRAPH_CACHE_DIR"])
    with Child(train, folder) as process:
        assert fine(process.outcome()) == Facts("inductor", cached=False)
    return folder


def empty(room: Path) -> Path:
    """A cache that has no step."""
    filled()
    return Path(new_cache(room / "cache"))


def copied(room: Path) -> Path:
    """A cache of its own that has one step."""
    return Path(shutil.copytree(filled(), room / "cache"))


def entries(folder: Path) -> list[Path]:
    """The steps in a cache."""
    return [path for path in (folder / "steps").iterdir() if not path.name.startswith(".")]


# --- what the processes do -------------------------------------------------------------------------------------


def train(
    parent: Parent, folder: Path, size: int = SIZE, *, at: Moment | None = None, stops: bool = False
) -> Facts:
    """Two steps with a cache; at a moment of the compilation it `stops`, or asks the parent to do its worst."""
    os.environ["MONOGRAPH_CACHE_DIR"] = str(folder)
    if at is not None:
        once(at, parent.stop if stops else partial(parent.ask, "compiles"))
    twins = Twins(size)
    twins.advance()
    twins.advance()
    return twins.facts()


def once(at: Moment, act: Callable[[], None]) -> None:
    """Act when something happens for the first time."""
    seen: list[str] = []

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if not seen and at(event, arguments):
            seen.append(event)
            act()

    sys.addaudithook(hook)


def compiles(name: str) -> Moment:
    """A C++ compiler starts with a file of this kind."""

    def at(event: str, arguments: tuple[Any, ...]) -> bool:
        return event == "subprocess.Popen" and any(str(item).endswith(name) for item in arguments[1])

    return at


def puts(event: str, arguments: tuple[Any, ...]) -> bool:
    """What was compiled gets its place."""
    return event == "os.rename" and ".new-" in str(arguments[0])


MOMENTS: tuple[Moment, ...] = (compiles("wrapper.cpp"), puts)


def check_cached(folder: Path, size: int = OTHER) -> None:
    """A new process finds the step, and is told nothing."""
    with Child(train, folder, size) as process:
        assert fine(process.outcome()) == Facts("inductor", cached=True)


def check_compiles(folder: Path, size: int = OTHER, **allowed: Any) -> None:
    """A new process compiles the step, and one after it finds it."""
    with Child(train, folder, size) as process:
        assert fine(process.outcome(), **allowed) == Facts("inductor", cached=False)
    check_cached(folder, size)


def beside_a_compiler(process: Child) -> None:
    """Let the compiler begin."""
    process.answer()
    time.sleep(0.7)


# --- killed, stopped, interrupted ------------------------------------------------------------------------------


def killed(room: Path) -> None:
    folder = empty(room)
    for number, moment in enumerate(MOMENTS):
        with Child(train, folder, OTHER + number, at=moment) as process:
            process.hear("compiles")
            if moment is not puts:
                beside_a_compiler(process)
        check_compiles(folder, OTHER + number)


def killed_in_the_shared_part(room: Path) -> None:
    filled()
    folder = room / "cache"
    with Child(train, folder, OTHER, at=compiles("interface.cpp")) as process:
        process.hear("compiles")
        beside_a_compiler(process)
    check_compiles(folder)


def stopped(moment: Moment) -> Callable[[Path], None]:
    def run(room: Path) -> None:
        folder = empty(room)
        with Child(train, folder, OTHER, at=moment, stops=True) as process:
            process.has_stopped()
            with Child(train, folder, OTHER) as another:
                assert fine(another.outcome(seconds=STOPPED_SECONDS)) == Facts("inductor", cached=False)
            process.signal(signal.SIGCONT)
            assert fine(process.outcome()) == Facts("inductor", cached=False)
        check_cached(folder)
        assert len(entries(folder)) == 1, entries(folder)

    return run


def twins_at_once(room: Path) -> None:
    folder = empty(room)
    with Child(train, folder, OTHER) as one, Child(train, folder, OTHER) as two:
        for process in (one, two):
            assert fine(process.outcome()).backend == "inductor"
    check_cached(folder)
    assert len(entries(folder)) == 1, entries(folder)


def interrupted(room: Path) -> None:
    folder = empty(room)

    def train_on(parent: Parent, size: int, at: Moment) -> Facts:
        os.environ["MONOGRAPH_CACHE_DIR"] = str(folder)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        once(at, partial(parent.ask, "compiles"))
        twins = Twins(size)
        try:
            twins.advance()
        except KeyboardInterrupt:
            parent.tell("interrupted")
        twins.advance()
        twins.advance()
        return twins.facts()

    for number, moment in enumerate(MOMENTS):
        with Child(train_on, OTHER + number, moment) as process:
            process.hear("compiles")
            if moment is puts:
                process.signal(signal.SIGINT)
                process.answer()
            else:
                beside_a_compiler(process)
                process.signal(signal.SIGINT, with_compilers=True)
            process.hear("interrupted")
            assert fine(process.outcome()).backend == "inductor"
        check_cached(folder, OTHER + number)


# --- folders that go -------------------------------------------------------------------------------------------


def removed_meanwhile(room: Path) -> None:
    folder = empty(room)
    for number, moment in enumerate(MOMENTS):
        with Child(train, folder, OTHER + number, at=moment) as process:
            process.hear("compiles")
            shutil.rmtree(folder)
            process.answer()
            fine(process.outcome(), warnings=1)
        shutil.rmtree(folder, ignore_errors=True)
        new_cache(folder)
        check_compiles(folder, OTHER + number)


def removed_afterwards(room: Path) -> None:
    folder = copied(room)

    def train_on(parent: Parent) -> Facts:
        os.environ["MONOGRAPH_CACHE_DIR"] = str(folder)
        twins = Twins(SIZE)
        twins.advance()
        assert twins.facts() == Facts("inductor", cached=True)
        parent.ask("trained")
        twins.advance()
        twins.advance(rows=5)
        return twins.facts()

    with Child(train_on) as process:
        process.hear("trained")
        shutil.rmtree(folder)
        process.answer()
        assert fine(process.outcome()) == Facts("inductor", cached=False)


def temporary_files_removed(room: Path) -> None:
    """In the middle of a compilation, and before the next one."""
    folder, temporary = empty(room), room / "temporary"
    temporary.mkdir()

    def train_on(parent: Parent) -> Facts:
        os.environ["MONOGRAPH_CACHE_DIR"], os.environ["TMPDIR"] = str(folder), str(temporary)
        tempfile.tempdir = None
        once(compiles("wrapper.cpp"), partial(parent.ask, "compiles"))
        twins = Twins(OTHER)
        twins.advance()
        parent.ask("trained")
        twins.advance(rows=5)
        return twins.facts()

    with Child(train_on) as process:
        for word in ("compiles", "trained"):
            process.hear(word)
            shutil.rmtree(temporary, ignore_errors=True)
            process.answer()
        assert fine(process.outcome(), warnings=1).backend == "inductor"


def torchs_files_removed(room: Path) -> None:
    """Those of torch's own compiler, with the headers that it has compiled."""
    folder, torchs = empty(room), room / "torch"
    shutil.copytree(os.environ["TORCHINDUCTOR_CACHE_DIR"], torchs)

    def train_on(parent: Parent) -> Facts:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(torchs)
        return train(parent, folder, OTHER, at=compiles("wrapper.cpp"))

    with Child(train_on) as process:
        process.hear("compiles")
        shutil.rmtree(torchs)
        process.answer()
        fine(process.outcome(), warnings=1)


def read_only_meanwhile(room: Path) -> None:
    filled()
    folder = room / "cache"
    with mounted(folder, "size=200m,mode=700"):
        new_cache(folder)
        with Child(train, folder, OTHER, at=compiles("wrapper.cpp")) as process:
            process.hear("compiles")
            make_read_only(folder)
            process.answer()
            fine(process.outcome(), warnings=1)


def cleared_before_it_is_loaded(room: Path) -> None:
    """An entry that was whole a moment before."""
    folder = copied(room)

    def train_on(parent: Parent) -> Facts:
        loading: Any = importlib.import_module("monograph.compat.inductor.loading")
        load = loading.load_library

        def late(*arguments: Any) -> Any:
            parent.ask("loads")
            return load(*arguments)

        loading.load_library = late
        return train(parent, folder)

    with Child(train_on) as process:
        process.hear("loads")
        shutil.rmtree(folder)
        process.answer()
        fine(process.outcome(), warnings=1)


# --- what is in the cache --------------------------------------------------------------------------------------


def spoilt_entries(room: Path) -> None:
    """Each is told of once, and compiled again."""
    folder = copied(room)
    (entry,) = entries(folder)
    spoils: Sequence[Callable[[], object]] = (
        lambda: os.truncate(entry / "step.so", (entry / "step.so").stat().st_size // 2),
        lambda: os.truncate(entry / "sums.json", 10),
        lambda: os.remove(entry / "step.so"),
    )
    for spoil in spoils:
        spoil()
        check_compiles(folder, SIZE, warnings=1, words=("is broken",))


def of_another_version(room: Path) -> None:
    folder = empty(room)

    def train_elsewhere(parent: Parent) -> Facts:
        vars(disk_cache)["machine"] = lambda: ("another version of torch",)
        return train(parent, folder, OTHER)

    with Child(train_elsewhere) as other:
        assert fine(other.outcome()) == Facts("inductor", cached=False)
    check_compiles(folder)
    steps = entries(folder)
    assert len(steps) == 2, steps
    for step in steps:  # whole, and still nothing that this system loads
        (step / "step.so").write_bytes(b"for another processor")
        sums = {"step.so": hashlib.sha256(b"for another processor").hexdigest()}
        (step / "sums.json").write_text(json.dumps(sums))
    with Child(train, folder, OTHER) as process:
        facts = fine(process.outcome(), warnings=1, words=("cannot be loaded",))
    assert facts.backend == "aten"


def forked_after_capture(room: Path) -> None:
    """Both go on with the step, and each compiles another one."""
    folder = copied(room)

    def both(_parent: Parent) -> Facts:
        os.environ["MONOGRAPH_CACHE_DIR"] = str(folder)
        twins = Twins(SIZE)
        twins.advance()

        def go_on(_parent: Parent) -> Facts:
            twins.advance()
            twins.advance(rows=5)
            twins.advance()
            return twins.facts()

        with Child(go_on) as forked:
            here = go_on(_parent)
            there: Facts = fine(forked.outcome())
        assert here.backend == there.backend == "inductor"
        return here

    with Child(both) as process:
        fine(process.outcome())


TRIALS = (
    Trial("a process alone on a new cache", "right, compiled", lambda _room: check_cached(filled(), SIZE)),
    Trial("killed in the middle of a compilation", "others compile, silently", killed),
    Trial("killed while it compiles what steps share", "others compile, silently", killed_in_the_shared_part),
    Trial("stopped in the middle of a compilation", "others compile in a minute; then it goes on", stopped(compiles("wrapper.cpp"))),
    Trial("stopped before what was compiled is in its place", "others compile; one entry", stopped(puts)),
    Trial("two compile the same step at once", "no warning, one entry", twins_at_once),
    Trial("Ctrl-C in the middle of a compilation", "KeyboardInterrupt; the next step is right", interrupted),
    Trial("the cache is removed in the middle of a compilation", "right, at most one warning", removed_meanwhile),
    Trial("the cache is removed afterwards", "steps go on; the next one is compiled", removed_afterwards),
    Trial("the cache is cleared before a step is loaded", "right, at most one warning", cleared_before_it_is_loaded),
    Trial("temporary files are removed meanwhile", "right, compiled, at most one warning", temporary_files_removed),
    Trial("torch's own files are removed meanwhile", "right, at most one warning", torchs_files_removed),
    Trial("the cache becomes read-only meanwhile", "right, at most one warning", read_only_meanwhile),
    Trial("truncated entries", "compiled again, with one warning each", spoilt_entries),
    Trial("entries of another version", "compiled again; aten and one warning if none can be loaded", of_another_version),
    Trial("a fork after a step was captured", "both go on, and compile", forked_after_capture),
)  # fmt: skip
