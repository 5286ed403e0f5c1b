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
    "capture/guards/sources", "capture/guards/test_*_facts.py", "capture/effects/test_host_effects.py",
    "capture/numbers", "capture/test_*.py", "ir/call",
)  # fmt: skip

# file in monograph/, what stands there, what is put in its place
FAULTS: tuple[tuple[str, str, str], ...] = (
    ("capture/guards/flat", "self._take().tobytes() != self._words", "False"),
    ("capture/guards/flat", "return self.metadata(*self.tensors) and bool(", "return bool("),
    ("capture/guards/flat", " and bool(self.read_pointers() == self.pointers)", ""),
    ("capture/guards/flat", "or not all(map(is_, chain.from_iterable(self._lists), self._items))", ""),
    ("capture/guards/flat", "or not self._state.isdisjoint(map(id, leaves))", ""),
    ("capture/guards/flat", "optimizer.state is not state or optimizer.param_groups is not groups", "False"),
    ("capture/guards/flat", "if before and self._ends[before - 1] > start:", "if False:"),
    ("capture/guards/flat", "if not self._hooks_hold():", "if False:"),
    ("capture/guards/flat", "not self._asked or all(ask() for ask in self._asked)", "True"),
    ("capture/guards/flat", "version == known_version", "True"),
    ("capture/guards/flat", "settings is known_settings", "True"),
    ("capture/guards/flat", "and alike(*args)", ""),
    ("capture/guards/flat", "and [read() for read in QUICK_MODES] == modes", ""),
    ("capture/guards/flat", "item.requires_grad or item.__dict__", "False"),
    ("capture/guards/flat", "gradients is not None or modes[0]:", "gradients is not None:"),
    ("capture/guards/flat", "by_position or call.same", "by_position"),
    ("capture/guards/objects", "self._read_words() == self.words and", ""),
    ("capture/guards/objects", "and not any(map(_differs, self._others))", ""),
    ("capture/guards/objects", "    if len(now) != len(before):", "    if False:"),
    ("capture/guards/objects", "source.whole and list(now) != list(before)", "False"),
    ("capture/guards/objects", "not same(value, present)", "value != present"),
    ("capture/guards/sources/lookup", "    if kind is not type(now):\n        return False\n", ""),
    ("capture/guards/sources/lookup", "return exactly(before) == exactly(now)", "return bool(before == now)"),
    ("capture/guards/sources/lookup", "frozenset({float, complex, range})", "frozenset({float, complex})"),
    ("capture/guards/sources/lookup", '{"__class__": type(self.owner)}', "{}"),
    ("capture/guards/sources/lookup", '            "__code__": function.__code__,\n', ""),
    ("capture/guards/sources/lookup", '            "__defaults__": function.__defaults__,\n', ""),
    ("capture/guards/sources/lookup", '            "__kwdefaults__": function.__kwdefaults__,\n', ""),
    ("capture/guards/sources/lookup", 'return {"__mro__": self.cls.__mro__}', "return {}"),
    ("capture/guards/sources/lookup", "    for cls in kind.__mro__:\n        if cls.__flags__", "    for cls in (kind,):\n        if cls.__flags__"),
    ("capture/guards/sources/lookup", ' or (name[:2] == "__" and name not in _ABOUT_CLASSES)', ""),
    ("capture/guards/sources/lookup", "        return _CONTEXT\n", "        return None\n"),
    ("capture/guards/sources/lookup", "    return _BUFFER\n", "    return None\n"),
    ("capture/guards/sources/lookup", "    (Twister, Reader(Twister.getstate, Twister.setstate)),\n", ""),
    ("capture/guards/sources/lookup", "        return _ITERATOR\n", "        return None\n"),
    ("capture/guards/sources/lookup", "            return _NUMPY[cls.__name__]\n", "            return None\n"),
    ("capture/guards/sources/reach", "return Verdict.FOLLOWED if computed and code not in _SETTERS else Verdict.TAKEN", "return Verdict.TAKEN"),
    ("capture/guards/sources/reach", "                self._add(Closure(", "                (lambda _: None)(Closure("),
    ("capture/guards/sources/reach", "            elif own and found is not ABSENT:", "            elif False:"),
    ("capture/guards/sources/reach", "            self._add(Content(label, value))", "            pass"),
    ("capture/guards/sources/reach", "            for item in gc.get_referents(value):", "            for item in ():"),
    ("capture/guards/sources/reach", "        source.whole = True\n", ""),
    ("capture/guards/sources/reach", "        self.names |= new\n        for source in list(self._growing.values()):", "        self.names |= new\n        for source in ():"),
    ("capture/guards/sources/reach", "                self._find_functions(code)", "                pass"),
    ("capture/guards/sources/reach", "            if names.whole and self._namespaces is not None:", "            if False:"),
    ("capture/guards/sources/reach", "                if own and not is_library_module(found.__name__):", "                if False:"),
    ("capture/guards/sources/reach", "        self._named(sys.modules,", "        (lambda *a, **k: None)(sys.modules,"),
    ("capture/guards/sources/code_names", "            attributes.update(_spelled(name))", "            pass"),
    ("capture/guards/sources/code_names", "                computed |= key is None\n", ""),
    ("capture/guards/sources/code_names", "computed |= bool(item.arg)", "computed |= False"),
    ("capture/guards/sources/code_names", "            computed |= name in _COMPUTES or name in _BUILTINS\n", ""),
    ("capture/effects/foreign_objects", "        return all(id(value) in known or is_immutable(value) for value in self.after.values())", "        return True"),
    ("capture/effects/foreign_objects", "        first = next(differences(source), None)\n", "        first = None\n"),
    ("capture/guards/guards", "return self._conditions.hold(inputs)", "return True"),
    ("capture/guards/guards", "return self._state_among(call) == self._arguments and self._offsets.hold(call)", "return True"),
    ("capture/tensors/item", '            self.branches.note(text, (name,))\n', ""),
    ("capture/guards/sources/reach", "                self.may_ask(value)\n", ""),
    ("capture/guards/sources/reach", "            if own:\n                self.may_ask(found)\n", ""),
    ("capture/guards/sources/reach", "elif question.is_no_in_captures or not same(before, answer.recorded[\"\"]):", "elif False:"),
    ("capture/guards/sources/questions", "        return _SUBCLASSES\n", "        return None\n"),
    ("capture/guards/sources/questions", "item.__code__ is _DISPATCHER", "False"),
    ("capture/step", "        yield from ((\"a hook\", hook) for hook in called_by_torch(leaves))\n", ""),
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
        tests = [str(path) for path in sorted((folder / "tests").glob(test))]
        ran = subprocess.run([*command, *tests], cwd=folder, env=environment, capture_output=True)
        if ran.returncode:
            return False
    return True


def place_of(name: str, package: Path) -> Path:
    """The file that a fault is put into."""
    return package / f"{name}.py"


def survives(fault: tuple[str, str, str], folder: Path) -> bool:
    """True if no test fails with a fault in place."""
    name, old, new = fault
    place = place_of(name, folder / "monograph")
    text = place.read_text()
    if text.count(old) != 1:
        raise SystemExit(f"{name}.py has not once {old!r}: the list of faults is out of date")
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
