"""Test POST /v1/chat/completions over a scripted core."""

import json

import pytest

from tests.engine.tokenizers_for_tests import byte_level
from tests.entrypoints.openai.fakes import MODEL, client_of
from tests.entrypoints.openai.sse_reader import chunks_of, text_of
from tests.fake_core import FakeCoreLLM
from tests.loops import loop_over
from vllm.entrypoints.openai.chat.serving import router

TOKENIZER = byte_level()
PATH = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": parameters}}
    for name, parameters in (
        ("look", {"type": "object", "properties": {"at": {"type": "string"}}}),
        ("wait", {"properties": {"s": {"$ref": "#/$defs/S"}}, "$defs": {"S": {"type": "number"}}}),
    )
]
NAMED = {"type": "function", "function": {"name": "look"}}
AUTO = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}


def engine_that_says(text: str, **args) -> FakeCoreLLM:
    script = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    return FakeCoreLLM(lambda request: [*script, TOKENIZER.eos_token_id], **args)


def chat(client, **body):
    response = client.post(PATH, json={"messages": MESSAGES, **body})
    assert response.status_code == 200, response.text
    return response.json()


def stream(client, **body):
    response = client.post(PATH, json={"messages": MESSAGES, "stream": True, **body})
    assert response.status_code == 200, response.text
    return chunks_of(response.text)


def message_of(chunks, index=0):
    """Return the message that the deltas of a stream give, and its finish reason."""
    message = {"role": None, "content": "", "reasoning_content": "", "tool_calls": []}
    finish_reason = None
    for choice in (c for chunk in chunks for c in chunk["choices"] if c["index"] == index):
        assert finish_reason is None, "something came after the end"
        finish_reason = choice["finish_reason"]
        delta = choice["delta"]
        message["role"] = delta.get("role", message["role"])
        message["content"] += delta.get("content") or ""
        message["reasoning_content"] += delta.get("reasoning_content") or ""
        for call in delta.get("tool_calls", ()):
            of_call = call.get("function") or call["custom"]
            assert "name" not in of_call or not (of_call.get("arguments") or of_call.get("input"))
            if call["index"] == len(message["tool_calls"]):
                message["tool_calls"].append(
                    {"id": call["id"], "type": call["type"], "function": call["function"]}
                )
            else:
                whole = message["tool_calls"][call["index"]]["function"]
                whole["arguments"] += call["function"]["arguments"]
    return message, finish_reason


def without_ids(calls):
    return [call["function"] for call in calls]


def test_a_conversation_is_continued():
    engine = engine_that_says("hello é")
    with client_of(engine, router) as client:
        body = chat(client, user="me", unknown_field=[1])
    assert body["id"].startswith("chatcmpl-")
    assert (body["object"], body["model"]) == ("chat.completion", MODEL)
    (choice,) = body["choices"]
    assert choice["message"] == {
        "role": "assistant",
        "content": "hello é",
        "reasoning_content": None,
        "refusal": None,
        "tool_calls": [],
    }
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)
    assert body["usage"]["prompt_tokens"] == 5
    prompt = engine.seen[0][0]["prompt_token_ids"]
    assert TOKENIZER.decode(prompt) == "<s><|user|>hi<|end|><|assistant|>"


def test_a_stream_begins_with_the_role_and_tells_what_the_whole_answer_tells():
    with client_of(engine_that_says("hello, é!"), router, response_role="bot") as client:
        whole = chat(client, n=2, max_tokens=3)
        chunks = stream(client, n=2, max_tokens=3, stream_options={"include_usage": True})
    assert [c["choices"][0]["delta"] for c in chunks[:2]] == [{"role": "bot", "content": ""}] * 2
    for choice in whole["choices"]:
        message, finish_reason = message_of(chunks, choice["index"])
        assert message["content"] == choice["message"]["content"]
        assert message["role"] == choice["message"]["role"] == "bot"
        assert finish_reason == choice["finish_reason"] == "length"
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == whole["usage"]
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_without_a_limit_the_answer_may_fill_the_context():
    engine = engine_that_says("hello")
    with client_of(engine, router) as client:
        chat(client)
        chat(client, max_tokens=9, max_completion_tokens=3)
    assert [params.max_tokens for _, params, _ in engine.seen] == [256 - 5, 3]


def test_logprobs_come_per_token():
    with client_of(engine_that_says("hello"), router) as client:
        body = chat(client, logprobs=True, top_logprobs=2, max_tokens=2)
        bare = chat(client, logprobs=True, max_tokens=1)
        chunks = stream(client, logprobs=True, top_logprobs=2, max_tokens=2)
    content = body["choices"][0]["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content) == body["choices"][0]["message"]["content"]
    assert all(len(entry["top_logprobs"]) == 2 for entry in content)
    assert bytes(content[0]["bytes"]).decode() == content[0]["token"]
    assert bare["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []
    # This character has several tokens.
    with client_of(engine_that_says("\U0001f600"), router) as client:
        smile = chat(client, logprobs=True, max_tokens=4)["choices"][0]["logprobs"]["content"]
    assert bytes(b for entry in smile for b in entry["bytes"]).decode()[0] == "\U0001f600"
    streamed = [c["choices"][0]["logprobs"] for c in chunks if c["choices"][0]["logprobs"]]
    assert [entry for piece in streamed for entry in piece["content"]] == content


@pytest.mark.parametrize("content", ["hello", [{"type": "text", "text": "hello"}]])
def test_the_last_message_is_continued_and_echoed(content):
    engine = engine_that_says(" world")
    messages = [*MESSAGES, {"role": "assistant", "content": content}]
    body = {
        "messages": messages,
        "add_generation_prompt": False,
        "continue_final_message": True,
        "echo": True,
    }
    with client_of(engine, router) as client:
        whole = chat(client, **body)
        streamed, _ = message_of(stream(client, **body))
    assert whole["choices"][0]["message"]["content"] == streamed["content"] == "hello world"
    assert TOKENIZER.decode(engine.seen[0][0]["prompt_token_ids"]).endswith("hello")


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"chat_template": "{% for m in messages %}{{ m.content }}!{% endfor %}"}, "hi!"),
        ({"chat_template": "{{ bos_token }}{{ k }}", "chat_template_kwargs": {"k": "v"}}, "<s>v"),
        ({"chat_template": "{{ documents[0].a }}", "documents": [{"a": "b"}]}, "b"),
        (
            {"chat_template": "{{ tools | tojson }}", "tools": TOOLS[:1], "tool_choice": NAMED},
            "look",
        ),
    ],
)
def test_a_template_of_the_request_is_rendered(fields, expected):
    engine = engine_that_says("x")
    with client_of(engine, router) as client:
        chat(client, **fields)
    assert expected in TOKENIZER.decode(engine.seen[0][0]["prompt_token_ids"])


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "2 s"),
        ("{{ 'a' * 100000000000 }}", "memory"),
        ("{{ ", "unexpected"),
        ("{{ raise_exception('not this') }}", "not this"),
        ("{{ ''.__class__.__mro__ }}", ""),
    ],
)
def test_a_template_of_the_request_harms_only_its_request(template, text):
    with client_of(engine_that_says("x"), router) as client:
        response = client.post(PATH, json={"messages": MESSAGES, "chat_template": template})
        assert response.status_code == 400
        assert response.json()["error"]["param"] in ("chat_template", "prompt")
        assert text in response.json()["error"]["message"]
        assert chat(client)["choices"]


def test_the_template_of_the_server_is_used(tmp_path):
    path = tmp_path / "template.jinja"
    path.write_text("{{ messages[0].content }}?")
    for given in (str(path), "{{ messages[0].content }}?"):
        engine = engine_that_says("x")
        with client_of(engine, router, chat_template=given) as client:
            chat(client)
        assert TOKENIZER.decode(engine.seen[0][0]["prompt_token_ids"]) == "hi?"


def test_arguments_of_the_template_have_defaults_of_the_server():
    engine = engine_that_says("x")
    defaults = {"greeting": "good", "time": "day"}
    template = "{{ greeting }} {{ time }}"
    with client_of(
        engine, router, chat_template=template, default_chat_template_kwargs=defaults
    ) as client:
        chat(client)
        chat(client, chat_template_kwargs={"time": "night"})
    prompts = [TOKENIZER.decode(prompt["prompt_token_ids"]) for prompt, *_ in engine.seen]
    assert prompts == ["good day", "good night"]


def test_a_named_tool_gets_the_whole_output_as_arguments():
    engine = engine_that_says('{"at": "é"}')
    with client_of(engine, router) as client:
        whole = chat(client, tools=TOOLS, tool_choice=NAMED)["choices"][0]
        message, finish_reason = message_of(stream(client, tools=TOOLS, tool_choice=NAMED))
    assert without_ids(whole["message"]["tool_calls"]) == [
        {"name": "look", "arguments": '{"at": "é"}'}
    ]
    assert without_ids(message["tool_calls"]) == without_ids(whole["message"]["tool_calls"])
    assert whole["message"]["content"] == message["content"] == ""
    assert finish_reason == whole["finish_reason"] == "stop"
    assert whole["message"]["tool_calls"][0]["id"].startswith("chatcmpl-tool-")
    schema = json.loads(engine.seen[0][1].guided_decoding.json)
    assert schema == TOOLS[0]["function"]["parameters"]


CALLS = '[{"name": "wait", "parameters": {"s": "}\\"],"}}, {"name":"look","parameters":{"at":[1]}}]'


@pytest.mark.parametrize("is_parallel", [True, False])
def test_required_tools_are_read_from_the_forced_array(is_parallel):
    engine = engine_that_says(CALLS)
    wanted = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": is_parallel}
    with client_of(engine, router) as client:
        whole = chat(client, **wanted)["choices"][0]
        message, finish_reason = message_of(stream(client, **wanted))
    expected = [
        {"name": "wait", "arguments": '{"s": "}\\"],"}'},
        {"name": "look", "arguments": '{"at":[1]}'},
    ]
    calls = without_ids(whole["message"]["tool_calls"])
    assert calls == expected[: 2 if is_parallel else 1]
    assert without_ids(message["tool_calls"]) == calls
    assert finish_reason == whole["finish_reason"] == "tool_calls"
    schema = json.loads(engine.seen[0][1].guided_decoding.json)
    wait = schema["items"]["anyOf"][1]["properties"]
    assert wait["name"]["enum"] == ["wait"]
    assert wait["parameters"]["properties"]["s"]["$ref"].removeprefix("#/$defs/") in schema["$defs"]
    assert schema.get("maxItems") == (None if is_parallel else 1)


@pytest.mark.parametrize(
    ("choice", "text", "reason"),
    [
        ({}, '<tool_call>{"name": "look", "arguments": {"at": "x"}}</tool_call>', "function_call"),
        ({"function_call": {"name": "look"}}, '{"at": "x"}', "stop"),
        ({"function_call": "none"}, "no", "stop"),
    ],
)
def test_functions_of_the_older_api_are_answered_in_its_form(choice, text, reason):
    wanted = {"functions": [tool["function"] for tool in TOOLS], **choice}
    call = None if text == "no" else {"name": "look", "arguments": '{"at": "x"}'}
    with client_of(engine_that_says(text), router, **AUTO) as client:
        whole = chat(client, **wanted)["choices"][0]
        chunks = stream(client, **wanted)
    assert (whole["finish_reason"], whole["message"].get("function_call")) == (reason, call)
    assert whole["message"]["tool_calls"] == []
    parts = [chunk["choices"][0]["delta"].get("function_call") or {} for chunk in chunks]
    if call is not None:
        assert "".join(part.get("arguments", "") for part in parts) == call["arguments"]
        assert [part["name"] for part in parts if "name" in part] == ["look"]
    assert chunks[-1]["choices"][0]["finish_reason"] == reason


@pytest.mark.parametrize("is_parallel", [True, False])
def test_tools_the_model_chose_to_call_are_found_by_the_parser(is_parallel):
    calls = [{"name": "look", "arguments": {"at": "é"}}, {"name": "wait", "arguments": {}}]
    text = "".join(f"<tool_call>{json.dumps(c)}</tool_call>" for c in calls)
    engine = engine_that_says("Well. " + text)
    wanted = {"tools": TOOLS, "parallel_tool_calls": is_parallel}
    with client_of(engine, router, **AUTO) as client:
        whole = chat(client, **wanted)["choices"][0]
        message, finish_reason = message_of(stream(client, **wanted))
    found = without_ids(whole["message"]["tool_calls"])
    assert [c["name"] for c in found] == ["look", "wait"][: 2 if is_parallel else 1]
    assert json.loads(found[0]["arguments"]) == {"at": "é"}
    assert without_ids(message["tool_calls"]) == found
    assert message["content"].strip() == whole["message"]["content"].strip() == "Well."
    assert finish_reason == whole["finish_reason"] == "tool_calls"
    assert engine.seen[0][1].guided_decoding is None


def test_without_a_call_the_answer_is_content():
    with client_of(engine_that_says("No <tool_cal"), router, **AUTO) as client:
        whole = chat(client, tools=TOOLS)["choices"][0]
        message, finish_reason = message_of(stream(client, tools=TOOLS))
    assert message["content"] == whole["message"]["content"] == "No <tool_cal"
    assert finish_reason == whole["finish_reason"] == "stop"


def test_reasoning_comes_in_a_field_of_its_own():
    engine = engine_that_says("<think>hm</think>yes")
    with client_of(engine, router, reasoning_parser="deepseek_r1") as client:
        whole = chat(client)["choices"][0]["message"]
        message, _ = message_of(stream(client))
        constrained = chat(client, guided_regex=".*")["choices"][0]["message"]
    assert (whole["reasoning_content"], whole["content"]) == ("hm", "yes")
    assert (message["reasoning_content"], message["content"]) == ("hm", "yes")
    assert (constrained["reasoning_content"], constrained["content"]) == ("hm", "yes")


@pytest.mark.parametrize("field", [{"include_reasoning": False}, {"reasoning": {"exclude": True}}])
def test_reasoning_may_be_left_out_of_the_answer(field):
    engine = engine_that_says("<think>hm</think>yes")
    with client_of(engine, router, reasoning_parser="deepseek_r1") as client:
        whole = chat(client, **field)
        message, _ = message_of(stream(client, **field))
    assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
    for found in (whole["choices"][0]["message"], message):
        assert (found["reasoning_content"] or "", found["content"]) == ("", "yes")


def test_the_server_may_switch_thinking_off():
    engine = engine_that_says("<think>yes</think>no")
    with client_of(
        engine,
        router,
        reasoning_parser="qwen3",
        default_chat_template_kwargs={"enable_thinking": False},
    ) as client:
        plain = chat(client)["choices"][0]["message"]
        thinking = chat(client, chat_template_kwargs={"enable_thinking": True})
    assert plain["content"] == "<think>yes</think>no"
    assert thinking["choices"][0]["message"]["content"] == "no"


def test_the_best_of_several_are_returned_and_beams_searched():
    with client_of(engine_that_says("hello"), router) as client:
        assert len(chat(client, n=2, best_of=3, max_tokens=2)["choices"]) == 2
        beams = chat(client, n=2, use_beam_search=True, max_tokens=2)
    assert [c["message"]["role"] for c in beams["choices"]] == ["assistant"] * 2


WRONG = [
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [5]}, "messages"),
    ({"messages": [{}]}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages"),
    ({"messages": [{"role": 5, "content": "a"}]}, "messages"),
    ({"messages": [{"role": "user", "content": {"a": 1}}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
    ({"messages": [{"role": "assistant", "tool_calls": 5}]}, "messages"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]}, "messages"),
    ({"messages": [{"role": "alien", "content": "a"}]}, "messages"),
    ({"messages": [{"role": "user", "content": "word " * 300}]}, "prompt"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"top_logprobs": -1, "logprobs": True}, "top_logprobs"),
    ({"top_logprobs": 10**6, "logprobs": True}, "logprobs"),
    ({"logprobs": 7}, "logprobs"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_completion_tokens": 10**6}, "max_tokens"),
    ({"continue_final_message": True}, "continue_final_message"),
    ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": 5}, "chat_template_kwargs"),
    ({"chat_template": 5}, "chat_template"),
    ({"mm_processor_kwargs": {"a": 1}}, "mm_processor_kwargs"),
    ({"tools": TOOLS}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": "auto"}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": "maybe"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"function": {"name": "x"}}}, "tool_choice"),
    ({"tools": [{"function": {}}]}, "tools"),
    ({"tools": [{"function": {"name": ""}}]}, "tools"),
    ({"tools": 5}, "tools"),
    ({"tools": TOOLS, "tool_choice": "required", "guided_regex": "a"}, "guided_regex"),
]


@pytest.fixture(scope="module")
def plain_client():
    with client_of(engine_that_says("hello"), router) as client:
        yield client


@loop_over("fields, param", WRONG)
def test_what_is_wrong_is_refused_by_name(plain_client, fields, param):
    for is_stream in (False, True):
        wanted = {"messages": MESSAGES, "stream": is_stream, **fields}
        body = (response := plain_client.post(PATH, json=wanted)).json()
        assert response.status_code == 400, body
        assert param in (body["error"]["param"] or ""), body
    assert chat(plain_client)["choices"]


def test_a_failure_midway_is_an_event():
    engine = engine_that_says("hello there")
    engine.core.fail_at = 1
    with client_of(engine, router) as client:
        *chunks, error = stream(client)
        assert text_of(chunks)
        assert error["error"]["code"] == "engine_dead"
        assert client.post(PATH, json={"messages": MESSAGES, "stream": True}).status_code == 500


def test_only_whole_answers_can_be_ranked(plain_client):
    wanted = {"messages": MESSAGES, "stream": True, "best_of": 2}
    assert plain_client.post(PATH, json=wanted).json()["error"]["param"] == "best_of"
