"""Measure `monograph serve`: its throughput next to that of the same batches in a loop without a server, in turn.

The server has one core and the clients another: `python -m benchmarks.serve --seconds 60`. Linux; needs the extra `dev`.
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
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from urllib.request import urlopen

import gevent
import numpy as np
import torch
import tritonclient.http as triton
from torch import Tensor, nn

import monograph as mg
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


def bare_loop(path: Path, size: int, told: Connection) -> None:
    """Gives the seconds that batches take in this process, for each request to run some."""
    os.sched_setaffinity(0, {SERVER_CORE})
    torch.set_num_threads(1)
    infer = mg.load(path).infer
    images: dict[int, Tensor] = {}
    while (batches := told.recv()) is not None:
        for rows in batches.keys() - images.keys():
            images[rows] = torch.randn(rows, 3, size, size)
            infer(images[rows])
        order = list(batches.elements())
        random.Random(0).shuffle(order)
        start = time.perf_counter()
        for rows in order:
            infer(images[rows])
        told.send(time.perf_counter() - start)


def main() -> None:
    """Measure once and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument(
        "--slices", type=int, default=3, help="in turn with the bare loop, as the machine's speed drifts"
    )
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--size", type=int, default=224, help="of the images")
    parser.add_argument("--max-batch", type=int, default=32)
    parser.add_argument("--backend", default="aten")
    options = parser.parse_args()
    os.environ["THP_MEM_ALLOC_ENABLE"] = "1"  # as the server has it
    times: list[float] = []
    faults: list[str] = []
    served: list[float] = []
    bare: list[float] = []
    before: Counter[int] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model"
        save(path, options.backend, options.max_batch, options.size)
        process, address = start_server(path, options.max_batch)
        context = get_context("spawn")
        told, theirs = context.Pipe()
        loop = context.Process(target=bare_loop, args=(path, options.size, theirs))
        loop.start()
        os.sched_setaffinity(0, {CLIENT_CORE})
        try:
            for _ in range(options.slices):
                start = time.perf_counter()
                found, wrong = load(address, options.clients, options.seconds / options.slices, options.size)
                served.append(len(found) / (time.perf_counter() - start))
                times, faults = times + found, faults + wrong
                after = batches_of(address)
                ran = after - before
                told.send(ran)
                bare.append(sum(ran.elements()) / told.recv())
                before = after
            told.send(None)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()
            loop.join()
    times.sort()
    p50, p99 = (1e3 * times[int(len(times) * part)] for part in (0.5, 0.99))
    ratios = sorted(rate / other for rate, other in zip(served, bare, strict=True))
    print(f"{len(times)} requests, {len(faults)} failed{': ' + faults[0] if faults else ''}")
    print(f"{median(served):.1f} requests/s, median {p50:.0f} ms, p99 {p99:.0f} ms")
    print(f"batches: {', '.join(f'{count} of {rows}' for rows, count in sorted(before.items()))}")
    print(f"the same batches in a bare loop: {median(bare):.1f} rows/s")
    print(
        f"the server reaches {median(ratios):.2f} of it, {ratios[0]:.2f} to {ratios[-1]:.2f} in {len(ratios)} slices"
    )


if __name__ == "__main__":
    main()
