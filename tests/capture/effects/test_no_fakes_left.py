"""Nothing fake survives a capture: whatever a hook keeps tensors in."""

from __future__ import annotations

import contextvars
import functools
import gc
import logging
import threading
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

import monograph as mg
from tests.support.garbage import collect_quickly


class Model(nn.Module):
    def __init__(self, *more: nn.Module) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 2), *more)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.first(x)))


Store = Callable[[Any], object]


def by_dict() -> tuple[Any, Store]:
    kept: dict[str, Any] = {}

    def store(out: Any) -> None:
        kept["out"] = out

    return kept, store


def by_default() -> tuple[Any, Store]:
    kept: dict[str, Any] = {}

    def store(out: Any, kept: dict[str, Any] = kept) -> None:
        kept["out"] = out

    return kept, store


def by_partial() -> tuple[Any, Store]:
    kept: dict[str, Any] = {}

    def store(kept: dict[str, Any], out: Any) -> None:
        kept["out"] = out

    return kept, functools.partial(store, kept)


def by_variable() -> tuple[Any, Store]:
    kept = None

    def store(out: Any) -> None:
        nonlocal kept
        kept = out

    return store, store


def by_nested() -> tuple[Any, Store]:
    kept = SimpleNamespace()

    def store(out: Any) -> None:
        kept.out = {"list": [out]}

    return kept, store


def by_error(*arguments: Any) -> tuple[Any, Store]:
    kept: list[Exception] = []

    def store(out: Any) -> None:
        try:
            raise ValueError("kept", *arguments)
        except ValueError as error:
            kept.append(error)

    return kept, store


def by_context() -> tuple[Any, Store]:
    kept: contextvars.ContextVar[Any] = contextvars.ContextVar("kept")
    return kept, lambda out: kept.set(out)


def by_thread() -> tuple[Any, Store]:
    kept = threading.local()

    def store(out: Any) -> None:
        kept.out = out

    return kept, store


def by_default_dict() -> tuple[Any, Store]:
    kept: defaultdict[str, list[Any]] = defaultdict(list)
    return kept, lambda out: kept["out"].append(out)


def by_ordered() -> tuple[Any, Store]:
    kept: OrderedDict[str, Any] = OrderedDict()
    return kept, lambda out: kept.__setitem__("out", out)


def by_deque() -> tuple[Any, Store]:
    kept: deque[Any] = deque(maxlen=2)
    return kept, kept.append


STORES = [
    *(
        by_dict,
        by_default,
        by_partial,
        by_variable,
        by_nested,
        by_context,
        by_thread,
        by_default_dict,
    ),
    *(by_ordered, by_deque),
]


def fakes() -> list[Any]:
    gc.collect()
    return [item for item in gc.get_objects() if issubclass(type(item), FakeTensor)]


def graph_of(model: nn.Module) -> mg.Graph:
    return mg.train_graph(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.fixture(autouse=True, scope="module")
def _look_at_new_objects_only() -> Iterator[None]:
    """Collections and `gc.get_objects()` leave out what is frozen: all that other tests made."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
    collect_quickly()


@pytest.fixture(autouse=True)
def _begin_without(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("MONOGRAPH_FULL_TRACEBACK", raising=False)
    for item in fakes():
        item.__dict__["of_another_test"] = True
    logging.disable()  # pytest keeps what is logged, with its arguments
    yield
    logging.disable(logging.NOTSET)


def left() -> int:
    return sum("of_another_test" not in item.__dict__ for item in fakes())


def hooked(where: str, store: Store) -> mg.Graph:
    """A step with a hook that stores a tensor."""
    model = Model()

    def hook(*given: Any) -> None:
        store(given[-1])

    if where == "forward":
        model.first.register_forward_hook(hook)
    elif where == "backward":
        model.last.register_full_backward_hook(lambda _module, _inputs, outputs: hook(outputs[0]))
    else:
        model.first.weight.register_hook(hook)
    return graph_of(model)


@pytest.mark.parametrize("make", STORES)
@pytest.mark.parametrize("where", ["forward", "backward", "gradient"])
def test_what_a_hook_keeps(where: str, make: Callable[[], tuple[Any, Store]]) -> None:
    kept, store = make()
    step = hooked(where, store)
    for _ in range(2):
        step(torch.randn(2, 3), torch.zeros(2, 2))
    assert left() == 0
    del kept


@pytest.mark.parametrize("where", ["forward", "backward", "gradient"])
def test_an_error_that_a_hook_keeps_is_refused(where: str) -> None:
    kept, store = by_error()
    step = hooked(where, store)
    for _ in range(2):
        with pytest.raises(
            mg.CaptureError, match=r"an object that holds tensors of the step into .*kept\[0\]"
        ):
            step(torch.randn(2, 3), torch.zeros(2, 2))
    assert left() == 0
    assert not kept


class Plain(mg.Graph):
    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def build(self, x: torch.Tensor) -> Any:
        return self.function(x)


@pytest.mark.parametrize("of_user", [True, False])
def test_an_error_of_a_failed_capture(of_user: bool) -> None:
    def fails(x: torch.Tensor) -> Any:
        doubled = x * 2
        if of_user:
            raise ValueError("of the user's")
        return doubled @ doubled.reshape(7)

    kept: list[Exception] = []
    try:
        Plain(fails)(torch.ones(2))
    except Exception as error:
        kept.append(error)
    assert kept[0].__traceback__ is not None
    assert left() == 0


@functools.lru_cache
def steps(count: int) -> torch.Tensor:
    return torch.arange(count) * 0.5


@functools.cache
def drawn(count: int) -> torch.Tensor:
    return torch.rand(count)


def test_functions_with_a_cache() -> None:
    steps.cache_clear()
    step = Plain(lambda x: x + steps(2))
    for _ in range(3):
        assert step(torch.ones(2)).tolist() == [1.0, 1.5]
    assert left() == 0
    assert steps(2).tolist() == [0.0, 0.5]
    assert step(torch.ones(2)).tolist() == [1.0, 1.5]


def test_a_cache_without_a_limit_keeps_what_the_first_step_has_drawn() -> None:
    drawn.cache_clear()
    step = Plain(lambda x: x + drawn(2))
    torch.manual_seed(3)
    first = step(torch.zeros(2))
    torch.manual_seed(3)
    assert first.tolist() == torch.rand(2).tolist()
    for _ in range(3):
        assert step(torch.zeros(2)).tolist() == first.tolist()
    assert drawn(2).tolist() == first.tolist()
    assert len(step.builds) == 2
    assert left() == 0


def test_the_cache_of_a_library_gets_none() -> None:
    """What it has found out stays there, and tensors of the step do not."""
    library: dict[str, Any] = {"functools": functools}
    text = """
@functools.cache
def kept(name, make):
    return make()
"""
    exec(compile(text, "/lib/site-packages/library.py", "exec"), library)
    kept = library["kept"]
    assert Plain(lambda x: x * kept("two", lambda: 2))(torch.ones(2)).tolist() == [2.0, 2.0]
    assert kept.cache_info().currsize == 1
    with pytest.raises(mg.CaptureError, match="an object that holds tensors of the step into"):
        Plain(lambda x: x * next(kept("half", lambda: iter([x * 0.5]))))(torch.ones(2))
    assert left() == 0


def test_a_generator_that_waits() -> None:
    def doubled(x: torch.Tensor) -> Iterator[torch.Tensor]:
        while True:
            made = x * 2
            yield made

    kept: dict[str, Any] = {}

    def run(x: torch.Tensor) -> Any:
        kept["generator"] = doubled(x)
        return next(kept["generator"])

    step = Plain(run)
    for number in range(3):
        with pytest.raises(
            mg.CaptureError, match=r"an object that holds tensors of the step into .*'generator'"
        ):
            step(torch.full((2,), float(number)))
    assert left() == 0
    assert not kept


class Halved(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 0.5


def test_the_cache_of_parametrizations_gets_none() -> None:
    layer = nn.Linear(2, 1, bias=False)
    nn.utils.parametrize.register_parametrization(layer, "weight", Halved())

    class Step(mg.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def build(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.layer(x)
            return found

    step, x = Step(), torch.ones(1, 2)
    with torch.no_grad(), nn.utils.parametrize.cached():
        assert torch.equal(step(x), layer(x))
        assert type(layer.weight) is torch.Tensor
        assert torch.equal(step(x), layer(x))
