"""verify(): what it says of a right graph, and that it leaves everything as it was."""

from __future__ import annotations

import copy
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import monograph as mg
from monograph.internals.internals import internals_of
from monograph.numerics.judge import digests
from tests.inspect import faults
from tests.inspect.faults import Net, Step, batch
from tests.support.steps import line_of


class Everything(mg.Graph):
    """Two parameter groups, a scheduler, an average, hooks, a kept gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.model, self.seen = Net(), []
        parameters = list(self.model.parameters())
        groups = [{"params": parameters[:2], "lr": 0.1}, {"params": parameters[2:]}]
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.SequentialLR(
            optimizer,
            [
                torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=2),
                torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5),
            ],
            milestones=[2],
        )
        self.add_optimizer(optimizer, lr_sch=self.scheduler)
        self.add_ema(self.model, 0.9)
        parameters[0].register_hook(lambda gradient: gradient * 2)

    def build(self, x: Tensor, y: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(self.model(x), y)
        loss.backward()
        return loss


def everything_of(graph: Any, leaves: tuple[Tensor, ...]) -> dict[str, Any]:
    """What a user can see, as digests and as identities."""
    model = graph.model.to(nn.Module)
    optimizer = internals_of(graph).registry.optimizers[0].optimizer
    named = dict(model.named_parameters()) | dict(model.named_buffers())
    state = {
        f"{index} {key}": item
        for index, entries in enumerate(optimizer.state.values())
        for key, item in entries.items()
    }
    return {
        "bits": digests({"model": named, "state": state, "arguments": list(leaves)}),
        "objects": [id(item) for item in (*named.values(), *state.values())],
        "gradients": [(id(p.grad), digests({"grad": p.grad})) for p in (*model.parameters(), *leaves)],
        "flags": [p.requires_grad for p in named.values()],
        "groups": [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups],
        "scheduler": digests(graph.scheduler.state_dict()) if hasattr(graph, "scheduler") else None,
        "steps": internals_of(graph).store.steps,
        "graph": digests({k: v for k, v in graph.state_dict().items() if k != "random"}),
        "hooks": [len(p._backward_hooks or ()) for p in model.parameters()],
        "random": (torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()),
        "training": [module.training for module in model.modules()],
    }


@pytest.mark.parametrize("before", [0, 3])
def test_everything_is_left_as_it_was(before: int) -> None:
    graph = Everything()
    x, y = batch()
    graph.compile(x, y)  # from now on the state has the entries that the first step will begin with
    for _ in range(before):
        graph(x, y)
    for index, parameter in enumerate(graph.model.parameters()):
        if index % 2:
            parameter.grad = torch.full_like(parameter, float(index))
    expected = everything_of(graph, (x,))
    report = graph.verify(x, y, steps=3)
    assert report.ok, str(report)
    assert everything_of(graph, (x,)) == expected
    graph.replay(x, y).run()
    graph.find_nonfinite(x, y)
    graph.profile(x, y)
    assert everything_of(graph, (x,)) == expected


def test_training_goes_on_as_if_nothing_had_been(tmp_path: Path) -> None:
    one, other = Everything(), Everything()
    x, y = batch()
    for number in range(4):
        torch.manual_seed(number)
        expected = one(x, y)
        other.verify(x, y, steps=2)
        torch.manual_seed(number)
        assert torch.equal(other(x, y), expected)
    assert digests(one.model.state_dict()) == digests(other.model.state_dict())
    assert len(other.builds) == 1


def test_the_reference_is_eager_mode() -> None:
    """The numbers that the report compares are those of plain PyTorch."""
    step = Step()
    x, y = batch()
    model = copy.deepcopy(step.model.to(nn.Module))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    torch.manual_seed(5)
    report = step.verify(x, y)
    torch.manual_seed(5)
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    torch.manual_seed(5)
    step(x, y)
    assert report.ok
    assert digests(model.state_dict()) == digests(step.model.state_dict())
    assert {"model.head.weight", "result"} <= {item.path for item in report.compared}


def test_against_float64() -> None:
    report = Step().verify(*batch(), steps=2, against="float64")
    assert report.ok, str(report)
    judged = report.judged["parameters and buffers"]
    assert judged.distances
    assert 0 < judged.eager_rms == judged.graph_rms < 1e-6


@pytest.mark.long
def test_a_compiled_step() -> None:
    step = Step(compiled=True)
    report = step.verify(*batch())
    assert report.backend == "inductor"
    assert report.ok, str(report)


@pytest.mark.long
def test_a_script_shows_the_difference(tmp_path: Path) -> None:
    step = Step()
    step.config.add_pass(faults.swaps_operands, after="cse")
    report = step.verify(*batch())
    report.repro(tmp_path / "difference.py")
    done = subprocess.run(
        [sys.executable, str(tmp_path / "difference.py")], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    lines = dict(line.split(maxsplit=1) for line in done.stdout.splitlines() if "now" not in line)
    now = {
        line.split(",")[0]: line.partition("now")[2].strip()
        for line in done.stdout.splitlines()
        if "now" in line
    }
    assert now["before"] == lines["expected"]
    assert now["after"] == lines["got"]
    assert now["before"] != now["after"]
    assert "monograph" not in (tmp_path / "difference.py").read_text()


def test_there_is_no_script_of_what_is_right(tmp_path: Path) -> None:
    with pytest.raises(mg.DefinitionError, match="no op"):
        Step().verify(*batch()).repro(tmp_path / "difference.py")


@pytest.mark.parametrize("options", [{"steps": 0}, {"against": "numpy"}])
def test_what_cannot_be_compared(options: dict[str, Any]) -> None:
    with pytest.raises(mg.DefinitionError, match="verify"):
        Step().verify(*batch(), **options)


_DRAWN = random.Random(3)  # which nothing puts back


@torch.library.custom_op("numerics_of_tests::halves", mutates_args=())
def halves(x: Tensor) -> Tensor:
    x.mul_(0.5)  # which it does not declare
    return x.clone()


@torch.library.custom_op("numerics_of_tests::noisy", mutates_args=())
def noisy(x: Tensor) -> Tensor:
    return x + _DRAWN.random()


for op in (halves, noisy):
    op.register_fake(torch.empty_like)
    op.register_autograd(lambda context, gradient: gradient)


class Custom(mg.Graph):
    """A step with an op of another library."""

    def __init__(self, op: Any) -> None:
        super().__init__()
        self.model, self.op = nn.Linear(4, 4), op
        self.add_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))
        self.config.backend("aten")

    def build(self, x: Tensor) -> Tensor:
        loss = (self.op(self.model(x).exp()) * 2).sum()
        loss.backward()  # at: backward
        return loss


def test_a_script_says_what_to_import(tmp_path: Path) -> None:
    report = Custom(noisy).verify(torch.ones(2, 4))
    report.repro(tmp_path / "difference.py")
    text = (tmp_path / "difference.py").read_text()
    assert "# import what defines numerics_of_tests::noisy first" in text
    assert "torch.ops.numerics_of_tests.noisy.default(" in text


def test_where_eager_mode_alone_fails() -> None:
    with pytest.raises(mg.CaptureError, match="eager mode fails in step 0, and the graph does not") as caught:
        Custom(halves).verify(torch.ones(2, 4))
    assert isinstance(caught.value, RuntimeError)  # as that of eager mode
    assert "modified by an inplace operation" in caught.value.message
    assert caught.value.where.file == __file__
    assert caught.value.where.line == line_of("backward", __file__)
    assert "mutates_args" in caught.value.hint


def test_the_line_of_the_call_is_named_where_backward_has_none() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = mg.train_graph(model, lambda made, y: (halves(made.exp()) * y).sum(), optimizer)
    step.config.backend("aten")
    with pytest.raises(mg.CaptureError, match="eager mode fails in step 0") as caught:
        step.verify(torch.ones(2, 4), torch.ones(2, 4))  # at: the call
    assert caught.value.where.line == line_of("the call", __file__)


def test_a_call_that_no_build_serves_is_told_with_the_build_that_it_got(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def scaled(x: Tensor, by: Tensor | None = None) -> Tensor:
        return x if by is None else x * by

    step = mg.trace(scaled)
    first = step.verify(torch.ones(2), torch.ones(2))  # of a graph that has no build yet, that is no news
    assert first.ok
    assert not first.made
    assert not step.verify(torch.ones(2), torch.ones(2)).made
    report = step.verify(torch.ones(2))
    assert report.ok
    assert report.made == f"build 1 was made for it ({step.builds[1].reason})"
    assert not caplog.text  # the report says so
    assert "  no build of the graph served this call: build 1 was made for it (the call has 1" in str(report)


@pytest.mark.parametrize("rate", [0.0, 0.1])
def test_an_update_that_moves_nothing_is_named(rate: float) -> None:
    model = nn.Linear(4, 4)
    step = mg.train_graph(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=rate))
    report = step.verify(torch.ones(2, 4), torch.ones(2, 4))
    assert report.ok
    assert report.idle == (("optimizer.0",) if rate == 0 else ())
    assert ("the learning rate of optimizer.0 is 0: its updates show nothing" in str(report)) == (rate == 0)


class ByHand(mg.Graph):
    """Gradients are added up from call to call, and the last call of a step updates."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Linear(4, 4)
        self.optimizer = self.add_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1), manual=True)
        self.config.backend("aten")
        self.config.keep_gradients()

    def build(self, x: Tensor, update: bool) -> Tensor:
        loss = self.model(x).square().mean()
        loss.backward()
        if update:
            self.optimizer.step()
            self.model.zero_grad()
        return loss


@pytest.mark.parametrize("rows", [4, 7])
def test_gradients_that_are_missing_are_named_and_no_size(rows: int) -> None:
    """After an update, where the call that updates finds the gradients of the calls before it: also at a size that varies."""
    step = ByHand()
    for size, update in ((4, False), (4, True), (4, False), (3, True)):
        step(torch.ones(size, 4), update)
    report = step.verify(torch.ones(rows, 4), True)
    assert report.ok
    assert "was made for it (the set of gradients that are there changed)" in report.made
    assert "after an update there are none: look at the call of a first batch then" in report.made
    step(torch.ones(4, 4), False)
    assert not step.verify(torch.ones(rows, 4), True).made  # as the loop calls it


def test_a_whole_batch_is_wanted_where_the_graph_splits_it() -> None:
    model = nn.Linear(4, 4)
    step = mg.train_graph(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1))
    step.config.backend("aten")
    step.config.set_gradient_accumulation_steps(4)
    step(torch.ones(8, 4), torch.zeros(8, 4))
    with pytest.raises(mg.SignatureError, match="has 2 rows: it cannot be split into 4 equal") as caught:
        step.verify(torch.ones(2, 4), torch.zeros(2, 4))  # one micro-batch
    assert "pass the whole batch, of which each micro-batch is a part" in caught.value.hint
    assert not step.verify(torch.ones(8, 4), torch.zeros(8, 4)).made
