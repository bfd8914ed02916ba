"""Write calls in the format of each model, as its chat template and documentation show it.

`calls` draws calls, and `WRITERS` writes them. So a test knows what a parser has to find.
"""

import json
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from hypothesis import strategies as st


class Call(NamedTuple):
    """A call: the name of the function, and its arguments by name."""

    name: str
    arguments: dict[str, Any]


Write = Callable[[Sequence[Call], random.Random], str]


def json_text(value: Any, rng: random.Random) -> str:
    """Return JSON in one of the ways in which models write it."""
    return json.dumps(
        value,
        ensure_ascii=rng.random() < 0.3,
        indent=rng.choice([None, None, 2]),
        separators=rng.choice([None, (",", ":")]),
    )


def _object(key: str = "arguments", name_key: str = "name") -> Callable[[Call, random.Random], str]:
    def write(call: Call, rng: random.Random) -> str:
        return json_text({name_key: call.name, key: call.arguments}, rng)

    return write


def _objects(before: str, between: str, after: str, **keys: str) -> Write:
    write = _object(**keys)
    return lambda calls, rng: before + between.join(write(c, rng) for c in calls) + after


def _each(before: str, middle: str, after: str, between: str = "\n", outer: Any = "{}") -> Write:
    """Return a writer of the name, the JSON arguments, and fixed texts around them."""

    def write(calls: Sequence[Call], rng: random.Random) -> str:
        texts = [
            before.replace("#", str(index))
            + call.name
            + middle.replace("#", str(index))
            + json_text(call.arguments, rng)
            + after
            for index, call in enumerate(calls)
        ]
        return outer.replace("{}", between.join(texts))

    return write


def _plain(value: Any) -> str:
    """Return a value as templates write it between tags: texts as they are, others as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _tags(call: str, argument: str, end: str, outer: str = "{}", between: str = "\n") -> Write:
    """Return a writer of calls whose keys and values are between tags."""

    def write(calls: Sequence[Call], rng: random.Random) -> str:
        texts = [
            call.replace("NAME", each.name)
            + "".join(
                argument.replace("KEY", key)
                .replace("IS_TEXT", json.dumps(isinstance(value, str)))
                .replace("VALUE", _plain(value))
                for key, value in each.arguments.items()
            )
            + end
            for each in calls
        ]
        return outer.replace("{}", between.join(texts))

    return write


def _pythonic(before: str, between: str, after: str) -> Write:
    def write(calls: Sequence[Call], rng: random.Random) -> str:
        texts = [
            f"{call.name}({', '.join(f'{k}={v!r}' for k, v in call.arguments.items())})"
            for call in calls
        ]
        return before + between.join(texts) + after

    return write


def _gemma(escape: str, before: str, after: str) -> Write:
    def value_text(value: Any) -> str:
        if isinstance(value, str):
            return escape + value + escape
        if isinstance(value, list):
            return "[" + ",".join(map(value_text, value)) + "]"
        if isinstance(value, dict):
            return "{" + ",".join(f"{k}:{value_text(v)}" for k, v in value.items()) + "}"
        return json.dumps(value)

    return lambda calls, rng: "".join(
        f"{before}call:{call.name}{value_text(call.arguments)}{after}" for call in calls
    )


_CODER = (
    "<tool_call>\n<function=NAME>\n",
    "<parameter=KEY>\nVALUE\n</parameter>\n",
    "</function>\n</tool_call>",
)
_DSML = "\uff5cDSML\uff5c"
_BAR, _LINE = "\uff5c", "\u2581"


def _deepseek(word: str) -> str:
    return f"<{_BAR}{word.replace(' ', _LINE)}{_BAR}>"


WRITERS: dict[str, tuple[str, Write]] = {
    "hermes": (
        "hermes",
        _objects("<tool_call>\n", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>"),
    ),
    "hermes, several objects": ("hermes", _objects("<tool_call>\n", "\n", "\n</tool_call>")),
    "llama": ("llama3_json", _objects("", "; ", "", key="parameters")),
    "llama, lines": ("llama3_json", _objects("", "\n", "", key="parameters")),
    "llama, commas": ("llama3_json", _objects("", ", ", "", key="parameters")),
    "llama, a list": ("llama4_json", _objects("[", ", ", "]", key="parameters")),
    "llama, marked": ("llama3_json", _objects("<|python_tag|>", ";", "", key="parameters")),
    "mistral": ("mistral", _objects("[TOOL_CALLS] [", ", ", "]")),
    "mistral, later": ("mistral", _each("[TOOL_CALLS]", "[ARGS]", "", "")),
    "mistral, with ids": ("mistral", _each("[TOOL_CALLS]", "[CALL_ID]12345678#[ARGS]", "", "")),
    "granite": ("granite", _objects("<|tool_call|>[", ", ", "]")),
    "granite code": ("granite-20b-fc", _objects("<function_call> ", "\n<function_call> ", "")),
    "internlm": (
        "internlm",
        _objects(
            "<|action_start|><|plugin|>\n",
            "<|action_end|>\n<|action_start|><|plugin|>\n",
            "<|action_end|>",
            key="parameters",
        ),
    ),
    "cohere": (
        "cohere_command3",
        _objects(
            "<|START_ACTION|>[\n",
            ",\n",
            "\n]<|END_ACTION|>",
            key="parameters",
            name_key="tool_name",
        ),
    ),
    "apertus": (
        "apertus",
        _each('{"', '": ', "}", ", ", "<|tools_prefix|>[{}]<|tools_suffix|>"),
    ),
    "hunyuan": ("hunyuan_a13b", _objects("<tool_calls>[", ", ", "]</tool_calls>")),
    "minimax m1": ("minimax", _objects("<tool_calls>\n", "\n", "\n</tool_calls>")),
    "nemotron": ("nemotron_json", _objects("<TOOLCALL>[", ", ", "]</TOOLCALL>")),
    "phi": ("phi4_mini", _objects("functools[", ", ", "]")),
    "phi, tokens": ("phi4_mini", _objects("<|tool_call|>[", ", ", "]<|/tool_call|>")),
    "xlam": ("xlam", _objects("<tool_call>[", ", ", "]</tool_call>")),
    "gigachat": (
        "gigachat3",
        _objects(
            "<|message_sep|>\n\nfunction call<|role_sep|>\n",
            "<|message_sep|>\n\nfunction call<|role_sep|>\n",
            "",
        ),
    ),
    "deepseek v3": (
        "deepseek_v3",
        _each(
            f"{_deepseek('tool call begin')}function{_deepseek('tool sep')}",
            "\n```json\n",
            f"\n```{_deepseek('tool call end')}",
            "\n",
            f"{_deepseek('tool calls begin')}{{}}{_deepseek('tool calls end')}",
        ),
    ),
    "deepseek v3.1": (
        "deepseek_v31",
        _each(
            _deepseek("tool call begin"),
            _deepseek("tool sep"),
            _deepseek("tool call end"),
            "",
            f"{_deepseek('tool calls begin')}{{}}{_deepseek('tool calls end')}",
        ),
    ),
    "kimi": (
        "kimi_k2",
        _each(
            "<|tool_call_begin|>functions.",
            ":#<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
            "",
            "<|tool_calls_section_begin|>{}<|tool_calls_section_end|>",
        ),
    ),
    "gpt-oss": (
        "openai",
        _each(
            "<|channel|>commentary to=functions.",
            " <|constrain|>json<|message|>",
            "",
            "<|call|><|start|>assistant",
        ),
    ),
    "gpt-oss, recipient first": (
        "openai",
        _each(
            " to=functions.",
            "<|channel|>commentary json<|message|>",
            "",
            "<|call|><|start|>assistant",
        ),
    ),
    "qwen3 coder": ("qwen3_coder", _tags(*_CODER)),
    "seed": (
        "seed_oss",
        _tags(*(text.replace("tool_call", "seed:tool_call") for text in _CODER)),
    ),
    "step 3": (
        "step3",
        _tags(
            f"<{_BAR}tool_call_begin{_BAR}>function<{_BAR}tool_sep{_BAR}>"
            '<steptml:invoke name="NAME">',
            '<steptml:parameter name="KEY">VALUE</steptml:parameter>',
            f"</steptml:invoke><{_BAR}tool_call_end{_BAR}>",
            f"<{_BAR}tool_calls_begin{_BAR}>\n{{}}\n<{_BAR}tool_calls_end{_BAR}>",
        ),
    ),
    "minimax m2": (
        "minimax_m2",
        _tags(
            '<invoke name="NAME">\n',
            '<parameter name="KEY">VALUE</parameter>\n',
            "</invoke>",
            "<minimax:tool_call>\n{}\n</minimax:tool_call>",
        ),
    ),
    "deepseek v3.2": (
        "deepseek_v32",
        _tags(
            f'<{_DSML}invoke name="NAME">\n',
            f'<{_DSML}parameter name="KEY" string="IS_TEXT">VALUE</{_DSML}parameter>\n',
            f"</{_DSML}invoke>",
            f"<{_DSML}function_calls>\n{{}}\n</{_DSML}function_calls>",
        ),
    ),
    "glm 4.5": (
        "glm45",
        _tags(
            "<tool_call>NAME\n",
            "<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n",
            "</tool_call>",
        ),
    ),
    "glm 4.7": (
        "glm47",
        _tags(
            "<tool_call>NAME",
            "<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>",
            "</tool_call>",
            between="",
        ),
    ),
    "longcat": (
        "longcat",
        _tags(
            "<longcat_tool_call>NAME\n",
            "<longcat_arg_key>KEY</longcat_arg_key>\n"
            "<longcat_arg_value>VALUE</longcat_arg_value>\n",
            "</longcat_tool_call>",
        ),
    ),
    "pythonic": ("pythonic", _pythonic("[", ", ", "]")),
    "gemma 3": ("pythonic", _pythonic("```tool_code\n", "\n", "\n```")),
    "gemma 3, a list": ("pythonic", _pythonic("```tool_code\n[", ", ", "]\n```")),
    "llama 4 pythonic": (
        "llama4_pythonic",
        _pythonic("<|python_start|>[", ", ", "]<|python_end|>"),
    ),
    "lfm2": ("lfm2", _pythonic("<|tool_call_start|>[", ", ", "]<|tool_call_end|>")),
    "olmo3": ("olmo3", _pythonic("<function_calls>", "\n", "</function_calls>")),
    "functiongemma": (
        "functiongemma",
        _gemma("<escape>", "<start_function_call>", "<end_function_call>"),
    ),
    "gemma4": ("gemma4", _gemma('<|"|>', "<|tool_call>", "<tool_call|>")),
}
"""Format -> its parser, and the function that writes calls."""

_KEYS = st.sampled_from(["a", "city_1", "päth", "x2"])
_TEXT = st.text(
    st.sampled_from("ab é日👩\n\t\\\"'{}[]:,=/<>0\u2028")
    | st.characters(exclude_categories=["Cs"]),
    max_size=12,
) | st.sampled_from(
    [
        "",
        "null",
        "5",
        "true",
        "[1]",
        '{"a": 1}',
        "\n",
        "\n\nx\n\n",
        " x ",
        "</b>",
        "\\u00e9",
        "None",
    ]
)
_SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(-1e9, 1e9, allow_nan=False)
    | _TEXT
)
_VALUES = st.recursive(
    _SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_KEYS, inner, max_size=3),
    max_leaves=5,
)
CALLS = st.lists(
    st.builds(
        Call,
        st.sampled_from(["f", "get_weather", "a_b2"]),
        st.dictionaries(_KEYS, _VALUES, max_size=3),
    ),
    min_size=1,
    max_size=3,
    unique_by=lambda call: call.name,
)
"""Calls of different functions, with no or any arguments."""


def tools_for(calls: Sequence[Call]) -> list[dict[str, Any]]:
    """Return the tools of some calls, with the types of their arguments."""
    return [
        {
            "type": "function",
            "function": {
                "name": call.name,
                "parameters": {
                    "type": "object",
                    "properties": {key: _schema(v) for key, v in call.arguments.items()},
                },
            },
        }
        for call in calls
    ]


def _schema(value: Any) -> dict[str, Any]:
    kinds = {
        str: "string",
        bool: "boolean",
        int: "integer",
        float: "number",
        list: "array",
        dict: "object",
        type(None): "null",
    }
    return {"type": kinds[type(value)]}
