"""Calls of torch's ops with arguments that make sense: what torch's own databases of tests come to, below autograd.

An op that changes an argument gives a call of its form that does not.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import random
import subprocess
import sys
import warnings
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.testing._internal.common_methods_invocations import (
    foreach_binary_op_db,
    foreach_other_op_db,
    foreach_pointwise_op_db,
    foreach_reduce_op_db,
    foreach_unary_op_db,
    op_db,
)
from torch.testing._internal.common_modules import module_db
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

_SAMPLES = 8  # of one op in a database and one dtype
_ELEMENTS = 3000  # of a tensor in a call that is kept
_KEPT = 12  # calls of one op, each with other forms of arguments
_DTYPES = (torch.float32, torch.int64, torch.complex64, torch.bool)
_PLAIN = (
    *(type(None), bool, int, float, complex, str),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)
_FOREACH = (
    *foreach_unary_op_db,
    *foreach_binary_op_db,
    *foreach_pointwise_op_db,
    *foreach_reduce_op_db,
    *foreach_other_op_db,
)


@dataclass(frozen=True)
class OpCall:
    """One call of an op, by its exact name."""

    op: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, dict[Any, bytes]] = defaultdict(dict)

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with contextlib.suppress(_TooLarge):
            self._note(op, args, kwargs)
        return op(*args, **kwargs)

    def _note(self, op: Any, args: Any, kwargs: Any) -> None:
        name = f"{op.namespace}::{op._opname.removesuffix('_') if op._schema.is_mutable else op._opname}"
        calls = self.found[f"{name}.{op._overloadname}"]
        leaves, spec = tree_flatten((args, kwargs))
        form = (str(spec), *(_form(leaf) for leaf in leaves))
        if len(calls) < _KEPT and form not in calls:
            try:
                calls[form] = pickle.dumps(tree_map(_copied, (args, kwargs)))
            except TypeError:
                print("not kept", op, type(args))


class _TooLarge(Exception):
    """A call that is not worth keeping."""


def _form(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.dtype, leaf.dim(), leaf.is_contiguous()
    return type(leaf) if isinstance(leaf, float) else str(leaf)


def _copied(leaf: Any) -> Any:
    if isinstance(leaf, torch.Generator):
        return None
    if not isinstance(leaf, torch.Tensor):
        if type(leaf) not in _PLAIN:
            raise _TooLarge
        return leaf
    if leaf.numel() > _ELEMENTS or leaf.layout is not torch.strided or leaf.is_quantized:
        raise _TooLarge
    if leaf.device.type != "cpu" or type(leaf) not in (torch.Tensor, nn.Parameter):
        raise _TooLarge
    made = leaf.detach().clone()
    return made.resolve_conj().resolve_neg()


def kept(path: Path) -> dict[str, list[OpCall]]:
    """Calls by the exact names of ops; they are recorded once, in a process of its own, and kept at `path`."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        environment = {key: value for key, value in os.environ.items() if key != "LD_PRELOAD"}
        subprocess.run(
            [sys.executable, "-m", "tests.stress.op_seeds", str(path)], check=True, env=environment
        )
    return calls_of(pickle.loads(path.read_bytes()))


def calls_of(rows: Mapping[str, list[bytes]]) -> dict[str, list[OpCall]]:
    """The calls that were recorded."""
    return {name: [OpCall(name, *pickle.loads(row)) for row in found] for name, found in rows.items()}


def recorded(names: Collection[str] | None = None) -> dict[str, list[bytes]]:
    """The arguments of calls by the exact names of ops; from these entries of torch's database alone, if told."""
    torch.manual_seed(0)
    random.seed(0)
    recorder = _Recorder()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for run in _runs(names):
            with contextlib.suppress(Exception), recorder:  # a sample that fails is no seed
                run()
    return {name: list(calls.values()) for name, calls in sorted(recorder.found.items()) if calls}


def _runs(names: Collection[str] | None) -> Iterator[Any]:
    for op in op_db:
        for dtype in _DTYPES if names is None or op.name in names else ():
            if dtype in op.supported_dtypes("cpu"):
                grad = op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")
                with contextlib.suppress(Exception):
                    samples = itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=grad), _SAMPLES)
                    yield from (_of_sample(op, sample, grad) for sample in samples)
    yield from map(_of_optimizer, ("SGD", "Adam", "AdamW", "Adagrad"))
    if names is not None:
        return
    for op in _FOREACH:
        for dtype in _DTYPES:
            with contextlib.suppress(Exception):
                samples = itertools.islice(op.sample_inputs("cpu", dtype), 4)
                yield from (_of_sample(op, sample, False) for sample in samples)
    for info in module_db:
        with contextlib.suppress(Exception):
            inputs = info.module_inputs_func(
                info, device="cpu", dtype=torch.float32, requires_grad=True, training=True
            )
            yield from (_of_module(info, item) for item in itertools.islice(inputs, _SAMPLES))
    yield from map(_of_encoder, itertools.product((1, 2), (None, "positions", "padding", "both")))


def _of_encoder(case: tuple[int, str | None]) -> Any:
    """Torch runs these as one op in evaluation."""

    def run() -> None:
        heads, masked = case
        layer = nn.TransformerEncoderLayer(4, heads, 6, batch_first=True).eval()
        masks: list[torch.Tensor | None] = [torch.ones(5, 5).triu(1).bool(), torch.zeros(3, 5).bool()]
        masks = [
            mask if masked in (name, "both") else None
            for mask, name in zip(masks, ("positions", "padding"), strict=True)
        ]
        x = torch.randn(3, 5, 4)
        with torch.no_grad():
            layer(x, *masks)
            layer.self_attn(x, x, x, key_padding_mask=masks[1], attn_mask=masks[0])

    return run


def _of_sample(op: Any, sample: Any, grad: bool) -> Any:
    def run() -> None:
        _backward(op(sample.input, *sample.args, **sample.kwargs) if callable(op) else None, grad)

    return run


def _of_module(info: Any, item: Any) -> Any:
    def run() -> None:
        given, forward = item.constructor_input, item.forward_input
        module = info.module_cls(*given.args, **given.kwargs)
        _backward(module(*forward.args, **forward.kwargs), True)

    return run


def _of_optimizer(name: str) -> Any:
    def run() -> None:
        for options in ({}, {"foreach": True}, {"fused": True}):
            module = nn.Linear(3, 2)
            optimizer = getattr(torch.optim, name)(module.parameters(), lr=0.1, **options)
            _backward(module(torch.ones(2, 3)), True)
            optimizer.step()

    return run


def _backward(results: Any, grad: bool) -> None:
    leaves = [
        item for item in tree_flatten(results)[0] if isinstance(item, torch.Tensor) and item.requires_grad
    ]
    if grad and leaves:
        torch.autograd.backward(leaves, [torch.ones_like(item) for item in leaves])


if __name__ == "__main__":
    torch.set_num_threads(1)
    temporary = Path(f"{sys.argv[1]}.{os.getpid()}")
    temporary.write_bytes(pickle.dumps(recorded()))
    temporary.replace(sys.argv[1])
