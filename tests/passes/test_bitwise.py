"""Passes that always run: golden texts, and that no caller can tell that they ran."""

from __future__ import annotations

import operator

import pytest
import torch
from hypothesis import given
from torch import fx

from monograph.ir.port import Role
from monograph.ir.program import Program
from monograph.ir.verify import verify
from monograph.passes.canonicalise import canonicalise
from monograph.passes.cse import cse
from monograph.passes.dce import dce
from monograph.passes.fold_constants import fold_constants
from monograph.passes.run import Pass
from monograph.passes.schedule_updates import schedule_updates
from monograph.passes.table import pipeline
from monograph.settings import Settings, pass_name
from tests.passes.programs import Sketch, aten, body, numbers, programs, run, visible
from tests.support.goldens import check_golden

PASSES = (canonicalise, fold_constants, cse, dce, schedule_updates)
BITWISE = pipeline(Settings())


@pytest.mark.parametrize("step", PASSES, ids=pass_name)
@given(programs())
def test_nobody_can_tell_that_a_pass_ran(step, drawn):
    program, inputs = drawn
    before, text = visible(program, inputs), program.text
    after = step(program)
    verify(after, after=pass_name(step))
    assert visible(after, inputs) == before
    assert program.with_graph(program.graph).text == text, "the pass changed the program it was given"
    assert (after.inputs, after.outputs) == (program.inputs, program.outputs)


@given(programs())
def test_nobody_can_tell_that_all_passes_ran(drawn):
    program, inputs = drawn
    before = visible(program, inputs)
    for step in (*BITWISE, schedule_updates):
        program = step(program)
    verify(program, after="all")
    assert visible(program, inputs) == before


@pytest.mark.parametrize("step", PASSES, ids=pass_name)
@given(programs())
def test_a_second_run_finds_nothing(step, drawn):
    once = step(drawn[0])
    assert step(once) is once


@pytest.mark.every_case
@pytest.mark.parametrize("op", [aten.mul.Tensor, aten.div.Tensor, aten.add.Tensor, aten.sub.Tensor], ids=str)
def test_arithmetic_that_seems_to_change_nothing_stays(op):
    """It does where the processor flushes denormals, and to minus zero."""
    sketch = Sketch()
    x = sketch.input("x", torch.tensor([-0.0, 1e-40, -1e-40, float("nan"), 2.5]))
    program = sketch.finish(sketch.op(op, x, 1 if op in (aten.mul.Tensor, aten.div.Tensor) else 0))
    after = program
    for step in (*BITWISE, schedule_updates):
        after = step(after)
    torch.set_flush_denormal(True)
    try:
        assert visible(after, sketch.inputs) == visible(program, sketch.inputs)
    finally:
        torch.set_flush_denormal(False)


# --- goldens -----------------------------------------------------------------------------------------------------------


def views() -> Program:
    """detach, t of t, a view of a view, copies that are read element by element, copied state that is returned."""
    sketch = Sketch()
    x, w = sketch.input("x", numbers(2, 3)), sketch.input("model.w", numbers(3, 2), Role.PARAM)
    t = sketch.op(aten.t.default, w)
    product = sketch.op(aten.mm.default, x, sketch.op(aten.t.default, t))
    detached = sketch.op(aten.detach.default, sketch.op(aten.detach.default, product))
    flat = sketch.op(aten.view.default, detached, [4])
    square = sketch.op(aten.mul.Tensor, sketch.op(aten.view.default, flat, [2, 2]), product)
    old = sketch.op(aten.clone.default, sketch.op(aten.detach.default, w))
    new = sketch.op(aten.sub.Tensor, w, sketch.op(aten.mul.Tensor, old, 0.1, phase="update"), phase="update")
    kept = sketch.op(aten.copy.default, w, new, phase="update")
    shown = sketch.op(aten.detach.default, square)
    return sketch.finish(square, shown, state={"model.w": kept})


def scalars() -> Program:
    """Numbers that are known, numbers that are not, and a division that fails at each step."""
    sketch = Sketch()
    x, lr = sketch.input("x", numbers(2)), sketch.input("lr", 0.1, Role.HYPER)
    known = sketch.op(operator.sub, 1.0, 0.75)
    known = sketch.op(operator.mul, known, 2.0)
    moving = sketch.op(operator.mul, lr, known)
    half = sketch.op(aten.full.default, [], 0.5, dtype=torch.float32)
    read = sketch.op(aten._local_scalar_dense.default, half)
    return sketch.finish(
        sketch.op(aten.mul.Tensor, sketch.op(aten.mul.Tensor, x, moving), read), sketch.op(operator.add, 1, 2)
    )


def twins() -> Program:
    """The same op twice: once inside, as two results, with another number, and at random."""
    sketch = Sketch()
    x = sketch.input("x", numbers(2, 2))
    first, second = sketch.op(aten.sin.default, x), sketch.op(aten.sin.default, x)
    one, other = sketch.op(aten.add.Tensor, first, 1), sketch.op(aten.add.Tensor, second, 1.0)
    a, b = sketch.op(aten.exp.default, one), sketch.op(aten.exp.default, one)
    drawn = [sketch.op(aten.bernoulli.p, x, 0.5) for _ in range(2)]
    both = sketch.op(aten.add.Tensor, *drawn)
    sorted_once, again = (sketch.op(aten.sort.default, x) for _ in range(2))
    top = sketch.op(operator.getitem, sorted_once, 0)
    places = sketch.op(operator.getitem, again, 1)
    return sketch.finish(
        a, b, both, sketch.op(aten.gather.default, top, 0, places), sketch.op(aten.neg.default, other)
    )


def dead() -> Program:
    """Ops that nothing reads: one that computes, one that draws, one that checks, and what only they need."""
    sketch = Sketch()
    x = sketch.input("x", numbers(2).abs())
    sketch.op(aten.neg.default, sketch.op(aten.exp.default, x))
    sketch.op(aten.bernoulli.p, x, 0.5)
    positive = sketch.op(aten.all.default, sketch.op(aten.gt.Scalar, x, 0))
    sketch.op(aten._assert_async.msg, positive, "x is not positive")
    return sketch.finish(sketch.op(aten.relu.default, x))


def two_layers() -> Program:
    """Two gradients and the updates behind them, the first of which could run earlier."""
    sketch = Sketch()
    x = sketch.input("x", numbers(2, 2))
    w = [sketch.input(f"w{i}", numbers(2, 2, seed=i), Role.PARAM) for i in (1, 2)]
    lr = sketch.input("lr", 0.1, Role.HYPER)
    hidden = sketch.op(aten.mm.default, x, w[0])
    later = sketch.op(aten.mm.default, hidden, x, phase="backward")
    earlier = sketch.op(aten.mm.default, x, later, phase="backward")
    rate = sketch.op(operator.neg, lr, phase="update")
    new = {}
    for gradient, weight, path in ((earlier, w[0], "w1"), (later, w[1], "w2")):
        decayed = sketch.op(aten.mul.Tensor, weight, 0.9, phase="update")
        step = sketch.op(aten.mul.Tensor, gradient, rate, phase="update")
        new[path] = sketch.op(aten.add.Tensor, decayed, step, phase="update")
    return sketch.finish(later, state=new)


GOLDENS = {canonicalise: views, fold_constants: scalars, cse: twins, dce: dead, schedule_updates: two_layers}


def check_before_and_after(step: Pass, program: Program) -> None:
    """Compare the ops before and after a pass with its golden file."""
    text = f"# before {pass_name(step)}\n{body(program)}\n\n# after\n{body(step(program))}"
    check_golden(f"passes/{pass_name(step)}.txt", text)


@pytest.mark.every_case
@pytest.mark.parametrize("step", GOLDENS, ids=pass_name)
def test_the_text_before_and_after(step):
    check_before_and_after(step, GOLDENS[step]())


# --- what must not be merged -------------------------------------------------------------------------------------------


def test_a_view_of_an_argument_stays_a_view_of_it():
    sketch = Sketch()
    x = sketch.input("x", numbers(2, 2))
    program = sketch.finish(sketch.op(aten.detach.default, x), sketch.op(aten.clone.default, x))
    (shown, copied) = run(canonicalise(program), sketch.inputs)
    assert shown is not sketch.inputs[0]
    assert shown.data_ptr() == sketch.inputs[0].data_ptr() != copied.data_ptr()


def test_a_copy_that_a_product_reads_stays():
    sketch = Sketch()
    x = sketch.input("x", numbers(3, 3))
    program = sketch.finish(sketch.op(aten.mm.default, sketch.op(aten.clone.default, x), x))
    assert canonicalise(program) is program


def test_a_copy_of_another_layout_stays():
    sketch = Sketch()
    x = sketch.input("x", numbers(3, 3))
    rows = sketch.op(aten.clone.default, sketch.op(aten.t.default, x), memory_format=torch.contiguous_format)
    program = sketch.finish(sketch.op(aten.neg.default, rows))
    assert canonicalise(program) is program


def test_a_view_that_checks_a_size_stays():
    sketch = Sketch()
    a, b = sketch.input("a", numbers(5, 2)), sketch.input("b", numbers(5, 3))
    solved = sketch.op(aten.linalg_lstsq.default, a, b, driver="gelsd")
    checked = sketch.op(aten.view.default, sketch.op(operator.getitem, solved, 1), [3])
    program = sketch.finish(sketch.op(aten.neg.default, checked))
    assert canonicalise(program) is program


@pytest.mark.parametrize(("inside", "stays"), [(aten.bernoulli.p, True), (aten.mul.Tensor, False)])
def test_a_branch_that_draws_stays_though_nothing_reads_it(inside, stays):
    branch = fx.Graph()
    branch.output((branch.call_function(inside, (branch.placeholder("x"), 0.5)),))
    sketch = Sketch()
    sketch.root.add_module("either", fx.GraphModule(torch.nn.Module(), branch))
    x = sketch.input("x", numbers(2))
    either = sketch.graph.get_attr("either")
    sketch.graph.call_function(torch.ops.higher_order.cond, (True, either, either, (x,)))
    program = sketch.finish(sketch.op(aten.neg.default, x))
    assert any(node.op == "get_attr" for node in dce(program).graph.nodes) is stays


@pytest.mark.parametrize(("dtype", "number"), [(torch.float32, 0.1), (torch.int64, 2.7), (torch.bool, 2.0)])
def test_a_number_that_is_read_from_a_tensor_is_that_of_its_type(dtype, number):
    sketch = Sketch()
    x = sketch.input("x", numbers(3).double())
    read = sketch.op(aten._local_scalar_dense.default, sketch.op(aten.full.default, [], number, dtype=dtype))
    program = sketch.finish(sketch.op(aten.mul.Tensor, x, read))
    assert visible(fold_constants(program), sketch.inputs) == visible(program, sketch.inputs)


def test_zeros_of_two_signs_are_two_values():
    sketch = Sketch()
    x = sketch.input("x", numbers(2))
    a, b = (sketch.op(aten.mul.Tensor, x, zero) for zero in (0.0, -0.0))
    program = sketch.finish(sketch.op(aten.add.Tensor, a, b))
    assert cse(program) is program


def test_custom_ops_run_as_often_as_in_eager_mode():
    with torch.library._scoped_library("tests_passes", "FRAGMENT") as library:
        library.define("counted(Tensor x) -> Tensor")
        library.impl("counted", torch.neg, "CompositeExplicitAutograd")
        counted = torch.ops.tests_passes.counted.default
        sketch = Sketch()
        x = sketch.input("x", numbers(2))
        program = sketch.finish(sketch.op(aten.add.Tensor, sketch.op(counted, x), sketch.op(counted, x)))
        assert cse(program) is program


def test_updates_keep_behind_what_they_read_and_before_what_reads_them():
    sketch = Sketch()
    x, w = sketch.input("x", numbers(2)), sketch.input("w", numbers(2), Role.PARAM)
    new = sketch.op(aten.sub.Tensor, w, x, phase="update")
    used = sketch.op(aten.sin.default, new)  # a second forward with the new weights
    newer = sketch.op(aten.sub.Tensor, new, used, phase="update")
    program = sketch.finish(used, state={"w": newer})
    assert schedule_updates(program) is program
