"""transformers: its Trainer, with each step a call of a Graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType
from torch import nn
from transformers import Trainer, TrainerCallback

import monograph as mg
from monograph.config import GraphConfig
from monograph.integrations.last_step import LastStep
from monograph.internals.internals import internals_of
from monograph.numerics.verify import VerifyReport

# of TrainingArguments: what no graph heeds, with what it is where nothing is asked for
_NOT_HEEDED = {"torch_compile": False, "torch_empty_cache_steps": None}
_IN_BACKWARD = ("lomo", "layerwise")  # in names of optimizers that update while gradients are made


class TrainerStep(mg.Graph):
    """What a Trainer does with a batch: forward, loss and backward; after the last of a step also clipping and the update.

    It gives the loss, and the norm of the gradients if there was an update.
    """

    def __init__(self, trainer: GraphTrainer, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__()
        self.model = model
        self.trainer = trainer
        self.accumulates = trainer.args.gradient_accumulation_steps > 1
        advised = internals_of(self).advised
        advised.expected.add("optimizer_steps")
        advised.drop_last = "TrainingArguments(dataloader_drop_last=True)"
        advised.configured_by("GraphTrainer(configure=function)", "docs/integrations/transformers.md")
        self.add_optimizer(optimizer, manual=self.accumulates)
        if self.accumulates:
            self.config.keep_gradients()

    def build(
        self, inputs: dict[str, Any], num_items_in_batch: Any, optimizer_steps: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The order is that of the Trainer's own loop, which is asked for each part."""
        trainer = self.trainer
        its_own: Any = super(GraphTrainer, trainer)
        loss = its_own.training_step(self.model, inputs, num_items_in_batch)
        if not optimizer_steps:
            return loss, None
        norm = its_own._clip_grad_norm(self.model) if trainer.args.max_grad_norm > 0 else None
        norm = its_own._get_grad_norm(self.model, grad_norm=norm)
        if self.accumulates:  # else the graph does both
            _inside(trainer.optimizer).step()
            self.model.zero_grad()
        return loss, norm


class GraphTrainer(Trainer):
    """A Trainer whose steps are calls of a Graph: forward, `compute_loss`, backward, clipping and the optimizer.

    `configure` gets the `config` of the graph, which is at `graph` from the first step on. For another Trainer write
    `class Mine(GraphTrainer, Seq2SeqTrainer)`. Raises DefinitionError at the first step for what a graph would not heed.

    >>> class Mine(GraphTrainer):
    ...     def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
    ...         return model(**inputs).logits.square().mean()
    """

    def __init__(
        self, *args: Any, configure: Callable[[GraphConfig], None] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.graph: TrainerStep | None = None
        self._graphed: Any = None  # the optimizer of the graph
        self._configure = configure
        self._norm: torch.Tensor | None = None  # of the gradients of the last step
        self._last = LastStep()
        self._architectures = [type(self.model).__name__]

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """One call of the graph."""
        if self.graph is None or self._graphed is not self.optimizer:
            _check(self)
            self.graph, self._graphed = TrainerStep(self, model, _inside(self.optimizer)), self.optimizer
            if self._configure is not None:
                self._configure(self.graph.config)
        _settle(self.model, self._architectures)
        if getattr(self, "_mixed_mesh_grads", False) is None:  # what the Trainer finds out in its first step
            self._mixed_mesh_grads = False
        model.train()
        prepared, optimizer_steps = self._prepare_inputs(inputs), self.accelerator.sync_gradients
        self._last.add(prepared, num_items_in_batch, optimizer_steps, optimizer_steps=optimizer_steps)
        loss, self._norm = self.graph(prepared, num_items_in_batch, optimizer_steps)
        return loss

    def verify(self, **options: Any) -> VerifyReport:
        """The last step once more, as the graph and eagerly, by `graph.verify()`: same options. Nothing is changed.

        Its arguments are those of the Trainer, and the model is in training mode for it. With gradient accumulation the
        batches before it are taken first. Raises DefinitionError before the first step.
        """
        if self.graph is None or not self._last:
            raise mg.DefinitionError(
                "verify() of a Trainer that has made no step",
                hint="call it after train(), or in a callback's on_step_end()",
            )
        _settle(self.model, self._architectures)
        with _training(self.model):
            return self._last.verify(self.graph, **options)

    # the Trainer asks for these after the last batch of a step, then steps an optimizer that has no gradients any more

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor | None:
        return self._norm

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> torch.Tensor | None:
        return self._norm


@contextmanager
def _training(model: nn.Module) -> Iterator[None]:
    """Inside, a model is in the mode that it has in a step."""
    modes = [(module, module.training) for module in model.modules()]
    model.train()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def _settle(model: nn.Module, architectures: list[str]) -> None:
    """Write into the configuration what each saving writes there: a step depends on it.

    `architectures` is to be the same list each time; saving puts an equal one there.
    """
    config = getattr(model, "config", None)
    if config is None or getattr(config, "architectures", "") not in (None, architectures):
        return
    config.architectures = architectures
    if getattr(config, "dtype", "") is None and isinstance(
        dtype := getattr(model, "dtype", None), torch.dtype
    ):
        config.dtype = str(dtype).removeprefix("torch.")


def _inside(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer in the wrapper of accelerate, which steps or not by state of its own."""
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    assert isinstance(optimizer, torch.optim.Optimizer)
    return optimizer


def _check(trainer: GraphTrainer) -> None:
    """Raise DefinitionError for what a graph would not heed."""
    for problem, hint in _problems(trainer):
        raise mg.DefinitionError(problem, hint=hint)


def _problems(trainer: GraphTrainer) -> Iterator[tuple[str, str]]:
    args, accelerator = trainer.args, trainer.accelerator
    kind = accelerator.distributed_type
    if kind != DistributedType.NO or args.n_gpu > 1:
        how = kind.value if kind != DistributedType.NO else f"{args.n_gpu} devices"
        yield f"GraphTrainer is for one process and one device; here is {how}", "start it for one device"
    if accelerator.scaler is not None:
        yield "fp16 scales gradients outside of the step", "TrainingArguments(bf16=True)"
    for name, unused in _NOT_HEEDED.items():
        if (value := getattr(args, name, unused)) != unused:
            yield (
                f"{name}={value!r} asks for what no graph heeds",
                "leave it out; GraphTrainer(configure=...) sets the backend",
            )
    if any(part in str(args.optim) for part in _IN_BACKWARD):
        yield (
            f"the optimizer {args.optim!s} updates while gradients are made, and a step does so at its end",
            'choose another one, for example optim="adamw_torch"',
        )
    for callback in trainer.callback_handler.callbacks:
        if type(callback).on_pre_optimizer_step is not TrainerCallback.on_pre_optimizer_step:
            yield (
                f"the callback {type(callback).__name__} has on_pre_optimizer_step(): that is in the middle of the step",
                "do it in compute_loss(), or after the step in on_optimizer_step()",
            )
