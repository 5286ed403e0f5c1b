"""What is known of the padded steps of one graph: how many there were, what padding costs, and how results are cut."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from monograph.padding.arguments import Arguments, Padded, Reader
from monograph.padding.declaration import Buckets
from monograph.padding.results import Rules


@dataclass
class _Count:
    """The steps of one bucket, and the elements of their arguments."""

    bucket: str
    steps: int = 0
    elements: int = 0
    added: int = 0
    found: str = ""  # by the comparison with the step without padding

    def add(self, padded: Padded) -> None:
        """One more step."""
        self.steps += 1
        self.elements += padded.elements
        self.added += padded.added

    @property
    def text(self) -> str:
        found = f"; {self.found}" if self.found else ""
        return f"{self.steps} step(s), {_share(self.added, self.elements)} of elements are padding{found}"


class Padding:
    """Of one configuration. A copy of it begins anew."""

    def __init__(self) -> None:
        self.rules: dict[Hashable, Rules] = {}
        self.compared: set[Hashable] = set()  # with steps without padding
        self.reported: set[str] = set()  # what a warning was given of
        self._counts: dict[Hashable, _Count] = {}
        self._reader: Reader | None = None

    def __reduce__(self) -> Any:
        return Padding, ()

    def read(
        self,
        buckets: tuple[Buckets, ...],
        build: Callable[..., Any],
        arguments: Arguments,
        formed: Callable[[tuple[Any, ...], dict[str, Any]], Arguments],
    ) -> Padded:
        """The arguments of a call of build(), padded."""
        if self._reader is None or self._reader.buckets is not buckets:
            self._reader = Reader(buckets, build)
            self.rules, self.compared, self.reported, self._counts = {}, set(), set(), {}
        return self._reader.read(arguments, formed)

    def count(self, padded: Padded, found: str | None) -> None:
        """A step was made. `found` is what the comparison has found, None if there was none."""
        count = self._counts.get(padded.bucket)
        if count is None:
            count = self._counts[padded.bucket] = _Count(_bucket(padded))
        count.add(padded)
        if found is not None:
            count.found = found

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Steps inside are not counted."""
        before = {name: replace(count) for name, count in self._counts.items()}
        try:
            yield
        finally:
            self._counts = before

    @property
    def cost(self) -> str:
        """What padding costs, in a few words; empty before the first step."""
        if not self._counts:
            return ""
        counts = self._counts.values()
        share = _share(sum(count.added for count in counts), sum(count.elements for count in counts))
        return f"padding costs {share} of elements in {sum(count.steps for count in counts)} step(s)"

    def lines(self, buckets: Sequence[Buckets]) -> list[str]:
        """What explain() says of these buckets."""
        if not buckets:
            return []
        names = ", ".join(map(str, buckets))
        lines = [f"buckets of {names}: {self.cost or 'no step yet'}"]
        return lines + [f"  {count.bucket}: {count.text}" for count in self._counts.values()]


def _bucket(padded: Padded) -> str:
    """The bucket of a call as text."""
    found = []
    for fit in padded.fits:
        if fit.group:
            found.append(f"{fit.group} {'larger than the largest' if fit.is_larger else fit.padded}")
    return "; ".join(found) or "nothing to pad"


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole if whole else 0:.1f} %"
