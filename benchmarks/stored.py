"""The report in its file, and the way back, so that a run that was broken off can go on."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from benchmarks.fields import from_fields
from benchmarks.record import Report


def write_report(report: Report, path: Path) -> None:
    """All samples as JSON; a reader finds the old report or the new one."""
    unfinished = path.with_name(f"{path.name}.part")
    unfinished.write_text(json.dumps(asdict(report), indent=1))
    unfinished.replace(path)


def read_report(path: Path) -> Report | None:
    """The report in the file, or none if there is no such file or something else is in it."""
    try:
        return from_fields(Report, json.loads(path.read_text()))
    except (FileNotFoundError, ValueError, TypeError, KeyError, AttributeError):
        return None
