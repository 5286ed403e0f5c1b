"""Faults put into the code that guards, one at a time: the tests of guards must notice each.

`python -m tests.stress.mutate_guards` copies the package, changes one place, and runs the tests until one fails.
Takes about half a minute for each fault.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = (
    "test_nothing_stale", "test_host_effects", "test_object_programs", "test_value_reads", "test_modes",
    "test_argument_layouts", "test_guards", "test_no_storms", "test_traps", "test_questions",
)  # fmt: skip

# file in capture/, what stands there, what is put in its place
FAULTS: tuple[tuple[str, str, str], ...] = (
    ("object_guards", "self._read_words() == self._words\n", "True\n"),
    ("object_guards", "and not any(map(_differs, self._others))", ""),
    ("object_guards", "    if len(now) != len(before):", "    if False:"),
    ("object_guards", "source.whole and list(now) != list(before)", "False"),
    ("object_guards", "not same(value, present)", "value != present"),
    ("sources", "    if kind is not type(now):\n        return False\n", ""),
    ("sources", "return exactly(before) == exactly(now)", "return bool(before == now)"),
    ("sources", "frozenset({float, complex, range})", "frozenset({float, complex})"),
    ("sources", '{"__class__": type(self.owner)}', "{}"),
    ("sources", '            "__code__": function.__code__,\n', ""),
    ("sources", '            "__defaults__": function.__defaults__,\n', ""),
    ("sources", '            "__kwdefaults__": function.__kwdefaults__,\n', ""),
    ("sources", 'return {"__mro__": self.cls.__mro__}', "return {}"),
    ("sources", "    for cls in kind.__mro__:\n        if cls.__flags__", "    for cls in (kind,):\n        if cls.__flags__"),
    ("sources", ' or (name[:2] == "__" and name not in _ABOUT_CLASSES)', ""),
    ("sources", "        return _CONTEXT\n", "        return None\n"),
    ("sources", "    return _BUFFER\n", "    return None\n"),
    ("sources", "    (Twister, Reader(Twister.getstate, Twister.setstate)),\n", ""),
    ("sources", "        return _ITERATOR\n", "        return None\n"),
    ("sources", "            return _NUMPY[cls.__name__]\n", "            return None\n"),
    ("reach", "return Verdict.FOLLOWED if computed and code not in _SETTERS else Verdict.TAKEN", "return Verdict.TAKEN"),
    ("reach", "                self._add(Closure(", "                (lambda _: None)(Closure("),
    ("reach", "            elif own and found is not ABSENT:", "            elif False:"),
    ("reach", "            self._add(Content(label, value))", "            pass"),
    ("reach", "            for item in gc.get_referents(value):", "            for item in ():"),
    ("reach", "        source.whole = True\n", ""),
    ("reach", "        self.names |= new\n        for source in list(self._growing.values()):", "        self.names |= new\n        for source in ():"),
    ("reach", "                self._find_functions(code)", "                pass"),
    ("reach", "            if names.whole and self._namespaces is not None:", "            if False:"),
    ("reach", "                if own and not is_library_module(found.__name__):", "                if False:"),
    ("reach", "        self._named(sys.modules,", "        (lambda *a, **k: None)(sys.modules,"),
    ("code_names", "            attributes.update(_spelled(name))", "            pass"),
    ("code_names", "                computed |= key is None\n", ""),
    ("code_names", "computed |= bool(item.arg)", "computed |= False"),
    ("code_names", "            computed |= name in _COMPUTES or name in _BUILTINS\n", ""),
    ("effects", "        return all(id(value) in known or is_immutable(value) for value in self.after.values())", "        return True"),
    ("effects", "        first = next(differences(source), None)\n", "        first = None\n"),
    ("guards", "return self._conditions.hold(inputs)", "return True"),
    ("guards", "return self._state_among(call) == self._arguments and self._offsets.hold(call)", "return True"),
    ("readings", '            self.branches.note(text, (name,))\n', ""),
    ("reach", "                self.may_ask(value)\n", ""),
    ("reach", "            if own:\n                self.may_ask(found)\n", ""),
    ("reach", "elif question.is_no_in_captures or not same(before, answer.recorded[\"\"]):", "elif False:"),
    ("questions", "        return _SUBCLASSES\n", "        return None\n"),
    ("questions", "item.__code__ is _DISPATCHER", "False"),
    ("step", "        yield from ((\"a hook\", hook) for hook in called_by_torch(leaves))\n", ""),
)  # fmt: skip


def pass_tests(folder: Path) -> bool:
    """True if no test of guards fails."""
    environment = os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "--tb=no",
        "--show-capture=no",
    ]
    for test in TESTS:
        ran = subprocess.run([*command, f"tests/{test}.py"], cwd=folder, env=environment, capture_output=True)
        if ran.returncode:
            return False
    return True


def place_of(name: str, package: Path) -> Path:
    """The file that a fault is put into."""
    return package / "capture" / f"{name}.py"


def survives(fault: tuple[str, str, str], folder: Path) -> bool:
    """True if no test fails with a fault in place."""
    name, old, new = fault
    place = place_of(name, folder / "monograph")
    text = place.read_text()
    if text.count(old) != 1:
        raise SystemExit(f"capture/{name}.py has not once {old!r}: the list of faults is out of date")
    place.write_text(text.replace(old, new))
    try:
        return pass_tests(folder)
    finally:
        place.write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--step", type=int, default=1, help="with --first, every so many: to share the work")
    options = parser.parse_args()
    survivors = 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name in ("monograph", "tests", "examples", "benchmarks", "docs", "tools"):
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "README.md"):
            shutil.copy(ROOT / name, folder / name)
        if not pass_tests(folder):
            raise SystemExit("the tests fail without a fault")
        faults = FAULTS[options.first :: options.step]
        for fault in faults:
            alive = survives(fault, folder)
            survivors += alive
            print(f"{'SURVIVED' if alive else 'caught'}  {fault[0]}: {fault[1].strip()[:90]}", flush=True)
    print(f"{survivors} of {len(faults)} faults survived")
    sys.exit(bool(survivors))


if __name__ == "__main__":
    main()
