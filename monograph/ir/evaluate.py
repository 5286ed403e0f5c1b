"""What ops give for values that are described: found by running them without data. The nodes that a pass made get it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

import torch
from torch import fx

from monograph.compat.ops import schema_of
from monograph.ir.meta import (
    ScalarMeta,
    TensorMeta,
    Value,
    compute_nodes,
    describe,
    metas,
    origin,
    set_origin,
    set_value,
    value,
)
from monograph.user_code.lines import Origin

# in place of numbers that a step computes, by kind; a half is a probability too
NUMBERS: Final[Mapping[str, Any]] = {"int": 1, "float": 0.5, "bool": True}


def fill_meta(graph: fx.Graph) -> None:
    """Describe the nodes that have no description, and give those without an origin that of their first input."""
    for node in compute_nodes(graph):
        if not origin(node).phase:
            phases = [origin(item) for item in node.all_input_nodes if origin(item).phase]
            set_origin(node, phases[0] if phases else Origin(phase="forward"))
        if value(node) is None and not _gives_nothing(node.target):
            set_value(node, computed(node))


def computed(node: fx.Node) -> Value | tuple[Any, ...]:
    """What the op of a node gives for inputs as they are described; None where torch cannot infer it without data."""
    if any(meta.varies for item in node.all_input_nodes for meta in metas(value(item))):
        return None
    arguments, options = example_arguments(node)
    devices = [known.device for item in node.all_input_nodes if isinstance(known := value(item), TensorMeta)]
    try:
        with torch.no_grad():
            described = describe(node.target(*arguments, **options))  # type: ignore[operator]
    except Exception:  # the real run says what is wrong with the op, and names its line
        return None
    return _placed(described, devices[0]) if devices else described


def _gives_nothing(target: Any) -> bool:
    schema = schema_of(target)
    return schema is not None and not schema.returns


def _without_data(described: TensorMeta) -> torch.Tensor:
    return described.empty("meta")


def example(described: Any, tensor: Callable[[TensorMeta], torch.Tensor] = _without_data) -> Any:
    """What an op can be run with in place of a value: a tensor of its form, a number of its kind; or None."""
    match described:
        case TensorMeta():
            return tensor(described)
        case ScalarMeta(kind):
            return NUMBERS[kind]
        case tuple():
            return tuple(example(item, tensor) for item in described)
    return None


def example_arguments(node: fx.Node) -> tuple[Any, Any]:
    """What an op can be run with in place of its arguments, by place and by name."""
    given: tuple[Any, Any] = fx.map_arg((node.args, node.kwargs), lambda item: example(value(item)))
    return given


def _placed(described: Any, device: torch.device) -> Any:
    """Results on the meta device are on the device of the inputs."""
    if isinstance(described, tuple):
        return tuple(_placed(item, device) for item in described)
    on_meta = isinstance(described, TensorMeta) and described.device.type == "meta"
    return replace(described, device=device) if on_meta else described
