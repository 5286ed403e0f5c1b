"""examples/singa_style.py keeps what it shows: shapes without data, eager's bits, states that go on, ONNX files."""

from __future__ import annotations

import os
import re
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import monograph as mg
from tests.support import ROOT, Side, assert_same, train_eagerly
from tests.support.warm import run_script

EXAMPLE = ROOT / "examples" / "singa_style.py"
BATCH = (8, 1, 8, 8)


def _example() -> Any:
    spec = spec_from_file_location("singa_style", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


singa = _example()


class PlainNet(nn.Module):
    """The net of the example in plain PyTorch, every shape written out."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.classifier = nn.Sequential(nn.Flatten(), nn.Dropout(0.2), nn.Linear(256, 10))

    def forward(self, x):
        return self.classifier(self.features(x))


class OtherNet(singa.DigitNet):
    """No BatchNorm, a parameter more, and another number of classes."""

    def __init__(self) -> None:
        super().__init__(num_classes=7)
        self.features[1] = nn.Identity()
        self.scale = nn.Parameter(torch.ones(1))
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.05)

    def forward(self, x):
        return super().forward(x) * self.scale


def compiled(kind=singa.DigitNet, seed=0, **options):
    torch.manual_seed(seed)
    model = kind()
    model.compile([mg.spec(BATCH), mg.spec(BATCH[:1], torch.int64)], **options)
    return model


def batches(count):
    generator = torch.Generator().manual_seed(3)
    return [
        (torch.randn(BATCH, generator=generator), torch.randint(7, BATCH[:1], generator=generator))
        for _ in range(count)
    ]


def trained(model, batches):
    """Out and loss of each step, and the state after it."""
    side = Side(model, model.optimizer)
    results = [(model.train_one_batch(*batch), side.state()) for batch in batches]
    return [{"out": out.detach(), "loss": loss.detach(), **state} for (out, loss), state in results]


def plainly_trained(model, batches):
    """The same by PyTorch alone."""
    outs: list[torch.Tensor] = []

    def loss_of(model, x, y):
        outs.append(model(x))
        return F.cross_entropy(outs[-1], y)

    trail = train_eagerly(
        Side(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)), loss_of, batches
    )
    return [{"out": out.detach(), **step} for out, step in zip(outs, trail, strict=True)]


def page_output() -> list[str]:
    """What docs/singa.md says that the example prints, without the lines that leave something out."""
    page = (ROOT / "docs" / "singa.md").read_text()
    (block,) = re.findall(
        r"^```text\n\$ python examples/singa_style\.py\n(.*?)^```$", page, re.MULTILINE | re.DOTALL
    )
    return [line for line in block.splitlines() if line.strip() not in ("", "...")]


# --- the example ---------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_the_example_prints_what_its_page_shows(tmp_path: Path) -> None:
    done = run_script([str(EXAMPLE), "--out", str(tmp_path / "saved")], cwd=tmp_path, env=os.environ)
    assert done.returncode == 0, done.stderr
    printed, shown = done.stdout.splitlines(), page_output()
    assert len(shown) > 20
    measured = re.compile(
        r"\d+(\.\d+)?%?|  +"
    )  # figures of the machine, and the widths that follow from them
    forms = {measured.sub("#", line) for line in printed}
    assert [line for line in shown if measured.sub("#", line) not in forms] == []
    before_data, after = done.stdout.split("no data was seen yet")
    assert [line for line in shown if "size=" in line and line not in before_data.splitlines()] == []
    assert re.search(r"resumed from step 30: (\d+) of \1 losses and tensors have the same bits", after)
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == ["model.onnx", "states"]


def test_a_run_without_steps_is_refused(tmp_path: Path) -> None:
    done = run_script([str(EXAMPLE), "--steps", "0"], cwd=tmp_path, env=os.environ)
    assert done.returncode == 2
    assert "--steps is one or more" in done.stderr


# --- compile -------------------------------------------------------------------------------------------------------


def test_lazy_shapes_and_first_values_are_those_of_layers_with_sizes() -> None:
    model = compiled()
    torch.manual_seed(0)
    assert_same(PlainNet().state_dict(), model.state_dict())
    assert model.training
    assert not model.optimizer.state
    assert "(INPUT:_model.classifier.2_input.input:tensor(..., size=(8, 256)" in repr(model.training_graph)
    memory = model.training_graph.builds[0].plan.memory
    weights = sum(parameter.nbytes for parameter in model.parameters())
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    assert memory.state_bytes == 2 * weights + buffers  # the momentum is as large as the weights
    assert memory.argument_bytes == 8 * 64 * 4 + 8 * 8


def test_inputs_alone_give_the_shapes_and_the_first_batch_the_step() -> None:
    model = singa.DigitNet()
    model.compile([mg.spec(BATCH)])
    assert model.classifier[2].weight.shape == (10, 256)
    assert not model.training_graph.is_compiled
    trained(model, batches(2))
    assert len(model.training_graph.builds) == 1


def test_values_set_after_compile_are_those_that_train() -> None:
    model, plain = compiled(), PlainNet()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for (name, values), parameter in zip(model.get_params(), plain.parameters(), strict=True):
            parameter.copy_(torch.rand(parameter.shape, generator=generator))
            values.copy_(plain.get_parameter(name))
    torch.manual_seed(1)
    expected = plainly_trained(plain, batches(2))
    torch.manual_seed(1)
    assert_same(expected, trained(model, batches(2)))
    assert len(model.training_graph.builds) == 1


# --- training and evaluation ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("use_graph", [True, False])
def test_train_one_batch_has_the_bits_of_the_plain_loop(use_graph: bool) -> None:
    model = compiled(use_graph=use_graph)
    torch.manual_seed(0)
    plain = PlainNet()
    torch.manual_seed(1)
    expected = plainly_trained(plain, batches(5))
    torch.manual_seed(1)
    assert_same(expected, trained(model, batches(5)))
    assert model.training_graph.state_dict()["graph.steps"] == (5 if use_graph else 0)


def test_evaluation_is_a_graph_of_the_live_weights() -> None:
    model, plain = compiled(), PlainNet()
    steps, (x, _) = batches(3), batches(4)[3]
    for batch in steps:
        model.train_one_batch(*batch)
        plain.load_state_dict(model.state_dict())
        got = model.eval()(x)
        with torch.no_grad():
            assert_same(plain.eval()(x), got)
        assert not got.requires_grad
        model.train()
    assert len(model.inference_graph.builds) == len(model.training_graph.builds) == 1
    assert {group.name for group in model.training_graph.profile(*steps[0]).by_phase()} == {
        "forward",
        "backward",
        "update",
    }


def test_a_model_can_be_compiled_again() -> None:
    model, (batch,) = compiled(), batches(1)
    before = model.training_graph
    model.compile([mg.spec(BATCH)], is_train=False)
    assert not model.training
    model.train().train_one_batch(*batch)
    assert model.training_graph is not before
    assert len(model.training_graph.builds) == 1


# --- save and load -------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_training_goes_on_with_the_bits_of_the_run_without_a_break(tmp_path: Path) -> None:
    model, steps = compiled(), batches(6)
    trained(model, steps[:3])
    model.save(tmp_path, state={"epoch": 3, "best": torch.tensor([0.5, -0.0])})
    expected = trained(model, steps[3:])
    again = compiled(seed=9)
    assert_same({"epoch": 3, "best": torch.tensor([0.5, -0.0])}, again.load(tmp_path))
    assert_same(expected, trained(again, steps[3:]))
    assert_same(_state(model), _state(again))


def _state(model: Any) -> dict[str, Any]:
    state = model.training_graph.state_dict()
    del state["graph.about"]
    return {key: dict(part) if isinstance(part, dict) else part for key, part in state.items()}


@pytest.mark.long
def test_each_misfit_is_named_and_the_rest_is_loaded(tmp_path: Path) -> None:
    model = compiled()
    trained(model, batches(2))
    model.save(tmp_path, state={"epoch": 2})
    other = compiled(OtherNet, seed=9)
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    with pytest.warns(UserWarning, match=r"in the (file|model)") as told:
        assert other.load(tmp_path) == {"epoch": 2}
    assert sorted(str(item.message) for item in told) == [
        "classifier.2.bias: (10,) in the file, (7,) in the model",
        "classifier.2.weight: (10, 256) in the file, (7, 256) in the model",
        "features.1.bias: (16,) in the file, unexpected in the model",
        "features.1.num_batches_tracked: () in the file, unexpected in the model",
        "features.1.running_mean: (16,) in the file, unexpected in the model",
        "features.1.running_var: (16,) in the file, unexpected in the model",
        "features.1.weight: (16,) in the file, unexpected in the model",
        "scale: missing in the file, (1,) in the model",
    ]
    assert {item.filename for item in told} == {__file__}
    loaded = ("features.0.weight", "features.0.bias")
    assert_same(before | {name: model.state_dict()[name] for name in loaded}, dict(other.state_dict()))
    assert not other.optimizer.state
    trained(other, batches(2))
    assert len(other.training_graph.builds) == 1


@pytest.mark.long
def test_an_existing_save_is_kept_unless_it_is_overwritten(tmp_path: Path) -> None:
    model = compiled()
    model.save(tmp_path, state={"epoch": 1})
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(mg.CheckpointError, match="exist"):
        model.save(tmp_path, state={"epoch": 2})
    assert files == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    model.save(tmp_path, state={"epoch": 2}, overwrite=True)
    assert model.load(tmp_path) == model.load(tmp_path, include_state=False) == {"epoch": 2}


@pytest.mark.long
def test_the_onnx_file_computes_what_the_model_does(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    model, (batch, (x, _)) = compiled(), batches(2)
    model.train_one_batch(*batch)
    model.save(tmp_path, state={"epoch": 1})
    (got,) = onnxruntime.InferenceSession(tmp_path / "model.onnx").run(None, {"x": x.numpy()})
    torch.testing.assert_close(torch.from_numpy(got), model.eval()(x), rtol=0, atol=1e-5)
    again = compiled(seed=9)
    assert again.load(tmp_path, include_state=False) == {"epoch": 1}
    assert_same(dict(model.named_parameters()), dict(again.named_parameters()))
    assert_same(model.features[1].running_var, again.features[1].running_var)
    assert not again.optimizer.state


def test_without_onnx_the_states_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(singa, "HAS_ONNX", False)
    model = compiled()
    with pytest.warns(UserWarning, match=r"no model\.onnx is written"):
        model.save(tmp_path, state={"epoch": 1})
    assert [path.name for path in tmp_path.iterdir()] == ["states"]
    assert model.load(tmp_path) == {"epoch": 1}
