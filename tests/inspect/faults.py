"""Models with marked lines, and faults to plant into their steps."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import monograph as mg
from monograph.ir.meta import value
from monograph.ir.program import Program

SETTINGS = {"scale": 2.0, "deep": False}
_FILE = Path(tempfile.mkdtemp()) / "settings.json"


def set_settings(**values: Any) -> None:
    """Write the settings, and those that are given here, into the file that build() reads."""
    _FILE.write_text(json.dumps(SETTINGS | values))


def setting(name: str) -> Any:
    """What build() reads past all guards: a constant of its capture."""
    return json.loads(_FILE.read_text())[name]


set_settings()
aten = torch.ops.aten


def line_of(marker: str) -> int:
    """The line of this file that ends with the comment `# <marker>`."""
    lines = Path(__file__).read_text().splitlines()
    (found,) = [number for number, line in enumerate(lines, 1) if line.endswith(f"  # {marker}")]
    return found


class Gate(nn.Module):
    """A layer with a product and a difference."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc = nn.Linear(width, width, bias=False)
        self.norm = nn.BatchNorm1d(width, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        gate = torch.tanh(self.fc(x))  # gate
        kept = x - 0.5 * gate  # difference
        return self.norm(kept)  # norm


class Net(nn.Module):
    """Two gates, a dropout and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Gate(8), Gate(8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        h = nn.functional.dropout(h, 0.25)  # dropout
        h = self.second(h)
        if setting("deep"):
            h = h.sin()  # deep
        return self.head(h) * setting("scale")  # scale


class Step(mg.Graph):
    """The usual training step."""

    def __init__(self, model: nn.Module | None = None, *, eps: float = 1e-8, compiled: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.model = Net() if model is None else model
        if compiled:  # quickly, and alike in each test: what one compiles the next finds in the cache
            self.config.backend("inductor")
            self.config.enable_kernel_selection(False)
            self.add_optimizer(torch.optim.SGD(self.model.parameters(), lr=1e-2, momentum=0.9))
        else:
            self.add_optimizer(torch.optim.Adam(self.model.parameters(), lr=1e-2, eps=eps))

    def build(self, x: Tensor, y: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(self.model(x), y)  # loss
        loss.backward()
        return loss


def batch() -> tuple[Tensor, Tensor]:
    """A batch, the same each time."""
    generator = torch.Generator().manual_seed(7)
    return torch.randn(6, 8, generator=generator), torch.randint(0, 4, (6,), generator=generator)


# --- wrong passes ----------------------------------------------------------------------------------------------------


def _nth(program: Program, target: Any, number: int = 0) -> Any:
    return [node for node in program.graph.nodes if node.target is target][number]


def swaps_operands(program: Program) -> Program:
    """x - y becomes y - x."""
    node = _nth(program, aten.sub.Tensor)
    node.args = (node.args[1], node.args[0])
    return program


def drops_an_op(program: Program) -> Program:
    """The second tanh is left out."""
    node = _nth(program, aten.tanh.default, 1)
    node.replace_all_uses_with(node.args[0])
    return program


def changes_a_number(program: Program) -> Program:
    """0.5 becomes 0.25 in the second gate."""
    node = [n for n in program.graph.nodes if n.target is aten.mul.Tensor and n.args[1] == 0.5][1]
    node.args = (node.args[0], 0.25)
    return program


def puts_in_a_wrong_op(program: Program) -> Program:
    """The first tanh becomes a sine, by a node of its own."""
    node = _nth(program, aten.tanh.default)
    with program.graph.inserting_before(node):
        other = program.graph.call_function(aten.sin.default, node.args)
    other.meta = dict(node.meta)
    node.replace_all_uses_with(other)
    return program


def keeps_old_state(program: Program, path: str) -> Program:
    """New state is the old one."""
    inputs = {port.path: port.name for port in program.inputs}
    nodes = {node.name: node for node in program.graph.nodes}
    output = program.graph.output_node()
    results = list(output.args[0])  # type: ignore[arg-type]
    for position, port in program.updates():
        if port.path == path:
            with program.graph.inserting_before(output):
                results[position] = program.graph.call_function(aten.clone.default, (nodes[inputs[path]],))
            results[position].meta["value"] = value(nodes[inputs[path]])
    output.args = (tuple(results),)
    return program


def keeps_an_old_buffer(program: Program) -> Program:
    """The running mean of the second norm stays."""
    return keeps_old_state(program, "model.second.norm.running_mean")


def keeps_an_old_weight(program: Program) -> Program:
    """The head is not trained."""
    return keeps_old_state(program, "model.head.weight")


def changes_a_gradient(program: Program) -> Program:
    """The gradient of the first tanh is taken at another place."""
    node = _nth(program, aten.tanh_backward.default, 1)
    node.args = (node.args[0], node.args[0])
    return program


def changes_an_update(program: Program) -> Program:
    """A square root of the update is left out."""
    node = next(n for n in program.graph.nodes if "sqrt" in str(n.target))
    node.replace_all_uses_with(node.args[0])
    return program


def swaps_operands_if_there(program: Program) -> Program:
    """x - y becomes y - x in the part that has it."""
    found = [node for node in program.graph.nodes if node.target is aten.sub.Tensor]
    return swaps_operands(program) if found else program


# --- numbers that are none -------------------------------------------------------------------------------------------


class BadBackward(torch.autograd.Function):
    """The identity, whose gradient is 0 / 0."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        zero = grad - grad
        return zero / zero  # backward


class Through(nn.Module):
    """A head behind a function."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.inner, self.head = Inner(function), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x))


class Inner(nn.Module):
    """A layer, and then the function."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.fc, self.function = nn.Linear(8, 8), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.fc(x))


@torch.library.custom_op("faults::halved", mutates_args=())
def halved(x: Tensor) -> Tensor:
    return x[:, ::2].clone()


@halved.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


halved.register_autograd(lambda ctx, grad: grad)


def wrong_shape(x: Tensor) -> Tensor:
    return halved(x) + x  # wrong shape


def bad_backward(x: Tensor) -> Tensor:
    return BadBackward.apply(x)


def overflow(x: Tensor) -> Tensor:
    wide = (x * 300.0).half()
    return (wide * wide).float() * 0.1  # overflow


def log_of_zero(x: Tensor) -> Tensor:
    return torch.log(x.relu())  # log


def root_of_zero(x: Tensor) -> Tensor:
    return (x - x).abs().sqrt() + x  # root


def hidden_root(x: Tensor) -> Tensor:
    return torch.where(x > 0, x.sqrt(), x)  # hidden root


def masked(x: Tensor) -> Tensor:
    scores = x.masked_fill(x > 0, float("-inf"))
    return scores.softmax(-1).nan_to_num(0.0) * (1.0 / (x[:, :1] - x[:, :1]))  # inverse
