"""Which calls are known by the names of sizes instead of their numbers, and which sizes are numbers for good."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from monograph.ir.call.signature import Call, Key
from monograph.ir.call.staying import Staying
from monograph.ir.call.varying import Place, Varying, by_numbers, declared, ones_in, vary
from monograph.settings import DynamicSize


@dataclass
class CallForms:
    """What the calls of one graph have taught about their sizes."""

    _known: list[Varying] = field(default_factory=list)  # newest first
    # keys by names for which no step could be captured, and why
    _static: dict[Key, str] = field(default_factory=dict)
    staying: Staying = field(default_factory=Staying)
    # why, by the form of a call
    _fixed: dict[tuple[object, ...], dict[Place, str]] = field(default_factory=dict)

    def of(self, call: Call) -> Iterator[Call]:
        """The call by the names of sizes that vary, sizes of one too, once for each way in which builds know them."""
        for form in self._known:
            if (by_names := form.of(call, with_ones=True)) is not None:
                yield by_names

    def new(self, call: Call, known: Collection[Key], *, sizes: bool) -> Call | None:
        """A call that no build fits by the names of what varies: ints, and `sizes`, in which alone it differs from a known one.

        None if it differs in something else, or if no step can be captured for it by names.
        """
        return self._movable(call, self._new_form(call, known, sizes))

    def why_static(self, call: Call, known: Collection[Key], *, sizes: bool) -> str:
        """Why a size of a call is a number, as an earlier capture has found; empty if none has."""
        form = self._new_form(call, known, sizes)
        found = filter(None, (less.of(call) for less in form.fewer())) if form is not None else ()
        why = next((self._static[item.key] for item in found if item.key in self._static), "")
        return why or next(iter(self._fixed_in(call).values()), "")

    def _new_form(self, call: Call, known: Collection[Key], sizes: bool) -> Varying | None:
        form = next((form for form in self._known if _key(form.of(call)) in known), None)
        return form or vary(call, known, self._fixed_in(call), sizes=sizes)

    def declared(
        self, call: Call, known: Collection[Key], sizes: Iterable[DynamicSize], *, others: bool = False
    ) -> Call | None:
        """A call by the names of the sizes that were declared to vary, and of what else differs from a known one: ints, and `others`.

        None if no size of it was declared, or if it is known.
        """
        fixed = self._fixed_in(call)
        form = declared(call, sizes, fixed)
        by_names = None if form is None else form.of(call)
        if form is None or by_names is None or by_names.key in known:
            return None
        forms, more = [form], vary(by_names, known, fixed, sizes=others)
        if more is not None:
            more = more.without(ints=self.staying.of(call, more.numbers)) or form
            forms = [form.with_names(more), replace(form, numbers=more.numbers), form]
        return self._first_of(call, forms)

    def _movable(self, call: Call, form: Varying | None) -> Call | None:
        """The call by the names of a form, or by fewer of them: those for which a step can be captured."""
        if form is not None:
            form = form.without(ints=self.staying.of(call, form.numbers))
        return None if form is None else self._first_of(call, form.fewer())

    def _first_of(self, call: Call, forms: Iterable[Varying]) -> Call | None:
        """The call by the names of the first of these forms for which a step can be captured."""
        found = filter(None, (form.of(call) for form in forms))
        return next((by_names for by_names in found if by_names.key not in self._static), None)

    def without_ones(self, call: Call, by_names: Call) -> Call | None:
        """The call with numbers for the sizes of one that are named in another form of it; None if no step can be captured so."""
        known = Varying.in_key(by_names.key)
        form = None if known is None else known.without(ones_in(by_names))
        if form is None:
            return call
        found = self._movable(call, form)
        return found if found is not None and Varying.in_key(found.key) == form else None

    def keep(self, call: Call) -> None:
        """From now on calls are known by the names in this one."""
        form = Varying.in_key(call.key)
        if form is not None and form not in self._known:
            self._known.insert(0, form)

    def is_static(self, key: Key, why: str = "") -> None:
        """Note that no step can be captured for calls of this key, which is by names, and `why`."""
        self._static[key] = why

    def narrowed(self, call: Call, fixed: Mapping[str, str]) -> Call:
        """A call by names with numbers for the sizes that its step has fixed, each with the reason."""
        form = Varying.in_key(call.key)
        if form is None or not fixed:
            return call
        for name, why in fixed.items():
            self._fixed_in(call).update((place, why) for place in form.places([name]))
        rest = form.without(fixed)
        numbers = by_numbers(call)
        return numbers if rest is None else rest.of(numbers) or numbers

    def _fixed_in(self, call: Call) -> dict[Place, str]:
        """The sizes that stay numbers since a step has fixed them."""
        tree, _, same, modes = call.key.signature
        return self._fixed.setdefault((tree, same, modes), {})


def _key(call: Call | None) -> Key | None:
    return None if call is None else call.key
