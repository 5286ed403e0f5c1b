"""How the ranks of a placement share a tensor, by OneFlow's words: in parts, as copies, or as summands."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class sbp:  # OneFlow's name
    """One of `split(dim)`, `broadcast` and `partial_sum`."""

    kind: str
    dim: int | None = None

    def __call__(self) -> sbp:
        """Itself: `broadcast` and `partial_sum` may be written with parentheses."""
        return self

    def __repr__(self) -> str:
        return f"sbp.{self.kind}" + (f"(dim={self.dim})" if self.dim is not None else "")


broadcast = sbp("broadcast")
partial_sum = sbp("partial_sum")


def split(dim: int) -> sbp:
    """Each rank has a part along a dimension, in the order of ranks.

    >>> split(0)
    sbp.split(dim=0)
    """
    return sbp("split", dim)
