"""What the site needs besides docs/: pages at the top of the repository, the notebook, the examples, and links that are right in both places.

MkDocs calls these functions; mkdocs.yml names this file.
"""

import difflib
import json
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
TOP_PAGES = {  # in the repository, and on the site, where README.md would be the first page of a folder
    "docs/notebook.ipynb": "notebook.md",
    "README.md": "about.md",
    **{name: name for name in ("ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md")},
}
TABLES = ("alignment-table", "benchmarks", "oneflow-names", "zoo")  # found by their names, not by each row
LANGUAGES = {".py": "python", ".cpp": "cpp", ".h": "cpp", ".txt": "cmake"}
LINK = re.compile(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)#\s]+)(#[^)\s]*)?\)")
CODE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """The decisions come last, in their order."""
    pages = sorted(path.name for path in (ROOT / "docs" / "decisions").glob("0*.md"))
    decisions = ["decisions/README.md", *(f"decisions/{name}" for name in pages)]
    assert config.nav is not None
    config.nav[-1]["Project"].append({"Decisions": decisions})
    return config


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """The pages at the top of the repository, and the notebook, become pages of the site."""
    for name, uri in TOP_PAGES.items():
        text = (ROOT / name).read_text()
        content = notebook_page(text) if name.endswith(".ipynb") else text
        files.append(File.generated(config, uri, content=content))
    for name in example_pages():
        files.append(File.generated(config, f"{name}.md", content=code_page(name)))
    return files


def example_pages() -> Iterator[str]:
    """The scripts and the folders of examples that have a page on the site."""
    for path in sorted((ROOT / "examples").rglob("*")):
        if (path.is_dir() and path.name != "__pycache__") or path.suffix in LANGUAGES:
            yield path.relative_to(ROOT).as_posix()


def code_page(name: str) -> str:
    """A page with the code of a script, or of all files in a folder; of a ported script also what has changed in it."""
    path = ROOT / name
    files = [path] if path.is_file() else sorted(item for item in path.iterdir() if item.suffix in LANGUAGES)
    parts = [f"# `{name}`"]
    before = path.parent.parent / "eager" / path.name
    if path.parent.name == "graph" and before.exists():
        texts = (item.read_text().splitlines(keepends=True) for item in (before, path))
        names = (item.relative_to(ROOT).as_posix() for item in (before, path))
        parts.append(f"What has changed:\n\n```diff\n{''.join(difflib.unified_diff(*texts, *names))}```")
        parts.append("The whole script:")
    for item in files:
        parts += [f"## `{item.name}`"] * path.is_dir()
        parts.append(f"```{LANGUAGES[item.suffix]}\n{item.read_text().rstrip()}\n```")
    return "\n\n".join(parts) + "\n"


def notebook_page(text: str) -> str:
    """A notebook as Markdown: each cell, and in a block of text what it printed and gave."""
    parts = []
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            shown = "".join(output.get("text") or output["data"]["text/plain"])
            parts.append(f"```text\n{shown.rstrip()}\n```")
    return "\n\n".join(parts) + "\n"


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links as the site has them; generated tables and decisions are not searched."""
    uri = page.file.src_uri
    if uri.startswith(("decisions/", "examples/", *TABLES)):
        page.meta["search"] = {"exclude": True}
    if uri == "errors.md":  # long lines are broken, docs/site.css
        markdown = markdown.replace("```text\n", "``` { .text .broken-lines }\n")
    return links_on_site(markdown, uri)


def links_on_site(markdown: str, uri: str) -> str:
    """The text of the page `uri` of the site, with links that are right there."""
    place = next((name for name, there in TOP_PAGES.items() if there == uri), f"docs/{uri}")
    pieces = CODE.split(markdown)  # every second one is code
    pieces[::2] = [LINK.sub(lambda link: _link(link, place, uri), piece) for piece in pieces[::2]]
    return "".join(pieces)


def _link(link: "re.Match[str]", place: str, uri: str) -> str:
    """A link of a page at `place` in the repository, for the page `uri` of the site; its text if the site has no target."""
    text, target, anchor = link.groups()
    if re.match("[a-z]+:", target):
        return link.group()
    found = posixpath.normpath(posixpath.join(posixpath.dirname(place), target))
    if found in example_pages():
        return f"[{text}]({posixpath.relpath(f'{found}.md', posixpath.dirname(uri) or '.')})"
    if found not in TOP_PAGES and not found.startswith("docs/"):
        return str(text)  # code, which is in the repository only
    there = posixpath.relpath(
        TOP_PAGES.get(found, found.removeprefix("docs/")), posixpath.dirname(uri) or "."
    )
    return f"[{text}]({there}{anchor or ''})"
