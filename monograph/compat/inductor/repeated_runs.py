"""A compiled library that is run for one step after another without Python between: the loop is in C.

What: the C interface of AOTInductor's libraries (`AOTInductorModelContainerRun`), that of torch for them
(`aoti_torch_*`), and the functions by which Python hands out tensors for it. Degraded path: where one is missing,
`RepeatedRuns.of` gives None, and steps are called one by one.
"""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Self

import torch

PIECE_SECONDS: float = 0.005  # after which Python is asked for signals
_MOST_DIMENSIONS = 16

_MOST_STEPS, _MOST_BYTES = 4096, 1 << 24  # of a piece, and of its results

# Who runs a library loses the tensors that it gives: each step gives objects of its own for the tensors that stay, and
# for those on a stack views that begin where the part of the step does. The results are copied to where they are stacked.
CODE = (
    f"#define MOST_DIMENSIONS {_MOST_DIMENSIONS}"
    + r"""
#define _POSIX_C_SOURCE 199309L
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

typedef void *tensor;

typedef struct {
    tensor whole;
    char *memory;
    int64_t position, dimensions, distance, bytes, type;
    int64_t sizes[MOST_DIMENSIONS], strides[MOST_DIMENSIONS];
} stack;

typedef struct {
    int32_t (*same)(tensor, tensor *);
    int32_t (*view)(tensor, int64_t, const int64_t *, const int64_t *, int64_t, tensor *);
    int32_t (*drop)(tensor);
    int32_t (*copy)(tensor, tensor, int32_t);
    int32_t (*dimensions)(tensor, int64_t *);
    int32_t (*sizes)(tensor, int64_t **);
    int32_t (*type)(tensor, int32_t *);
    int32_t (*is_dense)(tensor, bool *);
    int32_t (*memory)(tensor, void **);
    int32_t (*run)(void *, tensor *, size_t, tensor *, size_t, void *, void *);
    void *model;
    tensor *staying, *given, *made_now;
    stack *stacks, *results;
    int64_t *begun;
    int64_t num_inputs, num_stacks, num_results, number, made, nanoseconds, failed, unlike;
} runs;

static int64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

static int part(const runs *r, const stack *s, tensor *found) {
    return r->view(s->whole, s->dimensions, s->sizes, s->strides, s->distance * r->made, found);
}

static int ready(const runs *r) {
    int64_t i, fault = 0;
    for (i = 0; i < r->num_inputs; i++) r->given[i] = NULL;
    for (i = 0; i < r->num_inputs && !fault; i++)
        if (r->staying[i]) fault = r->same(r->staying[i], &r->given[i]);
    for (i = 0; i < r->num_stacks && !fault; i++) {
        fault = part(r, &r->stacks[i], &r->given[r->stacks[i].position]);
    }
    if (fault)
        for (i = 0; i < r->num_inputs; i++)
            if (r->given[i]) r->drop(r->given[i]);
    return !fault;
}

/* One result to its place among those of the steps before. */
static int put(const runs *r, const stack *s, tensor result) {
    int64_t dimensions, *sizes;
    int32_t type;
    bool is_dense;
    void *from;
    if (r->dimensions(result, &dimensions) || r->sizes(result, &sizes) || r->type(result, &type)) return 0;
    if (r->is_dense(result, &is_dense) || r->memory(result, &from)) return 0;
    if (dimensions != s->dimensions || type != s->type) return 0;
    for (int64_t i = 0; i < dimensions; i++)
        if (sizes[i] != s->sizes[i]) return 0;
    if (is_dense) {
        if (s->bytes) memcpy(s->memory + s->bytes * r->made, from, s->bytes);
        return 1;
    }
    tensor place;
    if (part(r, s, &place)) return 0;
    int fault = r->copy(place, result, 0);
    r->drop(place);
    return !fault;
}

/* Steps until all are made, one fails, or time is up. */
void monograph_run(runs *r) {
    int64_t end = now() + r->nanoseconds;
    do {
        if (r->begun) *r->begun = 0;
        r->failed = !ready(r) || r->run(r->model, r->given, r->num_inputs, r->made_now, r->num_results, NULL, NULL);
        if (r->failed) return;
        for (int64_t i = 0; i < r->num_results; i++) {
            if (!put(r, &r->results[i], r->made_now[i])) r->unlike = 1;
            r->drop(r->made_now[i]);
        }
        r->made++;
    } while (r->made < r->number && !r->unlike && now() < end);
}

/* Handles out of capsules in a list. */
void monograph_take(void *list, int64_t count, tensor *handles, void *(*item)(void *, ptrdiff_t),
                    void *(*get)(void *, const char *)) {
    for (int64_t i = 0; i < count; i++) handles[i] = get(item(list, i), NULL);
}

/* Where the part of a step begins. */
void *monograph_place(const runs *r, const stack *s) {
    tensor found;
    void *place = NULL;
    if (part(r, s, &found)) return NULL;
    r->memory(found, &place);
    r->drop(found);
    return place;
}

void monograph_drop(runs *r) {
    int64_t i;
    for (i = 0; i < r->num_inputs; i++) if (r->staying[i]) r->drop(r->staying[i]);
    for (i = 0; i < r->num_stacks; i++) if (r->stacks[i].whole) r->drop(r->stacks[i].whole);
    for (i = 0; i < r->num_results; i++) if (r->results[i].whole) r->drop(r->results[i].whole);
}
"""
)
_POINTER, _CPU = ctypes.c_void_p, torch.device("cpu")


_OF_TORCH = (
    "new_tensor_handle",
    "_reinterpret_tensor",
    "delete_tensor_object",
    "copy_",
    "get_dim",
    "get_sizes",
    "get_dtype",
    "is_contiguous",
    "get_data_ptr",
)


class _Stack(ctypes.Structure):
    _fields_ = (
        ("whole", _POINTER),
        ("memory", _POINTER),
        *((name, ctypes.c_int64) for name in ("position", "dimensions", "distance", "bytes", "type")),
        ("sizes", ctypes.c_int64 * _MOST_DIMENSIONS),
        ("strides", ctypes.c_int64 * _MOST_DIMENSIONS),
    )


_COUNTS = ("num_inputs", "num_stacks", "num_results", "number", "made", "nanoseconds", "failed", "unlike")


class _Runs(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in (*_OF_TORCH, "run", "model")),
        *((name, _POINTER) for name in ("staying", "given", "made_now", "stacks", "results", "begun")),
        *((name, ctypes.c_int64) for name in _COUNTS),
    )


@dataclass(frozen=True)
class Form:
    """What a library gives at each run."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class RepeatedRuns:
    """What a compiled library for the CPU needs to be run in a loop: its model, and functions of torch."""

    def __init__(self, library: Path, code: ctypes.CDLL, results: Sequence[Form]) -> None:
        """`code` is `CODE`, compiled. Raises AttributeError, OSError or RuntimeError where something is missing."""
        step = ctypes.PyDLL(
            str(library)
        )  # its functions need the interpreter's lock, as torch's runner has it
        self.code = ctypes.PyDLL(code._name, handle=code._handle)
        self.code.monograph_place.restype = _POINTER
        model, num_results = _POINTER(), ctypes.c_size_t()
        device, one = b"cpu", ctypes.c_size_t(1)
        if step.AOTInductorModelContainerCreateWithDevice(ctypes.byref(model), one, device, None):
            raise RuntimeError("AOTInductor makes no model")
        weakref.finalize(self, step.AOTInductorModelContainerDelete, model).atexit = False
        unknown = step.AOTInductorModelContainerGetNumOutputs(model, ctypes.byref(num_results))
        if unknown or num_results.value != len(results):
            raise RuntimeError("the library gives other results")
        functions = [getattr(step, f"aoti_torch_{name}") for name in _OF_TORCH]
        functions.append(step.AOTInductorModelContainerRun)
        self.functions = (*(ctypes.cast(function, _POINTER).value for function in functions), model.value)
        self.results = results
        self._hands = [_address(name) for name in ("PyList_GetItem", "PyCapsule_GetPointer")]

    @classmethod
    def of(cls, library: Path, code: ctypes.CDLL, results: Sequence[Form]) -> Self | None:
        """That of a library; None where torch or the library does not have what it takes."""
        try:
            made = cls(library, code, results)
            return made if made._is_understood() else None
        except (AttributeError, OSError, RuntimeError, TypeError):
            return None

    def begin(
        self,
        staying: Sequence[torch.Tensor | None],
        stacks: Mapping[int, torch.Tensor],
        begun: torch.Tensor | None,
    ) -> Runs | None:
        """Runs for as many steps as tensors are stacked, or fewer: `stacks` by the position that `staying` has None at.

        The library writes into `begun` when it begins to change tensors. None where a tensor has too many dimensions.
        """
        most = max([stack.dim() for stack in stacks.values()] + [len(form.shape) for form in self.results])
        return None if most > _MOST_DIMENSIONS else Runs(self, staying, stacks, begun)

    def handles(self, tensors: list[torch.Tensor]) -> list[int]:
        """New handles of tensors."""
        capsules = torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors(tensors)
        found = (_POINTER * len(tensors))()
        self.code.monograph_take(
            ctypes.py_object(capsules), ctypes.c_int64(len(tensors)), found, *self._hands
        )
        return list(found)

    def _is_understood(self) -> bool:
        """True if the part of a step begins where it should, in a tensor that begins within its memory."""
        whole = torch.arange(12, device=_CPU).reshape(4, 3)[1:]
        return Runs(self, [], {0: whole}, None).place(2) == whole[2].data_ptr()


class Runs:
    """Steps of a library that are made one after another."""

    def __init__(
        self,
        library: RepeatedRuns,
        staying: Sequence[torch.Tensor | None],
        stacks: Mapping[int, torch.Tensor],
        begun: torch.Tensor | None,
    ) -> None:
        self._library, self._begun = library, begun
        forms = library.results
        step_bytes = sum(math.prod(form.shape) * form.dtype.itemsize for form in forms)
        number = min(
            next(iter(stacks.values())).shape[0], _MOST_STEPS, max(1, _MOST_BYTES // max(step_bytes, 1))
        )
        self._made = [torch.empty((number, *form.shape), dtype=form.dtype, device=_CPU) for form in forms]
        handles = _POINTER * max(len(staying), 1)
        self._staying, given, made_now = handles(), handles(), (_POINTER * max(len(forms), 1))()
        self._stacks, results = (_Stack * len(stacks))(), (_Stack * max(len(forms), 1))()
        arrays = self._staying, given, made_now, self._stacks, results
        counts = len(staying), len(stacks), len(forms), number, 0, int(PIECE_SECONDS * 1e9), 0, 0
        flag = None if begun is None else begun.data_ptr()
        addresses = [ctypes.addressof(array) for array in arrays]
        self._runs = _Runs(*library.functions, *addresses, flag, *counts)
        weakref.finalize(self, _dropped, library, self._runs, arrays).atexit = False
        held = [(position, item) for position, item in enumerate(staying) if item is not None]
        for (position, _), handle in zip(held, library.handles([item for _, item in held]), strict=True):
            self._staying[position] = handle
        for place, (position, stack) in zip(self._stacks, stacks.items(), strict=True):
            self._describe(place, stack)
            place.position = position
        for place, made in zip(results, self._made, strict=False):
            self._describe(place, made)

    def _describe(self, place: _Stack, stack: torch.Tensor) -> None:
        """Say where the parts of a stack are."""
        (place.whole,) = self._library.handles([stack])
        place.memory, place.dimensions, place.distance = stack.data_ptr(), stack.dim() - 1, stack.stride(0)
        place.bytes = math.prod(stack.shape[1:]) * stack.element_size()
        place.type = _number_of(stack.dtype, self._runs.get_dtype, place.whole)
        count = place.dimensions
        place.sizes[:count], place.strides[:count] = stack.shape[1:], stack.stride()[1:]

    @property
    def made(self) -> int:
        """How many steps there are."""
        return int(self._runs.made)

    @property
    def has_failed(self) -> bool:
        """True if the step after those that are made has failed."""
        return bool(self._runs.failed)

    def run(self) -> None:
        """Make steps, at least one, until some milliseconds have gone, all are made, or one fails."""
        self._library.code.monograph_run(ctypes.byref(self._runs))

    def results(self) -> list[torch.Tensor]:
        """The results of the library, each of all steps that are made. Raises RuntimeError if one is not as described."""
        if self._runs.unlike:
            raise RuntimeError("the compiled step has given another result than its program says")
        return [item if self.made == len(item) else item[: self.made].clone() for item in self._made]

    def place(self, number: int) -> int:
        """Where in memory the part of the first stack for a step begins."""
        self._runs.made = number
        found = self._library.code.monograph_place(ctypes.byref(self._runs), ctypes.byref(self._stacks[0]))
        self._runs.made = 0
        return int(found or 0)


def _dropped(library: RepeatedRuns, runs: _Runs, _arrays: Any) -> None:
    library.code.monograph_drop(ctypes.byref(runs))


_NUMBERS: dict[torch.dtype, int] = {}


def _number_of(dtype: torch.dtype, read: int, handle: int) -> int:
    """Torch's number of a type, which a tensor of the type is asked for once."""
    if dtype not in _NUMBERS:
        found = ctypes.c_int32()
        ctypes.PYFUNCTYPE(ctypes.c_int32, _POINTER, _POINTER)(read)(handle, ctypes.addressof(found))
        _NUMBERS[dtype] = found.value
    return _NUMBERS[dtype]


@cache
def _address(name: str) -> Any:
    """A function of Python's own interface, to be handed to C."""
    return ctypes.cast(getattr(ctypes.pythonapi, name), _POINTER)
