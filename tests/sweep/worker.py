"""The child process of the sweep: runs cases and tells each sample on one line, before it and after it.

The parent writes one JSON line for each case (`mode`, `case`, `first` sample, `most` samples); a line is answered at once,
so that a crash or a hang belongs to the sample that was begun last.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import warnings
from dataclasses import replace
from typing import Any

import torch

from tests.sweep.cases import case_of
from tests.sweep.compiled import outcome_of_step
from tests.sweep.outcomes import Outcome, outcome_of
from tests.sweep.samples import samples_of
from tests.sweep.special import outcomes_of_group

_LONGEST = 600  # signs of a message that are kept


def run_samples(request: dict[str, Any], tell: Any) -> None:
    """Run the samples of a case on aten from the asked one on."""
    try:
        samples = samples_of(case_of(request["case"]), request["most"])
    except Exception as error:
        _tell(tell, 0, Outcome(f"eager: {type(error).__name__}", str(error)))
        return
    for index in range(request["first"], len(samples)):
        tell({"begins": index})
        _tell(tell, index, outcome_of(samples[index]))


def run_step(request: dict[str, Any], tell: Any) -> None:
    """Compile a case and run it, which is its only sample."""
    if request["first"] == 0:
        tell({"begins": 0})
        _tell(tell, 0, outcome_of_step(case_of(request["case"])))


def run_special(request: dict[str, Any], tell: Any) -> None:
    """Compile the ops of a case as one step and compare each; after one that ended the process, the next ones."""
    tell({"begins": request["first"]})
    outcomes = outcomes_of_group(case_of(request["case"]), request["first"])
    for index, (name, outcome) in enumerate(outcomes, request["first"]):
        _tell(tell, index, replace(outcome, message=outcome.message and f"{name}: {outcome.message}"))


RUN = {"aten": run_samples, "inductor": run_step, "special": run_special}


def _tell(tell: Any, index: int, outcome: Outcome) -> None:
    tell({"sample": index, "outcome": outcome.shows, "message": outcome.message[:_LONGEST]})


def main() -> None:
    """Answer requests until the parent closes the pipe."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what ops print is no answer
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")

    def tell(line: dict[str, Any]) -> None:
        answers.write(json.dumps(line) + "\n")
        answers.flush()

    tell({"ready": True})
    for line in sys.stdin:
        request = json.loads(line)
        RUN[request["mode"]](request, tell)
        tell({"done": True})


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        main()
