"""The Open Inference Protocol as its clients speak it, compared with plain PyTorch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import tritonclient.http as triton

from tests.serving.running import at_once, scores_model, words_model


@pytest.fixture(scope="module")
def client(server):
    with triton.InferenceServerClient(server.address) as found:
        yield found


def test_a_client_of_triton_learns_what_is_served(client):
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("scores")
    assert client.is_model_ready("scores", "1")
    assert not client.is_model_ready("nothing")
    assert "binary_tensor_data" in client.get_server_metadata()["extensions"]
    found = client.get_model_metadata("scores")
    assert found["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 6]}]
    assert found["outputs"] == [
        {"name": "result_scores", "datatype": "FP32", "shape": [-1, 3]},
        {"name": "result_best", "datatype": "INT64", "shape": [-1]},
    ]


@pytest.mark.parametrize("binary_in", [True, False])
@pytest.mark.parametrize("binary_out", [True, False])
def test_results_are_those_of_plain_pytorch(client, binary_in, binary_out):
    """With more rows than requests share; the artifact takes so many."""
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected = scores_model()(x)
    given = triton.InferInput("x", [5, 6], "FP32")
    given.set_data_from_numpy(x.numpy(), binary_data=binary_in)
    names = ("result_best", "result_scores")
    wanted = [triton.InferRequestedOutput(name, binary_data=binary_out) for name in names]
    found = client.infer("scores", [given], outputs=wanted, request_id="seven")
    assert np.array_equal(found.as_numpy("result_scores"), expected.numpy())
    assert np.array_equal(found.as_numpy("result_best"), expected.argmax(1).numpy())
    assert found.get_response()["id"] == "seven"


def test_without_a_list_of_outputs_all_come(client):
    given = triton.InferInput("x", [1, 6], "FP32")
    given.set_data_from_numpy(np.ones((1, 6), np.float32))
    found = client.infer("scores", [given])
    assert found.as_numpy("result_scores").shape == (1, 3)
    assert found.as_numpy("result_best").shape == (1,)


def test_requests_that_come_together_share_batches(server):
    rows_before = _batches(server)
    inputs = torch.randn(24, 6, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        expected = scores_model()(inputs)
    found: dict[int, list[float]] = {}

    def ask(index: int) -> None:
        answer = server.infer("scores", {"x": inputs[index : index + 1]})
        found[index] = answer.json["outputs"][0]["data"]

    at_once(ask, 24)
    results = torch.tensor([found[index] for index in range(24)])
    torch.testing.assert_close(results, expected, rtol=1e-5, atol=1e-6)
    batches = {rows: count - rows_before.get(rows, 0) for rows, count in _batches(server).items()}
    assert sum(rows * count for rows, count in batches.items()) == 24
    assert 1 < max(rows for rows, count in batches.items() if count) <= 4


def _batches(server) -> dict[int, int]:
    text = server.ask("GET", "/metrics").body.decode()
    found = {}
    for line in text.splitlines():
        if line.startswith('monograph_batches_total{model="scores"'):
            labels, _, count = line.rpartition(" ")
            found[int(labels.split('rows="')[1].split('"')[0])] = int(float(count))
    return found


def test_rows_that_depend_on_each_other_are_not_joined(server):
    x = torch.arange(8.0).view(2, 4)
    answers = {}

    def ask(index: int) -> None:
        answers[index] = server.infer("centered", {"x": x + index}).json["outputs"][0]["data"]

    at_once(ask, 6)
    assert all(answer == (x - x.mean(0)).flatten().tolist() for answer in answers.values())
    notes = [entry.get("note", "") for entry in server.entries() if entry.get("model") == "centered"]
    assert "depend on each other" in notes[0]


def test_a_wrong_value_fails_its_own_request_only(server):
    good = torch.randint(10, (1, 5), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        expected = words_model()(good).mean(1)
    answers = {}

    def ask(index: int) -> None:
        answers[index] = server.infer("bag", {"words": good + 100 if index == 3 else good})

    at_once(ask, 8)
    assert answers[3].status == 400
    assert "an index out of range" in answers[3].json["error"]
    for index in {0, 1, 2, 4, 5, 6, 7}:
        torch.testing.assert_close(torch.tensor(answers[index].json["outputs"][0]["data"]), expected[0])


def test_a_model_that_changes_its_state_is_not_tried(server):
    assert server.infer("counting", {"x": torch.zeros(1)}).json["outputs"][0]["data"] == [1.0]
    assert server.infer("counting", {"x": torch.zeros(1)}).json["outputs"][0]["data"] == [2.0]


def test_a_page_that_was_sent_here_under_another_name(server):
    """As a browser would, whose name server says that a stranger's site is this machine."""
    for host, status in (("evil.example", 403), ("localhost", 200), ("127.0.0.1:1", 200)):
        assert server.ask("GET", "/v2", headers={"Host": host}).status == status


def test_containers_masks_and_plain_values(server):
    x, mask = torch.arange(6.0).view(2, 3), torch.tensor([[True] * 3, [True, True, False]])
    found = server.infer("picked", {"pair_x": x, "pair_mask": torch.ones_like(mask)})
    assert found.json["outputs"] == [
        {"name": "result_0", "datatype": "FP32", "shape": [2, 3], "data": [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]}
    ]
    infinite = server.infer("picked", {"pair_x": x, "pair_mask": mask})
    assert infinite.status == 422
    assert "ask for binary data" in infinite.json["error"]
    binary = server.infer("picked", {"pair_x": x, "pair_mask": mask}, parameters={"binary_data_output": True})
    start = int(binary.headers["inference-header-content-length"])
    numbers = np.frombuffer(binary.body[start:], np.float32)
    assert np.array_equal(numbers, torch.where(mask, x * 2, x / 0).flatten().numpy())


def test_the_page_metrics_and_interface(server):
    page = server.ask("GET", "/")
    assert page.headers["content-type"].startswith("text/html")
    assert b"<td>scores</td>" in page.body
    server.infer("scores", {"x": torch.ones(1, 6)})
    while b"monograph_requests_inside 0.0" not in (text := server.ask("GET", "/metrics").body):
        pass  # it counts when the answer is gone
    assert b'monograph_requests_total{model="scores",status="200"}' in text
    assert b'monograph_request_seconds_bucket{le="0.001",model="scores"}' in text
    assert "/v2/models/{name}/infer" in server.ask("GET", "/openapi.json").json["paths"]


def test_logs_are_json_and_hold_nothing_of_requests(server):
    server.ask("POST", "/v2/models/scores/infer?logged", b"123.45")
    path = "/v2/models/scores/infer"
    while not (
        found := [item for item in server.entries() if item.get("path") == path and item["status"] == 400]
    ):
        pass  # it is written when the answer is gone
    assert found[-1].keys() == {"time", "level", "message", "method", "path", "status", "seconds"}
    assert "123.45" not in server.log.read_text()
