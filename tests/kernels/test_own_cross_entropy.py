"""Cross-entropy by code of our own: as near to float64 as torch's kernels, and chosen where all that reads it is known."""

from __future__ import annotations

import math
import operator
from types import SimpleNamespace

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

import monograph as mg
from monograph.compat.inductor.lowerings import _may_be_lost
from monograph.ir.own_ops import cross_entropy_of_torch
from monograph.kernels import compile as workshop_module
from monograph.kernels.compile import KernelCompiler
from monograph.kernels.cross_entropy import with_cross_entropy
from monograph.kernels.select import select
from monograph.layout import Layout
from monograph.native import CrossEntropy
from monograph.numerics.judge import against_float64
from monograph.settings import Settings
from tests.kernels.programs import COMPILED, program_of, run, targets, with_code

aten = torch.ops.aten
COMPILER = KernelCompiler()  # of this processor: what several tests use is compiled once
NONE, MEAN, SUM = range(3)


def code(logits: torch.Tensor, ignored: int = -100, threads: int = 1) -> CrossEntropy:
    """Our code for logits."""
    return CrossEntropy.of([Layout(logits.shape, logits.stride())], [ignored], threads)


def ours(logits, target, scale, ignored=-100, threads=1, compiler=COMPILER):
    """Losses and gradient by our code."""
    return compiler.compiled(code(logits, ignored, threads)).once(logits, target, scale)


def numbers(rows: int, classes: int, gap: int = 0):
    """Logits with a gap after each row, a class for each, and the scale of the gradient; the first row has no class."""
    target = torch.randint(classes, (rows,))
    scale = torch.rand(rows) / rows
    target[0], scale[0] = -100, 0
    return 4 * torch.randn(rows, classes + gap)[:, :classes], target, scale


def assert_near(logits, target, scale, ignored=-100, compiler=COMPILER) -> None:
    """Each result is about as near to float64 as torch's."""
    exact = cross_entropy_of_torch(logits.double(), target, scale.double(), ignored)
    theirs = cross_entropy_of_torch(logits, target, scale, ignored)
    for got, known, wanted in zip(
        ours(logits, target, scale, ignored, compiler=compiler), theirs, exact, strict=True
    ):
        assert got.shape == wanted.shape
        largest = max(1.0, logits.abs().max().item()) if wanted.dim() == 1 else scale.max()
        assert (got - wanted).abs().max() <= 2 * (known - wanted).abs().max() + 2e-7 * largest


SIZES = [  # rows, classes, the gap after a row, and the class that counts as none
    *((5, classes, 0, -100) for classes in (1, 2, 7, 8, 15, 16, 17, 31, 64, 65, 83, 128, 1000)),
    (1, 20, 0, -100),
    (30, 40, 3, 0),
    (9, 130, 1, 2),
]


def given_for(rows: int, classes: int, gap: int, ignored: int):
    """What our code takes for one of the sizes."""
    logits, target, scale = numbers(rows, classes, gap)
    target[0] = ignored
    return logits, target, scale.masked_fill(target == ignored, 0), ignored


@pytest.mark.parametrize("missing", [[], ["__AVX512F__"], ["__AVX512F__", "__AVX2__"]])
def test_every_size_and_layout(missing, monkeypatch):
    """Also with registers of half the width, and with none."""
    compile_as_it_is = workshop_module.compile_to_functions
    without = "".join(f"#undef {name}\n" for name in missing)
    monkeypatch.setattr(
        workshop_module, "compile_to_functions", lambda text, goal: compile_as_it_is(without + text, goal)
    )
    given = [given_for(*size) for size in SIZES]
    compiler = KernelCompiler(code(logits, ignored) for logits, _, _, ignored in given)
    for item in given:
        assert_near(*item, compiler=compiler)


SPECIAL = {
    "NaN": (1, 2, math.nan),
    "NaN after whole registers": (1, 33, math.nan),
    "NaN of a row without a class": (0, 2, math.nan),
    "infinite": (1, 2, math.inf),
    "minus infinite": (1, 2, -math.inf),
    "a row of minus infinite": (1, slice(None), -math.inf),
    "large": (slice(None), 5, 3e38),
    "small": (slice(None), slice(None), -3e38),
}


@pytest.mark.parametrize("case", SPECIAL)
def test_what_is_not_finite(case):
    row, column, number = SPECIAL[case]
    logits, target, scale = numbers(4, 35)
    target[1] = 2  # the class itself
    logits[row, column] = number
    theirs = cross_entropy_of_torch(logits, target, scale, -100)
    for got, known in zip(ours(logits, target, scale), theirs, strict=True):
        torch.testing.assert_close(got, known, rtol=1e-5, atol=1e-6, equal_nan=True)


def test_the_gradient_may_be_written_over_the_logits():
    logits, target, scale = numbers(6, 83)
    losses, gradient = ours(logits, target, scale)
    other = torch.empty(6)
    pointers = [item.data_ptr() for item in (logits, target, scale, other, logits)]
    COMPILER.compiled(code(logits))._run(1, *pointers, *[0] * 5)
    assert torch.equal(other, losses)
    assert torch.equal(logits, gradient)


def test_classes_out_of_range_are_none():
    """The program asserts that there are none; nothing outside is read or written on the way."""
    logits, target, scale = numbers(4, 20)
    target[:] = torch.tensor([20, -1, 1 << 40, -(1 << 40)])
    losses, gradient = ours(logits, target, scale)
    assert torch.equal(losses, torch.zeros(4))
    torch.testing.assert_close(gradient, logits.softmax(1) * scale[:, None])


def test_threads_share_rows():
    given = numbers(700, 100)  # enough work for several
    for alone, shared in zip(ours(*given), ours(*given, threads=3), strict=True):
        assert torch.equal(alone, shared)
    assert code(given[0], threads=3).used_threads == 3
    assert code(given[0][:9], threads=3).used_threads == 1


def test_what_it_is_not_made_for():
    assert CrossEntropy(Layout.contiguous(3, 5), -100).can_be_made
    for shape in ((0, 5), (3, 0), (3,), (2, 3, 5), (1 << 20, 1 << 20)):
        assert not CrossEntropy(Layout.contiguous(*shape), -100).can_be_made
    by_columns = CrossEntropy(Layout((3, 5), (1, 3)), -100)
    assert by_columns.operands[0] == Layout.contiguous(3, 5)


# --- programs ---------------------------------------------------------------------------------------------------------


def program_with(logits, target, *weight, reduction=MEAN, ignored=-100, scale=None, more=None):
    """A program with a cross-entropy and its gradient; `scale` writes that of the loss, `more` gives further results."""

    def build(op, x, y, *given):
        softmax = op(aten._log_softmax.default, x, 1, False)
        weights = given[0] if given else None
        made = op(aten.nll_loss_forward.default, softmax, y, weights, reduction, ignored)
        loss, total = (op(operator.getitem, made, i) for i in range(2))
        grad = scale(op, loss) if scale else op(aten.ones_like.default, loss, pin_memory=False)
        back = op(aten.nll_loss_backward.default, grad, softmax, y, weights, reduction, ignored, total)
        gradient = op(aten._log_softmax_backward_data.default, back, softmax, 1, logits.dtype)
        return loss, gradient, *(more(op, softmax, back, total) if more else ())

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


PROGRAMS = {
    "mean": {},
    "sum": {"reduction": SUM},
    "none": {"reduction": NONE},
    "a class that counts as none": {"ignored": 2},
    "scaled": {"scale": scaled},
    "sum of all": {"reduction": NONE, "scale": lambda op, loss: op(aten.expand.default, op(aten.ones_like.default, op(aten.sum.default, loss)), [9])},
}  # fmt: skip


CODED = ("mean", "none")  # also run by our code, whose compilation takes time


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
    assert str(choice).startswith("cross_entropy(f32[9, 21]): own (own ")
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
        loss = F.cross_entropy(logits, y, ignore_index=3)
        loss.backward()
        more = {"loss": (), "logits": (logits.detach(),), "doubled": (2 * logits.detach(),)}
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
@pytest.mark.parametrize("gives", ["loss", "logits", "doubled"])
def test_a_compiled_step(gives, monkeypatch):
    """Logits that something else reads are not written over; a wrong class changes nothing."""
    favour(monkeypatch, "own")
    exact, eager = classified(torch.float64, gives=gives)[0], classified(gives=gives)[0]
    made, graph, batches = classified(backend="inductor", gives=gives)
    assert graph.backend == "inductor"
    assert "torch.ops.monograph.cross_entropy.default(" in graph.show("kernels")
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
