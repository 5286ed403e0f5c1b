"""The class itself: names, attributes, options, what the text shows."""

from __future__ import annotations

import gc
import re
import warnings
import weakref
from typing import Any

import pytest
import torch

import monograph.flow as flow
import monograph.flow.nn as nn
from monograph.errors import DefinitionError, MissingBuildError, OptimizerError
from monograph.flow.nn.graph import GraphModule
from tests.flow.steps import TrainStep, batches, check_told, graph, infer, loss_of, net, sgd, trained, weights
from tests.support import assert_same

# --- names and construction ---------------------------------------------------------------------------------


def test_names_count_by_class() -> None:
    class Base(nn.Graph):
        def build(self, x):
            return x

    class Derived(Base):
        pass

    assert [Base().name, Derived().name, Base().name, Derived().name] == [
        "Base_0",
        "Derived_0",
        "Base_1",
        "Derived_1",
    ]


def test_arguments_of_init_are_oneflows(capsys: pytest.CaptureFixture[str]) -> None:
    class Loud(nn.Graph):
        def __init__(self) -> None:
            super().__init__(
                enable_get_runtime_state_dict=False,
                debug_v_level=0,
                debug_ranks=0,
                debug_max_py_stack_depth=3,
                debug_only_user_py_stack=True,
                debug_op_repr_with_py_stack=True,
            )

        def build(self, x):
            return x + 1

    loud = Loud()
    loud(torch.ones(1))
    assert loud.name in capsys.readouterr().out
    assert "test_class.py" in repr(loud)  # the line of each op
    with pytest.raises(TypeError):
        nn.Graph(0)


@pytest.mark.parametrize("use", [lambda g: g(torch.ones(1)), lambda g: g.build(), lambda g: g._compile()])
def test_a_graph_without_build_is_told(use: Any) -> None:
    class Empty(nn.Graph):
        pass

    with pytest.raises(NotImplementedError) as caught:
        use(Empty())
    assert isinstance(caught.value, MissingBuildError)
    check_told(caught.value, "Empty", "build()", hint="def build(self")


def test_build_called_by_hand_runs_eagerly_and_says_so() -> None:
    model = net()
    step = infer(model)
    x = batches(1)[0]
    with pytest.warns(UserWarning, match=r"build\(\) of Step_0 was called directly"):
        assert_same(model(x).detach(), step.build(x).detach())
    assert not step.is_compiled


def test_the_properties() -> None:
    step, x = infer(net()), batches(1)[0]
    assert (step.is_compiled, step.training, step.config.training) == (False, False, False)
    step(x)
    assert step.is_compiled
    step.add_optimizer(sgd(step.model))
    assert (step.training, step.config.training) == (True, True)


@pytest.mark.parametrize("assign", ["module", "tensor", "number"])
def test_init_must_come_first(assign: str) -> None:
    value = {"module": net(), "tensor": torch.ones(1), "number": 1}[assign]

    class Early(nn.Graph):
        def __init__(self) -> None:
            self.thing = value

    with pytest.raises(AttributeError) as caught:
        Early()
    check_told(caught.value, "Early.__init__ has not called super().__init__()", "thing", hint="first line")


def test_a_graph_that_was_never_initialised_goes_quietly(recwarn: pytest.WarningsRecorder) -> None:
    class Silent(nn.Graph):
        def __init__(self) -> None:
            pass

        def build(self, x):
            return x

    silent = Silent()
    with pytest.raises(AttributeError) as caught:
        silent(torch.ones(1))
    check_told(caught.value, "Silent.__init__ has not called", hint="super().__init__()")
    del silent, caught
    gc.collect()
    assert not [
        item for item in recwarn if issubclass(item.category, pytest.PytestUnraisableExceptionWarning)
    ]


# --- attributes ---------------------------------------------------------------------------------------------


def test_an_optimizer_is_no_attribute() -> None:
    step = infer(net())
    with pytest.raises(AttributeError) as caught:
        step.optimizer = sgd(step.model)
    check_told(caught.value, "'optimizer'", "an optimizer cannot be", hint="self.add_optimizer(optimizer)")


def test_a_tensor_that_trains_is_no_attribute() -> None:
    step = infer(net())
    with pytest.raises(AttributeError) as caught:
        step.table = torch.ones(2, requires_grad=True)
    check_told(caught.value, "'table'", "cannot be", hint="hold it in an nn.Module")


@pytest.mark.parametrize("name", ["a.b", "", "graph.steps"])
def test_a_module_needs_a_name_without_dots(name: str) -> None:
    step = infer(net())
    with pytest.raises(DefinitionError) as caught:
        setattr(step, name, net())
    check_told(caught.value, repr(name), hint="without a dot")
    assert next(iter(step.state_dict())) == "model"
    assert name not in step.__dict__


def test_config_is_taken() -> None:
    step = infer(net())
    with pytest.raises(AttributeError) as caught:
        step.config = net()
    check_told(caught.value, "'config' is a property of Graph", hint="another attribute name")


def test_attributes_that_are_not_there() -> None:
    step = infer(net())
    with pytest.raises(AttributeError, match="'Step' object has no attribute 'nothing'"):
        _ = step.nothing
    with pytest.raises(AttributeError, match="'Sequential' object has no attribute 'nothing'"):
        _ = step.model.nothing
    assert not hasattr(step, "nothing")
    assert not hasattr(step.model, "nothing")


def test_optimizers_are_checked_when_they_are_added() -> None:
    step, other = infer(net()), net(1)
    for wrong in (None, "SGD", step.model):
        with pytest.raises(OptimizerError) as caught:
            step.add_optimizer(wrong)
        check_told(caught.value, "takes a torch.optim.Optimizer", hint="self.add_optimizer(")
    optimizer = sgd(step.model)
    with pytest.raises(OptimizerError) as caught:
        step.add_optimizer(optimizer, lr_sch=flow.optim.lr_scheduler.StepLR(sgd(other), 1))
    check_told(caught.value, "lr_sch belongs to another optimizer", hint="with the optimizer that you add")
    with pytest.raises(DefinitionError) as caught:
        step.add_optimizer(optimizer, is_sparse=True)
    check_told(caught.value, "is_sparse=True", hint="leave is_sparse out")
    assert not step.training


def test_several_optimizers_over_parts_of_a_model() -> None:
    def build(self, x):
        loss = loss_of(self.model, x)
        loss.backward()
        return loss

    reference, model = net(), net()
    for side in (reference, model):
        optimizers = [
            torch.optim.SGD(side[0].parameters(), lr=0.1),
            torch.optim.Adam(side[2].parameters(), lr=0.01),
        ]
        if side is reference:
            for x in batches(3):
                side.zero_grad()
                loss_of(side, x).backward()
                [optimizer.step() for optimizer in optimizers]
    step = graph(build, optimizers[0], model=model)
    step.add_optimizer(optimizers[1])
    trained(step, batches(3))
    assert_same(weights(reference), weights(model))


@pytest.mark.parametrize("wrong", ["scaler", 2.0, object()])
def test_a_scaler_is_checked(wrong: Any) -> None:
    with pytest.raises(DefinitionError) as caught:
        infer(net()).set_grad_scaler(wrong)
    check_told(caught.value, type(wrong).__name__, hint="StaticGradScaler")


def test_setters_have_oneflows_argument_names() -> None:
    step = infer(net())
    step.set_grad_scaler(grad_scaler=flow.amp.StaticGradScaler(scale_factor=2.0))
    step.set_grad_scaler()
    step.config.set_gradient_accumulation_steps(value=2)
    assert step.config.settings.accumulation_steps == 2
    for wrong in (0, 1.5, True):
        with pytest.raises(DefinitionError, match="set_gradient_accumulation_steps"):
            step.config.set_gradient_accumulation_steps(wrong)


# --- the rest of the surface --------------------------------------------------------------------------------


def test_compile_without_running() -> None:
    model = net()
    before = weights(model)
    step = TrainStep(model, sgd(model))
    step._compile(batches(1)[0])
    assert step.is_compiled
    assert_same(before, weights(model))
    step._compile(batches(1)[0])  # nothing new to compile
    assert len(step.builds) == 1


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("build_graph", "graph.compile(...)"),
        ("finish_compile_and_init_runtime", "graph.compile(...)"),
        ("finish_complie_and_init_runtime", "graph.compile(...)"),
        ("enable_save_runtime_state_dict", "flow.save(graph, path)"),
        ("runtime_state_dict", "flow.save(graph, path)"),
        ("load_runtime_state_dict", "flow.save(graph, path)"),
        ("runtime_state_dict_to", "flow.save(graph, path)"),
        ("_graph_proto", "graph.show()"),
        ("_full_graph_proto", "graph.show()"),
        ("_compiled_graph_proto", "graph.show()"),
    ],
)
def test_methods_without_counterpart_say_what_to_use(name: str, hint: str) -> None:
    with pytest.raises(AttributeError) as caught:
        getattr(infer(net()), name)
    check_told(caught.value, f"nn.Graph.{name} is not here", hint=hint)


def test_trace_makes_a_graph_of_a_function() -> None:
    @nn.Graph.trace
    def doubled(x):
        return x * 2

    assert re.fullmatch(r"doubled_graph_\d+", doubled.name)
    assert_same(torch.full((2,), 2.0), doubled(torch.ones(2)))
    assert isinstance(doubled, nn.Graph)
    assert nn.Graph.trace(nn.Linear(2, 2))(torch.ones(2)).numpy().shape == (2,)  # no gradient history
    with pytest.raises(DefinitionError, match="trace\\(\\) takes a function, got a int"):
        nn.Graph.trace(3)


def test_what_has_no_effect_says_so() -> None:
    config = infer(net()).config
    for act in (
        config.enable_choose_best_memory_allocation,
        config.enable_auto_memory,
        config.enable_zero,
    ):
        with pytest.warns(UserWarning, match=f"^{act.__name__} has no effect: "):
            act()
    with pytest.warns(UserWarning, match="^enable_straighten_algorithm has no effect: "):
        config.enable_straighten_algorithm("OverlapCpuGpu")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config.enable_zero(False)
        config.enable_straighten_algorithm()
        config.enable_straighten_algorithm("Disable")
        config.enable_auto_memory("Disable")
        config.set_outputs_buffer_size(3)
        config.enable_compress_memory()


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("act", "told", "hint"),
    [
        (lambda config: config.enable_zero(stage=4), "stage=4", "stage is 1, 2 or 3"),
        (lambda config: config.enable_zero(shard_min_size=0), "shard_min_size=0", "greater than 0"),
        (lambda config: config.enable_zero(shard_restore_level=3), "shard_restore_level=3", "0, 1 or 2"),
        (lambda config: config.set_outputs_buffer_size(0), "set_outputs_buffer_size(0)", "from 1 on"),
        (lambda config: config.enable_straighten_algorithm("Fast"), "'Fast'", "SpeedFirst"),
        (lambda config: config.enable_amp(dtype=torch.float32), "torch.float32", "torch.bfloat16"),
        (lambda config: config.enable_amp(torch.float16), "enable_amp(torch.float16)", "dtype="),
        (
            lambda config: config.set_zero_redundancy_optimizer_mode("on"),
            "set_zero_redundancy_optimizer_mode is not here",
            "enable_zero",
        ),
        (lambda config: config.enable_auto_parallel(), "nothing searches", "enable_zero()"),
        (lambda config: config.proto, "protobuf", "leave it out"),
    ],
)
def test_a_wrong_option_is_told(act: Any, told: str, hint: str) -> None:
    with pytest.raises(DefinitionError) as caught:
        act(infer(net()).config)
    check_told(caught.value, told, hint=hint)


def test_an_unknown_option_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'GraphConfig' object has no attribute 'enable_magic'"):
        _ = infer(net()).config.enable_magic


# --- what is printed ----------------------------------------------------------------------------------------


def tags(text: str) -> set[str]:
    return set(re.findall(r"^ *\(([A-Za-z]+):", text, re.MULTILINE))


def test_the_text_before_and_after_the_first_call() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    step = TrainStep(model, sgd(model))
    before = repr(step)
    assert before.startswith(
        f"(GRAPH:{step.name}:TrainStep): (\n  (CONFIG:config:GraphConfig(training=True, "
    )
    assert tags(before) == {"GRAPH", "CONFIG", "MODULE", "PARAMETER", "BUFFER"}
    assert (
        "(PARAMETER:model.0.weight:tensor(..., size=(2, 3), dtype=torch.float32, requires_grad=True)): ()"
        in before
    )
    assert "(BUFFER:model.1.num_batches_tracked:tensor(..., size=(), dtype=torch.int64)): ()" in before
    step(batches(1)[0])
    after = repr(step)
    assert tags(after) == tags(before) | {"INPUT", "OUTPUT", "OPERATOR"}
    assert f"(INPUT:_{step.name}_input.x:tensor(..., size=(4, 3), dtype=torch.float32))" in after
    assert "(OUTPUT:_model.0_output:tensor(..., size=(4, 2), dtype=torch.float32" in after
    assert re.search(r"\(OPERATOR:.*aten\.addmm\(model\.0\.bias, x, .*forward\)", after)
    assert re.search(r"\(OPERATOR:.*backward\)", after)
    assert re.search(r"\(OPERATOR:.*update\)", after)


def test_options_are_in_the_text() -> None:
    step = infer(net())
    step.config.enable_amp()
    step.config.set_gradient_accumulation_steps(4)
    step.config.allow_fuse_model_update_ops()
    shown = " ".join(repr(step).split())
    for option in ("amp=torch.float16", "accumulation_steps=4", "model_update=True"):
        assert option in shown
    assert "accumulation_steps=4" in repr(step.config)


def test_options_of_all_modules_by_a_loop() -> None:
    step = infer(net())
    for index, module in enumerate(step.model.modules()):
        module.to(GraphModule).set_stage(index)
    stages = [module.to(GraphModule).stage_id for module in step.model.modules()]
    assert stages == list(range(len(stages)))
    assert step.model[0].to(GraphModule).stage_id == 1


def test_the_early_spelling_of_options_is_told_the_new_one() -> None:
    step = infer(net())
    for name in ("config", "origin"):
        with pytest.raises(AttributeError) as caught:
            getattr(step.model, name)
        assert ".to(GraphModule)" in caught.value.__notes__[0]


def test_a_block_lets_go_of_modules_that_are_removed() -> None:
    step = infer(net())
    step.model.head = nn.Linear(2, 2)
    kept = weakref.ref(step.model.head.to(nn.Module))
    del step.model.head
    assert len(list(step.model.children())) == len(step.model)
    gc.collect()
    assert kept() is None
    assert len(step.model[0:1]) == 1  # a slice is a module of its own
    assert step.model[0] is step.model[0]


def test_a_result_returned_twice_is_one_tensor() -> None:
    class Twice(nn.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.model = net()

        def build(self, x):
            y = self.model(x)
            return y, y

    first, second = Twice()(batches(1)[0])
    assert first is second
