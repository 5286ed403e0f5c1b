"""Optimizers with OneFlow's names, defaults and formulas. Where PyTorch has the formula, its code does the update.

Of the keys of a param group a Graph follows `clip_grad_max_norm`, `clip_grad_norm_type` and `lr_scale` by itself. In
eager mode `clip_grad()` clips, and `lr_scale` has no effect, as in OneFlow. `contiguous_params` and `fused` said how
OneFlow stores and computes; they are taken and change nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import optim

from monograph.compat.optimizers import without_step_hooks
from monograph.errors import OptimizerError

Betas = tuple[float, float]


class OneFlowOptimizer(optim.Optimizer):
    """What OneFlow's optimizers do besides PyTorch's methods, or otherwise."""

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Fill the gradients with zeros; with `set_to_none`, which is PyTorch's default, let go of them."""
        super().zero_grad(set_to_none)

    def clip_grad(self, error_if_nonfinite: bool = False) -> None:
        """Clip the gradients of each param group to its `clip_grad_max_norm`, in eager mode.

        The norm is that of all gradients of a group together, of the order `clip_grad_norm_type`. A Graph clips by
        itself.
        """
        for index, group in enumerate(self.param_groups):
            if group.get("clip_grad_max_norm") is None:
                warnings.warn(
                    f"param group {index} has no clip_grad_max_norm, so nothing is clipped", stacklevel=2
                )
                continue
            torch.nn.utils.clip_grad_norm_(
                group["params"],
                group["clip_grad_max_norm"],
                group.get("clip_grad_norm_type", 2.0),
                error_if_nonfinite=error_if_nonfinite,
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
        _check_no_maximize("SGD", maximize)
        if nesterov and (momentum == 0 or dampening != 0):
            raise OptimizerError(
                f"SGD(nesterov=True, momentum={momentum}, dampening={dampening})",
                hint="Nesterov momentum needs a momentum, and no dampening",
            )
        optim.SGD.__init__(self, params, lr, momentum, dampening, weight_decay, nesterov)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have gradients."""
        loss = _loss(closure)
        for group in self.param_groups:
            if group["momentum"] != 0:
                for parameter in _with_gradient(group):
                    if self.state[parameter].get("momentum_buffer") is None:
                        self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        without_step_hooks(optim.SGD.step)(self)
        return loss


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
        _add_option(self, "do_bias_correction", do_bias_correction)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have gradients."""
        loss, groups = _loss(closure), self.param_groups
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
        for parameter in _with_gradient(group):
            state, gradient = self.state[parameter], parameter.grad
            if group["weight_decay"] != 0:
                if group["decoupled_weight_decay"]:
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                else:
                    gradient = gradient.add(parameter, alpha=group["weight_decay"])
            state.setdefault("step", torch.tensor(0.0))  # PyTorch's Adam does not load a state without it
            state["step"] += 1
            mean, square = _moments(state, parameter, gradient, group["betas"])
            if group["amsgrad"]:
                largest = _zeros(state, "max_exp_avg_sq", parameter)
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
        _check_not_negative("LAMB", lr=lr, eps=eps, weight_decay=weight_decay)
        _check_betas("LAMB", betas)
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
        loss = _loss(closure)
        for group in self.param_groups:
            for parameter in _with_gradient(group):
                self._update(parameter, group)
        return loss

    def _update(self, parameter: Any, group: dict[str, Any]) -> None:
        state, gradient, decay = self.state[parameter], parameter.grad, group["weight_decay"]
        if not group["adam_w_mode"] and decay != 0:
            gradient = gradient.add(parameter, alpha=decay)
        mean, square = _moments(state, parameter, gradient, group["betas"])
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
        _check_not_negative("RMSprop", lr=lr, alpha=alpha, eps=eps, weight_decay=weight_decay)
        options = {"lr": lr, "alpha": alpha, "eps": eps, "weight_decay": weight_decay, "centered": centered}
        super().__init__(params, options)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have gradients."""
        loss = _loss(closure)
        for group in self.param_groups:
            alpha = group["alpha"]
            for parameter in _with_gradient(group):
                state, gradient = self.state[parameter], parameter.grad
                if group["weight_decay"] != 0:
                    gradient = gradient.add(parameter, alpha=group["weight_decay"])
                square = _zeros(state, "square_avg", parameter)
                square.mul_(alpha).addcmul_(gradient, gradient, value=1 - alpha)
                if group["centered"]:
                    mean = _zeros(state, "grad_avg", parameter).mul_(alpha).add_(gradient, alpha=1 - alpha)
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
        _check_no_maximize("Adadelta", maximize)
        optim.Adadelta.__init__(self, params, lr, rho, eps, weight_decay)


def _loss(closure: Callable[[], Any] | None) -> Any:
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def _with_gradient(group: dict[str, Any]) -> list[Any]:
    return [parameter for parameter in group["params"] if parameter.grad is not None]


def _zeros(state: dict[str, Any], name: str, parameter: torch.Tensor) -> torch.Tensor:
    if name not in state:
        state[name] = torch.zeros_like(parameter)
    return cast(torch.Tensor, state[name])


def _moments(
    state: dict[str, Any], parameter: torch.Tensor, gradient: torch.Tensor, betas: Betas
) -> tuple[torch.Tensor, torch.Tensor]:
    """The running means of the gradient and of its square, moved on by one step."""
    first, second = betas
    mean = _zeros(state, "exp_avg", parameter).mul_(first).add_(gradient, alpha=1 - first)
    square = _zeros(state, "exp_avg_sq", parameter).mul_(second)
    return mean, square.addcmul_(gradient, gradient, value=1 - second)


def _add_option(optimizer: optim.Optimizer, name: str, value: Any) -> None:
    """An option that PyTorch's class has not; param groups may have their own."""
    optimizer.defaults[name] = value
    for group in optimizer.param_groups:
        group.setdefault(name, value)


def _check_no_maximize(kind: str, maximize: bool) -> None:
    if maximize:
        raise OptimizerError(
            f"{kind}(maximize=True): OneFlow's formula adds the weight decay with the wrong sign",
            hint=f"negate the loss, or use torch.optim.{kind}(maximize=True)",
        )


def _check_betas(kind: str, betas: Betas) -> None:
    if not all(0 <= beta < 1 for beta in betas):
        raise OptimizerError(f"{kind}(betas={betas})", hint="each is between 0 and 1")


def _check_not_negative(kind: str, **values: float) -> None:
    for name, value in values.items():
        if value < 0:
            raise OptimizerError(
                f"{kind}({name}={value}): it must not be negative", hint=f"give another {name}"
            )
