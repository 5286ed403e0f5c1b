"""Whichever kernel is chosen: numbers stay those of PyTorch."""

from __future__ import annotations

import operator

import pytest
import torch

from monograph.ir.meta import compute_nodes, origin, value
from monograph.ir.verify import verify
from monograph.kernels.attention import ATTENTION
from monograph.kernels.candidates import PRODUCTS
from monograph.kernels.channels_last import channels_last
from monograph.kernels.convolutions import CONVOLUTIONS
from monograph.kernels.select import select
from monograph.numerics.judge import against_float64
from tests.kernels.programs import (
    COMPILED,
    aten,
    favour,
    forced,
    images,
    needs_onednn,
    program_of,
    run,
    steps,
    targets,
)
from tests.support.goldens import check_golden

BACKWARD_1X1 = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)


# --- numbers ------------------------------------------------------------------------------------------------


def check(function, *tensors, winner, table, monkeypatch, taken=True):
    """The program with this candidate is as near to float64 as PyTorch's own kernel, and its results lie alike."""
    program = program_of(function, *tensors)
    favour(monkeypatch, winner)
    chosen, choices = select(program, COMPILED, forced(table, winner))
    verify(chosen, after="kernels")
    assert (chosen is not program) == taken
    assert any(choice.winner == winner for choice in choices) == taken
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


def matrix(rows, columns, *, transposed, dtype=torch.float32):
    made = torch.randn(columns, rows).t() if transposed else torch.randn(rows, columns)
    return made.to(dtype)


@pytest.mark.every_case
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


@pytest.mark.every_case
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


@pytest.mark.every_case
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


# --- attention ----------------------------------------------------------------------------------------------


def heads(dtype, *, transposed):
    """Queries, keys and values of 2 sentences, 3 heads, 20 tokens; as a linear layer gives them, or each as a whole."""
    if transposed:
        return torch.randn(2, 20, 3, 3, 16).to(dtype).transpose(1, 3).unbind(2)
    return torch.randn(3, 2, 3, 20, 16).to(dtype).unbind(0)


@pytest.mark.every_case
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


def test_attention_in_float32_is_not_converted():
    op = aten._scaled_dot_product_flash_attention_for_cpu.default
    query = torch.randn(1, 1, 4, 8)
    program = program_of(lambda emit, x: emit(operator.getitem, emit(op, x, x, x), 0), query)
    assert select(program, COMPILED, ATTENTION) == (program, ())


# --- convolutions -------------------------------------------------------------------------------------------


@pytest.mark.every_case
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
