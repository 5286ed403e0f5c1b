"""The settings that a peer may choose from: the fastest one on the machine stands for the peer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Setting:
    """How a competitor is set up. A peer reads the fields that mean something to it."""

    optimizer: str = "foreach"  # of PyTorch: foreach, fused, single; of optax: tree, flat
    channels_last: bool = False
    cpp_wrapper: bool = False
    compiled_update: bool = True

    def __str__(self) -> str:
        """The words of the tables."""
        return ", ".join(
            (
                self.optimizer,
                *(("C++ wrapper",) if self.cpp_wrapper else ()),
                *(() if self.compiled_update else ("update not compiled",)),
                *(("channels last",) if self.channels_last else ()),
            )
        )


# Each begins with the one that is the fastest most often, which is all that a quick run tries.
EAGER = (Setting("fused"), Setting("foreach"), Setting("single"))
EAGER_IMAGES = (Setting("fused", channels_last=True), Setting("foreach", channels_last=True))
COMPILE = (
    Setting("fused", compiled_update=False),
    Setting("foreach"),
    Setting("foreach", cpp_wrapper=True),
)
COMPILE_IMAGES = (
    Setting("foreach", channels_last=True),
    Setting("fused", compiled_update=False, channels_last=True),
)
WHOLE = (Setting("foreach", cpp_wrapper=True), Setting("foreach"), Setting("single"))
WHOLE_IMAGES = (Setting("foreach", channels_last=True),)
JAX = (Setting("tree"), Setting("flat"))
JAX_IMAGES = (Setting("tree", channels_last=True), Setting("flat", channels_last=True))
OWN = EAGER
OWN_IMAGES = EAGER_IMAGES
OWN_COMPILED = (Setting("foreach"), Setting("single"))
OWN_COMPILED_IMAGES = (Setting("foreach", channels_last=True),)
