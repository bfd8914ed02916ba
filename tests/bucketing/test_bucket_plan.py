"""Test that the catalog of a configuration has a bucket for everything that its scheduler emits."""

import random
from dataclasses import replace
from itertools import product

import pytest

from tests.bucketing.helpers import pairs, triples
from tests.loops import loop_over
from tests.worker.hpu_helpers import make_config, run_load
from vllm.bucketing import Phase
from vllm.bucketing.catalog.bucket_plan import plan_buckets
from vllm.bucketing.catalog.closure import prove, unused_buckets
from vllm.config import ModelConfig, SpeculativeConfig, VllmConfig
from vllm.config.arch.model_arch import ModelArch
from vllm.errors import ConfigError
from vllm.messages import SchedulerOutput
from vllm.planning.replay import ScheduleLoop, sampled_rows
from vllm.worker.hpu.launches.planner import PaddedLaunch

SMALL = {"block_size": 16, "max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 128}
MAMBA = ModelArch.from_hf(
    {
        "architectures": ["MambaForCausalLM"],
        "model_type": "mamba",
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "vocab_size": 16,
        "state_size": 4,
    }
)


def seed_config(max_model_len: int) -> VllmConfig:
    """Return the config of the published example: four sequences, whole prompts, no prefix
    cache.
    """
    return make_config(
        block_size=128,
        max_model_len=max_model_len,
        max_num_seqs=4,
        max_num_batched_tokens=8192,
        enable_chunked_prefill=False,
        enable_prefix_caching=False,
        bucket_variables=(("VLLM_DECODE_BS_BUCKET_STEP", 128),),
    )


def test_the_lines_come_in_the_order_of_the_seeds():
    plan = plan_buckets(seed_config(1024), num_blocks=4107)
    prompts, generated, decodes, generated_decodes = plan.info
    assert prompts == (
        "Prompt bucket config (min, step, max_warmup) bs:[1, 4, 4], seq:[128, 128, 1024]"
    )
    assert generated.startswith("Generated 24 prompt buckets: [(1, 128), (1, 256), (1, 384), ")
    assert generated.endswith("(4, 896), (4, 1024)]")
    assert decodes == (
        "Decode bucket config (min, step, max_warmup) bs:[1, 128, 4], seq:[128, 128, 128]"
    )
    assert generated_decodes == "Generated 3 decode buckets: [(1, 8), (2, 16), (4, 32)]"
    assert plan.warnings == ()


def test_what_the_budget_omits_is_said_between_ranges_and_buckets():
    steps = (("VLLM_PROMPT_SEQ_BUCKET_MIN", 16), ("VLLM_PROMPT_SEQ_BUCKET_STEP", 16))
    budget = {"max_num_batched_tokens": 64, "max_num_seqs": 2}
    config = make_config(**{**SMALL, **budget}, bucket_variables=steps)
    starts = [line.split(" (")[0].split(":")[0] for line in plan_buckets(config, 17).info]
    assert starts == [
        "Prompt bucket config",
        "Omitted 10 prompt buckets due to exceeded token budget",
        "Generated 11 prompt buckets [bs, query, num_blocks]",
        "Decode bucket config",
        "Generated 2 decode buckets",
    ]


@pytest.mark.parametrize("strategy", ["exponential", "sparse"])
def test_variables_that_a_strategy_ignores_are_warned_of(strategy):
    variables = (("VLLM_PROMPT_BS_BUCKET_MAX", 2),)
    config = make_config(**SMALL, bucketing_strategy=strategy, bucket_variables=variables)
    assert plan_buckets(config, 33).warnings == (
        f"Using {strategy.capitalize()} Strategy - Your configuration "
        "VLLM_PROMPT_BS_BUCKET_MAX=2 will be overwritten!",
    )


# ---- buckets from a file -------------------------------------------------------------------------


def test_a_file_takes_the_place_of_a_strategy(tmp_path):
    path = tmp_path / "buckets.txt"
    path.write_text("(1, 128, 8)\n(1, 16, [0, 2])\n(4, 1, range(8, 33, 8))\n(4, 64, 0)\n")
    config = make_config(**SMALL, bucketing_file=str(path))
    plan = plan_buckets(config, num_blocks=33)
    assert triples(plan.catalog.prefill) == [(1, 16, 0), (1, 16, 2), (1, 128, 8)]
    assert pairs(plan.catalog.decode) == [(4, 8), (4, 16), (4, 24), (4, 32)]
    assert plan.info == (
        "Generated 3 prompt buckets [bs, query, num_blocks]: [(1, 16, 0), (1, 16, 2), (1, 128, 8)]",
        "Generated 4 decode buckets: [(4, 8), (4, 16), (4, 24), (4, 32)]",
    )
    assert plan.warnings == (
        f"The following prompt buckets from custom bucketing file {path} exceed "
        f"max_num_batched_tokens (128) and were omitted: [(4, 64, 0)]",
    )


def test_a_file_that_cannot_be_read_is_an_error_that_names_the_variable(tmp_path):
    config = make_config(**SMALL, bucketing_file=str(tmp_path / "nowhere"))
    with pytest.raises(
        ConfigError, match=r"VLLM_BUCKETING_FROM_FILE=.*nowhere cannot be read: No such file"
    ):
        plan_buckets(config)
    (tmp_path / "bytes").write_bytes(b"\xff")
    config = make_config(**SMALL, bucketing_file=str(tmp_path / "bytes"))
    with pytest.raises(
        ConfigError,
        match=r"VLLM_BUCKETING_FROM_FILE=.*bytes cannot be read: it is not text in UTF-8",
    ):
        plan_buckets(config)


def test_what_a_file_lacks_is_added_and_said(tmp_path):
    path = tmp_path / "buckets.txt"
    path.write_text("(1, 32, 2)\n(2, 1, 10)\n")
    plan = plan_buckets(make_config(**SMALL, bucketing_file=str(path)), num_blocks=33)
    assert plan.limits.max_query_len == 32
    assert triples(plan.catalog.prefill) == [(1, 32, 2), (1, 32, 8)]
    assert pairs(plan.catalog.decode) == [(2, 10), (4, 32)]
    assert plan.info[-1] == (
        "Added 2 buckets, for steps beyond the configured ranges: [(1, 32, 8), (4, 1, 32)]"
    )


def test_beyond_the_default_range_decode_buckets_grow_by_a_quarter():
    config = make_config(
        block_size=128, max_model_len=8192, max_num_seqs=128, max_num_batched_tokens=8192
    )
    plan = plan_buckets(config, num_blocks=4107)
    largest = [blocks for batch, blocks in pairs(plan.catalog.decode) if batch == 128]
    assert largest[-5:] == [2048, 2560, 3200, 4000, 4106]
    chosen = make_config(
        block_size=128,
        max_model_len=8192,
        max_num_seqs=128,
        max_num_batched_tokens=8192,
        bucket_variables=(("VLLM_DECODE_BLOCK_BUCKET_MAX", 2048),),
    )
    plan = plan_buckets(chosen, num_blocks=4107)
    assert [blocks for batch, blocks in pairs(plan.catalog.decode) if batch == 128][-2:] == [
        2048,
        4106,
    ]


# ---- limits of one forward pass ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "longest"),
    [
        ({}, 128),
        ({"bucket_variables": (("VLLM_PROMPT_SEQ_BUCKET_MAX", 32),)}, 32),
        ({"bucket_variables": (("VLLM_PROMPT_SEQ_BUCKET_MAX", 512),)}, 128),
        ({"long_prefill_token_threshold": 20}, 20),
        # Without chunked prefill the threshold has no effect.
        ({"long_prefill_token_threshold": 20, "enable_chunked_prefill": False}, 128),
        ({"bucketing_strategy": "exponential"}, 128),
        ({"bucketing_strategy": "sparse"}, 128),
    ],
)
def test_no_launch_is_longer_than_the_longest_bucket(settings, longest):
    plan = plan_buckets(make_config(**{**SMALL, **settings}), num_blocks=33)
    assert plan.limits.max_query_len == longest
    assert prove(plan.catalog, plan.limits).is_covered
    assert max(bucket.query_len for bucket in plan.catalog.prefill) >= longest


def test_parts_of_a_prompt_have_context_even_where_no_prompt_has():
    """A prompt of 2048 tokens runs in two parts, without chunked prefill and prefix caching. Only
    the second part has context.
    """
    plan = plan_buckets(seed_config(2048), num_blocks=4107)
    assert plan.limits.max_query_len == 1024
    counts = {bucket.blocks for bucket in plan.catalog.prefill if bucket.query_len == 1024}
    assert counts == {0, 9}
    assert {bucket.blocks for bucket in plan.catalog.prefill if bucket.batch > 1} == {0}
    assert not plan.info[-1].startswith("Added")


@pytest.mark.parametrize("strategy", ["linear", "exponential", "sparse"])
@pytest.mark.parametrize("contiguous_pa", [False, True])
def test_no_decode_bucket_is_beyond_what_is_launched_at_once(strategy, contiguous_pa):
    """128 requests with shared blocks can have 131,072 references to blocks. Their batch is split,
    so that a forward pass has at most 4,106.
    """
    config = make_config(
        block_size=128,
        max_model_len=131072,
        max_num_seqs=128,
        max_num_batched_tokens=8192,
        bucketing_strategy=strategy,
        contiguous_pa=contiguous_pa,
    )
    plan = plan_buckets(config, num_blocks=4107)
    assert plan.limits.max_block_refs == 4106
    most = max(bucket.blocks for bucket in plan.catalog.decode)
    assert most == 4106 + contiguous_pa


@pytest.mark.parametrize(
    ("max_model_len", "num_blocks", "num_prefill", "num_decode"),
    [(2048, 1520, 66, 42), (8192, 4107, 77, 90), (131072, 4107, 87, 158)],
)
def test_the_default_catalog_is_small(max_model_len, num_blocks, num_prefill, num_decode):
    config = make_config(
        block_size=128,
        max_model_len=max_model_len,
        max_num_seqs=128,
        max_num_batched_tokens=8192,
    )
    catalog = plan_buckets(config, num_blocks).catalog
    assert (len(catalog.prefill), len(catalog.decode)) == (num_prefill, num_decode)


SHAPES = {
    # (longest sequence, requests, tokens of a step, KV blocks of 128 tokens)
    "a small model on a large card": (8192, 128, 8192, 208859),
    "0.5 billion parameters": (32768, 256, 2048, 48700),
    "two requests": (2048, 2, 2048, 26500),
    "8 billion parameters": (131072, 128, 8192, 4107),
    "a short cache": (4096, 64, 1024, 40),
}


@loop_over("shape", SHAPES.values())
@loop_over("strategy", ["linear", "exponential", "sparse", "pad"])
@loop_over("prefix_caching", [False, True])
def test_every_bucket_can_run_and_every_step_has_one(shape, strategy, prefix_caching):
    """This holds for each block size, and whether decodes read slices or gather blocks."""
    max_model_len, seqs, budget, num_blocks = shape
    for block_size, contiguous_pa in product((16, 64, 128, 512), (False, True)):
        config = make_config(
            block_size=block_size,
            max_model_len=max_model_len,
            max_num_seqs=seqs,
            max_num_batched_tokens=budget,
            bucketing_strategy=strategy,
            enable_prefix_caching=prefix_caching,
            contiguous_pa=contiguous_pa,
        )
        plan = plan_buckets(config, num_blocks * 128 // block_size)
        catalog, limits = plan.catalog, plan.limits
        assert prove(catalog, limits).is_covered
        assert unused_buckets(catalog, limits) == []
        for bucket in catalog.decode:
            most = min(bucket.batch * limits.max_blocks_per_seq, limits.usable_blocks)
            assert bucket.blocks <= most + contiguous_pa
        assert max(len(line) for line in (*plan.info, *plan.warnings)) < 1900
        assert len(catalog.decode) <= 500


def test_buckets_of_a_file_that_no_step_can_use_are_left_out_and_named(tmp_path):
    path = tmp_path / "buckets.txt"
    path.write_text("(1, 128, [0, 8])\n(1, 128, 9)\n([1, 4], 1, 9999)\n(64, 1, 64)\n")
    plan = plan_buckets(make_config(**SMALL, bucketing_file=str(path)), num_blocks=33)
    assert triples(plan.catalog.prefill) == [(1, 128, 0), (1, 128, 8)]
    assert pairs(plan.catalog.decode) == [(1, 8), (4, 32)]
    assert plan.info[-1] == ("Left out 2 buckets that no step can use: [(1, 128, 9), (64, 1, 32)]")


@pytest.mark.parametrize(("captured", "num_long"), [(2048, 15), (8192, 10), (131072, 0)])
def test_sequences_beyond_the_captured_length_add_few_prompt_buckets(captured, num_long):
    """A model with 131,072 positions is served with all defaults."""
    config = make_config(
        block_size=128,
        max_model_len=131072,
        max_num_seqs=4,
        max_num_batched_tokens=8192,
        max_seq_len_to_capture=captured,
    )
    plan = plan_buckets(config, num_blocks=4107)
    assert prove(plan.catalog, plan.limits).is_covered
    beyond = [b for b in plan.catalog.prefill if b.blocks * 128 > captured]
    assert len(beyond) == num_long
    assert {b.query_len for b in beyond} <= {128, 256, 512, 1024}


def test_a_plan_before_the_blocks_are_known_covers_one_after():
    """The profiling run uses the plan that is made before the number of blocks is known."""
    config = make_config(**SMALL)
    before, after = plan_buckets(config).catalog, plan_buckets(config, num_blocks=20).catalog
    for phase in Phase:
        buckets = before.prefill if phase is Phase.PREFILL else before.decode
        later = after.prefill if phase is Phase.PREFILL else after.decode
        assert all(any(bucket.covers(other) for bucket in buckets) for other in later)


@pytest.mark.parametrize("contiguous_pa", [False, True])
def test_decodes_that_verify_drafts_have_buckets_of_their_own(contiguous_pa):
    plain = plan_buckets(make_config(**SMALL, contiguous_pa=contiguous_pa), 33)
    config = make_config(**SMALL, contiguous_pa=contiguous_pa, max_draft_tokens=3)
    plan = plan_buckets(config, 33)
    assert {bucket.query_len for bucket in plain.catalog.decode} == {1}
    one_token = [bucket for bucket in plan.catalog.decode if bucket.query_len == 1]
    assert one_token == list(plain.catalog.decode)
    assert plan.catalog.prefill == plain.catalog.prefill
    for bucket in one_token:
        assert plan.catalog.fit(Phase.DECODE, bucket.batch, 1, bucket.blocks) == bucket
        verifying = plan.catalog.fit(Phase.DECODE, bucket.batch, 3, bucket.blocks)
        assert (verifying.batch, verifying.query_len) == (bucket.batch, 4)
    assert prove(plan.catalog, plan.limits).is_covered
    assert not prove(plain.catalog, plan.limits).is_covered


def test_a_largest_batch_with_drafts_bounds_the_buckets_that_verify_them():
    config = make_config(**SMALL, max_draft_tokens=3)
    speculative = {"method": "ngram", "num_speculative_tokens": 3, "disable_by_batch_size": 1}
    limited = replace(config, speculative=SpeculativeConfig(speculative_config=speculative))
    found = [plan_buckets(each, 33) for each in (config, limited)]
    batches = [{b.batch for b in x.catalog.decode if b.query_len > 1} for x in found]
    assert batches[1] == {min(batches[0])} < batches[0]
    assert prove(found[1].catalog, found[1].limits).is_covered


@loop_over(
    "settings",
    [
        {},
        {"contiguous_pa": True, "max_draft_tokens": 2},
        {"enable_prefix_caching": False, "enable_chunked_prefill": False},
        {"bucket_variables": (("VLLM_DECODE_BLOCK_BUCKET_MAX", 64),)},
        *({"bucketing_strategy": name} for name in ("exponential", "sparse", "pad")),
    ],
)
def test_a_model_without_kv_cache_has_no_sizes_of_context(settings):
    """Its buckets are few, and every batch of random requests fits one and is packed for it."""
    config = make_config(**SMALL | settings)
    config = replace(config, model=ModelConfig(model="none", arch=MAMBA))
    plan = plan_buckets(config, 33)
    assert {bucket.blocks for bucket in plan.catalog.prefill} == {0}
    assert all(bucket.blocks == bucket.batch for bucket in plan.catalog.decode)
    rng, seen = random.Random(1), set()
    loop = ScheduleLoop(config, 33, plan)

    def run_step(step: SchedulerOutput, launches: list[PaddedLaunch]) -> list[int]:
        for launch in launches:
            assert launch.bucket in plan.catalog
            assert not launch.is_contiguous
            loop.inputs.pack(launch)
            seen.add((launch.bucket.phase, bool(launch.num_computed_tokens.any())))
        return rng.choices(range(4), k=len(sampled_rows(step, loop.batch)))

    run_load(rng, loop, 60, run_step)
    assert (Phase.DECODE, True) in seen
    assert ((Phase.PREFILL, True) in seen) == plan.limits.enable_chunked_prefill
    assert plan_buckets(make_config(**SMALL | settings), 33).limits.reads_blocks
