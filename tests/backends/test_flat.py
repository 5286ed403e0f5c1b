"""The form that compilers take of a program."""

from __future__ import annotations

import torch

from monograph.backends.flat import Source, flatten
from tests.kernels.programs import aten, program_of


def test_a_view_of_an_input_is_taken_from_the_input_and_nothing_is_compiled_for_it() -> None:
    x = torch.randn(2, 3)
    program = program_of(lambda emit, x: (emit(aten.t.default, x), emit(aten.neg.default, x)), x)
    flat = flatten(program, ())
    assert flat.sources == (Source(True, 0),)
    assert (flat.viewed, flat.returned) == ((0,), ((1, 0),))
    (made,) = flat.module(x)
    assert torch.equal(made, -x)
