"""Test example images and sounds: the packaged ones, a user's own files, and the error if a file is
missing.
"""

import struct
import sys
import types
import zlib

import numpy as np
import pytest

from vllm import envs
from vllm.assets.audio import AudioAsset
from vllm.assets.image import ImageAsset
from vllm.assets.video import VideoAsset
from vllm.errors import RequestError
from vllm.utils.media import write_wav


@pytest.fixture
def own_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("VLLM_ASSETS_CACHE", str(tmp_path))
    envs.get.cache_clear()
    yield tmp_path
    monkeypatch.undo()
    envs.get.cache_clear()


@pytest.mark.parametrize("name", ["stop_sign", "cherry_blossom"])
def test_the_packaged_pictures_are_pngs_of_256_pixels(name):
    data = ImageAsset(name).path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    assert struct.unpack(">II", data[16:24]) == (256, 256)
    begin = data.index(b"IDAT")
    (length,) = struct.unpack(">I", data[begin - 4 : begin])
    assert len(zlib.decompress(data[begin + 4 : begin + 4 + length])) == 256 * 257


def test_a_picture_is_given_in_rgb():
    picture = ImageAsset("stop_sign").pil_image
    assert (picture.mode, picture.size) == ("RGB", (256, 256))


def test_without_pillow_it_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(
        RequestError, match=r"Pillow, which is not installed: pip install .vllm\[image\]"
    ):
        ImageAsset("stop_sign").pil_image  # noqa: B018


def test_ones_own_files_come_first(own_folder):
    (own_folder / "stop_sign.jpg").write_bytes(b"mine")
    assert ImageAsset("stop_sign").path.read_bytes() == b"mine"
    assert ImageAsset("cherry_blossom").path.parent.name == "images"


def test_a_sound_is_read_as_samples_and_their_rate(own_folder):
    wave = np.sin(np.linspace(0, 60, 800))
    (own_folder / "call.wav").write_bytes(write_wav(wave, 8000))
    samples, rate = AudioAsset("call").audio_and_sample_rate
    assert (rate, samples.dtype) == (8000, np.float32)
    np.testing.assert_allclose(samples, wave, atol=1e-4)


class FakeCapture:
    """A video of five frames with one pixel each; frame i has the blue value i."""

    def __init__(self, path):
        self.frames = [np.array([[[i, 7, 9]]], np.uint8) for i in range(5)]
        self.is_video = path.endswith("call.mp4")

    def get(self, _):
        return float(len(self.frames)) if self.is_video else 0.0

    def read(self):
        return True, self.frames.pop(0)

    def release(self):
        pass


@pytest.mark.parametrize(("num_frames", "taken"), [(-1, range(5)), (3, (0, 2, 4)), (9, range(5))])
def test_frames_of_a_video_are_taken_evenly_and_in_rgb(own_folder, monkeypatch, num_frames, taken):
    opencv = types.SimpleNamespace(VideoCapture=FakeCapture, CAP_PROP_FRAME_COUNT=7)
    monkeypatch.setitem(sys.modules, "cv2", opencv)
    for name in ("call", "other"):
        (own_folder / f"{name}.mp4").touch()
    frames = VideoAsset("call", num_frames).np_ndarrays
    assert frames[:, 0, 0].tolist() == [[9, 7, i] for i in taken]
    with pytest.raises(RequestError, match="OpenCV cannot read the video"):
        VideoAsset("other.mp4").np_ndarrays  # noqa: B018


def test_without_opencv_it_is_named(own_folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "cv2", None)
    (own_folder / "call.mp4").touch()
    with pytest.raises(RequestError, match="videos need OpenCV, which is not installed: pip"):
        VideoAsset("call").np_ndarrays  # noqa: B018


@pytest.mark.parametrize(
    ("asset", "message"),
    [
        (ImageAsset("duck"), r"no asset 'duck' \(available: cherry_blossom, stop_sign\)"),
        (ImageAsset("duck"), r"Put duck\.jpg into a folder and name that folder in VLLM_ASSETS"),
        (VideoAsset("baby_reading"), r"no asset 'baby_reading': assets are not downloaded"),
        (AudioAsset("mary_had_lamb"), r"no asset 'mary_had_lamb': assets are not downloaded"),
    ],
)
def test_a_missing_asset_says_where_to_put_it(asset, message):
    with pytest.raises(RequestError, match=message):
        asset.path  # noqa: B018
