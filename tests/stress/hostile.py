"""Arguments that an op was not made for: from a call that makes sense, one or a few things are changed."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch

from tests.stress.op_seeds import OpCall

_INTS = (
    0,
    -1,
    1,
    2,
    3,
    5,
    16,
    -2,
    -7,
    1 << 31,
    (1 << 31) - 1,
    -(1 << 31),
    1 << 40,
    1 << 62,
    (1 << 63) - 1,
    1 - (1 << 63),
)
_FLOATS = (
    0.0,
    -0.0,
    1.0,
    -1.0,
    0.5,
    1e-320,
    1e30,
    -1e30,
    1.7e308,
    2.0**63,
    1e-8,
    *map(float, ("nan", "inf", "-inf")),
)
_DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16),
    *(
        torch.int8,
        torch.uint8,
        torch.bool,
        torch.complex64,
        torch.complex128,
        torch.uint16,
        torch.float8_e5m2,
    ),
)
_WORDS = (
    "none",
    "sum",
    "mean",
    "trunc",
    "floor",
    "tanh",
    "reflect",
    "ij",
    "ij,jk->ik",
    "left",
    "",
    "amax",
    "prod",
)
_FORMATS = (torch.contiguous_format, torch.preserve_format, torch.channels_last)


@dataclass(frozen=True)
class Moving:
    """A number that is no constant of the file, but an input of its program."""

    number: Any


def mutated(call: OpCall, choice: random.Random) -> OpCall:
    """The call with at most four changes; sometimes only in the values of its tensors."""
    args, kwargs = list(call.args), dict(call.kwargs)
    sizes = [size for item in _tensors([args, kwargs]) for size in item.shape]
    for _ in range(choice.choice((0, 1, 1, 1, 2, 2, 3, 4))):
        places = [(args, index) for index in range(len(args))] + [(kwargs, key) for key in kwargs]
        if places:
            holder, key = choice.choice(places)
            holder[key] = _changed(holder[key], choice, sizes)
            if isinstance(holder[key], (int, float)) and choice.random() < 0.2:
                holder[key] = Moving(holder[key])
    return OpCall(call.op, tuple(args), kwargs)


def of_schema(name: str, schema: Any, choice: random.Random) -> OpCall:
    """A call made from nothing but the types of the arguments."""
    args, kwargs = [], {}
    for argument in schema.arguments:
        if (argument.kwarg_only or argument.has_default_value()) and choice.random() < 0.6:
            if argument.kwarg_only:
                continue
            args.append(argument.default_value)
            continue
        made = _of_type(str(argument.real_type), choice)
        if argument.kwarg_only:
            kwargs[argument.name] = made
        else:
            args.append(made)
    return OpCall(name, tuple(args), kwargs)


def _of_type(kind: str, choice: random.Random) -> Any:
    if kind.startswith("Optional["):
        return None if choice.random() < 0.4 else _of_type(kind[9:-1], choice)
    if kind.startswith("List["):
        return [_of_type(kind[5:-1], choice) for _ in range(choice.choice((0, 1, 1, 2, 2, 3, 4)))]
    if kind == "Tensor":
        return _tensor(choice)
    if kind in ("int", "SymInt"):
        return choice.choice((0, 1, 2, 3, -1, choice.choice(_INTS)))
    if kind in ("float", "SymFloat"):
        return choice.choice(_FLOATS)
    if kind in ("number", "Scalar"):
        return choice.choice((choice.choice(_INTS), choice.choice(_FLOATS)))
    if kind in ("bool", "SymBool"):
        return choice.random() < 0.5
    if kind == "str":
        return choice.choice(_WORDS)
    if kind == "ScalarType":
        return choice.choice(_DTYPES)
    return None


def _tensors(items: Any) -> list[torch.Tensor]:
    leaves = torch.utils._pytree.tree_leaves(items)
    return [item for item in leaves if isinstance(item, torch.Tensor)]


def _changed(item: Any, choice: random.Random, sizes: list[int]) -> Any:
    if isinstance(item, torch.Tensor):
        return _changed_tensor(item, choice, sizes)
    if isinstance(item, bool):
        return not item
    if isinstance(item, int):
        near = [item - 1, item + 1, -item, *(size + step for size in sizes for step in (-1, 0, 1))]
        return choice.choice((choice.choice(_INTS), choice.choice(near)))
    if isinstance(item, float):
        return choice.choice((choice.choice(_FLOATS), choice.choice(_INTS)))
    if isinstance(item, (list, tuple)):
        return _changed_list(list(item), choice, sizes)
    if isinstance(item, str):
        return choice.choice(_WORDS)
    if isinstance(item, torch.dtype):
        return choice.choice(_DTYPES)
    if isinstance(item, torch.memory_format):
        return choice.choice(_FORMATS)
    if item is None:
        return choice.choice(
            (None, _tensor(choice), choice.choice(_INTS), choice.choice(_FLOATS), [1, 2], torch.float64)
        )
    return item


def _changed_list(items: list[Any], choice: random.Random, sizes: list[int]) -> list[Any]:
    kind = choice.randrange(6)
    if kind == 0 and items:
        items.pop(choice.randrange(len(items)))
    elif kind == 1:
        items.insert(choice.randint(0, len(items)), choice.choice(items) if items else choice.choice(_INTS))
    elif kind == 2 and choice.random() < 0.3:
        items = []
    elif kind == 3 and items:
        choice.shuffle(items)
    elif items:
        index = choice.randrange(len(items))
        items[index] = _changed(items[index], choice, sizes)
    return items


def _changed_tensor(item: torch.Tensor, choice: random.Random, sizes: list[int]) -> torch.Tensor:
    kind = choice.randrange(10)
    if kind <= 3:
        return _with_values(item.clone(), choice, sizes)
    if kind == 4:
        with_dtype = item.to(choice.choice(_DTYPES))
        return _with_values(with_dtype, choice, sizes) if choice.random() < 0.3 else with_dtype
    if kind == 5:
        return _tensor(choice, item.dtype)
    if kind == 6:
        return _laid_out(item, choice)
    shape = list(item.shape)
    if kind == 7 and shape:
        shape[choice.randrange(len(shape))] = choice.choice((0, 1, 2, 3, 7, choice.choice(sizes)))
    elif kind == 8:
        shape.insert(choice.randint(0, len(shape)), choice.choice((0, 1, 2, 3)))
    elif shape:
        shape.pop(choice.randrange(len(shape)))
    return _filled(shape, item, choice)


def _filled(shape: list[int], like: torch.Tensor, choice: random.Random) -> torch.Tensor:
    """A tensor of this shape with the values of another one."""
    count = 1
    for size in shape:
        count *= size
    flat = like.reshape(-1)
    if count > 1 << 16 or flat.numel() == 0:
        return torch.zeros(0 if count > 1 << 16 else shape, dtype=like.dtype)
    return flat.repeat(count // flat.numel() + 1)[:count].reshape(shape)


def _laid_out(item: torch.Tensor, choice: random.Random) -> torch.Tensor:
    """The same shape with strides that overlap, that leave gaps, or in another order."""
    kind = choice.randrange(4)
    if kind == 0 and item.dim() >= 2:
        a, b = choice.sample(range(item.dim()), 2)
        return item.transpose(a, b).contiguous().transpose(a, b)
    if kind == 1 and item.dim():
        dim = choice.randrange(item.dim())
        return item.narrow(dim, 0, min(1, item.shape[dim])).expand(
            [-1 if d != dim or not item.shape[dim] else item.shape[dim] for d in range(item.dim())]
        )
    if kind == 2 and item.dim():
        return torch.stack([item, item], dim=-1)[..., choice.randrange(2)]
    shape, stride = list(item.shape), [choice.choice((0, 1, 2, 3)) for _ in range(item.dim())]
    span = 1 + sum(max(size - 1, 0) * step for size, step in zip(shape, stride, strict=True))
    return _filled([span], item, choice).as_strided(shape, stride)


def _with_values(item: torch.Tensor, choice: random.Random, sizes: list[int]) -> torch.Tensor:
    """Some or all of its values at the limits of what they can be, or near a size."""
    if item.numel() == 0:
        return item
    item = item.contiguous()
    flat = item.view(-1)
    places = (
        range(flat.numel()) if choice.random() < 0.3 else [choice.randrange(flat.numel()) for _ in range(2)]
    )
    near = [value for size in (*sizes, 0) for value in (size, size - 1, size + 1, -size, -size - 1)]
    value: Any = choice.choice(
        (
            choice.choice(near),
            choice.choice(near),
            choice.choice((*_INTS, -(1 << 63))),
            choice.choice(_FLOATS),
        )
    )
    for place in list(places)[:64]:
        try:
            flat[place] = value
        except (RuntimeError, OverflowError, ValueError, TypeError):
            flat[place] = choice.choice((0, 1))
    return item


def _tensor(choice: random.Random, dtype: torch.dtype | None = None) -> torch.Tensor:
    shape = [choice.choice((0, 1, 2, 3, 3, 4, 5)) for _ in range(choice.choice((0, 1, 1, 2, 2, 3, 4, 5)))]
    count = 1
    for size in shape:
        count *= size
    made = torch.tensor([choice.randint(-3, 6) for _ in range(count)], dtype=torch.float32).reshape(shape)
    return made.to(dtype or choice.choice(_DTYPES[:11] + _DTYPES[:1] * 5 + (torch.int64,) * 4))
