"""The laws of the strategies, and that operators and modules align for whatever they draw."""

from __future__ import annotations

import copy
import itertools
import math
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from monograph.numerics.judge import same_bits
from monograph.testing import align
from monograph.testing.strategies import (
    COMPLEX,
    DTYPES,
    FLOATS,
    LAYOUTS,
    MODULES,
    VALUES,
    ModuleCase,
    TensorSpec,
    broadcastable,
    build,
    gather_arguments,
    make,
    matmul_pairs,
    modules,
    same_shape,
    shapes,
    special_numbers,
    tensor_and_dim,
    tensor_and_index,
    tensor_specs,
    tensors,
)


def drawn(strategy: st.SearchStrategy[Any], count: int = 150) -> list[Any]:
    """What a strategy gives in so many examples."""
    found = []

    @settings(max_examples=count, database=None, suppress_health_check=list(hypothesis.HealthCheck))
    @given(strategy)
    def collect(value: Any) -> None:
        found.append(value)

    collect()
    return found


# --- tensors --------------------------------------------------------------------------------------------------------


@given(tensor_specs(dtypes=DTYPES))
def test_a_spec_gives_the_same_tensor_each_time_and_so_does_its_repr(spec: TensorSpec) -> None:
    a, b, c = spec.build(), spec.build(), eval(repr(spec), {"TensorSpec": TensorSpec, "torch": torch})
    assert c == spec
    assert same_bits(a, b)
    assert a.data_ptr() != b.data_ptr() or a.numel() == 0
    assert (a.shape, a.dtype, a.stride(), a.storage_offset()) == (
        b.shape,
        b.dtype,
        b.stride(),
        b.storage_offset(),
    )
    assert (tuple(a.shape), a.dtype, a.requires_grad) == (spec.shape, spec.dtype, spec.requires_grad)
    assert a.is_leaf


def test_another_seed_gives_other_values() -> None:
    assert not torch.equal(TensorSpec((9,), seed=1).build(), TensorSpec((9,), seed=2).build())


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_special_value_occurs(dtype: torch.dtype) -> None:
    part = dtype.to_real() if dtype.is_complex else dtype
    found = drawn(tensors((20,), dtypes=(dtype,), values=("special",), layouts=("contiguous",)), 40)
    values = torch.cat([torch.view_as_real(x).reshape(-1) if dtype.is_complex else x for x in found])
    for number in special_numbers(part):
        wanted = torch.tensor(number, dtype=part)
        assert any(same_bits(value, wanted) for value in values), number


def test_special_values_are_those_that_matter() -> None:
    for dtype in FLOATS:
        numbers = torch.tensor(special_numbers(dtype), dtype=dtype)
        assert numbers.isnan().any()
        assert {math.inf, -math.inf} <= set(numbers.tolist())
        assert any(x == 0 and math.copysign(1, x) < 0 for x in numbers.tolist())
        assert (numbers == torch.finfo(dtype).max).any()
        assert ((numbers != 0) & (numbers.abs() < torch.finfo(dtype).smallest_normal)).any()


def is_gapped(x: torch.Tensor) -> bool:
    return (
        not x.is_contiguous()
        and sorted(x.stride()) != sorted(x.contiguous().stride())
        and 0 not in x.stride()
    )


SIGNS = {
    "contiguous": lambda x: x.is_contiguous() and x.storage_offset() == 0,
    "permuted": lambda x: not x.is_contiguous() and sorted(x.stride()) == sorted(x.mT.contiguous().stride()),
    "gapped": is_gapped,
    "expanded": lambda x: any(step == 0 and size > 1 for step, size in zip(x.stride(), x.shape, strict=True)),
    "offset": lambda x: x.storage_offset() > 0 and x.is_contiguous(),
    "mixed": lambda x: x.storage_offset() > 0 and 0 in x.stride() and any(step > 1 for step in x.stride()),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_layout_really_occurs(layout: Any) -> None:
    found = drawn(tensors((3, 4), layouts=(layout,)), 60)
    assert any(map(SIGNS[layout], found))
    assert all(SIGNS["contiguous"](x) for x in found if layout == "contiguous")


def test_all_kinds_of_tensors_occur() -> None:
    found = drawn(tensors(dtypes=DTYPES), 400)
    assert {x.dtype for x in found} == set(DTYPES)
    assert {x.dim() for x in found} == {0, 1, 2, 3, 4}
    assert any(x.numel() == 0 for x in found)
    assert {x.requires_grad for x in found} == {True, False}
    assert not any(x.requires_grad for x in found if not (x.is_floating_point() or x.is_complex()))


@given(tensors(values=("whole", "uniform"), low=2, high=4))
def test_bounds_hold(x: torch.Tensor) -> None:
    assert bool(((x >= 2) & (x <= 4)).all())


@given(shapes(min_dims=1, max_dims=3, min_side=2, max_side=4))
def test_shapes_keep_to_their_bounds(shape: tuple[int, ...]) -> None:
    assert 1 <= len(shape) <= 3
    assert all(2 <= side <= 4 for side in shape)


# --- arguments that fit each other ----------------------------------------------------------------------------------


@given(broadcastable(3, dtypes=(*FLOATS, *COMPLEX)))
def test_broadcastable_tensors_broadcast(found: tuple[torch.Tensor, ...]) -> None:
    assert len(found) == 3
    assert len({x.dtype for x in found}) == 1
    torch.broadcast_tensors(*found)


@given(same_shape(3))
def test_tensors_of_the_same_shape(found: tuple[torch.Tensor, ...]) -> None:
    assert len({x.shape for x in found}) == 1


@given(matmul_pairs())
def test_matrices_can_be_multiplied(pair: tuple[torch.Tensor, torch.Tensor]) -> None:
    torch.matmul(*pair)


def test_matrices_of_all_kinds_occur() -> None:
    kinds = {(a.dim(), b.dim()) for a, b in drawn(matmul_pairs(), 200)}
    assert {(1, 1), (1, 2), (2, 1), (2, 2)} < kinds
    assert any(a > 2 for a, _ in kinds)


@given(tensor_and_dim())
def test_the_dimension_is_one_of_the_tensor(pair: tuple[torch.Tensor, int]) -> None:
    x, dim = pair
    assert -x.dim() <= dim < x.dim()
    x.sum(dim)


@given(tensor_and_index())
def test_indices_lie_in_the_tensor(found: tuple[torch.Tensor, int, torch.Tensor]) -> None:
    x, dim, index = found
    assert torch.index_select(x, dim, index).shape[dim] == len(index)


@given(gather_arguments())
def test_gathered_positions_lie_in_the_tensor(found: tuple[torch.Tensor, int, torch.Tensor]) -> None:
    x, dim, index = found
    assert torch.gather(x, dim, index).shape == index.shape


# --- modules --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", MODULES)
def test_each_module_takes_its_inputs(kind: str) -> None:
    for case in drawn(modules([kind]), 20):
        module = case.module()
        assert type(module).__name__ == kind
        assert module.training == case.training
        module(*case.args())


@given(modules())
def test_a_module_case_is_the_same_each_time_and_so_is_its_repr(case: ModuleCase) -> None:
    scope = {"ModuleCase": ModuleCase, "make": make, "TensorSpec": TensorSpec, "torch": torch}
    again = eval(repr(case), scope)
    assert again == case
    first, second = case.module().state_dict(), again.module().state_dict()
    assert all(same_bits(first[name], second[name]) for name in first)


def test_parameters_come_from_the_seed_alone() -> None:
    case = ModuleCase(make("Linear", 3, 2), (TensorSpec((1, 3)),), seed=5)
    torch.manual_seed(1)
    before, first = torch.get_rng_state(), case.module().weight
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(2)
    assert torch.equal(first, case.module().weight)


# --- shrinking and replaying ----------------------------------------------------------------------------------------


def minimal(strategy: st.SearchStrategy[Any], fault: Any) -> Any:
    return hypothesis.find(strategy, fault, settings=settings(database=None))


def test_a_planted_fault_shrinks_to_the_smallest_shape() -> None:
    found = minimal(tensor_specs(), lambda spec: spec.build().numel() > 6)
    assert math.prod(found.shape) == 7 or found.shape in itertools.permutations((2, 4))
    assert found == TensorSpec(found.shape)  # nothing else is left: contiguous, float32, seed 0
    found = minimal(tensor_specs(), lambda spec: not spec.build().is_contiguous())
    assert math.prod(found.shape) <= 4
    found = minimal(tensors(values=VALUES), lambda x: bool(x.isnan().any()))
    assert found.dim() == 1
    assert found.numel() <= 4


def test_a_planted_fault_of_a_module_shrinks() -> None:
    found = minimal(modules(["Conv2d"]), lambda case: case.module().weight.shape[2] > 1)
    assert found.construction.args == (1, 1, 2)
    assert found.seed == 0


def failing_test() -> Any:
    @settings(database=None, print_blob=True, derandomize=False)
    @hypothesis.seed(11)
    @given(tensors((5,), values=("special",)))
    def check(x: torch.Tensor) -> None:
        assert not x.isinf().any()

    return check


def test_a_failure_prints_how_its_case_is_made_and_replays(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(AssertionError) as first:
        failing_test()()
    said = "\n".join(first.value.__notes__)
    assert "x=build(TensorSpec((5,)" in said
    _, _, told = said.partition("@reproduce_failure(")
    version, blob = eval(f"({told.partition(')')[0]})")
    with pytest.raises(AssertionError) as again:
        hypothesis.reproduce_failure(version, blob)(failing_test())()
    assert type(again.value) is type(first.value)
    assert "x=build(TensorSpec((5,)" in capsys.readouterr().out


def test_a_seed_decides_the_examples() -> None:
    def examples(seed: int) -> list[TensorSpec]:
        found = []

        @settings(database=None, max_examples=20, derandomize=False)
        @hypothesis.seed(seed)
        @given(tensor_specs())
        def collect(spec: TensorSpec) -> None:
            found.append(spec)

        collect()
        return found

    assert examples(1) == examples(1)
    assert examples(1) != examples(2)


def test_drawn_tensors_can_be_copied() -> None:
    x = build(TensorSpec((2, 3), order=(1, 0)))
    assert torch.equal(copy.deepcopy(x), x)


# --- graphs ---------------------------------------------------------------------------------------------------------

UNARY = (
    torch.exp,
    torch.sin,
    torch.sigmoid,
    torch.abs,
    torch.neg,
    nn.functional.gelu,
    torch.square,
    torch.sign,
)
BINARY = (torch.add, torch.mul, torch.sub, torch.div, torch.maximum, torch.atan2)
REDUCED = (torch.sum, torch.mean, torch.cumsum, torch.softmax, torch.logsumexp)


@pytest.mark.long
@settings(max_examples=30)
@given(st.sampled_from(UNARY), tensors())
def test_functions_of_one_tensor_align(function: Any, x: torch.Tensor) -> None:
    align(function, x)


@pytest.mark.long
@settings(max_examples=30)
@given(st.sampled_from(BINARY), broadcastable(2, dtypes=FLOATS))
def test_functions_of_two_tensors_align(function: Any, pair: tuple[torch.Tensor, torch.Tensor]) -> None:
    align(function, *pair)


@pytest.mark.long
@settings(max_examples=20)
@given(st.sampled_from(REDUCED), tensor_and_dim(dtypes=(torch.float32, torch.float64)))
def test_reductions_align(function: Any, found: tuple[torch.Tensor, int]) -> None:
    align(function, *found)


@pytest.mark.long
@settings(max_examples=15)
@given(matmul_pairs(dtypes=(torch.float32, torch.float64)))
def test_products_of_matrices_align(pair: tuple[torch.Tensor, torch.Tensor]) -> None:
    align(torch.matmul, *pair)


@pytest.mark.long
@settings(max_examples=15)
@given(tensor_and_index(), gather_arguments())
def test_indexing_aligns(selected: Any, gathered: Any) -> None:
    align(torch.index_select, *selected)
    align(torch.gather, *gathered)


@pytest.mark.long
@settings(max_examples=40)
@given(modules())
def test_modules_align(case: ModuleCase) -> None:
    align(case.module(), *case.args())
