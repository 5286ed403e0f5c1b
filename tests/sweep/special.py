"""The sweep of special values: compiled arithmetic gives eager's NaN, infinities and signs, and else rounds as eager.

Each op of torch's database that takes a type is called on what is special in that type: NaN, infinities, both zeros,
denormals, the largest and smallest numbers, limits of integers. A compilation takes seconds, so many ops of one type
are compiled as one step; a sample of a case is one of them. Where the graph cannot be compiled, halves of it are.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import BinaryUfuncInfo, UnaryUfuncInfo
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

import monograph as mg
from tests.sweep.cases import DEVICE, SweepCase
from tests.sweep.chains import CHAINS
from tests.sweep.outcomes import Outcome

DTYPES = {
    name: getattr(torch, name)
    for name in ("float32", "float64", "bfloat16", "float16", "int32", "int64", "int8", "uint8", "bool")
}
# Those that have expectations, and those that can be chosen beside them.
KINDS_OF_CALLS = (
    "float32", "float32 backward", "int32", "float64", "bfloat16", "int64", "float64 backward", "bfloat16 backward",
    "float16", "float16 backward", "int8", "uint8", "bool",
)  # fmt: skip
TOGETHER = 30  # ops in a step
CALLS = 4  # of a step of ops that are not elementwise, each with values of its own
ROUNDING = 64  # units in the last place that an op may err where it is compared element by element
_SIGNED = (torch.int8, torch.int32, torch.int64)
_LARGEST = 3000  # elements of a sample's tensor

# What draws numbers, has new memory, sizes by values or other than dense tensors; and products, decompositions of
# matrices and transforms, which are kernels of torch's libraries in compiled steps as well. And what only moves elements.
# `lcm` of the least integers ends the process of eager mode; polynomials take as many terms as an argument says.
_LEFT_OUT = re.compile(
    r"linalg|fft|sparse|jiterator|conv|rand|dropout|bernoulli|normal_|\.normal|^normal|multinomial|cauchy|exponential|"
    r"geometric|uniform|rrelu|empty|unique|nonzero|argwhere|masked_select|combinations|to_sparse|hash_tensor|"
    r"cholesky|\blu|svd|qr|eig|inverse|ormqr|triangular|geqrf|logdet|det$|matrix_exp|matmul|mm$|mv$|bmm|addr|einsum|"
    r"attention|embedding|allclose|equal$|item|stft|istft|cdist|ctc_loss|histogram|histc|bincount|tensordot|kron|"
    r"chain_matmul|multi_dot|^inner|outer|^dot|^vdot|bilinear|linear$|grid_sample|fold|pixel|interpolate|upsample|"
    r"polar|complex|view_as|as_strided|_segment|segment|to_dense|corrcoef|cov$|pca|pinv|lobpcg|trapz|trapezoid|"
    r"signal|fractional|^(lcm|__r(or|xor|sub|radd|mul)__|H|T|mH|mT|alias_copy|arange|atleast.*|cartesian_prod|chunk|column_stack|conj|"
    r"conj_physical|contiguous|diag.*|[dhv]?split.*|[dhv]?stack|expand.*|eye|flatten|flip.*|full.*|imag|real|linspace.*|"
    r"logspace.*|movedim|narrow.*|new_.*|ones.*|zeros.*|permute.*|positive|ravel|repeat.*|reshape.*|resolve.*|roll|rot90|"
    r"scalar_tensor|squeeze.*|swapaxes|swapdims|t|t_copy|take.*|tile|transpose.*|tril|triu|unbind.*|unflatten|unsafe.*|"
    r"unsqueeze.*|unravel_index|unfold.*|view.*|vsplit|vstack|cat|gather|select.*|slice.*|nn.functional.pad.*|"
    r"nn.functional.channel_shuffle|log_normal|cfloat|cdouble|chalf|nn.functional.one_hot)$|"
    r"polynomial|max_unpool|meshgrid|tril_indices|triu_indices|broadcast|block_diag|resize|nested|block_diag|_batch_norm|put$|put_"
)

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Call:
    """A function of tensors, and values for them; all are of one signature."""

    name: str
    function: Callable[..., Any]
    values: tuple[Tensors, ...]
    elementwise: bool
    differentiable: tuple[bool, ...] = ()  # whose gradients are asked for; of all if nothing is told

    def at(self, number: int) -> Tensors:
        """The values of a call."""
        return self.values[number % len(self.values)]


def special_cases(kinds: Sequence[str] = KINDS_OF_CALLS) -> tuple[SweepCase, ...]:
    """Groups of ops of each type."""
    return tuple(
        SweepCase("special", kind, f"{number:02} {group[0]}")
        for kind in kinds
        for number, group in enumerate(_groups(kind))
    )


def outcomes_of_group(case: SweepCase, first: int = 0) -> Iterator[tuple[str, Outcome]]:
    """The name and the outcome of each op of a case."""
    names = _groups(case.name)[int(case.part[:2])][first:]
    calls = [call_of(case.name, name) for name in names]
    found = outcomes_of([call for call in calls if isinstance(call, Call)])
    for name, call in zip(names, calls, strict=True):
        yield name, found[call.name] if isinstance(call, Call) else call


def op_of(case: str, index: int) -> str:
    """The op that a sample of a case is, by the key of the case."""
    _, kind, part = case.split("/", 2)
    return _groups(kind)[int(part[:2])][index]


@cache
def _groups(kind: str) -> tuple[tuple[str, ...], ...]:
    """The names of the ops that are compiled together."""
    dtype = DTYPES[kind.split()[0]]
    names = [name for name, op in OPS.items() if dtype in op.supported_dtypes(DEVICE)]
    if kind.endswith("backward"):
        names = [name for name in names if OPS[name].supports_autograd]
    names += [f"chain {name}" for name in CHAINS if dtype.is_floating_point in CHAINS[name].floats]
    return tuple(tuple(names[at : at + TOGETHER]) for at in range(0, len(names), TOGETHER))


OPS = {op.full_name: op for op in op_db if not _LEFT_OUT.search(op.full_name)}


# --- values ----------------------------------------------------------------------------------------------------------


def specials(dtype: torch.dtype) -> torch.Tensor:
    """What is special in a type, and some that is not."""
    if dtype is torch.bool:
        return torch.tensor([False, True])
    if not dtype.is_floating_point:
        least, most = torch.iinfo(dtype).min, torch.iinfo(dtype).max
        return torch.tensor(
            [least, least + 1, -7, -2, -1, 0, 1, 2, 3, 8, 31, 64, 1 << 24, most - 1, most]
        ).to(dtype)
    limits = torch.finfo(dtype)
    small = limits.smallest_normal
    magnitudes = [
        0.0,
        small * limits.eps,
        small * 0.25,
        small,
        1e-10,
        limits.eps,
        1e-5,
        1e-3,
        0.1,
        0.3,
        0.5,
        1.0,
        1 + limits.eps,
        1.5,
        2.0,
    ]
    magnitudes += [2.5, 3.0, 7.0, 88.0, 1e4, limits.max / 2, limits.max, float("inf")]
    return torch.tensor(
        [*magnitudes, *(-item for item in magnitudes), limits.max, float("nan")], dtype=torch.float64
    ).to(dtype)


def pairs(dtype: torch.dtype) -> Tensors:
    """Each special value with each."""
    values = specials(dtype)
    grid = torch.cartesian_prod(values, values)
    if dtype in _SIGNED:  # whose quotient ends eager mode's process
        grid = grid[(grid[:, 0] != torch.iinfo(dtype).min) | (grid[:, 1] != -1)]
    return grid.t().contiguous().unbind()


def _filled(tensor: torch.Tensor, number: int, generator: torch.Generator) -> torch.Tensor:
    """A tensor of that form with special values: some of them, many, or nothing else than one in each row.

    Squares and sums of large numbers overflow, sooner or later in this order or that, so the largest come in rows.
    """
    if tensor.numel() == 0:
        return tensor
    values = specials(tensor.dtype)
    if values.is_floating_point():
        values = values[~values.isfinite() | (values.abs() < torch.finfo(values.dtype).max ** 0.5 / 100)]
    drawn = values[torch.randint(len(values), tensor.shape, generator=generator)]
    if number == 0:  # mostly what it was
        return torch.where(torch.rand(tensor.shape, generator=generator) < 0.1, drawn, tensor)
    if number == 1:
        return drawn
    finite = values[values.isfinite()] if tensor.is_floating_point() else values
    whole = [
        float("-inf"),
        float("inf"),
        float("nan"),
        specials(tensor.dtype)[-2].item(),
        1e-3,
        -0.0,
        0.0,
        1e4,
    ]
    if number == 2 and tensor.is_floating_point() and tensor.dim() > 0:
        rows = torch.tensor(whole, dtype=tensor.dtype)[torch.arange(tensor.shape[0]) % len(whole)]
        return rows.reshape(-1, *[1] * (tensor.dim() - 1)).expand(tensor.shape).contiguous()
    return finite[torch.randint(len(finite), tensor.shape, generator=generator)]


# --- calls -----------------------------------------------------------------------------------------------------------


def call_of(kind: str, name: str) -> Call | Outcome:
    """What is called for an op, or why nothing is."""
    dtype, backward = DTYPES[kind.split()[0]], kind.endswith("backward")
    torch.manual_seed(0)
    if name.startswith("chain "):
        chain = CHAINS[name.removeprefix("chain ")]
        call = Call(name, chain.function, _values_of_chain(chain.operands, dtype), chain.elementwise)
    else:
        made = _call_of_op(name, dtype, backward)
        if made is None:
            return Outcome("eager: no sample", "eager mode takes no sample of tensors of this type")
        call = made
    if backward:
        asked = call.differentiable or tuple(True for _ in call.at(0))
        call = replace(call, function=_with_gradient(call.function, asked))
    values = tuple(values for values in call.values if _taken(call.function, values))
    return replace(call, name=name, values=values) if values else Outcome("eager: takes none")


def _values_of_chain(operands: int, dtype: torch.dtype) -> tuple[Tensors, ...]:
    if operands == 2:
        return (pairs(dtype), pairs(dtype))
    if operands == 1:
        return ((specials(dtype).repeat(3),),)
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(6, 40, generator=generator).mul(4).to(dtype)
    return tuple((_filled(table, number, generator),) for number in range(CALLS))


def _call_of_op(name: str, dtype: torch.dtype, backward: bool) -> Call | None:
    op = OPS[name]
    samples = itertools.islice(op.sample_inputs(DEVICE, dtype, requires_grad=backward), 20)
    for sample, indices in itertools.zip_longest(samples, _indices(op, dtype), fillvalue=()):
        leaves, form = tree_flatten((sample.input, sample.args, sample.kwargs))
        at = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        given = tuple(leaves[place].detach() for place in at)
        if not at or any(tensor.layout is not torch.strided or tensor.numel() > _LARGEST for tensor in given):
            continue
        if isinstance(op, UnaryUfuncInfo) and len(at) == 1:
            values: tuple[Tensors, ...] = ((specials(dtype).repeat(3),),)
        elif isinstance(op, BinaryUfuncInfo) and [tensor.dtype for tensor in given] == [dtype, dtype]:
            values = (pairs(dtype), _without_zeros(pairs(dtype)))
        else:
            generator = torch.Generator().manual_seed(0)
            values = tuple(
                tuple(
                    _filled(tensor, number, generator)
                    if tensor.dtype == dtype and place not in indices
                    else tensor
                    for place, tensor in zip(at, given, strict=True)
                )
                for number in range(CALLS)
            )
        asked = tuple(leaves[place].requires_grad for place in at) if backward else ()
        call = Call(name, _function(op, leaves, form, at), values, len(values) < CALLS, asked)
        if any(_taken(call.function, item) for item in values):
            return call
    return None


def _indices(op: Any, dtype: torch.dtype) -> Iterator[Collection[int]]:
    """For each sample in int64 where it has indices, by the samples in another type: eager mode does not check them all."""
    if dtype is torch.int64 and torch.int32 in op.supported_dtypes(DEVICE):
        for sample in itertools.islice(op.sample_inputs(DEVICE, torch.int32, requires_grad=False), 20):
            leaves = tree_leaves((sample.input, sample.args, sample.kwargs))
            yield [
                place
                for place, leaf in enumerate(leaves)
                if isinstance(leaf, torch.Tensor) and leaf.dtype is dtype
            ]


def _without_zeros(given: Tensors) -> Tensors:
    """Divisors that integers may have."""
    return given[0], torch.where(given[1] == 0, 5, given[1]) if not given[1].is_floating_point() else given[1]


def _function(op: Any, leaves: Sequence[Any], form: Any, at: Sequence[int]) -> Callable[..., Any]:
    def function(*tensors: torch.Tensor) -> list[torch.Tensor]:
        filled = [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        for place, tensor in zip(at, tensors, strict=True):
            filled[place] = tensor
        first, args, kwargs = tree_unflatten(filled, form)
        return [item for item in tree_leaves(op(first, *args, **kwargs)) if isinstance(item, torch.Tensor)]

    return function


def _with_gradient(function: Callable[..., Any], asked: Sequence[bool]) -> Callable[..., Any]:
    def gradients(*tensors: torch.Tensor) -> list[torch.Tensor]:
        given = [
            tensor.detach().requires_grad_(wanted and tensor.is_floating_point())
            for tensor, wanted in zip(tensors, asked, strict=True)
        ]
        with torch.enable_grad():
            results = [item for item in tree_leaves(function(*given)) if item.requires_grad]
            ones = [torch.ones_like(item) for item in results]
            wanted = [tensor for tensor in given if tensor.requires_grad]
            found = torch.autograd.grad(results, wanted, ones, allow_unused=True)
        return [item for item in found if item is not None]

    return gradients


def _taken(function: Callable[..., Any], values: Tensors) -> bool:
    try:
        made = tree_leaves(function(*values))
    except Exception:
        return False
    return bool(made) and not any(item.dtype.is_complex or item.layout is not torch.strided for item in made)


# --- outcomes --------------------------------------------------------------------------------------------------------


def outcomes_of(calls: Sequence[Call]) -> dict[str, Outcome]:
    """The outcome of each call, all of them compiled as one step, or its halves."""
    if not calls:
        return {}
    try:
        made = list(_compiled(calls))
    except Exception as error:
        made = []
        if len(calls) == 1:
            text = str(error).partition("\n")[0]
            return {calls[0].name: Outcome(f"falls back: {type(error).__name__}", text)}
    if not made:
        half = len(calls) // 2
        return outcomes_of(calls[:half]) | outcomes_of(calls[half:])
    return {
        call.name: _compared(call, [results[index] for results in made]) for index, call in enumerate(calls)
    }


def _compiled(calls: Sequence[Call]) -> Iterator[list[list[torch.Tensor]]]:
    """The results of each call with the values of each round."""
    tensors: dict[int, torch.Tensor] = {}  # values that several calls have are one argument
    keys = [[id(tensor) for tensor in call.at(0)] for call in calls]
    for call in calls:
        tensors |= {id(tensor): tensor for tensor in call.at(0)}
    order = {key: index for index, key in enumerate(tensors)}
    rounds = max(len(call.values) for call in calls)

    def step(*given: torch.Tensor) -> list[list[torch.Tensor]]:
        return [
            [item.clone() for item in tree_leaves(call.function(*(given[order[key]] for key in mine)))]
            for call, mine in zip(calls, keys, strict=True)
        ]

    graph = mg.trace(step)
    graph.config.backend("inductor")
    for number in range(rounds):
        given = list(tensors.values())
        for call, mine in zip(calls, keys, strict=True):
            for key, tensor in zip(mine, call.at(number), strict=True):
                given[order[key]] = tensor
        results = graph(*(tensor.clone() for tensor in given))
        if graph.backend != "inductor":
            raise RuntimeError(next(iter(graph.builds[-1].notes), "not compiled"))
        yield results


def _compared(call: Call, made: Sequence[list[torch.Tensor]]) -> Outcome:
    for number, results in enumerate(made):
        told = disagreement(call, call.at(number), results)
        if told is not None:
            return Outcome("differs", f"values {number}: {told}")
    return Outcome("as eager")


def disagreement(call: Call, given: Tensors, got: Sequence[torch.Tensor]) -> str | None:
    """Where compiled results are not eager's, up to rounding; None if they are.

    Eager's kernels for vectors and for single elements may disagree with each other: what one of them gives is right.
    """
    eager = [tree_leaves(call.function(*_cloned(given)))]
    if _taken(call.function, _strided(given)):
        eager.append(tree_leaves(call.function(*_strided(given))))
    wide = _wide(call, given) if any(tensor.is_floating_point() for tensor in given) else []
    for index, result in enumerate(got):
        expected = [results[index] for results in eager]
        good = _agrees(result, expected, [item[index] for item in wide], elementwise=call.elementwise)
        if not bool(good.all()):
            bad = int((~good).reshape(-1).int().argmax())
            values = [item.reshape(-1)[bad].item() if item.shape == result.shape else "..." for item in given]
            told, made = expected[0].reshape(-1)[bad].item(), result.reshape(-1)[bad].item()
            wrong = int((~good).sum())
            return f"result {index} at {values}: eager {told}, compiled {made} ({wrong} of {good.numel()})"
    return None


def _cloned(given: Tensors) -> Tensors:
    return tuple(tensor.clone() for tensor in given)


def _strided(given: Tensors) -> Tensors:
    """The same values, not side by side."""
    return tuple(tensor.unsqueeze(-1).repeat(*[1] * tensor.dim(), 2)[..., 0] for tensor in given)


def _wide(call: Call, given: Tensors) -> list[list[torch.Tensor]]:
    """The results in float64, and those of values that differ in their last places."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for number in range(1 if call.elementwise else 4):
        wide = [
            tensor.double() * (1 + bool(number) * torch.finfo(tensor.dtype).eps * _signs(tensor, generator))
            if tensor.is_floating_point()
            else tensor.clone()
            for tensor in given
        ]
        with contextlib.suppress(Exception):
            found.append(tree_leaves(call.function(*wide)))
    return found


def _signs(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(2, tensor.shape, generator=generator).double() * 2 - 1


def _agrees(
    got: torch.Tensor, expected: Sequence[torch.Tensor], wide: Sequence[torch.Tensor], *, elementwise: bool
) -> torch.Tensor:
    """Element by element: what one of eager's kernels gives, or as near to what is right as they are."""
    first = expected[0]
    if (got.dtype, got.shape) != (first.dtype, first.shape):
        return torch.zeros((), dtype=torch.bool)
    good = torch.zeros(got.shape, dtype=torch.bool)
    for item in expected:
        good |= _same(got, item)
    if not got.is_floating_point():
        return good
    unit = torch.finfo(got.dtype).eps
    least = torch.finfo(got.dtype).smallest_normal * unit
    for item in expected:
        alike = got.isfinite() & item.isfinite() & ((got != 0) | (item != 0))
        distance = (got.double() - item.double()).abs()
        good |= alike & (distance <= 2 * least + _allowed(got, elementwise) * unit * item.double().abs())
    wide = [item.double() for item in wide if item.shape == got.shape and item.is_floating_point()]
    if not wide:
        return good
    exact, *moved = wide
    error = torch.stack([(item.double() - exact).abs() for item in expected]).amax(0)
    distance = (got.double() - exact).abs()
    if elementwise:  # zeros have eager's sign; where sums are rounded, it is that of the rounding
        zeros = torch.stack([(got == 0) & (item == 0) for item in expected]).any(0)
        distance = distance.where(~zeros, math.inf)
        return good | (distance <= 4 * error.where(error.isfinite(), 0.0) + 2 * least)
    for item in (exact, *moved):
        good |= _same(got, item.to(got.dtype))
    finite = torch.where(exact.isfinite(), exact.abs(), 0.0)
    limit = 10 * _largest(error) + 8 * unit * _largest(finite) + 2 * least
    for item in moved:
        limit = limit + 10 * torch.where((item - exact).isfinite(), (item - exact).abs(), 0.0)
    return good | (distance <= limit)


def _largest(tensor: torch.Tensor) -> torch.Tensor:
    finite = tensor.where(tensor.isfinite(), 0.0)
    return finite.amax() if finite.numel() else finite.sum()


def _allowed(got: torch.Tensor, elementwise: bool) -> int:
    return 2 if got.dtype in (torch.bfloat16, torch.float16) and elementwise else ROUNDING


def _same(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    if not one.is_floating_point():
        return one == other
    return (one.isnan() & other.isnan()) | ((one == other) & (one.signbit() == other.signbit()))
