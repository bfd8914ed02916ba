"""Test pooling models against transformers in float32: every family, with mixed lengths in one
batch.
"""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.e2e.reference import random_prompts
from tests.reach import pool_of
from tests.tiny_models import VOCAB_SIZE
from tests.tiny_pooling_models import (
    add_sentence_transformers_files,
    add_tokenizer,
    class_logits,
    hidden_states,
    make_pooling_model,
    pair_logits,
    rewards,
)
from vllm import LLM

PROMPTS = random_prompts(24, 100, VOCAB_SIZE)
ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "max_model_len": 128,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 256,
}
CHUNKS = {"max_num_batched_tokens": 24, "max_num_seqs": 6}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory):
    """Return the folder of the tiny model of an architecture, made once."""

    @cache
    def folder(architecture: str) -> Path:
        return make_pooling_model(architecture, tmp_path_factory.mktemp(architecture))

    return folder


def run(folder: Path, prompts: list[list[int]] = PROMPTS, **settings: Any) -> list[np.ndarray]:
    outputs = LLM(str(folder), **{**ENGINE, **settings}).encode(prompts, use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == prompts
    return [output.outputs.data.numpy() for output in outputs]


def assert_same(got: list[np.ndarray], want: list[torch.Tensor], atol: float = 2e-5) -> None:
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_allclose(ours, theirs.numpy(), atol=atol, rtol=0)


def normalized(vector: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.normalize(vector, dim=-1)


ENCODERS = ["BertModel", "RobertaModel", "XLMRobertaModel"]
DECODERS = ["LlamaModel", "MistralModel", "Qwen2Model", "Qwen3Model"]


@pytest.mark.parametrize("architecture", ENCODERS)
def test_an_encoder_embeds_by_its_first_token(architecture, made):
    folder = made(architecture)
    want = [normalized(hidden_states(folder, architecture, p)[0]) for p in PROMPTS]
    assert_same(run(folder), want)


@pytest.mark.parametrize("architecture", DECODERS)
@pytest.mark.parametrize("settings", [{}, CHUNKS, {"enable_prefix_caching": False}])
def test_a_decoder_embeds_by_its_last_token(architecture, settings, made):
    folder = made(architecture)
    want = [normalized(hidden_states(folder, architecture, p)[-1]) for p in PROMPTS]
    assert_same(run(folder, **settings), want)


@pytest.mark.parametrize("architecture", ["BertModel", "Qwen2Model"])
@pytest.mark.parametrize("settings", [{"enable_prefix_caching": True}, {"max_num_seqs": 1}])
def test_the_mean_is_over_all_tokens(architecture, settings, made):
    folder = made(architecture)
    override = {"pooling_type": "mean", "normalize": False}
    want = [hidden_states(folder, architecture, p).mean(0) for p in PROMPTS]
    assert_same(run(folder, override_pooler_config=override, **settings), want, atol=1e-4)


def test_all_tokens_can_have_their_vector(made):
    folder = made("LlamaModel")
    override = {"pooling_type": "ALL", "normalize": True}
    want = [normalized(hidden_states(folder, "LlamaModel", p)) for p in PROMPTS]
    assert_same(run(folder, override_pooler_config=override), want)


@pytest.mark.parametrize(
    "architecture",
    [
        "BertForSequenceClassification",
        "RobertaForSequenceClassification",
        "XLMRobertaForSequenceClassification",
        "LlamaForSequenceClassification",
        "MistralForSequenceClassification",
        "Qwen2ForSequenceClassification",
        "Qwen3ForSequenceClassification",
    ],
)
def test_classifiers_give_probabilities(architecture, made):
    folder = made(architecture)
    logits = [class_logits(folder, architecture, p) for p in PROMPTS]
    want = [x.softmax(-1) if len(x) > 1 else x.sigmoid() for x in logits]
    assert torch.stack(logits).std(0).min() > 0.01, "logits too flat to tell anything"
    assert_same(run(folder), want)
    raw = run(folder, override_pooler_config={"softmax": False})
    assert_same(raw, logits, atol=1e-4)


def test_rewards_come_per_token(made):
    folder = made("Qwen2ForRewardModel")
    assert_same(run(folder), [rewards(folder, "Qwen2ForRewardModel", p) for p in PROMPTS], 1e-4)


def test_rewards_of_steps_come_where_they_end(made):
    architecture = "Qwen2ForProcessRewardModel"
    folder, step = made(architecture), 77
    prompts = [[*p[:5], step, *p[5:], step] for p in PROMPTS]
    want = [rewards(folder, architecture, p)[torch.tensor(p) == step].softmax(-1) for p in prompts]
    assert_same(run(folder, prompts, override_pooler_config={"step_tag_id": step}), want)


def test_a_generative_checkpoint_embeds_when_asked_to(made):
    folder = made("Qwen2ForCausalLM")
    want = [normalized(hidden_states(folder, "Qwen2ForCausalLM", p)[-1]) for p in PROMPTS]
    assert_same(run(folder, task="embed", **CHUNKS), want)


@pytest.mark.parametrize(
    ("mode", "normalize"), [("cls_token", True), ("mean_tokens", False), ("lasttoken", True)]
)
def test_files_of_sentence_transformers_say_how_to_pool(mode, normalize, tmp_path):
    folder = make_pooling_model("BertModel", tmp_path)
    add_sentence_transformers_files(folder, mode, normalize=normalize)
    pick = {"cls_token": lambda x: x[0], "mean_tokens": lambda x: x.mean(0)}
    states = [hidden_states(folder, "BertModel", p) for p in PROMPTS]
    want = [pick.get(mode, lambda x: x[-1])(x) for x in states]
    want = [normalized(x) for x in want] if normalize else want
    assert_same(run(folder), want, atol=1e-4)


def test_a_decoder_with_these_files_embeds_without_being_asked(tmp_path):
    folder = make_pooling_model("Qwen2ForCausalLM", tmp_path)
    add_sentence_transformers_files(folder, "lasttoken")
    llm = LLM(str(folder), **ENGINE)
    want = normalized(hidden_states(folder, "Qwen2ForCausalLM", PROMPTS[5])[-1])
    (output,) = llm.embed(PROMPTS[5], use_tqdm=False)
    np.testing.assert_allclose(output.outputs.embedding, want, atol=2e-5)
    assert output.outputs.hidden_size == 64


def test_types_of_tokens_reach_the_model(made):
    architecture = "BertForSequenceClassification"
    folder = made(architecture)
    llm = LLM(str(folder), **ENGINE)
    typed = [(p, [0] * (len(p) // 2) + [1] * (len(p) - len(p) // 2)) for p in PROMPTS]
    prompts = [{"prompt_token_ids": p, "token_type_ids": t} for p, t in typed]
    outputs = llm.classify([*prompts, *PROMPTS], use_tqdm=False)
    want = [class_logits(folder, architecture, p, t).softmax(-1) for p, t in typed]
    want += [class_logits(folder, architecture, p).softmax(-1) for p in PROMPTS]
    assert_same([np.array(output.outputs.probs) for output in outputs], want)


@pytest.mark.parametrize("has_types", [True, False])
def test_a_pair_has_types_where_its_tokenizer_gives_them(has_types, tmp_path):
    architecture = "BertForSequenceClassification"
    folder = make_pooling_model(architecture, tmp_path, num_labels=1)
    add_tokenizer(folder, has_types=has_types)
    pairs = [("w7 w8", "w9"), ("w20", "w21 w22 w23 w24"), ("w5", "w5")]
    want = [float(pair_logits(folder, architecture, *pair).sigmoid()) for pair in pairs]
    llm = LLM(str(folder), **{**ENGINE, "skip_tokenizer_init": False})
    found = llm.score(*map(list, zip(*pairs, strict=True)), use_tqdm=False)
    assert [output.outputs.score for output in found] == pytest.approx(want, abs=2e-5)


def test_a_prefix_is_computed_once(made):
    folder = made("LlamaModel")
    llm = LLM(str(folder), block_size=16, **ENGINE)
    shared = PROMPTS[5]
    (first,) = llm.encode(shared, use_tqdm=False)
    (again,) = llm.encode(shared, use_tqdm=False)
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, (len(shared) - 1) // 16 * 16)
    np.testing.assert_allclose(again.outputs.data, first.outputs.data, atol=2e-5)


@pytest.mark.parametrize("architecture", ["BertModel", "LlamaModel"])
def test_a_prompt_may_be_as_long_as_the_model_takes(architecture, made):
    llm = LLM(str(made(architecture)), num_gpu_blocks_override=9, block_size=16, **ENGINE)
    longest = list(range(100, 228))
    (output,) = llm.embed(longest, use_tqdm=False)
    assert output.prompt_token_ids == longest
    pool = pool_of(llm)
    assert pool.num_free == pool.num_usable_blocks
    with pytest.raises(ValueError, match=r"maximum context length is 128 tokens.*has 129 tokens"):
        llm.embed([*longest, 1], use_tqdm=False)
    (cut,) = llm.embed([1, *longest], truncate_prompt_tokens=-1, use_tqdm=False)
    assert cut.prompt_token_ids == longest


def test_bfloat16_stays_near_float32(made):
    for architecture in ("BertModel", "Qwen3Model"):
        folder = made(architecture)
        want = np.stack(run(folder))
        got = np.stack(run(folder, dtype="bfloat16"))
        assert (want * got).sum(-1).min() > 0.99


def test_a_result_that_overflows_fails_alone(tmp_path):
    folder = make_pooling_model("Qwen2ForSequenceClassification", tmp_path)
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["model.embed_tokens.weight"][7] = float("nan")
    save_file(tensors, path, {"format": "pt"})
    llm = LLM(str(folder), **ENGINE)
    with pytest.raises(ValueError, match=r"prompt 1 of 3: .*infinite or NaN"):
        llm.classify([[5, 6], [6, 7], [8, 9]], use_tqdm=False)
    (output,) = llm.classify([5, 6], use_tqdm=False)
    assert sum(output.outputs.probs) == pytest.approx(1)
