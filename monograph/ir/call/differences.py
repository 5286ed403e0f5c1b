"""The sentences of the form "from this to that". They are made here alone, so that the two sides never read the same."""

from __future__ import annotations


def change_text(what: str, before: str, now: str) -> str | None:
    """`what` changed from one text to another; None if the texts are the same, and say nothing."""
    return None if before == now else f"{what} changed from {before} to {now}"


def misfit_text(what: str, got: str, known: str) -> str | None:
    """What a call gives and what the graph was built for; None if the texts are the same, and say nothing."""
    return None if got == known else f"{what} {got}; the graph was built for {known}"
