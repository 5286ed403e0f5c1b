"""SGD, RMSprop, Adagrad and Adadelta with OneFlow's defaults and formulas."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import optim

from monograph import OptimizerError
from monograph.compat.optimizers import without_step_hooks
from monograph.flow.optim.one_flow_optimizer import (
    OneFlowOptimizer,
    check_no_maximize,
    check_not_negative,
    loss_of,
    state_like,
    with_gradient,
)


class SGD(OneFlowOptimizer, optim.SGD):
    """Gradient descent: `v = momentum * v + (1 - dampening) * (g + weight_decay * p)`; `p -= lr * v`.

    `v` begins with zero, where PyTorch's begins with the first gradient whatever the dampening is. With `nesterov`
    the step is `g + momentum * v`.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.001,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        maximize: bool = False,
        contiguous_params: bool = False,
        fused: bool = False,
    ) -> None:
        check_no_maximize("SGD", maximize)
        if nesterov and (momentum == 0 or dampening != 0):
            raise OptimizerError(
                f"SGD(nesterov=True, momentum={momentum}, dampening={dampening})",
                hint="Nesterov momentum needs a momentum, and no dampening",
            )
        optim.SGD.__init__(self, params, lr, momentum, dampening, weight_decay, nesterov)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have gradients."""
        loss = loss_of(closure)
        for group in self.param_groups:
            if group["momentum"] != 0:
                for parameter in with_gradient(group):
                    if self.state[parameter].get("momentum_buffer") is None:
                        self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        without_step_hooks(optim.SGD.step)(self)
        return loss


class RMSprop(OneFlowOptimizer):
    """RMSprop: `r = alpha * r + (1 - alpha) * g * g`; `p -= lr * g / sqrt(r + eps)`.

    `eps` stands inside of the root, where PyTorch's stands outside. If `centered`, `r` less the square of the mean
    gradient is taken. Weight decay is added to the gradient. OneFlow has no momentum here, and neither has this.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.001,
        alpha: float = 0.99,
        eps: float = 1e-08,
        weight_decay: float = 0,
        momentum: float = 0.0,
        centered: bool = False,
        contiguous_params: bool = False,
    ) -> None:
        if momentum != 0.0:
            raise OptimizerError(
                "OneFlow's RMSprop has no momentum",
                hint="torch.optim.RMSprop has it, with eps outside of the root",
            )
        check_not_negative("RMSprop", lr=lr, alpha=alpha, eps=eps, weight_decay=weight_decay)
        options = {"lr": lr, "alpha": alpha, "eps": eps, "weight_decay": weight_decay, "centered": centered}
        super().__init__(params, options)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have gradients."""
        loss = loss_of(closure)
        for group in self.param_groups:
            alpha = group["alpha"]
            for parameter in with_gradient(group):
                state, gradient = self.state[parameter], parameter.grad
                if group["weight_decay"] != 0:
                    gradient = gradient.add(parameter, alpha=group["weight_decay"])
                square = state_like(state, "square_avg", parameter)
                square.mul_(alpha).addcmul_(gradient, gradient, value=1 - alpha)
                if group["centered"]:
                    mean = (
                        state_like(state, "grad_avg", parameter).mul_(alpha).add_(gradient, alpha=1 - alpha)
                    )
                    square = square.addcmul(mean, mean, value=-1)
                parameter.addcdiv_(gradient, square.add(group["eps"]).sqrt_(), value=-group["lr"])
        return loss


class Adagrad(OneFlowOptimizer, optim.Adagrad):
    """Adagrad (https://jmlr.org/papers/v12/duchi11a.html): `s += g * g`; `p -= lr_t * g / (sqrt(s) + eps)`.

    `lr_t = lr / (1 + (step - 1) * lr_decay)`. The learning rate is 0.001 unless given; PyTorch's is 0.01.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.001,
        lr_decay: float = 0.0,
        weight_decay: float = 0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        contiguous_params: bool = False,
    ) -> None:
        optim.Adagrad.__init__(self, params, lr, lr_decay, weight_decay, initial_accumulator_value, eps)


class Adadelta(OneFlowOptimizer, optim.Adadelta):
    """Adadelta (https://arxiv.org/abs/1212.5701).

    `v = rho * v + (1 - rho) * g * g`; `d = sqrt(u + eps) / sqrt(v + eps) * g`; `u = rho * u + (1 - rho) * d * d`;
    `p -= lr * d`.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1.0,
        rho: float = 0.9,
        eps: float = 1e-6,
        weight_decay: float = 0,
        maximize: bool = False,
        contiguous_params: bool = False,
    ) -> None:
        check_no_maximize("Adadelta", maximize)
        optim.Adadelta.__init__(self, params, lr, rho, eps, weight_decay)
