"""Test the normalised conversations that templates get, with one template for each property.

Every case is rendered by both paths: as the template of the model, and by the handler of the
process for templates of requests.
"""

import json

import msgspec
import pytest

from tests.engine.tokenizers_for_tests import byte_level
from tests.loops import loop_over
from tests.reach import num_answers_of
from vllm.entrypoints.chat_utils import ChatOptions, render_chat, rendering_arguments
from vllm.entrypoints.conversation.messages import read_messages
from vllm.entrypoints.conversation.render import CannotRenderError
from vllm.entrypoints.conversation.rules import fit
from vllm.entrypoints.conversation.template import load_template
from vllm.entrypoints.openai.chat import template_worker
from vllm.errors import RequestError


def message(role, content, **fields):
    return {"role": role, "content": content, **fields}


def parts(*texts):
    return [{"type": "text", "text": text} for text in texts]


def call(arguments, call_id="call_1", name="f"):
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def called(*calls, **fields):
    return {"role": "assistant", "content": None, "tool_calls": list(calls), **fields}


def result(content, call_id="call_1", **fields):
    return message("tool", content, tool_call_id=call_id, **fields)


USER = message("user", "u")
ANSWER = message("assistant", "a")
SYSTEM = message("system", "s")
BARE = {"type": "function", "function": {"name": "f"}}


def each(body):
    """Return a template that writes this text for each message."""
    return "{% for m in messages %}" + body + "{% endfor %}"


ANY_ROLE = each("{{ m.role }}={{ m['content'] }};")
"""Shows any role, and appends nothing: also `None` and lists would be shown."""
APPENDS = each("{{ m['role'] + '=' + m['content'] + ';' }}")
"""Fails if content is not a string."""
NO_STRINGS = each("{{ m.role }}={% for part in m.content %}{{ part.text }},{% endfor %};")
MIXED = each(
    "{{ m.role }}="
    "{% if m.role == 'user' and m.content is not string %}"
    "{% for part in m.content %}({{ part.text }}){% endfor %}"
    "{% else %}{{ m.content }}{% endif %};"
)
"""Reads lists of the user only, and prints others, as Gemma 4 does."""
DUMPS = each("{{ m.role }}={{ m.content | tojson }};")
FIRST_ONLY = (
    "{% if messages[0].role == 'system' %}[{{ messages[0]['content'] }}]"
    "{% set rest = messages[1:] %}{% else %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}{% if m.role == 'system' %}{{ raise_exception('system must be first') }}"
    "{% endif %}{{ m.role }}={{ m.content }};{% endfor %}"
)
KNOWN_ROLES = each(
    "{% if m.role in ('system', 'user', 'assistant') %}{{ m.role }}={{ m.content }};{% endif %}"
)
"""Drops all other roles."""
NO_SYSTEM = each(
    "{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{{ m.role }}={{ m.content }};"
)
ALTERNATES = "{% set ns = namespace(n=0) %}" + each(
    "{% if m.role in ('user', 'assistant') and not m.tool_calls %}"
    "{% if (m.role == 'user') != (ns.n % 2 == 0) %}{{ raise_exception('must alternate') }}"
    "{% endif %}{% set ns.n = ns.n + 1 %}{% endif %}{{ m.role }}={{ m.content }};"
)
DEVELOPER = each(
    "{% if m.role == 'developer' %}#{{ m.content }}#"
    "{% elif m.role != 'system' %}{{ m.role }}={{ m.content }};{% endif %}"
)
OBSERVATION = each(
    "{% if m.role == 'observation' %}<{{ m.content }}>"
    "{% elif m.role in ('user', 'assistant') %}{{ m.role }}={{ m.content }};{% endif %}"
)
CALLS = each(
    "{{ m.role }}={{ m.content }}"
    "{% for c in m.tool_calls %}[{{ c.type }} {{ c.function.name }}"
    "{{ c.function.arguments | tojson }}]{% endfor %};"
)
CONCATENATES = each(
    "{% for c in m.tool_calls %}{{ c['function']['name'] + c['function']['arguments'] }}"
    "{% endfor %}"
)
PRINTS = each("{% for c in m.tool_calls %}{{ c.function.arguments }}{% endfor %}")
MEMBERS = each(
    "{% for c in m.tool_calls %}"
    "{% for key, value in c.function.arguments | items %}{{ key }}:{{ value }},{% endfor %}"
    "{% endfor %}"
)
RAW = each(
    "{% for c in m.tool_calls %}{% if c.function.arguments is string %}"
    "{{ c.function.arguments }}{% else %}{{ c.function.arguments | tojson }}{% endif %}"
    "{% endfor %}"
)
NINE = each(
    "{% for c in m.tool_calls %}{% if c.id | length != 9 %}{{ raise_exception('nine') }}{% endif %}"
    "[{{ c.id }}]{% endfor %}"
    "{% if m.role == 'tool' %}{% if m.tool_call_id | length != 9 %}{{ raise_exception('nine') }}"
    "{% endif %}<{{ m.tool_call_id }}>{{ m.content }}{% endif %}"
)
SINGLE = each(
    "{% if m.tool_calls %}{% if m.tool_calls | length != 1 %}{{ raise_exception('single') }}"
    "{% endif %}{{ m.content }}[{{ m.tool_calls[0].function.arguments | tojson }}]"
    "{% else %}{{ m.role }}={{ m.content }};{% endif %}"
)
FIRST_CALL = each(
    "{% if m.tool_calls %}[{{ m.tool_calls[0].function.arguments | tojson }}]"
    "{% else %}{{ m.role }}={{ m.content }};{% endif %}"
)
NAMES = each("{% if m.role == 'tool' %}{{ m['name'] + ':' + m.content }};{% endif %}")
THOUGHTS = each(
    "{{ m.reasoning_content }}|{{ m.reasoning }}|{{ m.thinking }};"
    "{% if m.thinking and m.content and m.tool_calls %}{{ raise_exception('one text') }}{% endif %}"
    "{{ m.content }}"
)
TOOLS = (
    "{% for t in tools %}{{ '//' + t.function.description }} {{ t.function.name }}("
    "{% for key, value in t.function.parameters.properties | items %}{{ key }},{% endfor %})"
    "{% endfor %}"
)
PLAIN_TOOLS = "{% for t in tools %}{{ t | tojson }}{% endfor %}"

CASES = {
    "a string stays a string": (MIXED, [SYSTEM, USER], "system=s;user=u;"),
    "a list is read by role": (
        MIXED,
        [message("system", parts("s", "t")), message("user", parts("u", "v"))],
        "system=s\nt;user=(u)(v);",
    ),
    "no branch for strings": (
        NO_STRINGS,
        [SYSTEM, USER, ANSWER],
        "system=s,;user=u,;assistant=a,;",
    ),
    "a list that would be printed": (ANY_ROLE, [message("user", parts("u"))], "user=u;"),
    "a list that would be dumped": (DUMPS, [message("user", parts("u"))], 'user="u";'),
    "a list that cannot be appended": (APPENDS, [message("user", parts("u", "v"))], "user=u\nv;"),
    "the result of a tool as a list": (
        APPENDS,
        [USER, called(call("{}")), result(parts("r", "q"))],
        'user=u;assistant={"name": "f", "arguments": {}};tool=r\nq;',
    ),
    "an empty list": (
        APPENDS,
        [USER, message("assistant", []), USER],
        "user=u;assistant=;user=u;",
    ),
    "an empty list where lists are read": (
        NO_STRINGS,
        [USER, message("assistant", []), USER],
        "user=u,;assistant=,;user=u,;",
    ),
    "no content beside a call": (
        APPENDS,
        [USER, called(call("{}"))],
        'user=u;assistant={"name": "f", "arguments": {}};',
    ),
    "no content at all": (
        APPENDS,
        [USER, {"role": "assistant"}],
        "user=u;assistant=;",
    ),
    "the content of a refusal": (
        APPENDS,
        [USER, message("assistant", None, refusal="no"), USER],
        "user=u;assistant=no;user=u;",
    ),
    "a result that is null": (
        APPENDS,
        [USER, called(call("{}")), result(None)],
        'user=u;assistant={"name": "f", "arguments": {}};tool=;',
    ),
    "developer is dropped": (KNOWN_ROLES, [message("developer", "d"), USER], "system=d;user=u;"),
    "developer is known": (DEVELOPER, [message("developer", "d"), USER], "#d#user=u;"),
    "developer and no system": (NO_SYSTEM, [message("system", "d"), USER], "user=d\n\nu;"),
    "any role": (ANY_ROLE, [message("critic", "c"), USER], "critic=c;user=u;"),
    "two systems": (FIRST_ONLY, [SYSTEM, message("system", "t"), USER], "[s\n\nt]user=u;"),
    "system and developer": (
        KNOWN_ROLES,
        [SYSTEM, message("developer", "t"), USER],
        "system=s;system=t;user=u;",
    ),
    "two systems that are shown": (
        KNOWN_ROLES,
        [SYSTEM, SYSTEM, USER],
        "system=s;system=s;user=u;",
    ),
    "a system in the middle that is shown": (
        KNOWN_ROLES,
        [USER, ANSWER, SYSTEM, USER],
        "user=u;assistant=a;system=s;user=u;",
    ),
    "a system before a user": (
        FIRST_ONLY,
        [SYSTEM, USER, ANSWER, SYSTEM, USER],
        "[s]user=u;assistant=a;user=s\n\nu;",
    ),
    "two systems before a user": (
        FIRST_ONLY,
        [USER, ANSWER, SYSTEM, message("system", "t"), USER],
        "user=u;assistant=a;user=s\n\nt\n\nu;",
    ),
    "a system at the end": (FIRST_ONLY, [USER, ANSWER, SYSTEM], "user=u;assistant=a;user=s;"),
    "a system after a user": (FIRST_ONLY, [USER, SYSTEM, ANSWER], "user=u\n\ns;assistant=a;"),
    "a system after a result": (
        FIRST_ONLY,
        [USER, called(call("{}")), result("r"), SYSTEM, ANSWER],
        'user=u;assistant={"name": "f", "arguments": {}};tool=r\n\ns;assistant=a;',
    ),
    "a system in parts": (
        FIRST_ONLY,
        [USER, ANSWER, message("system", parts("s", "t")), USER],
        "user=u;assistant=a;user=s\nt\nu;",
    ),
    "a greeting": (ALTERNATES, [ANSWER, USER], "user=;assistant=a;user=u;"),
    "a greeting that is shown": (ANY_ROLE, [ANSWER, USER], "assistant=a;user=u;"),
    "only a system": (NO_SYSTEM, [SYSTEM], "user=s;"),
    "only a system that is shown": (ANY_ROLE, [SYSTEM], "system=s;"),
    "two users": (ALTERNATES, [USER, message("user", "v")], "user=u\n\nv;"),
    "two answers": (ALTERNATES, [USER, ANSWER, ANSWER, USER], "user=u;assistant=a\n\na;user=u;"),
    "a user after a result": (
        ALTERNATES,
        [USER, called(call("{}")), result("r"), message("user", "v")],
        'user=u;assistant={"name": "f", "arguments": {}};tool=r\n\nv;',
    ),
    "two users that are shown": (ANY_ROLE, [USER, USER], "user=u;user=u;"),
    "an older role of results": (
        OBSERVATION,
        [USER, called(call("{}")), result("r")],
        'user=u;assistant={"name": "f", "arguments": {}};<r>',
    ),
    "results of a template without tools": (
        KNOWN_ROLES,
        [USER, called(call('{"x": 1}')), result("r"), result("t", "call_2"), USER],
        'user=u;assistant={"name": "f", "arguments": {"x": 1}};'
        "user=Result of the tool f:\n\nr;user=Result of the tool:\n\nt;user=u;",
    ),
    "calls of a template that refuses them without tools": (
        "{% if not tools and messages|selectattr('role', 'equalto', 'tool')|list %}"
        "{{ raise_exception('no tools') }}{% endif %}" + CALLS,
        [USER, called(call('{"x')), result("r")],
        'user=u;assistant={"name": "f", "arguments": "{\\"x"};user=Result of the tool f:\n\nr;',
    ),
    "the API before tools": (
        CALLS,
        [
            USER,
            message("assistant", None, function_call={"name": "f", "arguments": '{"x": 1}'}),
            message("function", "r", name="f"),
        ],
        'user=u;assistant=[function f{"x": 1}];tool=r;',
    ),
    "a call without type and id": (
        CALLS,
        [USER, called({"function": {"name": "f", "arguments": ""}})],
        "user=u;assistant=[function f{}];",
    ),
    "arguments as an object": (
        CALLS,
        [USER, called(call('{"x": "ü"}'))],
        'user=u;assistant=[function f{"x": "ü"}];',
    ),
    "arguments as text": (CONCATENATES, [USER, called(call('{"x":  1}'))], 'f{"x":  1}'),
    "an object as text": (CONCATENATES, [USER, called(call({"x": "ü"}))], 'f{"x": "ü"}'),
    "null as text": (CONCATENATES, [USER, called(call(None))], "f{}"),
    "damaged arguments as text": (CONCATENATES, [USER, called(call('{"x'))], 'f{"x'),
    "arguments that would be Python": (PRINTS, [USER, called(call('{"x": 1}'))], '{"x": 1}'),
    "damaged arguments": (RAW, [USER, called(call('{"x": "a'))], '{"x": "a'),
    "a list of arguments": (RAW, [USER, called(call("[1]"))], "[1]"),
    "a number": (RAW, [USER, called(call(5))], "5"),
    "no arguments": (RAW, [USER, called({"function": {"name": "f"}})], "{}"),
    "damaged arguments by members": (MEMBERS, [USER, called(call('{"x'))], 'arguments:{"x,'),
    "deep arguments": (MEMBERS, [USER, called(call("[" * 9999))], f"arguments:{'[' * 9999},"),
    "ids of another server": (
        NINE,
        [
            USER,
            called(call("{}", "call_abc123"), call("{}", "abcdefghi")),
            result("r", "abcdefghi"),
        ],
        "[xyHvf1Sfj][abcdefghi]<abcdefghi>r",
    ),
    "several calls": (
        SINGLE,
        [
            USER,
            called(call('{"x": 1}', "a"), call('{"x": 2}', "b")) | {"content": "c"},
            result("r", "b"),
            result("q", "a"),
            USER,
        ],
        'user=u;c[{"x": 1}]tool=q;[{"x": 2}]tool=r;user=u;',
    ),
    "several calls of which it shows one": (
        FIRST_CALL,
        [USER, called(call('{"x": 1}', "a"), call('{"x": 2}', "b")), result("r", "b"), USER],
        'user=u;[{"x": 1}][{"x": 2}]tool=r;user=u;',
    ),
    "a cancelled call": (
        ALTERNATES,
        [
            USER,
            called(call("{}", "a"), call("{}", "b")),
            result("r", "b"),
            USER,
            ANSWER,
            USER,
            called(call("{}", "c")),
        ],
        'user=u;assistant={"name": "f", "arguments": {}}\n{"name": "f", "arguments": {}};'
        "tool=r;tool=u;"
        'assistant=a;user=u;assistant={"name": "f", "arguments": {}};',
    ),
    "a cancelled call that it shows": (
        ANY_ROLE,
        [USER, called(call("{}")), USER],
        'user=u;assistant={"name": "f", "arguments": {}};user=u;',
    ),
    "the name in a result": (NAMES, [USER, called(call("{}", name="g")), result("r")], "g:r;"),
    "the name without an id": (
        NAMES,
        [USER, called(call("{}", "a", "g"), call("{}", "b", "h")), message("tool", "r")],
        "g:r;",
    ),
    "reasoning": (THOUGHTS, [message("assistant", "", reasoning="t")], "t|t|t;"),
    "reasoning_content": (THOUGHTS, [message("assistant", "", reasoning_content="t")], "t|t|t;"),
    "thoughts of Mistral in parts": (
        THOUGHTS,
        [message("assistant", [{"type": "thinking", "thinking": parts("t")}, *parts("a")])],
        "t|t|t;a",
    ),
    "thoughts of Anthropic in parts": (
        THOUGHTS,
        [message("assistant", [{"type": "thinking", "thinking": "t", "signature": "s"}])],
        "t|t|t;",
    ),
    "parts that are reasoning": (
        ANY_ROLE,
        [USER, message("assistant", [{"type": "reasoning", "text": "t"}, *parts("a")])],
        "user=u;assistant=a;",
    ),
    "two names of thoughts": (
        THOUGHTS,
        [message("assistant", "", reasoning_content="", reasoning="t")],
        "t|t|t;",
    ),
    "thoughts and text before a call": (
        THOUGHTS,
        [USER, called(call("{}"), reasoning="t") | {"content": "c"}],
        "||;u" + "|".join(['t\n\nc\n\n{"name": "f", "arguments": {}}'] * 3) + ";",
    ),
    "a custom call": (
        CALLS,
        [USER, called({"id": "1", "type": "custom", "custom": {"name": "f", "input": "i"}})],
        'user=u;assistant=[function f{"input": "i"}];',
    ),
    "loops, tojson and namespaces": (
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
        "{% if ns.n == 2 %}{% break %}{% endif %}{%- generation -%}{{ m.content }}"
        "{%- endgeneration -%}{% endfor %}"
        "{{ {'b': 'ü', 'a': 1} | tojson(ensure_ascii=True, separators=(',', ':'),"
        " sort_keys=True) }}"
        "{{ [1] | tojson(indent=1) }}{{ '<' | tojson }}{{ strftime_now('%%') }}",
        [USER, USER],
        'u{"a":1,"b":"\\u00fc"}[\n 1\n]"<"%',
    ),
    "documents and tools that are absent": (
        "{{ tools is none }}{{ documents is none }}{{ unknown is defined }}",
        [USER],
        "TrueTrueFalse",
    ),
    "a tool without anything": (TOOLS, [USER], "// f()", [BARE]),
    "a tool with open parameters": (
        TOOLS,
        [USER],
        "//d f()",
        [{"function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}],
    ),
    "a tool that is shown as it is": (PLAIN_TOOLS, [USER], json.dumps(BARE), [BARE]),
}


def on_both_paths(template, messages, tools=None, **options):
    """Return the text or the error, which must be the same on both paths."""
    tokenizer = byte_level()
    made = ChatOptions(chat_template=template, tools=tools, **options)
    handler = template_worker.start(b"")
    argument = msgspec.json.encode(rendering_arguments(tokenizer, messages, made)[0])
    try:
        text = render_chat(tokenizer, messages, made)
    except RequestError as error:
        with pytest.raises(CannotRenderError) as failure:
            handler(argument)
        assert str(error).endswith(f"cannot render this conversation: {failure.value}")
        raise
    assert msgspec.json.decode(handler(argument))["text"] == text
    return text


@loop_over("name", CASES)
def test_a_conversation_becomes_what_the_template_reads(name):
    template, messages, expected, *tools = CASES[name]
    assert on_both_paths(template, messages, *tools) == expected


@pytest.mark.parametrize(
    ("template", "messages", "reason"),
    [
        ("{{ raise_exception('never') }}", [USER], "never"),
        ("{{ messages[0].nothing.here }}", [USER], "no attribute 'nothing'"),
        ("{% set ns = namespace(_x=1) %}", [USER], "begins with _"),
        ("{% set ns = namespace() %}{% set ns.__init__ = 1 %}", [USER], "begins with _"),
        ("{{ messages.append(1) }}", [USER], "is unsafe"),
        ("{{ ''.__class__.__mro__ }}", [USER], "__class__"),
        ("{% if %}", [USER], "xpected"),
    ],
)
def test_a_template_may_refuse_a_conversation_on_both_paths(template, messages, reason):
    with pytest.raises(RequestError, match=reason):
        on_both_paths(template, messages)


@pytest.mark.parametrize(
    ("template", "content", "expected"),
    [
        (ANY_ROLE, "a ", "user=u;assistant=a "),
        (each("{{ m.content | trim }};"), "a ", "u;a"),
        (NO_STRINGS, parts("a", "b"), "user=u,;assistant=a,b"),
    ],
)
def test_the_last_message_is_continued_on_both_paths(template, content, expected):
    options = {"continue_final_message": True, "add_generation_prompt": False}
    messages = [USER, message("assistant", content)]
    assert on_both_paths(template, messages, **options) == expected
    with pytest.raises(RequestError, match="does not render the final message"):
        on_both_paths("{{ messages[0].content }}", messages, **options)


def test_a_template_that_renders_no_probe_gets_the_messages_as_they_are():
    template = "{% if not date %}{{ raise_exception('no date') }}{% endif %}" + KNOWN_ROLES
    messages = [message("developer", "d"), SYSTEM, SYSTEM, USER]
    options = {"template_kwargs": {"date": "today"}}
    assert on_both_paths(template, messages, **options) == "system=s;system=s;user=u;"


def test_roles_that_clients_invent_are_not_remembered_without_end():
    template = load_template(ANY_ROLE + "{# roles #}", ())
    for index in range(100):
        messages = read_messages([message(f"role{index}", parts("x", "y"))])
        assert fit(messages, template, "auto") == [message(f"role{index}", "x\ny")]
    assert num_answers_of(template) < 100


def test_a_call_without_text_cannot_be_continued():
    options = ChatOptions(continue_final_message=True, add_generation_prompt=False)
    with pytest.raises(RequestError, match="the final message has no text"):
        render_chat(byte_level(), [USER, called(call("{}"))], options)


def test_a_template_is_probed_once(monkeypatch):
    from vllm.entrypoints.conversation import template as module

    source = ANY_ROLE + "{# probed once #}"
    rendered = []
    monkeypatch.setattr(
        module.Template,
        "render",
        lambda self, *args, render=module.Template.render, **kwargs: (
            rendered.append(args) or render(self, *args, **kwargs)
        ),
    )
    options = ChatOptions(chat_template=source)
    counts = []
    for _ in range(2):
        render_chat(byte_level(), [SYSTEM, USER, ANSWER, USER], options)
        counts.append(len(rendered))
        rendered.clear()
    assert counts[0] > 1
    assert counts[1] == 1
