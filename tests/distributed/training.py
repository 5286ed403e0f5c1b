"""Workloads trained on several ranks, in eager mode by torch alone and in a graph, and compared bit for bit on each rank."""

from __future__ import annotations

import copy
import importlib
import traceback
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import monograph as mg
from benchmarks.workloads import dlrm, gpt, lstm, mlp, mobilenet
from tests.support import assert_same

WORKLOADS = {
    "mlp": mlp.mlp64,
    "mobilenet": mobilenet.workload,
    "gpt": gpt.workload,
    "lstm": lstm.workload,
    "dlrm": dlrm.workload,
}
OPTIMIZERS: dict[str, Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
}
Case = Callable[[int], None]
Wrong = list[dict[str, str]]  # by rank what was wrong with each case, or nothing


def collected(cases: Mapping[str, Case], rank: int) -> dict[str, str]:
    """Run each case on this rank; gives what was wrong with it, or nothing."""
    found = {}
    for name, case in cases.items():
        torch.manual_seed(0)
        try:
            case(rank)
            found[name] = ""
        except (Exception, pytest.fail.Exception):
            found[name] = f"rank {rank}\n{traceback.format_exc()}"
    return found


def run_cases(module: str, table: str) -> dict[str, str]:
    """Run the cases in a table of a module on this rank."""
    return collected(getattr(importlib.import_module(module), table), dist.get_rank())


def assert_right(case: str, found: Wrong) -> None:
    """Nothing was wrong with a case on any rank."""
    wrong = "".join(item[case] for item in found)
    assert not wrong, wrong


def num_unawaited() -> int:
    """How many collectives, sends and receives have begun that nobody has waited for."""
    return int(torch._C._distributed_c10d._get_work_registry_size())


class Trained:
    """A model with its optimizer and a learning rate that moves."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self.scheduler = LambdaLR(optimizer, lambda step: 0.7**step)

    def state(self) -> dict[str, Any]:
        """All that a step changes, by names without those of wrappers."""
        module = getattr(self.model, "module", self.model)
        found = {name: local(tensor).clone() for name, tensor in module.state_dict().items()}
        for name, parameter in module.named_parameters():
            for key, entry in self.optimizer.state.get(parameter, {}).items():
                found[f"{name}/{key}"] = local(entry).clone()
            if parameter.grad is not None:
                found[f"{name}.grad"] = local(parameter.grad).clone()
        return found


def local(item: Any) -> Any:
    """The part of a tensor that this rank has."""
    return item.to_local().detach() if hasattr(item, "to_local") else item.detach()


class Step(mg.Graph):
    """One step of a workload."""

    def __init__(
        self, trained: Trained, loss_of: Callable[..., torch.Tensor], clip: float = 0.0, backend: str = "aten"
    ) -> None:
        super().__init__()
        self.model, self.loss_of, self.clip = trained.model, loss_of, clip
        self.add_optimizer(trained.optimizer, lr_sch=trained.scheduler)
        self.config.backend(backend)

    def build(self, *batch: torch.Tensor) -> torch.Tensor:
        loss = self.loss_of(self.model(*batch[:-1]), batch[-1])
        loss.backward()
        if self.clip:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        return loss


def eager_step(
    trained: Trained, loss_of: Callable[..., torch.Tensor], batch: tuple[torch.Tensor, ...], clip: float = 0.0
) -> torch.Tensor:
    """The same by torch alone."""
    trained.optimizer.zero_grad()
    loss = loss_of(trained.model(*batch[:-1]), batch[-1])
    loss.backward()
    if clip:
        torch.nn.utils.clip_grad_norm_(trained.model.parameters(), clip)
    trained.optimizer.step()
    trained.scheduler.step()
    trained.optimizer.zero_grad()
    return loss.detach()


def compare(
    workload: str,
    optimizer: str,
    rank: int,
    wrapped: Callable[[nn.Module], nn.Module],
    ours: Callable[[nn.Module], nn.Module],
    configure: Callable[[mg.Graph], None] = lambda _graph: None,
    *,
    clip: float = 0.0,
    backend: str = "aten",
    steps: int = 3,
    prepare: Callable[[nn.Module], None] = lambda _model: None,
) -> mg.Graph:
    """Train a workload both ways: `wrapped(model)` in eager mode, `ours(model)` in a graph; each rank has batches of its own."""
    made = WORKLOADS[workload](smoke=True)
    torch.manual_seed(rank)  # other numbers on each rank: those of the first count
    base = made.make_model()
    prepare(base)
    sides = []
    for wrap in (wrapped, ours):
        model = wrap(copy.deepcopy(base))
        sides.append(Trained(model, OPTIMIZERS[optimizer](model.parameters())))
    step = Step(sides[1], made.loss, clip, backend)
    configure(step)
    generator = torch.Generator().manual_seed(100 + rank)
    for index in range(steps):
        batch = made.make_batch(generator)
        expected = eager_step(sides[0], made.loss, batch, clip)
        assert_same(expected, step(*batch).detach(), f"loss {index}")
        assert_same(sides[0].state(), sides[1].state(), f"step {index}")
    assert len(step.builds) == 1, step.explain()
    return step
