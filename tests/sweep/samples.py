"""The samples of a case: what is called, with which arguments, and how it is aligned."""

from __future__ import annotations

import copy
import functools
import itertools
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.testing._internal import common_methods_invocations
from torch.utils._pytree import tree_map_only

from monograph.testing import align
from tests.sweep.cases import DEVICE, DTYPE, MODULES, OPS, OPTIMIZERS, SweepCase, configurations

# these leave values to what the memory held before, lstsq by LAPACK's gelsy, whose pivots torch never sets
_READ_OLD_MEMORY = frozenset(
    {
        "empty",
        "empty_like",
        "empty_permuted",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
        "linalg.lstsq",
        "linalg.lstsq.grad_oriented",
    }
)

MOST = 10  # samples per case: the databases hold up to thousands for one op


@dataclass(frozen=True)
class Sample:
    """One call of `align`."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    fresh_memory: bool = False  # new memory is filled, alike on both sides

    def align(self) -> None:
        """Compare Monograph with eager on this sample; raises what `align` raises."""
        torch.use_deterministic_algorithms(self.fresh_memory)  # fills new memory too
        align(self.function, *self.args, kwargs=dict(self.kwargs), **self.options)


def samples_of(case: SweepCase, most: int = MOST, *, number: int = 0) -> list[Sample]:
    """The first samples of a case, the same in every process; another `number` gives other values."""
    seed(number)
    return list(itertools.islice(_SOURCES[case.database](case), most))


def seed(number: int = 0) -> None:
    """Set every generator that the databases draw from."""
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def _of_op(case: SweepCase) -> Any:
    # the tables seed before each random op, which is nothing to capture; align seeds before each call
    common_methods_invocations.wrapper_set_seed = _without_seed
    op, grad = OPS[case.name], case.part == "backward"
    for sample in op.sample_inputs(DEVICE, DTYPE, requires_grad=grad):
        args, kwargs = tree_map_only(torch.Tensor, _leaf, ((sample.input, *sample.args), sample.kwargs))
        functions = {name: value for name, value in kwargs.items() if callable(value)}
        function = (
            functools.partial(op, **functions) if functions else op
        )  # a function is no argument of a graph
        if grad:
            function = _followed_by(sample.output_process_fn_grad, function)
        given = {name: value for name, value in kwargs.items() if name not in functions}
        yield Sample(function, args, given, {"grad": grad}, case.name in _READ_OLD_MEMORY)


def _without_seed(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return op(*args, **kwargs)


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without its history: a graph takes leaves of autograd only."""
    return tensor if tensor.is_leaf else tensor.detach().requires_grad_()


def _followed_by(after: Callable[[Any], Any], op: Callable[..., Any]) -> Callable[..., Any]:
    """The op and what makes its results comparable: an eigenvector, say, has a gradient only up to its phase."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return after(op(*args, **kwargs))

    return call


def _of_module(case: SweepCase) -> Any:
    info, training = MODULES[case.name], case.part == "train"
    inputs = info.module_inputs_func(
        info, device=DEVICE, dtype=DTYPE, requires_grad=training, training=training
    )
    for item in inputs:
        given, forward = item.constructor_input, item.forward_input
        # the table makes the random samples of fractional pooling in double precision, which torch refuses
        kwargs = tree_map_only(
            torch.Tensor, lambda t: t.to(DTYPE) if t.is_floating_point() else t, given.kwargs
        )
        module = info.module_cls(*given.args, **kwargs).train(training)
        yield Sample(module, tuple(forward.args), forward.kwargs, {"grad": training})


def _of_optimizer(case: SweepCase) -> Any:
    kwargs = configurations(case.name)[case.part].kwargs
    kind = OPTIMIZERS[case.name].optim_cls

    def make(parameters: Any) -> torch.optim.Optimizer:
        return kind(
            parameters, **copy.deepcopy(kwargs)
        )  # a learning rate may be a tensor, which sides may not share

    # without biases, since Muon takes matrices only
    module = nn.Sequential(nn.Linear(5, 8, bias=False), nn.Tanh(), nn.Linear(8, 3, bias=False))
    yield Sample(module, (torch.randn(4, 5),), {}, {"optimizer": make, "calls": 4})


_SOURCES: Mapping[str, Callable[[SweepCase], Any]] = {
    "op_db": _of_op,
    "module_db": _of_module,
    "optim_db": _of_optimizer,
}
