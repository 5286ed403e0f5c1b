"""Advice fits what has happened: what to do about it, or that there is nothing to do."""

from __future__ import annotations

import dataclasses
import logging
import random
from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import prune

import monograph as mg
from monograph.internals.internals import internals_of
from tests.support import assert_same

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))


@dataclasses.dataclass
class Options:
    scale: float


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.first(x)))  # type: ignore[no-any-return]


class Step(mg.Graph):
    def __init__(self, body: Callable[..., Any] | None, extra: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = Net()
        self.body, self.extra = body, extra
        self.add_optimizer(torch.optim.SGD(self.net.parameters(), 0.1, momentum=0.9))
        self.config.backend("aten")

    def build(self, x: torch.Tensor) -> torch.Tensor:
        found = self.net(x)
        loss = (found if self.body is None else self.body(self, found)).square().mean()
        loss.backward()
        return loss


def optimizer_of(step: Any) -> torch.optim.Optimizer:
    found: torch.optim.Optimizer = internals_of(step).registry.optimizers[0].optimizer
    return found


def set_extra(value: Any) -> Callable[[Any, int], None]:
    def change(step: Any, index: int) -> None:
        step.extra = value(float(index))

    return change


def net_of(step: Any) -> Net:
    found: Net = step.net.to(nn.Module)
    return found


def momentum(step: Any, index: int) -> None:
    net_of(step).norm.momentum = 0.1 + index / 10


def pruned(step: Any, index: int) -> None:
    if index == 1:
        prune.l1_unstructured(net_of(step).first, "weight", 0.5)


def more_parameters(step: Any, index: int) -> None:
    if index == 1:
        net_of(step).register_module("more", nn.Linear(6, 2))
        optimizer_of(step).add_param_group({"params": net_of(step).more.parameters()})


def more_state(step: Any, index: int) -> None:
    if index == 2:
        optimizer_of(step).state[net_of(step).head.weight]["seen"] = torch.zeros(3)


def nothing(_step: Any, _index: int) -> None:
    pass


def new_key(step: Any, index: int) -> None:
    if index == 1:
        step.extra["b"] = 1.0


def drawn(_step: Any, out: torch.Tensor) -> torch.Tensor:
    return out * random.random()


def drawn_by_numpy(_step: Any, out: torch.Tensor) -> torch.Tensor:
    return out * np.random.rand()


def by_entry(step: Any, out: torch.Tensor) -> torch.Tensor:
    return out * step.extra[1]  # type: ignore[no-any-return]


def by_entries(step: Any, out: torch.Tensor) -> torch.Tensor:
    return out * sum(step.extra.values())  # type: ignore[no-any-return]


def by_option(step: Any, out: torch.Tensor) -> torch.Tensor:
    return out * step.extra.scale  # type: ignore[no-any-return]


class Way(Enum):
    UP, DOWN = 2.0, 3.0


def by_constant(step: Any, out: torch.Tensor) -> torch.Tensor:
    return out * step.extra.value  # type: ignore[no-any-return]


def by_items(step: Any, out: torch.Tensor) -> torch.Tensor:
    return out * sum(step.extra)  # type: ignore[no-any-return]


def by_attribute(step: Any, out: torch.Tensor) -> torch.Tensor:
    return out * getattr(step.extra, "more", 1.0)  # type: ignore[no-any-return]


def new_attribute(step: Any, index: int) -> None:
    if index == 1:
        step.extra.more = 2.0


NOTHING_TO_DO = "one build serves all further values of graph.extra[1]: nothing to do"
CASES: dict[str, tuple[Any, ...]] = {
    "momentum of a norm": (None, None, momentum, "the momentum of a norm", 4),
    "pruned": (None, None, pruned, "the model has other parts, which costs one build", 2),
    "more parameters": (None, None, more_parameters, "the model has other parts, which costs one build", 2),
    "more state": (None, None, more_state, "the optimizer has other state or other groups, which costs one build", 2),
    "random": (drawn, None, nothing, "before the call and pass it as an argument, or draw by torch.rand(())", 4),
    "numpy": (drawn_by_numpy, None, nothing, "before the call and pass it as an argument, or draw by torch.rand(())", 4),
    "a list replaced": (by_entry, [1.0, 2.0], set_extra(lambda value: [1.0, value]), NOTHING_TO_DO, 2),
    "an object replaced": (by_option, Options(2.0), set_extra(Options), "make it once and keep it there", 4),
    "an enum": (by_constant, Way.UP, lambda step, index: setattr(step, "extra", list(Way)[index % 2]), "few values need nothing", 2),
    "a list grows": (by_items, [1.0], lambda step, index: step.extra.append(2.0), "each length of graph.extra has a build", 4),
    "a deque grows": (by_items, deque([1.0]), lambda step, index: step.extra.append(2.0), "each length of graph.extra has a build", 4),
    "a set grows": (by_items, {0}, lambda step, index: step.extra.add(index), "each length of graph.extra has a build", 4),
    "new attribute": (by_attribute, Options(2.0), new_attribute, "graph.extra.more was not there before", 2),
    "new key": (by_entries, {"a": 1.0}, new_key, "each set of keys of graph.extra has a build: keep its keys", 2),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_advice_fits(case: str, caplog: pytest.LogCaptureFixture) -> None:
    body, extra, change, written, num_builds = CASES[case]
    caplog.set_level(logging.WARNING, "monograph")
    step = Step(body, extra)
    for index in range(4):
        change(step, index)
        step(X)
    assert len(step.builds) == num_builds
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1, said
    assert written in said[0]


def test_the_reason_for_a_dtype_that_comes_back_says_when_its_build_went() -> None:
    step: Any = mg.trace(Net())
    net = net_of_trace(step)
    step.config.backend("aten")
    for dtype in (torch.float32, torch.float64, torch.float32):
        net.to(dtype)
        step(X.to(dtype))
    assert str(step.builds[2].reason) == (
        "the build for this was let go when dtype of module.first.weight changed from torch.float32 to torch.float64"
    )


def net_of_trace(step: Any) -> Net:
    found: Net = step.module.to(nn.Module)
    return found


def test_an_old_head_that_the_optimizer_still_has() -> None:
    step = Step(None, None)
    step(X)
    net_of(step).head = nn.Linear(6, 2)
    optimizer_of(step).add_param_group({"params": net_of(step).head.parameters()})
    with pytest.raises(mg.OptimizerError, match="that no module of the graph holds") as caught:
        step(X)
    assert "take the parameters of the old one out of optimizer.param_groups" in caught.value.hint


def test_arguments_that_are_swapped() -> None:
    model = nn.Linear(4, 3)
    step = mg.train_graph(model, cross_entropy, torch.optim.SGD(model.parameters(), 0.1))
    x, y = X, torch.zeros(8, dtype=torch.int64)
    step(x, y)
    with pytest.raises(mg.MonographError) as caught:
        step(y, x)
    assert "are batch[0] and batch[1] swapped?" in caught.value.hint


def test_another_object_where_one_was_known_weakly_is_named_by_its_class(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "monograph")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    step = mg.trace(model)
    step(X)
    model[2] = nn.Linear(4, 2)
    step(X)
    assert not any("monograph.capture" in record.getMessage() for record in caplog.records)


def test_what_is_to_be_known_of_captures_is_said_once(
    caplog: pytest.LogCaptureFixture, tmp_path: Any
) -> None:
    caplog.set_level(logging.INFO, "monograph")
    with (tmp_path / "log").open("w") as file:

        def writes(_step: Any, out: torch.Tensor) -> torch.Tensor:
            file.write("a line")
            return out

        step = Step(writes, None)
        for _ in range(4):
            step(X)
    notes = [item for item in caplog.records if "only a new capture can repeat" in item.getMessage()]
    assert len(notes) <= 1


def test_a_head_is_replaced_as_the_hint_says() -> None:
    def trained(*, graph: bool) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)

        def body(out: torch.Tensor, _target: Any) -> torch.Tensor:
            return out.square().mean()

        step = mg.train_graph(net, body, optimizer) if graph else None
        for index in range(4):
            if index == 2:
                old = set(map(id, net.head.parameters()))
                net.head = nn.Linear(6, 2)
                kept = [item for item in optimizer.param_groups[0]["params"] if id(item) not in old]
                optimizer.param_groups[0]["params"] = kept
                optimizer.add_param_group({"params": net.head.parameters()})
            if step is not None:
                step(X, X)
            else:
                optimizer.zero_grad()
                body(net(X), X).backward()
                optimizer.step()
        assert step is None or len(step.builds) == 2
        return dict(net.state_dict())

    assert_same(trained(graph=False), trained(graph=True))


def test_a_branch_that_each_parameter_has_is_named_once() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    step = mg.train_graph(model, nn.functional.mse_loss, torch.optim.RAdam(model.parameters()))
    for _ in range(7):
        step(torch.ones(2, 3), torch.zeros(2, 3))
    reasons = [str(build.reason) for build in step.builds if "the branch" in str(build.reason)]
    assert [reason.count("is no longer taken") for reason in reasons] == [1]
    assert reasons[0].endswith("; and 3 more")


def test_each_length_has_a_build_where_strides_move(caplog: pytest.LogCaptureFixture) -> None:
    """Also where sizes are declared to vary. Strides of one buffer stay, and one build serves all."""
    buffer = torch.ones(4, 16)

    def shifted(length: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.ones(4, length)
        return tokens[:, :-1], tokens[:, 1:]

    def of_buffer(length: int) -> tuple[torch.Tensor, torch.Tensor]:
        return buffer[:, :length], buffer[:, 1 : length + 1]

    for is_declared, parts, num_builds in ((False, shifted, 4), (True, shifted, 4), (False, of_buffer, 2)):
        caplog.clear()
        graph = mg.trace(lambda x, y: (x * 2).sum() + y.sum())
        if is_declared:
            graph.config.dynamic("x", 1)
            graph.config.dynamic("y", 1)
        for length in (5, 7, 9, 11):
            graph(*parts(length))
        assert len(graph.builds) == num_builds
        told = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        moves = "x.contiguous() and y.contiguous() has one build for all strides"
        others = (
            "since the strides of x and y do not follow from sizes: pass x.contiguous() and y.contiguous()"
        )
        assert [moves in line or others in line for line in told[:1]] == [True] * (num_builds > 2)
        assert all("x and y are slices of larger tensors" in line for line in told[:1] if moves in line)
