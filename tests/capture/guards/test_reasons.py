"""A reason names what differs: its two sides never read the same."""

from __future__ import annotations

import ast
from collections import OrderedDict, deque
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import monograph as mg
from monograph.capture.guards.reasons import changed
from monograph.internals.internals import internals_of
from tests.support import says_nothing

PACKAGE = Path(mg.__file__).parent


def test_what_says_nothing_is_known() -> None:
    assert says_nothing("w changed from a tensor of shape (35, 35) to a tensor of shape (35, 35)")
    assert says_nothing("graph.d changed from a dict to a dict")
    assert says_nothing("argument x is a tensor (2,) float32; the graph was built for a tensor (2,) float32")
    assert not says_nothing("graph.d['a'] changed from 1 to 2")


def named(value: int, name: str = "Thing", **attributes: Any) -> Any:
    made = type(name, (), {"__eq__": None, "__repr__": lambda _self: "thing"})()
    made.__dict__.update(attributes, value=value)
    return made


class Thing:
    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


class Slotted:
    __slots__ = ("a",)

    def __init__(self, a: int) -> None:
        self.a = a


def function(value: Any, default: int = 0) -> Callable[..., Any]:
    def inner(first: int = default) -> Any:
        return value, first

    return inner


w = torch.ones(35, 35)
complex_w = torch.ones(2, 2, dtype=torch.complex64)
looped: list[Any] = [1]
looped.append(looped)
other_loop: list[Any] = [1]
other_loop.append(other_loop)
Colour = Enum("Colour", "RED")
OtherColour = Enum("Colour", "RED")

PAIRS: dict[str, tuple[Any, Any, str]] = {
    "identity of a tensor": (w, w.clone(), "x is another tensor, of the same form"),
    "strides": (w, w.clone().t(), "strides of x changed from (35, 1) to (1, 35)"),
    "dtype": (w, w.double(), "dtype of x changed from torch.float32 to torch.float64"),
    "device": (w, w.to("meta"), "device of x changed from cpu to meta"),
    "layout": (w, w.to_sparse(), "layout of x changed from torch.strided to torch.sparse_coo"),
    "shape": (w, w[0], "shape of x changed from (35, 35) to (35,)"),
    "requires_grad": (w, w.clone().requires_grad_(), "requires_grad of x changed from False to True"),
    "a leaf": (w.clone().requires_grad_(), w.clone().requires_grad_() * 1, "is_leaf of x changed from True to False"),
    "class": (w, nn.Parameter(w, requires_grad=False), "the class of x changed from Tensor to Parameter"),
    "conjugated": (complex_w, complex_w.clone().conj(), "the bit for conjugation of x changed from False to True"),
    "negated": (
        w,
        torch._neg_view(w.clone()),
        "the bit for negation of x changed from False to True",
    ),
    "value in a dict": ({"a": 1}, {"a": 2}, "x['a'] changed from 1 to 2"),
    "new key": ({"a": 1}, {"a": 1, "b": 2}, "x has a new key 'b'"),
    "key gone": ({"a": 1, "b": 2}, {"a": 1}, "x has no key 'b' any more"),
    "order of keys": ({"a": 1, "b": 2}, {"b": 2, "a": 1}, "the order of x changed: 'b' is where 'a' was"),
    "ordered": (OrderedDict(a=1, b=2), OrderedDict(b=2, a=1), "the order of x changed: 'b' is where 'a' was"),
    "kind of a value": ({"a": 1}, {"a": True}, "x['a'] changed from 1 to True"),
    "zero": ([0.0], [-0.0], "x[0] changed from 0.0 to -0.0"),
    "same dict": ({"a": 1}, {"a": 1}, "x is another dict, of the same form"),
    "nested": ({"a": [1, {"b": w}]}, {"a": [1, {"b": w.t()}]}, "strides of x['a'][1]['b'] changed from (35, 1) to (1, 35)"),
    "length": ([1, 2], [1], "the length of x changed from 2 to 1"),
    "deque": (deque([1, 2]), deque([1, 3]), "x[1] changed from 2 to 3"),
    "long tuple": ((0,) * 300 + (1,), (0,) * 300 + (2,), "x[300] changed from 1 to 2"),
    "long bytes": (bytes(40), bytes(39) + b"a", "x[39] changed from 0 to 97"),
    "attribute": (Thing(depth=1), Thing(depth=2), "x.depth changed from 1 to 2"),
    "new attribute": (Thing(), Thing(depth=2), "x has a new attribute 'depth'"),
    "slots": (Slotted(1), Slotted(2), "x.a changed from 1 to 2"),
    "same object": (Thing(a=1), Thing(a=1), "x is another Thing, of the same form"),
    "class of one name": (named(1), named(2), "x is of another class of the same name, "),
    "classes": (type("A", (), {}), type("A", (), {}), "x is another class A, of the same form"),
    "default": (function(1, 2), function(1, 3), "x.__defaults__ changed from (2,) to (3,)"),
    "closure": (function(1), function(2), "x.value changed from 1 to 2"),
    "function": (function(1), function(1), "x is another function function.<locals>.inner, of the same form"),
    "methods": (Thing(a=1).__eq__, Thing(a=2).__eq__, ""),
    "bound": (SimpleNamespace(a=1), SimpleNamespace(a=2), "x.a changed from 1 to 2"),
    "loop": (looped, other_loop, "x is another list, of the same form"),
    "enum": (Colour.RED, OtherColour.RED, ""),
    "kind": ([1], (1,), ""),
    "set": ({1}, {2}, ""),
    "module": (nn.Linear(2, 2), nn.Linear(2, 3), ""),
    "optimizer": (torch.optim.SGD([w]), torch.optim.SGD([w], lr=0.5), ""),
}  # fmt: skip


@pytest.mark.every_case
@pytest.mark.parametrize(("before", "now", "expected"), PAIRS.values(), ids=PAIRS)
def test_the_difference_is_named(before: Any, now: Any, expected: str) -> None:
    reason = changed("x", before, now)
    assert not says_nothing(reason), reason
    assert expected in reason


def test_sentences_with_two_sides_are_made_in_one_file() -> None:
    """There the two sides are compared before they are told."""
    found = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                text = "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
                if "changed from {}" in text or "; the graph was built for {}" in text:
                    found.append(path.relative_to(PACKAGE).as_posix())
    assert set(found) == {"ir/call/differences.py"}


# --- through a graph -------------------------------------------------------------------------------------------------------


class Step(mg.Graph):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Linear(4, 4)
        self.settings = {"scale": 2.0, "inner": {"shift": [1]}}
        self.helper = Thing(depth=1)
        self.add_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9))

    def build(self, x: torch.Tensor, y: Any = None) -> torch.Tensor:
        out = self.model(x) * self.settings["scale"] + self.settings["inner"]["shift"][0] + self.helper.depth
        loss = (out if y is None else out * y).square().mean()
        loss.backward()
        return loss


def weight(step: Any) -> nn.Parameter:
    return step.model.weight


def hook(step: Any) -> None:
    weight(step).register_hook(lambda grad: grad)


def _fewer_rows(step: Any) -> None:
    for parameter in step.model.parameters():
        parameter.data = parameter.data[:3]
    for entries in internals_of(step).registry.optimizers[0].optimizer.state.values():
        entries["momentum_buffer"] = entries["momentum_buffer"][:3].clone()


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "dict": (lambda s: setattr(s, "settings", {**s.settings, "scale": 3.0}), "graph.settings['scale'] changed from"),
    "inner dict": (
        lambda s: setattr(s, "settings", {**s.settings, "inner": {"shift": [2]}}),
        "graph.settings['inner']['shift'][0] changed from 1 to 2",
    ),
    "object": (lambda s: setattr(s, "helper", Thing(depth=4)), "graph.helper.depth changed from 1 to 4"),
    "strides": (lambda s: setattr(weight(s), "data", weight(s).data.t()), "strides of model.weight changed"),
    "shape": (_fewer_rows, "changed from (4, 4) to (3, 4)"),
    "frozen": (lambda s: weight(s).requires_grad_(False), "requires_grad of model.weight changed"),
    "hook": (hook, "a hook of model.weight was registered"),
    "configuration": (lambda s: s.config.keep_gradients(), "the configuration changed from keep_gradients=False to keep_gradients=True"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "expected"), CHANGES.values(), ids=CHANGES)
def test_a_build_tells_what_changed(change: Callable[[Any], Any], expected: str) -> None:
    step, x = Step(), torch.ones(2, 4)
    step(x)
    change(step)
    step(x)
    assert len(step.builds) == 2
    reason = step.builds[1].reason
    assert not says_nothing(reason), reason
    assert expected in reason


def sliced() -> torch.Tensor:
    return torch.ones(4, 2).t()


CALLS: dict[str, tuple[tuple[Any, ...], tuple[Any, ...], str]] = {
    "strides": ((torch.ones(2, 4),), (sliced(),), "argument x has the strides (1, 2); the graph was built for (4, 1)"),
    "shape": ((torch.ones(2, 4),), (torch.ones(3, 4),), "argument x is a tensor (3, 4)"),
    "number": ((torch.ones(2, 4), 2), (torch.ones(2, 4), True), "argument y is True (bool); the graph was built for 2"),
    "given twice": ((torch.ones(4, 4), torch.ones(4, 4)), (w[:4, :4],) * 2, "argument x has the strides"),
    "one tensor": ((torch.ones(4, 4), torch.ones(4, 4)), (torch.ones(4, 4),) * 2, "arguments x and y are one tensor"),
    "two tensors": (
        (torch.ones(4, 4),) * 2,
        (torch.ones(4, 4), torch.ones(4, 4)),
        "arguments x and y are two tensors; the graph was built for one",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("first", "second", "expected"), CALLS.values(), ids=CALLS)
def test_a_call_tells_what_does_not_fit(first: Any, second: Any, expected: str) -> None:
    step = Step()
    step(*first)
    step(*second)
    assert len(step.builds) == 2
    reason = step.builds[1].reason
    assert not says_nothing(reason), reason
    assert expected in reason


def test_a_call_is_compared_with_the_build_that_is_nearest() -> None:
    graph = mg.trace(lambda x, y: (x * 2, y * 2))
    for sizes in ((2, 2), (5, 5), (5, 3)):
        graph(*map(torch.ones, sizes))
    assert "argument y is a tensor (3,)" in graph.builds[2].reason
