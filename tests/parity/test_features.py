"""What people do to modules and gradients: hooks, clipping, parametrizations, checkpointing, autocast, freezing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.support.case import Case, check, sgd


def batch(g: torch.Generator) -> tuple[torch.Tensor, ...]:
    return torch.randn(6, 4, generator=g), torch.randn(6, 2, generator=g)


def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(model(x), y)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


# --- hooks -----------------------------------------------------------------------------------------------------------


def scaled_gradients() -> nn.Module:
    model = mlp()
    model[0].weight.register_hook(lambda gradient: gradient * 0.5)
    model[0].weight.register_hook(lambda gradient: gradient + 0.01)
    model[2].bias.register_hook(lambda gradient: None)
    return model


def clipped_gradients() -> nn.Module:
    model = mlp()

    def clip(parameter: torch.Tensor) -> None:
        parameter.grad.clamp_(-0.02, 0.02)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(clip)
    return model


def hooked_modules() -> nn.Module:
    model = mlp()
    model[0].register_forward_pre_hook(lambda module, args: (args[0] * 1.5,))
    model[0].register_forward_hook(lambda module, args, output: output + args[0].mean())
    model[1].register_full_backward_hook(lambda module, before, after: (before[0] * 0.7,))
    model[2].register_full_backward_pre_hook(lambda module, after: (after[0] + 0.001,))
    model[2].register_forward_pre_hook(lambda module, args, kwargs: (args, kwargs), with_kwargs=True)
    return model


class HookedActivation(nn.Module):
    """A hook on a value of the forward, and retain_grad on another."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        h.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        return self.b(h.relu())


# --- clipping and penalties ------------------------------------------------------------------------------------------


def clip_norm(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def clip_norm_foreach_off(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type=1.0, foreach=False)


def clip_value(model: nn.Module) -> None:
    nn.utils.clip_grad_value_(model.parameters(), 0.01)


def centralise(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.grad = parameter.grad - parameter.grad.mean(dim=1, keepdim=True)
        parameter.grad.add_(parameter.detach(), alpha=0.01)


def drop_gradient(model: nn.Module) -> None:
    model[0].bias.grad = None


# --- parametrizations ------------------------------------------------------------------------------------------------


def weight_norm() -> nn.Module:
    model = mlp()
    nn.utils.parametrizations.weight_norm(model[0])
    nn.utils.parametrizations.weight_norm(model[2], dim=1)
    return model


def spectral_norm() -> nn.Module:
    model = mlp()
    nn.utils.parametrizations.spectral_norm(model[0])
    return model


def orthogonal() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    nn.utils.parametrizations.orthogonal(model[0], orthogonal_map="cayley")
    return model


def old_spectral_norm() -> nn.Module:
    return nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, 8)), nn.Tanh(), nn.Linear(8, 2))


# --- checkpointing ---------------------------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.first = nn.Linear(4, 8)
        self.block = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.ReLU(), nn.Dropout(0.2))
        self.last = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(self.block, x, use_reentrant=self.use_reentrant)
        return self.last(F.dropout(x, 0.1, self.training))


# --- freezing --------------------------------------------------------------------------------------------------------


def freeze_and_thaw(model: nn.Module, index: int) -> None:
    if index in (1, 3):
        model[0].requires_grad_(index == 3)


def freeze_and_stay(model: nn.Module, index: int) -> None:
    if index == 1:
        model[2].weight.requires_grad_(False)


def switch_modes(model: nn.Module, index: int) -> None:
    model.train(index != 1)


def dropout_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))


# --- state in forward ------------------------------------------------------------------------------------------------


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.relu_(self.a(x))
        h = h.clone()
        h[:, 0] = 0.0
        h[1:3].mul_(2.0)
        h.add_(1.0)
        return F.leaky_relu(self.b(h), inplace=True)


class StridedNoise(nn.Module):
    """Random ops that fill tensors in place, through strides of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        fills = (
            lambda t: t.bernoulli_(0.5),
            lambda t: t.normal_(),
            lambda t: t.uniform_(-1, 1),
            lambda t: t.exponential_(),
            lambda t: t.random_(5),
            lambda t: t.bernoulli_(torch.full_like(t, 0.3)),
        )
        for fill in fills:
            noise = torch.zeros(8, 4, 6)
            fill(noise.permute(2, 0, 1))
            fill(noise.transpose(0, 2)[:, ::2])
            fill(noise[1:3])
            x = x + noise.mean(0).t() + F.dropout(torch.ones(4, 6).t(), 0.5)
        return self.net(x)


class Counting(nn.Module):
    """A buffer that forward re-assigns, and one that it changes in place; both take part in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        self.register_buffer("c", torch.tensor(0))
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("hidden", torch.ones(()), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.c = self.c + 1
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
            self.hidden.copy_(self.hidden * 1.5)
        return self.net(x - self.mean) / self.c + self.hidden


class Carrying(nn.Module):
    """A plain tensor attribute that is carried over the steps; `last` does not exist before the first."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.RNNCell(4, 5), nn.Linear(5, 2)
        self.h = torch.zeros(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.cell(x, self.h)
        self.h = h.detach()
        self.last = x.mean(dim=0)
        return self.head(h)


class Momentum(nn.Module):
    """A target network that follows in place under no_grad, as in BYOL; its parameters take no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.target = mlp(), mlp()
        self.target.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for slow, fast in zip(self.target.parameters(), self.online.parameters(), strict=True):
                slow.lerp_(fast, 0.1)
            wanted = self.target(x)
        return self.online(x) - wanted


class Condition(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: self.a(x).relu(), lambda x: self.b(x).sin(), (x,))


# --- dtypes and layouts ----------------------------------------------------------------------------------------------


class Autocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv1d(1, 4, 3), nn.LayerNorm(2), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = self.norm(self.conv(x[:, None]).relu())
            return self.head(h.flatten(1))


def autocast_all(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return F.cross_entropy(model(x), y.argmax(1))


class Spectral(nn.Module):
    """Complex parameters: multiplication in Fourier space."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3, dtype=torch.cfloat))
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        spectrum = torch.fft.rfft(x, dim=1)
        mixed = torch.einsum("bk,ck->bck", spectrum, self.weight)
        return self.head(torch.fft.irfft(mixed, n=4, dim=2).mean(2)) + mixed.abs().mean()


def channels_last() -> nn.Module:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.Dropout(0.3),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 2),
    )
    return model.to(memory_format=torch.channels_last)


def channels_last_batch(g: torch.Generator) -> tuple[torch.Tensor, ...]:
    x, y = torch.randn(4, 3, 6, 6, generator=g), torch.randn(4, 2, generator=g)
    return x.contiguous(memory_format=torch.channels_last), y


def half_precision() -> nn.Module:
    return mlp().to(torch.bfloat16)


def cast(dtype: torch.dtype) -> Callable[[torch.Generator], tuple[torch.Tensor, ...]]:
    return lambda g: tuple(item.to(dtype) for item in batch(g))


# --- sharing ---------------------------------------------------------------------------------------------------------


class Twice(nn.Module):
    """One module under two names, called three times."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.again = self.layer
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.layer(self.norm(self.again(self.layer(x).relu())))))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(x).mean(1).tanh())


class Wrapped(nn.Module):
    """A module that a user compiled, inside; the plain side has it too, run by eager Python."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.compile(dropout_mlp(), backend="eager")
        self.outer = nn.Linear(2, 2)
        self.outer.compile(backend="eager")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.inner(x))


def carried(model: nn.Module) -> Any:
    return [model.h, model.last]


CASES = (
    Case("parameter_hooks_scale", scaled_gradients, batch, loss),
    Case("post_accumulate_hooks_clip", clipped_gradients, batch, loss),
    Case("module_hooks", hooked_modules, batch, loss),
    Case("hook_on_a_value", HookedActivation, batch, loss),
    Case("clip_norm", mlp, batch, loss, clip_norm),
    Case("clip_norm_with_sgd", mlp, batch, loss, clip_norm, optimizer=sgd),
    Case("clip_norm_one_without_foreach", mlp, batch, loss, clip_norm_foreach_off),
    Case("clip_value", mlp, batch, loss, clip_value),
    Case("gradients_assigned", mlp, batch, loss, centralise),
    Case("gradient_dropped", mlp, batch, loss, drop_gradient),
    Case("weight_norm", weight_norm, batch, loss),
    Case("spectral_norm", spectral_norm, batch, loss),
    Case("spectral_norm_as_a_hook", old_spectral_norm, batch, loss),
    Case("orthogonal", orthogonal, batch, loss),
    Case("checkpoint", lambda: Checkpointed(use_reentrant=False), batch, loss),
    Case("checkpoint_reentrant", lambda: Checkpointed(use_reentrant=True), batch, loss),
    # frozen, thawed, and the first build fits again
    Case("frozen_and_thawed", mlp, batch, loss, between=freeze_and_thaw, builds=2),
    Case("frozen_and_thawed_with_sgd", mlp, batch, loss, between=freeze_and_thaw, optimizer=sgd, builds=2),
    Case("frozen_for_good", mlp, batch, loss, between=freeze_and_stay, builds=2),
    Case("eval_and_train", dropout_mlp, batch, loss, between=switch_modes, builds=2),
    Case("in_place_activations", InPlace, batch, loss),
    Case("strided_noise", StridedNoise, batch, loss),
    Case("buffers_counted", Counting, batch, loss, also=lambda model: [model.c, model.hidden]),
    Case("tensor_attribute_carried", Carrying, batch, loss, also=carried),
    Case("momentum_network", Momentum, batch, loss),
    Case("cond", Condition, batch, loss),
    Case("autocast_bf16", Autocast, batch, loss),
    Case("autocast_bf16_all", mlp, batch, autocast_all),
    Case("float64", lambda: mlp().double(), cast(torch.float64), loss),
    Case("bfloat16", half_precision, cast(torch.bfloat16), loss),
    Case("complex", Spectral, batch, loss),
    Case("channels_last", channels_last, channels_last_batch, loss),
    Case("channels_last_sgd", channels_last, channels_last_batch, loss, optimizer=sgd),
    Case("module_twice", Twice, batch, loss),
    Case(
        "tied_weights",
        Tied,
        lambda g: (torch.randint(0, 7, (3, 2), generator=g), torch.randint(0, 7, (3,), generator=g)),
        lambda model, x, y: F.cross_entropy(model(x), y),
    ),
    Case("compiled_inside", Wrapped, batch, loss),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_feature_keeps_eager_bits(case: Case) -> None:
    check(case)
