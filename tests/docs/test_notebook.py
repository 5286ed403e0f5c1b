"""The notebook of docs/ runs, shows what it says, and is a page of the site."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support import ROOT
from tests.support.pages import shape_of
from tests.support.warm import run_script

NOTEBOOK = ROOT / "docs" / "notebook.ipynb"
RUN = f"""
import json, runpy
tool = runpy.run_path({str(ROOT / "tools" / "notebook.py")!r})
with open({str(NOTEBOOK)!r}) as file:
    done = tool["executed"](json.load(file))
with open("done.json", "w") as file:
    json.dump(done, file)
"""


def texts(notebook: Mapping[str, Any]) -> Sequence[Sequence[str]]:
    """What each cell printed and gave, without numbers, which are those of a machine."""
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return [
        [
            shape_of("".join(text))
            for output in cell["outputs"]
            for text in (output["data"].values() if "data" in output else [output["text"]])
        ]
        for cell in cells
    ]


def test_the_notebook_shows_what_its_cells_give(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    (tmp_path / "run.py").write_text(RUN)
    done = run_script(["run.py"], cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    stored = json.loads(NOTEBOOK.read_text())
    assert texts(json.loads((tmp_path / "done.json").read_text())) == texts(stored)
    assert any(
        "text/html" in output.get("data", {})
        for cell in stored["cells"]
        for output in cell.get("outputs", ())
    )
    assert len(NOTEBOOK.read_text()) < 40_000


def test_it_is_a_page_of_the_site() -> None:
    pytest.importorskip("mkdocs")
    from tools.site_pages import links_on_site, notebook_page

    page = notebook_page(NOTEBOOK.read_text())
    assert page.startswith("# Monograph in a notebook")
    assert page.count("```python") == len(texts(json.loads(NOTEBOOK.read_text())))
    assert "as promised\n  23 of 23 results" in page
    assert links_on_site("[a notebook](notebook.ipynb)", "index.md") == "[a notebook](notebook.md)"
    assert links_on_site("[Debugging](debugging.md)", "notebook.md") == "[Debugging](debugging.md)"
