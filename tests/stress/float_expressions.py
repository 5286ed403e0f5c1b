"""`python -m tests.stress.float_expressions --trials 20000`: random float expressions and branches against eager."""

from __future__ import annotations

import argparse
import logging
import random
import warnings

from tests.float_expression_graphs import WAYS, differences
from tests.float_expressions import draw


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=random.randrange(2**31))
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    wrong = refused = calls = 0
    for seed in range(options.seed, options.seed + options.trials):
        program, way = draw(seed), list(WAYS)[seed % 2]
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
        f"seeds from {options.seed}, {options.trials} trials, {calls} calls: {wrong} wrong, {refused} refused by name"
    )
    return wrong > 0


if __name__ == "__main__":
    raise SystemExit(main())
