"""Outputs in the format of each parser, and functions that read them in pieces or as a whole."""

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
DAYS = '[1, {"a": "}]\\"<"}]'
ARGUMENTS = f'{{"city": "Łódź", "days": {DAYS}}}'
KIMI = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
    f"<|tool_call_argument_begin|>{ARGUMENTS}<|tool_call_end|>\n<|tool_call_begin|>functions.time:1"
    "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>"
)
MINIMAX_M2 = f"""<minimax:tool_call>
<invoke name="weather">
<parameter name="city">Łódź</parameter>
<parameter name="days">{DAYS}</parameter>
</invoke>
<invoke name="time">
</invoke>
</minimax:tool_call>"""
DSML = f"""<｜DSML｜function_calls>
<｜DSML｜invoke name="weather">
<｜DSML｜parameter name="city" string="true">Łódź</｜DSML｜parameter>
<｜DSML｜parameter name="days" string="false">{DAYS}</｜DSML｜parameter>
</｜DSML｜invoke>
<｜DSML｜invoke name="time">
</｜DSML｜invoke>
</｜DSML｜function_calls>"""
STEP3 = (
    "<｜tool_calls_begin｜>\n<｜tool_call_begin｜>function<｜tool_sep｜>"
    '<steptml:invoke name="weather"><steptml:parameter name="city">Łódź</steptml:parameter>'
    f'<steptml:parameter name="days">{DAYS}</steptml:parameter></steptml:invoke>'
    "<｜tool_call_end｜>\n"
    '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="time"></steptml:invoke>'
    "<｜tool_call_end｜>\n<｜tool_calls_end｜>"
)
GLM = f"""<tool_call>weather
<arg_key>city</arg_key>
<arg_value>Łódź</arg_value>
<arg_key>days</arg_key>
<arg_value>{DAYS}</arg_value>
</tool_call>
<tool_call>time
</tool_call>"""
GIGACHAT3 = "<|message_sep|>\n\nfunction call<|role_sep|>\n{}"
HARMONY = (
    f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{ARGUMENTS}<|call|>"
    "<|start|>assistant to=functions.time<|channel|>commentary json<|message|>{}"
)
FUNCTIONGEMMA = (
    "<start_function_call>call:weather{city:<escape>Łódź<escape>,"
    'days:[1,{a:<escape>}]"<<escape>}]}<end_function_call>'
    "<start_function_call>call:time{}<end_function_call>"
)
PYTHONIC = """[weather(city="Łódź", days=[1, {'a': '}]"<'}]), time()]"""

# (parser, output). Each output makes the same two calls, and has no content.
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
    (
        "cohere_command3",
        f"<|START_ACTION|>[\n{WEATHER},\n{TIME}\n]<|END_ACTION|>".replace("name", "tool_name"),
    ),
    (
        "deepseek_v31",
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{ARGUMENTS}<｜tool▁call▁end｜>"
        "<｜tool▁call▁begin｜>time<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    ("deepseek_v32", DSML),
    ("deepseek_v4", DSML.replace("function_calls", "tool_calls")),
    ("ernie45", f"<tool_call>\n{WEATHER}\n</tool_call>\n\n<tool_call>\n{TIME}\n</tool_call>\n"),
    ("functiongemma", FUNCTIONGEMMA),
    (
        "gemma4",
        FUNCTIONGEMMA.replace("<start_function_call>", "<|tool_call>")
        .replace("<end_function_call>", "<tool_call|>")
        .replace("<escape>", '<|"|>'),
    ),
    ("gigachat3", GIGACHAT3.format(WEATHER) + GIGACHAT3.format(TIME)),
    ("gigachat3", f"function call<|role_sep|>\n{WEATHER}function call<|role_sep|>\n{TIME}"),
    ("glm45", GLM),
    ("glm47", GLM.replace("\n", "")),
    ("granite4", f"<tool_call>{WEATHER}</tool_call>\n<tool_call>{TIME}</tool_call>"),
    ("hunyuan_a13b", f"<tool_calls>[{WEATHER}, {TIME}]</tool_calls>"),
    ("kimi_k2", KIMI),
    ("lfm2", f"<|tool_call_start|>{PYTHONIC}<|tool_call_end|>"),
    (
        "longcat",
        f"<longcat_tool_call>\n{WEATHER}\n</longcat_tool_call>\n"
        f"<longcat_tool_call>\n{TIME}\n</longcat_tool_call>",
    ),
    (
        "longcat",
        GLM.replace("<tool", "<longcat_tool")
        .replace("</tool", "</longcat_tool")
        .replace("arg_", "longcat_arg_"),
    ),
    ("apertus", f'<|tools_prefix|>[{{"weather": {ARGUMENTS}}}, {{"time": {{}}}}]<|tools_suffix|>'),
    ("nemotron_json", f"<TOOLCALL>[{WEATHER}, {TIME}]</TOOLCALL>"),
    ("nemotron_v3", QWEN3_CODER),
    ("minimax", f"<tool_calls>\n{WEATHER}\n{TIME}\n</tool_calls>"),
    ("minimax_m2", MINIMAX_M2),
    ("olmo3", "<function_calls>\n" + PYTHONIC[1:-1].replace("), ", ")\n") + "\n</function_calls>"),
    ("openai", HARMONY),
    (
        "openai",
        HARMONY.replace(
            "<|channel|>commentary to=functions.weather",
            " to=functions.weather<|channel|>commentary",
            1,
        ),
    ),
    ("qwen3_xml", QWEN3_CODER),
    ("seed_oss", QWEN3_CODER.replace("tool_call>", "seed:tool_call>")),
    ("step3", STEP3),
    ("step3", STEP3.replace("｜", "|")),
    ("step3p5", QWEN3_CODER),
    ("phi4_mini", f"functools[{WEATHER}, {TIME}]"),
    ("phi4_mini_json", f"functools[{WEATHER}, {TIME}]"),
]
SAMPLES = {
    name: text
    for name, text in dict(OUTPUTS).items()
    if name == min(n for n, _ in OUTPUTS if ToolParserManager.get(n) is ToolParserManager.get(name))
}
"""One output of each parser, under one of its names."""


def read(name, pieces, request=None, *, is_cut=False):
    """Return (content, [[name, arguments], ...]) of an output that arrives in pieces."""
    parser = ToolParserManager.get(name)()
    parser.adjust_request(request)
    deltas = [delta for piece in pieces for delta in parser.feed(piece)]
    deltas += parser.finish(is_cut=is_cut)
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
    """Return (content, [[name, arguments], ...]) of an output that arrives as a whole."""
    found = ToolParserManager.get(name)().extract_tool_calls(text, request)
    assert found.tools_called == bool(found.tool_calls)
    calls = [[call.function.name, call.function.arguments] for call in found.tool_calls]
    return found.content or "", calls


def decoded(calls):
    return [(name, json.loads(arguments)) for name, arguments in calls]
