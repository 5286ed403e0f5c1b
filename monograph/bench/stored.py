"""The report in its file, and the way back, so that a run that was broken off can go on."""

from __future__ import annotations

import json
from dataclasses import asdict, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from monograph.bench.record import Report


def write(report: Report, path: Path) -> None:
    """All samples as JSON; a reader finds the old report or the new one."""
    unfinished = path.with_name(f"{path.name}.part")
    unfinished.write_text(json.dumps(asdict(report), indent=1))
    unfinished.replace(path)


def read(path: Path) -> Report | None:
    """The report in the file, or none if there is no such file or something else is in it."""
    try:
        report: Report = made(Report, json.loads(path.read_text()))
    except (FileNotFoundError, ValueError, TypeError, KeyError, AttributeError):
        return None
    return report


def made(kind: Any, value: Any) -> Any:
    """A value of a type of `record`, from what JSON left of it."""
    if is_dataclass(kind):
        kinds = get_type_hints(kind)
        return kind(**{name: made(kinds[name], item) for name, item in value.items()})  # type: ignore[operator]
    if get_origin(kind) is tuple:
        (item_kind, _) = get_args(kind)  # of any length
        return tuple(made(item_kind, item) for item in value)
    if get_origin(kind) is UnionType and value is not None:
        (item_kind, _) = get_args(kind)  # or none
        return made(item_kind, value)
    return value
