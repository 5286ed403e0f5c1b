"""All or nothing with a scaler, autocast, clipping keys and an average: failures, interrupts, and facts that change."""

from __future__ import annotations

import copy
import sys
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from monograph import graph as graph_module
from monograph.internals.internals import internals_of
from monograph.runtime import executor
from monograph.state import averages
from tests.amp.mixed import Recipe, Side, Step, adamw, growing, infinite_at, plain_trail, sgd
from tests.support import assert_same
from tests.support.small import one_thread  # noqa: F401


def keyed(model: nn.Module) -> torch.optim.Optimizer:
    group = {"params": list(model.parameters()), "clip_grad_max_norm": 0.2, "lr_scale": 0.5}
    return torch.optim.AdamW([group], lr=0.01)


RECIPE = Recipe(keyed, scaler=growing, amp=torch.bfloat16, decay=0.9)


def world(side: Side) -> dict[str, Any]:
    """What a failure must leave alone, besides the numbers."""
    return {
        **side.state(),
        "scaler's attributes": sorted(set(vars(side.scaler)) - {"_scale", "_growth_tracker"}),
        "unscaled": dict(side.scaler._per_optimizer_states),
        "optimizer's attributes": sorted(set(vars(side.optimizer)) - {"_opt_called"}),
        "groups": [sorted(group) for group in side.optimizer.param_groups],
        "backward": torch.autograd.backward,
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        "cache": torch.is_autocast_cache_enabled(),
        "gradients": [p.grad for p in side.model.parameters()],
    }


class Own(Exception):
    pass


class Tripping(Step):
    """Fails where it is told to, once."""

    at: Any = ""

    def trip(self, here: str) -> None:
        if self.at == here:
            raise Own

    def build(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.trip("before")
        loss = F.cross_entropy(self.model(x), y)
        self.trip("after forward")
        loss.backward()
        self.trip("after backward")
        if self.at in ("after reading", "in step"):
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.trip("after reading")
        return loss


WHERE = ("before", "after forward", "after backward", "after reading", "in hook")


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("at", "after", "eager"),
    [
        *((at, 0, False) for at in WHERE),
        *((at, 1, True) for at in WHERE),
        ("after reading", 2, False),
        ("in hook", 2, False),
    ],
)
def test_a_failure_changes_nothing_and_can_be_tried_again(at: str, after: int, eager: bool) -> None:
    batches = infinite_at(3, count=4)
    expected = plain_trail(RECIPE, batches)
    side = RECIPE.side()
    step = Tripping(RECIPE, side)
    torch.manual_seed(1)
    for index in range(after):
        assert_same(
            expected[index], {"loss": step(*batches[index]).detach(), **side.state()}, f"step {index}"
        )
    before, random = world(side), torch.get_rng_state()

    def fails(_gradient: torch.Tensor) -> None:
        raise Own

    hook = side.model.last.weight.register_hook(fails) if at == "in hook" else None
    step.at = at
    with pytest.raises(Own):
        (step.eager if eager else step)(*batches[after])
    step.at = ""
    if hook is not None:
        hook.remove()
    now = world(side)
    if eager:  # a forward that ran has drawn numbers and moved the buffers: plain PyTorch does not undo them
        for kept in (before, now):
            kept["model"] = {key: value for key, value in kept["model"].items() if "norm." not in key}
            kept["average"] = [value for key, value in kept["average"].items() if "norm." not in key]
            kept.pop("rng")
    assert_same(before, now, "world")
    if not eager:
        torch.set_rng_state(random)
        for index in range(after, len(batches)):
            made = {"loss": step(*batches[index]).detach(), **side.state()}
            if not expected[index]["optimizer"]["state"]:
                made["optimizer"]["state"] = {}
            assert_same(expected[index], made, f"step {index}")


def test_an_autocast_block_that_build_never_leaves_keeps_no_casts() -> None:
    """Its casts of weights would be used by every later block, also of plain PyTorch."""
    side = Recipe(adamw).side()
    depth = torch.autocast_increment_nesting(), torch.autocast_decrement_nesting()

    class Leaves(Step):
        def build(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            torch.autocast("cpu", torch.float16, cache_enabled=False).__enter__()
            raise Own

    with pytest.raises(Own):
        Leaves(RECIPE, RECIPE.side())(*infinite_at()[0])
    assert depth == (torch.autocast_increment_nesting(), torch.autocast_decrement_nesting())
    assert not torch.is_autocast_enabled("cpu")
    assert torch.get_autocast_dtype("cpu") == torch.bfloat16
    assert torch.is_autocast_cache_enabled()
    x = infinite_at()[0][0]
    with torch.autocast("cpu"):
        before = side.model.first(x)
    with torch.no_grad():
        side.model.first.weight.mul_(2)
    with torch.autocast("cpu"):
        assert not torch.equal(before, side.model.first(x))


# --- steps that are cut short ----------------------------------------------------------------------------------------


class CutShort(TorchDispatchMode):
    """Raises at the n-th op."""

    def __init__(self, at: int, error: type[BaseException]) -> None:
        super().__init__()
        self.left, self.error = at, error

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.left == 0:
            raise self.error("cut short")
        self.left -= 1
        return func(*args, **(kwargs or {}))


@pytest.mark.one_case
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_step_cut_short_at_some_op_is_as_if_it_had_not_been(error: type[BaseException]) -> None:
    batches = infinite_at(2, count=4)
    expected = plain_trail(RECIPE, batches)
    side = RECIPE.side()
    step = Step(RECIPE, side)
    torch.manual_seed(1)
    for index, batch in enumerate(batches):
        before, random = side.state(), torch.get_rng_state()
        for at in range(0, 150, 17) if index else ():
            with pytest.raises(error), CutShort(at, error):
                step(*batch)
            assert_same(before, side.state(), f"op {at}")
            torch.set_rng_state(random)
        assert_same(expected[index], {"loss": step(*batch).detach(), **side.state()}, f"step {index}")


class Interrupts:
    """Raises KeyboardInterrupt at the n-th line that runs in the package's files, as a signal could."""

    def __init__(self, at: int) -> None:
        self.left = at
        self.files = {module.__file__ for module in (executor, averages, graph_module)}

    def __enter__(self) -> Interrupts:
        sys.settrace(self._calls)
        return self

    def __exit__(self, *_error: object) -> None:
        sys.settrace(None)

    def _calls(self, frame: FrameType, _event: str, _arg: Any) -> Any:
        return self._lines if frame.f_code.co_filename in self.files else None

    def _lines(self, _frame: FrameType, event: str, _arg: Any) -> Any:
        if event == "line":
            self.left -= 1
            if self.left == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self._lines


@pytest.mark.one_case
@pytest.mark.parametrize("first", [True, False], ids=["first replay", "later"])
def test_an_interrupt_at_any_line_loses_and_doubles_no_update(first: bool) -> None:
    recipe = Recipe(sgd, scaler=growing, decay=lambda n: n / (n + 1))
    batch = infinite_at()[0]
    side = recipe.side()
    step = Step(recipe, side)
    step(*batch)
    start, random = copy.deepcopy(step.state_dict()), torch.get_rng_state()
    if first:
        start["ema.model"]["n_averaged"].zero_()
    step.load_state_dict(start)
    step(*batch)
    whole = side.state()
    step.load_state_dict(start)
    none, at, outcomes = side.state(), 1, set()
    while True:
        step.load_state_dict(start)
        torch.set_rng_state(random)
        try:
            with Interrupts(at):
                step(*batch)
            break
        except KeyboardInterrupt:
            done = (
                internals_of(step).registry.averages[0].updates == int(start["ema.model"]["n_averaged"]) + 1
            )
            assert_same(whole if done else none, side.state(), f"line {at}")
            outcomes.add(done)
        at += 1
    assert at > 50
    assert outcomes == {True, False}
    assert len(step.builds) == 1


# --- facts -----------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_the_program_and_the_explanation_tell_of_all() -> None:
    step = Step(RECIPE, RECIPE.side())
    for batch in infinite_at(1)[:2]:
        step(*batch)
    roles = {port.role.value for port in step.builds[0].program.inputs}
    assert {"scaler", "ema", "hyper", "optim", "param"} <= roles
    text, why, tree = step.show(), step.explain(), repr(step)
    for part in (
        "scaler/scale",
        "scaler/growth_tracker",
        "ema/model/first.weight",
        "ema_weight/model",
        "bfloat16",
    ):
        assert part in text
    for phase in ("scale", "average", "clip", "update"):
        assert f"  {phase}  " in text, phase
    assert "scaler.growth_interval = 2" in why
    assert "amp=torch.bfloat16" in tree
    step.set_grad_scaler(None)
    step(*infinite_at()[0])
    assert "build 1" in step.explain()


def test_the_patched_modules_are_as_before() -> None:
    clipping = sys.modules["torch.nn.utils.clip_grad"]
    step = Step(RECIPE, RECIPE.side())
    step(*infinite_at()[0])
    step.eager(*infinite_at()[1])
    assert "float" not in vars(clipping)
