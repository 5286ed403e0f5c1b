"""Compiled steps where files have no good place, as in containers: read-only roots, small disks, users without a name.

Each trial is a new process in mounts of its own: a step must give eager's numbers, compiled, also in a private place
that one warning tells of, or op by op with one warning that says what is missing; never a raw error, never a long wait.

Run `python -m tests.stress.places` as root on Linux; `--only 'no room*'` takes some of the trials.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
USER = 12345  # without a name and a home
LONGEST_SECONDS = 240.0

STEP = """
import sys, time
import torch
from torch import nn
import monograph as mg
torch.manual_seed(0)
model, other = nn.Linear(3, 2), nn.Linear(3, 2)
other.load_state_dict(model.state_dict())
optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
graph = mg.train_graph(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1))
graph.config.backend("inductor")
graph.config.enable_kernel_selection(False)
x, y = torch.ones(4, 3), torch.ones(4, 2)
began = time.time()
for _ in range(2):
    graph(x, y)
    nn.functional.mse_loss(other(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
torch.testing.assert_close(model.weight, other.weight)
cached = any("found in the cache" in note for note in graph.builds[-1].notes)
print(f"backend={graph.backend} cached={cached} seconds={time.time() - began:.0f}")
"""


@dataclass(frozen=True)
class Trial:
    """What is done to the place before the process starts, and what becomes of it.

    `before` is for a shell in mounts of the trial's own: `$ROOM` is an empty disk of 1 GiB for the home and temporary
    files. `backend` is the one that runs the step, `warnings` how many there are, each with all `words`.
    """

    name: str
    before: str = ""
    env: tuple[str, ...] = ()  # NAME=value, or NAME alone, which takes it away
    user: int = 0
    backend: str = "inductor"
    warnings: int = 0
    words: tuple[str, ...] = ()
    cached: bool = True  # a second process finds what the first has compiled


# torch itself asks for a directory for temporary files, unless its compiler has one that is there
NO_TEMPORARY = "TORCHINDUCTOR_CACHE_DIR=/usr"
READ_ONLY = "mount -o remount,bind,ro /\n"
ADVICE = ("MONOGRAPH_CACHE_DIR",)
CACHE = "MONOGRAPH_CACHE_DIR=$ROOM/cache"


def _disk(where: str, options: str) -> str:
    return f"mkdir -p {where}; mount -t tmpfs -o {options} tmpfs {where}; chmod 700 {where}\n"


TRIALS = (
    Trial("all well"),
    Trial("read-only root, no home", READ_ONLY, ("HOME=/root",), warnings=1, words=ADVICE),
    Trial(
        "read-only everything",
        READ_ONLY + "mount -o remount,ro $ROOM; mount -t tmpfs -o ro tmpfs /dev/shm",
        ("TMPDIR", NO_TEMPORARY),
        backend="aten",
        warnings=1,
        words=(*ADVICE, "aten"),
    ),
    Trial("a user without a name", "", ("HOME",), USER, warnings=1, words=ADVICE),
    Trial("a user whose home is not there", "", ("HOME=/nonexistent",), USER, warnings=1, words=ADVICE),
    Trial(
        "a user with a read-only root and nothing else",
        READ_ONLY + "mount -o remount,ro $ROOM; mount -t tmpfs -o ro tmpfs /dev/shm",
        ("HOME", "TMPDIR", NO_TEMPORARY),
        USER,
        backend="aten",
        warnings=1,
        words=(*ADVICE, "aten"),
    ),
    Trial("no directory for temporary files, a cache", "", ("TMPDIR=/nonexistent", CACHE)),
    Trial(
        "a read-only root, a cache and no directory for temporary files",
        READ_ONLY,
        ("TMPDIR=/nonexistent", "HOME=/nonexistent", CACHE, NO_TEMPORARY),
        USER,
    ),
    Trial("no room in the cache", _disk("$ROOM/cache", "size=1m"), (CACHE,), warnings=1, words=ADVICE),
    Trial("little room in the cache", _disk("$ROOM/cache", "size=34m"), (CACHE,)),
    Trial("no room for temporary files", _disk("$ROOM/tmp", "mode=777,size=1m"), (CACHE,)),
    Trial("no room at all for temporary files", _disk("$ROOM/tmp", "mode=777,size=4k"), (CACHE,)),
    Trial(
        "no room anywhere",
        READ_ONLY + _disk("$ROOM", "size=4m") + "mkdir -p $ROOM/tmp $ROOM/home; mount -t tmpfs -o ro tmpfs /dev/shm",
        (CACHE,),
        backend="aten",
        warnings=1,
        words=(*ADVICE, "aten"),
    ),
    Trial(
        "room for nothing but the check",
        READ_ONLY + _disk("$ROOM", "size=33m") + "mkdir -p $ROOM/tmp $ROOM/home; mount -t tmpfs -o ro tmpfs /dev/shm",
        (CACHE,),
    ),
    Trial("no inodes in the cache", _disk("$ROOM/cache", "size=100m,nr_inodes=6"), (CACHE,), warnings=1, words=ADVICE),
    Trial("no inodes for temporary files", _disk("$ROOM/tmp", "mode=777,size=100m,nr_inodes=2"), (CACHE,)),
    Trial(
        "no code runs in the cache",
        _disk("$ROOM/cache", "size=100m,noexec"),
        (CACHE,),
        warnings=1,
        words=(*ADVICE, "noexec"),
    ),
    Trial("no code runs among temporary files", _disk("$ROOM/tmp", "mode=777,size=300m,noexec"), (CACHE,)),
    Trial(
        "no compiler",
        "mkdir $ROOM/bin; ln -s $(command -v env) $ROOM/bin/env",
        ("PATH=$ROOM/bin", "CXX"),
        backend="aten",
        warnings=1,
        words=("g++", "aten"),
    ),
    Trial(
        "no openssl",
        "mkdir $ROOM/bin; for name in env g++ gcc as ld uname; do ln -s $(command -v $name) $ROOM/bin/$name; done",
        ("PATH=$ROOM/bin",),
    ),
    Trial("umask 077", "umask 077"),
    Trial("umask 000", "umask 000", warnings=1, words=("torch", "other users")),  # torch makes a directory for everybody
    Trial("umask 777", "umask 777", user=USER, backend="aten", warnings=1, words=("aten", *ADVICE)),
    Trial(
        "a home with spaces and quotes",
        """mkdir "$ROOM/a b'c"; chmod 777 "$ROOM/a b'c" """,
        ("HOME=$ROOM/a b'c",),
        warnings=1,
        words=ADVICE,
    ),
    Trial(
        "temporary files with spaces and quotes",
        """mkdir "$ROOM/a b'c"; chmod 777 "$ROOM/a b'c" """,
        ("TMPDIR=$ROOM/a b'c",),
    ),
    Trial(
        "spaces everywhere",
        """mkdir "$ROOM/a b"; chmod 777 "$ROOM/a b" """,
        ("TMPDIR=$ROOM/a b", "HOME=$ROOM/a b"),
        backend="aten",
        warnings=1,
        words=("aten", *ADVICE),
    ),
    Trial("another user's cache", f"mkdir $ROOM/cache; chown {USER} $ROOM/cache", (CACHE,), warnings=1, words=ADVICE),
    Trial("a cache for everybody", "mkdir $ROOM/cache; chmod 777 $ROOM/cache", (CACHE,), warnings=1, words=ADVICE),
    Trial(
        "a link to another user's cache",
        f"mkdir $ROOM/other; chown {USER} $ROOM/other; ln -s $ROOM/other $ROOM/cache",
        (CACHE,),
        warnings=1,
        words=ADVICE,
    ),
    Trial("a link to nowhere", "ln -s $ROOM/none $ROOM/cache", (CACHE,), warnings=1, words=ADVICE),
    Trial("a link to one's own cache", "mkdir -m 700 $ROOM/own; ln -s $ROOM/own $ROOM/cache", (CACHE,)),
    Trial("a link in a circle", "ln -s $ROOM/cache $ROOM/cache", (CACHE,), warnings=1, words=ADVICE),
    Trial("a file in place of the cache", "touch $ROOM/cache", (CACHE,), warnings=1, words=ADVICE),
    Trial("files in place of its parts", "mkdir $ROOM/cache; touch $ROOM/cache/steps $ROOM/cache/kernels $ROOM/cache/shared", (CACHE,), warnings=1, words=ADVICE),
    Trial("a read-only part", "mkdir -p $ROOM/cache/steps; mount -t tmpfs -o ro tmpfs $ROOM/cache/steps", (CACHE,), warnings=1, words=ADVICE),
    Trial("an empty name of the cache", "", ("MONOGRAPH_CACHE_DIR=",)),
    Trial("no /proc", "umount -l /proc", warnings=1, words=("cpuinfo",)),  # of torch
    Trial("small files only", "ulimit -f 64", backend="aten", warnings=1, words=("aten", *ADVICE)),
    Trial("torch's directory is another user's", f"mkdir $ROOM/torch; chown {USER} $ROOM/torch", ("TORCHINDUCTOR_CACHE_DIR=$ROOM/torch",), warnings=1, words=("torch",)),
    Trial("torch's directory is for everybody", "mkdir $ROOM/torch; chmod 1777 $ROOM/torch", ("TORCHINDUCTOR_CACHE_DIR=$ROOM/torch",), warnings=1, words=("torch", "other users")),
    Trial("torch's directory is read-only", "mkdir $ROOM/torch; mount -t tmpfs -o ro,mode=755 tmpfs $ROOM/torch", ("TORCHINDUCTOR_CACHE_DIR=$ROOM/torch",)),
)  # fmt: skip

_PREPARED = """
set -e
mount -t tmpfs -o size=1g tmpfs $ROOM
mkdir $ROOM/tmp $ROOM/home
chown {user}:{user} $ROOM/tmp $ROOM/home
{before}
if [ {user} != 0 ] && [ -d $ROOM/cache ]; then chown {user} $ROOM/cache; chmod 700 $ROOM/cache; fi
cd /
{became} "$PYTHON" -c "$STEP" 2>&1 && echo --- && {became} "$PYTHON" -c "$STEP" 2>&1
"""


def run(trial: Trial) -> tuple[str, float]:
    """What the two processes of a trial print, and the seconds of both."""
    room = tempfile.mkdtemp(prefix="places-", dir="/tmp")
    env = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(ROOT),
        "PYTHON": sys.executable,
        "STEP": STEP,
        "ROOM": room,
        "OMP_NUM_THREADS": "1",
    }
    own = {"HOME": f"{room}/home", "TMPDIR": f"{room}/tmp"}
    for item in trial.env:
        name, given, text = item.partition("=")
        own.pop(name, None)
        if given:
            own[name] = text.replace("$ROOM", room)
    became = ["env", *(f"{name}={text}" for name, text in own.items())]
    if trial.user:
        caps = ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
        became = [
            "setpriv",
            f"--reuid={trial.user}",
            f"--regid={trial.user}",
            "--clear-groups",
            *caps,
            *became,
        ]
    script = _PREPARED.format(user=trial.user, before=trial.before, became=shlex.join(became))
    began = time.monotonic()
    try:
        done = subprocess.run(
            ["unshare", "-m", "bash", "-c", script], env=env, capture_output=True, text=True, check=False
        )
    finally:
        shutil.rmtree(room, ignore_errors=True)
    return done.stdout + done.stderr, time.monotonic() - began


def faults(trial: Trial, output: str) -> Iterator[str]:
    """What is wrong with the outcome of a trial."""
    parts = output.split("---\n")
    if len(parts) != 2:
        yield "a process failed"
        return
    for number, part in enumerate(parts):
        told = re.search(r"backend=(\w+) cached=(\w+) seconds=(\d+)", part)
        if told is None:
            yield f"process {number} gave no result"
            continue
        text = part.replace("\n  ", " ")  # hints are lines of their own
        said = [line for line in text.splitlines() if not line.startswith("backend=") and line.strip()]
        if told[1] != trial.backend:
            yield f"process {number} ran on {told[1]}"
        if number and trial.cached and told[1] == "inductor" and told[2] != "True":
            yield "what was compiled is not found again"
        if float(told[3]) > LONGEST_SECONDS:
            yield f"process {number} took {told[3]} s"
        if len(said) != trial.warnings:
            yield f"process {number} gave {len(said)} warnings"
        for line in said:
            if missing := [word for word in trial.words if word not in line]:
                yield f"process {number}: no {missing} in {line!r}"
    if re.search(r"Traceback|PermissionError|OSError|FileNotFoundError", output):
        yield "a raw error"


def main() -> int:
    """Run the trials; the exit status is 1 if one went wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=["*"], metavar="PATTERN")
    parser.add_argument("-v", "--verbose", action="store_true")
    options = parser.parse_args()
    named = {
        trial: pattern for pattern in options.only for trial in TRIALS if fnmatch.fnmatch(trial.name, pattern)
    }
    chosen = list(named)
    wrong = 0
    for trial in chosen:
        output, seconds = run(trial)
        found = list(faults(trial, output))
        wrong += bool(found)
        print(f"{'wrong' if found else 'right'} {seconds:4.0f} s  {trial.name}", flush=True)
        for fault in found:
            print(f"    {fault}", flush=True)
        if found or options.verbose:
            print("".join(f"      | {line}\n" for line in output.splitlines()), flush=True)
    print(f"{len(chosen)} trials, {wrong} wrong")
    return wrong > 0


if __name__ == "__main__":
    sys.exit(main())
