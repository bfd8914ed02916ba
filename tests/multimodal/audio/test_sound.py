"""Test sound files and samples of programs: every format, sampling rates, channels, and refused
files.

The files are made here with PyAV. A damaged one has to be refused, or read as far as its limit.
"""

import io
import random
import sys
import warnings
import wave

import av
import numpy as np
import pytest

from tests.sound_files import FORMS, Form, Samples, sound_file, tone
from vllm.errors import RequestError
from vllm.multimodal.audio import sound as sound_module
from vllm.multimodal.audio.containers import sniff
from vllm.multimodal.audio.sound import read_sound
from vllm.multimodal.interface.source import MediaSource

RATE = 16_000
_LIMIT_S = 10.0
_MAX_DELAY = 1600
"""Samples that an encoder may put before a sound."""


def read(data: bytes, max_seconds: float = _LIMIT_S) -> Samples:
    source = MediaSource(modality="audio", where="file", data=data)
    return read_sound(source, sampling_rate=RATE, max_seconds=max_seconds)


def refusal(data: bytes, max_seconds: float = _LIMIT_S) -> str:
    with pytest.raises(RequestError) as caught:
        read(data, max_seconds)
    assert caught.value.param == "file"
    message = str(caught.value)
    assert message.startswith("file: ") and "\n" not in message
    return message


def distance(got: Samples, expected: Samples) -> float:
    """Return the largest difference in the middle part of both sounds, for the best delay."""
    middle = slice(2000, len(expected) - 2000)
    return min(
        float(np.abs(np.roll(got, -delay)[: len(expected)][middle] - expected[middle]).max())
        for delay in range(-_MAX_DELAY, _MAX_DELAY)
    )


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_every_format_is_read(form: Form) -> None:
    data = sound_file(form, tone(1.0, form.rate))
    assert sniff(data) == form.name
    got = read(data)
    assert got.dtype == np.float32 and got.ndim == 1
    assert abs(len(got) - RATE) < 0.08 * RATE  # some encoders add a frame
    if form.is_exact:
        assert len(got) == RATE and np.abs(got - tone(1.0)).max() < 1e-4
    else:
        assert distance(got, tone(1.0)) < 0.05


@pytest.mark.parametrize("rate", [8_000, 11_025, 44_100, 48_000, 96_000])
def test_other_rates_are_resampled(rate: int) -> None:
    got = read(sound_file(FORMS["wav-float"], tone(1.0, rate), rate))
    assert abs(len(got) - RATE) <= 1
    assert np.abs(got[200:-200] - tone(1.0)[200 : len(got) - 200]).max() < 1e-3


@pytest.mark.parametrize("num_channels", [2, 6])
@pytest.mark.parametrize("name", ["wav", "flac", "wav-float"])
def test_channels_are_averaged(name: str, num_channels: int) -> None:
    channels = np.stack([tone(0.5, amplitude=0.1 * (i + 1)) for i in range(num_channels)])
    got = read(sound_file(FORMS[name], channels))
    assert np.abs(got - channels.mean(0)).max() < 1e-4


@pytest.mark.parametrize("num_channels", [8, 9, 32])
def test_many_channels_are_read_from_memory_of_the_file(num_channels: int) -> None:
    channels = np.arange(1, num_channels + 1) * 500 * np.ones((4_000, 1))
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setparams((num_channels, 2, RATE, 0, "NONE", ""))
        writer.writeframes(channels.astype("<i2").tobytes())
    got = read(file.getvalue())
    assert len(got) == 4_000 and np.abs(got - channels.mean() / 2**15).max() < 1e-4


@pytest.mark.parametrize("name", ["opus", "wav", "m4a", "webm", "webm-live"])
def test_recordings_one_after_the_other_are_not_cut_off_after_the_first(name: str) -> None:
    data = sound_file(FORMS[name], tone(0.5, FORMS[name].rate))
    assert "one recording, got several" in refusal(data + data)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_file_that_is_cut_off_is_refused(form: Form) -> None:
    data = sound_file(form, tone(1.0, form.rate))
    for share in (0.999, 0.93, 0.611, 0.3, 0.05):
        refusal(data[: int(len(data) * share)])


@pytest.mark.parametrize("size", [b"\xff\xff\xff\xff", b"\0\xf0\xff\x7f", b"\0\0\0\0"])
def test_samples_of_a_pipe_have_no_length(size: bytes) -> None:
    """A program that writes a WAV file to a pipe cannot know its length."""
    data = sound_file(FORMS["wav"], tone(0.5))
    at = data.index(b"data") + 4
    assert len(read(data[:at] + size + data[at + 4 :])) == RATE // 2


STATED = ["wav", "flac", "mp3", "m4a", "webm", "opus"]
"""Formats that state how long they are."""


@pytest.mark.parametrize("name", [*STATED, "mp3-bare", "aac", "webm-live", "mp4-parts"])
def test_a_sound_that_is_too_long_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    form = FORMS[name]
    if name in STATED:  # these files state their length, so ten hours are refused before decoding
        monkeypatch.setattr(sound_module, "MAX_CHANNELS", 0)  # refuses what is decoded
    message = refusal(sound_file(form, tone(3.0, form.rate)), max_seconds=2)
    assert "longer than 2 s" in message and "VLLM_MAX_AUDIO_DECODE_DURATION_S" in message


def test_a_header_that_states_less_than_there_is_does_not_pass_the_limit() -> None:
    """A FLAC file stores the total number of samples in 36 bits from byte 21 on."""
    data = bytearray(sound_file(FORMS["flac"], tone(3.0)))
    data[21] &= 0xF0
    data[22:26] = (100).to_bytes(4, "big")
    assert "longer than 2 s" in refusal(bytes(data), max_seconds=2)


def test_a_header_that_states_more_than_there_is_is_refused() -> None:
    data = bytearray(sound_file(FORMS["flac"], tone(3.0)))
    data[22:26] = (4 * RATE).to_bytes(4, "big")
    assert "its header announces" in refusal(bytes(data))


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", "an empty file"),
        (b"\x89PNG\r\n\x1a\n" + bytes(100), "PNG"),
        (b"\xff\xd8\xff\xe0" + bytes(100), "JPEG"),
        (bytes(4) + b"ftypavif" + bytes(100), "HEIC or AVIF"),
        (b"RIFF" + bytes(4) + b"AVI " + bytes(100), "AVI"),
        (b"#EXTM3U\nhttp://10.0.0.1/a.ts\n", "M3U"),
        (b"ffconcat version 1.0\nfile /etc/passwd\n", "an unknown format"),
        (b"<?xml version='1.0'?><MPD></MPD>", "an unknown format"),
        (bytes(1000), "an unknown format"),
    ],
)
def test_other_files_are_refused_by_their_bytes(data: bytes, expected: str) -> None:
    message = refusal(data)
    assert expected in message and "accepted are WAV, FLAC" in message


def _video(codec: str | None) -> bytes:
    """Return an MP4 video, with sound of this encoder or without sound."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        pictures = container.add_stream("mpeg4", rate=5)
        pictures.width = pictures.height = 32
        pictures.pix_fmt = "yuv420p"
        sound = None if codec is None else container.add_stream(codec, rate=48_000, layout="mono")
        for i in range(5):
            frame = av.VideoFrame.from_ndarray(np.full((32, 32, 3), 40 * i, np.uint8), "rgb24")
            container.mux(pictures.encode(frame))
        container.mux(pictures.encode(None))
        if sound is not None:
            cut = av.AudioResampler(
                sound.codec_context.format, "mono", 48_000, sound.codec_context.frame_size or None
            )
            whole = av.AudioFrame.from_ndarray(tone(1.0, 48_000)[None], "fltp", "mono")
            whole.sample_rate, whole.pts = 48_000, 0
            for part in [*cut.resample(whole), *cut.resample(None)]:
                container.mux(sound.encode(part))
            container.mux(sound.encode(None))
    return file.getvalue()


def test_of_a_video_it_is_the_sound() -> None:
    got = read(_video("aac"))
    # this encoder changes the first samples
    assert distance(got[1000:], tone(1.0)[1000:]) < 0.1


def test_a_video_without_sound_and_other_codecs_are_refused() -> None:
    assert "has no sound" in refusal(_video(None))
    assert "the codec ac3" in refusal(_video("ac3"))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e30])
def test_values_that_are_no_samples_are_refused(value: float) -> None:
    samples = tone(0.5)
    samples[4000] = value
    assert "infinite" in refusal(sound_file(FORMS["wav-float"], samples))
    with pytest.raises(RequestError, match="infinite"):
        of_program(samples, RATE)


def test_channels_without_a_mean_are_refused_without_a_warning() -> None:
    channels = np.stack([tone(0.5)] * 2)
    channels[:, 4000] = np.inf, -np.inf
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "infinite" in refusal(sound_file(FORMS["wav-float"], channels))


def test_a_sound_without_samples_is_refused() -> None:
    empty = sound_file(FORMS["wav"], tone(0.1))
    at = empty.index(b"data") + 4
    assert "no samples" in refusal(empty[:at] + bytes(4))


def test_rates_that_would_become_many_samples_are_refused() -> None:
    data = bytearray(sound_file(FORMS["wav"], tone(0.5)))
    data[24:28] = (1).to_bytes(4, "little")
    assert "has 1 samples per second" in refusal(bytes(data))


def test_without_pyav_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    data = sound_file(FORMS["wav"], tone(0.1))
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(RequestError, match=r"pip install 'vllm\[audio\]'"):
        read(data)


# ---- damaged files ----------------------------------------------------------------------------


def _damage(data: bytes, rng: random.Random) -> bytes:
    """Return a file of which some bytes are changed or missing, at its beginning or anywhere."""
    changed = bytearray(data)
    reach = rng.choice((64, 512, len(data)))
    for _ in range(rng.choice((1, 3, 20))):
        changed[rng.randrange(min(reach, len(changed)))] = rng.choice((0, 0xFF, rng.randrange(256)))
    if rng.random() < 0.3:
        begin = rng.randrange(len(changed))
        del changed[begin : begin + rng.randrange(1, 200)]
    return bytes(changed)


def _read_damaged(form: Form, num_files: int) -> None:
    data = sound_file(form, tone(0.3, form.rate))
    rng = random.Random(form.codec)
    for _ in range(num_files):
        try:
            got = read(_damage(data, rng), max_seconds=5)
        except RequestError as error:
            assert str(error).startswith("file: ")
        else:
            assert 0 < len(got) <= 5 * RATE and np.isfinite(got).all()


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_damaged_files_are_refused_or_read(form: Form) -> None:
    _read_damaged(form, 12)


@pytest.mark.exhaustive
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_many_damaged_files_are_refused_or_read(form: Form) -> None:
    _read_damaged(form, 1500)


# ---- samples that programs pass ------------------------------------------------------------------


def of_program(samples: Samples, rate: int, max_seconds: float = _LIMIT_S) -> Samples:
    source = MediaSource(modality="audio", where="file", samples=samples, sampling_rate=rate)
    return read_sound(source, sampling_rate=RATE, max_seconds=max_seconds)


def test_samples_of_programs_are_resampled() -> None:
    got = of_program(tone(1.0, 44_100), 44_100)
    assert abs(len(got) - RATE) <= 1
    assert np.abs(got[200:-200] - tone(1.0)[200 : len(got) - 200]).max() < 1e-3
    np.testing.assert_array_equal(of_program(tone(1.0), RATE), tone(1.0))


@pytest.mark.parametrize(
    ("samples", "rate", "expected"),
    [
        (tone(1.0), 1, "has 1 samples per second"),
        (tone(1.0), 10**6, "has 1000000 samples per second"),
        (tone(3.0), RATE, "longer than 2 s"),
        (tone(0.0), RATE, "no samples"),
    ],
)
def test_samples_of_programs_that_are_no_sound_are_refused(
    samples: Samples, rate: int, expected: str
) -> None:
    with pytest.raises(RequestError, match=expected):
        of_program(samples, rate, 2)
