"""Files of sound for tests, encoded with PyAV: tones, and tones with pauses."""

import io
from collections.abc import Mapping
from dataclasses import dataclass, field

import av
import numpy as np
from numpy.typing import NDArray

Samples = NDArray[np.float32]

HZ = 440


def tone(seconds: float, rate: int = 16_000, amplitude: float = 0.5) -> Samples:
    """Return samples [n] of a sine of `HZ`."""
    times = np.arange(round(seconds * rate)) / rate
    return (amplitude * np.sin(2 * np.pi * HZ * times)).astype(np.float32)


@dataclass(frozen=True)
class Form:
    """The format of a sound file.

    Attributes:
        name: what `sniff` calls it.
        container: writer of FFmpeg.
        codec: encoder of FFmpeg.
        options: of the writer.
        is_exact: the encoder changes no sample by more than its rounding.
    """

    name: str
    container: str
    codec: str
    rate: int = 16_000
    options: Mapping[str, str] = field(default_factory=dict)
    is_exact: bool = False


FORMS = {
    "wav": Form("WAV", "wav", "pcm_s16le", is_exact=True),
    "wav-float": Form("WAV", "wav", "pcm_f32le", is_exact=True),
    "wav-24": Form("WAV", "wav", "pcm_s24le", is_exact=True),
    "wav-8": Form("WAV", "wav", "pcm_u8"),
    "flac": Form("FLAC", "flac", "flac", is_exact=True),
    "vorbis": Form("OGG", "ogg", "vorbis", 44_100),
    "opus": Form("OGG", "ogg", "libopus", 48_000),
    "mp3": Form("MP3", "mp3", "libmp3lame", 44_100),
    "mp3-bare": Form("MP3", "mp3", "libmp3lame", 22_050, {"write_xing": "0", "id3v2_version": "0"}),
    "m4a": Form("MP4", "ipod", "aac", 44_100),
    "m4a-alac": Form("MP4", "ipod", "alac", is_exact=True),
    "mp4-parts": Form(
        "MP4", "mp4", "aac", 44_100, {"movflags": "frag_keyframe+empty_moov+default_base_moof"}
    ),
    "aac": Form("AAC", "adts", "aac", 44_100),
    "webm": Form("WebM", "webm", "libopus", 48_000),
    "webm-live": Form("WebM", "webm", "libopus", 48_000, {"live": "1"}),
}


def sound_file(form: Form, samples: Samples, rate: int | None = None) -> bytes:
    """Return the content of a file.

    Args:
        form: format of the file.
        samples: [n] or [channels, n].
        rate: samples per second; None: the rate of the format.
    """
    rate = rate or form.rate
    channels = np.atleast_2d(samples)
    if form.codec == "vorbis" and len(channels) == 1:  # this Vorbis encoder supports stereo only
        channels = np.repeat(channels, 2, axis=0)
    layout = {1: "mono", 2: "stereo", 6: "5.1"}[len(channels)]
    file = io.BytesIO()
    with av.open(file, "w", format=form.container, options=dict(form.options)) as container:
        stream = container.add_stream(
            form.codec, rate=rate, layout=layout, options={"strict": "experimental"}
        )
        frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(channels), "fltp", layout)
        frame.sample_rate, frame.pts = rate, 0
        coder = stream.codec_context
        coder.open()
        cut = av.AudioResampler(coder.format, layout, rate, coder.frame_size or None)
        for part in [*cut.resample(frame), *cut.resample(None)]:
            container.mux(stream.encode(part))
        container.mux(stream.encode(None))
    return file.getvalue()
