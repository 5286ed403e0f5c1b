"""Settings of the process and the thread that calls depend on: how to read them, and how to set them back.

Getters and setters of `torch._C`, which most settings have alone, and torch's random generator. A setting that a
version of torch does not have is left out.
"""

from __future__ import annotations

import operator
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch

from monograph.compat.amp import AUTOCAST_DEVICES, autocast_on
from monograph.compat.autograd import TOP_SAVED_TENSORS_HOOKS, hooks_on_saved_values
from monograph.compat.modes import default_devices, num_function_modes
from monograph.compat.patching import replace

# torch's own in Python makes an object for each change, which costs a microsecond. Degraded path: that.
set_grad_enabled: Callable[[bool], Any] = getattr(torch._C, "_set_grad_enabled", torch.set_grad_enabled)


def generator_key(generator: torch.Generator) -> int:
    """A number that the Python objects of one random generator share."""
    return int(generator._cdata)  # type: ignore[attr-defined]


class _TellingGenerator:
    """torch's default generator, which reports when it is set."""

    def __init__(self, generator: torch.Generator, report: Callable[[], None]) -> None:
        self._generator, self._report = generator, report

    def __getattr__(self, name: str) -> Any:
        if name in ("manual_seed", "seed", "set_state"):
            self._report()
        return getattr(self._generator, name)


@contextmanager
def seeding_watched(report: Callable[[], None]) -> Iterator[None]:
    """Call `report` whenever torch's random state is set, by this thread or another.

    What: the generator that the functions of `torch.random` use, replaced for a while. Why: threads may draw from it
    meanwhile, so that its state does not say who has set it. Degraded path: seeding is found by the state alone.
    """
    with ExitStack() as stack:
        if "default_generator" in vars(torch.random):
            telling = _TellingGenerator(torch.default_generator, report)
            replace(stack, torch.random, "default_generator", telling)
        yield


class Setting(NamedTuple):
    """A setting of the process or of this thread: its name for users, and how to read it and to set it."""

    name: str
    read: Callable[[], Any]
    put: Callable[[Any], object]


_READ_BY_OPS = {  # by their getters in torch._C, without `_get_`: an op asks for these when it runs
    "mkldnn_enabled": "mkldnn.enabled",
    "mkldnn_deterministic": "mkldnn.deterministic",
    "nnpack_enabled": "nnpack",
    "cpu_allow_fp16_reduced_precision_reduction": "cpu.allow_fp16_reduced_precision_reduction",
}
_READ_BY_OPS_OF_CUDA = {
    "cudnn_enabled": "cudnn.enabled",
    "cudnn_benchmark": "cudnn.benchmark",
    "cudnn_deterministic": "cudnn.deterministic",
    "cublas_allow_fp16_reduced_precision_reduction": "cuda.matmul.allow_fp16_reduced_precision_reduction",
    "cublas_allow_bf16_reduced_precision_reduction": "cuda.matmul.allow_bf16_reduced_precision_reduction",
    "linalg_preferred_backend": "cuda.preferred_linalg_library",
}
_READ_BY_COMPOSITES = {  # with their setters: torch chooses by them while it records
    "flash_sdp_enabled": "sdp_use_flash",
    "fa3_sdp_enabled": "sdp_use_fa3",
    "math_sdp_enabled": "sdp_use_math",
    "math_sdp_allow_fp16_bf16_reduction": "math_sdp_allow_fp16_bf16_reduction",
    "mem_efficient_sdp_enabled": "sdp_use_mem_efficient",
    "cudnn_sdp_enabled": "sdp_use_cudnn",
    "overrideable_sdp_enabled": "sdp_use_overrideable",
}


def _switches() -> tuple[Callable[[], Any], ...]:
    """What: getters of torch._C for switches between kernels. Why: torch chooses while it records, and compilers look
    at the others. Those of TF32 raise where old and new ways to set it are mixed, so the new one is asked alone.
    Degraded path: a switch that a version does not have is left out.
    """
    names = (*_READ_BY_OPS, *_READ_BY_OPS_OF_CUDA, *_READ_BY_COMPOSITES)
    found = [getattr(torch._C, f"_get_{name}", None) for name in names]
    precision = getattr(torch._C, "_get_fp32_precision_getter", None)
    if precision is not None:
        places = (("generic", "all"), ("mkldnn", "matmul"), ("cuda", "matmul"))
        found += [partial(precision, backend, op) for backend, op in places]
    else:
        found.append(torch.get_float32_matmul_precision)
    return tuple(getter for getter in found if getter is not None) + (
        torch.backends.mha.get_fastpath_enabled,
    )


_SWITCHES = _switches()


def _kernel_choices() -> tuple[Any, ...]:
    return tuple([read() for read in _SWITCHES])


# Lists, which have no hash. Degraded path: an order that nothing changes.
_SDP_ORDER: Callable[[], list[int]] = getattr(torch._C, "_get_sdp_priority_order", list)

# What: the module inside `torch.backends.opt_einsum`. Why: reading its wrapper costs a microsecond and a half.
# Degraded path: that.
_OPT_EINSUM: Any = vars(torch.backends.opt_einsum).get("m", torch.backends.opt_einsum)
_einsum_plan: Callable[[], tuple[Any, ...]] = partial(operator.attrgetter("enabled", "strategy"), _OPT_EINSUM)
# By its bits: where denormal numbers are flushed, arithmetic cannot make it.
_DENORMAL: float = struct.unpack("<d", bytes([1, 0, 0, 0, 0, 0, 0, 0]))[0]


def denormals_count() -> bool:
    """Torch has no getter for `set_flush_denormal`; Python's own floats obey the same register."""
    return _DENORMAL != 0.0


def checks_gradients_for_nan() -> bool:
    """True under `torch.autograd.set_detect_anomaly(True)`, which looks at what each function of backward gives."""
    return torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled()


def _saved_tensors_hooks() -> tuple[Any, ...] | None:
    """The hooks through which autograd keeps values for backward, each as its code and what that closes over.

    What: a getter of torch._C._autograd. Why: a capture records what they do; `save_on_cpu()` makes new functions each
    time. Degraded path: hooks around the call are not seen.
    """
    hooks = TOP_SAVED_TENSORS_HOOKS(True)
    return None if hooks is None else tuple(map(what_runs, hooks))


class Itself:
    """An object as a part of a key, equal to itself alone, whatever it says of itself."""

    __slots__ = ("item",)

    def __init__(self, item: Any) -> None:
        self.item = item

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Itself) and self.item is other.item

    def __hash__(self) -> int:
        return id(self.item)

    def __repr__(self) -> str:
        return repr(self.item)


def what_runs(function: Any) -> Any:
    """A key that functions share which were made by one `def` with the same surroundings."""
    if type(function) is MethodType:
        return Itself(function.__self__), what_runs(function.__func__)
    if type(function) is not FunctionType or function.__defaults__ or function.__kwdefaults__:
        return Itself(function)
    closed_over = [cell.cell_contents for cell in function.__closure__ or ()]
    parts = [item if isinstance(item, (int, float, str)) else Itself(item) for item in closed_over]
    return function.__code__, tuple(map(type, closed_over)), tuple(parts)


class ModeRow(NamedTuple):
    """A mode of torch that changes what build() would do."""

    name: str
    read: Callable[[], Any]  # a value to be part of a key
    # if `read` is a function of Python: some of C, so that it gives the same as long as these do
    in_c: tuple[Callable[[], Any], ...] | None = None


# What torch is asked for before each call: another answer is another build. A new mode is a row.
MODES: tuple[ModeRow, ...] = (
    ModeRow("grad mode", torch.is_grad_enabled),
    ModeRow("default dtype", torch.get_default_dtype),
    ModeRow("default device", default_devices, ()),  # none without a function mode, see QUICK_MODES
    ModeRow("deterministic mode", torch._C._get_deterministic_algorithms),
    ModeRow("warnings of deterministic mode", torch._C._get_deterministic_algorithms_warn_only),
    ModeRow("filling of uninitialised memory", torch._C._get_deterministic_fill_uninitialized_memory),
    ModeRow("the choice of kernels in torch.backends", _kernel_choices, _SWITCHES),
    ModeRow("the order of kernels for attention", lambda: tuple(_SDP_ORDER()), (_SDP_ORDER,)),
    ModeRow("the plan of torch.backends.opt_einsum", _einsum_plan),
    ModeRow("denormal numbers", denormals_count, (partial(operator.ne, _DENORMAL, 0.0),)),
    ModeRow("layouts of gradients", getattr(torch._C, "_is_grad_layout_enforcement_enabled", bool)),
    ModeRow(
        "hooks on values saved for backward", _saved_tensors_hooks, (partial(TOP_SAVED_TENSORS_HOOKS, True),)
    ),
    ModeRow("autocast's cache of weights", torch.is_autocast_cache_enabled),
    *(
        ModeRow(
            f"autocast on {device}",
            partial(autocast_on, device),
            (partial(torch.is_autocast_enabled, device), partial(torch.get_autocast_dtype, device)),
        )
        for device in AUTOCAST_DEVICES
    ),
)
# Functions of C that all give what they gave before if no mode has changed. The first gives the number of function
# modes, without which there is no default device.
QUICK_MODES: tuple[Callable[[], Any], ...] = (
    num_function_modes,
    *(read for row in MODES for read in ((row.read,) if row.in_c is None else row.in_c)),
)


def settings_of_ops() -> tuple[Setting, ...]:
    """What ops ask for when they run: a replay takes the settings of its call, whatever build() had set.

    What: getters and setters of torch._C. Why: most settings have no others. Those of CUDA count once it is in use.
    Degraded path: a setting that a version does not have is left out.
    """
    on_cuda = torch.cuda.is_initialized()
    flags = _READ_BY_OPS | (_READ_BY_OPS_OF_CUDA if on_cuda else {})
    return (
        Setting("torch.set_default_dtype()", torch.get_default_dtype, torch.set_default_dtype),
        Setting("torch.use_deterministic_algorithms()", _determinism, _set_determinism),
        Setting(
            "torch.utils.deterministic.fill_uninitialized_memory",
            torch._C._get_deterministic_fill_uninitialized_memory,
            torch._C._set_deterministic_fill_uninitialized_memory,
        ),
        Setting("torch.set_num_threads()", torch.get_num_threads, torch.set_num_threads),
        Setting("torch.set_flush_denormal()", lambda: not denormals_count(), torch.set_flush_denormal),
        *_settings_of_precision(on_cuda),
        *(_flag(f"torch.backends.{shown}", name, name) for name, shown in flags.items() if _exists(name)),
    )


def settings_of_recording() -> tuple[Setting, ...]:
    """What a trace records in its ops, so that build() may set it for a while, but not for good."""
    context, layouts = torch._GLOBAL_DEVICE_CONTEXT, "_is_grad_layout_enforcement_enabled"
    return (
        Setting("torch.set_grad_enabled()", torch.is_grad_enabled, torch._C._set_grad_enabled),
        Setting(
            "torch.set_default_device()",
            lambda: getattr(getattr(context, "device_context", None), "device", None),
            torch.set_default_device,
        ),
        Setting(
            "torch.backends.mha.set_fastpath_enabled()",
            torch.backends.mha.get_fastpath_enabled,
            torch.backends.mha.set_fastpath_enabled,
        ),
        Setting("torch.backends.opt_einsum", _einsum_plan, _set_einsum_plan),
        Setting("torch.autograd.graph.saved_tensors_hooks()", hooks_on_saved_values, _pop_hooks_to),
        Setting("torch.autograd.set_detect_anomaly()", torch.is_anomaly_enabled, _set_anomaly),
        Setting("torch.inference_mode()", torch.is_inference_mode_enabled, _left_to_its_block),
        *(
            Setting(f"torch.autocast({device!r})", partial(_autocast, device), _left_to_its_block)
            for device in AUTOCAST_DEVICES
        ),
        Setting(
            "the order of sdpa_kernel()",
            lambda: tuple(_SDP_ORDER()),
            lambda order: torch._C._set_sdp_priority_order(list(order)),
        ),
        *(
            _flag(f"torch.backends.cuda: {name}", name, setter)
            for name, setter in _READ_BY_COMPOSITES.items()
            if _exists(name)
        ),
        *(
            [
                Setting(
                    "layouts of gradients",
                    getattr(torch._C, layouts),
                    torch._C._set_grad_layout_enforcement_enabled,
                )
            ]
            if hasattr(torch._C, layouts)
            else []
        ),
    )


def _exists(name: str) -> bool:
    return hasattr(torch._C, f"_get_{name}")


def _flag(shown: str, name: str, setter: str) -> Setting:
    put = getattr(torch._C, f"_set_{setter}")
    return Setting(
        shown,
        getattr(torch._C, f"_get_{name}"),
        lambda value: put(*value) if isinstance(value, tuple) else put(value),
    )


def _settings_of_precision(on_cuda: bool) -> Iterator[Setting]:
    """Those of float32, the general ones first: others follow them until they are set themselves."""
    read, put = (getattr(torch._C, f"_{way}_fp32_precision_{way}ter", None) for way in ("get", "set"))
    if read is None or put is None:
        yield Setting(
            "torch.set_float32_matmul_precision()",
            torch.get_float32_matmul_precision,
            torch.set_float32_matmul_precision,
        )
        return
    ops = ("all", "matmul", "conv", "rnn")
    backends = ("mkldnn", "cuda") if on_cuda else ("mkldnn",)
    for backend, op in (("generic", "all"), *((backend, op) for backend in backends for op in ops)):
        own = "" if backend == "generic" else f".{backend}"
        shown = f"torch.backends{own}{'' if op == 'all' else f'.{op}'}.fp32_precision"
        yield Setting(shown, partial(read, backend, op), partial(put, backend, op))


def _determinism() -> tuple[bool, bool]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )


def _set_determinism(value: tuple[bool, bool]) -> None:
    torch._C._set_deterministic_algorithms(value[0], warn_only=value[1])


def _set_einsum_plan(value: tuple[Any, ...]) -> None:
    _OPT_EINSUM.enabled, _OPT_EINSUM.strategy = value


def _pop_hooks_to(hooks: tuple[Any, ...]) -> None:
    while (now := hooks_on_saved_values()) and now != hooks:
        torch._C._autograd._pop_saved_tensors_default_hooks()


def _set_anomaly(on: bool) -> None:
    torch.autograd.set_detect_anomaly(on)


def _autocast(device: str) -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)


def _left_to_its_block(_value: Any) -> None:
    """What a block around a capture puts back."""
