"""Training steps on an accelerator: plain PyTorch on one side, a Graph on the other, the same bits."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import monograph as mg
from monograph.internals import upgrades
from tests.support import Side, assert_same, train_eagerly
from tests.support.steps import TrainStep

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator"),
]
STEPS = 5
Batch = tuple[torch.Tensor, torch.Tensor]


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    """Kernels that give the same bits in each run, for both sides."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


class Convolutions(nn.Module):
    """Convolutions, batch norms, pooling and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.second, self.drop, self.last = nn.Conv2d(16, 32, 3, stride=2), nn.Dropout(0.3), nn.Linear(32, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.drop(self.second(F.relu(self.norm(self.first(x)))).relu().mean((2, 3))))


class Attention(nn.Module):
    """Tables, attention, layer norms and GELU."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 32)
        self.layer = nn.TransformerEncoderLayer(
            32, 4, 64, dropout=0.1, batch_first=True, activation="gelu", norm_first=True
        )
        self.last = nn.Linear(32, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.layer(self.table(x)).mean(1))


class Recurrent(nn.Module):
    """An LSTM and what reads its last step."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.last = nn.LSTM(8, 16, 2, batch_first=True), nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.lstm(x)[0][:, -1])


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.2), nn.LayerNorm(32), nn.Linear(32, 5))


INPUTS: dict[Callable[[], nn.Module], Callable[[torch.Generator], torch.Tensor]] = {
    layers: lambda g: torch.randn(6, 8, generator=g),
    Convolutions: lambda g: torch.randn(6, 3, 12, 12, generator=g),
    Attention: lambda g: torch.randint(50, (6, 9), generator=g),
    Recurrent: lambda g: torch.randn(6, 7, 8, generator=g),
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adam, one by one": lambda p: torch.optim.Adam(p, lr=0.01, foreach=False),
    "adam, fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "adam, capturable": lambda p: torch.optim.Adam(p, lr=0.01, capturable=True),
    "adam, rate a tensor": lambda p: torch.optim.Adam(
        p, lr=torch.tensor(0.01, device="cuda"), capturable=True
    ),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "sgd, fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9),
}


def batches(make: Callable[[], nn.Module]) -> list[Batch]:
    generator = torch.Generator().manual_seed(3)
    return [
        (INPUTS[make](generator).cuda(), torch.randint(5, (6,), generator=generator).cuda())
        for _ in range(STEPS)
    ]


def side(make: Callable[[], nn.Module], optimizer: str = "adamw") -> Side:
    torch.manual_seed(0)
    model = make().cuda()
    optimizing = OPTIMIZERS[optimizer](model.parameters())
    return Side(model, optimizing, torch.optim.lr_scheduler.StepLR(optimizing, 2, gamma=0.5))


def cross_entropy(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y)


def assert_trains_alike(
    plain: Side, traced: Side, given: list[Batch], loss_of: Callable[..., torch.Tensor] = cross_entropy
) -> TrainStep:
    torch.manual_seed(7)
    states: list[torch.Tensor] = []
    expected = train_eagerly(
        plain, loss_of, given, lambda _step, _loss: states.append(torch.cuda.get_rng_state())
    )
    torch.manual_seed(7)
    step = TrainStep(traced, loss_of)
    for number, batch in enumerate(given):
        got = {"loss": step(*batch).detach(), **traced.state()}
        assert_same(expected[number], got, f"step {number}")
        assert_same(states[number], torch.cuda.get_rng_state(), f"the device's generator after step {number}")
    return step


@pytest.mark.every_case
@pytest.mark.parametrize("make", [layers, Convolutions, Attention], ids=lambda make: make.__name__)
def test_a_model_trains_as_in_eager_mode(make: Callable[[], nn.Module]) -> None:
    step = assert_trains_alike(side(make), side(make), batches(make))
    assert len(step.builds) == 1


@pytest.mark.every_case
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_an_optimizer_updates_as_in_eager_mode(optimizer: str) -> None:
    assert (
        len(assert_trains_alike(side(layers, optimizer), side(layers, optimizer), batches(layers)).builds)
        == 1
    )


@pytest.mark.every_case
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_autocast(dtype: torch.dtype) -> None:
    def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", dtype=dtype):
            return F.cross_entropy(model(x), y)

    assert_trains_alike(side(Convolutions), side(Convolutions), batches(Convolutions), loss_of)


def test_a_scaler_skips_a_step_with_infinite_gradients() -> None:
    given = batches(layers)
    given[2][0][0, 0] = float("inf")
    plain, traced = side(layers), side(layers)
    traced.scheduler = None  # that of the plain one is not moved here

    def scaler() -> torch.amp.GradScaler:
        return torch.amp.GradScaler("cuda", init_scale=1000.0, growth_factor=1.5, growth_interval=2)

    torch.manual_seed(7)
    scaling, expected = scaler(), []
    for x, y in given:
        plain.optimizer.zero_grad()
        loss = F.cross_entropy(plain.model(x), y)
        scaling.scale(loss).backward()
        scaling.step(plain.optimizer)
        scaling.update()
        expected.append({"loss": loss.detach().clone(), **plain.state()})
    torch.manual_seed(7)
    step = TrainStep(traced, cross_entropy)
    step.set_grad_scaler(scaler())
    for number, batch in enumerate(given):
        assert_same(expected[number], {"loss": step(*batch).detach(), **traced.state()}, f"step {number}")


def test_channels_last() -> None:
    plain, traced = side(Convolutions), side(Convolutions)
    for each in (plain, traced):
        each.model.to(memory_format=torch.channels_last)
    given = [(x.to(memory_format=torch.channels_last), y) for x, y in batches(Convolutions)]
    assert_trains_alike(plain, traced, given)


def test_a_checkpoint_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    given = batches(layers)
    torch.manual_seed(7)
    step = TrainStep(side(layers), cross_entropy)
    for batch in given[:2]:
        step(*batch)
    mg.save(step.state_dict(), tmp_path / "state")
    expected = [step(*batch).detach().clone() for batch in given[2:]]
    again = TrainStep(side(layers), cross_entropy)
    again.load_state_dict(mg.load(tmp_path / "state"))
    assert_same(expected, [again(*batch).detach() for batch in given[2:]])


def test_many_steps_in_one_call() -> None:
    given = batches(layers)
    torch.manual_seed(7)
    single = TrainStep(side(layers), cross_entropy)
    expected = torch.stack([single(*batch).detach().clone() for batch in given])
    torch.manual_seed(7)
    step = TrainStep(side(layers), cross_entropy)
    got = step.many(*(torch.stack(column) for column in zip(*given, strict=True)))
    assert_same(expected, got.detach())


def test_a_model_on_the_device_reads_arguments_of_the_host() -> None:
    def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(x.cuda()), y.cuda())

    given = [(x.cpu(), y.cpu()) for x, y in batches(layers)]
    assert_trains_alike(side(layers), side(layers), given, loss_of)


def test_an_artifact_runs_without_the_model(tmp_path: Path) -> None:
    given = batches(layers)
    step = TrainStep(side(layers), cross_entropy)
    torch.manual_seed(7)
    expected = step(*given[0]).detach().clone()
    mg.save(step, tmp_path / "step.mg")
    again = mg.load(tmp_path / "step.mg")
    torch.manual_seed(8)
    second = step(*given[1]).detach().clone()
    torch.manual_seed(8)
    assert_same(second, again(*given[1]).detach())
    assert torch.isfinite(expected)


@pytest.mark.parametrize("make", [layers, Convolutions, Attention], ids=lambda make: make.__name__)
def test_compiled_by_inductor(make: Callable[[], nn.Module]) -> None:
    given = batches(make)
    plain, traced = side(make), side(make)
    for module in (*plain.model.modules(), *traced.model.modules()):
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # compiled code draws other masks
        if isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0
    torch.manual_seed(7)
    expected = [each["loss"] for each in train_eagerly(plain, cross_entropy, given)]
    step = TrainStep(traced, cross_entropy)
    step.config.backend("inductor")
    for loss, batch in zip(expected, given, strict=True):
        torch.testing.assert_close(step(*batch).detach(), loss, rtol=2e-3, atol=2e-3)


def test_a_recurrent_layer_of_cudnn_is_refused() -> None:
    step = TrainStep(side(Recurrent), cross_entropy)
    with pytest.raises(mg.CaptureError, match="a recurrent layer of cuDNN"):
        step(*batches(Recurrent)[0])


def test_the_default_backend_stays_bitwise_where_it_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upgrades, "_WORTH_IT", 0.0)
    assert_trains_alike(side(layers), side(layers), batches(layers) * 3)
