"""Test the fields that switch thinking on and off, from the requests of each API to the template
and the reasoning parser.
"""

from types import SimpleNamespace

import pytest

from tests.entrypoints.openai.fakes import client_of
from tests.entrypoints.openai.test_chat import TOKENIZER, engine_that_says, message_of, stream
from tests.entrypoints.openai.tool_parsers.formats import ARGUMENTS
from vllm.entrypoints.anthropic.serving import router as messages_router
from vllm.entrypoints.conversation.thinking import merge_switches, switch_of, with_all_switches
from vllm.entrypoints.openai.chat.serving import router as chat_router
from vllm.entrypoints.openai.responses.serving import router as responses_router
from vllm.entrypoints.openai.routes.tokenization import router as tokenize_router
from vllm.entrypoints.shared.context import ServerContext
from vllm.entrypoints.shared.server_args import ServerArgs
from vllm.reasoning import ReasoningParserManager

ROUTERS = (chat_router, responses_router, messages_router)
NAMES = ("enable_thinking", "thinking", "thinking_budget", "reasoning_effort")
TEMPLATE = "".join(f"{{{{ {name} if {name} is defined else '-' }}}} " for name in NAMES)
ON, OFF, UNSAID = "True True - -", "False False 0 -", "- - - -"


def chat(**fields):
    return "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], **fields}


def respond(**fields):
    return "/v1/responses", {"input": "x", **fields}


def message(**fields):
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 99, "model": ""}
    return "/v1/messages", {**body, **fields}


ASKED = [
    (chat(), UNSAID),
    (chat(enable_thinking=False), OFF),
    (chat(thinking=False), OFF),
    (chat(thinking=True), ON),
    (chat(thinking={"type": "disabled"}), OFF),
    (chat(thinking={"type": "enabled", "budget_tokens": 5}), ON),
    (chat(chat_template_kwargs={"thinking": False}), OFF),
    (chat(chat_template_kwargs={"enable_thinking": True}), ON),
    (chat(chat_template_kwargs={"enable_thinking": True, "thinking": False}), "True False - -"),
    (chat(chat_template_kwargs={"thinking_budget": 0}), OFF),
    (chat(chat_template_kwargs={"thinking_budget": 512}), "- - 512 -"),
    (chat(thinking=True, chat_template_kwargs={"thinking": False}), OFF),
    (chat(reasoning_effort="none"), "False False 0 none"),
    (chat(reasoning_effort="low"), "- - - low"),
    (chat(reasoning={"effort": "low"}), "- - - low"),
    (chat(reasoning={"enabled": False}), OFF),
    (chat(reasoning={"effort": "low"}, reasoning_effort="high"), "- - - high"),
    (chat(reasoning_effort="none", enable_thinking=True), "True True - none"),
    (chat(chat_template_kwargs={"reasoning_effort": "high"}), "- - - high"),
    (respond(), UNSAID),
    (respond(reasoning={"effort": "none"}), "False False 0 none"),
    (respond(reasoning={"effort": "high"}), "- - - high"),
    (respond(chat_template_kwargs={"thinking": True}), ON),
    (message(), UNSAID),
    (message(thinking={"type": "disabled"}), OFF),
    (message(thinking={"type": "enabled", "budget_tokens": 1024}), ON),
    (message(output_config={"effort": "low"}), "- - - low"),
]


def thoughts_of(path, answer):
    if path == "/v1/responses":
        items = [item for item in answer["output"] if item["type"] == "reasoning"]
        return "".join(part["text"] for item in items for part in item["content"])
    if path == "/v1/messages":
        return "".join(block.get("thinking", "") for block in answer["content"])
    return answer["choices"][0]["message"]["reasoning_content"] or ""


@pytest.mark.parametrize("parser", ["deepseek_r1", "deepseek_v3"])
def test_a_switch_of_any_api_reaches_the_template_and_the_parser(parser):
    engine = engine_that_says("a</think>b")
    is_default = ReasoningParserManager.get(parser).thinks_by_default
    with client_of(engine, *ROUTERS, chat_template=TEMPLATE, reasoning_parser=parser) as client:
        for (path, body), expected in ASKED:
            response = client.post(path, json=body)
            assert response.status_code == 200, response.text
            prompt = TOKENIZER.decode(engine.seen[-1][0]["prompt_token_ids"]).strip()
            assert prompt == expected, (path, body)
            first = expected.split()[0]
            is_thinking = is_default if first == "-" else first == "True"
            assert thoughts_of(path, response.json()) == ("a" if is_thinking else ""), (path, body)


def test_a_request_goes_before_the_server_under_any_name():
    engine = engine_that_says("x")
    defaults = {"enable_thinking": False, "reasoning_effort": "low"}
    with client_of(
        engine, *ROUTERS, chat_template=TEMPLATE, default_chat_template_kwargs=defaults
    ) as client:
        for path, body in (chat(), chat(thinking=True), message(thinking={"type": "enabled"})):
            client.post(path, json=body)
    prompts = [TOKENIZER.decode(prompt["prompt_token_ids"]).strip() for prompt, *_ in engine.seen]
    assert prompts == ["False False 0 low", "True True - low", "True True - low"]


@pytest.mark.parametrize(
    "field",
    [{"thinking": "maybe"}, {"thinking": {}}, {"reasoning_effort": 1}, {"reasoning": "high"}],
)
def test_a_switch_that_cannot_be_read_is_refused_by_its_name(field):
    with client_of(engine_that_says("x"), *ROUTERS) as client:
        path, body = chat(**field)
        response = client.post(path, json=body)
    assert response.status_code == 400
    assert next(iter(field)) in response.text


GPT_OSS = (
    "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>Wait."
    "<|end|><|start|>assistant<|channel|>commentary to=functions.look <|constrain|>json<|message|>"
    f"{ARGUMENTS}<|call|>"
)


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "calls", "reason"),
    [
        (GPT_OSS, "Hm.", "Wait.", [("look", ARGUMENTS)], "tool_calls"),
        (GPT_OSS.partition("<|end|>")[0], "Hm.", "", [], "stop"),
        ("<|channel|>final<|message|>Hello!<|return|>", "", "Hello!", [], "stop"),
        (
            '<|channel|>analysis to=python code<|message|>print("é")\n<|call|>',
            "",
            "",
            [("python", '{"code": "print(\\"é\\")\\n"}')],
            "tool_calls",
        ),
        (
            ' to=browser.search<|channel|>commentary<|message|>{"query": 1}',
            "",
            "",
            [("browser.search", '{"query": 1}')],
            "tool_calls",
        ),
        ("<|channel|>commentary to=python<|message|>", "", "", [("python", "{}")], "tool_calls"),
    ],
)
def test_the_messages_of_gpt_oss_become_thoughts_text_and_calls(
    text, reasoning, content, calls, reason
):
    flags = {"enable_auto_tool_choice": True, "tool_call_parser": "openai"}
    tools = [{"type": "function", "function": {"name": "look"}}]
    with client_of(
        engine_that_says(text), *ROUTERS, reasoning_parser="openai_gptoss", **flags
    ) as client:
        path, body = chat(tools=tools)
        [choice] = client.post(path, json=body).json()["choices"]
        for each, finish_reason in (
            (choice["message"], choice["finish_reason"]),
            message_of(stream(client, tools=tools)),
        ):
            assert (each["reasoning_content"] or "", each["content"] or "") == (reasoning, content)
            functions = [call["function"] for call in each["tool_calls"]]
            assert [(call["name"], call["arguments"]) for call in functions] == calls
            assert finish_reason == reason


def test_gpt_oss_is_read_without_a_flag():
    def parser_of(model_type, **flags):
        arch = SimpleNamespace(model_type=model_type)
        config = SimpleNamespace(model=SimpleNamespace(arch=arch))
        return ServerContext(
            ServerArgs(**flags), SimpleNamespace(vllm_config=config), created=0
        ).reasoning_parser

    assert parser_of("gpt_oss") == "openai_gptoss" in ReasoningParserManager.names()
    assert parser_of("gpt_oss", reasoning_parser="qwen3") == "qwen3"
    assert parser_of("llama") is None


def test_an_effort_of_a_request_replaces_the_server_s_none():
    given = {"reasoning_effort": "high"}
    assert merge_switches({"reasoning_effort": "none"}, given) == given
    assert switch_of(merge_switches({"reasoning_effort": "none"}, {"a": 1})) is False
    assert merge_switches({"reasoning_effort": "none"}, {"thinking": True}) == {
        "reasoning_effort": "none",
        "thinking": True,
    }


def test_tokenize_renders_the_switches_of_a_conversation():
    with client_of(engine_that_says("x"), tokenize_router, chat_template=TEMPLATE) as client:
        for (path, body), expected in ASKED:
            if path == "/v1/chat/completions":
                tokens = client.post("/tokenize", json=body).json()["tokens"]
                assert TOKENIZER.decode(tokens).strip() == expected, body


def test_arguments_that_are_no_switches_are_left_alone():
    assert with_all_switches({"a": 1, "reasoning_effort": "low"}) == {
        "a": 1,
        "reasoning_effort": "low",
    }
    assert switch_of({"thinking": None, "enable_thinking": 0}) is False
