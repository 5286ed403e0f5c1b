"""A server in a process of its own, and the artifacts that it serves in these tests."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import monograph as mg


@dataclass
class Answer:
    """What came back."""

    status: int
    body: bytes
    headers: Mapping[str, str]

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Server:
    """`monograph serve` with these arguments, ready to answer unless it is not waited for."""

    def __init__(self, folder: Path, *arguments: str, ready: bool = True) -> None:
        self.log = Path(tempfile.mkdtemp(dir=folder), "server.log")
        command = [sys.executable, "-m", "monograph", "serve", "--port", "0", "--threads", "1", *arguments]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, cwd=folder, stderr=log, env=dict(os.environ))
        while not (found := [entry for entry in self.entries() if entry["message"] == "listening"]):
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.02)
        self.port = found[0]["port"]
        while ready and self.ask("GET", "/v2/health/ready").status != 200:
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.02)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def entries(self) -> list[Any]:
        """What it has logged; a line that is being written is left out."""
        return [json.loads(line) for line in self.log.read_text().split("\n")[:-1]]

    def ask(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> Answer:
        """Send one request; a connection that is refused while the server starts counts as status 0."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            connection.request(method, path, body, dict(headers or {}))
            answer = connection.getresponse()
            return Answer(answer.status, answer.read(), {k.lower(): v for k, v in answer.getheaders()})
        except ConnectionRefusedError:
            return Answer(0, b"", {})
        finally:
            connection.close()

    def infer(self, model: str, inputs: Mapping[str, Tensor], **fields: Any) -> Answer:
        """Ask for an inference in JSON."""
        described = [
            {"name": name, "datatype": NAMES[item.dtype], "shape": list(item.shape), "data": item.tolist()}
            for name, item in inputs.items()
        ]
        body = json.dumps({"inputs": described, **fields}).encode()
        return self.ask("POST", f"/v2/models/{model}/infer", body)

    def stop(self) -> int:
        """Tell it to end, and give its exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait()


def at_once(ask: Callable[[int], None], number: int) -> None:
    """Call a function so often at the same time, with 0, 1, ..., and wait for all."""
    threads = [threading.Thread(target=ask, args=(index,)) for index in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


NAMES = {torch.float32: "FP32", torch.int64: "INT64", torch.bool: "BOOL"}


def scores_model() -> nn.Module:
    """Gives what plain PyTorch is compared with."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 3)).eval()


def words_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Embedding(10, 4).eval()


class Scores(mg.Graph):
    def __init__(self):
        super().__init__()
        self.model = scores_model()

    def build(self, x):
        scores = self.model(x)
        return {"scores": scores, "best": scores.argmax(1)}


class Words(mg.Graph):
    def __init__(self):
        super().__init__()
        self.model = words_model()

    def build(self, words):
        return self.model(words).mean(1)


class Centered(mg.Graph):
    """Its rows depend on each other."""

    def build(self, x):
        return x - x.mean(0)


class Picked(mg.Graph):
    """No size varies; containers and a plain value among the arguments."""

    def build(self, pair, times=2):
        x, mask = pair["x"], pair["mask"]
        return (torch.where(mask, x * times, x / 0),)


class Counting(mg.Graph):
    """Changes a buffer."""

    def __init__(self):
        super().__init__()
        self.model = nn.Module()
        self.model.register_buffer("calls", torch.zeros(()))

    def build(self, x):
        self.model.calls.add_(1)
        return x + self.model.calls


class Slow(mg.Graph):
    """Takes some tenths of a second."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Linear(1024, 1024, bias=False)

    def build(self, x):
        for _ in range(12):
            x = self.weight(x)
        return x.mean(1)


def save_all(folder: Path) -> None:
    """The artifacts."""
    batch = mg.Dim("batch", max=8)
    graphs = {
        "scores": (Scores(), mg.spec((batch, 6), torch.float32)),
        "words": (Words(), mg.spec((batch, mg.Dim("length", max=12)), torch.int64)),
        "centered": (Centered(), mg.spec((batch, 4), torch.float32)),
        "picked": (Picked(), {"x": torch.ones(2, 3), "mask": torch.ones(2, 3, dtype=torch.bool)}),
        "counting": (Counting(), mg.spec((mg.Dim("batch", max=4),), torch.float32)),
        "slow": (Slow(), mg.spec((1024, 1024), torch.float32)),
    }
    for name, (graph, example) in graphs.items():
        with torch.no_grad():
            graph.compile(example)
        mg.save(graph, folder / f"{name}.zip")
