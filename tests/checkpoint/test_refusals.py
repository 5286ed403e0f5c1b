"""What a checkpoint cannot hold is refused before anything is written, by its path, with what to do instead."""

from __future__ import annotations

import dataclasses
import enum
import functools
import io
import types
import warnings
from collections import OrderedDict, UserDict, defaultdict, namedtuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import monograph as mg


class Colour(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    LOW = 1


class Text(str):
    pass


class Whole(int):
    pass


@dataclasses.dataclass
class Record:
    x: int = 1


class OwnTensor(torch.Tensor):
    pass


Pair = namedtuple("Pair", "a b")


def quantized() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)


def blocks() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.ones(2, 2).to_sparse_bsr((1, 1))


def object_array() -> np.ndarray:
    return np.array([{}], dtype=object)


REFUSED = {
    "function": (lambda: None, "function", "holds no code"),
    "builtin": (print, "builtin_function_or_method", "holds no code"),
    "partial": (functools.partial(print), "functools.partial", "holds no code"),
    "class": (Record, "type", "holds no code"),
    "module": (types, "module", "holds no code"),
    "nn.Module": (nn.Linear(1, 1), "Linear", "state_dict()"),
    "optimizer": (torch.optim.SGD([torch.ones(1)]), "SGD", "state_dict()"),
    "enum": (Colour.RED, "Colour", ".value"),
    "IntEnum": (Level.LOW, "Level", ".value"),
    "str subclass": (Text("x"), "Text", "strings"),
    "int subclass": (Whole(3), "Whole", "numbers"),
    "dataclass": (Record(), "Record", "plain tuple, dict"),
    "namedtuple": (Pair(1, 2), "Pair", "plain tuple"),
    "mapping": (UserDict(), "UserDict", "plain tuple, dict"),
    "generator": (torch.Generator(), "Generator", "as tensors"),
    "file": (io.BytesIO(), "BytesIO", "as tensors"),
    "tensor subclass": (torch.ones(2).as_subclass(OwnTensor), "OwnTensor", "plain torch.Tensor"),
    "masked array": (np.ma.masked_array([1]), "MaskedArray", "array"),
    "object array": (object_array(), "array of object", "arrays of numbers"),
    "structured array": (np.zeros(2, "i4,f4"), "numpy array of", "arrays of numbers"),
    "void": (np.zeros(1, "V3")[0], "void", "as tensors"),
    "blocks": (blocks(), "sparse_bsr tensor", "to_dense()"),
    "quantized": (quantized(), "quantized tensor", "dequantize()"),
    "meta": (torch.ones(2, device="meta"), "meta device", "materialise"),
    "lazy": (nn.LazyLinear(2).weight, "UninitializedParameter", "plain torch.Tensor"),
    "key of an enum": ({Level.LOW: 1}, "a key of type Level", "keys that are"),
    "key in a tuple": ({(1, Colour.RED): 1}, "a key of type Colour", "keys that are"),
    "member of a set": ({frozenset()}, "a key of type frozenset", "keys that are"),
    "factory": (defaultdict(lambda: 3), "defaultdict of", "turn it into a dict"),
}


@pytest.mark.every_case
@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused(name, tmp_path):
    leaf, kind, hint = REFUSED[name]
    state = {"optimizer.0": {"state": {3: {"fn": [0, leaf]}}}}
    with pytest.raises(mg.CheckpointError) as caught:
        mg.save(state, tmp_path / "new" / "checkpoint")
    assert "optimizer.0/state/3/fn/1" in caught.value.message
    assert kind in caught.value.message
    assert hint in caught.value.hint
    assert f'cannot save "{tmp_path}/new/checkpoint"' in caught.value.message
    assert caught.value.where.file == __file__
    assert list(tmp_path.iterdir()) == []


def test_the_whole_message(tmp_path):
    with pytest.raises(mg.CheckpointError) as caught:
        mg.save({"schedule": {"fn": len}}, "checkpoint")
    line = caught.value.where.line
    assert str(caught.value) == (
        'cannot save "checkpoint": schedule/fn is of type builtin_function_or_method, which a checkpoint cannot hold\n'
        f'  at "{__file__}", line {line}\n'
        "  hint: leave it out and build it anew after loading: a checkpoint holds no code"
    )


def test_a_refused_overwrite_leaves_the_old_one(tmp_path):
    path = mg.save({"x": 1}, tmp_path / "checkpoint")
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    with pytest.raises(mg.CheckpointError):
        mg.save({"x": print}, path, overwrite=True)
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before


def test_a_type_as_a_schedule_is_refused(tmp_path):
    """`LambdaLR` takes the attributes of whatever is no function: for a type those are its methods."""
    optimizer = torch.optim.SGD([torch.ones(1)], lr=0.1)
    with pytest.raises(mg.CheckpointError, match="scheduler/lr_lambdas/0/__"):
        mg.save({"scheduler": LambdaLR(optimizer, float).state_dict()}, tmp_path / "checkpoint")


def test_states_without_a_bottom(tmp_path):
    endless: list = []
    endless.append(endless)
    circle: dict = {}
    circle["a"] = {"b": circle}
    deep: dict = {}
    for _ in range(5000):
        deep = {"d": deep}
    key: tuple = ()
    for _ in range(3000):
        key = (key,)
    for state in ({"x": endless}, circle, deep, {"x": {key: 1}}):
        with pytest.raises(mg.CheckpointError, match="deep"):
            mg.save(state, tmp_path / "checkpoint")
    wide: list = []
    for _ in range(60):
        wide = [wide, wide]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("monograph.checkpoint.flatten.MAX_NODES", 10_000)
        with pytest.raises(mg.CheckpointError, match="more than 10,000 parts"):
            mg.save({"x": wide}, tmp_path / "checkpoint")
    assert list(tmp_path.iterdir()) == []


def test_what_may_be_deep_may_be_loaded(tmp_path):
    deep: object = 0
    for _ in range(24):
        deep = {1: OrderedDict(a=defaultdict(list, {2: [deep]}))}
    assert mg.load(mg.save({"deep": deep}, tmp_path / "checkpoint"))["deep"] == deep


def test_a_state_that_is_no_dict(tmp_path):
    for state in ([1], torch.ones(1), None, UserDict()):
        with pytest.raises(mg.CheckpointError, match=f"the state is a {type(state).__name__}, not a dict"):
            mg.save(state, tmp_path / "checkpoint")


def test_an_ordered_dict_with_attributes_of_its_own(tmp_path):
    state = nn.Linear(1, 1).state_dict()
    state.extra = 3
    with pytest.raises(mg.CheckpointError, match="model has an attribute 'extra'"):
        mg.save({"model": state}, tmp_path / "checkpoint")


@pytest.mark.every_case
@pytest.mark.parametrize(
    "about", [{"x": torch.ones(1)}, {1: 2}, [1], {"x": float("nan")}, {"x": {"y": (1,)}}]
)
def test_what_a_graph_says_is_plain(about, tmp_path):
    with pytest.raises(mg.CheckpointError, match=r"graph\.about"):
        mg.save({"graph.about": about}, tmp_path / "checkpoint")


def test_too_much_that_is_no_tensor(tmp_path, monkeypatch):
    monkeypatch.setattr("monograph.checkpoint.manifest.MAX_MANIFEST_BYTES", 10_000)
    with pytest.raises(mg.CheckpointError, match="what is not a tensor takes"):
        mg.save({"x": list(range(5000))}, tmp_path / "checkpoint")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", [None, 3, {"weight": torch.ones(1)}])
def test_what_is_no_path_is_an_error(path):
    with pytest.raises(mg.CheckpointError, match="as its path"):
        mg.load(path)
    with pytest.raises(mg.CheckpointError, match="as its path"):
        mg.save({}, path)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("m.onnx", "onnxruntime runs it"),
        ("m.safetensors", "load_file"),
    ],
)
def test_a_file_of_another_kind_names_what_reads_it(name, hint, tmp_path):
    (tmp_path / name).write_bytes(b"no archive")
    with pytest.raises(mg.CheckpointError, match="Not a directory") as caught:
        mg.load(tmp_path / name)
    assert hint in caught.value.hint


def test_no_checkpoint_yet(tmp_path):
    with pytest.raises(mg.CheckpointError) as caught:
        mg.load(mg.CheckpointManager(tmp_path).latest())
    assert "no checkpoint yet" in caught.value.hint
