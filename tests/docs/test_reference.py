"""The reference has every public name, and the site's own code does what it says."""

from __future__ import annotations

import importlib
import re
from types import ModuleType
from typing import Any

import pytest

import monograph as mg
from tests.support import ROOT

DIRECTIVE = re.compile(r"^::: (\S+)$", re.MULTILINE)
PAGES = sorted((ROOT / "docs" / "reference").glob("*.md"))


def found(name: str) -> Any:
    """The module, or the object of a module, of that name."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        place, _, last = name.rpartition(".")
        return getattr(found(place), last)


DOCUMENTED = [found(name) for page in PAGES for name in DIRECTIVE.findall(page.read_text())]
IN_MODULES = [value for item in DOCUMENTED if isinstance(item, ModuleType) for value in vars(item).values()]


def is_documented(item: object) -> bool:
    return any(item is one for one in [*DOCUMENTED, *IN_MODULES])


def test_the_reference_has_every_public_name() -> None:
    namespaces = {
        "testing",
        "distributed",
        "Origin",
    }  # their names are on pages; a record of where something is
    assert [
        name for name in mg.__all__ if name not in namespaces and not is_documented(getattr(mg, name))
    ] == []


def test_the_reference_has_every_method_of_a_graph() -> None:
    own = {name: value for kind in mg.Graph.__mro__[:-1] for name, value in vars(kind).items()}
    written_there = {
        name for name, value in own.items() if getattr(value, "__module__", "") == "monograph.graph"
    }
    others = {name: value for name, value in own.items() if not name.startswith("_") and callable(value)}
    assert [name for name in others.keys() - written_there if not is_documented(others[name])] == []


def test_examples_of_docstrings_become_blocks() -> None:
    griffe = pytest.importorskip("griffe")
    assert griffe
    from tools.site_docstrings import fenced

    assert (
        fenced("A line.\n\n>>> a = 1\n>>> a\n1\n\nMore.")
        == "A line.\n\n```pycon\n>>> a = 1\n>>> a\n1\n```\n\nMore."
    )


def test_links_are_right_on_the_site() -> None:
    pytest.importorskip("mkdocs")
    from tools.site_pages import links_on_site as links

    assert links("[all](../ARCHITECTURE.md#layers)", "index.md") == "[all](ARCHITECTURE.md#layers)"
    assert links("[`C`](../tests/cpp), [x](https://a.b/c)", "deployment.md") == "`C`, [x](https://a.b/c)"
    assert links("[`C`](../examples/cpp)", "deployment.md") == "[`C`](examples/cpp.md)"
    assert links("[it](../../examples/gan.py)", "integrations/a.md") == "[it](../examples/gan.py.md)"
    assert links("[limits](docs/limits.md)", "about.md") == "[limits](limits.md)"
    assert (
        links("[sizes](../varying-sizes.md#cost)", "decisions/0066.md") == "[sizes](../varying-sizes.md#cost)"
    )
    assert links("```\n[a](../README.md)\n```\n", "index.md") == "```\n[a](../README.md)\n```\n"


def test_the_site_shows_the_code_of_examples() -> None:
    pytest.importorskip("mkdocs")
    from tools.site_pages import code_page, example_pages

    pages = list(example_pages())
    assert {"examples/gan.py", "examples/oneflow", "examples/ported/graph/mnist.py"} <= set(pages)
    assert "class " in code_page("examples/gan.py")
    assert "## `train.cpp`" in code_page("examples/cpp")
    ported = code_page("examples/ported/graph/mnist.py")
    assert "\n-        optimizer.zero_grad()" in ported
    assert ported.count("```python\n") == 1
