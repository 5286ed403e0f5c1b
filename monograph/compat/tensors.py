"""Tensors: their memory, the descriptors of their fields in C, and what guards compare (`torch._C._dynamo.guards`).

Without those of C, guards compare the same in Python, which takes longer. The last part is the interface to numpy's C code,
which guards borrow to look at many addresses in one call.
"""

from __future__ import annotations

import ctypes
import importlib
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch


def is_transformed(tensor: torch.Tensor) -> bool:
    """True for the wrappers that `torch.vmap` and `torch.func.grad` put around values of a trace."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


@contextmanager
def outside_of_transforms() -> Iterator[None]:
    """Inside, new tensors are plain ones, also in the middle of `vmap` or of a transform of `torch.func`.

    What: functorch's stack of interpreters, emptied for a while. Why: a trace meets tensors there for the first time.
    Degraded path: none is emptied, and such a trace fails.
    """
    functorch = importlib.import_module("torch._functorch.pyfunctorch")
    clear = getattr(functorch, "temporarily_clear_interpreter_stack", nullcontext)
    with clear():
        yield


def may_overlap(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """True if two elements may share one place: such memory cannot be written."""
    reach = 0
    dimensions = [(size, stride) for size, stride in zip(sizes, strides, strict=True) if size > 1]
    for size, stride in sorted(dimensions, key=lambda dimension: dimension[1]):
        if stride <= reach:
            return True
        reach += (size - 1) * stride
    return False


GRADIENT_GETTER: Any = vars(torch._C.TensorBase)["grad"].__get__
GRADIENT_SETTER: Any = vars(torch._C.TensorBase)["grad"].__set__
# questions that a fake answers as a real tensor does
FORM_GETTERS = frozenset(
    vars(torch._C.TensorBase)[name].__get__
    for name in ("device", "dtype", "layout", "requires_grad", "shape")
)
DATA_GETTER: Any = vars(torch._C.TensorBase)["data"].__get__
DATA_SETTER: Any = vars(torch._C.TensorBase)["data"].__set__
STOPS_GRADIENT: Any = (
    torch.Tensor.detach_,
    torch.Tensor.requires_grad_,
    vars(torch._C.TensorBase)["requires_grad"].__set__,
)
EQUALITY: Any = torch.Tensor.__eq__
VERSION_GETTER: Any = vars(torch._C.TensorBase)["_version"].__get__


def _addresses(table: dict[Any, Any]) -> Any:
    return (*map(id, table), *map(id, table.values()))


def _dict_version() -> Callable[[dict[Any, Any]], Any]:
    """What changes whenever a dict does. What: the version tag that Dynamo reads. Why: 40 ns for a dict of any size.
    Degraded path: the addresses of its keys and values.
    """
    try:
        found: Callable[[dict[Any, Any]], Any] = importlib.import_module(
            "torch._C._dynamo.guards"
        ).dict_version
        probe: dict[str, int] = {}
        first = found(probe)
        probe["a"] = 1
        return found if found(probe) != first else _addresses
    except (ImportError, AttributeError, TypeError):
        return _addresses


dict_version = _dict_version()


def metadata_guard(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """A check that tensors keep type, dtype, device, sizes, strides and requires_grad."""
    if (found := quick_metadata_guard(tensors)) is not None:
        return found
    expected = [_description(tensor) for tensor in tensors]
    return lambda *now: [_description(tensor) for tensor in now] == expected


def quick_metadata_guard(
    tensors: Sequence[torch.Tensor], varying: Sequence[Sequence[int]] = ()
) -> Callable[..., bool] | None:
    """The same in C, for as many objects of any kind; it also sees conjugation, inference tensors and functorch's.

    Of dimensions that are `varying` it checks nothing, and no strides of their tensors.

    What: the C++ TensorGuards. Why: 8 µs for 200 tensors. Degraded path: None.
    """
    if not tensors:
        return lambda: True
    try:
        module = importlib.import_module("torch._C._dynamo.guards")
        # None would stand for a size that is not looked at
        sizes: list[list[int | None]] = [list(tensor.shape) for tensor in tensors]
        strides = [_strides_to_check(tensor) for tensor in tensors]
        for index, dims in enumerate(varying):
            for dim in dims:
                sizes[index][dim] = None
            if dims:
                strides[index] = [None] * len(sizes[index])
        guards = module.TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
        check: Callable[..., bool] = guards.check
        return check
    except (ImportError, AttributeError, TypeError):
        return None


def _strides_to_check(tensor: torch.Tensor) -> list[int | None]:
    return list(tensor.stride()) if tensor.layout is torch.strided else [None] * tensor.dim()


# For tensors a function, and what it gives as long as all keep their data pointers. The tensors must stay alive.
PointerGuard = Callable[[Sequence[torch.Tensor]], tuple[Callable[[], Any], Any]]


def pointer_guard(tensors: Sequence[torch.Tensor]) -> tuple[Callable[[], Any], Any]:
    """A check that tensors keep their data pointers.

    What: the reader of a Python tensor's pointer that Inductor gives to C++ code. Why: a tenth of the time of
    `Tensor.data_ptr`, tensor by tensor, which is the degraded path.
    """
    simple = [tensor for tensor in tensors if _is_simple(tensor) and tensor.data_ptr()]
    known = set(map(id, simple))
    others = [tensor for tensor in tensors if id(tensor) not in known]
    fast = _read_pointers(simple)
    if fast is not None and not others:
        return fast, fast()

    def read() -> tuple[Any, list[int]]:
        return None if fast is None else fast(), [t.data_ptr() for t in (tensors if fast is None else others)]

    return read, read()


def _is_simple(tensor: torch.Tensor) -> bool:
    """True for tensors whose memory is their own; a wrapper's is no pointer, and asking for it is an error."""
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided


def _read_pointers(tensors: Sequence[torch.Tensor]) -> Callable[[], bytes] | None:
    """What gives the data pointers of tensors as bytes; None where the means for it are not there."""
    try:
        reader = importlib.import_module("torch._C._dynamo.guards")._torchinductor_pyobject_tensor_data_ptr
    except (ImportError, AttributeError):
        return None
    found = calls_of_each(reader, tensors)
    expected = struct.pack(f"{len(tensors)}P", *map(torch.Tensor.data_ptr, tensors))
    return found if found is not None and found() == expected else None


def _description(tensor: torch.Tensor) -> tuple[Any, ...]:
    kind = type(tensor), tensor.dtype, tensor.device, tensor.layout, tensor.requires_grad
    return *kind, tensor.is_conj(), tensor.is_neg(), tensor.shape, *_strides_to_check(tensor)


def users_of_storage(tensor: torch.Tensor) -> int:
    """How many tensors share the memory of this one, and what else keeps it alive.

    What: `torch._C._storage_Use_Count`. Why: a view that a user keeps is a user of the memory. Degraded path: always 0.
    """
    count: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)
    return 0 if count is None else count(tensor.untyped_storage()._cdata)


def storage_key(tensor: torch.Tensor) -> int:
    """A number that tensors on one storage share; a sparse tensor has several, and is alone."""
    with torch._C.DisableTorchFunction():  # a trace has asked often enough for this to show
        if tensor.layout is not torch.strided:
            return id(tensor)
        return int(tensor.untyped_storage()._cdata)


def changes_of(tensor: torch.Tensor) -> int:
    """How often a tensor was changed in place. What: its version. Degraded path: none; one of inference mode has none."""
    return tensor._version


def version_of(tensor: torch.Tensor) -> int:
    """The same, 0 for a tensor of inference mode."""
    return 0 if tensor.is_inference() else changes_of(tensor)


def is_view(tensor: torch.Tensor) -> bool:
    """True if autograd knows a tensor as a view of another one."""
    return tensor._base is not None


def negated_by_bit(tensor: torch.Tensor) -> torch.Tensor:
    """A view of the same memory that stands for its negation.

    What: `torch._neg_view`. Why: `.imag` of a conjugate view is one, and nothing public makes one of other tensors.
    Degraded path: none.
    """
    return torch._neg_view(tensor)


def coo_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The indices and the values of a sparse COO tensor, on its memory.

    What: getters of its own. Why: the public ones refuse a tensor that is not coalesced. Degraded path: none.
    """
    return tensor._indices(), tensor._values()


def num_elements(tensor: torch.Tensor) -> int:
    """How many elements a sparse tensor has."""
    return tensor._nnz()


def planned_device(device: torch.device) -> torch.device:
    """The device that a step is planned for. On meta nothing would choose kernels, nor be cast by autocast: it is the CPU."""
    return torch.device("cpu") if device.type == "meta" else device


def planned_form(mode: Any, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the form of another one, made in a mode: a fake that stands for nothing."""
    device = planned_device(tensor.device)
    with mode:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


WORD = ctypes.sizeof(ctypes.c_void_p)
_CALL_EACH = (
    12  # the place of PyUFunc_O_O in the table that numpy gives to extensions, part of its stable ABI
)


def words_at(addresses: Sequence[int]) -> Callable[[], Any]:
    """What reads a word of memory at each of these addresses, into a new array. They must stay readable."""
    if not addresses:
        return lambda: np.empty(0, dtype=np.int64)
    first = min(addresses)
    interface = {
        "data": (first, True),
        "shape": ((max(addresses) - first) // WORD + 1,),
        "typestr": np.dtype(np.int64).str,
        "version": 3,
    }
    memory = np.asarray(SimpleNamespace(__array_interface__=interface))
    places = (np.array(addresses, dtype=np.int64) - first) // WORD
    return partial(memory.take, places)  # all of C


def calls_of_each(function: int, objects: Sequence[Any]) -> Callable[[], bytes] | None:
    """What calls a C function `void* (*)(PyObject*)` with each object, and gives all results; None if numpy has no such
    loop. It ends at the first result that is null, and leaves those after it null. The objects must stay alive.
    """
    loop = _loop_over_objects()
    if loop is None:
        return None
    array, pair = ctypes.c_void_p * len(objects), ctypes.c_void_p * 2
    held = array(*map(id, objects))
    count, steps = (ctypes.c_ssize_t * 1)(len(objects)), (ctypes.c_ssize_t * 2)(WORD, WORD)
    address = ctypes.addressof

    def run() -> bytes:
        results = array()  # all null, and of this call: what is there is taken for objects to release
        loop(pair(address(held), address(results)), count, steps, function)
        return bytes(results)

    return run


def _loop_over_objects() -> Callable[..., Any] | None:
    """numpy's loop that calls a C function for each object of an array, without Python between."""
    try:
        capsule = importlib.import_module("numpy._core._multiarray_umath")._UFUNC_API
        get = ctypes.pythonapi.PyCapsule_GetPointer
        get.restype, get.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
        table = ctypes.cast(get(capsule, None), ctypes.POINTER(ctypes.c_void_p))
        prototype = ctypes.PYFUNCTYPE(
            None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p
        )
        return prototype(table[_CALL_EACH] or 0)
    except (ImportError, AttributeError, ValueError, TypeError):
        return None
