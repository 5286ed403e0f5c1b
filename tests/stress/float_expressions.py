"""`python -m tests.stress.float_expressions --trials 20000`: random float expressions and branches against eager."""

from __future__ import annotations

import argparse
import logging
import random
import signal
import warnings

from tests.support.float_expression_graphs import WAYS, differences
from tests.support.float_expressions import Program, draw, eager_calls
from tests.support.garbage import collect_quickly

SECONDS = 5  # for the calls of a program in eager mode: powers of whole numbers may have millions of digits


class TooLong(BaseException):
    """Eager mode is not done. No Exception, since programs may raise those."""


def ends(program: Program) -> bool:
    """True if eager mode is done with a program soon."""

    def stop(*_: object) -> None:
        raise TooLong

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        eager_calls(program)
    except TooLong:
        return False
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    return True


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=random.randrange(2**31))
    options = parser.parse_args()
    collect_quickly()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    wrong = refused = calls = endless = 0
    for seed in range(options.seed, options.seed + options.trials):
        program, way = draw(seed), list(WAYS)[seed % 2]
        if not ends(program):
            endless += 1
            continue
        found = differences(program, way)
        calls += len(program.calls)
        refused += sum(": refused: " in item for item in found)
        for item in found:
            if ": refused: " not in item:
                wrong += 1
                print(f"--- seed {seed}, {way}\n{program.text}{item}", flush=True)
        if (seed - options.seed) % 500 == 499:
            print(
                f"{seed - options.seed + 1} trials, {calls} calls: {wrong} wrong, {refused} refused",
                flush=True,
            )
    print(
        f"seeds from {options.seed}, {options.trials} trials, {calls} calls: {wrong} wrong, {refused} refused by name, "
        f"{endless} left out since eager mode takes too long"
    )
    return wrong > 0


if __name__ == "__main__":
    raise SystemExit(main())
