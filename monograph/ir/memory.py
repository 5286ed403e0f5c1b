"""Whose memory a value of a graph shows, and who writes to it.

`shown_values` is for programs, in which no op changes its arguments: where an op does not say what it shows, it may be
anything. The others are for graphs as they are recorded, and follow the one tensor that an op is a view of, or changes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache
from itertools import takewhile
from operator import getitem
from typing import Any, Final

import torch
from torch import fx

from monograph.compat.ops import aliased_arguments, named_arguments, schema_of, writes_to_inputs

_SILENT_NORMS: Final = tuple(
    getattr(torch.ops.aten, name) for name in ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm")
)


def is_view(node: fx.Node) -> bool:
    """True for ops whose results are known to be views of their arguments."""
    return any(aliased_arguments(node.target) or ())


@cache
def shows_nothing(op: Any) -> bool:
    """True for ops that are known to make memory for all their results. Remembered for each op."""
    shown = aliased_arguments(op)
    return shown is not None and not any(shown)


def shown_values(node: fx.Node) -> tuple[list[fx.Node], ...] | None:
    """For each result of an op the values whose memory it shows; None if that is unknown: it may be any of its inputs."""
    shown = aliased_arguments(node.target)
    if not shown or not any(shown):
        return None if shown is None else ([],) * len(shown)
    named = named_arguments(node.target, node.args, node.kwargs)
    return tuple(_nodes_in([named.get(name) for name in names]) for names in shown)


def _nodes_in(arguments: Any) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.map_arg(arguments, found.append)
    return found


def memory_root(node: fx.Node) -> fx.Node:
    """The node whose memory `node` shows, through views and through ops that return what they changed."""
    while (source := base_of(node)) is not None:
        node = source
    return node


class MemoryRoots:
    """`memory_root` of many nodes of a graph whose earlier nodes stay as they are: each step of a chain is taken once."""

    def __init__(self) -> None:
        self._known: dict[fx.Node, fx.Node] = {}

    def of(self, node: fx.Node) -> fx.Node:
        """The node whose memory `node` shows."""
        path = []
        while (root := self._known.get(node)) is None:
            path.append(node)
            if (source := base_of(node)) is None:
                root = node
                break
            node = source
        for item in path:
            self._known[item] = root
        return root


def base_of(node: fx.Node) -> fx.Node | None:
    """The value that a node is a view of, or that it has changed and gives back; None if it has memory of its own."""
    if node.op != "call_function":
        return None
    source = node.args[0] if node.target is getitem else next(iter(_aliased(node, writes=False)), None)
    if not isinstance(source, fx.Node):
        return None
    if node.target is getitem and source.op == "call_function" and not _aliased(source, writes=False):
        return None  # each of several new results has memory of its own
    return source


def views_its_input(node: fx.Node) -> bool:
    """True for views, which work on any layout and read nothing."""
    return bool(_aliased(node, writes=False)) and not writes_to_inputs(node.target)


def written_by(node: fx.Node) -> list[fx.Node]:
    """The values that an op changes in place."""
    return _nodes_in(_aliased(node, writes=True)) if writes_to_inputs(node.target) else []


def changed_by(node: fx.Node) -> list[fx.Node]:
    """The values that an op changes in place, also where its schema keeps silent about it."""
    if getattr(node.target, "overloadpacket", None) in _SILENT_NORMS:
        return [item for item in node.args[3:5] if isinstance(item, fx.Node)] if node.args[5] else []
    return written_by(node)


def _aliased(node: fx.Node, *, writes: bool) -> list[Any]:
    if not _marked(node.target, writes=writes):
        return []
    return marked_arguments(node.target, node.args, node.kwargs, writes=writes)


def marked_arguments(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], *, writes: bool) -> list[Any]:
    """The arguments that an op's results show, or with `writes` those that it changes."""
    count = len(args)
    return [
        args[position] if position < count else kwargs.get(name)
        for position, name in _marked(op, writes=writes)
    ]


def marked_names(op: Any, *, writes: bool) -> tuple[str, ...]:
    """The names of those arguments."""
    return tuple(name for _, name in _marked(op, writes=writes))


@cache
def _marked(op: Any, *, writes: bool) -> tuple[tuple[int, str], ...]:
    """The positions and names of those arguments. Remembered for each op."""
    schema = schema_of(op)
    if schema is None:
        return ()
    if not writes and all(result.alias_info is None for result in schema.returns):
        return ()  # such as a norm, which changes its running statistics and gives new tensors
    return tuple(
        (position, item.name)
        for position, item in enumerate(schema.arguments)
        if item.alias_info is not None and (item.alias_info.is_write or not writes)
    )


class Writes:
    """The ops that change memory in place, in a graph in the making whose earlier nodes stay as they are."""

    def __init__(self, graph: fx.Graph) -> None:
        self._graph, self._roots = graph, MemoryRoots()
        self._seen = set[fx.Node]()
        self._found: defaultdict[fx.Node, list[fx.Node]] = defaultdict(list)
        self._news: dict[fx.Node, None] = {}

    def news(self) -> Collection[fx.Node]:
        """The values that were changed since the last call, themselves or as views."""
        self._read()
        news, self._news = self._news, {}
        return news.keys()

    def to(self, node: fx.Node) -> Sequence[fx.Node]:
        """Those so far that change a value, or what it is a view of, in order."""
        self._read()
        return self._found.get(self._roots.of(node), ())

    def _read(self) -> None:
        new = [*takewhile(lambda item: item not in self._seen, reversed(self._graph.nodes))]
        self._seen.update(new)
        for item in reversed(new):
            for root in dict.fromkeys(map(self._roots.of, changed_by(item))):
                self._found[root].append(item)
                self._news[root] = None


def last_writers(graph: fx.Graph) -> dict[int, fx.Node]:
    """The last op that changes each input, by the input's position."""
    inputs = {node: i for i, node in enumerate(item for item in graph.nodes if item.op == "placeholder")}
    root_of = MemoryRoots().of
    return {
        inputs[root]: node
        for node in graph.nodes
        for root in map(root_of, written_by(node))
        if root in inputs
    }


class Groups:
    """Nodes that belong together."""

    def __init__(self) -> None:
        self._owner: dict[fx.Node, fx.Node] = {}

    def owner(self, node: fx.Node) -> fx.Node:
        """One of them that stands for all."""
        path = []
        while (above := self._owner.get(node, node)) is not node:
            path.append(node)
            node = above
        for item in path:
            self._owner[item] = node
        return node

    def join(self, node: fx.Node, other: fx.Node) -> None:
        """From now on the two belong together."""
        first, second = self.owner(node), self.owner(other)
        if first is not second:
            self._owner[first] = second

    def sorted(self, nodes: Iterable[fx.Node]) -> list[list[fx.Node]]:
        """The nodes by the groups that they belong to, each in their order."""
        found: dict[fx.Node, list[fx.Node]] = {}
        for node in nodes:
            found.setdefault(self.owner(node), []).append(node)
        return list(found.values())
