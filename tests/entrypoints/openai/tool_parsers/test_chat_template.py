"""Test the example template: it describes tools to a model, and shows calls in the format that the
parser reads.
"""

from pathlib import Path

from transformers import AutoTokenizer

from tests.entrypoints.openai.tool_parsers.formats import decoded, extract
from vllm.assets import BUNDLED_MODEL
from vllm.entrypoints.chat_utils import ChatOptions, render_chat

TEMPLATE = Path(__file__).parents[4] / "examples/online_serving/tool_chat_template_hermes.jinja"
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALLS = [("weather", {"city": "Łódź"}), ("weather", {"city": 'the "end" </tool_call>'})]
CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": "I look.",
        "tool_calls": [{"function": {"name": name, "arguments": text}} for name, text in CALLS],
    },
    {"role": "tool", "content": "Sun"},
    {"role": "tool", "content": "Rain"},
    {"role": "user", "content": "Thanks."},
]


def render(messages, tools):
    options = ChatOptions(chat_template=TEMPLATE.read_text(), tools=tools)
    return render_chat(AutoTokenizer.from_pretrained(BUNDLED_MODEL), messages, options)


def test_turns_are_marked_and_tools_are_told_of():
    text = render(CONVERSATION, [TOOL])
    turns = [turn.split("\n", 1) for turn in text.split("<|im_start|>")[1:]]
    roles = [role for role, _ in turns]
    assert roles == ["system", "user", "assistant", "tool", "user", "assistant"]
    assert '"name": "weather"' in turns[0][1] and turns[0][1].startswith("Be brief.\n")
    assert turns[3][1].count("<tool_response>") == 2
    assert all(body.endswith("<|im_end|>\n") for _, body in turns[:-1])
    assert "tools" not in render(CONVERSATION[1:2], None)


def test_calls_of_earlier_turns_have_the_form_that_the_parser_reads():
    text = render(CONVERSATION, [TOOL])
    answer = text.split("<|im_start|>assistant\n")[1].split("<|im_end|>")[0]
    content, calls = extract("hermes", answer)
    assert (content, decoded(calls)) == ("I look.\n", CALLS)
