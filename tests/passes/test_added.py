"""Passes of the user's, the runner's chores, and what a graph tells of its passes."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import nn

import monograph as mg
from monograph.config import GraphConfig
from monograph.ir.meta import TensorMeta, origin, value
from monograph.ir.port import Role
from monograph.ir.program import Program
from monograph.passes.dce import dce
from monograph.passes.run import AddedPass, Stage, run_passes
from monograph.passes.table import INDUCTOR_PASSES, PASS_NAMES, PASSES, pipeline
from monograph.settings import Settings, pass_name
from tests.passes.programs import Sketch, aten, body, numbers, run
from tests.support import ROOT

FILE = __file__
PAGE = ROOT / "docs/passes.md"


def small() -> Program:
    """relu(x * w), and an op that nothing reads."""
    sketch = Sketch()
    x, w = sketch.input("x", numbers(2, 3)), sketch.input("model.w", numbers(2, 3), Role.PARAM)
    product = sketch.op(aten.mul.Tensor, x, w)
    sketch.op(aten.neg.default, product)
    return sketch.finish(sketch.op(aten.relu.default, product))


def smooth(program: Program) -> Program:
    """relu becomes silu, in place."""
    for node in program.graph.nodes:
        if node.target is aten.relu.default:
            node.target = aten.silu.default
    return program


def shift(program: Program) -> Program:
    """A new op that says nothing of what it makes or where it comes from; the old one is left dead."""
    graph = program.graph
    for node in graph.find_nodes(op="call_function", target=aten.relu.default):
        with graph.inserting_after(node):
            doubled = graph.call_function(aten.add.Tensor, (node.args[0], 1))
            pair = graph.call_function(aten.max.dim, (doubled, 0))
        node.replace_all_uses_with(doubled)
        assert pair.meta == {}
    return program


# --- the runner ----------------------------------------------------------------------------------------------------------


def stages_of(*passes: Any) -> tuple[Stage, ...]:
    return run_passes(Stage("capture", small(), 0.0), passes)


def test_stages_are_kept_in_order_and_untouched_programs_are_shared():
    first, second, third = stages_of(dce, dce)
    assert [stage.name for stage in (first, second, third)] == ["capture", "dce", "dce"]
    assert "neg" in first.text
    assert "neg" not in second.text
    assert third.program is second.program


def test_a_pass_of_the_users_edits_a_copy():
    before, after = stages_of(AddedPass(smooth))
    assert "aten.relu" in before.text
    assert "aten.silu" in after.text
    assert after.name == "smooth"
    assert "neg" not in after.text, "dead ops go"


def test_new_ops_are_described_and_get_an_origin():
    after = stages_of(AddedPass(shift))[-1].program
    (added,) = (node for node in after.ops() if node.target is aten.add.Tensor)
    assert value(added) == TensorMeta((2, 3), torch.float32, (3, 1), torch.device("cpu"))
    assert (origin(added).phase, origin(added).line) == ("forward", 3)
    x, w = numbers(2, 3), numbers(2, 3)
    torch.testing.assert_close(run(after, [x, w])[0], x * w + 1)


def test_a_crash_names_the_pass_and_the_line_in_it():
    def crash(program):
        raise KeyError("lost")

    with pytest.raises(mg.PassError, match="pass crash failed: KeyError: 'lost'") as caught:
        stages_of(AddedPass(crash))
    assert caught.value.where.file == FILE
    assert caught.value.where.line == crash.__code__.co_firstlineno + 1
    assert "docs/passes.md" in caught.value.hint


def spoil(program: Program) -> Program:
    return replace(program, inputs=())


def test_a_broken_program_names_the_pass_and_where_it_is_defined():
    with pytest.raises(mg.PassError, match="after spoil: rule 'inputs match ports' is broken") as caught:
        stages_of(AddedPass(spoil))
    assert (caught.value.where.file, caught.value.where.line) == (FILE, spoil.__code__.co_firstlineno)
    assert "docs/passes.md" in caught.value.hint
    with pytest.raises(mg.PassError, match="after spoil: rule") as caught:
        stages_of(spoil)
    assert not caught.value.hint, "the user has not written it"


def test_a_pass_that_forgets_to_return_is_told():
    def forgetful(program):
        smooth(program)

    with pytest.raises(mg.PassError, match="pass forgetful returned NoneType, not a Program") as caught:
        stages_of(AddedPass(forgetful))
    assert caught.value.where.line == forgetful.__code__.co_firstlineno


@dataclass(frozen=True)
class Scale:
    """A pass with an option."""

    factor: float

    def __call__(self, program: Program) -> Program:
        for node in program.graph.find_nodes(op="call_function", target=aten.relu.default):
            with program.graph.inserting_after(node):
                scaled = program.graph.call_function(aten.mul.Tensor, (node, self.factor))
            node.replace_all_uses_with(scaled, delete_user_cb=lambda user, own=scaled: user is not own)
        return program


@dataclass
class Mutable:
    """An object that no build can be told by."""

    factor: float

    def __call__(self, program: Program) -> Program:
        return program


def test_a_pass_may_be_an_object():
    after = stages_of(AddedPass(Scale(3.0)))[-1]
    assert after.name == "Scale"
    assert "3.0" in body(after.program)


# --- the pipeline ----------------------------------------------------------------------------------------------------------


def names(**settings: Any) -> list[str]:
    return [pass_name(step) for step in pipeline(Settings(**settings))]


def test_the_passes_in_their_order():
    assert names() == ["canonicalise", "fold_constants", "cse", "dce", "merge_collectives"]
    every = (("gate_nonfinite", True), ("model_update", True))
    assert names(backend="inductor", passes=every) == list(PASS_NAMES)
    assert names(backend="inductor") == [
        name for name in PASS_NAMES if name not in ("model_update", "gate_nonfinite")
    ]
    assert names(passes=(("add_to_output", True),)) == [
        "canonicalise",
        "fold_constants",
        "cse",
        "dce",
        "add_to_output",
        "merge_collectives",
    ]
    assert "cast_scale" not in names(backend="inductor", passes=(("cast_scale", False),))


def test_an_added_pass_stands_where_it_is_put():
    assert names(added_passes=((smooth, None),)) == [
        *("canonicalise", "fold_constants", "cse", "dce", "merge_collectives", "smooth")
    ]
    added = ((smooth, "cse"), (shift, "smooth"), (spoil, "cast_scale"))
    assert names(added_passes=added) == [
        "canonicalise",
        "fold_constants",
        "cse",
        "smooth",
        "shift",
        "dce",
        "spoil",
        "merge_collectives",
    ]


# --- the configuration -----------------------------------------------------------------------------------------------------


def test_the_configuration_shows_its_passes():
    config = GraphConfig()
    config.add_pass(smooth, after="cse")
    config.add_pass(Scale(2.0))
    assert "added_passes=[smooth after cse, Scale]" in repr(config)
    config.allow_fuse_cast_scale()
    config.allow_fuse_add_to_output(False)
    config.allow_fuse_model_update_ops()
    config.enable_cudnn_conv_heuristic_search_algo()
    assert (
        "passes=[add_to_output=False, cast_scale=True, model_update=True], conv_heuristic_search=True"
        in repr(config)
    )


def test_the_page_of_passes_has_every_pass():
    """The tables are written from the rows; put what is expected here into the page where they differ."""
    rows = [
        f"| `{row.name}` | {row.about} | {f'`config.{row.switch}()`' if row.switch else row.runs} |"
        for row in PASSES
    ]
    page = PAGE.read_text()
    assert "\n".join(rows) in page
    assert "\n".join(f"| `{row.name}` | {row.about} |" for row in INDUCTOR_PASSES) in page


def test_a_pass_is_switched_by_its_name():
    one, other = GraphConfig(), GraphConfig()
    one.enable_pass("cast_scale")
    one.enable_pass("gate_nonfinite", False)
    other.detect_nonfinite(False)
    other.allow_fuse_cast_scale()
    assert one.settings == other.settings
    assert one.settings != GraphConfig().settings
    other.allow_fuse_cast_scale(False)  # which is no default: a compiled backend runs it by itself
    assert other.settings != GraphConfig().settings


def test_a_pass_that_is_off_by_itself_is_switched_off_for_nothing():
    config = GraphConfig()
    for switch in (config.detect_nonfinite, config.allow_fuse_model_update_ops):
        switch(False)
        assert config.settings == GraphConfig().settings
        switch()
        assert config.settings != GraphConfig().settings
        switch(False)
        assert config.settings == GraphConfig().settings


def test_a_pass_that_cannot_be_switched():
    one = GraphConfig()
    for name in ("cse", "smooth"):
        with pytest.raises(mg.DefinitionError, match=f"no pass '{name}' that can be switched") as caught:
            one.enable_pass(name)
        assert "cast_scale, add_to_output, model_update" in caught.value.hint


def test_an_unknown_place_lists_the_passes():
    config = GraphConfig()
    config.add_pass(smooth)
    with pytest.raises(mg.DefinitionError, match="there is no pass 'csa'") as caught:
        config.add_pass(shift, after="csa")
    assert "canonicalise, fold_constants, cse, dce" in caught.value.hint
    assert "smooth" in caught.value.hint


@pytest.mark.parametrize("again", [smooth, dce])
def test_a_name_stands_for_one_pass(again):
    config = GraphConfig()
    config.add_pass(smooth)
    with pytest.raises(mg.DefinitionError, match=f"there is a pass '{pass_name(again)}' already"):
        config.add_pass(again)


def test_what_is_no_pass_is_refused():
    with pytest.raises(mg.DefinitionError, match="a pass is a function"):
        GraphConfig().add_pass("cse")  # type: ignore[arg-type]
    with pytest.raises(mg.DefinitionError, match="called and hashed"):
        GraphConfig().add_pass(Mutable(2.0))
    with pytest.raises(mg.DefinitionError, match="neither on nor off"):
        GraphConfig().allow_fuse_cast_scale("yes")  # type: ignore[arg-type]


# --- in a graph --------------------------------------------------------------------------------------------------------------


class Step(mg.Graph):
    def __init__(self, micro_batches: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
        self.add_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))
        self.config.set_gradient_accumulation_steps(micro_batches)

    def build(self, x):
        loss = self.model(x).square().mean()
        loss.backward()
        return loss


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_an_added_pass_changes_what_runs(micro_batches):
    x = numbers(4, 3)
    plain, smoothed = Step(micro_batches), Step(micro_batches)
    smoothed.config.add_pass(smooth, after="cse")
    before, after = plain(x), smoothed(x)
    batches = x.chunk(micro_batches)
    expected = torch.stack([_smooth_loss(batch) for batch in batches])
    torch.testing.assert_close(after.reshape(-1), expected)
    assert not torch.equal(before, after)
    assert "smooth: " in smoothed.explain()


def _smooth_loss(x: torch.Tensor) -> torch.Tensor:
    first, _, last = Step().model
    with torch.no_grad():
        return last(nn.functional.silu(first(x))).square().mean()


def test_another_pass_is_another_build():
    step, x = Step(), numbers(4, 3)
    step(x)
    step.config.add_pass(smooth)
    step(x)
    step(x)
    assert len(step.builds) == 2
    assert "added_passes=[smooth]" in step.builds[1].reason


def test_a_copied_graph_keeps_its_passes():
    step = Step()
    step.config.add_pass(smooth)
    assert [item for item, _ in copy.deepcopy(step).config.settings.added_passes] == [smooth]


def test_the_diff_of_a_pass():
    step = Step()
    with pytest.raises(mg.DefinitionError, match="no build yet"):
        step.diff("cse")
    step.config.add_pass(smooth)
    step(numbers(4, 3))
    changed = [line for line in step.diff("smooth").splitlines() if line[:1] in "+-"]
    assert changed[:2] == ["--- before smooth", "+++ after smooth"]
    assert [line.split("  #")[0].strip() for line in changed[2:]] == [
        "-    relu = aten.relu.default(addmm)",
        "+    relu = aten.silu.default(addmm)",
    ]
    assert step.diff("fold_constants") == ""
    dropped = ("-    detach = ", "-    alias = ")  # as torch 2.14 records it
    assert any(line.startswith(dropped) for line in step.diff("canonicalise").splitlines())
    with pytest.raises(mg.DefinitionError, match="no pass 'capture'") as caught:
        step.diff("capture")
    assert "canonicalise" in caught.value.hint
    with pytest.raises(mg.DefinitionError, match="'schedule_updates' did not run") as caught:
        step.diff("schedule_updates")
    assert 'enable_pass("schedule_updates")' in caught.value.hint


def test_explain_tells_what_the_passes_did():
    step = Step()
    step(numbers(4, 3))
    text = step.explain()
    stages = {stage.name: sum(1 for _ in stage.program.ops()) for stage in step.builds[0].stages}
    assert f"canonicalise: {stages['capture']} ops become {stages['canonicalise']}" in text
    assert "nothing to do: fold_constants" in text
    assert (
        "off: fused_to_single, cast_scale, add_to_output, model_update, gate_nonfinite, merge_collectives, "
        "schedule_updates" in text
    )


def test_a_failing_pass_leaves_the_step_as_it_was():
    step, x = Step(), numbers(4, 3)
    before = copy.deepcopy(step.model.state_dict())
    step.config.add_pass(spoil)
    with pytest.raises(mg.PassError, match="after spoil"):
        step(x)
    assert not step.builds
    assert all(torch.equal(before[name], now) for name, now in step.model.state_dict().items())
