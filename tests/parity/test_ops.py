"""Corners of torch inside of build(): transforms, random ops, linear algebra, odd layers, autograd's own tools."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint_sequential

import monograph as mg
from tests.parity.test_features import batch, loss, mlp
from tests.support import assert_same
from tests.support.case import Case, TrainStep, check, make_side, sgd


class Using(nn.Module):
    """A small net whose forward is a function of it."""

    def __init__(self, forward: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.net = mlp()
        self.use = forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.use(self.net, x)


def using(name: str, forward: Callable[[Any, torch.Tensor], torch.Tensor]) -> Case:
    return Case(name, lambda: Using(forward), batch, loss)


# --- transforms ------------------------------------------------------------------------------------------------------


def functional_call(net: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.func.functional_call(net, {name: p * 2 for name, p in net.named_parameters()}, (x,))


def gradients_of_samples(net: Any, x: torch.Tensor) -> torch.Tensor:
    slopes = torch.vmap(torch.func.grad(lambda row: net(row).sum()))(x)
    return net(x) + slopes.sum(1, keepdim=True)


def forward_mode(net: Any, x: torch.Tensor) -> torch.Tensor:
    value, slope = torch.func.jvp(net, (x,), (torch.ones_like(x),))
    return value + slope


def jacobian(net: Any, x: torch.Tensor) -> torch.Tensor:
    return net(x) + torch.autograd.functional.jacobian(net, x[0], create_graph=True).sum()


# --- randomness ------------------------------------------------------------------------------------------------------


def noisy(net: Any, x: torch.Tensor) -> torch.Tensor:
    x = F.alpha_dropout(F.rrelu(x, training=True), 0.3, training=True)
    x = x[:, torch.randperm(4)] + torch.rand_like(x) * torch.randint_like(x, 3)
    picked = torch.multinomial(x.softmax(1), 2)
    out = net(x) * picked + torch.normal(x[:, :2], 0.1)
    return F.gumbel_softmax(out, hard=True) + F.feature_alpha_dropout(out[..., None], 0.3, True)[..., 0]


# --- autograd --------------------------------------------------------------------------------------------------------


def saved_hooks(net: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 1.5, lambda t: t * 2.0):
        hidden = net(x)
    with torch.autograd.graph.save_on_cpu():
        return net(x) + hidden


def grad_modes(net: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        a = net(x).mean().clone()
    with torch.no_grad():
        b = net(x)
        with torch.enable_grad():
            c = net(x)
    return net(x) + a.clone() + b * c


def backward_twice(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out = model(x)
    out.square().mean().backward(retain_graph=True)
    with torch.autograd.set_detect_anomaly(True):
        return F.mse_loss(out, y)


# --- numbers ---------------------------------------------------------------------------------------------------------


def signs_and_holes(net: Any, x: torch.Tensor) -> torch.Tensor:
    out = net(x) * -0.0 + net(x).clamp(max=-0.0)
    holes = torch.where(x[:, :2] > 0, out, float("nan")).nan_to_num() + (x[:, :1] * 0).sign()
    return holes + net(x).half().float()


def linear_algebra(net: Any, x: torch.Tensor) -> torch.Tensor:
    square = x.T @ x + torch.eye(4)
    parts = torch.linalg.inv(square).sum() + torch.linalg.qr(x)[1].sum() + torch.logdet(square)
    weight = net[0].weight
    return net(x) + parts + torch.linalg.svdvals(weight).sum() + torch.einsum("bi,ji->b", x, weight)[:, None]


def values_without_vectors(net: Any, x: torch.Tensor) -> torch.Tensor:
    """Where no gradient flows torch computes no vectors, by another routine; where one flows, it does."""
    with torch.no_grad():
        quiet = torch.linalg.svdvals(x).sum() + torch.linalg.eigvalsh(x.T @ x).sum() + torch.linalg.cond(x)
        quiet = quiet + torch.linalg.norm(x, "nuc") + torch.linalg.matrix_norm(x, 2) + torch.norm(x, "nuc")
    weight = net[0].weight
    return (
        net(x) + quiet + torch.linalg.svdvals(weight).sum() + torch.linalg.eigvalsh(weight.T @ weight).sum()
    )


def indices(net: Any, x: torch.Tensor) -> torch.Tensor:
    rows = (torch.tensor([0, 1]),)
    x = x.index_put(rows, torch.ones(2, 4), accumulate=True).masked_fill(x > 1, 0.0)
    x = x.sort(1)[0].flip(1).cumsum(1).roll(1, 0)
    return torch.stack([net(row) for row in x.unbind()])


def nested_autocast(net: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        a = net(x)
        with torch.autocast("cpu", enabled=False):
            b = net(x.float())
        return a + b + net(x)


# --- layers ----------------------------------------------------------------------------------------------------------


def images() -> nn.Module:
    return nn.Sequential(
        nn.ConvTranspose2d(1, 2, 3),
        nn.Upsample(scale_factor=2, mode="bilinear"),
        nn.PReLU(),
        nn.InstanceNorm2d(2, affine=True, track_running_stats=True),
        nn.AvgPool2d(3),
        nn.Flatten(),
        nn.Linear(32, 2),
    )


def norms() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (2, 2)),
        nn.Conv1d(2, 4, 1),
        nn.LocalResponseNorm(2),
        nn.GroupNorm(2, 4),
        nn.Flatten(),
        nn.RMSNorm(8),
        nn.SELU(),
        nn.GLU(),
        nn.Softplus(),
        nn.Linear(4, 2),
        nn.LogSoftmax(1),
    )


def limited_embedding() -> nn.Module:
    """max_norm changes the weight in place in forward."""
    embedding = nn.Embedding(9, 4, max_norm=0.5, padding_idx=0, scale_grad_by_freq=True)
    return nn.Sequential(embedding, nn.Flatten(), nn.Linear(8, 2))


class Lists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.matrices = nn.ParameterList([torch.ones(4, 2), torch.zeros(4, 2)])
        self.named = nn.ParameterDict({"a": torch.ones(4, 2)})
        self.heads = nn.ModuleDict({"x": nn.Linear(4, 2), "y": nn.Linear(4, 2)})  # y stays unused

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(x @ matrix for matrix in self.matrices) + x @ self.named["a"] + self.heads["x"](x)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(
            4, 2, dropout=0.2, batch_first=True, add_bias_kv=True, add_zero_attn=True
        )
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x[None]
        out, weights = self.attention(y, y, y, key_padding_mask=(x[:, 0] > 1)[None], need_weights=True)
        return self.head(out[0]) + weights.mean()


def old_weight_norm() -> nn.Module:
    return nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 8)), nn.Tanh(), nn.Linear(8, 2))


def pruned() -> nn.Module:
    model = mlp()
    prune.random_unstructured(model[0], "weight", 0.3)
    prune.l1_unstructured(model[2], "weight", 0.3)
    return model


# --- checks and branches on values -----------------------------------------------------------------------------------


def constant_branches(net: Any, x: torch.Tensor) -> torch.Tensor:
    """Python may ask for values that are the same at each step, however they were made."""
    mask = torch.ones(4, 4).tril()
    mask[0, 1:] = 0.5
    mask.t()[3].mul_(2.0)
    rows = torch.tensor([3, 1]) + 1
    if (mask > 0.4).all() or not mask.any() or mask[3].sum().item() != 5.0:
        raise AssertionError(mask)
    return net(x @ mask) * int(rows.sum()) + sum(rows.tolist())


def constant_masks(net: Any, x: torch.Tensor) -> torch.Tensor:
    """torch's own C++ code may read constants too: how many elements a mask takes, if a divisor is positive."""
    even = torch.arange(4) % 2 == 0
    i, j = torch.eye(4).nonzero(as_tuple=True)
    picked = torch.masked_select(x, even).sum() + (x.T @ x)[i, j].sum() + x[:, even].sum()
    picked = picked + x[:, torch.unique(torch.tensor([3, 1, 3]))].sum()
    pairs = torch.combinations(x[0], 2, with_replacement=True).prod(1).sum()
    return net(x) + picked + pairs + torch.cov(x).sum() + torch.corrcoef(x).mean()


class Choosing(nn.Module):
    """A branch of torch.cond reads an attribute, which a user changes between steps."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.gain = mlp(), 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.mean() > 0, lambda x: self.net(x) * self.gain, lambda x: self.net(x).sin(), (x,))


def turn_up(model: Any, index: int) -> None:
    model.gain = 1.0 + (index > 1)


CASES = (
    using("functional_call", functional_call),
    using("vmap", lambda net, x: torch.vmap(net)(x)),
    using("gradients_of_samples", gradients_of_samples),
    using("forward_mode", forward_mode),
    using("jacobian", jacobian),
    using("random_ops", noisy),
    using("saved_hooks", saved_hooks),
    using("grad_modes", grad_modes),
    using("checkpoint_sequential", lambda net, x: checkpoint_sequential(net, 2, x, use_reentrant=False)),
    Case("backward_twice", mlp, batch, backward_twice),
    using("signs_and_holes", signs_and_holes),
    using("linear_algebra", linear_algebra),
    using("values_without_vectors", values_without_vectors),
    using("indices", indices),
    using("nested_autocast", nested_autocast),
    Case(
        "images",
        images,
        lambda g: (torch.randn(6, 1, 4, 4, generator=g), torch.randn(6, 2, generator=g)),
        loss,
    ),
    Case("norms", norms, batch, loss),
    Case(
        "embedding_max_norm",
        limited_embedding,
        lambda g: (torch.randint(0, 9, (5, 2), generator=g), torch.randn(5, 2, generator=g)),
        loss,
    ),
    Case("parameter_lists", Lists, batch, loss),
    Case("attention", Attention, batch, loss),
    Case("weight_norm_as_a_hook", old_weight_norm, batch, loss),
    Case("pruned", pruned, batch, loss, optimizer=sgd),
    using("constant_branches", constant_branches),
    using("constant_masks", constant_masks),
    Case("attribute_in_a_branch", Choosing, batch, loss, between=turn_up, builds=2),
)


def test_a_failed_check_of_a_distribution_changes_nothing() -> None:
    side = make_side(Case("normal", mlp, batch, loss))

    def likelihood(model: nn.Module, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return -torch.distributions.Normal(model(x), scale, validate_args=True).log_prob(x[:, :2]).mean()

    step = TrainStep(Case("normal", mlp, batch, likelihood), side)
    x, scale = torch.randn(6, 4), torch.ones(2)
    step(x, scale)
    before = side.state()
    with pytest.raises(ValueError, match="Expected parameter scale"):  # as in eager mode
        step(x, scale - 2.0)
    assert_same(before, side.state())
    step(x, scale)
    assert len(step.builds) == 1


def test_a_branch_on_what_the_step_computes_is_refused() -> None:
    def branch(net: Any, x: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(4)
        mask[0] = net(x).sum()
        return net(x) if mask.all() else net(-x)

    with pytest.raises(mg.CaptureError, match="asked for the value") as caught:
        check(using("branch", branch))
    assert caught.value.where.file == __file__


@pytest.mark.one_case
@pytest.mark.filterwarnings(
    "ignore:.*weight_norm.*:FutureWarning", "ignore:.*jit.script.*:DeprecationWarning"
)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_an_odd_corner_keeps_eager_bits(case: Case) -> None:
    check(case)
