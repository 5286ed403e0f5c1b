"""The stand-alone script of a failed alignment."""

from __future__ import annotations

import re
from pathlib import Path

from monograph.testing import environment
from monograph.testing.alignment.case import Case
from monograph.testing.alignment.library_names import Unwritable
from monograph.testing.alignment.python_text import Source
from monograph.testing.modes import MODES, Mode


def write_script(case: Case, mode: Mode, what: str) -> tuple[Path | None, str]:
    """Write the script; gives its path, and a sentence that names it or says why there is none.

    The file of an earlier failure of the same target is replaced: while a random case shrinks, the last one counts.
    """
    try:
        text = script_text(case, mode, what)
    except Unwritable as reason:
        return None, f"none: {reason}"
    name = re.sub(r"\W+", "_", f"{case.name}_{mode.name}").strip("_")
    path = environment.script_folder() / f"align_{name}.py"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    except OSError as error:
        return None, f"none: {error}"
    return path, f"python {path}"


def script_text(case: Case, mode: Mode, what: str) -> str:
    """The text of the script; raises Unwritable if something cannot be made again elsewhere."""
    source = Source()
    source.assign("target", case.target)
    source.assign("args", case.arguments.args)
    source.assign("kwargs", case.arguments.kwargs)
    options = [f"grad={case.grad}", f"calls={case.calls}", f"seed={case.seed}"]
    if case.against != "eager":
        source.assign("against", case.against)
        options.append("against=against")
    if case.more:
        source.assign("more", case.more)
        options.append("more=more")
    if case.optimizer is not None:
        source.assign("optimizer", case.optimizer)
        options.append("optimizer=optimizer")
    if case.tolerance.close:
        tolerance = case.tolerance
        options += [
            f"rtol={tolerance.rtol}",
            f"atol={tolerance.atol}",
            f"check_dtype={tolerance.check_dtype}",
        ]
    name = repr(mode.name)
    if MODES.get(mode.name) is not mode:
        source.assign("make", mode.make)
        name = f"Mode({mode.name!r}, make, bitwise={mode.bitwise})"
    message = re.sub(r'["\\]', "'", what).splitlines()[0]
    return "\n".join(
        [
            f'"""{case.name} in mode {mode.name}: {message}\n\nThis script fails as long as that is so.\n"""\n',
            "from __future__ import annotations\n",
            *(["import sys\n", f"sys.path[:0] = {source.paths!r}\n"] if source.paths else []),
            *source.imports,
            "from monograph.testing import Mode, align\n",
            *source.lines,
            "",
            f"print(align(target, *args, kwargs=kwargs, modes=({name},), {', '.join(options)}))",
            "",
        ]
    )
