"""Programs of an artifact for ranges and for single sizes beside them, and what is said of sizes that it does not take."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import monograph as mg
from tests.support.steps import line_of


class Infer(mg.Graph):
    def __init__(self, model: Callable[..., Any]) -> None:
        super().__init__()
        self.model = model

    def build(self, x: Tensor) -> Any:
        with torch.no_grad():
            return self.model(x)


class Positions(nn.Module):
    """A table of sixteen rows."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(16, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table[: x.shape[1]]


RANGE = mg.spec((mg.Dim("batch", min=2, max=16), 4))
SINGLE = mg.spec((64, 4))


@pytest.mark.every_case
@pytest.mark.parametrize("specs", [(RANGE, SINGLE), (SINGLE, RANGE), (RANGE, SINGLE, SINGLE)])
def test_a_size_that_is_compiled_beside_a_range_is_in_the_artifact(specs: Any, tmp_path: Path) -> None:
    graph = Infer(nn.Linear(4, 3))
    for spec in specs:
        graph.compile(spec)
    artifact = mg.load(mg.save(graph, tmp_path / "artifact"))
    for rows in (2, 16, 64):
        x = torch.randn(rows, 4)
        assert torch.equal(artifact(x), graph(x))
    for rows in (17, 63):
        with pytest.raises(mg.SignatureError, match="the call fits no program of infer"):
            artifact(torch.randn(rows, 4))
    assert len(str(artifact.infer).splitlines()) == 2


def test_a_size_within_the_range_has_no_program_of_its_own(tmp_path: Path) -> None:
    graph = Infer(nn.Linear(4, 3))
    graph.compile(RANGE)
    graph.compile(mg.spec((8, 4)))
    artifact = mg.load(mg.save(graph, tmp_path / "artifact"))
    assert len(str(artifact.infer).splitlines()) == 1


def test_a_table_that_is_too_small_is_no_damage(tmp_path: Path) -> None:
    graph = Infer(Positions())
    for length in (4, 6):
        graph(torch.randn(2, length, 4))
    artifact = mg.load(mg.save(graph, tmp_path / "artifact"))
    assert artifact(torch.randn(2, 16, 4)).shape == (2, 16, 4)
    with pytest.raises(mg.ArtifactError, match=r"was captured for steps in which `x\.size\(1\) <= 16` holds"):
        artifact(torch.randn(2, 17, 4))


def test_the_hint_at_a_larger_range_knows_of_tables(tmp_path: Path) -> None:
    graph = Infer(Positions())
    graph.compile(mg.spec((2, mg.Dim("length", max=16), 4)))
    artifact = mg.load(mg.save(graph, tmp_path / "artifact"))
    with pytest.raises(mg.SignatureError) as caught:
        artifact(torch.randn(2, 17, 4))
    assert 'mg.Dim("length", min=1, max=17) in its mg.spec, and save it again, if' in caught.value.hint
    assert "a table of it, as of positions, may end before" in caught.value.hint


def test_sizes_that_vary_by_themselves_have_no_largest_one(tmp_path: Path) -> None:
    graph = Infer(nn.Linear(4, 3))
    for rows in (4, 6):
        graph(torch.randn(rows, 4, 4))
    artifact = mg.load(mg.save(graph, tmp_path / "artifact"))
    with pytest.raises(mg.SignatureError) as caught:
        artifact(torch.randn(1, 4, 4))
    assert "min=1, max=...)" in caught.value.hint


def repeated(x: Tensor) -> Tensor:
    return x.repeat_interleave(x.shape[0], 0)  # at: repeated


def branching(x: Tensor) -> Tensor:
    return x * 2 if x.shape[0] < 10 else x * 3  # at: branching


def longer(x: Tensor) -> Tensor:
    y = x + 1
    return y if x.shape[0] < 10 else y.exp()  # at: longer


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("function", "op"),
    [(repeated, "aten::"), (branching, "aten::mul.Tensor"), (longer, "aten::exp.default")],
)
def test_the_op_that_differs_is_named_with_its_line(
    function: Callable[[Tensor], Tensor], op: str, tmp_path: Path
) -> None:
    graph = Infer(function)
    graph.compile(mg.spec((mg.Dim("batch", max=64), 4)))
    with pytest.raises(mg.ArtifactError, match="not the same program for batch") as caught:
        mg.save(graph, tmp_path / "artifact")
    line = line_of(function.__name__, __file__)
    assert op in caught.value.message
    assert f"(test_sizes_beside.py:{line})" in caught.value.message
