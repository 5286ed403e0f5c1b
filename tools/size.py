"""Prints how big the package is: lines per layer, the longest files and functions, the number of knobs."""

import ast
from collections import Counter
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "monograph"
LONGEST = 5


def function_lines(path: Path) -> list[tuple[int, str]]:
    """The number of lines and the place of each function of a file."""
    return [
        ((node.end_lineno or node.lineno) - node.lineno + 1, f"{path.relative_to(PACKAGE)}: {node.name}")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def num_knobs(file: Path) -> int:
    """The number of fields of `Settings`."""
    classes = [node for node in ast.parse(file.read_text()).body if isinstance(node, ast.ClassDef)]
    settings = next(node for node in classes if node.name == "Settings")
    return sum(isinstance(item, ast.AnnAssign) for item in settings.body)


def print_table(title: str, rows: list[tuple[int, str]]) -> None:
    print(title)
    for count, name in rows:
        print(f"{count:7,}  {name}")


def main() -> None:
    files = {path: len(path.read_text().splitlines()) for path in sorted(PACKAGE.rglob("*.py"))}
    layers: Counter[str] = Counter()
    for path, count in files.items():
        layers[path.relative_to(PACKAGE).parts[0].removesuffix(".py")] += count
    functions = [row for path in files for row in function_lines(path)]
    print_table("lines per part", [(count, name) for name, count in layers.most_common()])
    print_table("all", [(sum(files.values()), "lines"), (len(files), "files"), (len(functions), "functions")])
    longest_files = sorted(
        ((count, str(path.relative_to(PACKAGE))) for path, count in files.items()), reverse=True
    )
    print_table("longest files", longest_files[:LONGEST])
    print_table("longest functions", sorted(functions, reverse=True)[:LONGEST])
    print_table("knobs", [(num_knobs(PACKAGE / "settings.py"), "fields of Settings")])


if __name__ == "__main__":
    main()
