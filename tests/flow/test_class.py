"""The class itself: names, attributes, what a module becomes inside of a graph, what the text shows."""

from __future__ import annotations

import gc
import re
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch.nn import functional

import monograph.flow as flow
import monograph.flow.nn as nn
from monograph.errors import CaptureError, DefinitionError, MissingBuildError, OptimizerError
from monograph.flow.nn.graph import GraphModule
from tests.flow.steps import TrainStep, batches, check_told, graph, loss_of, net, plain, sgd, trained, weights
from tests.support import assert_same


def infer(model: Any) -> nn.Graph:
    return graph(lambda self, x: self.model(x), model=model)


# --- names and construction --------------------------------------------------------------------------------------------


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


# --- attributes ------------------------------------------------------------------------------------------------------


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


# --- the rest of the surface -----------------------------------------------------------------------------------------


def test_compile_without_running() -> None:
    model = net()
    before = weights(model)
    step = TrainStep(model, sgd(model))
    step._compile(batches(1)[0])
    assert step.is_compiled
    assert_same(before, weights(model))
    step._compile(batches(1)[0])  # nothing new to compile
    assert len(step.builds) == 1


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
        config.enable_straighten_algorithm,
        config.enable_compress_memory,
        config.enable_choose_best_memory_allocation,
        config.enable_auto_memory,
        config.enable_zero,
    ):
        with pytest.warns(UserWarning, match=f"^{act.__name__} has no effect: "):
            act()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config.enable_zero(False)
        config.enable_straighten_algorithm("Disable")
        config.enable_auto_memory("Disable")
        config.set_outputs_buffer_size(3)


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
        (lambda config: config.enable_auto_parallel(), "one process", "leave it out"),
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


# --- a module inside of a graph ----------------------------------------------------------------------------------------


def test_a_module_is_its_own_kind_inside_and_outside_of_build() -> None:
    seen = []

    def build(self, x):
        seen.append((isinstance(self.model, nn.Sequential), isinstance(self.model[0], nn.Linear)))
        return self.model(x)

    step = graph(build, model=net())
    step(batches(1)[0])
    assert seen == [(True, True)]
    assert isinstance(step.model, nn.Sequential)
    assert isinstance(step.model[0], nn.Linear)


def test_to_gives_the_module_or_the_graphs_view() -> None:
    model = net()
    step = infer(model)
    assert step.model.to(nn.Module) is model
    assert step.model[0].to(nn.Module) is model[0]
    view = step.model[2].to(GraphModule)
    assert view is step.model[2].to(nn.graph.GraphModule)
    assert (view.name, view.name_prefix, view.type, view.module) == ("model.2", "model.", "MODULE", model[2])
    assert (step.model.to(GraphModule).name, step.model.to(GraphModule).name_prefix) == ("model", "")
    assert step.model.to(torch.float64) is step.model
    assert model[0].weight.dtype is torch.float64


def test_the_graphs_view_of_what_only_oneflow_has() -> None:
    view = infer(net()).model.to(GraphModule)
    with pytest.raises(AttributeError) as caught:
        _ = view.scope
    check_told(caught.value, "GraphModule.scope is not here", hint="graph.show()")
    with pytest.raises(AttributeError, match="'GraphModule' object has no attribute 'nothing'"):
        _ = view.nothing


def test_a_block_has_the_modules_own_parameters_and_state() -> None:
    model = net()
    step = infer(model)
    assert [*map(id, step.model.parameters())] == [*map(id, model.parameters())]
    assert list(step.model.modules()) == list(model.modules())  # a block equals its module
    assert [path for path, _ in step.model.named_modules()] == [path for path, _ in model.named_modules()]
    assert [*dict(step.model.named_modules(prefix="at"))] == [*dict(model.named_modules(prefix="at"))]
    assert list(step.model.children()) == [child for _, child in step.model.named_children()] == [*model]
    assert_same(dict(model.state_dict()), dict(step.model.state_dict()))  # tensors, no wrappers
    loaded = {name: tensor + 1 for name, tensor in weights(model).items()}
    step.model.load_state_dict(loaded)
    assert_same(loaded, weights(model))


def test_a_block_takes_new_members() -> None:
    step = infer(net())
    step.model.add_module("3", nn.Linear(2, 1))
    step.model.register_parameter("extra", nn.Parameter(torch.ones(1)))
    step.model.register_buffer("count", torch.zeros(1))
    assert step(batches(1)[0]).shape == (4, 1)
    assert {"3.weight", "extra", "count"} <= set(step.model.state_dict())


def test_methods_and_plain_attributes_come_from_the_module() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.factor = nn.Linear(3, 2), 3.0

        def scaled(self, x):
            return self.layer(x) * self.factor

    model, x = Model(), batches(1)[0]
    step = graph(lambda self, x: self.model.scaled(x), model=model)
    assert_same(model.scaled(x).detach(), step(x).detach())
    assert step.model.factor == 3.0


@pytest.mark.parametrize("nested", [True, False], ids=["in a module", "as attributes"])
def test_containers(nested: bool) -> None:
    def parts() -> dict[str, Any]:
        torch.manual_seed(3)
        return {
            "listed": nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)]),
            "named": nn.ModuleDict({"first": nn.Linear(3, 3)}),
            "numbers": nn.ParameterList([nn.Parameter(torch.ones(3)), nn.Parameter(torch.zeros(3))]),
            "keyed": nn.ParameterDict({"shift": nn.Parameter(torch.ones(3))}),
            "chain": nn.Sequential(nn.Linear(3, 2), nn.Tanh()),
        }

    def forward(self, x):
        for layer in self.listed:
            x = layer(x)
        for name in self.named:
            x = self.named[name](x)
        x = x * self.numbers[0] + self.numbers[1] + self.keyed["shift"]
        return self.chain[-1](self.chain[0](x)) * len(self.listed)

    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, part in parts().items():
                setattr(self, name, part)

    Holder.forward = forward
    reference, model = Holder(), Holder()

    def build(self, x):
        loss = loss_of(self.model if nested else lambda value: forward(self, value), x)
        loss.backward()
        return loss

    held = {"model": model} if nested else dict(model.named_children())
    step = graph(build, sgd(model, momentum=0.9), **held)
    losses = plain(reference, sgd(reference, momentum=0.9), batches(3))
    assert_same(losses, trained(step, batches(3)))
    assert_same(weights(reference), weights(model))


def test_a_mixin_may_bring_build_or_forward() -> None:
    class Forward:
        def forward(self, x):
            return self.layer(x) * 2

    class Model(Forward, nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

    class Build:
        def hold(self, model):
            self.model = model

        def build(self, x):
            return self.model(x) + 1

    class Both(Build, nn.Graph):
        def __init__(self, model) -> None:
            super().__init__()
            self.hold(model)

    model, x = Model(), batches(1)[0]
    assert_same((model.layer(x) * 2 + 1).detach(), Both(model)(x).detach())


@pytest.mark.parametrize("bases", [(nn.Graph, torch.nn.Module), (torch.nn.Linear, nn.Graph)])
def test_a_graph_is_no_module(bases: Any) -> None:
    with pytest.raises(DefinitionError) as caught:
        type("Mixed", bases, {})
    check_told(caught.value, "Mixed is a Graph and an nn.Module", hint="self.model = model")


def test_tied_parameters_are_updated_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.into, self.out = nn.Linear(3, 3), nn.Linear(3, 3)
            self.out.weight = self.into.weight
            self.again = self.into
            self.head = nn.Linear(3, 2)

        def forward(self, x):
            return self.head(self.again(self.out(self.into(x)).tanh()))

    reference, model = Tied(), Tied()
    plain(reference, sgd(reference, momentum=0.9), batches(3))
    step = TrainStep(model, sgd(model, momentum=0.9))
    trained(step, batches(3))
    assert_same(weights(reference), weights(model))
    assert [key for key in step.state_dict() if key.startswith("model.") and "weight" in key] == [
        "model.into.weight-momentum",
        "model.head.weight-momentum",
    ]


def test_parameters_shared_by_two_graphs() -> None:
    model, x = net(), batches(1)[0]
    train, evaluate = TrainStep(model, sgd(model)), infer(model)
    first = evaluate(x).detach().clone()
    train(x)
    assert_same(model(x).detach(), evaluate(x).detach())
    assert not torch.equal(first, evaluate(x))


def test_a_replaced_forward_is_the_one_that_runs() -> None:
    model, x = nn.Linear(3, 2), batches(1)[0]
    model.forward = lambda value: functional.linear(value, model.weight) * 3
    step = infer(model)
    assert_same((functional.linear(x, model.weight) * 3).detach(), step(x).detach())
    model.forward = lambda value: functional.linear(value, model.weight)
    assert_same(functional.linear(x, model.weight).detach(), step(x).detach())


def test_a_module_that_is_not_an_attribute_runs_but_does_not_train() -> None:
    other, x = net(), batches(1)[0]
    step = graph(lambda self, x: other(x))
    assert_same(other(x).detach(), step(x).detach())
    with torch.no_grad():
        other[2].bias += 1
    assert_same(other(x).detach(), step(x).detach())

    def build(self, x):
        loss = loss_of(other, x)
        loss.backward()
        return loss

    with pytest.raises(OptimizerError) as caught:
        graph(build, sgd(other))(x)
    check_told(caught.value, "shape (4, 3)", "that no module of the graph holds", hint="self.model = model")


def test_tensors_from_outside_are_read_at_each_call() -> None:
    free = torch.ones(2)
    model, x = net(), batches(1)[0]
    step = graph(lambda self, x: self.model(x) * free, model=model)
    assert_same(model(x).detach(), step(x).detach())
    free.fill_(3.0)
    assert_same((model(x) * 3.0).detach(), step(x).detach())
    assert len(step.builds) == 1


def test_graphs_cannot_be_nested() -> None:
    inner = infer(net())
    outer = graph(lambda self, x: inner(x))
    with pytest.raises(CaptureError) as caught:
        outer(batches(1)[0])
    check_told(caught.value, f"{inner.name} is called inside build() of {outer.name}", hint="call the module")
    inner(batches(1)[0])  # alone it works


# --- what is printed ---------------------------------------------------------------------------------------------------


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
