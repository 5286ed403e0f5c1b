"""Ports: the typed inputs and outputs of a program."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Role(StrEnum):
    """What a port is for."""

    USER = "user"  # an argument, or a result of build()
    PARAM = "param"
    BUFFER = "buffer"
    GRAD = "grad"  # a gradient from before: of earlier micro-batches, or of earlier steps
    OPTIM = "optim"  # optimizer state
    HYPER = "hyper"  # a number that may change at each step: lr, betas, float arguments
    SCALER = "scaler"  # the scale of a gradient scaler, and what moves it
    EMA = "ema"  # averaged weights
    RNG = "rng"  # an explicit torch.Generator
    CAPTURED = "captured"  # a tensor from outside that is no parameter and no buffer
    PROBE = "probe"  # output only: what is looked at besides, no result and no state
    STATE = "state"  # output only: the next value of a state input, a kept gradient, or new optimizer state


@dataclass(frozen=True, slots=True)
class Port:
    """One input or output: the name of its value in the program, its role and its path.

    The path says which thing it is (`model.fc.weight`, `optimizer.0/model.fc.weight/exp_avg`);
    a STATE output carries the path of the state that it updates.
    """

    name: str
    role: Role
    path: str


FREE = "captured."  # how the paths of tensors that belong to no module and no optimizer begin
FINITE = "finite"  # the path of the flag that says whether all that a step updates is finite
PROBES = "probe/"  # how the paths of what probes keep begin
READ_OUT = "read/"  # how the paths of numbers begin that Python keeps
GRADIENTS = "grad/"  # how the paths of gradients begin


def gradient_path(path: str) -> str:
    """The path of the gradient of what is at `path`."""
    return f"{GRADIENTS}{path}"
