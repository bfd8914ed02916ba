"""Generate random numbers that depend only on the seed of a request and a position.

A generator with state would give a request different numbers when the other requests of the batch
change. Here number p of a seed is a function of the seed and p, so a request samples the same
tokens by itself, in any batch, and after a preemption. Pure numpy.

The function is the finaliser of SplitMix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom
Number Generators", OOPSLA 2014), applied twice to the seed and once to the position.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

KeyArray = npt.NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST_FACTOR = np.uint64(0xBF58476D1CE4E5B9)
_SECOND_FACTOR = np.uint64(0x94D049BB133111EB)
# Made once, because creating a numpy number takes as long as a small array operation.
_1, _27, _30, _31, _41 = (np.uint64(n) for n in (1, 27, 30, 31, 41))


def stream_keys(seeds: npt.NDArray[Any]) -> KeyArray:
    """Compute the part of a random number that depends only on the seed. Called once per request.

    Args:
        seeds: [n] int64 or uint64; a negative seed is its two's complement.

    Returns:
        [n] keys for `exponentials_at`.
    """
    # Mixed twice, so that a larger seed does not give a shifted copy of one sequence.
    return _mix(_mix(seeds.astype(np.uint64) + _GOLDEN) + _GOLDEN)


def exponentials_at(
    keys: KeyArray, positions: npt.NDArray[Any], count: int
) -> npt.NDArray[np.float32]:
    """Return several exponentially distributed numbers at each position of each key's stream.

    Args:
        keys: [n], result of `stream_keys`.
        positions: [n] integers, at least 0.
        count: numbers per position; asking for more does not change the first ones.

    Returns:
        [n, count] float32 in [2**-24, 17), mean 1.
    """
    steps = np.arange(1, count + 1, dtype=np.uint64) * _GOLDEN
    bits = _mix(keys + (positions.astype(np.uint64) + _1) * _GOLDEN)
    values = _fractions(_mix(bits[:, None] + steps))
    np.log(values, out=values)
    return np.negative(values, out=values)


def _fractions(bits: KeyArray) -> npt.NDArray[np.float32]:
    """Convert bits to odd multiples of 2**-24 in (0, 1)."""
    # 23 random bits and one half bit fit into the 24-bit mantissa of a float32, so nothing is
    # rounded.
    fractions = (bits >> _41).astype(np.float32)
    fractions += np.float32(0.5)
    fractions *= np.float32(2.0**-23)
    return fractions


def _mix(z: KeyArray) -> KeyArray:
    """Mix 64-bit integers by a bijection in which each result bit depends on all input bits."""
    z = (z ^ (z >> _30)) * _FIRST_FACTOR
    z = (z ^ (z >> _27)) * _SECOND_FACTOR
    return z ^ (z >> _31)
