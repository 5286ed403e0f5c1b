"""A copy of a program is a program of its own, whichever way torch lets its nodes be copied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from torch import fx

from monograph.compat.traces import nodes
from monograph.ir.meta import origin, output_nodes, set_origin, value
from monograph.ir.program import Program
from monograph.user_code.lines import Origin
from tests.support.programs import example_inputs, interpret, programs

aten = torch.ops.aten


@pytest.fixture(params=["our own", "of torch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How nodes are copied: by our own code, or by `Graph.node_copy`, where torch's graph is another one."""
    if request.param == "of torch":

        def refused(*_: Any) -> Any:
            raise AttributeError("_graph_namespace")

        monkeypatch.setattr(nodes, "_copier", refused)
    return str(request.param)


def drawn(check: Callable[[Program], None]) -> None:
    """Check random programs; by hand, since a fixture is there for one of them."""
    given(programs())(check)()


def described(graph: fx.Graph) -> list[tuple[Any, ...]]:
    """All that a graph says."""
    return [
        (node.name, node.op, node.target, str(node.args), str(node.kwargs), value(node), origin(node))
        for node in graph.nodes
    ]


def by_torch(graph: fx.Graph) -> fx.Graph:
    """A copy as torch makes it."""
    made, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.nodes:
        copies[node] = made.node_copy(node, copies.__getitem__)
    return made


def test_a_copy_says_what_the_program_says(way: str) -> None:
    def check(program: Program) -> None:
        copy = program.rebuilt()
        copy.graph.lint()
        assert described(copy.graph) == described(program.graph)
        assert len(copy.graph.nodes) == len(program.graph.nodes)
        assert not set(copy.graph.nodes) & set(program.graph.nodes)
        expected = by_torch(program.graph)
        for node, other in zip(copy.graph.nodes, expected.nodes, strict=True):
            assert [item.name for item in node.users] == [item.name for item in other.users]
            assert [item.name for item in node.all_input_nodes] == [
                item.name for item in other.all_input_nodes
            ]
        for op, target in {(node.op, node.target) for node in copy.graph.nodes if node.op != "output"}:
            wanted = target if op == "call_function" else None
            found = copy.graph.find_nodes(op=op, target=wanted)
            assert [item.name for item in found] == [
                item.name for item in expected.find_nodes(op=op, target=wanted)
            ]

    drawn(check)


def test_what_is_done_to_a_copy_is_not_done_to_the_program(way: str) -> None:
    def check(program: Program) -> None:
        before, results = described(program.graph), interpret(program, example_inputs(program))
        copy = program.rebuilt()
        output = copy.graph.output_node()
        first = next(item for item in output_nodes(copy.graph) if isinstance(item, fx.Node))
        with copy.graph.inserting_before(output):
            for _ in range(3):
                added = copy.graph.create_node("call_function", aten.neg.default, (first,), name=first.name)
                set_origin(added, Origin("model.py", 3, "fc", "forward"))
        output.replace_input_with(first, added)
        for node in copy.graph.nodes:
            node.meta["mark"] = True
        copy.graph.lint()
        names = [node.name for node in copy.graph.nodes]
        assert len(set(names)) == len(names)
        assert described(program.graph) == before
        assert not any("mark" in node.meta for node in program.graph.nodes)
        again = interpret(program, example_inputs(program))
        assert all(
            torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
            for a, b in zip(results, again, strict=True)
        )

    drawn(check)


def test_what_is_left_out_is_read_no_more(way: str) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    one, two = (graph.create_node("call_function", aten.neg.default, (x,), name=name) for name in "ab")
    last = graph.create_node("call_function", aten.add.Tensor, (two, one), {"alpha": x}, name="c")
    output = graph.output([last, two])
    program = Program("step", fx.GraphModule(torch.nn.Module(), graph), (), ())
    copy = program.rebuilt(instead={two: one, x: 3}).graph
    copy.lint()
    assert [node.name for node in copy.nodes] == ["a", "c", "output"]
    a, c, returned = copy.nodes
    assert a.args == (3,)
    assert (c.args, c.kwargs) == ((a, a), {"alpha": 3})
    assert returned.args == ([c, a],)
    reordered = program.rebuilt([x, two, one, last, output]).graph
    assert [node.name for node in reordered.nodes] == ["x", "b", "a", "c", "output"]
    with pytest.raises(KeyError):
        program.rebuilt([two, x, one, last, output])
