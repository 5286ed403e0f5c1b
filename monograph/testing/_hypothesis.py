"""Says plainly what to install if Hypothesis is missing. Importing this module is the check."""

from __future__ import annotations

import importlib.util
from typing import Final

SENTENCE: Final = (
    "this part of monograph.testing draws its cases with Hypothesis, which is not installed: "
    "pip install 'monograph[testing]'"
)

if importlib.util.find_spec("hypothesis") is None:
    raise ModuleNotFoundError(SENTENCE, name="hypothesis")
