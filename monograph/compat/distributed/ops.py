"""Ops that talk to other processes, by their names: which there are, and whose memory they show."""

from __future__ import annotations

from typing import Any

import torch

_OpOverload = torch._ops.OpOverload  # as in compat/ops.py
_COMMUNICATION = frozenset({"_c10d_functional", "_c10d_functional_autograd", "c10d"})
SEND_NAME, RECEIVE_NAME = "send", "receive"  # our own, from one rank to another
_TRANSFERS = frozenset({f"monograph::{SEND_NAME}", f"monograph::{RECEIVE_NAME}"})
_COPY_FIRST = frozenset({"all_reduce", "all_reduce_coalesced", "broadcast"})
_MAKE_MEMORY = _COPY_FIRST | frozenset(
    f"{name}{coalesced}"
    for name in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single")
    for coalesced in ("", "_coalesced")
)


def communicates(target: Any) -> bool:
    """True for ops that send to other processes, receive from them, or wait for that: all run, each once, in their order."""
    return isinstance(target, _OpOverload) and (
        target.namespace in _COMMUNICATION or target._schema.name in _TRANSFERS
    )


def transfers(target: Any) -> bool:
    """True for ops by which one rank sends and another receives: the others of their group have no part in it."""
    return communicates(target) and (
        target._schema.name in _TRANSFERS or target._opname in ("isend", "irecv", "batch_p2p_ops")
    )


def waits(target: Any) -> bool:
    """True for the op that waits until a collective is done, and gives its result in the same memory."""
    return communicates(target) and target._opname == "wait_tensor"


def awaited(target: Any, made: Any) -> Any:
    """What an op made, once it is there: a collective is waited for where it begins.

    What is sent and received stays under way: two ranks that each send first would wait for each other.
    """
    if communicates(target) and not waits(target) and not transfers(target):
        for tensor in made if isinstance(made, (tuple, list)) else (made,):
            torch.ops._c10d_functional.wait_tensor.default(tensor)
    return made


def reads_until_awaited(target: Any) -> bool:
    """True for collectives that read their arguments until they are waited for.

    What: kernels in C++ that copy what they are given first, and send the copy. Why: such an argument need not live on.
    Degraded path: arguments live longer.
    """
    return communicates(target) and target._opname not in (*_COPY_FIRST, "wait_tensor")


def reads_a_copy(target: Any, device: str) -> bool:
    """True for collectives of a kind of device that read a copy, which they make before the op returns.

    What: `reduce_scatter_tensor` of Gloo, in C++. Why: what such a collective is given need not be held until it is waited for. It is
    not written over all the same: a group written in Python may hold the tensor itself. Degraded path: it is held for longer.
    """
    return device == "cpu" and communicates(target) and target._opname.startswith("reduce_scatter_tensor")


def copied_by_gloo(target: Any, given: int, made: int) -> int:
    """The bytes of the copy with which Gloo does a collective, by those that it is given and those that it makes.

    What: torch's kernels: what is reduced and scattered is reduced whole, what is gathered comes in one piece first. Why: a compiled step holds
    it while the collective is on its way. Degraded path: none is known.
    """
    if communicates(target) and target._opname.startswith("reduce_scatter_tensor"):
        return given
    return made if communicates(target) and target._opname.startswith("all_gather_into_tensor") else 0


def shown_by_collective(op: Any) -> tuple[frozenset[str], ...] | None:
    """For each result the names of the arguments whose memory it shows; None if that is not known.

    What: names of ops. Why: the schema of `wait_tensor` keeps silent about its result. Degraded path: what is sent or
    received may be anywhere.
    """
    if op._schema.name in _TRANSFERS:
        return (frozenset(),)
    if op.namespace != "_c10d_functional":
        return None
    if waits(op):
        return (frozenset({op._schema.arguments[0].name}),)
    return (frozenset(),) if op._opname in _MAKE_MEMORY else None
