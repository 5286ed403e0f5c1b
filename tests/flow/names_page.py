"""Writes docs/oneflow-names.md: which of OneFlow's names is PyTorch's, which is ours, and which is refused.

python -m tests.flow.names_page
"""

from __future__ import annotations

import importlib
import inspect
from itertools import groupby
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch

import monograph.flow as flow
from monograph.errors import DefinitionError, UnavailableError
from monograph.flow.refusals import ABSENT, Refusal, refusal
from tests.support import ROOT

NAMES = Path(__file__).with_name("oneflow_names.txt")
PAGE = ROOT / "docs" / "oneflow-names.md"
TITLE = """# Every name of OneFlow

Written by `make names` from a list of OneFlow's public names: {counts}.

- **Same**: the object is PyTorch's. `flow.relu is torch.relu`.
- **Ours**: only OneFlow has it, or its arguments or defaults are others than PyTorch's.
- **Refused**: an access raises `UnavailableError` (on graphs and configs `DefinitionError`) with this reason and
  alternative. Members of `Tensor`, `nn.Module` and `optim.Optimizer`, which are PyTorch's classes, are simply not there.
"""

IN_EAGER_CODE = (
    "in eager code; `build()` refuses it, since its C++ reads the lengths: use padded sequences and a mask"
)
LIMITED = {  # of names that are the same, what a graph cannot do with them
    "nn.utils.rnn.pack_padded_sequence": IN_EAGER_CODE,
    "nn.utils.rnn.pack_sequence": IN_EAGER_CODE,
    "nn.utils.rnn.pad_packed_sequence": IN_EAGER_CODE,
}


class Found(NamedTuple):
    """What becomes of a name, given without `oneflow.`."""

    path: str
    kind: str
    told: str  # of ours what it is; of refused names why, and what instead


def names() -> list[str]:
    """OneFlow's public names, without `oneflow.`."""
    lines = NAMES.read_text().splitlines()
    return [line.removeprefix("oneflow.") for line in lines if line and not line.startswith("#")]


def found(path: str) -> Found:
    """What becomes of a name."""
    reason = refusal(path) or ABSENT.get(path)
    if reason is not None:
        return Found(path, "refused", f"{reason.reason}: {reason.instead}")
    here = value_of(path)
    there = walk(torch, path, "torch.")
    if here is there and here is not None:
        return Found(path, "same", LIMITED.get(path, ""))
    holder = path.rpartition(".")[0]
    if holder and walk(flow, holder, "monograph.flow.") is walk(torch, holder, "torch."):
        return Found(path, "same", "")  # a member of the same object, such as a method that is bound anew
    if isinstance(here, ModuleType) and there is not None and not hasattr(here, "__file__"):
        return Found(path, "same", "")  # a thin module in front of PyTorch's
    return Found(path, "ours", about(here))


def value_of(path: str) -> Any:
    """The object at a name; of members that instances have, that of an instance."""
    holder, _, member = path.rpartition(".")
    sample = samples().get(holder)
    if sample is not None and not hasattr(walk(flow, holder, "monograph.flow."), member):
        return getattr(sample, member)
    value = walk(flow, path, "monograph.flow.")
    if value is None:
        raise LookupError(f"{path} is neither here nor refused")
    return value


def samples() -> dict[str, Any]:
    """An instance of each class whose attributes are listed."""

    class Empty(flow.nn.Graph):
        def build(self, x):
            return x

    graph, parameter = Empty(), torch.zeros(1, requires_grad=True)
    graph.m = torch.nn.ReLU()
    return {
        "nn.Graph": graph,
        "nn.graph.GraphConfig": graph.config,
        "nn.graph.GraphModule": graph.m.to(flow.nn.graph.GraphModule),
        "optim.Optimizer": flow.optim.SGD([parameter]),
        "placement": flow.placement("cpu", [0]),
    }


def walk(root: Any, path: str, prefix: str) -> Any:
    """The object at a path of attributes and modules; None if there is none."""
    parts, value = path.split("."), root
    for index, part in enumerate(parts):
        try:
            value = getattr(value, part)
        except AttributeError:
            try:
                value = importlib.import_module(prefix + ".".join(parts[: index + 1]))
            except ModuleNotFoundError:
                return None
    return value


def about(value: Any) -> str:
    """The first line of what documents an object of ours; PyTorch's are told by their names."""
    module = getattr(value, "__module__", None) or ""
    if inspect.ismethoddescriptor(value) and value.__objclass__ is torch._C.TensorBase:
        return f"`torch.Tensor.{value.__name__}` as a function"
    if module.startswith("torch") or (inspect.isbuiltin(value) and not module.startswith("monograph")):
        return f"`{'torch.jit' if 'jit' in module else 'torch.nn.functional'}.{value.__name__}`"
    text = inspect.getdoc(value) if not isinstance(value, (bool, int, str, type(None), dict, list)) else None
    return (text or "").split("\n")[0].replace("|", "\\|")


def page() -> str:
    """The page."""
    all_found = [found(path) for path in names()]
    counts = {kind: sum(item.kind == kind for item in all_found) for kind in ("same", "ours", "refused")}
    told = f"{len(all_found)} names, of which {counts['same']} are PyTorch's, {counts['ours']} ours and "
    lines = [TITLE.format(counts=f"{told}{counts['refused']} refused")]
    by_holder = sorted(all_found, key=lambda item: item.path.rpartition(".")[0])
    for holder, items in groupby(by_holder, key=lambda item: item.path.rpartition(".")[0]):
        lines += section(holder, list(items))
    return "\n".join(lines) + "\n"


def section(holder: str, items: list[Found]) -> list[str]:
    """The names of one namespace or class."""
    lines = [f"## flow{'.' if holder else ''}{holder}", ""]
    others = [item for item in items if item.kind != "same" or item.told]
    same = [f"`{item.path.rpartition('.')[2]}`" for item in items if item not in others]
    if same:
        lines += [f"Same: {', '.join(same)}.", ""]
    if others:
        lines += ["| name | | |", "|---|---|---|"]
        lines += [f"| `{item.path.rpartition('.')[2]}` | {item.kind} | {item.told} |" for item in others]
        lines += [""]
    return lines


def raised(path: str) -> tuple[Exception | None, Refusal]:
    """What an access to a refused name raises, and the reason."""
    reason = refusal(path) or ABSENT[path]
    holder, _, member = path.rpartition(".")
    sample = samples().get(holder)
    try:
        if sample is not None:
            getattr(sample, member)
        else:
            walk(flow, path, "monograph.flow.")
    except (UnavailableError, DefinitionError, AttributeError) as error:
        return error, reason
    return None, reason


if __name__ == "__main__":
    PAGE.write_text(page())
