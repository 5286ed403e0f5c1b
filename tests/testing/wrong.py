"""Wrong ways to run a step, each with the smallest case that must show it. None of them may pass `align`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import monograph as mg
from monograph.internals.internals import internals_of
from monograph.testing import Mode

Run = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Wrong:
    """A fault, where it shows, and a part of what must be said of it."""

    name: str
    make: Callable[[mg.Graph], Run]
    told: str
    target: Callable[..., Any] = torch.sin
    arguments: Callable[[], tuple[Any, ...]] = lambda: (torch.randn(3, 4),)
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        return self.name

    @property
    def mode(self) -> Mode:
        return Mode(self.name.replace(" ", "_"), self.make)


def with_result(change: Callable[..., Any]) -> Callable[[mg.Graph], Run]:
    """The graph with a changed result; `change(result, args, number of the call)`."""

    def make(graph: mg.Graph) -> Run:
        count = 0

        def run(args: Any, kwargs: Any, given: Any) -> Any:
            nonlocal count
            count += 1
            returned = graph(args, kwargs, given)
            return dataclasses.replace(returned, result=change(returned.result, args, count))

        return run

    return make


def after(change: Callable[..., None]) -> Callable[[mg.Graph], Run]:
    """The graph, and a change of what it left behind; `change(graph, args, returned)`."""

    def make(graph: mg.Graph) -> Run:
        def run(args: Any, kwargs: Any, given: Any) -> Any:
            returned = graph(args, kwargs, given)
            with torch.no_grad():
                change(graph, args, returned)
            return returned

        return run

    return make


def in_data(tensor: torch.Tensor, change: Callable[[torch.Tensor], Any]) -> torch.Tensor:
    """The same tensor with other numbers."""
    with torch.no_grad():
        tensor.data.copy_(change(tensor.data))
    return tensor


def one_ulp(result: torch.Tensor, _args: Any, _count: int) -> torch.Tensor:
    def bump(data: torch.Tensor) -> torch.Tensor:
        bumped = data.clone()
        bumped.view(-1)[5] = torch.nextafter(data.view(-1)[5], torch.tensor(9.0))
        return bumped

    return in_data(result, bump)


def backward(graph: mg.Graph, args: Any, _returned: Any) -> None:
    if args[0].grad is not None:
        args[0].grad.mul_(1 + 2**-22)


def parameter_gradient(_graph: mg.Graph, _args: Any, returned: Any) -> None:
    for gradient in returned.parameter_gradients.values():
        gradient.view(-1)[0] += 1.0


def weights(graph: mg.Graph, args: Any, _returned: Any) -> None:
    if graph.backward is not None:
        graph.module.weight.view(-1)[-1] += 1e-6


def optimizer_state(graph: mg.Graph, _args: Any, _returned: Any) -> None:
    if graph.backward is not None:
        sgd = internals_of(graph).registry.optimizers[0].optimizer
        next(iter(sgd.state.values()))["momentum_buffer"].mul_(1.0001)


def buffer(graph: mg.Graph, _args: Any, _returned: Any) -> None:
    graph.module.num_batches_tracked.sub_(1)


def random_state(_graph: mg.Graph, _args: Any, _returned: Any) -> None:
    torch.rand(1)


def nothing_in_place(graph: mg.Graph) -> Run:
    """Works on copies of its arguments."""

    def run(args: Any, kwargs: Any, given: Any) -> Any:
        return graph(
            tuple(a.detach().clone() if isinstance(a, torch.Tensor) else a for a in args), kwargs, given
        )

    return run


def shared_buffer(graph: mg.Graph) -> Run:
    """Gives its result in one piece of memory, again and again."""
    kept: list[torch.Tensor] = []

    def run(args: Any, kwargs: Any, given: Any) -> Any:
        returned = graph(args, kwargs, given)
        if returned.result.requires_grad:
            return returned
        kept[:] = kept or [torch.empty_like(returned.result)]
        kept[0].copy_(returned.result)
        return dataclasses.replace(returned, result=kept[0])

    return run


def stale(graph: mg.Graph) -> Run:
    """Keeps the arguments of its first call."""
    first: list[Any] = []

    def run(args: Any, kwargs: Any, given: Any) -> Any:
        first[:] = first or [tuple(a.clone() if isinstance(a, torch.Tensor) else a for a in args)]
        for argument, kept in zip(args, first[0], strict=True):
            if isinstance(argument, torch.Tensor):
                in_data(argument, lambda _, kept=kept: kept)
        return graph(args, kwargs, given)

    return run


def stale_number(graph: mg.Graph) -> Run:
    """Keeps the Python number of its first call."""
    first: list[Any] = []

    def run(args: Any, kwargs: Any, given: Any) -> Any:
        first[:] = first or [args[1]]
        return graph((args[0], first[0]), kwargs, given)

    return run


def only_strided(result: torch.Tensor, args: Any, _count: int) -> torch.Tensor:
    return result if args[0].is_contiguous() else in_data(result, lambda data: data + 1)


def only_shifted(result: torch.Tensor, args: Any, _count: int) -> torch.Tensor:
    return in_data(result, lambda data: data + 1) if args[0].storage_offset() else result


def other_stride(result: torch.Tensor, _args: Any, _count: int) -> torch.Tensor:
    return result.t().contiguous().t()


def positive_zero(result: torch.Tensor, _args: Any, _count: int) -> torch.Tensor:
    return in_data(result, lambda data: data + 0.0)


def changed_module(change: Callable[[Any], Any]) -> Callable[[mg.Graph], Run]:
    """The graph, and a change of its module."""
    return after(lambda graph, _args, _returned: change(graph.module))


def gradient_left(graph: mg.Graph, _args: Any, _returned: Any) -> None:
    graph.module.weight.grad = torch.full_like(graph.module.weight, 7.0)


def other_parameter(graph: mg.Graph, _args: Any, _returned: Any) -> None:
    if graph.backward is None:
        graph.module.weight = nn.Parameter(graph.module.weight.detach().clone())


def learning_rate(graph: mg.Graph, _args: Any, _returned: Any) -> None:
    if graph.backward is not None:
        internals_of(graph).registry.optimizers[0].optimizer.param_groups[0]["lr"] = 5.0


def drawn_elsewhere(_graph: mg.Graph, _args: Any, _returned: Any) -> None:
    np.random.rand()


def gradient_buffer(graph: mg.Graph) -> Run:
    """Gives the gradient of its argument in one piece of memory, again and again."""
    kept: list[torch.Tensor] = []

    def run(args: Any, kwargs: Any, given: Any) -> Any:
        returned = graph(args, kwargs, given)
        if args[0].grad is not None:
            kept[:] = kept or [torch.empty_like(args[0].grad)]
            kept[0].copy_(args[0].grad)
            args[0].grad = kept[0]
        return returned

    return run


def earlier_arguments(graph: mg.Graph) -> Run:
    """Writes into the arguments of the call before."""
    before: list[torch.Tensor] = []

    def run(args: Any, kwargs: Any, given: Any) -> Any:
        returned = graph(args, kwargs, given)
        for tensor in before:
            in_data(tensor, lambda data: data * 2)
        before[:] = [args[0]]
        return returned

    return run


def kept_result(graph: mg.Graph) -> Run:
    """Gives the same tensor again, which has the right values."""
    first: list[Any] = []

    def run(args: Any, kwargs: Any, given: Any) -> Any:
        first[:] = first or [graph(args, kwargs, given)]
        return first[0]

    return run


def frozen_weights(graph: mg.Graph) -> Run:
    """Computes with the weights and buffers of its first call, where they are not updated."""
    first: dict[str, torch.Tensor] = {}

    def run(args: Any, kwargs: Any, given: Any) -> Any:
        if graph.backward is not None:
            return graph(args, kwargs, given)
        now = {name: tensor.clone() for name, tensor in graph.module.state_dict().items()}
        first.update(first or now)
        graph.module.load_state_dict(first)
        returned = graph(args, kwargs, given)
        graph.module.load_state_dict(now)
        return returned

    return run


def frozen_learning_rate(graph: mg.Graph) -> Run:
    """Updates with the learning rate of its first call."""
    first: list[float] = []

    def run(args: Any, kwargs: Any, given: Any) -> Any:
        if graph.backward is None:
            return graph(args, kwargs, given)
        group = internals_of(graph).registry.optimizers[0].optimizer.param_groups[0]
        now = group["lr"]
        first[:] = first or [now]
        group["lr"] = first[0]
        returned = graph(args, kwargs, given)
        group["lr"] = now
        return returned

    return run


def gradient_replaced(graph: mg.Graph) -> Run:
    """Drops the gradient to which it should add."""

    def run(args: Any, kwargs: Any, given: Any) -> Any:
        args[0].grad = None
        return graph(args, kwargs, given)

    return run


def same_sparse(result: torch.Tensor, _args: Any, _count: int) -> torch.Tensor:
    values = result._values() + 0.0
    return torch.sparse_coo_tensor(result._indices(), values, result.shape, check_invariants=False)


def negative_sparse(x: torch.Tensor) -> torch.Tensor:
    return x.to_sparse() * -0.0


def lazily_conjugated(x: torch.Tensor) -> torch.Tensor:
    return (x + 1).conj()


WRONG = (
    Wrong("one unit in the last place", with_result(one_ulp), "result[1, 1]: expected"),
    Wrong("wrong only in backward", after(backward), "gradient of args[0]"),
    Wrong("gradient of a parameter", after(parameter_gradient), "gradient of weight", nn.Linear(4, 2)),
    Wrong("only updated weights", after(weights), "parameter weight", nn.Linear(4, 2)),
    Wrong("only optimizer state", after(optimizer_state), "optimizer state[0][", nn.Linear(4, 2)),
    Wrong("buffer not counted", after(buffer), "buffer num_batches_tracked", nn.BatchNorm1d(4)),
    Wrong(
        "only on the second call",
        with_result(lambda result, _args, count: in_data(result, lambda d: d * 2) if count == 2 else result),
        "call       2 of 3",
    ),
    Wrong(
        "only for strided input",
        with_result(only_strided),
        "12 of 12 elements differ",
        arguments=lambda: (torch.randn(4, 3).t(),),
    ),
    Wrong("only for unaligned input", with_result(only_shifted), "call       3 of 3"),
    Wrong("dtype", with_result(lambda result, *_: result.double()), "has another dtype"),
    Wrong("strides", with_result(other_stride), "has another stride"),
    Wrong(
        "container",
        with_result(lambda result, *_: list(result)),
        "has another form",
        torch.split,
        kwargs={"split_size_or_sections": 2},
    ),
    Wrong("requires_grad lost", with_result(lambda result, *_: result.detach()), "has another requires_grad"),
    Wrong("shared output buffer", shared_buffer, "result of call 1 was changed by a later call"),
    Wrong("stale argument", stale, "call       2 of 3"),
    Wrong("stale number", stale_number, "call       3 of 3", torch.mul, lambda: (torch.randn(3), 1.5)),
    Wrong("in-place effect lost", nothing_in_place, "args[0] afterwards", torch.Tensor.relu_),
    Wrong(
        "memory of the argument",
        with_result(
            lambda result, args, _: in_data(args[0].view(-1), lambda _: result.reshape(-1)).view(3, 4)
        ),
        "args[0]",
        torch.sin,
    ),
    Wrong(
        "own memory in place of a view",
        with_result(lambda result, *_: result.clone()),
        "shares the memory of",
        torch.Tensor.t,
    ),
    Wrong("random numbers drawn besides", after(random_state), "random state", F.dropout),
    Wrong(
        "sign of zero",
        with_result(positive_zero),
        "expected -0.0, got 0.0",
        torch.neg,
        lambda: (torch.zeros(3),),
    ),
    Wrong(
        "results in another order",
        with_result(lambda result, *_: type(result)((result[0], result[1].flip(0)))),
        "result.indices",
        torch.sort,
        lambda: (torch.tensor([3.0, 1.0, 2.0]),),
    ),
    Wrong("gradient left behind", after(gradient_left), "gradient of weight, left behind", nn.Linear(4, 2)),
    Wrong(
        "buffer exchanged",
        changed_module(lambda module: setattr(module, "running_mean", module.running_mean.clone())),
        "buffer running_mean is another tensor",
        nn.BatchNorm1d(4),
    ),
    Wrong(
        "memory of a weight exchanged",
        changed_module(lambda module: setattr(module.weight, "data", module.weight.data.clone())),
        "parameter weight is another tensor",
        nn.Linear(4, 2),
    ),
    Wrong(
        "parameter exchanged", after(other_parameter), "parameter weight is another tensor", nn.Linear(4, 2)
    ),
    Wrong("learning rate changed", after(learning_rate), 'optimizer groups[0]["lr"]', nn.Linear(4, 2)),
    Wrong("mode of a module", changed_module(nn.Module.eval), "attribute training", nn.Linear(4, 2)),
    Wrong(
        "attribute of a module",
        changed_module(lambda module: setattr(module, "in_features", 9)),
        "attribute in_features",
        nn.Linear(4, 2),
    ),
    Wrong("numbers drawn from numpy", after(drawn_elsewhere), "random state"),
    Wrong("shared buffer of gradients", gradient_buffer, "gradient of args[0] of call 1 was changed"),
    Wrong("earlier arguments overwritten", earlier_arguments, "args[0] afterwards of call 1 was changed"),
    Wrong("result given again", kept_result, "result has the memory of result of call 1", torch.zeros_like),
    Wrong("frozen weights", frozen_weights, "call       3 of 3", nn.Linear(4, 2)),
    Wrong("frozen buffers", frozen_weights, "call       3 of 3", nn.BatchNorm1d(4).eval()),
    Wrong("frozen learning rate", frozen_learning_rate, "parameter weight", nn.Linear(4, 2)),
    Wrong("gradient replaced", gradient_replaced, "gradient of args[0]"),
    Wrong(
        "autograd history cut",
        with_result(lambda result, *_: result.detach().requires_grad_(result.requires_grad)),
        "has another is_leaf",
    ),
    Wrong(
        "conjugated at once",
        with_result(lambda result, *_: result.resolve_conj()),
        "has another is_conj",
        lazily_conjugated,
        lambda: (torch.randn(3, dtype=torch.complex64),),
    ),
    Wrong("sign of zero in a sparse tensor", with_result(same_sparse), "result", negative_sparse),
    Wrong(
        "eight bits",
        with_result(lambda result, *_: (result.float() + 1).to(torch.float8_e4m3fn)),
        "3 of 3 elements differ",
        lambda x: x.to(torch.float8_e4m3fn),
        lambda: (torch.ones(3),),
    ),
)
