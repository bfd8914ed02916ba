"""Test the pieces of a recording: they cover it, none is too long, and each ends in a pause."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sound_files import tone
from vllm.entrypoints.openai.audio.pieces import Piece, is_silent, split_audio
from vllm.entrypoints.openai.audio.subtitles import TimedText, srt, vtt

RATE = 1_000


@settings(max_examples=60, deadline=None)
@given(
    num_samples=st.integers(1, 200_000),
    max_seconds=st.floats(0.002, 40),
    seed=st.integers(0, 2**32 - 1),
    is_flat=st.booleans(),
)
def test_pieces_cover_the_recording_and_none_is_too_long(
    num_samples: int, max_seconds: float, seed: int, is_flat: bool
) -> None:
    noise = np.random.default_rng(seed).normal(size=num_samples).astype(np.float32)
    pieces = split_audio(np.zeros_like(noise) if is_flat else noise, RATE, max_seconds)
    assert pieces[0].start == 0 and pieces[-1].end == num_samples
    assert [each.end for each in pieces[:-1]] == [each.start for each in pieces[1:]]
    assert all(0 < each.end - each.start <= max_seconds * RATE for each in pieces)
    # Only the end of a piece is searched for a pause, so there are not many more pieces than
    # needed.
    assert len(pieces) <= 1 + 2 * num_samples / int(max_seconds * RATE)


def test_a_recording_is_cut_in_its_pauses() -> None:
    """The quieter of two possible pauses is chosen, or the last of several equal ones."""
    samples = tone(70.0)
    rate = 16_000
    for start_s, amplitude in ((22.0, 0.0), (27.0, 0.01), (45.0, 0.0), (50.0, 0.0)):
        samples[int(start_s * rate) : int((start_s + 0.3) * rate)] *= amplitude
    pieces = split_audio(samples, rate, 30.0)
    assert len(pieces) == 3
    assert 22.0 < pieces[0].end / rate < 22.3
    assert 50.0 < pieces[1].end / rate < 50.3


def test_a_short_recording_is_one_piece() -> None:
    assert split_audio(tone(30.0), 16_000, 30.0) == [Piece(0, 480_000)]


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        (np.zeros(100, np.float32), True),
        (np.full(100, 1 / 32768, np.float32), True),
        (np.zeros(0, np.float32), True),
        (0.001 * tone(0.1), False),
    ],
)
def test_silence(samples: np.ndarray, expected: bool) -> None:
    assert is_silent(samples) == expected


def test_subtitles_stay_what_they_are_whatever_the_text() -> None:
    texts = [TimedText(0.0, 1.9996, " one\n\ntwo --> three"), TimedText(359_999.9, 360_000, "&<b>")]
    assert srt(texts) == (
        "1\n00:00:00,000 --> 00:00:02,000\none two -> three\n\n"
        "2\n99:59:59,900 --> 100:00:00,000\n&<b>\n\n"
    )
    assert vtt(texts) == (
        "WEBVTT\n\n00:00:00.000 --> 00:00:02.000\none two --&gt; three\n\n"
        "99:59:59.900 --> 100:00:00.000\n&amp;&lt;b&gt;\n\n"
    )
    assert srt([]) == "" and vtt([]) == "WEBVTT\n\n"
