"""The benchmarks: whole training steps of PyTorch, JAX and Monograph, timed against each other in turn."""

from __future__ import annotations

from monograph.bench.chart import chart
from monograph.bench.client import available_cores
from monograph.bench.peers import all_peers
from monograph.bench.record import Report
from monograph.bench.run import Options, run
from monograph.bench.stored import read_report, write_report
from monograph.bench.tables import all_tables, machine_lines, write_markdown
from monograph.bench.workloads import all_workloads

__all__ = [
    "Options",
    "Report",
    "all_peers",
    "all_tables",
    "all_workloads",
    "available_cores",
    "chart",
    "machine_lines",
    "read_report",
    "run",
    "write_markdown",
    "write_report",
]
