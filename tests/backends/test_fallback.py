"""A step that cannot be compiled: the capture is there already, and is lowered once more for `aten`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

import monograph as mg
from monograph import backends
from monograph.backends import LoweredProgram, LoweringRequest
from monograph.errors import BackendError
from tests.support import assert_same

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "AdamW": lambda parameters: AdamW(parameters, weight_decay=0.1),
    "AdamW, foreach": lambda parameters: AdamW(parameters, foreach=True),
    "AdamW, fused": lambda parameters: AdamW(parameters, fused=True),
    "Adam, fused": lambda parameters: Adam(parameters, fused=True, amsgrad=True, weight_decay=0.1),
    "SGD": lambda parameters: SGD(parameters, lr=0.1, momentum=0.9),
    "SGD, fused": lambda parameters: SGD(parameters, lr=0.1, momentum=0.9, fused=True),
    "Adagrad, fused": lambda parameters: Adagrad(parameters, fused=True, lr_decay=0.1),
}


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(order: LoweringRequest) -> LoweredProgram:
        raise BackendError("no C++ code can be compiled here")

    monkeypatch.setitem(backends.LOWER, "inductor", refusing)  # type: ignore[arg-type]


class Step(mg.Graph):
    """Counts and prints, and draws random numbers."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, *, scaled: bool, backend: str) -> None:
        super().__init__()
        self.model, self.calls = model, 0
        self.add_optimizer(optimizer)
        if scaled:
            self.set_grad_scaler(torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2))
        self.config.backend(backend)

    def build(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        print("build")
        self.calls += 1
        loss = F.cross_entropy(self.model(x), y)
        loss.backward()
        return loss


def made(name: str, backend: str, *, scaled: bool = False) -> tuple[Step, Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 3))
    optimizer = OPTIMIZERS[name](model.parameters())
    return Step(model, optimizer, scaled=scaled, backend=backend), optimizer


def trail(name: str, backend: str, *, scaled: bool, eager: bool = False) -> tuple[list[Any], Step]:
    """The losses, and what each step changes."""
    graph, optimizer = made(name, backend, scaled=scaled)
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(4):
        x, y = torch.randn(5, 4, generator=generator), torch.randint(3, (5,), generator=generator)
        loss = (graph.eager if eager else graph)(x, y).detach().clone()
        state = copy.deepcopy([graph.model.state_dict(), optimizer.state_dict(), graph.calls])
        found.append([loss, state, torch.get_rng_state()])
    return found, graph


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.usefixtures("no_compiler")
def test_build_runs_once_and_all_bits_are_those_of_eager_mode(
    name: str, scaled: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    expected, _ = trail(name, "aten", scaled=scaled, eager=True)
    capsys.readouterr()
    trail(name, "aten", scaled=scaled)
    printed = capsys.readouterr().out
    found, graph = trail(name, "inductor", scaled=scaled)
    assert_same(expected, found)
    assert capsys.readouterr().out == printed
    (build,) = graph.builds
    assert build.backend == "aten"
    assert build.notes == ("inductor could not be used: no C++ code can be compiled here",)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.usefixtures("no_compiler")
def test_a_capture_is_the_same_for_each_backend(name: str) -> None:
    texts = []
    for backend in ("aten", "inductor"):
        (build,) = trail(name, backend, scaled=True)[1].builds
        texts.append([build.guards.conditions.about, *(str(stage.program) for stage in build.stages)])
    assert texts[0] == texts[1]


@pytest.mark.usefixtures("no_compiler")
def test_arithmetic_raises_where_python_does_and_needs_no_build() -> None:
    graph = mg.trace(lambda x, w: x * (1 / w))
    graph.config.backend("inductor")
    graph(torch.ones(2), 2.0)
    with pytest.raises(ZeroDivisionError) as caught:
        graph(torch.ones(2), 0.0)
    assert str(caught.traceback[-1].path) == __file__
    assert graph(torch.ones(2), 4.0).tolist() == [0.25, 0.25]
    assert len(graph.builds) == 1


@pytest.mark.long
def test_compiled_arithmetic_depends_on_numbers_that_raise_nothing() -> None:
    graph = mg.trace(lambda x, w: x * (1 / w))
    graph.config.backend("inductor")
    graph(torch.ones(2), 2.0)
    with pytest.raises(ZeroDivisionError):
        graph(torch.ones(2), 0.0)
    assert graph(torch.ones(2), 4.0).tolist() == [0.25, 0.25]
    assert [build.backend for build in graph.builds] == ["inductor"]


@pytest.mark.usefixtures("no_compiler")
def test_an_error_after_the_capture_takes_first_state_away(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(order: LoweringRequest) -> LoweredProgram:
        raise RuntimeError("out of luck")

    monkeypatch.setitem(backends.LOWER, "aten", broken)  # type: ignore[arg-type]
    graph, optimizer = made("AdamW", "inductor")
    with pytest.raises(RuntimeError, match="out of luck"):
        graph(torch.ones(5, 4), torch.zeros(5, dtype=torch.int64))
    assert not optimizer.state
    assert graph.calls == 0
