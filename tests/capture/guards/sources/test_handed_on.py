"""Code that looks for names which it is given, such as a `__getattr__`: what was asked for counts, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import monograph as mg

X = torch.ones(2)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.log, self.scale = nn.Linear(2, 1), list[Any](), 2.0

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(x).square().mean() * self.scale
        return found

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name)


class ByClass(Model):
    def __getattr__(self, name: str) -> Any:
        return nn.Module.__getattr__(self, name)


class Inner:
    def __init__(self) -> None:
        self.scale, self.size, self.log = 2, 3, list[Any]()


class Wrapper:
    def __init__(self) -> None:
        self.inner = Inner()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class Twice(Wrapper):
    """Goes on to another one like it."""

    def __init__(self) -> None:
        self.other = Wrapper()

    @property
    def inner(self) -> Any:  # type: ignore[override]
        return self.other.inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.other, name)


@pytest.mark.parametrize("make", [Model, ByClass])
def test_lists_of_a_module_that_the_step_does_not_read(make: type[Model]) -> None:
    class Step(mg.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.model = make()

        def build(self, x: torch.Tensor) -> torch.Tensor:
            return self.model.loss(x)

    step = Step()
    for number in range(4):
        expected = step.model.loss(X)
        assert torch.equal(step(X), expected)
        step.model.log.append({"loss": expected.detach()})
        step.model.name = f"after step {number}"
    assert len(step.builds) == 1
    step.model.scale = 3.0
    assert torch.equal(step(X), step.model.loss(X))


def spelled(wrapped: Any) -> Any:
    return wrapped.scale


def made_up(wrapped: Any) -> Any:
    return getattr(wrapped, "sca" + "le")


def one_after_another(wrapped: Any) -> Any:
    return sum(getattr(wrapped, name[:-1]) for name in ("size_", "scale_"))


def with_a_default(wrapped: Any) -> Any:
    return wrapped.scale if hasattr(wrapped, "scale") else 7


def asked(item: Any, name: str, *, other: str = "absent") -> Any:
    return getattr(item, name) + (getattr(item, other) if hasattr(item, other) else 0)


def by_a_function(wrapped: Any) -> Any:
    return asked(wrapped.inner, "sca" + "le")


def by_a_keyword(wrapped: Any) -> Any:
    return asked(wrapped.inner, "size", other="sca" + "le")


def by_a_function_that_makes_it_up(wrapped: Any) -> Any:
    def found(item: Any, name: str) -> Any:
        name = name + "le"
        return getattr(item, name)

    return found(wrapped.inner, "sca")


def taken_away(wrapped: Any, step: int) -> None:
    if step == 2:
        del wrapped.inner.scale


def changed(wrapped: Any, step: int) -> None:
    wrapped.inner.scale = step + 3


@pytest.mark.every_case
@pytest.mark.parametrize("make", [Wrapper, Twice])
@pytest.mark.parametrize(
    ("read", "between"),
    [
        (spelled, changed),
        (made_up, changed),
        (one_after_another, changed),
        (by_a_function, changed),
        (by_a_keyword, changed),
        (by_a_function_that_makes_it_up, changed),
        (with_a_default, taken_away),
    ],
)
def test_what_is_read_by_way_of_another_object(
    read: Callable[[Any], Any], between: Callable[[Any, int], None], make: type[Wrapper]
) -> None:
    class Step(mg.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.wrapped = make()

        def build(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = x[:1].repeat(read(self.wrapped))
            return found

    step = Step()
    for number in range(4):
        assert step(X).shape == (read(step.wrapped),)
        between(step.wrapped, number)


@pytest.mark.parametrize("read", [spelled, by_a_function, by_a_keyword])
def test_lists_of_the_other_object_that_are_not_read(read: Callable[[Any], Any]) -> None:
    class Step(mg.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.wrapped = Wrapper()

        def build(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = x * read(self.wrapped)
            return found

    step = Step()
    for number in range(4):
        assert torch.equal(step(X), X * read(step.wrapped))
        step.wrapped.inner.log.append(number)
    assert len(step.builds) == 1
