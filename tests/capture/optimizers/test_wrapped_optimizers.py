"""Optimizers around optimizers: trained as eager mode does, their counters too, or refused with the line to write.

The wrappers of training frameworks are rebuilt here from what they do; the packages need not be installed.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ExponentialLR

import monograph as mg
from tests.support import assert_same


class GradientState:
    """One state for all, as accelerate has it."""

    _shared: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        self.__dict__ = self._shared
        if not self._shared:
            self.sync_gradients = True


class Accelerated(Optimizer):
    """As accelerate's wrapper: `Optimizer.__init__` is not called, everything is that of the one inside."""

    def __init__(self, optimizer: Optimizer, scaler: Any = None) -> None:
        self.optimizer, self.scaler, self.gradient_state = optimizer, scaler, GradientState()
        self._is_overflow = False

    @property
    def state(self) -> Any:
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: Any) -> None:
        self.optimizer.param_groups = groups

    @property
    def defaults(self) -> Any:
        return self.optimizer.defaults

    @defaults.setter
    def defaults(self, defaults: Any) -> None:
        self.optimizer.defaults = defaults

    def state_dict(self) -> Any:
        return self.optimizer.state_dict()

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        if self.gradient_state.sync_gradients:
            self.optimizer.zero_grad()

    def step(self, closure: Any = None) -> None:
        if self.gradient_state.sync_gradients:
            if self.scaler is not None:
                self.scaler.step(self.optimizer, closure)
                self.scaler.update()
            else:
                self.optimizer.step(closure)


def nothing() -> None:
    pass


class Strategy:
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], **kwargs: Any) -> Any:
        return optimizer.step(closure=closure, **kwargs)


class Lightning:
    """As Lightning's wrapper: of a class that is made on the fly, and counting its steps by callbacks."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer, self._strategy = optimizer, Strategy()
        self._on_before_step = self._on_after_step = nothing
        self.__class__ = type("Lightning" + type(optimizer).__name__, (self.__class__, type(optimizer)), {})

    @property
    def optimizer(self) -> Optimizer:
        return self._optimizer

    def step(self, closure: Any = None, **kwargs: Any) -> Any:
        self._on_before_step()
        output = self._strategy.optimizer_step(self._optimizer, closure or nothing, **kwargs)
        self._on_after_step()
        return output

    def __getattr__(self, item: str) -> Any:
        return getattr(self._optimizer, item)


class Progress:
    def __init__(self) -> None:
        self.ready = self.completed = 0

    def begin(self) -> None:
        self.ready += 1

    def end(self) -> None:
        self.completed += 1


def counted(optimizer: Optimizer) -> Any:
    wrapper, progress = Lightning(optimizer), Progress()
    wrapper._on_before_step, wrapper._on_after_step = progress.begin, progress.end  # type: ignore[method-assign]
    wrapper.progress = progress
    return wrapper


class Proxy:
    """No optimizer by its class, and with no step of its own."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def __getattr__(self, item: str) -> Any:
        return getattr(self.optimizer, item)


class Halving(Proxy):
    """With a step that does something besides, and a counter."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer)
        self.count = 0

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(0.5)
        return self.optimizer.step(closure)


def adam(model: nn.Module) -> Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.1)


WRAPPERS: dict[str, Callable[[Optimizer], Any]] = {
    "accelerate": Accelerated,
    "lightning": Lightning,
    "lightning that counts": counted,
    "proxy": Proxy,
    "own step": Halving,
    "twice": lambda optimizer: counted(Accelerated(optimizer)),
    "proxy of one": lambda optimizer: Proxy(Halving(optimizer)),
}


class Manual(mg.Graph):
    def __init__(self, model: nn.Module, optimizer: Any) -> None:
        super().__init__()
        self.model = model
        self.add_optimizer(optimizer, manual=True)
        self.optimizer = optimizer

    def build(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.mse_loss(self.model(x), y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss


def batches(count: int = 4) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(4, 3, generator=generator), torch.randn(4, 2, generator=generator)) for _ in range(count)
    ]


def parts(wrap: Callable[[Optimizer], Any]) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    return model, wrap(adam(model))


def counters(wrapper: Any) -> list[Any]:
    return [vars(wrapper).get("count"), vars(vars(wrapper).get("progress", Progress()))]


def trained(model: nn.Module, wrapper: Any, losses: list[torch.Tensor]) -> Any:
    rates = [group["lr"] for group in wrapper.param_groups]
    state = [dict(entries) for entries in wrapper.state.values()]
    return [losses, dict(model.state_dict()), state, rates, counters(wrapper)]


def eagerly(wrap: Callable[[Optimizer], Any], *, scheduled: bool = False) -> Any:
    model, wrapper = parts(wrap)
    scheduler = ExponentialLR(wrapper, 0.9) if scheduled else None
    losses = []
    for x, y in batches():
        loss = nn.functional.mse_loss(model(x), y)
        wrapper.zero_grad()
        loss.backward()
        wrapper.step()
        losses.append(loss.detach())
        if scheduler is not None:
            scheduler.step()
    return trained(model, wrapper, losses)


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
@pytest.mark.parametrize("kind", ["automatic", "manual", "eager"])
def test_wrappers_train_as_in_eager_mode(kind: str, wrap: Callable[[Optimizer], Any]) -> None:
    model, wrapper = parts(wrap)
    step = Manual(model, wrapper) if kind == "manual" else mg.train_graph(model, nn.MSELoss(), wrapper)
    call = step.eager if kind == "eager" else step
    losses = [call(x, y).detach() for x, y in batches()]
    assert_same(eagerly(wrap), trained(model, wrapper, losses))
    assert len(step.builds) <= 1, [build.reason for build in step.builds]
    assert "optimizer.0" in step.state_dict()


@pytest.mark.parametrize("name", ["accelerate", "lightning that counts", "twice"])
def test_schedulers_of_a_wrapper(name: str) -> None:
    wrap = WRAPPERS[name]
    model, wrapper = parts(wrap)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step = mg.train_graph(model, nn.MSELoss(), wrapper, ExponentialLR(wrapper, 0.9))
        losses = [step(x, y).detach() for x, y in batches()]
    assert_same(eagerly(wrap, scheduled=True), trained(model, wrapper, losses))


def test_a_scheduler_of_the_one_inside() -> None:
    model, wrapper = parts(Accelerated)
    step = mg.train_graph(model, nn.MSELoss(), wrapper, ExponentialLR(wrapper.optimizer, 0.9))
    losses = [step(x, y).detach() for x, y in batches()]
    assert_same(eagerly(Accelerated, scheduled=True), trained(model, wrapper, losses))


def test_a_wrapper_that_does_not_step_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    model, wrapper = parts(Accelerated)
    step = mg.train_graph(model, nn.MSELoss(), wrapper)
    x, y = batches(1)[0]
    step(x, y)
    monkeypatch.setattr(wrapper.gradient_state, "sync_gradients", False)
    with pytest.raises(
        mg.MonographError, match="step\\(\\) of the Accelerated has not stepped the Adam"
    ) as caught:
        step(x, y)
    assert "set_gradient_accumulation_steps" in caught.value.hint
    monkeypatch.setattr(wrapper.gradient_state, "sync_gradients", True)
    step(x, y)


def test_the_scaler_of_a_wrapper_is_told() -> None:
    model, wrapper = parts(lambda optimizer: Accelerated(optimizer, torch.amp.GradScaler("cpu")))
    with pytest.raises(mg.MonographError) as caught:
        mg.train_graph(model, nn.MSELoss(), wrapper)(*batches(1)[0])
    assert "set_grad_scaler" in str(caught.value)


# --- two optimizers in one ------------------------------------------------------------------------------------------------


class Lookahead(Optimizer):
    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer, self.param_groups = optimizer, optimizer.param_groups
        self.state, self.defaults = defaultdict(dict), optimizer.defaults

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


class SharpnessAware(Optimizer):
    def __init__(self, params: Any, base: type[Optimizer], **options: Any) -> None:
        super().__init__(params, {"rho": 0.05, **options})
        self.base_optimizer = base(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.base_optimizer.step(closure)


class Sharded(Optimizer):
    def __init__(self, params: Any, kind: type[Optimizer], **options: Any) -> None:
        super().__init__(params, options)
        self.optim = kind(self.param_groups, **options)

    def step(self, closure: Any = None) -> Any:
        return self.optim.step(closure)


class Closed:
    """A wrapper that shows nothing of the one inside."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.inner = optimizer

    def step(self) -> None:
        self.inner.step()


class Several:
    def __init__(self, *optimizers: Optimizer) -> None:
        self.optimizers = list(optimizers)

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()


class Unmade(Optimizer):
    def __init__(self, params: Any) -> None:
        self.parameters = list(params)

    def step(self, closure: Any = None) -> None:
        pass


REFUSED: dict[str, tuple[Callable[[nn.Module], Any], str, str]] = {
    "lookahead": (
        lambda m: Lookahead(adam(m)),
        "the Lookahead holds another optimizer, the Adam in its attribute optimizer",
        "self.add_optimizer(optimizer.optimizer)",
    ),
    "sharpness aware": (
        lambda m: SharpnessAware(m.parameters(), torch.optim.Adam, lr=0.1),
        "holds another optimizer, the Adam in its attribute base_optimizer",
        "self.add_optimizer(optimizer.base_optimizer)",
    ),
    "sharded": (
        lambda m: Sharded(m.parameters(), torch.optim.Adam, lr=0.1),
        "holds another optimizer, the Adam in its attribute optim",
        "self.add_optimizer(optimizer.optim)",
    ),
    "closed": (
        lambda m: Closed(adam(m)),
        "the Adam in its attribute inner, and does not show its param_groups and its state",
        "self.add_optimizer(optimizer.inner)",
    ),
    "several": (
        lambda m: Several(torch.optim.Adam([m.weight]), torch.optim.SGD([m.bias])),
        "the Several holds 2 optimizers",
        "self.add_optimizer(optimizer.optimizers[0]); self.add_optimizer(optimizer.optimizers[1])",
    ),
    "unmade": (lambda m: Unmade(m.parameters()), "got a Unmade", "super().__init__(params, defaults)"),
    "nothing": (lambda m: m, "optimizer is of type Linear; it takes a torch.optim.Optimizer", "the order is"),
}


@pytest.mark.every_case
@pytest.mark.parametrize(("make", "message", "hint"), REFUSED.values(), ids=REFUSED)
def test_two_in_one_are_refused(make: Callable[[nn.Module], Any], message: str, hint: str) -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(mg.MonographError) as caught:
        mg.train_graph(model, nn.MSELoss(), make(model))
    assert message in caught.value.message
    assert hint in caught.value.hint


class AcceleratedScheduler:
    def __init__(self, scheduler: Any, optimizer: Any) -> None:
        self.scheduler, self.optimizers = scheduler, [optimizer]

    def step(self) -> None:
        self.scheduler.step()


def test_a_wrapped_scheduler_is_told() -> None:
    model, wrapper = parts(Accelerated)
    scheduler: Any = AcceleratedScheduler(ExponentialLR(wrapper.optimizer, 0.9), wrapper)
    with pytest.raises(mg.MonographError) as caught:
        mg.train_graph(model, nn.MSELoss(), wrapper, scheduler)
    assert "lr_sch=scheduler.scheduler" in caught.value.hint
