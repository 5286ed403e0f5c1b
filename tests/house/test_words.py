"""The texts use the field's words: docs/glossary.md has them, and this table has those that are no longer used."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

from tests.support import ROOT

PAGES = [
    *(ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")),
    *(ROOT / "docs").glob("*.md"),
]
MODULES = sorted((ROOT / "monograph").rglob("*.py"))
CODE = re.compile(r"`[^`\n]*`")  # names of code are no words of a text

WORDS = {  # what is no longer said, and what to say
    r"stand-?ins?": "fake, proxy",
    r"leftovers?": "side effects",
    r"holdings": "what the graph owns",
    r"rehears(?:e|es|ed|al|als)": "simulation",
    r"workshops?": "compiler",
    r"trials?(?! round| step)": "autotuning, timing; test",
    r"twins?": "JAX port",
    r"the judge": "the numerics comparison",
    r"facts?": "guard, guarded value",
    r"(?:stand|stands|stood) on": "depend on",
    r"(?<!left )behind": "after",
    r"lies?|lay": "is; layout",
    r"told(?! apart)": "reported, logged, said",
    r"tells?(?! (?:\w+ ){0,6}(?:apart|from)\b| whether two)": "report, say, show",
    r"tak(?:e|es|en) back|took back": "roll back",
    r"(?:moves?|read|stepped) on the host|the host does": "in Python",
    r"writ(?:es|ten) out the": "inline, unroll",
    r"the border of": "the graph signature of, the boundary of",
    r"the outside(?: world)?": "globals and closures, the caller",
    r"(?:list of|its) members?": "entries",
    r"the bound one": "the program",
    r"parts of (?:a|the) program|program's parts": "subgraphs",
    r"shows? (?:an? |the |other |each )?memory|memory (?:that|which) [\w ]*shows?": "alias, share, be a view of",
    r"(?:come|comes|came|coming) about": "be made, run, succeed",
}
USED = re.compile(
    "|".join(rf"(?P<w{number}>\b(?:{word})\b)" for number, word in enumerate(WORDS)), re.IGNORECASE
)


def misused(text: str) -> Iterator[tuple[int, str]]:
    """The line in the text of each word that is no longer used, and what to say."""
    says = list(WORDS.values())
    for number, line in enumerate(text.splitlines()):
        for match in USED.finditer(CODE.sub("", line)):
            yield number, f"{match.group()!r}: say {says[int(str(match.lastgroup)[1:])]!r}"


def texts_of_module(source: str) -> Iterator[tuple[int, str]]:
    """Comments, docstrings and messages, each with its first line."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, node.value


def texts_of(path: Path) -> Iterator[tuple[int, str]]:
    source = path.read_text()
    return texts_of_module(source) if path.suffix == ".py" else iter([(1, source)])


def test_texts_use_the_words_of_the_glossary() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{first + number}: {what}"
        for path in [*PAGES, *MODULES]
        for first, text in texts_of(path)
        for number, what in misused(text)
    ]
    assert not found, "\n".join(sorted(found))


def test_a_word_is_found_with_its_line() -> None:
    source = '"""A module.\n\nIt has a stand-in.\n"""\nfacts = 1  # it lies in `facts`\nraise ValueError(f"{facts} behind")\n'
    found = sorted(first + number for first, text in texts_of_module(source) for number, _ in misused(text))
    assert found == [3, 5, 6]


def test_ordinary_english_is_let_through() -> None:
    assert not list(
        misused("nobody can tell copies from originals; they are told apart; a value layout; `behind`")
    )
