"""Requests that are wrong: each gets an answer of one sentence with a status below 500, and the server goes on."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from monograph.serving.limits import RequestError
from monograph.serving.models import ServedModel
from monograph.serving.protocol import read

PATH = "/v2/models/scores/infer"
VALID: dict[str, Any] = {
    "inputs": [{"name": "x", "datatype": "FP32", "shape": [2, 6], "data": [0.5] * 12}],
    "outputs": [{"name": "result_scores"}],
}
LENGTH = "Inference-Header-Content-Length"


def described(**changes: Any) -> bytes:
    """The valid request with other fields in its input."""
    request = copy.deepcopy(VALID)
    request["inputs"][0] |= changes
    return json.dumps(request).encode()


def binary(
    size: object, payload: bytes, length: str | None = None, shape: object = (2, 6)
) -> tuple[bytes, dict]:
    """A request with binary data of which one thing is wrong."""
    entry = {"name": "x", "datatype": "FP32", "shape": shape, "parameters": {"binary_data_size": size}}
    text = json.dumps({"inputs": [entry]}).encode()
    return text + payload, {LENGTH: str(len(text)) if length is None else length}


WRONG = {
    "nothing": (b"", {}),
    "no JSON": (b"{", {}),
    "a list": (b"[]", {}),
    "no inputs": (b"{}", {}),
    "text that is no text": (b'{"inputs": "\xff"}', {}),
    "deep nesting": (b"[" * 100_000, {}),
    "deep data": (described().replace(b"[0.5, ", b"[" * 5000), {}),
    "another name": (described(name="y"), {}),
    "another dtype": (described(datatype="FP64"), {}),
    "an unknown dtype": (described(datatype="BYTES"), {}),
    "a negative size": (described(shape=[-1, 6]), {}),
    "a size that is true": (described(shape=[True, 6]), {}),
    "a huge shape": (described(shape=[1 << 39, 6]), {}),
    "a shape without end": (described(shape=[1 << 70, 6]), {}),
    "no rows": (described(shape=[0, 6], data=[]), {}),
    "too many rows": (described(shape=[9, 6], data=[0.5] * 54), {}),
    "another rank": (described(shape=[12]), {}),
    "too few numbers": (described(data=[0.5] * 11), {}),
    "ragged numbers": (described(data=[[0.5] * 6, [0.5] * 5]), {}),
    "words for numbers": (described(data=["a"] * 12), {}),
    "null for numbers": (described(data=[None] * 12), {}),
    "no data": (described(data=None), {}),
    "an unknown output": (json.dumps({**VALID, "outputs": [{"name": "y"}]}).encode(), {}),
    "a flag that is none": (json.dumps({**VALID, "parameters": {"binary_data_output": 1}}).encode(), {}),
    "a timeout that is none": (json.dumps({**VALID, "parameters": {"timeout": -1}}).encode(), {}),
    "one input twice": (json.dumps({"inputs": VALID["inputs"] * 2}).encode(), {}),
    "bytes behind the JSON": (described() + b"0000", {LENGTH: str(len(described()))}),
    "too little binary data": binary(48, b"0" * 40),
    "too much binary data": binary(48, b"0" * 56),
    "a size that lies": binary(1 << 60, b"0" * 48),
    "a size that is negative": binary(-48, b"0" * 48),
    "a size that is text": binary("48", b"0" * 48),
    "a length beyond the body": binary(48, b"0" * 48, "100000"),
    "a length that is none": binary(48, b"0" * 48, "many"),
    "a negative length": binary(48, b"0" * 48, "-1"),
    "one output twice": (json.dumps({**VALID, "outputs": VALID["outputs"] * 2}).encode(), {}),
    "classification": (
        json.dumps(
            {**VALID, "outputs": [{"name": "result_scores", "parameters": {"classification": 2}}]}
        ).encode(),
        {},
    ),
    "shared memory": (described(parameters={"shared_memory_region": "a"}), {}),
    "a timeout without end": (
        json.dumps({**VALID, "parameters": {"timeout": 10**400}}).encode(),
        {},
    ),
    "a long word among numbers": (described(data=["a" * 30_000] + [1] * 11), {}),
    "NaN": (described().replace(b"0.5", b"NaN", 1), {}),
    "infinity": (described().replace(b"0.5", b"1e999", 1), {}),
    "a number beyond the dtype": (described(data=[1e39] * 12), {}),
    "true among numbers": (described(data=[True] + [0.5] * 11), {}),
    "another nesting": (described(data=[[0.5] * 4] * 3), {}),
    "a length of many digits": (described(), {LENGTH: "1" * 5000}),
    "compressed": (described(), {"Content-Encoding": "gzip"}),
}


def refused(answer) -> None:
    assert 400 <= answer.status < 500, answer.body
    error = answer.json["error"]
    assert set(answer.json) == {"error"}
    assert len(error) < 500
    assert "\n" not in error
    assert "Traceback" not in error


@pytest.mark.parametrize("name", WRONG)
def test_each_is_refused(server, name):
    refused(server.ask("POST", PATH, *WRONG[name]))


def test_paths_methods_and_versions(server):
    for method, path, status in (
        ("GET", "/v2/models/nothing", 404),
        ("GET", "/v2/models/scores/versions/2", 404),
        ("POST", "/v2/models/nothing/infer", 404),
        ("GET", PATH, 405),
        ("POST", "/v2/repository/models/scores/load", 404),
        ("GET", "/v2/models/..%2f..%2fetc", 404),
        ("GET", "/" + "a" * 5000, 404),
    ):
        answer = server.ask(method, path)
        assert answer.status == status, path
        assert set(answer.json) == {"error"}


def test_what_is_too_large_is_not_read(server):
    assert server.ask("POST", PATH, headers={"Content-Length": str(1 << 50)}).status == 413
    assert (
        server.ask("POST", PATH, b" " * (1 << 20)).status == 413
    )  # the model takes no more than some kilobytes


KINDS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@st.composite
def malformed(draw: st.DrawFn) -> tuple[bytes, dict[str, str]]:
    """A request that is wrong in one way or another."""
    kind = draw(st.sampled_from(["bytes", "value", "cut", "field", "input", "header", "binary"]))
    if kind == "bytes":
        return draw(st.binary(max_size=200)), {}
    if kind == "value":
        return json.dumps(draw(KINDS)).encode(), {}
    if kind == "cut":
        text = described()
        return text[: draw(st.integers(0, len(text) - 1))], {}
    if kind == "field":
        key = draw(st.sampled_from(["inputs", "outputs", "parameters", "id"]))
        wrong = {
            "inputs": KINDS,
            "outputs": KINDS.filter(lambda x: x != []),
            "parameters": KINDS,
            "id": KINDS,
        }[key]
        right = {"inputs": (), "outputs": (list,), "parameters": (dict,), "id": (str,)}[key]
        value = draw(wrong.filter(lambda item: not isinstance(item, right)))
        return json.dumps({**VALID, key: value}).encode(), {}
    if kind == "input":
        key = draw(st.sampled_from(["name", "datatype", "shape", "data"]))
        value = draw(KINDS.filter(lambda item: item != VALID["inputs"][0][key]))
        return described(**{key: value}), {}
    if kind == "header":
        length = draw(st.integers(-10, 10_000).filter(lambda item: item != len(described())))
        return described(), {LENGTH: str(length)}
    size = draw(st.integers(-100, 100))
    payload = draw(st.binary(max_size=100).filter(lambda item: (size, len(item)) != (48, 48)))
    return binary(size, payload)


@pytest.mark.long
@given(request=malformed())
@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_five_hundred_at_random(server, request):
    body, headers = request
    refused(server.ask("POST", PATH, body, headers))


def test_the_server_still_answers(server):
    assert server.infer("scores", {"x": torch.ones(2, 6)}).status == 200
    assert not [entry for entry in server.entries() if entry["level"] == "error"]


@pytest.mark.parametrize("timeout", [-1, 1 << 63])
def test_a_timeout_is_a_number_of_microseconds(server, timeout):
    answer = server.ask("POST", PATH, json.dumps({**VALID, "parameters": {"timeout": timeout}}).encode())
    assert (answer.status, "timeout is no number" in answer.json["error"]) == (400, True)


@pytest.mark.parametrize(("length", "status"), [(10, 400), (11, 413)])
def test_the_largest_json(length, status):
    with pytest.raises(RequestError) as caught:
        read(ServedModel.__new__(ServedModel), bytearray(b"x" * length), None, 10)
    assert caught.value.status == status
