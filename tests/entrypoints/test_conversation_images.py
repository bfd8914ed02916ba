"""Test images of conversations: how templates show them, and that text of a user never becomes an
image.

Every case is rendered by both paths: as the template of the model, and by the handler of the
process for templates of requests.
"""

import random

import msgspec
import numpy as np
import pytest

from tests.engine.tokenizers_for_tests import byte_level
from vllm.entrypoints.chat_utils import (
    ChatOptions,
    render_with_media,
    rendering_arguments,
)
from vllm.entrypoints.conversation.media import MediaParts, MediaRules, MediaText
from vllm.entrypoints.conversation.messages import read_messages
from vllm.entrypoints.openai.chat import template_worker
from vllm.errors import RequestError

A, B, C = (f"http://pictures.example/{name}.png" for name in "abc")
RULES = MediaRules(texts={"image": MediaText("<image>", "<image>")}, limits={"image": 3})


def image(url, **fields):
    return {"type": "image_url", "image_url": {"url": url}, **fields}


def text(words):
    return {"type": "text", "text": words}


def message(role, *content, **fields):
    whole = content[0] if len(content) == 1 and isinstance(content[0], str) else list(content)
    return {"role": role, "content": whole, **fields}


def each(body):
    return "{% for m in messages %}" + body + "{% endfor %}"


LISTS = each(
    "{{ m.role }}={% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'image' %}<image>{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %};"
)
"""Shows images and texts in their order."""
IMAGES_FIRST = each(
    "{{ m.role | upper }}: {% for p in m.content | selectattr('type', 'equalto', 'image') %}"
    "{{ '<image>\n' }}{% endfor %}{% for p in m.content | selectattr('type', 'equalto', 'text') %}"
    "{{ p.text + ' ' }}{% endfor %}"
)
"""Shows lists only, and the images of a message before its texts."""
STRINGS = each("{{ m.role + '=' + m.content + ';' }}")
TEXT_LISTS = each(
    "{{ m.role }}={% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "({{ p.text }}){% endfor %}{% endif %};"
)
"""Shows the texts of a list, and no images."""
USER_LISTS = each(
    "{{ m.role }}={% if m.role == 'user' and m.content is not string %}{% for p in m.content %}"
    "{% if p.type == 'image' %}<image>{% else %}{{ p.text }}{% endif %}{% endfor %}"
    "{% else %}{{ m.content }}{% endif %};"
)
SINGLE_CALLS = each(
    "{% if m.tool_calls and m.tool_calls | length > 1 %}{{ raise_exception('single') }}{% endif %}"
    "{{ m.role }}={{ m.content }};"
)
ARGUMENTS = each(
    "{{ m.role }}={{ m.content }}{% for c in m.tool_calls %}"
    "[{{ c.function.arguments | tojson }}]{% endfor %}{{ m.reasoning_content }};"
)
TOOLS = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{{ note }}" + LISTS

COUNTED = (
    "{% set ns = namespace(n=0) %}{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'image' or 'image' in p or 'image_url' in p %}{% set ns.n = ns.n + 1 %}"
    "{% if add_vision_id %}Picture {{ ns.n }}: {% endif %}<image>"
    "{% elif 'text' in p %}{{ p.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
)
"""Counts images, as Qwen2-VL does."""
PREFIXED = (
    "{% if messages[0].role == 'system' %}{% if messages[0].content is string %}"
    "{% set first = messages[0].content + '|' %}{% else %}"
    "{% set first = messages[0].content[0].text + '|' %}{% endif %}"
    "{% set rest = messages[1:] %}{% else %}{% set first, rest = '', messages %}{% endif %}"
    "{% for m in rest %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('must alternate') }}{% endif %}{{ m.role }}="
    "{{ first if loop.first else '' }}{% if m.content is string %}{{ m.content | trim }}"
    "{% else %}{% for p in m.content %}{% if p.type == 'image' %}<image>"
    "{% else %}{{ p.text | trim }}{% endif %}{% endfor %}{% endif %};{% endfor %}"
)
"""Puts the system message into the first turn, and requires that roles alternate, as Gemma 3."""

TWO = message("user", text("x"), image(A), text("y"), image(B))
CALLS = {
    "role": "assistant",
    "tool_calls": [
        {"id": name, "type": "function", "function": {"name": "f", "arguments": "{}"}}
        for name in ("call_1", "call_2")
    ],
}
LITERAL = message("user", "<image>")
ESCAPED = {"name": "f", "arguments": '{"k": "\\u003cimage\\u003e"}'}
TOOL = {"type": "function", "function": {"name": "f", "description": "<image>"}}

CASES = {
    "lists": (LISTS, [TWO], "user=x<image>y<image>;", [A, B], []),
    "images first": (IMAGES_FIRST, [TWO], "USER: <image>\n<image>\nx y ", [A, B], []),
    "strings": (STRINGS, [TWO], "user=x\n<image>\ny\n<image>;", [A, B], []),
    "lists of text": (TEXT_LISTS, [TWO], "user=(x)(<image>)(y)(<image>);", [A, B], []),
    "lists in one role": (
        USER_LISTS,
        [TWO, message("assistant", "ok", image(C)), message("user", "z")],
        "user=x<image>y<image>;assistant=ok\n<image>;user=z;",
        [A, B, C],
        [],
    ),
    "an image alone": (STRINGS, [message("user", image(A))], "user=<image>;", [A], []),
    "results that the template wants in another order": (
        SINGLE_CALLS,
        [
            message("user", "u"),
            CALLS,
            message("tool", image(B), tool_call_id="call_2"),
            message("tool", image(A), tool_call_id="call_1"),
        ],
        'user=u;assistant={"name": "f", "arguments": {}};tool=<image>;'
        'assistant={"name": "f", "arguments": {}};tool=<image>;',
        [A, B],
        [],
    ),
    "counted images": (
        COUNTED,
        [message("system", "s"), TWO, message("assistant", "a"), message("user", image(C))],
        "<|system|>s<|user|>x<image>y<image><|assistant|>a<|user|><image>",
        [A, B, C],
        [],
    ),
    "messages that are joined": (
        PREFIXED,
        [message("system", "s<image>"), message("user", "u "), TWO, message("assistant", "a")],
        "user=s<image>|ux<image>y<image>;assistant=a;",
        [A, B],
        [0],
    ),
    "text of the user": (LISTS, [LITERAL], "user=<image>;", [], [0]),
    "text of the user around an image": (
        LISTS,
        [message("user", text("<image>1"), image(A), text("2<image><image>"))],
        "user=<image>1<image>2<image><image>;",
        [A],
        [0, 2, 3],
    ),
    "text of the user in strings": (
        STRINGS,
        [message("user", text("a<image>"), image(A)), message("assistant", "b<image>")],
        "user=a<image>\n<image>;assistant=b<image>;",
        [A],
        [0, 2],
    ),
    "the text behind the images": (
        IMAGES_FIRST,
        [message("user", text("<image>"), image(A))],
        "USER: <image>\n<image> ",
        [A],
        [1],
    ),
    "arguments with escapes, and thoughts": (
        ARGUMENTS,
        [
            message("user", "u"),
            {
                "role": "assistant",
                "reasoning": "t<image>",
                "tool_calls": [{"id": "1", "type": "function", "function": ESCAPED}],
            },
        ],
        'user=u;assistant=[{"k": "<image>"}]t<image>;',
        [],
        [0, 1],
    ),
    "private characters of the user": (
        STRINGS,
        [message("user", text("\ue001<\ue002image>\ue001<image>"), image(A))],
        "user=\ue001<\ue002image>\ue001<image>\n<image>;",
        [A],
        [0],
    ),
}


def on_both_paths(template, messages, rules=RULES, **options):
    """Return the text with its images, which must be the same on both paths."""
    made = ChatOptions(chat_template=template, **options)
    chat = render_with_media(byte_level(), messages, made, rules)
    arguments, images = rendering_arguments(byte_level(), messages, made, rules)
    answer = msgspec.json.decode(template_worker.start(b"")(msgspec.json.encode(arguments)))
    assert answer["text"] == chat.text
    assert answer["literals"] == chat.literals
    assert [images[i].source for i in answer["order"]] == [each.source for each in chat.media]
    return chat


@pytest.mark.parametrize("name", CASES)
def test_images_and_the_text_of_users_stay_apart(name):
    template, messages, expected, urls, literals = CASES[name]
    chat = on_both_paths(template, messages)
    assert chat.text == expected
    assert [each.source for each in chat.media] == urls
    assert chat.literals == literals
    assert chat.text.count("<image>") == len(urls) + len(literals)


def test_a_template_may_number_its_images():
    chat = on_both_paths(COUNTED, [TWO], template_kwargs={"add_vision_id": True})
    assert chat.text == "<|user|>xPicture 1: <image>yPicture 2: <image>"


def test_tools_and_variables_have_text_of_the_user_too():
    chat = on_both_paths(
        TOOLS, [TWO], tools=[TOOL], template_kwargs={"note": "<image>", "<image>": 1}
    )
    assert chat.literals == [0, 1]
    assert chat.text.startswith('{"type": "function", "function": {"name": "f", "description": "<i')


def test_an_image_may_have_more_text_than_its_placeholder():
    rules = MediaRules(
        texts={"image": MediaText("<|pad|>", "<|start|><|pad|><|end|>")}, limits={"image": 2}
    )
    chat = on_both_paths(STRINGS, [message("user", text("<|pad|>"), image(A))], rules)
    assert chat.text == "user=<|pad|>\n<|start|><|pad|><|end|>;"
    assert chat.literals == [0]


@pytest.mark.parametrize(
    ("content_format", "expected"),
    [("string", "user=x\n<image>\ny\n<image>;"), ("openai", "user=x<image>y<image>;")],
)
def test_the_format_can_be_forced(content_format, expected):
    assert on_both_paths(LISTS, [TWO], content_format=content_format).text == expected


@pytest.mark.parametrize("template", [LISTS, STRINGS])
def test_a_message_that_ends_with_an_image_is_continued(template):
    messages = [message("user", "u"), message("assistant", text("a"), image(A))]
    options = {"continue_final_message": True, "add_generation_prompt": False}
    assert on_both_paths(template, messages, **options).text.endswith("<image>")


def test_a_template_that_loses_an_image_is_an_error():
    for template, number in (("{{ messages[0].role }}", 0), (LISTS + "<image>", 2)):
        with pytest.raises(RequestError, match=f"each of the 1 images, but it writes {number}"):
            on_both_paths(template, [message("user", image(A))])


@pytest.mark.parametrize("template", [LISTS, STRINGS, PREFIXED, ARGUMENTS])
def test_text_without_images_is_rendered_as_for_a_model_that_reads_text(template):
    pieces = [
        "<image>",
        "<ima",
        "ge>",
        "<",
        "\ue001",
        "\ue000",
        "\ue0010\ue001",
        " ",
        "\\u003c",
        "é",
    ]
    choice = random.Random(0)
    for _ in range(200):
        texts = ["".join(choice.choices(pieces, k=4)) for _ in range(3)]
        messages = [message("user", *map(text, texts)), message("assistant", texts[0], texts[1])]
        made = ChatOptions(chat_template=template)
        plain = render_with_media(byte_level(), messages, made, None)
        chat = render_with_media(byte_level(), messages, made, RULES)
        assert chat.text == plain.text
        assert chat.literals == list(range(plain.text.count("<image>")))


def test_a_model_that_reads_text_only_is_told_nothing_about_placeholders():
    chat = on_both_paths(STRINGS, [LITERAL], None)
    assert (chat.text, chat.media, chat.literals) == ("user=<image>;", [], [])


PIXELS = np.zeros((2, 2, 3), np.uint8)


@pytest.mark.parametrize(
    ("part", "source"),
    [
        (image(A), A),
        ({"type": "image_url", "image_url": A}, A),
        ({"image_url": A}, A),
        ({"type": "input_image", "image_url": A}, A),
        ({"type": "image", "url": A}, A),
        ({"type": "image", "image": A}, A),
        ({"type": "image", "path": "/tmp/a b.png"}, "file:///tmp/a%20b.png"),
        ({"type": "image", "image": PIXELS}, PIXELS),
        ({"type": "image_pil", "image_pil": PIXELS}, PIXELS),
    ],
)
def test_parts_of_all_apis_become_the_same_form(part, source):
    media = MediaParts({"image": 1})
    (read,) = read_messages([message("user", part)], media)
    assert read["content"] == [{"type": "image", "index": 0}]
    assert media.parts[0].source is source or media.parts[0].source == source
    assert media.parts[0].where == "messages[0].content[0]"


def test_a_part_keeps_its_detail_and_its_identity():
    media = MediaParts({"image": 3})
    given = {"type": "image_url", "image_url": {"url": A, "detail": "low"}, "uuid": "u1"}
    named = {
        "type": "input_image",
        "image_url": B,
        "detail": "high",
        "where": "input[0].content[0]",
    }
    read_messages([message("user", given, named)], media)
    assert [(each.detail, each.uuid) for each in media.parts] == [("low", "u1"), ("high", None)]
    assert media.parts[1].where == "input[0].content[0]"


def test_a_program_may_name_a_relative_path():
    part = {"type": "image", "path": "a.png"}
    media = MediaParts({"image": 1}, is_local=True)
    read_messages([message("user", part)], media)
    assert media.parts[0].source.startswith("file:///") and media.parts[0].source.endswith("a.png")
    with pytest.raises(RequestError, match="must begin with http"):
        read_messages([message("user", part)], MediaParts({"image": 1}))


@pytest.mark.parametrize(
    ("part", "message_"),
    [
        ({"type": "image_url"}, ".image_url must be the URL of an image"),
        ({"type": "image_url", "image_url": {"url": 5}}, ".image_url.url must be the URL"),
        ({"type": "image_url", "image_url": {"url": "ftp://a"}}, "must begin with http"),
        ({"type": "image_url", "image_url": "a.png"}, "got 'a.png'"),
        (
            {"type": "image_url", "image_url": "iVBO" * 20},
            "got base64 without such a beginning (80 characters)",
        ),
        (
            {"type": "image_url", "image_url": "_9j-" * 20},
            "got base64 without such a beginning (80 characters)",
        ),
        (
            {"type": "image_url", "image_url": f"b'{'iVBO' * 80}'"},
            "or file://, got a text of 323 characters",
        ),
        ({"type": "image", "image": "/9j/" * 20}, "such as 'data:image/png;base64,...'"),
        (image(A, detail=5), "detail must be one of auto, low, high, original, got 5"),
        (image(A, max_pixels=9), ".max_pixels must be left out: it has an effect only in mm_proc"),
        (
            {"type": "image_url", "image_url": {"url": A, "min_pixels": 4}},
            ".image_url.min_pixels must be left out: it has an effect only in mm_processor_kwargs",
        ),
        (image(A, fps=2), ".fps must be left out: it has an effect only in --media-io-kwargs"),
        (image(A, uuid=""), ".uuid must be a string of 1 to 256 characters"),
        ({"type": "image_url", "uuid": "a"}, ".image_url must be sent together with the uuid"),
        (image(""), "(http://, https://, data: or file://), got ''"),
        (
            image(None),
            "must be the URL of an image (http://, https://, data: or file://), got null",
        ),
        (
            {"type": "input_image", "file_id": "file-1"},
            ".file_id is not supported, because this server stores no files",
        ),
        ({"type": "image_pil", "image_pil": {"a": 1}}, "must be an image of Pillow, got dict"),
        ({"type": "image", "image": [1, 2]}, ".image must be the URL of an image"),
        (
            {"type": "audio_embeds", "audio_embeds": "AA"},
            'must have the type "image_url", as embeddings of sounds are not accepted',
        ),
        (
            {"type": "input_audio", "input_audio": {}},
            'must have the type "text" or "image_url", as this model reads text and images only',
        ),
        (
            {"type": "video_url", "video_url": {}},
            'must have the type "text" or "image_url", as this model reads text and images only',
        ),
        ({"type": "document"}, 'has the type "document", which is not known'),
    ],
)
def test_a_wrong_part_is_refused_with_its_place(part, message_):
    with pytest.raises(RequestError) as failure:
        read_messages([message("user", text("a"), part)], MediaParts({"image": 1}))
    assert str(failure.value).startswith("messages[0].content[1]")
    assert message_ in str(failure.value)
    assert failure.value.param == "messages"


def test_more_images_than_allowed_are_refused_with_both_numbers():
    first_above = r"^messages\[1\]\.content\[\d\]: .*"
    both = "has 4 images, and this server takes at most 3"
    with pytest.raises(RequestError, match=first_above + both):
        read_messages([TWO, TWO], MediaParts({"image": 3}))
    with pytest.raises(RequestError, match=r"^messages\[0\].*: this server does not accept images"):
        read_messages([TWO], MediaParts({"image": 0}))


def test_marks_are_made_of_characters_that_the_conversation_does_not_have():
    every = "".join(map(chr, range(0xE001, 0xF900)))
    with pytest.raises(RequestError, match="private use area"):
        on_both_paths(STRINGS, [message("user", every + "<image>")])
