"""C code to loaded libraries: by the system's compiler, kept in the cache, now or beside what else the process does."""

from __future__ import annotations

import ctypes
import logging
import os
import shutil
import signal
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from monograph.compat.inductor.directories import ADVICE
from monograph.compat.inductor.disk_cache import Entry, new_folder, shared_entry
from monograph.errors import BackendError

LOGGER = logging.getLogger("monograph")

# Products and sums are merged only where the code says so, and zeros, NaN and denormals are kept: eager's bits.
_FLAGS = (
    "-O3",
    "-march=native",
    "-std=c11",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-builtin-pow",
    "-w",
    "-shared",
    "-fPIC",
)
LOWEST = 19  # priority: a hundredth or two of each processor, where the training takes all
_KILLED_IN = 5.0  # seconds that a compiler may take to end


def c_compiler() -> str | None:
    """The system's C compiler."""
    asked = os.environ.get("CC")
    return next(
        (found for name in (asked, "gcc", "cc", "clang") if name and (found := shutil.which(name))), None
    )


def entry_of(text: str) -> Entry:
    """Where the library of a text is, or would be. Raises BackendError if there is no place for it."""
    return shared_entry("\n".join((text, *_FLAGS, c_compiler() or "")), "loops.so")


class Compilation:
    """Texts that a compiler makes to libraries, at low priority, while the process goes on.

    It belongs to the process that began it: a fork leaves it alone, and with its owner the compiler ends.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        """Begin. Raises BackendError if there is no compiler, or no place for what it makes."""
        compiler = c_compiler()
        if compiler is None:
            raise BackendError("no C code can be compiled here: there is no compiler", hint="install gcc")
        self._texts, self._pid = list(texts), os.getpid()
        for text in texts:
            entry_of(text)
        try:
            self._folder = str(new_folder())
        except OSError as error:
            raise BackendError(f"compiled code can be kept nowhere: {error.strerror}", hint=ADVICE) from error
        self._runs: list[subprocess.Popen[bytes]] = []
        self._end = weakref.finalize(self, ended, self._runs, self._folder, self._pid)
        threads = [] if sys.platform == "darwin" else ["-fopenmp"]
        for number, text in enumerate(texts):
            source = Path(self._folder, f"{number}.c")
            source.write_text(text)
            command = [compiler, *_FLAGS, *threads, str(source), "-o", str(source.with_suffix(".so")), "-lm"]
            self._runs.append(started(command, source.with_suffix(".txt"), {"TMPDIR": self._folder}))

    def is_done(self) -> bool:
        """True if all of them are made, or have failed."""
        return os.getpid() == self._pid and all(run.poll() is not None for run in self._runs)

    def finish(self) -> None:
        """Wait, and keep what was made. Raises BackendError if a compiler has failed. An interrupt of the wait ends none."""
        for run in self._runs:
            run.wait()
        try:
            for number, (run, text) in enumerate(zip(self._runs, self._texts, strict=True)):
                if run.returncode:
                    message = Path(self._folder, f"{number}.txt").read_text(errors="replace")
                    raise BackendError(f"the compiler ends with {run.returncode}: {message.strip()[:200]}")
                self._keep(text, Path(self._folder, f"{number}.so"))
        finally:
            self._end()

    def _keep(self, text: str, made: Path) -> None:
        entry = entry_of(text)
        try:
            with entry.written() as goal:
                shutil.copy2(made, goal)
        except OSError as error:
            raise BackendError(f"compiled code cannot be kept: {error.strerror}", hint=ADVICE) from error


def missing(texts: Sequence[str]) -> list[str]:
    """Those of which there is no library in the cache, or a broken one."""
    entries = {text: entry_of(text) for text in texts}
    absent = [text for text, entry in entries.items() if not entry.is_whole()]
    for text in absent:
        if (place := entries[text].directory).exists():
            LOGGER.warning("the compiled code in %s is broken; compiling it again", place)
    return absent


def compiled(texts: Sequence[str]) -> list[ctypes.CDLL]:
    """The libraries of texts, compiled where they are not in the cache. Raises BackendError if that cannot be."""
    absent = missing(texts)
    if absent:
        Compilation(absent).finish()
    try:
        return [ctypes.CDLL(str(entry_of(text).library)) for text in texts]
    except OSError as error:
        raise BackendError(
            f"what was compiled cannot be loaded: {error}", hint=f"where a disk lets no code run, {ADVICE}"
        ) from error


def started(
    command: list[str], messages: Path, environment: Mapping[str, str], priority: int = LOWEST
) -> subprocess.Popen[bytes]:
    """A process at low priority, and what it says in a file. Raises BackendError if there can be none."""
    nice = shutil.which("nice")
    low = [nice, "-n", str(priority), *command] if nice else command
    try:
        with messages.open("wb") as said:
            run = subprocess.Popen(
                low,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=said,
                env=os.environ | environment,
                start_new_session=True,  # Ctrl-C in a terminal is for the training
            )
        _give_way(run.pid, priority)
        return run
    except OSError as error:
        raise BackendError(
            f"no process can be started to compile in: {error.strerror}",
            hint="the system's limits on processes and memory (`ulimit -a`) leave no room for one",
        ) from error


def _give_way(session: int, priority: int) -> None:
    """Let a session take what others leave. Linux shares processors among sessions first, and looks at `nice` inside of each."""
    with suppress(OSError):
        Path(f"/proc/{session}/autogroup").write_text(str(priority))


def ended(runs: list[subprocess.Popen[bytes]], folder: str, pid: int) -> None:
    """End processes, and what they have started, and remove their folder; in a fork of the process `pid` nothing is done."""
    if os.getpid() != pid:
        return
    for run in runs:
        if run.poll() is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(run.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):  # a busy machine: it ends when it gets a processor
                run.wait(_KILLED_IN)
    shutil.rmtree(folder, ignore_errors=True)
