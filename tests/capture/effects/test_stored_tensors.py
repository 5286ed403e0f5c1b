"""What hooks keep in dicts, objects and lists: each step leaves eager's tensors there."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import monograph as mg


class Places:
    """Whatever a hook may put tensors into."""

    def __init__(self) -> None:
        self.d: dict[Any, Any] = {}
        self.ordered: OrderedDict[str, Any] = OrderedDict()
        self.lists: defaultdict[str, list[Any]] = defaultdict(list)
        self.last: deque[Any] = deque(maxlen=2)
        self.o = SimpleNamespace()
        self.inner: dict[str, dict[str, Any]] = {"a": {}}
        self.plain: list[Any] = []

    def seen(self) -> Any:
        return _seen(vars(self))


def _seen(item: Any) -> Any:
    if isinstance(item, torch.Tensor):
        return item.tolist(), item.requires_grad, item.is_leaf
    if isinstance(item, SimpleNamespace):
        return _seen(vars(item))
    if isinstance(item, dict):
        return [(key, _seen(value)) for key, value in item.items()]
    return [_seen(entry) for entry in item] if isinstance(item, (list, tuple, deque)) else item


def in_place(p: Places, n: str, out: torch.Tensor) -> None:
    p.d[n] = made = out.detach().clone()
    made.add_(1)


def replaced(p: Places, n: str, out: torch.Tensor) -> None:
    p.d.pop("gone", None)
    p.d.clear()
    p.d[n] = out.detach()


def averaged(p: Places, n: str, out: torch.Tensor) -> None:
    p.d[n] = p.d[n] * 0.9 + out.detach() * 0.1 if n in p.d else out.detach()


def first_only(p: Places, n: str, out: torch.Tensor) -> None:
    if p.d.get(n) is None:
        p.d[n] = out.detach()


KEPT: dict[str, tuple[Callable[[Places, str, torch.Tensor], Any], int]] = {  # and the most builds in 5 steps
    "d[k] = t": (lambda p, n, out: p.d.__setitem__(n, out), 2),
    "update": (lambda p, n, out: p.d.update({n: out}), 2),
    "setdefault": (lambda p, n, out: p.d.setdefault(n, out.detach()), 2),
    "an attribute": (lambda p, n, out: setattr(p.o, n, out), 2),
    "a deque": (lambda p, n, out: p.last.append(out), 2),
    "an OrderedDict": (lambda p, n, out: p.ordered.__setitem__(n, out), 2),
    "detached": (lambda p, n, out: p.d.__setitem__(n, out.detach()), 2),
    "a dict in a dict": (lambda p, n, out: p.inner["a"].__setitem__(n, out.detach().clone()), 2),
    "a tuple": (lambda p, n, out: p.d.__setitem__(n, (out, out.detach() * 2, 3)), 2),
    "a new dict": (lambda p, n, out: setattr(p.o, "acts", {n: out.detach()}), 5),
    "the same list": (lambda p, n, out: p.plain.__setitem__(slice(None), [out.detach()]), 2),
    "changed in place": (in_place, 2),
    "cleared": (replaced, 2),
    "the first alone": (first_only, 2),
    "d[k].append": (lambda p, n, out: p.lists[n].append(out.detach()), 5),
    "setdefault().append": (lambda p, n, out: p.d.setdefault(n, []).append(out.detach()), 5),
    "insert": (lambda p, n, out: p.plain.insert(0, out.detach()), 5),
    "a list as a value": (lambda p, n, out: p.d.__setitem__(n, [out.detach()]), 5),
    "what it reads": (averaged, 5),
    "another key each time": (lambda p, n, out: p.d.__setitem__(len(p.d), out.detach()), 5),
}


def trained(keep: Any, *, graph: bool) -> tuple[list[Any], int]:
    torch.manual_seed(0)
    model, places = nn.Sequential(nn.Linear(3, 2), nn.Tanh()), Places()
    for name, module in model.named_children():
        module.register_forward_hook(lambda _m, _a, out, name=name: (keep(places, f"m{name}", out), None)[1])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = mg.train_graph(model, nn.MSELoss(), optimizer) if graph else None
    found = []
    for number in range(5):
        x, y = torch.full((2, 3), float(number)), torch.zeros(2, 2)
        if step is not None:
            step(x, y)
        else:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        found.append(places.seen())
    return found, len(step.builds) if step is not None else 0


@pytest.mark.one_case
@pytest.mark.parametrize("name", KEPT)
def test_each_step_leaves_the_tensors_of_eager_mode(name: str) -> None:
    keep, most = KEPT[name]
    expected, _ = trained(keep, graph=False)
    got, builds = trained(keep, graph=True)
    assert got == expected
    assert builds <= most


def test_no_backward_goes_through_what_was_kept() -> None:
    model, kept = nn.Linear(3, 2), {}
    model.register_forward_hook(lambda _m, _a, out: kept.__setitem__("out", out))
    step = mg.train_graph(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1))
    step(torch.ones(2, 3), torch.zeros(2, 2))
    with pytest.raises(mg.GraphBoundaryError, match="no autograd history"):
        kept["out"].sum().backward()


def test_an_argument_that_is_kept_is_the_argument() -> None:
    kept: dict[str, Any] = {}

    class Step(mg.Graph):
        def build(self, x: torch.Tensor) -> torch.Tensor:
            kept["x"] = x
            return x * 2

    step = Step()
    for _ in range(3):
        x = torch.rand(2)
        step(x)
        assert kept["x"].data_ptr() == x.data_ptr()
    assert len(step.builds) == 2


@pytest.mark.long
def test_compiled() -> None:
    model, kept = nn.Linear(3, 2), {}
    model.register_forward_hook(lambda _m, _a, out: kept.__setitem__("out", out.detach()))
    step = mg.train_graph(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1))
    step.config.backend("inductor")
    for number in range(3):
        x = torch.full((2, 3), float(number))
        expected = model(x).detach()
        step(x, torch.zeros(2, 2))
        torch.testing.assert_close(kept["out"], expected)
    assert step.backend == "inductor"


def test_a_failed_step_leaves_what_was_there() -> None:
    model, kept = nn.Linear(3, 2), {"out": 1}

    def keep(_m: Any, _a: Any, out: torch.Tensor) -> None:
        kept["out"] = out  # type: ignore[assignment]

    model.register_forward_hook(keep)
    step = mg.train_graph(model, lambda *_: 1 / 0, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ZeroDivisionError):
        step(torch.ones(2, 3), torch.zeros(2, 2))
    assert kept == {"out": 1}


@pytest.mark.one_case
@pytest.mark.parametrize("begin", ["nothing", "a tensor", "a tensor that the script replaces"])
def test_a_variable_that_a_hook_binds_anew(begin: str) -> None:
    """Momentum in a `nonlocal` variable: a build for the first step, and one for all others."""

    def trained(capture: bool) -> tuple[list[torch.Tensor], int]:
        torch.manual_seed(0)
        layer = nn.Linear(2, 2)
        smooth: Any = None if begin == "nothing" else torch.zeros(2, 2)

        def hook(gradient: torch.Tensor) -> torch.Tensor:
            nonlocal smooth
            smooth = gradient.clone() if smooth is None else smooth * 0.9 + gradient
            return smooth

        layer.weight.register_hook(hook)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        step = mg.train_graph(layer, nn.MSELoss(), optimizer)
        kept: list[torch.Tensor] = []
        for index in range(6):
            x, target = torch.full((1, 2), index + 1.0), torch.zeros(1, 2)
            if capture:
                step(x, target)
            else:
                optimizer.zero_grad()
                nn.MSELoss()(layer(x), target).backward()
                optimizer.step()
            kept.append(smooth)
            if index == 3 and begin == "a tensor that the script replaces":
                smooth = torch.ones(2, 2)
        return [*kept, *(p.detach() for p in layer.parameters())], len(step.builds)

    (expected, _), (got, builds) = trained(False), trained(True)
    assert all(map(torch.equal, expected, got))
    assert builds <= 3
