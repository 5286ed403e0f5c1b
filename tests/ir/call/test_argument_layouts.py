"""How arguments lie in memory: over each other, twice, as views. Eager's numbers, or an error that names them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import monograph as mg
from tests.ir.call.layouts import Body, Step, add_to_first, numbers, only_read, train
from tests.support import assert_same
from tests.support.choice import only_quick
from tests.support.warm import run_module

Cut = Callable[[torch.Tensor], Sequence[torch.Tensor]]


def check(body: Body, *calls: Cut, builds: int = 1, memory: Callable[[], torch.Tensor] = numbers) -> None:
    """One graph, called on cuts of one buffer: results and the buffer are eager's, or AliasError where `refused`."""
    plain, captured = memory(), memory()
    step = Step(body)
    for cut in calls:
        if isinstance(cut, Refused):
            before = captured.clone()
            with pytest.raises(mg.AliasError, match=cut.told) as caught:
                step(*cut.cut(captured))
            assert "clone" in caught.value.hint
            assert_same(before, captured)
            continue
        expected = body(None, *cut(plain))
        assert_same(expected, step(*cut(captured)))
        assert_same(plain, captured)
    assert len(step.builds) == builds


class Refused:
    """A call that is refused with this text."""

    def __init__(self, cut: Cut, told: str) -> None:
        self.cut, self.told = cut, told


def at(*places: int, size: int = 4) -> Cut:
    """Arguments of one size from these elements on."""
    return lambda buffer: [buffer[place : place + size] for place in places]


def add_to_second(_self: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    b.mul_(3)
    return a * b


def add_to_both(_self: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a.add_(1)
    b.add_(a)
    return a - b


# --- arguments on one storage -------------------------------------------------------------------------------


@pytest.mark.parametrize("body", [add_to_first, add_to_second, add_to_both])
def test_arguments_that_begin_to_overlap(body):
    check(body, at(0, 4), Refused(at(0, 2), "share memory"), at(8, 12), at(12, 0))


@pytest.mark.parametrize("body", [add_to_first, add_to_second, add_to_both])
def test_arguments_that_overlap_at_first(body):
    check(body, Refused(at(2, 0), "share memory"), at(0, 4), Refused(at(3, 0), "share memory"))


def test_arguments_that_are_only_read_may_lie_anyhow():
    check(only_read, at(0, 4), at(0, 2), at(2, 0), at(5, 5), at(12, 1))


def test_the_error_names_both_arguments():
    def step(a: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return batch["x"].add_(a)

    buffer = numbers()
    graph = mg.trace(step)
    graph(buffer[:4], {"x": buffer[4:8]})
    with pytest.raises(mg.AliasError, match=r'arguments a and batch\["x"\] share memory') as caught:
        graph(buffer[:4], {"x": buffer[2:6]})
    assert "pass a clone of a" in caught.value.hint


def test_columns_of_one_matrix():
    def columns(start: int) -> Cut:
        def cut(buffer: torch.Tensor) -> list[torch.Tensor]:
            rows = buffer.view(8, 4)[start : start + 2]
            return [rows[:, :3], rows[:, 3:]]

        return cut

    check(only_read, *map(columns, range(6)), memory=lambda: numbers(32))


def test_batches_cut_out_of_one_tensor_need_one_build():
    data = torch.randn(64, 5)
    model = nn.Linear(4, 1)
    step = Step(
        lambda self, x, y: train(self.model, x, y),
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        model=model,
    )
    for start in (0, 8, 16, 56, 8, 24):
        rows = data[start : start + 8]
        step(rows[:, :4], rows[:, 4:])
    assert len(step.builds) == 1


def test_windows_over_a_series_need_one_build():
    tokens = numbers(40, torch.int64)
    step = Step(lambda self, x, y: (x * 3 + y).sum())
    for start, ahead in ((0, 1), (9, 1), (3, 7), (20, -5)):
        x, y = tokens[start : start + 8], tokens[start + ahead : start + ahead + 8]
        assert_same((x * 3 + y).sum(), step(x, y))
    assert len(step.builds) == 1


def test_two_storages_on_one_memory():
    array = np.arange(8, dtype=np.float32)
    step = Step(add_to_first)
    step(torch.from_numpy(array[:4]), torch.from_numpy(array[4:]))
    assert array[:4].tolist() == [1, 2, 3, 4]
    with pytest.raises(mg.AliasError, match="share memory"):
        step(torch.from_numpy(array[:4]), torch.from_numpy(array[2:6]))


# --- one tensor twice ---------------------------------------------------------------------------------------


def is_one(_self: Any, a: torch.Tensor, b: torch.Tensor) -> Any:
    return a * 2 + b, a is b


def twice(place: int) -> Cut:
    return lambda buffer: [buffer[place : place + 4]] * 2


def test_one_tensor_twice_and_then_two():
    check(is_one, twice(0), at(0, 4), twice(4), at(4, 4), at(0, 2), builds=2)


def test_one_tensor_twice_and_then_two_where_one_is_changed():
    check(add_to_first, twice(0), at(0, 4), twice(2), Refused(at(3, 3), "share memory"), builds=2)


def test_two_of_three_are_one():
    def body(_self: Any, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> Any:
        b.add_(1)
        return a + b * c, a is c, [a, c]

    check(
        body,
        lambda m: [m[:4], m[4:8], m[8:12]],
        lambda m: [first := m[:4], m[4:8], first],
        lambda m: [m[:4], second := m[4:8], second],
        builds=3,
    )


def test_an_argument_that_the_step_finds_elsewhere_too():
    table = torch.ones(3)
    step = Step(lambda _self, x: x + table)
    for x in (table, table * 2, table, torch.zeros(3)):
        assert_same(x + table, step(x))


# --- dtypes, strides, sizes ---------------------------------------------------------------------------------


def test_one_storage_by_two_dtypes():
    def body(_self: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a.add_(1)
        return a + b.float()

    def cut(first: int, second: int) -> Cut:
        return lambda m: [m[first : first + 4], m.view(torch.int32)[second : second + 4]]

    check(body, cut(0, 4), Refused(cut(0, 1), "share memory"), cut(8, 3))


def test_bytes_of_another_size():
    def body(_self: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        b.add_(1)
        return a + b.sum()

    def cut(first: int, second: int) -> Cut:
        return lambda m: [m[first : first + 4], m.view(torch.uint8)[second : second + 4]]

    check(body, cut(0, 16), Refused(cut(0, 12), "share memory"), cut(4, 12))


def test_arguments_without_elements_overlap_nothing():
    check(add_to_both, lambda m: [m[2:2], m[2:2]], lambda m: [m[4:4], m[0:0]])
    check(lambda _self, a, b: a.add_(1) + b.sum(), lambda m: [m[:4], m[1:1]], lambda m: [m[4:8], m[6:6]])


def test_expanded_arguments():
    check(only_read, lambda m: [m[:1].expand(4), m[1:5]], lambda m: [m[3:4].expand(4), m[1:5]])
    expanded: Cut = lambda m: [m[:1].expand(4), m[4:8]]  # noqa: E731
    check(add_to_second, expanded, Refused(lambda m: [m[5:6].expand(4), m[4:8]], "share memory"))
    check(add_to_first, Refused(expanded, "more than once"), builds=0)


def test_windows_that_overlap_themselves():
    windows: Cut = lambda m: [m[:8].unfold(0, 3, 1)]  # noqa: E731
    check(lambda _self, x: x.sum(1), windows)
    check(lambda _self, x: x.add_(1), Refused(windows, "argument args.* more than once"), builds=0)


@pytest.mark.parametrize("twist", [lambda z: z.conj(), lambda z: z.conj().imag, lambda z: z.mH])
def test_conjugate_and_negative_views(twist):
    def memory() -> torch.Tensor:
        return torch.view_as_complex(numbers(32).view(16, 2))

    def cut(first: int, second: int) -> Cut:
        return lambda m: [twist(m[first : first + 4].view(2, 2)), twist(m[second : second + 4].view(2, 2))]

    check(only_read, cut(0, 4), cut(0, 2), memory=memory)
    check(add_to_first, cut(0, 4), Refused(cut(0, 2), "share memory"), cut(4, 0), memory=memory)


# --- views that are returned, and absolute positions --------------------------------------------------------


@pytest.mark.parametrize("step", [1, 2])
def test_a_returned_view_of_a_changed_argument_shows_it(step):
    def body(_self: Any, a: torch.Tensor) -> Any:
        a.add_(1)
        return a[1:], a.view(torch.int32) if a.is_contiguous() else a[:1]

    plain, captured = numbers(), numbers()
    graph = Step(body)
    for start in (0, 3, 5):
        expected = body(None, plain[start : start + 8 : step])
        got = graph(captured[start : start + 8 : step])
        for side in (expected, got):
            side[0].fill_(-1)
            side[1].zero_()
        assert_same(plain, captured)


def test_a_returned_view_of_one_argument_and_a_change_of_another():
    def body(_self: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        b.add_(1)
        return a[1:]

    check(body, at(0, 4), Refused(at(0, 2), "share memory"), at(4, 0))


def test_where_a_tensor_begins_is_a_fact():
    check(lambda _self, a: a + a.storage_offset(), at(2), at(5), at(2), builds=2)
    check(lambda _self, a: a.as_strided((2,), (1,), a.storage_offset() + 1) * 2, at(2), at(5), builds=2)


def test_as_strided_beyond_an_argument():
    def body(_self: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        b.add_(1)
        return a.as_strided((6,), (1,)) * 2

    check(body, Refused(at(0, 8), "share memory"), builds=0)  # on one storage: it could see b
    plain, captured = numbers(), numbers()
    step = Step(body)
    expected = body(None, plain[:4], torch.ones(4))
    assert_same(expected, step(captured[:4], torch.ones(4)))
    with pytest.raises(mg.AliasError, match="share memory"):
        step(captured[:4], captured[8:12])


@pytest.mark.parametrize(
    "body",
    [
        lambda _self, a: a.as_strided((6,), (1,)).add_(1),
        lambda _self, a: a.add_(1).as_strided((6,), (1,)) * 1,
        lambda _self, a: a[::2].as_strided((2,), (1,), 3).add_(1),
    ],
)
def test_as_strided_beyond_an_argument_that_is_changed(body):
    check(body, Refused(at(2), "as_strided"), builds=0)


def test_a_copy_onto_itself():
    def interleaved(_self: Any, a: torch.Tensor) -> torch.Tensor:
        a[::2].copy_(a[1::2])
        a[:2].copy_(a[2:])
        a.copy_(a)
        return a * 1

    check(interleaved, at(0), at(5))
    for shifted in (
        lambda _self, a: a[1:].copy_(a[:-1]),
        lambda _self, a: a.copy_(a[:1].expand(4)),
        lambda _self, a: a.copy_(a.view(torch.int32)),
        lambda _self, a: a.view(2, 2).copy_(a.view(2, 2).t()),
    ):
        check(shifted, Refused(at(0), "copy_ reads memory that it writes"), builds=0)


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (lambda _self, a, b: a.set_(b) * 1, "memory of .* by set_"),
        (lambda _self, a, b: a.resize_(2) * 1, "by resize_"),
        (lambda _self, a, b: a.unsqueeze_(0) * 1, "by unsqueeze_"),
        (lambda _self, a, b: setattr(a, "data", b), r"\.data the memory"),
        (lambda _self, a, b: a + a.untyped_storage().nbytes(), "asks for the storage"),
    ],
)
def test_other_memory_for_an_argument_is_refused(body, told):
    with pytest.raises(mg.CaptureError, match=told):
        Step(body)(numbers(4), numbers(4))


# --- random layouts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seeds", only_quick([range(25), range(25, 150)], range(25)), ids=str)
def test_random_layouts(seeds: range) -> None:
    """In a process where little lives: `make stress` tries many more."""
    done = run_module("tests.stress.argument_layouts", "--trials", len(seeds), "--seed", seeds.start)
    assert done.returncode == 0, done.stdout + done.stderr
    counts = {name: int(count) for count, name in re.findall(r"^ *(\d+)  (.+)$", done.stdout, re.MULTILINE)}
    assert counts["cases"] == len(seeds)
    assert counts["eager's numbers"] > 0.8 * len(seeds)
