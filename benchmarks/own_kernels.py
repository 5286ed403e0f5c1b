"""What products and convolutions take by torch's kernels and by code of our own, each on its own.

    python -m benchmarks.own_kernels 2     # threads

Random data of normal distribution; the forms of an op run in turn, and the smallest time of each counts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from monograph.ir.meta import set_value, tensor_meta
from monograph.kernels.candidates import DEFAULT, fitting, forms_of
from monograph.kernels.compile import KernelCompiler
from monograph.kernels.select import COMPILED
from monograph.kernels.trials import seconds_of, tensors_of

aten = torch.ops.aten

PRODUCTS = [(16, 64, 64), (32, 256, 256), (512, 13, 64), (512, 512, 256), (1024, 32, 192), (256, 384, 64)]
IMAGES = [  # batch, channels, side, stride
    (64, 32, 16, 1),
    (64, 96, 16, 2),
    (64, 144, 8, 1),
    (64, 192, 4, 1),
    (64, 384, 2, 1),
    (64, 576, 2, 2),
    (64, 960, 1, 1),
]


def described(result: Any) -> Any:
    """What is known of a result, if there is one."""
    return None if result is None else tensor_meta(result)


def compare(op: Callable[..., Any], *arguments: Any) -> str:
    """The times of an op by torch's default and by our code, in microseconds."""
    graph = fx.Graph()
    inputs: list[fx.Node] = []
    for item in arguments:
        if isinstance(item, torch.Tensor):
            placeholder = graph.placeholder(f"x{len(inputs)}")
            set_value(placeholder, tensor_meta(item))
            inputs.append(placeholder)
    given = iter(inputs)
    node = graph.call_function(
        op, tuple(next(given) if isinstance(item, torch.Tensor) else item for item in arguments)
    )
    made = op(*arguments)
    set_value(node, tuple(map(described, made)) if isinstance(made, tuple) else described(made))
    own = [item for item in fitting(node, COMPILED[op]) if item.name == "own"]
    forms = forms_of(node, own)
    seconds = seconds_of(forms, tensors_of(forms[0]), KernelCompiler())
    return f"{seconds[DEFAULT] * 1e6:8.1f} {seconds['own'] * 1e6:8.1f}"


def main() -> None:
    """Print a line for each op of a linear layer, and of a convolution with a 3x3 filter for each channel."""
    torch.set_num_threads(int(sys.argv[1]))
    print(f"{torch.__version__}, {sys.argv[1]} threads; microseconds by torch and by our own code")
    for m, k, n in PRODUCTS:
        x, weight, bias, grad = torch.randn(m, k), torch.randn(n, k), torch.randn(n), torch.randn(m, n)
        print(f"{m}x{k}x{n} forward       {compare(aten.addmm.default, bias, x, weight.t())}")
        print(f"{m}x{k}x{n} of the input  {compare(aten.mm.default, grad, weight)}")
        print(f"{m}x{k}x{n} of the weight {compare(aten.mm.default, grad.t(), x)}")
    for count, channels, side, stride in IMAGES:
        x = torch.randn(count, channels, side, side).contiguous(memory_format=torch.channels_last)
        weight = torch.randn(channels, 1, 3, 3)
        options = ([stride] * 2, [1, 1], [1, 1], False, [0, 0], channels)
        grad = torch.randn_like(aten.convolution.default(x, weight, None, *options))
        name = f"{count} images, {channels} channels, {side}x{side}, stride {stride}:"
        print(f"{name} forward  {compare(aten.convolution.default, x, weight, None, *options)}")
        backward = compare(
            aten.convolution_backward.default, grad, x, weight, None, *options, [True, True, False]
        )
        print(f"{name} backward {backward}")


if __name__ == "__main__":
    main()
