"""The `exact` backend: compiled updates with the bits of plain PyTorch."""

from __future__ import annotations

import copy
import errno
import gc
import os
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import monograph as mg
from monograph.elementwise import compiling
from monograph.internals.internals import internals_of
from tests.support.seen import Seen, ops_of

Make = Callable[[Iterable[torch.Tensor]], Optimizer]
LOSS = nn.CrossEntropyLoss()
OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, maximize=True),
    "adam": lambda p: torch.optim.Adam(p, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p),
    "amsgrad": lambda p: torch.optim.AdamW(p, amsgrad=True),
    "lists": lambda p: torch.optim.AdamW(p, foreach=True),
    "tensor-lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-3)),
    "rmsprop": lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "nadam": lambda p: torch.optim.NAdam(p),
    "radam": lambda p: torch.optim.RAdam(p),
    "adamax": lambda p: torch.optim.Adamax(p),
    "rprop": lambda p: torch.optim.Rprop(p),
    "adafactor": lambda p: torch.optim.Adafactor(p),
}


def make_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    """A model whose parameters leave any number of elements over from loops for vectors."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 33), nn.LayerNorm(33), nn.GELU(), nn.Linear(33, 3)).to(dtype)


def batches(count: int, dtype: torch.dtype = torch.float32) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Data."""
    source = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(7, 10, generator=source, dtype=torch.float64).to(dtype),
            torch.randint(3, (7,), generator=source),
        )
        for _ in range(count)
    ]


class Eager:
    """The same training in plain PyTorch."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def __call__(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss: torch.Tensor = LOSS(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def both(make: Make, dtype: torch.dtype = torch.float32, backend: str = "exact") -> tuple[Eager, mg.Graph]:
    """Plain PyTorch, and a graph on the same weights."""
    model = make_model(dtype)
    eager = Eager(model, make(model.parameters()))
    model = make_model(dtype)
    graph = mg.train_graph(model, LOSS, make(model.parameters()))
    graph.config.backend(backend)
    return eager, graph


def state_of(graph: mg.Graph) -> tuple[nn.Module, Optimizer]:
    """The model and the optimizer of a graph."""
    registry = internals_of(graph).registry
    return next(iter(registry.modules().values())), registry.optimizers[0].optimizer


def bits(tensor: torch.Tensor) -> Any:
    """A tensor as bytes."""
    return tensor.detach().contiguous().numpy().tobytes()


def check_same(eager: Eager, graph: mg.Graph) -> None:
    """Parameters and optimizer state are the same, bit for bit."""
    model, optimizer = state_of(graph)
    for one, other in zip(eager.model.parameters(), model.parameters(), strict=True):
        assert bits(one) == bits(other)
        known = eager.optimizer.state[one]
        assert set(known) == set(optimizer.state[other])
        for name, item in known.items():
            if isinstance(item, torch.Tensor):
                assert bits(item) == bits(optimizer.state[other][name]), name
            else:
                assert item == optimizer.state[other][name], name


def compiled_ops(graph: mg.Graph) -> int:
    """How many ops of the newest build are in compiled code."""
    (note,) = [note for note in graph.builds[-1].notes if note.startswith("exact: ")]
    first = note.split()[1]
    return int(first) if first.isdigit() else 0


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=list(OPTIMIZERS))
def test_an_update_has_eagers_bits(make: Make) -> None:
    eager, graph = both(make)
    for batch in batches(6):
        assert bits(eager(*batch)) == bits(graph(*batch))
    check_same(eager, graph)
    assert graph.backend == "exact"
    assert compiled_ops(graph) > 0


@pytest.mark.parametrize("name", ["momentum", "adamw", "amsgrad"])
def test_in_float64(name: str) -> None:
    eager, graph = both(OPTIMIZERS[name], torch.float64)
    for batch in batches(4, torch.float64):
        assert bits(eager(*batch)) == bits(graph(*batch))
    check_same(eager, graph)
    assert compiled_ops(graph) > 0


def test_optimizers_that_compute_otherwise_run_op_by_op() -> None:
    eager, graph = both(lambda p: torch.optim.AdamW(p, fused=True))
    for batch in batches(3):
        assert bits(eager(*batch)) == bits(graph(*batch))
    check_same(eager, graph)
    assert graph.backend == "exact"
    assert compiled_ops(graph) == 0


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 1e38, 1e-38, 0.0, -0.0])
def test_values_of_all_sorts(value: float) -> None:
    eager, graph = both(OPTIMIZERS["adamw"])
    for number, (x, y) in enumerate(batches(4)):
        if number == 2:
            x = x.clone()
            x[0, :5] = value
            x[:, 7] = value
        eager(x, y)
        graph(x, y)
    check_same(eager, graph)


def test_groups_and_schedulers_move_the_numbers() -> None:
    def make(parameters: Iterable[torch.Tensor]) -> Optimizer:
        first, *others = parameters
        groups = [{"params": [first], "lr": 0.1, "weight_decay": 0.0}, {"params": others}]
        return torch.optim.AdamW(groups, lr=0.01)

    eager, graph = both(make)
    schedulers = [
        torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.3)
        for optimizer in (eager.optimizer, state_of(graph)[1])
    ]
    for batch in batches(6):
        eager(*batch)
        graph(*batch)
        for scheduler in schedulers:
            scheduler.step()
    check_same(eager, graph)
    assert len(graph.builds) == 1


def test_numbers_that_python_has_to_compute() -> None:
    """With a beta of 0, `lerp` takes another way at the ends of tensors: the update is left to eager's kernels."""
    eager, graph = both(lambda p: torch.optim.Adam(p, betas=(0.0, 0.99)))
    for batch in batches(14):
        assert bits(eager(*batch)) == bits(graph(*batch))
    check_same(eager, graph)
    assert graph.backend == "exact"


def test_a_number_that_eager_mode_refuses_is_its_error_and_changes_nothing() -> None:
    eager, graph = both(OPTIMIZERS["momentum"])
    first, second, third = batches(3)
    eager(*first)
    graph(*first)
    for optimizer in (eager.optimizer, state_of(graph)[1]):
        optimizer.param_groups[0]["lr"] = 1e300
    with pytest.raises(RuntimeError, match="overflow"):
        graph(*second)
    for optimizer in (eager.optimizer, state_of(graph)[1]):
        optimizer.param_groups[0]["lr"] = 0.1
    check_same(eager, graph)
    eager(*third)
    graph(*third)
    check_same(eager, graph)


def test_who_looks_at_ops_sees_all_of_them() -> None:
    eager, graph = both(OPTIMIZERS["adamw"])
    first, second = batches(2)
    eager(*first)
    graph(*first)
    with Seen() as seen:
        graph(*second)
    eager(*second)
    check_same(eager, graph)
    assert not ops_of(graph.builds[0].program) - seen.ops


@pytest.mark.every_case
@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("name", ["adamw", "lists"])
@pytest.mark.parametrize("backend", ["aten", "exact"])
def test_an_update_is_in_place_on_lists_and_after_micro_batches(backend: str, name: str, steps: int) -> None:
    eager, graph = both(OPTIMIZERS[name], backend=backend)
    graph.config.set_gradient_accumulation_steps(steps)
    data = batches(6)
    for parts in zip(*(data[number::steps] for number in range(steps)), strict=True):
        eager.optimizer.zero_grad()
        for x, y in parts:
            (LOSS(eager.model(x), y) / steps).backward()
        eager.optimizer.step()
        graph(*map(torch.cat, zip(*parts, strict=True)))
    check_same(eager, graph)
    places = {port.path: place for place, port in enumerate(graph.builds[0].program.outputs)}
    written = graph.builds[0].executor._runner.written
    assert {places[name] for name in places if name.startswith("model.")} <= written
    assert backend == "aten" or compiled_ops(graph) > 0


def test_a_state_that_the_step_returns_is_updated_apart() -> None:
    class Step(mg.Graph):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model
            self.add_optimizer(torch.optim.SGD(model.parameters(), lr=0.5))

        def build(self, x: torch.Tensor) -> torch.Tensor:
            loss = self.model(x).sum()
            loss.backward()
            return self.model.weight.detach()  # type: ignore[no-any-return, union-attr]

    torch.manual_seed(0)
    layer = nn.Linear(4, 3)
    before, weight = layer.weight.detach().clone(), layer.weight
    step = Step(layer)
    step.config.backend("exact")
    x = torch.ones(2, 4)
    shown = step(x)
    gradient = x.sum(0).expand(3, 4)
    assert torch.equal(weight, before - 0.5 * gradient)
    assert torch.equal(shown, weight)


def test_without_a_compiler_the_step_runs_op_by_op(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compiling, "c_compiler", lambda: None)
    monkeypatch.setattr(compiling, "missing", list)
    eager, graph = both(OPTIMIZERS["adadelta"])
    for batch in batches(2):
        assert bits(eager(*batch)) == bits(graph(*batch))
    check_same(eager, graph)
    assert graph.backend == "aten"
    assert "no compiler" in caplog.text
    assert "no compiler" in str(graph.explain())


def test_without_room_for_a_process_the_step_runs_op_by_op(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_args: Any, **_options: Any) -> Any:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setenv("MONOGRAPH_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compiling.subprocess, "Popen", refuse)
    eager, graph = both(OPTIMIZERS["adadelta"])
    for batch in batches(2):
        assert bits(eager(*batch)) == bits(graph(*batch))
    check_same(eager, graph)
    assert graph.backend == "aten"
    assert "no process can be started" in str(graph.explain())
    assert "ulimit" in caplog.text


def test_a_saved_step_runs_on_it(tmp_path: Any) -> None:
    eager, graph = both(OPTIMIZERS["adamw"])
    first, *others = batches(4)
    eager(*first)
    graph(*first)
    mg.save(graph, tmp_path / "step")
    loaded = mg.load(tmp_path / "step")
    for batch in others:
        assert bits(eager(*batch)) == bits(loaded(*batch))
    assert loaded.signatures["train"].backend == "exact"


def test_a_copy_of_the_state_from_before_is_no_part_of_the_update() -> None:
    eager, graph = both(OPTIMIZERS["momentum"])
    first, second, third = batches(3)
    eager(*first)
    graph(*first)
    saved = copy.deepcopy(graph.state_dict())
    loss = graph(*second)
    graph.load_state_dict(saved)
    assert bits(graph(*second)) == bits(loss)
    for batch in (second, third):
        eager(*batch)
    graph(*third)
    check_same(eager, graph)


def test_it_is_compiled_under_another_default_device() -> None:
    eager, graph = both(OPTIMIZERS["adamw"])
    for number, batch in enumerate(batches(3)):
        with torch.device("meta" if number else "cpu"):
            loss = graph(*batch)
        assert bits(eager(*batch)) == bits(loss)
    check_same(eager, graph)
    assert graph.backend == "exact"
    assert compiled_ops(graph) > 0


def test_the_arguments_of_the_first_step_are_not_kept() -> None:
    _eager, graph = both(OPTIMIZERS["adamw"])
    first, second = batches(2)
    graph(*first)
    kept = weakref.ref(first[0])
    graph(*second)
    del first
    gc.collect()
    assert kept() is None
