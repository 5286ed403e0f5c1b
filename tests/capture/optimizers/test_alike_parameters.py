"""The update of parameters that are alike is traced once for each kind: the program is the one of a trace of them all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial, wraps
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

import monograph as mg
from monograph.capture.optimizers.alike import StepByKinds
from monograph.capture.step.traced_step import TracedStep
from monograph.ir.memory import written_by
from monograph.ir.meta import needed_by


class Net(nn.Module):
    """Parameters of one, two and four dimensions, of several sizes, among them one that is as another one."""

    def __init__(self, memory_format: torch.memory_format = torch.contiguous_format) -> None:
        super().__init__()
        sizes = [(3, 4), (4, 6), (6, 6), (6, 6), (6, 5)]
        self.convs = nn.ModuleList(nn.Conv2d(*size, 3, padding=1) for size in sizes)
        self.deep = nn.Conv2d(5, 5, 3, padding=1, groups=5)
        self.norms = nn.ModuleList(nn.BatchNorm2d(size[1]) for size in sizes)
        self.heads = nn.ModuleList([nn.Linear(5, 7), nn.Linear(7, 7), nn.Linear(7, 7), nn.Linear(7, 2)])
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.unused = nn.Parameter(torch.ones(3))
        self.to(memory_format=memory_format)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = norm(conv(x)).relu()
        x = self.deep(x).mean((2, 3)) * self.scale
        for head in self.heads:
            x = head(x)
        return x


class Step(mg.Graph):
    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__()
        self.model = model
        self.add_optimizer(optimizer)

    def build(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(self.model(x), y)
        loss.backward()
        return loss


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(4, 3, 6, 6, generator=generator), torch.tensor([0, 1, 1, 0])


Make = Callable[[nn.Module], torch.optim.Optimizer]


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    flat = [p for p in model.parameters() if p.dim() < 2]
    return [
        {"params": [p for p in model.parameters() if p.dim() > 1]},
        {"params": flat, "weight_decay": 0.0, "lr": 0.02},
    ]


OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), 0.1),
    "sgd momentum": lambda m: torch.optim.SGD(m.parameters(), 0.1, momentum=0.9, weight_decay=0.1),
    "sgd nesterov": lambda m: torch.optim.SGD(
        m.parameters(), 0.1, momentum=0.9, nesterov=True, maximize=True
    ),
    "sgd dampening": lambda m: torch.optim.SGD(m.parameters(), 0.1, momentum=0.9, dampening=0.5),
    "adam": lambda m: torch.optim.Adam(m.parameters(), 0.01, weight_decay=0.1, amsgrad=True),
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), 0.01),
    "adamw groups": lambda m: torch.optim.AdamW(two_groups(m), 0.01),
    "adamw tensor lr": lambda m: torch.optim.AdamW(m.parameters(), torch.tensor(0.01)),
    "nadam": lambda m: torch.optim.NAdam(m.parameters(), 0.01),
    "radam": lambda m: torch.optim.RAdam(m.parameters(), 0.01),
    "adamax": lambda m: torch.optim.Adamax(m.parameters(), 0.01),
    "adadelta": lambda m: torch.optim.Adadelta(m.parameters(), 0.1),
    "adagrad": lambda m: torch.optim.Adagrad(m.parameters(), 0.1, lr_decay=0.1),
    "rmsprop": lambda m: torch.optim.RMSprop(m.parameters(), 0.01, momentum=0.9, centered=True),
    "rprop": lambda m: torch.optim.Rprop(m.parameters(), 0.01),
    "asgd": lambda m: torch.optim.ASGD(m.parameters(), 0.01),
    "adafactor": lambda m: torch.optim.Adafactor(m.parameters(), 0.01),
    "muon": lambda m: torch.optim.Muon([p for p in m.parameters() if p.dim() == 2], 0.01),
}


REPEATED = {  # updates of the first step that are repetitions: of 31, in the two memory formats
    **dict.fromkeys(
        ["sgd", "sgd momentum", "sgd nesterov", "adam", "adamw", "nadam"],
        (29, 27),
    ),
    "adamw groups": (28, 27),
    "adamw tensor lr": (17, 16),
    **dict.fromkeys(["adamax", "adadelta", "adagrad", "rmsprop"], (29, 27)),
}


class Recorded:
    """What captures have recorded, without ops that nobody reads."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.graphs: list[list[Any]] = []
        self.conditions: list[Any] = []
        record = TracedStep.record

        def recording(step: TracedStep) -> fx.GraphModule:
            module = record(step)
            nodes = module.graph.nodes
            read = needed_by(node for node in nodes if node.op != "call_function" or written_by(node))
            kept = [node for node in nodes if node in read]
            places = {node: at for at, node in enumerate(kept)}
            self.graphs.append([_line(node, places) for node in kept])
            self.conditions.append((step.conditions.branches, step.conditions.unraised))
            return module

        patch.setattr(TracedStep, "record", recording)


def _line(node: fx.Node, places: Mapping[fx.Node, int]) -> Any:
    value = node.meta.get("val")
    form: Any = type(value).__name__
    if isinstance(value, torch.Tensor):
        form = (type(value), value.shape, value.stride(), value.dtype, value.device, value.storage_offset())
    args = fx.map_arg((node.args, node.kwargs), lambda item: f"value {places[item]}")
    return node.target, repr(args), form, node.meta.get("origin")


Run = Callable[[nn.Module], object]


def compared(run: Run, patch: pytest.MonkeyPatch, model: Callable[[], nn.Module] = Net) -> None:
    """Do the same with and without formulas, and compare traces, conditions and parameters."""
    nets, made = [], []
    for whole in (False, True):
        with patch.context() as inner:
            made.append(Recorded(inner))
            if whole:
                inner.setattr(StepByKinds, "run", lambda _: False)
            torch.manual_seed(0)
            nets.append(model())
            run(nets[-1])
    by_kind, reference = made
    assert by_kind.graphs == reference.graphs
    assert by_kind.conditions == reference.conditions
    for ours, theirs in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        assert torch.equal(ours, theirs)


def repetitions(caplog: pytest.LogCaptureFixture) -> list[int]:
    """How many updates each trace has repeated."""
    told = [record.getMessage() for record in caplog.records if record.name == "monograph"]
    return [int(text.split(": ")[1].split()[0]) for text in told if "updates are recorded" in text]


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *((name, "contiguous_format") for name in OPTIMIZERS),
        ("sgd momentum", "channels_last"),
        ("adamw", "channels_last"),
    ],
)
def test_the_trace_is_that_of_all_parameters(
    name: str, layout: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def run(model: nn.Module) -> None:
        graph = Step(model, OPTIMIZERS[name](model))
        for _ in range(2):
            graph(*batch())

    caplog.set_level("DEBUG", "monograph")
    compared(run, monkeypatch, lambda: Net(getattr(torch, layout)))
    expected = REPEATED.get(name, (0, 0))[layout == "channels_last"]
    assert max(repetitions(caplog), default=0) == expected or name == "sgd dampening"


def test_state_of_other_values_is_another_kind(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def run(model: nn.Module) -> None:
        optimizer = OPTIMIZERS["adamw"](model)
        for number in range(2):  # some parameters have taken another step than others
            F.cross_entropy(model(batch()[0]), batch()[1]).backward()
            if number:
                for parameter in list(model.parameters())[:7]:
                    parameter.grad = None
            optimizer.step()
            optimizer.zero_grad()
        Step(model, optimizer)(*batch())

    caplog.set_level("DEBUG", "monograph")
    compared(run, monkeypatch)
    assert repetitions(caplog)[0] > 10


class Twice(Step):
    def build(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            loss = F.cross_entropy(self.model(x), y)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return sum(p.sum() for p in self.model.parameters())  # type: ignore[return-value]

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        mg.Graph.__init__(self)
        self.add_optimizer(optimizer, manual=True)
        self.model, self.optimizer = model, optimizer


def test_two_steps_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(model: nn.Module) -> None:
        graph = Twice(model, OPTIMIZERS["adamw"](model))
        for _ in range(2):
            graph(*batch())

    compared(run, monkeypatch)

    torch.manual_seed(0)
    eager, ours = Net(), Net()
    ours.load_state_dict(eager.state_dict())
    optimizer = OPTIMIZERS["adamw"](eager)
    for _ in range(2):
        F.cross_entropy(eager(batch()[0]), batch()[1]).backward()
        optimizer.step()
        optimizer.zero_grad()
    Twice(ours, OPTIMIZERS["adamw"](ours))(*batch())
    assert all(map(torch.equal, eager.parameters(), ours.parameters()))


class TooLate(Twice):
    def build(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(self.model(x), y)
        loss.backward(retain_graph=True)
        self.optimizer.step()
        loss.backward()
        return loss


def test_a_backward_after_the_step_is_refused_as_by_eager_mode() -> None:
    model = Net()
    graph = TooLate(model, OPTIMIZERS["adamw"](model))
    with pytest.raises(mg.MonographError, match="was changed in place"):
        graph(*batch())


def test_formulas_that_look_at_dimensions_are_for_one_shape(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """SGD of another release might treat matrices otherwise, also where two other shapes have the same formula."""
    sgd = import_module("torch.optim.sgd")
    usual = sgd._single_tensor_sgd
    text = """def aware(params, grads, buffers, **options):
    for parameter, gradient in zip(params, grads):
        if gradient.ndim == 2:
            gradient = gradient * 3.0
        usual([parameter], [gradient], [None], **options)
"""
    module = vars(sgd)
    monkeypatch.setitem(module, "usual", usual)
    monkeypatch.setitem(module, "aware", None)
    exec(compile(text, sgd.__file__, "exec"), module)
    monkeypatch.setitem(module, "_single_tensor_sgd", module["aware"])

    def run(model: nn.Module) -> None:
        Step(model, torch.optim.SGD(model.parameters(), 0.1))(*batch())

    caplog.set_level("DEBUG", "monograph")
    compared(run, monkeypatch)
    assert repetitions(caplog) == [17]  # of the same shape as another one


class SquareAware(torch.optim.AdamW):
    """An optimizer of the user's own, which looks at sizes."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    rate = 0.5 if parameter.shape[0] == parameter.shape[-1] else 0.1
                    parameter.add_(parameter.grad, alpha=-rate * group["lr"])


def test_optimizers_of_users_are_traced_whole(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def model() -> nn.Module:
        return nn.Sequential(*(nn.Linear(a, b) for a, b in [(4, 5), (5, 5), (5, 6), (6, 6), (6, 2)]))

    def run(model: nn.Module) -> None:
        Step(model, SquareAware(model.parameters()))(torch.ones(3, 4), torch.tensor([0, 1, 0]))

    caplog.set_level("DEBUG", "monograph")
    compared(run, monkeypatch, model)
    assert repetitions(caplog) == []


def test_hooks_and_other_methods_are_not_left_out(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", "monograph")
    for change in (
        lambda optimizer: optimizer.register_step_pre_hook(lambda *_: None),
        lambda optimizer: setattr(optimizer, "_init_group", optimizer._init_group),
        lambda optimizer: setattr(optimizer, "step", partial(type(optimizer).step, optimizer)),
        lambda optimizer: setattr(
            optimizer, "step", wraps(optimizer.step)(lambda step=optimizer.step: step())
        ),
    ):
        model = Net()
        optimizer = OPTIMIZERS["adamw"](model)
        change(optimizer)
        Step(model, optimizer)(*batch())
    assert repetitions(caplog) == []
