"""A recorded step copied op by op: the ops that write become pure ones, and views of what they wrote are taken anew."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from operator import getitem
from typing import Any

import torch
from torch import fx

from monograph.capture.tensors.functional.memory import Memory, is_ambiguous
from monograph.capture.tensors.functional.pure_forms import INVERSES
from monograph.capture.tensors.functional.replay import Replay
from monograph.capture.tensors.functional.writes import Rewriting, Write
from monograph.compat.fakes import example_of, example_view
from monograph.compat.ops import schema_of
from monograph.compat.traces.functional import with_bits, without_functional
from monograph.compat.traces.nodes import new_node
from monograph.ir.meta import add_label, come_from, is_late, labels
from monograph.ir.ops.laid_out import LAID_OUT


class Rewrite:
    """Copies a recorded step into a graph. `inputs` are its placeholders there; `replay` runs what has to be replayed."""

    def __init__(
        self,
        rewriting: Rewriting,
        graph: fx.Graph,
        inputs: Mapping[fx.Node, fx.Node],
        replay: Replay | None = None,
    ) -> None:
        self._rewriting, self._memories = rewriting, rewriting.memories
        self._graph, self._replay = graph, replay
        self._now: dict[fx.Node, fx.Node] = dict(inputs)
        self._writes: defaultdict[Memory, int] = defaultdict(int)  # how often it was written
        # by value the writes that its node has seen; as torch does it, none where it is a view taken after them
        self._seen: dict[fx.Node, int] = {}
        self._place: fx.Node | None = None  # the recorded op that is worked for
        for node in inputs:
            self._hand_over(node)

    def run(self, recorded: fx.Graph) -> None:
        """Copy all ops."""
        for node in recorded.nodes:
            if node.op != "call_function" or node in self._now:
                continue
            self.work_for(node)
            write = self._rewriting.writes.get(node)
            if node in self._rewriting.replayed:
                self._run_again(node)
            elif write is not None:
                self._write(node, write)
                if node in self._now:  # with memory of its own, which replayed ops may touch
                    self._hand_over(node)
            else:
                args, kwargs = fx.map_arg((node.args, _asked_for(node)), self.node_of)
                self._now[node] = self._new(node.target, args, kwargs, node.meta.get("val"))
                self._hand_over(node)
                self._label(node)

    def work_for(self, node: Any) -> None:
        """What is made from now on has the origin of `node`."""
        if isinstance(node, fx.Node) and node.op == "call_function":
            self._place = node
            if self._replay is not None:
                self._replay.current = node

    def node_of(self, node: fx.Node) -> fx.Node:
        """The node of the new graph that has the value of a recorded one as it is now."""
        if node.op == "get_attr":
            return self._attribute(node)
        if self._replay is not None and self._is_apart(node):
            return self._replay.node_of(node)
        value = self._memories.value_of(node)
        if self._seen.get(value, 0) != self._writes[self._memories.of[value]]:
            self._take_anew(value)
        return self._now[value]

    def value_of(self, node: fx.Node) -> Any:
        """The same as a value of the second trace, with the bits that it has in eager mode."""
        value = self.value_now(node)
        recorded = node.meta.get("val")
        if isinstance(value, torch.Tensor) and isinstance(recorded, torch.Tensor):
            return with_bits(value, recorded)
        return value

    def value_now(self, node: fx.Node) -> Any:
        """The same with whatever bits."""
        assert self._replay is not None, "no second trace runs"
        if node.op != "get_attr" and self._is_apart(node):
            return without_functional(self._replay.env[node])
        return self._replay.value_of(self.node_of(node), node.meta.get("val"))

    def _is_apart(self, node: fx.Node) -> bool:
        return node in self._rewriting.replayed or self._memories.of[node] in self._rewriting.apart

    def _new(self, target: Any, args: Any, kwargs: Any, example: Any) -> fx.Node:
        node = new_node(self._graph, target, args, kwargs)
        node.meta["val"] = example
        if self._place is not None:
            come_from(node, self._place)
        return node

    def _attribute(self, node: fx.Node) -> fx.Node:
        if node not in self._now:
            root, name = node.graph.owning_module, str(node.target)
            if self._replay is not None:
                setattr(self._replay.tracer.root, name, getattr(root, name))
            self._now[node] = self._graph.create_node("get_attr", name)
        return self._now[node]

    def _label(self, node: fx.Node) -> None:
        for label in labels(node):
            add_label(self.node_of(node), label)

    # --- under functional tensors --------------------------------------------------------------------------------

    def _hand_over(self, node: fx.Node) -> None:
        """Memory that only replayed ops may touch is theirs as soon as it is there."""
        if self._replay is not None and self._is_apart(node):
            self._replay.take(node, self._now[node])

    def _run_again(self, node: fx.Node) -> None:
        assert self._replay is not None, "no second trace runs"
        for item in node.all_input_nodes:
            if item.op == "get_attr":
                self._replay.env[item] = getattr(item.graph.owning_module, str(item.target))
            elif not self._is_apart(item):
                self._replay.take(item, self.node_of(item))
        self._replay.run_node(node)

    # --- what is written -----------------------------------------------------------------------------------------

    def _write(self, node: fx.Node, write: Write) -> None:
        args, kwargs = fx.map_arg((write.args, write.kwargs), self.node_of)
        made, own = self._new(write.form.op, args, kwargs, write.example), write.form.num_results
        given = [made]
        if isinstance(write.example, (list, tuple)):
            parts = [(part, list(self._taken(part))) for part in self._parts(made)]
            given = [leaf for _, leaves in parts[own:] for leaf in leaves]
            for user in (item for item in node.users if item.target is getitem and own):
                self._now[user] = parts[int(user.args[1])][0]  # type: ignore[arg-type]
                self._hand_over(user)
                self._label(user)
        if own:
            self._now[node] = made
        if write.laid_out:
            given = [self._laid_out(made, write.written[0].meta["val"])]
        for item, new, wholes in zip(write.written, given, write.wholes, strict=False):
            self._put(item, new, wholes)
        if labels(node):
            self._label(node)

    def _laid_out(self, made: fx.Node, like: torch.Tensor) -> fx.Node:
        """A copy of a value in memory of the strides of `like`, as `lay_out` makes it of functional tensors."""
        sizes, strides = list(like.shape), list(like.stride())
        options = {"dtype": like.dtype, "device": like.device, "pin_memory": False}
        example = example_of(like, sizes, strides)
        memory = self._new(torch.ops.aten.empty_strided.default, (sizes, strides), options, example)
        return self._new(torch.ops.aten.copy.default, (memory, made), {}, example)

    def _taken(self, part: fx.Node) -> Iterator[fx.Node]:
        """The tensors in a result, each a node."""
        if not isinstance(part.meta["val"], (list, tuple)):
            yield part
        for inner in self._parts(part):
            yield from self._taken(inner)

    def _parts(self, made: fx.Node) -> Iterator[fx.Node]:
        example = made.meta["val"]
        for index, part in enumerate(example if isinstance(example, (list, tuple)) else ()):
            yield self._new(getitem, (made, index), {}, part)

    def _put(self, written: fx.Node, new: fx.Node, wholes: tuple[Any, ...]) -> None:
        """Let the memory that a value is a view of have the new one in its place."""
        memory, chain = self._memories.of[written], self._memories.views_to(written)
        bases = [self._now[memory.root]]
        for view in chain[:-1]:
            bases.append(self._viewed(view, bases[-1]))
        steps = reversed(list(zip(chain, [memory.root, *chain], bases, strict=False)))
        for (view, base, now), example in zip(steps, wholes, strict=True):
            call = INVERSES[view.target](view, base, now, new)
            new = new if call is None else self._new(*call, example)
        self._now[memory.root] = self._as_before(memory.root, new)
        self._writes[memory] += 1
        self._seen[memory.root] = self._writes[memory]
        if chain:
            self._take_anew(chain[-1])

    def _as_before(self, root: fx.Node, new: fx.Node) -> fx.Node:
        """The new value of a whole memory, with the strides that it had before where they decide which kernel runs.

        What an update writes goes back to the memory of the state, and until then into arithmetic.
        """
        before = root.meta.get("val")
        if not is_ambiguous(before) or (self._place is not None and is_late(self._place)):
            return new
        return self._new(LAID_OUT, (new, self._now[root]), {}, example_view(before))

    def _take_anew(self, value: fx.Node) -> None:
        memory = self._memories.of[value]
        made = self._now[memory.root]
        for view in self._memories.views_to(value):
            made = self._viewed(view, made)
        self._now[value], self._seen[value] = made, self._writes[memory]

    def _viewed(self, view: fx.Node, base: fx.Node) -> fx.Node:
        return self._new(view.target, (base, *view.args[1:]), view.kwargs, view.meta["val"])


def _asked_for(node: fx.Node) -> dict[str, Any]:
    """The arguments by name of an op, without those that it has by default."""
    schema = schema_of(node.target)
    if not node.kwargs or schema is None:
        return dict(node.kwargs)
    defaults = {item.name: item.default_value for item in schema.arguments if item.has_default_value()}
    return {name: item for name, item in node.kwargs.items() if not _is_same(item, defaults.get(name, node))}


def _is_same(item: Any, default: Any) -> bool:
    plain = item is None or type(item) in (bool, int, float, str)
    return plain and type(item) is type(default) and bool(item == default)
