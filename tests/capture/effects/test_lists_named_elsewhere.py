"""Lists that a step adds losses to, where the same code spells their name for something else, or reads them after all."""

from __future__ import annotations

import copy
import gc
import inspect
import operator
import pickle
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import monograph as mg
from tests.support import assert_same

X = torch.arange(8.0).reshape(4, 2)


class Meter:
    """Is no attribute of a graph: the step knows it as a global."""

    def __init__(self) -> None:
        self.losses: list[float] = []


METER = Meter()
HOLDER: dict[str, Any] = {}
TEXT, HALVES = "{0.losses}", ["los", "ses"]


def fill(side: Any) -> None:
    torch.manual_seed(0)
    side.model, side.losses, side.log, side.count = nn.Linear(2, 1), [], False, 0
    side.parts = {"losses": []}
    METER.losses = []
    HOLDER["side"] = side


class Plain:
    def __init__(self, build: Callable[..., Any]) -> None:
        fill(self)
        self.build, self.optimizer = build, torch.optim.SGD(self.model.parameters(), lr=0.1)  # type: ignore[attr-defined]

    def __call__(self, x: torch.Tensor) -> Any:
        self.optimizer.zero_grad()
        found = self.build(self, x)
        self.optimizer.step()
        return found


def graph_of(build: Callable[..., Any], *, trains: bool = True) -> Any:
    class Step(mg.Graph):
        def __init__(self) -> None:
            super().__init__()
            fill(self)
            if trains:
                self.add_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))  # type: ignore[attr-defined]

    Step.build = build  # type: ignore[method-assign]
    return Step()


def trail(step: Any) -> list[Any]:
    """What four steps give, and what is there in the end."""
    found = [step(X + number) for number in range(4)]
    return [*found, step.losses, step.parts, list(METER.losses), list(step.model.parameters())]


def loss_of(self: Any, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = self.model(x).square().mean()
    loss.backward()
    return loss


def a_key(self: Any, x: torch.Tensor) -> Any:
    loss = loss_of(self, x)
    self.losses.append(loss.item())
    return {"losses": loss}


def keys(self: Any, x: torch.Tensor) -> Any:
    loss = loss_of(self, x)
    self.losses.append(loss.item())
    found = {"losses": loss, "x.losses": x, "log_losses_off": x}
    return {key: found[key] for key in ("losses", "log_losses_off")}, found["losses"]


def a_text_beside_other_names(self: Any, x: torch.Tensor) -> Any:
    loss = loss_of(self, x)
    self.losses.append(loss.item())
    scale = getattr(self, "scale", 2.0) if hasattr(self, "model") else 1.0
    return {"losses": loss * scale}


def a_format(self: Any, x: torch.Tensor) -> Any:
    loss = loss_of(self, x)
    self.losses.append(loss.item())
    return loss, "{losses} losses".format(losses=3)  # noqa: UP032


def read_in_a_branch_not_taken(self: Any, x: torch.Tensor) -> Any:
    loss = loss_of(self, x)
    self.losses.append(loss.item())
    if self.log:
        self.count += len(self.losses)
        self.losses += [1.0]
        METER.losses += [1.0]
        return loss * len(getattr(self, "losses"))  # noqa: B009
    return loss


def in_a_dict(self: Any, x: torch.Tensor) -> Any:
    loss = loss_of(self, x)
    self.parts["losses"].append(loss.item())
    if self.log:
        self.parts = {}
    return {"parts": loss, "losses": loss}


def of_a_global(self: Any, x: torch.Tensor) -> Any:
    loss = loss_of(self, x)
    METER.losses.append(loss.item())
    return {"losses": loss, "log_losses_off": getattr(self, "log")}  # noqa: B009


def by_a_variable(self: Any, x: torch.Tensor) -> Any:
    loss = loss_of(self, x)
    losses = self.losses
    losses.append(loss.item())
    if losses is not None and x.shape[0] > 2:
        losses.extend([loss.item(), 2.0])
    return loss


def if_it_is_kept(self: Any, x: torch.Tensor) -> Any:
    loss = loss_of(self, x)
    if self.losses is not None:
        self.losses.append(loss.item())
    is_left_out = self.losses is None
    return loss, is_left_out


@pytest.mark.parametrize(
    "build",
    [
        by_a_variable,
        if_it_is_kept,
        a_key,
        keys,
        a_text_beside_other_names,
        a_format,
        read_in_a_branch_not_taken,
        in_a_dict,
        of_a_global,
    ],
    ids=lambda build: build.__name__,
)
def test_a_name_that_is_no_read_of_the_list(build: Callable[..., Any]) -> None:
    step = graph_of(build)
    found = trail(step)
    assert len(step.builds) == 1
    assert_same(trail(Plain(build)), found)


def test_a_branch_that_reads_the_list_when_it_is_taken() -> None:
    step = graph_of(read_in_a_branch_not_taken)
    step(X)
    step.log = True
    with pytest.raises(mg.CaptureError, match="losses, in a way that no replay can repeat"):
        step(X)


def through_a_loop(self: Any) -> Any:
    return next(getattr(self, name) for name in ("losses",))


def by_default(self: Any, look: Any = getattr) -> Any:
    return look(self, "losses")


def by_pattern(self: Any) -> Any:
    match self:
        case mg.Graph(losses=found) | Plain(losses=found):
            return found


def by_a_variable_after_all(self: Any) -> Any:
    losses = self.losses
    losses.append(1.0)
    return losses


def by_two_variables(self: Any) -> Any:
    losses = self.losses
    found = others = losses
    others.append(1.0)
    return [0] * len(found)


def by_locals(self: Any) -> Any:
    losses = self.losses
    losses.append(1.0)
    return locals()["losses"]


def of_the_caller() -> Any:
    return sys._getframe(1).f_locals["losses"]


def by_a_frame(self: Any) -> Any:
    losses = self.losses
    losses.append(1.0)
    return of_the_caller()


def by_a_generator(self: Any) -> Any:
    losses = self.losses
    losses.append(1.0)
    return [item for item in losses if item]


def by_a_closure(self: Any) -> Any:
    losses = self.losses
    losses.append(1.0)
    return (lambda: losses)()


def by_its_truth(self: Any) -> Any:
    losses = self.losses
    return [1] if losses else [1, 2]


def of(name: str) -> Callable[[Any], Any]:
    return lambda self: getattr(self, name)


READS: dict[str, Callable[[Any], Any]] = {
    "getattr": lambda self: getattr(self, "losses"),  # noqa: B009
    "vars": lambda self: vars(self)["losses"],
    "vars of a global": lambda _: vars(HOLDER["side"])["losses"],
    "dict": lambda self: self.__dict__["losses"],
    "get": lambda self: self.__dict__.get("losses"),
    "made up": lambda self: getattr(self, "".join(HALVES)),
    "loop": through_a_loop,
    "default": by_default,
    "pattern": by_pattern,
    "closure": of("losses"),
    "variable": by_a_variable_after_all,
    "two variables": by_two_variables,
    "locals": by_locals,
    "frame": by_a_frame,
    "generator": by_a_generator,
    "variable of a closure": by_a_closure,
    "truth": by_its_truth,
    "attrgetter": lambda self: operator.attrgetter("losses")(self),
    "object": lambda self: object.__getattribute__(self, "losses"),
    "format": lambda self: TEXT.format(self),
    "eval": lambda self: eval("self.losses"),
    "getmembers": lambda self: dict(inspect.getmembers_static(self))["losses"],
    "copy": lambda self: copy.copy(self.__dict__)["losses"],
    "pickle": lambda self: pickle.loads(pickle.dumps(self.__dict__["losses"])),
    "weak": lambda self: weakref.proxy(self).losses,
    "method": lambda self: self.losses.append and self.losses,
    "reduce": lambda self: self.__getstate__()["losses"],
}


def by_garbage_collector() -> Any:
    found = (item for item in gc.get_referents(METER) if type(item) in (dict, list))
    return next(item["losses"] if type(item) is dict else item for item in found)


OF_A_GLOBAL: dict[str, Callable[[], Any]] = {
    "getattr": lambda: getattr(METER, "losses"),  # noqa: B009
    "vars": lambda: vars(METER)["losses"],
    "made up": lambda: getattr(METER, "".join(HALVES)),
    "attrgetter": lambda: operator.attrgetter("losses")(METER),
    "format": lambda: TEXT.format(METER),
    "written format": lambda: "{0.losses}".format(METER),  # noqa: UP030, UP032
    "object": lambda: object.__getattribute__(METER, "losses"),
    "default": lambda look=getattr: look(METER, "losses"),
    "copy": lambda: copy.copy(METER).losses,
    "gc": by_garbage_collector,
}


ALL = {**READS, **{f"of a global: {name}": lambda _, read=read: read() for name, read in OF_A_GLOBAL.items()}}


@pytest.mark.parametrize("name", ALL)
def test_losses_in_a_list_that_is_read_by_any_name_are_refused(name: str) -> None:
    def build(self: Any, x: torch.Tensor) -> Any:
        loss = loss_of(self, x)
        self.losses.append(loss.item())
        METER.losses.append(loss.item())
        return loss * len(ALL[name](self))

    with pytest.raises(mg.CaptureError, match=r"losses|asked for the value"):
        trail(graph_of(build))


@pytest.mark.parametrize("name", ALL)
def test_numbers_in_a_list_that_is_read_by_any_name_are_facts(name: str) -> None:
    def build(self: Any, x: torch.Tensor) -> Any:
        self.losses.append(1)
        METER.losses.append(1)
        return x * len(ALL[name](self))

    step = graph_of(build, trains=False)
    found = trail(step)
    assert len(step.builds) > 1
    assert_same(trail(Plain(build)), found)
