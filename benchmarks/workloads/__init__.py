"""The workloads by name, in the order of the table."""

from __future__ import annotations

from benchmarks.workload import Workload
from benchmarks.workloads import dlrm, gpt, lstm, mlp, mobilenet, resnet, vit


def all_workloads(*, smoke: bool = False) -> dict[str, Workload]:
    """Every workload; `smoke` makes each so small that a step takes milliseconds."""
    made = (
        mlp.mlp64(smoke=smoke),
        mlp.mlp256(smoke=smoke),
        mobilenet.workload(smoke=smoke),
        resnet.workload(smoke=smoke),
        gpt.workload(smoke=smoke),
        vit.workload(smoke=smoke),
        lstm.workload(smoke=smoke),
        dlrm.workload(smoke=smoke),
    )
    return {workload.name: workload for workload in made}
