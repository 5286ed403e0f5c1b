"""Sparse tensors as arguments, state and constants of a step: eager's bits, a build for each number of elements."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import monograph as mg
from monograph.numerics.judge import same_bits

warnings.filterwarnings("ignore", "Sparse CSR")
PLACES = torch.tensor([[0, 1, 2, 3, 4], [1, 0, 4, 2, 0]])
X, Y = torch.randn(5, 3, generator=torch.Generator().manual_seed(3)), torch.tensor([0, 1, 0, 1, 0])


def graph_of(seed: int = 0, count: int = 5, layout: torch.layout = torch.sparse_coo) -> torch.Tensor:
    values = torch.randn(count, generator=torch.Generator().manual_seed(seed))
    made = torch.sparse_coo_tensor(PLACES[:, :count], values, (5, 5)).coalesce()
    return made.to_sparse_csr() if layout is torch.sparse_csr else made


def uncoalesced() -> torch.Tensor:
    return torch.sparse_coo_tensor(torch.tensor([[0, 1, 1, 3], [1, 0, 0, 2]]), torch.arange(4.0), (5, 5))


class Function(mg.Graph):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def build(self, *args):
        return self.function(*args)


def same(expected, got) -> bool:
    if expected is None or got is None:
        return expected is got
    return same_bits(expected.detach(), got.detach()) and expected.requires_grad == got.requires_grad


USES = {
    "sparse.mm": lambda a, x: torch.sparse.mm(a, x),
    "@": lambda a, x: a @ x,
    "mv": lambda a, x: a @ x[:, 0],
    "dense @ sparse": lambda a, x: x.t() @ a.t(),
    "addmm": lambda a, x: torch.sparse.addmm(torch.ones(5, 3), a, x),
    "to_dense": lambda a, x: a.to_dense() @ x,
    "t": lambda a, x: a.t() @ x,
    "coalesce": lambda a, x: a.coalesce() @ x,
    "values": lambda a, x: a.coalesce().values().sum() * x,
    "indices": lambda a, x: x[a.coalesce().indices()[1]],
    "sum": lambda a, x: torch.sparse.sum(a) * x,
    "degrees": lambda a, x: torch.sparse.sum(a, dim=1).to_dense()[:, None] * (a @ x),
    "softmax": lambda a, x: torch.sparse.softmax(a, 1) @ x,
    "scaled": lambda a, x: (a * 2) @ x,
    "added": lambda a, x: (a + a.t()) @ x,
    "squared": lambda a, x: torch.sparse.mm(a, a) @ x,
    "other dtype": lambda a, x: a.double() @ x.double(),
    "to_csr": lambda a, x: a.to_sparse_csr() @ x,
    "mask": lambda a, x: (x @ x.t()).sparse_mask(a.coalesce()).to_dense(),
    "number of elements": lambda a, x: x * a._nnz(),
    "reduced": lambda a, x: torch.sparse.mm(a, x, "mean"),
}
KINDS = {
    "coo": graph_of(),
    "uncoalesced": uncoalesced(),
    "csr": graph_of(layout=torch.sparse_csr),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("use", USES)
def test_an_argument_and_the_gradient_of_the_dense_operand(use, kind):
    function = USES[use]

    def step(a, x):
        x = x.detach().requires_grad_()
        loss = function(a, x).sin().sum()
        return loss.detach(), torch.autograd.grad(loss, x, allow_unused=True)[0]

    sparse = KINDS[kind]
    try:
        expected = step(sparse, X)
    except (RuntimeError, NotImplementedError, AttributeError):
        with pytest.raises((mg.CaptureError, NotImplementedError, AttributeError, RuntimeError)):
            Function(step)(sparse, X)
        return  # eager mode refuses it too
    graph = Function(step)
    for _ in range(2):
        assert all(map(same, expected, graph(sparse, X)))
    assert len(graph.builds) == 1


WITHOUT_GRADIENT = {"softmax", "squared", "other dtype", "reduced", "to_csr", "degrees"}  # in eager mode


@pytest.mark.parametrize("use", sorted(USES.keys() - WITHOUT_GRADIENT))
def test_the_gradient_of_values(use):
    def step(weight, x):
        weight, x = weight.detach().requires_grad_(), x.detach().requires_grad_()
        sparse = torch.sparse_coo_tensor(PLACES, weight, (5, 5))
        loss = USES[use](sparse, x).sin().sum()
        return (loss.detach(), *torch.autograd.grad(loss, (weight, x), allow_unused=True))

    weight = torch.randn(5)
    assert all(map(same, step(weight, X), Function(step)(weight, X)))


class Network(nn.Module):
    def __init__(self, where: str, layout: torch.layout):
        super().__init__()
        self.where, self.first, self.second = where, nn.Linear(3, 8), nn.Linear(8, 2)
        if where == "buffer":
            self.register_buffer("adj", graph_of(layout=layout))
        if where == "attribute":
            self.adj = graph_of(layout=layout)

    def forward(self, x, adj=None):
        adj = CONSTANT if self.where == "global" else self.adj if adj is None else adj
        return torch.sparse.mm(adj, self.second(F.relu(adj @ self.first(x))))


CONSTANT = graph_of(7)


def eager(where, layout):
    torch.manual_seed(1)
    model = Network(where, layout)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

    def step(x, y, *adj):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x, *adj), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step, model


class Training(mg.Graph):
    def __init__(self, where, layout, backend="aten"):
        super().__init__()
        torch.manual_seed(1)
        self.model = Network(where, layout)
        self.add_optimizer(torch.optim.Adam(self.model.parameters(), lr=0.1))
        self.config.backend(backend)

    def build(self, x, y, *adj):
        loss = F.cross_entropy(self.model(x, *adj), y)
        loss.backward()
        return loss


def check_state(model, graph):
    for expected, got in zip(model.state_dict().values(), graph.model.state_dict().values(), strict=True):
        assert same_bits(expected, got)


@pytest.mark.one_case
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=str)
def test_training_with_another_graph_at_each_step(layout):
    step, model = eager("argument", layout)
    graph = Training("argument", layout)
    for seed in range(3):  # other values, as many of them: one build
        adj = graph_of(seed, layout=layout)
        assert same_bits(step(X, Y, adj), graph(X, Y, adj).detach())
    assert len(graph.builds) == 1
    fewer = graph_of(9, count=3, layout=layout)
    assert same_bits(step(X, Y, fewer), graph(X, Y, fewer).detach())
    assert len(graph.builds) == 2
    assert "adj" in graph.builds[1].reason
    assert same_bits(step(X, Y, adj), graph(X, Y, adj).detach())
    assert len(graph.builds) == 2
    check_state(model, graph)


@pytest.mark.one_case
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=str)
@pytest.mark.parametrize("where", ["buffer", "attribute"])
def test_training_with_a_graph_that_is_state(where, layout):
    step, model = eager(where, layout)
    graph = Training(where, layout)

    def check():
        for _ in range(2):
            assert same_bits(step(X, Y), graph(X, Y).detach())
        check_state(model, graph)

    check()
    for holder in (model, graph.model):  # in place
        holder.adj.values().mul_(2)
    check()
    for holder in (model, graph.model):  # replaced by one of as many elements
        holder.adj = graph_of(5, layout=layout)
    check()
    assert len(graph.builds) == 1
    for holder in (model, graph.model):
        holder.adj = graph_of(6, count=3, layout=layout)
    check()
    assert len(graph.builds) == 2


def test_another_content_of_the_same_tensor():
    step, model = eager("buffer", torch.sparse_coo)
    graph = Training("buffer", torch.sparse_coo)
    for content in (graph_of(), graph_of(4), graph_of(2, count=3), graph_of(3, count=3)):
        for holder in (model, graph.model):
            holder.adj.copy_(content)
        assert same_bits(step(X, Y), graph(X, Y).detach())
    for holder in (model, graph.model):
        holder.adj.zero_()
    assert same_bits(step(X, Y), graph(X, Y).detach())


def test_a_global():
    step, model = eager("global", torch.sparse_coo)
    graph = Training("global", torch.sparse_coo)
    for _ in range(2):
        assert same_bits(step(X, Y), graph(X, Y).detach())
        CONSTANT.values().mul_(2)
        assert same_bits(step(X, Y), graph(X, Y).detach())
    check_state(model, graph)
    assert len(graph.builds) == 1


@pytest.mark.one_case
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=str)
def test_state_is_saved_and_loaded(layout, tmp_path):
    graph = Training("buffer", layout)
    graph(X, Y)
    mg.save(graph.state_dict(), tmp_path / "state")
    torch.save(graph.model.state_dict(), tmp_path / "model")
    expected = graph(X, Y)
    graph.model.adj.values().mul_(3)
    graph(X, Y)
    graph.load_state_dict(mg.load(tmp_path / "state"))
    assert same_bits(expected.detach(), graph(X, Y).detach())
    again = Training("buffer", layout)
    again.load_state_dict(mg.load(tmp_path / "state"))
    assert same_bits(expected.detach(), again(X, Y).detach())
    graph.model.load_state_dict(torch.load(tmp_path / "model"))


@pytest.mark.long
@pytest.mark.one_case
@pytest.mark.parametrize("where", ["argument", "buffer"])
def test_inductor_leaves_what_is_sparse_to_pytorch(where):
    step, model = eager(where, torch.sparse_coo)
    graph = Training(where, torch.sparse_coo, "inductor")
    for seed in range(3):
        adj = (graph_of(seed),) if where == "argument" else ()
        torch.testing.assert_close(step(X, Y, *adj), graph(X, Y, *adj).detach())
    assert graph.backend == "inductor"
    for expected, got in zip(model.parameters(), graph.model.parameters(), strict=True):
        torch.testing.assert_close(expected, got, rtol=1e-3, atol=1e-4)


def test_results():
    def step(a, weight):
        own = torch.sparse_coo_tensor(PLACES, weight, (5, 5)).coalesce()
        return a * 2, a.t(), a.to_sparse_csr(), {"own": own}, a

    sparse, weight = graph_of(), torch.randn(5, requires_grad=True)
    expected, graph = step(sparse, weight), Function(step)
    for _ in range(2):
        got = graph(sparse, weight)
        for one, other in zip((*expected[:3], expected[3]["own"]), (*got[:3], got[3]["own"]), strict=True):
            assert one.layout is other.layout
            assert same(one, other)
        assert same_bits(got[4], sparse)


def test_in_containers_and_replicated():
    def step(batch):
        return batch["graphs"][0] @ batch["x"]

    batch = {"graphs": [graph_of()], "x": X}
    assert same_bits(step(batch), Function(step)(batch))
    model = nn.Linear(3, 2)

    class Accumulated(mg.Graph):
        def __init__(self):
            super().__init__()
            self.model = model
            self.add_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
            self.config.set_gradient_accumulation_steps(2)

        def build(self, x, adj):
            loss = (adj @ self.model(x)).square().mean()
            loss.backward()
            return loss

    with pytest.raises(mg.SignatureError, match="sparse tensor, which cannot be split") as caught:
        Accumulated()(torch.cat([X, X]), graph_of())
    assert "mg.replicated(adj)" in caught.value.hint
    reference = copy.deepcopy(model)
    Accumulated()(torch.cat([X, X]), mg.replicated(graph_of()))
    loss = (graph_of() @ reference(X)).square().mean()
    loss.backward()
    with torch.no_grad():
        expected = reference.weight - 0.1 * reference.weight.grad
    torch.testing.assert_close(expected, model.weight.detach())


def test_what_is_learned_may_be_coalesced():
    """How many elements there will be depends on the places alone, which are known before the step."""
    places = torch.tensor([[0, 1, 1, 3], [1, 0, 0, 2]])

    class Weighted(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.arange(4.0))

        def forward(self, places, x):
            return (
                torch.sparse.softmax(torch.sparse_coo_tensor(places, self.weight, (5, 5)).coalesce(), 1) @ x
            )

    model = Weighted()
    graph = Function(model)
    graph.model = model
    assert same(model(places, X), graph(places, X))
    assert same(model(PLACES[:, :4], X), graph(PLACES[:, :4], X))
    assert len(graph.builds) == 2
    assert same(model(places, X), graph(places, X))
    assert len(graph.builds) == 2


def embedded(optimizer, steps):
    torch.manual_seed(0)
    model = nn.Embedding(10, 4, sparse=True)
    return model, optimizer(model.parameters()), [torch.randint(10, (6,)) for _ in range(steps)]


@pytest.mark.one_case
@pytest.mark.parametrize("kind", ["SGD", "Adagrad"])
def test_sparse_gradients_of_an_embedding(kind):
    def make(parameters):
        return getattr(torch.optim, kind)(parameters, lr=0.1)

    model, optimizer, batches = embedded(make, 4)
    for batch in batches:
        optimizer.zero_grad()
        model(batch).sin().sum().backward()
        optimizer.step()
    own, held, _ = embedded(make, 0)

    class Step(mg.Graph):
        def __init__(self):
            super().__init__()
            self.model = own
            self.add_optimizer(held)

        def build(self, batch):
            loss = self.model(batch).sin().sum()
            loss.backward()
            return loss

    graph = Step()
    for batch in batches:
        graph(batch)
    assert same_bits(model.weight.detach(), own.weight.detach())
    assert kind == "Adagrad" or len(graph.builds) == 1


class SumStep(mg.Graph):
    def __init__(self, model, optimizer):
        super().__init__()
        self.model = model
        self.add_optimizer(optimizer)

    def build(self, batch):
        self.model(batch).sum().backward()


def test_first_state_of_a_sparse_gradient_is_refused():
    model, optimizer, (batch,) = embedded(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 1)

    with pytest.raises(mg.OptimizerError, match=r"first state for model\.weight from a sparse gradient"):
        SumStep(model, optimizer)(batch)


@pytest.mark.parametrize(
    ("make", "hint"),
    [
        (
            lambda p: torch.optim.SparseAdam(p),
            "Adagrad for an embedding with sparse=True; or sparse=False and Adam",
        ),
        (lambda p: torch.optim.Adagrad(p, weight_decay=0.1), "weight_decay takes dense gradients"),
        (lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1), "weight_decay takes dense gradients"),
        (lambda p: torch.optim.Adagrad(p, fused=True), "leave fused=True out"),
    ],
)
def test_optimizers_that_take_no_sparse_gradients_say_what_to_do(make, hint):
    model, optimizer, (batch,) = embedded(make, 1)

    with pytest.raises(mg.CaptureError) as caught:
        SumStep(model, optimizer)(batch)
    assert hint in caught.value.hint
    assert "closure" not in caught.value.hint


def changed_in_place(a, x):
    a.mul_(2)
    return a @ x


REFUSED = {
    "an argument that requires grad": (
        lambda a, x: a @ x,
        graph_of().requires_grad_(),
        "values get a gradient",
    ),
    "blocks": (lambda a, x: a @ x, torch.eye(4).to_sparse_bsr((2, 2)), "to_dense"),
    "in place": (changed_in_place, graph_of(), "compute a new one"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_named(name):
    function, sparse, hint = REFUSED[name]
    with pytest.raises(mg.MonographError) as caught:
        Function(function)(sparse, X)
    assert hint in caught.value.hint
    assert caught.value.where.file == __file__


def test_a_number_of_elements_that_the_step_makes_is_named():
    model = nn.Linear(3, 3)
    graph = Function(lambda x: (torch.relu(model(x)) @ x.t()).to_sparse() @ x)
    graph.model = model
    with pytest.raises(mg.DataDependentError, match="how many elements _to_sparse gives") as caught:
        graph(X)
    assert "to_dense()" in caught.value.hint


def test_state_that_becomes_sparse_is_refused():
    model = nn.Linear(3, 3)
    model.register_buffer("adj", graph_of())

    def step(x):
        model.adj = model.adj * 2
        return model.adj @ x

    graph = Function(step)
    graph.model = model
    with pytest.raises(mg.CaptureError, match=r"puts a sparse tensor into model\.adj"):
        graph(X)
    assert model.adj.layout is torch.sparse_coo


def test_an_artifact_says_that_it_cannot(tmp_path):
    graph = Training("argument", torch.sparse_coo)
    graph(X, Y, graph_of())
    with pytest.raises(mg.ArtifactError, match="sparse tensor"):
        mg.save(graph, tmp_path / "step.zip")
    graph = Training("buffer", torch.sparse_coo)
    graph(X, Y)
    with pytest.raises(mg.ArtifactError, match="sparse tensors") as caught:
        mg.save(graph, tmp_path / "step.zip")
    assert "state_dict" in caught.value.hint


def test_edges_as_an_index():
    """Message passing without sparse tensors, as torch_geometric does it."""
    model = nn.Linear(3, 2)

    def step(x, edges):
        source, target = edges
        messages = model(x)[source]
        added = torch.zeros(5, 2).index_add(0, target, messages)
        largest = torch.zeros(5, 2).scatter_reduce(0, target[:, None].expand(-1, 2), messages, "amax")
        return added + largest

    graph = Function(step)
    graph.model = model
    for edges in (PLACES, PLACES.flip(0), PLACES[:, :3]):
        assert same(step(X, edges), graph(X, edges))
    assert len(graph.builds) == 2
