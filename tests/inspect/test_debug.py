"""debug(): what is told while a graph is built, level by level."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor

import monograph as mg
from tests.inspect.faults import Step, batch, line_of


def told(capsys: pytest.CaptureFixture[str], level: int, **options: object) -> str:
    step = Step()
    step.debug(level, **options)  # type: ignore[arg-type]
    step(*batch())
    return capsys.readouterr().out


def test_stages_with_their_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    text = told(capsys, 0)
    lines = text.splitlines()
    assert lines[0].startswith("(GRAPH:Step_")
    assert lines[0].endswith(":Step) start capture.")
    assert any("capture done: " in line and " ops." in line for line in lines)
    for stage in ("passes", "plan", "backend aten"):
        assert f"start {stage}." in text
        assert f"{stage} done: " in text
    assert "MODULE" not in text


def test_modules_with_their_tensors(capsys: pytest.CaptureFixture[str]) -> None:
    text = told(capsys, 1)
    first = text.index("(MODULE:model:Net())")
    assert first < text.index("(MODULE:model.first:Gate())") < text.index("(MODULE:model.first.fc:Linear(")
    assert (
        "(PARAMETER:model.first.fc.weight:tensor(..., size=(8, 8), dtype=torch.float32, requires_grad=True))"
        in text
    )
    assert "(BUFFER:model.first.norm.running_mean:" in text
    assert "(INPUT:_model.first_input.x:tensor(..., size=(6, 8)" in text
    assert "(OUTPUT:_model.head_output:tensor(..., size=(6, 4)" in text
    assert "OPERATOR" not in text


def test_each_op_with_its_device(capsys: pytest.CaptureFixture[str]) -> None:
    text = told(capsys, 2)
    joined = " ".join(text.split())
    assert "(OPERATOR: " in text
    assert 'f32[6, 8] device=cpu, placement=(type="cpu", ranks=[0]), forward in model.first.fc' in joined
    assert ", backward in model.first" in joined
    assert ", update in optimizer.0" in joined
    assert "location=" not in text


def test_each_op_with_its_lines(capsys: pytest.CaptureFixture[str]) -> None:
    joined = " ".join(told(capsys, 3).split())
    assert (
        f"location=('forward' at 'faults.py': line {line_of('difference')}; 'forward' at 'faults.py'"
        in joined
    )
    deep = " ".join(told(capsys, 3, max_py_stack_depth=5, only_user_py_stack=False).split())
    assert "'forward' at 'linear.py'" in deep
    assert "'linear.py'" not in joined


def test_it_really_closes(capsys: pytest.CaptureFixture[str]) -> None:
    step = Step()
    step.debug(3)
    step.debug(-1)
    step(*batch())
    assert capsys.readouterr().out == ""


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("ranks", "speaks"), [(None, False), (0, False), (1, True), ([0, 1], True), (-1, True)]
)
def test_ranks(
    ranks: int | list[int] | None,
    speaks: bool,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANK", "1")
    assert bool(told(capsys, 0, ranks=ranks)) is speaks


def test_the_log_has_it_too(caplog: pytest.LogCaptureFixture) -> None:
    step = Step()
    step.debug()
    with caplog.at_level(logging.INFO, "monograph.debug"):
        step(*batch())
    assert any("capture done" in record.message for record in caplog.records)


def test_an_error_stands_behind_what_led_to_it(capsys: pytest.CaptureFixture[str]) -> None:
    class Broken(mg.Graph):
        def build(self, x: Tensor) -> Tensor:
            y = self.model(x).exp()
            return y if y.sum() > 0 else x

    graph = Broken()
    graph.model = torch.nn.Linear(2, 2)
    graph.debug(2)
    with pytest.raises(mg.DataDependentError):
        graph(torch.ones(2))
    lines = capsys.readouterr().out.splitlines()
    assert any("aten.exp.default" in line for line in lines)
    assert lines[-1].startswith("[ERROR](GRAPH:Broken_")


def test_lines_in_the_printed_graph() -> None:
    step = Step()
    step.debug(-1, op_repr_with_py_stack=True)
    step(*batch())
    assert f"location=('forward' at 'faults.py': line {line_of('difference')}" in " ".join(repr(step).split())
    plain = Step()
    plain(*batch())
    assert "location=" not in repr(plain)


@pytest.mark.every_case
@pytest.mark.parametrize(
    "wrong", [{"v_level": 4}, {"v_level": -2}, {"max_py_stack_depth": -1}, {"ranks": "all"}]
)
def test_options_that_there_are_not(wrong: dict[str, object]) -> None:
    with pytest.raises(mg.DefinitionError, match="debug"):
        Step().debug(**wrong)  # type: ignore[arg-type]
