"""The environment variables of the test tools, all read here; the pytest plugin sets them from its options."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

SEED = "MONOGRAPH_TEST_SEED"
SCRIPTS = "MONOGRAPH_TEST_SCRIPTS"
VERBOSE = "MONOGRAPH_TEST_VERBOSE"
WARMUP = "MONOGRAPH_PROFILE_WARMUP"
RUNS = "MONOGRAPH_PROFILE_RUNS"


def seed() -> int:
    """The seed of cases that do not choose one: 0 if the environment does not say otherwise."""
    text = os.environ.get(SEED, "0")
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"the environment variable {SEED} is a whole number, got {text!r}") from None


def script_folder() -> Path:
    """Where stand-alone scripts of failures are written."""
    return Path(os.environ.get(SCRIPTS) or Path(tempfile.gettempdir(), "monograph-scripts"))


def verbose() -> bool:
    """True if each check shall print its graph and its results."""
    return os.environ.get(VERBOSE, "") not in ("", "0")


def profile_runs() -> tuple[int, int]:
    """How often `@profile` runs an operator before it measures, and while it measures. Raises ValueError."""
    return _number(WARMUP, 3, least=0), _number(RUNS, 30, least=1)


def _number(name: str, usual: int, *, least: int) -> int:
    value = int(os.environ.get(name, usual))
    if value < least:
        raise ValueError(f"{name} is {value}, which is too few")
    return value
