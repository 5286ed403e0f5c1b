"""What a step finds through weak references dies when the user lets go of it, and the next call sees that."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import monograph as mg

X = torch.ones(1, 2)


class Item:
    def __init__(self, value: float = 2.0) -> None:
        self.value = value


class Slotted:
    __slots__ = ("__weakref__", "value")

    def __init__(self, value: float = 2.0) -> None:
        self.value = value


class Registered:
    known: ClassVar[weakref.WeakSet[Registered]] = weakref.WeakSet()

    def __init__(self) -> None:
        self.value = 2.0
        Registered.known.add(self)


class Counted(nn.Module):
    known: ClassVar[weakref.WeakSet[Counted]] = weakref.WeakSet()

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        Counted.known.add(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * len(Counted.known)


class Step(mg.Graph):
    """Scales its input by what `read` finds in `world`."""

    def __init__(self, world: Any, read: Callable[[Any], float]) -> None:
        super().__init__()
        self.world, self.read = world, read

    def build(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.read(self.world)


def items(kind: Callable[..., Any] = Item) -> list[Any]:
    return [kind(2.0), kind(5.0)]


def world(make: Callable[[list[Any]], Any], kind: Callable[..., Any] = Item) -> Any:
    held = items(kind)
    return SimpleNamespace(held=held, weak=make(held))


def proxied(w: Any) -> float:
    try:
        return float(w.weak.value)
    except ReferenceError:
        return 0.5


def value_of(item: Any) -> float:
    return 0.25 if item is None else float(item.value)


Make = Callable[[], Any]
Read = Callable[[Any], float]
KINDS: dict[str, tuple[Make, Read]] = {
    "WeakSet, its length": (lambda: world(weakref.WeakSet), lambda w: len(w.weak)),
    "WeakSet, its items": (lambda: world(weakref.WeakSet), lambda w: sum(i.value for i in w.weak)),
    "WeakSet of slots": (lambda: world(weakref.WeakSet, Slotted), lambda w: sum(i.value for i in w.weak)),
    "WeakSet, and the list that holds them": (
        lambda: world(weakref.WeakSet),
        lambda w: len(w.weak) + 0.5 * len(w.held),
    ),
    "WeakKeyDictionary, its length": (
        lambda: world(lambda held: weakref.WeakKeyDictionary(zip(held, (1.0, 3.0), strict=True))),
        lambda w: len(w.weak),
    ),
    "WeakKeyDictionary, its values": (
        lambda: world(lambda held: weakref.WeakKeyDictionary(zip(held, (1.0, 3.0), strict=True))),
        lambda w: sum(w.weak.values()),
    ),
    "WeakKeyDictionary, its entries": (
        lambda: world(lambda held: weakref.WeakKeyDictionary(zip(held, (1.0, 3.0), strict=True))),
        lambda w: sum(item.value * number for item, number in w.weak.items()),
    ),
    "WeakValueDictionary, its length": (
        lambda: world(lambda held: weakref.WeakValueDictionary(enumerate(held))),
        lambda w: len(w.weak),
    ),
    "WeakValueDictionary, its values": (
        lambda: world(lambda held: weakref.WeakValueDictionary(enumerate(held))),
        lambda w: sum(item.value for item in w.weak.values()),
    ),
    "WeakValueDictionary, get": (
        lambda: world(lambda held: weakref.WeakValueDictionary(enumerate(held))),
        lambda w: value_of(w.weak.get(1)),
    ),
    "ref is None": (
        lambda: world(lambda held: weakref.ref(held[1])),
        lambda w: 0.25 if w.weak() is None else 2.0,
    ),
    "an attribute behind a ref": (
        lambda: world(lambda held: weakref.ref(held[1])),
        lambda w: value_of(w.weak()),
    ),
    "a proxy": (lambda: world(lambda held: weakref.proxy(held[1])), proxied),
    "a registry of a class": (
        lambda: SimpleNamespace(held=[Registered(), Registered()]),
        lambda w: sum(item.value for item in Registered.known),
    ),
    "a module behind a ref": (
        lambda: world(lambda held: weakref.ref(held[1]), lambda _value: Counted()),
        lambda w: 2.0 if w.weak() is None else w.weak().linear.weight.sum(),
    ),
    "a list of lists": (
        lambda: SimpleNamespace(
            held=(held := [[Item()], [Item()]]), weak=weakref.WeakSet(i for h in held for i in h)
        ),
        lambda w: len(w.weak) + sum(map(len, w.held)),
    ),
    "a tuple": (
        lambda: SimpleNamespace(
            held=[({"a": (item := Item())}, 1), ({"a": (other := Item())}, 2)],
            weak=weakref.WeakSet((item, other)),
        ),
        lambda w: len(w.weak) + sum(pair[1] * pair[0]["a"].value for pair in w.held),
    ),
}
CHANGES: dict[str, Callable[[Any], object]] = {
    "one is gone": lambda w: w.held.pop(),
    "all are gone": lambda w: w.held.clear(),
    "another list": lambda w: setattr(w, "held", w.held[:1]),
}


def check(step: Step) -> None:
    expected = step.read(step.world)
    assert torch.equal(step(X), X * expected)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_let_go_is_gone_for_the_step_too(kind: str, change: str):
    make, read = KINDS[kind]
    gc.collect()  # graphs of other tests
    step = Step(make(), read)
    for _ in range(5):
        check(step)
    assert len(step.builds) == 1
    last = step.world.held[-1]
    while isinstance(last, (list, tuple, dict)):
        last = last["a"] if isinstance(last, dict) else last[0]
    gone = weakref.ref(last)
    del last
    CHANGES[change](step.world)
    assert gone() is None, "the build keeps it alive"
    for _ in range(3):
        check(step)
    assert len(step.builds) == 2


@pytest.mark.one_case
@pytest.mark.parametrize("kind", [kind for kind in KINDS if "Weak" in kind and "Key" not in kind])
def test_another_object_in_its_place(kind: str):
    make, read = KINDS[kind]
    step = Step(make(), read)
    for value in (7.0, 8.0, 9.0, 11.0):
        check(step)
        kept = type(step.world.held[0])
        step.world.held.pop()
        step.world.held.append(item := kept(value))  # mostly at the address of the old one
        if isinstance(step.world.weak, weakref.WeakSet):
            step.world.weak.add(item)
        else:
            step.world.weak[1] = item
        del item
    check(step)


def test_another_list_of_others_at_the_same_address():
    step = Step(world(weakref.WeakSet), lambda w: sum(i.value for i in w.held) + len(w.weak))
    for value in (7.0, 8.0, 9.0):
        check(step)
        step.world.held = None
        step.world.held = [Item(value), Item(value)]
        assert len(step.world.weak) == 0
    check(step)


def test_an_object_is_added():
    step = Step(world(weakref.WeakSet), lambda w: len(w.weak))
    check(step)
    step.world.weak.add(more := Item())
    check(step)
    del more
    check(step)
    assert len(step.builds) == 2 or len(step.builds) == 3


def test_a_variable_of_a_closure_is_let_go():
    item, known = Item(), weakref.WeakSet[Item]()
    known.add(item)

    def read(_: Any) -> float:
        return len(known) + (0.0 if item is None else item.value)

    step = Step(None, read)
    check(step)
    gone = weakref.ref(item)
    item = None
    assert gone() is None
    check(step)


def test_a_class_that_is_let_go():
    base = type("Base", (), {})
    kept = type("Kept", (base,), {"__slots__": ("value",)})
    kept_item = kept()
    kept_item.value = 3.0
    step = Step(SimpleNamespace(item=kept_item), lambda w: 1.0 + len(base.__subclasses__()) * w.item.value)
    for _ in range(3):
        check(step)
    assert len(step.builds) == 1
    gone = weakref.ref(kept)
    step.world.item = Item(4.0)
    step.world.item.value = 4.0
    step.world.__dict__["item"] = other = Item(4.0)
    del kept, kept_item
    gc.collect()
    assert gone() is None
    check(step)
    step.world.more = type("More", (base,), {})
    check(step)
    del other


def test_a_module_that_is_replaced():
    class Train(mg.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.outer = nn.Sequential(Counted())
            self.add_optimizer(torch.optim.SGD(self.outer.parameters(), lr=0.1))

        def build(self, x: torch.Tensor) -> torch.Tensor:
            loss = self.outer(x).sum()
            loss.backward()
            return loss

    gc.collect()
    before = len(Counted.known)
    step = Train()
    outer = step.outer.to(nn.Module)
    for _ in range(3):
        step(X)
    assert len(step.builds) == 1
    gone = weakref.ref(outer[0])
    outer[0] = Counted()
    assert gone() is None
    assert len(Counted.known) == before + 1


def test_a_whole_model_that_is_replaced():
    class Apply(mg.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.model = Counted()

        def build(self, x: torch.Tensor) -> torch.Tensor:
            return self.model(x)

    step = Apply()
    step(X)
    gone = weakref.ref(step.model.to(nn.Module))
    step.model = Counted()
    assert gone() is None
    assert torch.equal(step(X), step.model(X))


def test_callbacks_and_finalizers_run_at_once():
    told: list[str] = []
    step = Step(world(weakref.WeakSet), lambda w: len(w.weak))
    reference = weakref.ref(step.world.held[1], lambda _: told.append("callback"))
    weakref.finalize(step.world.held[1], told.append, "finalizer")
    check(step)
    step.world.held.pop()
    assert sorted(told) == ["callback", "finalizer"]
    assert reference() is None


def test_objects_in_a_cycle_go_with_the_collector():
    step = Step(world(weakref.WeakSet), lambda w: len(w.weak))
    for item in step.world.held:
        item.itself = item
    del item
    check(step)
    step.world.held.clear()
    gc.collect()
    assert not list(step.world.weak)
    check(step)


def test_a_capture_that_fails_keeps_nothing_alive():
    def read(w: Any) -> float:
        if len(w.weak) == 2:
            raise ValueError("two")
        return len(w.weak)

    step = Step(world(weakref.WeakSet), read)
    with pytest.raises(ValueError, match="two") as failed:
        step(X)
    gone = weakref.ref(step.world.held[1])
    step.world.held.pop()
    assert gone() is None
    assert failed.value.__traceback__ is not None
    check(step)


def test_a_parameter_that_is_known_weakly_trains_on():
    model = nn.Linear(2, 2)
    known = weakref.WeakSet(model.parameters())

    class Train(mg.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.model = model
            self.add_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))

        def build(self, x: torch.Tensor) -> torch.Tensor:
            loss = self.model(x).sum() * len(known)
            loss.backward()
            return loss

    step = Train()
    for _ in range(5):
        step(X)
    assert len(step.builds) == 1


class KnowsState(mg.Graph):
    """A step that counts the parameters which weak references still lead to."""

    def __init__(self, known: Any) -> None:
        super().__init__()
        self.model, self._known = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), known
        known.update(self.model.parameters())
        self.place: Any = None

    def build(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x) * len(self._known) * (1.0 if self.place is None else self.place.scale)


@pytest.mark.parametrize("other", [False, True], ids=["same call", "a call of another form first"])
@pytest.mark.parametrize("held_elsewhere", [False, True])
@pytest.mark.parametrize("collector", [False, True], ids=["no collector", "collector"])
def test_state_that_is_known_weakly_and_replaced(held_elsewhere: bool, other: bool, collector: bool):
    known = weakref.WeakSet[Any]()
    step = KnowsState(known)
    if held_elsewhere:  # read on the way, but for the attribute that holds the parameter
        step.place = SimpleNamespace(weight=step.model[1].weight, scale=1.0)
    gc.collect()
    if not collector:
        gc.disable()
    try:
        for _ in range(3):
            assert torch.equal(step(X), step.model(X) * 4)
        for left in (3, 2):
            layer = step.model[left - 2]
            layer.weight = nn.Parameter(torch.ones(2, 2))
            if held_elsewhere:
                step.place = None
            for x in [torch.ones(7, 2), X, X] if other else [X, X]:
                assert torch.equal(step(x), step.model(x) * left)
            assert len(known) == left
    finally:
        gc.enable()


def test_state_that_is_known_weakly_goes_with_its_model():
    known = weakref.WeakSet[Any]()
    step = KnowsState(known)
    for _ in range(2):
        step(X)
    step.model = nn.Linear(2, 2)
    for _ in range(2):
        assert torch.equal(step(X), step.model(X) * 0)
    assert not known


class Recurrent(mg.Graph):
    """Trains a recurrent layer, which knows its own weights by weak references."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__()
        self.model = model
        self.add_optimizer(optimizer)

    def build(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.model(x[None])[0].sum()
        loss.backward()
        return loss


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_weights_of_a_recurrent_layer_are_replaced(kind: Callable[..., nn.Module]):
    torch.manual_seed(0)
    model = kind(2, 2)
    eager = copy.deepcopy(model)
    sgd, plain_sgd = (torch.optim.SGD(item.parameters(), lr=0.1) for item in (model, eager))
    step = Recurrent(model, sgd)

    def check() -> None:
        plain_sgd.zero_grad()
        loss = eager(X[None])[0].sum()
        loss.backward()
        plain_sgd.step()
        assert torch.equal(step(X), loss)
        assert all(map(torch.equal, model.parameters(), eager.parameters()))

    for _ in range(3):
        check()
    gone = weakref.ref(model.weight_ih_l0)
    for item, optimizer in ((model, sgd), (eager, plain_sgd)):
        item.weight_ih_l0 = nn.Parameter(torch.ones_like(item.weight_ih_l0))
        optimizer.param_groups[0]["params"][:] = item.parameters()
    for _ in range(3):
        check()
    assert gone() is None


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_builds_of_a_recurrent_layer_stay(kind: Callable[..., nn.Module]):
    """What it knows weakly are its own weights, which are there: a number may move, and builds of both modes are kept."""

    class Scaled(Recurrent):
        def build(self, x: torch.Tensor) -> torch.Tensor:
            loss = (self.model(x[None])[0] * self.scale).sum()
            loss.backward()
            return loss

    model = kind(2, 2)
    step = Scaled(model, torch.optim.SGD(model.parameters(), lr=0.1))
    step.scale = 1.0
    for number in range(6):
        eager = copy.deepcopy(model)
        assert torch.equal(step(X), (eager(X[None])[0] * step.scale).sum())
        step.scale *= 0.5
        assert len(step.builds) == min(number + 1, 2)
    for mode in (False, True, False, True):
        model.train(mode)
        step(X)
    assert len(step.builds) == 3


def test_a_step_that_changes_what_it_finds():
    def read(w: Any) -> float:
        total = 0.0
        for item in w.weak:
            total += item.value
            item.value += 1.0
        return total

    step, plain = (Step(world(weakref.WeakSet), read) for _ in range(2))
    assert [float(step(X)[0, 0]) for _ in range(3)] == [plain.read(plain.world) for _ in range(3)]
    step.world.held.pop(0)
    plain.world.held.pop(0)
    assert len(step.world.weak) == 1
    assert [float(step(X)[0, 0]) for _ in range(3)] == [plain.read(plain.world) for _ in range(3)]


TENSORS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], object]]] = {
    "the only holder lets go": (
        lambda: SimpleNamespace(held=(t := torch.tensor(3.0)), weak=weakref.ref(t)),
        lambda w: 0.5 if w.weak() is None else w.weak(),
        lambda w: setattr(w, "held", None),
    ),
    "one of a set": (
        lambda: world(weakref.WeakSet, lambda value: torch.tensor(value)),
        lambda w: len(w.weak) + sum(w.held),
        lambda w: w.held.pop(),
    ),
}


@pytest.mark.parametrize("case", TENSORS)
def test_a_tensor_that_the_build_holds_itself_is_gone_at_the_next_call(case: str):
    make, read, change = TENSORS[case]
    step, plain = Step(make(), read), make()
    for _ in range(5):
        assert torch.equal(step(X), X * read(plain))
    assert len(step.builds) == 1
    change(step.world)
    change(plain)
    for _ in range(3):
        assert torch.equal(step(X), X * read(plain))
    assert len(step.builds) == 2


class Adding:
    def __init__(self, number: float) -> None:
        self.number = number

    def to(self, value: float) -> float:
        return value + self.number


@pytest.mark.parametrize("loose", [False, True])
def test_a_method_may_be_fetched_anew(loose: bool) -> None:
    first, second = Adding(1.0), Adding(2.0)
    shown: Any = SimpleNamespace(
        add=first.to, held=[first], weak=weakref.ref(first) if loose else lambda: first
    )
    step = Step(shown, lambda w: w.add(w.weak().number))
    for _ in range(4):
        shown.add = first.to  # another object each time
        assert step(X).tolist() == [[2.0, 2.0]]
    assert len(step.builds) == 1
    shown.add = second.to
    assert step(X).tolist() == [[3.0, 3.0]]
    assert len(step.builds) == 2
