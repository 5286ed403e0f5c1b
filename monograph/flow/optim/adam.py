"""Adam, AdamW and LAMB with OneFlow's defaults and formulas: bias correction is a choice."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import optim

from monograph import OptimizerError
from monograph.compat.optimizers import without_step_hooks
from monograph.flow.optim.one_flow_optimizer import (
    OneFlowOptimizer,
    check_not_negative,
    loss_of,
    state_like,
    with_gradient,
)

Betas = tuple[float, float]


class _MayCorrect(OneFlowOptimizer):
    """What Adam and AdamW have in common: bias correction is a choice of each param group."""

    _of_torch: type[optim.Optimizer]

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.001,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-08,
        weight_decay: float = 0,
        amsgrad: bool = False,
        do_bias_correction: bool = True,
        contiguous_params: bool = False,
        fused: bool = False,
    ) -> None:
        of_torch: Any = self._of_torch
        of_torch.__init__(self, params, lr, betas, eps, weight_decay, amsgrad)
        add_option(self, "do_bias_correction", do_bias_correction)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have gradients."""
        loss, groups = loss_of(closure), self.param_groups
        corrected = [group for group in groups if group["do_bias_correction"]]
        try:
            self.param_groups = corrected
            without_step_hooks(self._of_torch.step)(self)
        finally:
            self.param_groups = groups
        with torch.no_grad():
            for group in groups:
                if not group["do_bias_correction"]:
                    self._step_uncorrected(group)
        return loss

    def _step_uncorrected(self, group: dict[str, Any]) -> None:
        """`p -= lr * m / (sqrt(v) + eps)`."""
        for parameter in with_gradient(group):
            state, gradient = self.state[parameter], parameter.grad
            if group["weight_decay"] != 0:
                if group["decoupled_weight_decay"]:
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                else:
                    gradient = gradient.add(parameter, alpha=group["weight_decay"])
            state.setdefault("step", torch.tensor(0.0))  # PyTorch's Adam does not load a state without it
            state["step"] += 1
            mean, square = moments(state, parameter, gradient, group["betas"])
            if group["amsgrad"]:
                largest = state_like(state, "max_exp_avg_sq", parameter)
                square = torch.maximum(largest, square, out=largest)
            parameter.addcdiv_(mean, square.sqrt().add_(group["eps"]), value=-group["lr"])


class Adam(_MayCorrect, optim.Adam):
    """Adam (https://arxiv.org/abs/1412.6980), with weight decay added to the gradient.

    `m = b1 * m + (1 - b1) * g`; `v = b2 * v + (1 - b2) * g * g`; `p -= lr * m / (sqrt(v) + eps)`, where with
    `do_bias_correction` `m` and `v` are divided by `1 - b ** step` first. With `amsgrad` the largest `v` so far is
    taken.
    """

    _of_torch = optim.Adam


class AdamW(_MayCorrect, optim.AdamW):
    """Adam with decoupled weight decay (https://arxiv.org/abs/1711.05101): `p -= lr * weight_decay * p` besides.

    The weight decay is 0 unless given; PyTorch's is 0.01.
    """

    _of_torch = optim.AdamW


class LAMB(OneFlowOptimizer):
    """LAMB (https://arxiv.org/abs/1904.00962): Adam's direction, as long as the parameter itself.

    With `u = m / (sqrt(v) + eps)`, corrected as in Adam, `p -= lr * (|p| / |u|) * (u + weight_decay * p)`; the ratio
    of norms is 1 where one of them is 0. With `adam_w_mode=False` weight decay is added to the gradient instead. As in
    OneFlow the norm is that of `u` without weight decay.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.001,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-08,
        weight_decay: float = 0,
        adam_w_mode: bool = True,
        do_bias_correction: bool = True,
        amsgrad: bool = False,
        contiguous_params: bool = False,
    ) -> None:
        if amsgrad:
            raise OptimizerError("LAMB has no AMSGrad variant", hint="leave amsgrad out")
        check_not_negative("LAMB", lr=lr, eps=eps, weight_decay=weight_decay)
        check_betas("LAMB", betas)
        options = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "adam_w_mode": adam_w_mode,
            "do_bias_correction": do_bias_correction,
        }
        super().__init__(params, options)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have gradients."""
        loss = loss_of(closure)
        for group in self.param_groups:
            for parameter in with_gradient(group):
                self._update(parameter, group)
        return loss

    def _update(self, parameter: Any, group: dict[str, Any]) -> None:
        state, gradient, decay = self.state[parameter], parameter.grad, group["weight_decay"]
        if not group["adam_w_mode"] and decay != 0:
            gradient = gradient.add(parameter, alpha=decay)
        mean, square = moments(state, parameter, gradient, group["betas"])
        if group["do_bias_correction"]:
            state.setdefault("step", torch.tensor(0.0))
            state["step"] += 1
            count = state["step"].item()
            first, second = (1 - beta**count for beta in group["betas"])
            mean, square = mean / first, square / second
        update = mean / square.sqrt().add_(group["eps"])
        length, step_length = torch.linalg.vector_norm(parameter), torch.linalg.vector_norm(update)
        both = (length > 0) & (step_length > 0)
        ratio = torch.where(both, length / torch.where(both, step_length, 1.0), 1.0)
        if group["adam_w_mode"] and decay != 0:
            update = update.add(parameter, alpha=decay)
        parameter.sub_(update * ratio * group["lr"])


def moments(
    state: dict[str, Any], parameter: torch.Tensor, gradient: torch.Tensor, betas: Betas
) -> tuple[torch.Tensor, torch.Tensor]:
    """The running means of the gradient and of its square, moved on by one step."""
    first, second = betas
    mean = state_like(state, "exp_avg", parameter).mul_(first).add_(gradient, alpha=1 - first)
    square = state_like(state, "exp_avg_sq", parameter).mul_(second)
    return mean, square.addcmul_(gradient, gradient, value=1 - second)


def add_option(optimizer: optim.Optimizer, name: str, value: Any) -> None:
    """An option that PyTorch's class has not; param groups may have their own."""
    optimizer.defaults[name] = value
    for group in optimizer.param_groups:
        group.setdefault(name, value)


def check_betas(kind: str, betas: Betas) -> None:
    if not all(0 <= beta < 1 for beta in betas):
        raise OptimizerError(f"{kind}(betas={betas})", hint="each is between 0 and 1")
