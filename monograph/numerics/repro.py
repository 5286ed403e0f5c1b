"""A difference as a script of its own: the op that parts, on the numbers that it was given, without the user's model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import fx

from monograph.compat.ops import is_custom, op_name
from monograph.errors import DefinitionError
from monograph.inspect.walk import Walk
from monograph.ir.printer import HEADER, call_text, spell_value

_OWN = "monograph."
_SHOW = """\

def show(name, value):
    for item in value if isinstance(value, (list, tuple)) else (value,):
        print(f"{name:14}", item.flatten()[:6] if isinstance(item, torch.Tensor) else item)

""".splitlines()


@dataclass(frozen=True)
class Expression:
    """An op, and what it was given by name."""

    code: str
    operands: Mapping[str, Any] = field(default_factory=dict, repr=False)
    library_op: str = ""  # the name of the op, if it is of another library: "lib::op"


@dataclass(frozen=True)
class Evidence:
    """The op as it should be and as it is, and what it should give and gave."""

    before: Expression | None
    after: Expression | None
    expected: Any = field(default=None, repr=False)
    got: Any = field(default=None, repr=False)


def expression(walk: Walk, node: fx.Node) -> Expression:
    """A node of a walk, with the values of its operands."""
    operands = {item.name: made for item, made in walk.operands(node)}
    name = op_name(node.target).rpartition(".")[0] if is_custom(node.target) else ""
    code = "" if node.op == "placeholder" else call_text(node)
    return Expression(code, operands, "" if _OWN in code else name)


def write_repro(path: Path, about: str, evidence: Evidence | None, *, compiled: bool) -> None:
    """Write `path`, a script, and its tensors beside it. Raises DefinitionError if there is nothing to show."""
    if evidence is None or (evidence.before is None and evidence.after is None):
        raise DefinitionError(
            "there is no op to write a script of", hint="the report is of a step that is as promised"
        )
    if path.suffix != ".py":
        raise DefinitionError(
            f"repro({str(path)!r}): the script is a Python file", hint='repro("difference.py")'
        )
    tensors: dict[str, torch.Tensor] = {}
    lines = [f'"""{about}"""', "", "from pathlib import Path", "", HEADER.strip(), ""]
    if any(_OWN in item.code for item in (evidence.before, evidence.after) if item is not None):
        lines.append("import monograph  # for its ops")
    foreign = {item.library_op for item in (evidence.before, evidence.after) if item is not None}
    lines += [f"# import what defines {name} first" for name in sorted(foreign - {""})]
    lines += [
        "from safetensors.torch import load_file",
        "",
        'tensors = load_file(Path(__file__).with_suffix(".safetensors"))',
        "",
        *_SHOW,
    ]
    shown = []
    for name, what in (("before", evidence.before), ("after", evidence.after)):
        if what is not None and what.code:
            lines += _function(name, what, tensors)
            shown.append(name)
    for name, item in (("expected", evidence.expected), ("got", evidence.got)):
        if isinstance(item, torch.Tensor):
            tensors[name] = _plain(item)
            lines.append(f'show("{name}", tensors["{name}"])')
    for name in shown:
        lines.append(f'show("{name}, now", {name}())')
    if compiled and shown:
        lines.append(f'show("compiled, now", torch.compile({shown[-1]})())')
    path.write_text("\n".join(lines) + "\n")
    save_file(tensors, path.with_suffix(".safetensors"))


def _function(name: str, what: Expression, tensors: dict[str, torch.Tensor]) -> list[str]:
    lines = [f"def {name}():"]
    for operand, item in what.operands.items():
        lines.append(f"    {operand} = {_spelled(f'{name}.{operand}', item, tensors)}")
    return [*lines, f"    return {what.code}", "", ""]


def _spelled(key: str, item: Any, tensors: dict[str, torch.Tensor]) -> str:
    if isinstance(item, (list, tuple)):
        entries = [_spelled(f"{key}.{number}", entry, tensors) for number, entry in enumerate(item)]
        return f"[{', '.join(entries)}]"
    if not isinstance(item, torch.Tensor):
        return spell_value(item)
    tensors[key] = _plain(item)
    if item.is_contiguous() or not item.numel():
        return f'tensors["{key}"]'
    return f'torch.empty_strided({tuple(item.shape)}, {item.stride()}, dtype={item.dtype}).copy_(tensors["{key}"])'


def _plain(item: torch.Tensor) -> torch.Tensor:
    return item.detach().cpu().contiguous().clone()
