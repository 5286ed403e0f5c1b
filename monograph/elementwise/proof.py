"""Which formulas eager's kernels obey on this machine, and whether the code of an update has their bits: both are tested."""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import fx

from monograph.compat.global_state import denormals_count
from monograph.compat.modes import outside_of_function_modes, outside_of_modes
from monograph.compat.ops import named_arguments, schema_arguments
from monograph.elementwise.chains import Chain, place_of
from monograph.elementwise.compiling import compiled
from monograph.elementwise.formulas import ALL_FORMULAS, CALLED, ONE_THREAD, ONE_THREAD_CALLED, constant
from monograph.elementwise.kinds import C_TYPES, HEAD, Item
from monograph.elementwise.parts import Part, is_number
from monograph.elementwise.updates import CompiledUpdate, Group
from monograph.ir.meta import ScalarMeta, TensorMeta, form, value
from monograph.layout import extent

_NUMBERS = (0.1, 0.9, 0.999, 1e-3, -1e-3, 1e-8, 0.0, 1.0, 2.0, -0.5, 7.0)
_LENGTHS = range(1, 70)  # every number of elements that are left over by loops for vectors
_CHOICES = 40  # of numbers
_ROUNDS = 5  # of all lengths, where one element stands for many
_BITS: Mapping[torch.dtype, torch.dtype] = {torch.float32: torch.int32, torch.float64: torch.int64}
_DTYPES = {name: dtype for dtype, name in C_TYPES.items()}

# Documented cache: what was found in this process, by form; -1 where no text of a formula holds.
_FOUND: dict[Form, int] = {}


@dataclass(frozen=True)
class Form:
    """An op on elements of one type: which of its arguments are numbers, and which are left at their defaults.

    `masks` are tensors of bool, and `repeated` those with one element for many, with which eager's loops may compute beforehand.
    With `is_flushed` it runs in the mode of `torch.set_flush_denormal`.
    """

    op: Any
    kind: str  # the elements, in C
    numbers: tuple[str, ...]
    defaults: tuple[str, ...]
    masks: tuple[str, ...] = ()
    repeated: tuple[str, ...] = ()
    is_flushed: bool = False

    @property
    def tensors(self) -> list[str]:
        """The arguments that are tensors."""
        others = {*self.numbers, *self.defaults}
        return [item.name for item in schema_arguments(self.op) if item.name not in others]


def form_at(node: fx.Node) -> Form:
    """The form of the op at a node."""
    given = {
        name: item
        for name, item in named_arguments(node.target, node.args, node.kwargs).items()
        if item is not None
    }
    defaults = tuple(item.name for item in schema_arguments(node.target) if item.name not in given)
    numbers = tuple(name for name, item in given.items() if is_number(item))
    tensors = {
        name: found
        for name, item in given.items()
        if isinstance(item, fx.Node) and (found := form(item)) is not None
    }
    masks = tuple(name for name, item in tensors.items() if item.dtype not in C_TYPES)
    made = form(node)
    assert made is not None, "formulas are those of ops on tensors"
    kinds = [C_TYPES[item.dtype] for item in (*tensors.values(), made) if item.dtype in C_TYPES]
    places = {name: place_of(item.layout, made.layout) for name, item in tensors.items()}
    repeated = tuple(name for name, place in places.items() if place and place.kind in ("single", "column"))
    kind = kinds[0] if kinds else "float"
    return Form(node.target, kind, numbers, defaults, masks, repeated, not denormals_count())


def forms_in(parts: Iterable[Part | Chain]) -> list[Form]:
    """The forms of all ops with formulas in parts of an update, and in chains."""
    found: dict[Form, None] = {}
    for part in parts:
        for node in part.nodes:
            if node.target in ALL_FORMULAS:
                found[form_at(node)] = None
    return list(found)


def text_to_try(forms: Sequence[Form]) -> str:
    """Code that computes each form by each of its texts."""
    lines = [HEAD]
    for number, tried in enumerate(forms):
        names = {
            name: (
                f"((const {'bool' if name in tried.masks else tried.kind}*)tensors[{index}])"
                f"[{0 if name in tried.repeated else 'i'}]"
            )
            for index, name in enumerate(tried.tensors)
        }
        names |= {name: f"(({tried.kind})numbers[{index}])" for index, name in enumerate(tried.numbers)}
        names |= {
            item.name: constant(item.default, tried.kind)
            for item in schema_arguments(tried.op)
            if item.name in tried.defaults
        }
        formula = ALL_FORMULAS[tried.op]
        for choice in range(len(formula.texts)):
            refused = f"if ({formula.refused(names)}) return 1;" if formula.unless else ""
            lines.append(
                f"int try_{number}_{choice}(long count, const void** tensors, const double* numbers, "
                f"{'bool' if formula.is_test else tried.kind}* made) {{\n"
                f"  typedef {tried.kind} T; {refused}\n"
                "  #pragma GCC ivdep\n"
                f"  for (long i = 0; i < count; i++) made[i] = {formula.written(choice, names)};\n"
                "  return 0;\n}"
            )
    return "\n".join(lines)


def unproved(parts: Iterable[Part | Chain]) -> list[Form]:
    """The forms that nothing is known of in this process."""
    return [tried for tried in forms_in(parts) if tried not in _FOUND]


def prove(forms: Sequence[Form]) -> None:
    """Find out which text of each form's formula has the bits of eager's kernel. Raises BackendError without a compiler."""
    if not forms:
        return
    (library,) = compiled([text_to_try(forms)])
    with outside_of_modes(), outside_of_function_modes(), torch.no_grad():
        for number, tried in enumerate(forms):
            choices = range(len(ALL_FORMULAS[tried.op].texts))
            holding = (
                choice for choice in choices if _holds(tried, getattr(library, f"try_{number}_{choice}"))
            )
            _FOUND[tried] = next(holding, -1)


def has_one_mode(nodes: Iterable[fx.Node]) -> bool:
    """False if eager's kernels run on threads that flush denormal numbers and on others that do not: each thread has its mode."""
    return denormals_count() or all(
        math.prod(made.shape) <= (ONE_THREAD_CALLED if node.target in CALLED else ONE_THREAD)
        for node in nodes
        if (made := form(node)) is not None
    )


def is_proved(node: fx.Node) -> bool:
    """True if a formula holds for the op at a node."""
    return _FOUND.get(form_at(node), -1) >= 0


def choice_at(node: fx.Node) -> int:
    """The text that holds for the op at a node. Raises LookupError if none does."""
    found = _FOUND[form_at(node)]
    if found < 0:
        raise LookupError(f"no formula is known for {node.target} on this processor")
    return found


def _holds(tried: Form, run: Callable[..., int]) -> bool:
    pieces = _pieces(tried)
    only = ALL_FORMULAS[tried.op].only
    choices = itertools.product(*(only.get(name, _NUMBERS) for name in tried.numbers))
    for numbers in itertools.islice(choices, _CHOICES):
        given = (ctypes.c_double * max(len(numbers), 1))(*numbers)
        named = dict(zip(tried.numbers, numbers, strict=True))
        for piece in pieces:
            refused = run(piece.length, piece.pointers, given, piece.address)
            if not refused and not same_bits(piece.made, tried.op(**piece.tensors, **named)):
                return False  # what it refuses is left to Python
    return True


class _Piece:
    """Arguments to try a form with, and memory for the result."""

    def __init__(self, tried: Form, rows: torch.Tensor) -> None:
        self.tensors = {
            name: _argument(tried, name, column) for name, column in zip(tried.tensors, rows.T, strict=True)
        }
        dtype = torch.bool if ALL_FORMULAS[tried.op].is_test else _DTYPES[tried.kind]
        self.made = torch.empty(len(rows), dtype=dtype)
        self.length, self.address = ctypes.c_long(len(rows)), ctypes.c_void_p(self.made.data_ptr())
        self.pointers = (ctypes.c_void_p * len(self.tensors))(
            *(item.data_ptr() for item in self.tensors.values())
        )


def _pieces(tried: Form) -> list[_Piece]:
    """All values at once, and pieces of all lengths; more of them where one element stands for many."""
    values = special_values(_DTYPES[tried.kind], len(tried.tensors))
    found, start = [], 0
    for length in (len(values), *_LENGTHS) * (_ROUNDS if tried.repeated else 1):
        rows = values[start : start + length]
        found.append(_Piece(tried, rows))
        start = (start + (len(rows) if length < len(values) else 1)) % (len(values) - len(_LENGTHS))
    return found


def _argument(tried: Form, name: str, column: torch.Tensor) -> torch.Tensor:
    """What an argument is tried with: elements, as a mask for one, or the first of them for all."""
    item = column > 0 if name in tried.masks else column.contiguous()
    return item[0].clone().expand(len(item)) if name in tried.repeated else item


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """True if all elements are the same, zeros by their sign; of a NaN the payload is open."""
    if one.dtype is torch.bool:
        return torch.equal(one, other)
    one_bits, other_bits = one.view(_BITS[one.dtype]), other.view(_BITS[one.dtype])
    if torch.equal(one_bits, other_bits):
        return True
    equal = one_bits == other_bits
    return bool((equal | (one.isnan() & other.isnan())).all())


def special_values(dtype: torch.dtype, columns: int) -> torch.Tensor:
    """Rows of special values in all combinations, of random ones, and of random bits; nobody changes them."""
    return _special_values(dtype, columns, denormals_count())


@lru_cache(16)
def _special_values(dtype: torch.dtype, columns: int, _with_denormals: bool) -> torch.Tensor:
    limits = torch.finfo(dtype)
    small = limits.tiny * limits.eps
    plain = (
        0.0,
        1.0,
        2.0,
        0.5,
        3.0,
        0.1,
        1 / 3,
        1e-8,
        1e8,
        limits.max,
        limits.tiny,
        small,
        3 * small,
        limits.eps,
    )
    near = (1 - limits.eps / 2, 1 + limits.eps, float("inf"))
    special = torch.tensor([*plain, *near, *(-item for item in (*plain, *near)), float("nan")], dtype=dtype)
    combined = torch.cartesian_prod(*[special] * min(columns, 2)).reshape(-1, min(columns, 2))
    source = torch.Generator().manual_seed(0)
    if columns > 2:
        more = special[torch.randint(len(special), (20 * len(combined), columns), generator=source)]
        combined = torch.cat([more, torch.cat([combined, combined[:, : columns - 2]], 1)])
    shape = (8192, columns)
    random = torch.randn(shape, generator=source, dtype=torch.float64).to(dtype)
    random *= torch.randn(shape, generator=source, dtype=torch.float64).mul(4).exp().to(dtype)
    whole = torch.iinfo(_BITS[dtype])
    bits = torch.randint(whole.min, whole.max, shape, generator=source, dtype=_BITS[dtype]).view(dtype)
    rows = torch.cat([combined, random, bits])
    return rows[torch.randperm(len(rows), generator=source)]


# --- updates ----------------------------------------------------------------------------------------------------------


def has_eagers_bits(item: Item, library: ctypes.CDLL) -> bool:
    """True if the code of a kind writes what the ops of a part of it compute, for values of all sorts."""
    whole = item.part.whole
    assert whole is not None
    count = torch.Size(whole.shape).numel()
    values = special_values(whole.dtype, 1)[:, 0]
    source = torch.Generator().manual_seed(1)

    def tensor(described: TensorMeta, *, plain: bool) -> torch.Tensor:
        size = extent(described.shape, described.stride)
        if plain or not described.shape:  # counters, and what training meets
            memory = torch.rand(size, generator=source, dtype=torch.float64) + (not described.shape) * 2.0
        else:
            memory = values[torch.randint(len(values), (size,), generator=source)]
        return memory.to(described.dtype).as_strided(described.shape, described.stride)

    update = CompiledUpdate(Group(item.kind, (item,), library))
    with outside_of_modes(), outside_of_function_modes(), torch.no_grad():
        for plain in (True, False) if count else ():
            inputs: dict[fx.Node, Any] = {}
            for node in (*item.part.inputs, *item.part.writes.values()):
                described = value(node)
                if isinstance(described, TensorMeta):
                    inputs.setdefault(node, tensor(described, plain=plain))
                elif isinstance(described, ScalarMeta):
                    inputs[node] = 0.25 if described.kind == "float" else 2
            computed = _computed(item.part, inputs)
            if not update.takes(
                [inputs[node] for node in update.given], [inputs[node] for node in item.given]
            ):
                continue
            update.run(*(inputs[node] for node in update.tensors))
            for node, state in item.part.writes.items():
                if not same_bits(inputs[state].reshape(-1), computed[node].reshape(-1)):
                    return False
    return True


def _computed(part: Part, inputs: Mapping[fx.Node, Any]) -> dict[fx.Node, Any]:
    """What the ops of a part compute one by one."""
    known = dict(inputs)
    for node in part.nodes:
        args, kwargs = fx.map_arg((node.args, node.kwargs), known.__getitem__)
        known[node] = node.target(*args, **kwargs)  # type: ignore[operator]
    return known
