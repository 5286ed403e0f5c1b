"""Plain PyTorch before, between and after graph steps: the state is the user's own, and so are the gradients."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import monograph as mg
from tests.support import Side, assert_same, same_bits, train_eagerly
from tests.support.case import adamw, sgd


def make_side(optimizer: Any = adamw) -> Side:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3))
    made = optimizer(model.parameters())
    return Side(model, made, torch.optim.lr_scheduler.ExponentialLR(made, 0.9))


def batches(count: int, size: int = 6) -> list[tuple[torch.Tensor, torch.Tensor]]:
    g = torch.Generator().manual_seed(7)
    return [
        (torch.randn(size, 4, generator=g), torch.randint(0, 3, (size,), generator=g)) for _ in range(count)
    ]


def loss_of(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y)


class TrainStep(mg.Graph):
    def __init__(self, side: Side, clip: float | None = None) -> None:
        super().__init__()
        self.model = side.model
        self.clip = clip
        self.add_optimizer(side.optimizer, lr_sch=side.scheduler)

    def build(self, x, y):
        loss = loss_of(self.model, x, y)
        loss.backward()
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        return loss


class Evaluate(mg.Graph):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def build(self, x):
        return self.model(x)


def eager_step(
    side: Side, x: torch.Tensor, y: torch.Tensor, clip: float | None = None, zero: bool = True
) -> torch.Tensor:
    if zero:
        side.optimizer.zero_grad()
    loss = loss_of(side.model, x, y)
    loss.backward()
    if clip is not None:
        nn.utils.clip_grad_norm_(side.model.parameters(), clip)
    side.optimizer.step()
    side.scheduler.step()
    return loss.detach()


def gradients(side: Side) -> list[torch.Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in side.model.parameters()]


# --- eager, then a graph, then eager again ---------------------------------------------------------------------------


@pytest.mark.one_case
@pytest.mark.parametrize("optimizer", [adamw, sgd])
def test_eager_then_graph_then_eager(optimizer: Any) -> None:
    pure, mixed = make_side(optimizer), make_side(optimizer)
    torch.manual_seed(1)
    expected = [(eager_step(pure, x, y), pure.state()) for x, y in batches(12)]
    torch.manual_seed(1)
    step: TrainStep | None = None
    for index, (x, y) in enumerate(batches(12)):
        if 3 <= index < 6 or index >= 9:
            step = step or TrainStep(mixed)  # .grad is left over and the optimizer is warm
            before = gradients(mixed)
            loss = step(x, y)
            assert_same(before, gradients(mixed), "leftover gradients")
        else:
            loss = eager_step(mixed, x, y)
        assert_same(expected[index], (loss, mixed.state()), f"step {index}")
    assert step is not None
    assert len(step.builds) == 1


def test_eager_accumulates_on_its_own_leftover_gradients() -> None:
    pure, mixed = make_side(), make_side()
    (x, y), (x2, y2), (x3, y3) = batches(3)
    for side in (pure, mixed):
        torch.manual_seed(1)
        eager_step(side, x, y)
    kept = gradients(pure)
    torch.manual_seed(2)
    eager_step(pure, x2, y2)
    for parameter, gradient in zip(pure.model.parameters(), kept, strict=True):
        parameter.grad = gradient  # as if the graph step had not touched them
    eager_step(pure, x3, y3, zero=False)
    torch.manual_seed(2)
    TrainStep(mixed)(x2, y2)
    eager_step(mixed, x3, y3, zero=False)
    assert_same(pure.state(), mixed.state())


def test_a_checkpoint_is_plain_torch(tmp_path: Any) -> None:
    pure, mixed = make_side(), make_side()
    step = TrainStep(mixed)
    torch.manual_seed(1)
    for x, y in batches(3):
        eager_step(pure, x, y)
    torch.manual_seed(1)
    for x, y in batches(3):
        step(x, y)
    torch.save(
        [mixed.model.state_dict(), mixed.optimizer.state_dict(), mixed.scheduler.state_dict()], tmp_path / "a"
    )
    other = make_side()
    for part, saved in zip(
        (other.model, other.optimizer, other.scheduler),
        torch.load(tmp_path / "a", weights_only=False),
        strict=True,
    ):
        part.load_state_dict(saved)
    assert_same(pure.state() | {"rng": 0}, other.state() | {"rng": 0})
    # and loaded into the side whose graph is built already: the optimizer's state tensors are new ones
    for part, source in ((mixed.model, other.model), (mixed.optimizer, other.optimizer)):
        part.load_state_dict(copy.deepcopy(source.state_dict()))
    torch.manual_seed(2)
    expected = [(eager_step(pure, x, y), pure.state()) for x, y in batches(3)]
    torch.manual_seed(2)
    for (x, y), wanted in zip(batches(3), expected, strict=True):
        assert_same(wanted, (step(x, y), mixed.state()))


# --- train and eval on one model -------------------------------------------------------------------------------------


def test_a_train_graph_and_an_eval_graph_see_one_model() -> None:
    pure, mixed = make_side(), make_side()
    step, evaluate = TrainStep(mixed), Evaluate(mixed.model)
    probe = torch.randn(5, 4, generator=torch.Generator().manual_seed(9))
    torch.manual_seed(1)
    expected = []
    for x, y in batches(4):
        loss = eager_step(pure, x, y)
        pure.model.eval()
        with torch.no_grad():
            answer = pure.model(probe)
        pure.model.train()
        expected.append((loss, answer, pure.state()))
    torch.manual_seed(1)
    for index, (x, y) in enumerate(batches(4)):
        loss = step(x, y)
        mixed.model.eval()
        with torch.no_grad():
            answer = evaluate(probe)
        mixed.model.train()
        assert_same(expected[index], (loss, answer, mixed.state()), f"step {index}")
    assert len(step.builds) == len(evaluate.builds) == 1


def test_the_mode_of_the_model_is_part_of_a_build() -> None:
    pure, mixed = make_side(), make_side()
    evaluate = Evaluate(mixed.model)
    modes = (True, False, True, False)
    torch.manual_seed(1)
    expected = []
    for (x, _), training in zip(batches(4), modes, strict=True):
        pure.model.train(training)
        expected.append((pure.model(x).detach(), pure.state()))
    torch.manual_seed(1)
    for (x, _), training, wanted in zip(batches(4), modes, expected, strict=True):
        mixed.model.train(training)
        assert_same(wanted, (evaluate(x), mixed.state()))
    assert len(evaluate.builds) == 2
    assert "training changed from True to False" in evaluate.builds[1].reason


# --- gradients -------------------------------------------------------------------------------------------------------


@pytest.mark.one_case
@pytest.mark.parametrize("clip", [None, 0.05])
def test_kept_gradients_are_those_of_eager(clip: float | None) -> None:
    pure, mixed = make_side(), make_side()
    for side in (pure, mixed):
        side.model[4].bias.requires_grad_(False)
    step = TrainStep(mixed, clip)
    step.config.keep_gradients(True)
    torch.manual_seed(1)
    expected = [(eager_step(pure, x, y, clip), gradients(pure), pure.state()) for x, y in batches(4)]
    torch.manual_seed(1)
    for index, (x, y) in enumerate(batches(4)):
        assert_same(expected[index], (step(x, y), gradients(mixed), mixed.state()), f"step {index}")
    assert len(step.builds) == 1


def test_gradients_stay_away_unless_asked() -> None:
    side = make_side()
    leftover = torch.full((8, 4), 3.0)
    side.model[0].weight.grad = leftover
    step = TrainStep(side)
    for x, y in batches(2):
        step(x, y)
        assert side.model[0].weight.grad is leftover
        assert torch.equal(leftover, torch.full((8, 4), 3.0))
        assert all(p.grad is None for p in list(side.model.parameters())[1:])


def test_kept_gradients_without_an_optimizer() -> None:
    class Backward(mg.Graph):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model
            self.config.keep_gradients(True)

        def build(self, x, y):
            loss = loss_of(self.model, x, y)
            loss.backward()
            return loss

    pure, mixed = make_side(), make_side()
    backward = Backward(mixed.model)
    torch.manual_seed(1)
    expected = [eager_step(pure, x, y) for x, y in batches(3)]
    torch.manual_seed(1)
    for (x, y), wanted in zip(batches(3), expected, strict=True):
        assert_same(wanted, backward(x, y))
        mixed.optimizer.step()  # the user's own update, on the graph's gradients
        mixed.optimizer.zero_grad()  # they stay otherwise, and the next backward() adds to them
        mixed.scheduler.step()
    assert_same(pure.state(), mixed.state())


# --- shapes, and the step run eagerly --------------------------------------------------------------------------------


@pytest.mark.long
def test_a_smaller_last_batch_shares_the_state() -> None:
    pure, mixed = make_side(), make_side()
    epoch = [*batches(2), *batches(1, size=4)]
    torch.manual_seed(1)
    expected = [(eager_step(pure, x, y), pure.state()) for _ in range(3) for x, y in epoch]
    step = TrainStep(mixed)
    torch.manual_seed(1)
    for index in range(9):
        assert_same(expected[index], (step(*epoch[index % 3]), mixed.state()), f"step {index}")
    assert len(step.builds) == 2
    assert "x" in step.builds[1].reason


@pytest.mark.one_case
@pytest.mark.parametrize("keep", [False, True])
def test_eager_is_the_step_without_a_graph(keep: bool) -> None:
    pure, mixed, alone = make_side(), make_side(), make_side()
    step, other = TrainStep(mixed, 0.1), TrainStep(alone, 0.1)
    for graph in (step, other):
        graph.config.keep_gradients(keep)
    torch.manual_seed(1)
    expected = [(eager_step(pure, x, y, 0.1), pure.state()) for x, y in batches(6)]
    torch.manual_seed(1)
    for index, (x, y) in enumerate(batches(6)):
        loss = step.eager(x, y) if index % 2 else step(x, y)
        assert_same(expected[index], (loss.detach(), mixed.state()), f"step {index}")
        assert_same(
            [g if keep else None for g in gradients(pure)] if index == 5 else [],
            gradients(mixed) if index == 5 else [],
        )
    torch.manual_seed(1)
    for (x, y), wanted in zip(batches(6), expected, strict=True):
        assert_same(wanted, (other.eager(x, y).detach(), alone.state()))
    assert not other.is_compiled


def test_compiling_first_changes_nothing() -> None:
    pure, mixed = make_side(), make_side()
    before = mixed.state()
    step = TrainStep(mixed)
    step.compile(mg.spec((6, 4)), mg.spec((6,), torch.int64))
    after = mixed.state()
    assert_same(before["model"], after["model"])
    assert same_bits(before["rng"], after["rng"])
    torch.manual_seed(1)
    expected = [(eager_step(pure, x, y), pure.state()) for x, y in batches(3)]
    torch.manual_seed(1)
    for (x, y), wanted in zip(batches(3), expected, strict=True):
        assert_same(wanted, (step(x, y), mixed.state()))
    assert len(step.builds) == 1


def test_a_moving_average_by_hand_reads_and_writes_between_steps() -> None:
    pure, mixed = make_side(), make_side()
    step = TrainStep(mixed)
    averages = [[p.detach().clone() for p in side.model.parameters()] for side in (pure, mixed)]

    def follow(side: Side, average: list[torch.Tensor], index: int) -> None:
        with torch.no_grad():
            torch._foreach_lerp_(average, list(side.model.parameters()), 0.3)
            if index == 2:  # weights put back from the average, and a weight replaced by .data
                for parameter, mean in zip(side.model.parameters(), average, strict=True):
                    parameter.copy_(mean)
                side.model[0].weight.data = side.model[0].weight.data * 0.5

    torch.manual_seed(1)
    expected = []
    for index, (x, y) in enumerate(batches(5)):
        expected.append((eager_step(pure, x, y), pure.state()))
        follow(pure, averages[0], index)
    torch.manual_seed(1)
    for index, (x, y) in enumerate(batches(5)):
        assert_same(expected[index], (step(x, y), mixed.state()), f"step {index}")
        follow(mixed, averages[1], index)
    assert_same(averages[0], averages[1])


# --- inference -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grad", [True, False])
def test_encoders_in_eval_mode_take_the_path_that_eager_takes(grad: bool) -> None:
    """torch has a fused kernel for whole encoder layers in eval mode, with other rounding."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    evaluate = Evaluate(model)
    with torch.set_grad_enabled(grad):
        for seed in range(3):
            x = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(seed))
            assert_same(model(x).detach(), evaluate(x).detach())


@pytest.mark.one_case
@pytest.mark.parametrize("packed", [True, False])
def test_padded_sequences_in_eval_mode(packed: bool) -> None:
    class Encode(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
            self.embedding = nn.Embedding(9, 8, padding_idx=0)
            self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=packed)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.encoder(self.embedding(tokens), src_key_padding_mask=tokens == 0)

    torch.manual_seed(0)
    model = Encode().eval()
    evaluate = Evaluate(model)
    tokens = torch.tensor([[3, 4, 0, 0], [1, 2, 8, 5]])
    assert_same(model(tokens).detach(), evaluate(tokens).detach())
    with torch.no_grad():
        if not packed:
            assert_same(model(tokens), evaluate(tokens))
            return
        with pytest.raises(mg.CaptureError, match="nested tensor") as caught:
            evaluate(tokens)
    assert "enable_nested_tensor=False" in caught.value.hint
    assert caught.value.where.file == __file__


def test_attention_in_eval_mode() -> None:
    class Attend(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x: torch.Tensor) -> Any:
            return self.attention(x, x, x)

    torch.manual_seed(0)
    model = Attend().eval()
    evaluate = Evaluate(model)
    with torch.no_grad():
        for seed in range(3):
            x = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(seed))
            assert_same(list(model(x)), list(evaluate(x)))


def test_recurrent_layers_in_eval_mode() -> None:
    torch.manual_seed(0)
    model = nn.LSTM(4, 5, num_layers=2, batch_first=True).eval()
    evaluate = Evaluate(model)
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            x = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(1))
            out, (h, c) = model(x)
            got, (gh, gc) = evaluate(x)
            assert_same([out, h, c], [got, gh, gc])


def test_two_threads_keep_eager_bits():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        sides = []
        for _ in range(2):
            torch.manual_seed(0)
            model = nn.Sequential(
                nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten(), nn.LazyLinear(5)
            )
            model(torch.zeros(2, 3, 24, 24))
            sides.append(Side(model, torch.optim.AdamW(model.parameters())))
        data = [(torch.randn(16, 3, 24, 24), torch.randint(0, 5, (16,))) for _ in range(4)]
        expected = train_eagerly(sides[0], lambda model, x, y: nn.functional.cross_entropy(model(x), y), data)
        step = mg.train_graph(sides[1].model, nn.CrossEntropyLoss(), sides[1].optimizer)
        for batch, state in zip(data, expected, strict=True):
            loss = step(*batch)
            assert_same(state, {"loss": loss.detach(), **sides[1].state()})
    finally:
        torch.set_num_threads(before)
