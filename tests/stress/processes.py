"""Other processes on the same folder of checkpoints, or on the same cache of compiled steps, in the worst moments.

Each trial is a set of real processes, some of which are killed, stopped or interrupted, while the folder may move or the
disk be full. Readers must get what was saved, steps eager's numbers, and who cannot go on a named error; what is slower
than it should be may tell so in one warning.

Run `OMP_NUM_THREADS=1 .venv/bin/python -m tests.stress.processes` on Linux; trials that mount a disk need root.
`--only 'a writer*'` takes some of the trials.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import shutil
import sys
import tempfile
import time
import traceback
from pathlib import Path

import torch

from tests.stress import cache_processes, checkpoint_folders, checkpoint_processes
from tests.stress.trials import Skipped, Trial

TRIALS = (*checkpoint_processes.TRIALS, *checkpoint_folders.TRIALS, *cache_processes.TRIALS)


def run(trial: Trial, room: Path) -> str:
    """What went wrong in a trial, or ""."""
    try:
        trial.run(room)
    except AssertionError as error:
        return str(error) or traceback.format_exc()
    except Skipped:
        raise
    except Exception:
        return traceback.format_exc()
    return ""


def main() -> int:
    """Run the trials; the exit status is 1 if one went wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=["*"], metavar="PATTERN")
    options = parser.parse_args()
    chosen = [
        trial for trial in TRIALS if any(fnmatch.fnmatch(trial.name, pattern) for pattern in options.only)
    ]
    torch.set_num_threads(1)
    wrong = skipped = 0
    root = Path(tempfile.mkdtemp(prefix="processes-"))
    os.environ["MONOGRAPH_CACHE_DIR"] = str(root / "cache")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(root / "torch")
    try:
        for number, trial in enumerate(chosen):
            room = root / f"trial-{number}"
            room.mkdir()
            began = time.monotonic()
            try:
                fault = run(trial, room)
            except Skipped as reason:
                skipped += 1
                print(f"skipped {trial.name}: {reason}", flush=True)
                continue
            finally:
                shutil.rmtree(room, ignore_errors=True)
            wrong += bool(fault)
            print(
                f"{'wrong' if fault else 'ok':5} {time.monotonic() - began:4.0f} s  {trial.name}", flush=True
            )
            if fault:
                print(f"    must be: {trial.must}", flush=True)
                print("".join(f"    | {line}\n" for line in fault.splitlines()), end="", flush=True)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    print(f"{len(chosen)} trials, {skipped} skipped, {wrong} wrong")
    return wrong > 0


if __name__ == "__main__":
    sys.exit(main())
