"""A replay runs the program and nothing else: no build(), no forward, no Python of optimizers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from monograph.ir.meta import compute_nodes, origin
from tests.parity.case import Case, TrainStep, make_batches, make_side, sgd
from tests.parity.test_features import clip_norm
from tests.parity.test_models import (
    classification,
    conv,
    conv_batch,
    gpt,
    gpt_batch,
    mlp,
    mlp_batch,
    next_token,
)

CONV = Case("conv", conv, conv_batch, classification, optimizer=sgd)
GPT = Case("gpt", gpt, gpt_batch, next_token)
CLIPPED = Case("clipped", mlp, mlp_batch, classification, clip_norm)
CASES = (CONV, GPT, CLIPPED)


@cache
def built(case: Case) -> TrainStep:
    step = TrainStep(case, make_side(case))
    step(*make_batches(case)[0])
    return step


@contextmanager
def counted(step: TrainStep) -> Iterator[Counter[str]]:
    """Count the calls of build(), of every module's forward, of optimizers and of autograd."""
    calls: Counter[str] = Counter()

    def counting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return function(*args, **kwargs)

        return run

    places = [
        (TrainStep, "build"),
        (nn.Module, "__call__"),
        (torch.Tensor, "backward"),
        (torch.autograd, "backward"),
        (torch.optim.AdamW, "step"),
        (torch.optim.SGD, "step"),
        *{(type(module), "forward") for module in step.model.modules()},
    ]
    with ExitStack() as stack:
        for owner, name in places:
            label = f"{owner.__name__}.{name}"
            stack.enter_context(mock.patch.object(owner, name, counting(label, getattr(owner, name))))
        yield calls


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_replay_calls_no_python_of_the_user(case: Case) -> None:
    first, second, *others = make_batches(case)
    step = TrainStep(case, make_side(case))
    with counted(step) as calls:  # all the time: a forward that is replaced means a new build
        step.eager(*first)
        assert {"TrainStep.build", "Module.__call__", "Linear.forward", "Tensor.backward"} <= calls.keys()
        assert calls["AdamW.step"] + calls["SGD.step"] == 1
        step(*second)
        calls.clear()
        for batch in others:
            step(*batch)
        assert not calls
    assert len(step.builds) == 1


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_replay_dispatches_the_ops_of_the_program_in_order(case: Case) -> None:
    step, batch = built(case), make_batches(case)[1]
    with Seen() as seen:
        step(*batch)
    program = [node.target for node in compute_nodes(step.builds[0].program.graph)]
    assert seen.ops == [op for op in program if isinstance(op, torch._ops.OpOverload)]
    assert len(step.builds) == 1


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_program_holds_the_whole_step(case: Case) -> None:
    program = built(case).builds[0].program
    phases = Counter(origin(node).phase for node in compute_nodes(program.graph))
    assert phases["forward"] > 0
    assert phases["backward"] > 0
    assert phases["update"] > 0
    assert (phases["clip"] > 0) == (case is CLIPPED)
    updated = {port.path for _, port in program.updates()}
    state = {
        port.path for port in program.inputs if port.role in ("param", "optim") or "running" in port.path
    }
    assert state <= updated


@pytest.mark.parametrize("case", [CONV, GPT], ids=str)
def test_the_ops_know_where_they_come_from(case: Case) -> None:
    nodes = list(compute_nodes(built(case).builds[0].program.graph))
    known = [node for node in nodes if origin(node).file or origin(node).module]
    assert len(known) >= 0.98 * len(nodes)


def test_backward_and_update_name_the_layer_they_work_for() -> None:
    step = built(CONV)
    found: dict[tuple[str, str], Counter[str]] = {}
    for node in compute_nodes(step.builds[0].program.graph):
        place = origin(node)
        found.setdefault((place.phase, str(node.target)), Counter())[place.module] += 1
    assert set(found["backward", "aten.native_batch_norm_backward.default"]) == {"model.1"}
    assert set(found["backward", "aten.convolution_backward.default"]) == {"model.0", "model.4"}
    assert set(found["forward", "aten.convolution.default"]) == {"model.0", "model.4"}
