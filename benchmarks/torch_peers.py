"""The competitors that run PyTorch: eager, the two ways to compile, and Monograph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import monograph as mg
from benchmarks.competitor import Competitor
from benchmarks.peers import OWN_PREFIX, REFERENCE
from benchmarks.setting import Setting
from benchmarks.workload import Update, Workload, seeded_batches, seeded_model
from monograph.compat.autograd import trace_backward_in_compile

OPTIMIZER_FLAGS = {"foreach": {"foreach": True}, "fused": {"fused": True}, "single": {"foreach": False}}


@dataclass(frozen=True)
class Parts:
    """What every step is made of."""

    model: nn.Module
    optimizer: Optimizer
    loss: Callable[[Tensor, Tensor], Tensor]

    def forward(self, *batch: Tensor) -> Tensor:
        """The loss of a batch, whose last tensor is the target."""
        *inputs, target = batch
        return self.loss(self.model(*inputs), target)


def torch_competitor(workload: Workload, peer: str, setting: Setting) -> Competitor:
    """The step of a peer that runs PyTorch."""
    model, batches = seeded_model(workload), seeded_batches(workload)
    if setting.channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        batches = [tuple(map(channels_last, batch)) for batch in batches]
    parts = Parts(model, make_optimizer(workload.update, model, setting.optimizer), workload.loss)
    graph = own_step(parts, peer.removeprefix(OWN_PREFIX)) if peer.startswith(OWN_PREFIX) else None
    step = graph or STEPS[peer](parts, setting)
    return Competitor(
        step,
        batches,
        read=lambda loss: float(loss.item()),
        parameters=lambda: {name: item.detach().numpy() for name, item in model.named_parameters()},
        capture_seconds=lambda: (
            None if graph is None else sum(build.stages[0].seconds for build in graph.builds)
        ),
    )


def make_optimizer(update: Update, model: nn.Module, how: str) -> Optimizer:
    """The optimizer of a workload in one of its implementations."""
    flags: dict[str, Any] = OPTIMIZER_FLAGS[how]
    if update.kind == "adamw":
        return AdamW(model.parameters(), lr=update.lr, weight_decay=update.weight_decay, **flags)
    return SGD(
        model.parameters(),
        lr=update.lr,
        momentum=update.momentum,
        weight_decay=update.weight_decay,
        **flags,
    )


def channels_last(tensor: Tensor) -> Tensor:
    """Images with their channels last in memory; other tensors as they are."""
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor


def eager_step(parts: Parts, _setting: Setting) -> Callable[..., Tensor]:
    """The usual four lines."""

    def step(*batch: Tensor) -> Tensor:
        parts.optimizer.zero_grad()
        loss = parts.forward(*batch)
        loss.backward()
        parts.optimizer.step()
        return loss

    return step


def compiled_step(parts: Parts, setting: Setting) -> Callable[..., Tensor]:
    """Model and loss compiled as one function, the update as another one."""
    options = compile_options(setting)
    forward = torch.compile(parts.forward, options=options)
    update: Callable[[], Any] = parts.optimizer.step
    if setting.compiled_update:
        update = torch.compile(update, options=options)

    def step(*batch: Tensor) -> Tensor:
        parts.optimizer.zero_grad()
        loss: Tensor = forward(*batch)
        loss.backward()
        update()
        return loss

    return step


def whole_compiled_step(parts: Parts, setting: Setting) -> Callable[..., Tensor]:
    """The whole step compiled as one function, which torch cuts in two before the update."""
    trace_backward_in_compile()

    def step(*batch: Tensor) -> Tensor:
        loss = parts.forward(*batch)
        loss.backward()
        loss = loss.detach()  # a loss that still knows its backward pass would not let torch trace that
        parts.optimizer.step()
        parts.optimizer.zero_grad()
        return loss

    compiled: Callable[..., Tensor] = torch.compile(step, options=compile_options(setting))
    return compiled


def own_step(parts: Parts, backend: str) -> mg.Graph:
    """The step as a graph."""
    graph = mg.train_graph(parts.model, parts.loss, parts.optimizer)
    graph.config.backend(backend)
    return graph


def compile_options(setting: Setting) -> dict[str, Any] | None:
    """The options of torch.compile."""
    return {"cpp_wrapper": True} if setting.cpp_wrapper else None


STEPS: dict[str, Callable[[Parts, Setting], Callable[..., Tensor]]] = {
    REFERENCE: eager_step,
    "eager": eager_step,
    "compile": compiled_step,
    "compile-step": whole_compiled_step,
}
