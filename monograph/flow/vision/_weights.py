"""Weights of models from files: state dicts of torch.save, safetensors files, and directories of mg.save."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from monograph import CheckpointError
from monograph.checkpoint.load import load_checkpoint
from monograph.checkpoint.save import reason_of

Pretrained = bool | str | os.PathLike[str]
Model = TypeVar("Model", bound=nn.Module)

SHOWN = 4  # names of a list in a message


def with_weights(
    make: Callable[[], Model], pretrained: Pretrained, *, name: str, passed_over: tuple[str, ...] = ()
) -> Model:
    """The model, with the weights of a file if one is given; entries that end in one of `passed_over` are not read.

    CheckpointError for True, for a file that cannot be read, and for one that does not fit.
    """
    path = _path(pretrained, name)
    state = {} if path is None else read_state(path)
    model = make()
    if path is not None:
        load_state(model, {key: state[key] for key in state if not key.endswith(passed_over)}, path)
    return model


def _path(pretrained: Pretrained, name: str) -> Path | None:
    if pretrained is False or pretrained is None:
        return None
    if isinstance(pretrained, (str, os.PathLike)):
        return Path(pretrained)
    raise CheckpointError(
        f"{name}(pretrained={pretrained!r}) would have to download weights, and nothing is ever downloaded",
        hint=f'get the weights yourself and pass the path of the file: {name}(pretrained="weights.pt")',
    )


def read_state(path: Path) -> Mapping[str, Tensor]:
    """The state dict in a file or a directory. CheckpointError for anything else; nothing of it is run."""
    if path.is_dir():
        state: object = load_checkpoint(path)
    else:
        state = _read_file(path)
    if not isinstance(state, Mapping) or not all(
        isinstance(key, str) and isinstance(value, Tensor) for key, value in state.items()
    ):
        raise CheckpointError(
            f'"{path}" holds no state dict: names, and a tensor for each',
            hint="save model.state_dict() itself, without anything around it",
        )
    return state


def _read_file(path: Path) -> Any:
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        return torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise CheckpointError(f'there is no file "{path}"', hint="look at the path of the weights") from None
    except UnpicklingError as error:
        raise CheckpointError(
            f'cannot load "{path}": it is damaged, or holds more than tensors; nothing of it was run',
            hint="save model.state_dict() with torch.save",
        ) from error
    except Exception as error:  # each reader fails on damaged bytes in ways of its own
        raise CheckpointError(f'cannot load "{path}": {reason_of(error)}') from error


def load_state(model: nn.Module, state: Mapping[str, Tensor], path: Path) -> None:
    """Give the model the tensors of a file. CheckpointError names what is missing, unexpected or of another shape."""
    own = model.state_dict()
    shapes = {
        key: f"{key} {list(state[key].shape)} for {list(tensor.shape)}"
        for key, tensor in own.items()
        if key in state and state[key].shape != tensor.shape
    }
    fitting = {key: tensor for key, tensor in state.items() if key not in shapes}
    try:
        missing, unexpected = model.load_state_dict(fitting, strict=False)
    except RuntimeError as error:
        raise CheckpointError(f'the weights in "{path}" do not fit: {reason_of(error)}') from error
    faults = {
        "missing": [key for key in missing if key not in shapes],
        "unexpected": unexpected,
        "of another shape": list(shapes.values()),
    }
    if any(faults.values()):
        message = "; ".join(f"{what}: {_shown(names)}" for what, names in faults.items() if names)
        raise CheckpointError(
            f'the weights in "{path}" do not fit {type(model).__name__}: {message}',
            hint="make the model with the arguments of the one that was saved, such as num_classes",
        )


def _shown(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
