"""Guards on tensors alone: what they are, where they are in memory, their hooks; and shared objects that somebody lets go."""

from __future__ import annotations

import torch

from monograph.capture.guards.tensors import TensorGuards, has_hooks
from monograph.capture.guards.weak import SharedObjects


def guards_on(**tensors: torch.Tensor) -> TensorGuards:
    guards = TensorGuards(tensors, {})
    guards.settle()
    return guards


def test_another_form_is_named():
    weight = torch.zeros(2, 3)
    guards = guards_on(weight=weight)
    assert guards.checks.hold()
    assert guards.changed() is None
    weight.resize_(3, 2)
    assert not guards.checks.hold()
    assert "weight" in str(guards.changed())


def test_other_memory_is_named_but_where_it_may_be():
    weight = torch.zeros(2)
    guards = guards_on(weight=weight)
    weight.set_(torch.ones(2))
    assert not guards.checks.hold()
    assert guards.changed() == "storage of weight was replaced"
    assert guards.changed(without=["weight"]) is None
    guards.settle()
    assert guards.checks.hold()


def test_a_new_hook_and_one_that_is_gone():
    weight = torch.zeros(2, requires_grad=True)
    guards = guards_on(weight=weight)
    assert guards.hooks_hold()
    handle = weight.register_hook(lambda gradient: gradient)
    assert has_hooks(weight)
    assert not guards.hooks_hold()
    assert guards.hooks_changed() == "a hook of weight was registered"
    guards.settle()
    assert guards.hooks_hold()
    handle.remove()
    assert not guards.hooks_hold()
    assert guards.hooks_changed() == "a hook of a parameter was removed"


def test_released_guards_never_hold():
    assert not TensorGuards.released().checks.hold()


class Thing:
    """Somebody has it, and the build."""


def test_shared_objects_hold_until_somebody_lets_go():
    thing, other = Thing(), Thing()
    shared = SharedObjects([thing])
    assert shared.are_loose
    shared.share(iter([thing, other]), set())  # a list would hold them too
    assert shared.objects == [thing]
    assert shared.hold()
    del thing
    assert not shared.hold()


def test_state_is_looked_at_by_others():
    thing = Thing()
    shared = SharedObjects([thing])
    shared.share([thing], {id(thing)})
    assert shared.objects == [thing]
    assert shared.counted == []
    assert not SharedObjects([]).are_loose
