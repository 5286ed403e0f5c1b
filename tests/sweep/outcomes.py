"""What became of a sample: in one word what it shows, and a message if it does not pass."""

from __future__ import annotations

import os
import traceback
from dataclasses import dataclass

from monograph.errors import MonographError
from monograph.testing import AlignmentError
from tests.sweep.samples import Sample, seed

PASSES = "bitwise", "aligned", "as eager"  # on aten, on backends that may round otherwise, of special values


@dataclass(frozen=True)
class Outcome:
    """What a sample shows, such as `bitwise` or `refused: SignatureError`."""

    shows: str
    message: str = ""

    @property
    def passes(self) -> bool:
        """True if it is what it should be."""
        return self.shows in PASSES


def outcome_of(sample: Sample, passes: str = "bitwise") -> Outcome:
    """Align a sample."""
    seed()
    try:
        sample.align()
    except AlignmentError as error:
        cause = error.__cause__
        if cause is None:
            return Outcome("differs", error.what)
        kind = "refused" if isinstance(cause, MonographError) else "fails"
        return Outcome(f"{kind}: {type(cause).__name__}", str(cause))
    except MonographError as error:  # before the graph was called
        return Outcome(f"refused: {type(error).__name__}", str(error))
    except Exception as error:  # whatever eager itself raises passes through align
        return Outcome(f"eager: {type(error).__name__}", str(error) + _place(error))
    return Outcome(passes)


def _place(error: Exception) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f" ({os.path.basename(last.filename)}:{last.lineno})"
