"""The fifteen things in which OneFlow's graph can be beaten, and the tests that hold each.

What a test of another file shows already is named in `ELSEWHERE`, and not tested twice.
"""

from __future__ import annotations

import importlib
import re

import pytest
import torch

import monograph.flow.nn as nn
from monograph.errors import CaptureError, DefinitionError
from tests.flow.steps import TrainStep, batches, check_told, graph, net, plain, sgd, trained, weights
from tests.support import assert_same

ELSEWHERE = {
    "1 weights stay as they are after eager training": [
        "flow.nn.test_lifetime:test_training_goes_on_after_eager_training",
        "flow.nn.test_lifetime:test_gradients_of_before_do_not_count",
    ],
    "2 buffers are lost": ["flow.nn.test_lifetime:test_all_buffers_go_on"],
    "3 what changes between calls is ignored": [
        "flow.nn.test_lifetime:test_train_and_eval_are_heeded",
        "flow.nn.test_lifetime:test_an_edited_learning_rate_is_used",
        "flow.nn.test_lifetime:test_a_replaced_parameter_is_the_one_that_is_read",
        "flow.nn.test_lifetime:test_hooks_take_effect",
        "flow.nn.test_lifetime:test_a_hook_that_comes_later_is_heeded",
        "flow.nn.test_lifetime:test_a_number_among_the_arguments_is_heeded",
        "flow.nn.test_lifetime:test_a_number_among_the_attributes_is_heeded",
    ],
    "4 rates and gradients cannot be read": [
        "flow.nn.test_lifetime:test_the_rate_of_a_scheduler_can_be_read",
        "flow.nn.test_lifetime:test_gradients_can_be_kept_and_read",
    ],
    "5 errors name no argument, and a failed build spoils the graph": [
        "flow.nn.test_inputs_outputs:test_a_shape_that_cannot_be_is_told_with_both_shapes",
        "flow.nn.test_inputs_outputs:test_a_wrong_number_of_arguments_names_the_argument",
        "flow.nn.test_lifetime:test_a_failed_build_can_be_tried_again",
        "flow.nn.test_lifetime:test_a_wrong_call_does_no_harm",
    ],
    "6 leaves that are no tensors are refused or become None": [
        "flow.nn.test_inputs_outputs:test_any_nesting_goes_in_and_comes_out",
        "flow.nn.test_inputs_outputs:test_other_leaves_are_values_and_not_dropped",
        "flow.nn.test_inputs_outputs:test_what_a_graph_cannot_take_is_named_by_path_and_type",
    ],
    "7 states are loaded once, by half and without a word": [
        "flow.nn.test_state:test_training_goes_on_from_a_state",
        "flow.nn.test_state:test_the_scale_is_found_whatever_the_graph_is_called",
        "flow.nn.test_state:test_a_state_that_does_not_fit_changes_nothing",
        "flow.nn.test_state:test_entries_of_the_optimizer_that_are_missing_are_named",
        "flow.nn.test_state:test_the_state_of_the_optimizer_is_taken_and_given_back",
    ],
    "8 what is deployed cannot be loaded in Python": [
        "flow.nn.test_state:test_a_saved_graph_runs_without_the_model",
        "flow.nn.test_state:test_a_saved_graph_takes_batches_of_a_declared_range",
    ],
    "9 accumulation packs and fails without a word": [
        "flow.nn.test_accumulation:test_the_shapes_of_what_comes_back",
        "flow.nn.test_accumulation:test_a_batch_that_does_not_divide_is_named",
        "flow.nn.test_accumulation:test_an_argument_that_is_no_batch_is_passed_whole",
    ],
    "10 shapes alone are the key of the cache": [
        "flow.nn.test_shapes:test_what_differs_is_not_taken_for_the_same",
        "flow.nn.test_shapes:test_names_of_keyword_arguments_count",
    ],
    "12 schedulers and optimizers that are impossible": [
        "flow.nn.test_training_options:test_schedulers_that_oneflow_refuses",
        "flow.nn.test_training_options:test_reduce_on_plateau_is_stepped_by_hand",
        "flow.nn.test_training_options:test_optimizers_train_as_in_the_plain_loop",
        "flow.nn.test_training_options:test_a_custom_optimizer_goes_on_from_a_state",
    ],
    "13 tests of operators pass where the graph is wrong": [
        "testing.test_autotest_gaps:test_a_wrong_result_fails",
        "testing.test_autotest_gaps:test_a_wrong_part_of_a_tuple_fails",
        "testing.test_autotest_gaps:test_a_wrong_gradient_fails",
        "testing.test_autotest_gaps:test_a_wrong_update_of_parameters_fails",
        "testing.test_autotest_gaps:test_a_fault_of_the_second_call_only_fails",
        "testing.test_autotest_failures:test_a_seed_decides_the_cases",
    ],
    "14 nothing of a compilation is left to the next process": [
        "backends.test_cache:test_a_second_process_starts_without_the_compiler_and_a_broken_entry_is_compiled_anew",
    ],
    "15 autograd and control flow": [
        "flow.nn.test_inputs_outputs:test_backward_may_keep_its_graph_and_run_twice",
        "flow.nn.test_inputs_outputs:test_two_losses_add_up",
        "flow.nn.test_inputs_outputs:test_gradients_of_gradients",
        "flow.nn.test_inputs_outputs:test_the_gradient_of_an_input_is_a_result",
        "flow.nn.test_inputs_outputs:test_a_branch_on_values_by_cond",
        "flow.nn.test_modules:test_graphs_cannot_be_nested",  # refused, with a way out
    ],
}


@pytest.mark.every_case
@pytest.mark.parametrize("defect", ELSEWHERE)
def test_held_elsewhere(defect: str) -> None:
    for place in ELSEWHERE[defect]:
        module, _, name = place.partition(":")
        assert callable(getattr(importlib.import_module(f"tests.{module}"), name, None)), place


# --- the seed's order: eager training first, then the same model as a graph --------------------------------------------


def test_1_eager_training_with_zeroed_gradients_comes_first() -> None:
    """Losses go down in the graph, too: with the bits that the plain loop has from the beginning."""
    reference, model = net(), net()
    expected = plain(reference, sgd(reference), batches(1) * 6)
    optimizer = sgd(model)
    losses = plain(model, optimizer, batches(1) * 3)
    optimizer.zero_grad(set_to_none=False)
    assert all(parameter.grad is not None for parameter in model.parameters())
    losses += trained(TrainStep(model, optimizer), batches(1) * 3)
    assert_same(expected, losses)
    assert losses[0] > losses[2] > losses[3] > losses[5]
    assert_same(weights(reference), weights(model))


def test_5_the_error_names_the_path_inside_of_an_argument() -> None:
    step = graph(lambda self, batch, scale=1.0: self.model(batch["image"][0]) * scale, model=net())
    step({"image": [torch.ones(2, 3)], "label": torch.ones(2)})
    with pytest.raises(CaptureError) as caught:
        step({"image": [torch.ones(2, 9)], "label": torch.ones(2)})
    told = 'argument batch["image"][0] is a tensor (2, 9) float32 on cpu; the graph was built for a tensor (2, 3)'
    check_told(caught.value, "cannot be multiplied", hint=told)


# --- 11: what is told ----------------------------------------------------------------------------------------------------


def told(level: int | None, capsys: pytest.CaptureFixture[str]) -> str:
    """What a graph with this level says while it is compiled."""
    model = net()
    step = TrainStep(model, sgd(model))
    if level is None:
        step.debug()
    else:
        step.debug(level)
    step(batches(1)[0])
    said = capsys.readouterr()
    return re.sub(r"TrainStep_\d+|\d+\.\d+ ?m?s", "", said.out + said.err)


def test_11_each_level_tells_more(capsys: pytest.CaptureFixture[str]) -> None:
    texts = [told(level, capsys) for level in (-1, 0, 1, 2, 3)]
    assert texts[0] == ""
    lengths = [len(text) for text in texts]
    assert lengths == sorted(set(lengths))
    assert "(MODULE:model.0:" not in texts[1]
    assert "(MODULE:model.0:" in texts[2]
    assert "addmm" not in texts[2]
    assert "addmm" in texts[3]
    assert "steps.py" not in texts[3]
    assert "steps.py" in texts[4]  # the user's lines


def test_11_debug_without_an_argument_opens(capsys: pytest.CaptureFixture[str]) -> None:
    assert told(None, capsys) == told(0, capsys) != ""


def test_11_debug_closes(capsys: pytest.CaptureFixture[str]) -> None:
    step = graph(lambda self, x: x * 2)
    step.debug(3)
    step.debug(-1)
    step(torch.ones(2))
    assert capsys.readouterr().out == ""


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("wrong", "hint"),
    [
        ({"v_level": 4}, "3 ops with lines"),
        ({"v_level": -2}, "-1 off"),
        ({"v_level": 1, "max_py_stack_depth": -1}, "from 0 on"),
        ({"v_level": 1, "ranks": "all"}, "-1 for all"),
    ],
)
def test_11_what_debug_does_not_know_is_told(wrong: dict[str, object], hint: str) -> None:
    with pytest.raises(DefinitionError) as caught:
        graph(lambda self, x: x).debug(**wrong)
    name, value = list(wrong.items())[-1]
    check_told(caught.value, f"debug({name}={value!r})", hint=hint)


def test_11_the_text_of_the_config_shows_every_option() -> None:
    config = graph(lambda self, x: x).config
    plain_text = repr(config)
    config.enable_amp(dtype=torch.bfloat16)
    config.set_gradient_accumulation_steps(3)
    config.allow_fuse_add_to_output()
    for before, after in (
        ("amp=None", "amp=torch.bfloat16"),
        ("accumulation_steps=1", "accumulation_steps=3"),
        ("passes=[]", "passes=[add_to_output=True]"),
    ):
        assert before in plain_text
        assert after in repr(config)


# --- 15: control flow ----------------------------------------------------------------------------------------------------


def test_15_loops_and_branches_in_python_are_unrolled() -> None:
    class Unrolled(nn.Graph):
        def build(self, x, times, *, negate=False):
            for _ in range(times):
                x = x * 2
            return -x if negate else x

    step = Unrolled()
    assert step(torch.ones(1), 3).item() == 8.0
    assert step(torch.ones(1), 4).item() == 16.0
    assert step(torch.ones(1), 4, negate=True).item() == -16.0
