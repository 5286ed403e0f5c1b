"""A graph that is written wrongly gives its named error: what happened, at which line of the user's, and what to do."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import monograph as mg
from tests.graph.error_checks import Tagged, check, forward, quantised, sgd, trained
from tests.support import assert_same
from tests.support.steps import graph, linear

# --- how a Graph is written ---------------------------------------------------------------------------------


def test_super_init_is_forgotten():
    class Forgetful(mg.Graph):
        def __init__(self) -> None:
            self.model = linear()  # at: forgotten

        def build(self, x):
            return x

    with pytest.raises(mg.DefinitionError) as caught:
        Forgetful()
    check(caught.value, "Forgetful", "super().__init__()", at="forgotten")
    assert isinstance(caught.value, AttributeError)


@pytest.mark.every_case
@pytest.mark.parametrize(
    "use",
    [
        lambda step: step(torch.ones(1)),
        lambda step: step.compile(torch.ones(1)),
        lambda step: step.add_optimizer(sgd(linear())),
        lambda step: step.model,
    ],
)
def test_super_init_is_forgotten_and_nothing_is_set(use):
    class Forgetful(mg.Graph):
        def __init__(self) -> None:
            pass

        def build(self, x):
            return x

    with pytest.raises(mg.DefinitionError) as caught:
        use(Forgetful())
    check(caught.value, "super().__init__()")


def test_build_is_missing():
    class Empty(mg.Graph):
        pass

    step = Empty()
    with pytest.raises(mg.MissingBuildError) as caught:
        step(torch.ones(1))  # at: no build
    check(caught.value, "Empty", "build()", at="no build")
    assert isinstance(caught.value, NotImplementedError)
    with pytest.raises(mg.MissingBuildError):
        step.compile(torch.ones(1))


@pytest.mark.parametrize(
    ("make", "parts"),
    [
        (lambda: sgd(linear()), ["optimizer", "'thing'", "add_optimizer"]),
        (lambda: torch.ones(2).requires_grad_(), ["tensor", "'thing'", "nn.Module"]),
        (lambda: nn.Parameter(torch.ones(2)), ["tensor", "'thing'", "nn.Module"]),
    ],
)
def test_an_attribute_that_a_graph_cannot_have(make, parts):
    step = graph(forward)
    with pytest.raises(mg.DefinitionError) as caught:
        step.thing = make()  # at: attribute
    check(caught.value, *parts, at="attribute")
    assert not hasattr(step, "thing")


def test_an_attribute_with_the_name_of_a_property():
    step = graph(forward)
    with pytest.raises(mg.DefinitionError) as caught:
        step.training = True
    check(caught.value, "'training'", "property")


def test_an_attribute_that_is_not_there():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = graph(forward).nothing


def test_build_called_directly_warns_and_runs_eagerly():
    step = graph(forward, model=linear())
    with pytest.warns(UserWarning, match=r"build\(\) of .* was called directly"):
        out = step.build(torch.ones(2, 4))
    assert_same(linear()(torch.ones(2, 4)), out)
    assert not step.builds
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(torch.ones(2, 4))
        step.eager(torch.ones(2, 4))


def test_a_graph_inside_the_build_of_another():
    inner = graph(forward, model=linear())

    def build(self, x):
        return self.inner(x)  # at: nested

    outer = graph(build, inner=inner, model=linear())
    with pytest.raises(mg.CaptureError) as caught:
        outer(torch.ones(2, 4))
    check(caught.value, "nested", outer.name, inner.name, at="nested")
    assert_same(linear()(torch.ones(2, 4)), inner(torch.ones(2, 4)).detach())


def test_too_many_builds():
    step = graph(forward, model=linear())
    step.config.max_builds(1)
    step(torch.ones(2, 4))
    with pytest.raises(mg.CaptureError) as caught:
        step(torch.ones(3, 4))  # at: max builds
    check(caught.value, "has 1 build and would need another", "argument x", "max_builds", at="max builds")


@pytest.mark.every_case
@pytest.mark.parametrize(
    "use",
    [
        lambda step: step.config.backend("tpu"),
        lambda step: step.config.max_builds(0),
        lambda step: step.show(),
        lambda step: step.show("nothing"),
    ],
)
def test_a_wrong_setting(use):
    step = graph(forward)
    with pytest.raises(mg.DefinitionError) as caught:
        use(step)
    check(caught.value)


# --- what a graph cannot hold -------------------------------------------------------------------------------


def buffered(make: Callable[[], torch.Tensor]) -> Callable[[], nn.Module]:
    def module() -> nn.Module:
        inner = linear()
        inner.register_buffer("table", make())
        return nn.Sequential(inner)

    return module


def made_in_inference_mode() -> nn.Module:
    with torch.inference_mode():
        return nn.Sequential(linear())


def with_subclass() -> nn.Module:
    model = nn.Sequential(linear())
    model[0].weight = nn.Parameter(torch.ones(3, 4).as_subclass(Tagged))
    return model


def with_subclass_attribute() -> nn.Module:
    model = nn.Sequential(linear())
    model[0].table = torch.ones(3).as_subclass(Tagged)
    return model


UNHELD: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "another subclass": (with_subclass, ["model.0.weight", "Tagged"]),
    "a subclass as an attribute": (with_subclass_attribute, ["model.0.table", "Tagged"]),
    "a quantised buffer": (buffered(quantised), ["model.0.table", "quantised"]),
    "a nested buffer": (
        buffered(lambda: torch.nested.nested_tensor([torch.ones(2, 3)])),
        ["model.0.table", "nested tensor", "a mask"],
    ),
    "a sparse buffer of blocks": (
        buffered(lambda: torch.ones(2, 2).to_sparse_bsr((1, 1))),
        ["model.0.table", "sparse"],
    ),
    "an inference tensor": (made_in_inference_mode, ["model.0.weight", "inference_mode"]),
    "DataParallel": (
        lambda: nn.Sequential(nn.DataParallel(linear())),
        ["model.0", "DataParallel", ".module"],
    ),
    "a TorchScript module": (
        lambda: nn.Sequential(torch.jit.trace(linear(), torch.ones(1, 4))),
        ["model.0", "TorchScript"],
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", UNHELD)
def test_a_module_that_no_graph_holds(name):
    make, parts = UNHELD[name]
    model = make()
    step = graph(trained, model=model)
    parameters = [p for p in model.parameters() if p.is_leaf]
    step.add_optimizer(torch.optim.SGD(parameters, lr=0.1))
    with pytest.raises(mg.UnsupportedTensorError) as caught:
        step(torch.ones(2, 4))  # at: unheld
    check(caught.value, *parts, at="unheld")


def test_a_sparse_embedding_in_inference_is_fine():
    torch.manual_seed(0)
    model = nn.Embedding(3, 2, sparse=True)
    x = torch.tensor([0, 2])
    assert_same(model(x).detach(), graph(forward, model=model)(x).detach())


def test_a_free_tensor_of_a_subclass():
    table = torch.ones(3).as_subclass(Tagged)

    def build(self, x):
        return x + table  # at: free

    with pytest.raises(mg.UnsupportedTensorError) as caught:
        graph(build)(torch.ones(3))
    check(caught.value, "Tagged", at="free")


# --- what build() may not do to state -----------------------------------------------------------------------


class Rebel(nn.Module):
    """Does one forbidden thing in its forward."""

    def __init__(self, deed: Callable[[Any], None]) -> None:
        super().__init__()
        self.fc = linear()
        self.register_buffer("table", torch.ones(3))
        self.deed = deed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.deed(self)  # at: deed
        return self.fc(x) * (1 if self.table is None else self.table)


def replace_parameter(self: Rebel) -> None:
    self.fc.weight = nn.Parameter(torch.ones(3, 4))


def widen_buffer(self: Rebel) -> None:
    self.table = torch.ones(2, 3)


def retype_buffer(self: Rebel) -> None:
    self.table = self.table.double()


def drop_buffer(self: Rebel) -> None:
    self.table = None


def register_later(self: Rebel) -> None:
    self.register_buffer("late", torch.ones(3))


def retype_data(self: Rebel) -> None:
    self.fc.weight.data = self.fc.weight.data.double()


DEEDS: dict[str, tuple[Callable[[Any], None], list[str]]] = {
    "replace a parameter": (replace_parameter, ["model.fc.weight"]),
    "change the shape of a buffer": (widen_buffer, ["model.table", "(2, 3)", "(3,)"]),
    "change the dtype of a buffer": (retype_buffer, ["model.table", "float64", "float32"]),
    "remove a buffer": (drop_buffer, ["model.table"]),
    "register a buffer": (register_later, ["model.late"]),
    "change the dtype of .data": (retype_data, [".data", "float64", "float32"]),
}


@pytest.mark.every_case
@pytest.mark.parametrize("name", DEEDS)
def test_what_build_may_not_do_to_state(name):
    deed, parts = DEEDS[name]
    model = Rebel(deed)
    before = {key: id(value) for key, value in model.state_dict(keep_vars=True).items()}
    step = graph(forward, model=model)
    with torch.no_grad(), pytest.raises(mg.CaptureError) as caught:
        step(torch.ones(2, 4))
    check(caught.value, *parts)
    assert {key: id(value) for key, value in model.state_dict(keep_vars=True).items()} == before
