"""What ranks agree on before their first step, and what becomes of a rank that is killed, stopped, late or deviates."""

from __future__ import annotations

import logging
import os
import signal
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives  # the ops are defined there
from torch import fx

import monograph as mg
from monograph.distributed.agreement import Agreement, Ranks, Signature, Watch, signature_of
from monograph.distributed.agreement.signature import difference
from tests.distributed.processes import Group, on_ranks

OPS = torch.ops._c10d_functional
TIMEOUT = 2.0


def step_graph(*reduced: torch.Tensor, first: object = OPS.all_reduce.default) -> fx.Graph:
    """A graph by hand that reduces each tensor and waits for it."""
    graph = fx.Graph()
    for number, tensor in enumerate(reduced):
        value = graph.placeholder(f"x{number}")
        value.meta["val"] = tensor
        options = ("sum", "7") if number or first is OPS.all_reduce.default else (2, "7")
        begun = graph.call_function(OPS.all_reduce.default if number else first, (value, *options))
        begun.meta["val"] = tensor
        waited = graph.call_function(OPS.wait_tensor.default, (begun,))
        waited.meta["val"] = tensor
    graph.output(waited)
    return graph


def signature(*reduced: torch.Tensor, **options: object) -> Signature:
    return signature_of(step_graph(*reduced, **options).nodes)


A, B = torch.zeros(4, 3), torch.zeros(5)
USUAL = signature(A, B)


def test_the_signature_is_the_collectives_in_order() -> None:
    assert USUAL.text.splitlines() == [
        "all_reduce(sum) of float32[4, 3] in group '7'",
        "all_reduce(sum) of float32[5] in group '7'",
    ]
    named = signature_of(step_graph(A, B).nodes, {"7": "dp"})
    assert "group 'dp'" in named.text
    assert named.digest == signature_of(step_graph(A.clone(), B.clone()).nodes, {"7": "dp"}).digest
    others = [
        signature_of(graph.nodes).digest
        for graph in (
            step_graph(B, A),
            step_graph(A),
            step_graph(A.double(), B),
            step_graph(A[:3], B),
            step_graph(A, B, first=OPS.all_gather_into_tensor.default),
        )
    ]
    assert len({USUAL.digest, *others}) == 6


def test_what_a_rank_sends_to_another_is_not_compared() -> None:
    graph = step_graph(A)
    value = next(iter(graph.nodes))
    with graph.inserting_after(value):
        sent = graph.call_function(OPS.isend.default, (value, 1, 0, "7"))
        sent.meta["val"] = A
    assert signature_of(graph.nodes) == signature(A)


def test_sizes_that_ranks_choose_are_not_compared() -> None:
    def exchange(rows: int) -> Signature:
        graph = fx.Graph()
        value = graph.placeholder("x")
        value.meta["val"] = torch.zeros(rows, 3)
        graph.call_function(OPS.all_to_all_single.default, (value, [rows, 1], [1, rows], "7"))
        return signature_of(graph.nodes)

    assert exchange(4) == exchange(5)
    assert exchange(4).text == "all_to_all_single of float32[?, 3] in group '7'"


def test_the_first_difference_is_said_in_words() -> None:
    usual, other = USUAL.text, signature(A, B.double()).text
    deviating, said = difference([usual, other, usual, other, usual])
    assert deviating == [1, 3]
    assert said == (
        "collective 2 of the step is all_reduce(sum) of float64[5] in group '7', "
        "and elsewhere all_reduce(sum) of float32[5] in group '7'"
    )
    assert "is no more, and elsewhere all_reduce" in difference([usual, signature(A).text])[1]


# --- on ranks --------------------------------------------------------------------------------------------------------


def error_of(function, *arguments) -> str:
    try:
        function(*arguments)
    except mg.DistributedError as error:
        return error.message
    return ""


def seen_late(others, what: str):
    """The others, at whom a rank looks when they have gone on."""
    watcher = others(what)
    look = watcher.look

    def late():
        time.sleep(0.3)
        return look()

    watcher.look = late
    return watcher


def agreeing() -> dict[str, object]:
    """Everything that needs no fault, in one group."""
    rank = dist.get_rank()
    found: dict[str, object] = {}

    def pair(name: str, seconds: float = TIMEOUT) -> Agreement:
        ranks = Ranks(name, seconds=seconds)
        return Agreement(ranks)

    usual = pair("usual")
    usual.confirm(USUAL)
    plain, asked = usual.ranks.meet, []
    usual.ranks.meet = lambda *arguments: asked.append(1) or plain(*arguments)
    begin = time.perf_counter()
    for _ in range(1000):
        usual.confirm(Signature(USUAL.collectives))  # a batch of another size: the same collectives
    found["microseconds"] = (time.perf_counter() - begin) * 1000
    found["asked again"] = len(asked)
    new = signature(B)
    usual.confirm(new)
    usual.confirm(USUAL)
    found["asked of several"] = len(asked)

    deviations = {
        "order": step_graph(B, A),
        "dtype": step_graph(A, B.double()),
        "shape": step_graph(A, torch.zeros(6)),
        "fewer": step_graph(A),
        "op": step_graph(A, B, first=OPS.all_gather_into_tensor.default),
    }
    for name, graph in deviations.items():
        found[name] = error_of(pair(name).confirm, signature_of(graph.nodes) if rank else USUAL)
    one_of_two = pair("one of two")
    one_of_two.confirm(USUAL)
    one_of_two.confirm(new)
    found["one of two"] = error_of(one_of_two.confirm, USUAL if rank else new)
    missing = pair("missing", seconds=0.5)
    if rank == 0:
        found["missing"] = error_of(missing.confirm, USUAL)
    dist.barrier()
    first_missing = pair("first is missing", seconds=0.5)
    if rank == 1:
        found["missing"] = error_of(first_missing.confirm, USUAL)
    dist.barrier()
    for name in ("missing", "first is missing"):  # what one rank has left there does no harm
        pair(name).confirm(USUAL)
    pairs = [dist.new_group([0]), dist.new_group([1])]
    of_one = Ranks("of one", pairs[rank])
    found["named"] = of_one.named([0]), of_one.meet("here", "to be alone")
    known = pair("known")
    known.confirm(USUAL)
    if rank:  # it has these collectives in each step, and rank 0 suddenly others
        known.watch.begin(8, 0, USUAL.digest)
    else:
        found["known"] = error_of(known.confirm, new)
    dist.barrier()
    ahead = pair("ahead")
    ahead.confirm(USUAL)
    if rank:
        ahead.watch.others = partial(seen_late, ahead.watch.others)
    found["ahead"] = error_of(ahead.meet, "verify")
    if rank == 0:
        ahead.watch.begin(4, 0, USUAL.digest)
    dist.barrier()
    found["refused"] = error_of(known.watch.begin, 9, 0) if rank == 0 else ""
    begin = time.perf_counter()
    for step in range(1000):
        usual.watch.begin(step, 0, USUAL.digest)
    found["microseconds of a word"] = (time.perf_counter() - begin) * 1000
    alone = pair("timed")
    with alone.step(0, 0, USUAL):
        pass
    begin = time.perf_counter()
    for step in range(1000):
        with alone.step(step, 0, USUAL):
            pass
    found["microseconds of a step"] = (time.perf_counter() - begin) * 1000
    begin = time.perf_counter()
    for _ in range(100):
        usual.confirm(USUAL)
    found["microseconds of a question"] = (time.perf_counter() - begin) * 10000
    dist.barrier()
    return found


@pytest.fixture(scope="module")
def agreed() -> list[dict[str, object]]:
    return on_ranks(agreeing)


def test_a_known_signature_is_not_asked_about(agreed: list[dict[str, object]]) -> None:
    for found in agreed:
        assert found["asked again"] == 0
        assert found["asked of several"] == 2


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("deviation", "here", "there"),
    [
        (
            "order",
            "collective 1 of the step is all_reduce(sum) of float32[5]",
            "all_reduce(sum) of float32[4, 3]",
        ),
        (
            "dtype",
            "collective 2 of the step is all_reduce(sum) of float64[5]",
            "all_reduce(sum) of float32[5]",
        ),
        (
            "shape",
            "collective 2 of the step is all_reduce(sum) of float32[6]",
            "all_reduce(sum) of float32[5]",
        ),
        ("fewer", "collective 2 of the step is no more", "all_reduce(sum) of float32[5]"),
        ("op", "collective 1 of the step is all_gather_into_tensor(2)", "all_reduce(sum) of float32[4, 3]"),
    ],
)
def test_all_ranks_hear_who_deviates_and_how(
    agreed: list[dict[str, object]], deviation: str, here: str, there: str
) -> None:
    first, second = (str(found[deviation]) for found in agreed)
    assert first == second
    assert first.startswith(f"rank 1 would run other collectives than the others: {here}")
    assert f", and elsewhere {there}" in first


def test_ranks_that_mix_up_two_known_steps_are_stopped(agreed: list[dict[str, object]]) -> None:
    assert agreed[0]["one of two"] == agreed[1]["one of two"]
    assert "rank 1 would run other collectives" in str(agreed[0]["one of two"])


def test_a_rank_that_does_not_come_is_named(agreed: list[dict[str, object]]) -> None:
    for rank in (0, 1):
        assert agreed[rank]["missing"] == (
            f"rank {1 - rank} did not come to agree on the collectives of this step within 0.5 seconds"
        )


def test_ranks_of_a_part_have_the_names_of_all(agreed: list[dict[str, object]]) -> None:
    assert [found["named"] for found in agreed] == [("rank 0", ["here"]), ("rank 1", ["here"])]


def test_a_rank_that_runs_already_is_not_waited_for(agreed: list[dict[str, object]]) -> None:
    assert str(agreed[0]["known"]).startswith("rank 1 is in step 8 (build 0) already")
    assert agreed[0]["refused"] == agreed[0]["known"]


def test_a_rank_that_has_gone_on_after_the_meeting_is_no_failure(agreed: list[dict[str, object]]) -> None:
    assert [found["ahead"] for found in agreed] == ["", ""]


def waiting() -> list[str]:
    """What a rank logs that waits for the other one."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("monograph").addHandler(handler)
    ranks = Ranks("late", seconds=30, patience=0.2)
    for wait in (1.0, 0.0):
        time.sleep(wait * dist.get_rank())
        ranks.meet("here", 'to save "run"')
    return lines


def test_a_rank_that_waits_says_for_whom() -> None:
    first, second = on_ranks(waiting)
    assert second == []
    (line,) = first
    assert line.startswith('rank 0 has waited 0 seconds to save "run": rank 1 did not come so far')
    assert "an error after 30 seconds" in line


def reducing(fault: str, rank_of_fault: int) -> list[int]:
    """Five steps of one sum each; one rank does something else in the fourth."""
    watch = Watch(Ranks("reducing"))
    me, sums = dist.get_rank(), []
    try:
        for step in range(5):
            is_here = step == 3 and me == rank_of_fault
            if is_here and fault == "late":
                time.sleep(2.5 * TIMEOUT)
            with watch.step(step, 0):
                if is_here:
                    watch.doing("all_reduce of fc.weight")
                    happens(fault)
                value = torch.full((4,), step + me)
                dist.all_reduce(value)
                sums.append(int(value[0]))
        return sums
    except mg.DistributedError as error:
        if error_of(watch.begin, 4, 0) != error.message:
            raise RuntimeError("another step began") from error
        raise


def happens(fault: str) -> None:
    if fault == "raises":
        raise ValueError("bad batch")
    if fault == "slow":
        time.sleep(2.5 * TIMEOUT)
    if fault in ("killed", "stopped"):
        os.kill(os.getpid(), signal.SIGKILL if fault == "killed" else signal.SIGSTOP)


CASES = {
    "no fault": ("", 1, 2, False),
    "killed": ("killed", 1, 2, False),
    "killed of four": ("killed", 2, 4, False),
    "stopped": ("stopped", 1, 2, False),
    "late": ("late", 0, 2, False),
    "slow": ("slow", 1, 2, False),
    "raises": ("raises", 1, 2, False),
    "killed with the store": ("killed", 0, 2, True),
    "stopped with the store": ("stopped", 0, 2, True),
}


@pytest.fixture(scope="module")
def outcomes():
    """All at once: they mostly wait."""
    groups = {
        name: Group(reducing, size, fault, rank, seconds=TIMEOUT, store_in_rank_0=in_rank)
        for name, (fault, rank, size, in_rank) in CASES.items()
    }
    return {
        name: group.results(stopped=[CASES[name][1]] if "stopped" in name else [])
        for name, group in groups.items()
    }


def test_without_a_fault_nothing_is_said(outcomes) -> None:
    assert [outcome.value for outcome in outcomes["no fault"]] == [[1, 3, 5, 7, 9]] * 2


@pytest.mark.every_case
@pytest.mark.quick
@pytest.mark.parametrize(
    ("case", "said"),
    [
        (
            "killed",
            "rank 1 is gone or stopped: rank 1 was last in step 3 (build 0, in all_reduce of fc.weight)",
        ),
        (
            "killed of four",
            "rank 2 is gone or stopped: rank 2 was last in step 3 (build 0, in all_reduce of fc.weight)",
        ),
        (
            "stopped",
            "rank 1 is gone or stopped: rank 1 was last in step 3 (build 0, in all_reduce of fc.weight)",
        ),
        (
            "late",
            "rank 0 is late: rank 0 was last in step 2 (build 0), and the others waited in step 3 (build 0)",
        ),
        (
            "slow",
            "rank 1 is late: rank 1 was last in step 3 (build 0, in all_reduce of fc.weight), and the others waited",
        ),
        ("raises", "rank 1 failed in step 3 (build 0, in all_reduce of fc.weight): ValueError: bad batch"),
        (
            "killed with the store",
            "is gone or stopped, which is rank 0 unless torchrun has it; rank 1 was in step 3",
        ),
        (
            "stopped with the store",
            "is gone or stopped, which is rank 0 unless torchrun has it; rank 1 was in step 3",
        ),
    ],
)
def test_survivors_name_the_rank_its_step_and_what_it_did(outcomes, case: str, said: str) -> None:
    fault, rank, size, _ = CASES[case]
    for survivor in set(range(size)) - {rank}:
        outcome = outcomes[case][survivor]
        assert isinstance(outcome.error, mg.DistributedError), outcome
        assert said in outcome.error.message
        assert "torchrun" in outcome.error.hint
    there = outcomes[case][rank]
    if fault == "raises":
        assert isinstance(there.error, ValueError)
    elif fault in ("late", "slow"):
        assert isinstance(there.error, mg.DistributedError)  # it comes to a group that has given up
    else:
        assert not there.is_alive
