"""Padded sizes of forward passes of an encoder of images. Pure logic."""

from collections.abc import Sequence

_STEP = 1.25
"""Ratio of neighbouring sizes in patches: at most a fifth of a forward pass is padding."""


def encoder_sizes(
    smallest: int, largest: int, unit: str, multiple: int = 1, given: Sequence[int] = ()
) -> tuple[int, ...]:
    """Return the sizes, ascending. The last one has room for every image.

    Args:
        smallest: units of the smallest image.
        largest: units of the largest image.
        unit: "patches", or a name of items that all have one size, such as "images".
        multiple: every size is a multiple of it.
        given: sizes that the user asks for, instead of the usual ones. Sizes that are missing for
            the largest image are added.

    >>> encoder_sizes(1, 1, "images")
    (1, 2, 4, 8)
    >>> encoder_sizes(1, 5, "images")
    (1, 2, 4, 8)
    >>> encoder_sizes(16, 40, "patches", 4)
    (16, 20, 28, 32, 40)
    >>> encoder_sizes(16, 40, "patches", 4, [24])
    (24, 40)
    """
    found = {_up(size, multiple) for size in given}
    has_one_size = unit != "patches"
    if not found and has_one_size:
        found = {1, 2, 4, 8}
    size = float(smallest)
    while not given and not has_one_size and size < largest:
        found.add(_up(int(size), multiple))
        size = max(size * _STEP, size + multiple)
    kept = {size for size in found if size >= smallest and (has_one_size or size < largest)}
    if has_one_size:
        # Powers of two up to the tiles of the largest image.
        power = max(kept, default=1)
        while power < largest:
            power *= 2
            kept.add(power)
        return tuple(sorted(kept))
    return (*sorted(kept), _up(largest, multiple))


def split_into_sizes(counts: Sequence[int], sizes: Sequence[int]) -> list[tuple[list[int], int]]:
    """Divide images among forward passes, in their order.

    Args:
        counts: units of each image; none has more than the last size.
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
    """Return the fraction of padding of forward passes with one image each.

    >>> fraction_of_padding([3, 4], (4,))
    0.125
    """
    padded = sum(_least(count, sizes) for count in counts)
    return 1 - sum(counts) / padded


def _least(count: int, sizes: Sequence[int]) -> int:
    return next(size for size in sizes if size >= count)


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
