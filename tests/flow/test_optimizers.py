"""Parameters after ten steps of each optimizer, through a Graph, are those of its formula written in NumPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import monograph.flow as flow
import monograph.flow.nn as nn
from monograph.errors import OptimizerError

Array = Any  # of float64
STEPS = 10


# --- the formulas ------------------------------------------------------------------------------------------------------


def sgd(p, g, s, t, *, lr=0.001, momentum=0.0, dampening=0.0, weight_decay=0.0, nesterov=False):
    g = g + weight_decay * p
    if momentum == 0.0:
        return p - lr * g
    s["v"] = momentum * s.get("v", 0.0) + (1 - dampening) * g
    return p - lr * (g + momentum * s["v"] if nesterov else s["v"])


def adam(
    p, g, s, t, *, lr=0.001, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, amsgrad=False,
    do_bias_correction=True, decoupled=False,
):  # fmt: skip
    decay = lr * weight_decay * p if decoupled else 0.0
    if not decoupled:
        g = g + weight_decay * p
    s["m"] = betas[0] * s.get("m", 0.0) + (1 - betas[0]) * g
    s["v"] = betas[1] * s.get("v", 0.0) + (1 - betas[1]) * g * g
    s["max"] = np.maximum(s.get("max", 0.0), s["v"])
    v = s["max"] if amsgrad else s["v"]
    first, second = (1 - b**t for b in betas) if do_bias_correction else (1.0, 1.0)
    return p - lr * (s["m"] / first) / (np.sqrt(v / second) + eps) - decay


def adamw(p, g, s, t, **options):
    return adam(p, g, s, t, decoupled=True, **options)


def lamb(
    p, g, s, t, *, lr=0.001, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, adam_w_mode=True,
    do_bias_correction=True,
):  # fmt: skip
    if not adam_w_mode:
        g, weight_decay = g + weight_decay * p, 0.0
    s["m"] = betas[0] * s.get("m", 0.0) + (1 - betas[0]) * g
    s["v"] = betas[1] * s.get("v", 0.0) + (1 - betas[1]) * g * g
    first, second = (1 - b**t for b in betas) if do_bias_correction else (1.0, 1.0)
    u = (s["m"] / first) / (np.sqrt(s["v"] / second) + eps)
    of_p, of_u = np.linalg.norm(p), np.linalg.norm(u)
    ratio = of_p / of_u if of_p > 0 and of_u > 0 else 1.0
    return p - lr * ratio * (u + weight_decay * p)


def rmsprop(p, g, s, t, *, lr=0.001, alpha=0.99, eps=1e-8, weight_decay=0.0, centered=False):
    g = g + weight_decay * p
    s["r"] = alpha * s.get("r", 0.0) + (1 - alpha) * g * g
    s["g"] = alpha * s.get("g", 0.0) + (1 - alpha) * g
    return p - lr * g / np.sqrt(s["r"] - (s["g"] ** 2 if centered else 0.0) + eps)


def adagrad(
    p, g, s, t, *, lr=0.001, lr_decay=0.0, weight_decay=0.0, initial_accumulator_value=0.0, eps=1e-10
):
    g = g + weight_decay * p
    s["sum"] = s.get("sum", initial_accumulator_value) + g * g
    return p - lr / (1 + (t - 1) * lr_decay) * g / (np.sqrt(s["sum"]) + eps)


def adadelta(p, g, s, t, *, lr=1.0, rho=0.9, eps=1e-6, weight_decay=0.0):
    g = g + weight_decay * p
    s["v"] = rho * s.get("v", 0.0) + (1 - rho) * g * g
    delta = np.sqrt(s.get("u", 0.0) + eps) / np.sqrt(s["v"] + eps) * g
    s["u"] = rho * s.get("u", 0.0) + (1 - rho) * delta * delta
    return p - lr * delta


FORMULAS: dict[str, Callable[..., Array]] = {
    "SGD": sgd,
    "Adam": adam,
    "AdamW": adamw,
    "LAMB": lamb,
    "RMSprop": rmsprop,
    "Adagrad": adagrad,
    "Adadelta": adadelta,
}
CASES = [
    ("SGD", {}),
    ("SGD", {"lr": 0.1, "weight_decay": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}),
    ("Adam", {}),
    ("Adam", {"lr": 0.05, "weight_decay": 0.1, "amsgrad": True}),
    ("Adam", {"lr": 0.05, "do_bias_correction": False, "weight_decay": 0.1}),
    ("Adam", {"lr": 0.05, "do_bias_correction": False, "amsgrad": True, "betas": (0.5, 0.6)}),
    ("AdamW", {}),
    ("AdamW", {"lr": 0.05, "weight_decay": 0.1}),
    ("AdamW", {"lr": 0.05, "weight_decay": 0.1, "do_bias_correction": False, "amsgrad": True}),
    ("LAMB", {}),
    ("LAMB", {"lr": 0.05, "weight_decay": 0.1}),
    ("LAMB", {"lr": 0.05, "weight_decay": 0.1, "adam_w_mode": False}),
    ("LAMB", {"lr": 0.05, "do_bias_correction": False}),
    ("RMSprop", {}),
    ("RMSprop", {"lr": 0.01, "alpha": 0.9, "eps": 0.1, "weight_decay": 0.1}),
    ("RMSprop", {"lr": 0.01, "centered": True, "eps": 1e-3}),
    ("Adagrad", {}),
    ("Adagrad", {"lr": 0.1, "lr_decay": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.5}),
    ("Adadelta", {}),
    ("Adadelta", {"lr": 0.5, "rho": 0.8, "weight_decay": 0.1}),
]

ONE_OF_EACH = list({name: (name, options) for name, options in CASES}.values())  # the last one


# --- the training ------------------------------------------------------------------------------------------------------


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = flow.Generator().manual_seed(3)
        self.w = nn.Parameter(flow.randn(3, 2, generator=generator, dtype=flow.float64))
        self.b = nn.Parameter(flow.zeros(2, dtype=flow.float64))  # LAMB's ratio is 1 in the first step

    def forward(self, x):
        return flow.matmul(x, self.w) + self.b


class Train(nn.Graph):
    def __init__(self, model, optimizer, scheduler=None) -> None:
        super().__init__()
        self.model = model
        self.add_optimizer(optimizer, lr_sch=scheduler)

    def build(self, x, y):
        loss = ((self.model(x) - y) ** 2).sum()
        loss.backward()
        return loss


def batches() -> list[tuple[Array, Array]]:
    random = np.random.default_rng(5)
    return [(random.normal(size=(4, 3)), random.normal(size=(4, 2))) for _ in range(STEPS)]


def gradients(w: Array, b: Array, x: Array, y: Array) -> tuple[Array, Array]:
    difference = 2 * (x @ w + b - y)
    return x.T @ difference, difference.sum(0)


def by_formula(
    name: str, change: Callable[[Array, Array], tuple[Array, Array]], **options: Any
) -> list[Array]:
    model = Model()
    parameters = [model.w.detach().numpy().copy(), model.b.detach().numpy().copy()]
    states: list[dict[str, Array]] = [{}, {}]
    for t, (x, y) in enumerate(batches(), 1):
        of = change(*gradients(*parameters, x, y))
        parameters = [
            FORMULAS[name](p, g, s, t, **options) for p, g, s in zip(parameters, of, states, strict=True)
        ]
    return parameters


def unchanged(*of: Array) -> tuple[Array, ...]:
    return of


def by_graph(name: str, keys: dict[str, Any] | None = None, **options: Any) -> tuple[Train, list[Array]]:
    model = Model()
    optimizer = getattr(flow.optim, name)([{"params": model.parameters(), **(keys or {})}], **options)
    graph = Train(model, optimizer)
    for x, y in batches():
        graph(flow.from_numpy(x), flow.from_numpy(y))
    return graph, [model.w.detach().numpy(), model.b.detach().numpy()]


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_ten_steps_are_those_of_the_formula(name: str, options: dict[str, Any]) -> None:
    graph, got = by_graph(name, **options)
    for expected, found in zip(by_formula(name, unchanged, **options), got, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-11, atol=1e-14)
    assert len(graph.builds) == 1


@pytest.mark.parametrize("name", FORMULAS)
def test_the_learning_rate_is_scaled_in_a_graph(name: str) -> None:
    _, got = by_graph(name, {"lr_scale": 0.25}, lr=0.02)
    for expected, found in zip(by_formula(name, unchanged, lr=0.005), got, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize("order", [2.0, 1.0])
@pytest.mark.parametrize("name", FORMULAS)
def test_gradients_are_clipped_in_a_graph(name: str, order: float) -> None:
    def clipped(*of: Array) -> tuple[Array, ...]:
        norm = np.linalg.norm(np.concatenate([g.ravel() for g in of]), order)
        return tuple(g * min(1.0, 0.3 / (norm + 1e-6)) for g in of)

    keys = {"clip_grad_max_norm": 0.3, "clip_grad_norm_type": order}
    _, got = by_graph(name, keys, lr=0.02)
    for expected, found in zip(by_formula(name, clipped, lr=0.02), got, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize(("name", "options"), ONE_OF_EACH, ids=str)
def test_eager_mode_takes_the_same_steps(name: str, options: dict[str, Any]) -> None:
    model = Model()
    optimizer = getattr(flow.optim, name)(model.parameters(), **options)
    for x, y in batches():
        optimizer.zero_grad()
        ((model(flow.from_numpy(x)) - flow.from_numpy(y)) ** 2).sum().backward()
        optimizer.step()
    _, of_graph = by_graph(name, **options)
    for parameter, expected in zip(model.parameters(), of_graph, strict=True):
        assert np.array_equal(parameter.detach().numpy(), expected)


@pytest.mark.one_case
@pytest.mark.parametrize(("name", "options"), ONE_OF_EACH, ids=str)
def test_a_deployed_step_takes_the_same_steps(name: str, options: dict[str, Any], tmp_path: Any) -> None:
    model = Model()
    graph = Train(model, getattr(flow.optim, name)(model.parameters(), **options))
    given = [(flow.from_numpy(x), flow.from_numpy(y)) for x, y in batches()]
    for x, y in given[:5]:
        graph(x, y)
    flow.save(graph, tmp_path / "step")
    artifact = flow.load(tmp_path / "step")
    for x, y in given[5:]:
        artifact.train(x, y)
    _, expected = by_graph(name, **options)
    for tensor, array in zip(artifact.state_dict()["model"].values(), expected, strict=True):
        assert np.array_equal(tensor.numpy(), array)


def test_eager_mode_clips_when_it_is_told_to() -> None:
    model = Model()
    optimizer = flow.optim.SGD(
        [{"params": model.parameters(), "clip_grad_max_norm": 0.5, "clip_grad_norm_type": 2.0}]
    )
    (model(flow.ones(4, 3, dtype=flow.float64)) ** 2).sum().backward()
    optimizer.clip_grad()
    norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
    assert norm.item() == pytest.approx(0.5, rel=1e-5)


def test_clipping_without_a_limit_says_so() -> None:
    with pytest.warns(UserWarning, match="param group 0 has no clip_grad_max_norm"):
        flow.optim.Adam(Model().parameters()).clip_grad()


def test_gradients_are_zeroed_and_stay() -> None:
    model = Model()
    optimizer = flow.optim.SGD(model.parameters())
    model(flow.ones(1, 3, dtype=flow.float64)).sum().backward()
    optimizer.zero_grad()
    assert all(p.grad.count_nonzero() == 0 for p in model.parameters())
    optimizer.zero_grad(set_to_none=True)
    assert all(p.grad is None for p in model.parameters())


def test_what_oneflow_has_not_is_refused() -> None:
    parameters = list(Model().parameters())
    with pytest.raises(OptimizerError, match="LAMB has no AMSGrad"):
        flow.optim.LAMB(parameters, amsgrad=True)
    with pytest.raises(OptimizerError, match="RMSprop has no momentum"):
        flow.optim.RMSprop(parameters, momentum=0.9)
    for kind in (flow.optim.SGD, flow.optim.Adadelta):
        with pytest.raises(OptimizerError, match=r"maximize=True.*wrong sign"):
            kind(parameters, maximize=True)
    with pytest.raises(OptimizerError, match=r"nesterov=True, momentum=0.9, dampening=0.5"):
        flow.optim.SGD(parameters, momentum=0.9, dampening=0.5, nesterov=True)
    with pytest.raises(OptimizerError, match=r"LAMB\(betas=\(2.0, 0.9\)"):
        flow.optim.LAMB(parameters, betas=(2.0, 0.9))
    with pytest.raises(OptimizerError, match=r"LAMB\(lr=-1\)"):
        flow.optim.LAMB(parameters, lr=-1)


def test_how_oneflow_stores_and_computes_changes_nothing() -> None:
    _, plain = by_graph("Adam")
    _, stored = by_graph("Adam", contiguous_params=True, fused=True)
    assert all(map(np.array_equal, plain, stored))


def test_hooks_of_an_optimizer_run_once_in_a_step() -> None:
    torch.optim.Adam(Model().parameters())  # torch patches step() of each class when it is used first
    for corrected in (True, False):
        model, calls = Model(), []
        optimizer = flow.optim.Adam(model.parameters(), do_bias_correction=corrected)
        optimizer.register_step_pre_hook(lambda *_, calls=calls: calls.append(1))
        model(flow.ones(1, 3, dtype=flow.float64)).sum().backward()
        optimizer.step()
        assert calls == [1]


def test_the_names_are_those_of_the_classes() -> None:
    parameters = list(Model().parameters())
    for name in FORMULAS:
        assert isinstance(getattr(flow.optim, name)(parameters), torch.optim.Optimizer)
    assert isinstance(flow.optim.Adam(parameters, do_bias_correction=False), flow.optim.Adam)
    assert isinstance(flow.optim.AdamW(parameters, do_bias_correction=False), flow.optim.AdamW)
    assert flow.optim.AdamW(parameters).param_groups[0]["weight_decay"] == 0
    assert flow.optim.Adagrad(parameters).param_groups[0]["lr"] == 0.001


def test_momentum_begins_with_zero_wherever_the_state_comes_from() -> None:
    for prepare in (
        lambda optimizer: optimizer.state.clear(),
        lambda optimizer: optimizer.load_state_dict({**optimizer.state_dict(), "state": {}}),
        lambda optimizer: optimizer.param_groups[0].update(dampening=0.5),
    ):
        weight = flow.zeros(1, requires_grad=True)
        optimizer = flow.optim.SGD([weight], lr=0.1, momentum=0.9, dampening=0.5)
        prepare(optimizer)
        weight.grad = flow.ones(1)
        optimizer.step()
        assert weight.item() == pytest.approx(-0.05)


def test_bias_correction_is_a_choice_of_each_group() -> None:
    weights = [flow.ones(1, dtype=flow.float64, requires_grad=True) for _ in range(3)]
    groups = [{"params": weights[:1]}, {"params": weights[1:2], "do_bias_correction": False}]
    optimizer = flow.optim.Adam(groups, lr=0.1)
    optimizer.add_param_group({"params": weights[2:], "do_bias_correction": False})
    expected = []
    for correction in (True, False, False):
        p, state = np.ones(1), {}
        for t in (1, 2):
            p = adam(p, np.array([0.5 * t]), state, t, lr=0.1, do_bias_correction=correction)
        expected.append(p)
    for t in (1, 2):
        for weight in weights:
            weight.grad = flow.full((1,), 0.5 * t, dtype=flow.float64)
        optimizer.step()
    np.testing.assert_allclose([weight.detach().numpy() for weight in weights], expected, rtol=1e-12)


@pytest.mark.one_case
@pytest.mark.parametrize(("name", "options"), ONE_OF_EACH, ids=str)
def test_a_scaler_of_a_power_of_two_changes_nothing(name: str, options: dict[str, Any]) -> None:
    _, expected = by_graph(name, **options)
    model = Model()
    graph = Train(model, getattr(flow.optim, name)(model.parameters(), **options))
    graph.set_grad_scaler(flow.amp.GradScaler(init_scale=8.0))
    for x, y in batches():
        graph(flow.from_numpy(x), flow.from_numpy(y))
    for parameter, array in zip(model.parameters(), expected, strict=True):
        np.testing.assert_allclose(parameter.detach().numpy(), array, rtol=1e-12)
