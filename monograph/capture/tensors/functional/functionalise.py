"""From a recorded step that changes tensors in place to a pure program: what changed becomes an output."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from monograph.capture.tensors.checkpoint_regions import repeat_draws
from monograph.capture.tensors.functional.replay import Replay
from monograph.capture.tensors.functional.results_on_fakes import complete
from monograph.capture.tensors.functional.rewrite import Rewrite
from monograph.capture.tensors.functional.rounded_numbers import round_numbers
from monograph.capture.tensors.functional.views import Alias, state_aliases
from monograph.capture.tensors.functional.writes import Rewriting, all_replayed, rewriting
from monograph.compat.fake_values import KnownValue
from monograph.compat.modes import current_tracer
from monograph.compat.ops import named_input, writes_to_inputs
from monograph.compat.symbolic_numbers import exact_arithmetic
from monograph.compat.traces.functional import functional_tensors
from monograph.compat.traces.nodes import graph_module
from monograph.compat.traces.tracing import trace
from monograph.ir.memory import last_writers, memory_root
from monograph.ir.meta import origin, output_nodes, set_origin
from monograph.user_code.lines import Origin


@dataclass(frozen=True)
class Functional:
    """A pure graph; `changed` lists the inputs whose new values follow the first `num_results` outputs."""

    module: fx.GraphModule
    num_results: int
    changed: tuple[int, ...]
    shown: Mapping[int, Alias]  # the results that are on the memory of new state


def functionalise(
    module: fx.GraphModule,
    mode: Any,
    inputs: Sequence[Any],
    known_value: KnownValue,
    *,
    num_state: int = 0,
    overwritten: Collection[int] = (),
    replayed: bool = False,
) -> Functional:
    """Make a recorded step pure; bitwise the same. `inputs` are the fakes that it was recorded with.

    The last `num_state` results of the step are new state; `overwritten` are the inputs that some of it replaces.
    What cannot be copied op by op is traced again under functional tensors, and with `replayed` all of it.
    """
    repeat_draws(module.graph)
    complete(module.graph)
    round_numbers(module.graph)
    plan = all_replayed(module.graph) if replayed else rewriting(module.graph)
    made = _replayed(plan, module, mode, inputs, known_value) if plan.replayed else _rewritten(plan, module)
    pure, changed = made
    num_results = len(output_nodes(module.graph))
    shown = state_aliases(pure.graph, num_results - num_state)
    _keep_apart(pure, num_results - num_state, num_results, overwritten)
    assert not any(writes_to_inputs(node.target) for node in pure.graph.nodes), (
        "functionalisation left a write"
    )
    return Functional(pure, num_results, tuple(changed), shown)


def _rewritten(plan: Rewriting, module: fx.GraphModule) -> tuple[fx.GraphModule, list[int]]:
    graph, inputs = fx.Graph(), dict[fx.Node, fx.Node]()
    for index, node in enumerate(module.graph.find_nodes(op="placeholder")):
        inputs[node] = named_input(graph, f"arg{index}_1")
        inputs[node].meta["val"] = node.meta.get("val")
    rewrite = Rewrite(plan, graph, inputs)
    rewrite.run(module.graph)
    outputs = []
    for item in output_nodes(module.graph):
        rewrite.work_for(item)  # a view of what changed later is taken anew here
        outputs.append(rewrite.node_of(item) if isinstance(item, fx.Node) else item)
    after = [rewrite.node_of(node) for node in inputs]
    changed = [index for index, node in enumerate(inputs) if after[index] is not inputs[node]]
    graph.output([*outputs, *(after[index] for index in changed)])
    return graph_module(module, graph), changed


def _replayed(
    plan: Rewriting, module: fx.GraphModule, mode: Any, inputs: Sequence[Any], known_value: KnownValue
) -> tuple[fx.GraphModule, list[int]]:
    changed: list[int] = []
    recorded = module.graph.find_nodes(op="placeholder")
    writers = last_writers(module.graph)

    def pure(*flat: Any) -> list[Any]:
        with torch.no_grad(), functional_tensors() as (wrap, _):
            tracer = current_tracer()
            new = tracer.graph.find_nodes(op="placeholder")
            replay = Replay(module, tracer, wrap, dict(zip(new, flat, strict=True)))
            rewrite = Rewrite(plan, tracer.graph, dict(zip(recorded, new, strict=True)), replay)
            rewrite.run(module.graph)
            outputs = []
            for item in output_nodes(module.graph):
                rewrite.work_for(item)
                outputs.append(rewrite.value_of(item) if isinstance(item, fx.Node) else item)
            for index, (node, before) in enumerate(zip(recorded, flat, strict=True)):
                rewrite.work_for(writers.get(index))  # a write through a view reaches its base here
                after = rewrite.value_now(node)
                if after is not before:
                    changed.append(index)
                    outputs.append(after)
        return outputs

    with exact_arithmetic():
        traced = trace(pure, mode, inputs, known_value)
    for node, before in zip(traced.graph.find_nodes(op="placeholder"), recorded, strict=True):
        node.meta["val"] = before.meta.get("val")  # the step may have given an empty argument a size since
    return traced, changed


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
    given = graph.find_nodes(op="placeholder")
    inputs, replaced = set(given), {given[index] for index in overwritten}
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
