"""Test finding parsers by name, plug-ins, and the request settings that parsers need."""

import re
from pathlib import Path

import pytest

from vllm.entrypoints.openai.tool_parsers import ToolParser, ToolParserManager
from vllm.entrypoints.openai.tool_parsers.manager import check_parser_flags
from vllm.entrypoints.shared.server_args import ServerArgs
from vllm.errors import ConfigError
from vllm.reasoning import ReasoningParserManager

DOCUMENTATION = Path(__file__).parents[4] / "docs" / "tool_calling.md"


@pytest.fixture(autouse=True)
def registry(monkeypatch):
    """Forget the names that a test registers, after the test."""
    monkeypatch.setattr(ToolParserManager, "parsers", dict(ToolParserManager.parsers))


def test_the_plug_in_of_the_documentation_adds_a_parser(tmp_path):
    [source] = re.findall(r"```python\n(.*?)```", DOCUMENTATION.read_text(), re.DOTALL)
    path = tmp_path / "plugin.py"
    path.write_text(source)
    check_parser_flags(ServerArgs(tool_parser_plugin=str(path), tool_call_parser="call_word"))
    parser = ToolParserManager.get("call_word")()
    found = parser.extract_tool_calls('Yes: CALL f {"a": [1]} CALL me')
    assert [(c.function.name, c.function.arguments) for c in found.tool_calls] == [
        ("f", '{"a": [1]}')
    ]
    assert found.content == "Yes:  CALL me"


def test_the_documentation_names_every_parser():
    text = DOCUMENTATION.read_text()
    for name in [*ToolParserManager.names(), *ReasoningParserManager.names()]:
        assert f"`{name}`" in text


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (None, "there is no file"),
        ("1 / 0", "ZeroDivisionError"),
        ("def", "SyntaxError"),
        ("a = 1", "registers no parser"),
    ],
)
def test_a_plug_in_that_cannot_be_used_is_told_of(tmp_path, source, message):
    path = tmp_path / "plugin.py"
    if source is not None:
        path.write_text(source)
    with pytest.raises(ConfigError, match=message):
        check_parser_flags(ServerArgs(tool_parser_plugin=str(path)))


def test_an_unknown_name_is_told_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"'hermse' is not one of .*granite4, hermes,"):
        check_parser_flags(ServerArgs(tool_call_parser="hermse"))
    with pytest.raises(ConfigError, match=r"'r1' is not one of .*deepseek_r1, .*granite, "):
        check_parser_flags(ServerArgs(reasoning_parser="r1"))
    with pytest.raises(TypeError, match="not a subclass of ToolParser"):
        ToolParserManager.register_module("x")(object)
    assert all(
        issubclass(ToolParserManager.get(name), ToolParser) for name in ToolParserManager.names()
    )


NAMES = ["f", "g"]


@pytest.mark.parametrize(
    ("name", "call", "answer"),
    [
        ("hermes", "<tool_call>{", "{"),
        ("mistral", "[TOOL_CALLS]f{", "["),
        ("llama3_json", '{"name": "g", "parameters": {', '{"name": "g"}'),
        ("llama3_json", '<|python_tag|>{"name"', '{"a": 1}'),
        ("granite", '[{"name":"f","arguments":{', "[{}]"),
        ("xlam", '{"name": "f", "arguments": {', "```json\n{"),
        ("pythonic", "[g(a=1)]", "[1]"),
        ("llama4_pythonic", "<|python_start|>[f(", "[f]"),
        ("phi4_mini", 'functools[{"', "functools is a module"),
        ("qwen3_coder", "<tool_call>", "<b>"),
        ("deepseek_v3", "<｜tool▁calls▁begin｜>", "<"),
    ],
)
def test_calls_begin_as_no_other_answer_does(name, call, answer):
    starts = ToolParserManager.get(name)(None).call_starts(NAMES)
    assert call.startswith(starts) and not answer.startswith(starts)
