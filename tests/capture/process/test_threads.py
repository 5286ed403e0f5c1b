"""A capture is invisible to other threads: they find real tensors, draw their own numbers, and keep what they write."""

from __future__ import annotations

import contextlib
import copy
import io
import queue
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import monograph as mg
from monograph.state.threads import alone
from tests.support import assert_same

CAPTURES = 3  # of each of seven models


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight * 2

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient * weight * 2, (gradient * x * 2).sum(0)


class OwnFunction(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.head = nn.Parameter(torch.ones(6)), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(Doubled.apply(x, self.weight))


class Counting(nn.Module):
    """Assigns a buffer and a plain tensor anew in each forward."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.register_buffer("count", torch.zeros(()))
        self.last = torch.zeros(5, 3)

    def forward(self, x):
        self.count = self.count + 1
        made = self.layer(x) + self.last.mean()
        self.last = made.detach()
        return made


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.layer(x.reshape(5, 2, 3))[0][:, -1])


class Velocity(torch.optim.Optimizer):
    """Makes its state in its first step, from the first gradient."""

    def __init__(self, parameters, lr=0.1):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    entries = self.state[parameter]
                    if not entries:
                        entries["steps"], entries["velocity"] = torch.zeros(()), parameter.grad.clone()
                    entries["steps"] += 1
                    entries["velocity"].mul_(0.9).add_(parameter.grad)
                    parameter.sub_(entries["velocity"] * group["lr"])


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))


def convolutions() -> nn.Module:
    layers = [nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 4, 2), nn.BatchNorm2d(4), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Dropout(0.2), nn.Linear(8, 3))


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[..., torch.optim.Optimizer]]] = {
    "batch norm, dropout, AdamW": (perceptron, torch.optim.AdamW),
    "convolutions, SGD with momentum": (convolutions, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
    "an LSTM": (Recurrent, torch.optim.Adam),
    "attributes assigned anew": (Counting, torch.optim.Adam),
    "an autograd function": (OwnFunction, torch.optim.AdamW),
    "an optimizer of the user's": (perceptron, Velocity),
    "spectral norm": (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(6, 3)), torch.optim.RMSprop),
}


class Step(mg.Graph):
    def __init__(self, model, optimizer):
        super().__init__()
        self.model = model
        self.add_optimizer(optimizer)

    def build(self, x, y):
        loss = nn.functional.mse_loss(self.model(x), y)
        loss.backward()
        return loss


def make_side(case: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    make_model, make_optimizer = CASES[case]
    model = make_model()
    return model, make_optimizer(model.parameters())


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(5, 6, generator=generator), torch.randn(5, 3, generator=generator)


def eager_step(model, optimizer, x, y) -> torch.Tensor:
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.detach()


# --- what goes on beside a capture ---------------------------------------------------------------------------------------


def check_real(tensor: Any, shape: torch.Size | None = None) -> None:
    assert type(tensor) in (torch.Tensor, nn.Parameter), type(tensor)
    assert bool(torch.isfinite(tensor).all())
    assert shape is None or tensor.shape == shape


def check_tree(item: Any) -> None:
    """Only real tensors and plain numbers are in there."""
    if isinstance(item, torch.Tensor):
        check_real(item)
    elif isinstance(item, dict):
        for entry in item.values():
            check_tree(entry)
    elif isinstance(item, (list, tuple)):
        for entry in item:
            check_tree(entry)
    else:
        assert type(item) in (int, float, bool, str, type(None)), type(item)


@contextmanager
def beside(*jobs: Callable[[], None]) -> Iterator[None]:
    """Run each job over and over in a thread of its own; all have begun inside. What they raise is raised at the end."""
    ended, errors = threading.Event(), []
    begun = [threading.Event() for _ in jobs]

    def run(job: Callable[[], None], first: threading.Event) -> None:
        try:
            while not ended.is_set():
                job()
                first.set()
        except BaseException as error:
            errors.append(error)
        first.set()

    threads = [threading.Thread(target=run, args=pair) for pair in zip(jobs, begun, strict=True)]
    for thread in threads:
        thread.start()
    try:
        for first in begun:
            first.wait()
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]


class Reader:
    """Looks at everything that belongs to a model and its optimizer."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self.shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
        self.kept = {*vars(model), "last"}

    def __call__(self) -> None:
        state = self.model.state_dict()
        assert state.keys() == self.shapes.keys()
        counterpart = copy.deepcopy(self.model)
        file = io.BytesIO()
        torch.save(self.model.state_dict(), file)
        file.seek(0)
        for tensors in (state, counterpart.state_dict(), torch.load(file)):
            for name, tensor in tensors.items():
                check_real(tensor, self.shapes[name])
        for parameter in self.model.parameters():
            check_real(parameter)
            assert type(parameter) is nn.Parameter
            assert parameter.is_leaf
            if (gradient := parameter.grad) is not None:
                check_real(gradient, parameter.shape)
        if hasattr(self.model, "last"):
            check_real(self.model.last)
        check_tree(self.optimizer.state_dict())
        assert "step" not in vars(self.optimizer)
        assert vars(self.model).keys() <= self.kept


class Trainer:
    """Eager forward and backward of the model, in train mode, and the readings."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.read, self.forwards = model, Reader(model, optimizer), 0

    def __call__(self) -> None:
        x, y = batch()
        made = self.model(x)
        self.forwards += 1
        check_real(made.detach(), y.shape)
        loss = nn.functional.mse_loss(made, y)
        loss.backward()
        assert all(parameter.grad is not None for parameter in self.model.parameters())
        self.read()
        self.model.zero_grad()


class OtherTraining:
    """An eager step of another model of the same classes: its numbers are those that it has alone."""

    def __init__(self, case: str) -> None:
        self.model, self.optimizer = make_side(case)
        self.losses: list[torch.Tensor] = []
        for module in self.model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0  # random numbers are drawn by others as well
        self.counterpart = copy.deepcopy((self.model, self.optimizer))

    def __call__(self) -> None:
        self.losses.append(eager_step(self.model, self.optimizer, *batch()))
        check_tree(self.optimizer.state_dict())

    def check(self) -> None:
        model, optimizer = self.counterpart
        expected = [eager_step(model, optimizer, *batch()) for _ in self.losses]
        assert_same(expected, self.losses)
        assert_same(model.state_dict(), self.model.state_dict())


class Drawing:
    """Draws from the random generators of the process: no number comes twice unless somebody sets them back."""

    def __init__(self) -> None:
        self.seen: set[Any] = set()

    def __call__(self) -> None:
        for drawn in (tuple(torch.rand(4, dtype=torch.float64).tolist()), random.random()):
            assert drawn not in self.seen
            self.seen.add(drawn)


def check_steps(graph: mg.Graph, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """The graph steps as eager does from here on, bit by bit."""
    optimizer.zero_grad()
    eager_model, eager_optimizer = copy.deepcopy((model, optimizer))
    for index in range(3):
        torch.manual_seed(index)
        expected = eager_step(eager_model, eager_optimizer, *batch())
        torch.manual_seed(index)
        assert_same(expected, graph(*batch()).detach(), f"loss {index}")
    assert_same(eager_model.state_dict(), model.state_dict())
    assert_same(eager_optimizer.state_dict()["state"], optimizer.state_dict()["state"])


# --- captures beside them ------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_captures_beside_eager_training_of_the_same_model(case):
    for _ in range(CAPTURES):
        model, optimizer = make_side(case)
        trainer, other = Trainer(model, optimizer), OtherTraining(case)
        graph = Step(model, optimizer)
        with beside(trainer, other, Drawing()):
            graph.compile(*batch())
        other.check()
        check_tree([build.guards.tensors for build in graph.builds])
        if isinstance(model, Counting):
            assert model.count == trainer.forwards
        check_steps(graph, model, optimizer)


@pytest.mark.one_case
@pytest.mark.parametrize("case", ["batch norm, dropout, AdamW", "an optimizer of the user's"])
def test_first_steps_beside_a_reader(case):
    """A call captures and steps: readers find state as it is before or after that step."""
    model, optimizer = make_side(case)
    graph = Step(model, optimizer)
    with beside(Reader(model, optimizer)):
        check_steps(graph, model, optimizer)


@pytest.mark.one_case
@pytest.mark.parametrize("stage", ["before", "behind"])
def test_a_capture_that_fails_beside_a_reader(stage):
    class Failing(Step):
        def build(self, x, y):
            self.model.note = self.model[0](x)
            self.model.register_buffer("extra", torch.zeros(1))
            if stage == "before":
                raise ValueError("trip")
            super().build(x, y)
            raise ValueError("trip")

    model, optimizer = make_side("batch norm, dropout, AdamW")
    trainer = Trainer(model, optimizer)
    with beside(trainer, OtherTraining("an LSTM"), Drawing()):
        for _ in range(CAPTURES):
            with pytest.raises(ValueError, match="trip"):
                Failing(model, optimizer).compile(*batch())
    check_steps(Step(model, optimizer), model, optimizer)


SPY = """
class Spy:
    def __init__(self, real, watched, reads):
        self.real, self.watched, self.reads = real, watched, reads

    def __get__(self, tensor, kind=None):
        if tensor is None:
            return self
        if id(tensor) in self.watched:
            self.reads.append(self.watched[id(tensor)])
        return self.real.__get__(tensor)

    def __set__(self, tensor, gradient):
        self.real.__set__(tensor, gradient)
"""


@pytest.mark.one_case
@pytest.mark.parametrize("case", CASES)
def test_a_capture_reads_no_gradients_of_the_model(monkeypatch, case):
    """torch crashes if one thread reads a gradient that another sets or clears."""
    made: dict[str, Any] = {}
    file = Path(torch.__file__).with_name("spy.py")  # code of torch: it may keep notes
    exec(compile(SPY, str(file), "exec"), made)
    model, optimizer = make_side(case)
    watched, reads = {id(parameter): name for name, parameter in model.named_parameters()}, []
    monkeypatch.setattr(torch.Tensor, "grad", made["Spy"](torch.Tensor.grad, watched, reads), raising=False)
    graph = Step(model, optimizer)
    reads.clear()
    graph.compile(*batch())
    assert reads == []
    assert next(model.parameters()).grad is None
    assert len(reads) == 1


@pytest.mark.long
def test_captures_in_two_threads_at_once():
    sides = [make_side("batch norm, dropout, AdamW"), make_side("an LSTM")]
    graphs = [Step(*side) for side in sides]
    start, errors = threading.Barrier(2), []

    def capture(graph: mg.Graph) -> None:
        try:
            start.wait()
            graph.compile(*batch())
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=capture, args=(graph,)) for graph in graphs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    for graph, side in zip(graphs, sides, strict=True):
        check_steps(graph, *side)


@pytest.mark.long
def test_two_graphs_of_one_model_captured_at_once():
    class Evaluate(mg.Graph):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def build(self, x):
            return self.model(x)

    model, optimizer = make_side("batch norm, dropout, AdamW")
    train, evaluate = Step(model, optimizer), Evaluate(model)
    with beside(lambda: mg.Graph.compile(Evaluate(model), batch()[0]), Reader(model, optimizer)):
        train.compile(*batch())
    check_steps(train, model, optimizer)
    model.eval()
    assert_same(model(batch()[0]).detach(), evaluate(batch()[0]).detach())


def test_alone_an_optimizer_keeps_the_dict_of_its_state():
    model, optimizer = make_side("batch norm, dropout, AdamW")
    state, graph = optimizer.state, Step(model, optimizer)
    graph.compile(*batch())
    assert optimizer.state is state
    assert not state
    graph(*batch())
    assert optimizer.state is state
    assert len(state) == len(list(model.parameters()))


def test_the_thread_of_progress_bars_does_not_count():
    monitor = type("TMonitor", (threading.Thread,), {"__module__": "tqdm._monitor"})
    ended = threading.Event()
    for kind, expected in ((monitor, True), (threading.Thread, False)):
        thread = kind(target=ended.wait)
        thread.start()
        found = alone()
        ended.set()
        thread.join()
        ended.clear()
        assert found is expected


def test_classes_are_left_as_they_were():
    kinds = (nn.Module, torch.optim.Optimizer, torch.amp.GradScaler, mg.Graph)
    model, optimizer = make_side("an LSTM")
    graph = Step(model, optimizer)
    before = [dict(vars(kind)) for kind in kinds]
    with beside(Reader(model, optimizer)):
        graph.compile(*batch())
    assert [dict(vars(kind)) for kind in kinds] == before


@pytest.mark.long
def test_a_gradient_scaler_beside_a_reader():
    model, optimizer = make_side("batch norm, dropout, AdamW")
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    graph = Step(model, optimizer)
    graph.set_grad_scaler(scaler)

    def read() -> None:
        assert type(scaler.get_scale()) is float
        check_tree(scaler.state_dict())
        assert not vars(scaler).keys() & {"scale", "step", "update", "unscale_"}

    with beside(read, Trainer(model, optimizer)):
        graph.compile(*batch())
    assert torch.isfinite(graph(*batch()))


def test_a_gradient_scaler_of_another_thread_is_no_business_of_the_step():
    other = torch.amp.GradScaler("cpu", init_scale=8.0)

    def scale() -> None:
        assert other.scale(torch.ones(())).item() == 8.0

    graph = Step(*make_side("batch norm, dropout, AdamW"))
    with beside(scale):
        graph.compile(*batch())


# --- threads of the step itself --------------------------------------------------------------------------------


def in_a_thread(work: Callable[[], Any]) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    thread.join()
    return results[0]


def in_a_pool(work: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda _: work(), range(2)))


def while_it_is_awaited(work: Callable[[], Any]) -> Any:
    made: queue.Queue[Any] = queue.Queue()
    threading.Thread(target=lambda: made.put(work())).start()
    return made.get()


@pytest.mark.parametrize("start", [in_a_thread, in_a_pool, while_it_is_awaited])
@pytest.mark.parametrize("what", ["an argument", "state", "a new tensor"])
def test_tensor_work_of_a_step_in_another_thread_is_refused(start, what):
    class Step(mg.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.BatchNorm1d(2)

        def build(self, x):
            values = {
                "an argument": lambda: x * 2,
                "state": lambda: self.layer.running_var * 2,
                "a new tensor": lambda: torch.ones(2) * 2,
            }
            return start(values[what])

    with pytest.raises(mg.CaptureError, match="in another thread") as caught:
        Step()(torch.ones(2))
    assert caught.value.where is not None
    assert caught.value.where.file == __file__


def test_tensor_work_in_a_thread_from_before_is_refused():
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()
        with pytest.raises(mg.CaptureError, match="in another thread"):
            mg.trace(lambda x: pool.submit(lambda: x * 2).result())(torch.ones(2))


def test_an_error_of_another_thread_that_the_step_swallows():
    def body(x):
        with contextlib.suppress(Exception):
            return in_a_thread(lambda: x.tolist())
        return x

    with pytest.raises(mg.CaptureError, match="in another thread"):
        mg.trace(body)(torch.ones(2))


def test_a_step_that_starts_threads_is_captured_each_time():
    """No replay would start them, and what they read is no fact that is looked at."""
    facts, seen = {"factor": 1.0}, []

    def body(x):
        factor = in_a_thread(lambda: facts["factor"])
        seen.append(factor)
        return x * factor

    graph, x = mg.trace(body), torch.ones(2)
    for factor in (2.0, 2.0, 3.0):
        facts["factor"] = factor
        assert_same(x * factor, graph(x))
    assert "which threads run" in graph.builds[1].reason


def test_threads_of_a_step_that_go_on_work_with_tensors():
    asked, answered = queue.Queue(), queue.Queue()

    def work() -> None:
        while (item := asked.get()) is not None:
            answered.put(item * 2)

    def body(x):
        threading.Thread(target=work, daemon=True).start()
        return x + 1

    assert_same(torch.full((2,), 2.0), mg.trace(body)(torch.ones(2)))
    asked.put(torch.ones(2))
    assert_same(torch.full((2,), 2.0), answered.get())
    asked.put(None)
