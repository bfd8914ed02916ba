"""Test conversations: accepted values, content as templates get it, and refused values."""

import copy

import pytest

from tests.engine.tokenizers_for_tests import byte_level, metaspace
from tests.loops import loop_over
from vllm.entrypoints.chat_utils import ChatOptions, render_chat
from vllm.entrypoints.conversation.messages import read_messages
from vllm.errors import RequestError

STRING_TEMPLATE = "{% for m in messages %}{{ m.role }}:{{ m['content'] }};{% endfor %}"
PARTS_TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:"
    "{% for part in m.content %}({{ part.text }}){% endfor %};{% endfor %}"
)
USER = {"role": "user", "content": "hi"}


def render(messages, template=STRING_TEMPLATE, **options):
    return render_chat(byte_level(), messages, ChatOptions(chat_template=template, **options))


def test_the_template_of_the_tokenizer_is_used_unless_another_is_given():
    assert render_chat(byte_level(), [USER], ChatOptions()).endswith("hi<|end|><|assistant|>")
    assert render([USER]) == "user:hi;"


def test_without_any_template_the_message_says_what_to_do():
    with pytest.raises(RequestError, match="must provide a chat template"):
        render_chat(metaspace(), [USER], ChatOptions())
    assert render_chat(metaspace(), [USER], ChatOptions(chat_template="{{ 1 + 1 }}")) == "2"


@pytest.mark.parametrize(
    "content",
    [
        "a\nb",
        [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
        ["a", {"text": "b"}],
        [{"type": "input_text", "text": "a"}, {"type": "refusal", "refusal": "b"}],
    ],
)
def test_parts_of_text_are_joined_by_newlines_for_templates_that_take_a_string(content):
    assert render([{"role": "user", "content": content}]) == "user:a\nb;"


def test_a_template_that_loops_over_parts_gets_parts_also_for_a_string():
    assert render([USER], PARTS_TEMPLATE) == "user:(hi);"
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render([{"role": "user", "content": parts}], PARTS_TEMPLATE) == "user:(a)(b);"


def test_the_format_can_be_forced():
    assert render([USER], PARTS_TEMPLATE, content_format="string") == "user:()();"
    forced = render([USER], "{{ messages[0].content[0].type }}", content_format="openai")
    assert forced == "text"


def test_the_messages_of_the_caller_are_not_changed():
    call = {"id": "1", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages = [USER, {"role": "assistant", "content": ["a"], "tool_calls": [call]}]
    before = copy.deepcopy(messages)
    render(messages, PARTS_TEMPLATE)
    assert messages == before


@loop_over(
    "content, text",
    [
        ("a", "a"),
        ([], ""),
        ({"a": "é"}, '{"a": "é"}'),
        ([{"a": 1}, 2], '[{"a": 1}, 2]'),
        (3, "3"),
        (False, "false"),
        ([{"text": "a", "score": 1}], '[{"text": "a", "score": 1}]'),
        ({"type": "rain", "mm": 2}, '{"type": "rain", "mm": 2}'),
        (["a", {"type": "text", "text": "b"}], "a\nb"),
        ({"type": "text", "text": "b"}, "b"),
        ([{"text": "b"}], "b"),
    ],
)
def test_any_result_of_a_tool_is_text_for_the_model(content, text):
    for message in ({"role": "tool", "tool_call_id": "1"}, {"role": "function", "name": "f"}):
        template = "{% for m in messages %}{{ m.content }}{% endfor %}"
        assert render([USER, {**message, "content": content}], template) == "hi" + text


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages must not be empty"),
        ("hi", 'messages must be a list of messages, got "hi"'),
        (USER, "messages must be a list of messages, got an object"),
        (["hi"], 'messages[0] must be an object with role and content, got "hi"'),
        ([{"content": "a"}], "messages[0] needs a role, got null"),
        ([USER, {"role": "user"}], "messages[1] has no content"),
        ([{"role": "user", "content": 5}], "messages[0].content must be a string or a list"),
        (
            [{"role": "user", "content": [5]}],
            'messages[0].content[0] must be an object with a type, such as {"type": "text", '
            '"text": ...}, got 5',
        ),
        ([{"role": "user", "content": [{"type": None}]}], '"text": ...}, got the type null'),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            'must have the type "text", as this model reads text only; got "image_url"',
        ),
        (
            [{"role": "user", "content": [{"type": "text"}]}],
            "messages[0].content[0].text must be a string, got null",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}],
            "messages[0].tool_calls[0].function needs a name",
        ),
        (
            [{"role": "assistant", "tool_calls": ["f"]}],
            "messages[0].tool_calls[0] must be an object with a function",
        ),
        (
            [{"role": "assistant", "tool_calls": {"function": {"name": "f"}}}],
            "messages[0].tool_calls must be a list, got an object",
        ),
        (
            [{"role": "assistant", "function_call": {"arguments": "{}"}}],
            "messages[0].function_call needs a name",
        ),
    ],
)
def test_a_malformed_conversation_is_refused_with_the_place(messages, message):
    with pytest.raises(RequestError) as failure:
        read_messages(messages)
    assert message in str(failure.value)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% for", "cannot render this conversation"),
        ("{{ nothing.at.all }}", "cannot render this conversation"),
        ("{{ 1 / 0 }}", "division by zero"),
    ],
)
def test_what_the_template_refuses_is_an_error_of_the_request(template, message):
    with pytest.raises(RequestError, match=message):
        render([USER], template)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"continue_final_message": True}, "cannot both be true"),
        ({"content_format": "xml"}, "must be auto, string or openai, got 'xml'"),
        ({"template_kwargs": {"tokenize": True}}, "must not contain tokenize"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, message):
    with pytest.raises(RequestError, match=message):
        ChatOptions(**options)
