"""Split a recording at quiet positions into pieces that a model reads one by one.

Every sample is in exactly one piece. Pure functions of samples.
"""

from dataclasses import dataclass

import numpy as np

from vllm.utils.media import Samples

_WINDOW_S = 0.1
"""A pause between words is at least as long."""
_STEP_S = 0.02
_SEARCHED = 1 / 3
"""Share of the longest piece, at its end, in which a pause is searched."""
_SILENCE = 2.0**-13
"""No sample of silence is above it: a few steps of 16 bits, as a silent microphone gives them."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of a recording.

    Attributes:
        start: index of its first sample.
        end: index after its last sample.
    """

    start: int
    end: int


def split_audio(samples: Samples, rate: int, max_seconds: float) -> list[Piece]:
    """Return the pieces of a recording, in order; each has at most `max_seconds`.

    A longer recording is cut near the end of each piece, in the middle of the quietest tenth of a
    second (the last one, if several are equally quiet).

    Args:
        samples: samples [n], n > 0.
        rate: samples per second.
        max_seconds: maximum length of a piece.
    """
    most = int(max_seconds * rate)
    pieces = []
    start = 0
    while len(samples) - start > most:
        first = start + most - int(most * _SEARCHED)
        end = first + _quietest(samples[first : start + most], rate)
        pieces.append(Piece(start, end))
        start = end
    return [*pieces, Piece(start, len(samples))]


def is_silent(samples: Samples) -> bool:
    """Return whether the samples are completely silent. Noise is not silence; the model decides
    about it.
    """
    return float(np.abs(samples).max(initial=0.0)) <= _SILENCE


def _quietest(samples: Samples, rate: int) -> int:
    """Return the index in the middle of the quietest window of samples; at least 1."""
    window, step = max(1, int(_WINDOW_S * rate)), max(1, int(_STEP_S * rate))
    if len(samples) <= window:
        return len(samples)
    sums = np.concatenate(([0.0], np.cumsum(np.square(samples, dtype=np.float64))))
    starts = np.arange(0, len(samples) - window + 1, step)
    energies = sums[starts + window] - sums[starts]
    # Tolerance, because rounding errors of the sums make equal windows differ.
    last = np.flatnonzero(energies <= energies.min() + 1e-9 * sums[-1])[-1]
    return int(starts[last]) + max(1, window // 2)
