"""Find the packages that our requirement files need, by the metadata of the packages that are
installed here.
"""

from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def read_file(path: Path) -> list[Requirement]:
    """Return the requirements of a file and of the files that its `-r` lines name, without
    constraints.
    """
    requirements = []
    for line in path.read_text().splitlines():
        text = line.split("#")[0].strip()
        if text.startswith("-r"):
            requirements += read_file(path.parent / text.removeprefix("-r").strip())
        elif text and not text.startswith("-c"):
            requirements.append(Requirement(text))
    return requirements


def with_dependencies(requirements: list[Requirement]) -> dict[str, Distribution]:
    """Return every package that installing `requirements` installs: normalised name -> installed
    distribution.

    Raises:
        PackageNotFoundError: a package is not installed here.
    """
    found: dict[str, Distribution] = {}
    pending = [(requirement, "") for requirement in requirements]
    seen = set()
    while pending:
        requirement, extra = pending.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = canonicalize_name(requirement.name)
        for wanted in ("", *requirement.extras):
            if (name, wanted) in seen:
                continue
            seen.add((name, wanted))
            found[name] = distribution(name)
            pending += [(Requirement(text), wanted) for text in found[name].requires or ()]
    return found
