"""Random steps on tensors at three places, drawn as text: what a script sees after each call is what plain Python shows.

It sees the places, the results, and all that it has kept of both: numbers, and for what no copy can stand for, the objects.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import monograph as mg

NUM_STEPS = 6
PLACES = ("p0", "p1", "p2")
SPELLED = {  # how code of a step writes a place
    "an attribute of the graph": "self.{}",
    "an attribute of a module": "self.{}",
    "a buffer": "self.{}",
    "a list": "self.box[{}]",
    "a dict": "self.box['{}']",
    "a tuple": "{}",
    "an object in a closure": "thing.{}",
}
STATEMENTS = (
    *("{a} = {any}", "{a}, {b} = {b}, {a}", "{a} = x * 2", "{a} = {any} * 0.5 + x", "{any}.add_(x)"),
    *(
        "{a} = {b}.clone()",
        "kept = {a}",
        "{a} = x",
        "{a} = {b}; {b} = {c}; {c} = x * 1",
        "{a} = {b}.detach()",
    ),
)
RESULTS = ("{any}", "x + 1", "{a} + {b}")


class Thing:
    """An object that is no module."""


@dataclass(frozen=True)
class Script:
    """A step, where its tensors are, and what is kept after each call: the places, the results, both or nothing."""

    holder: str
    lines: Sequence[str]
    keeps: Sequence[tuple[bool, bool]]

    def __repr__(self) -> str:
        return "\n".join([self.holder, *self.lines, f"keeps {self.keeps}"])


@st.composite
def scripts(draw: st.DrawFn) -> Script:
    holder = draw(st.sampled_from(sorted(SPELLED)))
    names = list(range(3)) if holder == "a list" else PLACES
    places = [SPELLED[holder].format(name) for name in names]
    lines = ["p0, p1, p2 = self.box"] if holder == "a tuple" else []
    known = list(places)

    def filled(text: str) -> str:
        a, b, c = draw(st.permutations(places))
        return text.format(a=a, b=b, c=c, any=draw(st.sampled_from(known)))

    for statement in draw(st.lists(st.sampled_from(STATEMENTS), min_size=1, max_size=4)):
        lines.append(filled(statement))
        known += ["kept"] if statement.startswith("kept") and "kept" not in known else []
    lines += ["self.box = p0, p1, p2"] if holder == "a tuple" else []
    results = draw(st.lists(st.sampled_from(RESULTS), max_size=2))
    lines.append(f"return [{', '.join(map(filled, results))}]")
    keep = st.tuples(st.booleans(), st.booleans())
    keeps = draw(st.lists(keep, min_size=NUM_STEPS, max_size=NUM_STEPS))
    return Script(holder, lines, keeps)


def put_into(owner: Any, holder: str) -> Callable[[], list[Tensor]]:
    """Tensors at their places; gives what shows them."""
    tensors = {name: torch.full((2,), 10.0 * number) for number, name in enumerate(PLACES, 1)}
    if holder in ("a list", "a dict", "a tuple"):
        made = {"a list": list, "a tuple": tuple}
        owner.box = tensors if holder == "a dict" else made[holder](tensors.values())
        return lambda: list(owner.box.values()) if holder == "a dict" else list(owner.box)
    for name, tensor in tensors.items():
        owner.register_buffer(name, tensor) if holder == "a buffer" else setattr(owner, name, tensor)
    return lambda: [getattr(owner, name) for name in PLACES]


def made(script: Script, *, traced: bool) -> tuple[Callable[[Tensor], Any], Callable[[], list[Tensor]]]:
    """The step, and what shows its places."""
    text = "\n".join(["def step(self, x):", *(f"    {line}" for line in script.lines)])
    names: dict[str, Any] = {"thing": Thing()}
    exec(compile(text, "<step>", "exec"), names)
    step = names["step"]
    if script.holder == "an object in a closure":
        shown = put_into(names["thing"], script.holder)
        return (mg.trace(lambda x: step(None, x)) if traced else lambda x: step(None, x)), shown
    if script.holder == "an attribute of the graph":
        owner: Any = type("Step", (mg.Graph,), {"build": step})() if traced else Thing()
        return (owner if traced else lambda x: step(owner, x)), put_into(owner, script.holder)
    owner = type("Step", (nn.Module,), {"forward": step})()
    shown = put_into(owner, script.holder)
    return (mg.trace(owner) if traced else owner), shown


def seen(script: Script, *, traced: bool) -> list[list[list[float]]]:
    """What there is to see after each call."""
    step, places = made(script, traced=traced)
    kept: list[Tensor] = []
    found = []
    for number, (keeps_places, keeps_results) in enumerate(script.keeps, 1):
        results = list(step(torch.full((2,), float(number))))
        kept += places() if keeps_places else []
        kept += results if keeps_results else []
        found.append([item.tolist() for item in (*places(), *results, *kept)])
    return found


@pytest.mark.filterwarnings("ignore::UserWarning")
@given(script=scripts())
@settings(deadline=None)
def test_all_that_a_script_can_see_is_as_in_plain_python(script: Script) -> None:
    try:
        found = seen(script, traced=True)
    except mg.CaptureError as error:
        if "puts a view of another tensor" not in str(error):
            raise
        return  # it says what cannot be done
    assert found == seen(script, traced=False)
