"""Measure `monograph serve`: its throughput next to that of the same batches in a loop without a server.

The server has one core and the clients another: `python benchmarks/serve.py --seconds 60`. Linux; needs the extra `dev`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from urllib.request import urlopen

import gevent
import numpy as np
import torch
import tritonclient.http as triton
from torch import Tensor, nn

import monograph as mg

sys.path.insert(0, str(Path(__file__).parent.parent))
from examples.models.mobilenet_v2 import MobileNetV2

SERVER_CORE, CLIENT_CORE = 0, 1


class Infer(mg.Graph):
    """The inference of a model."""

    def __init__(self, model: nn.Module, backend: str) -> None:
        super().__init__()
        self.model = model
        self.config.backend(backend)

    def build(self, x: Tensor) -> Tensor:
        """Give the scores of images."""
        return self.model(x)


def save(path: Path, backend: str, max_batch: int, size: int) -> None:
    """Write the artifact that is served."""
    torch.manual_seed(0)
    graph = Infer(MobileNetV2(num_classes=1000).eval(), backend)
    with torch.no_grad():
        graph.compile(mg.spec((mg.Dim("batch", max=max_batch), 3, size, size), torch.float32))
    mg.save(graph, path)


def start_server(path: Path, max_batch: int) -> tuple[subprocess.Popen[str], str]:
    """A server on its core, and its address."""
    command = ["taskset", "-c", str(SERVER_CORE), sys.executable, "-m", "monograph", "serve", f"model={path}"]
    process = subprocess.Popen(
        [*command, "--port", "0", "--threads", "1", "--max-batch", str(max_batch)],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    address = ""
    for line in process.stderr:
        entry = json.loads(line)
        if entry["message"] == "listening":
            address = f"{entry['host']}:{entry['port']}"
        if entry["message"] == "the model is ready":
            break
    subprocess.Popen(
        ["cat"], stdin=process.stderr, stdout=subprocess.DEVNULL
    )  # so that its log never fills the pipe
    return process, address


def load(address: str, clients: int, seconds: float, size: int) -> tuple[list[float], list[str]]:
    """The seconds of each request, and what went wrong."""
    client = triton.InferenceServerClient(
        address, concurrency=clients, network_timeout=120, connection_timeout=120
    )
    images = np.random.default_rng(0).standard_normal((1, 3, size, size), dtype=np.float32)
    given = triton.InferInput("x", list(images.shape), "FP32")
    given.set_data_from_numpy(images, binary_data=True)
    wanted = triton.InferRequestedOutput("result", binary_data=True)
    times: list[float] = []
    faults: list[str] = []
    end = time.perf_counter() + seconds

    def ask() -> None:
        while (start := time.perf_counter()) < end:
            try:
                scores = client.infer("model", [given], outputs=[wanted]).as_numpy("result")
                assert scores.shape == (1, 1000)
                times.append(time.perf_counter() - start)
            except Exception as error:
                faults.append(str(error))

    gevent.joinall([gevent.spawn(ask) for _ in range(clients)])
    return times, faults


def batches_of(address: str) -> Counter[int]:
    """How often the server ran each number of rows."""
    with urlopen(f"http://{address}/metrics") as answer:
        text = answer.read().decode()
    found = re.findall(r'monograph_batches_total\{model="model",rows="(\d+)"\} (\S+)', text)
    return Counter({int(rows): int(float(count)) for rows, count in found})


def bare_loop(path: Path, batches: Counter[int], size: int) -> float:
    """The rows in a second of the same batches, called in this process."""
    os.sched_setaffinity(0, {SERVER_CORE})
    torch.set_num_threads(1)
    infer = mg.load(path).infer
    images = {rows: torch.randn(rows, 3, size, size) for rows in batches}
    for item in images.values():
        infer(item)
    order = list(batches.elements())
    random.Random(0).shuffle(order)
    start = time.perf_counter()
    for rows in order:
        infer(images[rows])
    return sum(order) / (time.perf_counter() - start)


def main() -> None:
    """Measure once and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--size", type=int, default=224, help="of the images")
    parser.add_argument("--max-batch", type=int, default=32)
    parser.add_argument("--backend", default="aten")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model"
        save(path, options.backend, options.max_batch, options.size)
        process, address = start_server(path, options.max_batch)
        os.sched_setaffinity(0, {CLIENT_CORE})
        try:
            start = time.perf_counter()
            times, faults = load(address, options.clients, options.seconds, options.size)
            rate = len(times) / (time.perf_counter() - start)
            batches = batches_of(address)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()
            bare = bare_loop(path, batches, options.size)
    times.sort()
    p50, p99 = (1e3 * times[int(len(times) * part)] for part in (0.5, 0.99))
    print(f"{len(times)} requests, {len(faults)} failed{': ' + faults[0] if faults else ''}")
    print(f"{rate:.1f} requests/s, median {p50:.0f} ms, p99 {p99:.0f} ms")
    print(f"batches: {', '.join(f'{count} of {rows}' for rows, count in sorted(batches.items()))}")
    print(f"the same batches in a bare loop: {bare:.1f} rows/s; the server reaches {rate / bare:.2f} of it")


if __name__ == "__main__":
    main()
