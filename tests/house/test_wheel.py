"""The wheel in an environment that has its dependencies and nothing of the repository."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from dataclasses import dataclass
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests.house.test_docs import BLOCKS
from tests.support import ROOT

pytest.importorskip("hatchling", reason="the wheel is built by hatchling, of the extra `dev`")

SAVE = """
import torch
import monograph as mg
from monograph.cli.demo import make_model

model = make_model(0)
step = mg.train_graph(model, torch.nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1))
x, y = torch.ones(2, 3, 32, 32), torch.tensor([1, 2])
step(x, y)
mg.save(step, "trained")
torch.save((x, y, step(x, y).detach()), "example.pt")
"""
LOAD = """
import torch
import monograph as mg

x, y, expected = torch.load("example.pt")
assert torch.equal(mg.load("trained")(x, y), expected)
"""


@dataclass(frozen=True)
class Installed:
    """A wheel, and a folder with an environment where it is installed."""

    wheel: Path
    folder: Path

    def run(self, *command: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        """A program of the environment, in a folder away from the repository unless `cwd` says where."""
        program, *arguments = command
        env = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
        path = self.folder / "env" / "bin" / program
        return subprocess.run(
            [path, *arguments], cwd=cwd or self.folder, env=env, capture_output=True, text=True
        )

    def run_text(self, text: str) -> str:
        """What a Python program of this text prints."""
        done = self.run("python", "-c", text)
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """Built and installed without a network. The other libraries are those of this process."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    venv.create(folder / "env", symlinks=True)
    python = folder / "env" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-index", "--no-deps"]
    subprocess.run([*pip, str(wheel)], cwd=folder, check=True, capture_output=True)
    (packages,) = (folder / "env" / "lib").glob("python*/site-packages")
    # a .pth file of that folder is not read, such as the one that makes the repository importable
    (packages / "libraries.pth").write_text(sysconfig.get_path("purelib"))
    return Installed(wheel, folder)


def test_the_wheel_holds_the_package_and_the_examples(installed: Installed) -> None:
    with ZipFile(installed.wheel) as file:
        names = {name for name in file.namelist() if ".dist-info/" not in name}
    examples = {name for name in names if name.startswith("monograph/examples/")}
    assert names - examples == files_of(ROOT / "monograph")
    assert {name.removeprefix("monograph/") for name in examples} == files_of(ROOT / "examples")


def files_of(folder: Path) -> set[str]:
    """The files of a folder, by their paths beside it."""
    found = (path for path in folder.rglob("*") if path.is_file() and path.parent.name != "__pycache__")
    return {path.relative_to(folder.parent).as_posix() for path in found}


@pytest.mark.long
def test_the_first_example_runs(installed: Installed) -> None:
    example = next(text for place, text in BLOCKS.items() if place.startswith("README.md"))
    printed = installed.run_text(f"{example}\nprint(mg.__file__)")
    assert "aten.addmm" in printed
    assert Path(printed.splitlines()[-1]).is_relative_to(installed.folder)


@pytest.mark.long
def test_an_artifact_is_saved_and_loaded(installed: Installed) -> None:
    installed.run_text(SAVE)
    installed.run_text(LOAD)
    inspected = installed.run("monograph", "inspect", "trained")
    assert inspected.returncode == 0, inspected.stderr


def test_the_commands_are_there(installed: Installed) -> None:
    printed = installed.run("monograph", "--help").stdout
    assert all(name in printed for name in ("demo", "doctor", "bench", "verify", "serve"))


@pytest.mark.long
def test_the_benchmarks_run_in_a_checkout(installed: Installed) -> None:
    done = installed.run("monograph", "bench", "--help", cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "--workload" in done.stdout
    elsewhere = installed.run("monograph", "bench", "--smoke")
    assert elsewhere.returncode == 2
    assert elsewhere.stderr.strip() == (
        "The benchmarks are in the repository and not in the installed package: "
        "run `monograph bench` in the top folder of a checkout."
    )
