"""Outputs in the form of each parser, and a way to read them in pieces."""

import json

from vllm.entrypoints.openai.tool_parsers import ToolParserManager

WEATHER = '{"name": "weather", "arguments": {"city": "Łódź", "days": [1, {"a": "}]\\"<"}]}}'
TIME = '{"name": "time", "arguments": {}}'
CALLS = [
    ("weather", {"city": "Łódź", "days": [1, {"a": '}]"<'}]}),
    ("time", {}),
]
DEEPSEEK = """<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather
```json
{"city": "Łódź", "days": [1, {"a": "}]\\"<"}]}
```<｜tool▁call▁end｜>
<｜tool▁call▁begin｜>time<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"""
QWEN3_CODER = """<tool_call>
<function=weather>
<parameter=city>
Łódź
</parameter>
<parameter=days>
[1, {"a": "}]\\"<"}]
</parameter>
</function>
</tool_call>
<tool_call><function=time></function></tool_call>"""
PYTHONIC = """[weather(city="Łódź", days=[1, {'a': '}]"<'}]), time()]"""

# (parser, output). Each makes the same two calls, and has no content.
OUTPUTS = [
    ("hermes", f"<tool_call>\n{WEATHER}\n</tool_call>\n<tool_call>{TIME}</tool_call>"),
    ("qwen", f"\n\n<tool_call>{WEATHER}</tool_call><tool_call>{TIME}</tool_call>\n"),
    ("llama3_json", f"{WEATHER}; {TIME}"),
    ("llama4_json", f"<|python_tag|>{WEATHER};{TIME}".replace("arguments", "parameters")),
    ("pythonic", PYTHONIC),
    ("llama4_pythonic", f"<|python_start|>{PYTHONIC}<|python_end|>"),
    ("llama4_pythonic", PYTHONIC),
    ("mistral", f"[TOOL_CALLS] [{WEATHER}, {TIME}]"),
    (
        "mistral",
        '[TOOL_CALLS]weather{"city": "Łódź", "days": [1, {"a": "}]\\"<"}]}'
        "[TOOL_CALLS]time[CALL_ID]123456789[ARGS]{}",
    ),
    ("granite", f"<|tool_call|>[{WEATHER}, {TIME}]"),
    ("granite", f"<tool_call>[{WEATHER}, {TIME}]"),
    ("granite", f"[{WEATHER}, {TIME}]"),
    ("granite-20b-fc", f"<function_call> {WEATHER}\n<function_call> {TIME}"),
    (
        "internlm",
        f"<|action_start|><|plugin|>\n{WEATHER}<|action_end|>\n"
        f"<|action_start|> <|plugin|>\n{TIME}\n<|action_end|>",
    ),
    ("jamba", f"<tool_calls>[\n{WEATHER},\n{TIME}\n]</tool_calls>"),
    ("deepseek_v3", DEEPSEEK),
    ("qwen3_coder", QWEN3_CODER),
    ("xlam", f"[{WEATHER}, {TIME}]"),
    ("xlam", f"```json\n[{WEATHER}, {TIME}]\n```"),
    ("xlam", f"[TOOL_CALLS][{WEATHER}, {TIME}]"),
    ("xlam", f"<tool_call>[{WEATHER}, {TIME}]</tool_call>"),
    ("phi4_mini", f"functools[{WEATHER}, {TIME}]"),
    ("phi4_mini_json", f"functools[{WEATHER}, {TIME}]"),
]
SAMPLES = dict(OUTPUTS)
"""One output of each parser."""


def read(name, pieces):
    """(content, [[name, arguments], ...]) of an output that comes in pieces."""
    parser = ToolParserManager.get(name)()
    deltas = [delta for piece in pieces for delta in parser.feed(piece)] + parser.finish()
    calls = []
    for delta in deltas:
        for call in delta.tool_calls:
            if call["index"] == len(calls):
                assert call["id"] and call["type"] == "function"
                calls.append([call["function"]["name"], ""])
            assert call["index"] == len(calls) - 1
            calls[-1][1] += call["function"]["arguments"]
    return "".join(delta.content or "" for delta in deltas), calls


def extract(name, text, request=None):
    """The same of a whole output."""
    found = ToolParserManager.get(name)().extract_tool_calls(text, request)
    assert found.tools_called == bool(found.tool_calls)
    calls = [[call.function.name, call.function.arguments] for call in found.tool_calls]
    return found.content or "", calls


def decoded(calls):
    return [(name, json.loads(arguments)) for name, arguments in calls]
