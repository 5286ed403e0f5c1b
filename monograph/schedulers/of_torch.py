"""PyTorch's schedulers by OneFlow's argument names."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer
from torch.optim import lr_scheduler as of_torch

from monograph.schedulers.stepping import OF_GRAPH, may_go_on, note_step, print_rate


class OfTorch(of_torch.LRScheduler):
    verbose = False
    of_graph = False

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Go one step on, after the optimizer's. One that a graph steps does not go on twice for a step."""
        if not may_go_on(self):
            return
        super().step(*args, **kwargs)
        note_step(self)
        if self.verbose:
            for index, group in enumerate(self.optimizer.param_groups):
                print_rate(self, index, group["lr"])

    def state_dict(self) -> dict[str, Any]:
        """The state."""
        return {key: value for key, value in super().state_dict().items() if key != OF_GRAPH}

    @property
    def last_step(self) -> int:
        """The step that the present rate belongs to."""
        return self.last_epoch


class MultiplicativeLR(OfTorch, of_torch.MultiplicativeLR):
    """Each step multiplies the rate by `lr_lambda(step)`."""

    def __init__(
        self, optimizer: Optimizer, lr_lambda: Any, last_step: int = -1, verbose: bool = False
    ) -> None:
        self.verbose = verbose
        of_torch.MultiplicativeLR.__init__(self, optimizer, lr_lambda, last_step)


class CyclicLR(OfTorch, of_torch.CyclicLR):
    """`torch.optim.lr_scheduler.CyclicLR`, with `last_step` and `verbose`."""

    def __init__(self, *args: Any, last_step: int = -1, verbose: bool = False, **kwargs: Any) -> None:
        self.verbose = verbose
        of_torch.CyclicLR.__init__(self, *args, **kwargs, last_epoch=last_step)  # type: ignore[misc]


class OneCycleLR(OfTorch, of_torch.OneCycleLR):
    """`torch.optim.lr_scheduler.OneCycleLR`, with `last_step` and `verbose`."""

    def __init__(self, *args: Any, last_step: int = -1, verbose: bool = False, **kwargs: Any) -> None:
        self.verbose = verbose
        of_torch.OneCycleLR.__init__(self, *args, **kwargs, last_epoch=last_step)  # type: ignore[misc]


class ReduceLROnPlateau(OfTorch, of_torch.ReduceLROnPlateau):
    """`torch.optim.lr_scheduler.ReduceLROnPlateau`, with `verbose`; call `step(metric)` yourself."""

    def __init__(
        self,
        optimizer: Optimizer,
        mode: Any = "min",
        factor: float = 0.1,
        patience: int = 10,
        threshold: float = 1e-4,
        threshold_mode: Any = "rel",
        cooldown: int = 0,
        min_lr: Any = 0,
        eps: float = 1e-8,
        verbose: bool = False,
    ) -> None:
        self.verbose = verbose
        of_torch.ReduceLROnPlateau.__init__(
            self, optimizer, mode, factor, patience, threshold, threshold_mode, cooldown, min_lr, eps
        )
