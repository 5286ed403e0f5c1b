"""memory(): numbers that are those of the build, sums that fit, and a graph that stays as it was."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import monograph as mg
from monograph.inspect.memory.reading import memory_report
from monograph.internals.internals import internals_of
from monograph.plan.memory import Holder, Moment
from monograph.user_code.lines import Origin
from tests.inspect.faults import Step, batch, line_of

FORMS = mg.spec((8, 16)), mg.spec((8,), torch.int64)


class Classifier(mg.Graph):
    """A step of two layers and an optimizer."""

    def __init__(self, device: str = "cpu", width: int = 16) -> None:
        super().__init__()
        with torch.device(device):
            self.model = nn.Sequential(nn.Linear(16, width), nn.Tanh(), nn.Linear(width, 10))
            self.add_optimizer(torch.optim.AdamW(self.model.parameters()))

    def build(self, x: Tensor, y: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(self.model(x), y)
        loss.backward()
        return loss


def sum_of_tensors(*tensors: Tensor) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def test_the_numbers_are_those_of_the_build() -> None:
    step = Classifier()
    report, build = step.memory(*FORMS), step.builds[0]
    parameters = list(step.model.parameters())
    held = sum_of_tensors(*parameters)
    assert report.state_bytes == 3 * held + 4 * len(parameters)  # two moments, and a counter for each
    assert report.argument_bytes == 8 * 16 * 4 + 8 * 8
    assert report.peak_bytes == build.memory.peak_bytes
    assert report.by_device == {"cpu": report.peak_bytes}
    assert max(point.running_bytes for point in report.timeline) == report.peak_bytes
    assert report.peak == max(report.timeline, key=lambda point: point.running_bytes)
    kinds = report.by_kind()
    assert (kinds["parameters"], kinds["arguments"]) == (held, report.argument_bytes)
    assert kinds["optimizer state"] == 2 * held + 4 * len(parameters)


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("more", ["", "clip", "ema", "scaler", "keep"])
def test_the_holders_are_all_that_is_held(more: str, accumulate: int) -> None:
    class Clipping(Classifier):
        def build(self, x: Tensor, y: Tensor) -> Tensor:
            loss = super().build.__wrapped__(self, x, y)
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            return loss

    step = Clipping() if more == "clip" else Classifier()
    step.config.set_gradient_accumulation_steps(accumulate)
    if more == "ema":
        step.add_ema(step.model)
    if more == "scaler":
        step.set_grad_scaler(torch.amp.GradScaler("cpu"))
    if more == "keep":
        step.config.keep_gradients()
    report = step.memory(*FORMS)
    assert sum(report.by_kind().values()) == report.total_bytes
    assert sum(report.by_phase().values()) == report.total_bytes
    held = sum_of_tensors(*step.model.parameters())
    assert report.by_kind()["parameters"] == held
    assert report.by_kind().get("gradients", 0) > 0 or more == "ema"  # whose peak is after the update
    assert report.by_kind().get("averages", 0) == (held if more == "ema" else 0)


def test_gradients_of_micro_batches_belong_to_their_modules() -> None:
    """Those so far, those of the last micro-batch and their sums, at the peak."""
    step = Classifier(width=64)
    step.config.set_gradient_accumulation_steps(4)
    report = step.memory(*FORMS)
    first, _, last = step.model
    for name, layer in ("model.0", first), ("model.2", last):
        assert report.by_module()[name]["gradients"] == 3 * sum_of_tensors(*layer.parameters())
    assert "activations" not in report.by_kind()


def test_activations_are_what_backward_waits_for() -> None:
    step = Step()
    report = step.memory(torch.randn(4096, 8), batch()[1].new_zeros(4096))
    activations = {item.module: item for item in report.holders if item.kind == "activations"}
    assert {item.phase for item in activations.values()} == {"forward"}
    assert {"model.first", "model.second"} <= activations.keys()
    assert report.peak.where.phase == "backward"
    assert report.peak.where.file.endswith("faults.py")
    modules = report.by_module()
    inside = [modules[name]["activations"] for name in ("model.first", "model.second")]
    assert sum(inside) <= modules["model"]["activations"]


def test_the_table_says_who_holds_the_peak() -> None:
    report = Step().memory(*batch())
    text = str(report)
    for word in ("parameters", "optimizer state", "gradients", "model.first", "the peak is at", "all"):
        assert word in text
    assert len(repr(report)) < 200
    assert "\n" not in repr(report)


def test_it_is_json() -> None:
    report = Classifier().memory(*FORMS)
    found = json.loads(json.dumps(report.to_dict()))
    assert found["total_bytes"] == report.total_bytes == sum(item["nbytes"] for item in found["holders"])
    assert len(found["timeline"]) == len(report.timeline)
    assert found["peak"]["op"] == report.peak.op


def test_passes_say_what_they_save() -> None:
    report = Classifier().memory(*FORMS)
    stages = [stage.name for stage in stages_of_a_build()]
    assert [item.name for item in report.passes] == [*stages, "aten"]  # whose updates are in place
    first, last = report.passes[0], report.passes[-1]
    assert first.peak_bytes - sum(item.saved_bytes for item in report.passes) == last.peak_bytes
    assert last.peak_bytes == report.peak_bytes


def stages_of_a_build() -> tuple[Any, ...]:
    step = Classifier()
    step.compile(*FORMS)
    return step.builds[0].stages


def test_a_pass_that_saves_memory_is_in_the_table() -> None:
    def twice(x: Tensor) -> Tensor:
        first, second = (x + 1).exp(), (x + 1).exp()
        return (first * second).sum()

    report = mg.trace(twice).memory(mg.spec((1024,)))
    saved = {item.name: item.saved_bytes for item in report.passes}
    assert saved["cse"] >= 4096
    assert "cse" in str(report)


def test_nothing_is_changed_before_the_first_step_and_after_many() -> None:
    torch.manual_seed(0)
    plain, looked_at = Step(), Step()
    looked_at.load_state_dict(plain.state_dict())
    x, y = batch()
    losses: list[list[Tensor]] = [[], []]
    for _ in range(3):
        random = torch.get_rng_state()
        losses[0].append(plain(x, y))
        torch.set_rng_state(random)
        before = looked_at.state_dict().keys()
        report = looked_at.memory(x, y)
        assert looked_at.state_dict().keys() == before
        assert torch.equal(torch.get_rng_state(), random)
        losses[1].append(looked_at(x, y))
    assert all(map(torch.equal, *losses))
    assert len(looked_at.builds) == 1
    assert looked_at.memory(x, y).to_dict() == report.to_dict()


def test_a_build_for_all_sizes_is_looked_at_with_those_of_the_call() -> None:
    step = Classifier()
    for rows in (8, 24):
        step(torch.randn(rows, 16), torch.zeros(rows, dtype=torch.int64))
    reports = {rows: step.memory(mg.spec((rows, 16)), mg.spec((rows,), torch.int64)) for rows in (4096, 24)}
    assert len(step.builds) == 2
    alone = Classifier()
    for rows, report in reports.items():
        alone = Classifier()
        expected = alone.memory(mg.spec((rows, 16)), mg.spec((rows,), torch.int64))
        assert report.peak_bytes == expected.peak_bytes
        assert report.by_kind() == expected.by_kind()
        assert report.argument_bytes == expected.argument_bytes


def test_of_compiled_code_it_is_what_the_code_holds() -> None:
    step = Classifier()
    step.compile(*FORMS)
    build, where = step.builds[0], Origin(module="model.0", phase="backward")
    held = (Holder("buf0", "temporary", 5000, where), Holder("buf1", "workspace", 300, Origin()))
    code = replace(
        build.plan.memory,
        peak_bytes=5300,
        peak_node="buf0",
        holders=held,
        timeline=(Moment("buf0", 5300, 0),),
    )
    report = memory_report(step.name, replace(build, backend="inductor", compiled_memory=code))
    assert report.peak_bytes == 5300
    assert report.by_device == {"cpu": 5300}
    assert sum(report.by_kind().values()) == report.total_bytes
    assert report.by_kind()["workspace"] == 300
    assert report.by_module()["model.0"]["temporaries"] == 5000
    assert (report.passes[-1].name, report.passes[-1].peak_bytes) == ("inductor", 5300)
    assert [(point.op, point.running_bytes) for point in report.timeline] == [("buf0", 5300)]
    assert "inductor" in str(report)


def test_dims_of_specs_are_not_declared_by_a_look() -> None:
    step, rows = Classifier(), mg.Dim("rows")
    report = step.memory(mg.spec((rows, 16)), mg.spec((rows,), torch.int64))
    assert report.peak_bytes > 0
    assert internals_of(step).declared == ()


def test_a_model_without_memory_holds_what_one_with_memory_would() -> None:
    with_memory = Classifier().memory(*FORMS)
    step = Classifier("meta")
    forms = [mg.spec(item.shape, item.dtype, "meta") for item in FORMS]
    without = step.memory(*forms)
    assert without.by_kind() == with_memory.by_kind()
    assert without.peak_bytes == with_memory.peak_bytes
    with pytest.raises(mg.BackendError, match="no memory") as failed:
        step(torch.empty(8, 16, device="meta"), torch.empty(8, dtype=torch.int64, device="meta"))
    assert "graph.memory" in failed.value.hint
    assert "not to be run" in without.notes[0]
    compiled = Classifier("meta")
    compiled.config.backend("inductor")
    assert compiled.memory(*forms).backend == "aten"


def test_arguments_that_do_not_fit_are_refused_as_in_a_call() -> None:
    step = Classifier()
    with pytest.raises(mg.CaptureError):
        step.memory(mg.spec((8, 15)), FORMS[1])
    with pytest.raises(mg.SignatureError):
        step.memory(FORMS[0])
    assert step.builds == ()


def test_the_line_of_the_peak_is_the_users() -> None:
    report = mg.trace(lambda x: (x * 2).exp().sum()).memory(mg.spec((1024,)))
    assert report.peak.where.file == __file__
    assert line_of("gate") > 0
