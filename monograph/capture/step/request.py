"""What is to be captured: a step, the arguments of one call, and the settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from monograph.capture.effects.gradients import GradientsSeen
from monograph.capture.effects.python_objects.number_places import Place
from monograph.capture.step.observer import SILENT, Observer
from monograph.ir.call.signature import Call
from monograph.ir.probes import ProbeLog
from monograph.settings import Settings
from monograph.state.find import Owned


@dataclass(frozen=True)
class Request:
    """What to capture: the user's build(), one call's arguments, what the graph holds, and the settings."""

    name: str
    build: Callable[..., Any]
    call: Call
    owned: Owned
    settings: Settings
    observer: Observer = SILENT
    probes: ProbeLog = field(default_factory=ProbeLog)
    own: Sequence[torch.Tensor] = ()  # tensors that nobody but the graph has
    answers: Mapping[str, Any] = field(default_factory=dict)  # of `questions`, before the trace
    before: GradientsSeen | None = None  # by the builds that there are
    waiting: Sequence[Any] = ()  # owners of optimizer state that is shown for the first step alone
    is_first: bool = True  # the graph has no build yet
    moved: Sequence[Place] = ()  # of numbers that have changed since some build was made
    for_many_sizes: bool = False  # its program is one of several, for which there is to be one of all sizes

    @property
    def takes_layers_whole(self) -> bool:
        """True if recurrent layers that torch unrolls are one op each, at sizes that do not vary too."""
        return self.for_many_sizes or self.settings.is_compiled
