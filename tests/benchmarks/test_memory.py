"""The benchmark of memory: what it counts, and its tables."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.memory import (
    MIB,
    Measured,
    common_bytes,
    in_fresh_processes,
    most_allocated,
    storage_bytes,
    tables,
    workloads,
)
from benchmarks.workload import seeded_batches, seeded_model


def test_memory_that_tensors_share_counts_once() -> None:
    whole = torch.zeros(8, 8)
    assert storage_bytes([whole, whole[0], whole.t(), torch.zeros(3)]) == 4 * (64 + 3)


def test_the_most_at_once_is_counted() -> None:
    def run() -> None:
        first = torch.zeros(1000)
        second = first + 1
        del first
        second.add(1)

    assert most_allocated(run) == pytest.approx(2 * 4000, abs=100)  # and the number that is added


def test_what_all_sides_hold_is_counted() -> None:
    before = common_bytes([])
    layer = torch.nn.Linear(300, 700, bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    layer(torch.ones(300)).sum().backward()
    optimizer.step()
    batch = (torch.zeros(1000),)
    assert common_bytes([batch]) - before == 2 * layer.weight.nbytes + 4000


def test_a_side_is_compared_with_the_best_of_torch() -> None:
    found: dict[str, dict[str, Measured | str]] = {
        "gpt": {
            "eager": Measured(4 * MIB, 5 * MIB, MIB),
            "inductor": Measured(2 * MIB, 3 * MIB, 0, planned=2 * MIB),
            "compile": Measured(4 * MIB, 6 * MIB, MIB),
            "compile-step": "RuntimeError: no",
        }
    }
    tracked, resident, planned = tables(found)
    assert tracked.rows == (("gpt", "4.0", "2.0", "4.0", "-", "0.50"),)
    assert resident.rows == (("gpt", "5.0", "3.0", "6.0", "-", "0.50"),)
    assert planned.rows == (("gpt", "-", "-", "-", "2.0", "1.000", "1.500"),)


def test_the_u_net_trains() -> None:
    workload = workloads(smoke=True)["unet"]
    model = seeded_model(workload)
    x, y = seeded_batches(workload)[0]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for _ in range(5):
        loss = workload.loss(model(x), y)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses == sorted(losses, reverse=True)


@pytest.mark.long
def test_a_side_is_measured_in_processes_of_its_own(tmp_path: Path) -> None:
    found = in_fresh_processes("mlp64", "aten", smoke=True, threads=1, cache=tmp_path)
    assert isinstance(found, Measured)
    assert 0 < found.tracked <= found.resident
    assert found.planned is not None
