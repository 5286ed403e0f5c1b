"""Every knob in one frozen place. The setters for users are in `config.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch

PLAIN = "aten"  # op by op, with eager's bits and errors: what runs where no other backend can
AUTO = "auto"  # begins on the plain one, and goes on by `exact` once that is compiled
KEPT = ("recent",)
STRAIGHTENED = ("MemoryFirst", "SpeedFirst", "Disable")  # how ops are ordered
BACKENDS = (AUTO, PLAIN, "exact", "inductor")

# of version 0.1: a pass, the field that switched it, and what that was until somebody did
_FIELDS_OF_PASSES = (
    ("add_to_output", "fuse_add_to_output", None),
    ("cast_scale", "fuse_cast_scale", None),
    ("gate_nonfinite", "detect_nonfinite", False),
    ("model_update", "fuse_model_update_ops", False),
)


@dataclass(frozen=True)
class DynamicSize:
    """A size of an argument that varies from the first build on, from `min` to `max`."""

    argument: str
    dim: int
    min: int | None = None
    max: int | None = None
    name: str = ""  # sizes of one name are equal

    def takes(self, size: int) -> bool:
        """True if it is within the range."""
        return (self.min is None or size >= self.min) and (self.max is None or size <= self.max)

    def __repr__(self) -> str:
        limits = [f"{name}={value}" for name in ("min", "max") if (value := getattr(self, name)) is not None]
        return ", ".join([f"{self.argument}.size({self.dim})", *limits])


@dataclass(frozen=True)
class DataParallel:
    """The processes that each train a copy of the modules on a part of the batch: those of a DeviceMesh, or all of them."""

    mesh: Any = None

    def __repr__(self) -> str:
        return "all" if self.mesh is None else repr(self.mesh)


@dataclass(frozen=True)
class Zero:
    """What processes that train copies of a model keep in parts, and how many elements a tensor has at least for that."""

    stage: int
    shard_min_size: int

    def __repr__(self) -> str:
        return f"stage {self.stage} from {self.shard_min_size} elements on"


@dataclass(frozen=True)
class MemoryBudget:
    """The bytes that a step may hold above its state and arguments; or the share of what it holds if nothing is dropped."""

    nbytes: int = 0
    share: float | None = None

    def of(self, whole: int) -> int:
        """The bytes, for a step that holds `whole` bytes if nothing is dropped."""
        return self.nbytes if self.share is None else int(whole * self.share)

    def __repr__(self) -> str:
        return f"{self.nbytes}" if self.share is None else f"'{self.share:g}x'"


@dataclass(frozen=True)
class Settings:
    """Every knob. A build depends on its Settings and on nothing else that can be configured."""

    backend: str = AUTO
    keep_gradients: bool = False
    amp: torch.dtype | None = None
    accumulation_steps: int = 1
    data_parallel: DataParallel | None = None
    zero: Zero | None = None
    stages: tuple[tuple[str, int], ...] = ()  # of a pipeline: the paths of modules, and the stage of each
    placements: tuple[
        tuple[str, tuple[int, ...]], ...
    ] = ()  # by path of such a module the processes that may run its stage
    pipeline_schedule: str = "1F1B"
    passes: tuple[tuple[str, bool], ...] = ()  # those that were switched on or off, by name
    conv_heuristic_search: bool = False
    kernel_selection: bool | None = None  # None: on for compiled backends
    strict: bool = field(default=False, compare=False)  # decides about captures, is no part of a build
    added_passes: tuple[
        tuple[Callable[[Any], Any], str | None], ...
    ] = ()  # with the name that each comes after
    background: bool = False  # compile beside the first steps
    swap_at: int | None = None  # the step from which on compiled code runs
    memory_budget: MemoryBudget | None = None
    compress_memory: bool = (
        False  # compute again what makes the peak small, for up to a third of the time of a step
    )
    checkpointed: tuple[str, ...] = ()  # the paths of modules that backward computes again
    max_builds: int | None = field(default=None, compare=False)  # decides about builds, is no part of one
    keep: str | None = field(default=None, compare=False)  # which of them stay: KEPT; None: no more are made
    dynamic: bool = field(default=True, compare=False)  # sizes vary by themselves from the second one on
    sizes: tuple[DynamicSize, ...] = field(
        default=(), compare=False
    )  # those that vary from the first build on
    buckets: tuple[Any, ...] = field(default=(), compare=False)  # that arguments are padded to first
    straighten: str = "MemoryFirst"  # the order of ops: STRAIGHTENED
    compare_buckets: bool = field(default=True, compare=False)  # steps of each with those without padding

    def is_on(self, switch: bool | None) -> bool:
        """What a switch means that may be left to the backend: compiled ones round as they like within the promise."""
        return self.is_compiled if switch is None else switch

    @property
    def is_compiled(self) -> bool:
        """True if the backend compiles the step."""
        return is_compiled(self.backend)

    @property
    def is_upgraded(self) -> bool:
        """True if a build may go on by compiled code of the same bits."""
        return self.backend == AUTO

    @property
    def first_backend(self) -> str:
        """What the first step runs on."""
        return PLAIN if self.is_upgraded or self.begins_plain else self.backend

    @property
    def begins_plain(self) -> bool:
        """True if a build begins op by op, and goes on by compiled code of other bits."""
        return self.is_compiled and self.background

    @property
    def is_lean(self) -> bool:
        """True if ops are ordered for memory, and what is cheap is computed again for it."""
        return self.straighten == STRAIGHTENED[0]

    def plain(self) -> Settings:
        """The same on the backend that can run everything."""
        return replace(self, backend=PLAIN)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """The settings of a pickled graph; those of version 0.1 had a field for each pass that can be switched."""
        if "passes" not in state:
            state["passes"] = tuple(
                (name, mode)
                for name, field, at_first in _FIELDS_OF_PASSES
                if (mode := state.pop(field, at_first)) is not at_first
            )
        self.__dict__.update({"dynamic": True, "sizes": ()} | state)

    def knobs(self) -> str:
        """Every setting as text."""
        return ", ".join(f"{item.name}={shown_setting(getattr(self, item.name))}" for item in fields(self))

    def __repr__(self) -> str:
        return f"Settings({self.knobs()})"


def is_compiled(backend: str) -> bool:
    """True for a backend that compiles whole steps: its code rounds within the promise, and raises nothing where Python does."""
    return backend == "inductor"


def shown_setting(setting: Any) -> str:
    """A setting as text; passes are shown by their names, since the text of a function holds its address."""
    if isinstance(setting, tuple):
        return f"[{', '.join(map(_shown_item, setting))}]"
    return repr(setting)


def _shown_item(item: tuple[Any, Any] | DynamicSize | str) -> str:
    """A pass that was switched, one of the user's with its place, a size, or buckets."""
    match item:
        case str(path):
            return path
        case DynamicSize():
            return repr(item)
        case str(name), bool() | int() as mode:
            return f"{name}={mode}"
        case function, None:
            return pass_name(function)
        case function, after:
            return f"{pass_name(function)} after {after}"
        case buckets:
            return repr(buckets)


def pass_name(function: Callable[[Any], Any]) -> str:
    """The name of a pass: that of the function, or of the class of a callable object."""
    return str(getattr(function, "__name__", type(function).__name__))
