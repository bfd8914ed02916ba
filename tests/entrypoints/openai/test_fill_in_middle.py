"""Test `suffix` of POST /v1/completions: the prompt of each format, what ends it, and errors."""

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from tests.engine.tokenizers_for_tests import BUNDLED_MODEL
from tests.entrypoints.openai.fakes import client_of
from tests.fake_core import FakeCoreLLM
from tests.loops import loop_over
from vllm.entrypoints.openai.completion.serving import router
from vllm.errors import RequestError
from vllm.transformers_utils.fill_in_middle import FillInMiddle

PATH = "/v1/completions"
QWEN = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_sep|>")


def tokenizer_with(*names: str) -> PreTrainedTokenizerFast:
    """Return the tokenizer of the bundled model, whose tokens from 3 on have these names."""
    text = (BUNDLED_MODEL / "tokenizer.json").read_text()
    old = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
    for was, name in zip(old, names, strict=False):
        text = text.replace(was, name)
    backend = Tokenizer.from_str(text)
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


@loop_over(
    "names, prompt, num_stops",
    [
        (QWEN, "<|fim_prefix|>A<|fim_suffix|>B<|fim_middle|>", 4),
        (
            ("<fim_suffix>", "<fim_middle>", "<fim_prefix>"),
            "<fim_prefix>A<fim_suffix>B<fim_middle>",
            3,
        ),
        (
            ("<fim-suffix>", "<fim-middle>", "<fim-prefix>"),
            "<fim-prefix>A<fim-suffix>B<fim-middle>",
            3,
        ),
        (
            ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
            "<｜fim▁begin｜>A<｜fim▁hole｜>B<｜fim▁end｜>",
            3,
        ),
        (
            ("<[fim-suffix]>", "<[fim-prefix]>", "<[fim-middle]>"),
            "<[fim-suffix]>B<[fim-prefix]>A<[fim-middle]>",
            3,
        ),
        (("[SUFFIX]", "[PREFIX]", "[MIDDLE]"), "[SUFFIX]B[PREFIX]A", 3),
        (("[SUFFIX]", "[PREFIX]"), "[SUFFIX]B[PREFIX]A", 2),
    ],
)
def test_the_tokens_of_a_tokenizer_choose_the_format(names, prompt, num_stops):
    fill = FillInMiddle.of(tokenizer_with(*names))
    assert fill.prompt("A", "B") == prompt
    assert fill.stop_token_ids == sorted(fill.stop_token_ids, key=fill.stop_token_ids.index)
    assert set(fill.stop_token_ids) == set(range(3, 3 + num_stops))


@loop_over("names", [(), ("<|fim_prefix|>", "<|fim_suffix|>"), ("<fim_prefix>", "<fim-suffix>")])
def test_a_tokenizer_without_all_markers_has_no_format(names):
    with pytest.raises(RequestError, match="suffix must be left out"):
        FillInMiddle.of(tokenizer_with(*names))


def test_a_completion_ends_at_the_suffix():
    tokenizer = tokenizer_with(*QWEN)
    middle = tokenizer("return x", add_special_tokens=False)["input_ids"]
    prompts = {}

    def reply(request):
        prompts[tuple(request.prompt_token_ids)] = None
        return [*middle, 6, *middle]  # 6: <|file_sep|>

    engine = FakeCoreLLM(reply, given_tokenizer=tokenizer)
    with client_of(engine, router) as client:
        body = {"prompt": ["def f(x):\n", ""], "suffix": "\n\nf(1)", "max_tokens": 50}
        for stops in ([], [2]):
            answer = client.post(PATH, json={**body, "stop_token_ids": stops}).json()
            assert [(c["text"], c["finish_reason"]) for c in answer["choices"]] == [
                ("return x", "stop")
            ] * 2
        texts = [tokenizer.decode(ids).removeprefix("<s>") for ids in prompts]
        assert texts == [
            f"<|fim_prefix|>{prompt}<|fim_suffix|>\n\nf(1)<|fim_middle|>"
            for prompt in body["prompt"]
        ]
        assert client.post(PATH, json={**body, "suffix": ""}).json()["usage"]["prompt_tokens"] < 10
        for field, value, param in (
            ("prompt", [1, 2], "prompt"),
            ("echo", True, "echo"),
            ("truncate_prompt_tokens", 4, "truncate_prompt_tokens"),
            ("use_beam_search", True, "use_beam_search"),
        ):
            error = client.post(PATH, json={**body, field: value}).json()["error"]
            assert error["param"] == param and "suffix" in error["message"], error
