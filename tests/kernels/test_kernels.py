"""Kernels are chosen by measurement, and the choice is remembered."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

import monograph as mg
from monograph.compat.inductor.disk_cache import cache_directory
from monograph.config import GraphConfig
from monograph.ir.meta import compute_nodes
from monograph.kernels import tuned as choices_module
from monograph.kernels.candidates import PRODUCTS, Candidate, fitting, forms_of
from monograph.kernels.compile import KernelCompiler
from monograph.kernels.select import select
from monograph.kernels.trials import timed
from monograph.kernels.tuned import remembered, verdict_on
from monograph.numerics.judge import against_float64
from monograph.settings import Settings
from monograph.user_code.lines import Origin
from tests.kernels.programs import (
    COMPILED,
    aten,
    favour,
    forced,
    needs_onednn,
    program_of,
    targets,
)
from tests.support.goldens import check_golden


def busy(seconds):
    def write(emit, a, b):
        return emit(torch.ops.kernel_test.slow_mm.default if seconds else aten.mm.default, a, b)

    return write


def always(*_):
    return True


@pytest.mark.parametrize("default_is_slow", [False, True])
def test_the_faster_of_two_is_taken(default_is_slow):
    a, b = torch.randn(4, 5), torch.randn(5, 6)
    slow, fast = torch.ops.kernel_test.slow_mm.default, aten.mm.default
    op = slow if default_is_slow else fast
    program = program_of(lambda emit, x, y: emit(op, x, y), a, b)
    planted = Candidate("planted", always, busy(0.0 if default_is_slow else 0.002))
    chosen, (choice,) = select(program, COMPILED, {op: (planted,)})
    assert choice.winner == ("planted" if default_is_slow else "aten")
    assert targets(chosen) == ["mm.default"]
    assert choice.seconds.keys() == {"aten", "planted"}


@needs_onednn
def test_views_of_operands_are_not_timed_and_products_are():
    a, b = torch.randn(64, 64), torch.randn(64, 64)
    program = program_of(lambda emit, x, y: emit(aten.mm.default, x, y), a, b)
    (node,) = compute_nodes(program.graph)
    forms = forms_of(node, fitting(node, PRODUCTS[aten.mm.default]))
    assert [
        [item.name for item in timed(form, (a, b), KernelCompiler()).graph.find_nodes(op="placeholder")]
        for form in forms
    ] == [
        ["x0", "x1"],
        ["x0", "x1", "t"],
    ]


def test_a_challenger_must_be_clearly_faster():
    assert verdict_on({"aten": 1.0, "other": 0.97}, "aten").winner == "aten"
    assert verdict_on({"aten": 1.0, "other": 0.90}, "aten").winner == "other"
    assert verdict_on({}, "aten").winner == "aten"


def test_a_kernel_that_gives_other_numbers_is_never_taken():
    a = torch.randn(4, 4)
    program = program_of(lambda emit, x, y: emit(torch.ops.kernel_test.slow_mm.default, x, y), a, a)
    wrong = Candidate("wrong", always, lambda emit, x, y: emit(aten.mm.default, y, emit(aten.neg.default, x)))
    chosen, (choice,) = select(program, COMPILED, {torch.ops.kernel_test.slow_mm.default: (wrong,)})
    assert choice.winner == "aten"
    assert set(choice.seconds) == {"aten"}
    assert targets(chosen) == ["slow_mm.default"]


def test_a_kernel_that_gives_another_layout_is_no_candidate():
    a = torch.randn(4, 3)
    program = program_of(lambda emit, x, y: emit(aten.mm.default, x, y), a, a.t().contiguous())
    turned = Candidate(
        "turned",
        always,
        lambda emit, x, y: emit(
            aten.t.default, emit(aten.mm.default, emit(aten.t.default, y), emit(aten.t.default, x))
        ),
    )
    (node,) = compute_nodes(program.graph)
    assert [form.name for form in forms_of(node, [turned])] == ["aten"]


@pytest.mark.parametrize(("factor", "taken"), [(1 + 1e-6, False), (1 + 1e-9, True)])
def test_a_kernel_that_rounds_too_much_is_never_taken(factor, taken):
    a = torch.randn(64, 64)
    program = program_of(lambda emit, x, y: emit(torch.ops.kernel_test.slow_mm.default, x, y), a, a)
    rough = Candidate(
        "rough", always, lambda emit, x, y: emit(aten.mm.default, emit(aten.mul.Tensor, x, factor), y)
    )
    _, (choice,) = select(program, COMPILED, {torch.ops.kernel_test.slow_mm.default: (rough,)})
    assert (choice.winner == "rough") == taken


@pytest.mark.parametrize("settings", [Settings(), Settings(backend="inductor", kernel_selection=False)])
def test_off_leaves_the_program_unchanged(settings):
    program = program_of(lambda emit, x: emit(aten.mm.default, x, x), torch.randn(64, 64))
    assert select(program, settings) == (program, ())


def test_the_switch_is_shown():
    config = GraphConfig()
    assert "kernel_selection=None" in repr(config)
    config.enable_kernel_selection(False)
    assert "kernel_selection=False" in repr(config)


# --- memory -------------------------------------------------------------------------------------------------


def test_a_choice_is_measured_once_in_a_process_and_once_on_a_machine(monkeypatch):
    calls = []

    def measure():
        calls.append(1)
        return {"aten": 2.0, "other": 1.0}

    first = remembered(("mm",), ("aten", "other"), measure)
    assert remembered(("mm",), ("aten", "other"), measure) is first
    monkeypatch.setattr(choices_module, "_IN_PROCESS", {})
    assert remembered(("mm",), ("aten", "other"), measure) == first
    assert len(calls) == 1
    assert first.winner == "other"
    remembered(("mm", "another shape"), ("aten", "other"), measure)
    assert len(calls) == 2


_SECOND = """
import torch
from monograph.kernels.tuned import remembered
torch.set_num_threads(THREADS)  # as the tests: the number of threads is part of the key
def measure():
    raise AssertionError("measured again")
print(remembered(("mm",), ("aten", "other"), measure).winner)
"""


@pytest.mark.long
def test_a_second_process_takes_the_choice_from_disk():
    remembered(("mm",), ("aten", "other"), lambda: {"aten": 2.0, "other": 1.0})
    second = _SECOND.replace("THREADS", str(torch.get_num_threads()))
    done = subprocess.run(
        [sys.executable, "-c", second], env=dict(os.environ), capture_output=True, text=True
    )
    assert (done.stdout.strip(), done.returncode) == ("other", 0), done.stderr


@pytest.mark.every_case
@pytest.mark.parametrize(
    "damage",
    [
        "",
        "{",
        "[]",
        '{"winner": "gone", "seconds": {}}',
        '{"winner": "aten", "seconds": {"aten": "fast"}}',
        "\x00",
    ],
)
def test_a_damaged_memory_is_measured_again_with_a_warning(damage, monkeypatch, caplog):
    found = remembered(("mm",), ("aten", "other"), lambda: {"aten": 2.0, "other": 1.0})
    (file,) = (cache_directory() / "kernels").iterdir()
    file.write_text(damage)
    monkeypatch.setattr(choices_module, "_IN_PROCESS", {})
    assert remembered(("mm",), ("aten", "other"), lambda: {"aten": 2.0, "other": 1.0}) == found
    (warning,) = caplog.messages
    assert "is damaged" in warning
    assert json.loads(file.read_text())["winner"] == "other"


def test_the_process_that_is_first_decides(monkeypatch):
    def measure():  # another process finishes its trial while this one is at work
        (cache_directory() / "kernels").mkdir(exist_ok=True)
        monkeypatch.setattr(choices_module, "_IN_PROCESS", {})
        remembered(("mm",), ("aten", "other"), lambda: {"aten": 2.0, "other": 1.0})
        return {"aten": 1.0, "other": 2.0}

    assert remembered(("mm",), ("aten", "other"), measure).winner == "other"
    assert len(list((cache_directory() / "kernels").iterdir())) == 1


def test_a_memory_that_cannot_be_written_is_a_warning(monkeypatch, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MONOGRAPH_CACHE_DIR", str(tmp_path / "file"))
    assert remembered(("mm",), ("aten", "other"), lambda: {"aten": 2.0, "other": 1.0}).winner == "other"
    assert "cannot be kept" in caplog.text


def test_threads_and_strides_are_part_of_what_is_remembered():
    a, b = torch.randn(8, 8), torch.randn(8, 8)
    for tensor in (b, b.t()):
        program = program_of(lambda emit, x, y: emit(aten.mm.default, x, y), a, tensor)
        select(program, COMPILED, forced(PRODUCTS, "onednn"))
    known = len(list((cache_directory() / "kernels").iterdir()))
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        select(program, COMPILED, forced(PRODUCTS, "onednn"))
    finally:
        torch.set_num_threads(threads)
    assert (known, len(list((cache_directory() / "kernels").iterdir()))) == (2, 3)


# --- text ---------------------------------------------------------------------------------------------------


def linear_and_back(emit, x, weight, bias, grad):
    transposed = emit(aten.t.default, weight)
    y = emit(aten.addmm.default, bias, x, transposed)
    dx = emit(aten.mm.default, grad, weight)
    dw = emit(aten.mm.default, emit(aten.t.default, grad), x)
    return y, dx, dw


@needs_onednn
def test_before_and_after(monkeypatch):
    favour(monkeypatch, "onednn")
    tensors = torch.randn(16, 32), torch.randn(8, 32), torch.randn(8), torch.randn(16, 8)
    program = program_of(linear_and_back, *tensors)
    chosen, choices = select(program, COMPILED)
    told = "\n".join(map(str, choices))
    check_golden("kernels/linear.txt", f"{program.text}\n{chosen.text}\n{told}")
    for node in compute_nodes(chosen.graph):
        assert node.meta["origin"] == Origin("model.py", 7, "fc", "forward")


def test_images_change_their_layout_if_all_convolutions_together_gain_by_it(monkeypatch):
    """One convolution alone would not: copies take longer than it gains."""

    def seconds_of(forms, operands, _compiler):
        is_last = operands[0].stride[1] == 1
        return {form.name: 4.0 if len(operands) == 1 else 2.0 if is_last else 3.0 for form in forms}

    def layout_of(count):
        x, weights = torch.randn(2, 8, 6, 6), [torch.randn(8, 8, 3, 3) for _ in range(count)]

        def convolved(emit, x, *weights):
            for weight in weights:
                x = emit(aten.convolution.default, x, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
            return x

        _, choices = select(program_of(convolved, x, *weights), COMPILED, {aten.convolution.default: ()})
        return next(choice for choice in choices if choice.op == "layout of images")

    monkeypatch.setattr("monograph.kernels.select.seconds_of", seconds_of)
    one, many = layout_of(1), layout_of(30)
    assert (one.winner, one.seconds["as_is"]) == ("as_is", 3.0)
    assert (many.winner, many.seconds["as_is"]) == ("channels_last", 90.0)


# --- whole steps --------------------------------------------------------------------------------------------


class Images(nn.Module):
    """Convolutions of each kind that has other kernels, and two products."""

    def __init__(self):
        super().__init__()
        self.first, self.channels = (
            nn.Conv2d(3, 8, 3, padding=1),
            nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False),
        )
        self.pixels, self.norm = nn.Conv2d(8, 6, 1), nn.BatchNorm2d(6)
        self.hidden, self.last = nn.Linear(6 * 16, 24), nn.Linear(24, 5)

    def forward(self, x):
        x = self.norm(self.pixels(self.channels(self.first(x)).relu())).relu()
        return self.last(self.hidden(x.flatten(1)).relu())


def trained(dtype, backend=None):
    """The loss of each of three steps, the state afterwards, and the graph."""
    torch.manual_seed(0)
    model = Images().to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    x, y = torch.randn(32, 3, 4, 4).to(dtype), torch.randint(5, (32,))
    graph = mg.train_graph(model, nn.CrossEntropyLoss(), optimizer)
    graph.config.backend(backend or "aten")
    graph.config.enable_kernel_selection(backend is not None)
    losses = [graph(x, y).detach().clone() for _ in range(3)]
    return {f"loss.{i}": item for i, item in enumerate(losses)} | model.state_dict(), graph


@pytest.mark.long
@needs_onednn
@pytest.mark.parametrize("backend", ["aten", "inductor"])
def test_a_whole_step_with_chosen_kernels(backend, monkeypatch):
    last = {"aten": 5.0, "mm": 4.0, "onednn": 2.0}

    def seconds_of(forms, inputs, _workshop):
        slower = 0.0 if inputs[0].stride[1:2] == (1,) else 10.0
        return {form.name: slower + last.get(form.name, 6.0) for form in forms}

    monkeypatch.setattr("monograph.kernels.select.seconds_of", seconds_of)
    exact, eager = trained(torch.float64)[0], trained(torch.float32)[0]
    state, graph = trained(torch.float32, backend)
    assert graph.backend == backend
    assert against_float64(exact, eager, state).ok
    (build,) = graph.builds
    winners = {choice.winner for choice in build.choices}
    assert {"channels_last", "mm", "onednn"} <= winners
    told = graph.explain()
    assert "kernels:" in told
    assert "layout of images, 6 times: channels_last" in told
    for item, other in zip(state.values(), trained(torch.float32, backend)[0].values(), strict=True):
        assert torch.equal(item, other)


class Residual(nn.Module):
    """Sums with a product on either side, of which nothing else is asked."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.last = nn.Linear(32, 48), nn.Linear(48, 32), nn.Linear(32, 32, bias=False)

    def forward(self, x):
        x = x + self.down(nn.functional.gelu(self.up(x)))
        return self.last(x) + x


@pytest.mark.long
@needs_onednn
def test_a_sum_behind_a_product_is_compiled(monkeypatch):
    favour(monkeypatch, "onednn")
    model = Residual()
    graph = mg.train_graph(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1))
    graph.config.backend("inductor")
    graph(torch.randn(16, 32), torch.randn(16, 32))
    assert graph.backend == "inductor"
    assert "_linear_pointwise" in graph.show("kernels")
