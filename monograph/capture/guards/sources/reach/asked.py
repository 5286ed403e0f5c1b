"""What code of the step asks for: modes, since it knows the function to ask, and variables of the environment, by name."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any, Final

from monograph.capture.guards.sources.places import Entries
from monograph.capture.guards.sources.questions import Answer, question_about
from monograph.capture.guards.sources.reach.recorded import Recorded
from monograph.capture.guards.sources.values import ABSENT, same
from monograph.errors import CaptureError

ENVIRONMENT: Final[Any] = type(os.environ)
_BY_NAME: Final[tuple[CodeType, ...]] = tuple(
    getattr(ENVIRONMENT, name).__code__ for name in ("__getitem__", "__setitem__", "__delitem__")
)
_AS_A_WHOLE: Final[tuple[CodeType, ...]] = tuple(
    getattr(ENVIRONMENT, name).__code__ for name in ("__iter__", "__len__", "__repr__")
)


@dataclass(eq=False)
class Environment(Entries):
    """The variables of the environment that code has asked for, or all if it has asked which there are."""

    def item_label(self, key: Any) -> str:
        return f"{self.label}[{os.fsdecode(key)!r}]"

    def restore(self, key: Any, value: Any) -> bool:
        if value is ABSENT:
            os.environb.pop(key, None)
        else:
            os.environb[key] = value
        return True


class Asked:
    """The questions that code can ask. `answers` is what they were answered before the trace."""

    def __init__(self, recorded: Recorded, answers: Mapping[str, Any]) -> None:
        self._recorded, self._answers = recorded, answers
        self._labels: set[str] = set()
        self._environment: Environment | None = None

    def may_ask(self, item: Any) -> None:
        """Code of the step knows this: if it asks for a mode, the answer counts."""
        question = question_about(item)
        if question is not None and question.label not in self._labels:
            self._labels.add(question.label)
            answer = Answer(question.label, question.ask, followed=False)
            self._recorded.add(answer)
            before = self._answers.get(question.label, answer.recorded[""])
            if question.is_set_by_steps and not (question.is_no_in_captures and before):
                answer.recorded[""] = before
            elif question.is_no_in_captures or not same(before, answer.recorded[""]):
                raise CaptureError(
                    f"code of the step can ask for {question.label}, which a capture sets to another value",
                    hint="ask before the step, and keep the answer in an attribute",
                )

    def asks_environment(self, code: CodeType, frame: FrameType) -> bool:
        """True for code of the environment, which is about to give, to set or to list variables: these count."""
        if code not in _BY_NAME and code not in _AS_A_WHOLE:
            return False
        if self._environment is None:
            self._environment = Environment("os.environ", vars(os.environ)["_data"], set())
            self._recorded.add(self._environment)
        if code in _AS_A_WHOLE:
            self._recorded.make_whole(self._environment)
        elif isinstance(key := frame.f_locals["key"], (str, bytes)):
            self._recorded.count(self._environment, os.fsencode(key))
        return True
