"""Every name of OneFlow is PyTorch's object, one of ours, or an error that says why not."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import monograph.flow as flow
from monograph.errors import DefinitionError, UnavailableError
from monograph.flow.refusals import ABSENT, REFUSALS
from tests.flow.names_page import PAGE, found, names, page, raised
from tests.support.warm import run_script


def test_no_name_is_left_open() -> None:
    kinds = {found(path).kind for path in names()}
    assert kinds == {"same", "ours", "refused"}


def test_the_page_tells_them_all() -> None:
    assert PAGE.read_text() == page(), "run `make names`"


@pytest.mark.parametrize("path", sorted(REFUSALS))
def test_a_refused_name_says_why_and_what_instead(path: str) -> None:
    error, reason = raised(path)
    assert isinstance(error, (UnavailableError, DefinitionError))
    assert reason.reason in error.message
    assert error.hint == reason.instead
    assert error.where.file == __file__ or error.where.file.endswith("names_page.py")


def test_members_of_torchs_classes_are_not_there() -> None:
    for path in ABSENT:
        owner: object = {"Tensor": flow.Tensor, "nn": flow.nn.Module, "optim": flow.optim.SGD}.get(
            path.split(".")[0], flow.placement
        )
        assert not hasattr(owner, path.rpartition(".")[2]), path


@pytest.mark.parametrize(
    "statement",
    [
        "from monograph.flow import one_embedding",
        "import monograph.flow.one_embedding",
        "from monograph.flow.nn import OFRecordReader",
        "from monograph.flow.nn.graph import GraphTensor",
        "from monograph.flow.profiler import range_push",
        "from monograph.flow.remat import set_budget",
    ],
)
def test_an_import_of_a_refused_name_shows_the_reason(statement: str) -> None:
    with pytest.raises(UnavailableError, match="is not here: "):
        exec(statement)


def test_namespaces_are_those_of_torch() -> None:
    assert importlib.import_module("monograph.flow.utils.data") is torch.utils.data
    assert importlib.import_module("monograph.flow.nn.init") is torch.nn.init
    assert flow.linalg is torch.linalg
    assert flow.nn.utils.rnn is torch.nn.utils.rnn
    sampler = importlib.import_module("monograph.flow.utils.data.distributed").DistributedSampler
    assert sampler is torch.utils.data.distributed.DistributedSampler
    # and PyTorch takes no notice
    assert torch.utils.data.__name__ == torch.utils.data.__spec__.name == "torch.utils.data"
    assert torch.nn.init.__spec__.name == "torch.nn.init"


IMPORTS = """
import monograph.flow.utils.data as data; data.DataLoader
from monograph.flow.utils.data import DataLoader, Dataset
import monograph.flow.nn.functional as F; F.relu, F.depend
from monograph.flow.nn.graph import GraphModule
from monograph.flow import nn; nn.Graph, nn.Module, nn.init.kaiming_normal_
from monograph.flow.optim.lr_scheduler import CosineDecayLR
import monograph.flow as flow; flow.utils.data.DataLoader, flow.cuda.is_available(), flow.Size([1])
import monograph.flow as flow; flow.autograd.Function, flow.distributions.Categorical, flow.fft.fft
import monograph.flow.cuda.amp; import monograph.flow.autograd.functional as f; f.vjp
"""


def test_imports_in_a_new_process(tmp_path: Path) -> None:
    (tmp_path / "imports.py").write_text(IMPORTS)
    done = run_script(["imports.py"], cwd=tmp_path, env=os.environ)
    assert done.returncode == 0, done.stderr


def test_a_name_that_nobody_has() -> None:
    with pytest.raises(AttributeError, match=r"module 'monograph\.flow\.nn' has no attribute 'Lineer'"):
        _ = flow.nn.Lineer
    with pytest.raises(ModuleNotFoundError, match="nosuch"):
        importlib.import_module("monograph.flow.nosuch")
    assert not hasattr(flow, "__wrapped__")


def test_a_plain_import_does_not_load_it() -> None:
    code = "import sys, monograph; sys.exit(any(name.startswith('monograph.flow') for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_switches_that_are_set_are_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.profiler, "switch", False, raising=False)
    flow.profiler.switch = True
    assert torch.profiler.switch is flow.profiler.switch is True


def test_modules_of_namespaces_are_found() -> None:
    assert importlib.import_module("monograph.flow.nn.modules.batchnorm") is torch.nn.modules.batchnorm
    assert flow.nn.modules.Linear is torch.nn.Linear
    assert importlib.import_module("monograph.flow.amp.autocast_mode") is torch.amp.autocast_mode


def test_names_are_listed() -> None:
    assert {"randn", "nn", "placement"} <= set(dir(flow))
    assert {"Linear", "Graph"} <= set(dir(flow.nn))
    assert {"profile"} <= set(dir(flow.profiler))


def test_a_refusal_can_be_caught_as_a_missing_import() -> None:
    with pytest.raises(ImportError, match="one_embedding is not here"):
        exec("from monograph.flow import one_embedding")
