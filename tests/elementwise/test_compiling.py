"""Compilers beside the training."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from monograph.elementwise.compiling import LOWEST, ended, started


@pytest.mark.skipif(sys.platform != "linux", reason="sessions that share processors are Linux's")
@pytest.mark.parametrize("priority", [LOWEST, 10])
def test_the_whole_session_of_a_compiler_has_its_priority(tmp_path: Path, priority: int) -> None:
    run = started([sys.executable, "-c", "import time; time.sleep(60)"], tmp_path / "messages", {}, priority)
    try:
        assert os.getsid(run.pid) == run.pid
        group = Path(f"/proc/{run.pid}/autogroup")
        if group.exists():
            assert group.read_text().split()[-1] == str(priority)
    finally:
        run.kill()
        run.wait()


def test_a_compiler_that_takes_long_to_end_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = subprocess.Popen(["sleep", "60"], start_new_session=True)
    wait = run.wait

    def busy(timeout: float | None = None) -> int:
        raise subprocess.TimeoutExpired(run.args, timeout or 0)

    monkeypatch.setattr(run, "wait", busy)
    folder = tmp_path / "new"
    folder.mkdir()
    ended([run], str(folder), os.getpid())
    assert not folder.exists()
    assert wait(60) == -signal.SIGKILL
