"""Fake tensors: `torch._subclasses.fake_tensor`, which lets a step run without data. Without it nothing is captured."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

from monograph.compat.distributed.ops import communicates
from monograph.compat.distributed.tensors import is_sharded, local_of
from monograph.compat.modes import outside_of_modes
from monograph.compat.tensors import outside_of_transforms, planned_device

# What: the name of its logger, which prints whole traces. Degraded path: they are seen.
LOGGER_OF_FAKES = "torch._subclasses.fake_tensor"


def import_capture_modules() -> None:
    """Import what capture needs. Costs over a second, so it waits for the first capture."""
    for name in (
        "torch._dynamo.source",
        "torch._functorch.config",
        "torch._subclasses.fake_tensor",
        "torch._subclasses.functional_tensor",
        "torch.fx.experimental.proxy_tensor",
        "torch.fx.experimental.symbolic_shapes",
        "torch.utils._sympy.printers",
        "torch.utils.checkpoint",
    ):
        importlib.import_module(name)


def fake_mode() -> Any:
    """What: FakeTensorMode. Why: capture without data. Degraded path: none, capture needs it."""
    environment = torch.fx.experimental.symbolic_shapes.ShapeEnv(allow_dynamic_output_shape_ops=False)
    _forget_places(environment)
    _know_truth_values(environment)
    _let_decide(environment)
    mode = torch._subclasses.fake_tensor.FakeTensorMode(shape_env=environment, allow_non_fake_inputs=True)
    _keep_from_cache(mode)
    compute_in_python(mode)
    return mode


def _forget_places(environment: Any) -> None:
    """What: the methods of ShapeEnv that look for the user's frame at each new symbol, for torch's own logs.

    Why: they import torch.export for a list of torch's own files, a third of the first capture of a process. Degraded
    path: they do.
    """
    for name in ("_get_user_frame", "_log_create_unbacked_symbol"):
        if hasattr(environment, name):
            setattr(environment, name, lambda *_args, **_options: None)
    summary = getattr(environment, "_get_stack_summary", None)
    if (
        summary is not None
    ):  # a place without a frame has no text in torch 2.11, and an error is one with a place

        def placed(is_debug: bool = False, framework_loc: str | None = None) -> Any:
            return summary(is_debug, framework_loc or "")

        environment._get_stack_summary = placed


def _know_truth_values(environment: Any) -> None:
    """What: the method of ShapeEnv that notes the value of a number read out of a tensor.

    Why: torch 2.11 notes 0 or 1 for a truth value, and then loses the condition of a branch on it: the branch would be
    taken in each step. Degraded path: there is no other; a torch without the method has no values to branch on.
    """
    noted = getattr(environment, "set_real_tensor_prop_unbacked_vals", None)
    if noted is not None:
        environment.set_real_tensor_prop_unbacked_vals = lambda symbol, value: noted(
            symbol, value if symbol.is_Symbol else bool(value)
        )


def _let_decide(environment: Any) -> None:
    """What: the method of ShapeEnv that decides on truth values. Why: ours decide themselves, and note it as a condition.
    Degraded path: sizes that vary are refused.
    """
    theirs = environment.evaluate_sym_node

    def decided(node: Any, *args: Any, **options: Any) -> Any:
        if getattr(node, "is_known", False):
            return node.truth()
        return theirs(node, *args, **options)

    environment.evaluate_sym_node = decided


_NO_PLAIN_INTS = ("concrete integers", "Expected IntList")  # as C++ refuses numbers that are computed


class NumbersAsked(RuntimeError):
    """A kernel for fakes asks for the number of a size that varies, where a formula may do without."""


def _own_formulas() -> dict[Any, Callable[..., torch.Tensor]]:
    """Those that torch lacks: drawn tensors, and the gradients of tensors that were resized, with the layouts of kernels."""

    def drawn(size: Any, *, generator: Any, **options: Any) -> torch.Tensor:
        return torch.empty(size, **options)

    def contiguous(gradient: torch.Tensor, _sizes: Any, before: Any, *_options: Any) -> torch.Tensor:
        return gradient.new_empty(before)

    def like_gradient(gradient: torch.Tensor, _sizes: Any, before: Any, *_options: Any) -> torch.Tensor:
        layout = torch._prims_common.suggest_memory_format(gradient)
        return torch.empty(before, dtype=gradient.dtype, device=gradient.device, memory_format=layout)

    aten = torch.ops.aten
    nearest = [f"{name}{dims}d" for name in ("upsample_nearest", "_upsample_nearest_exact") for dims in "13"]
    rows = {
        **dict.fromkeys(
            (*nearest, "upsample_linear1d", "upsample_bicubic2d", "_upsample_bicubic2d_aa"), contiguous
        ),
        **dict.fromkeys(("upsample_bilinear2d", "upsample_trilinear3d"), like_gradient),
    }
    resized = {getattr(aten, f"{name}_backward").default: formula for name, formula in rows.items()}
    return {**resized, aten.rand.generator: drawn, aten.randn.generator: drawn}


def compute_in_python(mode: Any) -> None:
    """What: what gives the fake result of an op, and torch's formulas in Python for it. Why: kernels in C++ of some ops, such
    as `constant_pad_nd`, take no number that is computed, or make numbers of the sizes that vary. Degraded path: those
    ops are refused for sizes that vary, or fix them.
    """
    theirs = getattr(mode, "_dispatch_impl", None)
    formulas = {**torch._decomp.meta_table, **torch._decomp.decomposition_table, **_own_formulas()}
    mode.has_formula = False  # of the op that is computed
    if theirs is None:
        return

    def computed(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        outer, mode.has_formula = mode.has_formula, func in formulas and not func._schema.is_mutable
        values = mode.propagate_real_tensors
        mode.propagate_real_tensors = values and not communicates(func)  # no process asks another in a trace
        try:
            return theirs(func, types, args, kwargs)
        except RuntimeError as error:
            asked = isinstance(error, NumbersAsked) and mode.has_formula
            refused = any(text in str(error) for text in _NO_PLAIN_INTS)
            if not asked and not (refused and func in formulas):
                raise
            mode.has_formula = False
            with mode:
                return formulas[func](*args, **kwargs)
        finally:
            mode.has_formula, mode.propagate_real_tensors = outer, values

    mode._dispatch_impl = computed


def _keep_from_cache(mode: Any) -> None:
    """What: a hook of FakeTensorMode that says what may come from its cache of results.

    Why: an op that gives one tensor twice, for the two biases of a recurrent layer, gives two from the cache, and a
    second capture would be another program than the first. Degraded path: it is one, with the same numbers.
    """
    right = getattr(mode, "_validate_cache_key", None)
    if right is None:
        return

    def validated(func: Any, args: Any, kwargs: Any) -> None:
        if func is torch.ops.aten.mkldnn_rnn_layer_backward.default:
            raise torch._subclasses.fake_tensor._BypassDispatchCache("one tensor twice")
        import torch.utils._pytree as pt

        for item in pt.tree_leaves((args, kwargs)):
            if isinstance(item, torch.SymInt) or (isinstance(item, torch.Tensor) and has_symbols(item)):
                raise torch._subclasses.fake_tensor._BypassDispatchCache("sizes that vary")
        right(func, args, kwargs)

    mode._validate_cache_key = validated


@outside_of_transforms()
def make_fake(
    mode: Any, tensor: torch.Tensor, *, with_value: bool = False, planned: bool = False
) -> torch.Tensor:
    """A fake of a real tensor with static sizes; `with_value` gives it data for branches and missing kernels.

    With `planned` it is on the device that a tensor without data is planned for.
    """
    # from_tensor would fake the base of a view too, and a gradient, with sizes that no trace knows: one that is there,
    # or one that a backward() in another thread puts there meanwhile
    with outside_of_modes(), torch._C.DisableTorchFunction():  # it may be met in the middle of a trace
        plain = tensor.data if tensor._is_view() or tensor.is_leaf else tensor
        whole = plain is not tensor and _is_block(plain)
        if block := whole or (planned and tensor.is_meta):
            made = _fake_of_block(mode, plain, requires_grad=tensor.requires_grad)
    if not block:
        if tensor.requires_grad and plain is not tensor:
            plain.requires_grad_(True)
        made = mode.from_tensor(plain, static_shapes=True)
    if with_value and not (planned and tensor.is_meta):
        made.real_tensor = tensor.detach().clone()
    return made  # type: ignore[no-any-return]


def _fake_of_block(mode: Any, tensor: torch.Tensor, *, requires_grad: bool) -> Any:
    """A fake of one that is the whole of its memory, which no view could show anything else of, or has none.

    What: the constructor of FakeTensor. Why: `from_tensor` describes each tensor first, for views, subclasses and
    symbolic sizes, and takes ten times as long. Degraded path: none, fakes are made so.
    """
    held = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return fake_around(mode, held, planned_device(tensor.device), requires_grad=requires_grad)


def _is_block(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and not tensor.is_meta
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg() or tensor.is_inference())
        and not tensor.storage_offset()
        and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
        and (tensor.is_contiguous() or tensor.is_contiguous(memory_format=torch.channels_last))
    )


def make_sparse_fake(mode: Any, form: Any, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """A fake sparse tensor: to autograd a sparse one of this size, without elements.

    What: the constructor of FakeTensor, around a sparse tensor of the device meta. Why: torch's own fakes of sparse
    tensors know no kernels, and lose how many elements there are. Degraded path: none.
    """
    layout, size, coalesced = form
    with outside_of_modes(), torch._C.DisableTorchFunction():
        empty = [torch.empty(part.shape, dtype=part.dtype, device="meta") for part in parts]
        options = {"is_coalesced": coalesced} if layout is torch.sparse_coo else {"layout": layout}
        make: Any = torch.sparse_coo_tensor if layout is torch.sparse_coo else torch.sparse_compressed_tensor
        held = make(*empty, size, check_invariants=False, **options)
        fake: torch.Tensor = torch._subclasses.fake_tensor.FakeTensor(mode, held, parts[-1].device)
    return fake


_STANDS_FOR = "_monograph_stands_for"


def bind_fake(fake: torch.Tensor, real: torch.Tensor) -> None:
    """Let a fake have the hash of a real tensor, so that sets and dicts find the one by the other.

    What: `__hash__` of FakeTensor, for those marked here. Why: `p in self.no_decay` of a parameter. Degraded path: none.
    """
    fakes: Any = torch._subclasses.fake_tensor.FakeTensor
    fakes.__hash__ = _hash_of_fake
    setattr(fake, _STANDS_FOR, (id(fake), id(real)))


def stands_for(item: object) -> int | None:
    """The id of the real tensor that a fake stands for; None for all else, copies of a fake among it."""
    if not is_fake(item):
        return None
    own, real = vars(item).get(_STANDS_FOR, (0, None))
    return real if own == id(item) else None


def _hash_of_fake(fake: torch.Tensor) -> int:
    return stands_for(fake) or id(fake)


def is_fake(tensor: object) -> bool:
    """True for tensors without data."""
    # of the type: a proxy of `weakref` whose object is gone has no class
    fakes = torch._subclasses.fake_tensor.FakeTensor
    return issubclass(type(tensor), fakes) or (is_sharded(tensor) and is_fake(local_of(tensor)))


def has_symbols(tensor: torch.Tensor) -> bool:
    """True for a tensor with sizes, or a place in memory, that are no plain numbers."""
    return not all(type(size) is int for size in (*tensor.shape, *tensor.stride(), tensor.storage_offset()))


UNSUPPORTED_OP = "UnsupportedOperatorException"  # of an op that has no fake results
DATA_DEPENDENT = (
    "GuardOnDataDependentSymNode",
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "PendingUnbackedSymbolNotFound",
)


def missing_fake_kernel(error: BaseException) -> bool:
    """True if a trace failed for want of a fake kernel, not for the user's fault."""
    return type(error).__name__ in (
        UNSUPPORTED_OP,
        "MissingOpProfile",
        "NotImplementedError",
    ) or ("fake impl" in str(error) or "meta kernel" in str(error).lower() or "Meta" in str(error))


def refused_by_fake_kernel(error: BaseException) -> bool:
    """True if a fake kernel refused its arguments; the real one may be less strict (seen: grouped matmul)."""
    traceback, file = error.__traceback__, ""
    while traceback is not None:
        file, traceback = traceback.tb_frame.f_code.co_filename, traceback.tb_next
    inside = ("_meta_registrations.py", "fake_impls.py", "_prims_common" + os.sep + "__init__.py")
    return type(error) is RuntimeError and file.endswith((*inside, "torch" + os.sep + "__init__.py"))


def example_view(fake: Any) -> Any:
    """What: how a trace notes what a node makes. Why: a copied node has no kernel run for it. Degraded path: none."""
    return torch.fx.experimental.proxy_tensor.snapshot_fake(fake)


def shown_example(fake: Any) -> Any:
    """The same for a fake that another node has as its example already, and that nobody writes to."""
    return fake if fake.real_tensor is None and not fake.requires_grad else example_view(fake)


def example_of(like: Any, shape: Sequence[int], strides: Sequence[int]) -> Any:
    """A fake of the dtype and device of another one.

    What: the constructor of FakeTensor. Why: its kernels take ten times as long. Degraded path: none.
    """
    with torch._C._DisableTorchDispatch():
        held = torch.empty_strided(shape, strides, dtype=like.dtype, device="meta")
    return fake_around(like.fake_mode, held, like.device)


def fake_around(mode: Any, held: torch.Tensor, device: torch.device, *, requires_grad: bool = False) -> Any:
    """A fake on a device, around a tensor of the device meta that nothing else holds.

    What: the constructor of FakeTensor, asked once for each device; others get the attributes that it has set. Why: it
    checks its arguments, and takes six times as long. Degraded path: none, fakes are made so.
    """
    fakes: Any = torch._subclasses.fake_tensor
    attributes = vars(mode).setdefault(_ATTRIBUTES, {})
    if device not in attributes:
        first = fakes.FakeTensor(mode, held.requires_grad_(requires_grad), device)
        attributes[device] = vars(first).copy()
        return first
    made: Any = torch.Tensor._make_subclass(
        fakes.FakeTensor, held, requires_grad, dispatch_device=True, device_for_backend_keys=device
    )
    if mode._allow_unsafe_data_ptr_access:
        torch._C._set_warn_deprecated_on_mutable_data_ptr(made)
    else:
        torch._C._set_throw_on_mutable_data_ptr(made)
    vars(made).update(attributes[device])
    return made


_ATTRIBUTES = "_monograph_attributes_of_fakes"  # of the mode
