"""Every knob in one frozen place, and the user's setters for them."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace

import torch

from monograph.errors import DefinitionError

BACKENDS = ("aten",)


@dataclass(frozen=True)
class Settings:
    """Every knob. A build depends on its Settings and on nothing else that can be configured."""

    backend: str = "aten"
    keep_gradients: bool = False
    amp: torch.dtype | None = None
    accumulation_steps: int = 1
    max_builds: int | None = field(default=None, compare=False)  # decides about builds, is no part of one


class GraphConfig:
    """The setters of a Graph's `config`; each returns nothing and holds from the next call on."""

    def __init__(self) -> None:
        self.settings = Settings()
        self.training = False

    def backend(self, name: str) -> None:
        """Choose what runs the program: "aten" replays op by op."""
        if name not in BACKENDS:
            raise DefinitionError(f"unknown backend {name!r}", hint=f"choose one of {', '.join(BACKENDS)}")
        self.settings = replace(self.settings, backend=name)

    def keep_gradients(self, mode: bool = True) -> None:
        """After a step let `p.grad` hold what eager's would."""
        self.settings = replace(self.settings, keep_gradients=mode)

    def enable_amp(self, mode: bool = True, *, dtype: torch.dtype = torch.bfloat16) -> None:
        """Run build() under autocast; `backward()` and the optimizers are outside of it."""
        if not isinstance(mode, bool):
            raise DefinitionError(
                f"enable_amp({mode!r}): the first argument says on or off", hint="write enable_amp(dtype=...)"
            )
        if dtype not in (torch.float16, torch.bfloat16):
            raise DefinitionError(
                f"enable_amp(dtype={dtype}): autocast computes in half precision",
                hint="choose torch.bfloat16, or torch.float16 with a gradient scaler: graph.set_grad_scaler(...)",
            )
        self.settings = replace(self.settings, amp=dtype if mode else None)

    def set_gradient_accumulation_steps(self, n: int) -> None:
        """One call is a mini-batch of `n` equal micro-batches, split on dimension 0, and one step of the optimizer.

        backward() sees the loss divided by `n`. Scalar results get the shape `(n,)`, undivided; others are joined on
        dimension 0. `mg.replicated(x)` passes an argument whole to each micro-batch.
        """
        if type(n) is not int or n < 1:
            raise DefinitionError(
                f"set_gradient_accumulation_steps({n!r}): a number of micro-batches is needed",
                hint="pass a whole number from 1 on; 1 means no accumulation",
            )
        self.settings = replace(self.settings, accumulation_steps=n)

    def max_builds(self, n: int | None) -> None:
        """Raise instead of compiling more than `n` builds; None removes the limit."""
        if n is not None and n < 1:
            raise DefinitionError(
                f"max_builds({n}): at least one build is needed", hint="pass None to remove the limit"
            )
        self.settings = replace(self.settings, max_builds=n)

    def __repr__(self) -> str:
        knobs = ", ".join(
            f"{field.name}={getattr(self.settings, field.name)!r}" for field in fields(self.settings)
        )
        return f"GraphConfig(training={self.training}, {knobs})"
