"""The layers of ARCHITECTURE.md hold: imports go one way, at the top and absolutely; private torch stays in compat/."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

import monograph as mg
from monograph.settings import BACKENDS
from tests.support import ROOT

PACKAGE = ROOT / "monograph"

ARCHITECTURE = ROOT / "ARCHITECTURE.md"
LAYERS = ARCHITECTURE.read_text().split("```layers\n")[1].split("```")[0].splitlines()
RANK = {part: rank for rank, row in enumerate(LAYERS) for part in row.split(" | ")}
TOPS = {part.split("/")[0] for part in RANK}
WHOLE = ("cli", "flow", "integrations", "serving", "testing")
PUBLIC_RANK = RANK["graph"]  # parts after this row may use the public names: `import monograph`
USERS_OF_PUBLIC_NAMES = WHOLE

BENCHMARKS = PACKAGE.parent / "benchmarks"
NOT_IN_THE_WHEEL = {"benchmarks", "examples", "tests", "tools"}

GROUND_FLOOR = {"compat", "compat/distributed", "errors", "layout", "settings", "sizes", "user_code"}
PRIVATE_TORCH = "compat/"
# in the methods that only look at a graph or at its state, and for a second process: training does without
IMPORT_LATE = {"graph.py", "inspected.py", "internals/upgrades.py"}
KNOW_BACKENDS = ("backends/", "settings.py")

# Names of our own that torch's classes have too, and the files that ask others than `self` for them, or set them in a
# `__dict__`. No row is there for speed.
SAME_NAME = {
    "_code": ("ir/program.py",),  # of the parts of a Program
}
ASKING_BY_NAME = ("getattr", "setattr", "hasattr", "delattr")


@dataclass(frozen=True)
class OwnImport:
    """An import of our own code: the line, the full name of what is imported, and whether a function holds it."""

    line: int
    target: str
    in_function: bool


def breaches(sources: Mapping[str, str]) -> list[str]:
    """What breaks the rules in files given as path in the package -> text, one sentence for each."""
    trees = {path: ast.parse(text) for path, text in sources.items()}
    own = frozenset(name for tree in trees.values() for name in own_attributes(tree))
    found: list[str] = []
    for path, tree in trees.items():
        if path == "__init__.py":
            found += front_breaches(path, tree)
        else:
            found += import_breaches(path, tree)
        found += relative_breaches(path, tree)
        if not path.startswith(KNOW_BACKENDS):
            found += backend_breaches(path, tree)
        if not path.startswith(PRIVATE_TORCH):
            found += private_torch_breaches(path, tree)
            found += private_instance_breaches(path, tree, own)
    return found + cycle_breaches(trees)


def import_breaches(path: str, tree: ast.Module) -> list[str]:
    part = part_of_file(path)
    if part not in RANK:
        return [f"{path}:1: {part} is not in LAYERS"]
    found = []
    for item in own_imports(tree):
        target = part_of(item.target)
        if item.in_function and path not in IMPORT_LATE:
            found.append(f"{path}:{item.line}: {item.target} is imported inside a function")
        if not may_import(part, target):
            found.append(f"{path}:{item.line}: {part} may not import {target}")
    return found


def may_import(part: str, target: str) -> bool:
    if target == "monograph":
        return part in USERS_OF_PUBLIC_NAMES
    return target in RANK and (RANK[target] < RANK[part] or target == part)


def front_breaches(path: str, tree: ast.Module) -> list[str]:
    """The package's own file holds the public names and nothing else."""
    return [
        f"{path}:{node.lineno}: only imports, __all__, __version__ and a docstring belong here"
        for node in tree.body
        if not (
            isinstance(node, ast.Import | ast.ImportFrom)
            or is_docstring(node)
            or is_public_constant(node)
            or is_late_import(node)
        )
    ]


def is_docstring(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def is_public_constant(node: ast.stmt) -> bool:
    return isinstance(node, ast.Assign) and all(
        isinstance(target, ast.Name) and target.id in ("__all__", "__version__") for target in node.targets
    )


def is_late_import(node: ast.stmt) -> bool:
    """What is imported when it is asked for: told to type checkers, and found by `__getattr__`; and the block of the rest."""
    if isinstance(node, ast.With):
        return all(isinstance(inner, ast.ImportFrom) for inner in node.body)
    if isinstance(node, ast.If):
        only_imports = all(isinstance(inner, ast.Import | ast.ImportFrom) for inner in node.body)
        return only_imports and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    return (isinstance(node, ast.FunctionDef) and node.name == "__getattr__") or (
        isinstance(node, ast.Expr) and ast.unparse(node) == "find_renamed_modules()"
    )


def relative_breaches(path: str, tree: ast.Module) -> list[str]:
    return [
        f"{path}:{node.lineno}: imports are absolute"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.level
    ]


def backend_breaches(path: str, tree: ast.Module) -> list[str]:
    """Decisions by the name of a backend; `aten` as a namespace of torch's operators is something else, and so is an "auto" elsewhere."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
        elif isinstance(node, ast.Match):
            sides = [node.subject, *(part for case in node.cases for part in ast.walk(case.pattern))]
        else:
            continue
        names = {part.value for side in sides for part in ast.walk(side) if isinstance(part, ast.Constant)}
        if names.intersection(BACKENDS) and not ast.unparse(sides[0]).endswith(
            ("namespace", "space", "auto_backward")
        ):
            found.append(f"{path}:{node.lineno}: only backends/ and settings.py know the backends by name")
    return found


def private_torch_breaches(path: str, tree: ast.Module) -> list[str]:
    """Names of torch that begin with an underscore, as modules, as attributes or through an alias."""
    found = []
    aliases: dict[str, str] = {}
    for node in ast.walk(tree):
        for imported, bound, name in torch_imports(node):
            aliases[bound] = name
            if is_private(imported):
                found.append((node.lineno, imported))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            base, name = dotted(node.value, aliases), dotted(node, aliases)
            if base and name and is_private(name) and not is_private(base):
                found.append((node.lineno, name))
    return [f"{path}:{line}: {name} is private to torch, use it through compat/" for line, name in found]


def private_instance_breaches(path: str, tree: ast.Module, own: Set[str]) -> list[str]:
    """Private attributes of torch's objects: `x._buffers`, `getattr(x, "_schema")` and `vars(x)["_modules"]`."""
    aliases = {bound: name for node in ast.walk(tree) for bound, name in torch_names(node)}
    return [
        f"{path}:{node.lineno}: {name} is private to torch's objects, use it through compat/"
        for node in ast.walk(tree)
        for owner, name in asked_attributes(node)
        if name in PRIVATE_ATTRIBUTES
        and not dotted(owner, aliases)  # of a module or a namespace of ops
        and not (isinstance(owner, ast.Name) and owner.id in ("self", "cls") and name in own)
        and path not in SAME_NAME.get(name, ())
    ]


def asked_attributes(node: ast.AST) -> Iterator[tuple[ast.expr, str]]:
    """What a piece of code asks for an attribute, and its name."""
    match node:
        case ast.Attribute(value=owner, attr=name):
            yield owner, name
        case ast.Call(func=ast.Name(id=asking), args=[owner, ast.Constant(value=str(name)), *_]):
            if asking in ASKING_BY_NAME:
                yield owner, name
        case (
            ast.Subscript(value=table, slice=ast.Constant(value=str(name)))
            | ast.Compare(left=ast.Constant(value=str(name)), comparators=[table])
            | ast.Call(func=ast.Attribute(value=table, attr="get"), args=[ast.Constant(value=str(name)), *_])
        ):
            match table:
                case ast.Attribute(value=owner, attr="__dict__"):
                    yield owner, name
                case ast.Call(func=ast.Name(id="vars"), args=[owner]):
                    yield owner, name


def torch_names(node: ast.AST) -> Iterator[tuple[str, str]]:
    """The names that stand for something of torch: imported ones, and `aten = torch.ops.aten`."""
    for _, bound, name in torch_imports(node):
        yield bound, name
    match node:
        case ast.Assign(targets=[ast.Name(id=bound)], value=value) if ast.unparse(value).startswith(
            "torch.ops"
        ):
            yield bound, ast.unparse(value)


def own_attributes(tree: ast.Module) -> Iterator[str]:
    """The attributes that classes of ours define: methods, fields, and what `self` is given."""
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef(body=body):
                for item in body:
                    match item:
                        case ast.FunctionDef(name=name) | ast.AnnAssign(target=ast.Name(id=name)):
                            yield name
                        case ast.Assign(targets=targets):
                            yield from (target.id for target in targets if isinstance(target, ast.Name))
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                yield name


def private_attributes() -> frozenset[str]:
    """Those of torch's objects that a step may meet, as their classes and the objects themselves give them."""
    weight, layer, contexts = nn.Parameter(torch.ones(1)), nn.LSTM(1, 1), []

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            contexts.append(ctx)
            return 2 * x

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return 2 * gradient

    result = Doubled.apply(weight)
    optimizer = torch.optim.AdamW([weight])
    traced = fx.symbolic_trace(nn.Linear(1, 1))
    schedules = torch.optim.lr_scheduler
    objects = (
        weight,
        weight.untyped_storage(),
        *contexts,
        result.grad_fn,
        weight.register_hook(print),
        layer,
        nn.BatchNorm1d(1),
        nn.LazyLinear(1),
        nn.ParameterList([weight]),
        layer.state_dict(),
        optimizer,
        schedules.LambdaLR(optimizer, lambda _: 1.0),
        schedules.ReduceLROnPlateau(optimizer),
        schedules.CyclicLR(optimizer, 0.1, 0.2, cycle_momentum=False),
        schedules.SequentialLR(optimizer, [schedules.ConstantLR(optimizer)] * 2, [1]),
        optimizer.step,  # which schedulers have wrapped
        torch.amp.GradScaler("cpu"),
        torch.Generator(),
        traced,
        traced.graph,
        next(iter(traced.graph.nodes)),
        torch.ops.aten.add,
        torch.ops.aten.add.Tensor,
        torch.ops.higher_order.cond,
        torch.autocast("cpu"),
    )
    names = (name for item in objects for name in (*dir(type(item)), *getattr(item, "__dict__", ())))
    return frozenset(name for name in names if name.startswith("_") and not name.endswith("__"))


PRIVATE_ATTRIBUTES = private_attributes()


def torch_imports(node: ast.AST) -> Iterator[tuple[str, str, str]]:
    """(what is imported, the name it is bound to, what that name means) for each name of torch."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            if alias.name.split(".")[0] == "torch":
                yield alias.name, alias.asname or "torch", alias.name if alias.asname else "torch"
    elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
        for alias in node.names:
            name = f"{node.module}.{alias.name}"
            yield name, alias.asname or alias.name, name


def dotted(node: ast.expr, aliases: Mapping[str, str]) -> str | None:
    """The full name of a chain of attributes that begins at an imported name of torch."""
    if isinstance(node, ast.Name):
        return aliases.get(node.id)
    if isinstance(node, ast.Attribute) and (base := dotted(node.value, aliases)):
        return f"{base}.{node.attr}"
    return None


def is_private(name: str) -> bool:
    """An underscore begins a part of the name; names of operators and dunders are public."""
    if name.startswith("torch.ops."):
        return False
    return any(
        part.startswith("_") and not part.startswith("_foreach_") and not part.endswith("__")
        for part in name.split(".")
    )


def cycle_breaches(trees: Mapping[str, ast.Module]) -> list[str]:
    """Cycles among the files of a part; between parts the rows leave no room for one."""
    files = {module_name(path): tree for path, tree in trees.items()}
    graph: dict[str, set[str]] = {}
    for name, tree in files.items():
        targets = {nearest_file(item.target, files) for item in own_imports(tree)}
        graph[name] = {target for target in targets if target and part_of(target) == part_of(name)}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return [f"import cycle: {' -> '.join(reversed(error.args[1]))}"]
    return []


def nearest_file(target: str, files: Mapping[str, ast.Module]) -> str | None:
    """The module that an imported name lies in: the name itself or what holds it."""
    while target and target not in files:
        target = target.rpartition(".")[0]
    return target or None


def own_imports(tree: ast.AST, *, in_function: bool = False) -> Iterator[OwnImport]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            names = []
            inside = in_function or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            yield from own_imports(node, in_function=inside)
        for name in names:
            if name.split(".")[0] == "monograph":
                yield OwnImport(node.lineno, name, in_function)


def module_name(path: str) -> str:
    """ir/a.py -> monograph.ir.a, ir/__init__.py -> monograph.ir"""
    return "monograph." + path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def part_of_file(path: str) -> str:
    """ir/call/tree.py -> ir/call, graph.py -> graph, flow/nn/graph.py -> flow"""
    folder, _, file = path.rpartition("/")
    top = path.split("/")[0].removesuffix(".py")
    if top in WHOLE or not folder:
        return top
    return f"{folder}/__main__" if file == "__main__.py" else folder


def part_of(name: str) -> str:
    """monograph.ir.call.tree -> ir/call; the package itself or one of its public names -> monograph"""
    parts = name.split(".")[1:]
    if not parts or (len(parts) == 1 and parts[0] not in TOPS):
        return "monograph"
    if parts[0] in WHOLE:
        return parts[0]
    for length in range(len(parts), 0, -1):
        if "/".join(parts[:length]) in RANK:
            return "/".join(parts[:length])
    return parts[0]


def test_imports_only_go_down() -> None:
    sources = {str(path.relative_to(PACKAGE).as_posix()): path.read_text() for path in PACKAGE.rglob("*.py")}
    assert breaches(sources) == []


def test_every_part_has_a_row_and_every_row_a_part() -> None:
    there = {part_of_file(path.relative_to(PACKAGE).as_posix()) for path in PACKAGE.rglob("*.py")}
    assert there - {"__init__"} == set(RANK)


def test_files_that_the_architecture_names_exist() -> None:
    named = set(re.findall(r"`((?:monograph|tests)/[\w/.]*)`", ARCHITECTURE.read_text()))
    assert len(named) > 40
    assert [name for name in sorted(named) if not (PACKAGE.parent / name).exists()] == []
    assert len(ARCHITECTURE.read_text().splitlines()) < 200


def test_folders_say_what_they_are() -> None:
    """The file of a folder of ours begins with a docstring; of the core, with what goes in, comes out, and is imported."""
    for file in PACKAGE.rglob("__init__.py"):
        said = ast.get_docstring(ast.parse(file.read_text())) or ""
        part = part_of_file(file.relative_to(PACKAGE).as_posix())
        assert len(said) > 20, file
        if part in RANK and part not in WHOLE and part not in ("passes", "backends", "native"):
            assert all(word in said for word in ("In:", "Out:", "mports")), file


def test_folders_say_what_they_import() -> None:
    """By name, but for the files at the bottom and `compat`, which everybody may use."""
    imported: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        part = part_of_file(path.relative_to(PACKAGE).as_posix())
        targets = {part_of(item.target) for item in own_imports(ast.parse(path.read_text()))}
        imported.setdefault(part, set()).update(targets - {part} - GROUND_FLOOR)
    for file in PACKAGE.rglob("__init__.py"):
        part = part_of_file(file.relative_to(PACKAGE).as_posix())
        _, _, named = (ast.get_docstring(ast.parse(file.read_text())) or "").partition("Imports ")
        if named and part not in WHOLE:
            assert set(re.findall(r"`([\w/]+)`", named)) == imported[part], file


def test_the_package_imports_nothing_that_its_wheel_lacks() -> None:
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {name.split(".")[0] for name in names} & NOT_IN_THE_WHEEL, f"{path}:{node.lineno}"


def test_the_inside_of_a_graph_is_reached_by_its_interface() -> None:
    """The private attributes of a Graph are named where it is defined and called, and nowhere else."""
    private = {"_monograph", "_monograph_kind"}
    own = {*vars(mg.Graph), *vars(mg.trace(abs))}
    assert {name for name in own if name.startswith("_") and not name.endswith("_")} == private
    where = {PACKAGE / f"{name}.py" for name in ("graph", "call", "internals/internals")}
    files = {file for folder in (PACKAGE, BENCHMARKS) for file in folder.rglob("*.py")} | {
        *(ROOT / "tests").rglob("*.py")
    }
    for file in files - where - {Path(__file__), ROOT / "tests/graph/test_graph_class.py"}:
        text = file.read_text()
        if not any(name in text for name in private):  # most files: to parse all takes seconds
            continue
        nodes = list(ast.walk(ast.parse(text)))
        named = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
        named |= {node.value for node in nodes if isinstance(node, ast.Constant) and type(node.value) is str}
        assert not named & private, file


def test_an_import_upwards_is_a_breach() -> None:
    assert breaches({"ir/a.py": "from monograph.passes import run"}) == [
        "ir/a.py:1: ir may not import passes"
    ]
    assert breaches({"ir/a.py": "from monograph import passes"}) == ["ir/a.py:1: ir may not import passes"]
    assert breaches({"errors.py": "\nimport monograph.ir.a"}) == ["errors.py:2: errors may not import ir"]


def test_neighbours_never_import_each_other() -> None:
    found = breaches({"plan/a.py": "from monograph.capture.trace import trace"})
    assert found == ["plan/a.py:1: plan may not import capture"]
    found = breaches({"runtime/a.py": "import monograph.capture.optimizers.rules"})
    assert found == ["runtime/a.py:1: runtime may not import capture/optimizers"]


def test_a_folder_in_a_folder_has_a_row_of_its_own() -> None:
    assert breaches({"ir/a.py": "from monograph.ir.call.tree import Tree"}) == []
    found = breaches({"ir/call/a.py": "from monograph.ir.port import Port"})
    assert found == ["ir/call/a.py:1: ir/call may not import ir"]
    assert breaches({"ir/other/a.py": ""}) == ["ir/other/a.py:1: ir/other is not in LAYERS"]


def test_downward_imports_and_imports_in_one_part_are_fine() -> None:
    sources = {
        "__init__.py": '"""Names."""\nfrom monograph.graph import Graph\n__all__ = ["Graph"]\n__version__ = "1"',
        "config.py": "from monograph.errors import E",
        "errors.py": "",
        "ir/a.py": "from monograph.errors import E",
        "ir/b.py": "from monograph.ir import a",
        "graph.py": "from monograph.block import Block",
        "block.py": "",
        "cli/demo.py": "import monograph as mg\nfrom monograph import Graph",
        "cli/main.py": "from monograph.cli import demo",
    }
    assert breaches(sources) == []


def test_the_public_names_are_not_used_inside() -> None:
    assert breaches({"ir/a.py": "import monograph"}) == ["ir/a.py:1: ir may not import monograph"]
    assert breaches({"graph.py": "from monograph import Graph"}) == [
        "graph.py:1: graph may not import monograph"
    ]


def test_a_cycle_is_a_breach() -> None:
    sources = {"ir/a.py": "from monograph.ir import b", "ir/b.py": "from monograph.ir.a import f"}
    (found,) = breaches(sources)
    assert found.startswith("import cycle: ")
    assert "monograph.ir.a -> monograph.ir.b" in found
    sources = {"flow/a.py": "from monograph.flow.nn.b import B", "flow/nn/b.py": "import monograph.flow.a"}
    (found,) = breaches(sources)
    assert "monograph.flow.a -> monograph.flow.nn.b" in found


def test_own_imports_stand_at_the_top_and_are_absolute() -> None:
    found = breaches({"ir/a.py": "def f():\n    from monograph.errors import E"})
    assert found == ["ir/a.py:2: monograph.errors.E is imported inside a function"]
    assert breaches({"ir/a.py": "def f():\n    import numpy"}) == []
    assert breaches({"ir/a.py": "from . import b"}) == ["ir/a.py:1: imports are absolute"]
    assert breaches({"__init__.py": "from .graph import Graph"}) == ["__init__.py:1: imports are absolute"]


def test_a_part_without_a_place_is_a_breach() -> None:
    assert breaches({"extra.py": ""}) == ["extra.py:1: extra is not in LAYERS"]
    assert breaches({"ir/a.py": "import monograph.extra.b"}) == ["ir/a.py:1: ir may not import extra"]


def test_the_package_file_holds_only_names() -> None:
    found = breaches({"__init__.py": "x = 1\ndef f(): ..."})
    assert [line.split(": ")[0] for line in found] == ["__init__.py:1", "__init__.py:2"]


def test_private_torch_is_a_breach_outside_its_file() -> None:
    uses = (
        "import torch\ntorch._C",
        "import torch\nx = 1 + torch.utils._pytree.tree_map(f, y)._x",
        "import torch._dynamo",
        "import torch._dynamo as dynamo",
        "from torch._subclasses import FakeTensorMode",
        "from torch import _dynamo",
        "from torch.fx import graph\ngraph._x",
        "import torch.utils as u\nu._pytree",
        "def f():\n    from torch import _C",
    )
    for use in uses:
        (found,) = breaches({"ir/a.py": use})
        assert found.endswith("is private to torch, use it through compat/")
        assert breaches({"compat/ops.py": use}) == []


def test_decisions_by_the_name_of_a_backend_are_breaches_outside_of_their_files() -> None:
    uses = (
        'settings.backend != "aten"',
        '"inductor" == build.backend',
        'backend in ("aten", "inductor")',
        'match backend:\n    case "aten" | "eager":\n        pass',
    )
    for use in uses:
        assert breaches({"ir/a.py": use}) == [
            "ir/a.py:1: only backends/ and settings.py know the backends by name"
        ]
        assert breaches({"backends/a.py": use}) == breaches({"settings.py": use}) == []
    for use in ('op.namespace == "aten"', 'settings = replace(settings, backend="inductor")'):
        assert breaches({"ir/a.py": use}) == []


def test_public_torch_is_fine() -> None:
    uses = ("torch.ops.aten._to_copy.default", "torch._foreach_add_(x, y)", "torch.__version__", "x._private")
    for use in uses:
        assert breaches({"ir/a.py": f"import torch\n{use}"}) == []


def test_private_attributes_of_torchs_objects_are_breaches_outside_of_compat() -> None:
    uses = (
        "module._buffers",
        "x.grad._version += 1",
        "scheduler._last_lr = []",
        "node.target._schema.name",
        "getattr(op, '_opname', '')",
        "vars(module)['_modules']",
        "'_initialize_hook' in module.__dict__",
        "vars(module).get('_parameters')",
        "class A:\n    def f(self):\n        return self._modules",
    )
    for use in uses:
        (found,) = breaches({"ir/a.py": use})
        assert found.endswith("is private to torch's objects, use it through compat/")
        assert breaches({"compat/ops.py": use}) == []


def test_our_own_attributes_may_have_the_names_of_torchs() -> None:
    uses = (
        "class A:\n    def __init__(self):\n        self._modules = {}\n    def f(self):\n        return self._modules",
        "import torch\naten = torch.ops.aten\naten._to_copy",
        "import torch\ntorch.ops.aten._unique(x)",
        "seen['_parameters']",
    )
    for use in uses:
        assert breaches({"ir/a.py": use}) == []
    assert breaches({"ir/program.py": "part._code"}) == []


def test_no_row_for_a_name_that_nobody_uses() -> None:
    for name, files in SAME_NAME.items():
        for file in files:
            assert re.search(rf"\b{name}\b", (PACKAGE / file).read_text()), (name, file)
            assert name in PRIVATE_ATTRIBUTES
