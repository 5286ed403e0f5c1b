"""The traps of capturing a step, one by one: each is handled, bit for bit, or refused by its name."""

from __future__ import annotations

import copy
import gc
import logging
import math
import random
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.checkpoint import checkpoint

import monograph as mg
from tests.support import assert_same

HERE = str(Path(__file__))
LINES = Path(__file__).read_text().splitlines()


def line_of(mark: str) -> int:
    """The line of this file that carries a comment."""
    (found,) = (number for number, line in enumerate(LINES, 1) if line.endswith(f"  # at: {mark}"))
    return found


def graph(build: Callable[..., Any], **attributes: Any) -> mg.Graph:
    """A graph with this build() and these attributes."""
    step = type("Step", (mg.Graph,), {"build": build})()
    for name, value in attributes.items():
        setattr(step, name, value)
    return step


class Plain:
    """The reference: the same build(), run by plain PyTorch."""

    def __init__(self, build: Callable[..., Any], optimizer: torch.optim.Optimizer | None) -> None:
        self.build, self.optimizer = build, optimizer

    def __call__(self, *args: Any) -> Any:
        if self.optimizer is not None:
            self.optimizer.zero_grad()
        result = self.build(self, *args)
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad()
        return result


def linear(seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(4, 3)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def inputs(count: int, *shape: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(*shape, generator=generator) for _ in range(count)]


def detached(item: Any) -> Any:
    if isinstance(item, torch.Tensor):
        return item.detach().clone()
    if isinstance(item, (list, tuple)):
        return [detached(entry) for entry in item]
    return item


def compare(
    build: Callable[..., Any],
    make: Callable[[], nn.Module] = linear,
    *,
    calls: Callable[[], list[Any]] = lambda: inputs(3, 5, 4),
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = sgd,
    builds: int = 1,
    look: Callable[[nn.Module], Any] = lambda _model: None,
    **attributes: Any,
) -> mg.Graph:
    """Run plain PyTorch and a graph over the same calls; everything must be the same bits."""
    trails: list[list[Any]] = []
    for kind in (Plain, graph):
        torch.manual_seed(0)
        model = make()
        optim = optimizer(model) if optimizer is not None else None
        if kind is Plain:
            step: Any = Plain(build, optim)
            for name, value in attributes.items():
                setattr(step, name, value() if callable(value) else value)
        else:
            step = graph(build, **{k: v() if callable(v) else v for k, v in attributes.items()})
        step.model = model
        if optim is not None and kind is not Plain:
            step.add_optimizer(optim)
        trail = []
        for seed, call in enumerate(calls()):
            args = call if isinstance(call, tuple) else (call,)
            torch.manual_seed(seed)
            result = step(*args)
            trail.append(
                {
                    "result": detached(result),
                    "arguments": detached(list(args)),
                    "model": {name: t.clone() for name, t in model.state_dict().items()},
                    "look": detached(look(model)),
                    "rng": torch.get_rng_state(),
                }
            )
        trails.append(trail)
    assert_same(*trails, "call")
    assert len(step.builds) == builds, [build.reason for build in step.builds]
    assert not fakes_in(step)
    return step


def fakes_in(*roots: Any) -> list[str]:
    """Where fake tensors are left behind in modules, lists, dicts and objects that can be reached."""
    found, seen = [], set()
    pending: list[tuple[str, Any]] = [(type(root).__name__, root) for root in roots]
    while pending:
        path, item = pending.pop()
        if id(item) in seen or isinstance(item, (str, bytes, int, float, type)):
            continue
        seen.add(id(item))
        if isinstance(item, FakeTensor):
            found.append(path)
        elif isinstance(item, dict):
            pending += [(f"{path}[{key!r}]", value) for key, value in item.items()]
        elif isinstance(item, (list, tuple, set, deque)):
            pending += [(f"{path}[{index}]", value) for index, value in enumerate(item)]
        elif isinstance(item, (nn.Module, mg.Graph, Holder, SimpleNamespace)):
            pending += [(f"{path}.{name}", value) for name, value in vars(item).items() if name != "_cache"]
        elif isinstance(item, torch.Tensor) and item.grad is not None:
            pending.append((f"{path}.grad", item.grad))
    return found


class Holder:
    """A plain object."""


def train(self: Any, x: torch.Tensor) -> torch.Tensor:
    loss = self.model(x).square().mean()
    loss.backward()
    return loss


def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.model(x)


# --- Python asks for the value of a tensor ---------------------------------------------------------------------------


def item(x: torch.Tensor) -> Any:
    return x if x.sum().item() > 0 else -x  # at: item


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
    assert (caught.value.where.file, caught.value.where.line) == (HERE, line_of(name))
    assert "torch.where" in caught.value.hint
    assert not step.builds
    del state


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
    assert caught.value.where.line == line_of("clip")


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
    assert caught.value.where.file == HERE


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
    assert caught.value.where.line == line_of("module")


# --- what Python draws and reads by itself -----------------------------------------------------------------------------


def test_python_and_numpy_random_keep_eager_numbers():
    def build(self: Any, x: torch.Tensor) -> torch.Tensor:
        return x * random.random() + float(np.random.rand())

    def seeded() -> None:
        random.seed(0)
        np.random.seed(0)

    seeded()
    expected = [build(None, torch.ones(2)) for _ in range(3)]
    after = random.getstate(), np.random.get_state()[1].copy(), np.random.get_state()[2]
    seeded()
    step = graph(build)
    step.compile(torch.ones(2))  # draws nothing
    assert_same(expected, [step(torch.ones(2)) for _ in range(3)])
    assert random.getstate() == after[0]
    assert (np.random.get_state()[1] == after[1]).all()
    assert np.random.get_state()[2] == after[2]
    seeded()
    builds = len(step.builds)
    assert_same(expected[0], step(torch.ones(2)))  # the same draws as before need no capture
    assert len(step.builds) == builds


def seed_here(x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(0)
    return x * torch.rand(2)


def seed_anew(x: torch.Tensor) -> torch.Tensor:
    torch.seed()
    return x


def set_state(x: torch.Tensor) -> torch.Tensor:
    torch.set_rng_state(torch.Generator().manual_seed(9).get_state())
    return x * torch.rand(2)


def fork(x: torch.Tensor) -> torch.Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        noise = torch.rand(2)
    return x * noise


def own_generator(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rand(2, generator=torch.Generator().manual_seed(3))


OUTER = torch.Generator()


def reseeded_generator(x: torch.Tensor) -> torch.Tensor:
    OUTER.manual_seed(3)
    return x * torch.rand(2, generator=OUTER)


@pytest.mark.parametrize("body", [seed_here, seed_anew, set_state, fork, own_generator, reseeded_generator])
def test_seeding_in_build_is_refused(body):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    step = graph(lambda self, x: body(x))
    with pytest.raises(mg.CaptureError, match="random generator") as caught:
        step(torch.ones(2))
    assert caught.value.hint
    assert_same(before, torch.get_rng_state())
    assert not step.builds


@pytest.mark.parametrize("holder", ["graph", "module", "global", "closure", "argument"])
def test_explicit_generators_move_as_in_eager(holder):
    trails = []
    for kind in (Plain, graph):
        own = torch.Generator().manual_seed(4)
        OUTER.manual_seed(4)

        def build(self: Any, x: torch.Tensor, *given: torch.Generator, own: Any = own) -> torch.Tensor:
            found = {"graph": getattr(self, "generator", None), "module": self.model.generator}
            used = given[0] if given else found.get(holder) or (OUTER if holder == "global" else own)
            return x * torch.rand(2, generator=used)

        model = nn.Identity()
        model.generator = own
        step: Any = Plain(build, None) if kind is Plain else graph(build)
        step.model, step.generator = model, own
        given = (own,) if holder == "argument" else ()
        trails.append([step(torch.ones(2), *given) for _ in range(3)] + [own.get_state()])
    assert_same(*trails)
    assert len(step.builds) == 1


# --- assignments to .data and .grad ---------------------------------------------------------------------------------------


def test_data_assigned_inside_build():
    def build(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.model.weight.data = self.model.weight.data.clamp(-0.1, 0.1)
        self.model.bias.data.mul_(0.5)
        return train(self, x)

    compare(build)


def test_grad_assigned_inside_build():
    def build(self: Any, x: torch.Tensor) -> torch.Tensor:
        loss = train(self, x)
        for parameter in self.model.parameters():
            parameter.grad = parameter.grad * 0.5
        self.model.bias.grad.add_(1.0)
        return loss

    compare(build)


def test_grad_set_to_none_inside_build():
    def build(self: Any, x: torch.Tensor) -> torch.Tensor:
        loss = train(self, x)
        self.model.bias.grad = None
        return loss

    compare(build)


def test_two_backward_calls_accumulate():
    def build(self: Any, x: torch.Tensor) -> torch.Tensor:
        train(self, x * 2)
        return train(self, x)

    compare(build)


def test_gradients_by_autograd_grad():
    def build(self: Any, x: torch.Tensor) -> torch.Tensor:
        loss = self.model(x).square().mean()
        grads = torch.autograd.grad(loss, list(self.model.parameters()), create_graph=True)
        (loss + sum(g.square().sum() for g in grads)).backward()
        return loss

    compare(build)


def test_freezing_and_thawing_inside_build():
    """As a GAN does: the discriminator is frozen while the generator is trained."""

    def build(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.model.weight.requires_grad_(False)
        self.model(x).sum().backward()
        self.model.weight.requires_grad_(True)
        return train(self, x)

    compare(build)


def test_freezing_for_good_inside_build_is_refused():
    def build(self: Any, x: torch.Tensor) -> torch.Tensor:
        loss = train(self, x)
        self.model.bias.requires_grad_(False)
        return loss

    model = linear()
    step = graph(build, model=model)
    step.add_optimizer(sgd(model))
    with pytest.raises(mg.CaptureError, match=r"requires_grad of model\.bias") as caught:
        step(torch.ones(2, 4))
    assert caught.value.hint
    assert model.bias.requires_grad


def test_parameters_reached_outside_of_the_modules():
    def build(self: Any, x: torch.Tensor) -> torch.Tensor:
        loss = self.model(x).square().mean()
        loss = loss + sum(p.square().sum() for p in self.kept["parameters"])
        loss.backward()
        nn.utils.clip_grad_norm_(self.kept["parameters"], 0.1)
        return loss

    trails = []
    for kind in (Plain, graph):
        model = linear()
        optimizer = sgd(model)
        step: Any = Plain(build, optimizer) if kind is Plain else graph(build)
        step.model, step.kept = model, {"parameters": list(model.parameters())}
        if kind is graph:
            step.add_optimizer(optimizer)
        trails.append([(detached(step(x)), detached(list(model.parameters()))) for x in inputs(3, 5, 4)])
    assert_same(*trails)


def test_gradients_of_the_user_are_left_alone():
    model = linear()
    step = graph(train, model=model)
    step.add_optimizer(sgd(model))
    model(torch.ones(1, 4)).sum().backward()
    before = [parameter.grad for parameter in model.parameters()]
    kept = detached(before)
    step(torch.ones(2, 4))
    assert all(p.grad is g for p, g in zip(model.parameters(), before, strict=True))
    assert_same(kept, before)


# --- ops without a fake kernel, or with a wrong one ---------------------------------------------------------------------------


@torch.library.custom_op("monograph_traps::cube", mutates_args=())
def cube(x: torch.Tensor) -> torch.Tensor:
    """No fake kernel is registered."""
    return torch.from_numpy(x.detach().numpy() ** 3)


def _cube_setup(ctx: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _cube_backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
    (x,) = ctx.saved_tensors
    return gradient * 3 * x * x


cube.register_autograd(_cube_backward, setup_context=_cube_setup)


@torch.library.custom_op("monograph_traps::turned", mutates_args=())
def turned(x: torch.Tensor) -> torch.Tensor:
    """Gives columns first; its fake kernel says rows first."""
    return (x * 2).t().contiguous().t()


@turned.register_fake
def _turned_fake(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def _turned_backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
    return gradient * 2


turned.register_autograd(_turned_backward)


def test_an_op_without_a_fake_kernel(caplog):
    def build(self: Any, x: torch.Tensor) -> torch.Tensor:
        loss = cube(self.model(x)).square().mean()
        loss.backward()
        return loss

    with caplog.at_level(logging.WARNING, "monograph"):
        compare(build, lambda: nn.Sequential(linear(), nn.Dropout(0.5)))
    assert "real tensors" in caplog.text
    assert "cube" in caplog.text


def test_an_op_whose_fake_kernel_tells_wrong_strides(caplog):
    def build(self: Any, x: torch.Tensor) -> torch.Tensor:
        hidden = turned(self.model(x))
        loss = (hidden.t().reshape(-1) * torch.arange(15.0)).mean() + hidden.stride()[0] * hidden.sum()
        loss.backward()
        return loss

    with caplog.at_level(logging.WARNING, "monograph"):
        compare(build)
    assert "real tensors" in caplog.text


def test_a_trace_on_real_tensors_still_refuses_values_that_the_step_computes():
    def build(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = cube(x) * self.model.bias
        return y if y.sum() > 0 else -y

    with pytest.raises(mg.DataDependentError):
        graph(build, model=linear())(torch.ones(3))


def test_a_trace_on_real_tensors_reads_values_of_arguments():
    def build(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = cube(x)
        return y if y.sum() > 0 else -y

    step = graph(build)
    for sign in (1.0, -1.0):
        assert_same(build(None, torch.full((2,), sign)), step(torch.full((2,), sign)))


# --- arguments that share memory, and odd ones -----------------------------------------------------------------------------------


def test_overlapping_zero_size_and_0_dim_arguments():
    def build(self: Any, x: torch.Tensor, empty: torch.Tensor, scale: torch.Tensor) -> Any:
        return (
            self.model(x).sum() * scale + empty.sum(),
            empty * 2,
            torch.cat([x[:, :0].flatten(), empty]),
            x.stride(),
        )

    calls = [
        (row[:1].expand(5, 4), torch.empty(0), torch.tensor(float(i)))
        for i, row in enumerate(inputs(3, 5, 4))
    ]
    compare(build, calls=lambda: calls, optimizer=None)


def test_one_tensor_passed_twice():
    def build(self: Any, a: torch.Tensor, b: torch.Tensor) -> Any:
        return a * 2 + b, a is b

    compare(build, calls=lambda: [(x, x) for x in inputs(3, 4)], optimizer=None)


def test_one_tensor_passed_twice_and_changed():
    def build(self: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a.add_(1)
        return a * b

    compare(build, calls=lambda: [(x, x) for x in inputs(3, 4)], optimizer=None)


def test_two_views_of_one_storage():
    def build(self: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a * 2 + b

    compare(build, calls=lambda: [(x[:4], x[2:]) for x in inputs(3, 6)], optimizer=None)


def test_two_views_of_one_storage_that_are_changed():
    def build(self: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a.add_(1)
        return a + b

    x = torch.zeros(6)
    step = graph(build)
    with pytest.raises(mg.AliasError, match="a and b share memory") as caught:
        step(x[:4], x[2:])
    assert "clone" in caught.value.hint
    assert_same(torch.zeros(6), x)
    step(x[:4].clone(), x[2:])


def test_a_view_of_a_parameter_that_is_not_changed_while_it_is_read():
    def build(self: Any, x: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
        return self.model(x).sum() + old.sum()

    model = linear()
    step = graph(build, model=model)
    x = torch.ones(2, 4)
    assert_same((model(x).sum() + model.weight[0].sum()).detach(), step(x, model.weight.detach()[0]).detach())


def test_a_view_of_a_buffer_that_is_changed():
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count.add_(1)
            return x + self.count

    def build(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)

    model = Counting()
    step = graph(build, model=model)
    with pytest.raises(mg.AliasError, match=r"x .*model\.count|model\.count .*x") as caught:
        step(model.count.view(3))
    assert "clone" in caught.value.hint
    step(torch.ones(3))
    with pytest.raises(mg.AliasError):
        step(model.count.view(3))
    assert_same(torch.ones(3), model.count)


def test_an_argument_changed_in_place_is_changed_for_the_caller():
    def build(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        y[0].fill_(7)
        return x.sum() + y.sum()

    compare(build, calls=lambda: [(x, x + 1) for x in inputs(3, 2, 4)], optimizer=None)


def test_a_strided_argument_changed_in_place():
    def build(self: Any, x: torch.Tensor) -> torch.Tensor:
        x[:, 0] = 5
        return x * 2

    bases = [inputs(3, 6, 4), inputs(3, 6, 4)]
    first = [graph(build)(b[::2].t()) for b in bases[0]]
    second = [build(None, b[::2].t()) for b in bases[1]]
    assert_same(second, first)
    assert_same(bases[1], bases[0])


def test_an_argument_that_is_returned_is_the_same_object():
    def build(self: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        return x, {"y": y, "weight": self.model.weight}, x.view(-1)

    model = linear()
    step = graph(build, model=model)
    for x in inputs(2, 2, 4):
        out, named, flat = step(x, x + 1)
        assert out is x
        assert named["weight"] is model.weight
        assert flat.data_ptr() == x.data_ptr()


def test_a_result_that_is_new_state_is_not_changed_by_the_next_step():
    def build(self: Any, x: torch.Tensor) -> Any:
        self.model.count.add_(x.sum())
        return self.model.count.clone(), self.model.count * 1

    def make() -> nn.Module:
        model = nn.Identity()
        model.register_buffer("count", torch.zeros(2))
        return model

    model = make()
    step = graph(build, model=model)
    kept = [step(torch.ones(2)) for _ in range(3)]
    assert_same([torch.full((2,), 2.0 * i) for i in (1, 2, 3)], [first for first, _ in kept])


def test_buffers_that_overlap_in_memory():
    class Overlapping(nn.Module):
        def __init__(self, change: bool) -> None:
            super().__init__()
            base = torch.arange(6.0)
            self.register_buffer("left", base[:4])
            self.register_buffer("right", base[2:])
            self.change = change

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.change:
                self.left.add_(1)
            return x + self.left + self.right

    compare(forward, lambda: Overlapping(False), calls=lambda: inputs(2, 4), optimizer=None)
    with pytest.raises(mg.AliasError, match=r"model\.left and model\.right overlap") as caught:
        graph(forward, model=Overlapping(True))(torch.ones(4))
    assert "clone" in caught.value.hint


def test_parameters_in_one_flat_storage_that_do_not_overlap():
    def make() -> nn.Module:
        model = linear()
        flat = torch.cat([p.detach().flatten() for p in model.parameters()])
        model.weight.data, model.bias.data = flat[:12].view(3, 4), flat[12:]
        return model

    compare(train, make)


def test_a_free_tensor_is_read_live_and_written_back():
    counter = {"plain": torch.zeros(2), "graph": torch.zeros(2)}
    results = []
    for side in ("plain", "graph"):
        count = counter[side]

        def build(self: Any, x: torch.Tensor, count: torch.Tensor = count) -> torch.Tensor:
            count.add_(x)
            return count * 2

        step: Any = Plain(build, None) if side == "plain" else graph(lambda self, x, f=build: f(self, x))
        trail = [detached(step(torch.ones(2)))]
        count.fill_(10)
        trail += [detached(step(torch.ones(2))), count.clone()]
        results.append(trail)
    assert_same(*results)


# --- Python attributes that forward sets --------------------------------------------------------------------------------------------


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = linear()
        self.n = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.n += 1
        return self.fc(x) * self.n


class ClassCounter(nn.Module):
    n = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.n = self.n + 1
        return x * self.n


def count_on_graph(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.n += 1
    return x * self.n


def count_on_object(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.meter.n += 1
    return x * self.meter.n


def meter() -> Holder:
    holder = Holder()
    holder.n = 0
    return holder


class CountingOptimizer(torch.optim.Optimizer):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.n = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.n += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad, alpha=group["lr"] / self.n)


def counting(where: str) -> mg.Graph:
    if where == "module":
        return graph(forward, model=Counter())
    if where == "class":
        return graph(forward, model=ClassCounter())
    if where == "graph":
        return graph(count_on_graph, n=0)
    if where == "optimizer":
        model = linear()
        step = graph(train, model=model)
        step.add_optimizer(CountingOptimizer(model.parameters()))
        return step
    return graph(count_on_object, meter=meter())


@pytest.mark.parametrize("where", ["module", "class", "graph", "object", "optimizer"])
def test_a_python_counter_counts_as_in_eager_mode(where):
    eager, step = counting(where), counting(where)
    x = torch.ones(2, 4)
    for count in range(1, 4):
        assert_same(eager.eager(x), step(x))
        owners = [
            (getattr(side, "model", side), side, getattr(side, "meter", side)) for side in (eager, step)
        ]
        for first, second in zip(*owners, strict=True):
            assert getattr(first, "n", count) == getattr(second, "n", count) == count
        if where == "optimizer":
            assert [held.optimizer.n for side in (eager, step) for held in side._optimizers] == [count, count]


class Stashing(nn.Module):
    """Leaves things behind in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = linear()
        self.history: list[Any] = []
        self.table: dict[str, Any] = {}
        self.recent: deque[Any] = deque(maxlen=2)
        self.seen = set()
        self.last = None
        self.shape: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.fc(x)
        self.history.append(hidden)
        self.table["hidden"] = hidden
        self.recent.append(hidden)
        self.seen.add("hidden")
        self.last = hidden.detach()
        self.fresh = hidden.detach() * 2
        self.shape = hidden.shape
        return hidden.relu()


def test_stashed_tensors_are_current_after_every_step():
    compare(
        train,
        Stashing,
        look=lambda model: [model.last, model.fresh, list(model.shape), model.seen, *stashed(model)],
        builds=3,  # the second step finds what the first has put into the set, the third a longer deque
    )


def stashed(model):
    """What is in the containers, without its history."""
    return [item.detach() for item in (*model.history, *model.table.values(), *model.recent)]


def test_containers_hold_what_eager_mode_puts_there():
    model = Stashing()
    step = graph(train, model=model)
    step.add_optimizer(sgd(model))
    x = torch.ones(2, 4)
    with torch.no_grad():
        hidden = model.fc(x)
    step(x)
    assert_same([hidden] * 3, stashed(model))
    assert model.history[0].requires_grad
    assert model.seen == {"hidden"}
    assert not fakes_in(step, model)


def test_nested_tensors_set_as_an_attribute_are_current():
    class Attending(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.maps = [x * 2, {"deep": (x * 3, 7)}]
            return x * 1

    def look(model: Any) -> Any:
        return [model.maps[0], *model.maps[1]["deep"]]

    compare(forward, Attending, calls=lambda: inputs(3, 2), optimizer=None, look=look)


def test_an_object_set_as_an_attribute_is_told(caplog):
    class Noting(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.note = Holder()
            self.note.value = x * 2
            return x * 1

    model = Noting()
    step = graph(forward, model=model)
    with caplog.at_level(logging.WARNING, "monograph"):
        step(torch.ones(2))
    assert "model.note" in step.explain()
    assert "model.note" in caplog.text
    assert not hasattr(model, "note")


def test_tensors_stashed_in_plain_objects():
    def build(self: Any, x: torch.Tensor) -> torch.Tensor:
        out = self.model(x)
        self.box.last = out.detach()
        self.box.inner.last = out.detach() * 2
        return out.sum()

    def box() -> Holder:
        holder = Holder()
        holder.inner = Holder()
        return holder

    trails = []
    for kind in (Plain, graph):
        step: Any = Plain(build, None) if kind is Plain else graph(build)
        step.model, step.box = linear(), box()
        trail = []
        for x in inputs(3, 2, 4):
            step(x)
            trail.append([step.box.last.clone(), step.box.inner.last.clone()])
        trails.append(trail)
    assert_same(*trails)
    assert not fakes_in(step)


def test_tensors_stashed_in_a_module_that_the_graph_does_not_hold():
    net = Stashing()

    def build(self: Any, x: torch.Tensor) -> torch.Tensor:
        return net(x).sum()

    step = graph(build)
    expected = []
    for x in inputs(3, 2, 4):
        with torch.no_grad():
            step(x)
        expected.append(net.fc(x).detach())
        assert_same(expected[-1], net.last)
    assert not fakes_in(step, net)
    assert_same(expected, net.history)  # a list that only grows does, as in eager mode


def test_a_value_computed_when_it_is_first_missing():
    class Cached(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not hasattr(self, "average"):
                self.average = x.mean()
            else:
                self.average = self.average * 0.9 + x.mean() * 0.1
            return x - self.average

    compare(
        forward,
        Cached,
        calls=lambda: inputs(4, 3),
        optimizer=None,
        builds=2,
        look=lambda model: [model.average],
    )


def test_buffers_assigned_anew():
    class Assigning(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("c", torch.zeros(2))
            self.register_buffer("view_of_argument", torch.zeros(2))
            self.register_buffer("same_twice", torch.zeros(2))
            self.register_buffer("swapped", torch.ones(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.c = self.c + x
            self.view_of_argument = x.view(2)
            self.same_twice, self.swapped = self.swapped, self.same_twice + 1
            return self.c * 2

    compare(forward, Assigning, calls=lambda: inputs(4, 2), optimizer=None)


def test_batch_norm_counts_its_batches():
    compare(train, lambda: nn.Sequential(linear(), nn.BatchNorm1d(3)))


# --- modules in odd places ------------------------------------------------------------------------------------------------------------


def test_tied_weights_and_one_module_used_twice():
    def make() -> nn.Module:
        model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
        model["b"].weight = model["a"].weight
        return model

    def build(self: Any, x: torch.Tensor) -> torch.Tensor:
        loss = self.model["b"](self.model["a"](self.model["a"](x)).tanh()).square().mean()
        loss.backward()
        return loss

    compare(build, make)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_around_dropout(reentrant):
    def build(self: Any, x: torch.Tensor) -> torch.Tensor:
        hidden = checkpoint(self.model, x.requires_grad_(), use_reentrant=reentrant)
        loss = hidden.square().mean()
        loss.backward()
        return loss

    compare(build, lambda: nn.Sequential(linear(), nn.Dropout(0.5), nn.Linear(3, 3)))


def test_a_module_wrapped_by_compile():
    def build(self: Any, x: torch.Tensor) -> torch.Tensor:
        return train(self, x)

    def make() -> nn.Module:
        return nn.Sequential(torch.compile(linear(), backend="eager"), nn.ReLU())

    compare(build, make)


def test_module_hooks_are_captured():
    def make() -> nn.Module:
        model = nn.Sequential(linear(), nn.ReLU())
        model[0].register_forward_hook(lambda module, args, out: out * 2)
        model[0].register_full_backward_hook(lambda module, grad_in, grad_out: None)
        model[1].register_forward_pre_hook(lambda module, args: (args[0] + 1,))
        model[0].weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        return model

    compare(train, make)


def test_a_module_may_be_sent_where_it_is():
    def build(self: Any, x: torch.Tensor) -> torch.Tensor:
        model = self.model.to(x.device).to(x.dtype).float()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    compare(build)


class HookedInForward(nn.Module):
    """Registers a hook in its first call, and remembers that it did."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.hooked = linear(), False

    def forward(self, x):
        if not self.hooked:
            self.layer.register_forward_hook(lambda module, args, out: out * 2)
            self.hooked = True
        return self.layer(x)


def test_a_hook_that_build_leaves_on_a_module_stays():
    compare(train, make=HookedInForward, builds=2, look=lambda model: len(model.layer._forward_hooks))


def test_a_compile_registers_no_hook():
    step = mg.train_graph(model := HookedInForward(), nn.MSELoss(), sgd(model))
    step.compile(torch.randn(3, 4), torch.randn(3, 3))
    assert not model.hooked
    assert not model.layer._forward_hooks
    step(torch.randn(3, 4), torch.randn(3, 3))
    assert model.hooked
    assert len(model.layer._forward_hooks) == 1


def test_a_hook_that_is_registered_in_each_step_is_one_more_each_time():
    class Doubling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = linear()

        def forward(self, x):
            self.layer.register_forward_hook(lambda module, args, out: out * 0.5)
            return self.layer(x)

    compare(train, make=Doubling, builds=3, look=lambda model: len(model.layer._forward_hooks))


def test_a_hook_whose_handle_is_kept_is_refused():
    class Kept(HookedInForward):
        def forward(self, x):
            self.handle = self.layer.register_forward_hook(lambda module, args, out: out * 2)
            return self.layer(x)

    step = mg.train_graph(model := Kept(), nn.MSELoss(), sgd(model))
    with pytest.raises(mg.HookError, match=r"registers or removes a hook of model\.layer") as caught:
        step(torch.randn(3, 4), torch.randn(3, 3))
    assert "called once eagerly" in str(caught.value)
    assert not model.layer._forward_hooks


def test_a_hook_that_holds_a_tensor_of_the_step_is_refused():
    class Holding(HookedInForward):
        def forward(self, x):
            self.layer.register_forward_hook(lambda module, args, out: out + x.sum())
            return self.layer(x)

    step = mg.train_graph(model := Holding(), nn.MSELoss(), sgd(model))
    with pytest.raises(mg.HookError, match=r"registers or removes a hook of model\.layer"):
        step(torch.randn(3, 4), torch.randn(3, 3))


def test_a_hook_that_the_first_eager_call_left_is_captured():
    def make() -> nn.Module:
        model = HookedInForward()
        model(torch.zeros(1, 4))
        return model

    compare(train, make)


def test_a_hook_that_is_removed_before_the_step_ends_is_captured():
    def build(self: Any, x: torch.Tensor) -> torch.Tensor:
        with self.model.register_forward_hook(lambda module, args, out: out * 2):
            loss = self.model(x).square().mean()
        loss.backward()
        return loss

    compare(build, linear)


def test_parametrizations():
    compare(train, lambda: nn.utils.parametrizations.weight_norm(linear()))


def test_spectral_norm_moves_its_vectors():
    compare(train, lambda: nn.utils.parametrizations.spectral_norm(linear()))


@pytest.mark.parametrize("make", [lambda: nn.GRUCell(8, 8), lambda: nn.GRU(8, 8)], ids=["cell", "layer"])
def test_a_gru_changes_chunks_in_place(make):
    """Their rows lie apart in memory, where torch works without vectors, which round otherwise."""

    def build(self: Any, x: torch.Tensor) -> torch.Tensor:
        out = self.model(x)
        loss = (out if isinstance(out, torch.Tensor) else out[0]).square().mean()
        loss.backward()
        return loss

    compare(build, make, calls=lambda: inputs(3, 40, 8))


def test_a_change_of_a_slice_keeps_its_layout():
    def build(self: Any, x: torch.Tensor) -> torch.Tensor:
        whole = self.model(x)
        part = whole[:, :8]
        part.mul_(2.0).sigmoid_()
        loss = part.tanh().sum() + whole.sum()
        loss.backward()
        return loss

    compare(build, lambda: nn.Linear(8, 24), calls=lambda: inputs(3, 40, 8))


def test_cpu_lstm():
    def build(self: Any, x: torch.Tensor) -> torch.Tensor:
        loss = self.model(x)[0].square().mean()
        loss.backward()
        return loss

    compare(build, lambda: nn.LSTM(4, 3), calls=lambda: inputs(3, 5, 2, 4))


def test_autograd_functions_of_the_user():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            (x,) = ctx.saved_tensors
            return gradient * 3 + x * 0

    def build(self: Any, x: torch.Tensor) -> torch.Tensor:
        loss = Double.apply(self.model(x)).square().mean()
        loss.backward()
        return loss

    compare(build)


@pytest.mark.parametrize(
    "around",
    [
        lambda: torch.autograd.set_detect_anomaly(True),
        lambda: torch.autograd.graph.save_on_cpu(),
        lambda: torch.device("cpu"),
        lambda: torch.profiler.record_function("step"),
    ],
)
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_contexts_around_the_first_call_stay_outside(around):
    def build(self: Any, x: torch.Tensor) -> torch.Tensor:
        return train(self, x)

    model, other = linear(), linear()
    step, plain = graph(build, model=model), Plain(build, sgd(other))
    step.add_optimizer(sgd(model))
    plain.model = other
    first, second = inputs(2, 5, 4)
    with around():
        assert_same(detached(plain(first)), detached(step(first)))
    assert_same(detached(plain(second)), detached(step(second)))
    assert not torch.is_anomaly_enabled()


def test_modules_set_to_eval_and_back_inside_build():
    def build(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.model.eval()
        with torch.no_grad():
            target = self.model(x)
        self.model.train()
        loss = (self.model(x) - target).square().mean()
        loss.backward()
        return loss

    compare(build, lambda: nn.Sequential(linear(), nn.BatchNorm1d(3), nn.Dropout(0.5)))


def test_a_scheduler_made_after_the_first_call_needs_no_build():
    model = linear()
    optimizer = sgd(model)
    step = graph(train, model=model)
    step.add_optimizer(optimizer)
    step(torch.ones(2, 4))
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=10)
    step(torch.ones(2, 4))
    scheduler.step()
    step(torch.ones(2, 4))
    assert len(step.builds) == 1


def test_schedulers_do_not_warn():
    model = linear()
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    step = graph(train, model=model)
    step.add_optimizer(optimizer, lr_sch=scheduler)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            step(torch.ones(2, 4))
    assert optimizer.param_groups[0]["lr"] == 0.1 * 0.5**3


def test_optimizer_state_of_eager_steps_is_taken_over():
    trails = []
    for kind in (Plain, graph):
        model = linear()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        plain = Plain(train, optimizer)
        plain.model = model
        plain(inputs(1, 5, 4)[0])
        step: Any = plain
        if kind is graph:
            step = graph(train, model=model)
            step.add_optimizer(optimizer)
        trail = [detached(step(x)) for x in inputs(3, 5, 4)]
        plain(inputs(1, 5, 4)[0])
        trails.append([trail, detached(list(model.parameters()))])
    assert_same(*trails)


# --- threads -----------------------------------------------------------------------------------------------------------------------------


def run_together(*jobs: Callable[[], Any]) -> list[Any]:
    """Run jobs in threads that start at one time; their results, or the first error."""
    barrier, results, errors = threading.Barrier(len(jobs)), [None] * len(jobs), []

    def work(index: int, job: Callable[[], Any]) -> None:
        try:
            barrier.wait()
            results[index] = job()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=item) for item in enumerate(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def trained(seed: int, steps: int, *, by_graph: bool) -> Iterator[Any]:
    model = nn.Sequential(linear(seed), nn.Tanh(), nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    step: Any = graph(train) if by_graph else Plain(train, optimizer)
    step.model = model
    if by_graph:
        step.add_optimizer(optimizer)

    def run() -> Any:
        losses = [detached(step(x)) for x in inputs(steps, 5, 4)]
        return losses, detached(list(model.parameters()))

    return run


@pytest.mark.parametrize("count", [2, 4])
def test_threads_capture_and_run_different_graphs(count):
    expected = [trained(seed, 6, by_graph=False)() for seed in range(count)]
    got = run_together(*[trained(seed, 6, by_graph=True) for seed in range(count)])
    assert_same(expected, got)


def test_a_thread_runs_eager_modules_while_another_captures():
    eager = nn.Sequential(linear(1), nn.Tanh())
    x = torch.ones(2, 4)
    expected = eager(x).detach()

    def forwards() -> list[torch.Tensor]:
        return [eager(x).detach() for _ in range(300)]

    got, _ = run_together(forwards, trained(0, 2, by_graph=True))
    assert_same([expected] * 300, got)


def test_threads_share_one_graph():
    step = graph(forward, model=linear())
    x = inputs(1, 5, 4)[0]
    expected = step.model(x).detach()
    got = run_together(*[lambda: [step(x).detach() for _ in range(20)]] * 4)
    assert_same([[expected] * 20] * 4, got)
    assert len(step.builds) == 1


def test_dropout_in_another_thread_is_no_reseeding():
    """Captures look at torch's one random generator, which other threads may be drawing from."""
    stop = threading.Event()

    def draw() -> None:
        while not stop.is_set():
            torch.rand(1)

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        for seed in range(3):
            trained(seed, 1, by_graph=True)()
    finally:
        stop.set()
        thread.join()


def test_a_thread_that_only_waits_does_not_hide_reseeding():
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    try:
        with pytest.raises(mg.CaptureError, match="random generator"):
            graph(lambda self, x: seed_here(x))(torch.ones(2))
    finally:
        stop.set()
        thread.join()


# --- nothing is left behind -----------------------------------------------------------------------------------------------------------------


def test_a_graph_can_be_freed():
    gc.collect()
    before = {id(item) for item in gc.get_objects() if type(item) is FakeTensor}
    model = linear()
    step = graph(train, model=model)
    step.add_optimizer(sgd(model))
    step(torch.ones(2, 4))
    gc.collect()
    left = [item for item in gc.get_objects() if type(item) is FakeTensor and id(item) not in before]
    assert not left, "fake tensors outlive the capture"
    build = weakref.ref(step.builds[0])
    del step
    gc.collect()
    assert build() is None


class Experts(nn.Module):
    """Two experts in one grouped matrix product, whose fake kernel takes only bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 16, 32))
        self.head = nn.Linear(32, 4)

    def forward(self, x, ends):
        return self.head(nn.functional.grouped_mm(x, self.weight, offs=ends))


def test_an_op_that_its_fake_kernel_refuses(caplog, capfd):
    torch.manual_seed(0)
    model = Experts()
    counterpart = copy.deepcopy(model)
    optimizer, twin_optimizer = (
        torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, counterpart)
    )
    step = mg.train_graph(model, nn.MSELoss(), optimizer)
    for end in (3, 5, 1):
        x, ends, y = torch.randn(8, 16), torch.tensor([end, 8], dtype=torch.int32), torch.randn(8, 4)
        twin_optimizer.zero_grad()
        expected = nn.functional.mse_loss(counterpart(x, ends), y)
        expected.backward()
        twin_optimizer.step()
        assert_same(expected.detach(), step(x, ends, y).detach())
        assert_same(dict(counterpart.state_dict()), dict(model.state_dict()))
    assert len(step.builds) == 1
    assert "traced on real tensors instead" in caplog.text
    assert "Traceback" not in capfd.readouterr().err


class FixedExperts(Experts):
    """The groups end at a tensor that forward makes: its value must be known as well when the step is traced again."""

    def forward(self, x):
        return super().forward(x, torch.tensor([3, 8], dtype=torch.int32))


def test_an_op_that_its_fake_kernel_refuses_works_on_a_tensor_made_in_build():
    torch.manual_seed(0)
    model = FixedExperts()
    counterpart = copy.deepcopy(model)
    step = mg.train_graph(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(2):
        x, y = torch.randn(8, 16), torch.randn(8, 4)
        assert_same(nn.functional.mse_loss(counterpart(x), y).detach(), step(x, y).detach())
        counterpart.load_state_dict(model.state_dict())
    assert len(step.builds) == 1


class ChoosyExperts(Experts):
    """Has another fault behind the op that its fake kernel refuses."""

    def forward(self, x, ends):
        out = super().forward(x, ends)
        return out if out.sum() > 0 else -out


def test_the_fault_behind_an_op_that_its_fake_kernel_refuses_is_told():
    model = ChoosyExperts()
    step = mg.train_graph(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1))
    x, ends, y = torch.randn(8, 16), torch.tensor([3, 8], dtype=torch.int32), torch.randn(8, 4)
    with pytest.raises(mg.CaptureError) as caught:
        step(x, ends, y)
    assert "BF16" not in str(caught.value)


# --- objects outside of the graph ------------------------------------------------------------------------------------


class Meter:
    def __init__(self) -> None:
        self.total = 0.0
        self.seen: list[torch.Tensor] = []


class Loss:
    """A callable with a memory."""

    def __call__(self, x):
        loss = x.square().mean()
        self.last = loss.detach()
        return loss


METER, HISTORY, LOSS = Meter(), [1], Loss()


def watched_loss(model, x):
    loss = LOSS(model(x))
    METER.total = METER.total + loss.detach()
    METER.seen.append(loss.detach())
    return loss


class Watched(mg.Graph):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Linear(3, 3)
        self.add_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))

    def build(self, x):
        loss = watched_loss(self.model, x)
        loss.backward()
        HISTORY.append(loss)
        return loss


def test_globals_hold_what_eager_mode_leaves_there():
    step = Watched()
    loss = step(torch.randn(2, 3))
    assert_same(loss.detach(), METER.total)
    assert_same([loss.detach()], METER.seen)
    assert HISTORY[0] == 1
    assert_same(loss.detach(), HISTORY[1].detach())
    assert_same(loss.detach(), LOSS.last)
    assert not fakes_in(step, METER, HISTORY, LOSS)


def test_a_closure_variable_without_a_value_is_no_hindrance():
    def make():
        class Early(mg.Graph):
            def build(self, x):
                return later if x is None else x * 2

        doubled = Early()(torch.ones(2))
        later = None
        return doubled, later

    assert make()[0].tolist() == [2.0, 2.0]


def test_a_scaler_that_the_graph_does_not_know_is_refused():
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    class Scaled(mg.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Linear(3, 3)
            self.add_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))

        def build(self, x):
            loss = self.model(x).square().mean()
            scaler.scale(loss).backward()
            return loss

    with pytest.raises(mg.CaptureError, match="does not know") as caught:
        Scaled()(torch.randn(2, 3))
    assert "set_grad_scaler" in caught.value.hint
    assert caught.value.where.file == __file__
    assert scaler.get_scale() == 4.0
    assert isinstance(scaler.scale(torch.ones(())), torch.Tensor)
