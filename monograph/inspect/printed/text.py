"""The text of a graph: its tree of modules with tags, and why its builds exist."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from monograph.capture.guards.sources.places import ClassEntries, Entries
from monograph.compat.modules import buffers_of, parameters_of, submodules_of
from monograph.compiler import Build
from monograph.config import GraphConfig
from monograph.errors import DefinitionError, shown
from monograph.inspect.printed.costs import cost_lines
from monograph.inspect.printed.operators import GRAPH, operators_by_module
from monograph.inspect.printed.tree import Entry, layout, wrapped
from monograph.ir.call_text import Leaf, ModuleCall
from monograph.ir.meta import ScalarMeta, TensorMeta, tensor_meta
from monograph.ir.port import Role
from monograph.ir.program import Program
from monograph.ir.text import Text, shortened
from monograph.passes.run import Stage
from monograph.passes.table import PASS_NAMES
from monograph.runnable import why_not_in_place
from monograph.state.find import Owned
from monograph.user_code.files import is_installed_file

SHOWN_CALLS = 3  # of a module that is called again and again
SHOWN_MODULES = 3  # of those that share a guard
SHOWN_PATHS = 5  # of parameters without gradient
_LONGEST_REPR = 400
_LONGEST_GUARD: Final = 240  # characters, such as those of a pattern
_ENTRY: Final = re.compile(r"(?P<owner>\S+?)(?:/|\.|\[')(?P<name>\w+)(?:'\])?(?P<value> = .*)")


def graph_text(
    name: str,
    kind: str,
    config: GraphConfig,
    owned: Owned,
    builds: Sequence[Build],
    *,
    lines_of_ops: bool = False,
) -> str:
    """The tree of a graph: what it holds, and what its newest build makes of that."""
    tree = _Tree(owned, builds[-1] if builds else None, lines_of_ops)
    lines = [f"(GRAPH:{name}:{kind}): (", *wrapped(f"(CONFIG:config:{config!r})", "  ")]
    if len(builds) > 1:
        lines += wrapped(f"# the newest of {len(builds)} builds: {builds[-1].reason}", "  ")
    for entry in tree.entries(name):
        lines += layout(entry, 1)
    return "\n".join([*lines, ")"])


@dataclass
class _Tree:
    """Makes the entries of a graph. A module or tensor met again refers to the place where it stood first."""

    owned: Owned
    build: Build | None
    lines_of_ops: bool = False
    seen: dict[int, str] = field(default_factory=dict)  # id → path

    def __post_init__(self) -> None:
        self._calls: Mapping[str, Sequence[ModuleCall]] = {}
        self._operators: Mapping[str, tuple[Entry, ...]] = {}
        if self.build is not None:
            self._calls = self.build.captured.module_io
            modules = self.owned.named_modules()
            self._operators = operators_by_module(self.build.program, modules, lines=self.lines_of_ops)

    def entries(self, name: str) -> Iterator[Entry]:
        """The entries of the graph itself, whose name is given."""
        yield from self._inputs(GRAPH, name)
        for path, module in self.owned.modules.items():
            yield self._module(path, module)
        yield from self._operators.get(GRAPH, ())
        yield from self._outputs(GRAPH, name)

    def _module(self, path: str, module: nn.Module) -> Entry:
        label = f"MODULE:{path}:{one_line(module)}"
        if (first := self._met(module, path)) is not None:
            return Entry(label, note=f"the same as {first}")
        return Entry(label, tuple(self._inside(path, module)))

    def _inside(self, path: str, module: nn.Module) -> Iterator[Entry]:
        yield from self._inputs(path, path)
        for tag, table in (("PARAMETER", parameters_of(module)), ("BUFFER", buffers_of(module))):
            for name, tensor in table.items():
                if tensor is not None:
                    yield self._state(tag, f"{path}.{name}", tensor)
        for name, child in submodules_of(module).items():
            if child is not None:
                yield self._module(f"{path}.{name}", child)
        yield from self._operators.get(path, ())
        yield from self._outputs(path, path)

    def _state(self, tag: str, path: str, tensor: torch.Tensor) -> Entry:
        label = f"{tag}:{path}:{state_text(tensor)}"
        first = self._met(tensor, path)
        return Entry(label, ()) if first is None else Entry(label, note=f"the same as {first}")

    def _met(self, item: object, path: str) -> str | None:
        first = self.seen.setdefault(id(item), path)
        return first if first != path else None

    def _inputs(self, path: str, name: str) -> Iterator[Entry]:
        return _crossing("INPUT", "input.", name, [call.inputs for call in self._calls.get(path, ())])

    def _outputs(self, path: str, name: str) -> Iterator[Entry]:
        return _crossing("OUTPUT", "output", name, [call.outputs for call in self._calls.get(path, ())])


def _crossing(tag: str, what: str, name: str, calls: Sequence[Sequence[Leaf]]) -> Iterator[Entry]:
    """What goes in or comes out; the calls of a module that is called several times are numbered."""
    for number, leaves in enumerate(calls[:SHOWN_CALLS]):
        which = f"#{number}" if len(calls) > 1 else ""
        for leaf in leaves:
            yield Entry(f"{tag}:_{name}{which}_{what}{leaf.path}:{value_text(leaf.value)}")
    if len(calls) > SHOWN_CALLS:
        yield Entry(f"{tag}:...:{len(calls) - SHOWN_CALLS} more calls")


def one_line(module: nn.Module) -> str:
    """`Conv2d(3, 32, kernel_size=(3, 3))`: the module without its children."""
    about = " ".join(module.extra_repr().split())
    if len(about) > _LONGEST_REPR:
        about = f"{about[:_LONGEST_REPR]} ..."
    return f"{type(module).__name__}({about})"


def state_text(tensor: torch.Tensor) -> str:
    """A parameter or buffer without its values."""
    if is_lazy(tensor):
        return f"tensor(..., uninitialized, dtype={tensor.dtype})"
    text = value_text(tensor_meta(tensor))
    return f"{text[:-1]}, requires_grad=True)" if tensor.requires_grad else text


def value_text(value: TensorMeta | ScalarMeta) -> str:
    """A tensor of the step without its values."""
    if isinstance(value, ScalarMeta):
        return str(value)
    device = "" if value.device.type == "cpu" else f"device='{value.device}', "
    return f"tensor(..., {device}size={value.shape}, dtype={value.dtype})"


# --- programs --------------------------------------------------------------------------------------------------------


def stage_program(build: Build, stage: str) -> Program:
    """The program of a build after one of its stages, or "final"."""
    stages = {item.name: item for item in build.stages}
    if stage != "final" and stage not in stages:
        raise DefinitionError(
            f"there is no stage {shown(stage)}", hint=f"stages: {', '.join([*stages, 'final'])}"
        )
    return build.program if stage == "final" else stages[stage].program


# --- why builds exist ------------------------------------------------------------------------------------------------


def explain_text(name: str, builds: Sequence[Build], num_dropped: int, more: Sequence[str]) -> Text:
    """Why each build exists, and what it costs; of others that were dropped how many, and `more` lines."""
    dropped = f", {num_dropped} more were dropped: the least recently used" if num_dropped else ""
    lines = [f"{name}: {len(builds)} build(s){dropped}", *cost_lines(builds)]
    for build in builds:
        lines.append(
            f"build {build.number} on {build.backend}, {_num_ops(build.program)} ops: {build.reason}"
        )
        for title, items in _sections(build, builds):
            lines += [f"  {title}:", *(line for item in items for line in wrapped(str(item), "    "))]
    return Text("\n".join([*lines, *more]))


def _guards(build: Build, first: Build) -> tuple[str, list[str]]:
    """All guards of the first build; of another one what is not as in the first, if they have more in common than that."""
    own, others = build.guards.texts(), first.guards.texts()
    new = [text for text in own if text not in others]
    if build is first or 2 * len(new) > len(own):
        return "guards", _without_libraries(own, build)
    places = {text.partition(" = ")[0] for text in own}
    gone = [text for text in others if text not in own and text.partition(" = ")[0] not in places]
    differing = [
        *_without_libraries(new, build),
        *(f"without {line}" for line in _without_libraries(gone, first)),
    ]
    return f"guards, the same as of build {first.number} but for", differing or ["what its reason says"]


def _without_libraries(texts: Sequence[str], build: Build) -> list[str]:
    """Guards with many on one line; of those in classes, functions and globals of installed packages only the number."""
    packages, counts = _packages(build), Counter[str]()
    shown = []
    for text in texts:
        label = re.split(r"[.\[]| = ", text, maxsplit=1)[0]
        if label in packages:
            counts[packages[label]] += 1
        else:
            shown.append(text)
    folded = [f"{count} values in classes, functions and globals of {name}" for name, count in counts.items()]
    return [*_grouped(shown), *(f"{line}, which build.guards.texts() lists" for line in folded)]


def _packages(build: Build) -> dict[str, str]:
    """Installed packages by what labels of places in them begin with: names of classes, and of the packages."""
    found, others = dict[str, str](), set[str]()
    for source in build.guards.sources:
        if not isinstance(source, Entries):
            continue
        is_class = isinstance(source, ClassEntries)
        module = str(source.entries.get("__module__" if is_class else "__name__", ""))
        if not (is_class or source.label == module):
            continue
        package, label = module.partition(".")[0], source.label.partition(".")[0]
        file = getattr(sys.modules.get(module), "__file__", None)
        if file is not None and is_installed_file(file):
            found[label] = package
        else:
            others.add(label)
    return {label: package for label, package in found.items() if label not in others}


def _sections(build: Build, builds: Sequence[Build]) -> list[tuple[str, list[Any]]]:
    found: list[tuple[str, list[Any]]] = [
        ("advice", _advice(build, builds)),
        ("costs", why_not_in_place(build.executor.bound, build.backend)),
        ("numbers read at each step", _numbers(build, builds[0])),
        ("hooks", list(build.captured.hooks)),
        ("parameters without gradient", _some(build.captured.without_gradient)),
        ("constants and notes", list(build.captured.notes)),
        ("passes", _passes(build.stages)),
        ("backend", list(dict.fromkeys(build.notes))),
        ("kernels", list(build.choices)),
        _guards(build, builds[0]),
    ]
    return [(title, items) for title, items in found if items]


def _numbers(build: Build, first: Build) -> list[str]:
    """The numbers that each step reads, those of one owner on one line."""
    if build is not first and _hyper(build) == _hyper(first):
        return [f"those of build {first.number}"]
    by_group: dict[str, list[str]] = {}
    for path in _hyper(build):
        optimizer, *inside = path.split("/", maxsplit=2)
        group, name = (f"{optimizer}/{inside[0]}: ", inside[1]) if len(inside) == 2 else ("", path)
        by_group.setdefault(group, []).append(name)
    return [group + ", ".join(names) for group, names in by_group.items()]


def _hyper(build: Build) -> list[str]:
    return [port.path for port in build.program.inputs if port.role is Role.HYPER]


def _some(paths: Sequence[str]) -> list[str]:
    more = [f"and {len(paths) - SHOWN_PATHS} more"] if len(paths) > SHOWN_PATHS else []
    return [*paths[:SHOWN_PATHS], *more]


def _advice(build: Build, builds: Sequence[Build]) -> list[str]:
    """What to write against a build, or which one before it says so."""
    advice = build.reason.advice
    first = next(item for item in builds if item.reason.advice == advice)
    return [advice if first is build else f"that of build {first.number}"] if advice else []


def _passes(stages: Sequence[Stage]) -> list[str]:
    """What each pass made of the program, in their order, and which did nothing or did not run."""
    lines, idle = [], []
    for before, after in pairwise(stages):
        if after.program is before.program:
            idle.append(after.name)
        else:
            lines.append(f"{after.name}: {_num_ops(before.program)} ops become {_num_ops(after.program)}")
    off = [name for name in PASS_NAMES if name not in [stage.name for stage in stages]]
    for title, names in (("nothing to do", idle), ("off", off)):
        lines += [f"{title}: {', '.join(names)}"] if names else []
    return lines


def _num_ops(program: Program) -> int:
    return sum(1 for _ in program.ops())


def _grouped(texts: Sequence[str]) -> list[str]:
    """Guards of the form `path.attribute = value`, those that many modules share on one line, and those of one owner."""
    sharing: dict[str, list[str]] = {}
    for text in [shortened(text, _LONGEST_GUARD) for text in texts]:
        owner = text.partition(" = ")[0].rpartition(".")[0]
        shared = text.removeprefix(f"{owner}.") if owner and " = " in text else text
        sharing.setdefault(shared, []).append(owner)
    lines = []
    for shared, owners in sharing.items():
        if len(owners) > SHOWN_MODULES:
            lines.append(f"{shared} in {len(owners)} modules: {', '.join(owners[:SHOWN_MODULES])}, ...")
        else:
            lines += [f"{owner}.{shared}" if " = " in shared and owner else shared for owner in owners]
    return _by_owner(lines)


def _by_owner(lines: Sequence[str]) -> list[str]:
    """The same with many guards on one module, or on entries of one dict, such as the options of an optimizer, on one line."""
    entries: dict[str, list[tuple[str, str]]] = {}
    for line in lines:
        found = _ENTRY.match(line)
        # those of the graph or of a scaler stay apart: users look for them
        if found and "." not in found["owner"] and "/" not in line:
            found = None
        owner, entry = (found["owner"], f"{found['name']}{found['value']}") if found else (line, line)
        entries.setdefault(owner, []).append((line, entry))
    return [
        line
        for owner, found in entries.items()
        for line in (
            [f"{owner}: {', '.join(entry for _, entry in found)}"]
            if len(found) > SHOWN_MODULES
            else [line for line, _ in found]
        )
    ]
