"""Test video files: which frames are read, and which files are refused."""

from types import SimpleNamespace

import numpy as np
import pytest

from tests.loops import loop_over
from tests.tiny_videos import FORMATS, draw_frames, make_video
from vllm.errors import RequestError
from vllm.multimodal.interface.family import VideoFrames
from vllm.multimodal.interface.source import MediaSource
from vllm.multimodal.video import frames as video

pytest.importorskip("av", reason="videos need PyAV")

FILES = {name: make_video(name) for name in FORMATS}
USUAL = {"num_frames": 8, "fps": -1.0, "max_given": 16, "max_pixels": 64 * 48}


def read(data, **choice):
    source = MediaSource(modality="video", where="here", data=data)
    return video.read_frames(source, video.FrameChoice(**{**USUAL, **choice}))


def shown(found):
    """Return the number of each frame, which is encoded in its brightness."""
    return np.rint(found.pixels.mean((1, 2, 3)) / 6).astype(int).tolist()


@pytest.mark.parametrize("name", FORMATS)
@loop_over(
    "choice, expected",
    [
        ({}, [0, 6, 11, 17, 22, 28, 33, 39]),
        ({"num_frames": 1}, [0]),
        ({"num_frames": 2}, [0, 39]),
        ({"fps": 1.0}, [0, 13, 26, 39]),
        ({"fps": 0.1}, [0]),
        ({"fps": 100.0, "num_frames": 40}, list(range(40))),
        ({"num_frames": 100}, list(range(40))),
    ],
)
def test_frames_are_chosen_by_number_and_rate(name, choice, expected):
    found = read(FILES[name], **choice)
    tolerance = 2 if name == "gif" else 0  # GIF has 256 colors only
    assert np.abs(np.subtract(shown(found), expected)).max() <= tolerance
    np.testing.assert_allclose(found.seconds, np.array(expected) / 10, atol=2e-3)
    assert found.pixels.shape == (len(expected), 48, 64, 3)


def test_frames_before_a_chosen_one_are_not_all_decoded(monkeypatch):
    sought = []

    class Watched:
        """A container of PyAV that notes where it seeks."""

        def __init__(self, container):
            self.container = container

        def __enter__(self):
            self.container.__enter__()
            return self

        def __exit__(self, *error):
            return self.container.__exit__(*error)

        def __getattr__(self, name):
            return getattr(self.container, name)

        def seek(self, time, **more):
            sought.append(time)
            self.container.seek(time, **more)

    av = SimpleNamespace(open=lambda *given, **options: Watched(open_video(*given, **options)))
    open_video = video.import_av("videos", "video").open
    monkeypatch.setattr(video, "import_av", lambda *_: av)
    long = make_video("mp4", [6 * (n // 40) for n in range(240)], key_every=20)
    assert shown(read(long, num_frames=3)) == [0, 3, 5]
    assert len(sought) == 3


def test_a_turned_video_is_upright():
    data = bytearray(make_video("mp4", [100], size=(64, 32)))
    matrix = data.index(b"tkhd") + 4 + 40
    quarter = [0, 1 << 16, 0, -(1 << 16) % 2**32, 0, 0, 0, 0, 1 << 30]
    data[matrix : matrix + 36] = b"".join(value.to_bytes(4, "big") for value in quarter)
    assert read(bytes(data)).pixels.shape == (1, 64, 32, 3)


def cut(name, part):
    return FILES[name][: int(len(FILES[name]) * part)]


def with_size(data, width, height):
    """Return an MP4 file whose track header has another size."""
    edited = bytearray(data)
    at = edited.index(b"avc1") + 4 + 24
    edited[at : at + 4] = width.to_bytes(2, "big") + height.to_bytes(2, "big")
    return bytes(edited)


SOUND = b"RIFF\x24\0\0\0WAVEfmt "


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "got an empty file"),
        (b"?" * 99, "it must be a video of MP4 and MOV, WebM and MKV, AVI, GIF, got a file of an "),
        (SOUND, "got a file of the format WAV"),
        (b"\x89PNG\r\n\x1a\n", "got a file of the format PNG"),
        (b"#EXTM3U\nhttp://a/b.ts", "got a file of the format M3U"),
        (cut("mp4", 0.5), "this MP4 file is damaged or incomplete"),
        (cut("webm", 0.5), "this WebM file is damaged or incomplete"),
        (FILES["mp4"][:200], "this MP4 file"),
        (b"\x1a\x45\xdf\xa3" + b"\0" * 99, "this WebM file"),
        (make_video("mp4", [0], size=(128, 64)), "must have 1 to 3072 pixels"),
        (make_video("webm", [0], size=(128, 64)), "must have 1 to 3072 pixels"),
        *((FILES[name] * 2, "must be one recording, got several") for name in FORMATS),
    ],
)
def test_other_files_are_refused_in_one_sentence(data, message):
    with pytest.raises(RequestError) as failure:
        read(data)
    assert str(failure.value).startswith("here: ")
    assert message in str(failure.value)
    assert failure.value.param == "here"


def test_damaged_files_end_with_a_refusal_or_with_frames():
    generator = np.random.default_rng(0)
    for name in FORMATS:
        for _ in range(20):
            data = bytearray(FILES[name])
            for at in generator.integers(0, len(data), 8):
                data[at] = generator.integers(0, 256)
            try:
                found = read(bytes(data))
            except RequestError as error:
                assert str(error).startswith("here: ")
            else:
                assert 1 <= len(found.pixels) <= 8


def test_limits_hold_for_files_with_very_many_frames(monkeypatch):
    assert len(read(make_video("gif", [0] * 2000, size=(8, 8)), num_frames=4).pixels) == 4
    monkeypatch.setattr(video, "MAX_PACKETS", 39)
    with pytest.raises(RequestError, match="more than 39 frames"):
        read(FILES["mp4"])
    monkeypatch.setattr(video, "MAX_PACKETS", 40)
    monkeypatch.setattr(video, "MAX_KEPT_BYTES", 8 * 64 * 48 * 3 - 1)
    with pytest.raises(RequestError, match="8 frames of 64 x 48 pixels have 73728 bytes, more"):
        read(FILES["mp4"])


def test_times_that_positions_cannot_have_are_refused():
    # Times count from the first frame, at 0.1 s.
    last = make_video("mkv", [0] * 4, last_s=video.MAX_SECONDS)
    assert read(last).seconds[-1] == video.MAX_SECONDS - 0.1
    wrong = "must be shown 0 to 1048576 s after the first, got "
    with pytest.raises(RequestError, match=wrong + "1e"):
        read(make_video("mkv", [0] * 4, last_s=10**15))
    frames = VideoFrames(draw_frames(2), np.array([0, np.inf]))
    with pytest.raises(RequestError, match=wrong + "inf"):
        video.read_frames(
            MediaSource(modality="video", where="here", frames=frames), video.FrameChoice(**USUAL)
        )


def test_frames_of_a_program_stay_as_they_are():
    frames = VideoFrames(draw_frames(4), np.arange(4) / 2)
    source = MediaSource(modality="video", where="here", frames=frames)
    choice = {**USUAL, "num_frames": 2}
    assert video.read_frames(source, video.FrameChoice(**choice)) is frames
    with pytest.raises(RequestError, match=r"has 4 frames, and at most 3 are accepted"):
        video.read_frames(source, video.FrameChoice(**{**choice, "max_given": 3}))
    with pytest.raises(RequestError, match=r"must have 1 to 10 pixels .* got 56 x 40"):
        video.read_frames(source, video.FrameChoice(**{**choice, "max_pixels": 10}))


def test_videos_need_pyav(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "av", None)
    with pytest.raises(RequestError, match=r"pip install 'vllm\[video\]'"):
        read(FILES["mp4"])
