"""AlexNet as in "One weird trick for parallelizing convolutional neural networks" (Krizhevsky 2014)."""

from __future__ import annotations

from torch import Tensor, nn


def _conv(inputs: int, outputs: int, kernel: int, *, stride: int = 1, padding: int) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, kernel, stride, padding), nn.ReLU(inplace=True)]


def _hidden(inputs: int, outputs: int, *, dropout: float) -> list[nn.Module]:
    return [nn.Dropout(dropout), nn.Linear(inputs, outputs), nn.ReLU(inplace=True)]


class AlexNet(nn.Module):
    """Five convolutions and three linear layers."""

    def __init__(self, num_classes: int = 1000, dropout: float = 0.5) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *_conv(3, 64, 11, stride=4, padding=2),
            nn.MaxPool2d(3, stride=2),
            *_conv(64, 192, 5, padding=2),
            nn.MaxPool2d(3, stride=2),
            *_conv(192, 384, 3, padding=1),
            *_conv(384, 256, 3, padding=1),
            *_conv(256, 256, 3, padding=1),
            nn.MaxPool2d(3, stride=2),
        )
        self.avgpool = nn.AdaptiveAvgPool2d((6, 6))
        self.classifier = nn.Sequential(
            *_hidden(256 * 6 * 6, 4096, dropout=dropout),
            *_hidden(4096, 4096, dropout=dropout),
            nn.Linear(4096, num_classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        pooled: Tensor = self.avgpool(self.features(x))
        logits: Tensor = self.classifier(pooled.flatten(1))
        return logits
