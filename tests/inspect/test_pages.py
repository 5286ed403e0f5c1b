"""Pages and drawings as files; `tests/html` opens a page in a browser."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

import monograph as mg
from monograph.internals.internals import internals_of
from tests.inspect import faults
from tests.inspect.faults import Step, batch, line_of


def test_a_page_holds_the_step(tmp_path: Path) -> None:
    step = Step()
    with pytest.raises(mg.DefinitionError, match="no build"):
        step.to_html(tmp_path / "page.html")
    step(*batch())
    step.to_html(tmp_path / "page.html", profile=step.profile(*batch()))
    text = (tmp_path / "page.html").read_text()
    assert not re.search(r"(src|href)\s*=", text), "nothing comes from outside"
    data = json.loads(re.search(r'id="data">(.*?)</script>', text, re.S)[1])
    file = data["files"][[item["path"] for item in data["files"]].index(faults.__file__)]
    assert file["lines"][line_of("gate") - 1].endswith("# gate")
    assert len(data["profile"]["seconds"]) == len(data["nodes"])
    memory, report = data["memory"], step.memory(*batch())
    assert max(running for _, running, *_ in memory["points"]) == report.peak_bytes
    assert sum(count for _, count in memory["kinds"]) == report.total_bytes
    assert memory["held"] + report.peak_bytes == report.total_bytes
    with pytest.raises(mg.DefinitionError, match="HTML"):
        step.to_html(tmp_path / "page.txt")


def test_text_of_the_user_cannot_end_the_script(tmp_path: Path) -> None:
    step = Step()
    internals_of(step).registry.name = "</script><script>alert(1)</script>"
    step(*batch())
    step.to_html(tmp_path / "page.html")
    assert "<script>alert" not in (tmp_path / "page.html").read_text()


def test_drawings(tmp_path: Path) -> None:
    step = Step()
    step(*batch())
    step.draw(tmp_path / "first.svg", module="model.first")
    step.draw(tmp_path / "all.dot")
    svg = ElementTree.fromstring((tmp_path / "first.svg").read_text())
    texts = {item.text for item in svg.iter() if item.tag.endswith("text")}
    assert any(text and text.endswith(": tanh") for text in texts)
    assert "model.first.fc.weight" in texts
    dot = (tmp_path / "all.dot").read_text()
    assert dot.count(" -> ") > 200
    assert dot.startswith("digraph")
    with pytest.raises(mg.DefinitionError, match=r"model\.first"):
        step.draw(tmp_path / "none.svg", module="model.third")
    with pytest.raises(mg.DefinitionError, match="DOT or SVG"):
        step.draw(tmp_path / "all.png")


def test_notebooks_show_the_modules() -> None:
    step = Step()
    step(*batch())
    assert step._repr_html_() == step.summary()._repr_html_()
    assert "  first (Gate)" in step._repr_html_()
