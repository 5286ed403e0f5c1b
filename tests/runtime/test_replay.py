"""A replay runs the program and nothing else: no build(), no forward, no Python of optimizers."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import pytest

from monograph.ir.meta import compute_nodes, origin
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
from tests.support import ROOT
from tests.support.case import Case, TrainStep, make_batches, make_side, sgd
from tests.support.seen import Seen, ops_of

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
def files_that_run() -> Iterator[set[str]]:
    """The files of all Python functions that are called inside."""
    files: set[str] = set()
    sys.setprofile(lambda frame, event, _argument: files.add(frame.f_code.co_filename))
    try:
        yield files
    finally:
        sys.setprofile(None)


def is_of_the_step(file: str) -> bool:
    return any(
        part in file
        for part in (
            "/torch/nn/",
            "/torch/optim/",
            f"{ROOT}/tests/",
            "/torch/_tensor.py",
            "/autograd/__init__.py",
        )
    )


@pytest.mark.one_case
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_replay_calls_no_python_of_the_user(case: Case) -> None:
    first, second, *others = make_batches(case)
    step = TrainStep(case, make_side(case))
    with files_that_run() as files:
        step.eager(*first)
    assert any("/torch/nn/" in file for file in files)
    assert any("/torch/optim/" in file for file in files)
    step(*second)
    with files_that_run() as files:
        for batch in others:
            step(*batch)
    assert not set(filter(is_of_the_step, files)) - {__file__}
    assert len(step.builds) == 1


@pytest.mark.one_case
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_replay_dispatches_the_ops_of_the_program(case: Case) -> None:
    step, batch = built(case), make_batches(case)[1]
    with Seen() as seen:
        step(*batch)
    assert not ops_of(step.builds[0].program) - seen.ops
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
