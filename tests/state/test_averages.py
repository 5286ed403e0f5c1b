"""`add_ema`: averaged weights with the bits of `torch.optim.swa_utils.AveragedModel`, and evaluation with them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import monograph as mg
from monograph.errors import CheckpointError, DefinitionError
from tests.amp.mixed import (
    Classifier,
    Recipe,
    Side,
    Step,
    adamw,
    averaged,
    check,
    growing,
    infinite_at,
    plain_step,
    plain_trail,
    sgd,
    trail,
)
from tests.support import assert_same
from tests.support.small import one_thread  # noqa: F401


def warming(updates: int) -> float:
    return min(0.9, (1 + updates) / (4 + updates))


def from_the_first(updates: int) -> float:
    """Has no value before the first update, which copies."""
    return 1 - 1 / updates


@pytest.mark.one_case
@pytest.mark.parametrize(
    "decay", [0.9, 0.0, 1.0, 0.3, warming, from_the_first], ids=lambda d: getattr(d, "__name__", str(d))
)
def test_an_average_is_torchs(decay: Any) -> None:
    check(Recipe(adamw, decay=decay))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.tied, self.last = nn.Linear(6, 6), nn.Linear(6, 6, bias=False), nn.Linear(6, 3)
        self.tied.weight = self.layer.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.tied(self.layer(x).relu()))


class Frozen(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.first.requires_grad_(False)


class PartlyHalf(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.last.to(torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x)).relu().bfloat16()).float()


def of_dtype(dtype: torch.dtype) -> Recipe:
    def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(x.to(dtype)).float(), y)

    return Recipe(sgd, lambda: Classifier().to(dtype), loss, decay=0.9)


@pytest.mark.one_case
@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(adamw, Tied, decay=0.9),
        Recipe(adamw, Frozen, decay=0.9),
        Recipe(sgd, PartlyHalf, decay=0.9),
        of_dtype(torch.float16),
        of_dtype(torch.bfloat16),
        of_dtype(torch.float64),
    ],
    ids=["tied", "frozen", "two dtypes", "float16", "bfloat16", "float64"],
)
def test_parameters_of_all_kinds(recipe: Recipe) -> None:
    check(recipe)


def test_a_skipped_step_is_an_update_too() -> None:
    check(Recipe(sgd, scaler=growing, amp=torch.bfloat16, decay=warming), infinite_at(0, 3))


def test_two_averages() -> None:
    recipe = Recipe(adamw)
    plain = recipe.side()
    part = AveragedModel(plain.model.first, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    whole = averaged(plain.model, warming)
    expected = []
    torch.manual_seed(1)
    for batch in infinite_at():
        plain_step(recipe, plain, *batch)
        part.update_parameters(plain.model.first)
        whole.update_parameters(plain.model)
        expected.append(copy.deepcopy([part.state_dict(), whole.state_dict()]))
    side = recipe.side()
    step = Step(recipe, side)
    step.add_ema(step.model.first, 0.5)
    step.add_ema(step.model, warming)
    torch.manual_seed(1)
    for index, batch in enumerate(infinite_at()):
        step(*batch)
        assert_same(expected[index], averages(step), f"step {index}")
    assert len(step.builds) == 1
    text = step.show()
    assert "ema/model.first/weight" in text
    assert "ema/model/first.weight" in text


def averages(step: mg.Graph) -> list[Any]:
    return [value for key, value in step.state_dict().items() if key.startswith("ema.")]


# --- state -----------------------------------------------------------------------------------------------------------


def trained(decay: Any = 0.9, steps: int = 3) -> tuple[Side, Step]:
    recipe = Recipe(adamw, decay=decay)
    side = recipe.side()
    step = Step(recipe, side)
    for batch in infinite_at(count=steps):
        step(*batch)
    return side, step


def test_state_goes_to_an_averaged_model_and_back() -> None:
    side, step = trained()
    model = AveragedModel(Classifier(), multi_avg_fn=get_ema_multi_avg_fn(0.9))
    model.load_state_dict(step.state_dict()["ema.model"])
    assert_same(step.state_dict()["ema.model"], model.state_dict())
    model.update_parameters(side.model)
    step.load_state_dict({**step.state_dict(), "ema.model": copy.deepcopy(model.state_dict())})
    assert_same(model.state_dict(), step.state_dict()["ema.model"])
    torch.manual_seed(1)
    step(*infinite_at()[4])
    model.update_parameters(side.model)
    assert_same(model.state_dict(), step.state_dict()["ema.model"])
    assert len(step.builds) == 1


def test_a_state_that_does_not_fit_changes_nothing() -> None:
    _, step = trained()
    before = copy.deepcopy(step.state_dict())
    value = step.state_dict()["ema.model"]
    for wrong in (
        3,
        {key: item for key, item in value.items() if "last" not in key},
        {**value, "module.other": torch.ones(2)},
        {**value, "module.last.bias": torch.ones(4)},
    ):
        with pytest.raises(CheckpointError, match=r"ema\.model"):
            step.load_state_dict({**before, "ema.model": wrong})
        assert_same(before, step.state_dict())


def test_a_copied_graph_has_averages_of_its_own() -> None:
    _, step = trained()
    other = copy.deepcopy(step)
    torch.manual_seed(1)
    step(*infinite_at()[4])
    torch.manual_seed(1)
    other(*infinite_at()[4])
    assert_same(averages(step), averages(other))
    step(*infinite_at()[5])
    assert not torch.equal(averages(step)[0]["module.last.bias"], averages(other)[0]["module.last.bias"])


# --- evaluation ------------------------------------------------------------------------------------------------------


class Evaluate(mg.Graph):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def build(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)


def test_evaluation_sees_averaged_weights_and_training_goes_on() -> None:
    recipe = Recipe(adamw, decay=0.9)
    expected = plain_trail(recipe, infinite_at())
    side = recipe.side()
    step, evaluate = Step(recipe, side), Evaluate(side.model)
    x, parameters = infinite_at()[0][0], list(side.model.parameters())

    def between(index: int, side: Side) -> None:
        random = torch.get_rng_state()
        average = AveragedModel(Classifier())
        average.load_state_dict(expected[index]["average"])
        side.model.eval()
        own = evaluate(x).detach()
        with step.ema_weights():
            assert all(a is b for a, b in zip(parameters, side.model.parameters(), strict=True))
            assert_same(average.module.eval()(x).detach(), side.model(x).detach())
            assert_same(average.module(x).detach(), evaluate(x).detach())
        assert_same(own, evaluate(x).detach())
        side.model.train()
        torch.set_rng_state(random)

    assert_same(expected, trail(side, step, infinite_at(), between), "step")
    assert len(step.builds) == len(evaluate.builds) == 1


@pytest.mark.one_case
@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
def test_weights_come_back_after_an_exception(error: type[BaseException]) -> None:
    side, step = trained()
    step.add_ema(step.model.first, 0.5)
    before = side.state()["model"]
    with pytest.raises(error), step.ema_weights():
        raise error
    assert_same(before, side.state()["model"])
    with step.ema_weights():
        pass
    step(*infinite_at()[3])


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda step: step(*infinite_at()[0]), "is called inside of its ema_weights"),
        (lambda step: step.eager(*infinite_at()[0]), "is called inside of its ema_weights"),
        (lambda step: step.compile(*infinite_at()[0]), "is called inside of its ema_weights"),
        (lambda step: step.ema_weights().__enter__(), "is inside of ema_weights"),
        (lambda step: step.state_dict(), "saves or loads its state inside of"),
        (lambda step: step.load_state_dict({}), "saves or loads its state inside of"),
    ],
    ids=["call", "eager", "compile", "nested", "save", "load"],
)
def test_what_may_not_be_done_inside(use: Callable[[Step], Any], message: str) -> None:
    side, step = trained(steps=1)
    before = side.state()
    with step.ema_weights(), pytest.raises(DefinitionError, match=message):
        use(step)
    assert_same(before, side.state())


# --- mistakes --------------------------------------------------------------------------------------------------------


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("add", "message"),
    [
        (lambda step: step.add_ema(nn.Linear(2, 2)), "the Linear is not held by the graph"),
        (lambda step: step.add_ema(step.model), "model has an average already"),
        (lambda step: step.add_ema(step.model.first, 1.5), r"the decay of the average of model.first is 1.5"),
        (lambda step: step.add_ema(step.model.first, "0.9"), r"is '0.9' at update 0"),
    ],
    ids=["foreign", "twice", "decay", "type"],
)
def test_wrong_averages_are_named(add: Callable[[Step], Any], message: str) -> None:
    recipe = Recipe(adamw, decay=0.9)
    with pytest.raises(DefinitionError, match=message):
        add(Step(recipe, recipe.side()))


def test_a_decay_of_one_keeps_the_first_weights() -> None:
    recipe = Recipe(adamw, decay=1.0)
    step = Step(recipe, recipe.side())
    step(*infinite_at()[0])
    (first,) = copy.deepcopy(averages(step))
    step(*infinite_at()[1])
    (second,) = averages(step)
    names = [f"module.{name}" for name, _ in step.model.named_parameters()]
    assert_same([first[name] for name in names], [second[name] for name in names])


@pytest.mark.one_case
@pytest.mark.parametrize(
    "decay", [lambda n: 2.0 if n == 2 else 0.5, lambda n: torch.tensor(0.5) if n == 2 else 1]
)
def test_a_decay_that_goes_wrong_later_leaves_the_step_undone(decay: Any) -> None:
    recipe = Recipe(adamw, decay=decay)
    side = recipe.side()
    step = Step(recipe, side)
    step(*infinite_at()[0])
    step(*infinite_at()[1])
    before = side.state()
    with pytest.raises(DefinitionError, match="the decay of the average of model"):
        step(*infinite_at()[2])
    assert_same(before, side.state())


def replace_last(side: Side, step: Step) -> None:
    side.model.last = nn.Linear(8, 3)


def replace_parameter(side: Side, step: Step) -> None:
    side.model.norm.weight = nn.Parameter(torch.ones(8, dtype=torch.float64))


def add_parameter(side: Side, step: Step) -> None:
    side.model.register_parameter("extra", nn.Parameter(torch.ones(2)))


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (replace_last, r"model.last was replaced after add_ema"),
        (replace_parameter, r"model.norm.weight is not as it was when the average of model began"),
        (add_parameter, r"model.extra is not as it was when the average of model began"),
    ],
    ids=lambda item: getattr(item, "__name__", ""),
)
def test_a_module_that_changes_under_its_average_is_named(change: Any, message: str) -> None:
    """Without optimizer, which would complain first."""
    side = Recipe(adamw).side()
    step = Averaging(side.model)
    step(infinite_at()[0][0])
    change(side, step)
    with pytest.raises(DefinitionError, match=message):
        step(infinite_at()[0][0])


class Averaging(Evaluate):
    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        for module in (self.model, self.model.norm, self.model.last):
            self.add_ema(module)

    def build(self, x: torch.Tensor) -> torch.Tensor:
        return self.model.first(x)
