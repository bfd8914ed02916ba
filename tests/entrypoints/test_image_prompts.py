"""Test prompts with images that a program gives, and the files that are fetched for it."""

import asyncio
import base64

import numpy as np
import pytest

from vllm.config import MultiModalConfig
from vllm.entrypoints.conversation.media import (
    MediaPart,
    MediaRules,
    MediaText,
    RenderedChat,
)
from vllm.entrypoints.shared.media import (
    fetch_media,
    fetch_media_sync,
    make_fetcher,
    media_prompt,
)
from vllm.errors import ConfigError, RequestError

RULES = MediaRules(texts={"image": MediaText("<image>", "<image>")}, limits={"image": 3})
DATA = f"data:image/png;base64,{base64.b64encode(b'data').decode()}"
PIXELS = np.zeros((2, 2, 3), np.uint8)


def fetch(config, *sources):
    parts = [MediaPart("image", source, f"image {i}") for i, source in enumerate(sources)]
    fetcher = make_fetcher(config)
    together = asyncio.run(fetch_media(fetcher, parts))
    in_turn = fetch_media_sync(fetcher, parts)
    assert [each.source for each in together] == [each.source for each in in_turn]
    return together


def test_files_and_data_are_read_and_objects_stay_as_they_are(tmp_path):
    (tmp_path / "a.png").write_bytes(b"file")
    config = MultiModalConfig(allowed_local_media_path=str(tmp_path))
    found = fetch(config, DATA, PIXELS, (tmp_path / "a.png").as_uri(), DATA)
    assert [each.source for each in found] == [b"data", PIXELS, b"file", b"data"]
    assert [each.where for each in found] == ["image 0", "image 1", "image 2", "image 3"]


def test_files_are_read_only_where_the_flag_allows_it(tmp_path):
    (tmp_path / "a.png").write_bytes(b"file")
    with pytest.raises(RequestError, match=r"image 0: cannot fetch .*--allowed-local-media-path"):
        fetch(MultiModalConfig(), (tmp_path / "a.png").as_uri())
    with pytest.raises(ConfigError, match="is not a folder"):
        make_fetcher(MultiModalConfig(allowed_local_media_path=str(tmp_path / "no")))


def test_a_prompt_names_its_images_and_what_is_text():
    parts = [
        MediaPart("image", b"file", "messages[0].content[1]", "u1", "low"),
        MediaPart("image", PIXELS, "messages[0].content[2]"),
    ]
    chat = RenderedChat("<image><image><image>", parts, [1])
    prompt = media_prompt(chat, parts, RULES, {"max_pixels": 9})
    file, pixels = prompt["multi_modal_data"]["image"]
    assert pixels.item is PIXELS
    assert (file.modality, file.data, file.where) == ("image", b"file", "messages[0].content[1]")
    assert (file.uuid, file.detail) == ("u1", "low")
    assert prompt["multi_modal_uuids"] == {"image": ["u1", None]}
    assert prompt["mm_processor_kwargs"] == {"max_pixels": 9}
    assert prompt["literal_placeholders"] == [1]
    assert prompt["add_special_tokens"] is False


def test_a_prompt_without_images_is_text():
    chat = RenderedChat("hi", [], [])
    plain = {"prompt": "hi", "add_special_tokens": False}
    assert media_prompt(chat, [], None, None) == plain
    assert media_prompt(chat, [], RULES, {"max_pixels": 9}) == plain | {"literal_placeholders": []}
    with pytest.raises(RequestError, match=r"^mm_processor_kwargs: this model reads text only"):
        media_prompt(chat, [], None, {"max_pixels": 9})


def test_the_content_of_an_image_is_not_in_its_description():
    assert "secret" not in repr(MediaPart("image", "data:secret", "messages[0].content[0]"))
