"""Each name of torch that the package spells is there in the torch that runs, or is known to be missing."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator

from tests.house.test_layers import PACKAGE

OURS = "torch.ops.monograph."  # defined by the package
# looked for before they are used
OPTIONAL = {
    "torch._C._aoti.AOTIModelContainerRunnerCuda",  # of a torch that is built for CUDA
    "torch._C._set_grad_layout_enforcement_enabled",  # since torch 2.13
}


def test_names_of_torch_are_there() -> None:
    missing = {name: place for name, place in _names_of_torch() if not _exists(name)}
    assert not missing.keys() - OPTIONAL, {name: missing[name] for name in missing.keys() - OPTIONAL}


def test_a_name_that_is_missing_is_seen() -> None:
    assert not _exists("torch._C._no_such_name")
    assert not _exists("torch._no_such_module")
    assert _exists("torch._subclasses.fake_tensor.FakeTensor")


def _names_of_torch() -> Iterator[tuple[str, str]]:
    """Whole chains of attributes that begin with `torch`, imported names, and modules that are imported by name."""
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text())
        inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and id(node) not in inner:
                names = [_chain(node)]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [f"{node.module}.{item.name}" for item in node.names]
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "._" in node.value:
                names = [node.value]  # of what `import_module` is given
            else:
                continue
            place = f"{path.relative_to(PACKAGE.parent)}:{node.lineno}"
            for name in names:
                if name.startswith("torch.") and all(map(str.isidentifier, name.split("."))):
                    yield name, place


def _chain(node: ast.expr) -> str:
    """`a.b.c` as a text; empty for what does not begin with a name."""
    if isinstance(node, ast.Attribute):
        before = _chain(node.value)
        return f"{before}.{node.attr}" if before else ""
    return node.id if isinstance(node, ast.Name) else ""


def _exists(name: str) -> bool:
    if name.startswith(OURS):
        return True
    found: object = importlib.import_module("torch")
    path = "torch"
    for part in name.split(".")[1:]:
        path = f"{path}.{part}"
        try:
            found = getattr(found, part)
        except AttributeError:
            try:
                found = importlib.import_module(path)
            except ImportError:
                return False
    return True
