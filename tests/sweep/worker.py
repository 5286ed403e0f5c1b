"""The child process of the sweep: runs cases and tells each sample on one line, before it and after it.

The parent writes one JSON line for each case (`case`, `first` sample, `most` samples); a line is answered at once,
so that a crash or a hang belongs to the sample that was begun last.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import traceback
import warnings
from typing import Any

import torch

from monograph.errors import MonographError
from monograph.testing import AlignmentError
from tests.sweep.cases import case_of
from tests.sweep.expectations import BITWISE
from tests.sweep.samples import Sample, samples_of, seed

_LONGEST = 600  # signs of a message that are kept


def outcome_of(sample: Sample) -> tuple[str, str]:
    """What became of a sample in one word, and the message."""
    seed()
    try:
        sample.align()
    except AlignmentError as error:
        cause = error.__cause__
        if cause is None:
            return "differs", error.what
        kind = "refused" if isinstance(cause, MonographError) else "fails"
        return f"{kind}: {type(cause).__name__}", str(cause)
    except MonographError as error:  # before the graph was called
        return f"refused: {type(error).__name__}", str(error)
    except Exception as error:  # whatever eager itself raises passes through align
        return f"eager: {type(error).__name__}", str(error) + _place(error)
    return BITWISE, ""


def _place(error: Exception) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f" ({os.path.basename(last.filename)}:{last.lineno})"


def run_case(request: dict[str, Any], tell: Any) -> None:
    """Run the samples of a case from the asked one on."""
    try:
        samples = samples_of(case_of(request["case"]), request["most"])
    except Exception as error:
        tell({"sample": 0, "outcome": f"eager: {type(error).__name__}", "message": str(error)[:_LONGEST]})
        return
    for index in range(request["first"], len(samples)):
        tell({"begins": index})
        outcome, message = outcome_of(samples[index])
        tell({"sample": index, "outcome": outcome, "message": message[:_LONGEST]})


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
        run_case(json.loads(line), tell)
        tell({"done": True})


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        main()
