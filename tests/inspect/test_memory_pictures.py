"""plot(): what is drawn is what is held, as SVG and as PNG."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

import monograph as mg
from monograph.inspect.memory.chart import phase_of, widths
from monograph.inspect.memory.picture import Label, Picture, Rectangle
from tests.inspect.faults import Step, batch

SVG = "{http://www.w3.org/2000/svg}"
RED = b"\xff\x00\x00"


def test_the_picture_shows_what_is_held(tmp_path: Path) -> None:
    report = Step().memory(*batch())
    report.plot(tmp_path / "memory.svg")
    root = ElementTree.parse(tmp_path / "memory.svg").getroot()
    texts = [item.text or "" for item in root.iter(f"{SVG}text")]
    for kind in report.by_kind():
        assert kind in texts
    for word in ("forward", "backward", "update"):
        assert word in texts
    notes = [item.text or "" for item in root.iter(f"{SVG}title")]
    for point in report.timeline:
        assert any(note.startswith(f"{point.op}: ") for note in notes)
    assert "the peak" in notes
    heights = [
        float(item.attrib["height"]) for item in root.iter(f"{SVG}rect") if "%" not in item.attrib["height"]
    ]
    assert min(heights) >= 0


def test_a_step_of_many_ops_has_a_column_for_each_pixel(tmp_path: Path) -> None:
    def long(x):  # type: ignore[no-untyped-def]
        for _ in range(3000):
            x = x + 1
        return x

    report = mg.trace(long).memory(mg.spec((64,)))
    report.plot(tmp_path / "memory.svg")
    root = ElementTree.parse(tmp_path / "memory.svg").getroot()
    assert 300 < len(list(root.iter(f"{SVG}rect"))) < 700
    assert "the peak" in [item.text for item in root.iter(f"{SVG}title")]


def test_numbers_of_the_optimizer_take_little_of_the_width() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(6)))
    step = mg.train_graph(model, nn.MSELoss(), torch.optim.AdamW(model.parameters()))
    step.config.set_memory_budget("0.6x")
    report = step.memory(mg.spec((512, 64)), mg.spec((512, 64)))
    found = dict.fromkeys(("forward", "backward", "update", "computed again"), 0.0)
    for point, width in zip(report.timeline, widths(report.timeline, report.total_bytes), strict=True):
        found[phase_of(point)] += width
    assert found["update"] < 0.3 * sum(found.values())
    assert 0 < found["computed again"] < found["backward"]


def test_a_step_that_holds_nothing_is_drawn(tmp_path: Path) -> None:
    report = mg.trace(lambda x: x.t()).memory(mg.spec((0, 4)))
    assert report.total_bytes == 0
    report.plot(tmp_path / "memory.svg")
    report.plot(tmp_path / "memory.png")
    assert "0 bytes at the peak" in (tmp_path / "memory.svg").read_text()


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(mg.DefinitionError, match="SVG or PNG"):
        Step().memory(*batch()).plot(tmp_path / "memory.pdf")
    assert not list(tmp_path.iterdir())


def test_pixels_are_where_the_rectangles_are() -> None:
    picture = Picture(20, 10, [Rectangle(2, 1, 3, 4, "#ff0000"), Rectangle(18, 8, 9, 9, "#ff0000")])
    width, height, rows = decoded(picture.png())
    assert (width, height) == (40, 20)
    red = {(x, y) for y, row in enumerate(rows) for x in range(width) if row[3 * x : 3 * x + 3] == RED}
    inside = {(x, y) for x in range(4, 10) for y in range(2, 10)}
    assert red == inside | {(x, y) for x in range(36, 40) for y in range(16, 20)}


def test_letters_stand_where_their_labels_do() -> None:
    picture = Picture(60, 20, labels=[Label(30, 15, "gI", "#ff0000", at_end=True)])
    width, _, rows = decoded(picture.png())
    red = {(x, y) for y, row in enumerate(rows) for x in range(width) if row[3 * x : 3 * x + 3] == RED}
    assert red
    assert {x // 2 for x, _ in red} <= set(range(18, 30))
    assert {y // 2 for _, y in red} <= set(range(8, 16))  # the letter g reaches below the line


def decoded(png: bytes) -> tuple[int, int, list[bytes]]:
    """Width, height and the rows of a file without filters, checked as the format says."""
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    at, chunks = 8, {}
    while at < len(png):
        (length,) = struct.unpack(">I", png[at : at + 4])
        kind, content = png[at + 4 : at + 8], png[at + 8 : at + 8 + length]
        assert struct.unpack(">I", png[at + 8 + length : at + 12 + length])[0] == zlib.crc32(kind + content)
        chunks[kind] = content
        at += 12 + length
    width, height, depth, color = struct.unpack(">IIBB", chunks[b"IHDR"][:10])
    assert (depth, color) == (8, 2)
    pixels = zlib.decompress(chunks[b"IDAT"])
    step = 1 + 3 * width
    assert all(pixels[step * y] == 0 for y in range(height))
    return width, height, [pixels[step * y + 1 : step * (y + 1)] for y in range(height)]
