"""Test the messages that users of the server get for wrong requests.

A message names fields as the user wrote them, with the value, the accepted values, and what to do.
An entry of `MESSAGES` is a request and its whole message; a new situation needs a new entry.
"""

import importlib
import json
import pkgutil
import types
import typing
from typing import Any

import pytest
from pydantic import ValidationError
from pydantic_core import core_schema
from starlette.testclient import TestClient

from tests.entrypoints.openai.scripted_engine import ODD_VALUES, ScriptedEngine, make_app
from tests.loops import loop_over
from vllm.entrypoints.http.validation_text import describe_validation
from vllm.entrypoints.openai import protocol
from vllm.entrypoints.openai.protocol.base import RequestModel
from vllm.utils.text.json_words import show_value

for module in pkgutil.iter_modules(protocol.__path__, f"{protocol.__name__}."):
    importlib.import_module(module.name)

COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
RESPONSES, MESSAGES_API = "/v1/responses", "/v1/messages"
USER = [{"role": "user", "content": "hi"}]
NO_BODY = "the request has no body: send a JSON object"
PROMPTS = "must be text, token ids, or a list of either"
STRINGS = "must be a string or a list of strings"
DEEP = json.loads("[" * 300 + "]" * 300)


def beams(**fields: Any) -> dict[str, Any]:
    return {"prompt": "a", "use_beam_search": True, **fields}


def prompt(value: Any) -> dict[str, Any]:
    return {"prompt": value}


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": USER, **fields}


def message(content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 1}


NAMED_TOOL = (
    'none, auto, required, {"type": "function", "function": {"name": ...}}, {"type": "custom", '
    '"custom": {"name": ...}}, or {"type": "allowed_tools", "allowed_tools": {"mode": "auto" or '
    '"required", "tools": [...]}}'
)
MESSAGES: list[tuple[str, Any, str]] = [
    # ---- beam search: the user has set n, and no logprobs
    (
        COMPLETION,
        beams(n=128),
        "beam search with n = 128 needs 256 log-probabilities per token, and --max-logprobs is 20: "
        "use n up to 10, or raise --max-logprobs to 256",
    ),
    (
        CHAT,
        chat(n=11, use_beam_search=True),
        "beam search with n = 11 needs 22 log-probabilities per token, and --max-logprobs is 20: "
        "use n up to 10, or raise --max-logprobs to 22",
    ),
    # ---- a body that is missing or is not JSON
    *[
        (path, b"", NO_BODY)
        for path in (COMPLETION, CHAT, RESPONSES, MESSAGES_API, "/tokenize", "/detokenize")
    ],
    *[(path, b"", NO_BODY) for path in ("/v1/embeddings", "/score", "/classify")],
    ("/invocations", b"", NO_BODY),
    (COMPLETION, b"null", "the body must be a JSON object, got null"),
    (
        "/tokenize",
        b"[]",
        "the body must be a JSON object, got an empty list",
    ),
    # ---- prompts and inputs
    (COMPLETION, prompt(-1), f"prompt {PROMPTS}, got -1"),
    (COMPLETION, prompt([-1]), f"prompt {PROMPTS}; entry 0 is -1"),
    (COMPLETION, prompt([2**31]), f"prompt {PROMPTS}; entry 0 is 2147483648"),
    (COMPLETION, prompt(["a", 3]), f"prompt {PROMPTS}; entry 1 is 3"),
    (COMPLETION, prompt([1, "a"]), f'prompt {PROMPTS}; entry 1 is "a"'),
    (
        COMPLETION,
        prompt([[1], [1, -2]]),
        f"prompt {PROMPTS}; entry 1 of entry 1 is -2",
    ),
    (
        COMPLETION,
        {"prompt_embeds": [3]},
        "prompt_embeds must be a string of base64 or a list of such strings; entry 0 is 3",
    ),
    (COMPLETION, prompt({}), f"prompt {PROMPTS}, got an object"),
    ("/v1/embeddings", {"input": [1.5]}, f"input {PROMPTS}; entry 0 is 1.5"),
    ("/classify", {"input": ["a", []]}, f"input {PROMPTS}; entry 1 is an empty list"),
    ("/pooling", {"input": True}, f"input {PROMPTS}, got true"),
    (
        "/score",
        {"text_1": "a", "text_2": ["b", None]},
        "text_2 must be a string or a list of strings; entry 1 is null",
    ),
    (
        "/rerank",
        {"query": "a", "documents": ["b", 3]},
        "documents.1 must be a string or an object with text, got 3",
    ),
    (
        RESPONSES,
        {"input": ["a"]},
        'input must be text or a list of items (objects); entry 0 is "a"',
    ),
    (
        MESSAGES_API,
        message(3),
        "messages.0.content must be text or a list of content blocks (objects), got 3",
    ),
    (
        MESSAGES_API,
        {**message("a"), "system": [3]},
        "system must be text or a list of text blocks (objects); entry 0 is 3",
    ),
    (CHAT, {"messages": 3}, "messages must be a list, got 3"),
    (CHAT, {"messages": []}, "messages has too few entries; it must have 1 or more"),
    (CHAT, {"messages": [3]}, "messages.0 must be an object, got 3"),
    # ---- other fields of several types
    (CHAT, chat(stop=[3]), f"stop {STRINGS}; entry 0 is 3"),
    (RESPONSES, {"input": "a", "stop": {}}, f"stop {STRINGS}, got an object"),
    (CHAT, chat(tool_choice="x"), f'tool_choice must be {NAMED_TOOL}, got "x"'),
    (
        CHAT,
        chat(tool_choice={}),
        f"tool_choice must be {NAMED_TOOL}; its function is missing",
    ),
    (
        CHAT,
        chat(tool_choice={"type": "custom", "custom": {"name": 3}}),
        f"tool_choice must be {NAMED_TOOL}; the name of its custom is 3",
    ),
    (
        CHAT,
        chat(tool_choice={"type": "allowed_tools", "allowed_tools": {"mode": 3, "tools": []}}),
        f"tool_choice must be {NAMED_TOOL}; the mode of its allowed_tools is 3",
    ),
    (
        CHAT,
        chat(tool_choice={"type": "function", "function": {"name": 3}}),
        f"tool_choice must be {NAMED_TOOL}; the name of its function is 3",
    ),
    (
        RESPONSES,
        {"input": "a", "tool_choice": 3},
        'tool_choice must be none, auto, required, or an object such as {"type": "function", '
        '"name": ...}, got 3',
    ),
    (CHAT, chat(tools=[3]), "tools.0 must be an object, got 3"),
    (
        COMPLETION,
        {"prompt": "a", "response_format": {"type": "x"}},
        'response_format.type must be text, json_object, json_schema or structural_tag, got "x"',
    ),
    (
        COMPLETION,
        {"prompt": "a", "response_format": {"type": "json_schema", "json_schema": {}}},
        "response_format of type json_schema needs json_schema with name and schema, such as "
        '{"type": "json_schema", "json_schema": {"name": "answer", "schema": {...}}}',
    ),
    (
        COMPLETION,
        {"prompt": "a", "response_format": 3},
        "response_format must be an object, got 3",
    ),
    (
        COMPLETION,
        {"prompt": "a", "guided_json": DEEP},
        "guided_json is nested too deeply",
    ),
    (
        COMPLETION,
        {
            "prompt": "a",
            "guided_json": {},
            "guided_choice": ["a"],
            "response_format": {"type": "json_object"},
        },
        "guided_json, guided_choice, response_format: only one of these fields may be set",
    ),
    (
        RESPONSES,
        {"input": "a", "metadata": {"k" * 65: "b"}},
        f'a key of metadata must have at most 64 characters, got "{"k" * 65}"',
    ),
    # ---- numbers
    (
        COMPLETION,
        {"prompt": "a", "seed": 2**63},
        "seed must be at most 9223372036854775807, got 9223372036854775808",
    ),
    (
        CHAT,
        chat(top_k="x"),
        'top_k must be an integer, got "x"',
    ),
    # ---- chat templates
    *[
        (
            path,
            chat(chat_template=template),
            "chat_template is empty: leave it out to use the template of the model",
        )
        for path in (CHAT, "/tokenize")
        for template in ("", " \n")
    ],
]
"""Path, body (JSON, or bytes as they are), message."""
NOT_FOR_USERS = [
    *("dictionary", "discriminator", "constrained", "function-", "after validation", "Input tag"),
    *("Input should", "is not a valid value", "_type)", "_parsing)", "(missing)"),
    *(each.__name__ for each in (RequestModel, *RequestModel.__subclasses__())),
]


@pytest.fixture(scope="module")
def client():
    with TestClient(make_app(ScriptedEngine("one", "two"))) as client:
        yield client


@loop_over("path, body, text", MESSAGES)
def test_a_wrong_request_is_told(client, path, body, text):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"content-type": "application/json"} if content else {}
    answer = client.post(path, content=content, headers=headers)
    found = answer.json()
    assert answer.status_code == 400, found
    assert found["error"]["message"] == text


@pytest.mark.parametrize(
    ("query", "text"),
    [
        (
            "?limit=0",
            'limit must be at least 1, got "0"',
        ),
        ("?order=up", "order must be 'asc' or 'desc', got \"up\""),
    ],
)
def test_a_wrong_query_is_told(client, query, text):
    answer = client.get(f"{RESPONSES}/resp_1/input_items{query}")
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, text)
    assert answer.json()["error"]["param"] == query[1:6]


# ---- no field has an error in the words of pydantic ----------------------------------------------


def request_models(base: type[RequestModel] = RequestModel) -> list[type[RequestModel]]:
    found = [base]
    for each in base.__subclasses__():
        found += request_models(each)
    return [each for each in found if each.__module__.startswith(protocol.__name__)]


FIELDS = sorted(
    {
        (f"{model.__name__}.{name}", model, field.alias or name)
        for model in request_models()
        for name, field in model.model_fields.items()
    },
    key=lambda row: row[0],
)
WRONG_VALUES = [
    # lone surrogates are replaced when a body is read
    *(value for value in ODD_VALUES if value != "\ud800"),
    *([-1], [3, "x"], ["x", 3], [[1], [1, -2]], [["x"]], [[[]]], [True], [1.5], [2**70], DEEP),
    *({"type": 3}, {"type": "x"}, {"function": {}}, {"function": {"name": 3}}, {"name": {}}),
    *({"type": "json_schema", "json_schema": 3}, {"type": "structural_tag", "triggers": 3}),
    *({"format": 3}, {"k" * 100: {}}, {"k": 3}, {"schema": 3}, {"include_usage": 3}),
    [{"type": "function", "function": {"name": 3, "parameters": 3}}],
]


def is_place(location: tuple[int | str, ...], value: Any, kind: str) -> bool:
    """Return whether a location is a path of keys and indices in a value, as the user sees it."""
    for position, part in enumerate(location):
        is_last = position == len(location) - 1
        if is_last and (kind == "missing" or part == "[key]"):
            return isinstance(value, dict)
        if isinstance(part, str) and part.startswith(":"):
            continue  # this error is left out of the message
        try:
            value = value[part]
        except (TypeError, KeyError, IndexError):
            return False
    return True


@loop_over("model, name", [row[1:] for row in FIELDS])
def test_what_is_wrong_with_a_field_is_told_in_the_words_of_the_user(model, name):
    for value in WRONG_VALUES:
        body = {name: value}
        try:
            model.model_validate(body)
        except ValidationError as error:
            own = [each for each in error.errors() if each["loc"][:1] == (name,)]
        else:
            continue
        for each in own:
            if each["type"] == "recursion_depth_exceeded":
                each = {**each, "loc": each["loc"][:1]}  # for this error, only the field is named
            assert is_place(each["loc"], body, each["type"]), (value, each)
            text, param = describe_validation([{**each, "loc": ("body", *each["loc"])}])
            assert param == name
            assert name in text
            assert not [word for word in NOT_FOR_USERS if word in text], text


def unions_of(annotation: Any, is_told: bool = False) -> list[bool]:
    """Return, for every union in an annotation, whether `accepts` is applied to it."""
    if (inner := getattr(annotation, "__metadata__", None)) is not None:
        known = any(type(each).__name__ in ("WrapValidator", "Discriminator") for each in inner)
        return unions_of(typing.get_args(annotation)[0], is_told or known)
    args = [each for each in typing.get_args(annotation) if each is not type(None)]
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    found = [is_told] if is_union and len(args) > 1 else []
    for each in args:
        found += unions_of(each, is_told if is_union and len(args) == 1 else False)
    return found


def test_every_union_of_the_protocol_says_what_it_accepts():
    num_unions = 0
    for model in request_models():
        for name, hint in typing.get_type_hints(model, include_extras=True).items():
            if name in model.model_fields:
                told = unions_of(hint)
                num_unions += len(told)
                assert all(told), f"{model.__name__}.{name}: annotate the union with accepts(...)"
    assert num_unions >= 15


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"),
        (True, "true"),
        ("é", '"é"'),
        ("x" * 81, f'"{"x" * 80}"...'),
        (10**200, "an integer of more than 80 digits"),
        ([], "an empty list"),
        ([1], "a list"),
        ({"a": 1}, "an object"),
        (b"x", "a value of type bytes"),
        (float("inf"), "Infinity"),
    ],
)
def test_a_value_is_shown_as_json_and_cut(value, text):
    assert show_value(value) == text


def test_a_location_that_does_not_begin_in_the_body_is_kept():
    error = {"loc": ("stop", 0), "type": "string_type", "input": 3}
    assert describe_validation([error])[0] == "stop.0 must be a string, got 3"


CODES = typing.get_args(core_schema.ErrorType)
NUMBERS_OF_RULES = dict.fromkeys(
    ("gt", "ge", "lt", "le", "multiple_of", "min_length", "max_length", "expected", "pattern"), 7
)


@loop_over("code", [*CODES, "a_code_of_a_later_release"])
def test_no_code_of_pydantic_is_in_a_message(code):
    error = {"loc": ("body", "n"), "msg": "Input should be odd", "type": code, "input": 3}
    context = {**NUMBERS_OF_RULES, "expected_tags": "'a', 'b'", "error": "is wrong"}
    text, _ = describe_validation([{**error, "ctx": context}])
    assert "Input" not in text and "_" not in text and "(" not in text, text
    assert len(text.split()) >= 3, "a sentence"


def test_an_exception_of_a_validator_is_its_own_message():
    error = {"loc": ("body", "n"), "msg": "Value error, too odd", "type": "value_error", "input": 3}
    assert describe_validation([{**error, "ctx": {"error": ValueError("is too odd")}}])[0] == (
        "n is too odd"
    )
