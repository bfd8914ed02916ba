"""Test each format of tool calls, as models write it."""

import json
from types import SimpleNamespace

import pytest

from tests.entrypoints.openai.tool_parsers.formats import CALLS, OUTPUTS, TIME, decoded, extract
from tests.loops import loop_over
from vllm.entrypoints.openai.tool_parsers import ToolParserManager


@pytest.mark.parametrize(("name", "text"), OUTPUTS)
def test_calls_are_found_and_nothing_else_is_content(name, text):
    content, calls = extract(name, text)
    assert decoded(calls) == CALLS
    assert content == ""


@loop_over(
    "name, text, content, calls",
    [
        # Content before and after calls.
        ("hermes", f"Sure.\n<tool_call>{TIME}</tool_call>\nDone.", "Sure.\n\nDone.", ["time"]),
        ("mistral", f"Sure. [TOOL_CALLS][{TIME}]", "Sure. ", ["time"]),
        ("xlam", f"<think>Hm.</think>\n[{TIME}]", "<think>Hm.</think>", ["time"]),
        # End markers that models forget or repeat.
        ("hermes", f"<tool_call>{TIME}", "", ["time"]),
        ("hermes", '<tool_call>{"name": "time", "arguments": {}</tool_call>', "", ["time"]),
        ("hermes", f"<tool_call>{TIME}}}</tool_call>", "}</tool_call>", ["time"]),
        ("hermes", f"<tool_call>\n[\n{TIME},\n{TIME}\n]\n</tool_call>", "", ["time", "time"]),
        ("granite", f"<tool_call>[{TIME}", "", ["time"]),
        ("qwen3_coder", "<function=f><parameter=a>1</function>", "", ["f"]),
        ("jamba", f"<tool_calls>[{TIME}, oops]</tool_calls>", ", oops]</tool_calls>", ["time"]),
        ("minimax", f"<tool_calls>{TIME}\n{TIME}", "", ["time", "time"]),
        ("granite", f"<tool_call>{TIME}</tool_call>", "", ["time"]),
        ("glm45", "A.\n<tool_call>f\n</tool_call>\nB.", "A.\n\nB.", ["f"]),
        ("glm45", "<tool_call>\nf\n<arg_key>a</arg_key><arg_value>1</tool_call>", "", ["f"]),
        ("minimax_m2", 'A.<invoke name="f"></invoke>\nB.', "A.\nB.", ["f"]),
        ("kimi_k2", "A.<|tool_call_begin|>f<|tool_call_argument_begin|>{}", "A.", ["f"]),
        (
            "kimi_k2",
            "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|>B.",
            "B.",
            ["f"],
        ),
        ("olmo3", "A.<function_calls>f(a=null)\ng(b=true), and", "A., and", ["f", "g"]),
        ("gigachat3", f"A.<|message_sep|>\n\nfunction call<|role_sep|>\n{TIME}", "A.", ["time"]),
        ("gemma4", "A.<|tool_call>call:f{a:{b:true},c:None}<tool_call|>B.", "A.B.", ["f"]),
        ("apertus", 'A.\n<|tools_prefix|>[{"f": {}}]<|tools_suffix|>\nB.', "A.\n\nB.", ["f"]),
        ("apertus", '<|tools_prefix|>[{"name": {}}, {"arguments": {}}]', "", ["name", "arguments"]),
        ("apertus", '<|tools_prefix|>[{"f": {}, "g": {}}]', ', "g": {}}]', ["f"]),
        ("pythonic", "[f(a=1), and so on", ", and so on", ["f"]),
        # A key that is unknown; keys in the other order; no arguments; arguments inside a string.
        (
            "llama3_json",
            '{"type": "function", "parameters": {}, "x": [1, "]"], "name": "f"}',
            "",
            ["f"],
        ),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>', "", ["f"]),
        ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', "", ["f"]),
        ("hermes", '<tool_call>{"name": "f", "arguments": ""}</tool_call>', "", ["f"]),
        ("mistral", '[TOOL_CALLS]{"name": "f", "arguments": "{\\"a\\": 1}"}', "", ["f"]),
    ],
)
def test_variations(name, text, content, calls):
    found, found_calls = extract(name, text)
    assert (found, [call for call, _ in found_calls]) == (content, calls)
    assert all(isinstance(arguments, dict) for _, arguments in decoded(found_calls))


@loop_over(
    "name, text",
    [
        ("hermes", "<tool_call>"),
        ("hermes", "<tool_call>not JSON</tool_call>"),
        ("hermes", "<tool_call>{}</tool_call>"),
        ("hermes", '<tool_call>{"name": 1, "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": "a=1"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": "\\ud800"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "argum'),
        ("hermes", "  </tool_call> "),
        ("hermes", " \n"),
        ("llama3_json", '{"name": "Bob"}'),
        ("llama3_json", '[{"name": "Bob"}, 1]'),
        ("llama3_json", "[1, 2]"),
        ("phi4_mini", "<|tool_call|>no<|/tool_call|>"),
        ("llama3_json", 'See {"name": "f", "parameters": {}}'),
        ("granite", "[1, 2]"),
        ("granite", "[]"),
        ("internlm", f"<|action_start|>{TIME}"),
        ("jamba", "<tool_calls>[]</tool_calls>"),
        ("mistral", "[TOOL_CALLS]weather in Łódź"),
        ("deepseek_v3", "<｜tool▁calls▁begin｜><｜tool▁calls▁end｜>"),
        ("deepseek_v3", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\nno"),
        ("qwen3_coder", "<tool_call><function=f><parameter=a"),
        ("qwen3_coder", "<tool_call><function=f g></function>"),
        ("glm45", "<tool_call> is how calls begin</tool_call>"),
        ("glm45", "<tool_call>f<arg_key>a</arg_key>1</tool_call>"),
        ("glm45", f"<tool_call>{TIME}</tool_call>"),
        ("longcat", "<longcat_tool_call>{}</longcat_tool_call>"),
        ("minimax_m2", "<minimax:tool_call>\n</minimax:tool_call>"),
        ("minimax_m2", '<invoke name="">'),
        ("step3", "<｜tool_calls_begin｜><｜tool_calls_end｜>"),
        ("deepseek_v32", "<｜DSML｜function_calls></｜DSML｜function_calls>"),
        ("kimi_k2", "<|tool_calls_section_begin|><|tool_calls_section_end|>"),
        ("kimi_k2", "<|tool_call_begin|>functions.f:0{}<|tool_call_end|>"),
        ("functiongemma", "<start_function_call>f{}<end_function_call>"),
        ("gemma4", "<|tool_call>f{}<tool_call|>"),
        ("gemma4", "<start_function_call>call:f{}<end_function_call>"),
        ("apertus", "<|tools_prefix|>[]<|tools_suffix|>"),
        ("apertus", "<|tools_prefix|>[{}]<|tools_suffix|>"),
        ("apertus", '<|tools_prefix|>[{"f": 1}]<|tools_suffix|>'),
        ("apertus", '<|tools_prefix|>[{"": {}}]<|tools_suffix|>'),
        ("nemotron_json", "<TOOLCALL>[]</TOOLCALL>"),
        ("gigachat3", "<|message_sep|>\n\nfunction call"),
        ("gigachat3", "function call<|role_sep|>\nno"),
        ("olmo3", "<function_calls>\n</function_calls>"),
        ("cohere_command3", f"<|START_ACTION|>[{TIME}]<|END_ACTION|>"),
        ("qwen3_coder", "<tool_call><function=f>text"),
        ("pythonic", "[1, 2, 3]"),
        ("pythonic", "```tool_code\nprint(1)\n```"),
        ("pythonic", "[f(1)]"),
        ("pythonic", "[f(a=g())]"),
        ("pythonic", "[f(a=__import__('os').system('x'))]"),
        ("pythonic", "[f(a=lambda: 0)]"),
        ("llama4_pythonic", "<|python_start|><|python_end|>"),
        ("phi4_mini", "functools.partial(f)[0]"),
        ("xlam", '```json\n{"name": "Bob"}\n```'),
        ("xlam", "```python\nprint()\n```"),
    ],
)
def test_what_is_no_call_is_content_as_it_was_written(name, text):
    assert extract(name, text) == (text, [])


def test_arguments_are_passed_on_as_they_were_written():
    arguments = '{ "a" :1e2,\n"b":"\\u00e9" , "c": [ ] }'
    text = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
    assert extract("hermes", text)[1] == [["f", arguments]]


def test_parameters_get_the_types_of_the_request_s_tool():
    properties = {"zip": {"type": "string"}, "days": {"type": "integer"}}
    function = SimpleNamespace(name="f", parameters={"properties": properties})
    text = "<function=f>" + "".join(
        f"<parameter={key}>\n{value}\n</parameter>"
        for key, value in [("zip", "01234"), ("days", "3"), ("on", "True"), ("x", "NaN")]
    )
    for tool in (SimpleNamespace(function=function), {"function": vars(function)}):
        _, calls = extract("qwen3_coder", text + "</function>", SimpleNamespace(tools=[tool]))
        assert decoded(calls) == [("f", {"zip": "01234", "days": 3, "on": "True", "x": "NaN"})]


@pytest.mark.parametrize(
    ("text", "arguments", "rest"),
    [
        ("<parameter=zip>\n01\n\n", '{"zip": "01\\n', ""),
        ("<parameter=zip>\n01\n</parameter>", '{"zip": "01"', ""),
        ("<parameter=days>\n3", '{"days": ', "3"),
        ("<parameter=days>3</parameter><parameter=zip>0", '{"days": 3, "zip": "0', ""),
        ("<parameter=x>\nNaN", '{"x": "NaN', ""),
    ],
)
def test_text_between_tags_streams_as_it_grows_and_a_cut_call_is_incomplete(text, arguments, rest):
    properties = {"zip": {"type": "string"}, "days": {"type": "integer"}}
    request = {"function": {"name": "f", "parameters": {"properties": properties}}}
    parser = ToolParserManager.get("qwen3_coder")()
    parser.adjust_request(SimpleNamespace(tools=[request]))
    deltas = parser.feed("<tool_call><function=f>" + text)
    found = [call["function"]["arguments"] for delta in deltas for call in delta.tool_calls]
    assert "".join(found) == arguments
    last = [call["function"]["arguments"] for d in parser.finish() for call in d.tool_calls]
    assert "".join(last) == rest


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", {}),
        ("a=1,", {"a": 1}),
        ("a=-1.5, b=+2, c=1_000, d=.5, e=1e3", {"a": -1.5, "b": 2, "c": 1000, "d": 0.5, "e": 1e3}),
        ("a=True, b=None, c=false, d=null", {"a": True, "b": None, "c": False, "d": None}),
        ("a=[], b={}, c=(), d=(1,), e=(1, 2)", {"a": [], "b": {}, "c": [], "d": [1], "e": [1, 2]}),
        ("a={'x': 1, 2: [{}], None: 3}", {"a": {"x": 1, "2": [{}], "null": 3}}),
        (
            r"""a='it\'s', b="\"\n", c='\x41\u00e9\101\q'""",
            {"a": "it's", "b": '"\n', "c": "AéA\\q"},
        ),
        ("a='two\nlines', b='''three''', c=''", {"a": "two\nlines", "b": "three", "c": ""}),
    ],
)
def test_python_literals_become_json(arguments, expected):
    assert decoded(extract("pythonic", f"[f({arguments})]")[1]) == [("f", expected)]


@pytest.mark.parametrize(
    "arguments",
    [
        *("1", "a", "a=", "a=b", "a=(1)", "a={1}", "a=1 b=2", "a==1", "a=[1", "a=1]", "a=[1,,2]"),
        *(",", "a=1_0e999", "a='x", "a=1.2.3", "a=f'x'", "a='x' 'y'", "a=1+1"),
        "a=" + "1" * 5000 + "_0",
    ],
)
def test_what_is_no_python_literal_makes_no_call(arguments):
    text = f"[f({arguments})]"
    assert extract("pythonic", text) == (text, [])


def test_an_id_that_the_model_wrote_is_kept():
    text = dict(OUTPUTS)["kimi_k2"]
    calls = ToolParserManager.get("kimi_k2")().extract_tool_calls(text).tool_calls
    assert [call.id for call in calls] == ["functions.weather:0", "functions.time:1"]


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        (
            "a:1,b:-2.5e3,c:true,d:null,e:word",
            '{"a": 1, "b": -2.5e3, "c": true, "d": null, "e": "word"}',
        ),
        ("a:{b:[<escape>x<escape>,[]],c:{}}", '{"a": {"b": ["x", []], "c": {}}}'),
        ('a:<escape>"\n{,}<escape>', '{"a": "\\"\\n{,}"}'),
        ("a:<escape>cut", '{"a": "cut}'),
        ("a:1 b:2", '{"a": 1'),
        ("a", "{"),
    ],
)
def test_functiongemma_values_become_json(text, arguments):
    output = f"<start_function_call>call:f{{{text}}}<end_function_call>"
    [[name, found]] = extract("functiongemma", output)[1]
    assert (name, found) == ("f", arguments)


def test_ids_differ_and_have_the_form_that_templates_ask_for():
    for name, text in OUTPUTS:
        calls = ToolParserManager.get(name)().extract_tool_calls(text).tool_calls
        assert len({call.id for call in calls}) == 2
        if name == "mistral":
            assert all(len(call.id) == 9 and call.id.isalnum() for call in calls)


def test_arguments_stream_as_they_grow():
    parser = ToolParserManager.get("hermes")()
    deltas = [
        parser.feed(piece)
        for piece in ('<tool_call>{"name": "f", "arguments": ', '{"a": "on', "e", ' two"}', "}")
    ]
    assert deltas[0] == []
    first = deltas[1][0].tool_calls[0]
    assert (first["function"], first["type"]) == (
        {"name": "f", "arguments": '{"a": "on'},
        "function",
    )
    assert deltas[2][0].tool_calls == [{"index": 0, "function": {"arguments": "e"}}]
    assert json.loads(first["function"]["arguments"] + "e" + ' two"}') == {"a": "one two"}
    assert deltas[4] == [] == parser.finish()


def test_a_marker_is_held_back_until_it_is_certain():
    parser = ToolParserManager.get("hermes")()
    assert [d.content for piece in ("a<", "b<tool", "<tool_", "x") for d in parser.feed(piece)] == [
        "a",
        "<b",
        "<tool",
        "<tool_x",
    ]
