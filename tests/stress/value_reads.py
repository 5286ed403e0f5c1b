"""Random steps whose Python looks at values of tensors, compared with eager mode over changing arguments and state.

`python -m tests.stress.value_reads --trials 5000` runs that many programs, five calls each.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import monograph as mg
from tests.support.garbage import collect_quickly

PURE = (
    "{v} + {w}", "{v} * 0.5", "-{v}", "{v}.abs()", "{v} - {w}.mean()", "{v}.t()", "{v}[1:]", "{v}.flip(0)", "{v}.clone()",
    "torch.where({v} > {w}, {v}, {w})", "{v}.clamp(-1.0, 1.0)", "{v} + torch.rand(3, 3)", "F.dropout({v}, 0.3)",
    "{v}.detach()", "{v}.round()",
)  # fmt: skip
IN_PLACE = (
    "{v}.add_(1.0)", "{v}.mul_(0.5)", "{v}[0] = 2.0", "{v}[:, 0] += {w}[0, 0].clone()", "{v}.t().sub_(0.5)", "{v}.copy_({w})",
    "self.book.add_({v}.sum().detach())", "self.book.zero_()", "{v}[{v} > 0.5] = 0.0", "{v}.masked_fill_({v} < 0, 1.0)",
)  # fmt: skip
READS = (
    "if {v}.sum() > 0:\n        total = total * 2 + 1",
    "if bool(({v} > {w}).any()):\n        total += 3",
    "total += int({v}.argmax())",
    "total += {v}.sum().item() * 0.5",
    "if {v}.mean().item() > 0.1:\n        total += 5",
    "total += sum({v}.flatten().round().tolist())",
    "out = out + {v}[{v} > 0].sum()",
    "out = out + {v}.masked_select({w} > 0).sum()",
    "out = out + ({v} > 0).nonzero().sum()",
    "if torch.equal({v}, {w}):\n        total += 7",
    "if self.book > 1:\n        total += 11",
    "if torch.rand([]) < 0.5:\n        total += 13",
    "out = out + torch.arange(3).repeat_interleave({v}[0].abs().round().long()).sum()",
)


def program(seed: int) -> str:
    """The source of a build()."""
    chance = random.Random(seed)
    lines = ["total, out = 0, x.new_zeros(())"]
    names = ["x", "y", "self.state"]
    for number in range(chance.randint(2, 9)):
        v, w = chance.choice(names), chance.choice(names)
        kind = chance.random()
        if kind < 0.4:
            lines.append(f"v{number} = " + chance.choice(PURE).format(v=v, w=w))
            if "[1:]" not in lines[-1]:
                names.append(f"v{number}")
        elif kind < 0.6:
            lines.append(chance.choice(IN_PLACE).format(v=v, w=w))
        else:
            lines.append(chance.choice(READS).format(v=v, w=w))
    lines.append(f"return out + total + {chance.choice(names)}.sum()")
    return "def build(self, x, y):\n    " + "\n    ".join(lines)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", torch.linspace(-1.0, 1.0, 9).reshape(3, 3))
        self.register_buffer("book", torch.tensor(0.0))


def differs(seed: int) -> tuple[str | None, int]:
    """What went wrong with one program, and how many steps were refused by name."""
    scope: dict[str, Any] = {"torch": torch, "F": nn.functional}
    source = program(seed)
    exec(source, scope)
    build: Callable[..., Any] = scope["build"]
    plain, held, refused = Plain(), Plain(), 0

    class Step(mg.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.model = held

        def build(self, x: torch.Tensor, y: torch.Tensor) -> Any:
            return build(self.model, x, y)

    step = Step()
    for call in range(5):
        sides = []
        generator = torch.Generator().manual_seed(seed * 7 + call // 2)
        x, y = (torch.randn(3, 3, generator=generator) for _ in range(2))
        before = [item.clone() for item in held.buffers()]
        for run in (lambda *args: build(plain, *args), step):
            torch.manual_seed(call // 2)
            args = x.clone(), y.clone()
            try:
                found: Any = run(*args)
            except mg.MonographError as error:
                eagerly = sides[0][0]  # the name of an error where eager mode fails as well
                if "capture failed" in str(error) and not (
                    isinstance(eagerly, str) and f"capture failed: {eagerly}" in str(error)
                ):
                    return f"{seed}: {error}\n{source}", refused
                refused += 1
                for item, value in zip([*plain.buffers(), *held.buffers()], before * 2, strict=True):
                    item.copy_(value)
                return None, refused
            except Exception as error:
                found = type(error).__name__
            where = plain if not sides else held
            sides.append((found, *args, *(item.clone() for item in where.buffers()), torch.get_rng_state()))
        for a, b in zip(*sides, strict=True):
            same = (
                torch.equal(a, b) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else a == b
            )
            if not same and not (isinstance(a, torch.Tensor) and a.isnan().any() and b.isnan().any()):
                return f"{seed}, call {call}: {a} != {b}\n{source}", refused
    return None, refused


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    collect_quickly()
    logging.getLogger("monograph").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    wrong = refused = 0
    for seed in range(options.seed, options.seed + options.trials):
        fault, names = differs(seed)
        refused += names
        if fault:
            wrong += 1
            print(fault, flush=True)
        if (seed + 1) % 200 == 0:
            print(f"{seed + 1 - options.seed} programs, {wrong} wrong, {refused} refused", flush=True)
    print(f"seeds {options.seed} to {seed}: {wrong} wrong, {refused} refused")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
