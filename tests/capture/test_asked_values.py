"""Python asks for the value of a tensor: it is read, bit for bit as in eager mode, or refused by its line."""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import monograph as mg
from tests.capture.traps import compare, forward, inputs, item, train
from tests.support import assert_same
from tests.support.steps import graph, line_of, linear, sgd


def to_float(x: torch.Tensor) -> Any:
    return x * float(x.sum())  # at: float


def to_int(x: torch.Tensor) -> Any:
    return x * int(x.sum())  # at: int


def branch(x: torch.Tensor) -> Any:
    if x.sum() > 0:  # at: branch
        return x
    return -x


def truth(x: torch.Tensor) -> Any:
    return x if bool(x.any()) else -x  # at: truth


def loop(x: torch.Tensor) -> Any:
    while x.norm() > 1:  # at: loop
        x = x / 2
    return x


def mask(x: torch.Tensor) -> Any:
    return x[x > 0].sum()  # at: mask


def nonzero(x: torch.Tensor) -> Any:
    return x.nonzero()  # at: nonzero


def where_of_one(x: torch.Tensor) -> Any:
    return torch.where(x > 0)[0]  # at: where


def masked_select(x: torch.Tensor) -> Any:
    return x.masked_select(x > 0)  # at: masked_select


def unique(x: torch.Tensor) -> Any:
    return x.unique()  # at: unique


def to_list(x: torch.Tensor) -> Any:
    return sum(value for value in x.flatten().tolist() if value > 0)  # at: tolist


def as_index(x: torch.Tensor) -> Any:
    return list(range(20))[x.argmax()]  # at: index


def as_size(x: torch.Tensor) -> Any:
    return torch.zeros(int(x.argmax()))  # at: size


def repeat(x: torch.Tensor) -> Any:
    return x.flatten().repeat_interleave(x.flatten().int())  # at: repeat


def clip_strictly(self: Any, x: torch.Tensor) -> Any:
    self.model(x).sum().backward()
    nn.utils.clip_grad_norm_(self.model.parameters(), 1.0, error_if_nonfinite=True)  # at: clip


def isclose(x: torch.Tensor) -> Any:
    assert torch.allclose(x, x + 1e-9)  # at: allclose
    return x


def equal(x: torch.Tensor) -> Any:
    return x if torch.equal(x, x * 2) else -x  # at: equal


DATA_DEPENDENT = {
    "item": item,
    "float": to_float,
    "int": to_int,
    "branch": branch,
    "truth": truth,
    "loop": loop,
    "mask": mask,
    "nonzero": nonzero,
    "where": where_of_one,
    "masked_select": masked_select,
    "unique": unique,
    "tolist": to_list,
    "index": as_index,
    "size": as_size,
    "repeat": repeat,
    "allclose": isclose,
    "equal": equal,
}


class Computed(nn.Module):
    """Asks for what it computes from its argument and its weight."""

    def __init__(self, body: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.weight, self.body = nn.Parameter(torch.ones(())), body

    def forward(self, x: torch.Tensor) -> Any:
        return self.body(x * self.weight)


@pytest.mark.parametrize("shape", [(5, 4), ()], ids=["2-dim", "0-dim"])
@pytest.mark.parametrize("name", DATA_DEPENDENT)
def test_a_value_that_the_step_computes_is_refused_by_its_line(name, shape):
    body = DATA_DEPENDENT[name]
    step = graph(forward, model=Computed(body))
    state = torch.get_rng_state()
    with pytest.raises(mg.DataDependentError) as caught:
        step(torch.rand(shape))
    file = body.__code__.co_filename
    assert (caught.value.where.file, caught.value.where.line) == (file, line_of(name, file))
    assert "torch.where" in caught.value.hint
    assert not step.builds
    del state


@pytest.mark.every_case
@pytest.mark.parametrize("shape", [(5, 4), ()], ids=["2-dim", "0-dim"])
@pytest.mark.parametrize("name", [name for name in DATA_DEPENDENT if name != "unique"])
def test_a_value_of_an_argument_is_read(name, shape):
    body = DATA_DEPENDENT[name]
    step = graph(lambda self, x: body(x))
    for seed in (0, 1, 2, 1, 0):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        x = x.abs() if name == "repeat" else x
        expected, got = body(x), step(x)
        assert_same(expected, got)
        if isinstance(expected, torch.Tensor):
            assert expected.stride() == got.stride()
    builds = len(step.builds)
    assert builds <= 3
    assert_same(body(x), step(x))
    assert len(step.builds) == builds  # the same value needs no capture


def test_a_value_of_state_is_read():
    class Initialised(nn.Module):
        """Scales itself by its first batch, as many do."""

        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))
            self.register_buffer("ready", torch.tensor(0, dtype=torch.uint8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.training and self.ready.item() == 0:
                with torch.no_grad():
                    self.scale.copy_(1 / (x.std(0) + 1e-6))
                    self.ready.fill_(1)
            return x * self.scale

    step = compare(train, make=Initialised, builds=2)
    assert "the value of a tensor" in step.builds[1].reason


def test_a_value_that_the_step_has_changed_is_read():
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))
            self.register_buffer("steps", torch.tensor(0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.steps.add_(1)
            return x * self.weight * (2.0 if self.steps > 2 else 1.0)

    compare(train, make=Counting, builds=2, calls=lambda: inputs(5, 5, 4))


def test_a_cumulative_average_of_batches_reads_how_many_there_were():
    def make() -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(4, momentum=None), linear())

    compare(
        train, make=make, builds=3, look=lambda model: [model[0].running_mean, model[0].num_batches_tracked]
    )


def test_what_is_read_and_changed_later_is_read_before():
    def build(self: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        before = bool((y > 0).all())
        y.neg_()
        after = bool((y > 0).all())
        return x * (1.0 + before + 2 * after)

    step = graph(build)
    for sign in (1.0, -1.0, 1.0):
        y, counterpart = torch.full((2,), sign), torch.full((2,), sign)
        assert_same(build(None, torch.ones(2), counterpart), step(torch.ones(2), y))
        assert_same(counterpart, y)
    assert len(step.builds) == 2


class LayerDrop(nn.Module):
    """Leaves out layers at random, after other draws."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = nn.functional.dropout(x, 0.2)
            drawn = torch.rand([])
            x = x + torch.randn_like(x) * 0.1
            if not drawn < 0.5:
                x = layer(x)
        return x * torch.rand(4)


def test_what_torch_draws_decides_in_python():
    calls = [call for _ in range(4) for call in inputs(3, 5, 4)]
    compare(train, make=LayerDrop, calls=lambda: calls, builds=3, look=lambda _: torch.get_rng_state())


def test_a_draw_that_depends_on_what_the_step_computes_is_refused():
    class Sampling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.fc(x)
            torch.multinomial(y.softmax(1), 2)
            return y if torch.rand([]) < 0.5 else -y

    with pytest.raises(mg.DataDependentError):
        graph(forward, model=Sampling())(torch.ones(2, 4))


def test_gradients_flow_through_a_mask_of_an_argument():
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.fc(x)
            chosen = y[x[:, 0] > 0]
            return chosen.sum() + y.masked_select(x[:, :1] > 0.5).square().sum()

    step = compare(train, make=Masked, calls=lambda: [*inputs(2, 5, 4), *inputs(2, 5, 4)], builds=2)
    assert len(step.builds) == 2


def test_an_item_that_only_computes_is_recorded():
    """No Python looks at the number, so that it may stay one of the program."""

    def build(self: Any, x: torch.Tensor) -> torch.Tensor:
        total = x.sum().item()
        return x * total + torch.full((2,), 1 / total) + math.sqrt(abs(total))

    compare(build, calls=lambda: inputs(3, 2), optimizer=None)


def test_strict_clipping_is_refused_by_its_line():
    model = linear()
    step = graph(clip_strictly, model=model)
    step.add_optimizer(sgd(model))
    with pytest.raises(mg.DataDependentError) as caught:
        step(torch.ones(2, 4))
    assert caught.value.where.line == line_of("clip", __file__)


@pytest.mark.parametrize("ask", ["numpy", "__array__", "data_ptr"])
def test_memory_asked_for_in_python_is_refused_by_its_line(ask):
    def build(self: Any, x: torch.Tensor) -> Any:
        y = x * 2
        if ask == "numpy":
            return x * float(y.detach().numpy().sum())
        if ask == "__array__":
            return x * float(np.asarray(y).sum())
        return x * y.data_ptr()

    with pytest.raises(mg.CaptureError) as caught:
        graph(build)(torch.ones(2))
    assert caught.value.where.file == __file__


def test_values_asked_for_in_a_module_name_the_line_of_the_module():
    class Checked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if (x * self.weight).isnan().any():  # at: module
                raise ValueError
            return x

    with pytest.raises(mg.DataDependentError) as caught:
        graph(forward, model=nn.Sequential(Checked()))(torch.ones(2))
    assert caught.value.where.line == line_of("module", __file__)


@pytest.mark.every_case
@pytest.mark.parametrize("form", ["a tensor", "numbers", "packed before"])
def test_packed_sequences_are_refused_by_their_name(form):
    rnn = nn.utils.rnn

    def build(self: Any, x: Any, lengths: torch.Tensor) -> Any:
        if form != "packed before":
            numbers = lengths.tolist() if form == "numbers" else lengths
            x = rnn.pack_padded_sequence(x, numbers, batch_first=True, enforce_sorted=False)
        return self.model(x)[0].data

    x, lengths = torch.ones(2, 4, 3), torch.tensor([3, 4])
    if form == "packed before":
        x = rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    with pytest.raises(mg.DataDependentError, match=r"pack_padded_sequence\(\)") as caught:
        graph(build, model=nn.LSTM(3, 2, batch_first=True))(x, lengths)
    assert caught.value.where.file == __file__
    assert "padded sequences, and mask" in caught.value.hint
    assert "bidirectional" in caught.value.hint


def test_a_norm_that_is_checked_is_told_by_its_option():
    def build(self: Any, x: torch.Tensor) -> None:
        clip_strictly(self, x)

    with pytest.raises(mg.DataDependentError, match="error_if_nonfinite=True") as caught:
        graph(build, model=linear(), optimizer=sgd)(torch.ones(2, 4))
    assert "leave that option out" in caught.value.hint
    assert caught.value.where.line == line_of("clip", __file__)


@pytest.mark.parametrize(
    "write", [lambda x: torch.save(x, io.BytesIO()), pickle.dumps], ids=["save", "pickle"]
)
def test_a_tensor_that_is_saved_in_build_is_told_in_plain_words(write: Callable[..., Any]) -> None:
    def build(x: torch.Tensor) -> torch.Tensor:
        write(x)
        return x * 2

    with pytest.raises(mg.CaptureError, match=r"as torch.save, pickle and copy.copy do") as caught:
        mg.trace(build)(torch.ones(2))
    assert "save it after the step" in caught.value.hint


def test_a_value_that_was_changed_through_views():
    class Counted(mg.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Linear(2, 2)
            self.model.register_buffer("counts", torch.arange(6).reshape(2, 3))
            self.model.register_buffer("other", torch.arange(6))

        def build(self, x: torch.Tensor) -> torch.Tensor:
            rows = self.model.counts.view(-1)[2:].view(2, 2)
            rows[1].add_(rows[0])
            self.model.other.add_(7)
            self.model.counts.t()[0].mul_(2)
            torch._foreach_add_([self.model.counts[1], self.model.other], 1)
            return x * int(self.model.counts.sum())

    step, plain = Counted(), Counted()
    x = torch.ones(2)
    for _ in range(4):
        assert torch.equal(step(x), plain.build(x))
        assert torch.equal(step.model.counts, plain.model.counts)
        assert torch.equal(step.model.other, plain.model.other)
