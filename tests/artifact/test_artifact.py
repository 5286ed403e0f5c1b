"""What is saved of a graph, what a loaded artifact takes and gives, and what errors say."""

from __future__ import annotations

import copy
import json
import sys
import warnings
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

import monograph as mg
from tests.support import assert_same
from tests.support.goldens import GOLDENS

GOLDEN = GOLDENS / "artifacts"
Pair = namedtuple("Pair", "first second")


@dataclass
class Scores:
    logits: torch.Tensor
    parts: dict


class Infer(mg.Graph):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def build(self, x):
        return self.model(x)


class Train(mg.Graph):
    def __init__(self, model, optimizer=None, scheduler=None):
        super().__init__()
        self.model = model
        optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=0.1)
        self.add_optimizer(optimizer, lr_sch=scheduler)

    def build(self, x, y, weight=1.0):
        loss = nn.functional.mse_loss(self.model(x), y) * weight
        loss.backward()
        return loss


def small():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 2))


def batch(seed=0, size=6):
    source = torch.Generator().manual_seed(seed)
    return torch.randn(size, 4, generator=source), torch.randn(size, 2, generator=source)


def loaded(what, tmp_path, **options):
    return mg.load(mg.save(what, tmp_path / "artifact"), **options)


# --- signatures --------------------------------------------------------------------------------------------------


def test_a_graph_is_stored_as_infer_or_train(tmp_path):
    model = nn.Linear(4, 2)
    infer, train = Infer(model), Train(model)
    x, y = batch()
    infer(x)
    train(x, y)
    assert list(mg.load(mg.save(infer, tmp_path / "a")).signatures) == ["infer"]
    assert list(mg.load(mg.save(train, tmp_path / "b")).signatures) == ["train"]
    named = mg.load(mg.save(infer, tmp_path / "c", signatures=("score",)))
    assert torch.equal(named.score(x), named(x))


def test_a_graph_for_predictions_that_was_called_in_train_mode_is_told(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout())
    predict = mg.trace(model)
    with torch.no_grad():
        predict(torch.ones(2, 4))
        with pytest.warns(
            UserWarning, match=r"in train\(\) mode: it draws random numbers and changes .*call model.eval\(\)"
        ):
            mg.save(predict, tmp_path / "trains")
        model.eval()
        predict = mg.trace(model)
        predict(torch.ones(2, 4))
        model.train()  # the mode of the call is saved
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            mg.save(predict, tmp_path / "predicts")
    assert torch.equal(*[mg.load(tmp_path / "predicts")(torch.ones(2, 4)) for _ in range(2)])


def test_several_graphs_share_one_state(tmp_path):
    model = small()
    train, evaluate, x, y = Train(model), Infer(model), *batch()
    train(x, y)
    model.eval()
    evaluate(x)
    model.train()
    path = mg.save({"train": train, "eval": evaluate}, tmp_path / "artifact")
    artifact = mg.load(path)
    before = artifact.eval(x)
    artifact.train(x, y)
    assert not torch.equal(before, artifact.eval(x))
    state = artifact.state_dict()
    model.load_state_dict(state["model"])
    assert_same(model.eval()(x).detach(), artifact.eval(x))
    stored = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    tensors = [
        *model.state_dict().values(),
        *(t for e in train.state_dict()["optimizer.0"]["state"].values() for t in e.values()),
    ]
    assert stored < sum(t.nbytes for t in tensors) + 20_000  # no tensor is stored twice
    with pytest.raises(mg.ArtifactError, match="several signatures: train, eval"):
        artifact(x)
    with pytest.raises(AttributeError, match="no signature 'infer'; it has train, eval"):
        artifact.infer(x)


@pytest.mark.every_case
@pytest.mark.parametrize("name", ["", "a b", "_x", "state_dict", 3])
def test_names_that_no_signature_can_have(tmp_path, name):
    graph = Infer(nn.Linear(4, 2))
    graph(batch()[0])
    with pytest.raises(mg.ArtifactError, match="is no name for a signature"):
        mg.save({name: graph}, tmp_path / "a")


def test_what_cannot_be_saved(tmp_path):
    graph = Infer(nn.Linear(4, 2))
    with pytest.raises(mg.ArtifactError, match=r"has no program yet(.|\n)*graph.compile"):
        mg.save(graph, tmp_path / "a")
    graph(batch()[0])
    graph.model.weight = nn.Parameter(torch.zeros(2, 4), requires_grad=False)
    with pytest.raises(mg.ArtifactError, match="was changed since"):
        mg.save(graph, tmp_path / "a")
    with pytest.raises(mg.ArtifactError, match="'epoch' is a int, not a graph"):
        mg.save({"train": graph, "epoch": 1}, tmp_path / "a")
    with pytest.raises(mg.ArtifactError, match="one graph has one signature"):
        mg.save(graph, tmp_path / "a", signatures=("a", "b"))
    with pytest.raises(mg.ArtifactError, match=r"export_onnx\(\) got a .* as its path") as caught:
        mg.export_onnx(tmp_path / "model.onnx", graph)
    assert "the graph comes first" in caught.value.hint
    with pytest.raises(mg.ArtifactError, match="got a int as its path"):
        mg.save(graph, 3)
    assert not (tmp_path / "a").exists()


def test_parameters_that_others_of_the_same_form_have_replaced(tmp_path):
    graph, x = Infer(nn.Linear(4, 2)), batch()[0]
    graph(x)
    graph.model.weight = nn.Parameter(torch.ones(2, 4))
    loaded = mg.load(mg.save(graph, tmp_path / "a"))
    assert torch.equal(loaded(x), graph.model(x).detach())
    assert len(graph.builds) == 1


def test_an_attribute_that_was_set_to_an_equal_value_is_no_change(tmp_path):
    graph = Infer(nn.Conv1d(1, 2, 3))
    graph(torch.ones(1, 1, 3))
    graph.model.stride = (1,)  # another tuple
    mg.save(graph, tmp_path / "a")
    graph.model.stride = (2,)
    with pytest.raises(mg.ArtifactError, match="was changed since"):
        mg.save(graph, tmp_path / "b")


def test_paths_that_exist(tmp_path):
    graph, x = Infer(nn.Linear(4, 2)), batch()[0]
    graph(x)
    for path in (tmp_path / "a", tmp_path / "a.zip"):
        mg.save(graph, path)
        with pytest.raises(mg.ArtifactError, match="it exists already"):
            mg.save(graph, path)
        with torch.no_grad():
            graph.model.weight.add_(1)
        mg.save(graph, path, overwrite=True)
        assert torch.equal(mg.load(path)(x), graph(x).detach())
    assert sorted(item.name for item in tmp_path.iterdir()) == ["a", "a.zip"]


# --- calls -------------------------------------------------------------------------------------------------------


class Nested(mg.Graph):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def build(self, pair, *, options, mode="sum", power=2.0):
        y = self.model(pair.first) * options["scale"] + pair.second[0] ** power
        score = Scores(y, {"mode": mode, 1: (y.sum(), None)})
        return Pair(score, [OrderedDict(best=y.max(dim=1)), pair.first])


def test_nested_arguments_and_results(tmp_path):
    model, (x, y) = nn.Linear(4, 2), batch()
    graph = Nested(model)
    given = Pair(x, [y]), {"scale": y}
    expected = graph(given[0], options=given[1], mode="mean", power=3.0)
    artifact = loaded(graph, tmp_path)
    for pair in (given[0], (x, [y])):
        got = artifact(pair, options=given[1], power=3.0)  # what is the same in each call may be left out
        assert (type(got).__name__, got._fields) == ("Pair", ("first", "second"))
        assert_same(expected.first.logits, got.first.logits)
        assert got.first.parts["mode"] == "mean"
        assert got.first.parts[1][1] is None
        assert type(got.second[0]) is OrderedDict
        assert type(got.second[0]["best"]) is torch.return_types.max
        assert got.second[1] is x
    assert not torch.equal(artifact(pair, options=given[1], power=4.0).first.logits, expected.first.logits)


MISFITS = {
    "shape": (
        lambda x, y: ((x[:3], y), {}),
        r"argument x is float32\[3, 4\] on cpu; the artifact takes float32\[6, 4\]",
    ),
    "dtype": (lambda x, y: ((x.double(), y), {}), r"argument x is float64\[6, 4\]"),
    "missing": (lambda x, y: ((x,), {}), "argument y is missing"),
    "too many": (lambda x, y: ((x, y, 1.0, 2), {}), "it got 4 positional arguments"),
    "twice": (lambda x, y: ((x, y), {"x": x}), "argument x is given twice"),
    "unknown": (lambda x, y: ((x, y), {"z": x}), "argument z is unknown"),
    "no tensor": (lambda x, y: ((x, 3), {}), "argument y is an int; the artifact takes a tensor"),
    "no number": (lambda x, y: ((x, y, "x"), {}), "argument weight is a str; the artifact takes a number"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_calls_that_do_not_fit(tmp_path, name):
    model, (x, y) = nn.Linear(4, 2), batch()
    graph = Train(model)
    graph(x, y, 1.0)
    artifact = loaded(graph, tmp_path)
    before = copy.deepcopy(artifact.state_dict())
    call, message = MISFITS[name]
    args, kwargs = call(x, y)
    with pytest.raises(mg.SignatureError, match=message):
        artifact(*args, **({"weight": 1.0} if len(args) == 2 else {}) | kwargs)
    assert_same(before, artifact.state_dict())


def test_tensors_of_other_strides_and_shared_memory(tmp_path):
    model, (x, y) = nn.Linear(4, 2), batch()
    graph = Train(model)
    graph(x, y, 1.0)
    artifact, other = loaded(graph, tmp_path), mg.load(tmp_path / "artifact")
    both = torch.cat([x, y], dim=1)
    losses = [artifact(both[:, :4], both[:, 4:], 1.0), other(x, y, 1.0)]
    assert_same(losses[0], losses[1])


class Adding(mg.Graph):
    def build(self, x, y):
        x.add_(1)
        return x + y


def test_an_argument_that_shares_memory_with_one_that_changes_is_refused(tmp_path):
    graph = Adding()
    graph(torch.zeros(3), torch.zeros(3))
    artifact = loaded(graph, tmp_path)
    both = torch.zeros(4)
    with pytest.raises(mg.SignatureError, match="argument y shares memory, and the step changes it"):
        artifact(both[:3], both[1:])
    assert both.tolist() == [0.0] * 4
    assert artifact(torch.zeros(6)[:3], torch.ones(3)).tolist() == [2.0] * 3


def test_each_form_of_a_call_is_stored(tmp_path):
    graph = Infer(nn.Linear(4, 2))
    graph.config.dynamic(False)
    calls = [torch.randn(size, 4) for size in (1, 3, 5)]
    expected = [graph(x).detach() for x in calls]
    artifact = loaded(graph, tmp_path)
    assert_same(expected, [artifact(x) for x in calls])
    with pytest.raises(mg.SignatureError, match=r"fits no program of infer(.|\n)*float32\[5, 4\]"):
        artifact(torch.randn(2, 4))


def test_an_op_that_fails_names_its_place(tmp_path):
    graph = Infer(nn.Embedding(3, 2))
    graph(torch.tensor([1, 2]))
    artifact = loaded(graph, tmp_path)
    with pytest.raises(
        mg.ArtifactError, match=r"infer failed: index out of range(.|\n)*embedding(.|\n)*test_artifact.py"
    ):
        artifact(torch.tensor([1, 3]))
    assert artifact(torch.tensor([0, 2])).shape == (2, 2)


# --- declared sizes ------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.project, self.output = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x):
        batch, length, width = x.shape
        heads = self.project(x).view(batch, length, 3, 2, 4).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(*heads)
        return self.output(mixed.transpose(1, 2).reshape(batch, length, width)), x.mean() * length


@pytest.mark.long
def test_two_sizes_vary(tmp_path):
    torch.manual_seed(0)
    model = Attention().eval()
    graph = Infer(model)
    dims = mg.Dim("batch", max=9), mg.Dim("length", min=2, max=33)
    graph.compile(mg.spec((*dims, 8)))
    artifact = loaded(graph, tmp_path)
    for sizes in ((1, 2), (1, 33), (4, 4), (5, 8), (8, 5), (9, 33)):
        x = torch.randn(*sizes, 8)
        assert_same([item.detach() for item in model(x)], list(artifact(x)))
    with pytest.raises(
        mg.SignatureError, match="size 34 in dimension 1; the artifact takes length from 2 to 33"
    ):
        artifact(torch.randn(2, 34, 8))
    assert "float32[batch, length, 8]" in str(artifact)


@pytest.mark.filterwarnings("error")
def test_attention_without_dropout_draws_nothing(tmp_path):
    graph = Infer(Attention().train())
    graph(torch.randn(2, 3, 8))
    mg.save(graph, tmp_path / "a")  # would warn of a graph that draws


class LastStates(nn.Module):
    """The states of a recurrent layer at the ends of padded sequences."""

    def __init__(self, kind):
        super().__init__()
        self.embedding, self.layer = nn.Embedding(9, 4), kind(4, 3, batch_first=True)

    def forward(self, tokens, lengths):
        states = self.layer(self.embedding(tokens))[0]
        places, rows = torch.arange(tokens.shape[1]), torch.arange(len(tokens))  # alike where both sizes are
        kept = states * (places < lengths[:, None])[..., None]
        return kept[rows, lengths - 1]


@pytest.mark.parametrize("kind", [nn.GRU, nn.RNN])
def test_recurrent_layers_at_any_length(tmp_path, kind):
    torch.manual_seed(0)
    model = LastStates(kind).eval()

    class InferTwo(Infer):
        def build(self, tokens, lengths):
            return self.model(tokens, lengths)

    graph = InferTwo(model)
    rows, length = mg.Dim("rows", max=6), mg.Dim("length", max=6)
    graph.compile(mg.spec((rows, length), torch.int64), mg.spec((rows,), torch.int64))
    artifact = loaded(graph, tmp_path)
    for sizes in ((1, 1), (1, 6), (2, 2), (3, 5), (6, 1), (6, 6)):
        tokens = torch.randint(9, sizes)
        lengths = torch.randint(1, sizes[1] + 1, sizes[:1])
        assert_same(model(tokens, lengths).detach(), artifact(tokens, lengths))


def test_training_at_any_size(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    graph = Train(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    size = mg.Dim("batch", min=2, max=64)
    graph.compile(mg.spec((size, 4)), mg.spec((size, 2)), 1.0)
    artifact = loaded(graph, tmp_path)
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for number, count in enumerate((3, 64, 17, 2)):
        x, y = batch(number, count)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(plain(x), y)
        loss.backward()
        optimizer.step()
        assert_same(loss.detach(), artifact(x, y, 1.0))
    assert_same(dict(plain.state_dict()), dict(artifact.state_dict()["model"]))
    with pytest.raises(mg.SignatureError, match="argument y is float32"):
        artifact(batch(0, 5)[0], batch(0, 6)[1], 1.0)


def test_a_step_that_is_another_program_at_other_sizes(tmp_path):
    class Odd(nn.Module):
        def forward(self, x):
            return x.sum() if len(x) > 5 else x

    graph = Infer(Odd())
    graph.compile(mg.spec((mg.Dim("batch", max=9), 4)))
    with pytest.raises(mg.ArtifactError, match="not the same program for batch from 2 to 9"):
        mg.save(graph, tmp_path / "a")


def test_a_size_of_one_may_be_another_program(tmp_path):
    class One(nn.Module):
        def forward(self, x):
            return x.exp() if len(x) == 1 else x.sin()

    graph = Infer(One())
    graph.compile(mg.spec((mg.Dim("batch", max=9), 4)))
    artifact = loaded(graph, tmp_path)
    for count in (1, 2, 9):
        x = torch.randn(count, 4)
        assert_same(One()(x), artifact(x))


class Positions(nn.Module):
    """A slice of a table, which is the table itself, without an op, where it is as long."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(8, 4))

    def forward(self, x):
        return x + self.table[: x.shape[1]]


def test_the_largest_size_may_be_another_program(tmp_path):
    model = Positions()
    graph = Infer(model)
    graph.compile(mg.spec((mg.Dim("batch", max=9), mg.Dim("length", max=8), 4)))
    artifact = loaded(graph, tmp_path)
    for sizes in ((1, 1), (1, 8), (3, 5), (5, 8), (9, 1), (9, 7), (9, 8)):
        x = torch.randn(*sizes, 4)
        assert_same(model(x).detach(), artifact(x))
    assert str(artifact).count("infer(") == 2
    with pytest.raises(mg.SignatureError, match="size 9 in dimension 1"):
        artifact(torch.randn(2, 9, 4))


@pytest.mark.every_case
@pytest.mark.parametrize("values", [("", 1, 2), ("a b", 1, 2), ("a", 0, 2), ("a", 3, 2), ("a", 1.0, 2)])
def test_dims_that_are_none(values):
    with pytest.raises(mg.SignatureError):
        mg.Dim(*values)


def test_a_constant_that_hangs_on_a_size_is_refused(tmp_path):
    class Scaled(mg.Graph):
        def build(self, x):
            return x * torch.tensor([float(len(x)), 1.0])

    graph = Scaled()
    with pytest.raises(mg.CaptureError, match="fixes size 0 of argument x") as caught:
        graph.compile(mg.spec((mg.Dim("batch", max=16), 2)))
    assert caught.value.where.file == __file__
    assert graph.builds == ()


class Lengths(nn.Module):
    """A model whose arithmetic, shapes and branches are about sizes."""

    def __init__(self):
        super().__init__()
        self.tokens, self.places, self.head = nn.Embedding(11, 4), nn.Embedding(40, 4), nn.Linear(4, 11)

    def forward(self, x):
        hidden = self.tokens(x) + self.places(torch.arange(x.shape[1]))
        hidden = hidden * 2 if x.shape[1] > 20 else hidden
        return self.head(hidden.transpose(0, 1).reshape(-1, 2, 2).flatten(1)) / len(x)


def test_a_step_for_any_size_is_stored_as_one(tmp_path):
    class Train(mg.Graph):
        def __init__(self, model):
            super().__init__()
            self.model = model
            self.add_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))

        def build(self, x):
            loss = nn.functional.cross_entropy(self.model(x), x.t().reshape(-1))
            loss.backward()
            return loss

    torch.manual_seed(0)
    graph = Train(Lengths())
    graph(torch.randint(11, (3, 5)))
    graph(torch.randint(11, (4, 7)))
    assert len(graph.builds) == 2
    artifact = loaded(graph, tmp_path)
    for shape in ((2, 2), (4, 7), (9, 13), (3, 5), (2, 20)):
        x = torch.randint(11, shape)
        assert_same(graph(x).detach(), artifact(x))
    assert_same(graph.model.state_dict(), dict(artifact.state_dict()["model"]))
    assert len(graph.builds) == 2
    with pytest.raises(mg.ArtifactError, match=r"in which `x.size\(1\) <= 20` holds"):
        artifact(torch.zeros(2, 21, dtype=torch.int64))


def test_one_name_is_one_range():
    graph = Infer(nn.Linear(4, 2))
    with pytest.raises(mg.SignatureError, match="two dims named 'a'"):
        graph.compile(mg.spec((mg.Dim("a"), mg.Dim("a", max=3))))


# --- training on -----------------------------------------------------------------------------------------------------


def test_scaler_average_and_schedule_go_on(tmp_path):
    model = small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    graph = Train(
        model, optimizer, torch.optim.lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, cycle_momentum=False)
    )
    graph.set_grad_scaler(torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2))
    graph.add_ema(graph.model, decay=0.5)
    for seed in range(3):
        graph(*batch(seed), 1.0)
    path = mg.save(graph, tmp_path / "artifact.zip")
    random = torch.get_rng_state()
    expected = [graph(*batch(seed), 1.0) for seed in range(3, 7)]
    torch.manual_seed(5)
    artifact = mg.load(path)
    assert torch.equal(torch.get_rng_state(), random)
    assert_same(expected, [artifact.train(*batch(seed), 1.0) for seed in range(3, 7)])
    assert_same(graph.state_dict(), artifact.state_dict())


def test_a_schedule_goes_on_as_often_as_its_optimizer_steps(tmp_path):
    class Twice(mg.Graph):
        def __init__(self, model):
            super().__init__()
            self.model, optimizer = model, torch.optim.SGD(model.parameters(), lr=0.1)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
            self.add_optimizer(optimizer, lr_sch=schedule, manual=True)
            self.optimizer = optimizer

        def build(self, x, y, scale):
            for _ in range(2):
                self.optimizer.zero_grad()
                loss = ((self.model(x) - y) * scale).square().mean()
                loss.backward()
                self.optimizer.step()
            return loss

    graph = Twice(small())
    graph(*batch(0), 1.0)
    path = mg.save(graph, tmp_path / "artifact")
    expected = [graph(*batch(seed), 1.0) for seed in (1, 2)]
    artifact = mg.load(path)
    assert_same(expected, [artifact.train(*batch(seed), 1.0) for seed in (1, 2)])
    assert_same(graph.state_dict(), artifact.state_dict())


def test_what_was_compiled_only_trains_from_the_beginning(tmp_path):
    model = small()
    graph = Train(model)
    graph.compile(mg.spec((6, 4)), mg.spec((6, 2)), 1.0)
    artifact = loaded(graph, tmp_path)
    assert graph.state_dict()["optimizer.0"]["state"] == {}  # saving has left nothing behind
    random = torch.get_rng_state()
    loss = graph(*batch(), 1.0)
    torch.set_rng_state(random)
    assert_same(loss, artifact.train(*batch(), 1.0))
    assert_same(graph.state_dict(), artifact.state_dict())


def test_a_graph_takes_over_what_an_artifact_learnt(tmp_path):
    graph = Train(small())
    graph(*batch(), 1.0)
    artifact = loaded(graph, tmp_path)
    artifact.train(*batch(1), 1.0)
    other = Train(small())
    other.load_state_dict(artifact.state_dict())
    random = torch.get_rng_state()
    loss = artifact.train(*batch(2), 1.0)
    torch.set_rng_state(random)
    assert_same(loss, other(*batch(2), 1.0))


def test_hyperparameters_can_be_set(tmp_path):
    model = nn.Linear(4, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    graph = Train(model, optimizer)
    graph(*batch(), 1.0)
    artifact = loaded(graph, tmp_path)
    assert artifact.hyperparameters["optimizer.0/group0/lr"] == 0.1
    artifact.hyperparameters["optimizer.0/group0/lr"] = 0.01
    artifact.hyperparameters["optimizer.0/group0/betas/0"] = 0.5
    optimizer.param_groups[0] |= {"lr": 0.01, "betas": (0.5, 0.999)}
    assert_same(graph(*batch(1), 1.0), artifact.train(*batch(1), 1.0))
    assert_same(graph(*batch(1), 1.0), artifact.train(*batch(1), 1.0))
    assert artifact.state_dict()["optimizer.0"]["param_groups"][0]["betas"] == (0.5, 0.999)


def test_a_branch_that_is_not_taken_any_more(tmp_path):
    model = nn.Linear(4, 2)
    graph = Train(model, torch.optim.RAdam(model.parameters()))
    graph(*batch(), 1.0)
    artifact = loaded(graph, tmp_path)
    for seed in range(4):
        artifact.train(*batch(seed), 1.0)
    with pytest.raises(mg.ArtifactError, match="was captured for steps in which"):
        artifact.train(*batch(), 1.0)
    for seed in range(9):
        graph(*batch(seed), 1.0)
    later = mg.load(mg.save(graph, tmp_path / "later"))
    assert_same(
        [graph(*batch(seed), 1.0) for seed in range(3)], [later(*batch(seed), 1.0) for seed in range(3)]
    )


class BranchOfRows(mg.Graph):
    """Takes a branch by a number that is computed with the number of rows."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)
        self.config.backend("aten")

    def build(self, x):
        values = self.linear(x)
        return values * 2 if (torch.arange(x.shape[0]) + x[:, 0] > 0).all() else values


def test_a_branch_by_a_size_that_varies_is_refused(tmp_path):
    varying, single = BranchOfRows(), BranchOfRows()
    single.config.dynamic(False)
    with torch.no_grad():
        for rows in (3, 5, 7):
            assert_same(varying(torch.ones(rows, 4)), single(torch.ones(rows, 4)))
        with pytest.raises(mg.ArtifactError, match="size that varies, which no artifact can hold") as caught:
            mg.save(varying, tmp_path / "varying")
        assert "config.dynamic(False)" in caught.value.hint
        artifact = mg.load(mg.save(single, tmp_path / "single"))
        assert_same(artifact(torch.ones(5, 4)), single(torch.ones(5, 4)))
        with pytest.raises(mg.ArtifactError, match="was captured for steps in which"):
            artifact(-torch.ones(5, 4))


def test_schedulers_that_hold_code(tmp_path):
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    graph = Train(model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step))
    graph(*batch(), 1.0)
    with pytest.raises(mg.ArtifactError, match=r"LambdaLR computes with code(.|\n)*artifact.hyperparameters"):
        mg.save(graph, tmp_path / "a")


def test_micro_batches(tmp_path):
    model = small()
    graph = Train(model)
    graph.config.set_gradient_accumulation_steps(3)
    graph(*batch(), 1.0)
    artifact = loaded(graph, tmp_path)
    random = torch.get_rng_state()
    expected = graph(*batch(1), 1.0)
    torch.set_rng_state(random)
    assert_same(expected, artifact.train(*batch(1), 1.0))


@pytest.mark.long
def test_compiled(tmp_path):
    model, (x, y) = nn.Linear(4, 2), batch()
    graph = Train(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    graph(x, y, 1.0)
    artifact = loaded(graph, tmp_path, backend="inductor")
    expected = [graph(x, y, 1.0) for _ in range(3)]
    torch.testing.assert_close([artifact.train(x, y, 1.0) for _ in range(3)], expected)
    assert artifact.train.backend == "inductor"
    torch.testing.assert_close(dict(artifact.state_dict()["model"]), dict(model.state_dict()))
    with pytest.raises(mg.ArtifactError, match="unknown backend 'x'"):
        mg.load(tmp_path / "artifact", backend="x")


# --- old artifacts -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path", sorted(GOLDEN.glob("schema-*/*.zip")), ids=lambda path: f"{path.parent.name}-{path.stem}"
)
def test_old_artifacts_load_for_ever(path):
    """Each was written when its schema was new; `make_golden` wrote it, and what it gave then."""
    told = json.loads(path.with_suffix(".json").read_text())
    artifact = mg.load(path)
    x, y = (torch.tensor(values) for values in told["batch"])
    torch.testing.assert_close(artifact.infer(x[:2]), torch.tensor(told["inferred"]))
    losses = [artifact.train(x, y, 1.0).item() for _ in told["losses"]]
    torch.testing.assert_close(losses, told["losses"])


def make_golden(path: Path) -> None:
    """Write an artifact of the present schema: `python -m tests.artifact.test_artifact PATH`."""
    model, (x, y) = small(), batch()
    train, infer = Train(model), Infer(model)
    for _ in range(2):
        train(x, y, 1.0)
    model.eval()
    with torch.no_grad():
        infer.compile(mg.spec((mg.Dim("batch", max=8), 4)))
    model.train()
    mg.save({"train": train, "infer": infer}, path)
    artifact = mg.load(path)
    told = {"batch": [x.tolist(), y.tolist()], "inferred": artifact.infer(x[:2]).tolist()}
    told["losses"] = [artifact.train(x, y, 1.0).item() for _ in range(3)]
    path.with_suffix(".json").write_text(json.dumps(told) + "\n")


if __name__ == "__main__":
    make_golden(Path(sys.argv[1]))


def held(buffer: torch.Tensor) -> mg.Graph:
    class Step(mg.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Module()
            self.module.register_buffer("buffer", buffer)

        def build(self, x: torch.Tensor) -> torch.Tensor:
            return self.module.buffer * x

    return Step()


@pytest.mark.parametrize(
    "form",
    [lambda t: t[:, 0], lambda t: t[:1].expand(3, 4), lambda t: t[:, ::2]],
    ids=["column", "expanded", "steps"],
)
def test_state_with_gaps_in_memory_is_refused_when_it_is_saved(form, tmp_path):
    graph = held(form(torch.arange(12.0).reshape(3, 4)))
    graph(torch.ones(()))
    with pytest.raises(mg.ArtifactError, match=r"module\.buffer is in memory with gaps"):
        mg.save(graph, tmp_path / "artifact")


def test_state_that_is_negated_by_a_bit_is_saved(tmp_path):
    memory = torch.complex(torch.arange(4.0), -torch.arange(4.0))
    graph, x = held(memory.conj()), torch.ones(4)
    expected = graph(x)
    mg.save(graph, tmp_path / "artifact")
    assert torch.equal(mg.load(tmp_path / "artifact")(x), expected)
