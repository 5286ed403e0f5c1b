"""More than the server can do, less than it may, and its end."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import threading
import time

import pytest
import torch

import monograph as mg
from monograph.serving.app import make_app
from monograph.serving.batching import Batcher, Job
from monograph.serving.limits import Limits, RequestError
from monograph.serving.metrics import Metrics
from monograph.serving.service import Service
from tests.serving.running import Server
from tests.support.warm import run_script

X = torch.ones(1024, 1024)


@pytest.fixture
def slow(artifacts):
    (artifacts / "token").write_text("secret\n")
    found = Server(artifacts, "slow.zip", "--queue", "3", "--token-file", "token", "--deadline", "60")
    yield found
    found.process.kill()


def ask(server, statuses, seconds=None):
    """Send a slow request with binary data, and note its status."""
    entry = {
        "name": "x",
        "datatype": "FP32",
        "shape": [1024, 1024],
        "parameters": {"binary_data_size": 4 << 20},
    }
    parameters = {"timeout": int(seconds * 1e6)} if seconds else {}
    text = json.dumps({"inputs": [entry], "parameters": parameters}).encode()
    headers = {"Inference-Header-Content-Length": str(len(text)), "Authorization": "Bearer secret"}
    answer = server.ask("POST", "/v2/models/slow/infer", text + X.numpy().tobytes(), headers)
    statuses.append(answer.status)
    return answer


def ask_often(server, number, statuses):
    threads = [threading.Thread(target=ask, args=(server, statuses)) for _ in range(number)]
    for thread in threads:
        thread.start()
    return threads


@pytest.mark.long
def test_overload_deadlines_the_token_and_the_end(slow):
    assert slow.ask("GET", "/v2/health/ready").status == 200
    assert slow.ask("GET", "/v2/models/slow").status == 401
    assert slow.ask("GET", "/metrics", headers={"Authorization": "Bearer wrong"}).status == 401
    assert slow.ask("GET", "/metrics", headers={"Authorization": "Bearer secret"}).status == 200

    statuses: list[int] = []
    for thread in ask_often(slow, 24, statuses):
        thread.join()
    assert set(statuses) == {200, 429}
    assert len(statuses) == 24
    assert ask(slow, []).status == 200

    late = ask(slow, [], seconds=1e-6)
    assert late.status == 504
    assert "deadline" in late.json["error"]

    statuses.clear()
    threads = ask_often(slow, 3, statuses)
    while (
        b"monograph_requests_inside 3.0"
        not in slow.ask("GET", "/metrics", headers={"Authorization": "Bearer secret"}).body
    ):
        time.sleep(0.001)
    assert slow.stop() == 0
    for thread in threads:
        thread.join()
    assert statuses == [200, 200, 200]


@pytest.mark.long
def test_a_client_that_goes_away(server):
    text = b'{"inputs": [{"name": "x"'
    for whole in (False, True):
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            length = len(text) if whole else 1000
            head = f"POST /v2/models/scores/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n\r\n"
            connection.sendall(head.encode() + text)
    while b"monograph_requests_inside 0.0" not in server.ask("GET", "/metrics").body:
        time.sleep(0.001)
    assert not [entry for entry in server.entries() if entry["level"] == "error"]


def test_requests_whose_deadline_passed_leave_the_queue():
    started, go_on = threading.Event(), threading.Event()

    class Model:
        name, batch_sizes = "model", ()

        def run(self, tensors):
            started.set()
            go_on.wait()
            return list(tensors)

    async def main():
        batcher = Batcher(Model(), Limits(), Metrics())
        loop, now = asyncio.get_running_loop(), time.monotonic()
        jobs = [Job((torch.ones(1),), now, loop.create_future()) for _ in range(3)]
        batcher.submit(jobs[0])
        await asyncio.to_thread(started.wait)
        batcher.submit(jobs[1])
        batcher.submit(jobs[2])
        batcher.withdraw(jobs[1])
        batcher.withdraw(jobs[0])  # it runs: nothing to forget
        go_on.set()
        await jobs[2].done
        await asyncio.to_thread(batcher.close)
        return [job.done.done() for job in jobs]

    assert asyncio.run(main()) == [True, False, True]


def test_a_failure_after_the_deadline_is_nobodys():
    """No error of a future that nobody awaits: its text might hold what a client sent."""
    passed, errors = threading.Event(), []

    class Model:
        name, batch_sizes = "model", ()

        def run(self, tensors):
            passed.wait()
            raise MemoryError

    class Client:
        async def receive(self):
            await asyncio.Event().wait()

    async def main():
        asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
        service = Service([model := Model()], Limits(), None)
        with pytest.raises(RequestError, match="the deadline passed"):
            await service._run(Client(), model, (torch.ones(1),), time.monotonic() + 0.01)
        passed.set()
        await asyncio.to_thread(service._batchers["model"].close)
        await asyncio.sleep(0)

    asyncio.run(main())
    gc.collect()
    assert errors == []


def test_who_comes_when_too_many_wait_is_told_to_try_again():
    class Model:
        name, batch_sizes, inputs = "model", (), ()

    sent = []

    async def receive():
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def send(message):
        sent.append(message)

    async def main():
        service = Service([Model()], Limits(queue=0), None)
        service.ready = True
        scope = {"type": "http", "method": "POST", "path": "/v2/models/model/infer", "query_string": b""}
        headers = [(b"host", b"localhost"), (b"content-length", b"2")]
        await make_app(service)({**scope, "headers": headers}, receive, send)
        await asyncio.to_thread(service._batchers["model"].close)

    asyncio.run(main())
    assert sent[0]["status"] == 429
    assert dict(sent[0]["headers"])[b"retry-after"] == b"1"


@pytest.mark.long
@pytest.mark.parametrize("seconds", [0.0, 0.5])
def test_the_end_while_models_get_ready(artifacts, seconds):
    server = Server(artifacts, "slow.zip", "scores.zip", ready=False)
    time.sleep(seconds)
    assert server.stop() == 0


def test_what_cannot_be_served(artifacts, tmp_path):
    class Train(mg.Graph):
        def __init__(self):
            super().__init__()
            self.model = torch.nn.Linear(2, 2)
            self.add_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))

        def build(self, x):
            loss = self.model(x).sum()
            loss.backward()
            return loss

    class Scaled(mg.Graph):
        def build(self, x, factor):
            return x * factor

    train, scaled = Train(), Scaled()
    train(torch.ones(2, 2))
    scaled(torch.ones(2), 0.5)
    mg.save(train, tmp_path / "train")
    mg.save(scaled, tmp_path / "scaled")
    mg.save({"a": torch.ones(2)}, tmp_path / "state")
    (tmp_path / "token").write_text("secret")
    scores = str(artifacts / "scores.zip")
    for arguments, text in (
        (["train"], "only trains"),
        (["scaled"], "takes factor as a float"),
        (["state"], "is a checkpoint"),
        ([scores, scores], "Two models are called scores"),
        ([scores, "--host", "0.0.0.0"], "give --token-file FILE"),
        ([scores, "--token-file", "nothing"], "cannot be read"),
        ([scores, "--host", "192.0.2.1", "--token-file", "token"], "cannot be used"),
        (["nothing.zip"], "No such file"),
    ):
        done = run_script(["-m", "monograph", "serve", *arguments], cwd=tmp_path, env={})
        assert done.returncode > 0, arguments
        assert text in done.stderr, done.stderr
        assert "Traceback" not in done.stderr


def test_a_batch_takes_no_more_rows_than_it_may_and_one_shape():
    ran = []

    class Model:
        name = "small"
        batch_sizes = (1, 2, 4)

        def run_together(self, requests):
            ran.append([tuple(tensors[0].shape) for tensors in requests])
            return [[tensors[0]] for tensors in requests]

    async def work():
        loop = asyncio.get_running_loop()
        sizes = [(1, 2), (2, 2), (1, 3), (3, 2), (1, 2), (1, 3)]
        jobs = [Job([torch.ones(size)], time.monotonic(), loop.create_future()) for size in sizes]
        batcher = Batcher(Model(), Limits(delay=60.0), Metrics())
        with batcher._changed:  # nothing is taken before all wait
            batcher._waiting.extend(jobs)
        batcher.close()
        return [(await job.done)[0].shape for job in jobs]

    shapes = asyncio.run(work())
    assert ran == [[(1, 2), (2, 2), (1, 2)], [(1, 3), (1, 3)], [(3, 2)]]
    assert [tuple(shape) for shape in shapes] == [(1, 2), (2, 2), (1, 3), (3, 2), (1, 2), (1, 3)]
