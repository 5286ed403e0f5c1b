"""Checks in parallel loops of Inductor's kernels: a check that fails raises, as on one thread.

An exception that leaves an iteration of an OpenMP loop ends the process. So the iterations of a loop with checks catch
it; the first one is kept, what follows in the parallel region is left out, and after the region it is thrown again.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

# texts and comments, which Inductor writes as directives at first
_TEXT = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|#pragma CMT[^\n]*')
_REGION = re.compile(r"#pragma omp parallel(?: num_threads\(\w+\))? *\n\s*\{")
_DIRECTIVE = re.compile(r"#pragma omp [^\n]*")
_WORK = re.compile(r"#pragma omp (?:for(?: collapse\((?P<depth>\d+)\))?|(?P<single>single)) *")
_LOOP = r"\s*for *\([^\n{}]*\)\s*\{"
_CHECK = re.compile(r"TORCH_CHECK\(|\bthrow\b")
_INDUCTORS_CHECK = re.compile(r"\bAOTI_TORCH_CHECK\(")
# A failing check never goes on. If the compiler did not know, it would keep what comes after the check on the stack,
# where exceptions are caught: a loop that does little else takes a fifth longer.
_HEAD = """#include <cstdlib>
#include <exception>
#define MONOGRAPH_AOTI_TORCH_CHECK(condition, ...) \\
    if (!(condition)) { AOTI_TORCH_CHECK(false, __VA_ARGS__); std::abort(); }
"""


def with_caught_checks(kernel: str) -> str:
    """The code of a kernel, changed if checks in it may fail in parallel loops; what it computes stays the same.

    A region that is written otherwise than Inductor writes them is left alone.
    """
    code = _TEXT.sub(lambda found: " " * len(found[0]), kernel)  # texts may have braces
    ends = _blocks(code)
    additions: list[tuple[int, str]] = []
    count = 0
    for region in _REGION.finditer(code):
        works = _works(code, region.end(), ends) if ends else None
        if works is None or code[: region.start()].rstrip()[-1:] not in (*"{};",):
            continue
        raised: list[str] = []
        for work in works:
            if raised:
                additions += [(work.start, f"if (!({' || '.join(raised)}))\n{{\n"), (work.end, "\n}")]
            if _CHECK.search(code, work.body, work.body_end):
                raised.append(f"monograph_raised{count}")
                additions += [(work.body, "\ntry\n{"), (work.body_end, _kept_in(raised[-1]))]
                checks = _INDUCTORS_CHECK.finditer(code, work.body, work.body_end)
                additions += [(check.start(), "MONOGRAPH_") for check in checks]
                count += 1
        if raised:
            declared = "".join(f"std::exception_ptr {name};\n" for name in raised)
            thrown = "".join(f"\nif ({name}) std::rethrow_exception({name});" for name in raised)
            additions += [(region.start(), declared), (ends[region.end() - 1], thrown)]
    return _with(kernel, [(0, _HEAD), *additions]) if additions else kernel


@dataclass(frozen=True)
class _Work:
    """What the threads of a region share: a loop or a block for one of them, from its directive to its closing brace."""

    start: int
    end: int
    body: int  # of one iteration, after its brace
    body_end: int


def _kept_in(name: str) -> str:
    return (
        "}\ncatch (...)\n{\n#pragma omp critical(monograph_raised)\n"
        f"{{ if (!{name}) {name} = std::current_exception(); }}\n}}\n"
    )


def _blocks(code: str) -> dict[int, int]:
    """The place after the closing brace of each opening one; empty if they do not fit."""
    ends: dict[int, int] = {}
    open_braces: list[int] = []
    for brace in re.finditer("[{}]", code):
        if brace[0] == "{":
            open_braces.append(brace.start())
        elif open_braces:
            ends[open_braces.pop()] = brace.end()
        else:
            return {}
    return {} if open_braces else ends


def _works(code: str, start: int, ends: dict[int, int]) -> list[_Work] | None:
    """The loops and blocks of the region whose code starts here; None if there are directives of other kinds."""
    works: list[_Work] = []
    place, end = start, ends[start - 1]
    while (directive := _DIRECTIVE.search(code, place, end)) is not None:
        work = _work(code, directive, ends)
        if work is None:
            return None
        works.append(work)
        place = work.end
    return works


def _work(code: str, directive: re.Match[str], ends: dict[int, int]) -> _Work | None:
    kind = _WORK.fullmatch(directive[0])
    if kind is None:
        return None
    heads = r"\s*\{" if kind["single"] else rf"(?:{_LOOP}){{{kind['depth'] or 1}}}"
    head = re.compile(heads).match(code, directive.end())
    if head is None:
        return None
    first, last = code.index("{", directive.end()), head.end() - 1
    return _Work(directive.start(), ends[first], last + 1, ends[last] - 1)


def _with(text: str, additions: list[tuple[int, str]]) -> str:
    """A text with others at places in it; those at one place in the order that they are given in."""
    parts, done = [], 0
    for place, addition in sorted(additions, key=lambda item: item[0]):
        parts += [text[done:place], addition]
        done = place
    return "".join([*parts, text[done:]])
