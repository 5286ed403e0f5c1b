"""A parameter, buffer or argument is one object wherever a step finds it: in sets, as a key, by `id()`, by `is`."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import monograph as mg

Case = Callable[[], tuple[nn.Module, Any, Callable[[nn.Module, Any], torch.Tensor]]]
CASES: dict[str, Case] = {}
X = torch.linspace(-1, 1, 6).view(2, 3)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))


def decay(name: str, make: Callable[[Any], Any], weight: Callable[[torch.Tensor, Any], Any]) -> None:
    """A case whose loss weighs each parameter by what the step finds about it."""

    def case() -> tuple[nn.Module, Any, Callable[[nn.Module, Any], torch.Tensor]]:
        held = model()

        def loss(module: nn.Module, kept: Any) -> torch.Tensor:
            weighed = [p.square().sum() * float(weight(p, kept)) for p in module.parameters()]
            return module(X).square().mean() + sum(weighed)

        return held, make(held), loss

    CASES[name] = case


THE_ONE: Any = None


def in_a_global(held: Any) -> None:
    global THE_ONE
    THE_ONE = held[0].bias


class Kept:
    def __init__(self, item: Any) -> None:
        self.item = item


decay("a set", lambda m: {m[0].bias}, lambda p, kept: p not in kept)
decay("a frozen set", lambda m: frozenset([m[0].bias]), lambda p, kept: p not in kept)
decay("a set of ids", lambda m: {id(m[0].bias)}, lambda p, kept: id(p) not in kept)
decay("ids by map", lambda m: {id(m[0].bias)}, lambda p, kept: next(map(id, [p])) not in kept)
decay("keys", lambda m: {p: i for i, p in enumerate(m.parameters())}, lambda p, kept: kept[p])
decay("keys of some", lambda m: {m[0].bias: 3}, lambda p, kept: kept.get(p, 1))
decay(
    "keys in tuples",
    lambda m: {(p, "w"): i for i, p in enumerate(m.parameters())},
    lambda p, kept: kept[p, "w"],
)
decay("a place in a list", lambda m: [m[0].bias], lambda p, kept: kept.index(p) + 2 if p.shape == (3,) else 1)
decay("a nested set", lambda m: {"none": {m[0].bias, m[1].bias}}, lambda p, kept: p not in kept["none"])
decay("is, in a loop", lambda m: [m[0].bias], lambda p, kept: not any(p is q for q in kept))
decay("is not, in a loop", lambda m: [m[0].bias], lambda p, kept: all(p is not q for q in kept))
decay("is, of an attribute", lambda m: Kept(m[0].bias), lambda p, kept: p is kept.item)
decay("is, of an item", lambda m: {"p": m[0].bias}, lambda p, kept: kept["p"] is p)
decay("is, of a weak reference", lambda m: weakref.ref(m[0].bias), lambda p, kept: p is not kept())
decay("is, of a global", in_a_global, lambda p, kept: p is THE_ONE)


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


def a_loss(module: nn.Module, _kept: Any) -> torch.Tensor:
    return module(X).square().mean()


@case
def names_and_sets_of_the_module_itself() -> Any:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 2)
            self.skip, self.first = {self.a.weight}, [self.a.weight]
            self.names = {p: name for name, p in self.named_parameters()}

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.b(self.a(x))
            for p in self.parameters():
                y = y + p.sum() if p not in self.skip else y
                y = y * 2 if p is self.first[0] else y
                y = y * 3 if self.names[p] == "a.bias" else y
                y = y + 1 if p is self.b.weight else y
            return y

    torch.manual_seed(0)
    return Model(), None, a_loss


@case
def hooks_that_close_over_parameters() -> Any:
    held: Any = model()
    weight, offsets = held[0].weight, {p: torch.ones_like(p) for p in held.parameters()}
    held[0].register_forward_hook(lambda module, _args, out: out * 2 if module.weight is weight else out)
    held[1].register_forward_hook(lambda module, _args, out: out + offsets[module.weight].sum())
    return held, None, a_loss


@case
def momentum_of_hooks_by_parameter() -> Any:
    held, kept = model(), dict[Any, torch.Tensor]()

    def smoothed(p: torch.Tensor) -> None:
        if p not in kept:
            kept[p] = torch.zeros_like(p)
        assert p.grad is not None
        kept[p].mul_(0.9).add_(p.grad)
        p.grad.copy_(kept[p])

    for p in held.parameters():
        p.register_post_accumulate_grad_hook(smoothed)
    return held, None, a_loss


@case
def momentum_of_tensor_hooks_by_parameter() -> Any:
    held, kept = model(), dict[Any, torch.Tensor]()

    def hook_of(p: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        def hook(gradient: torch.Tensor) -> torch.Tensor:
            kept.setdefault(p, torch.zeros_like(p)).mul_(0.9).add_(gradient)
            return kept[p].clone()

        return hook

    for p in held.parameters():
        p.register_hook(hook_of(p))
    return held, None, a_loss


@case
def parameters_that_were_seen() -> Any:
    def loss(module: nn.Module, seen: set[Any]) -> torch.Tensor:
        found = module(X).square().mean()
        for p in module.parameters():
            if p not in seen:
                seen.add(p)
                found = found + p.square().sum()
        return found

    return model(), set(), loss


@case
def parameters_that_were_put_into_a_list() -> Any:
    def loss(module: nn.Module, seen: list[Any]) -> torch.Tensor:
        found = module(X).square().mean()
        for p in module.parameters():
            if not any(p is q for q in seen):
                seen.append(p)
                found = found + p.square().sum()
        return found

    return model(), [], loss


@pytest.mark.one_case
@pytest.mark.parametrize("name", CASES)
def test_the_numbers_are_those_of_eager_mode(name: str) -> None:
    def trained(capture: bool) -> tuple[list[torch.Tensor], int]:
        module, kept, loss = CASES[name]()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)

        class Step(mg.Graph):
            def __init__(self) -> None:
                super().__init__()
                self.module, self.kept = module, kept
                self.add_optimizer(optimizer)

            def build(self) -> torch.Tensor:
                found = loss(self.module, self.kept)
                found.backward()
                return found

        step, losses = Step(), []
        for _ in range(4):
            if capture:
                losses.append(step().detach().clone())
                continue
            optimizer.zero_grad()
            found = loss(module, kept)
            found.backward()
            optimizer.step()
            losses.append(found.detach())
        return [*losses, *(p.detach() for p in module.parameters())], len(step.builds)

    (expected, _), (got, builds) = trained(False), trained(True)
    assert all(map(torch.equal, expected, got))
    assert builds <= 2


class ByParameter(torch.optim.Optimizer):
    """Momentum in a dict of its own."""

    def __init__(self, parameters: Any, begin: str) -> None:
        super().__init__(parameters, {"lr": 0.1})
        parameters = self.param_groups[0]["params"]
        self.by_id = begin.endswith("id")
        self.last: Any = None
        self.kept: Any = {} if begin.startswith("empty") else None
        if begin.startswith("full"):
            self.kept = {self.key(p): torch.zeros_like(p) for p in parameters}

    def key(self, parameter: torch.Tensor) -> Any:
        return id(parameter) if self.by_id else parameter

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        parameters = self.param_groups[0]["params"]
        if self.kept is None:
            self.kept = {self.key(p): torch.zeros_like(p) for p in parameters}
        if self.last is None:
            self.last, self.order = parameters[-1], list(reversed(parameters))
        for p in self.order:
            if self.key(p) not in self.kept:
                self.kept[self.key(p)] = torch.zeros_like(p)
            momentum = self.kept[self.key(p)]
            momentum.mul_(0.9).add_(p.grad)
            p.add_(momentum, alpha=-0.2 if p is self.last else -0.1)


@pytest.mark.one_case
@pytest.mark.parametrize("begin", ["empty", "empty, by id", "full", "full, by id", "none", "none, by id"])
def test_optimizers_that_keep_their_state_by_parameter(begin: str) -> None:
    def trained(capture: bool) -> tuple[nn.Module, Any, int]:
        module = model()
        optimizer = ByParameter(module.parameters(), begin)
        step = mg.train_graph(module, nn.MSELoss(), optimizer)
        for _ in range(5):
            if capture:
                step(X, torch.zeros(2, 2))
            else:
                optimizer.zero_grad()
                nn.MSELoss()(module(X), torch.zeros(2, 2)).backward()
                optimizer.step()
        return module, optimizer, len(step.builds)

    (expected, _, _), (got, optimizer, builds) = trained(False), trained(True)
    assert all(map(torch.equal, expected.parameters(), got.parameters()))
    assert builds <= 2
    held = list(got.parameters())
    assert optimizer.last is held[-1]
    assert [any(p is q for q in held) for p in optimizer.order] == [True] * 4
    assert optimizer.kept.keys() == {optimizer.key(p) for p in held}


def test_a_set_that_changes_is_a_new_build() -> None:
    held: Any = model()
    kept = {held[0].bias}

    class Step(mg.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.held, self.kept = held, kept

        def build(self) -> torch.Tensor:
            found: Any = sum(p.sum() for p in self.held.parameters() if p not in self.kept)
            return found

    step = Step()
    for change in (lambda: None, lambda: kept.add(held[1].bias), lambda: kept.discard(held[0].bias)):
        change()
        expected: Any = sum(p.sum() for p in held.parameters() if p not in kept)
        assert torch.equal(step(), expected)


OTHER = torch.ones(2)
LISTED = [torch.ones(2), OTHER]


class ByArgument(mg.Graph):
    def __init__(self) -> None:
        super().__init__()
        self.listed, self.kept, self.named = LISTED, {OTHER}, {"other": OTHER}

    def build(self, x: torch.Tensor) -> torch.Tensor:
        found = x * (2 if x is OTHER else 1) + (10 if any(x is q for q in self.listed) else 0)
        return found + (100 if self.named["other"] is x else 0)


def of_argument(x: torch.Tensor) -> torch.Tensor:
    return x * (2 if x is OTHER else 1) + 10 * any(x is q for q in LISTED) + 100 * (x is OTHER)


@pytest.mark.parametrize("known_first", [True, False])
def test_which_tensor_an_argument_is_counts_where_code_compares_it(known_first: bool) -> None:
    step = ByArgument()
    arguments = [torch.ones(2), OTHER, LISTED[0], torch.zeros(2)]
    for _ in range(2):
        for x in arguments[::-1] if known_first else arguments:
            assert torch.equal(step(x), of_argument(x))
    assert len(step.builds) == 3


def test_comparisons_of_values_still_give_tensors() -> None:
    held: Any = model()

    class Step(mg.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.held, self.first = held, [held[0].bias]

        def build(self) -> torch.Tensor:
            return self.held[0].bias == self.first[0]

    assert torch.equal(Step()(), torch.ones(3, dtype=torch.bool))


def test_a_comparison_that_cannot_be_seen_is_a_named_error() -> None:
    held: Any = model()

    class Step(mg.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.held, self.kept = held, Kept(held[0].bias)

        def build(self, x: torch.Tensor) -> torch.Tensor:
            return x * (2 if self.held.get_submodule("0").bias is self.kept.item else 1)

    with pytest.raises(mg.CaptureError, match="by `is` a tensor that it has found in two places"):
        Step()(X)


def test_none_is_no_tensor() -> None:
    held: Any = model()

    class Step(mg.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.held, self.kept, self.none = held, Kept(held[0].bias), None

        def build(self, x: torch.Tensor) -> torch.Tensor:
            for p in self.held.parameters():
                x = (
                    x * 2
                    if p is not None and self.kept.item is not None and self.kept.item is not self.none
                    else x
                )
                x = x * 3 if type(p) is nn.Parameter else x
            return x

    assert torch.equal(Step()(X), X * 6**4)


def test_a_comparison_that_an_error_cuts_short_leaves_variables_as_they_are() -> None:
    held: Any = model()

    class Maybe:
        def __getattr__(self, name: str) -> Any:
            raise AttributeError(name)

    found = [Kept(held[0].bias), Maybe(), Kept(held[1].bias)]

    def scaled(x: torch.Tensor, module: nn.Module, found: list[Any]) -> torch.Tensor:
        for p in module.parameters():
            for index, kept in enumerate(found):
                try:
                    x = x * 2 + index if p is kept.item else x
                except AttributeError:
                    x = x + p.sum()
        return x

    class Step(mg.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.held, self.found = held, found

        def build(self, x: torch.Tensor) -> torch.Tensor:
            return scaled(x, self.held, self.found)

    assert torch.equal(Step()(X), scaled(X, held, found))
