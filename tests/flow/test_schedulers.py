"""The learning rate at each step of each scheduler, through a Graph, is that of its formula written in NumPy."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import monograph as mg
import monograph.flow as flow
import monograph.flow.nn as nn
from monograph.errors import ArtifactError, OptimizerError
from monograph.flow.optim import lr_scheduler as lrs

STEPS = 24
BASE = 0.4
Rate = Callable[[float, int], float]


# --- the formulas: the rate for a base rate at a step, counted from 0 ------------------------------------------------


def constant(factor: float, n: int) -> Rate:
    return lambda base, t: base * factor if t < n else base


def linear(start: float, end: float, n: int) -> Rate:
    return lambda base, t: base * np.interp(t, [0, n], [start, end])


def step(size: int, gamma: float) -> Rate:
    return lambda base, t: base * gamma ** np.floor(t / size)


def multi_step(milestones: list[int], gamma: float) -> Rate:
    return lambda base, t: base * gamma ** np.sum(t >= np.array(milestones))


def exponential(gamma: float) -> Rate:
    return lambda base, t: base * np.power(gamma, t)


def polynomial(n: int, end: float, power: float, cycle: bool = False) -> Rate:
    def rate(base: float, t: int) -> float:
        whole = n * max(1.0, np.ceil(t / n)) if cycle else n
        now = max(t, 1) if cycle else min(t, n)
        return (base - end) * (1 - now / whole) ** power + end

    return rate


def cosine_decay(n: int, alpha: float) -> Rate:
    return lambda base, t: base * ((1 - alpha) * 0.5 * (1 + np.cos(np.pi * min(t, n) / n)) + alpha)


def cosine(n: int, low: float) -> Rate:
    return lambda base, t: low + (base - low) * 0.5 * (1 + np.cos(np.pi * t / n))


def restarts(first: int, times: int, low: float = 0.0, decay: float = 1.0, limit: int = 0) -> Rate:
    ends = np.cumsum([first * times**k for k in range(STEPS)])

    def rate(base: float, t: int) -> float:
        run = int(np.searchsorted(ends, t, side="right"))
        if limit and run >= limit:
            return low
        start = ends[run - 1] if run else 0
        share = (t - start) / (first * times**run)
        return low + (base * decay**run - low) * 0.5 * (1 + np.cos(np.pi * share))

    return rate


def warm_up(inner: Rate, factor: float, n: int, method: str = "linear", prefix: bool = False) -> Rate:
    def rate(base: float, t: int) -> float:
        if t >= n:
            return inner(base, t - n if prefix else t)
        if method == "constant":
            return base * factor
        return float(np.interp(t, [0, n], [base * factor, inner(base, 0 if prefix else n)]))

    return rate


def sequential(rates: list[Rate], milestones: list[int], rescaling: list[bool]) -> Rate:
    def rate(base: float, t: int) -> float:
        index = int(np.searchsorted(milestones, t, side="right"))
        shift = milestones[index - 1] if index and rescaling[index - 1] else 0
        return rates[index](base, t - shift)

    return rate


def same(base: float, t: int) -> float:
    return base


CASES: dict[str, tuple[Callable[[Any], Any], Rate]] = {
    "ConstantLR": (lambda o: lrs.ConstantLR(o), constant(1 / 3, 5)),
    "ConstantLR, given": (lambda o: lrs.ConstantLR(o, factor=0.5, total_iters=7), constant(0.5, 7)),
    "LinearLR": (lambda o: lrs.LinearLR(o), linear(1 / 3, 1.0, 5)),
    "LinearLR, given": (lambda o: lrs.LinearLR(o, 0.9, 0.1, 8), linear(0.9, 0.1, 8)),
    "StepLR": (lambda o: lrs.StepLR(o, 4), step(4, 0.1)),
    "StepLR, given": (lambda o: lrs.StepLR(o, step_size=5, gamma=0.5), step(5, 0.5)),
    "MultiStepLR": (lambda o: lrs.MultiStepLR(o, [3, 9, 15], gamma=0.5), multi_step([3, 9, 15], 0.5)),
    "ExponentialLR": (lambda o: lrs.ExponentialLR(o, gamma=0.9), exponential(0.9)),
    "PolynomialLR": (lambda o: lrs.PolynomialLR(o, 10), polynomial(10, 0.0001, 1.0)),
    "PolynomialLR, given": (lambda o: lrs.PolynomialLR(o, 10, 0.01, 2.0), polynomial(10, 0.01, 2.0)),
    "PolynomialLR, cycle": (
        lambda o: lrs.PolynomialLR(o, decay_batch=5, end_learning_rate=0.01, power=2.0, cycle=True),
        polynomial(5, 0.01, 2.0, cycle=True),
    ),
    "CosineDecayLR": (lambda o: lrs.CosineDecayLR(o, 10), cosine_decay(10, 0.0)),
    "CosineDecayLR, given": (
        lambda o: lrs.CosineDecayLR(o, decay_steps=15, alpha=0.3),
        cosine_decay(15, 0.3),
    ),
    "CosineAnnealingLR": (lambda o: lrs.CosineAnnealingLR(o, 6), cosine(6, 0.0)),
    "CosineAnnealingLR, given": (lambda o: lrs.CosineAnnealingLR(o, T_max=7, eta_min=0.1), cosine(7, 0.1)),
    "CosineAnnealingWarmRestarts": (lambda o: lrs.CosineAnnealingWarmRestarts(o, 4), restarts(4, 1)),
    "CosineAnnealingWarmRestarts, given": (
        lambda o: lrs.CosineAnnealingWarmRestarts(o, T_0=3, T_mult=2, eta_min=0.05, decay_rate=0.7),
        restarts(3, 2, 0.05, 0.7),
    ),
    "CosineAnnealingWarmRestarts, limited": (
        lambda o: lrs.CosineAnnealingWarmRestarts(o, 4, eta_min=0.05, restart_limit=2),
        restarts(4, 1, 0.05, limit=2),
    ),
    "LambdaLR": (lambda o: lrs.LambdaLR(o, lambda t: 1 / (1 + t)), lambda base, t: base / (1 + t)),
    "MultiplicativeLR": (lambda o: lrs.MultiplicativeLR(o, lambda t: 0.9), exponential(0.9)),
    "WarmUpLR": (lambda o: lrs.WarmUpLR(o), warm_up(same, 1 / 3, 5)),
    "WarmUpLR, constant": (
        lambda o: lrs.WarmUpLR(o, warmup_factor=0.5, warmup_iters=4, warmup_method="constant"),
        warm_up(same, 0.5, 4, "constant"),
    ),
    "WarmUpLR, of a scheduler": (
        lambda o: lrs.WarmUpLR(lrs.CosineDecayLR(o, 12, 0.1), warmup_factor=0.5, warmup_iters=4),
        warm_up(cosine_decay(12, 0.1), 0.5, 4),
    ),
    "WarmupLR, constant, of a scheduler": (
        lambda o: lrs.WarmupLR(lrs.StepLR(o, 3, 0.5), 0.1, 4, "constant"),
        warm_up(step(3, 0.5), 0.1, 4, "constant"),
    ),
    "WarmUpLR, prefix": (
        lambda o: lrs.WarmUpLR(lrs.ExponentialLR(o, 0.8), 0.1, 4, warmup_prefix=True),
        warm_up(exponential(0.8), 0.1, 4, prefix=True),
    ),
    "WarmUpLR, no iterations": (
        lambda o: lrs.WarmUpLR(lrs.ExponentialLR(o, 0.8), warmup_iters=0),
        exponential(0.8),
    ),
    "SequentialLR": (
        lambda o: lrs.SequentialLR(o, [lrs.ConstantLR(o, 0.1, 2), lrs.ExponentialLR(o, 0.9)], [6]),
        sequential([constant(0.1, 2), exponential(0.9)], [6], [False]),
    ),
    "SequentialLR, rescaled": (
        lambda o: lrs.SequentialLR(
            o, [lrs.StepLR(o, 2), lrs.CosineDecayLR(o, 5), lrs.LinearLR(o)], [4, 9], [True, False]
        ),
        sequential([step(2, 0.1), cosine_decay(5, 0.0), linear(1 / 3, 1.0, 5)], [4, 9], [True, False]),
    ),
    "ChainedScheduler": (
        lambda o: lrs.ChainedScheduler([lrs.ConstantLR(o, 0.1, 2), lrs.ExponentialLR(o, 0.9)]),
        lambda base, t: exponential(0.9)(constant(0.1, 2)(base, t), t),
    ),
}


class Count(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(flow.zeros((), dtype=flow.float64))
        self.v = nn.Parameter(flow.zeros((), dtype=flow.float64))


class Train(nn.Graph):
    """Each gradient is 1, so a step of SGD moves a parameter by its learning rate."""

    def __init__(self, model: Count, optimizer: Any, scheduler: Any) -> None:
        super().__init__()
        self.model = model
        self.add_optimizer(optimizer, lr_sch=scheduler)

    def build(self):
        loss = self.model.w + self.model.v
        loss.backward()
        return loss


def trained(make: Callable[[Any], Any], lr: Any = BASE) -> tuple[Train, Any, Any]:
    model = Count()
    groups = [{"params": [model.w]}, {"params": [model.v], "lr": 2 * BASE}]
    optimizer = flow.optim.SGD(groups, lr=lr)
    scheduler = make(optimizer)
    return Train(model, optimizer, scheduler), optimizer, scheduler


def rates(graph: Train, steps: int) -> list[tuple[float, float]]:
    """By how much each step moves the two parameters."""
    found = []
    for _ in range(steps):
        before = graph.model.w.item(), graph.model.v.item()
        graph()
        found.append((before[0] - graph.model.w.item(), before[1] - graph.model.v.item()))
    return found


@pytest.mark.parametrize("name", CASES)
def test_each_step_has_the_rate_of_the_formula(name: str) -> None:
    make, formula = CASES[name]
    graph, optimizer, scheduler = trained(make)
    expected = [(formula(BASE, t), formula(2 * BASE, t)) for t in range(STEPS + 1)]
    np.testing.assert_allclose(rates(graph, STEPS), expected[:-1], rtol=1e-12, atol=1e-13)
    # the rate can be read, and it is that of the coming step
    np.testing.assert_allclose([g["lr"] for g in optimizer.param_groups], expected[-1], rtol=1e-12)
    assert scheduler.get_last_lr() == [g["lr"] for g in optimizer.param_groups]
    assert scheduler.last_step == STEPS
    assert len(graph.builds) == 1


@pytest.mark.every_case
@pytest.mark.parametrize("name", CASES)
def test_each_step_of_a_plain_loop_has_the_rate_of_the_formula(name: str) -> None:
    make, formula = CASES[name]
    model = Count()
    optimizer = flow.optim.SGD([{"params": [model.w]}, {"params": [model.v], "lr": 2 * BASE}], lr=BASE)
    scheduler, found = make(optimizer), []
    for _ in range(STEPS):
        found.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    expected = [(formula(BASE, t), formula(2 * BASE, t)) for t in range(STEPS)]
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", CASES)
def test_a_schedule_goes_on_from_a_saved_state(name: str, tmp_path: Any) -> None:
    make, _ = CASES[name]
    graph, _, _ = trained(make)
    rates(graph, 6)
    flow.save(graph.state_dict(), tmp_path / "state")
    expected = rates(graph, 8)
    other, _, _ = trained(make)
    other.load_state_dict(flow.load(tmp_path / "state"))
    assert rates(other, 8) == expected


@pytest.mark.parametrize("name", CASES)
def test_a_deployed_step_moves_its_rate(name: str, tmp_path: Any) -> None:
    make, formula = CASES[name]
    graph, _, _ = trained(make)
    rates(graph, 3)
    if "Lambda" in name or "Multiplicative" in name:
        with pytest.raises(ArtifactError, match="computes with code that an artifact cannot hold"):
            flow.save(graph, tmp_path / "step")
        return
    flow.save(graph, tmp_path / "step")
    artifact, found = mg.load(tmp_path / "step"), []
    for _ in range(8):
        before = [tensor.item() for tensor in artifact.state_dict()["model"].values()]
        artifact.train()
        after = [tensor.item() for tensor in artifact.state_dict()["model"].values()]
        found.append([old - new for old, new in zip(before, after, strict=True)])
    expected = [(formula(BASE, t), formula(2 * BASE, t)) for t in range(3, 11)]
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.long
def test_an_artifact_needs_no_import_of_flow(tmp_path: Any) -> None:
    graph, _, _ = trained(lambda o: lrs.WarmUpLR(lrs.CosineDecayLR(o, 12, 0.1), 0.5, 4))
    rates(graph, 3)
    flow.save(graph, tmp_path / "step")
    code = (
        "import sys, monograph as mg; artifact = mg.load(sys.argv[1]); artifact.train(); "
        "print(artifact.hyperparameters, 'monograph.flow' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "step"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("False\n")


def test_a_schedule_goes_on_from_last_step() -> None:
    for make, formula in [
        (lambda o, n: lrs.CosineDecayLR(o, 12, last_step=n), cosine_decay(12, 0.0)),
        (lambda o, n: lrs.WarmUpLR(o, warmup_iters=9, last_step=n), warm_up(same, 1 / 3, 9)),
    ]:
        optimizer = flow.optim.SGD([flow.zeros(1, requires_grad=True)], lr=BASE)
        make(optimizer, -1)
        scheduler = make(optimizer, 6)
        assert scheduler.last_step == 7
        assert optimizer.param_groups[0]["lr"] == pytest.approx(formula(BASE, 7), rel=1e-12)


def test_verbose_prints_each_rate_while_a_graph_trains(capsys: Any) -> None:
    graph, _, _ = trained(lambda o: lrs.CosineDecayLR(o, decay_steps=100, alpha=0.98, verbose=True))
    assert capsys.readouterr().out.splitlines() == [
        "CosineDecayLR: step 0: lr of param_groups[0] is 0.4",
        "CosineDecayLR: step 0: lr of param_groups[1] is 0.8",
    ]
    graph()
    assert capsys.readouterr().out.splitlines() == [
        "CosineDecayLR: step 1: lr of param_groups[0] is 0.399998",
        "CosineDecayLR: step 1: lr of param_groups[1] is 0.799996",
    ]


def test_verbose_of_a_scheduler_of_torch(capsys: Any) -> None:
    graph, _, _ = trained(lambda o: lrs.MultiplicativeLR(o, lambda t: 0.5, verbose=True))
    capsys.readouterr()
    graph()
    assert "MultiplicativeLR: step 1: lr of param_groups[0] is 0.2" in capsys.readouterr().out


def test_a_rate_that_is_a_tensor_stays_one() -> None:
    graph, optimizer, _ = trained(lambda o: lrs.StepLR(o, 2, 0.5), lr=torch.tensor(BASE, dtype=torch.float64))
    rate = optimizer.param_groups[0]["lr"]
    expected = [BASE, BASE, BASE / 2, BASE / 2]
    np.testing.assert_allclose([first for first, _ in rates(graph, 4)], expected, rtol=1e-12)
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == BASE / 4


def test_a_scheduler_of_ones_own() -> None:
    class Halving(lrs.LRScheduler):
        def get_lr(self, base_lr, step):
            return base_lr * 0.5**step

    graph, _, _ = trained(lambda o: lrs.WarmUpLR(Halving(o), 0.1, 2, "constant"))
    expected = [BASE * factor for factor in (0.1, 0.1, 0.25, 0.125)]
    np.testing.assert_allclose([first for first, _ in rates(graph, 4)], expected, rtol=1e-12)


@pytest.mark.parametrize(
    "make",
    [
        lambda o, **of: lrs.CyclicLR(o, 0.1, 1.0, step_size_up=4, cycle_momentum=False, **of),
        lambda o, **of: lrs.OneCycleLR(o, 1.0, total_steps=30, cycle_momentum=False, **of),
    ],
    ids=["CyclicLR", "OneCycleLR"],
)
def test_schedulers_of_torch_by_oneflows_arguments(make: Any) -> None:
    graph, _, scheduler = trained(lambda o: make(o, last_step=-1, verbose=False))
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=BASE)
    kind = getattr(torch.optim.lr_scheduler, type(scheduler).__name__)
    given = {"cycle_momentum": False}
    plain = (
        kind(optimizer, 0.1, 1.0, step_size_up=4, **given)
        if kind is torch.optim.lr_scheduler.CyclicLR
        else kind(optimizer, 1.0, total_steps=30, **given)
    )
    expected = []
    for _ in range(10):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        plain.step()
    np.testing.assert_allclose([first for first, _ in rates(graph, 10)], expected, rtol=1e-12)


def test_reduce_on_plateau_is_stepped_by_the_user(capsys: Any) -> None:
    model = Count()
    optimizer = flow.optim.SGD(model.parameters(), lr=BASE)
    plateau = lrs.ReduceLROnPlateau(optimizer, patience=0, factor=0.5, verbose=True)
    with pytest.raises(OptimizerError, match="ReduceLROnPlateau cannot be lr_sch"):
        Train(model, optimizer, plateau)
    graph = Train(model, optimizer, None)
    for metric in (1.0, 2.0, 3.0):
        graph()
        plateau.step(metric)
    assert optimizer.param_groups[0]["lr"] == BASE / 4
    assert "ReduceLROnPlateau: step 3: lr of param_groups[0] is 0.1" in capsys.readouterr().out
    assert rates(graph, 1)[0][0] == pytest.approx(BASE / 4)


def test_arguments_that_cannot_be() -> None:
    optimizer = flow.optim.SGD([flow.zeros(1, requires_grad=True)], lr=BASE)
    other = flow.optim.SGD([flow.zeros(1, requires_grad=True)], lr=BASE)
    cases: list[tuple[Callable[[], Any], str]] = [
        (lambda: lrs.StepLR(optimizer, 0), "step_size is 0"),
        (lambda: lrs.PolynomialLR(optimizer, -1), "decay_batch is -1"),
        (lambda: lrs.LinearLR(optimizer, 2.0), r"start_factor is 2\.0"),
        (lambda: lrs.WarmUpLR(optimizer, warmup_method="cosine"), "unknown warmup_method 'cosine'"),
        (lambda: lrs.WarmUpLR(None), "WarmUpLR got a NoneType"),
        (
            lambda: lrs.SequentialLR(optimizer, [lrs.LinearLR(optimizer)], [1]),
            "1 schedulers and 1 milestones",
        ),
        (lambda: lrs.SequentialLR(optimizer, [lrs.LinearLR(other)], []), "belongs to another optimizer"),
        (lambda: lrs.ChainedScheduler([]), "ChainedScheduler got no schedulers"),
        (
            lambda: lrs.ChainedScheduler([torch.optim.lr_scheduler.StepLR(optimizer, 1)]),
            "ChainedScheduler got a StepLR as scheduler 0",
        ),
        (lambda: lrs.LambdaLR(optimizer, [abs, abs]), "2 functions for 1 param groups"),
    ]
    for make, message in cases:
        with pytest.raises(OptimizerError, match=message):
            make()


def test_a_step_of_the_script_does_not_count_twice() -> None:
    graph, optimizer, scheduler = trained(lambda o: lrs.CosineDecayLR(o, 10))
    seen = []
    for _ in range(4):
        seen.append(optimizer.param_groups[0]["lr"])
        graph()
        with pytest.warns(UserWarning, match="CosineDecayLR that a graph steps by itself has no effect"):
            scheduler.step()
    np.testing.assert_allclose(seen, [cosine_decay(10, 0.0)(BASE, t) for t in range(4)], rtol=1e-12)
    optimizer.step()  # an eager step between those of the graph
    scheduler.step()
    assert scheduler.last_step == 5
    assert "of_graph" not in scheduler.state_dict()


def test_a_param_group_that_is_added_later_has_its_rate() -> None:
    graph, optimizer, _ = trained(lambda o: lrs.StepLR(o, 1, 0.5))
    graph()
    extra = nn.Parameter(flow.zeros((), dtype=flow.float64))
    graph.model.extra = extra
    late = nn.Parameter(flow.zeros((), dtype=flow.float64))
    graph.model.late = late
    optimizer.add_param_group({"params": [extra], "lr": 1.0})
    optimizer.add_param_group({"params": [late], "lr": 1.0, "initial_lr": 8.0})
    graph()
    assert [group["lr"] for group in optimizer.param_groups] == [BASE / 4, BASE / 2, 0.25, 2.0]


def test_the_state_of_a_function_that_is_an_object_is_saved() -> None:
    class Factor:
        def __init__(self, value: float) -> None:
            self.value = value

        def __call__(self, step: int) -> float:
            return self.value

    def make(value: float) -> Any:
        return lrs.LambdaLR(flow.optim.SGD([flow.zeros(1, requires_grad=True)], lr=1.0), Factor(value))

    first, second = make(0.5), make(0.25)
    second.load_state_dict(first.state_dict())
    assert second.lr_lambdas[0].value == 0.5
