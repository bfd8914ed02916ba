"""Test sounds and videos of conversations, with and without images."""

import asyncio
import base64

import numpy as np
import pytest

from tests.entrypoints.test_conversation_images import (
    A,
    each,
    image,
    message,
    on_both_paths,
    text,
)
from vllm.entrypoints.conversation.media import MediaParts, MediaRules, MediaText, RenderedChat
from vllm.entrypoints.conversation.messages import read_messages
from vllm.entrypoints.shared.media import fetch_media, media_prompt
from vllm.errors import RequestError

DATA = base64.b64encode(b"sound").decode()
SOUND = {"type": "input_audio", "input_audio": {"data": DATA, "format": "mp3"}}
SOUND_URL = f"data:audio/mp3;base64,{DATA}"
VIDEO_URL = "https://films.example/a.mp4"
VIDEO = {"type": "video_url", "video_url": {"url": VIDEO_URL}}
LIMITS = {"image": 2, "audio": 2, "video": 1}
RULES = MediaRules(
    texts={
        "image": MediaText("<image>", "<image>"),
        "audio": MediaText("<sound>", "[<sound>]"),
        "video": MediaText("<film>", "<film>"),
    },
    limits=LIMITS,
)

TYPES = each(
    "{{ m.role }}={% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'image' %}<image>{% elif p.type == 'audio' %}<sound>"
    "{% elif p.type == 'video' %}<film>{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %};"
)
KEYS = each(
    "{{ m.role }}={% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if 'image' in p %}<image>{% elif 'audio' in p or 'audio_url' in p %}<sound>"
    "{% elif 'video' in p %}<film>{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %};"
)
"""Looks for keys, as Qwen2-Audio does."""
STRINGS = each("{{ m.role + '=' + m.content + ';' }}")
IMAGES_ONLY = each(
    "{{ m.role }}={% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'image' %}<image>{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %};"
)
MIXED = message("user", image(A), SOUND, text("a<film>"), VIDEO, text("b<sound>"), SOUND)


@pytest.mark.parametrize(
    ("template", "expected", "literals"),
    [
        (TYPES, "user=<image><sound>a<film><film>b<sound><sound>;", [2, 4]),
        (KEYS, "user=<image><sound>a<film><film>b<sound><sound>;", [2, 4]),
        (STRINGS, "user=<image>\n[<sound>]\na<film>\n<film>\nb<sound>\n[<sound>];", [2, 4]),
        (IMAGES_ONLY, "user=<image>[<sound>]a<film><film>b<sound>[<sound>];", [2, 4]),
    ],
)
def test_media_of_all_kinds_keep_their_order_and_users_their_text(template, expected, literals):
    chat = on_both_paths(template, [MIXED], RULES)
    assert chat.text == expected
    assert chat.literals == literals
    assert [part.modality for part in chat.media] == ["image", "audio", "video", "audio"]


def test_a_template_must_show_the_media_of_each_kind():
    for template, number in ((TYPES + "<sound>", 2), ("{{ messages[0].role }}", 0)):
        with pytest.raises(RequestError, match=f"each of the 1 sounds, but it writes {number}"):
            on_both_paths(template, [message("user", SOUND)], RULES)


SAMPLES = np.zeros(8, np.float32)
FRAMES = np.zeros((2, 4, 4, 3), np.uint8)


@pytest.mark.parametrize(
    ("part", "modality", "source"),
    [
        (SOUND, "audio", SOUND_URL),
        ({"input_audio": {"data": DATA}}, "audio", f"data:audio/wav;base64,{DATA}"),
        ({"type": "input_audio", "input_audio": {"data": SOUND_URL}}, "audio", SOUND_URL),
        ({"type": "audio_url", "audio_url": {"url": "http://a.example/b"}}, "audio", None),
        ({"type": "audio", "audio": "/tmp/a b.wav"}, "audio", "file:///tmp/a%20b.wav"),
        ({"type": "audio", "audio": (SAMPLES, 8000)}, "audio", None),
        ({"type": "audio", "audio": b"RIFF"}, "audio", None),
        (VIDEO, "video", VIDEO_URL),
        ({"video_url": VIDEO_URL}, "video", VIDEO_URL),
        ({"type": "video", "video": FRAMES}, "video", None),
        ({"type": "video", "video": [FRAMES[0], FRAMES[1]]}, "video", None),
        ({"type": "video", "path": "/tmp/a.mp4"}, "video", "file:///tmp/a.mp4"),
    ],
)
def test_parts_of_a_program_have_urls_files_and_objects(part, modality, source):
    media = MediaParts(LIMITS, is_local=True)
    (read,) = read_messages([message("user", part)], media)
    assert read["content"] == [{"type": modality, "index": 0}]
    assert media.parts[0].modality == modality
    if source is not None:
        assert media.parts[0].source == source


def test_media_next_to_the_content_of_a_message_are_refused():
    for name in ("images", "image_url", "audios", "videos"):
        message = {"role": "user", "content": "a", name: ["iVBORw0"]}
        with pytest.raises(RequestError, match=rf"messages\[0\]\.{name} must be left out"):
            read_messages([message])
        assert read_messages([{**message, name: []}])


@pytest.mark.parametrize(
    ("part", "message_"),
    [
        ({"type": "input_audio"}, '.input_audio must be an object such as {"data"'),
        ({"type": "input_audio", "input_audio": {"data": 5}}, "whose data is the base64 text"),
        (
            {"type": "input_audio", "input_audio": {"data": "AA", "format": "a/b"}},
            '.input_audio.format must be the name of a format, such as wav or mp3, got "a/b"',
        ),
        ({"type": "audio_url", "audio_url": {}}, ".audio_url.url must be the URL of a sound"),
        ({"type": "video_url", "video_url": "a.mp4"}, "must begin with http"),
        ({"type": "audio", "audio": [0.5, 0.5]}, ".audio must be the URL of a sound"),
        ({"type": "video", "video": [[1]]}, ".video must be the URL of a video"),
        ({"type": "audio_embeds", "audio_embeds": "AA"}, "embeddings of sounds are not accepted"),
    ],
)
def test_a_wrong_part_of_a_client_is_refused_with_its_place(part, message_):
    with pytest.raises(RequestError) as failure:
        read_messages([message("user", part)], MediaParts(LIMITS))
    assert str(failure.value).startswith("messages[0].content[0]")
    assert message_ in str(failure.value)


@pytest.mark.parametrize(
    ("limits", "reads"),
    [
        ({}, 'must have the type "text", as this model reads text only'),
        ({"audio": 1}, '"text" or "input_audio", as this model reads text and sounds only'),
        (
            {"image": 1, "audio": 1},
            '"text" or "image_url" or "input_audio", as this model reads text and images',
        ),
    ],
)
def test_a_model_says_what_it_reads(limits, reads):
    with pytest.raises(RequestError) as failure:
        read_messages([message("user", VIDEO)], MediaParts(limits))
    assert reads in str(failure.value)


def test_each_kind_has_a_limit_of_its_own():
    with pytest.raises(RequestError, match=r"has 2 videos, and this server takes at most 1"):
        read_messages([message("user", VIDEO, VIDEO, SOUND, SOUND)], MediaParts(LIMITS))
    with pytest.raises(RequestError, match=r"has 3 sounds, and this server takes at most 2"):
        read_messages([message("user", SOUND, SOUND, SOUND)], MediaParts(LIMITS))
    with pytest.raises(RequestError, match=r"not accept sounds \(limit_mm_per_prompt\): leave"):
        read_messages([message("user", SOUND)], MediaParts({**LIMITS, "audio": 0}))


def test_results_of_tools_give_way_to_newer_ones_and_to_what_users_send():
    def conversation(*pictures):
        results = [message("tool", text(url), image(url)) for url in pictures]
        return [message("user", image(A)), *results]

    urls = [f"https://a.example/{number}.png" for number in range(4)]
    media = MediaParts(LIMITS)
    read = read_messages(conversation(*urls), media)
    assert [part.source for part in media.parts] == [A, urls[3]]
    gone = {"type": "text", "text": "[image left out: newer ones follow]"}
    assert [m["content"][-1] for m in read[1:]] == [*[gone] * 3, {"type": "image", "index": 1}]
    media = MediaParts(LIMITS)
    read_messages(conversation(urls[0]), media)
    assert len(media.parts) == 2
    users = message("user", image(A), image(A))
    with pytest.raises(RequestError, match=r"has 3 images, and this server takes at most 2"):
        read_messages([*conversation(urls[0]), users], MediaParts(LIMITS))


class Fetcher:
    def make_budget(self):
        return None

    async def fetch(self, url, modality, where, budget):
        return f"{modality} {where}".encode()


def test_a_prompt_has_the_media_of_each_kind_in_order():
    media = MediaParts(LIMITS)
    named = {**SOUND, "uuid": "u1"}
    other = {"type": "audio_url", "audio_url": "https://a.example/b.wav"}
    read_messages([message("user", named, VIDEO, image(A), other)], media)
    fetched = asyncio.run(fetch_media(Fetcher(), media.parts))
    prompt = media_prompt(RenderedChat("", fetched, []), fetched, RULES, None)
    data = prompt["multi_modal_data"]
    assert {kind: [each.data for each in items] for kind, items in data.items()} == {
        "audio": [b"audio messages[0].content[0]", b"audio messages[0].content[3]"],
        "video": [b"video messages[0].content[1]"],
        "image": [b"image messages[0].content[2]"],
    }
    assert all(each.modality == kind for kind, items in data.items() for each in items)
    uuids = {"audio": ["u1", None], "video": [None], "image": [None]}
    assert prompt["multi_modal_uuids"] == uuids
