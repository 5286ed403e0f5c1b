"""ONNX files: written by torch's exporter and compared on onnxruntime; weights read by their names.

onnx and onnxruntime are imported where they are used: they belong to the extra `onnx`.
"""

from __future__ import annotations

import base64
import importlib
import json
import logging
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import numpy as np
import safetensors.torch
import torch
from torch import nn

from monograph.checkpoint.errors import Damaged, Refused
from monograph.checkpoint.files import in_place_of
from monograph.checkpoint.flatten import flatten
from monograph.checkpoint.manifest import parse_json
from monograph.checkpoint.rebuild import rebuild
from monograph.errors import ArtifactError, first_line

STATE: Final = "monograph.state"  # of the metadata: what was stored besides the weights
TENSORS: Final = "monograph.state.tensors"
_TOLERANCE: Final = 1e-3  # relative to the largest result: other kernels round otherwise
_MOST_BYTES: Final = 2 << 30  # of one file


@dataclass(frozen=True)
class Exported:
    """What is exported: a module over flat tensors, and how its arguments and results are called.

    `dims` says for each argument which of its dimensions vary, `samples` are arguments for some sizes, the first
    those to export with.
    """

    module: nn.Module
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    dims: tuple[Mapping[int, tuple[str, int, int]], ...]
    samples: tuple[tuple[torch.Tensor, ...], ...]


def write_onnx(exported: Exported, path: Path, state: Mapping[str, Any] | None) -> None:
    """Write the file, check it, and compare it with the module. Raises `Refused` if it computes something else."""
    onnx, runtime = _library("onnx"), _library("onnxruntime")
    _library("onnxscript")
    metadata = {} if state is None else _state_to_metadata(state)
    program = _exported(exported)
    program.model.metadata_props.update(metadata)
    with in_place_of(path) as temporary:
        program.save(str(temporary), external_data=False)
        try:
            onnx.checker.check_model(str(temporary), full_check=True)
        except onnx.checker.ValidationError as error:
            raise Refused(f"torch's exporter writes it wrongly: {str(error).splitlines()[0]}") from None
        try:
            session = runtime.InferenceSession(str(temporary), providers=["CPUExecutionProvider"])
        except Exception as error:  # its errors have no class in common
            raise Refused(f"onnxruntime cannot run it: {str(error).splitlines()[0]}") from None
        _compare(exported, session)


def input_names(path: Path) -> tuple[str, ...]:
    """The arguments that a file takes: one that nothing is computed from may be missing."""
    return tuple(item.name for item in _library("onnx").load(path).graph.input)


def load_onnx_weights(path: str | os.PathLike[str], module: nn.Module) -> dict[str, Any]:
    """Copy the weights of an ONNX file into a module by their names, and return the state that was stored with them.

    A name in the file may have those of the modules around in front, as `model.` has. Warns of each parameter or
    buffer that has no weight of its shape in the file, and of each weight that has no place; nothing is copied if
    the file is damaged. Needs the extra `onnx`. Raises ArtifactError.

    >>> state = mg.load_onnx_weights("classifier.onnx", model)  # doctest: +SKIP
    """
    onnx, path = _library("onnx"), Path(path)
    with _reading(path):
        if path.stat().st_size > _MOST_BYTES:
            raise Damaged("it has more than 2 GB")
        model = onnx.load_model_from_string(path.read_bytes())
        onnx.checker.check_model(model)
        found = {item.name: _weight(onnx, item) for item in model.graph.initializer}
        state = _state_from({item.key: item.value for item in model.metadata_props})
    own: dict[str, torch.Tensor] = dict(module.state_dict())
    pairs, unused = _matched(own, found)
    tied = {own[name].data_ptr() for name in pairs}
    with torch.no_grad():
        for name, tensor in own.items():
            if name not in pairs and (tensor.data_ptr() in tied or not tensor.is_floating_point()):
                continue  # it has its weight under another name, or counts what inference does not look at
            if name not in pairs:
                warnings.warn(
                    f"{path.name} has no weight for {name} {tuple(tensor.shape)}: it stays", stacklevel=2
                )
            else:
                tensor.copy_(pairs[name])
    for name in unused:
        shape = tuple(found[name].shape)
        warnings.warn(f"{type(module).__name__} has no place for the weight {name} {shape}", stacklevel=2)
    return state


def _exported(exported: Exported) -> Any:
    shapes = tuple(
        {axis: torch.export.Dim(name, min=low, max=high) for axis, (name, low, high) in dims.items()}
        for dims in exported.dims
    )
    with _quiet(), torch.no_grad():
        try:
            program = torch.onnx.export(
                exported.module,
                exported.samples[0],
                input_names=list(exported.inputs),
                output_names=list(exported.outputs),
                dynamic_shapes={"tensors": shapes} if any(shapes) else None,
                dynamo=True,
                optimize=False,  # it would fold parameters into constants without their names
                verbose=False,
            )
        except Exception as error:  # its errors have no class in common
            while error.__cause__ is not None and isinstance(error.__cause__, Exception):
                error = error.__cause__  # the others say what to report to torch
            raise Refused(
                f"torch's exporter cannot write it: {first_line(error)}",
                "deploy it with mg.save(graph, path)",
            ) from None
    if program is None:
        raise Refused("torch.onnx gave no program")
    return program


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporter's notes about libraries that are not installed, and torch's about itself."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _compare(exported: Exported, session: Any) -> None:
    for sample in exported.samples:
        with torch.no_grad():
            expected: Sequence[torch.Tensor] = exported.module(*sample)
        given = {name: tensor.numpy() for name, tensor in zip(exported.inputs, sample, strict=True)}
        known = {item.name for item in session.get_inputs()}
        results = session.run(None, {name: array for name, array in given.items() if name in known})
        for name, wanted, got in zip(exported.outputs, expected, results, strict=True):
            made = torch.from_numpy(np.asarray(got))
            if made.shape != wanted.shape:
                raise Refused(
                    f"onnxruntime gives {name} the shape {tuple(made.shape)}, not {tuple(wanted.shape)}"
                )
            made, wanted = made.double(), wanted.double()
            same = (made == wanted) | (made.isnan() & wanted.isnan())
            largest = _largest(wanted[wanted.isfinite()])
            error = _largest((made - wanted)[~same])
            if not error <= _TOLERANCE * max(largest, 1e-6):
                raise Refused(
                    f"onnxruntime gives another {name}: numbers of up to {largest:.3g} differ by up to {error:.3g}",
                    "was model.eval() forgotten? dropout and statistics of the batch differ from call to call",
                )


def _largest(numbers: torch.Tensor) -> float:
    return numbers.abs().max().item() if numbers.numel() else 0.0


def _weight(onnx: ModuleType, item: Any) -> torch.Tensor:
    if item.data_location == onnx.TensorProto.EXTERNAL or item.external_data:
        raise Damaged(f"the weight {item.name!r} is in another file, which is not read")
    array: Any = onnx.numpy_helper.to_array(item)
    if array.dtype.kind not in "biufc":
        return torch.from_numpy(array.astype(np.float32))  # bfloat16 and such, which numpy does not know
    return torch.from_numpy(np.array(array))


def _matched(
    own: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], list[str]]:
    """The weight for each name, and the weights that have no place: constants of the program are none."""
    prefixes = [""]
    for name in found:
        prefixes += [name[: -len(key)] for key in own if name.endswith(f".{key}") and name != key]
    best = max(dict.fromkeys(prefixes), key=lambda prefix: sum(prefix + key in found for key in own))
    pairs = {
        key: found[best + key]
        for key, tensor in own.items()
        if best + key in found and found[best + key].shape == tensor.shape
    }
    used = {best + key for key in pairs}
    return pairs, [name for name in found if name not in used and "." in name and name.startswith(best)]


def _state_to_metadata(state: Mapping[str, Any]) -> dict[str, str]:
    if not isinstance(state, dict):
        raise Refused("the state is no dict", 'write state={"epoch": 3}')
    flat = flatten(state)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in flat.tensors.items()}
    raw = base64.b64encode(safetensors.torch.save(tensors)).decode()
    return {STATE: json.dumps({"tree": flat.tree}, allow_nan=False), TENSORS: raw}


def _state_from(metadata: Mapping[str, str]) -> dict[str, Any]:
    if STATE not in metadata:
        return {}
    try:
        tensors = safetensors.torch.load(base64.b64decode(metadata.get(TENSORS, ""), validate=True))
    except (ValueError, safetensors.SafetensorError) as error:
        raise Damaged(f"its state is damaged: {error}") from None
    values = parse_json(metadata[STATE].encode(), "its state")
    state = rebuild(values.get("tree"), tensors)
    if not isinstance(state, dict):
        raise Damaged("its state is no dict")
    return state


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except ArtifactError:
        raise
    except Exception as error:
        text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        hint = "export it again with mg.export_onnx(graph, path)"
        raise ArtifactError(f'cannot load "{path}": {text.strip()[:500]}', hint=hint) from None


def _library(name: str) -> ModuleType:
    try:
        module = importlib.import_module(name)
        if name == "onnx":
            importlib.import_module("onnx.checker")
            importlib.import_module("onnx.numpy_helper")
    except ImportError:
        raise ArtifactError(f"{name} is not installed", hint='pip install "monograph[onnx]"') from None
    return module
