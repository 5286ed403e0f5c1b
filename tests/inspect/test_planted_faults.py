"""Faults planted into steps: each is traced to its line, its module, and to what made it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from monograph.backends.python import generated as aten_backend
from monograph.backends.python import two_parts
from monograph.errors import CaptureError
from tests.inspect import faults
from tests.inspect.faults import Step, Through, batch, line_of, set_settings
from tests.support import new_cache

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    yield
    set_settings()


PASSES = [
    (faults.swaps_operands, "difference", "model.first", "forward"),
    (faults.drops_an_op, "difference", "model.second", "forward"),
    (faults.changes_a_number, "difference", "model.second", "forward"),
    (faults.puts_in_a_wrong_op, "gate", "model.first", "forward"),
    (faults.keeps_an_old_buffer, "norm", "model.second.norm", "forward"),
    (faults.keeps_an_old_weight, "", "optimizer.0", "update"),
    (faults.changes_a_gradient, "gate", "model.first", "backward"),
    (faults.changes_an_update, "", "optimizer.0", "update"),
]


@pytest.mark.one_case
@pytest.mark.parametrize(("fault", "line", "module", "phase"), PASSES)
def test_a_wrong_pass(fault: Callable[..., Any], line: str, module: str, phase: str) -> None:
    step = Step()
    step.config.add_pass(fault, after="cse")
    report = step.verify(*batch())
    assert not report.ok
    assert report.first is not None
    assert report.first.cause == f"pass {fault.__name__}"
    assert (report.first.module, report.first.phase) == (module, phase)
    if line:
        assert report.first.file == faults.__file__
        assert report.first.line == line_of(line)


def wrong(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) * 1.001

    return run


KERNELS = [
    (aten.tanh.default, "gate", "model.first", "forward"),
    (aten.tanh_backward.default, "gate", "model.second", "backward"),
    (aten._log_softmax.default, "loss", "", "forward"),
]


@pytest.mark.one_case
@pytest.mark.parametrize(("op", "line", "module", "phase"), KERNELS)
def test_a_wrong_kernel(op: Any, line: str, module: str, phase: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = aten_backend.direct_call
    for place in (aten_backend, two_parts):  # all ops are called by `direct_call`
        monkeypatch.setattr(place, "entries", lambda calls: {})
    monkeypatch.setattr(
        aten_backend,
        "direct_call",
        lambda target: wrong(right(target)) if target.overloadpacket is op.overloadpacket else right(target),
    )
    report = Step().verify(*batch())
    assert report.first is not None
    assert report.first.cause == "kernels of aten"
    assert (report.first.line, report.first.module, report.first.phase) == (line_of(line), module, phase)


def test_a_constant_that_moved() -> None:
    step = Step()
    step(*batch())
    set_settings(scale=3.0)
    report = step.verify(*batch())
    assert report.first is not None
    assert report.first.cause == "capture"
    assert (report.first.line, report.first.module) == (line_of("scale"), "model")
    assert any("2.0" in line and "3.0" in line for line in report.moving)


@pytest.mark.long
def test_a_constant_that_moved_in_compiled_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Compiled code is near to what was captured, and that is wrong."""
    monkeypatch.setenv("MONOGRAPH_CACHE_DIR", new_cache(tmp_path))
    step = Step(compiled=True)
    step(*batch())
    set_settings(scale=3.0)
    report = step.verify(*batch())
    assert report.first is not None
    assert report.first.cause == "capture"
    assert (report.first.line, report.first.module) == (line_of("scale"), "model")


def test_a_branch_that_moved() -> None:
    step = Step()
    step(*batch())
    set_settings(deep=True)
    report = step.verify(*batch())
    assert report.first is not None
    assert report.first.cause == "capture"
    assert (report.first.line, report.first.module) == (line_of("deep"), "model")
    assert "sin" in report.first.expected


@pytest.mark.long
def test_a_wrong_kernel_of_compiled_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of the second gate, in its backward; test_nonfinite has one in the forward."""
    from torch._inductor import decomposition

    monkeypatch.setenv("MONOGRAPH_CACHE_DIR", new_cache(tmp_path))
    op = aten.tanh_backward.default
    monkeypatch.setitem(decomposition.decompositions, op, lambda *args: torch.sin(args[0]) * 1.01)
    report = Step(compiled=True).verify(*batch())
    assert report.first is not None, str(report)
    assert report.first.cause == "kernels of inductor"
    place = report.first.line, report.first.module, report.first.phase
    assert place == (line_of("gate"), "model.second", "backward")


def test_a_wrong_fake_shape() -> None:
    with pytest.raises(CaptureError, match="its fake kernel reports shape") as caught:
        Step(Through(faults.wrong_shape))(*batch())
    assert caught.value.where is not None
    assert (caught.value.where.line, caught.value.where.module) == (line_of("wrong shape"), "model.inner")
    assert "opcheck" in caught.value.hint


def test_a_fault_in_a_micro_batch() -> None:
    step = Step()
    step.config.set_gradient_accumulation_steps(3)
    step.config.add_pass(faults.swaps_operands_if_there, after="cse")
    report = step.verify(*batch())
    assert report.first is not None
    assert report.first.cause == "pass swaps_operands_if_there"
    assert (report.first.line, report.first.module) == (line_of("difference"), "model.first")


def test_a_fault_that_begins_in_a_later_step() -> None:
    def late(program: Any) -> Any:
        return faults.keeps_an_old_weight(program)

    step = Step()
    step.config.add_pass(late, after="cse")
    report = step.verify(*batch(), steps=3)
    assert report.first is not None
    assert report.first.reaches == "model.head.weight"


NUMBERS = [
    (faults.bad_backward, "backward", "model.inner", "backward", "NaN"),
    (faults.overflow, "overflow", "model.inner", "forward", "Inf"),
    (faults.log_of_zero, "log", "model.inner", "forward", "Inf"),
    (faults.root_of_zero, "root", "model.inner", "backward", "Inf"),
    (faults.hidden_root, "hidden root", "model.inner", "forward", "NaN"),
    (faults.masked, "inverse", "model.inner", "forward", "Inf"),
]


@pytest.mark.one_case
@pytest.mark.parametrize(("function", "line", "module", "phase", "kind"), NUMBERS)
def test_numbers_that_are_none(
    function: Callable[..., Any], line: str, module: str, phase: str, kind: str
) -> None:
    report = Step(Through(function)).find_nonfinite(*batch())
    assert report.found is not None
    assert report.first is not None
    assert report.found.kind == kind, str(report)
    assert (report.first.module, report.first.phase) == (module, phase)
    assert (report.first.file, report.first.line) == (faults.__file__, line_of(line))


def test_a_weight_that_is_none() -> None:
    step = Step()
    with torch.no_grad():
        step.model.second.fc.weight[0, 0] = float("nan")
    report = step.find_nonfinite(*batch())
    assert report.found is not None
    assert report.found.made.name == "model.second.fc.weight"


def test_an_argument_that_is_none() -> None:
    x, y = batch()
    x[1, 2] = float("nan")
    report = Step().find_nonfinite(x, y)
    assert report.found is not None
    assert report.found.made.name == "x"


def test_an_update_that_divides_by_zero() -> None:
    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = nn.Linear(8, 4), nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x) + 0.0 * self.idle(x)

    report = Step(Unused(), eps=0.0).find_nonfinite(*batch())
    assert report.first is not None
    assert report.first.phase == "update"
    assert any(path.startswith("model.idle") for path in report.reached)
