"""Whether a loaded state is the saved one: types, order, every bit and the strides."""

from __future__ import annotations

import struct
from collections import OrderedDict, defaultdict, deque
from typing import Any

import numpy as np
import torch


def difference(saved: Any, loaded: Any, path: str = "state") -> str | None:
    """Where two states differ first, or None."""
    kind, loaded_kind = (_kind(value, is_root=path == "state") for value in (saved, loaded))
    if kind is not loaded_kind:
        return f"{path}: {kind} became {type(loaded)}"
    return _COMPARE.get(kind, _by_value)(saved, loaded, path)


def _kind(value: Any, *, is_root: bool) -> type:
    """A Parameter comes back as a plain tensor, and the saved dict as a Checkpoint."""
    if isinstance(value, torch.Tensor):
        return torch.Tensor
    return dict if is_root and isinstance(value, dict) else type(value)


def assert_equal(saved: Any, loaded: Any) -> None:
    """Fail at the first difference, and name its path."""
    found = difference(saved, loaded)
    assert found is None, found


def _by_value(saved: Any, loaded: Any, path: str) -> str | None:
    if isinstance(saved, np.generic):
        return (
            None
            if (saved.dtype, saved.tobytes()) == (loaded.dtype, loaded.tobytes())
            else f"{path}: {loaded!r}"
        )
    return None if saved == loaded else f"{path}: {saved!r} became {loaded!r}"


def _tensor(saved: torch.Tensor, loaded: torch.Tensor, path: str) -> str | None:
    if loaded.requires_grad or not loaded.is_cpu:
        return f"{path}: not a plain tensor on the host"
    if is_dense(saved) and saved.stride() != loaded.stride():
        return f"{path}: strides {saved.stride()} became {loaded.stride()}"
    same = (
        saved.dtype == loaded.dtype and saved.shape == loaded.shape and raw_bytes(saved) == raw_bytes(loaded)
    )
    return None if same else f"{path}: {saved} became {loaded}"


def is_dense(tensor: torch.Tensor) -> bool:
    """True if a copy keeps the strides: the elements fill their memory."""
    return tensor.numel() > 0 and torch.empty_like(tensor).stride() == tensor.stride()


def raw_bytes(tensor: torch.Tensor) -> bytes:
    """The elements in the order of the shape."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu()
    if plain.numel() == 0:
        return b""
    raw = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
    return plain.view(raw[plain.element_size()]).contiguous().numpy().tobytes()


def _float(saved: float, loaded: float, path: str) -> str | None:
    return (
        None
        if struct.pack(">d", saved) == struct.pack(">d", loaded)
        else f"{path}: {saved!r} became {loaded!r}"
    )


def _complex(saved: complex, loaded: complex, path: str) -> str | None:
    return _float(saved.real, loaded.real, path) or _float(saved.imag, loaded.imag, path)


def _sequence(saved: Any, loaded: Any, path: str) -> str | None:
    if len(saved) != len(loaded):
        return f"{path}: {len(saved)} items became {len(loaded)}"
    found = (difference(a, b, f"{path}/{i}") for i, (a, b) in enumerate(zip(saved, loaded, strict=True)))
    return next((item for item in found if item), None)


def _dict(saved: Any, loaded: Any, path: str) -> str | None:
    keys = _sequence(list(saved), list(loaded), f"{path} keys")
    values = (
        difference(a, b, f"{path}/{key}") for (key, a), b in zip(saved.items(), loaded.values(), strict=False)
    )
    attributes = None
    if hasattr(saved, "_metadata"):
        attributes = difference(saved._metadata, getattr(loaded, "_metadata", None), f"{path}/_metadata")
    return keys or attributes or next((item for item in values if item), None)


def _defaultdict(saved: Any, loaded: Any, path: str) -> str | None:
    if saved.default_factory is not loaded.default_factory:
        return f"{path}: another factory"
    return _dict(saved, loaded, path)


def _deque(saved: Any, loaded: Any, path: str) -> str | None:
    return f"{path}: another length" if saved.maxlen != loaded.maxlen else _sequence(saved, loaded, path)


def _array(saved: Any, loaded: Any, path: str) -> str | None:
    same = (saved.dtype.str, saved.shape, saved.tobytes()) == (
        loaded.dtype.str,
        loaded.shape,
        loaded.tobytes(),
    )
    order = saved.flags.fnc == loaded.flags.fnc
    return None if same and order else f"{path}: {saved!r} became {loaded!r}"


_COMPARE: dict[type, Any] = {
    torch.Tensor: _tensor,
    float: _float,
    complex: _complex,
    list: _sequence,
    tuple: _sequence,
    dict: _dict,
    OrderedDict: _dict,
    defaultdict: _defaultdict,
    deque: _deque,
    np.ndarray: _array,
}
