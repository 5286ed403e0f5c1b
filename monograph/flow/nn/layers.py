"""Modules that OneFlow has and PyTorch has not."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from monograph import DefinitionError
from monograph.flow.functions import as_classes, quick_gelu


class CrossEntropyLoss(nn.CrossEntropyLoss):
    """PyTorch's, with labels of any type of integers."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return super().forward(input, as_classes(target))


class NLLLoss(nn.NLLLoss):
    """PyTorch's, with labels of any type of integers."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return super().forward(input, as_classes(target))


class QuickGELU(nn.Module):
    """`x * sigmoid(1.702 * x)` (https://arxiv.org/abs/1606.08415)."""

    def forward(self, x: Tensor) -> Tensor:
        return quick_gelu(x)


class RMSLayerNorm(nn.Module):
    """`weight * x / sqrt(mean(x * x) + eps)` over the last dimension (https://arxiv.org/abs/1910.07467)."""

    def __init__(self, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class _AddendRelu:
    """Batch normalisation, an addend, and ReLU."""

    def forward(self, x: Tensor, addend: Tensor | None = None) -> Tensor:
        normal: Tensor = super().forward(x)  # type: ignore[misc]
        return F.relu(normal if addend is None else normal + addend)


class FusedBatchNorm1d(_AddendRelu, nn.BatchNorm1d):
    """`relu(BatchNorm1d(x) + addend)`."""


class FusedBatchNorm2d(_AddendRelu, nn.BatchNorm2d):
    """`relu(BatchNorm2d(x) + addend)`."""


class FusedBatchNorm3d(_AddendRelu, nn.BatchNorm3d):
    """`relu(BatchNorm3d(x) + addend)`."""


class FusedMLP(nn.Module):
    """Linear layers with ReLU and dropout between them; the last has no ReLU with `skip_final_activation`.

    The parameters are `weight_0`, `bias_0`, `weight_1`, … with the shapes of `nn.Linear`.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: Sequence[int],
        out_features: int,
        hidden_dropout_rate: Sequence[float] | None = None,
        out_dropout_rate: float = 0.0,
        skip_final_activation: bool = False,
    ) -> None:
        super().__init__()
        rates = list(hidden_dropout_rate or [0.0] * len(hidden_features))
        if len(rates) != len(hidden_features):
            raise DefinitionError(
                f"FusedMLP got {len(rates)} dropout rates for {len(hidden_features)} hidden layers",
                hint="give one for each",
            )
        self.dropout_rates = [*rates, out_dropout_rate]
        self.skip_final_activation = skip_final_activation
        widths = [in_features, *hidden_features, out_features]
        for index, (given, made) in enumerate(pairwise(widths)):
            for name, parameter in nn.Linear(given, made).named_parameters():
                self.register_parameter(f"{name}_{index}", parameter)

    def forward(self, x: Tensor) -> Tensor:
        last = len(self.dropout_rates) - 1
        for index, rate in enumerate(self.dropout_rates):
            x = F.linear(x, getattr(self, f"weight_{index}"), getattr(self, f"bias_{index}"))
            if index < last or not self.skip_final_activation:
                x = F.relu(x)
            x = F.dropout(x, rate, self.training)
        return x


class CombinedMarginLoss(nn.Module):
    """Margins on the logit of the target (https://arxiv.org/abs/1801.07698): `cos(m1 * theta + m2) - m3`.

    `forward(x, label)` takes cosines (N, C) and class numbers (N,), and gives the changed cosines.
    """

    def __init__(self, m1: float = 1.0, m2: float = 0.0, m3: float = 0.0) -> None:
        super().__init__()
        self.m1, self.m2, self.m3 = m1, m2, m3

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        target = F.one_hot(label.long(), x.shape[1]).bool()
        if self.m1 == 1.0 and self.m2 == 0.0:
            return torch.where(target, x - self.m3, x)
        angle = torch.acos(torch.where(target, x, 0.0))
        return torch.where(target, torch.cos(self.m1 * angle + self.m2) - self.m3, x)
