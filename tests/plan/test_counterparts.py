"""Ops on lists give the bits of single ops, for all that updates of torch's optimizers call."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from monograph.plan.updates import counterparts
from monograph.plan.updates.counterparts import Kind, NumberTensors, op_in_place, op_on_lists
from tests.support import assert_same

aten = torch.ops.aten
CALLS = (
    (aten.add.Tensor, 1, "float", ""),
    (aten.add.Tensor, 1, "int", ""),
    (aten.add.Tensor, 1, "small int", ""),
    (aten.sub.Tensor, 1, "float", ""),
    (aten.add.Tensor, 2, "", ""),
    (aten.add.Tensor, 2, "float", "alpha"),
    (aten.sub.Tensor, 2, "", ""),
    (aten.mul.Tensor, 1, "float", ""),
    (aten.mul.Tensor, 2, "", ""),
    (aten.div.Tensor, 1, "float", ""),
    (aten.div.Tensor, 2, "", ""),
    (aten.lerp.Scalar, 2, "float", ""),
    (aten.addcmul.default, 3, "float", "value"),
    (aten.addcdiv.default, 3, "float", "value"),
    (aten.addcdiv.default, 3, "", ""),
    (aten.sqrt.default, 1, "", ""),
    (aten.neg.default, 1, "", ""),
    (aten.abs.default, 1, "", ""),
    (aten.sign.default, 1, "", ""),
    (aten.reciprocal.default, 1, "", ""),
    (aten.maximum.default, 2, "", ""),
)
SPECIAL = torch.tensor(
    [0.0, -0.0, math.inf, -math.inf, math.nan, 1e-40, -3e-42, 5e-324, 1.0, -2.5, 3e38, -3e38, 6e4],
    dtype=torch.float64,
)
OTHER_BITS = {
    (aten.mul.Tensor, torch.bfloat16),
    (aten.mul.Tensor, torch.float16),
}  # they round the number first
NUMBERS = (0.1, -0.0, 1e-8, -1.7, math.inf, math.nan, 3.0, 1e-42, 0.30000001192092896, 2.5e-320)


def values(dtype: torch.dtype, size: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * size + seed)
    drawn = torch.randn(size, generator=generator, dtype=torch.float64)
    special = SPECIAL[torch.randint(len(SPECIAL), (size,), generator=generator)]
    return torch.where(torch.rand(size, generator=generator) < 0.4, special, drawn).to(dtype)


def call(op: Any, tensors: list[Any], named: str, number: Any) -> Any:
    given = () if number is None or named else (number,)
    return op(*tensors, *given, **({named: number} if named and number is not None else {}))


@pytest.mark.every_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CALLS, ids=lambda case: f"{case[0].__name__}-{case[1]}-{case[2]}{case[3]}")
def test_lists_and_places_change_no_bit(case: Any, dtype: torch.dtype) -> None:
    op, num_tensors, number, named = case
    sizes = range(1, 70)  # all that is left over at the end of a loop of vectors
    lists = [[values(dtype, size, seed) for size in sizes] for seed in range(num_tensors)]
    for own in (False, True) if number else (False,):
        given: list[Any] = [None] * len(sizes)
        if number:
            given = [
                (NUMBERS[i % len(NUMBERS)] if number == "float" else 4 * i - 20) for i in range(len(sizes))
            ]
            given = given if own else given[:1] * len(sizes)
        wanted = [call(op, [item[i] for item in lists], named, given[i]) for i in range(len(sizes))]
        in_place = op_in_place(op)
        if in_place is not None:
            for i in range(len(sizes)):
                first, *others = (item[i] for item in lists)
                made = call(in_place, [first.clone(), *others], named, given[i])
                assert_same(wanted[i], made)
        for placed in (False, True):
            found = op_on_lists(Kind(op, num_tensors, number, named, dtype), in_place=placed, numbers=own)
            if found is None:
                assert (own and named == "alpha") or (op, dtype) in OTHER_BITS
                continue
            tensors = [[item.clone() for item in each] for each in lists]
            numbers: Any = None if not number else given if own else given[0]
            if found.as_tensors:
                numbers = NumberTensors(numbers, dtype).made()
            made = call(found.op, tensors, found.named, numbers)
            assert_same(wanted, tensors[0] if placed else list(made))


def test_an_op_on_lists_that_gives_other_bits_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = Kind(aten.sqrt.default, 1, "", "", torch.float32)
    assert op_on_lists.__wrapped__(kind, in_place=False, numbers=False) is not None
    monkeypatch.setattr(counterparts, "list_ops", lambda op, *, in_place: [aten._foreach_exp.default])
    assert op_on_lists.__wrapped__(kind, in_place=False, numbers=False) is None


def test_an_op_whose_number_comes_first_is_another_op() -> None:
    kind = Kind(aten.pow.Scalar, 1, "float", "", torch.float32)
    assert op_on_lists(kind, in_place=False, numbers=False) is None
