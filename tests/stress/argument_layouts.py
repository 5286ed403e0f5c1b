"""Calls one graph with arguments that lie in memory in ever other ways: it gives eager's numbers, or says what is wrong.

Each case is a random step on views of shared buffers (`layout_cases`), called two to four times. Results, what memory
they show, and every byte of the buffers are compared with plain PyTorch.

    python -m tests.stress.argument_layouts --trials 20000 --seed 0

Trials are numbered: `--seed 5000` goes on where 5000 trials from 0 stopped.
"""

from __future__ import annotations

import argparse
import logging
import warnings
from collections import Counter
from typing import Any

import torch

import monograph as mg
from tests.stress.layout_cases import Case, Plain, Side, draw
from tests.support import same_bits
from tests.support.garbage import collect_quickly


class Captured(Side):
    """The same as a graph."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        side = self

        class Step(mg.Graph):
            def __init__(self) -> None:
                super().__init__()
                self.model = side.model
                if side.optimizer is not None:
                    self.add_optimizer(side.optimizer)

            def build(self, *given: torch.Tensor) -> list[Any]:
                return side.forward(*given)

        self.step = Step()


class Stale(AssertionError):
    """A graph gave other numbers than eager, or wrote other memory."""


def check(seed: int) -> Counter[str]:
    """How the calls of one case ended. Raises Stale, or what a graph raised without a name."""
    case, outcomes = draw(seed), Counter[str]()
    plain, captured = Plain(case), Captured(case)
    for number, places in enumerate(case.calls):
        where = f"seed {seed}, call {number}, {case}"
        before = [buffer.clone() for buffer in captured.buffers]
        expected, refused = attempt(plain, places)
        got, error = attempt(captured, places)
        if error is not None and not isinstance(error, mg.MonographError):
            if type(error) is not type(refused):
                raise AssertionError(f"{where}: {error!r}, which has no name") from error
            outcomes["eager raises as well"] += 1
            break  # eager leaves half a step behind
        if error is not None:
            if any(map(_differ, before, captured.buffers)):
                raise Stale(f"{where}: a call that was refused has changed memory") from error
            outcomes[f"refused: {type(error).__name__}" if refused is None else "eager raises as well"] += 1
            if refused is not None:
                break
            for buffer, right in zip(captured.buffers, plain.buffers, strict=True):
                buffer.copy_(right)
            continue
        if refused is not None:
            outcomes[f"eager alone raises: {str(refused)[:60]}"] += 1
            break
        if (difference := _difference(plain, expected, captured, got)) is not None:
            raise Stale(f"{where}: {difference}")
        outcomes["eager's numbers"] += 1
    outcomes["builds"] += len(captured.step.builds)
    return outcomes


def attempt(side: Any, places: Any) -> tuple[Any, Exception | None]:
    """What a call gives, with its arguments, or what it raises."""
    try:
        given = side.arguments(places)
        return (side.step(*given), given), None
    except Exception as error:
        return None, error


def _differ(a: torch.Tensor, b: torch.Tensor) -> bool:
    return not torch.equal(a, b)


def _difference(plain: Side, expected: Any, captured: Side, got: Any) -> str | None:
    for number, pair in enumerate(zip(plain.buffers, captured.buffers, strict=True)):
        if _differ(*pair):
            return f"buffer {number} is\n{pair[1].view(torch.float32)}, not\n{pair[0].view(torch.float32)}"
    for number, (a, b) in enumerate(zip(expected[0], got[0], strict=True)):
        if not isinstance(a, torch.Tensor):
            if a != b:
                return f"result {number} is {b}, not {a}"
        elif not same_bits(a.resolve_conj().resolve_neg(), b.resolve_conj().resolve_neg()):
            return f"result {number} is {b}, not {a}"
        elif plain.shown(a) != captured.shown(b):
            return f"result {number} shows {captured.shown(b)}, not {plain.shown(a)}"
    for number, (a, b) in enumerate(zip(expected[1], got[1], strict=True)):
        if (a.grad is None) != (b.grad is None) or (a.grad is not None and not same_bits(a.grad, b.grad)):
            return f"the gradient of argument {number} is {b.grad}, not {a.grad}"
    return None


def run(trials: int, seed: int = 0, every: int = 0) -> Counter[str]:
    """The outcomes of many cases; those that fail are printed and counted."""
    outcomes = Counter[str]()
    for number in range(seed, seed + trials):
        try:
            outcomes += check(number)
        except Stale as fault:
            outcomes["stale"] += 1
            print(f"STALE: {fault}", flush=True)
        except AssertionError as fault:
            outcomes["without a name"] += 1
            print(f"WITHOUT A NAME: {fault}", flush=True)
        outcomes["cases"] += 1
        if every and (number + 1 - seed) % every == 0:
            print(f"{number + 1 - seed:,} cases: {dict(outcomes)}", flush=True)
    return outcomes


def main() -> None:
    """Run and report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    collect_quickly()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("monograph").setLevel(logging.ERROR)
    outcomes = run(options.trials, options.seed, every=1000)
    for name, count in outcomes.most_common():
        print(f"{count:7,}  {name}")
    print(f"{outcomes['stale']:7,}  stale of {outcomes['cases']:,} cases, seeds from {options.seed}")
    if outcomes["stale"] or outcomes["without a name"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
