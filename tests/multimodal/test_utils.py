"""Test images and sounds for the bodies of requests."""

import asyncio
import base64
import functools
import http.server
import io
import threading
import wave

import numpy as np
import pytest
from PIL import Image

from vllm import envs
from vllm.errors import RequestError
from vllm.multimodal.utils import (
    encode_audio_base64,
    encode_image_base64,
    fetch_audio,
    fetch_image,
)
from vllm.utils.media import read_wav, write_wav

SAMPLES = np.sin(np.linspace(0, 60, 800)).astype(np.float32)


def data_url(data, head="data:image/png;base64"):
    return f"{head},{base64.b64encode(data).decode()}"


@pytest.fixture
def web(tmp_path):
    """Return the address of a server of the files in `tmp_path`."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Quiet, directory=tmp_path)
    )
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def png(image):
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def test_an_image_is_fetched_from_data_from_the_web_and_from_a_folder(web, tmp_path):
    data = png(Image.new("RGB", (3, 2), (9, 9, 9)))
    (tmp_path / "a.png").write_bytes(data)
    allowed = {
        "allowed_media_domains": ["127.0.0.1"],
        "allowed_local_media_path": str(tmp_path),
    }
    for url in (data_url(data), f"{web}/a.png", f"file://{tmp_path}/a.png"):
        image = fetch_image(url, image_mode="L", **allowed)
        assert (image.size, image.mode, image.getpixel((0, 0))) == ((3, 2), "L", 9)


def test_an_image_is_fetched_where_an_event_loop_runs():
    async def fetch():
        return fetch_image(data_url(png(Image.new("RGB", (3, 2)))))

    assert asyncio.run(fetch()).size == (3, 2)


@pytest.fixture
def environment(monkeypatch):
    """Set variables for one test."""

    def set_variables(**values):
        for name, value in values.items():
            monkeypatch.setenv(name, value)
        envs.get.cache_clear()

    yield set_variables
    monkeypatch.undo()
    envs.get.cache_clear()


def test_variables_limit_images_and_redirects(environment, web, tmp_path):
    # For a folder, the server redirects to the URL with a slash at its end.
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "index.html").write_bytes(png(Image.new("RGB", (3, 2))))
    fetch = functools.partial(fetch_image, f"{web}/folder", allowed_media_domains=["127.0.0.1"])
    assert fetch().size == (3, 2)
    environment(VLLM_MAX_IMAGE_PIXELS="5")
    with pytest.raises(RequestError, match="image_url: it has 3 x 2 pixels, more than 5, the lim"):
        fetch()
    environment(VLLM_MEDIA_URL_ALLOW_REDIRECTS="0")
    with pytest.raises(RequestError, match="redirects are not followed"):
        fetch()


def test_an_image_becomes_text_and_back():
    clear = Image.new("RGBA", (3, 2), (0, 0, 0, 0))
    image = fetch_image(f"data:image/jpeg;base64,{encode_image_base64(clear)}")
    assert image.getpixel((0, 0)) == (255, 255, 255)
    text = encode_image_base64(clear, image_mode="RGBA", format="PNG")
    image = fetch_image(f"data:image/png;base64,{text}", image_mode="RGBA")
    assert image.getpixel((0, 0)) == (0, 0, 0, 0)


def test_a_sound_becomes_text_and_back():
    text = encode_audio_base64(SAMPLES, 16000)
    samples, rate = fetch_audio(f"data:audio/wav;base64,{text}")
    assert rate == 16000
    np.testing.assert_allclose(samples, SAMPLES, atol=1e-4)


@pytest.mark.parametrize(("width", "tolerance"), [(1, 1e-2), (2, 1e-4), (4, 1e-6)])
def test_sounds_of_every_width_are_read_and_channels_mixed(width, tolerance):
    scale = 2 ** (8 * width - 1) - 1
    left = (SAMPLES.astype(np.float64) * scale).astype({1: "i1", 2: "<i2", 4: "<i4"}[width])
    frames = np.stack([left, np.zeros_like(left)], 1)
    raw = (frames.astype("i2") + 128).astype("u1") if width == 1 else frames
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setparams((2, width, 8000, 0, "NONE", ""))
        file.writeframes(raw.tobytes())
    samples, rate = read_wav(buffer.getvalue())
    assert rate == 8000
    np.testing.assert_allclose(samples, SAMPLES / 2, atol=tolerance)


def test_what_is_too_loud_is_cut_off():
    samples, _ = read_wav(write_wav(np.array([[-3.0, 0.5, 3.0]]), 8000))
    np.testing.assert_allclose(samples, [-1, 0.5, 1], atol=1e-4)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        (
            "file:///etc/passwd",
            "image_url: cannot fetch 'file:///etc/passwd': this server does not read files",
        ),
        ("/etc/passwd", "must begin with http:, https:, data: or file:"),
        (data_url(b"!"), "image_url: it is no image; accepted are PNG"),
        ("http://127.0.0.1:1/a", "the host '127.0.0.1' is not on the public internet"),
    ],
)
def test_what_cannot_be_fetched_says_why(url, message):
    with pytest.raises(RequestError, match=message):
        fetch_image(url)


def test_a_sound_of_another_form_says_how_to_convert_it():
    with pytest.raises(RequestError, match=r"this is not a WAV file.*ffmpeg -i FILE out\.wav"):
        fetch_audio("data:,OggS")
