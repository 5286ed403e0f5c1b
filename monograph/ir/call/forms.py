"""Which calls are known by the names of sizes instead of their numbers, and which sizes are numbers for good."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

from monograph.ir.call.signature import Call, Key
from monograph.ir.call.varying import Place, Varying, by_numbers, declared, vary
from monograph.settings import DynamicSize


@dataclass
class CallForms:
    """What the calls of one graph have taught about their sizes."""

    _known: list[Varying] = field(default_factory=list)  # newest first
    _static: set[Key] = field(default_factory=set)  # keys by names for which no step could be captured
    _fixed: dict[tuple[object, ...], set[Place]] = field(default_factory=dict)  # by the form of a call

    def of(self, call: Call) -> Iterator[Call]:
        """The call by the names of sizes that vary, once for each way in which builds know them."""
        for form in self._known:
            if (by_names := form.of(call)) is not None:
                yield by_names

    def new(self, call: Call, known: Collection[Key]) -> Call | None:
        """A call that no build fits by the names of sizes that vary: those in which it differs from a known one alone.

        None if it differs in something else, or if no step can be captured for it by names.
        """
        found = next((by_names for by_names in self.of(call) if by_names.key in known), None)
        if found is None and (form := vary(call, known, self._fixed_in(call))) is not None:
            found = form.of(call)
        return None if found is None or found.key in self._static else found

    def declared(self, call: Call, sizes: Iterable[DynamicSize]) -> Call | None:
        """A call by the names of the sizes that were declared to vary; None if none of it were."""
        form = declared(call, sizes, self._fixed_in(call))
        return None if form is None else form.of(call)

    def keep(self, call: Call) -> None:
        """From now on calls are known by the names in this one."""
        form = Varying.in_key(call.key)
        if form is not None and form not in self._known:
            self._known.insert(0, form)

    def is_static(self, key: Key) -> None:
        """Note that no step can be captured for calls of this key, which is by names."""
        self._static.add(key)

    def narrowed(self, call: Call, fixed: Collection[str]) -> Call:
        """A call by names with numbers for the sizes that its step has fixed."""
        form = Varying.in_key(call.key)
        if form is None or not fixed:
            return call
        self._fixed_in(call).update(form.places(fixed))
        rest = form.without(fixed)
        numbers = by_numbers(call)
        return numbers if rest is None else rest.of(numbers) or numbers

    def _fixed_in(self, call: Call) -> set[Place]:
        tree, _, same, modes = call.key.signature
        return self._fixed.setdefault((tree, same, modes), set())
