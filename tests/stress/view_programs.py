"""Random programs of views and ops in place, against eager: bits and strides of every result, and who shares memory.

    python -m tests.stress.view_programs --trials 5000 --seed 0

Trials are numbered: `--seed 5000` goes on where 5000 trials from 0 stopped. With `--both-ways` the program that is
copied op by op is also compared with that of a second trace; the first difference ends the trials.
"""

from __future__ import annotations

import argparse
import logging
import random
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch.nn import functional as F

import monograph as mg
from tests.support import same_bits
from tests.support.both_ways import compared_ways
from tests.support.garbage import collect_quickly

Tensor = torch.Tensor
Op = Callable[[Tensor], Tensor]


class Skip(Exception):
    """The op does not fit the tensor."""


def _dim(rng: random.Random, x: Tensor) -> int:
    if x.dim() == 0:
        raise Skip
    return rng.randrange(x.dim())


def _two(rng: random.Random, x: Tensor) -> tuple[int, int]:
    if x.dim() < 2:
        raise Skip
    first, second = rng.sample(range(x.dim()), 2)
    return first, second


def _as_strided(rng: random.Random, x: Tensor) -> Op:
    if x.numel() < 4:
        raise Skip
    span = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    rows, columns = rng.randint(1, 2), rng.randint(1, 2)
    size, stride = (rows, columns), (rng.choice([2, 1]), 1)
    if (rows - 1) * stride[0] + columns - 1 >= span:
        raise Skip
    if rng.random() < 0.5:
        return lambda x: x.as_strided(size, stride)
    offset = x.storage_offset()
    return lambda x: x.as_strided(size, stride, offset)


def _slice(rng: random.Random, x: Tensor) -> Op:
    dim = _dim(rng, x)
    begin, step = rng.randrange(x.shape[dim]), rng.choice([1, 1, 2])
    index = (slice(None),) * dim + (slice(begin, None, step),)
    return lambda x: x[index]


def _expand(rng: random.Random, x: Tensor) -> Op:
    return lambda x: x.unsqueeze(0).expand(2, *x.shape)


def _unfold(rng: random.Random, x: Tensor) -> Op:
    dim = _dim(rng, x)
    size = rng.randint(1, x.shape[dim])
    return lambda x: x.unfold(dim, size, 1)


def _view(rng: random.Random, x: Tensor) -> Op:
    return rng.choice([lambda x: x.view(-1), lambda x: x.reshape(-1), lambda x: x.flatten()])


def _one_dim(make: Callable[[int], Op]) -> Callable[[random.Random, Tensor], Op]:
    return lambda rng, x: make(_dim(rng, x))


def _two_dims(make: Callable[[int, int], Op]) -> Callable[[random.Random, Tensor], Op]:
    return lambda rng, x: make(*_two(rng, x))


VIEWS: tuple[Callable[[random.Random, Tensor], Op], ...] = (
    _two_dims(lambda a, b: lambda x: x.transpose(a, b)),
    _two_dims(lambda a, b: lambda x: x.transpose(a, b)),
    _two_dims(lambda a, b: lambda x: x.diagonal(0, a, b)),
    _one_dim(lambda a: lambda x: x.select(a, 0)),
    _one_dim(lambda a: lambda x: x.unsqueeze(a)),
    _one_dim(lambda a: lambda x: x.chunk(2, a)[-1]),
    _one_dim(lambda a: lambda x: x.movedim(a, 0)),
    _one_dim(lambda a: lambda x: x.squeeze(a)),
    _slice,
    _slice,
    _expand,
    _unfold,
    _view,
    _as_strided,
    lambda rng, x: lambda x: x.detach(),
)


def _index(x: Tensor) -> Tensor:
    return torch.zeros(1, dtype=torch.long)


IN_PLACE: tuple[Callable[[Tensor], Any], ...] = (
    lambda x: x.mul_(1.5),
    lambda x: x.add_(x.sum()),
    lambda x: x.masked_fill_(x > 0.5, 0.25),
    lambda x: F.elu_(x),
    lambda x: F.hardtanh_(x, -0.5, 0.5),
    lambda x: F.leaky_relu_(x, 0.1),
    lambda x: x.relu_(),
    lambda x: x.fill_(0.75),
    lambda x: x.copy_(torch.full_like(x, 0.5)),
    lambda x: x.clamp_(-0.25, 0.25),
    lambda x: x.index_fill_(0, _index(x), 2.0),
    lambda x: x.index_add_(0, _index(x), torch.ones_like(x[:1])),
    lambda x: x.index_copy_(0, _index(x), torch.ones_like(x[:1])),
    lambda x: x.index_put_((_index(x),), torch.tensor(3.0)),
    lambda x: x.scatter_(0, torch.zeros_like(x[:1], dtype=torch.long), 4.0),
    lambda x: x.fill_diagonal_(3.0),
    lambda x: x.triu_(),
    lambda x: x.cumsum_(0),
    lambda x: x.__setitem__(x > 0, 0.125),
    lambda x: x.__setitem__(0, 1.0),
    lambda x: x.t_(),
    lambda x: x.transpose_(0, -1),
    lambda x: x.squeeze_(),
    lambda x: x.unsqueeze_(0),
    lambda x: x.sigmoid_().exp_(),
    lambda x: x.lerp_(torch.ones_like(x), 0.3),
    lambda x: x.addcmul_(x, x),
    lambda x: x.sub_(1).neg_(),
    lambda x: x.masked_scatter_(x > 0, torch.ones_like(x)),
)
FRESH: tuple[Op, ...] = (
    lambda x: x * 2,
    lambda x: x.clone(),
    lambda x: x.contiguous(),
    lambda x: torch.cat([x, x]),
    lambda x: F.softmax(x, -1),
)


def draw(seed: int) -> tuple[list[tuple[str, int, Any]], Tensor]:
    """Steps (kind, on which value, op) that eager mode takes, and the argument."""
    rng = random.Random(seed)
    shape = [rng.choice([1, 2, 3, 5, 17]) for _ in range(rng.choice([1, 2, 2, 3]))]
    argument = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    values, steps = [argument.clone() * 2], []
    for _ in range(rng.randint(2, 7)):
        at, kind = rng.randrange(len(values)), rng.choice(["view", "view", "change", "change", "fresh"])
        before = [value.clone() for value in values]
        try:
            if kind == "view":
                op: Any = rng.choice(VIEWS)(rng, values[at])
            else:
                op = rng.choice(IN_PLACE if kind == "change" else FRESH)
            made = op(values[at])
        except (Skip, RuntimeError, IndexError):
            if kind == "change" and not all(map(same_bits, before, values)):
                break
            continue
        steps.append((kind, at, op))
        if kind != "change":
            values.append(made)
    return steps, argument


def run(steps: list[tuple[str, int, Any]], argument: Tensor) -> list[Tensor]:
    """All values that the steps make, and sums of them."""
    values = [argument * 2]
    for kind, at, op in steps:
        made = op(values[at])
        if kind != "change":
            values.append(made)
    return [*values, *(value.sum() for value in values), *(value.sum(0) for value in values if value.dim())]


def _memory(values: list[Tensor]) -> list[int]:
    keys = [value.untyped_storage().data_ptr() for value in values]
    return [keys.index(key) for key in keys]


def check(seed: int) -> str:
    """What came of one trial: "same", "refused: ...", or what is wrong."""
    steps, argument = draw(seed)
    try:
        expected = run(steps, argument)
    except RuntimeError as error:
        return f"eager refuses: {str(error)[:40]}"
    try:
        made = mg.trace(lambda x: run(steps, x))(argument)
    except mg.MonographError as error:
        return f"refused: {str(error).splitlines()[0][:120]}"
    for index, (one, other) in enumerate(zip(expected, made, strict=True)):
        if not same_bits(one, other):
            return f"WRONG: value {index} has other bits"
        pairs = zip(one.shape, one.stride(), other.stride(), strict=True)
        if any(a != b for size, a, b in pairs if size > 1 and one.numel()):
            return f"WRONG: value {index} has strides {other.stride()}, not {one.stride()}"
    return "same" if _memory(expected) == _memory(made) else "WRONG: other results share memory"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--both-ways", action="store_true")
    options = parser.parse_args()
    collect_quickly()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    outcomes = Counter[str]()
    for seed in range(options.seed, options.seed + options.trials):
        with compared_ways() if options.both_ways else nullcontext():
            outcome = check(seed)
        outcomes[outcome] += 1
        if outcome.startswith("WRONG"):
            print(f"seed {seed}: {outcome}", flush=True)
    for outcome, count in outcomes.most_common():
        print(f"{count:6,}  {outcome}")
    if any(outcome.startswith("WRONG") for outcome in outcomes):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
