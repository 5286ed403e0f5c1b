"""Whether a loaded program is what it says of its values: found by running it without data.

`shapes.py` does it faster for common ops; this is for all others, and for compilers, which rely on strides too.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import fx

from monograph.checkpoint.errors import Damaged
from monograph.checkpoint.leaves import check
from monograph.checkpoint.read import memory_bytes
from monograph.compat.fakes import LOGGER_OF_FAKES, fake_mode, import_capture_modules
from monograph.compat.ops import HigherOrderOperator, OpOverload
from monograph.compat.patching import quiet
from monograph.ir.evaluate import NUMBERS, example
from monograph.ir.meta import TensorMeta, describe, grad_mode, metas, plain, value
from monograph.ir.program import Program
from monograph.plan.plan import Plan

_BOOLS: Final = frozenset(["lt", "le", "gt", "ge", "eq", "ne", "not_", "bool", "sym_not"])
_FLOATS: Final = frozenset(
    ["truediv", "float", "sym_float", "_sym_sqrt", "sqrt", "exp", "log", "log2", "sin", "cos", "tan", "tanh"]
)
_INTS: Final = frozenset(["int", "sym_int", "floor", "ceil", "trunc", "round"])


def check_values(program: Program) -> None:
    """`Damaged` unless every value of a program is what its description says.

    Nothing is computed, and no memory is taken for the tensors.
    """
    with _without_data():
        inputs = [_fake(value(node)) for node in program.graph.find_nodes(op="placeholder")]
        _Run(program).graph(program.module, inputs)


def check_graph(module: fx.GraphModule) -> None:
    """The same for a graph by itself."""
    with _without_data():
        _Run(None).graph(module, [_fake(value(node)) for node in module.graph.find_nodes(op="placeholder")])


def described_result(op: Any, *args: Any, **named: Any) -> Any:
    """What an op gives for these arguments, tensors as descriptions. `Damaged` if it refuses them."""
    with _without_data():
        try:
            given, options = fx.node.map_aggregate((args, named), _fake_tensor)
            return plain(describe(op(*given, **options)))
        except Exception as error:
            raise Damaged(f"{op} refuses what it is given: {' '.join(str(error).split())[:300]}") from None


@contextmanager
def _without_data() -> Iterator[None]:
    """Inside, ops compute shapes alone; what they refuse is the caller's to report."""
    import_capture_modules()
    with quiet(LOGGER_OF_FAKES), fake_mode(), torch.no_grad():
        yield


def check_bytes(node: fx.Node) -> None:
    """`Damaged` if a value is described as larger than the memory of this machine."""
    for item in metas(value(node)):
        if item.nbytes > memory_bytes():
            raise Damaged(f"{node.name} takes {item.nbytes:,} bytes, more than this machine has")


def check_peak(plan: Plan) -> None:
    """`Damaged` if a program would hold more than the memory of this machine, op by op."""
    described = (item for node in plan.program.ops() for item in metas(value(node)))
    on_host = all(item.device.type == "cpu" for item in described)
    if on_host and plan.memory.peak_bytes > memory_bytes():
        raise Damaged(f"a program holds {plan.memory.peak_bytes:,} bytes at once, more than this machine has")


def _fake(item: Any) -> Any:
    return torch.Generator() if item is None else example(item, TensorMeta.empty)


def _fake_tensor(item: Any) -> Any:
    return item.empty() if isinstance(item, TensorMeta) else item


def _text(described: Any) -> str:
    return f"({', '.join(map(_text, described))})" if isinstance(described, tuple) else str(described)


class _Run:
    """Runs the graphs of one program on fakes."""

    def __init__(self, program: Program | None) -> None:
        self._parts = {part.name: part.module for part in (program.parts if program is not None else ())}

    def graph(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        """What a graph gives for these inputs; every node is checked on the way."""
        placeholders = module.graph.find_nodes(op="placeholder")
        check(len(inputs) == len(placeholders), "a part or a branch is given too many arguments, or too few")
        made: dict[fx.Node, Any] = dict(zip(placeholders, inputs, strict=True))
        for node in module.graph.nodes:
            if node.op == "output":
                return fx.node.map_arg(node.args[0], made.__getitem__)
            if node.op != "placeholder":
                made[node] = self._result(node, module, made)
            self._check(node, made[node])
        raise Damaged("a graph has no output")

    def _check(self, node: fx.Node, result: Any) -> None:
        if isinstance(result, torch.Generator):
            return
        check_bytes(node)
        found, stated = plain(describe(result)), plain(value(node))
        check(
            found == stated or (stated is None and node.op == "get_attr"),
            f"{node.name} is {_text(found)}, not {_text(stated)}",
        )

    def _result(self, node: fx.Node, module: fx.GraphModule, made: Mapping[fx.Node, Any]) -> Any:
        if node.op == "get_attr":
            return getattr(module, str(node.target))
        args: Any = fx.node.map_arg(node.args, made.__getitem__)
        kwargs: Any = fx.node.map_arg(node.kwargs, made.__getitem__)
        if node.op == "call_module":
            return self.graph(self._parts[str(node.target)], args)
        target: Any = node.target
        if isinstance(target, HigherOrderOperator):
            return self._chosen(node, args)
        if target is torch.ops.aten._local_scalar_dense.default:
            return NUMBERS[_kind(args[0].dtype)]
        if not isinstance(target, OpOverload) and target is not operator.getitem:
            return _number(node, args)
        try:
            with torch.set_grad_enabled(bool(grad_mode(node))):
                result = target(*args, **kwargs)
        except Exception as error:
            text = " ".join(str(error).split())
            raise Damaged(f"{node.name} cannot be computed: {text[:300] or type(error).__name__}") from None
        return result

    def _chosen(self, node: fx.Node, args: Sequence[Any]) -> Any:
        """A branch on a value: either way gives the same form."""
        fits = len(args) == 4 and isinstance(args[3], (list, tuple))
        check(
            fits and all(isinstance(item, fx.GraphModule) for item in args[1:3]),
            f"{node.name} has no branches",
        )
        results = [self.graph(branch, args[3]) for branch in args[1:3]]
        forms = [describe(result) for result in results]
        check(forms[0] == forms[1], f"the branches of {node.name} give different forms")
        return results[0]


def _kind(dtype: torch.dtype) -> str:
    if dtype is torch.bool:
        return "bool"
    return "float" if dtype.is_floating_point else "int"


def _number(node: fx.Node, args: Sequence[Any]) -> Any:
    """A number in place of what Python arithmetic would give."""
    name = getattr(node.target, "__name__", "")
    check(
        all(type(item) in (bool, int, float) for item in args) and bool(args) and not node.kwargs,
        f"{node.name} computes with what is no number",
    )
    kinds = set(map(type, args))
    if name in _BOOLS:
        return True
    if name in _FLOATS or (float in kinds and name not in _INTS):
        return NUMBERS["float"]
    # of integers these might never end
    check(name not in ("mul", "pow"), f"{node.name} multiplies integers")
    return NUMBERS["int"]
