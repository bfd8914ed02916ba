"""Build the pages as a web site in build/site, with search and a check of all links.

python tools/build_site.py            copy the pages to build/site-pages and run mkdocs
python tools/build_site.py --serve    show them on http://127.0.0.1:8001 instead

The copy has the layout of the repository, so links between pages remain valid. Other linked
files are copied with them; a linked folder is shown as its name.
"""

import argparse
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

_LINK = re.compile(r"\[([^\[\]]+)\]\((?!https?:|mailto:|#)([^()\s#]+)(#[^()\s]*)?\)")
_ADDRESS = "127.0.0.1:8001"


def find_pages(root: Path) -> Iterator[Path]:
    """Find the pages of a tree, and the pictures that they show."""
    yield from root.glob("*.md")
    yield from root.glob("benchmarks/*.md")
    yield from (path for path in root.glob("docs/**/*") if path.suffix in (".md", ".svg"))


def copy_pages(root: Path, target: Path) -> None:
    """Copy all pages of a tree, and the files that they link to, into an empty folder."""
    shutil.rmtree(target, ignore_errors=True)
    pages = {path.relative_to(root) for path in find_pages(root)}
    for name in sorted(pages):
        copy = target / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        if name.suffix != ".md":
            shutil.copy(root / name, copy)
            continue
        text = (root / name).read_text(encoding="utf-8")

        def mend(link: re.Match[str], name: Path = name) -> str:
            linked = (root / name.parent / link[2]).resolve()
            if not linked.exists() or linked.relative_to(root) in pages:
                return link[0]
            if linked.is_dir() or linked.suffix == ".md":
                return f"{link[1]} (`{linked.relative_to(root).as_posix()}`)"
            file = target / linked.relative_to(root)
            file.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(linked, file)
            return link[0]

        copy.write_text(_LINK.sub(mend, text), encoding="utf-8")


def main() -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--serve", action="store_true", help=f"show the site on {_ADDRESS}")
    args = parser.parse_args()
    copy_pages(ROOT, ROOT / "build" / "site-pages")
    what = ["serve", "-a", _ADDRESS] if args.serve else ["build", "--strict"]
    return subprocess.run([sys.executable, "-m", "mkdocs", *what], cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main())
