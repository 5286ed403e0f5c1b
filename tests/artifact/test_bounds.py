"""Ops that go where an index says, from a file without trust: what lies outside is an error, and nothing is written.

`make stress` tries all ops that such a file may hold; here are the ones that were found to write anywhere.
"""

from __future__ import annotations

import math
import operator
import re
import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch
from torch import fx, nn

import monograph as mg
from monograph.artifact.bounds.describe import check_graph
from monograph.artifact.bounds.rules import RULES
from monograph.artifact.bounds.safe_ops import SAFE_OPS
from monograph.artifact.programs.operators import op_of
from monograph.artifact.state.averages import StoredAverage
from monograph.checkpoint.errors import Damaged
from monograph.checkpoint.read import memory_bytes
from monograph.ir.meta import ScalarMeta, describe, set_value
from tests.artifact.test_malicious import edited
from tests.stress.artifact_ops import through_the_door
from tests.stress.op_seeds import OpCall
from tests.support import ROOT

aten = torch.ops.aten
FAR = 1 << 40


class Call(mg.Graph):
    """One op, called with what a step is given."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def build(self, *args):
        return self.function(*args)


def max_pool(x, grad, indices):
    return aten.max_pool2d_with_indices_backward(grad, x, [2, 2], [2, 2], [0, 0], [1, 1], False, indices)


def bag(grad, indices, of_bags, sizes, maximum):
    return aten._embedding_bag_dense_backward(grad, indices, of_bags, sizes, maximum, 5, False, 0, None)


X, SMALL = torch.arange(16.0).view(1, 1, 4, 4), torch.ones(1, 1, 2, 2)
PLACES = torch.tensor([5, 7, 13, 15]).view(1, 1, 2, 2)
WORDS = torch.tensor([0, 4, 1, 1])
# the op, its arguments, and which of them holds indices
WRITERS = {
    "max_pool2d_with_indices_backward": (max_pool, (X, SMALL, PLACES), 2),
    "adaptive_max_pool2d_backward": (
        lambda grad, x, indices: aten.adaptive_max_pool2d_backward(grad, x, indices),
        (SMALL, X, PLACES),
        2,
    ),
    "embedding_dense_backward": (
        lambda grad, indices: aten.embedding_dense_backward(grad, indices, 5, -1, False),
        (torch.ones(4, 3), WORDS),
        1,
    ),
    "_embedding_bag_dense_backward": (
        bag,
        (
            torch.ones(2, 3),
            WORDS,
            torch.tensor([0, 0, 1, 1]),
            torch.tensor([2, 2]),
            torch.zeros(0, dtype=torch.int64),
        ),
        1,
    ),
    "_embedding_bag_dense_backward of bags": (
        bag,
        (
            torch.ones(2, 3),
            WORDS,
            torch.tensor([0, 0, 1, 1]),
            torch.tensor([2, 2]),
            torch.zeros(0, dtype=torch.int64),
        ),
        2,
    ),
    "nll_loss_backward": (
        lambda grad, x, target, total: aten.nll_loss_backward(grad, x, target, None, 0, -100, total),
        (torch.ones(4), torch.randn(4, 5), WORDS, torch.tensor(4.0)),
        2,
    ),
    "repeat_interleave": (
        lambda repeats: aten.repeat_interleave.Tensor(repeats, output_size=4),
        (torch.tensor([1, 0, 3]),),
        0,
    ),
    "linalg_lu_solve": (
        lambda lu, pivots, b: aten.linalg_lu_solve(lu, pivots, b),
        (torch.eye(3), torch.tensor([1, 2, 3], dtype=torch.int32), torch.ones(3, 1)),
        1,
    ),
}


@pytest.mark.every_case
@pytest.mark.parametrize("name", WRITERS)
def test_an_index_of_an_artifact(tmp_path, name):
    function, args, place = WRITERS[name]
    graph = Call(function)
    expected = graph(*args)
    artifact = mg.load(mg.save(graph, tmp_path / "artifact"))
    assert torch.equal(artifact(*args), expected)
    for value in (FAR, -FAR, 16, -1):
        value = max(-(1 << 31), min(value, (1 << 31) - 1)) if args[place].dtype is torch.int32 else value
        hostile = list(args)
        hostile[place] = torch.full_like(args[place], value)
        with pytest.raises(mg.ArtifactError, match="has values from"):
            artifact(*hostile)
    assert torch.equal(artifact(*args), expected)


PIXELS, LABELS = torch.arange(40.0).view(4, 10), torch.zeros(2, 5, dtype=torch.int64)
# an op with one argument left out, what fits there, and what leads the kernel out of its memory
MISFITS = {
    "the gradient of a pad": (
        "aten::reflection_pad2d_backward.default",
        lambda grad: (grad, torch.zeros(3, 4, 12, 9), [1, 2, 3, 4]),
        torch.ones(3, 4, 19, 12),
        [torch.ones(3, 12, 5, 6)],
    ),
    "the gradient of a loss": (
        "aten::multilabel_margin_loss_backward.default",
        lambda is_target: (torch.ones(()), torch.ones(2, 5), LABELS, 1, is_target),
        torch.ones(2, 5),
        [torch.ones(10), torch.ones(2, 4)],
    ),
    "the gradient of an average": (
        "aten::avg_pool2d_backward.default",
        lambda grad: (grad, torch.ones(2, 3, 1, 9), [1, 3], [1, 3], [0, 0], False, True, None),
        torch.ones(2, 3, 1, 3),
        [torch.ones(3, 3, 1, 3)],
    ),
    "the gradient of samples of a volume": (
        "aten::grid_sampler_3d_backward.default",
        lambda grad: (grad, torch.ones(1, 1, 2, 2, 2), torch.zeros(1, 7, 1, 1, 3), 0, 0, True, [True, True]),
        torch.ones(1, 1, 7, 1, 1),
        [torch.ones(1, 1, 1, 1, 1)],
    ),
    "the gradient of GELU": (
        "aten::gelu_backward.default",
        lambda grad: (grad, torch.ones(1, 3)),
        torch.ones(1, 3),
        [torch.ones(1).expand(3)],
    ),
    "words in no bag": (
        "aten::_embedding_bag.default",
        lambda offsets: (torch.ones(5, 3), WORDS, offsets),
        torch.tensor([0, 2]),
        [torch.zeros(0, dtype=torch.int64)],
    ),
    "attention, which divides by its sizes": (
        "aten::_scaled_dot_product_flash_attention_for_cpu.default",
        lambda query: (query, torch.ones(3, 2, 4, 2), torch.ones(3, 2, 4, 2)),
        torch.ones(3, 2, 5, 2),
        [torch.ones(3, 2, 0, 2), torch.ones(3, 2, 5, 1).expand(3, 2, 5, 2)],
    ),
    "a norm": (
        "aten::_native_batch_norm_legit.no_stats",
        lambda bias: (torch.ones(2, 5, 3), None, bias, True, 0.1, 1e-5),
        torch.ones(5),
        [torch.ones(1)],
    ),
    "the gradient of a norm, whose kernel takes statistics as if they lay one after the other": (
        "aten::native_batch_norm_backward.default",
        lambda mean: (PIXELS, PIXELS, None, None, None, mean, torch.ones(10), True, 1e-5, [True] * 3),
        torch.zeros(10),
        [torch.zeros(1).expand(10), torch.zeros(10, 3)[:, 0]],
    ),
}


@pytest.mark.every_case
@pytest.mark.parametrize("name", MISFITS)
def test_arguments_that_lead_a_kernel_out_of_its_memory(name):
    op, args_with, fits, misfits = MISFITS[name]
    assert through_the_door(OpCall(op, args_with(fits), {})) == "ran"
    for misfit in misfits:
        assert through_the_door(OpCall(op, args_with(misfit), {})) == "refused"


@pytest.mark.parametrize(("padding", "value"), [(1, math.nan), (2, math.inf)])
def test_points_that_are_nowhere(padding, value):
    """Where points outside of an image are moved to its border, one that is nowhere has no place in memory."""

    def gradient(points):
        x = torch.ones(1, 1, 2, 2)
        args = (x, x, points, 0, padding, True, [True, True])
        return OpCall("aten::grid_sampler_2d_backward.default", args, {})

    points = torch.zeros(1, 2, 2, 2)
    assert through_the_door(gradient(points)) == "ran"
    points[0, 1, 1, 0] = value
    assert through_the_door(gradient(points)) == "failed"


def test_bags_that_begin_after_the_first_word():
    """Where the forward op has noted no bags, their gradient finds them from the offsets, the first of which is 0."""

    def gradient(offsets):
        none = torch.zeros(0, dtype=torch.int64)
        return OpCall(
            "aten::_embedding_bag_backward.default",
            (torch.ones(2, 3), WORDS, offsets, none, torch.tensor([2, 2]), none, 5, False, 0, False, None),
            {},
        )

    assert through_the_door(gradient(torch.tensor([0, 2]))) == "ran"
    assert through_the_door(gradient(torch.tensor([1, 2]))) == "failed"


class Everything(nn.Module):
    """What gradients with rules come from."""

    def __init__(self):
        super().__init__()
        self.pads = nn.Sequential(nn.ReflectionPad2d(1), nn.ReplicationPad2d((1, 2, 1, 2)), nn.AvgPool2d(2))
        self.norm, self.group, self.bag = nn.BatchNorm2d(3), nn.GroupNorm(3, 3), nn.EmbeddingBag(5, 6)
        self.points = nn.Parameter(torch.rand(2, 6, 6, 2) * 3 - 1.5)

    def forward(self, x, words):
        x = nn.functional.gelu(self.group(self.norm(self.pads(x))))
        x = nn.functional.grid_sample(x, self.points, padding_mode="reflection", align_corners=False)
        x = nn.functional.scaled_dot_product_attention(x, x, x).mean((1, 2))
        return x + self.bag(words)


def test_gradients_of_a_step_need_no_trust(tmp_path):
    torch.manual_seed(0)
    model = Everything()
    graph = mg.train_graph(
        model, nn.functional.multilabel_margin_loss, torch.optim.SGD(model.parameters(), lr=0.1)
    )
    x, words = torch.randn(2, 3, 8, 8), torch.randint(5, (2, 4))
    labels = torch.tensor([[1, 3, -1, 0, 0, 0], [0, -1, 0, 0, 0, 0]])
    graph(x, words, labels)
    artifact = mg.load(mg.save(graph, tmp_path / "artifact"))
    for _ in range(2):
        assert torch.equal(artifact.train(x, words, labels), graph(x, words, labels))


def test_no_op_stands_in_both_lists():
    assert not SAFE_OPS & set(RULES)


def test_ops_that_may_never_end_need_trust(tmp_path):
    """The kernel of a Legendre polynomial takes as many steps as its degree says."""
    graph = Call(torch.special.legendre_polynomial_p)
    x, degree = torch.linspace(-1, 1, 5), torch.arange(5.0)
    expected = graph(x, degree)
    path = mg.save(graph, tmp_path / "artifact")
    with pytest.raises(mg.ArtifactError, match="special_legendre_polynomial_p"):
        mg.load(path)
    assert torch.equal(mg.load(path, trust=True)(x, degree), expected)


def test_a_workspace_that_no_forward_op_has_left(tmp_path):
    """What the gradient of a recurrent layer goes by is known to its forward op alone."""
    torch.manual_seed(0)
    model = nn.LSTM(3, 4)
    graph = mg.train_graph(
        model, lambda made, y: (made[0] - y).square().mean(), torch.optim.SGD(model.parameters(), lr=0.1)
    )
    x, y = torch.randn(5, 2, 3), torch.randn(5, 2, 4)
    graph(x, y)
    path = mg.save(graph, tmp_path / "artifact")
    artifact = mg.load(path)
    assert torch.equal(artifact.train(x, y), graph(x, y))

    def change(program):
        row = next(row for row in program["nodes"] if "mkldnn_rnn_layer_backward" in row[1])
        row[2][-1] = row[2][7]

    edited(path, change)
    with pytest.raises(mg.ArtifactError, match="has a workspace that aten::mkldnn_rnn_layer has not made"):
        mg.load(path)


@pytest.mark.long
def test_compiled_programs_look_too(tmp_path):
    function, args, _place = WRITERS["embedding_dense_backward"]
    graph = Call(function)
    expected = graph(*args)
    artifact = mg.load(mg.save(graph, tmp_path / "artifact"), backend="inductor")
    assert torch.equal(artifact(*args), expected)
    with pytest.raises(mg.ArtifactError):
        artifact(args[0], args[1] + FAR)


@pytest.mark.parametrize("op", [operator.mul, operator.pow])
def test_integers_that_might_grow_without_end(op):
    graph = fx.Graph()
    number = graph.placeholder("number")
    set_value(number, ScalarMeta("int"))
    graph.output(graph.call_function(op, (number, number)))
    with pytest.raises(Damaged, match="multiplies integers"):
        check_graph(fx.GraphModule({}, graph))


def test_numbers_of_a_step_are_no_sizes(tmp_path):
    """What is told of a program is true for one size."""
    graph = Call(lambda x, scale: x * scale)
    graph(torch.ones(3), 2.0)
    path = mg.save(graph, tmp_path / "artifact")

    def change(program):
        row = next(row for row in program["nodes"] if row[1].startswith("aten::mul"))
        row[1:3] = ["aten::expand.default", [row[2][0], [row[2][1]]]]

    edited(path, change)
    with pytest.raises(mg.ArtifactError, match="from a number of the step"):
        mg.load(path)


def test_more_memory_at_once_than_there_is(tmp_path):
    """Each value fits the machine, and all of them together do not."""
    graph = Call(lambda x: x * 2)
    graph(torch.ones(3))
    path = mg.save(graph, tmp_path / "artifact")
    size = memory_bytes() * 6 // 10

    def change(program):
        row = next(row for row in program["nodes"] if row[1].startswith("aten::mul"))
        zeros = ["aten::zeros.default", [[size]], {"dtype": {"dtype": "uint8"}}, 0, ["uint8", [size], [1]]]
        sums = [["a", *zeros], ["b", *zeros], ["c", "aten::add.Tensor", ["a", "b"], {}, 0, zeros[4]]]
        sums.append(["d", "aten::amax.default", ["c"], {}, 0, ["uint8", [], []]])
        program["nodes"][:0] = sums
        row[2][1] = "d"

    edited(path, change)
    with pytest.raises(mg.ArtifactError, match="bytes at once, more than this machine has"):
        mg.load(path)(torch.ones(3))


@pytest.mark.long
def test_hostile_calls():
    """A part of `make stress`: the ops that have rules, each call in a process that may die."""
    command = [sys.executable, "-m", "tests.stress.artifact_ops", "--quick", "--calls", "600"]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert made.returncode == 0, made.stdout[-2000:] + made.stderr[-2000:]
    assert ", 0 deaths," in made.stdout


@pytest.mark.parametrize("trust", [False, True])
def test_an_op_that_nobody_has_looked_at(trust):
    if trust:
        assert op_of("aten::_reshape_alias.default", trust=True) is aten._reshape_alias.default
        return
    for name in (
        "aten::_reshape_alias.default",
        "aten::_ctc_loss_backward.default",
        "aten::segment_reduce.default",
    ):
        with pytest.raises(Damaged, match=rf"{re.escape(name)}.*trust=True"):
            op_of(name, trust=False)


def test_forms_that_do_not_fit(tmp_path):
    """The kernel reads as many indices as there are gradients."""
    function, args, _ = WRITERS["adaptive_max_pool2d_backward"]
    graph = Call(function)
    graph(*args)
    path = mg.save(graph, tmp_path / "artifact")

    def change(program):
        node = next(row for row in program["nodes"] if "adaptive" in row[1])
        node[2][0] = node[2][1]  # the image in place of the gradient

    edited(path, change)
    with pytest.raises(mg.ArtifactError, match="arguments that do not fit: indices"):
        mg.load(path)


def branch(target) -> fx.GraphModule:
    graph = fx.Graph()
    x = graph.placeholder("x")
    made = graph.call_function(target, (x,))
    set_value(x, describe(torch.ones(2, 3)))
    set_value(made, describe(target(torch.ones(2, 3))))
    graph.output((made,))
    return fx.GraphModule(nn.Module(), graph)


@pytest.mark.every_case
@pytest.mark.parametrize("other", [aten.neg.default, aten.t.default])
def test_branches_give_one_form(other):
    root, graph = nn.Module(), fx.Graph()
    root.first, root.second = branch(aten.neg.default), branch(other)
    flag, x = graph.placeholder("flag"), graph.placeholder("x")
    branches = graph.get_attr("first"), graph.get_attr("second")
    chosen = graph.call_function(torch.ops.higher_order.cond, (flag, *branches, (x,)))
    set_value(flag, describe(torch.tensor(True)))
    set_value(x, describe(torch.ones(2, 3)))
    set_value(chosen, describe((torch.ones(2, 3),)))
    graph.output((chosen,))
    refused = pytest.raises(Damaged, match="the branches of cond give different forms")
    with nullcontext() if other is aten.neg.default else refused:
        check_graph(fx.GraphModule(root, graph))


@pytest.mark.parametrize("decay", [-0.1, 1.5, math.nan, 1, None])
def test_an_average_decays_by_a_number_from_0_to_1(decay):
    with pytest.raises(Damaged, match="an average has no decay"):
        StoredAverage(decay, {"n_averaged": torch.tensor(1)})


@pytest.mark.every_case
@pytest.mark.parametrize("masked", [False, True])
def test_layers_that_evaluation_runs_as_one_op_need_no_trust(tmp_path, masked):
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    mask = torch.ones(5, 5).triu(1).bool() if masked else None
    x = torch.randn(3, 5, 8)
    graph = Call(lambda x: (layer(x, mask), layer.self_attn(x, x, x, attn_mask=mask)[0]))
    with torch.no_grad():
        made = graph(x)
        assert "_transformer_encoder_layer_fwd" in graph.show()
        again = mg.load(mg.save(graph, tmp_path / "layer"))(x)
    assert all(map(torch.equal, made, again))
