"""A second build is said aloud, with a line to write against further ones: for each cause, and once for each."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import monograph as mg
from monograph.internals.advice import advice
from monograph.internals.internals import internals_of
from monograph.ir.call.reason import Cause, Reason
from tests.support.steps import line_of

SCALE, NAME, TABLE = 2.0, "a", {"k": 1}
BOX = SimpleNamespace(text="p")


class Step(mg.Graph):
    """A step that reads numbers and texts from many places."""

    def __init__(self, backend: str = "aten") -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.0))
        self.add_optimizer(torch.optim.AdamW(self.model.parameters(), lr=0.1))
        self.config.backend(backend)
        self.beta, self.mode, self.rows = 1.0, "x", 1

    def build(self, x: Any, step: Any = 0, mask: Any = None, other: Any = None) -> torch.Tensor:
        out = self.model(x) * SCALE * self.beta + len(NAME) + TABLE["k"] + len(self.mode) + len(BOX.text)
        if isinstance(mask, torch.Tensor) and mask.any():
            out = out * 2
        loss = sum(out for _ in range(self.rows)).square().mean() + (0 if isinstance(step, str) else step)
        loss.backward()
        return loss


def x(*shape: int) -> torch.Tensor:
    return torch.ones(*(shape or (4, 8)))


def group(step: Any) -> dict[str, Any]:
    found: dict[str, Any] = internals_of(step).registry.optimizers[0].optimizer.param_groups[0]
    return found


def under_autocast(step: Any) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        step(x())


def replaced_state(step: Any) -> None:
    new = torch.randn(8, 16)[:, ::2].contiguous()
    step.model[0].weight.data = new.t().contiguous().t()
    step(x())


def then(*args: Any) -> Callable[[Any], Any]:
    return lambda step: step(*args)


def after(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def run(step: Any) -> None:
        change(step)
        step(x())

    return run


# what comes after a call with x(), what the line names, and what it says to write
CAUSES: dict[str, tuple[Callable[[Any], Any], str, str]] = {
    "batch": (then(x(5, 8)), "argument x is a tensor (5, 8)", 'config.dynamic("x", 0)'),
    "special size": (then(x(1, 8)), "argument x is a tensor (1, 8)", 'mg.buckets("x", dim=0, sizes=[...])'),
    "dtype": (then(x().requires_grad_()), "argument x", "x.detach()"),
    "strides": (then(x(8, 4).t()), "argument x has the strides", "pass x.contiguous()"),
    "text": (then(x(), "a"), "2 positional arguments", "nothing to do, if there are few"),
    "attribute": (after(lambda s: setattr(s, "beta", 3.0)), "graph.beta changed from 1.0 to 3.0", "one build serves all further values of graph.beta"),
    "needed number": (after(lambda s: setattr(s, "rows", 2)), "graph.rows changed from 1 to 2", "needs the number itself, as a size, an index"),
    "text of an attribute": (after(lambda s: setattr(s, "mode", "abc")), "graph.mode changed", "each value of graph.mode has a build"),
    "lr": (after(lambda s: group(s).update(lr=torch.tensor(0.1))), "lr changed", 'optimizer.param_groups[0]["lr"]'),
    "weight decay": (after(lambda s: group(s).update(weight_decay=0.0)), "weight_decay != 0", "each side has a build"),
    "maximize": (after(lambda s: group(s).update(maximize=True)), "maximize changed", 'optimizer.param_groups[0]["maximize"]'),
    "autocast": (under_autocast, "autocast on cpu changed", "in build()"),
    "configuration": (after(lambda s: s.config.enable_amp()), "amp=torch.bfloat16", "graph.config before the first call"),
    "module": (after(lambda s: setattr(s, "more", nn.ReLU())), "added or replaced: graph.more", "in __init__"),
    "frozen": (after(lambda s: s.model[0].weight.requires_grad_(False)), "requires_grad of model.0.weight", "each choice of what trains has a build"),
    "hook": (after(lambda s: s.model.register_forward_hook(lambda *_: None)), "hook", "register hooks once, before the first call"),
    "strides of state": (replaced_state, "strides of model.0.weight", "before the first call"),
}  # fmt: skip


def lines(caplog: pytest.LogCaptureFixture, level: int = logging.WARNING) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == level]


@pytest.mark.every_case
@pytest.mark.filterwarnings("ignore::UserWarning")  # about mistakes, which are not the point here
@pytest.mark.parametrize(("second", "named", "written"), CAUSES.values(), ids=CAUSES)
def test_the_second_build_is_one_line(
    second: Callable[[Any], Any], named: str, written: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "monograph")
    step = Step()
    step(x())
    assert not lines(caplog)
    second(step)
    (line,) = lines(caplog, logging.INFO if "config.dynamic" in written else logging.WARNING)
    assert line.startswith(f"{step.name}: build 1: ")
    assert named in line
    assert written in line
    assert step.builds[1].reason.advice in " ".join(step.explain().split())


@pytest.fixture
def settings_as_they_were() -> Iterator[None]:
    threads, mode = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(mode)


@pytest.mark.usefixtures("settings_as_they_were")
def test_what_is_set_for_the_process_is_to_be_set_once(caplog: pytest.LogCaptureFixture) -> None:
    graph = mg.trace(lambda x: x[: torch.get_num_threads()] * 2)
    graph(x())
    torch.set_num_threads(torch.get_num_threads() + 1)
    graph(x())
    torch.use_deterministic_algorithms(True)
    graph(x())
    answer, mode = lines(caplog)
    assert "each answer of torch.get_num_threads() has a build, and all stay" in answer
    assert "for one build, set what deterministic mode is before the first call" in mode


@pytest.fixture
def globals_as_they_were() -> Iterator[None]:
    kept = SCALE, NAME, dict(TABLE), BOX.text
    yield
    globals().update(SCALE=kept[0], NAME=kept[1])
    TABLE.update(kept[2])
    BOX.text = kept[3]


class Kinds(mg.Graph):
    def __init__(self) -> None:
        super().__init__()
        self.item: Any = None

    def build(self, x: torch.Tensor, given: Any = None) -> torch.Tensor:
        for item in (self.item, given):
            if isinstance(item, (float, torch.Tensor)):
                x = x + item
            elif isinstance(item, torch.dtype):
                x = x.to(item)
            elif item is not None and not isinstance(item, (bool, str)):
                x = item(x)
            elif item:
                x = x * 2
        return x


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("first", "second", "named", "written"),
    [
        (True, False, "True", "for one build pass a tensor, by which torch.where(it, a, b) chooses"),
        ("a", "b", "'b'", "few texts need nothing"),
        (None, 1.5, "None", "give it a value from the first step on"),
        (torch.float32, torch.float64, "torch.float64", "has a build, and all stay"),
        (1.5, torch.ones(1), "a tensor", "let it be of one kind, such as a tensor or a float"),
        (
            torch.abs,
            torch.sin,
            "from the function abs to the function sin",
            "a lambda or a partial that is made anew",
        ),
        (torch.ones(4, 1), torch.ones(1, 1), "shape of graph.item", "graph.item.copy_(new)"),
    ],
)
def test_the_advice_is_for_the_kind_of_value(first: Any, second: Any, named: str, written: str) -> None:
    graph = Kinds()
    for graph.item in (first, second):
        graph(x())
    reason = graph.builds[-1].reason
    assert named in reason
    assert written in reason.advice
    if not (callable(first) or torch.is_tensor(first)):
        graph = Kinds()
        for given in (first, second):
            graph(x(), given)
        assert written in graph.builds[-1].reason.advice


@pytest.mark.usefixtures("globals_as_they_were")
@pytest.mark.parametrize(
    ("change", "place", "written"),
    [
        (lambda: globals().update(SCALE=3.0), ".SCALE", "one build serves all further values"),
        (lambda: globals().update(NAME="bb"), ".NAME", "has a build"),
        (lambda: TABLE.update(k=7), ".TABLE['k']", "one build serves all further values"),
        (lambda: setattr(BOX, "text", "qqq"), ".BOX.text", "has a build"),
    ],
)
def test_what_changes_outside_is_named(
    change: Callable[[], Any], place: str, written: str, caplog: pytest.LogCaptureFixture
) -> None:
    step = Step()
    step(x())
    change()
    step(x())
    (line,) = lines(caplog)
    assert f"{place} " in line
    assert written in line


@pytest.mark.parametrize(
    ("first", "second", "named", "written"),
    [
        ((x(), 1), (x(), 2), "argument step is 2", "one build serves all further values of step"),
        ((x(), "a"), (x(), "b"), "argument step is 'b'", "each value of step has a build"),
        ((x(), 0, x()), (x(), 0, x() * 0), "the value of a tensor that is read", "torch.where"),
        ((x(), 0, None, x()), (x(), 0), "positional arguments", "each choice of arguments"),
    ],
)
def test_what_differs_among_arguments_is_named(
    first: Any, second: Any, named: str, written: str, caplog: pytest.LogCaptureFixture
) -> None:
    step = Step()
    step(*first)
    step(*second)
    (line,) = lines(caplog)
    assert named in line
    assert written in line


def test_all_sizes_that_vary_are_named(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "monograph")
    graph = mg.trace(lambda batch, target: (batch["ids"] * target).sum())
    for rows in (4, 6):
        graph({"ids": x(rows, 3)}, x(rows, 3))
    assert not lines(caplog)  # it is the last one: nobody has to do anything
    (line,) = lines(caplog, logging.INFO)
    assert """config.dynamic('batch["ids"]', 0), config.dynamic("target", 0)""" in line


def test_the_line_that_needs_one_size_is_named(caplog: pytest.LogCaptureFixture) -> None:
    class Fixed(mg.Graph):
        def build(self, x: torch.Tensor) -> torch.Tensor:
            return x * len(f"{x.shape[0]:04d}")  # at: one size

    graph = Fixed()
    for rows in (4, 6):
        graph(x(rows, 8))
    (line,) = lines(caplog)
    assert f"test_advice.py:{line_of('one size', __file__)}" in line
    assert 'mg.buckets("x", dim=0, sizes=[...])' in line


@pytest.mark.parametrize(
    "use",
    [lambda step: f"epoch {step.epoch}", lambda step: str(step.epoch)],
)
def test_a_text_of_a_number_is_named(use: Callable[[Any], str], caplog: pytest.LogCaptureFixture) -> None:
    class Told(mg.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.epoch = 0

        def build(self, item: torch.Tensor) -> tuple[torch.Tensor, str]:
            return item + 1, use(self)

    graph = Told()
    for graph.epoch in range(4):
        graph(x())
    assert "makes a text of it: make the text after the call, or leave it out" in caplog.text


def test_a_size_that_is_printed_is_named(caplog: pytest.LogCaptureFixture) -> None:
    def printing(item: torch.Tensor) -> torch.Tensor:
        print(item.shape)
        return item + 1

    graph = mg.trace(printing)
    for rows in (4, 6):
        graph(x(rows, 8))
    assert "makes a text of it" in lines(caplog)[-1]
    graph = mg.trace(printing)
    graph.config.dynamic("item", 0)
    with pytest.raises(mg.CaptureError, match="the step fixes size 0") as caught:
        graph(x(4, 8))
    assert caught.value.hint == "make a text of the size after the call, or leave it out"


def _of_one_size(item: torch.Tensor) -> torch.Tensor:
    return item * len(f"{item.shape[0]:04d}")  # at: for each size


def _refused_by_names(item: torch.Tensor) -> torch.Tensor:
    if isinstance(item.shape[0], torch.SymInt):
        raise RuntimeError("no symbols")  # at: refused
    return item + 1


@pytest.mark.parametrize(
    ("function", "at"), [(_of_one_size, "for each size"), (_refused_by_names, "refused")]
)
def test_each_later_build_says_what_needs_one_size(
    function: Callable[[torch.Tensor], torch.Tensor], at: str
) -> None:
    graph = mg.trace(function)
    for rows in (4, 6, 8, 9):
        graph(x(rows, 8))
    assert len(graph.builds) == 4
    for build in graph.builds[1:]:
        assert f"test_advice.py:{line_of(at, __file__)} needs one size" in build.reason.advice
    graph(x(1, 8))
    assert "sizes of 0 and 1 are special" in graph.builds[-1].reason.advice


def test_what_an_argument_is_may_keep_its_sizes() -> None:
    graph = mg.trace(lambda item: item * 2)
    for rows in (4, 6):
        graph(x(rows, 8).requires_grad_())
    assert "each size has a build, since it requires grad; " in graph.builds[-1].reason.advice


def test_where_sizes_stay_numbers_the_line_says_why(caplog: pytest.LogCaptureFixture) -> None:
    step = Step()
    step.config.set_gradient_accumulation_steps(2)
    for rows in (4, 2):
        step(x(rows, 8))
    (line,) = lines(caplog)
    assert "each size has a build, since micro-batches of 0 and 1 rows are special" in line
    assert "drop_last=True" in line
    assert 'mg.buckets("x", dim=0, sizes=[...])' in line


def test_what_nobody_can_change_is_not_said_aloud(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(3, 2)
    step = mg.train_graph(model, nn.MSELoss(), torch.optim.RAdam(model.parameters()))
    for _ in range(8):
        step(torch.ones(4, 3), torch.zeros(4, 2))
    assert len(step.builds) == 2  # RAdam goes another way after five steps
    assert not lines(caplog)


def test_each_cause_is_said_aloud_once(caplog: pytest.LogCaptureFixture) -> None:
    step = Step()
    for step.mode in ("a", "bb", "ccc", "dddd"):
        step(x())
    step.model.eval()
    step(x())
    with_modes = [record for record in caplog.records if "graph.mode" in record.getMessage()]
    assert [record.levelno for record in with_modes] == [logging.WARNING]  # the others are below the level
    assert len(lines(caplog)) == 2
    assert "training changed from True to False" in lines(caplog)[1]
    assert len(step.builds) == 5


def test_what_to_write_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    step = Step()
    for mode in "abcdefghijkl":
        step.mode = mode
        step(x())
    first, *others = lines(caplog)  # the second build, the fourth of its kind, and the eighth
    assert (
        "build 1: graph.mode changed from 'a' to 'b'\n  hint: each value of graph.mode has a build" in first
    )
    assert first.endswith('; see docs/rebuilds.md, "Why does it rebuild?"')
    assert len(others) == 2
    assert all(line.endswith("; what to write is in the line of build 1") for line in others)


def test_each_cause_has_a_line() -> None:
    call = internals_of(Step()).read((x(),), {})
    for cause in set(Cause) - {Cause.FIRST, Cause.OTHER, Cause.COUNTED, Cause.OFTEN}:
        assert advice(Reason("a reason", cause, "place", sizes=(("place", (0,)),)), call), cause


def test_too_many_builds_come_with_the_line() -> None:
    step = Step()
    step.config.max_builds(1)
    step(x())
    with pytest.raises(mg.CaptureError) as caught:
        step(x(5, 8))
    assert 'config.dynamic("x", 0)' in caught.value.hint
    step.config.max_builds(None)
    with mg.assert_max_builds(0), pytest.raises(mg.CaptureError, match="more than 0"):
        step(x(5, 8))
    for rows in (5, 6, 7):
        step(x(rows, 8))
    assert len(step.builds) == 2  # the errors have not made sizes numbers


def test_a_process_without_logging_shows_the_line_and_the_hint_below() -> None:
    code = """
import torch, monograph as mg
graph = mg.trace(lambda x: x * 2)
for rows in (3, 4, 5, 6):
    graph(torch.ones(rows))  # one build for any size: no line
still = mg.trace(lambda x: x * len(f"{x.shape[0]:04d}"))
for rows in (3, 4, 5, 6):
    still(torch.ones(rows))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    line, hint = done.stderr.splitlines()
    assert "build 1: argument x is a tensor (4,)" in line
    assert hint.startswith("  hint: each size has a build, since code of the step needs one size")
    assert hint.endswith('; see docs/rebuilds.md, "Why does it rebuild?"')


class Accumulating(mg.Graph):
    """A batch is a call; the last one of a step updates."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Linear(8, 8)
        self.optimizer = self.add_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1), manual=True)
        self.config.backend("aten")
        self.config.keep_gradients()

    def build(self, x: torch.Tensor, update: bool) -> torch.Tensor:
        loss = self.model(x).square().mean()
        loss.backward()
        if update:
            self.optimizer.step()
            self.model.zero_grad()
        return loss


def test_gradients_that_are_there_or_not_need_no_line(caplog: pytest.LogCaptureFixture) -> None:
    """And a smaller last batch, which makes a step alone, is no reason for buckets: its sizes vary as those of others."""
    step = Accumulating()
    with caplog.at_level(logging.INFO, "monograph"):
        for rows, update in ((4, False), (4, False), (4, True), (2, True), (3, True), (5, True)):
            step(x(rows, 8), update)
    said = [item for item in caplog.records if ": build " in item.message]
    about_gradients = [item for item in said if "the set of gradients that are there changed" in item.message]
    assert [item.levelname for item in about_gradients] == ["INFO"]
    assert not any("choice of arguments" in item.message or "each size" in item.message for item in said)
    assert len(step.builds) == 5, [item.reason for item in step.builds]


def test_what_a_tool_means_to_vary_is_said_to_nobody(caplog: pytest.LogCaptureFixture) -> None:
    step = Accumulating()
    internals_of(step).advised.expected.add("update")
    with caplog.at_level(logging.INFO, "monograph"):
        step(x(), False)
        step.model.zero_grad()
        step(x(), True)
    (said,) = [item for item in caplog.records if ": build 1: " in item.message]
    assert said.levelname == "INFO"
    assert "torch.where" not in said.message
    assert step.builds[1].reason.advice == ""


def test_an_attribute_that_the_first_step_makes(caplog: pytest.LogCaptureFixture) -> None:
    class Sums(mg.Graph):
        total = 0.0

        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Linear(4, 4)
            self.add_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))

        def build(self, x: torch.Tensor) -> torch.Tensor:
            loss = self.model(x).square().mean()
            loss.backward()
            self.total += loss.item()
            return loss

    graph = Sums()
    for _ in range(3):
        graph(torch.ones(2, 4))
    assert len(graph.builds) == 2
    (line,) = lines(caplog)
    assert "graph.total was not there before: give it a value before the first call, as in __init__()" in line
