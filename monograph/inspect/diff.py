"""What a pass changed, as a unified diff of the program's text."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from monograph.errors import DefinitionError, shown
from monograph.passes.run import Stage
from monograph.passes.table import PASSES


def diff_text(stages: Sequence[Stage], name: str) -> str:
    """The lines that the pass `name` took away and those it put in; empty if it changed nothing."""
    names = [stage.name for stage in stages]
    if name not in names[1:]:
        for row in PASSES:
            if row.name == name:
                hint = f"{row.how_to_switch_on} switches it on"
                raise DefinitionError(f"the pass {shown(name)} did not run", hint=hint)
        raise DefinitionError(f"there is no pass {shown(name)}", hint=f"passes: {', '.join(names[1:])}")
    place = names.index(name)
    before, after = stages[place - 1], stages[place]
    if before.program is after.program:
        return ""
    lines = difflib.unified_diff(
        before.text.splitlines(), after.text.splitlines(), f"before {name}", f"after {name}", lineterm=""
    )
    return "\n".join(lines)
