"""Regions of torch.utils.checkpoint that eager mode runs twice, and where that shows: as eager, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import monograph as mg
from tests.support import assert_same


class Norm(nn.Module):
    """A norm without the counter that nn.BatchNorm1d has."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("var", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.batch_norm(x, self.mean, self.var, training=True)


class Counting(nn.Module):
    """Changes a buffer that it reads, and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.count = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        self.count += 1
        return x * (1 + self.calls)


class Drawing(nn.Module):
    """Draws in many ways, beside state that changes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + torch.rand_like(x).mul_(0.5) + torch.randn(4) * torch.empty(4).uniform_(0, 1)
        x = x * torch.randint(1, 3, (4,)) + F.dropout(x, 0.3)
        return x[:, torch.randperm(4)] + torch.empty(4, dtype=torch.int64).random_(5)


BODIES: dict[str, Callable[[], list[nn.Module]]] = {
    "batch norm": lambda: [nn.BatchNorm1d(4)],
    "cumulative": lambda: [nn.BatchNorm1d(4, momentum=None)],
    "frozen": lambda: [nn.BatchNorm1d(4).eval()],
    "functional": lambda: [Norm()],
    "dropout": lambda: [nn.Dropout(0.5)],
    "both": lambda: [nn.BatchNorm1d(4), nn.Dropout(0.5)],
    "many draws": lambda: [nn.BatchNorm1d(4), Drawing(), nn.Dropout(0.2)],
    "counting": lambda: [Counting()],
    "plain": list,
}
REPEATS = {
    "dropout",
    "both",
    "many draws",
}  # draws that the second run repeats, if it preserves the state of the generator
CHANGES = {"batch norm", "cumulative", "functional", "both", "many draws", "counting"}


class Net(nn.Module):
    def __init__(self, body: str, around: Callable[..., Any], **options: Any) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)
        self.body = nn.Sequential(nn.Linear(4, 4), *BODIES[body](), nn.ReLU(), nn.Linear(4, 4))
        self.around, self.options = around, options

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(F.dropout(self.around(self.body, self.first(x), **self.options), 0.2))


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [
        (torch.randn(5, 3, generator=generator), torch.randn(5, 2, generator=generator)) for _ in range(3)
    ]


def trained(make: Callable[[], nn.Module], *, graph: bool) -> list[Any]:
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = mg.train_graph(model, nn.MSELoss(), optimizer) if graph else None
    losses = []
    for x, y in batches():
        if step is not None:
            loss = step(x, y)
        else:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
        losses.append(loss.detach())
    counts = [module.count for module in model.modules() if isinstance(module, Counting)]
    return [losses, dict(model.state_dict()), counts, torch.get_rng_state()]


def compare(make: Callable[[], nn.Module]) -> None:
    assert_same(trained(make, graph=False), trained(make, graph=True))


@pytest.mark.one_case
@pytest.mark.parametrize("preserve", [True, False])
@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_region_runs_as_in_eager_mode(body: str, reentrant: bool, preserve: bool) -> None:
    def make() -> nn.Module:
        return Net(body, checkpoint, use_reentrant=reentrant, preserve_rng_state=preserve)

    refused = reentrant and (body in CHANGES or (body in REPEATS and not preserve))
    if not refused:
        compare(make)
        return
    with pytest.raises(mg.CaptureError, match="a region of torch\\.utils\\.checkpoint") as caught:
        trained(make, graph=True)
    assert caught.value.where.line
    assert "use_reentrant=False" in caught.value.hint


class Choosing(nn.Module):
    """Draws by what is in a tensor, which the second run may find changed."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.bernoulli(x.detach().sigmoid())


def test_draws_by_values_are_not_repeated() -> None:
    def make() -> nn.Module:
        made = Net("batch norm", checkpoint, use_reentrant=False)
        made.body.append(Choosing())
        return made

    with pytest.raises(mg.CaptureError, match=r"cannot repeat those of aten\.bernoulli\.default") as caught:
        trained(make, graph=True)
    assert caught.value.hint == "checkpoint what draws apart from what changes state"
    assert caught.value.where.line


def test_a_generator_of_its_own_goes_on_in_the_second_run() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.generator = torch.Generator().manual_seed(7)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.dropout(x, 0.5) * torch.rand(4, generator=self.generator)

    def make() -> nn.Module:
        made = Net("plain", checkpoint, use_reentrant=False, determinism_check="none")
        made.body.append(Own())
        made.body.append(nn.Linear(4, 4))
        return made

    compare(make)


OPTIONS = {
    "no early stop": {"early_stop": False},
    "no check": {"determinism_check": "none"},
}


@pytest.mark.one_case
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("body", ["batch norm", "both", "counting"])
def test_options(body: str, options: dict[str, Any]) -> None:
    compare(lambda: Net(body, checkpoint, use_reentrant=False, preserve_rng_state=False, **options))


def nested(body: nn.Module, x: torch.Tensor, **options: Any) -> torch.Tensor:
    return checkpoint(lambda x: checkpoint(body, x, **options) * 2, x, **options)  # type: ignore[no-any-return]


def twice(body: nn.Module, x: torch.Tensor, **options: Any) -> torch.Tensor:
    return checkpoint(body, checkpoint(body, x, **options), **options)  # type: ignore[no-any-return]


def sequential(body: Any, x: torch.Tensor, **options: Any) -> torch.Tensor:
    return checkpoint_sequential(body, 2, x, **options)  # type: ignore[no-any-return]


def under_autocast(body: nn.Module, x: torch.Tensor, **options: Any) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return checkpoint(body, x, **options).float()  # type: ignore[no-any-return]


def without_gradients(body: nn.Module, x: torch.Tensor, **options: Any) -> torch.Tensor:
    with torch.no_grad():
        return checkpoint(body, x, **options)  # type: ignore[no-any-return]


@pytest.mark.parametrize("around", [nested, twice, sequential, under_autocast, without_gradients])
@pytest.mark.parametrize("body", ["batch norm", "both", "plain"])
@pytest.mark.parametrize("preserve", [True, False])
def test_regions_in_other_places(body: str, around: Callable[..., Any], preserve: bool) -> None:
    compare(lambda: Net(body, around, use_reentrant=False, preserve_rng_state=preserve))


def test_a_reentrant_region_of_data_alone_has_no_gradient() -> None:
    class First(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(checkpoint(self.first, x, use_reentrant=True))

    with pytest.warns(UserWarning, match="None of the inputs have requires_grad"):
        compare(lambda: First("plain", checkpoint))


def test_a_region_that_shows_nothing_is_recorded_once() -> None:
    def ops(around: Callable[..., Any], **options: Any) -> list[str]:
        model = Net("dropout", around, **options)
        step = mg.train_graph(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1))
        step(*batches()[0])
        (recorded,) = (stage.program for stage in step.builds[0].stages if stage.name == "dce")
        return [str(node.target) for node in recorded.ops()]

    def plainly(body: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return body(x)  # type: ignore[no-any-return]

    assert ops(checkpoint, use_reentrant=False) == ops(plainly)
