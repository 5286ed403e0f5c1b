"""The job that a worker gets when it starts."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from benchmarks.fields import from_fields
from benchmarks.setting import Setting


@dataclass(frozen=True)
class Job:
    """One competitor: a workload, a peer, and how it is set up."""

    workload: str
    peer: str
    setting: Setting
    threads: int
    smoke: bool

    def to_json(self) -> str:
        """The job as a command line argument."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Job:
        """The job that `to_json` wrote."""
        return from_fields(Job, json.loads(text))
