"""How arguments lie in memory: over each other, on state, on gradients. Eager's numbers, or an error that names them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import monograph as mg
from tests.support import assert_same
from tests.warm import run_module

Body = Callable[..., Any]
Cut = Callable[[torch.Tensor], Sequence[torch.Tensor]]


class Step(mg.Graph):
    """A body as a graph, with what it holds."""

    def __init__(self, body: Body, optimizer: torch.optim.Optimizer | None = None, **held: Any) -> None:
        super().__init__()
        for name, value in held.items():
            setattr(self, name, value)
        self.body = body
        if optimizer is not None:
            self.add_optimizer(optimizer)

    def build(self, *args: Any) -> Any:
        return self.body(self, *args)


def numbers(count: int = 16, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(count).to(dtype)


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


def add_to_first(_self: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a.add_(1)
    return a + b


def add_to_second(_self: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    b.mul_(3)
    return a * b


def add_to_both(_self: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a.add_(1)
    b.add_(a)
    return a - b


def only_read(_self: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a * 2 + b


# --- arguments on one storage --------------------------------------------------------------------------------------


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


def train(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss = (model(x) - y).square().mean()
    loss.backward()
    return loss


def test_two_storages_on_one_memory():
    array = np.arange(8, dtype=np.float32)
    step = Step(add_to_first)
    step(torch.from_numpy(array[:4]), torch.from_numpy(array[4:]))
    assert array[:4].tolist() == [1, 2, 3, 4]
    with pytest.raises(mg.AliasError, match="share memory"):
        step(torch.from_numpy(array[:4]), torch.from_numpy(array[2:6]))


# --- one tensor twice ----------------------------------------------------------------------------------------------


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


# --- dtypes, strides, sizes ----------------------------------------------------------------------------------------


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


# --- views that are returned, and absolute positions -----------------------------------------------------------------


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


# --- arguments on state --------------------------------------------------------------------------------------------


class Counting(nn.Module):
    """Two buffers side by side, the first of which counts."""

    def __init__(self) -> None:
        super().__init__()
        memory = torch.zeros(8)
        self.register_buffer("count", memory[:4])
        self.register_buffer("other", memory[4:])
        self.again = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.again:
            self.count = self.count + 1
        else:
            self.count.add_(1)
        return x + self.count


@pytest.mark.parametrize("first", [False, True])
def test_an_argument_on_a_buffer_that_changes(first):
    model = Counting()
    step = Step(lambda self, x: self.model(x), model=model)
    if first:
        step(torch.ones(4))
    for view in (model.count.view(4), model.count.as_strided((4,), (1,), 2), model.count.view(torch.int32)):
        with pytest.raises(mg.AliasError, match=r"argument .*model\.count"):
            step(view)
    before = model.count.clone()
    assert_same(model.other + before + 1, step(model.other[:]))  # beside it
    assert len(step.builds) == 1


@pytest.mark.parametrize("first", [False, True])
def test_an_argument_on_what_the_step_puts_another_tensor_in_the_place_of(first):
    model, plain = Counting(), Counting()
    model.again = plain.again = True
    step = Step(lambda self, x: self.model(x), model=model)
    if first:
        assert_same(plain(torch.ones(4)), step(torch.ones(4)))
    for look in (lambda count: count.view(4), lambda count: count.view(torch.int32), lambda count: count):
        mine, theirs = look(model.count), look(plain.count)
        assert_same(plain(theirs), step(mine))
        assert_same(theirs, mine)  # as it was
        assert_same(plain.count, model.count)


def test_an_argument_on_state_that_is_only_read():
    model = nn.Linear(4, 3)
    step = Step(lambda self, x: self.model(x), model=model)
    with torch.no_grad():
        for x in (torch.ones(2, 4), model.weight.detach()[:2], model.weight.detach()[1:]):
            assert_same(model(x), step(x))
        assert len(step.builds) == 1
        assert_same(model(model.weight), step(model.weight))


def test_an_argument_changed_on_state_that_is_read():
    model = nn.Linear(4, 3).requires_grad_(False)

    def body(self: Any, x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return self.model(x)

    step = Step(body, model=model)
    step(torch.ones(1, 4))
    with pytest.raises(mg.AliasError, match=r"argument .*model\.weight"):
        step(model.weight[:1])


def test_an_argument_that_is_one_of_two_parameters_on_one_storage():
    flat = torch.randn(8)
    model = nn.ParameterList([nn.Parameter(flat[:4]), nn.Parameter(flat[4:])])
    step = Step(lambda self, x: (x * 2, x is self.model[0], x is self.model[1]), model=model)
    with torch.no_grad():
        for x in (model[0], model[0].view(4), model[1], model[1].detach(), model[0]):
            assert_same((x * 2, x is model[0], x is model[1]), step(x))


@pytest.mark.parametrize("state", [False, True])
def test_an_argument_on_what_the_optimizer_updates(state):
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = Step(lambda self, x, y: train(self.model, x, y), optimizer, model=model)
    step(torch.ones(3, 4), torch.ones(3, 3))
    held = optimizer.state[model.weight]["momentum_buffer"] if state else model.weight.detach()
    for view in (held[:], held.clone()):
        if view.data_ptr() == held.data_ptr():
            with pytest.raises(mg.AliasError, match="argument args"):
                step(view, torch.ones(3, 3))
        else:
            step(view, torch.ones(3, 3))
    assert len(step.builds) == 1


# --- gradients -----------------------------------------------------------------------------------------------------


def differentiate(_self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    (x * x * y + x).sum().backward()
    return y * 2


def test_an_argument_that_is_the_gradient_of_another():
    def leaf() -> torch.Tensor:
        x = numbers(4).requires_grad_()
        x.grad = torch.ones(4)
        return x

    step = Step(differentiate)
    mine, plain = leaf(), leaf()
    assert_same(differentiate(None, plain, numbers(4)), step(mine, numbers(4)))
    assert_same(plain.grad, mine.grad)
    for view in (mine.grad, mine.grad[:]):
        with pytest.raises(mg.AliasError, match="gradient of argument"):
            step(mine, view)
    assert_same(plain.grad, mine.grad)


def test_two_arguments_with_gradients_on_one_memory():
    def both(_self: Any, x: torch.Tensor, y: torch.Tensor) -> None:
        (x * 2 + y).sum().backward()

    grad = torch.zeros(8)
    x, y = (numbers(4).requires_grad_() for _ in range(2))
    x.grad, y.grad = grad[:4], grad[4:]
    step = Step(both)
    step(x, y)
    assert_same(torch.tensor([2.0] * 4 + [1.0] * 4), grad)
    y.grad = grad[2:6]
    with pytest.raises(mg.AliasError, match="the gradient of argument"):
        step(x, y)


def test_an_argument_whose_gradient_is_asked_for():
    def body(_self: Any, x: torch.Tensor) -> torch.Tensor:
        (x * x).sum().backward()
        return x.grad * 1

    step, x, plain = Step(body), numbers(4).requires_grad_(), numbers(4).requires_grad_()
    assert_same(body(None, plain), step(x))
    with pytest.raises(mg.CaptureError, match="has one from before the step"):
        step(x)
    assert_same(plain.grad, x.grad)
    x.grad = plain.grad = None
    assert_same(body(None, plain), step(x))
    assert len(step.builds) == 1


def test_an_argument_that_is_the_gradient_of_a_parameter():
    model = nn.Linear(4, 3)
    kept = Step(lambda self, x, y: train(self.model, x, y), model=model)
    kept.config.keep_gradients()
    x, y = torch.ones(3, 4), torch.ones(3, 3)
    kept(x, y)
    kept(x, y)
    assert model.weight.grad is not None
    with pytest.raises(mg.AliasError, match=r"argument .*model\.weight"):
        kept(model.weight.grad, y)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    free = Step(lambda self, x, y: train(self.model, x, y), optimizer, model=model)  # gradients of its own
    before = model.weight.grad.clone()
    expected = (model(before) - y).square().mean().detach()
    assert_same(expected, free(model.weight.grad, y).detach())
    assert_same(before, model.weight.grad)


@pytest.mark.parametrize("shares", [False, True])
def test_arguments_that_require_gradients_on_one_buffer(shares):
    def run(step: Any) -> list[torch.Tensor]:
        buffer = numbers()
        found = []
        for second in (4, 8, 2 if shares else 12):
            x = buffer[:4].detach().requires_grad_()
            y = buffer[second : second + 4].detach().requires_grad_()
            step(x, y)
            found += [x.grad, y.grad]
        return found

    def both(_self: Any, x: torch.Tensor, y: torch.Tensor) -> None:
        (x * x * y).sum().backward()

    step = Step(both)
    assert_same(run(lambda x, y: both(None, x, y)), run(step))
    assert len(step.builds) == 1


# --- gradient accumulation ---------------------------------------------------------------------------------------------


def test_micro_batches_of_one_buffer():
    def body(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return train(self.model, x, y)

    model = nn.Linear(4, 4)
    step = Step(body, torch.optim.SGD(model.parameters(), lr=0.1), model=model)
    step.config.set_gradient_accumulation_steps(2)
    data = torch.randn(16, 4)
    right = data.clone()
    right[:4] *= 2
    step(data[:4], data[4:8])
    assert_same(right, data)
    for x, y in ((data[:4], data[2:6]), (data[4:8], data[3:7])):
        with pytest.raises(mg.AliasError, match="share memory"):
            step(x, y)
    assert_same(right, data)
    step(data[8:12], data[4:8])
    right[8:12] *= 2
    assert_same(right, data)
    assert len(step.builds) == 1
    with pytest.raises(mg.AliasError, match="more than once"):
        step(data[:1].expand(4, 4), data[4:8])


def test_a_whole_argument_over_a_batch():
    def body(self: Any, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return train(self.model, x + table, x)

    model = nn.Linear(4, 4)
    step = Step(body, torch.optim.SGD(model.parameters(), lr=0.1), model=model)
    step.config.set_gradient_accumulation_steps(2)
    data = torch.randn(16, 4)
    for start in (0, 2, 8):
        step(data[start : start + 4], mg.replicated(data[2:3]))
    assert len(step.builds) == 1
    with pytest.raises(mg.AliasError, match=r"argument .*model\.weight"):
        step(data[:4], mg.replicated(model.weight.detach()[:1]))


# --- artifacts -----------------------------------------------------------------------------------------------------


def test_an_artifact_is_called_with_arguments_that_overlap(tmp_path):
    graph = Step(add_to_first)
    graph(numbers(4), numbers(4))
    mg.save(graph, tmp_path / "artifact")
    artifact, buffer, plain = mg.load(tmp_path / "artifact"), numbers(), numbers()
    assert_same(
        add_to_first(None, plain[:4], plain[4:8]), artifact(buffer[4:8] * 0 + buffer[:4], buffer[4:8])
    )
    for first, second in ((buffer[:4], buffer[2:6]), (buffer[2:6], buffer[:4]), (buffer[:4], buffer[:4])):
        with pytest.raises(mg.SignatureError, match="shares memory"):
            artifact(first, second)
    assert_same(numbers(), buffer)


def test_an_artifact_for_one_tensor_given_twice(tmp_path):
    graph, x = Step(only_read), numbers(4)
    graph(x, x)
    mg.save(graph, tmp_path / "one")
    artifact = mg.load(tmp_path / "one")
    assert_same(x * 9, artifact(*[x * 3] * 2))
    with pytest.raises(mg.SignatureError, match="was one tensor with another"):
        artifact(x, x + 1)
    graph(x, x + 1)
    mg.save(graph, tmp_path / "two")
    assert_same(only_read(None, x, x + 2), mg.load(tmp_path / "two")(x, x + 2))


def test_programs_that_an_artifact_could_not_choose_between(tmp_path):
    graph, x = Step(lambda _self, a, b, c: a * 4 + b * 2 + c), numbers(4)
    graph(x, x + 1, x)
    with pytest.raises(mg.ArtifactError, match="one tensor as two arguments"):
        mg.save(graph, tmp_path / "artifact")
    table = torch.ones(4)
    graph = Step(lambda _self, a: a + table)
    graph(table)
    with pytest.raises(mg.ArtifactError, match="state as an argument"):
        mg.save(graph, tmp_path / "artifact")


# --- negation that a view only promises -----------------------------------------------------------------------------


@pytest.mark.parametrize("as_argument", [False, True])
@pytest.mark.parametrize(
    "dtype", [torch.complex64, torch.complex128, torch.bfloat16, torch.float32, torch.int32]
)
def test_copies_of_what_is_negated_by_a_bit(dtype, as_argument):
    # not float16: eager mode forgets to negate what it copies there from contiguous memory
    source = torch.complex(torch.tensor([3.0, -0.0, 0.0]), torch.tensor([1.0, -2.0, 0.0]))

    def body(_self, target, given):
        negated = given if as_argument else given.conj().imag
        target.copy_(negated)
        target[:1] = negated[1:2]
        return target.clone()

    given = source.conj().imag if as_argument else source
    expected, target = torch.ones(3, dtype=dtype), torch.ones(3, dtype=dtype)
    body(None, expected, given)
    Step(body)(target, given)
    assert_same(expected, target)


# --- random layouts --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 150])
def test_random_layouts(seed: int) -> None:
    """In a process where little lives: `make stress` tries many more."""
    done = run_module("tests.stress.argument_layouts", "--trials", 150, "--seed", seed)
    assert done.returncode == 0, done.stdout + done.stderr
    counts = {name: int(count) for count, name in re.findall(r"^ *(\d+)  (.+)$", done.stdout, re.MULTILINE)}
    assert counts["cases"] == 150
    assert counts["eager's numbers"] > 120


# --- what a tensor is besides its values ---------------------------------------------------------------------------------


def penalty(_: Any, x: torch.Tensor) -> torch.Tensor:
    x.requires_grad_()
    (gradient,) = torch.autograd.grad((x * x).sum(), x, create_graph=True)
    return gradient.square().sum()


def backward(_: Any, x: torch.Tensor) -> torch.Tensor:
    x.requires_grad = True
    (x * x).sum().backward()
    assert x.grad is not None
    return x.grad * 1


def stop(_: Any, x: torch.Tensor) -> torch.Tensor:
    x.requires_grad_(False)
    return x * 2


def detach(_: Any, x: torch.Tensor) -> torch.Tensor:
    x.mul_(2) if not x.requires_grad else None
    return x.detach_() * 2


@pytest.mark.parametrize("backend", ["aten", "inductor"])
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("body", [penalty, backward, stop, detach])
def test_the_callers_tensor_requires_grad_as_in_eager_mode(
    body: Body, requires_grad: bool, backend: Any
) -> None:
    step = Step(body)
    step.config.backend(backend)
    for _ in range(2):
        expected, given = (numbers().requires_grad_(requires_grad) for _ in range(2))
        assert_same(body(None, expected), step(given))
        assert given.requires_grad is expected.requires_grad
        assert given.is_leaf
        assert_same((expected.detach(), expected.grad), (given.detach(), given.grad))
    assert len(step.builds) == 1


@pytest.mark.parametrize("body", [stop, detach])
def test_a_gradient_that_cannot_be_stopped_is_refused(body: Body) -> None:
    leaf = numbers().requires_grad_()
    step = Step(body)
    step(numbers().requires_grad_())
    inner = leaf * 1
    with torch.no_grad(), pytest.raises(mg.CaptureError, match="stops the gradient of argument"):
        step(inner)
    assert inner.requires_grad


def add_out(_: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    torch.add(a, a, out=b)
    return b + 1


@pytest.mark.parametrize("backend", ["aten", "inductor"])
def test_an_empty_out_gets_a_size(backend: Any) -> None:
    step = Step(add_out)
    step.config.backend(backend)
    for empty in (torch.empty(0), torch.empty(0), torch.zeros(20).resize_(0)):
        assert_same(numbers() * 2 + 1, step(numbers(), empty))
        assert_same(numbers() * 2, empty)
    assert len(step.builds) == 1
    whole = torch.zeros(4)
    with pytest.raises(mg.CaptureError, match="shares the memory of another tensor"):
        step(numbers(), whole[:0])
    assert_same(torch.zeros(4), whole)


def set_data(_: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    b.data = a * 2
    return b + 1


def resize(_: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    torch.resize_as_(b, a)
    return a + 1


def turn(_: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    b.t_()
    return a + 1


def put(_: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    b.set_(a * 2)
    return b + 1


@pytest.mark.parametrize("body", [add_out, set_data, resize, turn, put])
def test_another_form_of_an_argument_is_refused_before_anything_is_written(body: Body) -> None:
    model = nn.Linear(16, 1)
    before = model.weight.detach().clone()

    def train(step: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        step.model(a).sum().backward()
        return body(step, a, b)

    step = Step(train, torch.optim.SGD(model.parameters(), lr=0.1), model=model)
    given = torch.zeros(3, 4)
    with pytest.raises(mg.CaptureError, match=r"args\[1\]|to \.data") as caught:
        step(numbers(), given)
    assert caught.value.where.file == __file__
    assert caught.value.hint
    assert_same(before, model.weight.detach())
    assert_same(torch.zeros(3, 4), given)
