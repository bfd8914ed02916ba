"""Map each torch version to the triton versions that fit.

torch imports any installed triton, on every device; with a wrong release `torch.compile` can fail
at its first use. Some packages require just any triton, so pip would install the newest. Standard
library only: setup.py and tools/vendor_packages.py need this before any install.
"""

import re

RANGES = {
    (2, 6): ((3, 1), (3, 3)),
    (2, 7): ((3, 1), (3, 4)),
    (2, 8): ((3, 4), (3, 5)),
    (2, 9): ((3, 5), (3, 6)),
    (2, 10): ((3, 6), (3, 7)),
    (2, 11): ((3, 6), (3, 7)),
}
"""Minor release of torch -> the first triton for it, and the first that is too new. From what the
builds of torch for CUDA ask for; 2.6 and 2.7 were also run with 3.1."""


def triton_range(torch_version: str) -> str | None:
    """Return the version requirement of triton for this torch version; None if it is not known."""
    bounds = RANGES.get(_minor(torch_version))
    if bounds is None:
        return None
    (low_major, low_minor), (high_major, high_minor) = bounds
    return f">={low_major}.{low_minor},<{high_major}.{high_minor}"


def triton_fits(triton_version: str, torch_version: str) -> bool:
    """Return False only if the triton version is known not to fit the torch version."""
    bounds = RANGES.get(_minor(torch_version))
    return bounds is None or bounds[0] <= _minor(triton_version) < bounds[1]


def _minor(release: str) -> tuple[int, int]:
    match = re.match(r"(\d+)\.(\d+)", release)
    return (int(match[1]), int(match[2])) if match else (0, 0)
