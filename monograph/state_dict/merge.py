"""Put loaded values into the live tensors, dicts and lists that can take them, so that builds on those stay."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from numbers import Number
from typing import Any

import torch

from monograph.compat.tensors import num_elements
from monograph.state_dict.loading import Loading


def merged(old: Any, new: Any, loading: Loading) -> Any:
    """`new` with the live objects of `old` where they can take the new values; to be `settled` at the commit."""
    if isinstance(new, torch.Tensor):
        if isinstance(old, torch.Tensor) and _form(old) == _form(new):
            loading.copies.append((old, new))
            return old
        return new.clone()  # not the very tensor of the state dict, which others may hold
    if isinstance(new, dict):
        items = {
            key: merged(old.get(key) if isinstance(old, dict) else None, item, loading)
            for key, item in new.items()
        }
        return _Refill(old, items) if type(old) is type(new) else items
    if type(new) in (list, tuple):
        fits = type(old) is type(new) and len(old) == len(new)
        made = [merged(old[index] if fits else None, item, loading) for index, item in enumerate(new)]
        if type(new) is list:
            return _Refill(old, made) if type(old) is list else made
        return old if fits and all(a is b for a, b in zip(old, made, strict=True)) else tuple(made)
    return new


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    compressed = tensor.layout not in (
        torch.strided,
        torch.sparse_coo,
    )  # copied into ones of as many elements only
    return tensor.shape, tensor.dtype, tensor.device, tensor.layout, num_elements(tensor) if compressed else 0


class _Refill:
    """A live dict or list that gets new content when all is known to be right."""

    def __init__(self, live: Any, content: Any) -> None:
        self.live, self.content = live, content


def settled(item: Any) -> Any:
    """What `merged` made, with its live dicts and lists filled. Doing it twice does the same."""
    if isinstance(item, _Refill):
        content = settled(item.content)
        item.live.clear()
        item.live.update(content) if isinstance(item.live, dict) else item.live.extend(content)
        return item.live
    if type(item) is dict:
        return {key: settled(entry) for key, entry in item.items()}
    if type(item) is tuple:
        made = tuple(map(settled, item))
        return item if all(a is b for a, b in zip(item, made, strict=True)) else made
    return list(map(settled, item)) if type(item) is list else item


def misfits(live: Any, saved: Any, path: str, *, exact: bool = True) -> Iterator[str]:
    """Where a saved value cannot stand in the place of a live one: another shape, or another kind of value.

    Unless `exact`, as for what is of the user's own, None may stand for everything and lists may grow.
    """
    if live is None or (saved is None and (not exact or isinstance(live, (bool, str)))):
        return
    if isinstance(live, torch.Tensor) and isinstance(saved, torch.Tensor):
        if live.shape != saved.shape:
            yield f"{path} is of shape {tuple(saved.shape)}; here it is {tuple(live.shape)}"
    elif _kind(live) != _kind(saved):
        yield f"{path} is a {type(saved).__name__}; here it is a {type(live).__name__}"
    elif isinstance(live, Mapping):
        for key in live:
            if key in saved:
                yield from misfits(live[key], saved[key], f"{path}/{key}", exact=exact)
    elif isinstance(live, (list, tuple)):
        if len(live) != len(saved) and (exact or isinstance(live, tuple)):
            yield f"{path} has {len(saved)} items; here it has {len(live)}"
        for index, (item, other) in enumerate(zip(live, saved, strict=False)):
            yield from misfits(item, other, f"{path}/{index}", exact=exact)


def is_torchs(item: object) -> bool:
    """True for torch's own optimizers, schedulers and scalers, which keep the form of their state."""
    return type(item).__module__.startswith("torch.")


def _kind(value: Any) -> str:
    """Numbers and tensors without dimensions may stand for each other, lists for tuples."""
    if isinstance(value, torch.Tensor):
        return "tensor" if value.dim() else "number"
    if isinstance(value, bool) or not isinstance(value, (Number, Mapping, list, tuple)):
        return type(value).__name__
    if isinstance(value, Number):
        return "number"
    return "mapping" if isinstance(value, Mapping) else "sequence"
