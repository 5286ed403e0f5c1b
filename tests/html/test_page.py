"""The page of to_html() in a browser without a window: it opens, filters, unfolds, and is quick with 5,000 ops."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import monograph as mg
from tests.inspect.faults import Step, batch, line_of

sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright: make test-html installs it")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt install chromium")
SECONDS_TO_OPEN = 2.0


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A page that fails the test if it asks for anything from the network or logs an error."""
    context = browser.new_context(viewport={"width": 1400, "height": 900})
    found = context.new_page()
    problems: list[str] = []
    found.on("pageerror", lambda error: problems.append(str(error)))
    found.on(
        "request",
        lambda request: problems.append(request.url) if not request.url.startswith("file:") else None,
    )
    yield found
    context.close()
    assert problems == []


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    step = Step()
    step(*batch())
    path = tmp_path_factory.mktemp("html") / "step.html"
    step.to_html(path, profile=step.profile(*batch()))
    return path


@pytest.mark.parametrize("width", [390, 1280])
def test_it_opens_on_a_summary(width: int, page: Any, small: Path) -> None:
    page.set_viewport_size({"width": width, "height": 800})
    page.goto(small.as_uri())
    assert page.is_visible("#summary")
    assert not page.is_visible("#rows")
    text = page.text_content("#summary")
    for words in (
        "parameters",
        "FLOPs",
        "Time by module",
        "peak: ",
        "optimizer state",
        "model.first",
        "(Gate)",
    ):
        assert words in text
    shares = [float(found) for found in re.findall(r"ms, ([\d.]+) %", text)]
    assert sum(shares) == pytest.approx(100, abs=2)
    assert all(phase in page.text_content("#legend") for phase in ("forward", "backward", "update"))
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.click("#summary .modules td:first-child >> text=first (Gate)")
    assert page.is_visible("#rows")
    assert all("model.first" in row.get_attribute("title") for row in page.locator(".row").all())
    page.click("#view-summary")
    assert page.is_visible("#summary")


def test_without_a_profile_the_summary_says_how(page: Any, tmp_path: Path) -> None:
    step = mg.trace(lambda x: x * 2)
    step(torch.ones(2))
    step.to_html(tmp_path / "step.html")
    page.goto((tmp_path / "step.html").as_uri())
    assert "to_html(path, profile=" in page.text_content("#summary")


def test_it_filters_and_shows_the_source(page: Any, small: Path) -> None:
    page.goto(small.as_uri())
    everything = int(page.text_content("#shown").split()[2])
    page.fill("#search", "aten.tanh.default model.second")
    assert page.text_content("#shown") == f"1 of {everything} ops"
    page.click(".row")
    here = page.text_content("#panel-source .here")
    assert here.startswith(str(line_of("gate")))
    assert "torch.tanh" in here
    assert "model.second" in page.text_content("#panel-source dl")


def test_modules_unfold_and_choose(page: Any, small: Path) -> None:
    page.goto(small.as_uri())
    page.click("#view-ops")
    inner = page.locator('#tree .name[data-path="model.first.fc"]')
    assert not inner.is_visible()
    page.click('#tree button[aria-label="expand first"]')
    assert inner.is_visible()
    inner.click()
    rows = page.locator(".row").all_text_contents()
    assert rows
    assert any("mm" in row for row in rows)  # the product of the layer
    assert all("model_second" not in row for row in rows)


def test_memory_profile_passes_and_explain(page: Any, small: Path) -> None:
    page.goto(small.as_uri())
    page.click("#view-ops")
    page.click("#tab-memory")
    phases = page.locator("#panel-memory svg text.phase").all_text_contents()
    assert "forward" in phases
    assert "update" in phases
    assert page.locator("#panel-memory svg text.module").all_text_contents()
    box = page.locator("#panel-memory svg").bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    assert "KiB" in page.text_content("#panel-memory .told")
    assert "parameters" in page.text_content("#panel-memory table")
    page.click("#tab-profile")
    assert page.locator("#panel-profile rect").count() > 5
    page.click("#panel-profile tr:nth-child(2)")
    assert page.is_visible("#panel-source .here")
    page.click("#tab-passes")
    page.click("#panel-passes summary >> nth=0")
    page.click("#tab-explain")
    assert "first call" in page.text_content("#panel-explain")


def test_five_thousand_ops_open_quickly(page: Any, tmp_path: Path) -> None:
    class Long(mg.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(116)))
            self.add_optimizer(torch.optim.Adam(self.model.parameters(), foreach=False))

        def build(self, x: Tensor) -> Tensor:
            loss = self.model(x).sum()
            loss.backward()
            return loss

    graph = Long()
    graph(torch.ones(2, 4))
    graph.to_html(tmp_path / "long.html")
    page.goto((tmp_path / "long.html").as_uri())
    count = int(page.text_content("#shown").split()[2])
    assert count >= 5000
    timing = page.evaluate("performance.getEntriesByType('navigation')[0].duration / 1000")
    assert timing < SECONDS_TO_OPEN
    seconds = page.evaluate(
        """() => { const start = performance.now(); const box = document.getElementById("search");
        box.value = "model.57"; box.oninput(); return (performance.now() - start) / 1000; }"""
    )
    assert seconds < SECONDS_TO_OPEN
    assert "model.57" in page.locator(".row").first.get_attribute("title")
