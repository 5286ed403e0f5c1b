"""Which formulas eager's kernels obey on this machine, and whether the code of an update has their bits: both are tested."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from monograph.compat.modes import outside_of_function_modes, outside_of_modes
from monograph.compat.ops import named_arguments, schema_arguments
from monograph.elementwise.compiling import compiled
from monograph.elementwise.formulas import FORMULAS
from monograph.elementwise.kinds import C_TYPES, HEAD, Item
from monograph.elementwise.parts import Part, is_number
from monograph.elementwise.updates import CompiledUpdate, Group
from monograph.ir.meta import ScalarMeta, TensorMeta, form, value
from monograph.layout import extent

_NUMBERS = (0.1, 0.9, 0.999, 1e-3, -1e-3, 1e-8, 0.0, 1.0, 2.0, -0.5, 7.0)
_LENGTHS = range(1, 70)  # every number of elements that are left over by loops for vectors
_BITS: Mapping[torch.dtype, torch.dtype] = {torch.float32: torch.int32, torch.float64: torch.int64}
_DTYPES = {name: dtype for dtype, name in C_TYPES.items()}

# Documented cache: what was found in this process, by form; -1 where no text of a formula holds.
_FOUND: dict[Form, int] = {}


@dataclass(frozen=True)
class Form:
    """An op on elements of one type: which of its arguments are numbers, and which are left at their defaults."""

    op: Any
    kind: str  # the elements, in C
    numbers: tuple[str, ...]
    defaults: tuple[str, ...]

    @property
    def tensors(self) -> list[str]:
        """The arguments that are tensors."""
        others = {*self.numbers, *self.defaults}
        return [item.name for item in schema_arguments(self.op) if item.name not in others]


def form_at(node: fx.Node) -> Form:
    """The form of the op at a node."""
    made = form(node)
    assert made is not None, "formulas are those of ops on tensors"
    given = named_arguments(node.target, node.args, node.kwargs)
    defaults = tuple(item.name for item in schema_arguments(node.target) if item.name not in given)
    numbers = tuple(name for name, item in given.items() if is_number(item))
    return Form(node.target, C_TYPES[made.dtype], numbers, defaults)


def forms_in(parts: Iterable[Part]) -> list[Form]:
    """The forms of all ops with formulas in parts of an update."""
    found: dict[Form, None] = {}
    for part in parts:
        for node in part.nodes:
            if node.target in FORMULAS:
                found[form_at(node)] = None
    return list(found)


def text_to_try(forms: Sequence[Form]) -> str:
    """Code that computes each form by each of its texts."""
    lines = [HEAD]
    for number, tried in enumerate(forms):
        names = {name: f"tensors[{index}][i]" for index, name in enumerate(tried.tensors)}
        names |= {name: f"(({tried.kind})numbers[{index}])" for index, name in enumerate(tried.numbers)}
        names |= {
            item.name: f"(({tried.kind}){float(item.default)!r})"
            for item in schema_arguments(tried.op)
            if item.name in tried.defaults
        }
        formula = FORMULAS[tried.op]
        for choice in range(len(formula.texts)):
            refused = f"if ({formula.refused(names)}) return 1;" if formula.unless else ""
            lines.append(
                f"int try_{number}_{choice}(long count, const {tried.kind}** tensors, const double* numbers, "
                f"{tried.kind}* made) {{\n"
                f"  typedef {tried.kind} T; {refused}\n"
                "  #pragma GCC ivdep\n"
                f"  for (long i = 0; i < count; i++) made[i] = {formula.written(choice, names)};\n"
                "  return 0;\n}"
            )
    return "\n".join(lines)


def unproved(parts: Iterable[Part]) -> list[Form]:
    """The forms that nothing is known of in this process."""
    return [tried for tried in forms_in(parts) if tried not in _FOUND]


def prove(forms: Sequence[Form]) -> None:
    """Find out which text of each form's formula has the bits of eager's kernel. Raises BackendError without a compiler."""
    if not forms:
        return
    (library,) = compiled([text_to_try(forms)])
    with outside_of_modes(), outside_of_function_modes(), torch.no_grad():
        for number, tried in enumerate(forms):
            choices = range(len(FORMULAS[tried.op].texts))
            holding = (
                choice for choice in choices if _holds(tried, getattr(library, f"try_{number}_{choice}"))
            )
            _FOUND[tried] = next(holding, -1)


def choice_at(node: fx.Node) -> int:
    """The text that holds for the op at a node. Raises LookupError if none does."""
    found = _FOUND[form_at(node)]
    if found < 0:
        raise LookupError(f"no formula is known for {node.target} on this processor")
    return found


def _holds(tried: Form, run: Callable[..., int]) -> bool:
    dtype = _DTYPES[tried.kind]
    values = _values(dtype, len(tried.tensors))
    for numbers in itertools.islice(itertools.product(_NUMBERS, repeat=len(tried.numbers)), 40):
        start = 0
        for length in (len(values), *_LENGTHS):
            piece = values[start : start + length]
            start += 1 if length == len(values) else length
            if not _is_same(tried, run, [column.contiguous() for column in piece.T], numbers):
                return False
    return True


def _is_same(
    tried: Form, run: Callable[..., int], tensors: Sequence[torch.Tensor], numbers: Sequence[float]
) -> bool:
    made = torch.empty_like(tensors[0])
    pointers = (ctypes.c_void_p * len(tensors))(*(item.data_ptr() for item in tensors))
    given = (ctypes.c_double * max(len(numbers), 1))(*numbers)
    if run(ctypes.c_long(len(made)), pointers, given, ctypes.c_void_p(made.data_ptr())):
        return True  # left to Python
    named = dict(zip(tried.tensors, tensors, strict=True)) | dict(zip(tried.numbers, numbers, strict=True))
    return same_bits(made, tried.op(**named))


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """True if all elements are the same, zeros by their sign; of a NaN the payload is open."""
    kind = _BITS[one.dtype]
    equal = one.view(kind) == other.view(kind)
    return bool((equal | (one.isnan() & other.isnan())).all())


def _values(dtype: torch.dtype, columns: int) -> torch.Tensor:
    """Rows of special values in all combinations, of random ones, and of random bits."""
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
    values = _values(whole.dtype, 1)[:, 0]
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
            if not update.prepared(
                [inputs[node] for node in item.slots], [inputs[node] for node in item.given]
            ):
                continue
            update.run()
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
