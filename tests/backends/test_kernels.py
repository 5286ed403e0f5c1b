"""Kernels are chosen by measurement, the choice is remembered, and numbers stay those of PyTorch."""

from __future__ import annotations

import json
import operator
import os
import subprocess
import sys
import time

import pytest
import torch
from torch import fx, nn

import monograph as mg
from monograph.compat.inductor.disk_cache import cache_directory
from monograph.config import GraphConfig
from monograph.errors import Origin
from monograph.ir.meta import compute_nodes, origin, set_origin, set_value, tensor_meta, value
from monograph.ir.port import Port, Role
from monograph.ir.program import Program
from monograph.ir.verify import verify
from monograph.kernels import tuned as choices_module
from monograph.kernels.attention import ATTENTION
from monograph.kernels.candidates import PRODUCTS, Candidate, fitting, forms_of
from monograph.kernels.channels_last import channels_last
from monograph.kernels.compile import KernelCompiler
from monograph.kernels.convolutions import CONVOLUTIONS
from monograph.kernels.select import select
from monograph.kernels.trials import timed
from monograph.kernels.tuned import remembered, verdict_on
from monograph.numerics.judge import against_float64
from monograph.settings import Settings
from tests.goldens import check_golden
from tests.support import new_cache

aten = torch.ops.aten
COMPILED = Settings(backend="inductor")
BACKWARD_1X1 = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)

needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")


@pytest.fixture(autouse=True)
def own_memory(tmp_path, monkeypatch):
    """Each test begins knowing nothing."""
    monkeypatch.setenv("MONOGRAPH_CACHE_DIR", new_cache(tmp_path))
    monkeypatch.setattr(choices_module, "_IN_PROCESS", {})


def program_of(function, *tensors: torch.Tensor) -> Program:
    """A program of the calls that `function(op, *tensors)` makes by `op(target, *args)`."""
    graph = fx.Graph()
    real: dict[fx.Node, object] = {}

    def note(node, result):
        real[node] = result
        described = (
            tuple(tensor_meta(item) if item is not None else None for item in result)
            if isinstance(result, tuple)
            else tensor_meta(result)
        )
        set_value(node, described)
        return node

    def op(target, *args, **kwargs):
        node = graph.create_node(
            "call_function", target, args, kwargs, name=target.__name__.partition(".")[0]
        )
        set_origin(node, Origin("model.py", 7, "fc", "forward"))
        arguments, options = fx.map_arg((args, kwargs), real.__getitem__)
        return note(node, target(*arguments, **options))

    inputs = [note(graph.placeholder(f"x{i}"), tensor) for i, tensor in enumerate(tensors)]
    results = function(op, *inputs)
    results = results if isinstance(results, tuple) else (results,)
    graph.output(results)
    ports = tuple(Port(node.name, Role.USER, node.name) for node in inputs)
    outputs = tuple(Port(f"out{i}", Role.USER, f"result.{i}") for i in range(len(results)))
    program = Program("step", fx.GraphModule(torch.nn.Module(), graph), ports, outputs)
    verify(program, after="the test")
    return program


def run(program: Program, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    with torch.no_grad():
        return fx.Interpreter(program.module).run(*tensors)


def forced(table, name):
    """The table with one challenger only."""
    return {op: tuple(item for item in items if item.name == name) for op, items in table.items()}


def favour(monkeypatch, name):
    """Trials in which the form of this name is the fastest."""
    monkeypatch.setattr(
        "monograph.kernels.select.seconds_of",
        lambda forms, *_: {form.name: 1.0 if form.name == name else 2.0 for form in forms},
    )


def targets(program: Program) -> list[str]:
    return [node.target.__name__ for node in compute_nodes(program.graph)]


def busy(seconds):
    def write(emit, a, b):
        return emit(torch.ops.kernel_test.slow_mm.default if seconds else aten.mm.default, a, b)

    return write


@torch.library.custom_op("kernel_test::slow_mm", mutates_args=())
def slow_mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    end = time.thread_time() + 0.002
    while time.thread_time() < end:
        pass
    return a @ b


@slow_mm.register_fake
def _(a, b):
    return a.new_empty(a.shape[0], b.shape[1])


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


# --- memory -----------------------------------------------------------------------------------------------------------


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


def test_a_second_process_takes_the_choice_from_disk():
    remembered(("mm",), ("aten", "other"), lambda: {"aten": 2.0, "other": 1.0})
    second = _SECOND.replace("THREADS", str(torch.get_num_threads()))
    done = subprocess.run(
        [sys.executable, "-c", second], env=dict(os.environ), capture_output=True, text=True
    )
    assert (done.stdout.strip(), done.returncode) == ("other", 0), done.stderr


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


# --- numbers ----------------------------------------------------------------------------------------------------------


def check(function, *tensors, winner, table, monkeypatch, taken=True):
    """The program with this candidate is as near to float64 as PyTorch's own kernel, and its results lie alike."""
    program = program_of(function, *tensors)
    favour(monkeypatch, winner)
    chosen, tuned_kernels = select(program, COMPILED, forced(table, winner))
    verify(chosen, after="kernels")
    assert (chosen is not program) == taken
    assert any(choice.winner == winner for choice in tuned_kernels) == taken
    exact = run(program, *(item.double() for item in tensors))
    eager, graph = run(program, *tensors), run(chosen, *tensors)
    named = [
        {str(i): item for i, item in enumerate(items) if item is not None} for items in (exact, eager, graph)
    ]
    assert list(map(steps, named[1].values())) == list(map(steps, named[2].values()))
    if sum(item.numel() for item in named[0].values()) < 1000:  # too few for a mean error
        torch.testing.assert_close(named[2], named[1])
    else:
        assert against_float64(*named).ok
    for node, result in zip(chosen.graph.output_node().all_input_nodes, named[2].values(), strict=True):
        assert value(node).shape == result.shape
    return chosen


def steps(tensor):
    """Its strides, but for dimensions of one element, where they mean nothing."""
    return [step for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size != 1]


def matrix(rows, columns, *, transposed, dtype=torch.float32):
    made = torch.randn(columns, rows).t() if transposed else torch.randn(rows, columns)
    return made.to(dtype)


@needs_onednn
@pytest.mark.parametrize("winner", ["onednn", "onednn_transposed"])
@pytest.mark.parametrize("right", [False, True])
@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("sizes", [(33, 17, 65), (1, 9, 5), (7, 1, 3), (5, 6, 1), (1, 1, 1)])
def test_products(sizes, left, right, winner, monkeypatch):
    rows, inner, columns = sizes
    a, b = matrix(rows, inner, transposed=left), matrix(inner, columns, transposed=right)
    taken = winner == "onednn" or a.stride()[-1] != 1
    check(
        lambda emit, x, y: emit(aten.mm.default, x, y),
        a, b, winner=winner, table=PRODUCTS, monkeypatch=monkeypatch, taken=taken,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_of_16_bits_are_tried_where_the_processor_has_them(dtype, monkeypatch):
    a, b = (matrix(32, 32, transposed=False, dtype=dtype) for _ in range(2))
    check(
        lambda emit, x, y: emit(aten.mm.default, x, y),
        a, b, winner="onednn", table=PRODUCTS, monkeypatch=monkeypatch, taken=has_product(dtype),
    )  # fmt: skip


def has_product(dtype):
    weight = torch.ones(2, 2, dtype=dtype)
    try:
        torch.ops.mkldnn._linear_pointwise(weight, weight, None, "none", [], "")
    except RuntimeError:
        return False
    return True


@needs_onednn
@pytest.mark.parametrize(
    ("bias", "winner"),
    [
        (torch.randn(12), "onednn"),
        (torch.randn(24)[::2], "onednn_add"),
        (torch.randn(1), "onednn_add"),
        (torch.randn(8, 12), "onednn_add"),
        (torch.randn(12, 8).t(), "onednn_add"),
        (torch.randn(8, 1), "onednn_add"),
    ],
)
def test_sums_with_products(bias, winner, monkeypatch):
    a, b = torch.randn(8, 5), torch.randn(12, 5).t()
    check(
        lambda emit, c, x, y: emit(aten.addmm.default, c, x, y),
        bias, a, b, winner=winner, table=PRODUCTS, monkeypatch=monkeypatch,
    )  # fmt: skip


@needs_onednn
def test_a_bias_with_gaps_is_not_given_to_onednn(monkeypatch):
    check(
        lambda emit, c, x, y: emit(aten.addmm.default, c, x, y),
        torch.randn(24)[::2], torch.randn(8, 5), torch.randn(5, 12),
        winner="onednn", table=PRODUCTS, monkeypatch=monkeypatch, taken=False,
    )  # fmt: skip


@needs_onednn
def test_batches_of_products(monkeypatch):
    a, b = torch.randn(3, 8, 5), torch.randn(3, 12, 5).mT
    check(
        lambda emit, x, y: emit(aten.bmm.default, x, y),
        a,
        b,
        winner="onednn",
        table=PRODUCTS,
        monkeypatch=monkeypatch,
    )
    check(
        lambda emit, c, x, y: emit(aten.baddbmm.default, c, x, y),
        torch.randn(3, 8, 12), a, b, winner="onednn_add", table=PRODUCTS, monkeypatch=monkeypatch,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (torch.randn(4, 4, dtype=torch.float64), torch.randn(4, 4, dtype=torch.float64)),
        (torch.ones(4, 4, dtype=torch.int64), torch.ones(4, 4, dtype=torch.int64)),
        (torch.randn(4, 4, dtype=torch.complex64), torch.randn(4, 4, dtype=torch.complex64)),
        (torch.randn(0, 4), torch.randn(4, 4)),
        (torch.randn(4, 0), torch.randn(0, 4)),
    ],
    ids=["float64", "int64", "complex64", "no rows", "nothing to add up"],
)
def test_what_onednn_does_not_take_is_left_alone(a, b):
    program = program_of(lambda emit, x, y: emit(aten.mm.default, x, y), a, b)
    assert select(program, COMPILED) == (program, ())


def test_products_with_factors_are_left_alone():
    a = torch.randn(4, 4)
    program = program_of(lambda emit, x: emit(aten.addmm.default, x, x, x, beta=2.0), a)
    assert select(program, COMPILED) == (program, ())


# --- attention --------------------------------------------------------------------------------------------------------


def heads(dtype, *, transposed):
    """Queries, keys and values of 2 sentences, 3 heads, 20 tokens; as a linear layer gives them, or each as a whole."""
    if transposed:
        return torch.randn(2, 20, 3, 3, 16).to(dtype).transpose(1, 3).unbind(2)
    return torch.randn(3, 2, 3, 20, 16).to(dtype).unbind(0)


@pytest.mark.parametrize("options", [{}, {"scale": 0.3}])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_attention_in_half_types(dtype, transposed, masked, options, monkeypatch):
    tensors = [*heads(dtype, transposed=transposed), torch.randn(2, 20, 3, 16).to(dtype).transpose(1, 2)]
    tensors += [torch.randn(2, 1, 20, 20).to(dtype)] if masked else []

    def both(emit, query, key, value, grad, *mask):
        given = options | ({"attn_mask": mask[0]} if mask else {})
        numbers = 0.0, not mask
        op = aten._scaled_dot_product_flash_attention_for_cpu
        made = emit(op.default, query, key, value, *numbers, **given)
        result, sums = (emit(operator.getitem, made, i) for i in range(2))
        op = aten._scaled_dot_product_flash_attention_for_cpu_backward
        made = emit(op.default, grad, query, key, value, result, sums, *numbers, **given)
        return result, sums, *(emit(operator.getitem, made, i) for i in range(3))

    chosen = check(both, *tensors, winner="float32", table=ATTENTION, monkeypatch=monkeypatch)
    attention = [node for node in compute_nodes(chosen.graph) if "attention" in node.name]
    assert {value(node)[0].dtype for node in attention} == {torch.float32}


def test_attention_in_float32_is_left_alone():
    op = aten._scaled_dot_product_flash_attention_for_cpu.default
    query = torch.randn(1, 1, 4, 8)
    program = program_of(lambda emit, x: emit(operator.getitem, emit(op, x, x, x), 0), query)
    assert select(program, COMPILED) == (program, ())


# --- convolutions -----------------------------------------------------------------------------------------------------


def images(*shape):
    return torch.randn(*shape).contiguous(memory_format=torch.channels_last)


@needs_onednn
@pytest.mark.parametrize("size", [(1, 1), (3, 5)])
@pytest.mark.parametrize("bias", [False, True])
def test_convolutions_with_1x1_filters(bias, size, monkeypatch):
    x, weight, grad = images(2, 6, *size), torch.randn(4, 6, 1, 1), images(2, 4, *size)

    def both(emit, x, weight, grad, *bias):
        y = emit(aten.convolution.default, x, weight, bias[0] if bias else None, *BACKWARD_1X1)
        mask = [True, True, bool(bias)]
        made = emit(aten.convolution_backward.default, grad, x, weight, [4], *BACKWARD_1X1, mask)
        return y, *(emit(operator.getitem, made, i) for i in range(2 + len(bias)))

    tensors = [x, weight, grad, *([torch.randn(4)] if bias else [])]
    chosen = check(both, *tensors, winner="mm", table=CONVOLUTIONS, monkeypatch=monkeypatch)
    assert not any("convolution" in name for name in targets(chosen))


def test_convolutions_of_several_channels_in_groups_are_left_alone():
    options = ([1, 1], [1, 1], [1, 1], False, [0, 0], 2)
    x, weight = images(2, 8, 4, 4), torch.randn(8, 4, 3, 3)
    program = program_of(lambda emit, x, w: emit(aten.convolution.default, x, w, None, *options), x, weight)
    chosen, _ = select(program, COMPILED)
    assert targets(chosen).count("convolution.default") == 1


def two_convolutions(emit, x, first, second):
    """Two convolutions with an op between them, then a view that only takes contiguous images."""
    options = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    y = emit(aten.relu.default, emit(aten.convolution.default, x, first, None, *options))
    y = emit(aten.convolution.default, y, second, None, *options)
    return emit(aten.view.default, y, [2, -1]), y


def test_a_region_of_convolutions_keeps_its_layout():
    tensors = torch.randn(2, 3, 4, 4), torch.randn(5, 3, 3, 3), torch.randn(6, 5, 3, 3)
    program = program_of(two_convolutions, *tensors)
    last = channels_last(program)
    verify(last, after="channels_last")
    nodes = {node.name: node for node in last.graph.nodes}
    assert value(nodes["relu"]).stride == (5 * 16, 1, 5 * 4, 5)
    assert targets(last).count("clone.default") == 2  # the images that come in, and what leaves
    for expected, result in zip(run(program, *tensors), run(last, *tensors), strict=True):
        assert result.stride() == expected.stride()
        torch.testing.assert_close(result, expected)
    check_golden("kernels/channels_last.txt", f"{program.text}\n{last.text}")


def test_an_image_that_is_only_a_result_leaves_as_it_lay():
    options = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    tensors = torch.randn(2, 3, 4, 4), torch.randn(5, 3, 3, 3)
    program = program_of(lambda emit, x, w: emit(aten.convolution.default, x, w, None, *options), *tensors)
    last = channels_last(program)
    verify(last, after="channels_last")
    copies = [node for node in last.graph.nodes if node.target is aten.clone.default]
    assert [origin(node).phase for node in copies] == [origin(copies[-1].args[0]).phase] * 2
    (expected,), (result,) = run(program, *tensors), run(last, *tensors)
    assert result.stride() == expected.stride()
    torch.testing.assert_close(result, expected)


def test_without_convolutions_of_images_there_is_no_layout():
    program = program_of(lambda emit, x: emit(aten.mm.default, x, x), torch.randn(4, 4))
    assert channels_last(program) is program


@pytest.mark.parametrize("winner", ["as_is", "channels_last"])
def test_the_layout_is_measured(winner, monkeypatch):
    tensors = torch.randn(2, 3, 4, 4), torch.randn(5, 3, 3, 3), torch.randn(6, 5, 3, 3)
    program = program_of(two_convolutions, *tensors)

    def seconds_of(forms, inputs, _workshop):
        contiguous = inputs[0].stride[1] != 1
        return {forms[0].name: 1.0 if contiguous == (winner == "as_is") else 9.0}

    monkeypatch.setattr("monograph.kernels.select.seconds_of", seconds_of)
    chosen, (layout,) = select(program, COMPILED)
    assert layout.winner == winner
    assert (chosen is program) == (winner == "as_is")


# --- text -------------------------------------------------------------------------------------------------------------


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
    chosen, tuned_kernels = select(program, COMPILED)
    told = "\n".join(map(str, tuned_kernels))
    check_golden("kernels/linear.txt", f"{program.text}\n{chosen.text}\n{told}")
    for node in compute_nodes(chosen.graph):
        assert node.meta["origin"] == Origin("model.py", 7, "fc", "forward")


# --- whole steps ------------------------------------------------------------------------------------------------------


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
    winners = {choice.winner for choice in build.tuned_kernels}
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


@needs_onednn
def test_a_sum_behind_a_product_is_compiled(monkeypatch):
    favour(monkeypatch, "onednn")
    model = Residual()
    graph = mg.train_graph(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1))
    graph.config.backend("inductor")
    graph(torch.randn(16, 32), torch.randn(16, 32))
    assert graph.backend == "inductor"
    assert "_linear_pointwise" in graph.show("kernels")
