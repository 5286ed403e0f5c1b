"""Passes over programs whose sizes vary."""

from __future__ import annotations

import pytest

from monograph.errors import PassError
from monograph.ir.program import Program
from monograph.passes.run import AddedPass, Stage, run_passes
from monograph.sizes.expression import Expression
from monograph.sizes.size import Size
from tests.support.programs import small_program


def by_size(program: Program) -> Program:
    if Size(3, Expression.of("rows")) < 5:
        return program.rebuilt()
    return program


def test_a_pass_that_depends_on_a_size_is_passed_over() -> None:
    program = small_program()
    assert run_passes(Stage("capture", program, 0.0), [by_size])[-1].program is program


def test_a_pass_of_the_user_is_not() -> None:
    with pytest.raises(PassError, match="depends on the sizes"):
        run_passes(Stage("capture", small_program(), 0.0), [AddedPass(by_size)])
