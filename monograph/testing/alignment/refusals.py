"""What `align` refuses before it runs anything: wrong arguments, and state that both sides would share."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from monograph import Graph
from monograph.capture.guards.sources.closures import closure_of
from monograph.errors import shown
from monograph.numerics.judge import same_bits
from monograph.testing.alignment.arguments import Arguments
from monograph.testing.alignment.case import Case
from monograph.testing.alignment.library_names import global_names, is_own
from monograph.testing.alignment.step import module_of
from monograph.testing.modes import Mode, find_mode


def check_target(target: Any, args: tuple[Any, ...]) -> None:
    """Raise TypeError for what cannot be aligned."""
    if isinstance(target, Graph):
        raise TypeError(
            f"align() takes a function or an nn.Module, got the graph {target.name}: align its module, which may be compared with "
            "that of another graph by against=; what two graphs do is compared by a diff of the texts of show()"
        )
    if not callable(target):
        raise TypeError(f"align() takes a function or an nn.Module, got a {type(target).__name__}")
    if isinstance(target, type) and issubclass(target, nn.Module):
        raise TypeError(
            f"align() takes a module, got the class {target.__name__}: pass {target.__name__}(...)"
        )
    held = module_of(target)
    for name, item in _reached(target, "the function", set()):
        if _has_state(item) and item is not held:
            raise TypeError(
                f"the function reaches {name} from outside: its state would change on both sides; pass the module "
                "itself, or a method of it, to align()"
            )
    for path, leaf in Arguments(args, {}).leaves():
        if isinstance(leaf, Iterator):
            raise TypeError(f"{path} is a {type(leaf).__name__}, which can be read only once: pass a list")


def _has_state(item: Any) -> bool:
    """True for what a step may change; a layer such as a distance or an activation holds nothing."""
    if isinstance(item, nn.Module):
        return any(True for _ in (*item.parameters(), *item.buffers()))
    return isinstance(item, Optimizer)


@contextmanager
def outside_tensors(target: Any) -> Iterator[Callable[[], None]]:
    """Give tensors that a function reads from outside their gradients back, and a check that it leaves their values."""
    found = dict(_reached(target, "the function", set())) if module_of(target) is None else {}
    tensors = {name: item for name, item in found.items() if isinstance(item, torch.Tensor) and item.is_leaf}
    values = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    gradients = {name: tensor.grad for name, tensor in tensors.items()}
    for tensor in tensors.values():
        tensor.grad = None

    def check() -> None:
        for name, tensor in tensors.items():
            if not same_bits(tensor, values[name]):
                with torch.no_grad():
                    tensor.copy_(values[name])
                raise TypeError(
                    f"the function changes {name} from outside, on both sides: pass it as an argument to align()"
                )

    try:
        yield check
    finally:
        for name, tensor in tensors.items():
            tensor.grad = gradients[name]


def _reached(item: Any, name: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """Everything that can be reached by name, in containers and objects too; libraries and modules are not entered."""
    if id(item) in seen:
        return
    seen.add(id(item))
    yield name, item
    if isinstance(item, (nn.Module, Optimizer, torch.Tensor, type)):
        return
    for below, part in _parts(item, name):
        yield from _reached(part, below, seen)


def _parts(item: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(item, MethodType):
        yield name, item.__func__
        yield name, item.__self__
    elif isinstance(item, functools.partial):
        yield name, item.func
        yield from (("an argument of the partial", part) for part in (*item.args, *item.keywords.values()))
    elif isinstance(item, FunctionType):
        if is_own(item.__module__):
            yield from _named(item)
    elif type(item) in (list, tuple):
        yield from ((f"{name}[{index}]", part) for index, part in enumerate(item))
    elif type(item) is dict:
        yield from ((f"{name}[{key!r}]", part) for key, part in item.items())
    elif is_own(type(item).__module__):
        yield from getattr(item, "__dict__", {}).items()
        call = getattr(type(item), "__call__", None)  # noqa: B004  its text is looked at
        yield from [(name, call)] if isinstance(call, FunctionType) else []


def _named(function: FunctionType) -> Iterator[tuple[str, Any]]:
    plain = inspect.unwrap(function)
    if not isinstance(plain, FunctionType):
        return
    scope = plain.__globals__
    yield from ((key, scope[key]) for key in global_names(plain.__code__) if key in scope)
    yield from closure_of(plain).items()


def checked_kwargs(kwargs: Any) -> dict[str, Any]:
    """The keyword arguments; raises TypeError if they are none."""
    if not isinstance(kwargs or {}, Mapping) or not all(isinstance(key, str) for key in kwargs or {}):
        raise TypeError(f"kwargs is a dict of the keyword arguments, got {shown(kwargs)}")
    return dict(kwargs or {})


def checked_modes(modes: Any) -> tuple[Mode, ...]:
    """The modes; a single one is refused with the way to write it."""
    if isinstance(modes, (str, Mode)) or not isinstance(modes, Sequence):
        one = modes.name if isinstance(modes, Mode) else modes
        raise TypeError(
            f"modes is a sequence of modes: modes=[{one!r}]" if one else "modes is a sequence of modes"
        )
    found = tuple(find_mode(mode) for mode in modes)
    if not found:
        raise ValueError("align() needs at least one mode, got none")
    names = [mode.name for mode in found]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise ValueError(f"there are two modes with the name {twice[0]!r}")
    return found


def check_options(
    against: Any, calls: Any, more: Any, seed: Any, make: Any, tolerances: Sequence[Any]
) -> None:
    """Raise TypeError or ValueError for options that mean nothing."""
    if type(calls) is not int:
        raise TypeError(f"calls is a whole number, got {shown(calls)}")
    if calls < 1:
        raise ValueError(f"align() needs at least one call, got calls={calls}")
    if isinstance(against, Graph):
        raise TypeError(
            f"against is a function, got the graph {against.name}: pass its module, or a function"
        )
    if not callable(against) and against not in ("eager", "float64"):
        raise ValueError(f'against is "eager", "float64" or a function, got {shown(against)}')
    if not isinstance(more, (list, tuple)) or not all(isinstance(args, tuple) for args in more):
        raise TypeError(
            "more is a list of tuples, one of all positional arguments for each further call: [(x,)]"
        )
    if seed is not None and (type(seed) is not int or abs(seed) >= 2**62):
        raise ValueError(f"seed is a whole number of less than 63 bits, got {shown(seed)}")
    if make is not None and (isinstance(make, Optimizer) or not callable(make)):
        raise TypeError(
            f"optimizer is a function from parameters to an optimizer, got a {type(make).__name__}"
        )
    for bound in tolerances:
        if bound is not None and (not isinstance(bound, (int, float)) or not bound >= 0):
            raise ValueError(f"rtol and atol are numbers from 0, got {shown(bound)}")


def check_more(case: Case) -> None:
    """Further calls must take gradients for the tensors of the first."""
    for number, args in enumerate(case.more):
        expected, got = len(case.arguments.tensors()), len(Arguments(args, case.arguments.kwargs).tensors())
        if got != expected:
            raise ValueError(f"more[{number}] has {got} tensors; the given arguments have {expected}")


def check_optimizer(optimizer: Any) -> Optimizer:
    """What the user's function made; raises TypeError if that is no optimizer."""
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer=... gave a {type(optimizer).__name__}, not a torch.optim.Optimizer")
    return optimizer


def check_made(call: Callable[..., Any], mode: Mode) -> Callable[..., Any]:
    """What a mode's `make` gave; raises TypeError if that cannot be called."""
    if not callable(call):
        raise TypeError(
            f"make of mode {mode.name!r} gave a {type(call).__name__}, nothing that can be called"
        )
    return call
