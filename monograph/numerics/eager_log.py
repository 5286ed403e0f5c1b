"""Every op of an eager step, in its order, with what it made and the user's line."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import nn

from monograph.compat.distributed.ops import communicates, waits
from monograph.compat.fakes import is_fake
from monograph.compat.modes import watching_results
from monograph.compat.ops import aliased_arguments, spelling
from monograph.ir.call.nested import tensors_in
from monograph.user_code.lines import Origin, user_place

_FORMS = re.compile("_(legit|functional|no_training)")  # how torch names other forms of the same op


@dataclass(frozen=True)
class EagerOp:
    """An op that ran."""

    name: str
    where: Origin
    made: tuple[torch.Tensor, ...]  # copies


def op_name(target: Any) -> str | None:
    """The name of an op, one for all its forms: overloads, in place, functional. None for what is no op."""
    full = spelling(target)
    if full is None:
        return None
    name = full.removeprefix("torch.ops.").removeprefix("aten.").partition(".")[0]
    return _FORMS.sub("", name).strip("_")


def says_nothing(target: Any) -> bool:
    """True for views, and for collectives, whose results are there when they have been waited for."""
    return any(aliased_arguments(target) or ()) or (communicates(target) and not waits(target))


class EagerLog:
    """A context manager: ops that run inside are noted in `ops`, but for those that say nothing."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self.ops: list[EagerOp] = []
        self._paths = {id(module): path for path, module in modules.items()}
        self._mode = watching_results(self._see)

    def __enter__(self) -> EagerLog:
        self._mode.__enter__()
        return self

    def __exit__(self, *details: Any) -> None:
        self._mode.__exit__(*details)

    def _see(self, target: Any, result: Any) -> None:
        if (name := op_name(target)) is None or says_nothing(target):
            return
        if any(map(is_fake, found := tensors_in(result))):
            return  # DTensor looks for a layout
        made = tuple(tensor.detach().clone() for tensor in found)
        self.ops.append(EagerOp(name, self._place(sys._getframe(2)), made))

    def _place(self, frame: FrameType | None) -> Origin:
        """The user's line, and the innermost held module whose code is running."""
        place, module = user_place(frame), ""
        while frame is not None and not module:
            module = self._paths.get(id(frame.f_locals.get("self")), "")
            frame = frame.f_back
        return Origin(place.file, place.line, module)
