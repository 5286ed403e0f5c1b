"""Sets of programs of ranks, made by hand: data parallel, in parts, in a grid, and pipelines; and faults put into them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import torch
from torch import fx

from monograph.distributed.planning.check import RankProgram
from monograph.distributed.programs.collectives import awaited_by, begins_collective
from monograph.ir.meta import set_origin, set_value, tensor_meta, value
from monograph.ir.port import Port, Role
from monograph.ir.program import Program
from monograph.user_code.lines import Origin

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
Ranks = dict[int, RankProgram]
WORLD, SHARD, COPIES = "monograph/world", "monograph/shard", "monograph/replicate"


class Writer:
    """Writes a program of values with shapes."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.inputs: list[Port] = []
        self.outputs: list[tuple[fx.Node, Role, str]] = []

    def input(self, path: str, role: Role, *shape: int) -> fx.Node:
        node = self.graph.placeholder(path.replace(".", "_").replace("/", "_"))
        set_value(node, tensor_meta(torch.empty(shape)))
        self.inputs.append(Port(node.name, role, path))
        return node

    def op(self, target: Any, *args: Any, shape: Sequence[int] | None = None) -> fx.Node:
        node = self.graph.call_function(target, args)
        wanted = value(args[0]).shape if shape is None else shape
        set_value(node, tensor_meta(torch.empty(wanted)))
        set_origin(node, Origin("model.py", 3, "fc", "backward"))
        return node

    def awaited(self, target: Any, *args: Any, shape: Sequence[int] | None = None) -> fx.Node:
        return self.op(c10d.wait_tensor.default, self.op(target, *args, shape=shape))

    def finish(self) -> Program:
        self.graph.output(tuple(node for node, _, _ in self.outputs))
        ports = tuple(Port(f"out{i}", role, path) for i, (_, role, path) in enumerate(self.outputs))
        return Program("step", fx.GraphModule(torch.nn.Module(), self.graph), tuple(self.inputs), ports)


# --- sets that are right -------------------------------------------------------------------------------------------------


def data_parallel(random: Random) -> Ranks:
    """Each rank has all; gradients are summed."""
    count, size = random.randint(1, 3), random.choice((2, 3, 4))
    rows = random.choice((2, 5))
    return _alike(
        size,
        lambda: _training(
            Random(0), count, rows, lambda w, g: w.awaited(c10d.all_reduce.default, g, "sum", WORLD)
        ),
    )


def state_in_parts(random: Random) -> Ranks:
    """Parameters are whole, and each rank updates its part, after clipping by the norm of all."""
    count, size = random.randint(1, 3), random.choice((2, 4))

    def program() -> Program:
        writer = Writer()
        x = writer.input("x", Role.USER, 8, 4)
        gradients = [_gradient(writer, x, index, 8) for index in range(count)]
        parts = [_scattered(writer, gradient, size, WORLD) for _, gradient in gradients]
        factor = _norm(writer, parts, WORLD)
        for index, ((weight, _), part) in enumerate(zip(gradients, parts, strict=True)):
            state = writer.input(f"optimizer.0/w{index}/momentum", Role.OPTIM, 8 // size, 4)
            moved = writer.op(aten.add.Tensor, state, writer.op(aten.mul.Tensor, part, factor))
            own = writer.op(aten.slice.Tensor, weight, 0, 0, 8 // size, shape=(8 // size, 4))
            new = writer.op(aten.sub.Tensor, own, moved)
            whole = writer.awaited(c10d.all_gather_into_tensor.default, new, size, WORLD, shape=(8, 4))
            writer.outputs += [
                (whole, Role.STATE, f"w{index}"),
                (moved, Role.STATE, f"optimizer.0/w{index}/momentum"),
            ]
        return writer.finish()

    parts = {f"optimizer.0/w{index}/momentum": frozenset({WORLD}) for index in range(count)}
    return _alike(size, program, parts)


def parameters_in_parts(random: Random) -> Ranks:
    """Parts of parameters are gathered, and their gradients scattered; in a grid the sums of the copies are added, too."""
    count, in_grid = random.randint(1, 3), random.random() < 0.5
    size = 2 if in_grid else random.choice((2, 4))
    over = SHARD if in_grid else WORLD

    def program() -> Program:
        writer = Writer()
        x = writer.input("x", Role.USER, 8, 4)
        held = [writer.input(f"w{index}", Role.PARAM, 8 // size, 4) for index in range(count)]
        parts = []
        for part in held:
            whole = writer.awaited(c10d.all_gather_into_tensor.default, part, size, over, shape=(8, 4))
            gradient = writer.op(aten.mul.Tensor, whole, x)
            scattered = _scattered(writer, gradient, size, over)
            if in_grid:
                scattered = writer.awaited(c10d.all_reduce.default, scattered, "sum", COPIES)
            parts.append(scattered)
        factor = _norm(writer, parts, over)
        for index, (part, gradient) in enumerate(zip(held, parts, strict=True)):
            new = writer.op(aten.sub.Tensor, part, writer.op(aten.mul.Tensor, gradient, factor))
            writer.outputs.append((new, Role.STATE, f"w{index}"))
        return writer.finish()

    parts = {f"w{index}": frozenset({over}) for index in range(count)}
    if not in_grid:
        return _alike(size, program, parts)
    groups = {
        rank: {SHARD: (rank // 2 * 2, rank // 2 * 2 + 1), COPIES: (rank % 2, rank % 2 + 2)}
        for rank in range(4)
    }
    return {rank: RankProgram(program(), groups[rank], parts) for rank in range(4)}


def pipeline(random: Random) -> Ranks:
    """Each rank has one layer: activations go on, gradients come back, one micro-batch after the other."""
    size, count = random.choice((2, 3)), random.choice((2, 3))
    groups = {WORLD: tuple(range(size))}
    return {rank: RankProgram(_stage(rank, size, count), groups, shares=False) for rank in range(size)}


def _stage(rank: int, size: int, count: int) -> Program:
    writer = Writer()
    x, weight = writer.input("x", Role.USER, 4, 4), writer.input(f"w{rank}", Role.PARAM, 4, 4)
    made, sent = [], []

    def received(source: int, tag: int) -> fx.Node:
        room = writer.op(aten.empty.memory_format, [4, 4], shape=(4, 4))
        return writer.awaited(c10d.irecv.default, room, source, tag, WORLD)

    for batch in range(count):
        given = x if rank == 0 else received(rank - 1, batch)
        made.append(writer.op(aten.mul.Tensor, given, weight))
        if rank < size - 1:
            sent.append(writer.op(c10d.isend.default, made[-1], rank + 1, batch, WORLD))
    total = weight
    for batch in range(count):
        gradient = made[batch] if rank == size - 1 else received(rank + 1, 100 + batch)
        passed = writer.op(aten.mul.Tensor, gradient, made[batch])
        if rank:
            sent.append(writer.op(c10d.isend.default, passed, rank - 1, 100 + batch, WORLD))
        total = writer.op(aten.sub.Tensor, total, passed)
    for begun in sent:
        writer.op(c10d.wait_tensor.default, begun)
    writer.outputs.append((total, Role.STATE, f"w{rank}"))
    return writer.finish()


def _alike(
    size: int, program: Callable[[], Program], parts: Mapping[str, frozenset[str]] | None = None
) -> Ranks:
    return {rank: RankProgram(program(), {WORLD: tuple(range(size))}, parts or {}) for rank in range(size)}


def _training(
    random: Random, count: int, rows: int, reduced: Callable[[Writer, fx.Node], fx.Node]
) -> Program:
    writer = Writer()
    x = writer.input("x", Role.USER, rows, 4)
    for index in range(count):
        weight, gradient = _gradient(writer, x, index, rows)
        new = writer.op(aten.sub.Tensor, weight, reduced(writer, gradient))
        writer.outputs.append((new, Role.STATE, f"w{index}"))
    return writer.finish()


def _gradient(writer: Writer, x: fx.Node, index: int, rows: int) -> tuple[fx.Node, fx.Node]:
    weight = writer.input(f"w{index}", Role.PARAM, rows, 4)
    return weight, writer.op(aten.mul.Tensor, weight, x)


def _scattered(writer: Writer, gradient: fx.Node, size: int, group: str) -> fx.Node:
    return writer.awaited(
        c10d.reduce_scatter_tensor.default, gradient, "sum", size, group, shape=(8 // size, 4)
    )


def _norm(writer: Writer, parts: Sequence[fx.Node], group: str) -> fx.Node:
    squares = [writer.op(aten.linalg_vector_norm.default, part, shape=()) for part in parts]
    total = squares[0]
    for item in squares[1:]:
        total = writer.op(aten.add.Tensor, total, item)
    return writer.awaited(c10d.all_reduce.default, total, "sum", group)


SETS = (data_parallel, state_in_parts, parameters_in_parts, pipeline)


# --- faults --------------------------------------------------------------------------------------------------------------


def faulty(random: Random) -> tuple[str, Ranks]:
    """A set with one fault, and what that is."""
    while True:
        ranks = random.choice(SETS)(random)
        name, fault = random.choice([*FAULTS.items()])
        changed = fault(random, {rank: _copied(item) for rank, item in ranks.items()})
        if changed is not None:
            return name, changed


def _copied(item: RankProgram) -> RankProgram:
    return replace(item, program=item.program.rebuilt())


Fault = Callable[[Random, Ranks], Ranks | None]


def _begun(item: RankProgram, *targets: Any) -> list[fx.Node]:
    nodes = [
        node for node in item.program.graph.nodes if node.op == "call_function" and begins_collective(node)
    ]
    return [node for node in nodes if not targets or node.target in targets]


def _of_one(change: Callable[[Random, RankProgram, fx.Node], bool], *targets: Any) -> Fault:
    """A fault of one collective of one rank."""

    def fault(random: Random, ranks: Ranks) -> Ranks | None:
        rank = random.choice([*ranks])
        found = _begun(ranks[rank], *targets)
        return ranks if found and change(random, ranks[rank], random.choice(found)) else None

    return fault


def _of_all(change: Callable[[Random, RankProgram, fx.Node], bool], *targets: Any) -> Fault:
    """The same fault on all ranks: of programs that are alike."""

    def fault(random: Random, ranks: Ranks) -> Ranks | None:
        found = [_begun(item, *targets) for item in ranks.values()]
        if not all(item.shares for item in ranks.values()) or not found[0]:
            return None
        place, seed = random.randrange(len(found[0])), random.random()
        done = [
            change(Random(seed), item, nodes[place])
            for item, nodes in zip(ranks.values(), found, strict=True)
        ]
        return ranks if all(done) else None

    return fault


def _wait_of(begun: fx.Node) -> fx.Node:
    return next(node for node in begun.users if awaited_by(node) is begun)


def _drop(random: Random, item: RankProgram, begun: fx.Node) -> bool:
    given, wait = begun.args[0], _wait_of(begun)
    assert isinstance(given, fx.Node)
    wait.replace_all_uses_with(given)
    item.program.graph.erase_node(wait)
    item.program.graph.erase_node(begun)
    return True


def _double(random: Random, item: RankProgram, begun: fx.Node) -> bool:
    with item.program.graph.inserting_before(begun):
        again = item.program.graph.node_copy(begun)
        item.program.graph.node_copy(_wait_of(begun), lambda _: again)
    return True


def _swap(random: Random, item: RankProgram, begun: fx.Node) -> bool:
    """Another one runs first, or they send each other's values."""
    others = [
        node for node in _begun(item, begun.target) if node is not begun and _peer(node) == _peer(begun)
    ]
    if not others:
        return False
    other = random.choice(others)
    first, second = begun.args[0], other.args[0]
    if value(first) != value(second):  # type: ignore[arg-type]
        return False
    if "tag" in [argument.name for argument in begun.target._schema.arguments]:  # type: ignore[union-attr]
        begun.update_arg(2, other.args[2])
        return True
    early, late = sorted((begun, other), key=[*item.program.graph.nodes].index)
    place = {node: index for index, node in enumerate(item.program.graph.nodes)}
    if place[late.args[0]] > place[early]:  # type: ignore[index]
        return False
    first, second = early.args[0], late.args[0]
    early.update_arg(0, second)
    late.update_arg(0, first)
    return True


def _peer(node: fx.Node) -> Any:
    return node.args[1:2]


def _argument(name: str, change: Callable[[Any], Any]) -> Callable[[Random, RankProgram, fx.Node], bool]:
    def changed(random: Random, item: RankProgram, begun: fx.Node) -> bool:
        names = [argument.name for argument in begun.target._schema.arguments]  # type: ignore[union-attr]
        if name not in names:
            return False
        begun.update_arg(names.index(name), change(begun.args[names.index(name)]))
        return True

    return changed


def _other_group(random: Random, item: RankProgram, begun: fx.Node) -> bool:
    names = [argument.name for argument in begun.target._schema.arguments]  # type: ignore[union-attr]
    place = names.index("group_name")
    others = [name for name in (*item.groups, "monograph/other") if name != begun.args[place]]
    begun.update_arg(place, random.choice(others))
    return True


def _other_form(**changed: Any) -> Callable[[Random, RankProgram, fx.Node], bool]:
    def change(random: Random, item: RankProgram, begun: fx.Node) -> bool:
        given = begun.args[0]
        assert isinstance(given, fx.Node)
        if given.op == "placeholder":
            return False
        set_value(given, replace(value(given), **changed))
        return True

    return change


def _no_wait(random: Random, item: RankProgram, begun: fx.Node) -> bool:
    wait = _wait_of(begun)
    wait.replace_all_uses_with(begun)
    item.program.graph.erase_node(wait)
    return True


def _early_read(random: Random, item: RankProgram, begun: fx.Node) -> bool:
    readers = [*_wait_of(begun).users]
    if not readers:
        return False
    reader = random.choice(readers)
    reader.replace_input_with(_wait_of(begun), begun)
    return True


def _read_own(random: Random, item: RankProgram, begun: fx.Node) -> bool:
    """The collective runs, and something reads what was given to it instead of what it made."""
    wait, given = _wait_of(begun), begun.args[0]
    readers = [
        reader for reader in wait.users if reader.op == "call_function" and not begins_collective(reader)
    ]
    if not readers or value(wait) != value(given):  # type: ignore[arg-type]
        return False
    random.choice(readers).replace_input_with(wait, given)  # type: ignore[arg-type]
    return True


def _late(random: Random, item: RankProgram, begun: fx.Node) -> bool:
    """It is sent when all else is done."""
    wait = _wait_of(begun)
    if wait.users or not _waits_after(item, begun):
        return False
    last = item.program.graph.output_node().prev
    last.append(begun)
    begun.append(wait)
    return True


def _waits_after(item: RankProgram, begun: fx.Node) -> bool:
    """True if what comes back of it is received later."""
    nodes = [*item.program.graph.nodes]
    return any(node.target is c10d.irecv.default for node in nodes[nodes.index(begun) :])


_SUM, _SCATTER = c10d.all_reduce.default, c10d.reduce_scatter_tensor.default
_SEND, _RECEIVE = c10d.isend.default, c10d.irecv.default

FAULTS: dict[str, Fault] = {
    "dropped": _of_one(_drop),
    "dropped everywhere": _of_all(_drop, _SUM),
    "twice": _of_one(_double),
    "swapped": _of_one(_swap),
    "another group": _of_one(_other_group),
    "another group everywhere": _of_all(_other_group),
    "another type": _of_one(_other_form(dtype=torch.float64)),
    "another shape": _of_one(_other_form(shape=(1, 4), stride=(4, 1))),
    "another reduction": _of_one(_argument("reduce_op", lambda _: "max")),
    "no wait": _of_one(_no_wait),
    "no wait anywhere": _of_all(_no_wait),
    "read before it is done": _of_one(_early_read),
    "read before it is done everywhere": _of_all(_early_read),
    "own value read": _of_one(_read_own, _SUM),
    "own value read everywhere": _of_all(_read_own, _SUM),
    "sent to another": _of_one(_argument("dst", lambda peer: peer + 1), _SEND),
    "received from another": _of_one(_argument("src", lambda peer: peer + 1), _RECEIVE),
    "another tag": _of_one(_argument("tag", lambda tag: tag + 1), _SEND, _RECEIVE),
    "sent too late": _of_one(_late, _SEND),
}
