"""What an artifact says of a call that does not fit: which argument, what it is, and what to do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import monograph as mg


class Infer(mg.Graph):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Linear(3, 3)

    def build(self, items: Any) -> Any:
        found = items["items"] if isinstance(items, dict) else items
        return sum(self.model(x).sum() for x in found)


def artifact_of(path: Path, *args: Any) -> Any:
    graph = Infer()
    graph.compile(*args)
    mg.save(graph, path)
    return mg.load(path)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return artifact_of(tmp_path_factory.mktemp("artifacts") / "list", [mg.spec((2, 3)), mg.spec((2, 3))])


CASES: dict[str, tuple[Callable[[Tensor], Any], str, str]] = {
    "fewer": (lambda x: [x], "items is a list of 1; the artifact takes a list of 2", "before it is saved"),
    "more": (
        lambda x: (x, x, x),
        "items is a tuple of 3; the artifact takes a list of 2",
        "before it is saved",
    ),
    "a tensor": (lambda x: x, "items is a tensor: float32[2, 3] on cpu; the artifact takes a list of 2", ""),
    "a dict": (lambda x: {"a": x}, "items is a dict with the keys 'a'; the artifact takes a list of 2", ""),
    "an int": (
        lambda x: [x, 1],
        "items[1] is an int; the artifact takes a tensor: float32[2, 3]",
        "torch.tensor(items[1])",
    ),
    "an array": (
        lambda x: [x, x.numpy()],
        "items[1] is a numpy.ndarray; the artifact takes a tensor: float32[2, 3]",
        "torch.from_numpy(items[1])",
    ),
    "an array of doubles": (
        lambda x: [x, x.double().numpy()],
        "items[1] is a numpy.ndarray",
        "torch.from_numpy(items[1]).to(torch.float32)",
    ),
    "nothing": (lambda x: [x, None], "items[1] is None; the artifact takes a tensor", "pass a tensor"),
    "no values": (lambda x: [x, x.to("meta")], "items[1] is float32[2, 3] on meta", "has no values"),
    "rows": (
        lambda x: [x.tolist(), x],
        "items[0] is a list of 2; the artifact takes a tensor: float32[2, 3]",
        "torch.tensor(items[0])",
    ),
    "nested": (
        lambda x: [x, torch.nested.nested_tensor([x])],
        "items[1] is a nested tensor; the artifact",
        "",
    ),
    "sparse": (lambda x: [x, x.to_sparse()], "items[1] is a torch.sparse_coo tensor; the artifact takes", ""),
    "a size": (lambda x: [x, x[:1]], "items[1] is float32[1, 3] on cpu", 'mg.Dim("batch", max=64)'),
    "another size": (
        lambda x: [x, x[:, :2]],
        "items[1] is float32[2, 2] on cpu",
        "its size in dimension 1 is 2, and has to be 3; ",
    ),
    "a dtype": (
        lambda x: [x, x.double()],
        "items[1] is float64[2, 3] on cpu",
        "items[1].to('cpu', torch.float32)",
    ),
    "dimensions": (
        lambda x: [x, x[0]],
        "items[1] is float32[3] on cpu; the artifact takes float32[2, 3]",
        "it has 1 dimensions where the artifact takes 2; a single example is a batch of one: items[1].unsqueeze(0)",
    ),
    "more dimensions": (
        lambda x: [x, x[None]],
        "items[1] is float32[1, 2, 3] on cpu; the artifact takes float32[2, 3]",
        "it has 3 dimensions where the artifact takes 2",
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_the_argument_is_named(artifact: Any, name: str) -> None:
    make, message, hint = CASES[name]
    with pytest.raises(mg.SignatureError) as caught:
        artifact(make(torch.ones(2, 3)))
    assert caught.value.message.startswith(f"argument {message}")
    assert hint in caught.value.hint


def test_keys(tmp_path: Path) -> None:
    artifact = artifact_of(tmp_path / "dict", {"items": [mg.spec((2, 3))]})
    with pytest.raises(
        mg.SignatureError, match="items is a dict with the keys 'other'; the artifact takes a dict with"
    ):
        artifact({"other": [torch.ones(2, 3)]})


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("size", "dim"), [(9, "min=2, max=9"), (1, "min=1, max=8")])
def test_a_size_outside_of_the_range(tmp_path: Path, size: int, dim: str) -> None:
    artifact = artifact_of(tmp_path / "dim", [mg.spec((mg.Dim("batch", min=2, max=8), 3))])
    with pytest.raises(
        mg.SignatureError, match=f"size {size} in dimension 0; the artifact takes batch from 2 to 8"
    ) as caught:
        artifact([torch.ones(size, 3)])
    assert f'mg.Dim("batch", {dim})' in caught.value.hint
    with pytest.raises(mg.SignatureError, match="is a nested tensor"):
        artifact([torch.nested.nested_tensor([torch.ones(3)])])
    with pytest.raises(mg.SignatureError, match=r"takes a tensor: float32\[batch, 3\] on cpu"):
        artifact([None])
    with pytest.raises(
        mg.SignatureError, match=r"is float32\[4, 5\] on cpu; the artifact takes float32\[batch, 3\] on cpu"
    ):
        artifact([torch.ones(4, 5)])
    with pytest.raises(mg.SignatureError, match="has size 0 in dimension 0") as caught:
        artifact([torch.ones(0, 3)])
    assert "leave out the call" in caught.value.hint


def _by_sign(x: Tensor) -> Tensor:
    made: Tensor = torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x * 2, (x,))
    return made


@pytest.mark.parametrize(
    ("call", "op"),
    [(torch.linalg.svdvals, "_linalg_svd is (f32[0], f32[3], f32[0]), not"), (_by_sign, "f32[3, 3]")],
)
def test_what_could_not_be_loaded_is_not_saved(
    tmp_path: Path, call: Callable[[Tensor], Tensor], op: str
) -> None:
    """Torch describes the result of some ops otherwise where a step is captured."""

    class Predict(mg.Graph):
        def build(self, x: Tensor) -> Tensor:
            return call(x)

    with torch.no_grad():
        step = Predict()
        step(torch.ones(3, 3))
        with pytest.raises(mg.ArtifactError, match=r"load\(\) would refuse the program") as caught:
            mg.save(step, tmp_path / "never")
    assert op in caught.value.message
    assert not (tmp_path / "never").exists()
