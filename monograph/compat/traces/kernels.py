"""What kernels for fakes give, by the forms of what they get: in front of the cache of `torch._subclasses.fake_tensor`.

Without it each op goes through that cache, or through its kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch

from monograph.compat.fakes import fake_around
from monograph.compat.patching import replace

_PLAIN = frozenset(
    (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
)
_MOST = 1 << 16  # entries, of about a kilobyte


class _Form(NamedTuple):
    """A result: a new tensor, by its sizes, strides, dtype and device; or the argument at a position; or None."""

    options: Any = None
    argument: int = -1


class _Known:
    """Results of this process, as torch's own cache is; both are emptied together."""

    def __init__(self) -> None:
        self.results: dict[Any, Any] = {}
        self._misses = 0

    def follow(self, fakes: Any) -> None:
        """Forget all if torch has forgotten."""
        misses = getattr(fakes.FakeTensorMode, "cache_misses", 0)
        if misses < self._misses or len(self.results) > _MOST or not fakes.FakeTensorMode.cache:
            self.results.clear()
        self._misses = misses


_KNOWN = _Known()


@contextmanager
def results_by_form(mode: Any) -> Iterator[None]:
    """Inside, an op on fakes of `mode` gives what it gave for arguments of the same forms.

    What: `FakeTensorMode._cached_dispatch_impl`, called by what makes the result of each op. Why: torch's cache
    describes each tensor by seventeen properties in Python, and takes longer than many a kernel; half of a trace is
    that. It is asked first, and what it does not keep is not kept here. Degraded path: it is asked each time.
    """
    fakes: Any = torch._subclasses.fake_tensor
    asked = getattr(mode, "_cached_dispatch_impl", None)
    with ExitStack() as stack:
        if asked is not None and hasattr(fakes.FakeTensorMode, "cache"):
            _KNOWN.follow(fakes)
            replace(stack, mode, "_cached_dispatch_impl", _quick(mode, asked, _KNOWN.results))
        yield


def _quick(mode: Any, asked: Callable[..., Any], known: dict[Any, Any]) -> Callable[..., Any]:
    detach, detached = torch.ops.aten.detach.default, torch.fx.experimental.proxy_tensor.snapshot_fake

    quiet = torch._C.DisableTorchFunction  # a mode of functions that is on would see each look at a tensor

    def results(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        given: list[Any] = []
        with quiet():
            key = _key(func, args, kwargs, given, mode)
            if key is not None and func is detach:
                return detached(args[0])  # which is its kernel
            if key is not None and (forms := known.get(key)) is not None:
                if type(forms) is _Form:
                    return _made(forms, args, mode)
                return tuple([_made(form, args, mode) for form in forms])
        made = asked(func, types, args, kwargs)
        if key is not None:
            with quiet():
                if (forms := _forms_of(made, args, given, mode)) is not None:
                    known[key] = forms
        return made

    return results


# What: the device of new tensors by default. Degraded path: fakes know theirs.
_default_device: Callable[[], Any] = getattr(torch._C, "_get_default_device", str)


def _key(func: Any, args: Any, kwargs: Any, given: list[Any], mode: Any) -> Any:
    """All that the form of a result depends on; None where that is more than forms and constants."""
    if not _is_kept(func) and func is not torch.ops.aten.detach.default:
        return None
    key: list[Any] = [func, torch.get_default_dtype(), torch.is_inference_mode_enabled(), _default_device()]
    if not _describe(args, key, given, mode):
        return None
    if kwargs:
        key += kwargs
        if not _describe(kwargs.values(), key, given, mode):
            return None
    return tuple(key)


@cache
def _is_kept(op: Any) -> bool:
    """True for ops of torch whose results are new tensors or arguments, of forms that depend on no values."""
    if not isinstance(op, torch._ops.OpOverload) or op.namespace not in ("aten", "prims"):
        return False
    tags, schema = torch.Tag, op._schema
    odd = (tags.data_dependent_output, tags.dynamic_output_shape, tags.inplace_view)
    if op.is_view or not schema.returns or any(tag in op.tags for tag in odd):
        return False
    if schema.name in ("aten::_unsafe_view", "aten::lift", "aten::lift_fresh", "aten::lift_fresh_copy"):
        return False
    for item in schema.arguments:
        if item.alias_info is not None and (item.kwarg_only or not item.alias_info.is_write):
            return False
    return all(str(item.type) == "Tensor" for item in schema.returns)


def _describe(items: Any, key: list[Any], given: list[Any], mode: Any) -> bool:
    """Add the forms of arguments to a key, and the fakes to `given`; False if one is something else than plain."""
    fake = torch._subclasses.fake_tensor.FakeTensor
    for item in items:
        kind = type(item)
        if kind is fake:
            if (
                item.constant is not None
                or item.fake_mode is not mode
                or item._has_symbolic_sizes_strides
                or item.layout is not torch.strided
                or item._is_zerotensor()
            ):
                return False
            place = item.storage_offset(), item.untyped_storage().nbytes()
            if type(place[0]) is not int or type(place[1]) is not int:  # a row of a tensor whose size varies
                return False
            given.append(item)
            key += (
                *(item.shape, item.stride(), *place),
                *(item.dtype, item.fake_device, item.requires_grad),
                *(item.is_conj(), item.is_neg(), item.is_inference()),
            )
        elif kind in _PLAIN:
            key.append(kind)
            key.append(item)
        elif kind is list or kind is tuple:
            key.append(kind)
            key.append(len(item))
            if not _describe(item, key, given, mode):
                return False
        else:
            return False
    return True


def _forms_of(made: Any, args: Sequence[Any], given: Sequence[Any], mode: Any) -> Any:
    """How to make the same again; None if there is something else than new tensors and whole arguments."""
    several = made if type(made) is tuple else (made,)
    forms, memory = [], {item.untyped_storage()._cdata for item in given}
    for item in several:
        position = next((position for position, other in enumerate(args) if other is item), -1)
        if item is None or position >= 0:
            forms.append(_Form(argument=position))
            continue
        if not _is_plain(item) or item.untyped_storage()._cdata in memory:
            return None
        memory.add(item.untyped_storage()._cdata)
        form = _Form((tuple(item.shape), item.stride(), item.dtype, item.fake_device))
        keys: Any = torch._C._dispatch_key_set
        if keys(_made(form, args, mode)) != keys(item):
            return None
        forms.append(form)
    return forms if type(made) is tuple else forms[0]


def _is_plain(made: Any) -> bool:
    """True for a fake that is its sizes, strides, dtype and device, on memory that begins with it."""
    return (
        type(made) is torch._subclasses.fake_tensor.FakeTensor
        and made.layout is torch.strided
        and made.constant is None
        and made.real_tensor is None
        and not (made._has_symbolic_sizes_strides or made.is_quantized or made.requires_grad)
        and not (made.is_conj() or made.is_neg() or made.is_inference() or made.storage_offset())
    )


def _made(form: _Form, args: Sequence[Any], mode: Any) -> Any:
    if form.options is None:
        return args[form.argument] if form.argument >= 0 else None
    shape, stride, dtype, device = form.options
    with torch._C._DisableTorchDispatch():
        held = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    return fake_around(mode, held, device)
