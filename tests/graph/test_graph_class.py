"""What a user writes: Graph subclasses, blocks, containers, lazy modules, and graphs without a class."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import monograph as mg
from tests.support import assert_same


def infer(module: nn.Module, function: Any = None) -> mg.Graph:
    """A Graph that holds `module` as `model` and returns `function(self.model, x)`."""

    class Infer(mg.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.model = module

        def build(self, x):
            return function(self.model, x) if function is not None else self.model(x)

    return Infer()


# --- shapes without data -------------------------------------------------------------------------------------------


def lazy_model() -> nn.Module:
    return nn.Sequential(nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d(), nn.ReLU(), nn.Flatten(), nn.LazyLinear(3))


def test_lazy_modules_get_their_shapes_from_specs_alone():
    torch.manual_seed(0)
    eager = lazy_model()
    x, y = torch.randn(5, 2, 6, 6), torch.randint(0, 3, (5,))
    torch.manual_seed(1)
    eager_optimizer = torch.optim.Adam(eager.parameters())
    eager(x)
    eager.load_state_dict(eager.state_dict())
    eager[1].reset_running_stats()

    model = lazy_model()
    torch.manual_seed(1)
    optimizer = torch.optim.Adam(model.parameters())
    step = mg.train_graph(model, nn.CrossEntropyLoss(), optimizer)
    step.compile(mg.spec(x.shape), mg.spec(y.shape, torch.int64))
    assert_same(dict(eager.state_dict()), dict(model.state_dict()))
    for _ in range(3):
        eager_optimizer.zero_grad()
        loss = nn.functional.cross_entropy(eager(x), y)
        loss.backward()
        eager_optimizer.step()
        assert_same(loss.detach(), step(x, y).detach())
        assert_same(dict(eager.state_dict()), dict(model.state_dict()))
    assert len(step.builds) == 1


def test_a_first_step_draws_the_parameters_of_lazy_modules_and_then_its_own_numbers():
    results = []
    for captured in (False, True):
        torch.manual_seed(1)
        model = nn.Sequential(nn.LazyLinear(8), nn.Dropout(0.5))
        step = mg.trace(model) if captured else model
        results.append([step(torch.ones(2, 3)).detach() for _ in range(2)] + [torch.get_rng_state()])
    assert_same(*results)


def test_a_lazy_module_that_is_not_reached_is_named():
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.LazyLinear(3), nn.LazyLinear(3)

        def forward(self, x):
            return self.used(x)

    model = Half()
    step = mg.train_graph(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(mg.UnsupportedTensorError, match=r"model\.unused is a lazy module"):
        step(torch.ones(2, 4), torch.zeros(2, 3))


def test_parameters_may_be_initialised_after_compile():
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    step = mg.train_graph(model, nn.CrossEntropyLoss(), torch.optim.AdamW(model.parameters()))
    step.compile(mg.spec((6, 4)), mg.spec((6,), torch.int64))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-1, 1)
    eager = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(eager.parameters())
    x, y = torch.randn(6, 4), torch.randint(0, 3, (6,))
    for _ in range(3):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(eager(x), y)
        loss.backward()
        optimizer.step()
        assert_same(loss.detach(), step(x, y).detach())
    assert len(step.builds) == 1
    assert step.is_compiled


def test_compile_changes_nothing():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout())
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    infer(model).compile(mg.spec((6, 4)))
    assert_same(dict(before), dict(model.state_dict()))
    assert_same(random, torch.get_rng_state())


# --- blocks and containers -----------------------------------------------------------------------------------------


def test_a_block_behaves_as_its_module():
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    graph = infer(model)
    assert isinstance(graph.model, nn.Sequential)
    assert isinstance(graph.model[0], nn.Linear)
    assert graph.model.to(nn.Module) is model
    assert graph.model[0].to(nn.Module) is model[0]
    view = graph.model[0].to(mg.GraphModule)
    assert (view.name, view.module) == ("model.0", model[0])
    assert graph.model.to(torch.float64) is graph.model
    assert model[0].weight.dtype is torch.float64
    assert len(graph.model) == 2
    assert [type(layer.to(nn.Module)) for layer in graph.model] == [nn.Linear, nn.ReLU]
    assert list(graph.model.state_dict()) == list(model.state_dict())
    graph.model.note = 7
    assert model.note == 7
    del graph.model.note
    assert not hasattr(model, "note")


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = {"scale": 3.0}
        self.name = "attention"
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return self.inner(x) * self.config["scale"]


class Scaling:
    def scaled(self, x):
        return x * self.factor  # the class that mixes this in has it


class Mixed(Scaling, nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return self.scaled(x)


class Containers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.by_name = nn.ModuleDict({"a": nn.Tanh(), "b": nn.Linear(4, 4)})
        self.scales = nn.ParameterList(nn.Parameter(torch.full((4,), float(i))) for i in range(1, 3))
        self.shifts = nn.ParameterDict({"x": nn.Parameter(torch.ones(4))})

    def forward(self, x):
        for layer in self.layers[1:]:
            x = layer(x)
        x = self.by_name["b"](self.by_name["a"](x))
        return x * self.scales[0] * self.scales[1] + self.shifts["x"]


def replaced_forward() -> nn.Module:
    model = nn.Linear(4, 4)
    model.forward = lambda x: nn.functional.linear(x, model.weight).relu()
    return model


CASES = {
    "attributes called config and name": (Attention, None),
    "mixin": (Mixed, None),
    "containers": (Containers, None),
    "replaced forward": (replaced_forward, None),
    "slice in build": (
        lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)),
        lambda m, x: m[:2](x),
    ),
    "children in build": (Containers, lambda m, x: m.by_name["b"](m.layers[0](x)) + m.scales[1]),
    "loop in build": (Containers, lambda m, x: sum(layer(x) for layer in m.layers)),
    "method of the module": (Mixed, lambda m, x: m.scaled(x)),
    "attribute of the module": (Attention, lambda m, x: m.inner(x) * m.config["scale"]),
}


@pytest.mark.every_case
@pytest.mark.parametrize("name", CASES)
def test_modules_of_all_kinds(name):
    make, function = CASES[name]
    torch.manual_seed(0)
    model = make()
    graph, x = infer(model, function), torch.randn(3, 4)
    expected = function(model, x) if function is not None else model(x)
    for _ in range(2):
        assert_same(expected.detach(), graph(x).detach())
    assert len(graph.builds) == 1


def test_a_module_attribute_may_be_called_as_graph_members_are():
    graph = infer(Attention())
    assert graph.model.config == {"scale": 3.0}
    assert graph.model.name == "attention"
    assert graph.name.startswith("Infer_")
    with pytest.raises(mg.DefinitionError, match="'config' is a property of Graph"):
        graph.config = nn.Linear(1, 1)


def test_names_count_by_class():
    class First(mg.Graph):
        def build(self, x):
            return x

    class Second(First):
        pass

    assert [First().name, First().name, Second().name] == ["First_0", "First_1", "Second_0"]


# --- without a class -------------------------------------------------------------------------------------------------


def test_trace_holds_the_modules_that_a_function_reaches():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    counterpart = copy.deepcopy(model)

    @mg.trace
    def forward(x):
        return model(x).relu()

    x = torch.randn(5, 4)
    for _ in range(3):
        assert_same(counterpart(x).relu().detach(), forward(x).detach())
        assert_same(dict(counterpart.state_dict()), dict(model.state_dict()))
    model.eval()
    counterpart.eval()
    assert_same(counterpart(x).relu().detach(), forward(x).detach())
    assert len(forward.builds) == 2


def test_trace_of_a_whole_training_step():
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    counterpart = copy.deepcopy(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    twin_optimizer = torch.optim.Adam(counterpart.parameters(), lr=0.1)

    @mg.trace
    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    x = torch.randn(5, 4)
    for _ in range(4):
        twin_optimizer.zero_grad()
        loss = counterpart(x).square().mean()
        loss.backward()
        twin_optimizer.step()
        assert_same(loss.detach(), step(x).detach())
    assert_same(dict(counterpart.state_dict()), dict(model.state_dict()))
    assert len(step.builds) == 1


def test_trace_of_a_module_and_of_a_method():
    model = Attention()
    x = torch.randn(2, 4)
    assert_same(model(x).detach(), mg.trace(model)(x).detach())
    assert_same(model(x).detach(), mg.trace(model.forward)(x).detach())
    with pytest.raises(mg.SignatureError, match="does not fit"):
        mg.trace(model.forward)(x, x)
    with pytest.raises(mg.DefinitionError, match="takes a function"):
        mg.trace(3)


def test_a_graph_of_a_module_calls_its_arguments_as_forward_does():
    class Scaled(nn.Module):
        def forward(self, points, scale=2.0):
            return points * scale

    step = mg.trace(Scaled())
    assert_same(step(torch.ones(2)), torch.full((2,), 2.0))
    assert_same(step(points=torch.ones(3)), torch.full((3,), 2.0))
    assert "argument points is a tensor (3,)" in step.builds[1].reason
    with pytest.raises(mg.SignatureError, match=r"does not fit build\(points, scale=2.0\)"):
        step(torch.ones(2), 2.0, None)
    model = Scaled()
    model.register_forward_pre_hook(lambda module, args: (args[0][0], args[0][1]))
    assert_same(mg.trace(model)((torch.ones(2), 4.0)), torch.full((2,), 4.0))


def test_all_names_of_attributes_but_one_are_the_users():
    class Own(mg.Graph):
        _counter = 5

        def __init__(self) -> None:
            super().__init__()
            self._name, self._version, self._store, self._cache = "mine", 3, None, {}

        def build(self, x):
            return x * self._version + self._counter

    step = Own()
    assert step.name == "Own_0"
    assert [name for name in vars(step) if name not in ("_name", "_version", "_store", "_cache")] == [
        "_monograph"
    ]
    assert step(torch.ones(2)).tolist() == [8.0, 8.0]
    step._version = 4
    assert step(torch.ones(2)).tolist() == [9.0, 9.0]
    assert (copy.deepcopy(step)._name, len(step.builds)) == ("mine", 2)


def test_train_graph_takes_several_inputs():
    class Add(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 2)

        def forward(self, a, b):
            return self.inner(a + b)

    model = Add()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    step = mg.train_graph(model, nn.MSELoss(), optimizer, scheduler)
    a = torch.randn(3, 4)
    first = step(a, a, torch.zeros(3, 2))
    assert step(a, a, torch.zeros(3, 2)) < first
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.001)


def test_trace_takes_a_function_with_an_argument_named_self():
    assert mg.trace(lambda self, x: x * self)(3, torch.ones(2)).tolist() == [3.0, 3.0]
    assert mg.trace(lambda _graph, self_: _graph + self_)(torch.ones(2), torch.ones(2)).tolist() == [2.0, 2.0]


def test_trace_takes_functions_made_in_c():
    x = torch.ones(2)
    assert torch.equal(mg.trace(torch.add)(x, x, alpha=2), torch.full((2,), 3.0))


def test_a_module_counted_from_the_end_is_the_same_block():
    step = mg.train_graph(
        model := nn.Sequential(nn.Linear(3, 2), nn.Tanh()),
        nn.MSELoss(),
        torch.optim.SGD(model.parameters(), lr=0.1),
    )
    assert step.model[-1] is step.model[1]
    assert step.model[-2].to(mg.GraphModule).name == "model.0"


def test_a_scheduler_has_one_of_two_names():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    graph = mg.train_graph(model, nn.MSELoss(), optimizer, lr_scheduler=scheduler)
    graph(torch.ones(2, 2), torch.ones(2, 1))
    assert optimizer.param_groups[0]["lr"] == 0.5
    with pytest.raises(mg.DefinitionError, match="two names of one argument"):
        mg.train_graph(model, nn.MSELoss(), optimizer, scheduler, lr_scheduler=scheduler)
    with pytest.raises(mg.DefinitionError, match="two names of one argument"):
        mg.Graph().add_optimizer(optimizer, lr_sch=scheduler, lr_scheduler=scheduler)


def test_add_optimizer_takes_either_name_and_returns_the_optimizer():
    model = nn.Linear(2, 1)

    class Step(mg.Graph):
        def __init__(self, **scheduler):
            super().__init__()
            self.model = model
            self.returned = self.add_optimizer(optimizer, manual=True, **scheduler)

        def build(self, x):
            self.model(x).sum().backward()
            self.returned.step()

    for name in ("lr_sch", "lr_scheduler"):
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        step = Step(**{name: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)})
        assert step.returned is optimizer
        step(torch.ones(2, 2))
        step(torch.ones(2, 2))
        assert optimizer.param_groups[0]["lr"] == 0.25


@pytest.mark.parametrize("name", ["lr_sch", "lr_scheduler"])
@pytest.mark.parametrize("by", ["add_optimizer", "train_graph"])
def test_errors_say_the_name_by_which_a_scheduler_was_given(name, by):
    schedulers, model = torch.optim.lr_scheduler, nn.Linear(2, 1)
    optimizer, other = (torch.optim.SGD(model.parameters(), lr=1.0) for _ in range(2))

    class Around:
        def __init__(self):
            self.inside = schedulers.StepLR(optimizer, 1)

    def added(scheduler):
        if by == "add_optimizer":
            mg.Graph().add_optimizer(optimizer, **{name: scheduler})
        else:
            mg.train_graph(model, nn.MSELoss(), optimizer, **{name: scheduler})

    for scheduler, message in (
        (schedulers.ReduceLROnPlateau(optimizer), f"ReduceLROnPlateau cannot be {name}:"),
        (Around(), f"{name} takes a learning-rate scheduler, got a Around"),
        (schedulers.StepLR(other, 1), f"{name} belongs to another optimizer"),
    ):
        with pytest.raises(mg.OptimizerError, match=message) as caught:
            added(scheduler)
        assert f"{name}=scheduler.inside" in caught.value.hint or not isinstance(scheduler, Around)


def test_train_graph_returns_what_a_function_makes_of_its_predictions():
    def rights(predictions, target):
        return {"logits": predictions, "right": predictions.argmax(1) == target}

    def make():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(), nn.Linear(8, 3))
        return model, torch.optim.AdamW(model.parameters())

    x, y = torch.randn(6, 4), torch.randint(0, 3, (6,))
    model, optimizer = make()
    logits = model(x)
    loss = nn.functional.cross_entropy(logits, y)
    loss.backward()
    optimizer.step()
    expected = loss.detach(), {"logits": logits.detach(), "right": logits.argmax(1) == y}
    captured, optimizer = make()
    step = mg.train_graph(captured, nn.CrossEntropyLoss(), optimizer, outputs=rights)
    assert_same(expected, step(x, y))
    assert_same(dict(model.state_dict()), dict(captured.state_dict()))
    with pytest.raises(mg.DefinitionError, match="outputs is a str; train_graph\\(\\) takes a function"):
        mg.train_graph(captured, nn.CrossEntropyLoss(), optimizer, outputs="accuracy")  # type: ignore[arg-type]
