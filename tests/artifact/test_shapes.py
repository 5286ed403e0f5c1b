"""The rules for shapes agree with torch, and no wrong shape passes them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

import monograph as mg
from monograph.artifact.programs.shapes import _RULES, check_shapes
from monograph.checkpoint.errors import Damaged
from monograph.ir.meta import TensorMeta, compute_nodes, set_value, value

X = torch.randn(2, 4, 9, 8)
WEIGHT = torch.randn(6, 4, 3, 2)
FUNCTIONS = {
    "convolution": lambda x: F.conv2d(
        x, WEIGHT, torch.ones(6), stride=(2, 1), padding=(0, 3), dilation=(2, 3)
    ),
    "groups": lambda x: F.conv2d(x, WEIGHT[:, :2], groups=2),
    "one dimension": lambda x: F.conv1d(x[:, :, 0], WEIGHT[..., 0]),
    "batch norm": lambda x: F.batch_norm(x, torch.ones(4), torch.ones(4)),
    "activations": lambda x: F.hardswish(F.hardtanh(F.silu(F.relu(x).sigmoid().tanh().exp()))) - F.gelu(-x),
    "broadcasts": lambda x: (x + X[:1, :, :1]) * X[0, 0, 0] - 2 * x,
    "means": lambda x: x.mean((2, 3), keepdim=True) + x.mean(dim=[-1, 0, 2, 1]),
    "products": lambda x: torch.addmm(torch.ones(5), x.reshape(8, 72), torch.ones(5, 72).t()).mm(
        torch.ones(5, 3)
    ),
}


def program(function):
    graph = mg.trace(function)
    with torch.no_grad():
        graph(X)
    return graph.builds[0].program


@pytest.mark.every_case
@pytest.mark.parametrize("name", FUNCTIONS)
def test_right_ones_pass_and_wrong_ones_do_not(name):
    found = program(FUNCTIONS[name])
    ours = [node for node in compute_nodes(found.graph) if node.target in _RULES]
    assert ours
    if len(ours) == len(list(compute_nodes(found.graph))):
        assert check_shapes(found)
    for node in ours:
        told = value(node)
        if isinstance(told, TensorMeta) and check_shapes(found):
            for wrong in (replace(told, shape=(*told.shape, 1)), replace(told, dtype=torch.float64)):
                set_value(node, wrong)
                with pytest.raises(Damaged):
                    check_shapes(found)
            set_value(node, told)


def test_other_ops_are_left_to_torch():
    assert not check_shapes(program(lambda x: x.sort()[0]))
    assert not check_shapes(program(lambda x: x.sum() * X.double()))


def test_what_does_not_fit_is_left_to_torch_too():
    found = program(lambda x: F.conv2d(x, WEIGHT))
    (node,) = (node for node in compute_nodes(found.graph) if "convolution" in str(node.target))
    node.args = (*node.args[:3], [0, 0], *node.args[4:])  # a stride of none
    assert not check_shapes(found)
