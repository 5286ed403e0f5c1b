"""Modes of torch around the calls of one graph: eager's numbers under each, or an error that names the mode."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import monograph as mg
from tests.support import assert_same

Around = Callable[[], AbstractContextManager[Any]]


class Step(mg.Graph):
    """A body as a graph."""

    def __init__(self, body: Callable[..., Any], model: nn.Module | None = None) -> None:
        super().__init__()
        self.body = body
        if model is not None:
            self.model = model
            self.config.keep_gradients()

    def build(self, *args: Any) -> Any:
        return self.body(*args)


def check(body: Callable[..., Any], around: Around, *args: torch.Tensor, builds: int = 2) -> None:
    """Calls under the mode and without it, both ways round, give what eager gives there."""
    for order in ((False, True, False, True), (True, False, True)):
        step = Step(body)
        for inside in order:
            with around() if inside else nullcontext():
                expected = body(*args)
                got = step(*args)
            assert_same(expected, got)
        assert len(step.builds) == builds


@contextmanager
def setting(put: Callable[[Any], Any], value: Any, back: Any) -> Any:
    put(value)
    try:
        yield
    finally:
        put(back)


# --- settings ------------------------------------------------------------------------------------------------------


def attend(x: torch.Tensor) -> torch.Tensor:
    return functional.scaled_dot_product_attention(x, x, x)


X = torch.randn(2, 5, 4)


@pytest.mark.one_case
@pytest.mark.parametrize(
    "around",
    [
        lambda: setting(torch.set_float32_matmul_precision, "high", "highest"),
        lambda: torch.backends.mkldnn.flags(enabled=True, deterministic=True),
        lambda: torch.backends.mkldnn.flags(enabled=False),
        lambda: torch.backends.nnpack.flags(enabled=False),
        lambda: sdpa_kernel(SDPBackend.MATH),
        lambda: setting(torch.backends.mha.set_fastpath_enabled, False, True),
        lambda: setting(torch.use_deterministic_algorithms, True, False),
        lambda: setting(torch.set_flush_denormal, True, False),
    ],
)
@pytest.mark.filterwarnings("ignore:TF32")
def test_settings_that_choose_kernels(around):
    torch.set_float32_matmul_precision("highest")  # the default is a third answer
    check(lambda x: attend(x) @ x.mT, around, X)


def test_the_order_of_kernels_for_attention():
    kernels = [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION]
    check(attend, lambda: sdpa_kernel(kernels, set_priority=True), X)


def test_denormal_numbers():
    tiny = torch.tensor([sys.float_info.min / 4, 1.0], dtype=torch.float64)
    check(lambda x: x * 1.0 + tiny, lambda: setting(torch.set_flush_denormal, True, False), tiny)


def test_denormal_numbers_once_calls_are_checked_in_c():
    """In the mode, a denormal number equals zero, kept ones as well."""
    tiny = torch.tensor([sys.float_info.min / 4, 1.0], dtype=torch.float64)
    step = Step(lambda x: torch.full_like(x, float(sys.float_info.min / 2 == 0)))
    for is_flushed in (False, True, False, True, True, False):
        for _ in range(4):
            assert torch.set_flush_denormal(is_flushed)
            try:
                found = step(tiny)
            finally:
                torch.set_flush_denormal(False)
            assert found.tolist() == [is_flushed, is_flushed]
    assert len(step.builds) == 2


def test_memory_that_is_filled():
    def body(x: torch.Tensor) -> torch.Tensor:
        return torch.empty(3).isnan().all() & torch.are_deterministic_algorithms_enabled() | (x.sum() > 0)

    def filled(fill: bool) -> AbstractContextManager[Any]:
        torch.utils.deterministic.fill_uninitialized_memory = fill
        return setting(torch.use_deterministic_algorithms, True, False)

    try:
        check(body, lambda: filled(True), -torch.ones(2))
        step = Step(lambda x: torch.empty(3) * x)
        with filled(False):
            step(torch.ones(3))
        with filled(True):
            assert step(torch.ones(3)).isnan().all()
        assert len(step.builds) == 2
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = True


def test_algorithms_that_are_not_deterministic():
    def body(x: torch.Tensor) -> torch.Tensor:
        return x.clone().put_(torch.tensor([0, 1]), torch.tensor([5.0, 6.0]))

    step, x = Step(body), torch.zeros(3)
    assert_same(body(x), step(x))
    with setting(torch.use_deterministic_algorithms, True, False):
        for run in (body, step):
            with pytest.raises((RuntimeError, mg.MonographError), match="determin"):
                run(x)
    with setting(lambda mode: torch.use_deterministic_algorithms(mode, warn_only=mode), True, False):
        for run in (body, step):
            assert_same(torch.tensor([5.0, 6.0, 0.0]), run(x))
    assert_same(body(x), step(x))


def test_the_plan_of_einsum(monkeypatch):
    """opt_einsum itself is no dependency: the order it would choose is made up here."""

    class Planner:
        @staticmethod
        def contract_path(_equation: str, *_shapes: Any, optimize: str, **_options: Any) -> tuple[Any, ...]:
            return ([(1, 2), (0, 1)] if optimize == "optimal" else [(0, 1), (0, 1)]), None

    settings = vars(torch.backends.opt_einsum)["m"]
    monkeypatch.setattr(settings, "_opt_einsum", Planner)
    given = [torch.randn(7, 7) * 100 for _ in range(3)]

    @contextmanager
    def planned(strategy: str) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(settings, "enabled", True)
            patch.setattr(settings, "strategy", strategy)
            yield

    def body(*matrices: torch.Tensor) -> torch.Tensor:
        return torch.einsum("ij,jk,kl->il", *matrices)

    check(body, lambda: planned("optimal"), *given)
    step = Step(body)
    for strategy in ("auto", "optimal", "auto"):
        with planned(strategy):
            assert_same(body(*given), step(*given))
    assert len(step.builds) == 2


def test_the_number_of_threads_is_that_of_the_call():
    x, threads = torch.randn(300, 2000), torch.get_num_threads()
    step = Step(lambda x: (x.sum(), x.softmax(0), x @ x.mT))
    for number in (1, 2, 1):
        with setting(torch.set_num_threads, number, threads):
            assert_same(step.body(x), step(x))
    assert len(step.builds) == 1


# --- devices -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "around",
    [lambda: torch.device("meta"), lambda: setting(torch.set_default_device, "meta", None)],
)
def test_the_default_device(around):
    def body(x: torch.Tensor) -> Any:
        made = torch.zeros(2)
        return x + 1, str(made.device), torch.get_default_device()

    check(body, around, torch.ones(2))


# --- hooks and anomalies -------------------------------------------------------------------------------------------


def gradient(step: Any, model: nn.Module, x: torch.Tensor) -> Any:
    model.zero_grad()
    step(x)
    return [p.grad.clone() for p in model.parameters()]


def differentiated(arounds: list[Around]) -> int:
    """Gradients of a graph are eager's under each context in turn; gives the number of builds."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh())

    def body(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().sum()
        loss.backward()
        return loss

    step = Step(body, model)
    for around in arounds:
        with around():
            assert_same(gradient(body, model, X), gradient(step, model, X))
    return len(step.builds)


def rounded(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.half()


def widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float()


def scaled_by(factor: float) -> Around:
    return lambda: saved_tensors_hooks(lambda t: t * factor, lambda t: t)


def test_hooks_that_round_what_backward_needs():
    lossy: Around = lambda: saved_tensors_hooks(rounded, widened)  # noqa: E731
    assert differentiated([nullcontext, lossy, nullcontext, lossy]) == 2
    assert differentiated([lossy, nullcontext, scaled_by(2.0), scaled_by(3.0)]) == 4


def test_new_hooks_that_do_the_same_need_no_build():
    assert differentiated([save_on_cpu, save_on_cpu, nullcontext, save_on_cpu]) == 2


class Scaling:
    """Hooks that are methods, which read an attribute."""

    def __init__(self) -> None:
        self.factor = 2.0

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor * self.factor

    def unpack(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


def test_hooks_that_are_methods_of_an_object_that_changes():
    scaling = Scaling()

    def around(factor: float) -> Around:
        @contextmanager
        def scaled() -> Any:
            scaling.factor = factor
            with saved_tensors_hooks(scaling.pack, scaling.unpack):
                yield

        return scaled

    assert differentiated([around(2.0), around(2.0), around(3.0), nullcontext, around(2.0)]) == 3


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_anomaly_detection_stops_a_step_whose_backward_makes_a_nan():
    model = nn.Linear(3, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    class Train(mg.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.model = model
            self.add_optimizer(optimizer)

        def build(self, x: torch.Tensor) -> torch.Tensor:
            loss = (self.model(x) * 0).sqrt().sum() * 0
            loss.backward()
            return loss

    step, good = Train(), torch.ones(2, 3)
    with (
        torch.autograd.set_detect_anomaly(True),
        pytest.raises(mg.NonfiniteError, match="detect_anomaly: backward") as caught,
    ):
        step(good)
    assert "aten.div" in caught.value.hint
    assert caught.value.where is not None
    assert caught.value.where.file == __file__
    assert_same(torch.ones(1, 3), model.weight.detach())
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        step(good)
    assert model.weight.isnan().all()


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_anomaly_detection_lets_a_sound_step_be():
    assert differentiated([lambda: torch.autograd.set_detect_anomaly(True), nullcontext]) == 1


# --- modes of the user -----------------------------------------------------------------------------------------------


class Doubling(TorchFunctionMode):
    """Doubles every sine."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        return made * 2 if func is torch.sin else made


class DoublingOps(TorchDispatchMode):
    """The same one level below, and a list of what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        made = func(*args, **(kwargs or {}))
        return made * 2 if func is torch.ops.aten.sin.default else made


def wave(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x + 1)


def test_a_function_mode_around_the_call_is_refused():
    step = Step(wave)
    for _ in range(2):
        with Doubling(), pytest.raises(mg.GraphBoundaryError, match="Doubling, a TorchFunctionMode"):
            step(X)
        with torch.device("cpu"), Doubling(), pytest.raises(mg.GraphBoundaryError, match="Doubling"):
            step.compile(X)
        assert_same(wave(X), step(X))


def test_a_function_mode_inside_of_build_is_captured():
    def body(x: torch.Tensor) -> torch.Tensor:
        with Doubling():
            return wave(x)

    step = Step(body)
    for _ in range(2):
        assert_same(body(X), step(X))


@pytest.mark.parametrize("first", [False, True])
def test_a_dispatch_mode_works_on_each_replay(first):
    step = Step(wave)
    for inside in (first, not first, first, not first):
        with DoublingOps() if inside else nullcontext() as mode:
            expected = wave(X)
            if mode is not None:
                mode.seen.clear()
            got = step(X)
            assert mode is None or mode.seen == [torch.ops.aten.add.Tensor, torch.ops.aten.sin.default]
        assert_same(expected, got)
    assert len(step.builds) == 1


def test_a_dispatch_mode_around_compiled_code_is_refused():
    step = Step(wave)
    step(X)
    object.__setattr__(step.builds[0], "backend", "inductor")  # compiling takes too long for what it shows
    with DoublingOps(), pytest.raises(mg.GraphBoundaryError, match="DoublingOps, a TorchDispatchMode"):
        step(X)
    assert_same(wave(X), step(X))


# --- set inside of build() -----------------------------------------------------------------------------------------


def put_and_back(read: Callable[[], Any], put: Callable[[Any], Any], value: Any) -> Around:
    return lambda: setting(put, value, read())


def precision(place: Any, value: str) -> Around:
    return put_and_back(lambda: place.fp32_precision, lambda v: setattr(place, "fp32_precision", v), value)


INSIDE: dict[str, Around] = {
    "set_default_dtype": put_and_back(torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    "mkldnn.enabled": lambda: torch.backends.mkldnn.flags(enabled=False),
    "mkldnn.deterministic": lambda: torch.backends.mkldnn.flags(enabled=True, deterministic=True),
    "nnpack": lambda: torch.backends.nnpack.flags(enabled=False),
    "fp32_precision": put_and_back(
        torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "medium"
    ),
    "mkldnn.matmul.fp32_precision": precision(torch.backends.mkldnn.matmul, "bf16"),
    "mkldnn.conv.fp32_precision": precision(torch.backends.mkldnn.conv, "bf16"),
    "set_flush_denormal": put_and_back(lambda: sys.float_info.min / 2 == 0, torch.set_flush_denormal, True),
    "set_num_threads": put_and_back(torch.get_num_threads, torch.set_num_threads, 3),
    "use_deterministic_algorithms": put_and_back(
        torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True
    ),
    "fill_uninitialized_memory": put_and_back(
        lambda: torch.utils.deterministic.fill_uninitialized_memory,
        lambda fill: setattr(torch.utils.deterministic, "fill_uninitialized_memory", fill),
        False,
    ),
}


@pytest.fixture
def plain_precision():
    torch.set_float32_matmul_precision("highest")


@pytest.mark.usefixtures("plain_precision")
@pytest.mark.filterwarnings("ignore:TF32")
@pytest.mark.parametrize("name", INSIDE)
def test_an_op_under_a_setting_that_only_build_sets_is_refused(name):
    around = INSIDE[name]

    def body(x: torch.Tensor) -> Any:
        with around():
            made = x @ x.mT
        return made, torch.ones(2)

    with pytest.raises(mg.CaptureError, match=f"changes .*{name}.*for a part of the step") as caught:
        Step(body)(X)
    assert caught.value.where is not None
    assert caught.value.where.line == body.__code__.co_firstlineno + 2
    assert "before the step" in caught.value.hint
    with around():
        step = Step(body)
        assert_same(body(X), step(X))
        assert_same(body(X), step(X))


@pytest.mark.every_case
@pytest.mark.usefixtures("plain_precision")
@pytest.mark.filterwarnings("ignore:TF32")
@pytest.mark.parametrize("name", INSIDE)
def test_a_setting_that_is_set_back_before_the_next_op_changes_nothing(name):
    def body(x: torch.Tensor) -> torch.Tensor:
        made = x @ x.mT
        with INSIDE[name]():
            pass
        return made + 1

    step = Step(body)
    for _ in range(2):
        assert_same(body(X), step(X))


def test_backward_and_the_update_under_a_setting_of_build():
    model = nn.Linear(4, 3)

    def body(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().sum()
        with INSIDE["set_num_threads"]():
            loss.backward()
        return loss

    with pytest.raises(mg.CaptureError, match="set_num_threads"):
        Step(body, model)(X)


def test_an_error_about_a_setting_that_build_swallows():
    def body(x: torch.Tensor) -> torch.Tensor:
        try:
            with INSIDE["set_num_threads"]():
                return x.sum()
        except Exception:
            return x.mean()

    with pytest.raises(mg.CaptureError, match="set_num_threads"):
        Step(body)(X)


LEFT: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "set_default_dtype": (lambda: torch.set_default_dtype(torch.float64), torch.get_default_dtype),
    "set_grad_enabled": (lambda: torch.set_grad_enabled(False), torch.is_grad_enabled),
    "set_num_threads": (lambda: torch.set_num_threads(3), torch.get_num_threads),
    "use_deterministic_algorithms": (
        lambda: torch.use_deterministic_algorithms(True, warn_only=True),
        torch.is_deterministic_algorithms_warn_only_enabled,
    ),
    "set_default_device": (lambda: torch.set_default_device("meta"), torch.get_default_device),
    "set_flush_denormal": (lambda: torch.set_flush_denormal(True), lambda: sys.float_info.min / 2),
    "mkldnn.enabled": (
        lambda: torch.backends.mkldnn.set_flags(False),
        lambda: torch.backends.mkldnn.enabled,
    ),
    "fp32_precision": (
        lambda: setattr(torch.backends.mkldnn.matmul, "fp32_precision", "bf16"),
        lambda: torch.backends.mkldnn.matmul.fp32_precision,
    ),
    "sdp_enabled": (
        lambda: torch.backends.cuda.enable_math_sdp(False),
        torch.backends.cuda.math_sdp_enabled,
    ),
    "set_fastpath_enabled": (
        lambda: torch.backends.mha.set_fastpath_enabled(False),
        torch.backends.mha.get_fastpath_enabled,
    ),
    "autocast": (
        lambda: torch.autocast("cpu", torch.bfloat16).__enter__(),
        lambda: torch.is_autocast_enabled("cpu"),
    ),
    "saved_tensors_hooks": (
        lambda: saved_tensors_hooks(rounded, widened).__enter__(),
        lambda: torch._C._autograd._top_saved_tensors_default_hooks(True),
    ),
    "set_detect_anomaly": (lambda: torch.autograd.set_detect_anomaly(True), torch.is_anomaly_enabled),
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.filterwarnings("ignore:TF32")
@pytest.mark.parametrize("name", LEFT)
def test_a_setting_that_build_leaves_changed_is_refused_and_set_back(name):
    change, read = LEFT[name]
    before = read()

    def body(x: torch.Tensor) -> torch.Tensor:
        made = x * 2
        change()
        return made

    with pytest.raises(mg.CaptureError, match=f"leaves .*{name}"):
        Step(body)(X)
    assert read() == before
    assert_same(X * 3, Step(lambda x: x * 3)(X))


@pytest.mark.every_case
@pytest.mark.parametrize(
    "around",
    [
        torch.no_grad,
        lambda: sdpa_kernel(SDPBackend.MATH),
        lambda: setting(torch.backends.mha.set_fastpath_enabled, False, True),
        lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: saved_tensors_hooks(lambda t: t * 2, lambda t: t),
        lambda: setting(torch.set_default_device, "cpu", None),
        Doubling,
        DoublingOps,
    ],
)
def test_what_a_trace_records_may_be_set_inside(around):
    def body(x: torch.Tensor) -> Any:
        with around():
            return attend(x).sin() + torch.ones(4), x @ x.mT

    step = Step(body)
    for _ in range(2):
        assert_same(body(X), step(X))
