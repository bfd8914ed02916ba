"""Test fields that belong to another API: they are read or refused, never lost."""

from tests.entrypoints.openai.scripted_engine import ScriptedEngine, make_client
from tests.loops import loop_over

USER = {"role": "user", "content": "u"}
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
LEAST = {
    CHAT: {"messages": [USER]},
    RESPONSES: {"input": "u"},
    MESSAGES: {"messages": [USER], "max_tokens": 8},
}
BEGUN = {"role": "assistant", "content": "Hi"}


def ask(path, **fields):
    """Return (answer, prompt, parameters) of a request."""
    engine = ScriptedEngine("Hi")
    answer = make_client(engine).post(path, json={**LEAST[path], **fields})
    if answer.status_code != 200:
        return answer, None, None
    [(prompt, params)] = engine.requests.values()
    return answer, prompt, params


@loop_over(
    "fields, prompt",
    [
        ({"instructions": "S"}, "<system>S<user>u<assistant>"),
        ({"system": "S"}, "<system>S<user>u<assistant>"),
        ({"system": [{"type": "text", "text": "S"}]}, "<system>S<user>u<assistant>"),
        ({"system": "", "instructions": None}, "<user>u<assistant>"),
        ({"system": True}, "<user>u<assistant>"),
        ({"messages": [USER, {**BEGUN, "prefix": True}]}, "<user>u<assistant>Hi"),
        ({"messages": [USER, {**BEGUN, "partial": True}]}, "<user>u<assistant>Hi"),
        ({"messages": [USER, {**BEGUN, "prefix": False}]}, "<user>u<assistant>Hi<assistant>"),
        ({"messages": [{**USER, "prefix": True}]}, "<user>u<assistant>"),
        ({"messages": [{**BEGUN, "prefix": True}, USER]}, "<assistant>Hi<user>u<assistant>"),
        ({"extra_body": {"add_generation_prompt": False}}, "<user>u"),
        ({"tool_choice": "auto"}, "<user>u<assistant>"),
        *(({"modalities": m}, "<user>u<assistant>") for m in (["text"], [], None)),
    ],
)
def test_a_chat_reads_what_changes_its_prompt(fields, prompt):
    answer, found, _ = ask(CHAT, **fields)
    assert (answer.status_code, found) == (200, prompt), answer.text


@loop_over(
    "path, fields, name, value",
    [
        (CHAT, {"stop_sequences": ["a"]}, "stop", ["a"]),
        (CHAT, {"stop_sequences": ["a"], "stop": "b"}, "stop", ["b"]),
        (CHAT, {"max_output_tokens": 7}, "max_tokens", 7),
        (CHAT, {"max_new_tokens": 7}, "max_tokens", 7),
        (CHAT, {"random_seed": 3}, "seed", 3),
        *((p, {"extra_body": {"top_k": 3}}, "top_k", 3) for p in LEAST),
        *((p, {"extra_body": {"top_k": 3}, "top_k": 4}, "top_k", 4) for p in LEAST),
        *((p, {"stop": ["a"]}, "stop", ["a"]) for p in LEAST),
        *((p, {"stop": "a"}, "stop", ["a"]) for p in LEAST),
        *((p, {"stop_token_ids": [5]}, "stop_token_ids", [5]) for p in LEAST),
        *((p, {"min_tokens": 2}, "min_tokens", 2) for p in LEAST),
        *((p, {"ignore_eos": True}, "ignore_eos", True) for p in LEAST),
        *((p, {"skip_special_tokens": False}, "skip_special_tokens", False) for p in LEAST),
        *((p, {"logit_bias": {"3": 1}}, "logit_bias", {3: 1.0}) for p in LEAST),
        *((p, {"seed": 3, "min_p": 0.5}, "min_p", 0.5) for p in LEAST),
        *((p, {"n": 1, "best_of": 1, "use_beam_search": False}, "n", 1) for p in LEAST),
    ],
)
def test_a_sampling_field_has_the_same_effect_in_each_api(path, fields, name, value):
    answer, _, params = ask(path, **fields)
    assert answer.status_code == 200, answer.text
    assert getattr(params, name) == value


@loop_over("path", LEAST)
@loop_over(
    "fields, kind",
    [
        ({"guided_regex": "a+"}, "regex"),
        ({"guided_choice": ["a"]}, "choice"),
        ({"structured_outputs": {"json": {"type": "object"}}}, "json"),
        ({"extra_body": {"guided_json": {"type": "object"}}}, "json"),
    ],
)
def test_structured_output_of_this_server_holds_in_each_api(path, fields, kind):
    answer, _, params = ask(path, **fields)
    assert answer.status_code == 200, answer.text
    assert getattr(params.guided_decoding, kind)


@loop_over(
    "path, fields, param",
    [
        (CHAT, {"modalities": ["text", "audio"]}, "modalities"),
        (CHAT, {"modalities": ["image"]}, "modalities"),
        (CHAT, {"modalities": "audio"}, "modalities"),
        (CHAT, {"tool_choice": "required"}, "tool_choice"),
        (CHAT, {"stop_sequences": ["a"] * 5000}, "stop_sequences"),
        (CHAT, {"extra_body": {"stop": ["a"] * 5000}}, "stop"),
        (CHAT, {"extra_body": {"top_k": "x"}}, "top_k"),
        *((p, {"extra_body": [{"top_k": 3}]}, "extra_body") for p in (CHAT, RESPONSES)),
        (MESSAGES, {"extra_body": '{"top_k": 3}'}, None),
        (RESPONSES, {"n": 2}, "n"),
        (RESPONSES, {"use_beam_search": True}, "use_beam_search"),
        (RESPONSES, {"stop_token_ids": [1] * 5000}, "stop_token_ids"),
        (RESPONSES, {"guided_regex": "a", "guided_choice": ["a"]}, None),
        (MESSAGES, {"n": 2}, None),
        (MESSAGES, {"stop": ["a"] * 5000}, None),
        (MESSAGES, {"logit_bias": {"x": 1}}, None),
    ],
)
def test_what_cannot_be_done_is_refused(path, fields, param):
    answer, _, _ = ask(path, **fields)
    assert answer.status_code == 400, answer.text
    assert param is None or answer.json()["error"]["param"] == param


def test_variables_of_the_template_reach_it_from_the_messages_api():
    engine = ScriptedEngine("Hi")
    client = make_client(engine, chat_template="{{ a }}{{ enable_thinking }}")
    kwargs = {"a": "A", "enable_thinking": False}
    body = {**LEAST[MESSAGES], "chat_template_kwargs": kwargs, "thinking": {"type": "adaptive"}}
    assert client.post(MESSAGES, json=body).status_code == 200
    [(prompt, _)] = engine.requests.values()
    assert prompt == "AFalse"
