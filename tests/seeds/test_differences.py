"""Test intended differences from the documents: how to get the documented behaviour."""

import numpy as np
import torch

from tests.sample.helpers import make_request, make_state
from tests.worker.hpu_helpers import make_config
from vllm.bucketing import Phase
from vllm.bucketing.bucket import prefill
from vllm.bucketing.catalog.bucket_plan import plan_buckets
from vllm.sample.sampler import Sampler


def plan(**variables: int):
    config = make_config(
        block_size=128,
        max_model_len=2048,
        max_num_seqs=4,
        max_num_batched_tokens=8192,
        bucket_variables=tuple(variables.items()),
    )
    return plan_buckets(config, num_blocks=65)


def test_three_prompts_share_a_bucket_of_four_where_there_is_none_smaller():
    ours, theirs = plan().catalog, plan(VLLM_PROMPT_BS_BUCKET_MIN=4).catalog
    assert ours.fit(Phase.PREFILL, 3, 412, 0) == prefill(4, 512)
    assert ours.fit(Phase.PREFILL, 2, 412, 0) == prefill(2, 512)
    assert ours.fit(Phase.PREFILL, 1, 412, 0) == prefill(1, 512)
    assert {theirs.fit(Phase.PREFILL, n, 412, 0) for n in (1, 2, 3)} == {prefill(4, 512)}


def test_decode_blocks_of_the_recipe_are_those_of_its_formula():
    assert [seqs * (32 + 1) * 1024 // 128 for seqs in (128, 32)] == [33792, 8448]
    variables = {
        "VLLM_DECODE_BLOCK_BUCKET_MIN": 1024,
        "VLLM_DECODE_BLOCK_BUCKET_STEP": 1024,
        "VLLM_DECODE_BLOCK_BUCKET_MAX": 33792,
    }
    for seqs in (128, 32):
        config = make_config(
            block_size=128,
            max_model_len=33 * 1024,
            max_num_seqs=seqs,
            max_num_batched_tokens=8192,
            enable_prefix_caching=False,
            bucket_variables=tuple(variables.items()),
        )
        most = seqs * 33 * 1024 // 128
        catalog = plan_buckets(config, num_blocks=most + 1).catalog
        assert max(bucket.blocks for bucket in catalog.decode) == most


def test_tokens_that_tie_at_the_last_place_of_top_k_are_all_kept():
    """This is the sampler of a card without VLLM_HANDLE_TOPK_DUPLICATES."""
    logits = torch.full((256,), -5.0)
    logits[[7, 70, 140, 200]] = torch.tensor([3.0, 2.0, 2.0, 2.0])
    request = make_request(top_k=2)
    state = make_state([request], len(logits), static_shapes=True)
    seen = set()
    for start in range(4):
        order, done = np.zeros(64, np.int32), np.arange(64 * start, 64 * start + 64, dtype=np.int32)
        output = Sampler(None)(logits.repeat(64, 1), state.metadata(order, done))
        seen |= set(output.token_ids.tolist())
    assert seen == {7, 70, 140, 200}
