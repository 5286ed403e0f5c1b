"""Writes through views that conjugate or negate by a bit: results and state have the bits of eager mode, and its numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import monograph as mg
from tests.support import assert_same

Tensor = torch.Tensor
Z = torch.complex(torch.linspace(-2.0, 2.0, 9).sin(), torch.linspace(1.0, -3.0, 9)).reshape(3, 3)


def an_op_in_place(z: Tensor) -> Any:
    made = z * 1j
    made.conj().mul_(2j)
    return made


def an_item(z: Tensor) -> Any:
    made = z * 1j
    made.conj()[0] = 1 + 2j
    return made


def fill(z: Tensor) -> Any:
    made = z * 1j
    made.conj().fill_(1 + 2j)
    return made


def an_imaginary_part(z: Tensor) -> Any:
    made = z * 1j
    made.conj().imag.add_(1)
    return made


def every_part(z: Tensor) -> Any:
    made = z * 1j
    view = made.T.conj()
    view.imag.fill_(1)
    return made, view, made.real, view.imag, view.real


def a_transposed_copy(z: Tensor) -> Any:
    made = (z * 1j).T
    view = made.conj()
    view.copy_(z + 1)
    return made, view


def an_out_argument(z: Tensor) -> Any:
    made = z * 1j
    torch.add(z, z, out=made.conj())
    return made


def as_real_afterwards(z: Tensor) -> Any:
    made = z * 1j
    made.conj().mul_(2j)
    return torch.view_as_real(made)


def a_conjugate_of_what_changes(z: Tensor) -> Any:
    view = z[1:].conj()
    z.add_(1j)
    return view


def a_conjugate_that_is_written(z: Tensor) -> Any:
    view = z.mH
    view.mul_(2j)
    return view


def a_negated_part_that_is_written(z: Tensor) -> Any:
    view = z.conj().imag
    view.add_(1)
    return view


def a_copy_of_a_result_with_the_bit(z: Tensor) -> Any:
    product = z[0].conj().dot(z[1].conj())  # which torch computes as the conjugate of another one
    return product.clone(), product + 1


BODIES = (
    an_op_in_place,
    an_item,
    fill,
    an_imaginary_part,
    every_part,
    a_transposed_copy,
    an_out_argument,
    as_real_afterwards,
    a_conjugate_of_what_changes,
    a_conjugate_that_is_written,
    a_negated_part_that_is_written,
    a_copy_of_a_result_with_the_bit,
)


def assert_same_form(expected: Any, got: Any) -> None:
    if not isinstance(expected, tuple):
        expected, got = (expected,), (got,)
    for one, other in zip(expected, got, strict=True):
        assert (one.is_conj(), one.is_neg(), one.stride()) == (
            other.is_conj(),
            other.is_neg(),
            other.stride(),
        )
        assert_same(one.resolve_conj().resolve_neg(), other.resolve_conj().resolve_neg())


class Held(nn.Module):
    def __init__(self, held: Tensor) -> None:
        super().__init__()
        self.held: Tensor
        self.register_buffer("held", held)


class Step(mg.Graph):
    def __init__(self, body: Callable[[Tensor], Any], held: Tensor) -> None:
        super().__init__()
        self.model, self.body = Held(held), body

    def build(self) -> Any:
        return self.body(self.model.held)


@pytest.mark.every_case
@pytest.mark.parametrize("form", [Tensor.clone, lambda z: z.clone().conj()], ids=["plain", "conjugate"])
@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_bits_of_arguments_and_results(
    body: Callable[[Tensor], Any], form: Callable[[Tensor], Tensor]
) -> None:
    plain, given = form(Z), form(Z)
    assert_same_form(body(plain), mg.trace(body)(given))
    assert_same_form(plain, given)


@pytest.mark.every_case
@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_bits_of_state(body: Callable[[Tensor], Any]) -> None:
    held, step = Z.clone().conj(), Step(body, Z.clone().conj())
    for _ in range(2):
        assert_same_form(body(held), step())
        assert_same_form(held, step.model.held)


def test_a_returned_conjugate_shows_the_live_tensor() -> None:
    given = Z.clone()
    view = mg.trace(a_conjugate_of_what_changes)(given)
    given.fill_(1 + 2j)
    assert view.is_conj()
    assert view.tolist() == [[1 - 2j] * 3] * 2


def test_an_artifact_holds_no_conjugate_of_what_changes(tmp_path: Path) -> None:
    step = Step(a_conjugate_of_what_changes, Z.clone())
    step()
    with pytest.raises(mg.MonographError, match="by another dtype or conjugated"):
        mg.save(step, tmp_path / "artifact")
