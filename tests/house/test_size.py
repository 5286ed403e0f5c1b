"""Files and folders stay as small as ARCHITECTURE.md says, no file is left behind, and `make size` prints its tables."""

from __future__ import annotations

import ast
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import ROOT

PACKAGE = ROOT / "monograph"
MODULES = sorted(PACKAGE.rglob("*.py"))
MOST_LINES = 350
MOST_ENTRIES = 16  # but at the top, which has a folder for each part of the package
NAMED_BY_USERS = {
    "monograph.integrations.lightning",
    "monograph.integrations.transformers",
    "monograph.testing.plugin",
}  # `pytest -p`


def test_size_counts_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "tools" / "size.py"), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "lines per part"
    assert lines[-1].endswith("fields of Settings")


def test_files_are_short() -> None:
    lines = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in MODULES}
    assert not {name: count for name, count in lines.items() if count > MOST_LINES}


def test_folders_have_few_entries() -> None:
    folders = {path.parent for path in MODULES} - {PACKAGE}
    entries = {
        str(folder.relative_to(ROOT)): [
            entry.name for entry in folder.iterdir() if entry.name != "__pycache__"
        ]
        for folder in folders
    }
    assert not {name: found for name, found in entries.items() if len(found) > MOST_ENTRIES}


def test_every_module_is_used() -> None:
    """A file that a merge brings back, or that lost its last user, is imported by nothing and named in no string."""
    trees = {path: ast.parse(path.read_text()) for path in MODULES}
    used = {name for tree in trees.values() for name in named(tree)} | NAMED_BY_USERS
    modules = {name_of(path) for path in MODULES if path.stem not in ("__init__", "__main__")}
    assert modules <= used, sorted(modules - used)


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def named(tree: ast.Module) -> Iterator[str]:
    """The modules that a file imports, or has the names of in strings."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from (node.value, f"monograph.{node.value}")
