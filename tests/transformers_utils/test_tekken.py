"""Test tokenizers of Mistral AI: token ids and chats equal the ones of mistral-common."""

import base64
import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest

from vllm.entrypoints.chat_utils import ChatOptions, render_chat
from vllm.errors import ConfigError
from vllm.transformers_utils.special_tokens import SpecialTokens
from vllm.transformers_utils.token_bytes import ByteDecoding, TokenBytes
from vllm.transformers_utils.tokenizer import get_tokenizer

PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""The version of all published files."""
WORDS = (
    *("  ", " t", "er", "in", "he", " the", "\n\n", "re", " a", "aa", "aaa", "ab", "abc", "bc"),
    *("\u00e9", "\u4f60", "\u4f60\u597d", "    ", "th", " there", "the", "()", "=="),
)
CONTROL = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]"),
    *("[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    *("[TOOL_CONTENT]", "[ARGS]", "[CALL_ID]"),
)
NUM_SPECIAL = 30
VERSIONS = ("v3", "v7", "v11", "v13")

TEXTS = (
    *(
        "",
        " ",
        "a",
        "aaaa",
        "abcabc",
        "the there  there",
        "\n",
        "\n\n\n",
        "  x",
        "x  ",
        "\t\tif x:",
    ),
    *("Hello, world!", "camelCase XMLHttpRequest2", "1234567890", "3.14e-10", "a1b22c333", "\r\n"),
    *(
        "\u00e9t\u00e9 \u00c9T\u00c9",
        "e\u0301",
        "\u4f60\u597d\uff0c\u4e16\u754c",
        "\U0001f600\u200d\U0001f680",
    ),
    *(
        "\u0645\u0631\u062d\u0628\u0627",
        "\u041f\u0440\u0438\u0432\u0435\u0442",
        "\u3053\u3093\u306b\u3061\u306f",
        "\ud55c\uad6d\uc5b4",
        "\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35",
    ),
    *(
        "def f(x):\n    return [x for x in y if x != 0]  # done\n",
        "http://a.b/c?d=e&f=g#h",
        "a/b//c/\n",
    ),
    *(
        "don't I'll we've",
        "...!!!???",
        "()==()",
        "{'k': \"v\"}",
        "\\n\\t",
        "a\u00a0b\u2003c",
        "\u2028x",
    ),
    *(
        "\x00\x01\x7f",
        "\ufeffbom",
        "MiXeD CaSe WORDS",
        "snake_case__name",
        "$100.00 \u20ac5",
        "x" * 60,
    ),
    *(
        "= = == ===",
        "-----",
        "<|im_end|>",
        "\u00bd \u00b2 \u2167",
        "\u01c5 \u02b0",
        "a\u0300\u0301\u0302",
        "  \n  \n",
        " \t \n x",
    ),
    *(
        "The quick brown fox jumps over the lazy dog.",
        "SELECT * FROM t WHERE a>=1;",
        "#include <x>\r\n",
    ),
    *(
        "\u0924\u094d\u0930",
        "zero\u200bwidth",
        "tab\tand  two",
        "end\n",
        "\n  end",
        "I\u2019m \u201cq\u201d",
    ),
    *(
        "\u00df\u00fc\u00f6 Stra\u00dfe",
        "a b c d e f",
        "aabaabaab",
        "10\u00b0C",
        "\u2603\u2603 \u2603",
    ),
)


def write_tekken(
    folder: Path, version: str = "v3", lists_special: bool = True, **changes: Any
) -> Path:
    """Write a folder with a small tekken.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tokens = [bytes([i]) for i in range(256)] + [word.encode() for word in WORDS]
    content: dict[str, Any] = {
        "config": {
            "pattern": PATTERN,
            "num_vocab_tokens": len(tokens),
            "default_vocab_size": len(tokens) + NUM_SPECIAL,
            "default_num_special_tokens": NUM_SPECIAL,
            "version": version,
        },
        "vocab": [
            {"rank": i, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
            for i, token in enumerate(tokens)
        ],
    }
    if lists_special:
        content["special_tokens"] = [
            {"rank": i, "token_str": text, "is_control": True} for i, text in enumerate(CONTROL)
        ]
    for name, value in changes.items():
        where = content["config"] if name in content["config"] else content
        where[name] = value
    (folder / "tekken.json").write_text(json.dumps(content))
    return folder


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": 'Wetter f\u00fcr "Ort"',
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]


def call(call_id: str, arguments: str) -> dict[str, Any]:
    function = {"name": "get_weather", "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


USER, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}
SECOND, SYSTEM = {"role": "user", "content": "Now?\n"}, {"role": "system", "content": "Be brief."}
CALL = {"role": "assistant", "tool_calls": [call("abcdef123", '{"city": "Z\u00fcrich"}')]}
CALLS = {
    "role": "assistant",
    "tool_calls": [*CALL["tool_calls"], call("abcdef124", '{"city":"Bern"}')],
}
RESULT = {
    "role": "tool",
    "tool_call_id": "abcdef123",
    "name": "get_weather",
    "content": "12 \u00b0C",
}
SECOND_RESULT = RESULT | {"tool_call_id": "abcdef124", "content": '{"t": 3}'}
PARTS = {"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": "!"}]}
CHATS: dict[str, tuple[list[Any], list[Any] | None]] = {
    "one": ([USER], None),
    "system": ([SYSTEM, USER], None),
    "turns": ([SYSTEM, USER, ANSWER, SECOND], None),
    "tools": ([USER], TOOLS),
    "system and tools": ([SYSTEM, USER, ANSWER, SECOND], TOOLS),
    "call": ([USER, CALL, RESULT], TOOLS),
    "call and more": ([SYSTEM, USER, CALL, RESULT, ANSWER, SECOND], TOOLS),
    "two calls": ([USER, CALLS, RESULT, SECOND_RESULT], TOOLS),
    "without tools": ([USER, CALL, RESULT, ANSWER, SECOND], None),
    "two users": ([USER, SECOND, ANSWER, SECOND, USER], TOOLS),
    "two systems": ([SYSTEM, SYSTEM, USER], None),
    "parts": ([PARTS], None),
    "number": ([USER, CALL, RESULT | {"content": "3"}], TOOLS),
    "number and sign": ([USER, CALL, RESULT | {"content": "-2.5"}], TOOLS),
    "words": ([USER, CALL, RESULT | {"content": "3 or 4"}], TOOLS),
    "true": ([USER, CALL, RESULT | {"content": "true"}], TOOLS),
    "list": ([USER, CALL, RESULT | {"content": "[1, 2]"}], TOOLS),
    "quotes": ([USER, CALL, RESULT | {"content": '"a"'}], TOOLS),
    "spaces": ([USER, {"role": "assistant", "content": " a  "}, SECOND], None),
}


def by_the_rules(text: str, words: list[str]) -> list[int]:
    """Return the ids of a text that is already split into words.

    A word that is a token remains whole. In other words, the pair whose bytes have the lowest rank
    is merged first.
    """
    ranks = {word.encode(): 256 + i for i, word in enumerate(WORDS)} | {
        bytes([i]): i for i in range(256)
    }
    assert "".join(words) == text
    ids = []
    for word in words:
        data = word.encode()
        parts = [data] if data in ranks else [bytes([byte]) for byte in data]
        while True:
            pairs = [
                (ranks[a + b], i)
                for i, (a, b) in enumerate(itertools.pairwise(parts))
                if a + b in ranks
            ]
            if not pairs:
                break
            _, i = min(pairs)
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        ids += [ranks[part] + NUM_SPECIAL for part in parts]
    return ids


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return get_tokenizer(str(write_tekken(tmp_path_factory.mktemp("tekken"))))


@pytest.mark.parametrize(
    "words",
    [
        ["the", " there", " ", " the"],
        ["aaaa"],
        ["abcabc"],
        ["h", "\u00e9\u00e9"],
        ["\u4f60\u597d", "\uff0c\u4e16"],
        ["x", " ==", "()\n", "   ", " y"],
        ["1", "2", "3"],
        ["camel", "Case", " HTTPRequest"],
        ["\U0001f600"],
    ],
)
def test_neighbours_merge_by_the_rank_of_their_bytes(tokenizer, words):
    text = "".join(words)
    ids = by_the_rules(text, words)
    assert tokenizer(text, add_special_tokens=False).input_ids == ids
    assert tokenizer(text).input_ids == [1, *ids]
    assert tokenizer.decode(ids) == text


def test_ids_are_ranks_behind_those_of_special_tokens(tokenizer):
    first_word = NUM_SPECIAL + 256
    assert len(tokenizer) == first_word + len(WORDS)
    assert tokenizer(" the\n\na").input_ids == [1, first_word + 5, first_word + 6, NUM_SPECIAL + 97]
    assert tokenizer("[INST]a</s><SPECIAL_29>").input_ids == [1, 3, NUM_SPECIAL + 97, 2, 29]
    assert tokenizer.decode([1, 3, NUM_SPECIAL + 97, 2], skip_special_tokens=True) == "a"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 11)
    decoding = ByteDecoding.of(tokenizer.backend_tokenizer)
    assert decoding is not None and decoding.is_byte_level  # text can be decoded token by token
    hidden = SpecialTokens.of(tokenizer).ids
    table = TokenBytes(tokenizer.backend_tokenizer, is_byte_level=True, hidden=hidden)
    assert (table[NUM_SPECIAL + 200], table[first_word + 14], table[3]) == (
        b"\xc8",
        b"\xc3\xa9",
        b"",
    )


def test_a_token_that_controls_nothing_stays_in_the_text(tmp_path):
    special = [
        {"rank": i, "token_str": text, "is_control": text != "[IMG]"}
        for i, text in enumerate(CONTROL)
    ]
    tokenizer = get_tokenizer(str(write_tekken(tmp_path, special_tokens=special)))
    assert tokenizer.decode([1, 10, 3], skip_special_tokens=True) == "[IMG]"


def chat(tokenizer: Any, name: str) -> str:
    messages, tools = CHATS[name]
    return render_chat(tokenizer, messages, ChatOptions(tools=tools))


V3_CALL = (
    '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Z\u00fcrich"}, '
    '"id": "abcdef123"}]</s>'
)


@pytest.mark.parametrize(
    ("version", "name", "text"),
    [
        ("v3", "turns", "<s>[INST]Hi[/INST]Hello!</s>[INST]Be brief.\n\nNow?\n[/INST]"),
        (
            "v3",
            "without tools",
            f"<s>[INST]Hi[/INST]{V3_CALL}"
            '[TOOL_RESULTS]{"content": "12 \u00b0C", "call_id": "abcdef123"}[/TOOL_RESULTS]'
            "Hello!</s>[INST]Now?\n[/INST]",
        ),
        ("v7", "system", "<s>[SYSTEM_PROMPT]Be brief.[/SYSTEM_PROMPT][INST]Hi[/INST]"),
        (
            "v7",
            "without tools",
            f"<s>[INST]Hi[/INST]{V3_CALL}[TOOL_RESULTS]abcdef123[TOOL_CONTENT]12 \u00b0C"
            "[/TOOL_RESULTS]Hello!</s>[INST]Now?\n[/INST]",
        ),
        (
            "v11",
            "without tools",
            "<s>[INST]Hi[/INST][TOOL_CALLS]get_weather[CALL_ID]abcdef123[ARGS]"
            '{"city": "Z\u00fcrich"}</s>[TOOL_RESULTS]abcdef123[TOOL_CONTENT]12 \u00b0C'
            "[/TOOL_RESULTS]Hello!</s>[INST]Now?\n[/INST]",
        ),
        (
            "v13",
            "without tools",
            '<s>[INST]Hi[/INST][TOOL_CALLS]get_weather[ARGS]{"city": "Z\u00fcrich"}</s>'
            "[TOOL_RESULTS]12 \u00b0C[/TOOL_RESULTS]Hello!</s>[INST]Now?\n[/INST]",
        ),
        (
            "v13",
            "system and tools",
            f"<s>[SYSTEM_PROMPT]Be brief.[/SYSTEM_PROMPT][AVAILABLE_TOOLS]"
            f"{json.dumps(TOOLS, ensure_ascii=False)}[/AVAILABLE_TOOLS]"
            f"[INST]Hi[/INST]Hello!</s>[INST]Now?\n[/INST]",
        ),
    ],
)
def test_chats_have_the_format_of_the_version(version, name, text, tmp_path):
    tokenizer = get_tokenizer(str(write_tekken(tmp_path, version)))
    assert chat(tokenizer, name) == text


def test_the_last_message_can_be_continued(tokenizer):
    options = ChatOptions(add_generation_prompt=False, continue_final_message=True)
    assert render_chat(tokenizer, [USER, ANSWER], options) == "<s>[INST]Hi[/INST]Hello!"


def test_a_checkpoint_with_its_own_template_keeps_it(tmp_path):
    folder = write_tekken(tmp_path)
    own = "{{ messages[0].content }}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": own}))
    assert get_tokenizer(str(folder)).chat_template == own
    (folder / "chat_template.jinja").write_text(own + "!")
    assert get_tokenizer(str(folder)).chat_template == own + "!"


def test_a_version_without_a_known_format_has_no_template(tmp_path):
    assert get_tokenizer(str(write_tekken(tmp_path, "v99"))).chat_template is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"config": []}, "has no object 'config'"),
        ({"vocab": None}, "has no list 'vocab'"),
        (
            {"vocab": [{"rank": 0}] * 300},
            r"has no 'rank' and 'token_bytes' in base64 in vocab\[0\]",
        ),
        ({"vocab": [5] * 300}, r"in base64 in vocab\[0\]"),
        ({"vocab": [{"rank": 0, "token_bytes": "A"}] * 300}, r"in base64 in vocab\[0\]"),
        ({"vocab": [{"rank": 1, "token_bytes": "AA=="}] * 300}, r"has a wrong 'rank' \(not 0\)"),
        ({"default_vocab_size": 2**40}, "has default_vocab_size=1099511627776, which is not an"),
        (
            {"default_vocab_size": 5},
            "has 279 tokens and 30 special tokens, but default_vocab_size=5",
        ),
        ({"default_vocab_size": 1000}, "but default_vocab_size=1000"),
        (
            {"default_num_special_tokens": 2},
            "has 22 special tokens, but default_num_special_tokens",
        ),
        ({"default_num_special_tokens": "9"}, "has default_num_special_tokens='9'"),
        ({"special_tokens": "x"}, "has 'special_tokens' that are not a list of objects"),
        (
            {"special_tokens": [{"rank": 1}]},
            r"has no 'rank' 0 and 'token_str' in special_tokens\[0\]",
        ),
        ({"pattern": "(("}, "has a 'pattern' that is not a regular expression"),
        ({"pattern": None}, "has no text 'pattern' in 'config'"),
    ],
)
def test_a_damaged_file_is_refused_with_what_is_wrong(changes, message, tmp_path):
    folder = write_tekken(tmp_path, **changes)
    with pytest.raises(ConfigError, match=message) as failure:
        get_tokenizer(str(folder))
    assert "\n" not in str(failure.value)


def test_a_token_that_is_there_twice_is_refused(tmp_path):
    words = [
        {"rank": i, "token_bytes": base64.b64encode(bytes([i % 256])).decode()} for i in range(279)
    ]
    with pytest.raises(ConfigError, match="has a token twice"):
        get_tokenizer(str(write_tekken(tmp_path, vocab=words)))


def test_tokenizer_json_is_read_unless_the_mode_is_mistral(tmp_path):
    from vllm.assets import BUNDLED_MODEL

    folder = write_tekken(tmp_path)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((BUNDLED_MODEL / name).read_bytes())
    assert len(get_tokenizer(str(folder))) > 1000
    assert len(get_tokenizer(str(folder), "mistral")) == NUM_SPECIAL + 256 + len(WORDS)
    with pytest.raises(ConfigError, match=r"'mistral' reads tekken\.json, and there is none"):
        get_tokenizer(str(BUNDLED_MODEL), "mistral")


def published_and_small(folder: Path) -> list[Path]:
    """Return files to compare: small ones of all versions, and the first one that was published."""
    import mistral_common

    data = Path(mistral_common.__file__).parent / "data" / "tekken_240718.json"
    published = folder / "published"
    published.mkdir()
    (published / "tekken.json").write_bytes(data.read_bytes())
    small = [write_tekken(folder / version, version) for version in VERSIONS]
    return [published, write_tekken(folder / "old", lists_special=False), *small]


def test_ids_and_chats_are_those_of_mistral_common(tmp_path):
    pytest.importorskip("mistral_common")
    from mistral_common.protocol.instruct.request import ChatCompletionRequest
    from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

    pick = random.Random(0)
    alphabet = "aAbBtheinr  \n\t0123()=/.,\u00e9\u4f60\u597d\u0301\U0001f600-'"
    texts = [*TEXTS, *("".join(pick.choices(alphabet, k=50)) for _ in range(300))]
    for folder in published_and_small(tmp_path):
        theirs = MistralTokenizer.from_file(str(folder / "tekken.json"))
        raw = theirs.instruct_tokenizer.tokenizer
        ours = get_tokenizer(str(folder))
        for text in texts:
            ids = raw.encode(text, bos=True, eos=False)
            assert ours(text).input_ids == ids, (folder.name, text)
        for name, (messages, tools) in CHATS.items():
            request = ChatCompletionRequest(messages=messages, tools=tools)
            want = theirs.encode_chat_completion(request).tokens
            text = chat(ours, name)
            assert ours.decode(want) == text, (folder.name, name)
            assert ours(text, add_special_tokens=False).input_ids == want, (folder.name, name)
