"""Files for ONNX runtimes: eager's results at several sizes, and weights that find their way back by name."""

from __future__ import annotations

import warnings

import onnx
import onnxruntime
import pytest
import torch
from torch import nn

import monograph as mg
from tests.artifact.plain import WORKLOADS, inputs
from tests.support import assert_same
from tests.support.choice import only_quick


class Infer(mg.Graph):
    def __init__(self, model):
        super().__init__()
        self.net = model

    def build(self, x):
        return self.net(x)


def small():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)).eval()


def compiled(model, size=None):
    graph = Infer(model)
    graph.compile(mg.spec((size or mg.Dim("batch", max=9), 4)))
    return graph


@pytest.mark.parametrize("name", only_quick(WORKLOADS, "lstm"))
def test_models_on_onnxruntime(name, tmp_path):
    torch.manual_seed(0)
    model = WORKLOADS[name].make().model.eval()
    graph, example = Infer(model), inputs(name, 4)
    graph.compile(mg.spec((mg.Dim("batch", max=16), *example.shape[1:]), example.dtype))
    path = mg.export_onnx(graph, tmp_path / "model.onnx")
    onnx.checker.check_model(str(path), full_check=True)
    session = onnxruntime.InferenceSession(path)
    for count in (1, 6):
        x = inputs(name, count)
        (got,) = session.run(None, {"x": x.numpy()})
        with torch.no_grad():
            torch.testing.assert_close(torch.from_numpy(got), model(x), rtol=0, atol=1e-5)
    names = {item.name for item in onnx.load(path).graph.initializer}
    tied = {"net.tokens.weight", "net.head.weight"}  # one weight with two names
    assert {
        f"net.{name}" for name, _ in model.named_parameters(remove_duplicate=False)
    } - names - tied == set()
    other = WORKLOADS[name].make().model
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mg.load_onnx_weights(path, other)
    assert_same(dict(model.named_parameters()), dict(other.named_parameters()))


@pytest.mark.long
def test_the_state_comes_back(tmp_path):
    optimizer = torch.optim.Adam(small().parameters())
    state = {"epoch": 3, "optimizer": optimizer.state_dict(), "best": torch.tensor([0.5, 1.0])}
    path = mg.export_onnx(compiled(small()), tmp_path / "model.onnx", state=state)
    assert_same(state, mg.load_onnx_weights(path, small()))
    assert mg.load_onnx_weights(mg.export_onnx(compiled(small()), tmp_path / "b.onnx"), small()) == {}


def test_each_mismatch_is_told(tmp_path):
    path = mg.export_onnx(compiled(small()), tmp_path / "model.onnx")
    other = nn.Sequential(nn.Linear(4, 8), nn.Identity(), nn.ReLU(), nn.Linear(8, 3))
    before = other[3].weight.clone()
    with pytest.warns(UserWarning, match="has no") as told:
        mg.load_onnx_weights(path, other)
    messages = sorted(str(item.message) for item in told)
    assert [message for message in messages if "has no weight for" in message] == [
        "model.onnx has no weight for 3.bias (3,): it stays",
        "model.onnx has no weight for 3.weight (3, 8): it stays",
    ]
    assert any("has no place for the weight net.1.running_mean (8,)" in message for message in messages)
    assert torch.equal(other[0].weight, small()[0].weight)
    assert torch.equal(other[3].weight, before)


@pytest.mark.long
def test_a_graph_can_be_exported_again(tmp_path):
    model = nn.Sequential(nn.Conv2d(1, 2, 3, stride=(1, 1)), nn.Flatten())
    graph = Infer(model)
    for training in (False, True):  # the exporter gives the convolution an equal stride in another tuple
        model.train(training)
        graph.compile(mg.spec((2, 1, 4, 4)))
    model.eval()
    first = mg.export_onnx(graph, tmp_path / "a.onnx").read_bytes()
    assert mg.export_onnx(graph, tmp_path / "b.onnx").read_bytes() == first
    mg.save(graph, tmp_path / "artifact")
    graph(torch.ones(2, 1, 4, 4))
    assert len(graph.builds) == 2


def test_several_arguments_and_results(tmp_path):
    class Both(mg.Graph):
        def __init__(self):
            super().__init__()
            self.net = small()

        def build(self, pair, *, mask, mode="sum"):
            y = self.net(pair["x"]) * mask
            return {"scores": y, "parts": [y.sum(dim=1), pair["x"] + 1], "mode": mode}

    graph, x = Both(), torch.randn(5, 4)
    graph({"x": x}, mask=torch.ones(5, 1))
    session = onnxruntime.InferenceSession(mg.export_onnx(graph, tmp_path / "model.onnx"))
    assert [item.name for item in session.get_inputs()] == ["pair_x", "mask"]
    results = session.run(None, {"pair_x": x.numpy(), "mask": torch.full((5, 1), 2.0).numpy()})
    expected = graph({"x": x}, mask=torch.full((5, 1), 2.0))
    wanted = [expected["scores"], *expected["parts"]]
    for got, item in zip(results, wanted, strict=True):
        torch.testing.assert_close(torch.from_numpy(got), item.detach())


def test_a_result_that_is_nan_as_it_should_be(tmp_path):
    graph = mg.trace(lambda x: (x - 0.5).log())
    graph(torch.tensor([1.0, -1.0, 0.0]))
    session = onnxruntime.InferenceSession(mg.export_onnx(graph, tmp_path / "model.onnx"))
    (got,) = session.run(None, {session.get_inputs()[0].name: torch.tensor([2.0, -2.0, 0.0]).numpy()})
    torch.testing.assert_close(torch.from_numpy(got), torch.tensor([1.5, -2.5, -0.5]).log(), equal_nan=True)


def test_a_tied_weight_that_the_file_has_once(tmp_path):
    def tied():
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model[1].weight = model[0].weight
        return model

    model, other = tied(), tied()
    path = mg.export_onnx(compiled(model, 3), tmp_path / "model.onnx")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mg.load_onnx_weights(path, other)
    assert_same(dict(model.named_parameters()), dict(other.named_parameters()))


def test_what_is_not_exported(tmp_path):
    model = nn.Linear(4, 2)
    train = mg.train_graph(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(mg.ArtifactError, match="a graph that trains"):
        mg.export_onnx(train, tmp_path / "a.onnx")
    with pytest.raises(mg.ArtifactError, match="has no program yet"):
        mg.export_onnx(Infer(model), tmp_path / "a.onnx")
    scaled = mg.trace(lambda x, n: x * n)
    scaled(torch.ones(2), 2.0)
    with pytest.raises(mg.ArtifactError, match=r"takes a float(.|\n)*tensor of one element"):
        mg.export_onnx(scaled, tmp_path / "a.onnx")
    with pytest.raises(mg.ArtifactError, match="which a checkpoint cannot hold"):
        mg.export_onnx(compiled(small()), tmp_path / "a.onnx", state={"model": model})
    values = mg.trace(torch.linalg.eigvalsh)
    values(torch.eye(3))
    with pytest.raises(mg.ArtifactError, match=r"(?s)cannot write it.*_linalg_eigh.*mg\.save") as caught:
        mg.export_onnx(values, tmp_path / "a.onnx")
    assert "PyTorch" not in str(caught.value)  # what its exporter would have reported
    assert list(tmp_path.iterdir()) == []


def test_files_that_are_none(tmp_path):
    path = mg.export_onnx(compiled(small(), 3), tmp_path / "model.onnx")
    raw, model = path.read_bytes(), small()
    before = {name: item.clone() for name, item in model.state_dict().items()}
    for spoilt in (b"", b"x" * 100, raw[:-50], raw[: len(raw) // 2]):
        path.write_bytes(spoilt)
        with pytest.raises(mg.ArtifactError, match="cannot load"):
            mg.load_onnx_weights(path, model)
    with pytest.raises(mg.ArtifactError, match="No such file"):
        mg.load_onnx_weights(tmp_path / "nothing", model)
    outside = onnx.load_model_from_string(raw)
    onnx.save_model(outside, path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    with pytest.raises(mg.ArtifactError, match="cannot load"):
        mg.load_onnx_weights(path, model)
    assert_same(before, dict(model.state_dict()))
