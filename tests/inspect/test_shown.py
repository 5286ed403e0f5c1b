"""What stands in a cell of a notebook: lines as lines, and records in a few of them."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import monograph as mg
from monograph.ir.text import Text


class Printer:
    """Of IPython: it asks the class of a value first."""

    def __init__(self) -> None:
        self.told = ""

    def text(self, text: str) -> None:
        self.told += text


def in_a_cell(value: object) -> str:
    printer = Printer()
    pretty = next(
        (vars(kind)["_repr_pretty_"] for kind in type(value).__mro__ if "_repr_pretty_" in vars(kind)), None
    )
    if pretty is None:
        return repr(value)
    pretty(value, printer, False)
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


def test_records_of_a_build_are_short(step):
    build = step.builds[0]
    for record in (build, build.program, build.plan, build.captured, *build.stages):
        assert len(repr(record)) < 200
        assert "\n" not in repr(record)


def test_texts_are_not_quoted(step):
    for text in (step.show(), step.explain(), step.diff("canonicalise"), step.builds[0].program.text):
        assert "\n" in text
        assert in_a_cell(text) == repr(text) == str(text) == text
        assert isinstance(text, str)


def test_reports_show_themselves_as_they_print(step):
    batch = torch.randn(2, 4), torch.randint(3, (2,))
    for report in (step.verify(*batch), step.find_nonfinite(*batch), step.profile(*batch)):
        assert in_a_cell(report) == str(report)


def test_a_text_is_a_string():
    text = Text("a\nb")
    assert text == "a\nb"
    assert hash(text) == hash("a\nb")
    assert type(str(text)) is str
    assert type(text + "c") is str
    assert pickle.loads(pickle.dumps(text)) == copy.deepcopy(text) == text
    assert f"{text}" == "a\nb"
