"""Tables, Markdown and the chart."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console

from benchmarks.chart import chart
from benchmarks.peers import all_peers
from benchmarks.stored import read_report, write_report
from benchmarks.tables import BEGIN, END, all_tables, summary, workload_table, write_markdown
from tests.benchmarks.reports import measured, report, result

REPORT = report(
    result(
        measured("eager", 4, 4, 4),
        measured("compile", error="BackendError: no [C++] compiler\nand more"),
        measured("jax", 2, 2, 2),
        measured("monograph-aten", 1, 1, 1),
    )
)


def test_the_summary_names_the_best_peers() -> None:
    table = summary(REPORT)
    assert table.rows == (
        ("mlp64", "1", "4.00 (eager)", "2.00 (jax)", "1.00"),
        ("geometric mean", "", "4.00", "2.00", ""),
    )


def test_a_row_for_each_competitor_also_for_the_excluded() -> None:
    table = workload_table(REPORT, REPORT.results[0])
    eager, compiled, _, ours = table.rows
    assert eager == (
        "eager",
        "foreach",
        "4",
        "2",
        "8",
        "25%",
        "3.00",
        "1.25",
        "-",
        "2.50",
        "300",
        "20",
        "4.00",
    )
    assert compiled[1].startswith("excluded: BackendError")
    assert set(compiled[2:]) == {"-"}
    assert ours[-1] == "1.00"
    seconds = dict(zip(table.columns, ours, strict=True))
    assert [seconds[f"{name} s"] for name in ("first step", "warm", "capture", "compile")] == [
        "3.00",
        "1.25",
        "0.75",
        "2.50",
    ]
    assert {len(row) for row in table.rows} == {len(table.columns)}


def test_every_table_can_be_printed() -> None:
    console = Console(width=200, record=True)
    for table in all_tables(REPORT):
        console.print(table.rich())
    text = console.export_text()
    assert "no [C++] compiler" in text  # not taken for markup
    assert "foreach 10" in text


def test_markdown_goes_into_its_place(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"# Title\n\n{BEGIN}\nold\n{END}\n\nThe end.\n")
    for _ in range(2):
        write_markdown(REPORT, page)
    text = page.read_text()
    assert text.startswith("# Title\n")
    assert text.endswith("\nThe end.\n")
    assert "old" not in text
    assert text.count("| mlp64 | 1 | 4.00 (eager) |") == 1
    for line in text.splitlines():
        assert not line.startswith("|") or line.endswith("|")  # no error broke its row


def test_a_report_comes_back_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    assert read_report(path) is None
    write_report(REPORT, path)
    assert read_report(path) == REPORT
    assert list(tmp_path.iterdir()) == [path]
    path.write_text('{"results": 3}')
    assert read_report(path) is None


def test_markdown_is_a_page_of_its_own(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    write_markdown(REPORT, page)
    assert page.read_text().startswith("- a processor, 2 of 4 cores")


def test_bars_are_as_long_as_the_speed() -> None:
    svg = "{http://www.w3.org/2000/svg}"
    root = ElementTree.fromstring(chart(REPORT))
    height = next(rect.get("height") for rect in root.iter(f"{svg}rect") if rect.get("x") == "120")
    bars = [
        rect for rect in root.iter(f"{svg}rect") if rect.get("x") == "120" and rect.get("height") == height
    ]
    lengths = [float(rect.get("width", "nan")) for rect in bars]
    assert [length / lengths[0] for length in lengths] == pytest.approx([1, 2, 4], rel=1e-3)
    words = [text.text for text in root.iter(f"{svg}text")]
    assert "compile: excluded" in words
    assert {"mlp64", "1.00", "2.00", "4.00"} <= set(words)


def test_there_is_a_color_and_room_for_each_competitor() -> None:
    svg = "{http://www.w3.org/2000/svg}"
    root = ElementTree.fromstring(chart(report(result(*(measured(name, 1.0) for name in all_peers())))))
    squares = [rect for rect in root.iter(f"{svg}rect") if rect.get("y") == "38"]
    assert len({rect.get("fill") for rect in squares}) == len(squares) == len(all_peers())
    last = [text for text in root.iter(f"{svg}text") if text.get("y") == "48.0"][-1]
    assert float(last.get("x", "nan")) + 6.5 * len(last.text or "") < float(root.get("width", "nan"))
