"""`config.enable_amp`: build() runs under autocast, backward and optimizers outside of it, with eager's bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import monograph as mg
from monograph.errors import DefinitionError
from tests.amp.mixed import (
    Classifier,
    Recipe,
    Step,
    adamw,
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


class Shared(nn.Module):
    """A layer that is called twice, and one tied to it: autocast casts their weight once, and gradients add in half."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.tied, self.last = nn.Linear(6, 6), nn.Linear(6, 6, bias=False), nn.Linear(6, 3)
        self.tied.weight = self.layer.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.tied(self.layer(self.layer(x).relu())))


class SharedInOwnAutocast(Shared):
    """The same where the user's own code turns autocast on."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(x).float()


class Layers(nn.Module):
    """Convolution, attention, normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(1, 4, 3, padding=1), nn.LayerNorm(4)
        self.attention, self.last = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(24, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.conv(x[:, None]).transpose(1, 2)
        h = self.norm(h + self.attention(h, h, h)[0])
        return self.last(h.flatten(1))


class Nested(Classifier):
    """The user's own blocks inside: off, and another dtype."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        with torch.autocast("cpu", enabled=False):
            h = self.norm(h.float())
        with torch.autocast("cpu", dtype=torch.float16):
            h = self.last(h.relu())
        return self.drop(h)


class WithoutGradients(Classifier):
    """A forward without gradients comes first: its casts are in the cache."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            target = self.last(self.first(x))
        return super().forward(x) + target.float()


class Checkpointed(Shared):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(checkpoint(lambda x: F.dropout(self.layer(x), 0.3).relu(), x, use_reentrant=False))


class Sine(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * ctx.saved_tensors[0].cos()


class WithFunction(Classifier):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(Sine.apply(self.first(x)))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.last = nn.GRUCell(6, 4), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.cell(x, self.cell(x)))


MODELS = [Classifier, Shared, Layers, Nested, WithoutGradients, Checkpointed, WithFunction, Recurrent]


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("model", "dtype"),
    [*((model, torch.bfloat16) for model in MODELS), *((model, torch.float16) for model in MODELS[:4])],
    ids=lambda item: getattr(item, "__name__", str(item)),
)
def test_a_model_trains_under_autocast(model: Any, dtype: torch.dtype) -> None:
    check(Recipe(adamw, model, amp=dtype, scaler=growing), infinite_at(2, count=4))


def test_casts_are_shared_in_the_users_own_autocast() -> None:
    check(Recipe(adamw, SharedInOwnAutocast))


def in_half(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out = model(x)
    assert out.dtype in (torch.float16, torch.bfloat16)
    return (out * F.one_hot(y, 3).to(out.dtype)).sum()


@pytest.mark.one_case
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_loss_in_half_precision(dtype: torch.dtype) -> None:
    check(Recipe(sgd, loss=in_half, amp=dtype, scaler=growing), infinite_at(1, count=4))


def test_backward_is_outside_of_autocast() -> None:
    """A hook computes with the matrices of float32 that it gets."""

    def hooked() -> nn.Module:
        model = Classifier()

        def hook(gradient: torch.Tensor) -> torch.Tensor:
            product = gradient @ gradient.T @ gradient
            assert product.dtype is torch.float32
            return gradient + 0.01 * product

        model.first.weight.register_hook(hook)
        return model

    check(Recipe(sgd, hooked, amp=torch.bfloat16), infinite_at(count=3))


@pytest.mark.long
def test_settings_change_between_steps() -> None:
    """Each is a build with a reason; what was there before is found again."""
    dtypes = [torch.bfloat16, torch.float16, None, torch.bfloat16]
    recipes = [Recipe(adamw, amp=dtype) for dtype in dtypes]
    plain, side = recipes[0].side(), recipes[0].side()
    step = Step(recipes[0], side)
    torch.manual_seed(1)
    expected = []
    for recipe, batch in zip(recipes, infinite_at(), strict=False):
        loss = plain_step(recipe, plain, *batch)
        expected.append({"loss": loss.detach().clone(), **plain.state()})
    torch.manual_seed(1)
    for index, (dtype, batch) in enumerate(zip(dtypes, infinite_at(), strict=False)):
        step.config.enable_amp(dtype is not None, dtype=dtype or torch.bfloat16)
        assert_same(expected[index], {"loss": step(*batch).detach(), **side.state()}, f"step {index}")
    assert len(step.builds) == 3
    assert "amp=torch.float16" in step.builds[1].reason
    assert "amp=None" in step.builds[2].reason


class Infer(mg.Graph):
    def __init__(self, model: nn.Module | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.model = model
        self.config.enable_amp(dtype=dtype)

    def build(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x) if self.model is not None else x @ x.T


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_graph_without_optimizer(dtype: torch.dtype) -> None:
    x, model = infinite_at()[0][0], Classifier().eval()
    graph = Infer(model, dtype)
    with torch.autocast("cpu", dtype=dtype):
        expected = model(x)
    assert expected.dtype == dtype
    assert_same(expected.detach(), graph(x).detach())
    assert_same(expected.detach(), graph.eager(x).detach())
    with torch.autocast("cpu", dtype=dtype):
        assert_same(x @ x.T, Infer(None, dtype)(x))


def test_autocast_around_the_call_makes_no_difference_and_stays() -> None:
    recipe = Recipe(adamw, Shared, amp=torch.bfloat16)
    expected = plain_trail(recipe, infinite_at())
    side = recipe.side()
    step = Step(recipe, side)
    with torch.autocast("cpu", dtype=torch.float16):
        made = trail(side, step, infinite_at())
        assert torch.get_autocast_dtype("cpu") == torch.float16
        assert torch.is_autocast_enabled("cpu")
        assert torch.is_autocast_cache_enabled()
    assert not torch.is_autocast_enabled("cpu")
    assert_same(expected, made, "step")


@pytest.mark.long
def test_a_cache_of_casts_that_is_switched_off_is_noticed() -> None:
    """Each use of a weight is cast apart then, and gradients add in float32."""
    recipe = Recipe(adamw, Shared, amp=torch.bfloat16)

    def switch(index: int, _side: Any) -> None:
        torch.set_autocast_cache_enabled(index != 1)

    try:
        step = check(recipe, infinite_at(count=5), switch, builds=2)
    finally:
        torch.set_autocast_cache_enabled(True)
    assert "autocast's cache of weights changed from True to False" in step.builds[1].reason


def test_a_graph_without_parameters_casts_on_the_cpu() -> None:
    step = mg.trace(torch.mm)
    step.config.enable_amp(dtype=torch.bfloat16)
    x = torch.randn(3, 3)
    assert torch.equal(step(x, x), x.bfloat16() @ x.bfloat16())


def test_only_half_precision_is_accepted() -> None:
    with pytest.raises(DefinitionError, match="enable_amp") as raised:
        Infer(None, torch.float32)
    assert "bfloat16" in raised.value.hint


def test_a_dtype_as_the_first_argument_is_refused() -> None:
    model = nn.Linear(2, 2)
    step = mg.train_graph(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(mg.DefinitionError, match="first argument"):
        step.config.enable_amp(torch.float16)
