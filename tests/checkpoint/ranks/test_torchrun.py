"""torchrun starts the ranks again when one is killed, and they go on from the newest checkpoint with the same bits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import monograph as mg
from tests.checkpoint.ranks import training
from tests.checkpoint.same import assert_equal
from tests.support import ROOT


def trained(folder: Path, killed_at: int) -> None:
    options = ["--nproc-per-node", "2", "--max-restarts", "1", "--standalone"]
    # else torch itself reads, of the store that it keeps, the addresses of the ranks that are gone
    new_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *options, training.__file__, folder, str(killed_at)],
        check=True,
        capture_output=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **new_store},
    )


@pytest.mark.long
def test_killed_ranks_go_on_with_the_same_bits(tmp_path: Path) -> None:
    trained(tmp_path / "whole", -1)
    trained(tmp_path / "killed", 5)
    for rank in range(2):
        whole, killed = (mg.load(tmp_path / name / f"result-{rank}") for name in ("whole", "killed"))
        assert whole["start"] == 0
        assert killed["start"] == 4
        assert_equal(whole["model"], killed["model"])
