"""Modes that code of the step can ask for, since it knows the function to ask: the answers count."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from monograph.capture.guards.sources.questions import Answer, question_about
from monograph.capture.guards.sources.reach.recorded import Recorded
from monograph.capture.guards.sources.values import same
from monograph.errors import CaptureError


class Asked:
    """The questions that code can ask. `answers` is what they were answered before the trace."""

    def __init__(self, recorded: Recorded, answers: Mapping[str, Any]) -> None:
        self._recorded, self._answers = recorded, answers
        self._labels: set[str] = set()

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
