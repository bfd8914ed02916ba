"""Values that tests of the engine need: a config, and log-probabilities."""

import json
from collections.abc import Iterable
from typing import Any

import numpy as np

from tests.engine.tokenizers_for_tests import BUNDLED_MODEL
from vllm.config import CacheConfig, ModelArch, ModelConfig, SchedulerConfig, VllmConfig
from vllm.messages import LogprobRows


def make_config(max_model_len: int = 64, num_added_tokens: int = 0, **model: Any) -> VllmConfig:
    """Make the config of the bundled model, with room for `max_model_len` tokens."""
    hf_config = json.loads((BUNDLED_MODEL / "config.json").read_text())
    hf_config["vocab_size"] += num_added_tokens
    return VllmConfig(
        model=ModelConfig(
            model="stdlib",
            served_model_name=("stdlib",),
            arch=ModelArch.from_hf(hf_config),
            path=str(BUNDLED_MODEL),
            max_model_len=max_model_len,
            **model,
        ),
        cache=CacheConfig(block_size=16),
        scheduler=SchedulerConfig(
            max_model_len=max_model_len, max_num_seqs=8, max_num_batched_tokens=64
        ),
    )


def logprob_rows(token_ids: Iterable[int], num_top: int = 0) -> LogprobRows:
    """Return log-probabilities for one position per token. Each token is the most likely one of its
    position, followed by the tokens 1, 2, 3, ...
    """
    ids = [[token_id, token_id, *range(1, num_top)][: 1 + num_top] for token_id in token_ids]
    shape = (len(ids), 1 + num_top)
    return LogprobRows(
        token_ids=np.array(ids, np.int32).reshape(shape),
        logprobs=np.tile(-0.5 * np.arange(1, 2 + num_top, dtype=np.float32), (len(ids), 1)),
        ranks=np.ones(len(ids), np.int32),
    )
