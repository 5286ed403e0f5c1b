"""The Open Inference Protocol: JSON and binary tensors in, and out again."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final

import torch
from pydantic import BaseModel, Field, StrictInt, StrictStr, ValidationError

from monograph.export.triton import DATATYPES
from monograph.serving.limits import RequestError
from monograph.serving.models import Field as TensorField
from monograph.serving.models import ServedModel

HEADER_LENGTH: Final = "inference-header-content-length"
JSON_BYTES_OF_ELEMENT: Final = 32  # of text, generously
JSON_BYTES: Final = 64 << 10  # of everything else in a request
_MAX_RANK: Final = 64
_MAX_TENSORS: Final = 1000

Size = Annotated[StrictInt, Field(ge=0, lt=1 << 40)]
Parameters = dict[str, Any]


class InputTensor(BaseModel):
    """A tensor of a request; its numbers are in `data`, or as binary data after the JSON."""

    name: StrictStr
    datatype: StrictStr
    shape: Annotated[list[Size], Field(max_length=_MAX_RANK)]
    parameters: Parameters = {}
    data: list[Any] | None = None


class RequestedOutput(BaseModel):
    """A tensor that the client asks for."""

    name: StrictStr
    parameters: Parameters = {}


class InferenceRequest(BaseModel):
    """The JSON of a request."""

    id: Annotated[StrictStr, Field(max_length=1000)] = ""
    parameters: Parameters = {}
    inputs: Annotated[list[InputTensor], Field(max_length=_MAX_TENSORS)]
    outputs: Annotated[list[RequestedOutput], Field(max_length=_MAX_TENSORS)] = []


@dataclass(frozen=True)
class Inference:
    """A request that fits the model: its tensors in the model's order, and what the answer has to hold."""

    id: str
    tensors: tuple[torch.Tensor, ...]
    seconds: float | None  # that the client waits
    outputs: tuple[tuple[int, bool], ...]  # position among the model's outputs, whether binary


def describe(model: ServedModel) -> dict[str, Any]:
    """The metadata of a model."""
    return {
        "name": model.name,
        "versions": ["1"],
        "platform": f"monograph_{model.backend}",
        "inputs": [_described(field) for field in model.inputs],
        "outputs": [_described(field) for field in model.outputs],
    }


def _described(field: TensorField) -> dict[str, Any]:
    return {"name": field.name, "datatype": DATATYPES[field.dtype], "shape": list(field.shape)}


def most_bytes(model: ServedModel) -> int:
    """What the body of a request can have at most, whichever way its tensors come."""
    return JSON_BYTES + sum(field.most * JSON_BYTES_OF_ELEMENT for field in model.inputs)


def read(model: ServedModel, body: bytearray, header_length: str | None, max_json_bytes: int) -> Inference:
    """A request. Raises RequestError for all that does not fit the protocol or the model."""
    split = len(body)
    if header_length is not None:
        is_number = header_length.isascii() and header_length.isdigit() and len(header_length) < 20
        split = int(header_length) if is_number else -1
        if not 0 <= split <= len(body):
            raise RequestError(400, "Inference-Header-Content-Length is no length within the body")
    if split > max_json_bytes:
        raise RequestError(
            413, f"the JSON is larger than {max_json_bytes} bytes: send tensors as binary data"
        )
    request = _parsed(bytes(memoryview(body)[:split]))
    tensors = _tensors(model, request, body, split)
    return Inference(request.id, tensors, _seconds(request.parameters), _outputs(model, request))


def answer(
    model: ServedModel, inference: Inference, results: Sequence[torch.Tensor]
) -> tuple[bytes, dict[str, str]]:
    """The body of the answer, and its headers."""
    described: list[dict[str, Any]] = []
    binary: list[bytes] = []
    for position, is_binary in inference.outputs:
        result, field = results[position].detach().cpu().contiguous(), model.outputs[position]
        entry: dict[str, Any] = {**_described(field), "shape": list(result.shape)}
        if is_binary:
            binary.append(result.reshape(-1).view(torch.uint8).numpy().tobytes())
            entry["parameters"] = {"binary_data_size": len(binary[-1])}
        else:
            entry["data"] = result.reshape(-1).tolist()
        described.append(entry)
    answered = {"model_name": model.name, "model_version": "1", "outputs": described}
    if inference.id:
        answered["id"] = inference.id
    try:
        text = json.dumps(answered, allow_nan=False, separators=(",", ":")).encode()
    except ValueError:
        message = "the results hold NaN or infinity, which JSON has not: ask for binary data"
        raise RequestError(422, message) from None
    if not binary:
        return text, {"content-type": "application/json"}
    headers = {"content-type": "application/octet-stream", HEADER_LENGTH: str(len(text))}
    return b"".join([text, *binary]), headers


def _parsed(text: bytes) -> InferenceRequest:
    try:
        return InferenceRequest.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise RequestError(
            400, f"the request is wrong{f' at {where}' if where else ''}: {first['msg']}"
        ) from None


def _seconds(parameters: Parameters) -> float | None:
    """The parameter `timeout`, which clients give in microseconds; 0 means none."""
    given = parameters.get("timeout", 0)
    if type(given) is not int or not 0 <= given < 1 << 63:
        raise RequestError(400, "the parameter timeout is no number of microseconds")
    return given / 1e6 if given else None


def _outputs(model: ServedModel, request: InferenceRequest) -> tuple[tuple[int, bool], ...]:
    by_default = _flag(request.parameters, "binary_data_output", False)
    names = [field.name for field in model.outputs]
    if not request.outputs:
        return tuple((position, by_default) for position in range(len(names)))
    found, seen = [], set[str]()
    for item in request.outputs:
        if item.name not in names:
            raise RequestError(
                400, f"{model.name} has no output {item.name[:100]!r}; it has {', '.join(names)}"
            )
        if item.name in seen:
            raise RequestError(400, f"the output {item.name!r} is asked for twice")
        seen.add(item.name)
        if item.parameters.get("classification", 0) or _shares_memory(item.parameters):
            raise RequestError(400, "outputs come as they are: no classification, no shared memory")
        found.append((names.index(item.name), _flag(item.parameters, "binary_data", by_default)))
    return tuple(found)


def _shares_memory(parameters: Parameters) -> bool:
    return any(name.startswith("shared_memory") for name in parameters)


def _flag(parameters: Parameters, name: str, default: bool) -> bool:
    flag = parameters.get(name, default)
    if not isinstance(flag, bool):
        raise RequestError(400, f"the parameter {name} is neither true nor false")
    return flag


def _tensors(
    model: ServedModel, request: InferenceRequest, body: bytearray, start: int
) -> tuple[torch.Tensor, ...]:
    """The tensors in the model's order; binary data comes after the JSON in the order of the request."""
    given: dict[str, torch.Tensor] = {}
    known = {field.name: field for field in model.inputs}
    for item in request.inputs:
        if item.name not in known or item.name in given:
            what = (
                "is there twice" if item.name in given else f"is unknown; the model takes {', '.join(known)}"
            )
            raise RequestError(400, f"the input {item.name[:100]!r} {what}")
        _check(known[item.name], item, model)
        size = item.parameters.get("binary_data_size")
        if size is None:
            given[item.name] = _from_json(known[item.name], item)
            continue
        given[item.name] = _from_binary(known[item.name], item, size, body, start)
        start += size
    if start != len(body):
        raise RequestError(400, f"{len(body) - start} bytes after the JSON belong to no input")
    if missing := [name for name in known if name not in given]:
        raise RequestError(400, f"the input {missing[0]!r} is missing")
    if model.batch_sizes and len({len(tensor) for tensor in given.values()}) > 1:
        raise RequestError(400, "the inputs have different numbers of rows")
    return tuple(given[name] for name in known)


def _check(field: TensorField, item: InputTensor, model: ServedModel) -> None:
    """What is asked for fits the model; nothing was allocated for it yet."""
    if _shares_memory(item.parameters):
        raise RequestError(400, "memory is not shared with clients: send tensors as binary data")
    if item.datatype != DATATYPES[field.dtype]:
        raise RequestError(
            400, f"the input {field.name!r} has to be {DATATYPES[field.dtype]}, not {item.datatype[:20]!r}"
        )
    fits = len(item.shape) == len(field.shape) and all(
        want in (-1, size) for want, size in zip(field.shape, item.shape, strict=False)
    )
    if not fits:
        wanted = f"{list(field.shape)}, where -1 is any size" if -1 in field.shape else str(list(field.shape))
        raise RequestError(
            400, f"the input {field.name!r} has the shape {item.shape}; it has to have {wanted}"
        )
    if model.batch_sizes and not 1 <= item.shape[0] <= model.most_rows:
        raise RequestError(400, f"{model.name} takes from 1 to {model.most_rows} rows")
    if math.prod(item.shape) > field.most:
        raise RequestError(413, f"the input {field.name!r} has more than {field.most} elements")


def _from_binary(
    field: TensorField, item: InputTensor, size: object, body: bytearray, start: int
) -> torch.Tensor:
    count = math.prod(item.shape)
    if type(size) is not int or size != count * field.dtype.itemsize:
        expected = count * field.dtype.itemsize
        raise RequestError(400, f"the input {field.name!r} has to have {expected} bytes of binary data")
    if item.data is not None or start + size > len(body):
        what = "also data" if item.data is not None else "less binary data than it says"
        raise RequestError(400, f"the input {field.name!r} has {what}")
    if field.dtype is torch.bool:
        return _flat(body, torch.uint8, count, start).ne(0).reshape(item.shape)
    return _flat(body, field.dtype, count, start).reshape(item.shape)


def _flat(body: bytearray, dtype: torch.dtype, count: int, start: int) -> torch.Tensor:
    """Numbers that stay where they are in the body."""
    return (
        torch.frombuffer(body, dtype=dtype, count=count, offset=start)
        if count
        else torch.empty(0, dtype=dtype)
    )


def _from_json(field: TensorField, item: InputTensor) -> torch.Tensor:
    if item.data is None:
        raise RequestError(400, f"the input {field.name!r} has no data")
    count, real = math.prod(item.shape), field.dtype.is_floating_point
    nested = any(isinstance(part, list) for part in item.data)
    try:
        found = list(_leaves(item.data, item.shape if nested else [count]))
    except (TypeError, ValueError):
        raise RequestError(
            400, f"the data of the input {field.name!r} does not have the shape {item.shape}"
        ) from None
    kinds = {bool} if field.dtype is torch.bool else {int, float} if real else {int}
    if not set(map(type, found)) <= kinds:
        raise RequestError(400, f"the data of the input {field.name!r} is not {item.datatype}")
    beyond = RequestError(
        400,
        f"the data of the input {field.name!r} is beyond {item.datatype}; NaN and infinity need binary data",
    )
    if kinds == {int} and found:
        limits = torch.iinfo(field.dtype)
        if min(found) < limits.min or max(found) > limits.max:
            raise beyond
    try:
        made = torch.tensor(found, dtype=field.dtype).reshape(item.shape)
    except OverflowError:
        raise beyond from None
    if real and not made.isfinite().all():  # the largest numbers of JSON, and what its readers make of NaN
        raise beyond
    return made


def _leaves(item: Any, shape: Sequence[int]) -> Iterator[Any]:
    """The numbers of lists that are nested like a shape. Raises ValueError or TypeError if they are not."""
    if not shape:
        yield item
        return
    if len(item) != shape[0]:
        raise ValueError
    if len(shape) == 1:
        yield from item
        return
    for part in item:
        if not isinstance(part, list):
            raise TypeError
        yield from _leaves(part, shape[1:])
