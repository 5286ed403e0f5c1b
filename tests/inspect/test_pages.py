"""Pages and drawings as files; `tests/html` opens a page in a browser."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from itertools import combinations
from pathlib import Path

import pytest
import torch
from torch import nn

import monograph as mg
from monograph.inspect.pages.boxes import MOST, is_folded, panels
from monograph.inspect.pages.layout import Placed, placed
from monograph.internals.internals import internals_of
from monograph.ir.meta import compute_nodes, origin
from monograph.passes.inductor.inline_parts import inline_parts
from tests.inspect import faults
from tests.inspect.faults import Step, batch, line_of


def test_a_page_shows_the_build_that_its_profile_is_of(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 2))
    step = mg.train_graph(model, nn.CrossEntropyLoss(), torch.optim.AdamW(model.parameters()))
    step.config.dynamic(False)
    x, y = torch.randn(64, 1, 8, 8), torch.randint(2, (64,))
    step(x, y)
    step(x[:29], y[:29])
    step.to_html(tmp_path / "page.html", profile=step.profile(x, y))
    assert '"about":"build 0 ' in (tmp_path / "page.html").read_text()
    step.to_html(tmp_path / "page.html")
    assert '"about":"build 1 ' in (tmp_path / "page.html").read_text()
    other = Step()
    other(*batch())
    with pytest.raises(mg.DefinitionError, match="of no build"):
        other.to_html(tmp_path / "page.html", profile=step.profile(x, y))


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
    places = {(phase, module) for *_, phase, module in memory["points"]}
    assert {phase for phase, _ in places} == {"forward", "backward", "update"}
    assert ("forward", "model.first") in places  # the axis names phases and modules
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
    assert "tanh" in texts
    assert any(text and "weight" in text.partition("reads ")[2] for text in texts)
    assert {"forward, model.first", "backward, model.first"} <= texts
    assert texts.isdisjoint({"t", "view", "detach"})  # views are folded
    dot = (tmp_path / "all.dot").read_text()
    assert dot.startswith("digraph")
    assert dot.count("{") == dot.count("}")
    with pytest.raises(mg.DefinitionError, match=r"model\.first"):
        step.draw(tmp_path / "none.svg", module="model.third")
    with pytest.raises(mg.DefinitionError, match="DOT or SVG"):
        step.draw(tmp_path / "all.png")
    with pytest.raises(mg.DefinitionError, match="depth=-1"):
        step.draw(tmp_path / "all.svg", depth=-1)


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.MultiheadAttention(width, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(x)
        x = x + self.mix(hidden, hidden, hidden, need_weights=False)[0]
        return x + self.mlp(self.norm(x))  # the norm is called twice


@pytest.fixture(scope="module")
def attention() -> mg.Graph:
    model = nn.Sequential(*(Attention(8) for _ in range(3)))
    graph = mg.train_graph(model, nn.MSELoss(), torch.optim.AdamW(model.parameters()))
    graph.compile(mg.spec((2, 4, 8)), mg.spec((2, 4, 8)))
    return graph


@pytest.mark.parametrize("module", ["model.1", None])
@pytest.mark.parametrize("depth", [None, 0, 1, 9])
def test_boxes_do_not_overlap(attention: mg.Graph, module: str | None, depth: int | None) -> None:
    program = inline_parts(internals_of(attention).newest().stages[0].program)
    found = panels(program, module, depth)
    assert [panel.phase for panel in found][:2] == ["forward", "backward"]
    for panel in found:
        check_places(placed(panel.frame))
        count = sum(1 for _ in panel.frame.every())
        assert depth is not None or count <= 2 * MOST
    drawn = [box for panel in found for box in panel.frame.every()]
    ops = [node for node in compute_nodes(program.graph) if module is None or origin(node).is_in(module)]
    if depth == 9:  # each op that is no view is a box
        leaves = [box for box in drawn if not box.boxes and not box.name.startswith("outside/")]
        assert len(leaves) == sum(not is_folded(node) for node in ops)
    elif module is not None and depth is None:
        assert {"norm", "mix", "mlp"} <= {box.lines[0] for box in drawn}


def check_places(item: Placed) -> None:
    """What is in a frame is inside of it and apart, and arrows go down."""
    for one, other in combinations(item.inside, 2):
        assert (
            one.x + one.width <= other.x
            or other.x + other.width <= one.x
            or one.y + one.height <= other.y
            or other.y + other.height <= one.y
        )
    known = {inner.box.name: inner for inner in item.inside}
    for inner in item.inside:
        assert inner.x >= 0 <= inner.y
        assert inner.x + inner.width <= item.width
        assert inner.y + inner.height <= item.height
        check_places(inner)
    for arrow, _ in item.paths:
        assert known[arrow.start].y + known[arrow.start].height < known[arrow.end].y
        assert arrow.nbytes >= 0


def test_closed_modules_say_how_to_open_them(attention: mg.Graph, tmp_path: Path) -> None:
    attention.draw(tmp_path / "all.svg", depth=1)
    text = (tmp_path / "all.svg").read_text()
    assert "draw(path, module=&quot;model.0&quot;) shows its ops" in text
    assert "optimizer.0" in text
    widths = {float(found) for found in re.findall(r'stroke-width="([\d.]+)"', text)}
    assert max(widths) == 7.0  # of the arrow that carries most
    ElementTree.fromstring(text)


def test_notebooks_show_the_modules() -> None:
    step = Step()
    step(*batch())
    assert step._repr_html_() == step.summary()._repr_html_()
    assert "  first (Gate)" in step._repr_html_()
