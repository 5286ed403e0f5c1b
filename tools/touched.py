"""Prints the tests that belong to what a change touches, one path a line: `make check` runs their quick ones.

A file of the package is tested by the folder of `tests` that has the name of its own folder, a test file by itself.
The change is all that differs from where the branch left `origin/main`, or from the commit before the last.
"""

import subprocess
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parent.parent
OTHERS = {
    "benchmarks": "tests/benchmarks",
    "examples": "tests/examples",
    "docs": "tests/house",
    "tools": "tests/house",
}
WHOLE = "tests/graph"  # what all parts together do


def git(*arguments: str) -> list[str]:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.splitlines() if done.returncode == 0 else []


def changed_files() -> set[str]:
    """What is in no commit yet is a change as well."""
    (head,) = git("rev-parse", "HEAD")
    base = git("merge-base", "HEAD", "origin/main")
    since = base[0] if base and base[0] != head else "HEAD~"
    return {*git("diff", "--name-only", since), *git("ls-files", "--others", "--exclude-standard")}


def tests_of(name: str) -> str | None:
    """The file or folder with the tests of a file of the repository, or None where there are none."""
    path = PurePosixPath(name)
    first = path.parts[0]
    if first == "tests":
        if path.name.startswith("test_") and path.suffix == ".py":
            return name if (ROOT / name).exists() else None
        return WHOLE if first == str(path.parent) or path.parts[1] == "support" else _folder(path.parent)
    if first == "monograph":
        own = PurePosixPath("tests", *path.with_suffix("").parts[1:])
        return _folder(own if (ROOT / own).is_dir() else own.parent)
    return OTHERS.get(first, "tests/house" if path.suffix == ".md" else None)


def _folder(path: PurePosixPath) -> str:
    """The folder itself, or the nearest one around it that has tests."""
    while path.name != "tests":
        if any((ROOT / path).glob("test_*.py")):
            return str(path)
        path = path.parent
    return WHOLE


def test_files(names: Iterable[str]) -> list[str]:
    """The test files for these files: of a folder those that are in it, not those of the folders below it."""
    found: set[str] = set()
    for place in filter(None, map(tests_of, names)):
        files = [ROOT / place] if place.endswith(".py") else (ROOT / place).glob("test_*.py")
        found.update(file.relative_to(ROOT).as_posix() for file in files)
    return sorted(found)


if __name__ == "__main__":
    print("\n".join(test_files(changed_files())))
