"""Which ops an artifact may hold, each by its exact name: `aten::add.Tensor`, `python::mul`, `higher_order::cond`.

An artifact is data from anywhere. So an op loads only if it is known to compute and to do nothing else, and why it stays
in its memory whatever it is given (`bounds.py`). Other ops of torch, and those of other libraries, need the user's trust;
no library is imported.
"""

from __future__ import annotations

import builtins
import math
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from monograph.artifact.bounds.checks import is_bounded
from monograph.checkpoint.errors import Damaged, Refused
from monograph.compat.ops import HigherOrderOperator, OpOverload, find_op, op_name, writes_to_inputs
from monograph.ir.call.sparse import COUNT_SPARSE, ON_SPARSE
from monograph.ir.ops import definitions  # noqa: F401 -- our own ops are found by their names

TRUSTED: Final = frozenset({"aten", "prims", "mkldnn", "monograph"})
_NAME: Final = re.compile(r"([A-Za-z_]\w{0,99})::([A-Za-z_]\w{0,99})\.([A-Za-z_]\w{0,99})", re.ASCII)
# ops that do more than compute: they touch files or print, or take tensors of a kind that no program has
_REFUSED: Final = re.compile(
    r"from_file|_print|_?test_\w+|_?quantized?_\w+|_?sparse_\w+|_?nested_\w+|_cslt_\w+|_validate_\w+|"
    r"_?record_function\w*|_?set_\w*|rename\w*|\w+_sparse"
)

_OF_OPERATOR: Final = (
    "add sub mul truediv floordiv mod pow neg pos abs getitem lt le gt ge eq ne and_ or_ not_"
)
_OF_MATH: Final = "sqrt exp log log2 floor ceil trunc sin cos tan tanh pow"
_OF_TORCH: Final = "sym_max sym_min sym_float sym_int sym_not sym_ite _sym_sqrt"
_PYTHON: Final[Mapping[str, Callable[..., Any]]] = {
    **{name: getattr(operator, name) for name in _OF_OPERATOR.split()},
    **{name: getattr(builtins, name) for name in ("max", "min", "round", "int", "float", "bool")},
    **{f"math_{name}": getattr(math, name) for name in _OF_MATH.split()},
    **{name: getattr(torch, name) for name in _OF_TORCH.split() if hasattr(torch, name)},
}
_PYTHON_NAMES: Final = {id(function): name for name, function in _PYTHON.items()}
_HIGHER_ORDER: Final = frozenset({"cond"})


def name_of(target: Any) -> str:
    """The exact name of an op; `Refused` for one that no artifact can hold."""
    if target in (ON_SPARSE, COUNT_SPARSE):
        raise Refused(
            "the step works on sparse tensors, which an artifact cannot",
            "work on to_dense() in build(); a checkpoint holds sparse tensors: mg.save(graph.state_dict(), path)",
        )
    if isinstance(target, OpOverload):
        return op_name(target)
    if isinstance(target, HigherOrderOperator) and target.name() in _HIGHER_ORDER:
        return f"higher_order::{target.name()}"
    name = _PYTHON_NAMES.get(id(target))
    if name is None:
        raise Refused(f"the step calls {target}, which an artifact cannot hold", "use ops of torch instead")
    return f"python::{name}"


def op_of(name: str, *, trust: bool) -> Any:
    """The op of an exact name; `Damaged` for one that is not known, or that is not to be trusted."""
    namespace, _, rest = name.partition("::")
    if namespace == "python" and rest in _PYTHON:
        return _PYTHON[rest]
    if namespace == "higher_order" and rest in _HIGHER_ORDER:
        return getattr(torch.ops.higher_order, rest)
    parts = _NAME.fullmatch(name)
    if parts is None or (parts[1] in TRUSTED and _REFUSED.fullmatch(parts[2])):
        raise Damaged(f"it has the op {name[:100]!r}, which no artifact may hold")
    if parts[1] not in TRUSTED and not trust:
        raise Damaged(
            f"it has the op {name!r} of another library: load it with trust=True if you trust the file and the library"
        )
    op = find_op(*parts.groups())
    if op is None:
        missing = "this version of torch" if parts[1] in TRUSTED else "this process: import its library first"
        raise Damaged(f"it has the op {name!r}, which is not in {missing}")
    if writes_to_inputs(op):
        raise Damaged(f"it has the op {name!r}, which changes its arguments")
    if not trust and not is_bounded(op):
        raise Damaged(
            f"it has the op {name!r}, of which it is not known that it stays in its memory whatever a file gives it: "
            "load it with trust=True if you trust the file"
        )
    return op
