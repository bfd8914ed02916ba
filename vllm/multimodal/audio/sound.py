"""Decodes sound files to samples of one channel, and resamples them.

It uses FFmpeg by PyAV (`av`), which is imported when it is needed. A file is not trusted: it is
opened from memory, only by the reader of the format that its bytes show, only audio decoders are
accepted, and decoding ends with the first sample above the limit, whatever the header states.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm.errors import RequestError
from vllm.multimodal.audio.containers import (
    ACCEPTED,
    FFMPEG_NAMES,
    check_complete,
    describe,
    sniff,
    states_length,
)
from vllm.multimodal.interface.decoding import Decoders, IncompleteError, decoding, import_av
from vllm.multimodal.interface.family import EncoderInput
from vllm.multimodal.interface.source import MediaSource, refuse
from vllm.utils.media import Samples

if TYPE_CHECKING:
    from av.audio.frame import AudioFrame
    from av.audio.stream import AudioStream
    from av.container.input import InputContainer


MAX_CHANNELS = 32
MIN_RATE, MAX_RATE = 1_000, 768_000
"""Limits of the samples per second of a file or an array. Resampling from a lower rate would make
many samples from a small file."""
_LARGEST = 2.0**31
"""Magnitude of a sample above which features overflow; integers that were not scaled are below."""

_DECODERS = Decoders(
    (
        *("pcm_u8", "pcm_s8", "pcm_s16le", "pcm_s16be", "pcm_s24le", "pcm_s24be", "pcm_s32le"),
        *("pcm_s32be", "pcm_f32le", "pcm_f32be", "pcm_f64le", "pcm_f64be", "pcm_alaw"),
        *("pcm_mulaw", "flac", "alac", "vorbis", "opus", "mp3", "mp3float", "aac"),
    ),
    "PCM, FLAC, ALAC, Vorbis, Opus, MP3 and AAC",
)
"""Decoders of sound; none of them decodes pictures."""
_ESTIMATED = ("MP3", "AAC")
"""Formats of which FFmpeg may guess the length from the bytes of a few frames."""
_CONTAINER_UNITS = 1_000_000
"""Units in a second of the length of a container."""
_MISSING_S = 0.1
"""Maximum number of seconds by which a file may be shorter than it states. Encoders also count
samples that decoders cut off."""


def make_reader(sampling_rate: int, max_seconds: float) -> Callable[[MediaSource], EncoderInput]:
    """Return the job for processes that read sound files; its only tensor is `samples`.

    Args:
        sampling_rate: sampling rate; see `read_sound`.
        max_seconds: maximum number of seconds; see `read_sound`.
    """
    # Without the package, each file is refused with the name of what to install.
    with suppress(ImportError):
        import av  # noqa: F401  # for the children of this process

    def read(source: MediaSource) -> EncoderInput:
        samples = read_sound(source, sampling_rate=sampling_rate, max_seconds=max_seconds)
        return EncoderInput({"samples": samples}, ())

    return read


def read_sound(source: MediaSource, *, sampling_rate: int, max_seconds: float) -> Samples:
    """Read a sound of a request: its samples [n] from -1 to 1, n > 0.

    The channels of a file are averaged. If a file has several audio streams, or video, the first
    audio stream is used.

    Args:
        source: has the content of a file, or samples.
        sampling_rate: samples per second of the result; other rates are resampled.
        max_seconds: limit of its length.

    Raises:
        RequestError: the format is not supported, the file is damaged or incomplete, the sound is
            empty or too long or has infinite values or NaN, or PyAV is not installed.
    """
    where = source.where
    if source.data is None:
        assert source.samples is not None and source.sampling_rate is not None
        samples = checked(source.samples, where)
        return resample(samples, source.sampling_rate, sampling_rate, max_seconds, where)
    parts = _decode_file(source.data, where, sampling_rate, max_seconds)
    return checked(np.concatenate([np.empty(0, np.float32), *parts]), where)


def resample(
    samples: Samples, rate: int, sampling_rate: int, max_seconds: float, where: str
) -> Samples:
    """Resample samples of one channel to another rate.

    Args:
        samples: [n], n > 0.
        rate: samples per second of the input.
        sampling_rate: samples per second of the result.
        max_seconds: limit of their length.
        where: name of the sound in error messages.

    Raises:
        RequestError: the rate is not supported, they are too long, or PyAV is not installed.
    """
    _check_rate(rate, where)
    if len(samples) > max_seconds * rate:
        raise _too_long(max_seconds, where)
    if rate == sampling_rate:
        return samples
    frame = import_av("sounds", "audio").AudioFrame.from_ndarray(samples[None], "fltp", "mono")
    frame.sample_rate = rate
    resampler = _Resampler(sampling_rate)
    return np.concatenate([*resampler.add(frame), *resampler.end()])


def checked(samples: Samples, where: str) -> Samples:
    """Check that a model can read these samples, and return them.

    Raises:
        RequestError: there are none, or values are infinite, NaN or too large.
    """
    if not len(samples):
        raise refuse(where, "it has no samples. Send a sound that is longer than 0 s")
    if not np.abs(samples).max() <= _LARGEST:  # `not <=`, so that NaN is refused too
        raise refuse(
            where,
            "its samples must be from -1 to 1, got values that are infinite, NaN or too large",
        )
    return samples


# ---- files -----------------------------------------------------------------------------------


def _decode_file(
    data: bytes, where: str, sampling_rate: int, max_seconds: float
) -> Iterator[Samples]:
    name = sniff(data)
    if name not in FFMPEG_NAMES:
        raise refuse(where, f"it is {describe(data)}; accepted are {ACCEPTED}")
    av = import_av("sounds", "audio")
    with decoding(name, where):
        check_complete(name, data)
        with _DECODERS.open(data, FFMPEG_NAMES[name], av) as container:
            if not container.streams.audio:
                raise refuse(
                    where, f"the {name} file has no sound. Send a file with sound in {ACCEPTED}"
                )
            stream = container.streams.audio[0]
            _DECODERS.check(stream, where, "its sound has")
            if stream.rate:
                _check_rate(stream.rate, where)
            is_stated = states_length(name, data)
            if (is_stated or name not in _ESTIMATED) and (
                _known_seconds(container, stream) > max_seconds + _MISSING_S
            ):
                raise _too_long(max_seconds, where)
            stated_s = _stated_seconds(stream) if is_stated else 0.0
            num_samples, most = 0, max_seconds * sampling_rate
            for part in _decode(container, stream, sampling_rate, where):
                num_samples += len(part)
                if num_samples > most:
                    raise _too_long(max_seconds, where)
                yield part
        seconds = num_samples / sampling_rate
        if seconds < stated_s - _MISSING_S:
            raise IncompleteError(
                f"its header announces {stated_s:.2f} s of sound, but it has only {seconds:.2f} s"
            )


def _decode(
    container: "InputContainer", stream: "AudioStream", sampling_rate: int, where: str
) -> Iterator[Samples]:
    """Yield the decoded samples of a stream, in pieces of limited size.

    A piece has at most the samples of one frame at `MIN_RATE`.
    """
    resampler = _Resampler(sampling_rate)
    for frame in container.decode(stream):
        _check_rate(frame.sample_rate, where)
        num_channels = len(frame.layout.channels)
        if num_channels > MAX_CHANNELS:
            raise refuse(where, f"it has {num_channels} channels, more than {MAX_CHANNELS}")
        yield from resampler.add(frame)
    yield from resampler.end()


def _known_seconds(container: "InputContainer", stream: "AudioStream") -> float:
    """Return the length in seconds that FFmpeg finds without decoding; 0 if it finds none."""
    whole = container.duration
    return max(_stated_seconds(stream), 0.0 if whole is None else whole / _CONTAINER_UNITS)


def _stated_seconds(stream: "AudioStream") -> float:
    if stream.duration is None or stream.time_base is None:
        return 0.0
    return float(stream.duration * stream.time_base)


class _Resampler:
    """Converts frames to one channel and one rate; the format of the frames may change.

    Args:
        rate: samples per second of the result.
    """

    def __init__(self, rate: int) -> None:
        self._rate = rate
        self._form: tuple[Any, ...] = ()
        self._resampler: Any = None

    def add(self, frame: "AudioFrame") -> Iterator[Samples]:
        """Yield the samples that are complete with this frame."""
        form = (frame.format.name, frame.layout.name, frame.sample_rate)
        if form != self._form:
            yield from self.end()
            self._form = form
            # Interleaved samples (flt), not planar ones: with more than eight planes, PyAV reads
            # out of bounds.
            self._resampler = import_av("sounds", "audio").AudioResampler(
                "flt", frame.layout, self._rate
            )
        frame.pts = None  # ignore time stamps: a gap between frames adds no samples
        yield from self._run(frame)

    def end(self) -> Iterator[Samples]:
        """Yield the remaining samples."""
        if self._resampler is not None:
            yield from self._run(None)

    def _run(self, frame: "AudioFrame | None") -> Iterator[Samples]:
        for each in self._resampler.resample(frame):
            samples = each.to_ndarray().reshape(-1, len(each.layout.channels))
            with np.errstate(all="ignore"):  # `checked` refuses values that are not finite
                mean = samples.mean(1, dtype=np.float32)
            yield mean


def _check_rate(rate: int, where: str) -> None:
    if not MIN_RATE <= rate <= MAX_RATE:
        raise refuse(
            where, f"it has {rate} samples per second; accepted are {MIN_RATE} to {MAX_RATE}"
        )


def _too_long(max_seconds: float, where: str) -> RequestError:
    return refuse(
        where,
        f"it is longer than {max_seconds:g} s, the limit of VLLM_MAX_AUDIO_DECODE_DURATION_S. "
        f"Send it in parts",
    )
