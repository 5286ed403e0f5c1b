"""Four models saved in one process run and train on in another, which has no code of theirs: every bit is eager's."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

from tests.artifact.plain import BEFORE, WORKLOADS, batches, inputs, plain_results
from tests.support import ROOT, assert_same
from tests.support.choice import only_quick
from tests.support.warm import run_module


@pytest.fixture(scope="module")
def directory(request, tmp_path_factory):
    """Where one process saved the artifacts, and another wrote what they gave."""
    here = [item for item in request.session.items if item.path == request.path]
    names = list(dict.fromkeys(item.callspec.params["name"] for item in here))
    path = tmp_path_factory.mktemp("artifacts")
    saved = run_module("tests.artifact.saving", path, *names)
    assert saved.returncode == 0, saved.stderr
    for name in names:
        data = {"inputs": {n: inputs(name, n) for n in (1, 4, 6)}, "batches": batches(name)[BEFORE:]}
        torch.save(data, path / f"{name}.data")
    script = shutil.copy(Path(__file__).with_name("loading.py"), path)
    # the package without the repository around it, which an editable installation would make importable
    (path / "packages").mkdir()
    (path / "packages" / "monograph").symlink_to(ROOT / "monograph")
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(path / "packages"), sysconfig.get_path("purelib")]),
    }
    command = [sys.executable, "-S", str(script), str(path), *names]
    loaded = subprocess.run(command, cwd=path, env=env, capture_output=True, text=True)
    assert loaded.returncode == 0, loaded.stderr
    return path


@pytest.mark.parametrize("name", only_quick(WORKLOADS, "lstm"))
def test_every_bit_is_eagers(directory, name):
    expected, got = plain_results(name), torch.load(directory / f"{name}.out")
    assert_same(expected["inferred"], got["inferred"])
    assert_same(expected["losses"], got["losses"])
    assert_same(dict(expected["model"]), dict(got["model"]))
    assert_same(expected["optimizer"]["state"], got["optimizer"]["state"])
    assert got["optimizer"]["param_groups"][0]["lr"] == expected["lr"]
    if name != "unet":  # where nothing is drawn, the state of the process is left alone
        assert_same(expected["random"], got["random"])


@pytest.mark.parametrize("name", only_quick(WORKLOADS, "lstm"))
def test_an_artifact_is_saved_again(directory, name):
    one, other = torch.load(directory / f"{name}.out")["next"]
    assert_same(one, other)
