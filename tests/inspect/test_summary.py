"""graph.summary(): the numbers are those that plain PyTorch gives."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import monograph as mg
from monograph.inspect.pages.modules import amount


class Net(nn.Module):
    """A weight that two modules share, a frozen parameter, buffers, a module that is called twice, and one that never is."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.body = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embed.weight
        self.idle = nn.Linear(3, 3)
        self.norm.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.embed(x))
        scores = self.head(self.body(self.body(hidden)))
        return scores.flatten(0, 1)


@pytest.fixture(scope="module")
def model() -> Net:
    torch.manual_seed(0)
    return Net()


@pytest.fixture(scope="module")
def step(model: Net) -> mg.Graph:
    optimizer = torch.optim.AdamW([item for item in model.parameters() if item.requires_grad])
    return mg.train_graph(model, nn.CrossEntropyLoss(), optimizer)


X, Y = torch.arange(24).reshape(4, 6) % 20, torch.arange(24) % 20


def test_before_the_first_build_it_has_modules_and_parameters(model: Net) -> None:
    graph = mg.trace(model)
    found = graph.summary()
    assert "no build yet" in str(found)
    assert "output" in str(found)
    assert "FLOPs:" not in str(found)
    assert found.num_parameters == sum(item.numel() for item in model.parameters())
    assert found.total_flops == found.peak_bytes == 0
    assert not graph.builds
    assert "no build yet" in graph._repr_html_()


def test_parameters_are_those_of_torch(step: mg.Graph, model: Net) -> None:
    found = step.summary(X, Y)
    assert found.num_parameters == sum(item.numel() for item in model.parameters())
    assert found.num_trainable == sum(item.numel() for item in model.parameters() if item.requires_grad)
    assert found.num_buffers == sum(item.numel() for item in model.buffers())
    counted = {row.path: row.num_parameters for row in found.modules}
    for path, module in model.named_modules(prefix="model"):
        assert counted[path] == sum(item.numel() for item in module.parameters())
    assert counted["loss_fn"] == 0


def test_arithmetic_is_that_of_torch(step: mg.Graph, model: Net) -> None:
    with FlopCounterMode(display=False) as counter:
        loss = nn.CrossEntropyLoss()(model(X), Y)
        forward = counter.get_total_flops()
        loss.backward()
    found = step.summary(X, Y)
    assert found.total_flops == counter.get_total_flops()
    assert found.flops == {"forward": forward, "backward": counter.get_total_flops() - forward}
    rows = {row.path: row.flops for row in found.modules}
    assert rows["model"] == found.flops
    assert rows["model.body"] == {
        "forward": 2 * 2 * (2 * 24 * 8 * 16),
        "backward": 2 * 2 * 2 * (2 * 24 * 8 * 16),
    }
    assert rows["model.norm"] == rows["model.idle"] == {}


class Last(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)[0][:, -1]


@pytest.mark.every_case
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("both", [False, True])
def test_recurrent_layers_take_a_product_with_each_weight_at_each_step(
    kind: type[nn.RNNBase], both: bool
) -> None:
    layer = kind(16, 32, 2, batch_first=True, bidirectional=both)
    graph = mg.train_graph(Last(layer), nn.MSELoss(), torch.optim.SGD(layer.parameters(), lr=0.1))
    found = graph.summary(mg.spec((8, 20, 16)), mg.spec((8, 64 if both else 32)))
    forward = 2 * 8 * 20 * sum(item.numel() for item in layer.parameters() if item.dim() == 2)
    assert found.flops["forward"] == forward
    weights = dict(layer.named_parameters())
    of_x = 2 * 8 * 20 * sum(item.numel() for name, item in weights.items() if "weight_ih_l0" in name)
    of_first = 2 * 8 * sum(item.numel() for name, item in weights.items() if "weight_hh" in name)
    assert 2 * forward - of_x - of_first <= found.flops["backward"] <= 2 * forward  # neither has a gradient


def test_a_convolution_in_groups_takes_in_backward_what_it_takes_twice() -> None:
    """Once for each of its gradients, however many groups there are."""
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.Flatten())
    graph = mg.train_graph(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), 0.1))
    found = graph.summary(mg.spec((2, 3, 4, 4)), mg.spec((2, 128)))
    flops = {row.path: row.flops for row in found.modules}["model.1"]
    assert flops == {"forward": 2 * (2 * 8 * 16) * 9, "backward": 2 * 2 * (2 * 8 * 16) * 9}


def test_accumulated_steps_count_each_part() -> None:
    layer = nn.Linear(3, 2)
    graph = mg.train_graph(layer, nn.MSELoss(), torch.optim.SGD(layer.parameters(), lr=0.1))
    whole = graph.summary(mg.spec((8, 3)), mg.spec((8, 2))).flops
    graph.config.set_gradient_accumulation_steps(4)
    assert graph.summary(mg.spec((8, 3)), mg.spec((8, 2))).flops == whole


def test_shapes_memory_and_the_tree(step: mg.Graph) -> None:
    found, memory = step.summary(X, Y), step.memory(X, Y)
    rows = {row.path: row for row in found.modules}
    assert rows["model"].output == "f32[24, 20]"
    assert rows["model.body"].output == "f32[4, 6, 8] (2 calls)"
    assert rows["model.idle"].output == ""
    assert [rows[path].depth for path in ("model", "model.body", "model.body.0", "loss_fn")] == [0, 1, 2, 0]
    held = (found.state_bytes, found.argument_bytes, found.peak_bytes)
    assert held == (memory.state_bytes, memory.argument_bytes, memory.peak_bytes)
    by_module = {path: sum(kinds.values()) for path, kinds in memory.by_module().items()}
    assert all(row.peak_bytes == by_module.get(row.path, 0) for row in found.modules)
    text = str(found)
    assert "    0 (Linear)" in text
    assert "batch[0] i64[4, 6]" in text
    assert str(found) == str(mg.summary(step, X, Y))
    shallow = str(step.summary(depth=1))
    assert "model (Net)" in shallow
    assert "(Linear)" not in shallow
    assert "and 8 modules inside of them" in shallow
    assert "model (Net)" in step._repr_html_()


def test_sizes_that_vary_are_named() -> None:
    layer = nn.Linear(3, 2)
    size = mg.Dim("batch", min=2, max=64)
    found = mg.trace(layer).summary(mg.spec((size, 3)))
    assert "f32[input_0, 3]" in str(found)
    assert "numbers are those of the sizes of its capture" in str(found)
    assert "sizes of its capture" not in str(mg.trace(layer).summary(mg.spec((4, 3))))


def test_it_is_of_graphs(model: Net) -> None:
    with pytest.raises(mg.DefinitionError, match="got a Net"):
        mg.summary(model)  # type: ignore[arg-type]


def test_nothing_is_changed(step: mg.Graph) -> None:
    step.compile(X, Y)
    builds, count = step.builds, step.state_dict()
    step.summary()
    assert step.builds == builds
    assert step.state_dict().keys() == count.keys()


def test_amounts_have_three_digits() -> None:
    found = [amount(count) for count in (0, 1, 999, 1000, 2_360_000, 999_600, 10**18)]
    assert found == ["", "1", "999", "1 K", "2.36 M", "1 M", "1e+03 P"]
