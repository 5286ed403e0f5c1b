"""Fake tensors that know values: FakeTensorMode's dispatch, wrapped, and its `propagate_real_tensors`.

Without it a step whose ops or branches ask for values is refused as data-dependent.
"""

from __future__ import annotations

import importlib
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeAlias

import torch

from monograph.compat.fakes import is_fake, refused_by_fake_kernel
from monograph.compat.modes import outside_of_modes
from monograph.compat.patching import replace, replaced
from monograph.compat.symbolic_numbers import hint_of

VALUES_NOT_KNOWN = "an op whose fake kernel refuses its arguments works on values that are not known"


@contextmanager
def fake_values(
    mode: Any, *, infer_kernels: bool = False, mended: dict[Any, str] | None = None
) -> Iterator[None]:
    """Ops on fakes that carry values compute real values too.

    `mended` gets the ops whose fake kernel reported something else than the real one gave, and what.

    What: `propagate_real_tensors` of FakeTensorMode, switched on for a stretch. Why: optimizers that branch on
    their step counter need its value; with `infer_kernels` an op without a (right) fake kernel takes the
    description of its real result. Degraded path: without the flag such optimizers are refused.
    """
    fakes: Any = torch._subclasses.fake_tensor
    config = torch._functorch.config
    before = mode.propagate_real_tensors, mode.cache_enabled, fakes._infer_fake_from_real_tensor
    mode.propagate_real_tensors, mode.cache_enabled = True, False
    if infer_kernels:
        fakes._infer_fake_from_real_tensor = fake_like_real
    logger = logging.getLogger("torch.fx.experimental.symbolic_shapes")
    logger.addFilter(_about_branches)
    try:
        with ExitStack() as stack:
            stack.enter_context(config.patch(generate_fake_kernels_from_real_mismatches=infer_kernels))
            if infer_kernels:
                _compare_strides(stack, {} if mended is None else mended)
                _take_real_results(stack, mode)
            yield
    finally:
        mode.propagate_real_tensors, mode.cache_enabled, fakes._infer_fake_from_real_tensor = before
        logger.removeFilter(_about_branches)


def is_unlike_formula(error: BaseException) -> bool:
    """True if a gradient has another shape than the value that it is of: a fake kernel may have reported a wrong one.

    What: words of autograd's own error. Why: it has no type. Degraded path: the error is the user's to explain.
    """
    return type(error) is RuntimeError and "returned an invalid gradient" in str(error)


def _about_branches(record: logging.LogRecord) -> bool:
    """Drop torch's warning that a branch was taken on a real value: here it becomes a guard."""
    return not str(record.msg).startswith("propagate_real_tensors")


def _compare_strides(stack: ExitStack, mended: dict[Any, str]) -> None:
    """Compare the strides of fake and real results too, but of views, which must stay what they show.

    What: the comparison of FakeTensorMode. Why: asked for strides, that of torch 2.11 and 2.12 compares those on a GPU only.
    Degraded path: a fake kernel with wrong strides makes a program whose ops refuse what they get.
    """
    utils = importlib.import_module("torch._subclasses.fake_utils")
    compare, fakes = utils._check_fake_real_tensors, torch._subclasses.fake_tensor
    told: list[tuple[Any, Any]] = []  # the last real result that was compared, with its fake

    def described(mode: Any, op: Any, real: Any) -> Any:
        if told and told[0][0] is real:
            mended.setdefault(
                op, f"shape {tuple(real.shape)}; its fake kernel reports {tuple(told[0][1].shape)}"
            )
        return fake_like_real(mode, op, real)

    def with_strides(real: torch.Tensor, fake: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        told[:] = [(real, fake)]
        compare(real, fake, *args, **kwargs)
        if real.numel() and not fake._is_view():
            pairs = zip(real.shape, real.stride(), fake.stride(), strict=True)
            if any(size > 1 and type(b) is int and a != b for size, a, b in pairs):
                error: Any = torch._subclasses.fake_tensor.MetadataMismatchError
                raise error(f"strides are {real.stride()} and {fake.stride()}")

    replace(stack, utils, "_check_fake_real_tensors", with_strides)
    replace(stack, fakes, "_infer_fake_from_real_tensor", described)


def fake_like_real(mode: Any, _op: Any, real: torch.Tensor) -> torch.Tensor:
    with mode:
        return torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device=real.device)


def value_constant(mode: Any, tensor: Any, known: Callable[[Any], Any]) -> Any:
    """Let a tensor that was made from Python numbers carry its value while `mode` computes values.

    torch remembers a single number only; `known` gives the value of the others.
    Degraded path: a counter that such a tensor is added to keeps its old value, which the conditions then refuse.
    """
    if mode.propagate_real_tensors and is_fake(tensor):
        constant = tensor.constant
        if constant is None and tensor.real_tensor is None:
            constant = known(tensor)
        if constant is not None:
            with outside_of_modes():
                tensor.real_tensor = constant.clone()
    return tensor


def _take_real_results(stack: ExitStack, mode: Any) -> None:
    """An op that its fake kernel refuses takes the description of its real result."""
    dispatch, tree = mode._dispatch_impl, torch.utils._pytree

    def fake_of(real: torch.Tensor) -> torch.Tensor:
        fake = fake_like_real(mode, None, real)
        fake.real_tensor = real  # type: ignore[attr-defined]
        return fake

    def rescued(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        try:
            return dispatch(func, types, args, kwargs)
        except RuntimeError as error:
            if not refused_by_fake_kernel(error) or func._schema.is_mutable:
                raise
            real_args, real_kwargs = tree.tree_map(_value_of, (args, kwargs))
            with outside_of_modes():
                made = func(*real_args, **real_kwargs)
            return tree.tree_map_only(torch.Tensor, fake_of, made)

    replace(stack, mode, "_dispatch_impl", rescued)


KnownValue: TypeAlias = Callable[[torch.Tensor, Any], torch.Tensor | None]


@contextmanager
def results_by_value(mode: Any, value_of: Callable[[torch.Tensor], torch.Tensor | None]) -> Iterator[None]:
    """Ops whose result depends on values (`item`, `nonzero`) work where `value_of` knows the values that decide.

    What: FakeTensorMode's dispatch, wrapped. Why: torch's own C++ code reads masks and numbers that are constant.
    Degraded path: without it such a step is refused as data-dependent.
    """
    dispatch, tree = mode._dispatch_impl, torch.utils._pytree
    fakes: Any = torch._subclasses.fake_tensor
    unknown = (fakes.DataDependentOutputException, fakes.DynamicOutputShapeException)
    aten = torch.ops.aten
    values_do_not_decide = {  # the positions of arguments whose values the form of the result does not depend on
        aten.masked_select.default: (0,),
        aten.index.Tensor: (0,),
        aten.linalg_lstsq.default: (0, 1),  # if the matrix has full rank, as the fakes have
    }

    def real(func: Any, args: Any, kwargs: Any) -> Any:
        """The result on known values, None if one is not known."""
        free, complete = [args[position] for position in values_do_not_decide.get(func, ())], True

        def value(item: Any) -> Any:
            nonlocal complete
            known = value_of(item)
            if known is None and any(item is other for other in free):
                known = torch.zeros(item.shape, dtype=item.dtype, device=item.device)
                if item.dim() > 1 and item.is_floating_point():
                    known.diagonal(dim1=-2, dim2=-1).fill_(1)
            complete = complete and known is not None
            return known

        with outside_of_modes():
            values = tree.tree_map_only(torch.Tensor, value, (args, kwargs))
            return func(*values[0], **values[1]) if complete else None

    def known(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if func is aten._local_scalar_dense.default and (number := real(func, args, kwargs)) is not None:
            return number
        if func in (aten._sample_dirichlet.default, aten.binomial.default):  # torch has no fake of them
            with mode:
                return args[0].new_empty(args[0].shape)
        try:
            return dispatch(func, types, args, kwargs)
        except unknown:
            if func in (aten._ctc_loss.default, aten._ctc_loss.Tensor):
                return _fake_ctc_loss(mode, *args[:4])
            made = real(func, args, kwargs)
            if made is None:
                raise
            return tree.tree_map_only(torch.Tensor, lambda item: fake_like_real(mode, None, item), made)

    with ExitStack() as stack:
        replace(stack, mode, "_dispatch_impl", known)
        yield


@contextmanager
def checks_as_assertions(mode: Any, tracer: Any, is_known: Callable[[torch.Tensor], bool]) -> Iterator[None]:
    """C++ of torch that asks whether values are right gets the answer that they are, and the program asserts it.

    `value <= 0` asks for a fault, any other comparison for what is right. Degraded path: see `results_by_value`.
    """
    dispatch, aten = mode._dispatch_impl, torch.ops.aten
    get_slot: Any = torch.fx.experimental.proxy_tensor.get_proxy_slot

    def answered(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if func is not aten.equal.default or is_known(args[0]):  # with a tensor that says true
            return dispatch(func, types, args, kwargs)
        condition = get_slot(args[0], tracer).proxy
        fault = condition.node.target is aten.le.Scalar
        if fault:
            condition = tracer.create_proxy("call_function", aten.logical_not.default, (condition,), {})
        message = "a check of values in a function of torch has failed"
        tracer.create_proxy("call_function", aten._assert_async.msg, (condition, message), {})
        return not fault

    with ExitStack() as stack:
        replace(stack, mode, "_dispatch_impl", answered)
        yield
    for node in reversed(tracer.graph.nodes):  # the questions themselves, which nobody could answer again
        if node.target is aten.equal.default and not node.users:
            tracer.graph.erase_node(node)


def _fake_ctc_loss(mode: Any, log_probs: Any, targets: Any, _lengths: Any, target_lengths: Any) -> Any:
    """The loss of each sequence, and a workspace that only backward reads: of unknown lengths the largest."""
    time, batch = log_probs.shape[:2]
    unknown = isinstance(target_lengths, torch.Tensor)
    longest = targets.shape[-1] if unknown else max(target_lengths, default=0)
    with mode:
        return log_probs.new_empty(batch), log_probs.new_empty(batch, time, 2 * longest + 1)


def _value_of(item: Any) -> Any:
    value = item.real_tensor if is_fake(item) else hint_of(item)
    if is_fake(item) and value is None:
        raise RuntimeError(VALUES_NOT_KNOWN)
    return value


@contextmanager
def lists_by(answer: Callable[[Any], Any], unknown: object) -> Iterator[None]:
    """Let `answer(tensor)` give what `tolist()` of a fake gives in this thread, unless it is `unknown`.

    What: the method of fake tensors. Why: torch's own reads a number for each element. Degraded path: so it does.
    """
    fakes: Any = torch._subclasses.fake_tensor
    thread, original = threading.get_ident(), fakes.FakeTensor.tolist

    def listed(tensor: Any) -> Any:
        answered = unknown if threading.get_ident() != thread else answer(tensor)
        return original(tensor) if answered is unknown else answered

    with replaced(fakes.FakeTensor, "tolist", listed):
        yield


def op_that_failed(error: BaseException) -> str:
    """What: the op in an error of torch's fakes. Why: messages name it. Degraded path: ""."""
    packet = getattr(getattr(error, "func", None), "overloadpacket", None)
    return str(getattr(packet, "__name__", ""))
