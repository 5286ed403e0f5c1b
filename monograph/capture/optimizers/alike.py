"""An optimizer's step where parameters are alike: traced for one of each kind, and repeated for the others.

Most of a trace is the update, which torch's optimizers compute parameter by parameter, by one formula. Parameters of one
kind have their dtype, device, layout and param group in common, and so have their gradients and their state. A formula is
used for other shapes if it does not ask for sizes or how many there are: at once where all of it is pointwise, else when
it was the same for two of them.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.overrides import TorchFunctionMode

from monograph.capture.numbers.moving import Moving
from monograph.capture.optimizers.asked_state import AskedState
from monograph.capture.optimizers.formula import PARAMETER, Formula, Part, recorded
from monograph.compat.modes import current_tracer, outside_of_function_modes, outside_of_modes
from monograph.compat.optimizers import is_torchs_own, steps_alone, takes_lists

_LOGGER = logging.getLogger("monograph")
_WORTH = 3  # parameters that are traced for no formula, at least
_TRACED = 2  # parameters of each kind that are
_SIZES = frozenset(
    {"shape", "size", "numel", "nelement", "dim", "ndim", "ndimension", "stride", "__len__", "is_contiguous"}
)
Kind = tuple[Any, ...]


@dataclass(frozen=True)
class _Alike:
    """A parameter that has a gradient: its param group by index, its kind, and what its update is about."""

    group: int
    kind: Kind
    part: Part

    @property
    def parameter(self) -> Any:
        return self.part[PARAMETER]


class StepByKinds:
    """One step of an optimizer. `step` runs its own, `record(node, like)` gets each node that is a copy of another one."""

    def __init__(
        self,
        optimizer: Any,
        step: Callable[..., Any],
        moving: Moving,
        record: Callable[[fx.Node, fx.Node], None],
    ) -> None:
        self._optimizer, self._step, self._moving, self._record = optimizer, step, moving, record
        self._groups: Sequence[dict[str, Any]] = optimizer.param_groups
        self._state: AskedState = optimizer.state
        self._formulas: dict[tuple[Kind, Any], Formula] = {}  # by kind and shape; None for all shapes
        self._of_kind: dict[Kind, Formula] = {}  # the first one, if it may fit other shapes

    @staticmethod
    def fits(optimizer: Any, step: Callable[..., Any]) -> bool:
        """True if `step` is torch's own code, which treats parameters one by one."""
        is_torchs = is_torchs_own(optimizer) and steps_alone(step, optimizer)
        return is_torchs and not any(map(_takes_lists, optimizer.param_groups))

    def run(self) -> bool:
        """Trace the step; False if nothing is traced, as this is no way for the optimizer."""
        with outside_of_function_modes(), outside_of_modes():
            found = list(self._alike())
        kinds = {item.kind for item in found if item is not None}
        if None in found or len(found) < len(kinds) * _TRACED + _WORTH:
            return False
        items, repeated = [item for item in found if item is not None], 0
        for at, item in enumerate(items):
            formula = self._formula_for(item)
            if formula is not None:
                self._repeat(formula, item.part)
                repeated += 1
            elif not self._traced(item):
                self._trace_all(items[at + 1 :])
                break
        kind = type(self._optimizer).__name__
        _LOGGER.debug("%s: %d of %d updates are recorded as repetitions", kind, repeated, len(items))
        return True

    def _alike(self) -> Iterator[_Alike | None]:
        for index, group in enumerate(self._groups):
            for parameter in group["params"]:
                if parameter.grad is not None:
                    yield _alike(index, parameter, self._entries_of(parameter))

    def _entries_of(self, parameter: Any) -> dict[str, Any]:
        """Its state; a look that is none of the step."""
        found: dict[str, Any] = dict.get(self._state, parameter, {})
        return found

    def _formula_for(self, item: _Alike) -> Formula | None:
        exact = self._formulas.get((item.kind, item.parameter.shape))
        return exact or self._formulas.get((item.kind, None))

    def _repeat(self, formula: Formula, part: Part) -> None:
        tracer = current_tracer()
        if self._state.was_asked_for(formula.part[PARAMETER]):
            _ = self._state[part[PARAMETER]]
        with outside_of_function_modes(), outside_of_modes():
            formula.repeat(part, tracer, self._record)

    def _traced(self, item: _Alike) -> bool:
        """Trace the update of one parameter; False if there is no formula to be had from it."""
        entries = dict(self._entries_of(item.parameter))
        asked = _SizesAsked()

        def run() -> None:
            with self._only({item.group: [item.parameter]}), asked:
                self._step()

        formula = recorded(item.part, run, current_tracer(), self._moving)
        now = self._entries_of(item.parameter)
        if (
            formula is None
            or now.keys() != entries.keys()
            or any(now[key] is not entries[key] for key in now)
        ):
            return False
        self._formulas[item.kind, item.parameter.shape] = formula
        if not asked.found:
            with outside_of_function_modes(), outside_of_modes():
                self._compare(item.kind, formula)
        return True

    def _compare(self, kind: Kind, formula: Formula) -> None:
        if not formula.fits_other_sizes:
            return
        first = self._of_kind.setdefault(kind, formula)
        if formula.is_pointwise or (first is not formula and formula.same_as(first)):
            self._formulas[kind, None] = formula

    def _trace_all(self, items: Sequence[_Alike]) -> None:
        chosen: dict[int, list[Any]] = {}
        for item in items:
            chosen.setdefault(item.group, []).append(item.parameter)
        if chosen:
            with self._only(chosen):
                self._step()

    @contextmanager
    def _only(self, chosen: Mapping[int, list[Any]]) -> Iterator[None]:
        """Inside, the optimizer has these parameters alone, by param group."""
        before = [group["params"] for group in self._groups]
        try:
            for index, group in enumerate(self._groups):
                group["params"] = chosen.get(index, [])
            yield
        finally:
            for group, parameters in zip(self._groups, before, strict=True):
                group["params"] = parameters


def _takes_lists(group: Mapping[str, Any]) -> bool:
    """True if a param group is updated by ops on lists, or by ones that autograd goes through."""
    if any(group.get(name) for name in ("foreach", "fused", "differentiable")):
        return True
    return group.get("foreach") is None and takes_lists(group["params"])


def _alike(group: int, parameter: Any, entries: Mapping[str, Any]) -> _Alike | None:
    """None for a parameter whose update takes something else than tensors and constants."""
    part = {PARAMETER: parameter, "gradient": parameter.grad}
    constants: dict[str, Any] = {}
    for key, entry in entries.items():
        if isinstance(entry, torch.Tensor):
            part[f"state: {key}"] = entry
        elif entry is None or type(entry) in (bool, str):
            constants[key] = entry
        else:
            return None
    if len(set(map(id, part.values()))) < len(part) or not all(map(_has_few_values, part.values())):
        return None
    forms = tuple((name, *_form(tensor, parameter)) for name, tensor in part.items())
    return _Alike(group, (group, parameter.dim() == 0, forms, tuple(constants.items())), part)


def _has_few_values(fake: Any) -> bool:
    return hasattr(fake, "real_tensor") and (fake.real_tensor is None or fake.real_tensor.numel() == 1)


def _form(fake: Any, parameter: Any) -> Kind:
    """What a tensor of a part is, apart from sizes that it has in common with the parameter."""
    value = None if fake.real_tensor is None else float(fake.real_tensor).hex()
    if fake.shape == parameter.shape and fake.stride() == parameter.stride():
        order: Any = _order(fake)
    else:
        order = tuple(fake.shape), fake.stride()
    return fake.dtype, fake.device, fake.layout, fake.is_conj(), fake.is_neg(), order, value


def _order(fake: Any) -> Any:
    """The order of a tensor in memory: the name of one that torch's ops keep, or its strides."""
    if not fake.numel():
        return tuple(fake.shape)
    last = fake.dim() == 4 and not fake.is_contiguous()
    order = torch.channels_last if last else torch.contiguous_format
    usual = torch.empty(fake.shape, device="meta", memory_format=order).stride()
    return order if fake.stride() == usual else (tuple(fake.shape), fake.stride())


class _SizesAsked(TorchFunctionMode):
    """Notes whether code of torch's optimizers asks a tensor for its sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.found = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (_name_of(func) in _SIZES) and not self.found:
            self.found = _asked_by_optimizer()
        return func(*args, **(kwargs or {}))


def _name_of(func: Any) -> str:
    owner = getattr(func, "__self__", None)  # of the getter of an attribute
    return str(getattr(owner, "__name__", "") or getattr(func, "__name__", ""))


def _asked_by_optimizer() -> bool:
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__") in ("torch.overrides", "torch._tensor"):
        frame = frame.f_back
    return frame is not None and str(frame.f_globals.get("__name__", "")).startswith("torch.optim.")
