"""Programs of ranks that would hang, or give wrong numbers, are refused; those that fit each other are not.

`MONOGRAPH_EXAMPLES=1000 pytest -m long tests/distributed/test_rank_programs.py` puts in a thousand faults.
"""

from __future__ import annotations

import os
from collections import Counter
from random import Random

import pytest

from monograph.distributed.planning.check import RankProgram, check_ranks
from monograph.errors import DistributedError
from monograph.ir.meta import add_label
from monograph.ir.port import Role
from monograph.ir.program import Program
from tests.distributed.rank_programs import FAULTS, SETS, WORLD, Ranks, Writer, aten, c10d, faulty

MANY = int(os.environ.get("MONOGRAPH_EXAMPLES", "300"))


@pytest.mark.parametrize("make", SETS)
def test_programs_that_fit_are_accepted(make):
    for seed in range(8):
        check_ranks(make(Random(seed)))


def missed(count: int) -> tuple[Counter[str], list[str]]:
    """The faults that were put in, and those that nobody found."""
    tried, left = Counter[str](), []
    for seed in range(count):
        name, ranks = faulty(Random(seed))
        tried[name] += 1
        try:
            check_ranks(ranks)
        except DistributedError:
            continue
        left.append(f"{seed}: {name}")
    return tried, left


def test_faults_are_found():
    tried, left = missed(60)
    assert left == []
    assert len(tried) > len(FAULTS) * 2 / 3


@pytest.mark.long
def test_many_faults_are_found():
    tried, left = missed(MANY)
    assert left == []
    assert tried.keys() == FAULTS.keys()


def summed_beside_parts(*, is_same: bool) -> Ranks:
    """A sum that each rank gives whole for all parts of another one; or a part of it for each, which none then holds whole."""

    def program() -> Program:
        writer = Writer()
        x, bias = writer.input("x", Role.USER, 8, 4), writer.input("b", Role.PARAM, 4)
        gradient = writer.op(aten.sum.dim_IntList, x, [0], shape=(4,))
        if is_same:
            row = writer.op(aten.view.default, gradient, [1, 4], shape=(1, 4))
            row = writer.op(aten.expand.default, row, [2, 4], shape=(2, 4))
        else:
            row = writer.op(
                aten.view.default,
                writer.op(aten.cat.default, [gradient] * 2, shape=(8,)),
                [2, 4],
                shape=(2, 4),
            )
        rows = writer.op(
            aten.cat.default, [writer.op(aten.view.default, x, [2, 16], shape=(2, 16)), row], 1, shape=(2, 20)
        )
        flat = writer.op(aten.view.default, rows, [40], shape=(40,))
        made = writer.awaited(c10d.reduce_scatter_tensor.default, flat, "sum", 2, WORLD, shape=(20,))
        summed = writer.op(aten.slice.Tensor, made, 0, 16, 20, shape=(4,))
        writer.outputs.append((writer.op(aten.sub.Tensor, bias, summed), Role.STATE, "b"))
        return writer.finish()

    return {rank: RankProgram(program(), {WORLD: (0, 1)}) for rank in range(2)}


def test_sums_may_go_with_scattered_sums():
    check_ranks(summed_beside_parts(is_same=True))
    with pytest.raises(DistributedError, match="the new b is one part of several"):
        check_ranks(summed_beside_parts(is_same=False))


def gathered_by_stages(orders: list[list[str]]) -> Ranks:
    """Ranks of a pipeline that each give numbers of their own to gathers of one form, which they know by these names."""

    def program(rank: int, order: list[str]) -> Program:
        writer = Writer()
        for index, name in enumerate(order):
            own = writer.input(f"w{rank}_{index}", Role.PARAM, 1)
            begun = writer.op(c10d.all_gather_into_tensor.default, own, 2, WORLD, shape=(2,))
            add_label(begun, name)
            writer.outputs.append((writer.op(c10d.wait_tensor.default, begun), Role.USER, name))
        return writer.finish()

    groups = {WORLD: (0, 1)}
    return {
        rank: RankProgram(program(rank, order), groups, shares=False) for rank, order in enumerate(orders)
    }


def test_stages_gather_numbers_of_their_own_in_one_order():
    check_ranks(gathered_by_stages([["norms", "infinities"], ["norms", "infinities"]]))
    for other in (["infinities", "norms"], ["norms"], ["norms", "norms"]):
        with pytest.raises(DistributedError, match="rank 1 would run other collectives"):
            check_ranks(gathered_by_stages([["norms", "infinities"], other]))
