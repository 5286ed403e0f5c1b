"""The state of a graph in OneFlow's layout, and back.

OneFlow keeps what an optimizer knows of a parameter under `<parameter>-<entry>`, with entry names of its own, and the
number of steps as a tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from monograph.capture.state import HeldOptimizer, Holdings
from monograph.errors import CheckpointError
from monograph.flow.optim.lr_scheduler import LRScheduler
from monograph.storage.checkpoint import Checkpoint

TRAIN_STEP = "System-Train-TrainStep"
_STEPS = "graph.steps"
_OF_ADAM = {"exp_avg": "m", "exp_avg_sq": "v", "max_exp_avg_sq": "max_v"}
_ENTRIES = {  # by class: PyTorch's name of an entry, and OneFlow's
    "SGD": {"momentum_buffer": "momentum"},
    "Adam": _OF_ADAM,
    "AdamW": _OF_ADAM,
    "LAMB": _OF_ADAM,
    "RMSprop": {"square_avg": "mean_square", "grad_avg": "mean_gradient"},
    "Adadelta": {"square_avg": "square_avgs", "acc_delta": "acc_deltas"},
}


def is_oneflow(state: Any) -> bool:
    """True for a state in OneFlow's layout."""
    return isinstance(state, Mapping) and TRAIN_STEP in state


def to_oneflow(state: Mapping[str, Any], holdings: Holdings) -> dict[str, Any]:
    """The state of a Monograph Graph in OneFlow's layout; what OneFlow has not stays as it is, behind the rest."""
    modules = {name: state[name] for name in holdings.modules}
    entries: dict[str, Any] = {}
    others = {key: value for key, value in state.items() if key not in modules and key != _STEPS}
    for held in holdings.optimizers:
        names, own = _entry_names(held), state[held.name]
        left: dict[Any, Any] = {}
        paths = _paths(held, holdings)
        for index, found in own["state"].items():
            path = paths.get(index)
            for key, value in found.items():
                if path is not None and isinstance(value, torch.Tensor):
                    entries[f"{path}-{names.get(key, key)}"] = value
                else:
                    left.setdefault(index, {})[key] = value
        others[held.name] = {**own, "state": left}
    steps = torch.tensor([state[_STEPS]], dtype=torch.int64)
    return {**modules, **entries, TRAIN_STEP: steps, **others}


def from_oneflow(given: Mapping[str, Any], present: Mapping[str, Any], holdings: Holdings) -> dict[str, Any]:
    """A state in OneFlow's layout as one of a Monograph Graph.

    OneFlow itself saves no param groups, schedulers and random states: of a state that it wrote, schedulers are set by
    the number of steps, and the others stay as they are in `present`.
    """
    state = dict(given)
    steps = _steps(state.pop(TRAIN_STEP))
    entries = dict(_entries(state))
    for index, held in enumerate(holdings.optimizers):
        written_here = held.name in state
        own = state.get(held.name, {**present[held.name], "state": {}})
        if not written_here and held.scheduler is not None:
            own = {**own, "param_groups": _rates_at(held, own["param_groups"], steps)}
            state[f"scheduler.{index}"] = {**present[f"scheduler.{index}"], "last_epoch": steps}
        names = {theirs: ours for ours, theirs in _entry_names(held).items()}
        found = {key: dict(value) for key, value in own["state"].items()}
        for number, path in _paths(held, holdings).items():
            for key, value in entries.pop(path, {}).items():
                state.pop(f"{path}-{key}")
                found.setdefault(number, {})[names.get(key, key)] = value
            if not written_here and number in found:
                found[number] = _counted(held, found[number], steps)
        state[held.name] = {**own, "state": found}
    state[_STEPS] = steps
    if "graph.rng" not in state:
        unknown = [key for key, value in present.items() if key.startswith("graph.") and key not in state]
        state |= {key: present[key] for key in unknown}
    return Checkpoint(state, given.path, given.about) if isinstance(given, Checkpoint) else state


def _entry_names(held: HeldOptimizer) -> Mapping[str, str]:
    kinds = [kind.__name__ for kind in type(held.optimizer).__mro__]
    return next((_ENTRIES[name] for name in kinds if name in _ENTRIES), {})


def _paths(held: HeldOptimizer, holdings: Holdings) -> dict[int, str]:
    """The paths of the optimizer's parameters in the graph, by their numbers in its state."""
    paths = {
        id(parameter): f"{name}.{path}"
        for name, module in holdings.modules.items()
        for path, parameter in module.named_parameters()
    }
    parameters = [parameter for group in held.optimizer.param_groups for parameter in group["params"]]
    return {index: paths[id(item)] for index, item in enumerate(parameters) if id(item) in paths}


def _entries(state: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """What the state holds of optimizers, by parameter."""
    found: dict[str, dict[str, Any]] = {}
    for key, value in state.items():
        path, dash, entry = key.rpartition("-")
        if dash and isinstance(value, torch.Tensor):
            found.setdefault(path, {})[entry] = value
    yield from found.items()


def _steps(value: Any) -> int:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return int(value)
    raise CheckpointError(
        f"{TRAIN_STEP} is {value!r}", hint="it is the number of steps, a tensor of one element"
    )


def _counted(held: HeldOptimizer, entries: dict[str, Any], steps: int) -> dict[str, Any]:
    """The state of a parameter with the counter of steps that PyTorch's optimizers have for each, in their order."""
    kinds = {kind.__name__ for kind in type(held.optimizer).__mro__}
    if kinds & {"Adam", "AdamW", "Adagrad", "Adadelta"}:
        return {"step": torch.tensor(float(steps)), **entries}
    return {**entries, "step": steps} if "LAMB" in kinds else entries


def _rates_at(held: HeldOptimizer, groups: Any, steps: int) -> list[dict[str, Any]]:
    if not isinstance(held.scheduler, LRScheduler):
        raise CheckpointError(
            f"the state says {steps} steps, and a {type(held.scheduler).__name__} does not tell its rate at a step",
            hint="use the scheduler of that name in flow.optim.lr_scheduler",
        )
    rates = held.scheduler.rates(steps)
    return [{**group, "lr": rate} for group, rate in zip(groups, rates, strict=True)]
