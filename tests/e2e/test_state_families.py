"""Test models with recurrent (Mamba) layers: the settings that they refuse or turn off.

Outputs are compared with `transformers` in test_equal_to_transformers.py.
"""

import logging

import pytest

from tests.hpu import simulated_hpu
from tests.reach import stats_of
from vllm import LLM, SamplingParams
from vllm.errors import ConfigError

SETTINGS = {
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "max_model_len": 96,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 40,
    "block_size": 16,
}


def test_prompts_end_to_end_would_mix_states_up(models):
    with (
        simulated_hpu(VLLM_MERGED_PREFILL=1),
        pytest.raises(ConfigError, match="mix up the recurrent state"),
    ):
        LLM(model=str(models("mamba")), **SETTINGS)


def test_states_are_not_transferred(models, tmp_path):
    transfer = {
        "kv_connector": "SharedStorageConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
    }
    with pytest.raises(
        ConfigError, match=r"a model that has recurrent \(Mamba or DeltaNet\) layers"
    ):
        LLM(model=str(models("mamba")), **SETTINGS, kv_transfer_config=transfer)


def test_kept_states_have_no_more_than_a_quarter_of_the_memory(models, caplog):
    with caplog.at_level(logging.INFO, logger="vllm"):
        for num_bytes, count in ((2**28, 16), (2**18, 0)):
            LLM(model=str(models("mamba")), **SETTINGS, kv_cache_memory_bytes=num_bytes)
            said = [
                r.getMessage() for r in caplog.records if r.getMessage().startswith("Mamba state:")
            ]
            assert f" and {count} cached prefixes" in said[-1]


def test_a_model_with_drafts_sleeps_and_wakes_up(models):
    drafts = {"method": "suffix", "num_speculative_tokens": 3, "adaptive": False}
    prompt = {"prompt_token_ids": [5, 6, 7, 8] * 10}
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)
    folder = str(models("bamba"))
    asked = SETTINGS | {"enable_sleep_mode": True}
    plain = LLM(model=folder, **asked)
    llm = LLM(model=folder, **asked, speculative_config=drafts)
    want, *found = (
        list(engine.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids)
        for engine in (plain, llm)
    )
    for level in (1, 2):
        llm.sleep(level)
        llm.wake_up()
        if level == 2:
            llm.collective_rpc("reload_weights")
        found.append(list(llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids))
    assert found == [want] * 3
    assert sum(stats_of(llm).drafts.accepted)


def test_a_draft_model_has_no_states(models):
    drafts = {"model": str(models("bamba")), "num_speculative_tokens": 3}
    with pytest.raises(ConfigError, match=r"has recurrent .* use the method ngram"):
        LLM(model=str(models("bamba")), **SETTINGS, speculative_config=drafts)
