"""Report the structure of vllm/: sizes, crowded folders, circles of imports, files per change.

python tools/structure.py           a table
python tools/structure.py --json    the figures, with names

A report and no limit: it always exits with 0. Reads the sources with `ast`; nothing is imported.
"""

import argparse
import ast
import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]

MAX_ROOM_FILES = 15
NUM_LARGEST = 5
TRACED = (".py", ".js", ".html", ".cpp", ".h")
TRACES = {
    "a sampling parameter": r"(?i)\bk?min_?p\b",
    "a family with images": r"(?i)\bglm4v",
    "a quantization format": r"(?i)\bhqq",
    "a kind of quantized values": r"(?i)\bmxfp4",
    "an option of attention": r"\bchunk_size\b",
}
"""Change -> words of an existing feature of the same kind. A file whose code has one of them is a
file that such a change has to touch; docstrings and comments do not count. `min_p` narrows the
distribution, GLM-4V has an image tower and positions of its own, HQQ stores values of a known kind,
MXFP4 was a new kind of values with kernels of its own, and the chunked attention of Llama 4 is an
option of layers and kernels."""


@dataclass(frozen=True)
class Definition:
    """A function or a file with its number of lines."""

    name: str
    lines: int


@dataclass(frozen=True)
class Report:
    """The figures of a tree.

    Attributes:
        files: Python files of the package.
        lines: their lines, by code, docstrings, comments and blank.
        traces: change -> the files of the package and of csrc/ with a word of the feature in code.
        crowded: folder with more than MAX_ROOM_FILES files -> their number, without `__init__`.
        mutual: pairs of folders whose files import each other; what the package's own `__init__`
            offers under its name does not count.
        circles: files that import each other, imports for the type checker included.
        function_lines: median and largest number of lines of a function.
        largest_functions, largest_files: the longest first.
    """

    files: int
    lines: Mapping[str, int]
    traces: Mapping[str, list[str]]
    crowded: Mapping[str, int]
    mutual: list[tuple[str, str]]
    circles: list[list[str]]
    function_lines: tuple[float, int]
    largest_functions: list[Definition]
    largest_files: list[Definition]


def measure(root: Path, package: str = "vllm") -> Report:
    """Measure the package of a tree."""
    sources = read_sources(root, package)
    trees = {name: parse(source) for name, source in sources.items()}
    traced = {
        path.relative_to(root).as_posix(): path.read_text(encoding="utf-8")
        for folder in (package, "csrc")
        for path in sorted((root / folder).rglob("*"))
        if path.suffix in TRACED
    }
    traced |= {name: code_of(sources[name], nodes) for name, nodes in trees.items()}
    lines: Counter[str] = Counter()
    functions = []
    for name, nodes in trees.items():
        lines += count_lines(sources[name], nodes)
        functions += [Definition(f"{name}:{each}", n) for each, n in functions_of(nodes)]
    functions.sort(key=lambda each: (-each.lines, each.name))
    files = [Definition(name, len(source.splitlines())) for name, source in sources.items()]
    imports = imports_between(trees)
    rooms = Counter(folder_of(name) for name in trees if not name.endswith("__init__.py"))
    sizes = [each.lines for each in functions]
    return Report(
        files=len(sources),
        lines=dict(lines),
        traces={
            change: [name for name, text in traced.items() if re.search(words, text)]
            for change, words in TRACES.items()
        },
        crowded={room: n for room, n in rooms.most_common() if n > MAX_ROOM_FILES},
        mutual=mutual_folders(imports),
        circles=circles(imports),
        function_lines=(median(sizes), max(sizes)) if sizes else (0, 0),
        largest_functions=functions[:NUM_LARGEST],
        largest_files=sorted(files, key=lambda each: (-each.lines, each.name))[:NUM_LARGEST],
    )


def read_sources(root: Path, package: str = "vllm") -> dict[str, str]:
    """Read the Python files of a package: path relative to the root -> source."""
    return {
        path.relative_to(root).as_posix(): path.read_text(encoding="utf-8")
        for path in sorted((root / package).rglob("*.py"))
    }


def parse(source: str) -> list[ast.AST]:
    """Parse a source file and return its syntax tree."""
    return list(ast.walk(ast.parse(source)))


def folder_of(name: str) -> str:
    """Return the folder of a file."""
    return name.rpartition("/")[0]


def count_lines(source: str, nodes: Iterable[ast.AST]) -> Counter[str]:
    """Count the lines of a file as blank, docstring, comment or code."""
    return Counter(kind for kind, _ in _kinds_of_lines(source, nodes))


def code_of(source: str, nodes: Iterable[ast.AST]) -> str:
    """Return the lines of a file that are code."""
    return "\n".join(line for kind, line in _kinds_of_lines(source, nodes) if kind == "code")


def _kinds_of_lines(source: str, nodes: Iterable[ast.AST]) -> Iterator[tuple[str, str]]:
    """Yield the kind of each line, and the line."""
    docstrings: set[int] = set()
    for node in nodes:
        value = node.value if isinstance(node, ast.Expr) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            docstrings.update(range(value.lineno, (value.end_lineno or value.lineno) + 1))
    for number, line in enumerate(source.splitlines(), 1):
        if number in docstrings:
            yield "docstrings", line
        elif not line.strip():
            yield "blank", line
        else:
            yield "comments" if line.lstrip().startswith("#") else "code", line


def functions_of(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, int]]:
    """Yield the name of every function and its number of lines."""
    for node in nodes:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node.name, (node.end_lineno or node.lineno) - node.lineno + 1


def imports_between(trees: Mapping[str, Iterable[ast.AST]]) -> dict[str, set[str]]:
    """Return the files of the tree that each file imports, for the type checker or to run."""
    imports: dict[str, set[str]] = {}
    for name, nodes in trees.items():
        parts = [imported.split(".") for _, imported in imported_names(name, nodes)]
        files = (_file_of(each, trees) or _file_of(each[:-1], trees) for each in parts)
        imports[name] = {file for file in files if file}
    return imports


def imported_names(name: str, nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield the line and dotted name of every import of a file; `from a import b` gives a.b."""
    package = folder_of(name).split("/")
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            parent = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{parent}.{alias.name}") for alias in node.names)


def _file_of(parts: list[str], files: Mapping[str, object]) -> str | None:
    names = (f"{'/'.join(parts)}.py", f"{'/'.join(parts)}/__init__.py")
    return next((name for name in names if name in files), None)


def mutual_folders(imports: Mapping[str, set[str]]) -> list[tuple[str, str]]:
    """Return the pairs of folders with imports in both directions; not of a folder with its own.

    The `__init__` of the package is left out: it offers names of files above the others.
    """
    arrows = {
        (folder_of(name), folder_of(target))
        for name, targets in imports.items()
        if not name.endswith("__init__.py") or name.count("/") > 1
        for target in targets
    }
    return sorted((a, b) for a, b in arrows if a < b and (b, a) in arrows)


def circles(imports: Mapping[str, set[str]]) -> list[list[str]]:
    """Return the groups of files of which each imports each, directly or through others.

    The largest first.
    """
    left = {name: targets - {name} for name, targets in imports.items()}
    while ends := left.keys() - {name for name, targets in left.items() if targets}:
        left = {name: targets - ends for name, targets in left.items() if name not in ends}
    reachable = {name: _reachable(name, left) for name in left}
    groups = {
        tuple(sorted(other for other in reachable[name] if name in reachable[other]))
        for name in left
        if name in reachable[name]
    }
    return sorted(map(list, groups), key=lambda group: (-len(group), group))


def _reachable(start: str, arrows: Mapping[str, set[str]]) -> set[str]:
    """Return what can be reached in one step or more."""
    found: set[str] = set()
    pending = [start]
    while pending:
        new = arrows[pending.pop()] - found
        found |= new
        pending += new
    return found


def table(report: Report) -> Iterator[str]:
    """Write the report as lines of text."""
    total = sum(report.lines.values())
    parts = ", ".join(f"{n:,} {kind}" for kind, n in sorted(report.lines.items()))
    yield f"lines      {total:,} in {report.files} files: {parts}"
    middle, longest = report.function_lines
    yield f"functions  median {middle:g} lines, largest {longest}"
    for kind, largest in (("functions", report.largest_functions), ("files", report.largest_files)):
        yield f"  largest {kind}: " + ", ".join(f"{each.name} {each.lines}" for each in largest)
    yield f"folders    {len(report.crowded)} have more than {MAX_ROOM_FILES} files"
    if report.crowded:
        yield "  " + ", ".join(f"{room} {n}" for room, n in report.crowded.items())
    yield f"imports    {len(report.mutual)} pairs of folders import each other"
    by_room: dict[str, list[str]] = defaultdict(list)
    for one, other in report.mutual:
        by_room[one].append(other.removeprefix(f"{one}/"))
    for one, others in by_room.items():
        yield f"  {one}: {', '.join(others)}"
    yield f"circles    {len(report.circles)} groups of files import each other"
    for group in report.circles:
        yield f"  {len(group)}: {', '.join(group)}"
    yield "changes    files with a word of the feature in code (vllm/ and csrc/)"
    for change, names in report.traces.items():
        yield f"  {change}: {len(names)} files in {len(set(map(folder_of, names)))} folders"


def main() -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="write the figures as JSON")
    parser.add_argument("--root", type=Path, default=ROOT, help="default: this checkout")
    args = parser.parse_args()
    report = measure(args.root)
    print(json.dumps(asdict(report), indent=1) if args.json else "\n".join(table(report)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
