"""Programs with cross-entropies: those whose readers are all known get code of our own, and steps train with it."""

from __future__ import annotations

import operator
from types import SimpleNamespace

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

import monograph as mg
from monograph.compat.inductor.lowerings import _may_be_lost
from monograph.kernels.cross_entropy import with_cross_entropy
from monograph.kernels.select import select
from monograph.numerics.judge import against_float64
from monograph.settings import Settings
from tests.kernels.programs import COMPILED, program_of, run, targets, with_code
from tests.kernels.test_own_cross_entropy import numbers

aten = torch.ops.aten
NONE, MEAN, SUM = range(3)


def program_with(logits, target, *weight, reduction=MEAN, ignored=-100, scale=None, more=None, smooth=None):
    """A program with a cross-entropy and its gradient; `scale` writes that of the loss, `more` gives further results.

    With `smooth`, each logarithm has a gradient besides: what this makes of a row of numbers.
    """

    def build(op, x, y, *given):
        softmax = op(aten._log_softmax.default, x, 1, False)
        weights = given[0] if given else None
        made = op(aten.nll_loss_forward.default, softmax, y, weights, reduction, ignored)
        loss, total = (op(operator.getitem, made, i) for i in range(2))
        sums = [op(aten.sum.dim_IntList, softmax, [1])] if smooth else []
        grad = scale(op, loss) if scale else op(aten.ones_like.default, loss, pin_memory=False)
        back = op(aten.nll_loss_backward.default, grad, softmax, y, weights, reduction, ignored, total)
        if smooth:
            back = smooth(op, back, op(aten.mul.Tensor, op(aten.ones_like.default, sums[0]), -0.01))
        gradient = op(aten._log_softmax_backward_data.default, back, softmax, 1, logits.dtype)
        return loss, gradient, *sums, *(more(op, softmax, back, total) if more else ())

    return program_of(build, logits, target, *weight)


def favour(monkeypatch, name: str) -> None:
    """Trials in which the form of this name is the fastest."""
    monkeypatch.setattr(
        "monograph.kernels.cross_entropy.seconds_of",
        lambda forms, *_: {form.name: 1.0 if form.name == name else 2.0 for form in forms},
    )


def scaled(op, loss):
    """What a loss scaler makes of the gradient."""
    return op(aten.mul.Tensor, op(aten.ones_like.default, loss), 8.0)


def spread(op, back, row):
    """A number for each row added to the gradient of all its logarithms."""
    column = op(aten.unsqueeze.default, row, 1)
    return op(aten.add.Tensor, op(aten.expand.default, column, [9, 21]), back)


def spread_last(op, back, row):
    """The same in the other order."""
    column = op(aten.unsqueeze.default, row, -1)
    return op(aten.add.Tensor, back, op(aten.expand.default, column, [9, 21]))


PROGRAMS = {
    "mean": {},
    "smooth": {"smooth": spread},
    "smooth, the other way round": {"smooth": spread_last, "ignored": 2},
    "sum": {"reduction": SUM},
    "none": {"reduction": NONE},
    "a class that counts as none": {"ignored": 2},
    "scaled": {"scale": scaled},
    "sum of all": {"reduction": NONE, "scale": lambda op, loss: op(aten.expand.default, op(aten.ones_like.default, op(aten.sum.default, loss)), [9])},
}  # fmt: skip


CODED = ("mean", "none", "smooth")  # also run by our code, whose compilation takes time


@pytest.mark.every_case
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("case", PROGRAMS)
def test_it_takes_the_place_of_torchs_ops(case, weighted, monkeypatch):
    favour(monkeypatch, "own")
    logits, target, _ = numbers(9, 21)
    target[0], target[3] = PROGRAMS[case].get("ignored", -100), 2
    given = (logits, target, *([torch.rand(21)] if weighted else []))
    program = program_with(*given, **PROGRAMS[case])
    chosen, (choice,) = with_cross_entropy(program)
    assert choice.winner == "own"
    assert "cross_entropy(f32[9, 21]): own (own " in str(choice)
    assert not {"nll_loss_forward.default", "_log_softmax.default"} & set(targets(chosen))
    exact = run(program, *(item.double() if item.is_floating_point() else item for item in given))
    coded = [with_code(chosen)] if case in CODED and weighted else []
    for form in (chosen, *coded):
        for got, wanted in zip(run(form, *given), exact, strict=True):
            torch.testing.assert_close(got.double(), wanted.double(), rtol=2e-6, atol=2e-6)


def test_no_row_has_a_class(monkeypatch):
    """The mean is NaN, and the gradient 0, as torch's."""
    favour(monkeypatch, "own")
    logits, target, _ = numbers(3, 5)
    program = program_with(logits, target.fill_(-100))
    loss, gradient = run(with_code(with_cross_entropy(program)[0]), logits, target)
    assert loss.isnan()
    assert torch.equal(gradient, torch.zeros(3, 5))


def test_a_class_out_of_range_is_an_error(monkeypatch):
    favour(monkeypatch, "own")
    logits, target, _ = numbers(3, 5)
    chosen = with_cross_entropy(program_with(logits, target))[0]
    run(chosen, logits, target)
    for wrong in (5, -1):
        target[1] = wrong
        with pytest.raises(RuntimeError, match="out of bounds"):
            run(with_code(chosen), logits, target)


def test_losses_that_weigh_each_other(monkeypatch):
    """The gradient of each is scaled by the other: one of them stays."""
    favour(monkeypatch, "own")
    logits, target, _ = numbers(4, 5)

    def build(op, x, z, y):
        softmaxes = [op(aten._log_softmax.default, item, 1, False) for item in (x, z)]
        made = [op(aten.nll_loss_forward.default, item, y, None, MEAN, -100) for item in softmaxes]
        losses, totals = ([op(operator.getitem, item, i) for item in made] for i in range(2))
        for softmax, scale, total in zip(softmaxes, reversed(losses), totals, strict=True):
            back = op(aten.nll_loss_backward.default, scale, softmax, y, None, MEAN, -100, total)
            losses = [*losses, op(aten._log_softmax_backward_data.default, back, softmax, 1, torch.float32)]
        return tuple(losses)

    given = (logits, torch.randn(4, 5), target)
    program = program_of(build, *given)
    chosen, choices = with_cross_entropy(program)
    assert len(choices) == 1
    assert targets(chosen).count("cross_entropy.default") == 1
    for got, wanted in zip(run(chosen, *given), run(program, *given), strict=True):
        torch.testing.assert_close(got, wanted)


def test_torchs_kernels_stay_where_they_are_faster(monkeypatch):
    favour(monkeypatch, "aten")
    program = program_with(*numbers(3, 5)[:2])
    chosen, (choice,) = with_cross_entropy(program)
    assert choice.winner == "aten"
    assert targets(chosen) == targets(program)


def test_it_is_measured_on_compiled_backends_only():
    program = program_with(*numbers(64, 512)[:2])
    (choice,) = select(program, COMPILED)[1]
    assert set(choice.seconds) == {"aten", "own"}
    assert select(program, Settings(kernel_selection=True))[1] == ()


def focal(op, loss):
    """A scale that depends on the loss."""
    return op(aten.exp.default, loss)


def random(op, loss):
    """A scale that is drawn: what is drawn after the loss stays after it."""
    return op(aten.bernoulli.p, op(aten.ones_like.default, loss), 0.5)


LEFT = {
    "the scale depends on the loss": lambda: program_with(*numbers(4, 5)[:2], scale=focal),
    "the scale is random": lambda: program_with(*numbers(4, 5)[:2], scale=random),
    "the softmax is read": lambda: program_with(
        *numbers(4, 5)[:2], more=lambda op, softmax, back, total: (op(aten.exp.default, softmax),)
    ),
    "the sums are weighted": lambda: program_with(
        *numbers(9, 21)[:2],
        smooth=lambda op, back, row: op(aten.mul.Tensor, spread(op, back, row), 2.0),
    ),
    "the gradient is added twice": lambda: program_with(
        *numbers(9, 21)[:2], smooth=lambda op, back, row: op(aten.add.Tensor, back, back)
    ),
    "the gradient is scaled before": lambda: program_with(
        *numbers(9, 21)[:2],
        smooth=lambda op, back, row: spread(op, op(aten.mul.Tensor, back, 2.0), row),
    ),
    "only the sums are read": lambda: program_with(*numbers(9, 21)[:2], smooth=lambda op, back, row: back),
    "the gradient of the softmax is read": lambda: program_with(
        *numbers(4, 5)[:2], more=lambda op, softmax, back, total: (back,)
    ),
    "the weight of all is read": lambda: program_with(
        *numbers(4, 5)[:2], more=lambda op, softmax, back, total: (total,)
    ),
    "float64": lambda: program_with(torch.randn(4, 5).double(), torch.zeros(4, dtype=torch.int64)),
    "no rows": lambda: program_with(torch.randn(0, 5), torch.zeros(0, dtype=torch.int64)),
    "bytes": lambda: program_with(torch.randn(4, 5), torch.zeros(4, dtype=torch.uint8)),
    "one row": lambda: program_of(lambda op, x: op(aten._log_softmax.default, x, 0, False), torch.randn(5)),
}


@pytest.mark.every_case
@pytest.mark.parametrize("case", LEFT)
def test_other_losses_are_left_alone(case, monkeypatch):
    favour(monkeypatch, "own")
    program = LEFT[case]()
    assert with_cross_entropy(program) == (program, ())


def test_what_was_a_half_type_is_left_alone(monkeypatch):
    favour(monkeypatch, "own")

    def build(op, half, y):
        x = op(aten._to_copy.default, half, dtype=torch.float32)
        softmax = op(aten._log_softmax.default, x, 1, False)
        made = op(aten.nll_loss_forward.default, softmax, y, None, MEAN, -100)
        loss, total = (op(operator.getitem, made, i) for i in range(2))
        grad = op(aten.ones_like.default, loss)
        back = op(aten.nll_loss_backward.default, grad, softmax, y, None, MEAN, -100, total)
        return op(aten._log_softmax_backward_data.default, back, softmax, 1, torch.float32)

    program = program_of(build, torch.randn(4, 5).bfloat16(), torch.zeros(4, dtype=torch.int64))
    assert with_cross_entropy(program)[1] == ()


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("source", "more", "lost"),
    [
        ("mm", None, True),
        ("mm", "before", True),
        ("mm", "after", False),
        ("argument", None, False),
        ("view of an argument", None, False),
    ],
)
def test_what_may_be_written_over(source, more, lost):
    """Logits that this graph makes and nothing reads later, also not by another view."""
    graph = fx.Graph()

    def made(target, *args, like=None):
        node = graph.call_function(target, args)
        node.meta["val"] = torch.empty(4, 4) if like is None else like.meta["val"].view(2, 8)
        return node

    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(4, 4)
    logits = made(aten.mm.default, x, x) if source == "mm" else x
    other = made(aten.view.default, logits, [2, 8], like=logits)
    if more == "before":
        made(aten.exp.default, other)
    given = other if source == "view of an argument" else logits
    losses = made(torch.ops.monograph.cross_entropy.default, given, x, x, -100)
    last = made(aten.exp.default, other) if more == "after" else losses
    graph.output((last,))
    lowered = SimpleNamespace(graph_inputs={"x"}, constants={}, current_node=losses)
    operand = SimpleNamespace(get_name=lambda: "buf0" if source == "mm" else "x")
    assert _may_be_lost(lowered, operand) is lost


# --- steps ------------------------------------------------------------------------------------------------------------


class Classified(mg.Graph):
    """Trains a classifier; gives the loss, and what else is asked for."""

    def __init__(self, dtype: torch.dtype, gives: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Linear(12, 37).to(dtype)
        self.gives = gives
        self.add_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9))

    def build(self, x, y):
        """The loss, and logits before or after it."""
        logits = self.model(x)
        loss = F.cross_entropy(logits, y, ignore_index=3, label_smoothing=0.1 * (self.gives == "smooth"))
        loss.backward()
        more = {"loss": (), "smooth": (), "logits": (logits.detach(),), "doubled": (2 * logits.detach(),)}
        return loss.detach(), *more[self.gives]


def classified(dtype=torch.float32, backend="aten", gives="loss", guard=False):
    """What four steps give and the state afterwards, and the graph."""
    graph = Classified(dtype, gives)
    graph.config.backend(backend)
    if guard:
        graph.config.detect_nonfinite()
    torch.manual_seed(1)
    batches = [(torch.randn(20, 12).to(dtype), torch.randint(37, (20,))) for _ in range(4)]
    made = {
        f"{i}.{k}": item.clone() for i, batch in enumerate(batches) for k, item in enumerate(graph(*batch))
    }
    return made | graph.model.state_dict(), graph, batches


@pytest.mark.long
@pytest.mark.parametrize("gives", ["loss", "smooth", "logits", "doubled"])
def test_a_compiled_step(gives, monkeypatch):
    """Logits that something else reads are not written over; a wrong class changes nothing."""
    favour(monkeypatch, "own")
    exact, eager = classified(torch.float64, gives=gives)[0], classified(gives=gives)[0]
    made, graph, batches = classified(backend="inductor", gives=gives)
    assert graph.backend == "inductor"
    assert "cross_entropy.default(" in graph.show("kernels")
    assert "cross_entropy(f32[20, 37]): own" in str(graph.explain())
    assert against_float64(exact, eager, made).ok
    before = {name: item.clone() for name, item in graph.model.state_dict().items()}
    for wrong in (37, -1):
        x, y = batches[0]
        with pytest.raises(IndexError, match=f"Target {wrong} is out of bounds"):
            graph(x, y.masked_fill(torch.arange(20) == 7, wrong))
    assert all(torch.equal(item, before[name]) for name, item in graph.model.state_dict().items())


@pytest.mark.long
def test_looking_for_what_is_not_finite_changes_no_bit(monkeypatch):
    favour(monkeypatch, "own")
    plain, guarded = (classified(backend="inductor", guard=guard)[0] for guard in (False, True))
    assert all(torch.equal(item, guarded[name]) for name, item in plain.items())
