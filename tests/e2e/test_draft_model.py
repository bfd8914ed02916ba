"""Test a draft model: outputs are unchanged, and drafts are right if the two models agree."""

import json
import random
import shutil

import pytest
import torch

from tests.e2e.test_drafts import seen_by_user
from tests.e2e.test_speculation import PARAMS, PROMPTS
from tests.exhaustive import exhaustive
from tests.reach import draft_model_of, stats_of, worker_of
from vllm import LLM, SamplingParams
from vllm.assets import BUNDLED_MODEL
from vllm.errors import ConfigError
from vllm.model_executor.model_memory import model_storages

COMMON = {"dtype": "float32", "max_model_len": 128, "max_num_seqs": 8}
FEW_BLOCKS = {"num_gpu_blocks_override": 20, "max_num_batched_tokens": 24}


def with_draft(draft, model=None, num_drafts=4, **more) -> LLM:
    speculative = {"model": str(draft), "num_speculative_tokens": num_drafts}
    speculative |= {"method": "draft_model", "adaptive": more.pop("adaptive", False)}
    return LLM(model, speculative_config=speculative, **{**COMMON, **more})


def run(llm: LLM, params=PARAMS) -> list:
    return [seen_by_user(o) for o in llm.generate(PROMPTS, params, use_tqdm=False)]


def drafts_of(llm: LLM) -> tuple[int, int]:
    stats = stats_of(llm).drafts
    return stats.num_draft_tokens, sum(stats.accepted)


@pytest.fixture(scope="module")
def expected():
    return run(LLM(**COMMON))


@pytest.mark.parametrize("more", [exhaustive({}), FEW_BLOCKS], ids=["plenty", "crowded"])
def test_drafts_of_the_model_itself_are_right(more, expected):
    llm = with_draft(BUNDLED_MODEL, **more)
    assert run(llm) == expected
    assert run(llm) == expected, "with a prefix cache that has the draft model's keys and values"
    num_drafts, num_right = drafts_of(llm)
    assert num_drafts > num_right > 0.8 * num_drafts > 100, "a penalty is not part of drafts"
    if more:
        assert stats_of(llm).num_preemptions


def keep(token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    return logits


def test_requests_with_and_without_drafts_share_prefixes_and_leave_at_any_time():
    llm = with_draft(BUNDLED_MODEL, num_drafts=3, **FEW_BLOCKS | {"num_gpu_blocks_override": 12})
    engine, rng = llm.llm_engine, random.Random(2)
    todo = list(range(60))
    while todo or engine.has_unfinished_requests():
        if todo and rng.random() < 0.8:
            text = PROMPTS[0][: rng.choice([30, 60, 61, 90])]
            params = SamplingParams(max_tokens=rng.randint(1, 30), ignore_eos=True, seed=len(todo))
            if rng.random() < 0.4:
                params.logits_processors = [keep]  # requests with a logits processor get no drafts
            engine.add_request(str(todo.pop()), text, params)
        if rng.random() < 0.1:
            engine.abort_request(str(rng.choice(range(60))))
        engine.step()
    num_drafts, num_right = drafts_of(llm)
    assert num_right == num_drafts > 100
    stats = stats_of(engine)
    assert stats.num_preemptions and stats.num_prefix_hits


def test_a_draft_model_of_another_family_changes_no_output(models, expected):
    llm = with_draft(models("opt"), adaptive=True)
    assert run(llm) == expected
    num_drafts, num_right = drafts_of(llm)
    assert num_drafts > num_right


def test_a_model_with_windows_keeps_what_its_draft_model_sees(models, tmp_path):
    shutil.copytree(models("gemma2"), tmp_path, dirs_exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUNDLED_MODEL / name, tmp_path)
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    want = run(LLM(str(tmp_path), **COMMON), params)
    llm = with_draft(BUNDLED_MODEL, str(tmp_path))
    assert run(llm, params) == want
    llm = with_draft(tmp_path, str(tmp_path))
    assert run(llm, params) == want
    num_drafts, num_right = drafts_of(llm)
    assert num_right == num_drafts > 100


@pytest.mark.parametrize("vocab_size", [exhaustive(4000), 4224])
def test_vocabularies_may_be_padded_differently(vocab_size, models, tmp_path, expected):
    shutil.copytree(models("qwen3"), tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": vocab_size}))
    with pytest.raises(ConfigError, match=f"has a vocabulary of {vocab_size} tokens"):
        with_draft(tmp_path)
    shutil.copy(BUNDLED_MODEL / "tokenizer.json", tmp_path)
    assert run(with_draft(tmp_path, load_format="dummy")) == run(LLM(load_format="dummy", **COMMON))
    assert expected


def test_a_draft_model_sleeps_and_wakes_up_with_the_model(expected):
    llm = with_draft(BUNDLED_MODEL, enable_sleep_mode=True)
    worker = worker_of(llm)
    (weight, *_) = model_storages(draft_model_of(worker))
    for level in (1, 2):
        before = drafts_of(llm)
        assert run(llm) == expected
        num_drafts, num_right = (
            now - then for now, then in zip(drafts_of(llm), before, strict=True)
        )
        assert num_right > 0.8 * num_drafts > 50
        assert weight.any()
        llm.sleep(level)
        assert not weight.any(), "its memory is given back"
        llm.wake_up()
    assert run(llm) == expected


def test_what_cannot_make_drafts_is_refused(models, tmp_path):
    shutil.copytree(models("qwen3"), tmp_path, dirs_exist_ok=True)
    tokenizer = json.loads((BUNDLED_MODEL / "tokenizer.json").read_text())
    tokens = list(tokenizer["model"]["vocab"])
    first, second = tokens[50:52]
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match="does not have the tokenizer of the model"):
        with_draft(tmp_path)
