"""Sizes that vary in programs: computed from the inputs where a pass has written them, and written where ops compute them."""

from __future__ import annotations

import operator

import torch
from torch import fx, nn

from monograph.ir.meta import ScalarMeta, TensorMeta, set_origin, set_value, value
from monograph.ir.port import Port, Role
from monograph.ir.program import Program
from monograph.ir.size_numbers import at_present_sizes, compute_sizes, numbers_of_sizes, sizes_written
from monograph.sizes.expression import Expression
from monograph.sizes.size import Size
from monograph.user_code.lines import Origin

aten = torch.ops.aten
ROWS, LENGTH = Size(3, Expression.of("rows")), Size(5, Expression.of("length"))
FORWARD = Origin(phase="forward")


def graph_over(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[fx.Graph, fx.Node]:
    """A graph with one input of this form."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    set_value(x, TensorMeta(shape, torch.float32, stride, torch.device("cpu")))
    return graph, x


def call(graph: fx.Graph, target: object, *args: object, like: object) -> fx.Node:
    node = graph.call_function(target, args)  # type: ignore[arg-type]
    set_value(node, like)
    set_origin(node, FORWARD)
    return node


def program_of(graph: fx.Graph) -> Program:
    port = Port("x", Role.USER, "x")
    return Program("step", fx.GraphModule(nn.Module(), graph), (port,), (Port("y", Role.USER, "result.0"),))


def run(graph: fx.Graph, *args: torch.Tensor) -> torch.Tensor:
    (result,) = fx.GraphModule(nn.Module(), graph)(*args)
    return result


def test_sizes_in_arguments_are_computed() -> None:
    graph, x = graph_over((ROWS, LENGTH, 4), (LENGTH * 4, 4, 1))
    wanted = [(LENGTH + 1) // 2, ROWS * LENGTH * 2 - LENGTH // 3 + 7]
    made = call(
        graph,
        aten.new_empty.default,
        x,
        wanted,
        like=TensorMeta(tuple(wanted), torch.float32, (1, 1), x.meta["value"].device),
    )
    graph.output((made,))
    compute_sizes(graph)
    assert all(type(size) is fx.Node for size in made.args[1])
    assert {node.target for node in numbers_of_sizes(graph)} >= {aten.sym_size.int, operator.floordiv}
    for rows, length in ((3, 5), (2, 9)):
        shape = run(graph, torch.zeros(rows, length, 4)).shape
        assert shape == ((length + 1) // 2, rows * length * 2 - length // 3 + 7)


def test_sizes_of_parts_are_computed_from_the_whole() -> None:
    graph, x = graph_over((ROWS * 4, LENGTH), (LENGTH, 1))
    made = call(
        graph,
        aten.slice.Tensor,
        *(x, 0, ROWS, ROWS * 2),
        like=TensorMeta((ROWS, LENGTH), torch.float32, (LENGTH, 1), torch.device("cpu")),
    )
    graph.output((made,))
    fixed = at_present_sizes(program_of(graph)).graph
    assert [node.args[2:] for node in fixed.nodes if node.target is aten.slice.Tensor] == [(3, 6)]
    described = {type(size) for node in fixed.nodes if value(node) for size in value(node).shape}
    assert described == {int}
    compute_sizes(graph)
    for rows in (8, 20):
        given = torch.arange(rows * 5).view(rows, 5)
        assert torch.equal(run(graph, given), given[rows // 4 : rows // 2])


def test_a_graph_without_such_sizes_is_left_alone() -> None:
    graph, x = graph_over((3, 5), (5, 1))
    made = call(
        graph, aten.view.default, x, [15], like=TensorMeta((15,), torch.float32, (1,), torch.device("cpu"))
    )
    graph.output((made,))
    text = str(graph)
    compute_sizes(graph)
    assert str(graph) == text
    program = program_of(graph)
    assert sizes_written(program) is program


def test_sizes_take_the_place_of_the_ops_that_compute_them() -> None:
    graph, x = graph_over((ROWS, LENGTH, 4), (LENGTH * 4, 4, 1))
    number = ScalarMeta("int")
    length = call(graph, aten.sym_size.int, x, 1, like=number)
    stride = call(graph, aten.sym_stride.int, x, 0, like=number)
    count = call(graph, aten.sym_numel.default, x, like=number)
    rest = call(
        graph, operator.sub, call(graph, operator.floordiv, count, length, like=number), 2, like=number
    )
    made = call(
        graph,
        aten.view.default,
        x,
        [stride, rest],
        like=TensorMeta((1, 1), torch.float32, (1, 1), torch.device("cpu")),
    )
    graph.output((made,))
    written = sizes_written(program_of(graph))
    (view,) = [node for node in written.graph.nodes if node.op == "call_function"]
    assert view.args[1] == [LENGTH * 4, ROWS * 4 - 2]
    assert list(map(int, view.args[1])) == [20, 10]
