"""When updates run, and what writes over what: random programs for real, and steps that hold less than in eager mode."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import monograph as mg
from monograph.errors import PlanError
from monograph.ir.own_ops import CLASS_LOSS_BACKWARD
from monograph.ir.port import Role
from monograph.plan.check import check_plan
from monograph.plan.overwrite import _READ_FIRST, op_into
from monograph.plan.plan import make_plan
from monograph.plan.updates.failing import can_fail
from monograph.plan.updates.schedule import Schedule, schedule
from monograph.plan.updates.tail import tail_of
from tests.plan.drawn import STATES, Drawing, aten, programs, start
from tests.plan.test_memory import Language, adamw, allocated_peak, convolutions, language, mlp, momentum
from tests.plan.test_tail import updates
from tests.support import assert_same

W, V, _ = STATES


def scheduled(program: Any, chunk_bytes: int) -> Schedule | None:
    plan = make_plan(program)
    tail = tail_of(plan, plan.in_place)
    return None if tail is None else schedule(plan, tail, chunk_bytes=chunk_bytes)


@given(st.one_of(programs(), updates()), st.sampled_from([1, 40, 1 << 20]))
def test_the_checker_takes_schedules_of_random_programs(program: Any, chunk_bytes: int) -> None:
    found = scheduled(program, chunk_bytes)
    if found is not None:
        check_plan(found.plan)
        assert found.plan.memory.peak_bytes <= make_plan(program).memory.peak_bytes


@given(updates(), st.data())
def test_a_value_that_is_written_over_too_early_is_refused(program: Any, data: st.DataObject) -> None:
    """Whatever an op writes over that something else reads later is found, without the planner's code."""
    found = scheduled(program, 1)
    if found is None:
        return
    plan = found.plan
    nodes = [node for node in plan.program.graph.nodes if node.op == "call_function"]
    read_later = [
        (node, source)
        for place, node in enumerate(nodes)
        for source in node.all_input_nodes
        if source.op == "call_function"
        and node.name not in plan.into
        and any(source in later.all_input_nodes for later in nodes[place + 1 :])
    ]
    if not read_later:
        return
    node, source = data.draw(st.sampled_from(read_later))
    with pytest.raises(PlanError, match=r"has overwritten|not there alone|does not fit|is not in the memory"):
        check_plan(replace(plan, into={**plan.into, node.name: source.name}))


def test_an_update_runs_before_the_gradient_of_another_parameter() -> None:
    drawing = start()
    x, y, w, v, _ = drawing.made
    turned = drawing.op(aten.t.default, y)
    outputs = []
    for state, path in ((w, W), (v, V)):
        gradient = drawing.op(aten.mm.default, drawing.op(aten.mm.default, x, turned), x)
        outputs.append((drawing.op(aten.add.Tensor, state, gradient, alpha=-0.1), Role.STATE, path))
    found = scheduled(drawing.finish(outputs), 1)
    assert found is not None
    names = [call.ops[0].name for call in found.second]
    assert names.index("add_tensor") < names.index("mm_default_2")


# --- what can fail ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_looked_up", [True, False])
def test_a_backward_cannot_fail_whose_indices_were_looked_at_before(is_looked_up: bool) -> None:
    drawing = Drawing()
    table = drawing.input(W, Role.PARAM, torch.randn(5, 3))
    places = drawing.input("x", Role.USER, torch.tensor([0, 4, 1]))
    others = drawing.input("y", Role.USER, torch.tensor([0, 4, 1]))
    found = drawing.op(aten.embedding.default, table, places if is_looked_up else others)
    back = drawing.op(aten.embedding_dense_backward.default, found, places, 5, -1, False)
    assert can_fail(found)
    assert can_fail(back) is not is_looked_up


def test_a_backward_for_a_smaller_table_can_fail() -> None:
    drawing = Drawing()
    table = drawing.input(W, Role.PARAM, torch.randn(5, 3))
    places = drawing.input("x", Role.USER, torch.tensor([0, 1, 1]))
    found = drawing.op(aten.embedding.default, table, places)
    assert can_fail(drawing.op(aten.embedding_dense_backward.default, found, places, 4, -1, False))


def test_numbers_that_a_type_does_not_have_can_fail() -> None:
    drawing = Drawing()
    w = drawing.input(W, Role.PARAM, torch.randn(3))
    assert not can_fail(drawing.op(aten.mul.Tensor, w, 2.0))
    node = drawing.op(aten.mul.Tensor, w, 2.0)
    node.args = (w, 1e300)
    assert can_fail(node)
    assert can_fail(drawing.op(aten.index_select.default, w, 0, drawing.op(aten.argsort.default, w)))


def test_labels_that_are_wrong_change_nothing() -> None:
    torch.manual_seed(0)
    model = Language()
    step = mg.train_graph(model, nn.CrossEntropyLoss(), adamw(model))
    step.config.backend("aten")
    _, x, y = language()
    step(x, y)
    before = {name: item.clone() for name, item in model.state_dict().items()}
    for wrong in (torch.full_like(y, 200), torch.full_like(y, -7)):
        with pytest.raises(IndexError):
            step(x, wrong)
        assert_same(before, dict(model.state_dict()))
    with pytest.raises(IndexError):
        step(x + 200, y)
    assert_same(before, dict(model.state_dict()))
    step(x, y)


# --- what is written over --------------------------------------------------------------------------------------------

SPECIAL = (0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-40, 1.0, -2.5, 65504.0)
ARGUMENTS: dict[str, Callable[[torch.Tensor, torch.Tensor], tuple[Any, ...]]] = {
    "threshold_backward": lambda a, b: (a, b, 0.0),
    "hardtanh_backward": lambda a, b: (a, b, -1.0, 6.0),
    "leaky_relu_backward": lambda a, b: (a, b, 0.1, False),
    "elu_backward": lambda a, b: (a, 1.0, 1.0, 1.0, False, b),
    "softplus_backward": lambda a, b: (a, b, 1.0, 20.0),
    "softshrink_backward": lambda a, b: (a, b, 0.5),
    "hardshrink_backward": lambda a, b: (a, b, 0.5),
    "_log_softmax_backward_data": lambda a, b: (a, b, 1, a.dtype),
    "_softmax_backward_data": lambda a, b: (a, b, 1, a.dtype),
    "_log_softmax": lambda a, _b: (a, 1, False),
    "_softmax": lambda a, _b: (a, 1, False),
    "add": lambda a, b: (a, b),
    "mul": lambda a, b: (a, b),
    "relu": lambda a, _b: (a,),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "name",
    [*(item.removeprefix("aten::") for item in sorted(_READ_FIRST) if "aten" in item), "add", "mul", "relu"],
)
def test_an_op_gives_the_same_bits_over_any_of_its_arguments(name: str, dtype: torch.dtype) -> None:
    packet = getattr(aten, name)
    op = packet.Tensor if "Tensor" in packet.overloads() else packet.default
    into = op_into(op)
    assert into is not None
    generator = torch.Generator().manual_seed(0)
    for shape in ((7, 33), (3, 64, 5), (1, 4099)):
        special = torch.tensor(SPECIAL)[torch.randint(len(SPECIAL), shape, generator=generator)]
        plain = torch.randn(shape, generator=generator)
        for values in ((plain, plain.roll(1)), (special, plain), (plain, special)):
            args = ARGUMENTS.get(name, lambda a, b: (a, b))(*(item.to(dtype) for item in values))
            wanted = op(*args)
            for place, item in enumerate(args):
                if isinstance(item, torch.Tensor) and (into[1] or place == 0):
                    own = [entry.clone() if isinstance(entry, torch.Tensor) else entry for entry in args]
                    made = into[0](*own, **({into[1]: own[place]} if into[1] else {}))
                    assert made is own[place]
                    assert_same(wanted, made)


def as_given(op: Any) -> list[Any] | None:
    """Arguments for an op: large tensors, and plain values where it needs some. None if it does not work on such."""
    made: list[Any] = []
    for item in op._schema.arguments:
        if item.has_default_value():
            break
        kind = str(item.type)
        made.append(
            torch.rand(128, 128) + 0.1 if kind == "Tensor" else 1 if kind in ("number", "int") else 0.5
        )
    try:
        whole = op(*made)
    except (RuntimeError, TypeError, IndexError):
        return None
    return made if whole.dtype == torch.float32 and whole.shape == made[0].shape else None


def test_no_op_has_memory_for_its_result_beside_what_it_writes_over() -> None:
    # these compute by two ops of torch, also where nothing is written over
    composed = {"aten::ldexp", "aten::mvlgamma"}
    seen = set()
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        op = (
            getattr(getattr(aten, packet, None), overload or "default", None) if namespace == "aten" else None
        )
        into = None if op is None or f"aten::{packet}" in composed else op_into(op)
        args = (
            None
            if into is None or not isinstance(op._schema.arguments[0].type, torch.TensorType)
            else as_given(op)
        )
        if into is None or args is None:
            continue
        run = partial(into[0], *args, **({into[1]: args[0]} if into[1] else {}))
        run()
        assert allocated_peak(run) < 1 << 14, name
        seen.add(packet)
    assert {"relu", "tanh", "mul", "celu", "silu_backward"} <= seen


@pytest.mark.parametrize("shape", [(1500, 1000), (3, 200_000), (5, 7, 90, 101), (2, 3, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_backward_of_a_loss_some_rows_at_a_time_has_the_bits_of_torchs(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    aten = torch.ops.aten
    logits = torch.randn(shape, generator=generator).to(dtype) * 5
    rows = (shape[0], *shape[2:]) if len(shape) > 2 else shape[:1]
    rows = (shape[0], shape[2], 1) if len(shape) == 3 else rows
    logits = logits.reshape(*shape, 1) if len(shape) == 3 else logits
    softmax = aten._log_softmax(logits, 1, False)
    target = torch.randint(shape[1], rows, generator=generator)
    target.view(-1)[::5] = -100
    forward, backward = (
        (aten.nll_loss2d_forward, aten.nll_loss2d_backward)
        if logits.dim() > 2
        else (aten.nll_loss_forward, aten.nll_loss_backward)
    )
    for weight in (None, torch.rand(shape[1], generator=generator).to(dtype)):
        for reduction in range(3):
            losses, total = forward(softmax, target, weight, reduction, -100)
            grad = torch.randn(losses.shape, generator=generator).to(dtype)
            args = (grad, softmax, target, weight, reduction, -100, total)
            wanted = aten._log_softmax_backward_data(backward(*args), softmax, 1, dtype)
            assert_same(wanted, CLASS_LOSS_BACKWARD(*args))
            own = softmax.clone()
            torch.ops.monograph.class_loss_backward.out(grad, own, *args[2:], out=own)
            assert_same(wanted, own)


class Classes(mg.Graph):
    """A step whose largest tensors are logits."""

    def __init__(self, *, is_image: bool, trains: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Conv2d(3, 32, 1) if is_image else nn.Linear(32, 1024)
        if trains:
            self.add_optimizer(torch.optim.SGD(self.layer.parameters(), lr=0.1))
        self.config.backend("aten")

    def build(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self.layer(x).relu(), y)
        loss.backward()
        return loss


@pytest.mark.parametrize("is_image", [False, True])
def test_the_gradients_of_logits_are_there_once(is_image: bool) -> None:
    step = Classes(is_image=is_image)
    x, y = torch.randn(2048, 32), torch.randint(1024, (2048,))
    if is_image:
        x, y = torch.randn(2, 3, 256, 256), torch.randint(32, (2, 256, 256))
    assert step.verify(x, y, steps=2).ok
    logits = 2048 * 1024 * 4 if not is_image else 2 * 32 * 256 * 256 * 4
    assert logits < step.memory(x, y).peak_bytes < 2.2 * logits  # relu keeps its result
    with pytest.raises((IndexError, RuntimeError)):
        step(x, y + 1024)
    assert step.verify(x, y, steps=2).ok


@pytest.mark.parametrize("keeps", [False, True])
def test_gradients_that_nobody_keeps_are_written_over(keeps: bool) -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(64, 8192), nn.ReLU(), nn.Linear(8192, 64))

    def optimizer(of: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(of.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)

    class Step(mg.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.model = model()
            self.add_optimizer(optimizer(self.model))
            self.config.backend("aten")
            self.config.keep_gradients(keeps)

        def build(self, x: torch.Tensor) -> torch.Tensor:
            loss = self.model(x).square().mean()
            loss.backward()
            return loss

    step, x, other = Step(), torch.randn(4, 64), model()
    optim = optimizer(other)
    for _ in range(3):
        optim.zero_grad()
        loss = other(x).square().mean()
        loss.backward()
        optim.step()
        assert_same(loss.detach(), step(x))
    assert_same(dict(other.state_dict()), dict(step.model.state_dict()))
    if keeps:
        assert_same([p.grad for p in other.parameters()], [p.grad for p in step.model.parameters()])
    else:
        weight = 64 * 8192 * 4
        assert step.memory(x).peak_bytes < 2 * weight  # a gradient, and no other tensor of its size


def test_micro_steps_write_over_arguments_too() -> None:
    step = Classes(is_image=False)
    step.config.set_gradient_accumulation_steps(4)
    x, y = torch.randn(4 * 2048, 32), torch.randint(1024, (4 * 2048,))
    assert step.verify(x, y, steps=2).ok
    logits = 2048 * 1024 * 4
    assert logits < step.memory(x, y).peak_bytes < 2.3 * logits


def test_steps_without_an_update_write_over_arguments_too() -> None:
    step = Classes(is_image=False, trains=False)
    step.config.keep_gradients()
    x, y = torch.randn(2048, 32), torch.randint(1024, (2048,))
    assert step.verify(x, y, steps=2).ok
    logits = 2048 * 1024 * 4
    assert logits < step.memory(x, y).peak_bytes < 2.3 * logits


@pytest.mark.every_case
@pytest.mark.parametrize("activation", [nn.ReLU6, nn.ELU, nn.Softplus, nn.Hardswish, nn.Hardsigmoid, nn.GELU])
def test_results_are_laid_out_as_in_eager_mode(activation: type[nn.Module]) -> None:
    """Shape functions of torch say of some backwards that they follow the other argument than their kernels do."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for before, after in ((3, 16), (16, 32), (32, 32)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), activation()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
    model.to(memory_format=torch.channels_last)
    step = mg.train_graph(model, nn.CrossEntropyLoss(), momentum(model))
    step.config.backend("aten")
    x = torch.randn(16, 3, 12, 12).contiguous(memory_format=torch.channels_last)
    assert step.verify(x, torch.randint(10, (16,)), steps=2).ok


def test_what_is_read_later_or_returned_is_not_written_over() -> None:
    class Step(mg.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)
            self.add_optimizer(torch.optim.SGD(self.layer.parameters(), lr=0.1))

        def build(self, x: torch.Tensor) -> Any:
            first = self.layer(x)
            second = first + x  # first is returned
            third = second * 2  # second is not read again
            (third.sum() + second.detach()[0, 0]).backward()
            return first, third

    torch.manual_seed(0)
    step = Step()
    step.config.backend("aten")
    x = torch.randn(4, 8)
    assert step.verify(x, steps=2).ok
    kept = x.clone()
    first, third = step(x)
    step(x)
    assert_same(kept, x)
    assert_same((first + x) * 2, third)


# --- less than eager mode --------------------------------------------------------------------------------------------


class Tracked(TorchDispatchMode):
    """Counts the bytes of storages from when an op makes them until they are gone, without those that are known."""

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.live = {item.untyped_storage()._cdata for item in known}
        self.held = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for item in tree_leaves(made):
            if isinstance(item, torch.Tensor) and item.untyped_storage()._cdata not in self.live:
                self._note(item.untyped_storage())
        return made

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        self.live.add(key)
        self.held += nbytes
        self.peak = max(self.peak, self.held)

        def gone() -> None:
            self.live.discard(key)
            self.held -= nbytes

        weakref.finalize(storage, gone)


def known_to(
    model: nn.Module, optimizer: torch.optim.Optimizer, *batch: torch.Tensor
) -> Iterator[torch.Tensor]:
    yield from (*model.parameters(), *model.buffers(), *batch)
    for entry in optimizer.state.values():
        yield from (item for item in entry.values() if isinstance(item, torch.Tensor))


def wide() -> tuple[nn.Module, Any, Any]:
    layers = [layer for _ in range(4) for layer in (nn.Linear(512, 512), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(512, 10)), torch.randn(8, 512), torch.randint(10, (8,))


def pictures() -> tuple[nn.Module, Any, Any]:
    model, _, _ = convolutions()
    return model, torch.randn(64, 3, 32, 32), torch.randint(10, (64,))


def text() -> tuple[nn.Module, Any, Any]:
    return Language(width=128, length=64), torch.randint(200, (16, 64)), torch.randint(200, (16 * 64,))


class Speech(nn.Module):
    """A recurrent layer, whose kernel leaves a workspace, over 12 sequences of 40 steps."""

    def __init__(self, *, batch_first: bool) -> None:
        super().__init__()
        self.layer = nn.LSTM(64, 96, num_layers=2, batch_first=batch_first)
        self.head = nn.Linear(96, 2000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(x)[0]).flatten(0, 1)


def speech(*, batch_first: bool) -> tuple[nn.Module, Any, Any]:
    shape = (12, 40, 64) if batch_first else (40, 12, 64)
    return Speech(batch_first=batch_first), torch.randn(shape), torch.randint(2000, (480,))


@pytest.mark.parametrize(
    ("make", "optimizer"),
    [
        (wide, adamw),
        (pictures, momentum),
        (text, adamw),
        (mlp, adamw),
        (partial(speech, batch_first=True), adamw),
        (partial(speech, batch_first=False), adamw),
    ],
    ids=["wide", "pictures", "text", "mlp", "speech, batches first", "speech, steps first"],
)
def test_a_step_holds_less_than_eager_mode_and_what_was_said(make: Any, optimizer: Any) -> None:
    torch.manual_seed(0)
    model, x, y = make()
    optim = optimizer(model)

    def eager() -> torch.Tensor:
        optim.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optim.step()
        return loss.detach()

    start = {name: item.clone() for name, item in model.state_dict().items()}
    losses = [eager() for _ in range(2)]
    optim.zero_grad()
    with Tracked(known_to(model, optim, x, y)) as tracked:
        eager()
    model.load_state_dict(start)
    step = mg.train_graph(model, nn.CrossEntropyLoss(), optimizer(model))
    step.config.backend("aten")
    said = step.memory(x, y).peak_bytes
    assert_same(losses, [step(x, y) for _ in range(2)])
    with Tracked(owned_by(step, model, x, y)) as ours:
        step(x, y)
    assert said == pytest.approx(ours.peak, rel=0.02)
    assert ours.peak <= 0.8 * tracked.peak


def owned_by(step: mg.Graph, model: nn.Module, *batch: torch.Tensor) -> list[torch.Tensor]:
    state = step.state_dict()["optimizer.0"]["state"].values()
    moments = [item for entry in state for item in entry.values() if isinstance(item, torch.Tensor)]
    return [*model.parameters(), *model.buffers(), *batch, *moments]


FUSED: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, fused=True, amsgrad=True),
    "adam": lambda p: torch.optim.Adam(p, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, fused=True),
}


@pytest.mark.parametrize("name", FUSED)
def test_a_fused_update_does_not_wait_for_the_last_gradient(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("monograph.backends.aten._FUSED", 1)
    torch.manual_seed(0)
    model, x, y = wide()
    start = {key: item.clone() for key, item in model.state_dict().items()}
    optim, losses = FUSED[name](model.parameters()), []
    for _ in range(3):
        optim.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optim.step()
        losses.append(loss.detach())
    expected = [losses, [item.clone() for item in model.state_dict().values()], optim.state_dict()["state"]]
    model.load_state_dict(start)
    step = mg.train_graph(model, nn.CrossEntropyLoss(), FUSED[name](model.parameters()))
    step.config.backend("aten")
    found = [step(x, y) for _ in range(3)]
    assert_same(
        expected, [found, list(model.state_dict().values()), step.state_dict()["optimizer.0"]["state"]]
    )
    assert step.builds[0].memory.peak_bytes < 0.6 * sum(item.nbytes for item in model.parameters())


class Tagger(nn.Module):
    """Backward reads the weight of the head after its gradient is complete."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.LSTM(8, 16, num_layers=2, batch_first=True), nn.Linear(16, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(x)[0]).flatten(0, 1)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("backend", ["aten", "exact"])
def test_an_update_waits_for_the_last_read_of_all_that_it_writes(
    backend: str, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("monograph.backends.aten._FUSED", 1)
    monkeypatch.setattr("monograph.plan.updates.schedule.CHUNK_BYTES", 1)
    torch.manual_seed(0)
    model, x, y = Tagger(), torch.randn(3, 5, 8), torch.randint(6, (15,))
    start = {key: item.clone() for key, item in model.state_dict().items()}
    optim = torch.optim.AdamW(model.parameters(), fused=fused)
    for _ in range(3):
        optim.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optim.step()
    expected = [item.clone() for item in model.state_dict().values()]
    model.load_state_dict(start)
    step = mg.train_graph(model, nn.CrossEntropyLoss(), torch.optim.AdamW(model.parameters(), fused=fused))
    step.config.backend(backend)
    for _ in range(3):
        step(x, y)
    assert step.backend == backend
    assert_same(expected, list(model.state_dict().values()))


def test_speed_first_keeps_all_gradients_to_the_end() -> None:
    held = {}
    for mode in ("MemoryFirst", "SpeedFirst", "Disable"):
        torch.manual_seed(0)
        model, x, y = wide()
        step = mg.train_graph(model, nn.CrossEntropyLoss(), adamw(model))
        step.config.backend("aten")
        step.config.enable_straighten_algorithm(mode)
        held[mode] = step.memory(x, y).peak_bytes
    gradients = sum(item.nbytes for item in model.parameters())
    assert held["MemoryFirst"] < 0.6 * gradients < gradients < held["SpeedFirst"] == held["Disable"]


def test_an_order_that_there_is_not() -> None:
    step = mg.trace(torch.sin)
    with pytest.raises(mg.ConfigError, match="'Fast'"):
        step.config.enable_straighten_algorithm("Fast")
    assert "straighten='MemoryFirst'" in repr(step.config)
