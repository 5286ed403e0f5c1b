"""Models in the layout of Triton's repositories, read by the definition of its configuration and run on onnxruntime."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
import tritonclient
from google.protobuf import text_format

import monograph as mg
from tests.serving.running import Centered, Picked, Scores, Words, scores_model


def read_config(path):
    """The configuration as Triton's own message; its package would import grpc."""
    file = Path(tritonclient.__path__[0], "grpc", "model_config_pb2.py")
    spec = importlib.util.spec_from_file_location("model_config_pb2", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module, text_format.Parse((path / "config.pbtxt").read_text(), module.ModelConfig())


def exported(graph, example, path):
    with torch.no_grad():
        graph.compile(example)
    mg.export_triton(graph, path)
    return read_config(path)


def shapes(tensors):
    return {item.name: list(item.dims) for item in tensors}


def test_rows_become_batches(tmp_path):
    path = tmp_path / "scores"
    message, config = exported(Scores(), mg.spec((mg.Dim("batch", max=8), 6), torch.float32), path)
    assert (config.name, config.backend, config.max_batch_size) == ("scores", "onnxruntime", 8)
    assert config.HasField("dynamic_batching")
    assert shapes(config.input) == {"x": [6]}
    assert shapes(config.output) == {"result_scores": [3], "result_best": [1]}
    assert list(config.output[1].reshape.shape) == []
    assert config.output[1].HasField("reshape")
    assert [item.data_type for item in config.output] == [message.TYPE_FP32, message.TYPE_INT64]
    session = onnxruntime.InferenceSession(path / "1" / "model.onnx")
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = scores_model()(x).numpy()
    assert np.allclose(session.run(["result_scores"], {"x": x.numpy()})[0], expected, atol=1e-6)


def test_other_sizes_stay_open(tmp_path):
    sizes = mg.spec((mg.Dim("batch", max=4), mg.Dim("length", max=12)), torch.int64)
    _, config = exported(Words(), sizes, tmp_path / "words")
    assert config.max_batch_size == 4
    assert shapes(config.input) == {"words": [-1]}
    assert shapes(config.output) == {"result": [4]}


def test_rows_that_depend_on_each_other_stay_together(tmp_path):
    _, config = exported(
        Centered(), mg.spec((mg.Dim("batch", max=8), 4), torch.float32), tmp_path / "centered"
    )
    assert config.max_batch_size == 0
    assert not config.HasField("dynamic_batching")
    assert shapes(config.input) == {"x": [-1, 4]}


def test_a_model_that_takes_no_single_row_gets_no_batches(tmp_path):
    """Triton may hand over a batch of any size up to the largest."""
    sizes = mg.spec((mg.Dim("batch", min=2, max=8), 6), torch.float32)
    _, config = exported(Scores(), sizes, tmp_path / "scores")
    assert config.max_batch_size == 0
    assert not config.HasField("dynamic_batching")
    assert shapes(config.input) == {"x": [-1, 6]}


def test_fixed_sizes(tmp_path):
    example = {"x": torch.ones(2, 3), "mask": torch.ones(2, 3, dtype=torch.bool)}
    message, config = exported(Picked(), example, tmp_path / "picked")
    assert config.max_batch_size == 0
    assert shapes(config.input) == {"pair_x": [2, 3], "pair_mask": [2, 3]}
    assert config.input[1].data_type == message.TYPE_BOOL


@pytest.mark.long
def test_a_second_export_replaces_the_first(tmp_path):
    for _ in range(2):
        exported(Scores(), mg.spec((3, 6), torch.float32), tmp_path / "scores")
    files = [str(file.relative_to(tmp_path)) for file in sorted(tmp_path.rglob("*")) if file.is_file()]
    assert files == ["scores/1/model.onnx", "scores/config.pbtxt"]


def test_a_graph_that_was_never_called(tmp_path):
    with pytest.raises(mg.ArtifactError, match="has no program yet"):
        mg.export_triton(Scores(), tmp_path / "scores")


def test_what_the_exporter_of_torch_writes_wrongly(tmp_path):
    class Bags(mg.Graph):
        def __init__(self):
            super().__init__()
            self.model = torch.nn.EmbeddingBag(10, 4)

        def build(self, words):
            return self.model(words)

    with pytest.raises(mg.ArtifactError, match="exporter writes it wrongly"):
        exported(Bags(), torch.zeros(2, 5, dtype=torch.int64), tmp_path / "bags")
    assert not list(tmp_path.rglob("*.onnx"))
