"""Find the state of a Graph: parameters, buffers, attribute tensors and optimizer state, each with a path."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from monograph.compat.amp import SCALER_TENSORS, is_dynamic_scaler
from monograph.compat.distributed.tensors import is_sharded, local_of
from monograph.compat.modes import outside_of_function_modes
from monograph.compat.modules import buffers_of, parameters_of
from monograph.errors import DefinitionError, OptimizerError, UnsupportedTensorError
from monograph.ir.call.sparse import HELD
from monograph.ir.port import Role
from monograph.renamed import renamed_class
from monograph.settings import Settings
from monograph.state.averages import Average
from monograph.state.spans import span


@dataclass(frozen=True)
class RegisteredOptimizer:
    """An optimizer of a Graph with its scheduler; a manual one is stepped by build() itself."""

    name: str
    optimizer: Optimizer
    scheduler: LRScheduler | None = None
    manual: bool = False
    wrapper: Any = None  # what is stepped in the place of the optimizer, which has all state
    scheduler_name: str = "lr_sch"  # of the argument by which the scheduler was given

    @property
    def stepped(self) -> Any:
        """What is stepped: the optimizer, or what is around it."""
        return self.optimizer if self.wrapper is None else self.wrapper

    @property
    def parameters(self) -> list[torch.Tensor]:
        """The parameters of all its groups, in order."""
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]


def __getattr__(name: str) -> Any:  # for pickles
    return renamed_class(__name__, name)


def _itself(item: Any) -> Any:
    return item


class WeakModules(Mapping[str, nn.Module]):
    """Modules by name, without those that are gone: nothing here keeps them alive."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._references = {name: weakref.ref(module) for name, module in modules.items()}

    def _present(self) -> dict[str, nn.Module]:
        found = ((name, reference()) for name, reference in self._references.items())
        return {name: module for name, module in found if module is not None}

    def __getitem__(self, name: str) -> nn.Module:
        return self._present()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._present())

    def __len__(self) -> int:
        return len(self._present())


@dataclass(frozen=True)
class Owned:
    """What a Graph holds. `owner` is the Graph itself, whose plain attributes are guarded."""

    owner: Any
    modules: Mapping[str, nn.Module] = field(default_factory=dict)
    optimizers: tuple[RegisteredOptimizer, ...] = ()
    scaler: Any = None
    averages: tuple[Average, ...] = ()
    private: frozenset[str] = frozenset()  # attributes of the owner that no step reads
    table: dict[str, Any] = field(default_factory=dict)  # what the owner keeps besides, and no step changes
    unwrap: Callable[[Any], Any] = _itself  # gives the module of a proxy in the owner
    whole: dict[str, str] = field(
        default_factory=dict
    )  # by name of an optimizer why it runs on no parts, or ""
    as_written: bool = False  # build() is a whole loop's body: nothing is cleared before it

    def named_modules(self) -> dict[str, nn.Module]:
        """Every module once, by its first path."""
        seen: set[int] = set()
        found: dict[str, nn.Module] = {}
        for name, root in self.modules.items():
            for path, module in root.named_modules(prefix=name, remove_duplicate=True):
                if id(module) not in seen:
                    seen.add(id(module))
                    found[path] = module
        return found

    def held_by_modules(self) -> set[int]:
        """The ids of the modules, and of their parameters and buffers."""
        roots = self.modules.values()
        return {id(item) for root in roots for item in (*root.modules(), *root.parameters(), *root.buffers())}


@dataclass(frozen=True)
class Slot:
    """A place where a state tensor lives: `container[key]`."""

    container: Any
    key: Any
    path: str
    role: Role

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor that lives there now."""
        found: torch.Tensor = self.container[self.key]
        return found


Seen = Callable[[dict[str, Any]], dict[str, Any]]


def as_it_is(table: dict[str, Any]) -> dict[str, Any]:
    """Look at the table itself."""
    return table


def module_slots(modules: Mapping[str, nn.Module], seen: Seen = as_it_is) -> Iterator[Slot]:
    """The places of parameters, buffers and plain tensor attributes of modules.

    `seen(table)` gives the table to look at in place of one that is there. Attributes that a step cannot use are none: what metrics
    have counted under torch.inference_mode().
    """
    for path, module in modules.items():
        tables = (
            (parameters_of(module), Role.PARAM),
            (buffers_of(module), Role.BUFFER),
            (module.__dict__, Role.CAPTURED),
        )
        for there, role in tables:
            table = seen(there)
            for name, tensor in list(table.items()):  # other threads may set attributes meanwhile
                if not isinstance(tensor, torch.Tensor) or (role is Role.CAPTURED and tensor.is_inference()):
                    continue
                yield Slot(table, name, f"{path}.{name}", role)


def optimizer_slots(
    registered: RegisteredOptimizer, state: Mapping[Any, Any], names: Mapping[int, str]
) -> Iterator[Slot]:
    """The places of tensors in an optimizer's state; `names` gives the path of each parameter by id."""
    for key, entries in state.items():
        owner = names.get(id(key)) if isinstance(key, torch.Tensor) else str(key)
        if owner is not None and isinstance(entries, dict):
            yield from _nested_slots(entries, f"{registered.name}/{owner}")


def scaler_slots(scaler: Any, seen: Seen = as_it_is) -> Iterator[Slot]:
    """The places of the scale and the growth tracker of a dynamic scaler."""
    if is_dynamic_scaler(scaler) and scaler.is_enabled():
        for name in SCALER_TENSORS:
            yield Slot(seen(vars(scaler)), name, f"scaler/{name.strip('_')}", Role.SCALER)


def average_slots(average: Average) -> Iterator[Slot]:
    """The places of averaged weights."""
    for name in average.weights:
        yield Slot(average.weights, name, f"ema/{average.path}/{name}", Role.EMA)


def _nested_slots(container: Any, path: str) -> Iterator[Slot]:
    items = container.items() if isinstance(container, dict) else enumerate(container)
    for key, entry in items:
        if isinstance(entry, torch.Tensor):
            yield Slot(container, key, f"{path}/{key}", Role.OPTIM)
        elif isinstance(entry, (dict, list)):
            yield from _nested_slots(entry, f"{path}/{key}")
        elif isinstance(entry, tuple) and any(isinstance(item, torch.Tensor) for item in entry):
            raise OptimizerError(
                f"optimizer state {path}/{key} is a tuple of tensors", hint="keep them in a list or a dict"
            )


def kept_parameters(owned: Owned, settings: Settings) -> list[torch.Tensor]:
    """The parameters whose gradients stay from one step to the next, and are added to as in eager mode.

    Parameters of an automatic optimizer begin each step without. Frozen ones count: optimizers and clipping look at
    every gradient that is there.
    """
    if not settings.keep_gradients:
        return []
    updated = {
        id(p) for registered in owned.optimizers if not registered.manual for p in registered.parameters
    }
    parameters = {id(p): p for module in owned.modules.values() for p in module.parameters()}
    return [p for key, p in parameters.items() if key not in updated]


def tensor_paths(modules: Mapping[str, nn.Module]) -> dict[int, str]:
    """The first path of each parameter and buffer by id of the tensor."""
    paths: dict[int, str] = {}
    for slot in module_slots(modules):
        paths.setdefault(id(slot.tensor), slot.path)
    return paths


def check_owned(owned: Owned, modules: Mapping[str, nn.Module]) -> None:
    """Refuse by name what a static graph cannot hold."""
    for path, module in modules.items():
        _check_module(path, module)
    slots = list(module_slots(modules))
    for slot in slots:
        check_tensor(slot.tensor, slot.path)
    held_modules = set(map(id, modules.values()))
    for average in owned.averages:
        if id(average.module) not in held_modules:
            raise DefinitionError(
                f"{average.path} was replaced after add_ema(): its average belongs to the module before",
                hint="replace modules first, then call add_ema()",
            )
    known = {id(slot.tensor): slot.path for slot in slots}
    owners: dict[int, str] = {}
    for registered in owned.optimizers:
        for index, group in enumerate(registered.optimizer.param_groups):
            for position, parameter in enumerate(group["params"]):
                if owners.setdefault(id(parameter), registered.name) != registered.name:
                    raise OptimizerError(
                        f"{known.get(id(parameter))} belongs to {owners[id(parameter)]} and to {registered.name}: "
                        "it would be updated twice",
                        hint="give each optimizer its own parameters",
                    )
                if id(parameter) not in known:
                    raise OptimizerError(
                        f"{registered.name} ({type(registered.optimizer).__name__}) holds {nameless(parameter)} "
                        f"(group {index}, position {position}) that no module of the graph holds",
                        hint=_about_missing(owned, modules)
                        if isinstance(parameter, nn.Parameter)
                        else _NO_PARAMETER,
                    )


_NO_PARAMETER = (
    "a module holds parameters alone: make one of it before the optimizer gets it, p = nn.Parameter(tensor.detach()), and hold "
    "that in the graph: self.held = nn.ParameterList([p])"
)


def _about_missing(owned: Owned, modules: Mapping[str, nn.Module]) -> str:
    """What to do about an optimizer whose parameters no module holds: was a part of the model replaced?"""
    updated = {id(parameter) for registered in owned.optimizers for parameter in registered.parameters}
    held = [slot for slot in module_slots(modules) if slot.role is Role.PARAM]
    num_held = sum(id(slot.tensor) in updated for slot in held)
    new = [slot.path for slot in held if slot.tensor.requires_grad and id(slot.tensor) not in updated]
    if not new:
        if num_held:
            return (
                "if a part of the model was replaced, take the parameters of the old one out of optimizer.param_groups, or "
                "make a new optimizer; else set the module that holds the missing parameter as an attribute of the Graph: "
                "self.model = model"
            )
        return "set its module as an attribute of the Graph: self.model = model"
    several = f"{new[0]} and {len(new) - 1} more can be trained and are" if len(new) > 1 else ""
    return (
        f"{several or f'{new[0]} can be trained and is'} in no optimizer: if a part of the model was replaced, make the optimizer "
        "after that, with the parameters of the new model; else set the module that holds the missing parameter as an "
        "attribute of the Graph: self.model = model"
    )


def nameless(parameter: torch.Tensor) -> str:
    """What to call a parameter that no module of the graph holds."""
    if is_lazy(parameter):
        return "a lazy parameter"
    kind = "parameter" if isinstance(parameter, nn.Parameter) else "tensor"
    return f"a {kind} of shape {tuple(parameter.shape)}"


_TRAINED = "hold its values as a parameter and put it together in build(): torch.sparse_coo_tensor(indices, values, size)"


def check_tensor(tensor: torch.Tensor, path: str) -> None:
    """Raise UnsupportedTensorError for kinds of tensors that cannot be state."""
    if is_lazy(tensor):
        return
    if is_sharded(tensor):
        return check_tensor(local_of(tensor), path)
    problem = None
    if tensor.is_inference():
        problem, hint = "was made under torch.inference_mode()", "make the module outside of inference_mode"
    elif tensor.is_nested:
        problem, hint = "is a nested tensor", "hold a padded tensor and a mask, or a list of tensors"
    elif tensor.is_quantized:
        problem, hint = "is quantised", "use the float module"
    elif tensor.layout in HELD and (tensor.requires_grad or isinstance(tensor, nn.Parameter)):
        problem, hint = f"is {tensor.layout} and requires grad", _TRAINED
    elif tensor.layout not in (torch.strided, *HELD):
        problem, hint = (
            f"is {tensor.layout}",
            "static graphs hold dense tensors, and sparse ones in COO, CSR and CSC",
        )
    elif type(tensor) not in (torch.Tensor, nn.Parameter):
        kind = f"{type(tensor).__module__}.{type(tensor).__qualname__}"
        problem, hint = f"is a {kind}, a subclass of Tensor", "static graphs hold plain tensors"
    if problem is not None:
        raise UnsupportedTensorError(f"{path} {problem}", hint=hint)


def _check_module(path: str, module: nn.Module) -> None:
    kind = type(module)
    if kind.__name__ in (
        "FullyShardedDataParallel",
        "DataParallel",
    ):
        raise UnsupportedTensorError(
            f"{path} is wrapped by {kind.__name__}",
            hint="give the graph the module inside (`.module`); the wrapper synchronises in ways a graph cannot see",
        )
    if isinstance(module, torch.jit.ScriptModule):
        raise UnsupportedTensorError(f"{path} is a TorchScript module", hint="use the Python module")


def overlapping(slots: Mapping[str, torch.Tensor]) -> list[tuple[str, str]]:
    """Pairs of different state tensors whose memory overlaps."""
    with outside_of_function_modes():  # of a trace, which would show a fake
        found = [(span(tensor), path, tensor) for path, tensor in slots.items()]
    pairs = []
    for index, ((start, end), path, tensor) in enumerate(found):
        for (other_start, other_end), other_path, other in found[index + 1 :]:
            if tensor is not other and max(start, other_start) < min(end, other_end):
                pairs.append((path, other_path))
    return pairs
