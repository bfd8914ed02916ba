"""Test `LLM` with pooling models: scores, wrong use, and the returned objects."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.tiny_pooling_models import (
    add_tokenizer,
    class_logits,
    hidden_states,
    make_pooling_model,
)
from vllm import LLM, PoolingParams

ENGINE: dict[str, Any] = {"dtype": "float32", "max_model_len": 64, "max_num_seqs": 4}


def load(architecture: str, folder: Path, task: str = "auto", **overrides: Any) -> LLM:
    add_tokenizer(make_pooling_model(architecture, folder, **overrides))
    return LLM(str(folder), task=task, **ENGINE)


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return load("BertModel", tmp_path_factory.mktemp("bert"), matryoshka_dimensions=[16, 32])


@pytest.fixture(scope="module")
def scorer(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = tmp_path_factory.mktemp("scorer")
    return load("BertForSequenceClassification", folder, num_labels=1)


@pytest.fixture(scope="module")
def generator(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return load("Qwen2ForCausalLM", tmp_path_factory.mktemp("qwen"))


@pytest.fixture(scope="module")
def rewarder(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return load("Qwen2ForRewardModel", tmp_path_factory.mktemp("reward"))


def test_rewards_are_encodings_of_a_reward_model(rewarder, embedder):
    (reward,) = rewarder.reward("w7 w8 w9", use_tqdm=False)
    (encoded,) = rewarder.encode("w7 w8 w9", use_tqdm=False)
    assert torch.equal(reward.outputs.data, encoded.outputs.data)
    assert len(reward.outputs.data) == len(reward.prompt_token_ids)
    with pytest.raises(ValueError, match="runs with task 'reward', but this one runs with"):
        embedder.reward("w7", use_tqdm=False)


def test_embeddings_are_lists_and_encodings_tensors(embedder):
    (output,) = embedder.embed("w7 w8", use_tqdm=False)
    assert output.finished and output.prompt_token_ids == [2, 7, 8, 3]
    assert output.outputs.hidden_size == len(output.outputs.embedding) == 64
    (encoded,) = embedder.encode("w7 w8", use_tqdm=False)
    assert encoded.outputs.data.dtype is torch.float32
    assert encoded.outputs.data.tolist() == output.outputs.embedding
    assert int(output.request_id) < int(encoded.request_id)


def test_fewer_dimensions_are_the_first_ones_with_length_one(embedder):
    (whole,) = embedder.embed("w7 w8", use_tqdm=False)
    (cut,) = embedder.embed("w7 w8", pooling_params=PoolingParams(dimensions=16), use_tqdm=False)
    want = np.array(whole.outputs.embedding[:16])
    np.testing.assert_allclose(cut.outputs.embedding, want / np.linalg.norm(want), atol=1e-6)


def test_each_prompt_may_have_parameters_of_its_own(embedder):
    params = [PoolingParams(dimensions=16), PoolingParams(), PoolingParams(dimensions=32)]
    outputs = embedder.embed(["w7", "w8", "w9"], pooling_params=params, use_tqdm=False)
    assert [output.outputs.hidden_size for output in outputs] == [16, 64, 32]
    with pytest.raises(
        ValueError, match="pooling_params must have one entry for each of the 1 prompts, got 3"
    ):
        embedder.embed("w7", pooling_params=params)


def test_scores_of_embeddings_are_cosines(embedder, tmp_path_factory):
    folder = Path(embedder.llm_engine.model_config.resolved_path)
    texts = {"w7 w8": [2, 7, 8, 3], "w9": [2, 9, 3], "w5 w5": [2, 5, 5, 3]}
    states = {text: hidden_states(folder, "BertModel", ids)[0] for text, ids in texts.items()}
    outputs = embedder.score("w7 w8", ["w9", "w5 w5", "w7 w8"], use_tqdm=False)
    want = [
        torch.cosine_similarity(states["w7 w8"], states[text], dim=0).item()
        for text in ("w9", "w5 w5", "w7 w8")
    ]
    assert [output.outputs.score for output in outputs] == pytest.approx(want, abs=1e-5)
    assert outputs[0].prompt_token_ids == [2, 7, 8, 3, 2, 9, 3]
    each = embedder.score(["w9", "w7 w8"], ["w7 w8", "w9"], use_tqdm=False)
    assert [output.outputs.score for output in each] == pytest.approx([want[0]] * 2, abs=1e-5)


def test_a_cross_encoder_reads_both_texts_at_once(scorer):
    folder = Path(scorer.llm_engine.model_config.resolved_path)
    outputs = scorer.score("w7 w8", ["w9", "w5 w5 w6"], use_tqdm=False)
    for output, second in zip(outputs, ([9, 3], [5, 5, 6, 3]), strict=True):
        ids, types = [2, 7, 8, 3, *second], [0] * 4 + [1] * len(second)
        logit = class_logits(folder, "BertForSequenceClassification", ids, types)
        assert output.prompt_token_ids == ids
        assert output.outputs.score == pytest.approx(logit.sigmoid().item(), abs=1e-5)


def test_long_pairs_are_cut(scorer):
    (output,) = scorer.score("w7 " * 50, "w8 " * 50, truncate_prompt_tokens=11, use_tqdm=False)
    assert output.prompt_token_ids == [2] + [7] * 4 + [3] + [8] * 4 + [3]


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (["w7", "w8"], ["w9"], r"as many as text_2 \(1\), got 2"),
        ([], ["w9"], "text_1 must have at least one string"),
        ("w7", [], "text_2 must have at least one string"),
        ("w7", [7], "text_2 must be"),
        ("w7", "w8 " * 70, "maximum context length is 64"),
    ],
)
def test_texts_that_do_not_pair_are_refused(first, second, message, scorer, embedder):
    for llm in (scorer, embedder):
        with pytest.raises(ValueError, match=message):
            llm.score(first, second, use_tqdm=False)


@pytest.mark.parametrize(
    ("model", "method", "message"),
    [
        ("embedder", "generate", r"does not generate.*'embed'.*LLM\.embed"),
        ("embedder", "classify", r"'classify' or 'score', but this one runs with task 'embed'"),
        ("scorer", "generate", r"does not generate.*'score'.*LLM\.score"),
        ("scorer", "embed", r"runs with task 'embed', but this one runs with task 'score'"),
        ("generator", "embed", r"this model generates.*LLM\.generate.*start it with task='embed'"),
        ("generator", "classify", r"this model generates.*start it with task='classify'"),
        ("generator", "encode", r"this model generates.*task='embed'"),
    ],
)
def test_the_wrong_kind_of_model_is_refused_with_advice(model, method, message, request):
    llm = request.getfixturevalue(model)
    with pytest.raises(ValueError, match=message):
        getattr(llm, method)("w7", use_tqdm=False)


def test_a_conversation_needs_a_model_that_generates(embedder):
    with pytest.raises(ValueError, match="does not generate"):
        embedder.chat([{"role": "user", "content": "w7"}], use_tqdm=False)


def test_scores_need_one_label(generator, tmp_path):
    with pytest.raises(ValueError, match="this model generates"):
        generator.score("w7", "w8")
    llm = load("BertForSequenceClassification", tmp_path)
    with pytest.raises(ValueError, match="one label; this one has 3"):
        llm.score("w7", "w8")
    (output,) = llm.classify("w7", use_tqdm=False)
    assert output.outputs.num_classes == 3


def test_a_wrong_prompt_is_named_and_stops_nobody(embedder):
    with pytest.raises(ValueError, match=r"prompt 1 of 2: .*context length"):
        embedder.embed(["w7", "w7 " * 100], use_tqdm=False)
    assert len(embedder.embed(["w7", "w8"], use_tqdm=False)) == 2
    assert not embedder.llm_engine.has_unfinished_requests()
