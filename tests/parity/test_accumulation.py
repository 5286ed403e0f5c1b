"""Gradient accumulation: one call is a mini-batch of several micro-batches, against the plain loop over them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import monograph as mg
from monograph.demo import load_example
from tests.support import assert_same

CALLS = 4
BATCH = 12
Batch = tuple[Any, ...]


class Net(nn.Module):
    """BatchNorm, dropout, a counter that the forward moves, a frozen parameter and one without gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.drop, self.unused = nn.Dropout(0.3), nn.Linear(2, 2)
        self.last.bias.requires_grad_(False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.last(self.drop(self.norm(self.first(x)).relu()))


class Tied(nn.Module):
    """One weight at two places, and a buffer that is assigned anew."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.b.weight = self.a.weight
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return self.c(self.b(self.a(x - self.mean).tanh()).tanh())


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(2, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.lstm(x.reshape(-1, 3, 2))[0][:, -1])


class Powered(nn.Module):
    """Spectral norm: buffers that an iteration moves in each forward, weights computed from them."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 8))
        self.b = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x).relu())


class Carrying(nn.Module):
    """Hidden states in a list go from micro-batch to micro-batch; a norm of gradients and noise of its own besides."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)
        self.hidden = [torch.zeros(3, 6), torch.ones(3, 6)]
        self.register_buffer("norm", torch.ones(()))
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x + self.hidden[0] * self.hidden[1]).tanh()
        self.hidden = [x.detach(), self.hidden[0] + 1]
        return self.last(F.dropout(x, 0.2))


def classes(generator: torch.Generator) -> Batch:
    return torch.randn(BATCH, 6, generator=generator), torch.randint(3, (BATCH,), generator=generator)


def loss_of(model: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    return F.cross_entropy(model(x), y)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def one_cycle(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=CALLS + 1)


@dataclass(frozen=True)
class Case:
    """`forward(model, *micro_batch)` gives the losses to call backward() on, and what is returned besides."""

    name: str
    model: Callable[[], nn.Module] = Net
    forward: Callable[..., Any] = lambda model, x, y: ([loss_of(model, x, y)], None)
    after: Callable[[nn.Module], Any] = lambda model: None  # once, on the summed gradients; is returned
    optimizer: Callable[[Any], torch.optim.Optimizer] = adamw
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None
    batch: Callable[[torch.Generator], Batch] = classes
    steps: int = 4
    whole: frozenset[int] = field(default_factory=frozenset)  # positions of arguments that are no batch
    amp: torch.dtype | None = None
    scaled: bool = False
    average: bool = False
    builds: int = 1

    def __str__(self) -> str:
        return self.name


def clipped(model: nn.Module) -> Any:
    return nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def clipped_by_value(model: nn.Module) -> Any:
    nn.utils.clip_grad_value_(model.parameters(), 0.01)


def noisy(model: nn.Module) -> Any:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad = parameter.grad + 0.01 * torch.randn(parameter.shape)


def centred(model: nn.Module) -> Any:
    for parameter in model.parameters():
        if parameter.grad is not None and parameter.dim() > 1:
            parameter.grad.sub_(parameter.grad.mean(0, keepdim=True))


def decayed(model: nn.Module) -> Any:
    """Changes weights behind backward(), before the optimizer does."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.99)


def adaptive(model: Any) -> Any:
    """Clips by a mean of norms that a buffer has, and adds noise of a generator."""
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    for parameter in model.parameters():
        parameter.grad.mul_(torch.clamp(model.norm / norm, max=1.0))
        parameter.grad += 0.01 * torch.randn(parameter.shape, generator=model.generator)
    model.norm.lerp_(norm, 0.1)
    return norm, model.first.weight.grad


def by_calls(model: nn.Module) -> Any:
    """Reads a buffer that each micro-batch has moved."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad = parameter.grad / model.calls


def two_losses(model: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    out = model(x)
    return [F.cross_entropy(out, y), 0.1 * out.square().mean()], {
        "logits": out,
        "entropy": out.softmax(1).mean(0),
    }


def some_decayed(model: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    """Later losses reach some of the parameters only."""
    first, last = model.first.weight, model.last.weight
    return [
        0.1 * first.square().sum(),
        loss_of(model, x, y),
        0.1 * last.abs().sum(),
        0.2 * last.square().sum(),
    ], None


def penalised(model: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    x = x.detach().requires_grad_()
    loss = loss_of(model, x, y)
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    return [loss + slope.square().sum()], [slope.norm(dim=1)]


def weighted(model: Any, x: torch.Tensor, y: torch.Tensor, weights: torch.Tensor, scale: float) -> Any:
    return [scale * F.cross_entropy(model(x), y, weight=weights)], (weights.sum(), y)


def weighted_batch(generator: torch.Generator) -> Batch:
    scale = float(torch.rand((), generator=generator))
    return (*classes(generator), torch.rand(3, generator=generator), scale)


def tokens(generator: torch.Generator) -> Batch:
    return torch.randint(32, (8, 9), generator=generator), torch.randint(32, (8, 9), generator=generator)


def gpt() -> nn.Module:
    return load_example("models/gpt").GPT(32, context=9, width=16, num_layers=2, num_heads=2, dropout=0.1)


def next_token(model: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    return [F.cross_entropy(model(x).flatten(0, 1), y.flatten())], None


CASES = [
    Case("plain"),
    Case("two_steps", steps=2),
    Case("each_row", model=Tied, steps=BATCH),
    Case("clip", after=clipped),
    Case("clip_value", after=clipped_by_value),
    Case("noise", after=noisy),
    Case("centred", after=centred),
    Case("by_calls", after=by_calls),
    Case("two_losses", forward=two_losses, after=clipped),
    Case("some_decayed", forward=some_decayed, after=clipped),
    Case("penalty", forward=penalised, model=Tied),
    Case("recurrent", model=Recurrent),
    Case("spectral", model=Powered),
    Case("carried", model=Carrying, after=adaptive),
    Case("decayed", after=decayed),
    Case("replicated", forward=weighted, batch=weighted_batch, whole=frozenset({2})),
    Case(
        "sgd",
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
        scheduler=one_cycle,
    ),
    Case("radam", optimizer=lambda p: torch.optim.RAdam(p, lr=0.01)),
    Case("adafactor", optimizer=lambda p: torch.optim.Adafactor(p, lr=0.01)),
    Case("muon_free_asgd", optimizer=lambda p: torch.optim.ASGD(p, lr=0.01)),
    Case("fused", optimizer=lambda p: torch.optim.AdamW(p, lr=0.01, fused=True)),
    Case("tensor_lr", optimizer=lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01))),
    Case("amp", amp=torch.bfloat16, after=clipped),
    Case("scaler", scaled=True, after=clipped, amp=torch.float16),
    Case("average", average=True, scheduler=one_cycle),
    Case("gpt", model=gpt, forward=next_token, batch=tokens, after=clipped, scheduler=one_cycle),
]


class TrainStep(mg.Graph):
    def __init__(self, case: Case, side: Side) -> None:
        super().__init__()
        self.model, self.forward, self.after = side.model, case.forward, case.after
        self.add_optimizer(side.optimizer, lr_sch=side.scheduler)
        if side.scaler is not None:
            self.set_grad_scaler(side.scaler)
        if case.amp is not None:
            self.config.enable_amp(dtype=case.amp)
        if case.average:
            self.add_ema(self.model, 0.9)
        self.config.set_gradient_accumulation_steps(case.steps)

    def build(self, *batch):
        losses, more = self.forward(self.model, *batch)
        for index, loss in enumerate(losses):
            loss.backward(retain_graph=index + 1 < len(losses))
        return losses, more, self.after(self.model)


class Side:
    """A model with what trains it."""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(0)
        self.model = case.model()
        self.optimizer = case.optimizer(self.model.parameters())
        self.scheduler = None if case.scheduler is None else case.scheduler(self.optimizer)
        self.scaler = (
            torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2) if case.scaled else None
        )

    def state(self) -> dict[str, Any]:
        return {
            "model": {name: tensor.clone() for name, tensor in self.model.state_dict().items()},
            "optimizer": copy.deepcopy(self.optimizer.state_dict()),
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
            "rng": torch.get_rng_state(),
        }


def make_batches(case: Case) -> list[Batch]:
    generator = torch.Generator().manual_seed(7)
    return [case.batch(generator) for _ in range(CALLS)]


def plain_loop(case: Case) -> list[dict[str, Any]]:
    """What PyTorch alone does."""
    side = Side(case)
    average = torch.optim.swa_utils.AveragedModel(
        side.model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    torch.manual_seed(1)
    trail = []
    for batch in make_batches(case):
        side.optimizer.zero_grad()
        returned = [plain_micro_step(case, side, micro) for micro in micro_batches(case, batch)]
        if side.scaler is not None:
            side.scaler.unscale_(side.optimizer)
        norm = case.after(side.model)
        if side.scaler is not None:
            side.scaler.step(side.optimizer)
            side.scaler.update()
        else:
            side.optimizer.step()
        if side.scheduler is not None:
            side.scheduler.step()
        average.update_parameters(side.model)
        trail.append({"returned": (*packed(returned), norm), **side.state()})
        if case.average:
            trail[-1]["average"] = {name: tensor.clone() for name, tensor in average.state_dict().items()}
    return trail


def micro_batches(case: Case, batch: Batch) -> list[Batch]:
    columns = [
        item.chunk(case.steps)
        if isinstance(item, torch.Tensor) and index not in case.whole
        else [item] * case.steps
        for index, item in enumerate(batch)
    ]
    return list(zip(*columns, strict=True))


def plain_micro_step(case: Case, side: Side, micro: Batch) -> Any:
    with torch.autocast("cpu", dtype=case.amp or torch.bfloat16, enabled=case.amp is not None):
        losses, more = case.forward(side.model, *micro)
    for index, loss in enumerate(losses):
        part = loss / case.steps
        if side.scaler is not None:
            part = side.scaler.scale(part)
        part.backward(retain_graph=index + 1 < len(losses))
    return losses, more


def packed(items: list[Any]) -> Any:
    first = items[0]
    if isinstance(first, torch.Tensor):
        detached = [item.detach() for item in items]
        return torch.cat(detached) if first.dim() else torch.stack(detached)
    if isinstance(first, dict):
        return {key: packed([item[key] for item in items]) for key in first}
    if isinstance(first, (list, tuple)):
        return type(first)(packed(list(column)) for column in zip(*items, strict=True))
    return first


def graph_loop(case: Case, step: TrainStep, side: Side, *, eager: bool = False) -> list[dict[str, Any]]:
    trail = []
    torch.manual_seed(1)
    for batch in make_batches(case):
        arguments = [mg.replicated(item) if index in case.whole else item for index, item in enumerate(batch)]
        returned = step.eager(*arguments) if eager else step(*arguments)
        trail.append({"returned": detached(returned), **side.state()})
        if case.average:
            average = step.state_dict()["ema.model"]
            trail[-1]["average"] = {name: tensor.clone() for name, tensor in average.items()}
    return trail


def detached(item: Any) -> Any:
    if isinstance(item, torch.Tensor):
        return item.detach()
    if isinstance(item, dict):
        return {key: detached(entry) for key, entry in item.items()}
    return type(item)(map(detached, item)) if isinstance(item, (list, tuple)) else item


@pytest.mark.parametrize("eager", [False, True], ids=["graph", "eager"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_one_call_is_the_loop_over_micro_batches(case: Case, eager: bool) -> None:
    expected = plain_loop(case)
    side = Side(case)
    step = TrainStep(case, side)
    assert_same(expected, graph_loop(case, step, side, eager=eager))
    if not eager:
        assert len(step.builds) == case.builds, step.explain()
        assert [part.name for part in step.builds[0].program.parts] == ["accumulate", "update"]


def test_the_programs_run_so_often() -> None:
    """A dispatch mode sees the ops of `accumulate` for each micro-batch, and those of `update` once."""
    case = Case("counted", steps=3)
    side = Side(case)
    step = TrainStep(case, side)
    (batch, *_) = make_batches(case)
    step(*batch)
    seen: list[str] = []

    class Seeing(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func.name())
            return func(*args, **(kwargs or {}))

    with Seeing():
        step(*batch)
    assert (
        seen.count("aten::native_batch_norm") + seen.count("aten::_native_batch_norm_legit_functional") == 3
    )
    assert seen.count("aten::stack") + seen.count("aten::cat") >= 1
    accumulate, update = step.builds[0].program.parts
    names = {
        part.name: [node.target.name() for node in part.ops() if hasattr(node.target, "name")]
        for part in (accumulate, update)
    }
    once = set(names["update"]) - set(names["accumulate"]) - {"aten::add.Tensor"}
    assert once
    for name in once:
        assert seen.count(name) == names["update"].count(name), name


def test_another_number_of_steps_is_another_build() -> None:
    case = Case("steps", steps=3)
    side = Side(case)
    step = TrainStep(case, side)
    (batch, *_) = make_batches(case)
    assert step(*batch)[0][0].shape == (3,)
    step.config.set_gradient_accumulation_steps(2)
    assert step(*batch)[0][0].shape == (2,)
    step.config.set_gradient_accumulation_steps(1)
    assert step(*batch)[0][0].shape == ()
    assert "configuration" in step.builds[1].reason
    assert "accumulation_steps=1" in repr(step.config)


def test_compiled_from_shapes() -> None:
    case = Case("specs", forward=weighted, batch=weighted_batch, whole=frozenset({2}))
    side = Side(case)
    step = TrainStep(case, side)
    labels = mg.spec((BATCH,), torch.int64)
    step.compile(mg.spec((BATCH, 6)), labels, mg.replicated(mg.spec((3,))), 0.5)
    expected = plain_loop(case)
    assert_same(expected, graph_loop(case, step, side))
    assert len(step.builds) == 1


# --- what cannot be split ------------------------------------------------------------------------------------------


class Scaled(mg.Graph):
    def __init__(self, steps: int = 4) -> None:
        super().__init__()
        self.model = nn.Linear(6, 3)
        self.add_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))
        self.config.set_gradient_accumulation_steps(steps)

    def build(self, batch, scale=1.0):
        loss = (self.model(batch["x"]) * scale).square().mean()
        loss.backward()
        return loss


def test_an_indivisible_batch_is_named() -> None:
    step = Scaled()
    with pytest.raises(mg.SignatureError, match=r'batch\["x"\] has 10 rows.*4 equal'):
        step({"x": torch.randn(10, 6)})
    assert step({"x": torch.randn(8, 6)}).shape == (4,)


def test_a_scalar_is_named() -> None:
    step = Scaled()
    with pytest.raises(mg.SignatureError, match=r"scale has no dimension") as caught:
        step({"x": torch.randn(8, 6)}, torch.tensor(2.0))
    assert "mg.replicated(scale)" in str(caught.value)
    assert step({"x": torch.randn(8, 6)}, mg.replicated(torch.tensor(2.0))).shape == (4,)
    assert step({"x": torch.randn(8, 6)}, 3.0).shape == (4,)


def test_replicated_without_accumulation_is_the_argument_itself() -> None:
    step = Scaled(1)
    x = torch.randn(8, 6)
    assert step(mg.replicated({"x": x})).shape == ()
    step({"x": x})
    assert len(step.builds) == 1


def test_replicated_or_not_are_two_builds() -> None:
    step = Scaled(2)
    x, scale = torch.randn(8, 6), torch.ones(8, 3)[:1].repeat(4, 1)
    for _ in range(2):
        step({"x": x}, mg.replicated(scale))
        step({"x": x}, torch.ones(8, 1))
    assert len(step.builds) == 2
    step({"x": x[:2]}, mg.replicated(scale[:2, :1]))
    step({"x": x[:2]}, scale[:2, :1])
    assert len(step.builds) == 4
    assert "replicated arguments" in step.builds[3].reason


class Odd(mg.Graph):
    """A graph whose build() is given."""

    def __init__(
        self, build: Callable[..., Any], manual: bool = False, model: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.model = nn.Linear(6, 3) if model is None else model
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.add_optimizer(optimizer, manual=manual)
        self.body = build
        if manual:
            self.optimizer = optimizer
        self.config.set_gradient_accumulation_steps(2)

    def build(self, *batch):
        return self.body(self, *batch)


def changes_between(self: Any, x: torch.Tensor) -> None:
    self.model(x).mean().backward()
    self.model.weight.grad.mul_(2)
    self.model(x).square().mean().backward()


def by_the_batch(self: Any, x: torch.Tensor) -> None:
    self.model(x).mean().backward()
    self.model.weight.grad.mul_(x.mean())


def by_hand(self: Any, x: torch.Tensor) -> None:
    (self.model.weight.grad,) = torch.autograd.grad(self.model(x).mean(), [self.model.weight])


def alternating(self: Any, x: torch.Tensor) -> Any:
    self.model(x).mean().backward()
    self.optimizer.step()
    self.optimizer.zero_grad()
    loss = self.model(x).square().mean()
    loss.backward()
    self.optimizer.step()
    return loss


def clears_between(self: Any, x: torch.Tensor) -> None:
    self.model(x).mean().backward()
    self.model.zero_grad()
    self.model(x).square().mean().backward()


def sets_before(self: Any, x: torch.Tensor) -> None:
    self.model.weight.grad = torch.ones_like(self.model.weight)
    self.model(x).mean().backward()


def twice_differentiated(self: Any, x: torch.Tensor) -> None:
    self.model(x).square().mean().backward(create_graph=True)
    self.model.weight.grad.square().sum().backward()


def noise_from_before(self: Any, x: torch.Tensor) -> None:
    noise = torch.randn(3, 6)
    self.model(x).mean().backward()
    self.model.weight.grad.add_(noise)


def shrinks_weights(self: Any, x: torch.Tensor) -> None:
    with torch.no_grad():
        self.model.weight.mul_(0.5)
    self.model(x).mean().backward()


def shrinks_data(self: Any, x: torch.Tensor) -> None:
    self.model.weight.data.mul_(0.5)
    self.model(x).mean().backward()


def gives_a_number(self: Any, x: torch.Tensor) -> Any:
    loss = self.model(x).mean()
    loss.backward()
    return loss.item()


@pytest.mark.parametrize(
    ("body", "manual", "told"),
    [
        (changes_between, False, "gradient of model.weight before its last backward"),
        (clears_between, False, "gradient of model.weight before its last backward"),
        (sets_before, False, "gradient of model.weight before its last backward"),
        (twice_differentiated, False, "create_graph"),
        (noise_from_before, False, "random numbers that were drawn before"),
        (by_the_batch, False, "single micro-batch"),
        (by_hand, False, "single micro-batch"),
        (alternating, True, "micro-batch|before its last backward"),
        (shrinks_weights, False, "changes before backward"),
        (shrinks_data, False, "changes before backward"),
        (gives_a_number, False, "Python number"),
    ],
)
def test_what_is_no_accumulation_is_refused_by_name(body: Any, manual: bool, told: str) -> None:
    step = Odd(body, manual)
    before = copy.deepcopy(step.model.state_dict())
    with pytest.raises(mg.CaptureError, match=told) as caught:
        step(torch.randn(4, 6))
    assert caught.value.where.file == __file__
    assert caught.value.hint
    assert_same(before, step.model.state_dict())
    assert all(parameter.grad is None for parameter in step.model.parameters())


def test_a_hook_on_accumulated_gradients_is_refused() -> None:
    step = Scaled()
    step.model.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.raises(mg.HookError, match="accumulated"):
        step({"x": torch.randn(8, 6)})


def test_a_manual_optimizer_that_steps_last() -> None:
    def body(self: Any, x: torch.Tensor) -> Any:
        loss = self.model(x).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        self.optimizer.step()
        return loss

    torch.manual_seed(0)
    step = Odd(body, manual=True)
    plain = copy.deepcopy(step.model.to(nn.Module))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        x = torch.randn(4, 6)
        optimizer.zero_grad()
        losses = []
        for micro in x.chunk(2):
            loss = plain(micro).square().mean()
            (loss / 2).backward()
            losses.append(loss.detach())
        nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        optimizer.step()
        assert_same(torch.stack(losses), step(x).detach())
        assert_same(plain.state_dict(), step.model.state_dict())


def test_arguments_that_are_changed_or_want_gradients() -> None:
    def body(self: Any, x: torch.Tensor) -> Any:
        loss = self.model(x * 2).square().mean()
        loss.backward()
        return loss

    torch.manual_seed(0)
    step = Odd(body)
    plain = copy.deepcopy(step.model.to(nn.Module))
    x = torch.randn(4, 6, requires_grad=True)
    step(x)
    expected = []
    for micro in x.detach().chunk(2):
        leaf = micro.clone().requires_grad_()
        (plain(leaf * 2).square().mean() / 2).backward()
        expected.append(leaf.grad)
    assert_same(torch.cat(expected), x.grad)

    def changing(self: Any, x: torch.Tensor) -> Any:
        loss = self.model(x).square().mean()
        loss.backward()
        x.mul_(2)
        return loss, x

    step = Odd(changing)
    x = torch.randn(4, 6)
    doubled = x * 2
    _, returned = step(x)
    assert returned is x
    assert_same(doubled, x)


def test_a_gradient_of_a_replicated_argument_is_refused() -> None:
    def body(self: Any, x: torch.Tensor, scale: torch.Tensor) -> None:
        (self.model(x) * scale).square().mean().backward()

    scale = torch.ones(3, requires_grad=True)
    with pytest.raises(mg.CaptureError, match=r"argument batch\[1\].*replicated"):
        Odd(body)(torch.randn(4, 6), mg.replicated(scale))
    assert scale.grad is None
    Odd(body)(torch.randn(4, 6), mg.replicated(scale.detach()))


def test_a_parameter_is_not_split() -> None:
    def body(self: Any, x: torch.Tensor, weight: torch.Tensor) -> Any:
        loss = F.linear(x, weight).square().mean()
        loss.backward()
        return loss

    step = Odd(body)
    weight = nn.Parameter(torch.randn(4, 6))
    step.model.weight = weight
    step = Odd(body, model=step.model.to(nn.Module))
    with pytest.raises(mg.AliasError, match="would be split"):
        step(torch.randn(4, 6), weight)
    assert step(torch.randn(4, 6), mg.replicated(weight)).shape == (2,)


# --- attributes that micro-batches find otherwise --------------------------------------------------------------------


class Remembering(nn.Module):
    """`begin(self)` gives the attributes, `use(self, x)` is the forward before the layer."""

    def __init__(self, begin: Callable[[Any], None], use: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.use = nn.Linear(6, 3), use
        begin(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.use(self, x))


def from_none(self: Any, x: torch.Tensor) -> torch.Tensor:
    x = x if self.last is None else x + self.last
    self.last = x.detach()
    return x


def tuple_from_none(self: Any, x: torch.Tensor) -> torch.Tensor:
    x = x if self.last is None else x + self.last[0]
    self.last = (x.detach(), x.detach() * 2)
    return x


def only_at_first(self: Any, x: torch.Tensor) -> torch.Tensor:
    x = 2 * x if self.last is None else x
    self.last = 1
    return x


def of_another_shape(self: Any, x: torch.Tensor) -> torch.Tensor:
    x = x + self.shift
    self.shift = x.detach()
    return x


def not_yet_there(self: Any, x: torch.Tensor) -> torch.Tensor:
    if not hasattr(self, "added"):
        self.added = torch.zeros(6)
    self.added = self.added + x.detach().mean(0)
    return x + self.added


def start(self: Any) -> None:
    self.last, self.shift = None, torch.zeros(6)


@pytest.mark.parametrize(
    "use",
    [from_none, tuple_from_none, only_at_first, of_another_shape, not_yet_there],
    ids=lambda use: use.__name__,
)
def test_an_attribute_that_the_second_micro_batch_finds_otherwise_is_refused(use: Any) -> None:
    def body(self: Any, x: torch.Tensor) -> None:
        self.model(x).mean().backward()

    step = Odd(body, model=Remembering(start, use))
    with pytest.raises(mg.CaptureError, match=r"attribute model\.(last|shift|added).*second micro-batch"):
        step(torch.randn(4, 6))
    assert step.model.last is None
    step.eager(torch.randn(4, 6))  # the plain loop can do it


@pytest.mark.parametrize("steps", [1, 2])
def test_an_attribute_that_is_only_set_may_change_its_shape(steps: int) -> None:
    def keeping(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.last = x.detach() * 2
        return x

    def body(self: Any, x: torch.Tensor) -> None:
        self.model(x).mean().backward()

    step = Odd(body, model=Remembering(start, keeping))
    step.config.set_gradient_accumulation_steps(steps)
    for rows in (4, 6, 4):
        x = torch.randn(rows, 6)
        step(x)
        assert_same(x[-rows // steps :] * 2, step.model.last)


# --- borders of the programs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("name", ["input", "update", "accumulate", "slice", "device", "micro_0", "größe"])
def test_arguments_of_any_name(name: str, steps: int) -> None:
    scope: dict[str, Any] = {}
    exec(
        f"def build(self, {name}):\n"
        f"    loss = self.model({name}).square().mean()\n"
        "    loss.backward()\n"
        f"    return loss, {name} * 2\n",
        scope,
    )
    step = type("Named", (Odd,), {"build": scope["build"]})(None)
    step.config.set_gradient_accumulation_steps(steps)
    x = torch.randn(4, 6)
    assert_same(x * 2, step(x)[1])
    exec(step.show(), {})


def test_gradients_are_returned_and_kept_as_sums() -> None:
    def body(self: Any, x: torch.Tensor) -> Any:
        self.model(x).square().mean().backward()
        return self.model.weight.grad, self.model.bias.grad * 2

    for keep in (False, True):
        step = Odd(body)
        step.config.keep_gradients(keep)
        plain = copy.deepcopy(step.model.to(nn.Module))
        x = torch.randn(4, 6)
        for micro in x.chunk(2):
            (plain(micro).square().mean() / 2).backward()
        weight, bias = step(x)
        assert_same(plain.weight.grad, weight)
        assert_same(plain.bias.grad * 2, bias)
        if keep:
            assert_same(plain.weight.grad, step.model.weight.grad)
            assert_same(plain.bias.grad, step.model.bias.grad)
        else:
            assert step.model.weight.grad is None


@pytest.mark.parametrize("eager", [False, True], ids=["graph", "eager"])
def test_kept_gradients_are_sums_of_one_call(eager: bool) -> None:
    """Without an automatic optimizer they would have to be added to: the user must clear them."""

    class Summed(mg.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Linear(6, 3)
            self.config.keep_gradients()
            self.config.set_gradient_accumulation_steps(2)

        def build(self, x):
            loss = self.model(x).square().mean()
            loss.backward()
            return loss

    step = Summed()
    plain = copy.deepcopy(step.model.to(nn.Module))
    run = step.eager if eager else step
    for _ in range(2):
        x = torch.randn(4, 6)
        for micro in x.chunk(2):
            (plain(micro).square().mean() / 2).backward()
        run(x)
        assert_same(plain.weight.grad, step.model.weight.grad)
        with pytest.raises(mg.CaptureError, match=r"model\.weight has a gradient when the step begins"):
            run(x)
        assert_same(plain.weight.grad, step.model.weight.grad)
        plain.zero_grad()
        step.model.zero_grad()
    assert len(step.builds) == (0 if eager else 1)


def test_without_backward_results_are_joined() -> None:
    class Evaluated(mg.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
            self.config.set_gradient_accumulation_steps(2)

        def build(self, x):
            with torch.no_grad():
                y = self.model(x)
                return y, y.mean(), y.t(), x, "text", None

    step, x = Evaluated(), torch.randn(4, 6)
    plain = copy.deepcopy(step.model.to(nn.Module))
    with torch.no_grad():
        parts = [plain(micro) for micro in x.chunk(2)]
    joined, means, turned, same, *rest = step(x)
    assert_same(torch.cat(parts), joined)
    assert_same(torch.stack([part.mean() for part in parts]), means)
    assert_same(torch.cat([part.t() for part in parts]), turned)
    assert same is x
    assert rest == ["text", None]
    assert_same(plain.state_dict(), step.model.state_dict())


@pytest.mark.parametrize("n", [0, -1, 2.0, True, "2"])
def test_a_wrong_number_of_steps_is_refused(n: Any) -> None:
    with pytest.raises(mg.DefinitionError):
        Scaled().config.set_gradient_accumulation_steps(n)


def test_a_failure_in_a_later_micro_batch_undoes_the_step() -> None:
    class Checked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.table = nn.BatchNorm1d(6), nn.Embedding(5, 6)

        def forward(self, index: torch.Tensor) -> torch.Tensor:
            return F.dropout(self.norm(self.table(index)), 0.5)

    class Looked(mg.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.model = Checked()
            self.add_optimizer(torch.optim.AdamW(self.model.parameters()))
            self.config.set_gradient_accumulation_steps(3)

        def build(self, index):
            loss = self.model(index).square().mean()
            loss.backward()
            return loss

    step = Looked()
    good = torch.randint(5, (6,))
    step(good)
    before = copy.deepcopy(step.state_dict())
    bad = good.clone()
    bad[5] = 99  # in the last micro-batch
    with pytest.raises(Exception, match="index out of range"):
        step(bad)
    assert_same(before, step.state_dict())
    step(good)
    assert len(step.builds) == 1


class CutShort(TorchDispatchMode):
    """Raises at op `at`."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at, self.count = at, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        if self.count > self.at:
            raise KeyboardInterrupt
        return func(*args, **(kwargs or {}))


def test_a_step_cut_short_at_any_op_is_as_if_it_had_not_been() -> None:
    case = Case("cut", after=clipped, scaled=True, average=True, scheduler=one_cycle)
    expected = plain_loop(case)
    side = Side(case)
    step = TrainStep(case, side)
    batches = make_batches(case)
    torch.manual_seed(1)
    step(*batches[0])
    before = copy.deepcopy(step.state_dict())
    at, cuts = 0, 0
    while at < 10_000:
        try:
            with CutShort(at):
                returned = step(*batches[1])
            break
        except KeyboardInterrupt:
            assert_same(before, step.state_dict())
        at, cuts = at + 11, cuts + 1
    assert cuts > 20
    assert_same(expected[1]["returned"], detached(returned))
    assert_same(expected[1]["model"], side.state()["model"])
    assert_same(expected[1]["optimizer"], side.state()["optimizer"])


def test_the_text_shows_both_programs() -> None:
    step = Scaled(2)
    step({"x": torch.randn(4, 6)})
    text = step.show()
    assert text.index("def accumulate(") < text.index("def update(") < text.index("def train_step(")
    scope: dict[str, Any] = {}
    exec(text, scope)
    x = torch.randn(4, 6)
    known = dict(step.model.named_parameters())
    inputs = {"model.weight": known["weight"], "model.bias": known["bias"], 'batch["x"]': x, "scale": 1.0}
    ports = step.builds[0].program.inputs
    with torch.no_grad():
        outputs = scope["train_step"](*[inputs.get(port.path, 0.1) for port in ports])
    assert_same(outputs[0], step({"x": x}).detach())
    assert "OPERATOR" in repr(step)
    assert "accumulation_steps=2" in repr(step)
    assert step.explain()
