"""What stands in a cell of a notebook: lines as lines, and records in a few of them."""

from __future__ import annotations

import copy
import html
import pickle

import pytest
import torch
from torch import nn

import monograph as mg
from monograph.ir.text import Rows, Text


class Printer:
    """Of IPython: it asks the class of a value first."""

    def __init__(self) -> None:
        self.told = ""

    def text(self, text: str) -> None:
        self.told += text


def in_a_cell(value: object) -> str:
    printer = Printer()
    vars(next(kind for kind in type(value).__mro__ if "_repr_pretty_" in vars(kind)))["_repr_pretty_"](
        value, printer, False
    )
    return printer.told


@pytest.fixture(scope="module")
def step():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    graph = mg.train_graph(model, nn.CrossEntropyLoss(), torch.optim.AdamW(model.parameters()))
    graph(torch.randn(2, 4), torch.randint(3, (2,)))
    return graph


def test_builds_take_a_line_each_and_no_more_than_a_few(step):
    assert repr(step.builds) == f"({step.builds[0]!r},)"
    assert repr(step.builds[0]).startswith("<Build 0 on aten, ")
    assert repr(step.builds[0]).endswith(" ops: first call>")

    class Sum(mg.Graph):
        def build(self, x):
            return x.sum()

    graph = Sum()
    graph.config.dynamic(False)
    for size in range(1, 21):
        graph(torch.ones(size))
    assert isinstance(graph.builds, tuple)
    assert len(graph.builds) == 20
    lines = in_a_cell(graph.builds).splitlines()
    assert len(lines) < 12
    assert " ... 12 builds in between" in lines
    assert all(len(line) < 200 for line in lines)
    assert "<Build 0 " in lines[1]
    assert "<Build 19 " in lines[-2]


def test_all_that_a_user_is_given_is_a_line_prints_its_text_and_fits_into_a_cell(step, tmp_path):
    batch = torch.randn(2, 4), torch.randint(3, (2,))
    build = step.builds[0]
    nan = mg.trace(torch.sqrt).find_nonfinite(torch.tensor([-1.0]))
    walk = step.replay(*batch)
    watch = walk.watch("*")
    walk.run()
    mg.save(step, tmp_path / "artifact")
    artifact = mg.load(tmp_path / "artifact")
    things = {
        "<Build 0 on aten, ": build,
        "<Stage capture: ": build.stages[0],
        "<Program train_step: ": build.program,
        f"<VerifyReport of 2 lines: {step.name} on aten": step.verify(*batch),
        f"<NonfiniteReport: {step.name}: all results": step.find_nonfinite(*batch),
        "<NonfiniteReport of ": nan,
        "<Nonfinite of ": nan.found,
        "<Profile of ": step.profile(*batch),
        "<MemoryReport of ": step.memory(*batch),
        "<Text of ": step.show(),
        "<Text of 17 lines: ": Text("TrainGraph_0: 1 build(s)\n" * 17),
        f"<Replay of 4 lines: {step.name}: ": walk,
        "<Watch of ": watch,
        "<MemoryPlan: ": build.memory,
        "<33 rows: result: the same bits": step.verify(*batch).compared,
        "<107 rows: ": walk.ops,
        "<StoredSignature: train(": artifact.train,
    }
    for begins, thing in things.items():
        line, text, cell, page = repr(thing), str(thing), in_a_cell(thing), thing._repr_html_()
        assert line.startswith(begins)
        assert len(line) < 200
        assert "\n" not in line
        assert text
        assert cell == shortened_like_a_screen(text)
        assert html.unescape(page.partition(">")[2]) == f"{cell}</pre>"
        assert len(page) < 15_000
    for thing in (step.probes(), artifact):  # of few lines
        assert repr(thing) == str(thing)


def shortened_like_a_screen(text: str) -> str:
    lines = [line if len(line) <= 160 else line[:159] + "…" for line in text.splitlines()]
    more = [f"... {len(lines) - 60} more line{'s' * (len(lines) > 61)}: print() shows all"]
    return "\n".join(lines[:60] + more * (len(lines) > 60))


@pytest.mark.long
def test_a_large_graph_fits_into_a_cell():
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(300)))
    graph = mg.train_graph(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1))
    graph(torch.randn(2, 2), torch.randn(2, 2))
    things = graph, graph.builds, graph.show(), graph.explain(), graph.builds[0].program
    for thing in things:
        assert len(in_a_cell(thing)) < 10_000
        assert len(thing._repr_html_()) < 15_000
    assert len(str(graph)) > 40_000  # the tree that print() shows


def test_rows_are_a_tuple():
    rows = Rows([1, 2])
    assert rows == (1, 2)
    assert isinstance(rows, tuple)
    assert (repr(rows), str(rows)) == ("<2 rows: 1, ...>", "1\n2")
    assert repr(Rows([])) == "<Rows: empty>"
    assert pickle.loads(pickle.dumps(rows)) == copy.deepcopy(rows) == rows


def test_markup_in_a_name_is_text():
    assert "&lt;b&gt;" in Text("<b>")._repr_html_()


def test_other_records_of_a_build_are_short(step):
    build = step.builds[0]
    for record in (build.plan, build.captured):
        assert len(repr(record)) < 200
        assert "\n" not in repr(record)


def test_a_text_is_a_string(step):
    for text in (step.show(), step.explain(), step.diff("canonicalise"), step.builds[0].program.text):
        assert isinstance(text, str)
        assert type(text.upper()) is str
    text = Text("a\nb")
    assert text == "a\nb"
    assert hash(text) == hash("a\nb")
    assert type(str(text)) is str
    assert type(text + "c") is str
    assert pickle.loads(pickle.dumps(text)) == copy.deepcopy(text) == text
    assert f"{text}" == "a\nb"
    assert repr(Text("")) == "<Text: empty>"
