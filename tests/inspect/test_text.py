"""What `print(graph)` and `graph.explain()` say."""

from __future__ import annotations

import re
from collections import Counter

import pytest
import torch
from torch import nn

import monograph as mg
from examples.models.mobilenet_v2 import MobileNetV2
from monograph.inspect.printed.operators import SHOWN_OPS
from monograph.inspect.printed.text import SHOWN_CALLS
from monograph.inspect.printed.tree import WIDTH, Entry, layout
from tests.support.goldens import check_golden

TAGS = {"GRAPH", "CONFIG", "MODULE", "PARAMETER", "BUFFER", "INPUT", "OUTPUT"}
SYMBOL = re.compile(r"\bzu?f\d")  # what torch calls a number that moves


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x):
        self.steps += 1
        return self.layers(x)


def train_step(model: nn.Module, make=torch.optim.SGD, **options) -> mg.Graph:
    """A training graph whose number is 0 in every test: the class is made anew."""

    class TrainStep(mg.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.model = model
            self.loss_fn = nn.CrossEntropyLoss()
            self.add_optimizer(make(model.parameters(), lr=0.1, **options))

        def build(self, x, y):
            loss = self.loss_fn(self.model(x), y)
            loss.backward()
            return loss

    return TrainStep()


def infer(model: nn.Module, call=lambda model, *args: model(*args)) -> mg.Graph:
    class Infer(mg.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def build(self, *args):
            return call(self.model, *args)

    return Infer()


def labels(graph: object) -> list[str]:
    """The content of each tagged line, continued lines joined."""
    text = re.sub(r"\n {7,}(?=[^ (])", " ", repr(graph))
    text = re.sub(r"\n +(?=->)", " ", text)
    return [line.strip() for line in text.split("\n")]


def tags(graph: object) -> set[str]:
    return set(re.findall(r"^ *\(([A-Z]+):", repr(graph), re.MULTILINE))


def without_config(graph: object) -> str:
    """The text with the knobs left out: a new knob is no reason to touch a golden."""
    return re.sub(
        r"(\(CONFIG:config:GraphConfig\(training=\w+, ).*?\)\)\n(?=  \()",
        r"\1...))\n",
        repr(graph),
        flags=re.S,
    )


@pytest.mark.parametrize("called", [False, True], ids=["before", "after"])
def test_golden(called):
    graph = train_step(Tiny())
    if called:
        graph(torch.randn(2, 4), torch.tensor([0, 1]))
    check_golden(f"text/{'after' if called else 'before'}_the_first_call.txt", without_config(graph))


def test_tags():
    graph = train_step(Tiny())
    assert tags(graph) == TAGS - {"INPUT", "OUTPUT"}
    graph(torch.randn(2, 4), torch.tensor([0, 1]))
    assert tags(graph) == TAGS | {"OPERATOR"}


def test_every_shape_is_known_without_data():
    graph = train_step(Tiny())
    graph.compile(mg.spec((64, 4)), mg.spec((64,), torch.int64))
    shapes = {
        "TrainStep_0_input.x": (64, 4),
        "TrainStep_0_input.y": (64,),
        "model_input.x": (64, 4),
        "model.layers_input.input": (64, 4),
        "model.layers.0_input.input": (64, 4),
        "model.layers.0_output": (64, 3),
        "model.layers.1_input.input": (64, 3),
        "model.layers.1_output": (64, 3),
        "model.layers_output": (64, 3),
        "model_output": (64, 3),
        "loss_fn_input.input": (64, 3),
        "loss_fn_input.target": (64,),
        "loss_fn_output": (),
        "TrainStep_0_output": (),
    }
    found = [line for line in labels(graph) if line.startswith(("(INPUT", "(OUTPUT"))]
    dtype = {(64,): torch.int64}
    expected = [
        f"({'INPUT' if 'input' in name.split('_')[-1] else 'OUTPUT'}:_{name}:"
        f"tensor(..., size={size}, dtype={dtype.get(size, torch.float32)}))"
        for name, size in shapes.items()
    ]
    assert sorted(found) == sorted(expected)


@pytest.mark.long
def test_mobilenet_fits_the_page():
    model = MobileNetV2()
    graph = train_step(model, torch.optim.AdamW)
    graph.compile(mg.spec((64, 3, 32, 32)), mg.spec((64,), torch.int64))
    lines = repr(graph).split("\n")
    assert max(map(len, lines)) <= WIDTH
    assert len(lines) < 20 * sum(1 for _ in model.modules())
    tagged = Counter(re.findall(r"^ *\((PARAMETER|BUFFER):([\w.]+):", repr(graph), re.MULTILINE))
    expected = [("PARAMETER", f"model.{name}") for name, _ in model.named_parameters()]
    expected += [("BUFFER", f"model.{name}") for name, _ in model.named_buffers()]
    assert tagged == Counter(expected)
    assert re.search(
        r"\(INPUT:_model.features.0.0_input.input:tensor\(\.\.\., size=\(64, 3, 32, 32\)", repr(graph)
    )


def test_operators_stand_with_their_module():
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3))
    graph = train_step(model, torch.optim.AdamW, foreach=False)
    graph(torch.randn(2, 4), torch.tensor([0, 1]))
    lines = labels(graph)
    start = next(i for i, line in enumerate(lines) if line.startswith("(MODULE:model.0:"))
    own = lines[start : lines.index(")", start)]
    for phase in ("forward", "backward", "update"):
        assert 1 <= sum(line.endswith(f", {phase})") for line in own) <= SHOWN_OPS
    assert "(OPERATOR:addmm:aten.addmm(model.0.bias, x, t) -> f32[2, 3], forward)" in own
    assert any(re.match(r"\(OPERATOR:\.\.\.:\d+ more in update\)", line) for line in own)
    shared = lines[lines.index("(MODULE:loss_fn:CrossEntropyLoss()): (") :]
    assert any("optimizer.0/group0/lr" in line and line.endswith(", update)") for line in shared)


def test_a_program_has_all_its_operators_counted():
    graph = train_step(Tiny(), torch.optim.AdamW)
    graph.compile(mg.spec((2, 4)), mg.spec((2,), torch.int64))
    shown = [line for line in labels(graph) if line.startswith("(OPERATOR:") and ":...:" not in line]
    hidden = sum(map(int, re.findall(r"(\d+) more in (?:forward|backward|update)", repr(graph))))
    nodes = graph.builds[-1].program.graph.nodes
    ops = [node for node in nodes if node.op == "call_function" and node.target.__name__ != "getitem"]
    assert len(shown) + hidden == len(ops)


def test_a_module_called_often_has_its_calls_numbered():
    def call(model, x):
        for _ in range(SHOWN_CALLS + 2):
            x = model(x)
        return x

    graph = infer(nn.Linear(3, 3), call)
    graph(torch.ones(2, 3))
    lines = labels(graph)
    for number in range(SHOWN_CALLS):
        assert f"(INPUT:_model#{number}_input.input:tensor(..., size=(2, 3), dtype=torch.float32))" in lines
        assert f"(OUTPUT:_model#{number}_output:tensor(..., size=(2, 3), dtype=torch.float32))" in lines
    assert "(INPUT:...:2 more calls)" in lines


def test_nested_inputs_and_outputs_have_paths():
    class Nested(nn.Module):
        def forward(self, batch, *rest, scale=None, name="x"):
            return {"sum": [batch["x"] + rest[0], batch["x"] * scale]}

    graph = infer(Nested(), lambda model, batch, y, scale: model(batch, y, scale=scale, name="y"))
    graph({"x": torch.ones(2)}, torch.ones(1), 2.0)
    lines = labels(graph)
    for path, value in {
        'Infer_0_input.args[0]["x"]': "size=(2,)",
        "Infer_0_input.args[1]": "size=(1,)",
        'model_input.batch["x"]': "size=(2,)",
        "model_input.rest[0]": "size=(1,)",
    }.items():
        assert f"(INPUT:_{path}:tensor(..., {value}, dtype=torch.float32))" in lines
    assert "(INPUT:_model_input.scale:float)" in lines
    assert '(OUTPUT:_model_output["sum"][1]:tensor(..., size=(2,), dtype=torch.float32))' in lines
    assert '(OUTPUT:_Infer_0_output["sum"][0]:tensor(..., size=(2,), dtype=torch.float32))' in lines
    assert "name" not in repr(graph)


def test_an_argument_that_holds_itself_is_no_trap():
    loop: list = []
    loop.append(loop)

    class Ignore(nn.Module):
        def forward(self, x, _loop):
            return x + 1

    graph = infer(Ignore(), lambda model, x: model(x, loop))
    assert graph(torch.ones(1)).item() == 2


def test_tied_and_shared_state_stands_once():
    model = nn.ModuleDict({"first": nn.Linear(2, 2), "second": nn.Linear(2, 2, bias=False)})
    model["second"].weight = model["first"].weight
    model["again"] = model["first"]
    lines = labels(infer(model))
    assert (
        "(MODULE:model.again:Linear(in_features=2, out_features=2, bias=True)): (the same as model.first)"
        in lines
    )
    (tied,) = (line for line in lines if line.startswith("(PARAMETER:model.second.weight:"))
    assert tied.endswith("): (the same as model.first.weight)")


def test_names_that_are_spelled_alike_stay_apart():
    class Alike(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name in ("a_b", "a-b", "a b"):
                self.register_buffer(name, torch.tensor([float(len(vars(self)["_buffers"]))]))

        def forward(self, x):
            return x + self.get_buffer("a_b") + self.get_buffer("a-b") * 10 + self.get_buffer("a b") * 100

    class Infer(mg.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.m = Alike()

        def build(self, x):
            return self.m(x)

    graph = Infer()
    assert graph(torch.zeros(1)).item() == 210.0
    (build,) = graph.builds
    names = [port.name for port in build.program.inputs]
    assert len(set(names)) == 4
    assert {"m_a_b", "m_a_b_", "m_a_b__"} < set(names)


def test_devices_and_missing_shapes():
    model = nn.Sequential(
        nn.Linear(2, 1, bias=False, device="meta").requires_grad_(False), nn.LazyLinear(3, bias=False)
    )
    lines = labels(infer(model))
    frozen = "(PARAMETER:model.0.weight:tensor(..., device='meta', size=(1, 2), dtype=torch.float32)): ()"
    assert frozen in lines
    assert "(PARAMETER:model.1.weight:tensor(..., uninitialized, dtype=torch.float32)): ()" in lines


def test_the_newest_of_several_builds_is_shown():
    graph = train_step(Tiny())
    graph.compile(mg.spec((2, 4)), mg.spec((2,), torch.int64))
    assert "newest" not in repr(graph)
    graph.compile(mg.spec((5, 4)), mg.spec((5,), torch.int64))
    assert "\n  # the newest of 2 builds: argument x is a tensor (5, 4)" in repr(graph)
    assert "(INPUT:_TrainStep_0_input.x:tensor(..., size=(x_0, 4), dtype=torch.float32))" in labels(graph)
    assert "(2, 4)" not in repr(graph).split("\n  (INPUT")[1]


def test_wide_lines_break_behind_commas():
    pieces = [f"argument_{i}=(1, 2)" for i in range(30)]
    lines = list(layout(Entry(f"OPERATOR:{', '.join(pieces)}"), depth=2))
    assert all(len(line) <= WIDTH and line.endswith(",") for line in lines[:-1])
    assert " ".join(line.strip() for line in lines) == f"(OPERATOR:{', '.join(pieces)})"


def test_explain_names_inputs_instead_of_symbols():
    dropouts = (nn.Dropout() for _ in range(4))
    graph = train_step(nn.Sequential(Tiny(), *dropouts), torch.optim.AdamW, foreach=False)
    graph.compile(mg.spec((2, 4)), mg.spec((2,), torch.int64))
    text = graph.explain()
    assert not re.search(SYMBOL, text)
    assert "optimizer.0/group0/betas/1 >= 0.0" in text
    assert "optimizer.0/group0/betas/1 <= 1.0" in text  # the square root of a bias correction
    assert "training = True in 4 modules: model.1, model.2, model.3, ..." in text


def test_explain_names_state_that_a_branch_stands_on():
    graph = train_step(Tiny(), torch.optim.RAdam)
    graph.compile(mg.spec((2, 4)), mg.spec((2,), torch.int64))
    assert "(optimizer.0/model.layers.0.weight/step as updated)" in graph.explain()
    assert not re.search(SYMBOL, graph.explain())


def test_ops_on_gradients_between_the_backward_and_the_update_clip():
    class Clipped(mg.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Linear(4, 3)
            self.add_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))

        def build(self, x):
            loss = self.model(x).square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            return loss

    step = Clipped()
    step(torch.ones(2, 4))
    phases = {
        line.split()[0]: re.search("  (forward|backward|clip|update)  ", line)[1]
        for line in step.show("capture").splitlines()
        if " = aten." in line
    }
    assert phases["addmm"] == "forward"
    assert {phase for name, phase in phases.items() if "norm" in name} == {"clip"}
