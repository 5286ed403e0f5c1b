"""Pages of docs/ whose blocks belong together: each page is one script, and what a block prints is shown after it."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

from tests.support import ROOT
from tests.support.warm import run_script

SCRIPTS = {  # and the file that the page calls its script
    "how-it-works.md": "train.py",
    "porting.md": "train.py",
    "quickstart.md": "digits.py",
    "rebuilds.md": "train.py",
}
SINGLE_ERRORS = "errors.md"  # each block of it is a script that fails
FENCE = re.compile(r"^(?:(\w+):\n\n)?```(python|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MARK = "--- the next block of the page ---"
NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[+-]?\d+)?(?: (?:KiB|MiB|bytes)\b)?")

_ALONE = {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "0",
}  # one process, as torchrun


@dataclass(frozen=True)
class Block:
    """A block of code of a page, the word that introduces it, and what the page says that it prints."""

    code: str
    label: str
    output: str | None


def blocks_of(page: Path) -> list[Block]:
    """The Python blocks of a page; a block of text right after one is its output."""
    found: list[Block] = []
    for label, kind, text in FENCE.findall(page.read_text()):
        if kind == "python":
            found.append(Block(text, label, None))
        elif found:
            found[-1] = replace(found[-1], output=text)
    return found


def printed_by(page: Path, folder: Path, *, after: str = "pass") -> list[str]:
    """What each block of the page prints, and `after`, a statement that is run after each block.

    It is on the line between two blocks, so that lines have the numbers that they have without it.
    """
    script = "".join(f"{block.code}{after}; print({MARK!r})\n" for block in blocks_of(page))
    (folder / SCRIPTS[page.name]).write_text(script)
    done = run_script([SCRIPTS[page.name]], cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1", **_ALONE})
    assert done.returncode == 0, done.stderr
    return done.stdout.split(f"{MARK}\n")[:-1]


def shape_of(text: str) -> str:
    """A text without its numbers, which are those of a machine, and the space around them."""
    return re.sub(r"[ \t]+", " ", NUMBER.sub("#", text)).strip()


def is_shown(output: str, shown: str) -> bool:
    """True if the page shows this output. Tables are sorted by times, so that lines may change places.

    A line of three dots stands for what the page leaves out.
    """
    lines, there = Counter(shown.splitlines()), Counter(output.splitlines())
    leaves_out = lines.pop("...", 0) > 0
    return lines <= there if leaves_out else lines == there


def docs(name: str) -> Path:
    return ROOT / "docs" / name


BEGIN = (
    "import torch\nfrom torch import nn\nimport monograph as mg\n\n"  # of each script on the page of errors
)
FAILING = """
import json, linecache, runpy, sys

for number, code in enumerate(json.load(open("blocks.json"))):
    with open("train.py", "w") as file:
        file.write(code)
    linecache.clearcache()
    print("{mark}" if number else "", end="")
    try:
        runpy.run_path("train.py", run_name="__main__")
    except Exception as error:
        print(type(error).__name__ + ": " + str(error))
"""


def errors_of(page: Path, folder: Path) -> list[str]:
    """What each block of the page raises, as the last lines of a traceback say it."""
    codes = [BEGIN + block.code for block in blocks_of(page)]
    (folder / "blocks.json").write_text(json.dumps(codes))
    (folder / "all.py").write_text(FAILING.replace("{mark}", MARK))
    done = run_script(["all.py"], cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    texts = [text.replace(f"{folder}/", "") for text in done.stdout.split(MARK)]
    return [
        re.sub(r"((?i:graph))_\d+", r"\1_0", text) for text in texts
    ]  # each is the first graph of its script
