"""Random steps on views of shared buffers, and what plain PyTorch makes of them. Knows nothing of Monograph.

A case is a program and two to four calls of it. The calls differ in where their arguments lie: on which buffer, from
which element on, over each other or apart, one tensor given twice.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

BUFFER_BYTES = 384
DTYPES = (
    torch.float32,
    torch.float32,
    torch.float32,
    torch.int32,
    torch.float64,
    torch.uint8,
    torch.complex64,
)


@dataclass(frozen=True)
class Form:
    """What must be the same of an argument for one build to serve it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    twist: str = ""  # "conj", "imag" of a conjugate, which is a negative view, or "grad"

    @property
    def reach(self) -> int:
        """The elements from the first to behind the last."""
        if 0 in self.shape:
            return 0
        return 1 + sum((size - 1) * step for size, step in zip(self.shape, self.strides, strict=True))


@dataclass(frozen=True)
class Place:
    """Where an argument lies: a buffer and its first byte; or the argument, or the state, that it is itself."""

    buffer: int
    byte: int
    same_as: int = -1
    is_state: bool = False


@dataclass(frozen=True)
class Case:
    """One step with its calls."""

    forms: tuple[Form, ...]
    calls: tuple[tuple[Place, ...], ...]
    program: tuple[tuple[Any, ...], ...]
    results: tuple[int, ...]
    state: tuple[Form, Place] | None
    weight: Place | None  # with it the step trains


def draw(seed: int) -> Case:
    """The case of a seed."""
    choice = random.Random(seed)
    forms = [_form(choice) for _ in range(choice.choice((1, 2, 2, 2, 3)))]
    if len(forms) > 1 and choice.random() < 0.4:
        forms[1] = forms[0]
    state = None
    if choice.random() < 0.35:
        form = forms[0] if choice.random() < 0.4 and not forms[0].twist else _form(choice, plain=True)
        state = (form, _place(form, choice))
    weight = None
    if choice.random() < 0.3:
        weight = _place(Form(torch.float32, (3,), (1,)), choice)
    calls = []
    for _ in range(choice.choice((2, 2, 3, 4))):
        calls.append(_call(forms, state, choice, calls[-1] if calls else None))
    program = _program(len(forms) + (state is not None), choice)
    values = len(forms) + (state is not None) + sum(op[0] in _MAKES for op in program)
    results = tuple(choice.randrange(values) for _ in range(choice.choice((1, 1, 2, 3))))
    return Case(tuple(forms), tuple(calls), program, results, state, weight)


def _form(choice: random.Random, *, plain: bool = False) -> Form:
    dtype = choice.choice(DTYPES)
    shape = tuple(choice.choice((1, 2, 2, 3, 4)) for _ in range(choice.choice((1, 1, 2))))
    if choice.random() < 0.04:
        shape = (0, *shape[1:])
    strides: list[int] = []
    step = choice.choice((1, 1, 1, 2))
    for size in reversed(shape):
        strides.insert(0, step)
        step *= max(size, 1)
    kind = choice.random()
    if kind < 0.12 and len(shape) == 2:
        strides.reverse()
        shape = (shape[1], shape[0])
    elif kind < 0.17 and not plain:
        strides[choice.randrange(len(strides))] = 0
    elif kind < 0.21 and not plain and len(shape) == 2:
        strides = [1, 1]
    elif kind < 0.28 and len(shape) == 2:
        strides[0] += choice.choice((1, 2))  # columns of a wider matrix
    twist = ""
    if not plain and dtype is torch.complex64 and choice.random() < 0.6:
        twist = choice.choice(("conj", "imag"))
    elif not plain and dtype.is_floating_point and choice.random() < 0.15:
        twist = "grad"
    return Form(dtype, shape, tuple(strides), twist)


def _place(form: Form, choice: random.Random) -> Place:
    size = form.dtype.itemsize
    last = BUFFER_BYTES // size - max(form.reach, 1)
    near = min(last, 24 // size + 3)  # arguments meet often
    return Place(choice.choice((0, 0, 0, 1)), size * choice.randint(0, choice.choice((near, last))))


def _call(
    forms: Sequence[Form],
    state: tuple[Form, Place] | None,
    choice: random.Random,
    before: Sequence[Place] | None,
) -> tuple[Place, ...]:
    places: list[Place] = []
    for index, form in enumerate(forms):
        counterpart = next((i for i in range(index) if forms[i] == form), -1)
        if counterpart >= 0 and choice.random() < 0.25:
            places.append(Place(0, 0, same_as=counterpart))
        elif state is not None and form == state[0] and choice.random() < 0.2:
            places.append(Place(0, 0, is_state=True))
        elif before is not None and choice.random() < 0.4:
            places.append(before[index])
        else:
            places.append(_place(form, choice))
    return tuple(places)


# --- programs ------------------------------------------------------------------------------------------------------

_MAKES = ("add", "sum", "clone", "flip", "tail", "flat", "step", "bits", "cross", "strided")
_CHANGES = ("add_", "mul_", "zero_", "first_", "step_", "copy_", "through_", "out_", "flip_", "tail_")
_ASKS = ("is", "offset")


def _program(num_given: int, choice: random.Random) -> tuple[tuple[Any, ...], ...]:
    ops: list[tuple[Any, ...]] = []
    values = num_given
    reads_only = choice.random() < 0.25
    for _ in range(choice.choice((2, 3, 3, 4, 5))):
        if not reads_only and choice.random() < 0.45:
            name = choice.choice(_CHANGES)
        else:
            name = choice.choice((*_MAKES, *_MAKES, "is") if choice.random() < 0.9 else (*_MAKES, *_ASKS))
        if name == "strided" and choice.random() < 0.6:
            name = "clone"
        ops.append((name, choice.randrange(values), choice.randrange(values), choice.randrange(4)))
        values += name in _MAKES
    return tuple(ops)


def run(program: Sequence[tuple[Any, ...]], given: Sequence[torch.Tensor]) -> list[Any]:
    """The values of a program, those given first, and what it asked last."""
    values, asked = list(given), []
    for name, first, second, number in program:
        a, b = values[first], values[second]
        with torch.no_grad():  # in place on leaves; what is differentiated is in `loss`
            made = _STEPS[name](a, b, number)
        if name in _MAKES:
            values.append(made)
        elif name in _ASKS:
            asked.append(made)
    return [*values, asked]


def _out(a: torch.Tensor, b: torch.Tensor, number: int) -> None:
    torch.add(a, number, out=a)


def _through(a: torch.Tensor, b: torch.Tensor, number: int) -> None:
    a.unsqueeze(0).transpose(0, -1).add_(number)


def _copy(a: torch.Tensor, b: torch.Tensor, number: int) -> None:
    a.copy_(b.reshape(-1)[:1].expand(a.shape) if a.shape != b.shape and b.numel() else b)


def _first(a: torch.Tensor, b: torch.Tensor, number: int) -> None:
    a[..., :1] = number


def _flip(a: torch.Tensor, b: torch.Tensor, number: int) -> None:
    a.copy_(a.flip(0))


def _bits(a: torch.Tensor, b: torch.Tensor, number: int) -> torch.Tensor:
    real = torch.view_as_real(a.resolve_conj().resolve_neg()) if a.is_complex() else a.resolve_neg()
    return real.view({1: torch.uint8, 4: torch.int32, 8: torch.int64}[real.element_size()])


def _strided(a: torch.Tensor, b: torch.Tensor, number: int) -> torch.Tensor:
    if number < 2:
        return a.as_strided((2,), (1,)) if a.numel() else a
    return a.as_strided((2,), (1,), number)


_STEPS: dict[str, Any] = {
    "add": lambda a, b, number: a + number,
    "sum": lambda a, b, number: a.sum() * number,
    "clone": lambda a, b, number: a.clone(),
    "flip": lambda a, b, number: a.flip(0),
    "tail": lambda a, b, number: a[number % 2 :],
    "flat": lambda a, b, number: a.reshape(-1),
    "step": lambda a, b, number: a[..., ::2],
    "bits": _bits,
    "cross": lambda a, b, number: a.sum() + b.sum(),
    "strided": _strided,
    "add_": lambda a, b, number: a.add_(number + 1),
    "mul_": lambda a, b, number: a.mul_(2),
    "zero_": lambda a, b, number: a.zero_(),
    "first_": _first,
    "step_": lambda a, b, number: a[..., ::2].add_(1),
    "copy_": _copy,
    "through_": _through,
    "out_": _out,
    "flip_": _flip,
    "tail_": lambda a, b, number: a[1:].add_(number),
    "is": lambda a, b, number: a is b,
    "offset": lambda a, b, number: a.storage_offset(),
}


def loss(values: Sequence[torch.Tensor], given: Sequence[torch.Tensor], weight: torch.Tensor) -> torch.Tensor:
    """What a training step goes back from: real values times the weight, and arguments that require a gradient."""
    last = next(
        (v for v in reversed(values) if isinstance(v, torch.Tensor) and v.dtype is torch.float32), None
    )
    total = weight.square().sum()
    if last is not None:
        total = total + (weight * last.detach().clone().sum().clamp(-8, 8)).sum()
    for item in given:
        if item.requires_grad:
            total = total + item.sum().to(torch.float32) * weight[0]
    return total


# --- one side ------------------------------------------------------------------------------------------------------


def buffers() -> list[torch.Tensor]:
    """Bytes that are small whole numbers as float32, and nothing worse than a number as anything else."""
    return [
        (torch.arange(BUFFER_BYTES // 4, dtype=torch.float32) % 13 + 1 + number).view(torch.uint8)
        for number in range(2)
    ]


class Side:
    """Buffers, state and weight of one side. `step` is called with arguments and gives results."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.buffers = buffers()
        self.model = nn.Module()
        if case.state is not None:
            self.model.register_buffer("state", self.view(*case.state))
        self.optimizer = None
        if case.weight is not None:
            self.model.weight = nn.Parameter(self.view(Form(torch.float32, (3,), (1,)), case.weight))
            self.optimizer = torch.optim.SGD([self.model.weight], lr=0.5)

    def view(self, form: Form, place: Place) -> torch.Tensor:
        """A tensor of this form on the buffers."""
        whole = self.buffers[place.buffer].view(form.dtype)
        made = whole.as_strided(form.shape, form.strides, place.byte // form.dtype.itemsize)
        if form.twist == "conj":
            return made.conj()
        if form.twist == "imag":
            return made.conj().imag
        return made.detach().requires_grad_() if form.twist == "grad" else made

    def arguments(self, places: Sequence[Place]) -> list[torch.Tensor]:
        """The arguments of a call."""
        made: list[torch.Tensor] = []
        for form, place in zip(self.case.forms, places, strict=True):
            if place.is_state:
                made.append(self.model.state)
            else:
                made.append(made[place.same_as] if place.same_as >= 0 else self.view(form, place))
        return made

    def forward(self, *given: torch.Tensor) -> list[Any]:
        """The step but for the update."""
        inputs = [*given, self.model.state] if self.case.state is not None else list(given)
        *values, asked = run(self.case.program, inputs)
        if self.case.weight is not None:
            loss(values, given, self.model.weight).backward()
        return [*(values[index] for index in self.case.results), asked]

    def shown(self, result: Any) -> tuple[int, int] | None:
        """The buffer that a result lies on, and from which byte on."""
        if not isinstance(result, torch.Tensor) or not result.numel():
            return None
        for number, buffer in enumerate(self.buffers):
            byte = result.data_ptr() - buffer.data_ptr()
            if 0 <= byte < BUFFER_BYTES:
                return number, byte
        return None


class Plain(Side):
    """The reference."""

    def step(self, *given: torch.Tensor) -> list[Any]:
        """One eager step."""
        if self.optimizer is not None:
            self.optimizer.zero_grad()
        results = self.forward(*given)
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad()
        return results
