"""A compiled library that is run for one step after another without Python between: the loop is in C.

What: the C interface of AOTInductor's libraries (`AOTInductorModelContainerRun`), that of torch for them
(`aoti_torch_*`), and the functions by which Python hands out tensors for it. Degraded path: where one is missing,
`RepeatedRuns.of` gives None, and steps are called one by one.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Self

import torch

PIECE_SECONDS: float = 0.005  # after which Python is asked for signals
_MOST_DIMENSIONS = 16

# Who runs a library loses the tensors that it gives: each step gives objects of its own for the tensors that stay, and
# for those on a stack views that begin where the part of the step does. The results are the caller's.
CODE = (
    f"#define MOST_DIMENSIONS {_MOST_DIMENSIONS}"
    + r"""
#define _POSIX_C_SOURCE 199309L
#include <stddef.h>
#include <stdint.h>
#include <time.h>

typedef void *tensor;

typedef struct {
    tensor whole;
    int64_t position, dimensions, distance;
    int64_t sizes[MOST_DIMENSIONS], strides[MOST_DIMENSIONS];
} stack;

typedef struct {
    int32_t (*same)(tensor, tensor *);
    int32_t (*view)(tensor, int64_t, const int64_t *, const int64_t *, int64_t, tensor *);
    int32_t (*drop)(tensor);
    int32_t (*run)(void *, tensor *, size_t, tensor *, size_t, void *, void *);
    void *model;
    tensor *staying, *given, *results;
    stack *stacks;
    int64_t *begun;
    int64_t num_inputs, num_stacks, num_results, number, made, nanoseconds, failed;
} runs;

static int64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

static int ready(const runs *r) {
    int64_t i, fault = 0;
    for (i = 0; i < r->num_inputs; i++) r->given[i] = NULL;
    for (i = 0; i < r->num_inputs && !fault; i++)
        if (r->staying[i]) fault = r->same(r->staying[i], &r->given[i]);
    for (i = 0; i < r->num_stacks && !fault; i++) {
        const stack *s = &r->stacks[i];
        fault = r->view(s->whole, s->dimensions, s->sizes, s->strides, s->distance * r->made, &r->given[s->position]);
    }
    if (fault)
        for (i = 0; i < r->num_inputs; i++)
            if (r->given[i]) r->drop(r->given[i]);
    return !fault;
}

/* Steps until all are made, one fails, or time is up. */
void monograph_run(runs *r) {
    int64_t end = now() + r->nanoseconds;
    do {
        if (r->begun) *r->begun = 0;
        r->failed = !ready(r) || r->run(r->model, r->given, r->num_inputs, r->results + r->made * r->num_results,
                                        r->num_results, NULL, NULL);
        if (r->failed) return;
        r->made++;
    } while (r->made < r->number && now() < end);
}

/* Handles out of capsules in a list, and into new ones. */
void monograph_take(void *list, int64_t count, tensor *handles, void *(*item)(void *, ptrdiff_t),
                    void *(*get)(void *, const char *)) {
    for (int64_t i = 0; i < count; i++) handles[i] = get(item(list, i), NULL);
}

int monograph_hand_out(void *list, int64_t count, tensor *handles, int (*set)(void *, ptrdiff_t, void *),
                       void *(*made)(void *, const char *, void (*)(void *))) {
    for (int64_t i = 0; i < count; i++) {
        void *capsule = made(handles[i], NULL, NULL);
        if (!capsule || set(list, i, capsule)) return 1;
    }
    return 0;
}

void monograph_drop(runs *r) {
    int64_t i;
    for (i = 0; i < r->num_inputs; i++) if (r->staying[i]) r->drop(r->staying[i]);
    for (i = 0; i < r->num_stacks; i++) if (r->stacks[i].whole) r->drop(r->stacks[i].whole);
    for (i = 0; i < r->made * r->num_results; i++) if (r->results[i]) r->drop(r->results[i]);
}
"""
)
_POINTER = ctypes.c_void_p


class _Stack(ctypes.Structure):
    _fields_ = (
        ("whole", _POINTER),
        ("position", ctypes.c_int64),
        ("dimensions", ctypes.c_int64),
        ("distance", ctypes.c_int64),
        ("sizes", ctypes.c_int64 * _MOST_DIMENSIONS),
        ("strides", ctypes.c_int64 * _MOST_DIMENSIONS),
    )


class _Runs(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("same", "view", "drop", "run", "model")),
        *((name, _POINTER) for name in ("staying", "given", "results", "stacks", "begun")),
        *(
            (name, ctypes.c_int64)
            for name in ("num_inputs", "num_stacks", "num_results", "number", "made", "nanoseconds", "failed")
        ),
    )


class RepeatedRuns:
    """What a compiled library for the CPU needs to be run in a loop: its model, and functions of torch."""

    def __init__(self, library: Path, code: ctypes.CDLL) -> None:
        """`code` is `CODE`, compiled. Raises AttributeError, OSError or RuntimeError where something is missing."""
        step = ctypes.PyDLL(
            str(library)
        )  # its functions need the interpreter's lock, as torch's runner has it
        self._library, self._code = step, ctypes.PyDLL(code._name, handle=code._handle)
        self._num_results = ctypes.c_size_t()
        model = _POINTER()
        made = step.AOTInductorModelContainerCreateWithDevice(
            ctypes.byref(model), ctypes.c_size_t(1), b"cpu", None
        )
        if made:
            raise RuntimeError("AOTInductor makes no model")
        weakref.finalize(self, step.AOTInductorModelContainerDelete, model).atexit = False
        if step.AOTInductorModelContainerGetNumOutputs(model, ctypes.byref(self._num_results)):
            raise RuntimeError("AOTInductor does not say how many results there are")
        names = ("aoti_torch_new_tensor_handle", "aoti_torch__reinterpret_tensor")
        dropping, running = "aoti_torch_delete_tensor_object", "AOTInductorModelContainerRun"
        addresses = [ctypes.cast(getattr(step, name), _POINTER).value for name in (*names, dropping, running)]
        self._functions = (*addresses, model.value)
        self._hands = [_address(name) for name in ("PyList_GetItem", "PyCapsule_GetPointer")]
        self._takes = [_address(name) for name in ("PyList_SetItem", "PyCapsule_New")]

    @classmethod
    def of(cls, library: Path, code: ctypes.CDLL) -> Self | None:
        """That of a library; None where torch or the library does not have what it takes."""
        try:
            made = cls(library, code)
            return made if made._is_understood() else None
        except (AttributeError, OSError, RuntimeError, TypeError):
            return None

    def begin(
        self,
        staying: Sequence[torch.Tensor | None],
        stacks: Mapping[int, torch.Tensor],
        begun: torch.Tensor | None,
    ) -> Runs | None:
        """Runs for as many steps as tensors are stacked: `stacks` by the position that `staying` has None at.

        The library writes into `begun` when it begins to change tensors. None where a tensor has too many dimensions.
        """
        if any(stack.dim() > _MOST_DIMENSIONS for stack in stacks.values()):
            return None
        return Runs(self, staying, stacks, begun)

    def handles(self, tensors: list[torch.Tensor]) -> list[int]:
        """New handles of tensors."""
        capsules = torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors(tensors)
        found = (_POINTER * len(tensors))()
        self._code.monograph_take(
            ctypes.py_object(capsules), ctypes.c_int64(len(tensors)), found, *self._hands
        )
        return list(found)

    def tensors(self, handles: Any, count: int) -> list[torch.Tensor]:
        """The tensors of handles, which are used up."""
        capsules: list[Any] = [None] * count
        if self._code.monograph_hand_out(
            ctypes.py_object(capsules), ctypes.c_int64(count), handles, *self._takes
        ):
            raise MemoryError
        made: list[torch.Tensor] = torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs(capsules)
        return made

    def _is_understood(self) -> bool:
        """True if a view begins where it should, of a tensor that begins within its memory."""
        whole = torch.arange(12).reshape(4, 3)[1:]
        runs = Runs(self, [], {0: whole}, None)
        return bool(torch.equal(runs.part(2), whole[2]))


class Runs:
    """Steps of a library that are made one after another."""

    def __init__(
        self,
        library: RepeatedRuns,
        staying: Sequence[torch.Tensor | None],
        stacks: Mapping[int, torch.Tensor],
        begun: torch.Tensor | None,
    ) -> None:
        self._library, self._kept = library, begun
        number = next(iter(stacks.values())).shape[0]
        results = number * library._num_results.value
        handles = _POINTER * max(len(staying), 1)
        self._staying, self._given, self._results = handles(), handles(), (_POINTER * max(results, 1))()
        self._stacks = (_Stack * len(stacks))()
        self._runs = _Runs(
            *library._functions,
            *(ctypes.addressof(item) for item in (self._staying, self._given, self._results, self._stacks)),
            None if begun is None else begun.data_ptr(),
            len(staying),
            len(stacks),
            library._num_results.value,
            number,
            0,
            int(PIECE_SECONDS * 1e9),
            0,
        )
        kept = (self._staying, self._given, self._results, self._stacks)
        weakref.finalize(self, _dropped, library, self._runs, kept).atexit = False
        held = [(position, item) for position, item in enumerate(staying) if item is not None]
        for (position, _), handle in zip(held, library.handles([item for _, item in held]), strict=True):
            self._staying[position] = handle
        for place, (position, stack) in zip(self._stacks, stacks.items(), strict=True):
            (place.whole,) = library.handles([stack])
            place.position, place.dimensions, place.distance = position, stack.dim() - 1, stack.stride(0)
            for dimension, (size, stride) in enumerate(zip(stack.shape[1:], stack.stride()[1:], strict=True)):
                place.sizes[dimension], place.strides[dimension] = size, stride

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
        self._library._code.monograph_run(ctypes.byref(self._runs))

    def results(self) -> list[list[torch.Tensor]]:
        """For each result of the library those of all steps that are made. It can be asked for once."""
        width = int(self._runs.num_results)
        made = self._library.tensors(self._results, self.made * width)
        ctypes.memset(self._results, 0, ctypes.sizeof(self._results))
        return [made[index::width] for index in range(width)]

    def part(self, number: int) -> torch.Tensor:
        """The part of the first stack for a step."""
        place, view = self._stacks[0], (_POINTER * 1)()
        long, pointer = ctypes.c_int64, _POINTER
        function = ctypes.CFUNCTYPE(ctypes.c_int32, pointer, long, pointer, pointer, long, pointer)
        sizes, strides = (
            ctypes.addressof(place) + getattr(_Stack, name).offset for name in ("sizes", "strides")
        )
        function(self._runs.view)(
            place.whole, place.dimensions, sizes, strides, place.distance * number, view
        )
        return self._library.tensors(view, 1)[0]


def _dropped(library: RepeatedRuns, runs: _Runs, _kept: Any) -> None:
    library._code.monograph_drop(ctypes.byref(runs))


@cache
def _address(name: str) -> Any:
    """A function of Python's own interface, to be handed to C."""
    return ctypes.cast(getattr(ctypes.pythonapi, name), _POINTER)
