"""From a recorded step that changes tensors in place to a pure program: what changed becomes an output."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from monograph.capture.numbers.arithmetic import OPERATIONS
from monograph.capture.numbers.moving import again, is_moving, read_out_again
from monograph.capture.tensors.functional.views import Alias, state_aliases
from monograph.compat.fake_values import KnownValue
from monograph.compat.modes import current_tracer
from monograph.compat.ops import has_effect, is_profiler_mark, looks_at_grad_mode, writes_to_inputs
from monograph.compat.symbolic_numbers import REPEATED, exact_arithmetic
from monograph.compat.tracing import (
    call_beneath_functional_mode,
    functional_tensors,
    has_other_bits,
    has_other_strides,
    lay_out,
    trace,
    traced_node,
    with_bits,
    without_functional,
)
from monograph.errors import AliasError
from monograph.ir.memory import last_writers, memory_root, views_its_input, written_by
from monograph.ir.meta import (
    add_label,
    grad_mode,
    labels,
    origin,
    output_nodes,
    set_grad_mode,
    set_origin,
)
from monograph.user_code.lines import Origin


@dataclass(frozen=True)
class Functional:
    """A pure graph; `changed` lists the inputs whose new values follow the first `num_results` outputs."""

    module: fx.GraphModule
    num_results: int
    changed: tuple[int, ...]
    shown: Mapping[int, Alias]  # the results that are on the memory of new state


def drop_profiler(graph: fx.Graph) -> None:
    """Erase the profiler's marks around optimizer steps."""
    for node in reversed(list(graph.nodes)):
        if is_profiler_mark(node.target) and not node.users:
            graph.erase_node(node)


def lift_constants(module: fx.GraphModule, known: Mapping[int, fx.Node]) -> list[torch.Tensor]:
    """Turn the tensors that a trace holds into placeholders after the others, and list them in that order.

    A tensor whose id is in `known` is an input already.
    """
    graph = module.graph
    lifted: list[torch.Tensor] = []
    placed = dict(known)
    anchor = [node for node in graph.nodes if node.op == "placeholder"][-1:]
    for node in list(graph.nodes):
        if node.op != "get_attr" or not isinstance(
            tensor := _attribute(module, str(node.target)), torch.Tensor
        ):
            continue
        if id(tensor) not in placed:
            with graph.inserting_after(anchor[0]) if anchor else graph.inserting_before():
                anchor = [graph.placeholder(f"captured_{len(lifted)}")]
            anchor[0].meta["val"] = node.meta.get("val")
            placed[id(tensor)] = anchor[0]
            lifted.append(tensor)
        node.replace_all_uses_with(placed[id(tensor)])
        graph.erase_node(node)
    return lifted


def record_generators(tracer: Any) -> None:
    """Let a trace hold explicit `torch.Generator` objects as attributes; `lift_generators` makes them inputs."""
    create = tracer.create_arg

    def create_arg(item: Any) -> Any:
        if not isinstance(item, torch.Generator):
            return create(item)
        name = f"generator_{id(item)}"
        setattr(tracer.root, name, item)
        return tracer.create_node("get_attr", name, (), {})

    tracer.create_arg = create_arg


def lift_generators(module: fx.GraphModule) -> list[torch.Generator]:
    """Turn the generators that a trace holds into placeholders after the others."""
    graph = module.graph
    lifted: dict[int, tuple[torch.Generator, fx.Node]] = {}
    anchor = [node for node in graph.nodes if node.op == "placeholder"][-1:]
    for node in list(graph.nodes):
        if node.op != "get_attr" or not isinstance(
            item := _attribute(module, str(node.target)), torch.Generator
        ):
            continue
        if id(item) not in lifted:
            with graph.inserting_after(anchor[0]) if anchor else graph.inserting_before():
                anchor = [graph.placeholder(f"generator_{len(lifted)}")]
            lifted[id(item)] = (item, anchor[0])
        node.replace_all_uses_with(lifted[id(item)][1])
        graph.erase_node(node)
    return [item for item, _ in lifted.values()]


def _attribute(module: fx.GraphModule, target: str) -> Any:
    found: Any = module
    for part in target.split("."):
        found = getattr(found, part)
    return found


class _Replay(fx.Interpreter):
    """Runs a recorded step under a second trace and hands each op's origin on."""

    def __init__(self, module: fx.GraphModule, tracer: Any) -> None:
        super().__init__(module, garbage_collect_values=False)  # what a view is taken from is asked for
        self._tracer = tracer
        self._current: fx.Node | None = None
        self._recorded: dict[
            int, torch.Tensor
        ] = {}  # by the id of a tensor what eager mode has in its place now
        create = tracer.create_node

        def create_node(*args: Any, **kwargs: Any) -> fx.Node:
            node: fx.Node = create(*args, **kwargs)
            if self._current is not None and node.op in ("call_function", "call_method"):
                set_origin(node, origin(self._current))
                if looks_at_grad_mode(node.target) and (enabled := grad_mode(self._current)) is not None:
                    set_grad_mode(node, enabled)
            return node

        tracer.create_node = create_node

    def run_node(self, node: fx.Node) -> Any:
        self.work_for(node)
        number = node.meta.get("val")
        if node.op == "call_function" and is_moving(number) and node.target in OPERATIONS:
            return again(number, node.target, tuple(fx.map_arg(node.args, self.env.__getitem__)))
        if node.op == "call_function" and not views_its_input(node):
            for item in node.all_input_nodes:
                if isinstance(as_recorded := item.meta.get("val"), torch.Tensor):
                    lay_out(self.env[item], as_recorded)
        made = super().run_node(node)
        if node.op == "call_function" and is_moving(number):
            return read_out_again(number, made)
        if isinstance(recorded := node.meta.get("val"), torch.Tensor):
            self._recorded[id(made)] = recorded
        for written in written_by(node) if node.op == "call_function" else ():
            self._lie_as_recorded(written)
        if labels(node) and (new := traced_node(without_functional(made), self._tracer)) is not None:
            for label in labels(node):
                add_label(new, label)
        return made

    def _lie_as_recorded(self, written: fx.Node) -> None:
        """An op in place keeps strides and bits; its functional form chooses them for a view, and so for what it shows."""
        root = self.env[memory_root(written)]
        view, whole = self._recorded.get(id(self.env[written])), self._recorded.get(id(root))
        if view is None or whole is None:
            return
        if has_other_strides(self.env[written], view) or has_other_bits(root, whole):
            lay_out(root, whole, with_views=True)

    @property
    def place(self) -> Origin:
        """Where the op comes from that runs now."""
        return Origin() if self._current is None else origin(self._current)

    def work_for(self, node: Any) -> None:
        """What is recorded from now on has the origin of `node`."""
        if isinstance(node, fx.Node) and node.op == "call_function":
            self._current = node

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if has_effect(target):
            return call_beneath_functional_mode(target, args, kwargs)
        if target is torch.ops.aten.bernoulli_.float and not args[0].is_contiguous():
            return _draw_in_memory_order(*args, **kwargs)
        if target is torch.ops.aten.copy_.default and args[1].is_neg() and not args[0].is_neg():
            return _copy_negated(*args)
        return super().call_function(REPEATED.get(target, target), args, kwargs)


def _copy_negated(tensor: torch.Tensor, source: torch.Tensor, _non_blocking: bool = False) -> torch.Tensor:
    """`copy_` of what is a negation by a bit alone: kernels convert to another dtype first, and negate all of it then.

    The imaginary parts of a complex copy are -0.0. The functional form negates first.
    """
    if tensor.dtype == source.dtype:
        return tensor.copy_(source)
    return tensor.copy_(torch.ops.aten._neg_view.default(source)).neg_()


def _draw_in_memory_order(tensor: torch.Tensor, p: float = 0.5, *, generator: Any = None) -> torch.Tensor:
    """`bernoulli_` draws in the order of memory, but its functional form gives the numbers to a contiguous tensor.

    Other random ops keep the strides of what they fill. Met by dropout after a transpose.
    """
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    drawn = torch.ops.aten.bernoulli.p(tensor.permute(order), p, generator=generator)
    return tensor.copy_(drawn.permute(sorted(range(tensor.dim()), key=order.__getitem__)))


def functionalise(
    module: fx.GraphModule,
    mode: Any,
    inputs: Sequence[Any],
    known_value: KnownValue,
    *,
    num_state: int = 0,
    overwritten: Collection[int] = (),
) -> Functional:
    """Trace a recorded step again under functional tensors with the same fake inputs; bitwise the same.

    The last `num_state` results of the step are new state; `overwritten` are the inputs that some of it replaces.
    """
    changed: list[int] = []
    num_results = 0

    def pure(*flat: Any) -> list[Any]:
        nonlocal num_results
        changed.clear()
        with torch.no_grad(), functional_tensors() as (wrap, unwrap):
            wrapped = [wrap(item) for item in flat]
            tracer = current_tracer()
            record_generators(tracer)
            replay = _Replay(module, tracer)
            outputs = []
            for node, item in zip(output_nodes(module.graph), _replayed(replay, wrapped), strict=True):
                replay.work_for(node)  # a view of what changed later is made anew here
                outputs.append(_with_bits_of(node, unwrap(item)))
            num_results = len(outputs)
            writers = last_writers(module.graph)
            for index, (before, item) in enumerate(zip(flat, wrapped, strict=True)):
                replay.work_for(writers.get(index))  # a write through a view reaches its base here
                after = unwrap(item)
                if after is not before:
                    changed.append(index)
                    outputs.append(after)
        return outputs

    with exact_arithmetic():
        traced = trace(pure, mode, inputs, known_value)
    shown = state_aliases(traced.graph, num_results - num_state)
    _keep_apart(traced, num_results - num_state, num_results, overwritten)
    assert not any(writes_to_inputs(node.target) for node in traced.graph.nodes), (
        "functionalisation left a write"
    )
    return Functional(traced, num_results, tuple(changed), shown)


def _with_bits_of(node: Any, value: Any) -> Any:
    recorded = node.meta.get("val") if isinstance(node, fx.Node) else None
    if not isinstance(recorded, torch.Tensor) or not isinstance(value, torch.Tensor):
        return value
    return with_bits(value, recorded)


def _replayed(replay: _Replay, inputs: Sequence[Any]) -> Any:
    try:
        return replay.run(*inputs)
    except RuntimeError as error:
        if "functionaliz" not in str(error):
            raise
        raise AliasError(
            "memory is changed in place through a chain of views that a static graph cannot turn round",
            where=replay.place,
            hint="change the tensor that they are views of, or make it contiguous() before the views are taken",
        ) from error


def _keep_apart(
    module: fx.GraphModule, num_returned: int, num_results: int, overwritten: Collection[int]
) -> None:
    """Copy results that write-backs would change, and new state that they would read after they wrote it.

    Those are: what is returned and shows an input that gets another value afterwards, new state that shows an
    input, and the new value of an input that changed if it is another result as well.
    """
    graph = module.graph
    output = graph.output_node()
    results = list(output.args[0])  # type: ignore[arg-type]
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    replaced = {inputs[index] for index in overwritten}
    seen: set[fx.Node] = {item for item in results[:num_results] if isinstance(item, fx.Node)}
    for index, item in enumerate(results):
        if not isinstance(item, fx.Node) or not isinstance(item.meta.get("val"), torch.Tensor):
            continue
        shown = memory_root(item)
        if shown in (replaced if index < num_returned else inputs) or (index >= num_results and item in seen):
            with graph.inserting_before(output):
                copy = graph.call_function(torch.ops.aten.clone.default, (item,))
            copy.meta["val"] = item.meta["val"]
            set_origin(copy, origin(item) if origin(item).phase else Origin(phase="forward"))
            results[index] = item = copy
        seen.add(item)
    output.args = (results,)
    module.recompile()
