"""Test that JSON with long strings is read like `json.loads` reads it, with anything around the
strings.
"""

import json
import random

import pytest

from vllm.entrypoints.http.long_texts import MIN_CHARS, CutJson

LONG = "data:image/png;base64," + "Ab+/" * (MIN_CHARS // 4)


@pytest.mark.parametrize(
    ("text", "num_cut"),
    [
        (json.dumps({"url": LONG}), 1),
        (json.dumps([{"url": LONG}, LONG, "a", [LONG + "x"]]), 3),
        (json.dumps({"url": LONG}).replace("/", "\\/"), 1),
        (json.dumps({LONG: LONG, "b": {LONG: 1}}), 3),
        (json.dumps({"text": f'say "{LONG}" twice, {LONG}'}), 0),
        (json.dumps({"text": LONG + "\\"}), 0),
        (json.dumps({"text": LONG + "\n"}), 0),
        (json.dumps({"text": LONG + "\\/"}), 0),
        (json.dumps({"text": LONG + "é"}, ensure_ascii=False), 0),
        (json.dumps({"text": LONG[: MIN_CHARS - 1]}), 0),
        (json.dumps(["a", *range(MIN_CHARS), "b"]), 0),
        (json.dumps(["a"] + ["b" * 7] * MIN_CHARS), 0),
        (json.dumps({"text": " " + LONG}), 0),
        (json.dumps(LONG), 1),
        ('{"a":"\\u0022' + LONG + '\\u0022"}', 0),
        ('["a\\\\", "' + LONG + '"]', 1),
    ],
)
def test_equal_to_the_parser(text: str, num_cut: int) -> None:
    data = text.encode()
    cut = CutJson(data)
    assert cut.parse() == json.loads(data)
    assert len(data) - len(cut.rest) >= num_cut * (MIN_CHARS - 100)
    assert num_cut or cut.rest is data


@pytest.mark.parametrize(
    "text",
    [
        f'{{"url": "{LONG}", "b": }}',
        f'{{"url": "a"{LONG}"}}',
        f'["{LONG}" "{LONG}"]',
        f'["{LONG}',
        f'["{LONG}\n"]',
        f'["{LONG}"]]',
        f'["{LONG}", "{LONG}", nothing]',
        f'["\x01{LONG}"]',
    ],
)
def test_errors_have_the_position_in_the_whole_text(text: str) -> None:
    with pytest.raises(json.JSONDecodeError) as expected:
        json.loads(text)
    with pytest.raises(json.JSONDecodeError) as error:
        CutJson(text.encode()).parse()
    assert (error.value.pos, error.value.msg) == (expected.value.pos, expected.value.msg)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32", "utf-8-sig"])
def test_other_encodings(encoding: str) -> None:
    value = ["\u4141\u2241\u4122" * MIN_CHARS, LONG]
    data = json.dumps(value, ensure_ascii=False).encode(encoding)
    assert CutJson(data).parse() == value


def test_random_texts() -> None:
    generator = random.Random(0)
    pieces = ['"', "\\", "\\\\", '\\"', "\\/", "a" * MIN_CHARS, " ", ",", "[", "]", "1", LONG]
    for _ in range(300):
        text = "[" + "".join(generator.choices(pieces, k=8)) + "]"
        try:
            expected = json.loads(text)
        except ValueError as error:
            expected = str(error)
        try:
            found = CutJson(text.encode()).parse()
        except ValueError as error:
            found = str(error)
        if isinstance(expected, str):  # an error; its line and column refer to the shortened text
            assert isinstance(found, str), text[:200]
        else:
            assert found == expected
    for _ in range(100):
        value = [
            generator.choice([LONG, "/", '"', "\\", "\\/", {"a": LONG}, [], 1])
            for _ in range(generator.randrange(6))
        ]
        text = json.dumps({"messages": value})
        if generator.random() < 0.5:
            text = text.replace("/", "\\/")
        assert CutJson(text.encode()).parse() == json.loads(text)
