"""Padded sizes of forward passes of an image or sound encoder. Pure logic."""

from collections.abc import Iterator, Sequence

from vllm.bucketing.step_limits import round_up

_MULTIPLE = 16
"""Numbers of patches are multiples of it, and of the blocks that an encoder merges."""
_STEP = 1.25
"""Ratio of neighbouring sizes in patches: at most a fifth of a forward pass is padding."""


def encoder_sizes(
    smallest: int, largest: int, unit: str, given: Sequence[int] = ()
) -> tuple[int, ...]:
    """Return the padded sizes, ascending. Every image fits into the last one.

    Args:
        smallest: units of the smallest image.
        largest: units of the largest image.
        unit: "patches", or a name of items that all have one size, such as "images".
        given: sizes from the user, instead of the default ones. One for the largest image is added.

    >>> encoder_sizes(1, 1, "images")
    (1, 2, 4, 8)
    >>> encoder_sizes(1, 5, "images")
    (1, 2, 3, 4, 5, 8)
    >>> encoder_sizes(3, 5, "images")
    (3, 4, 5, 8)
    >>> encoder_sizes(1, 5, "images", [2])
    (2, 5)
    >>> encoder_sizes(20, 130, "patches")
    (32, 48, 64, 80, 96, 112, 144)
    >>> encoder_sizes(16, 40, "patches", [24])
    (32, 48)
    """
    if unit == "patches":
        last = round_up(largest, _MULTIPLE)
        found = {round_up(size, _MULTIPLE) for size in given or _patches(smallest, largest)}
        return (*sorted(size for size in found if smallest <= size < last), last)
    sizes = {size for size in given or _tiles(largest) if size >= smallest}
    return tuple(sorted(sizes if max(sizes, default=0) >= largest else {*sizes, largest}))


def _tiles(largest: int) -> Iterator[int]:
    """Yield sizes for images of one tile, and for images of up to `largest` tiles.

    Several images of one tile may share a forward pass.
    """
    yield from (1, 2, 4, 8)
    size = 2
    while size < largest:
        yield from (each for each in (size, 3 * size // 2) if each < largest)
        size *= 2
    yield largest


def _patches(smallest: int, largest: int) -> Iterator[int]:
    size = float(smallest)
    while size < largest:
        yield round_up(int(size), _MULTIPLE)
        size = max(size * _STEP, size + _MULTIPLE)


def split_into_sizes(counts: Sequence[int], sizes: Sequence[int]) -> list[tuple[list[int], int]]:
    """Divide images among forward passes, in their order.

    Args:
        counts: units of each image, at most the last size.
        sizes: ascending.

    Returns:
        For each forward pass the indices of its images, and its padded size.

    >>> split_into_sizes([1, 1, 1], (1, 2, 4))
    [([0, 1, 2], 4)]
    >>> split_into_sizes([5, 2, 3], (4, 8))
    [([0, 1], 8), ([2], 4)]
    """
    groups: list[tuple[list[int], int]] = []
    indices: list[int] = []
    total = 0
    for index, count in enumerate(counts):
        if indices and total + count > sizes[-1]:
            groups.append((indices, _least(total, sizes)))
            indices, total = [], 0
        indices.append(index)
        total += count
    if indices:
        groups.append((indices, _least(total, sizes)))
    return groups


def fraction_of_padding(counts: Sequence[int], sizes: Sequence[int]) -> float:
    """Return the fraction of padding, if each forward pass has one image.

    >>> fraction_of_padding([3, 4], (4,))
    0.125
    """
    padded = sum(_least(count, sizes) for count in counts)
    return 1 - sum(counts) / padded


def _least(count: int, sizes: Sequence[int]) -> int:
    return next(size for size in sizes if size >= count)
