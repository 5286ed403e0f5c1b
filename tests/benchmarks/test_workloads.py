"""Every workload trains, and its JAX port has the same losses."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks.competitor import Competitor
from benchmarks.flops import count_flops
from benchmarks.peers import REFERENCE
from benchmarks.run import losses_differ
from benchmarks.setting import Setting
from benchmarks.torch_peers import torch_competitor
from benchmarks.workload import seeded_batches, seeded_model
from benchmarks.workloads import all_workloads

WORKLOADS = all_workloads(smoke=True)


def losses(competitor: Competitor) -> list[float]:
    """The losses of the first steps."""
    return [competitor.read(competitor.step(*batch)) for batch in competitor.batches[:3]]


@pytest.mark.every_case
@pytest.mark.parametrize("name", WORKLOADS)
def test_weights_and_batches_are_the_same_each_time(name: str) -> None:
    workload = WORKLOADS[name]
    for one, other in zip(seeded_batches(workload), seeded_batches(workload), strict=True):
        assert all(map(torch.equal, one, other))
    states = [seeded_model(workload).state_dict() for _ in range(2)]
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


@pytest.mark.one_case
@pytest.mark.parametrize("name", WORKLOADS)
def test_graph_and_eager_agree(name: str) -> None:
    expected = losses(torch_competitor(WORKLOADS[name], REFERENCE, Setting("single")))
    assert len(set(expected)) == 3  # it does train
    setting = Setting("fused", channels_last=WORKLOADS[name].has_images)
    got = losses(torch_competitor(WORKLOADS[name], "monograph-aten", setting))
    assert losses_differ(got, expected) is None


# XLA compiles the two convolution nets for minutes; each run of the benchmark compares their losses before it times
@pytest.mark.every_case
@pytest.mark.parametrize("name", sorted(set(WORKLOADS) - {"mobilenetv2", "resnet50"}))
def test_the_jax_port_agrees_with_eager(name: str) -> None:
    pytest.importorskip("jax")
    pytest.importorskip("optax")
    from benchmarks.jax_peer import jax_competitor

    workload = WORKLOADS[name]
    expected = losses(torch_competitor(workload, REFERENCE, Setting("single")))
    for setting in (Setting("flat", channels_last=workload.has_images), Setting("tree")):
        assert losses_differ(losses(jax_competitor(workload, setting)), expected) is None, setting


def test_operations_of_linear_layers() -> None:
    layer, x = nn.Linear(3, 5), torch.randn(7, 3)
    assert count_flops(lambda: layer(x)) == 2 * 7 * 3 * 5
    assert count_flops(lambda: layer(x).sum().backward()) == 2 * 2 * 7 * 3 * 5  # x needs no gradient


@pytest.mark.parametrize("groups", [1, 4])
def test_operations_of_convolutions(groups: int) -> None:
    layer = nn.Conv2d(4, 8, 3, padding=1, groups=groups)
    x = torch.randn(2, 4, 5, 5, requires_grad=True)
    forward = 2 * 2 * 5 * 5 * 8 * 9 * 4 // groups
    assert count_flops(lambda: layer(x)) == forward
    assert count_flops(lambda: layer(x).sum().backward()) == 3 * forward


def test_operations_of_fused_kernels() -> None:
    layer, x = nn.LSTM(4, 6), torch.randn(5, 2, 4)
    assert count_flops(lambda: layer(x)) == 5 * 2 * 2 * (4 + 6) * 24
    q = torch.randn(1, 2, 8, 4)
    attend = torch.nn.functional.scaled_dot_product_attention
    assert count_flops(lambda: attend(q, q, q, is_causal=True)) == 2 * 2 * 2 * 8 * 8 * 4
