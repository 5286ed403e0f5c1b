"""What the sweep goes through: torch's own databases of ops, modules and optimizers, as `SweepCase`s.

The databases are those that torch tests itself with. An op gives two cases, forward and backward; a module gives
a training step and a call in eval mode; an optimizer gives one case for each of its configurations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import module_db
from torch.testing._internal.common_optimizers import optim_db

DEVICE = "cpu"
DTYPE = torch.float32

OPS = {op.full_name: op for op in op_db if DTYPE in op.supported_dtypes(DEVICE)}
MODULES = {info.name: info for info in module_db if DTYPE in info.supported_dtypes(DEVICE)}
OPTIMIZERS = {info.optim_cls.__name__: info for info in optim_db}

_EVERY = 48  # the fast part takes every 48th op and module


@dataclass(frozen=True, order=True)
class SweepCase:
    """One entry of a database and what is asked of it; `key` names it in results and expectations."""

    database: str
    name: str
    part: str

    @property
    def key(self) -> str:
        """`op_db/sin/forward`: the name of the case everywhere."""
        return f"{self.database}/{self.name}/{self.part}"

    @property
    def group(self) -> str:
        """What the case is counted under: `op_db/forward`, `module_db/train`, `optim_db`, `special/float32`."""
        if self.database == "special":
            return f"special/{self.name}"
        return self.database if self.database == "optim_db" else f"{self.database}/{self.part}"


def all_cases() -> tuple[SweepCase, ...]:
    """Every case, in the order of the databases."""
    return (*_op_cases(), *_module_cases(), *_optimizer_cases())


def case_of(key: str) -> SweepCase:
    """The case that a key names."""
    database, name, part = key.split("/", 2)
    return SweepCase(database, name, part)


def fast_cases(with_rows: frozenset[str]) -> tuple[SweepCase, ...]:
    """The fixed part that every test run goes through: a 48th of the ops and modules, and every case that has a row."""
    names = {*list(OPS)[::_EVERY], *list(MODULES)[::_EVERY]}
    return tuple(
        case for case in all_cases() if case.name in names or case.key in with_rows or case.part == "default"
    )


def configurations(name: str) -> dict[str, Any]:
    """The inputs of an optimizer's configurations by their description."""
    return {item.desc: item for item in OPTIMIZERS[name].optim_inputs_func(device=DEVICE)}


def _op_cases() -> list[SweepCase]:
    cases = []
    for name, op in OPS.items():
        cases.append(SweepCase("op_db", name, "forward"))
        if op.supports_autograd and DTYPE in op.supported_backward_dtypes(DEVICE):
            cases.append(SweepCase("op_db", name, "backward"))
    return cases


def _module_cases() -> list[SweepCase]:
    return [SweepCase("module_db", name, part) for name in MODULES for part in ("train", "eval")]


def _optimizer_cases() -> list[SweepCase]:
    return [
        SweepCase("optim_db", name, configuration)
        for name in OPTIMIZERS
        for configuration in configurations(name)
    ]
