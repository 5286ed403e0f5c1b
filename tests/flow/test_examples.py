"""The scripts of OneFlow's tutorials, in examples/oneflow, each in a process of its own."""

from __future__ import annotations

import os
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import monograph.flow as flow
from monograph.flow.vision.models.neural_style_transfer.stylenet import neural_style_transfer
from tests.support import ROOT, assert_same
from tests.support.warm import run_script

EXAMPLES = ROOT / "examples" / "oneflow"
ROWS = 28  # in each of the five files: two batches of 64, and a rest of 12
LOSS = r"loss: \d\.\d{6}  \[    0/  140\]"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where a script runs: small files in the form of CIFAR-10's are there."""
    random = np.random.default_rng(0)
    files = tmp_path / "data" / "cifar-10-batches-py"
    files.mkdir(parents=True)
    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
        pixels = random.integers(0, 256, (ROWS, 3072), dtype=np.uint8)
        (files / name).write_bytes(pickle.dumps({"data": pixels, "labels": [i % 10 for i in range(ROWS)]}))
    names = [f"class {i}" for i in range(10)]
    (files / "batches.meta").write_bytes(pickle.dumps({"label_names": names}))
    return tmp_path


def run(script: str, folder: Path) -> str:
    done = run_script(
        [str(EXAMPLES / script)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Warning" not in done.stderr
    return done.stdout


def tags(printed: str) -> list[str]:
    return re.findall(r"\([A-Z]+:", printed)


def test_linear(folder: Path) -> None:
    eager, graph = run("linear.py", folder).splitlines()
    assert re.fullmatch(r"tensor\(\[\[ ?-?\d+\.\d{4}(, +-?\d+\.\d{4}){2}\]\]\)", graph)
    assert eager.split("]]")[0] == graph.split("]]")[0]


@pytest.mark.long
def test_training_in_eager_mode_and_predicting_with_a_graph(folder: Path) -> None:
    lines = run("mobilenet_eager.py", folder).splitlines()
    assert lines[0] in ("Using cpu device", "Using cuda device")
    assert lines[1:3] == ["Epoch 1", "-------------------------------"]
    assert re.fullmatch(LOSS, lines[3])
    assert lines[4:] == ["torch.Size([64, 1000])"]


@pytest.mark.long
def test_training_as_a_graph(folder: Path) -> None:
    printed = run("mobilenet_graph.py", folder)
    before, _, rest = printed.partition("Epoch 1")
    during, _, after = rest.rpartition("\n(GRAPH:")
    assert before.splitlines()[1] == "(GRAPH:GraphMobileNetV2_0:GraphMobileNetV2): ("
    assert "(CONFIG:config:GraphConfig(training=True, " in before
    assert "    (MODULE:model.features:Sequential()): (" in before
    assert (
        "(PARAMETER:model.classifer.1.bias:tensor(..., size=(10,), dtype=torch.float32, requires_grad=True"
        in before
    )
    assert "  (MODULE:loss_fn:CrossEntropyLoss()): ()" in before
    assert not {"(INPUT:", "(OUTPUT:", "(OPERATOR:"} & set(tags(before))
    assert {"(INPUT:", "(OUTPUT:", "(OPERATOR:", "(BUFFER:"} <= set(tags(after))
    assert "(GRAPH:GraphMobileNetV2_0:GraphMobileNetV2)" in during  # debug(1), while the graph is made
    assert "(MODULE:model.features.0" in during
    assert re.search(LOSS, during)
    assert re.search(r"loss of the loaded step: \d\.\d{6}\n$", after)

    state = flow.load(folder / "GraphMobileNetV2")
    assert state["System-Train-TrainStep"].tolist() == [2]
    assert_same(dict(state["model"]), dict(flow.load(folder / "graph_model")))

    assert "Going on after step 2\n" in run("mobilenet_graph.py", folder)
    further = flow.load(folder / "GraphMobileNetV2")
    assert further["System-Train-TrainStep"].tolist() == [4]
    assert further["model"]["features.0.1.num_batches_tracked"] == 4


def test_exporting_and_running_again(folder: Path) -> None:
    torch.save(neural_style_transfer().state_dict(), folder / "sketch.pth")
    assert run("style_transfer.py", folder) == "torch.Size([1, 3, 256, 256]) the same again: True\n"


def test_a_loss_by_hand(folder: Path) -> None:
    eager, shapes, graph = run("autograd.py", folder).splitlines()
    assert shapes == "torch.Size([5, 3]) torch.Size([1, 3])"
    assert eager.removesuffix(", grad_fn=<SumBackward0>)") == graph.removesuffix(")")


def test_learning_rates_are_printed(folder: Path) -> None:
    assert run("learning_rate.py", folder).splitlines() == [
        f"CosineDecayLR: step {step}: lr of param_groups[0] is {rate}"
        for step, rate in enumerate(["0.001", "0.000999995", "0.00099998", "0.000999956"])
    ]


def test_without_the_files_the_error_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(
        AssertionError, match=r"DatasetError: CIFAR-10 is not in \"data\"[^$]*nothing is ever downloaded"
    ):
        run("mobilenet_eager.py", tmp_path)
