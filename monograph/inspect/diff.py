"""What a pass changed, as a unified diff of the program's text."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from monograph.errors import DefinitionError
from monograph.passes import PASSES, Stage

_SWITCHES = {
    "gate_nonfinite": "graph.config.detect_nonfinite()",
    "cast_scale": "graph.config.allow_fuse_cast_scale()",
    "add_to_output": "graph.config.allow_fuse_add_to_output()",
    "model_update": "graph.config.allow_fuse_model_update_ops()",
}


def diff_text(stages: Sequence[Stage], name: str) -> str:
    """The lines that the pass `name` took away and those it put in; empty if it changed nothing."""
    names = [stage.name for stage in stages]
    if name not in names[1:]:
        if name in PASSES:
            needed = _SWITCHES.get(name, 'graph.config.backend("inductor")')
            raise DefinitionError(f"the pass {name!r} did not run", hint=f"{needed} switches it on")
        raise DefinitionError(f"there is no pass {name!r}", hint=f"passes: {', '.join(names[1:])}")
    place = names.index(name)
    before, after = stages[place - 1], stages[place]
    if before.program is after.program:
        return ""
    lines = difflib.unified_diff(
        before.text.splitlines(), after.text.splitlines(), f"before {name}", f"after {name}", lineterm=""
    )
    return "\n".join(lines)
