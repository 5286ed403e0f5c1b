"""The network of fast style transfer (Johnson et al. 2016, https://arxiv.org/abs/1603.08155) with instance norms.

Each upsampling is a nearest neighbour followed by a convolution, and each convolution reflects at the border.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from monograph import DefinitionError
from monograph.flow.vision._weights import Pretrained, with_weights

__all__ = ["STYLES", "FastNeuralStyle", "neural_style_transfer"]

STYLES = ("sketch", "candy", "mosaic", "rain_princess", "udnie")
PIXEL_MAX = 255
# what old files carry of instance norms, which keep no statistics
STATISTICS = (".running_mean", ".running_var", ".num_batches_tracked")


def norm(channels: int) -> nn.InstanceNorm2d:
    """An instance norm with a learnt scale and shift."""
    return nn.InstanceNorm2d(channels, affine=True)


class ConvLayer(nn.Module):
    """A convolution with a reflected border, of an image first enlarged `upsample` times."""

    def __init__(self, inputs: int, outputs: int, kernel: int, *, stride: int = 1, upsample: int = 1) -> None:
        super().__init__()
        self.upsample = upsample
        self.reflection_pad = nn.ReflectionPad2d(kernel // 2)
        self.conv2d = nn.Conv2d(inputs, outputs, kernel, stride)

    def forward(self, x: Tensor) -> Tensor:
        if self.upsample != 1:
            x = nn.functional.interpolate(x, scale_factor=self.upsample, mode="nearest")
        y: Tensor = self.conv2d(self.reflection_pad(x))
        return y


class ResidualBlock(nn.Module):
    """Two convolutions and the shortcut, with nothing after the sum."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = ConvLayer(channels, channels, 3)
        self.in1 = norm(channels)
        self.conv2 = ConvLayer(channels, channels, 3)
        self.in2 = norm(channels)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.in1(self.conv1(x)))
        change: Tensor = self.in2(self.conv2(y))
        return change + x


class FastNeuralStyle(nn.Module):
    """From an image with values 0 to 255 to the image in a style, of the same size and range.

    >>> from monograph.flow.vision.models import FastNeuralStyle
    >>> FastNeuralStyle()(255 * torch.rand(1, 3, 16, 16)).shape
    torch.Size([1, 3, 16, 16])
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = ConvLayer(3, 32, 9)
        self.in1 = norm(32)
        self.conv2 = ConvLayer(32, 64, 3, stride=2)
        self.in2 = norm(64)
        self.conv3 = ConvLayer(64, 128, 3, stride=2)
        self.in3 = norm(128)
        self.res1 = ResidualBlock(128)
        self.res2 = ResidualBlock(128)
        self.res3 = ResidualBlock(128)
        self.res4 = ResidualBlock(128)
        self.res5 = ResidualBlock(128)
        self.deconv1 = ConvLayer(128, 64, 3, upsample=2)
        self.in4 = norm(64)
        self.deconv2 = ConvLayer(64, 32, 3, upsample=2)
        self.in5 = norm(32)
        self.deconv3 = ConvLayer(32, 3, 9)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.in1(self.conv1(x)))
        x = self.relu(self.in2(self.conv2(x)))
        x = self.relu(self.in3(self.conv3(x)))
        for block in (self.res1, self.res2, self.res3, self.res4, self.res5):
            x = block(x)
        x = self.relu(self.in4(self.deconv1(x)))
        x = self.relu(self.in5(self.deconv2(x)))
        image: Tensor = self.deconv3(x)
        return image.clamp(0, PIXEL_MAX)


def neural_style_transfer(
    pretrained: Pretrained = False, progress: bool = True, style_model: str = "sketch", **options: Any
) -> FastNeuralStyle:
    """The network of fast style transfer; the style is that of the file given as `pretrained`.

    DefinitionError for a style that OneFlow does not have, CheckpointError for weights that do not fit.
    """
    if style_model not in STYLES:
        raise DefinitionError(f"there is no style {style_model!r}", hint=f"choose one of {', '.join(STYLES)}")
    name = f"neural_style_transfer_{style_model}"
    return with_weights(lambda: FastNeuralStyle(**options), pretrained, name=name, passed_over=STATISTICS)
