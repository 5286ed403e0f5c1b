"""A model as Triton's server finds it in a repository: an ONNX file, and what it takes and gives.

Source: the layout of repositories and the configuration of models in the documentation of Triton Inference Server.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import torch

from monograph.checkpoint.files import in_place_of
from monograph.export.batch_independence import rows_are_apart, trials
from monograph.export.onnx import Exported, input_names, write_onnx

DATATYPES: Final = {
    torch.bool: "BOOL",
    torch.uint8: "UINT8",
    torch.uint16: "UINT16",
    torch.uint32: "UINT32",
    torch.uint64: "UINT64",
    torch.int8: "INT8",
    torch.int16: "INT16",
    torch.int32: "INT32",
    torch.int64: "INT64",
    torch.float16: "FP16",
    torch.bfloat16: "BF16",
    torch.float32: "FP32",
    torch.float64: "FP64",
}  # as the Open Inference Protocol calls them too

Tensors = Sequence[torch.Tensor]


def write_triton(exported: Exported, path: Path) -> None:
    """Write the folder of a model: `config.pbtxt` and `1/model.onnx`."""
    file = path / "1" / "model.onnx"
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        write_onnx(exported, file, None)
    except BaseException:
        with suppress(OSError):  # an older export stays
            file.parent.rmdir()
            path.rmdir()
        raise
    with in_place_of(path / "config.pbtxt") as config:
        config.write_text(_config(exported, path.name, input_names(file)))


def _config(exported: Exported, name: str, known: Sequence[str]) -> str:
    """The configuration; the first size of all tensors is a batch for Triton to fill, if rows do not depend on each other."""
    with torch.no_grad():
        results = [exported.module(*sample) for sample in exported.samples]
    inputs = list(zip(*exported.samples, strict=True))
    outputs = list(zip(*results, strict=True))
    batch = _batch(exported, inputs, outputs)
    pairs = [(key, found) for key, found in zip(exported.inputs, inputs, strict=True) if key in known]
    lines = [f'name: "{name}"', 'backend: "onnxruntime"', f"max_batch_size: {batch}"]
    lines += ["dynamic_batching { }"] if batch else []
    lines += [_tensor("input", key, found, batch) for key, found in pairs]
    lines += [_tensor("output", *pair, batch) for pair in zip(exported.outputs, outputs, strict=True)]
    return "\n".join(lines) + "\n"


def _batch(exported: Exported, inputs: Sequence[Tensors], outputs: Sequence[Tensors]) -> int:
    """How many rows Triton may put together; 0 if there are no rows that could be."""
    firsts = {dims.get(0) for dims in exported.dims}
    found = firsts.pop() if len(firsts) == 1 else None
    if found is None or found[1] > 1 or found[2] == 1:
        return 0
    rows = [item.shape[:1] for item in inputs[0]]
    if any([item.shape[:1] for item in items] != rows for items in outputs):
        return 0
    sample = exported.samples[0]

    def run(batch: Tensors) -> Tensors:
        results: Tensors = exported.module(*batch)
        return results

    with torch.no_grad():
        batches = trials(run, [item.shape for item in sample], [item.dtype for item in sample])
        return found[2] if all(rows_are_apart(run, batch) for batch in batches) else 0


def _tensor(kind: str, name: str, found: Tensors, batch: int) -> str:
    """One tensor, from what it was at two sizes."""
    shapes = [item.shape[1:] if batch else item.shape for item in found]
    dims = [sizes[0] if len(set(sizes)) == 1 else -1 for sizes in zip(*shapes, strict=True)]
    shape = f"dims: {dims}" if dims else "dims: [1] reshape { shape: [] }"
    return f'{kind} {{ name: "{name}" data_type: TYPE_{DATATYPES[found[0].dtype]} {shape} }}'
