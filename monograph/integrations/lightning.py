"""Lightning: its Trainer, by a strategy that makes each step of the optimizer one call of a Graph."""

from __future__ import annotations

import dis
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

import monograph as mg
from monograph.config import GraphConfig
from monograph.integrations.last_step import LastStep
from monograph.internals.internals import internals_of
from monograph.numerics.verify import VerifyReport

# hooks between forward and update
_HOOKS_OF_STEP = ("on_before_backward", "on_after_backward", "on_before_optimizer_step")
_ALL_NAMES = frozenset({"locals", "vars", "dir", "eval", "exec"})  # functions that may read any variable
# a value by its name, and what log() got besides
_Logged = dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]]
_LOGGED: ContextVar[_Logged | None] = ContextVar("logged", default=None)  # in a step: what it has logged


class LightningStep(mg.Graph):
    """A step of a LightningModule: `training_step`, backward, the module's hooks, clipping, and the optimizer.

    It gives what `training_step` gives, and what was logged in the step.
    """

    def __init__(self, trainer: Trainer, module: LightningModule) -> None:
        super().__init__()
        self.module = module
        self.trainer = trainer
        self.accumulates = _accumulates(trainer)
        advised = internals_of(self).advised
        advised.expected.add("optimizer_steps")
        advised.configured_by("GraphStrategy(configure=function)", "docs/integrations/lightning.md")
        self.add_optimizer(trainer.optimizers[0], manual=self.accumulates)
        if self.accumulates:
            self.config.keep_gradients()
        self.set_grad_scaler(getattr(trainer.precision_plugin, "scaler", None))

    def build(self, batch: Any, batch_idx: int | None, optimizer_steps: bool) -> tuple[Any, _Logged]:
        """The order is that of Lightning's own loop; `optimizer_steps` is False for batches before the last one of a step."""
        module, trainer, logged = self.module, self.trainer, _Logged()
        outer = _LOGGED.set(logged)
        try:
            with trainer.precision_plugin.train_step_context():
                output = module.training_step(*((batch,) if batch_idx is None else (batch, batch_idx)))
            loss = output["loss"] if isinstance(output, Mapping) else output
            if loss is None:
                raise mg.DefinitionError(
                    f"{type(trainer.lightning_module).__name__}.training_step() gave None, and a step needs its loss",
                    hint="leave such batches out in the loader",
                )
            loss = loss / trainer.accumulate_grad_batches
            module.on_before_backward(loss)
            module.backward(loss)
            module.on_after_backward()
            if optimizer_steps:
                self.before_update(module, trainer.optimizers[0])
        finally:
            _LOGGED.reset(outer)
        return output, logged

    def before_update(self, module: Any, optimizer: Any) -> None:
        """What comes before the update, and if several batches are accumulated the update as well."""
        module.on_before_optimizer_step(optimizer)
        limit, algorithm = self.trainer.gradient_clip_val, self.trainer.gradient_clip_algorithm
        module.configure_gradient_clipping(optimizer, limit, algorithm)
        if self.accumulates:
            optimizer.step()
            optimizer.zero_grad()


class GraphStrategy(SingleDeviceStrategy):
    """A strategy of Lightning for one device: the whole step of a LightningModule, by a Graph.

    `training_step`, backward, the module's hooks in between, clipping and the optimizer are captured once; what they log
    is logged at each step. `configure` gets the `config` of the graph, which is at `graph` from the beginning of `fit`.
    The device is the first of the accelerator if none is given. Raises DefinitionError for what a graph would not heed.

    >>> strategy = GraphStrategy(configure=lambda config: config.backend("exact"))
    >>> trainer = Trainer(strategy=strategy, max_epochs=3, accelerator="cpu", logger=False)
    """

    graph: LightningStep

    def __init__(
        self,
        device: str | torch.device | None = None,
        *,
        configure: Callable[[GraphConfig], None] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(device or "cpu", **options)
        # the Trainer fills in both, as it does for strategies of several devices
        self.parallel_devices = [] if device is None else [torch.device(device)]
        self.num_nodes = 1
        self._configure = configure
        self._updates = False  # whether the present batch is the last of its step
        self._last = LastStep()

    @property
    def root_device(self) -> torch.device:
        """The device; if none was given, the first of the Trainer."""
        return next(iter(self.parallel_devices), torch.device("cpu"))

    def setup(self, trainer: Trainer) -> None:
        """As of other strategies; for `fit` it makes the graph."""
        super().setup(trainer)
        if trainer.state.fn != TrainerFn.FITTING:
            return
        assert self.lightning_module is not None
        _check(trainer, self.lightning_module)
        self.lightning_module.log = partial(_log, self.lightning_module)
        if _accumulates(
            trainer
        ):  # it would come after the first batch of a step, whose gradients are there already
            self.lightning_module.optimizer_zero_grad = _nothing
        self._reads_index = _reads_second(self.lightning_module.training_step)
        self._make_graph(trainer, self.lightning_module)

    def _make_graph(self, trainer: Trainer, module: LightningModule) -> None:
        self.graph, self._graphed = LightningStep(trainer, module), trainer.optimizers[0]
        if self._configure is not None:
            self._configure(self.graph.config)

    def teardown(self) -> None:
        """As of other strategies; the module has its own hooks again."""
        if self.lightning_module is not None:
            self.lightning_module.__dict__.pop("optimizer_zero_grad", None)
        super().teardown()

    def training_step(self, batch: Any, batch_idx: int | None = None) -> Any:
        """One call of the graph; what it has logged is logged by Lightning."""
        module, loop = self.lightning_module, self.graph.trainer.fit_loop.epoch_loop.automatic_optimization
        assert module is not None
        if getattr(
            loop, "_skip_backward", False
        ):  # averaged weights run once more for their BatchNorms, and do not train
            return super().training_step(*((batch,) if batch_idx is None else (batch, batch_idx)))
        _check_anomaly()
        if self._graphed is not self.optimizers[0]:  # a callback has made another
            self._make_graph(self.graph.trainer, module)
        if batch_idx is not None and not self._reads_index:
            batch_idx = 0  # an int that moves would be captured once more
        self._last.add(batch, batch_idx, self._updates, optimizer_steps=self._updates)
        output, logged = self.graph(batch, batch_idx, self._updates)
        for name, (value, given, options) in logged.items():
            module.log(name, value, *given, **options)
        return output

    def verify(self, **options: Any) -> VerifyReport:
        """The last step once more, as the graph and eagerly, by `graph.verify()`: same options. Nothing is changed.

        Its arguments are those of the loop; with gradient accumulation the batches before it are taken first. Raises DefinitionError before the first step.
        """
        if not self._last:
            raise mg.DefinitionError(
                "verify() of a GraphStrategy that has made no step",
                hint="call it after fit(), or in a callback's on_train_batch_end()",
            )
        return self._last.verify(self.graph, **options)

    def backward(self, closure_loss: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Nothing: the step has done it."""
        return closure_loss

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        """The closure alone: it makes the step, the update included."""
        self._updates = True
        try:
            return closure()
        finally:
            self._updates = False


def _accumulates(trainer: Trainer) -> bool:
    """True if some steps have several batches."""
    by_epoch = any(isinstance(callback, GradientAccumulationScheduler) for callback in trainer.callbacks)
    return trainer.accumulate_grad_batches != 1 or by_epoch


def _nothing(*args: Any) -> None:
    """In the place of a hook."""


def _log(module: LightningModule, name: str, value: Any, *args: Any, **options: Any) -> None:
    """`module.log`: in a step it is noted, and else logged."""
    logged = _LOGGED.get()
    if logged is None:
        type(module).log(module, name, value, *args, **options)
    else:
        logged[name] = (value, args, options)


def _reads_second(method: Callable[..., Any]) -> bool:
    """False if the code of a method does not read its second argument."""
    code = getattr(method, "__code__", None)
    if code is None or code.co_argcount < 3 or not _ALL_NAMES.isdisjoint(code.co_names):
        return True
    name = code.co_varnames[2]
    asked = (item.argval for item in dis.get_instructions(code) if item.opname != "STORE_FAST")
    return any(name == item or (isinstance(item, tuple) and name in item) for item in asked)


def _check(trainer: Trainer, module: LightningModule) -> None:
    """Raise DefinitionError for what a graph would not heed."""
    kind = type(module).__name__
    if not module.automatic_optimization:
        raise mg.DefinitionError(
            f"{kind} has manual optimization, and GraphStrategy makes the step itself",
            hint="call a Graph of your own in training_step(), and leave out the strategy",
        )
    if not any(group["params"] for optimizer in trainer.optimizers for group in optimizer.param_groups):
        raise mg.DefinitionError(
            f"{kind}.configure_optimizers() gives no optimizer", hint="return one with parameters"
        )
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        raise mg.DefinitionError(
            f"{kind}.training_step() takes an iterator, and a step takes its batch",
            hint="write training_step(self, batch, batch_idx)",
        )
    strategy = trainer.strategy
    num_devices, num_nodes = len(strategy.parallel_devices), strategy.num_nodes
    if (num_devices, num_nodes) != (1, 1):
        raise mg.DefinitionError(
            f"GraphStrategy is for one device; the Trainer was given {num_devices} devices and {num_nodes} nodes",
            hint="Trainer(devices=1, num_nodes=1)",
        )
    plugin = trainer.precision_plugin
    if type(plugin) not in (Precision, MixedPrecision):
        raise mg.DefinitionError(
            f"precision {plugin.precision!r} ({type(plugin).__name__}) changes steps in a way that no graph heeds",
            hint='choose "32-true", "bf16-mixed" or "16-mixed"',
        )
    for callback in trainer.callbacks:
        for hook in _HOOKS_OF_STEP:
            if is_overridden(hook, callback, Callback):
                raise mg.DefinitionError(
                    f"the callback {type(callback).__name__} has {hook}(): that is in the middle of the step",
                    hint=f"write {hook}() in {kind}: there it is captured with the step",
                )
    if _accumulates(trainer) and is_overridden("optimizer_zero_grad", module):
        raise mg.DefinitionError(
            f"{kind} has optimizer_zero_grad(), and accumulated gradients are cleared in the step",
            hint="leave it out",
        )


def _check_anomaly() -> None:
    if torch.is_anomaly_enabled():
        raise mg.DefinitionError(
            "detect_anomaly looks at autograd, which runs once, when the step is captured",
            hint="GraphStrategy(configure=lambda config: config.detect_nonfinite()) names the op that makes a NaN",
        )
