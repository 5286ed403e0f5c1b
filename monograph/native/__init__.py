"""C++ functions of our own for ops in compiled steps, written for sizes and strides that are known beforehand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from monograph.layout import Layout
from monograph.native.attention import Attention
from monograph.native.cross_entropy import CrossEntropy
from monograph.native.depthwise import Depthwise
from monograph.native.product import Product
from monograph.native.recurrent import Recurrence

Kernel = Product | Depthwise | Attention | Recurrence | CrossEntropy

# How the ops in ir/own_ops.py are written: from what they take, their other arguments, and the threads there are.
KERNELS: Mapping[str, Callable[[Sequence[Layout], Sequence[Any], int], Kernel]] = {
    "monograph::product": Product.of,
    "monograph::depthwise": Depthwise.of,
    "monograph::depthwise_of_image": Depthwise.of_image,
    "monograph::depthwise_of_weight": Depthwise.of_weight,
    "monograph::attention": Attention.of,
    "monograph::attention_backward": Attention.of_gradient,
    "monograph::recurrence": Recurrence.of,
    "monograph::recurrence_backward": Recurrence.of_gradient,
    "monograph::cross_entropy": CrossEntropy.of,
    "monograph::smooth_cross_entropy": CrossEntropy.of,
}

__all__ = ["KERNELS", "Attention", "CrossEntropy", "Depthwise", "Kernel", "Product", "Recurrence"]
