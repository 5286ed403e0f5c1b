"""Whose code a file has: the user's, an installed package's, that of torch, or ours."""

from __future__ import annotations

import os
from functools import cache

import torch

_TORCH = os.path.dirname(torch.__file__) + os.sep
_OURS = os.path.dirname(os.path.dirname(__file__)) + os.sep
_INSIDE = (_TORCH, _OURS)
_MACHINERY = (_OURS, *(_TORCH + name for name in ("fx", "_", "utils", "overrides")))  # of tracing
_CALL = os.path.join(_OURS, "call.py")  # around each step
_GENERATED = "<monograph"
_LIBRARY_FILES = ("<frozen", "<string>", "<eval_with_key>", _GENERATED)
_COMMAND_LINES = (f"{os.sep}typer{os.sep}", f"{os.sep}click{os.sep}")  # what runs the user's code
_LIBRARY_NAMES = (f"{os.sep}bin{os.sep}monograph",)  # the command
_NUMBERS = tuple(
    _OURS + os.path.join("capture", "numbers", f"{name}.py")
    for name in ("arithmetic", "moving", "protocol", "python_functions", "recorded_arithmetic")
)
_STANDARD = os.path.dirname(os.__file__) + os.sep
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


def is_inside(filename: str) -> bool:
    """True for files of torch and of Monograph."""
    return filename.startswith(_INSIDE)


@cache  # asked for each frame that an op comes from, and for each module at a capture
def is_user_file(filename: str) -> bool:
    """True for files outside torch, Monograph and the interpreter's own plumbing."""
    return not (
        filename.startswith(_INSIDE)
        or filename.startswith(_LIBRARY_FILES)
        or filename.endswith(_LIBRARY_NAMES)
        or any(name in filename for name in _COMMAND_LINES)
        or (filename.startswith(_STANDARD) and not any(name in filename for name in _INSTALLED))
    )


@cache
def is_installed_file(filename: str) -> bool:
    """True for files of packages that were installed, which the user has not written."""
    return any(name in filename for name in _INSTALLED)


def calls_steps(filename: str) -> bool:
    """True for our file that calls steps: what is on a stack before it is none of the step."""
    return filename == _CALL


def is_torch(filename: str) -> bool:
    """True for files of torch."""
    return filename.startswith(_TORCH)


def traces(filename: str) -> bool:
    """True for files of torch and of Monograph that run because a step is captured, and would not in eager mode."""
    return filename.startswith(_MACHINERY)


def is_generated(filename: str) -> bool:
    """True for the functions that programs are made of."""
    return filename.startswith(_GENERATED)


def computes_numbers(filename: str) -> bool:
    """True for the files that do Python's arithmetic on numbers that move."""
    return filename in _NUMBERS
