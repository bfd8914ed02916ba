"""Test parsers that were written for vLLM, from their file to the answers of the server."""

from functools import partial

import pytest

from tests.entrypoints.openai.fakes import client_of
from tests.entrypoints.openai.test_chat import TOOLS, chat, engine_that_says, message_of, stream
from tests.entrypoints.openai.tool_parsers.formats import SAMPLES, extract
from vllm.entrypoints.openai.chat.serving import router
from vllm.entrypoints.openai.protocol import DeltaMessage
from vllm.entrypoints.openai.tool_parsers import ToolParser, ToolParserManager, utils
from vllm.entrypoints.openai.tool_parsers.manager import check_parser_flags
from vllm.entrypoints.shared.server_args import ServerArgs
from vllm.errors import ConfigError
from vllm.reasoning import ReasoningParser, ReasoningParserManager

TOOL_PLUGIN = '''
import json
from collections.abc import Sequence
from typing import Optional, Union

from vllm.entrypoints.openai.protocol import (ChatCompletionRequest, DeltaFunctionCall,
    DeltaMessage, DeltaToolCall, ExtractedToolCallInformation, FunctionCall, ToolCall)
from vllm.entrypoints.openai.tool_parsers.abstract_tool_parser import (
    ToolParser, ToolParserManager)
from vllm.logger import init_logger
from vllm.transformers_utils.tokenizer import AnyTokenizer

logger = init_logger(__name__)


@ToolParserManager.register_module(["bang", "bang2"])
class BangToolParser(ToolParser):
    """`!name{json}` at the end of a text."""

    def __init__(self, tokenizer: AnyTokenizer):
        super().__init__(tokenizer)
        assert self.model_tokenizer is tokenizer and len(self.vocab) > 10
        self.name_sent = False

    def adjust_request(self, request: ChatCompletionRequest) -> ChatCompletionRequest:
        request.skip_special_tokens = False
        return request

    def extract_tool_calls(self, model_output: str,
                           request: ChatCompletionRequest) -> ExtractedToolCallInformation:
        content, bang, call = model_output.partition("!")
        if "RAISE" in model_output:
            raise ValueError("this output is cursed")
        if not bang:
            return ExtractedToolCallInformation(tools_called=False, tool_calls=[],
                                                content=model_output)
        assert request.tools[0].function.name == "look"
        name, _, arguments = call.partition("{")
        return ExtractedToolCallInformation(
            tools_called=True, content=content or None,
            tool_calls=[ToolCall(type="function",
                                 function=FunctionCall(name=name, arguments="{" + arguments))])

    def extract_tool_calls_streaming(
        self, previous_text: str, current_text: str, delta_text: str,
        previous_token_ids: Sequence[int], current_token_ids: Sequence[int],
        delta_token_ids: Sequence[int], request: ChatCompletionRequest,
    ) -> Union[DeltaMessage, None]:
        assert previous_text + delta_text == current_text
        assert [*previous_token_ids, *delta_token_ids] == list(current_token_ids)
        assert self.model_tokenizer.decode(current_token_ids).startswith(current_text)
        if "RAISE" in current_text:
            raise ValueError("this output is cursed")
        if "!" not in current_text:
            return DeltaMessage(content=delta_text)
        call = current_text.partition("!")[2]
        name, brace, arguments = call.partition("{")
        if not brace:
            return None
        if not self.name_sent:
            self.name_sent = True
            self.current_tool_id = 0
            self.prev_tool_call_arr = [{"name": name, "arguments": {}}]
            return DeltaMessage(tool_calls=[DeltaToolCall(
                index=0, type="function",
                function=DeltaFunctionCall(
                    name=name, arguments="{" + arguments).model_dump(exclude_none=True))])
        try:
            self.prev_tool_call_arr[0]["arguments"] = json.loads("{" + arguments)
            return None  # the server sends what is left
        except ValueError:
            return DeltaMessage(tool_calls=[DeltaToolCall(
                index=0, function=DeltaFunctionCall(arguments=delta_text))])
'''

REASONING_PLUGIN = '''
from vllm.entrypoints.openai.protocol import DeltaMessage
from vllm.reasoning import ReasoningParser, ReasoningParserManager


@ReasoningParserManager.register_module("pipe")
class PipeReasoningParser(ReasoningParser):
    """Thoughts, a pipe, the answer."""

    def __init__(self, tokenizer):
        super().__init__(tokenizer)
        self.end = self.vocab["|"]

    def is_reasoning_end(self, input_ids):
        return self.end in input_ids

    def extract_content_ids(self, input_ids):
        return input_ids[list(input_ids).index(self.end) + 1:]

    def extract_reasoning_content(self, model_output, request):
        if "OOPS" in model_output:
            raise KeyError("oops")
        thoughts, pipe, answer = model_output.partition("|")
        return thoughts, answer if pipe else None

    def extract_reasoning_content_streaming(self, previous_text, current_text, delta_text,
            previous_token_ids, current_token_ids, delta_token_ids):
        if self.is_reasoning_end(previous_token_ids):
            return DeltaMessage(content=delta_text)
        if self.is_reasoning_end(delta_token_ids):
            thought, _, answer = delta_text.partition("|")
            return DeltaMessage(reasoning_content=thought or None, content=answer or None)
        return DeltaMessage(reasoning_content=delta_text)
'''
ARGUMENTS = '{"at": "Łódź"}'
CALL = {"name": "look", "arguments": ARGUMENTS}
FLAGS = {"enable_auto_tool_choice": True, "tool_call_parser": "bang", "reasoning_parser": "pipe"}


@pytest.fixture(autouse=True)
def plugins(monkeypatch, tmp_path):
    """Load both plug-ins, and remove the registered names after the test."""
    for manager in (ToolParserManager, ReasoningParserManager):
        monkeypatch.setattr(manager, "parsers", manager.snapshot())
    tools, reasoning = tmp_path / "tools.py", tmp_path / "reasoning.py"
    tools.write_text(TOOL_PLUGIN)
    reasoning.write_text(REASONING_PLUGIN)
    check_parser_flags(
        ServerArgs(tool_parser_plugin=str(tools), reasoning_parser_plugin=str(reasoning), **FLAGS)
    )


def ask(text, how, flags=FLAGS, **body):
    """Return (message, finish reason) of an answer, streamed or whole."""
    with client_of(engine_that_says(text), router, **flags) as client:
        if how == "streamed":
            return message_of(stream(client, **body))
        choice = chat(client, **body)["choices"][0]
    return choice["message"], choice["finish_reason"]


@pytest.mark.parametrize("how", ["whole", "streamed"])
@pytest.mark.parametrize(
    ("text", "reasoning", "content", "calls", "reason"),
    [
        (f"hm|So.!look{ARGUMENTS}", "hm", "So.", [CALL], "tool_calls"),
        (f"hm|!look{ARGUMENTS}", "hm", None, [CALL], "tool_calls"),
        ("a b|c d", "a b", "c d", [], "stop"),
    ],
)
def test_a_plug_in_reads_whole_answers_and_streams(how, text, reasoning, content, calls, reason):
    message, finish_reason = ask(text, how, tools=TOOLS)
    assert message["reasoning_content"] == reasoning
    assert (message["content"] or None) == content
    assert [call["function"] for call in message["tool_calls"]] == calls
    assert all(call["id"] and call["type"] == "function" for call in message["tool_calls"])
    assert finish_reason == reason


def test_a_plug_in_adjusts_its_request_and_is_not_asked_without_tools():
    engine = engine_that_says("a|b!c{}")
    with client_of(engine, router, **FLAGS) as client:
        chat(client, tools=TOOLS)
        message = chat(client)["choices"][0]["message"]
    assert [params.skip_special_tokens for _, params, _ in engine.seen] == [False, True]
    assert (message["content"], message["tool_calls"]) == ("b!c{}", [])


def test_without_thoughts_everything_is_the_answer():
    message, _ = ask("a|b", "whole", chat_template_kwargs={"enable_thinking": False})
    assert (message["reasoning_content"], message["content"]) == (None, "a|b")


@pytest.mark.parametrize(
    ("ends", "expected"), [(None, (None, "hm|yes", None)), (("|",), ("hm", "yes", ("|",)))]
)
def test_a_grammar_waits_for_the_end_of_thoughts_that_a_plug_in_names(ends, expected):
    if ends is not None:
        ReasoningParserManager.get("pipe").ends = ends
    engine = engine_that_says("hm|yes")
    with client_of(engine, router, **FLAGS) as client:
        message = chat(client, guided_choice=["yes"])["choices"][0]["message"]
    start = engine.seen[0][1].guided_decoding.start
    found = None if start is None else start.thought_ends
    assert (message["reasoning_content"], message["content"], found) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x|RAISE", "the tool parser 'bang' failed on this request: ValueError: this output is"),
        ("OOPS|x", "the reasoning parser 'pipe' failed on this request: KeyError: 'oops'"),
    ],
)
def test_a_plug_in_that_raises_fails_its_own_request_alone(text, message):
    said = [text]
    engine = engine_that_says("")
    with client_of(engine, router, **FLAGS) as client:
        for each in (text, "a|fine"):
            engine.core.reply = engine_that_says(each).core.reply
            body = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS}
            answer = client.post("/v1/chat/completions", json=body)
            said.append(answer.status_code)
            if answer.status_code != 200:
                assert message in answer.json()["error"]["message"]
    assert said == [text, 500, 200]


def test_a_plug_in_that_raises_in_a_stream_ends_it_with_the_error():
    with client_of(engine_that_says("x|RAISE it"), router, **FLAGS) as client:
        body = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS, "stream": True}
        text = client.post("/v1/chat/completions", json=body).text
    assert "the tool parser 'bang' failed" in text


def test_a_parser_of_ours_can_be_called_as_vllms_are():
    parser = ReasoningParserManager.get_reasoning_parser("qwen3")(None)
    assert parser.extract_reasoning_content("<think>a</think>b", None) == ("a", "b")
    found = ToolParserManager.get_tool_parser("hermes")(None).extract_tool_calls(
        '<tool_call>{"name": "f", "arguments": {}}</tool_call>', request=None
    )
    assert found.tools_called and found.tool_calls[0].function.name == "f"


def streamed(read, text, size):
    """Return the deltas of a parser that is called as in vLLM, with one token per character."""
    for end in range(0, len(text), size):
        before, now = text[:end], text[: end + size]
        ids = [list(range(len(part))) for part in (before, now, now[end:])]
        yield read(before, now, now[end:], *ids)


@pytest.mark.parametrize("name", SAMPLES)
def test_every_tool_parser_reads_streams_as_vllms_do(name):
    parser = ToolParserManager.get(name)()
    text = SAMPLES[name]
    content, expected = extract(name, text)
    # One parser reads all texts: it has to start again for each text.
    for size in (1, 7, len(text)):
        found, calls = "", []
        for delta in streamed(
            partial(parser.extract_tool_calls_streaming, request=None), text, size
        ):
            assert delta is None or isinstance(delta, DeltaMessage)
            found += (delta and delta.content) or ""
            for call in delta.tool_calls if delta else ():
                if call.id is not None:
                    calls.append([call.function.name, ""])
                assert call.index == len(calls) - 1
                calls[-1][1] += call.function.arguments
        held_back = [call for delta in parser.finish() for call in delta.tool_calls]
        for call in held_back:
            calls[-1][1] += call["function"]["arguments"]
        assert (found, calls) == (content, expected)
        if not held_back:
            assert parser.streamed_args_for_tool == [arguments for _, arguments in calls]
            assert [each["name"] for each in parser.prev_tool_call_arr] == ["weather", "time"]
            assert parser.current_tool_id == 1


@pytest.mark.parametrize("name", ["extract_reasoning_content", "extract_reasoning"])
def test_every_reasoning_parser_is_called_as_vllms_are(name):
    text = "<think>a < b</think>\n<c"
    for each in {*ReasoningParserManager.names()} - {"pipe"}:
        parser = ReasoningParserManager.get(each)()
        for size in (1, 5, len(text)):
            deltas = [*streamed(getattr(parser, f"{name}_streaming"), text, size)]
            parts = [(d.reasoning_content, d.content) for d in deltas if d is not None]
            parts.append(parser.finish())
            joined = tuple("".join(filter(None, kind)) or None for kind in zip(*parts, strict=True))
            assert joined == getattr(parser, name)(text, None) == parser.split(text), each
            assert all(d.reasoning == d.reasoning_content for d in deltas if d is not None)


DERIVED = """
from vllm.entrypoints.openai.tool_parsers import Hermes2ProToolParser, ToolParserManager
from vllm.reasoning import ReasoningParserManager

Qwen3 = ReasoningParserManager.get_reasoning_parser("qwen3")


@ToolParserManager.register_module("marked")
class Marked(Hermes2ProToolParser):
    markers, closing = ("<call>",), ("</call>",)


@ToolParserManager.register_module("loud")
class Loud(Hermes2ProToolParser):
    def extract_tool_calls(self, model_output, request):
        found = super().extract_tool_calls(model_output, request)
        for call in found.tool_calls:
            call.function.name = call.function.name.upper()
        return found

    def extract_tool_calls_streaming(self, *args, **kwargs):
        delta = super().extract_tool_calls_streaming(*args, **kwargs)
        for call in delta.tool_calls if delta else ():
            if call.function.name:
                call.function.name = call.function.name.upper()
        return delta


@ToolParserManager.register_module("whole")
class Whole(Loud):
    extract_tool_calls_streaming = Hermes2ProToolParser.extract_tool_calls_streaming


@ReasoningParserManager.register_module("same")
class Same(Qwen3):
    pass


@ReasoningParserManager.register_module("short")
class Short(Qwen3):
    def extract_reasoning_content(self, model_output, request):
        reasoning, content = super().extract_reasoning_content(model_output, request)
        return reasoning[:2], content
"""


@pytest.mark.parametrize(
    ("tools", "reasoning", "how", "name", "thoughts"),
    [
        ("marked", "same", "whole", "look", "hmm <"),
        ("marked", "same", "streamed", "look", "hmm <"),
        ("loud", "short", "whole", "LOOK", "hm"),
        ("loud", "short", "streamed", "LOOK", "hmm <"),
        ("whole", "short", "whole", "LOOK", "hm"),
        ("whole", "short", "streamed", "look", "hmm <"),
    ],
)
def test_a_plug_in_can_be_derived_from_a_parser_of_ours(
    tmp_path, tools, reasoning, how, name, thoughts
):
    path = tmp_path / "derived.py"
    path.write_text(DERIVED)
    check_parser_flags(ServerArgs(tool_parser_plugin=str(path)))
    tag = "call" if tools == "marked" else "tool_call"
    call = f'<{tag}>{{"name": "look", "arguments": {ARGUMENTS}}}</{tag}>'
    flags = {**FLAGS, "tool_call_parser": tools, "reasoning_parser": reasoning}
    message, _ = ask(f"<think>hmm <</think>So.{call} <", how, flags, tools=TOOLS)
    assert message["reasoning_content"] == thoughts
    assert message["content"] == "So. <"
    assert [call["function"] for call in message["tool_calls"]] == [
        {"name": name, "arguments": ARGUMENTS}
    ]


def test_a_class_can_be_registered_in_every_way():
    class Reads(ToolParser):
        def extract_tool_calls(self, model_output, request):
            raise NotImplementedError

    class ReadsNothing(ToolParser):
        pass

    class Thinks(ReasoningParser):
        starts = ("<thought>",)

    assert ToolParserManager.register_module()(Reads) is Reads
    assert ToolParserManager.register_module("b", force=True, module=Reads) is Reads
    assert ToolParserManager.get("Reads") is ToolParserManager.get("b") is Reads
    assert ReasoningParserManager.register_module(["c"], module=Thinks) is Thinks
    with pytest.raises(KeyError, match="registered already"):
        ToolParserManager.register_module("b", force=False, module=Reads)
    with pytest.raises(TypeError, match="must define read_calls or extract_tool_calls"):
        ToolParserManager.register_module("d")(ReadsNothing)


@pytest.mark.parametrize(
    "text", ["raise ValueError('x')", "import nothing_of_this_name", "x = 1", "def"]
)
def test_a_reasoning_plug_in_that_cannot_be_used_is_told_of_before_anything_is_served(
    tmp_path, text
):
    path = tmp_path / "broken.py"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"reasoning_parser_plugin: .*broken\.py"):
        check_parser_flags(ServerArgs(reasoning_parser_plugin=str(path)))


def test_the_helpers_that_plug_ins_import():
    assert utils.extract_intermediate_diff('{"a": "xyz"}', '{"a": "x"}') == "yz"
    assert utils.extract_intermediate_diff("abc", "abc") == ""
    assert utils.find_common_suffix("ab}]", "cd}]") == "}]"
    assert utils.find_all_indices("aXbX", "X") == [1, 3]
    assert [utils.is_complete_json(t) for t in ('{"a": 1}', '{"a": 1', "")] == [True, False, False]
    assert utils.consume_space(1, "a  b") == 3


def test_enable_reasoning_needs_a_parser():
    assert ServerArgs(enable_reasoning=True, reasoning_parser="qwen3").enable_reasoning
    with pytest.raises(ConfigError, match="add --reasoning-parser NAME"):
        ServerArgs(enable_reasoning=True)
