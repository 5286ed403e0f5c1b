"""The state of a graph in OneFlow's layout, and back.

OneFlow keeps what an optimizer knows of a parameter under `<parameter>-<entry>`, with entry names of its own, and the
number of steps as a tensor.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import optim

from monograph import CheckpointError
from monograph.checkpoint.save import Checkpoint
from monograph.compat.optimizers import LAST_RATES, STEP_COUNT
from monograph.flow.optim.adam import LAMB
from monograph.schedulers.scheduler import LRScheduler
from monograph.state.find import Owned, RegisteredOptimizer

TRAIN_STEP = "System-Train-TrainStep"
_LOSS_SCALE = re.compile(
    r"System-Train-DynamicLossScale-.*-(LossScale|GoodStepCounter)"
)  # of a graph of any name
_SCALER = "graph.scaler"
_STEPS = "graph.steps"
_OF_ADAM = {"exp_avg": "m", "exp_avg_sq": "v", "max_exp_avg_sq": "max_v"}
_ENTRIES = {  # by class: PyTorch's name of an entry, and OneFlow's
    "SGD": {"momentum_buffer": "momentum"},
    "Adam": _OF_ADAM,
    "AdamW": _OF_ADAM,
    "LAMB": _OF_ADAM,
    "RMSprop": {"square_avg": "mean_square", "grad_avg": "mean_gradient"},
    "Adagrad": {"sum": "sum"},
    "Adadelta": {"square_avg": "square_avgs", "acc_delta": "acc_deltas"},
}
_COUNTING = (
    LAMB,
    optim.Adam,
    optim.Adagrad,
    optim.Adadelta,
    optim.Adamax,
    optim.NAdam,
    optim.RAdam,
    optim.RMSprop,
)
_ONLY_WITH = {
    "momentum": "momentum",
    "max_v": "amsgrad",
    "mean_gradient": "centered",
}  # options of a param group


class Translated(NamedTuple):
    """A state for a Monograph Graph, and the keys that the given one should have had."""

    state: dict[str, Any]
    missing: list[str]


def is_oneflow(state: Any) -> bool:
    """True for a state in OneFlow's layout."""
    return isinstance(state, Mapping) and TRAIN_STEP in state


def to_oneflow(state: Mapping[str, Any], owned: Owned) -> dict[str, Any]:
    """The state of a Monograph Graph in OneFlow's layout; what OneFlow has not stays as it is, after the rest.

    The state of an optimizer says where its tensors stand: `{0: {"momentum_buffer": "model.weight-momentum"}}`.
    """
    modules = {name: state[name] for name in owned.modules}
    entries: dict[str, Any] = {}
    others = {key: value for key, value in state.items() if key not in modules and key != _STEPS}
    for registered in owned.optimizers:
        names, own = _entry_names(registered), state[registered.name]
        left: dict[Any, Any] = {}
        paths = _paths(registered, owned)
        for index, found in own["state"].items():
            path = paths.get(index)
            for key, value in found.items():
                place = f"{path}-{names.get(key, key)}"
                if path is not None and isinstance(value, torch.Tensor) and place not in entries:
                    entries[place] = value
                    value = place
                left.setdefault(index, {})[key] = value
        others[registered.name] = {**own, "state": left}
    steps = torch.tensor([state[_STEPS]], dtype=torch.int64)
    return {**modules, **entries, TRAIN_STEP: steps, **others}


def from_oneflow(given: Mapping[str, Any], present: Mapping[str, Any], owned: Owned) -> Translated:
    """A state in OneFlow's layout as one of a Monograph Graph.

    OneFlow itself saves no param groups, schedulers and random states: of a state that it wrote, schedulers are set by
    the number of steps, and the others stay as they are in `present`.
    """
    state, missing = dict(given), list[str]()
    steps = _steps(state.pop(TRAIN_STEP))
    for index, registered in enumerate(owned.optimizers):
        if registered.name in state:
            missing += _put_back(state, registered, owned)
            continue
        own = dict(present[registered.name])
        if registered.scheduler is not None:
            rates = _rates_at(registered, steps)
            groups = zip(own["param_groups"], rates, strict=True)
            own["param_groups"] = [{**group, "lr": rate} for group, rate in groups]
            moved = {"last_epoch": steps, LAST_RATES: rates, STEP_COUNT: steps + 1}
            state[f"scheduler.{index}"] = {**present[f"scheduler.{index}"], **moved}
        taken = _taken(state, registered, owned)
        missing += _lacking(registered, taken, owned) if steps else []
        own["state"] = {number: _counted(registered, entries, steps) for number, entries in taken.items()}
        state[registered.name] = own
    state[_STEPS] = steps
    for name in owned.modules:
        if not present[name]:
            state.setdefault(name, {})  # a loss, which has no state
    if "graph.rng" not in state:
        if isinstance(owned.scaler, torch.amp.GradScaler):
            state[_SCALER] = _scaler_state(state, present[_SCALER])
        unknown = [key for key, value in present.items() if key.startswith("graph.") and key not in state]
        state |= {key: present[key] for key in unknown}
    return Translated(
        Checkpoint(state, given.path, given.about) if isinstance(given, Checkpoint) else state, missing
    )


def _put_back(state: dict[str, Any], registered: RegisteredOptimizer, owned: Owned) -> list[str]:
    """Put the tensors of a state that was written here back into its optimizer; the keys that are not there."""
    paths, missing = _paths(registered, owned), []
    found = {number: dict(entries) for number, entries in state[registered.name]["state"].items()}
    for number, entries in found.items():
        for key, place in list(entries.items()):
            if not isinstance(place, str) or not place.startswith(f"{paths.get(number)}-"):
                continue
            if place in state:
                entries[key] = state.pop(place)
            else:
                del entries[key]
                missing.append(place)
    state[registered.name] = {**state[registered.name], "state": found}
    return missing


def _taken(state: dict[str, Any], registered: RegisteredOptimizer, owned: Owned) -> dict[int, dict[str, Any]]:
    """What a state that OneFlow wrote has for the parameters of an optimizer, taken out of it."""
    names = {theirs: ours for ours, theirs in _entry_names(registered).items()}
    numbers = {path: number for number, path in _paths(registered, owned).items()}
    taken: dict[int, dict[str, Any]] = {}
    for key in list(state):
        path, dash, entry = key.rpartition("-")
        known = entry in names or not names  # of an optimizer of the user's own every entry is
        if dash and known and path in numbers and isinstance(state[key], torch.Tensor):
            taken.setdefault(numbers[path], {})[names.get(entry, entry)] = state.pop(key)
    return taken


def _lacking(registered: RegisteredOptimizer, taken: Mapping[int, Any], owned: Owned) -> Iterator[str]:
    """The entries that OneFlow would have saved. A parameter without gradient has none, but not all are so."""
    names = _entry_names(registered)
    groups = [group for group in registered.optimizer.param_groups for _ in group["params"]]
    for number, path in _paths(registered, owned).items():
        for ours, theirs in names.items():
            kept = theirs not in _ONLY_WITH or groups[number].get(_ONLY_WITH[theirs])
            if kept and (number in taken or not taken) and ours not in taken.get(number, {}):
                yield f"{path}-{theirs}"


def _scaler_state(state: dict[str, Any], present: Mapping[str, Any]) -> dict[str, Any]:
    found = {match[1]: state.pop(key) for key in list(state) if (match := _LOSS_SCALE.fullmatch(key))}
    moved = dict(present)
    if "LossScale" in found:
        moved["scale"] = float(found["LossScale"])
    if "GoodStepCounter" in found:
        moved["_growth_tracker"] = int(found["GoodStepCounter"])
    return moved


def _entry_names(registered: RegisteredOptimizer) -> Mapping[str, str]:
    kinds = [kind.__name__ for kind in type(registered.optimizer).__mro__]
    return next((_ENTRIES[name] for name in kinds if name in _ENTRIES), {})


def _paths(registered: RegisteredOptimizer, owned: Owned) -> dict[int, str]:
    """The paths of the optimizer's parameters in the graph, by their numbers in its state."""
    paths = {
        id(parameter): f"{name}.{path}"
        for name, module in owned.modules.items()
        for path, parameter in module.named_parameters()
    }
    parameters = [parameter for group in registered.optimizer.param_groups for parameter in group["params"]]
    return {index: paths[id(item)] for index, item in enumerate(parameters) if id(item) in paths}


def _steps(value: Any) -> int:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return int(value)
    raise CheckpointError(
        f"{TRAIN_STEP} is {value!r}", hint="it is the number of steps, a tensor of one element"
    )


def _counted(registered: RegisteredOptimizer, entries: dict[str, Any], steps: int) -> dict[str, Any]:
    """The state of a parameter with the counter of steps that PyTorch's optimizers have for each, in their order."""
    counts = isinstance(registered.optimizer, _COUNTING)
    return {"step": torch.tensor(float(steps)), **entries} if counts else entries


def _rates_at(registered: RegisteredOptimizer, steps: int) -> list[Any]:
    if not isinstance(registered.scheduler, LRScheduler):
        raise CheckpointError(
            f"the state says {steps} steps, and a {type(registered.scheduler).__name__} does not say its rate at a step",
            hint="use the scheduler of that name in flow.optim.lr_scheduler",
        )
    return registered.scheduler.rates(steps)
