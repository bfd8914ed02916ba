"""Test buckets that are chosen for recorded traffic: they cover all steps, have the requested
number, and are read back from a file.
"""

import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.bucketing.test_closure import small_limits
from tests.worker.hpu_helpers import make_config
from vllm.bucketing.bucket import Phase, decode, prefill
from vllm.bucketing.catalog.bucket_plan import choose_for_config, plan_buckets
from vllm.bucketing.catalog.catalog import Catalog
from vllm.bucketing.catalog.closure import prove
from vllm.bucketing.catalog.from_traffic import (
    bucket_file_text,
    choose_for_traffic,
    mandatory_buckets,
    traffic_limits,
)
from vllm.bucketing.step_limits import StepLimits
from vllm.bucketing.strategies.bucket_file import parse_buckets
from vllm.bucketing.traffic import TrafficTable, even_traffic
from vllm.config import VllmConfig
from vllm.errors import ConfigError

SERVER = StepLimits(
    max_num_seqs=128,
    max_model_len=8192,
    max_num_batched_tokens=8192,
    block_size=128,
    num_blocks=4103,
    max_chunk_tokens=1024,
)


def random_table(block_size: int, seed: int) -> TrafficTable:
    rng = random.Random(seed)
    table = TrafficTable(block_size)
    for _ in range(rng.randint(1, 30)):
        batch = rng.randint(1, 8)
        table.add(Phase.DECODE, batch, rng.choice([1, 1, 3]), batch + rng.randint(0, 40))
        table.add(Phase.PREFILL, rng.randint(1, 3), rng.randint(1, 12), rng.randint(0, 5))
    return table


@given(limits=small_limits, seed=st.integers(0, 2**32), num_buckets=st.integers(1, 6))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_chosen_sets_are_closed_for_any_limits(
    limits: StepLimits, seed: int, num_buckets: int
) -> None:
    table = random_table(limits.block_size, seed)
    limits = replace(limits, max_block_refs=None)
    chosen = choose_for_traffic(table, limits, num_buckets)
    launch_limits = traffic_limits(table, limits)
    prefills = [bucket for bucket in chosen.buckets if bucket.phase is Phase.PREFILL]
    decodes = [bucket for bucket in chosen.buckets if bucket.phase is Phase.DECODE]
    assert prove(Catalog(prefills, decodes), launch_limits).is_covered
    mandatory = mandatory_buckets(launch_limits)
    for phase, found in ((Phase.PREFILL, prefills), (Phase.DECODE, decodes)):
        least = sum(b.phase is phase for b in mandatory)
        assert len(found) <= max(num_buckets, least)
        text = f". --num-buckets {num_buckets} is too few; at least {least} are needed"
        assert any(f" {phase} " in line and text in line for line in chosen.lines) == (
            num_buckets < least
        )


def test_the_smallest_closed_set_has_the_largest_launch_of_each_phase() -> None:
    assert mandatory_buckets(SERVER) == [prefill(1, 1024, 64), decode(128, 8192)]


def test_a_set_for_even_traffic_needs_no_record() -> None:
    chosen = choose_for_traffic(even_traffic(SERVER), SERVER, 8)
    assert len(chosen.buckets) == 16
    first, second = chosen.lines
    assert first.startswith("8 prefill buckets: ")
    assert second.startswith("8 decode buckets: ")
    assert "% padding; no 8 buckets can have less than " in second


def recorded(tmp_path: Path, block_size: int = 16) -> Path:
    table = TrafficTable(block_size)
    for batch, blocks in ((1, 3), (2, 9), (3, 14), (4, 30)):
        table.add(Phase.DECODE, batch, 1, blocks, count=100)
    table.add(Phase.PREFILL, 1, 40, 2, count=9)
    table.save(tmp_path / "traffic.json")
    return tmp_path / "traffic.json"


def make_traffic_config(path: Path | None, **settings: object) -> VllmConfig:
    return make_config(
        block_size=16,
        max_model_len=128,
        max_num_seqs=4,
        max_num_batched_tokens=128,
        bucketing_strategy="optimal",
        traffic=None if path is None else str(path),
        **settings,
    )


def test_an_engine_has_the_chosen_buckets_and_says_their_certificate(tmp_path: Path) -> None:
    config = choose_for_config(make_traffic_config(recorded(tmp_path), num_buckets=4))
    plan = plan_buckets(config, 33)
    decodes = [(b.batch, b.blocks) for b in plan.catalog.decode]
    assert decodes == [(1, 3), (2, 9), (3, 14), (4, 32)]
    assert plan.limits.max_query_len == 48, "as long as the prompts of the traffic"
    assert {b.query_len for b in plan.catalog.prefill} == {48}
    assert any(line.startswith("4 decode buckets: 0.0 % padding; no 4") for line in plan.info)
    assert prove(plan.catalog, plan.limits).is_covered


def test_the_longest_prompt_can_be_set(tmp_path: Path) -> None:
    variables = (("VLLM_PROMPT_SEQ_BUCKET_MAX", 96), ("VLLM_DECODE_BS_BUCKET_MAX", 2))
    config = make_traffic_config(recorded(tmp_path), bucket_variables=variables)
    plan = plan_buckets(choose_for_config(config), 33)
    assert plan.limits.max_query_len == 96
    assert plan.warnings == (
        "VLLM_DECODE_BS_BUCKET_MAX=2 has no effect: buckets are chosen for the traffic of "
        "--traffic",
    )


@pytest.mark.parametrize(
    ("block_size", "words"),
    [(None, "needs --traffic FILE"), (128, "blocks of 128 tokens, and this engine has")],
)
def test_traffic_that_is_missing_or_of_other_blocks_is_an_error(
    tmp_path: Path, block_size: int | None, words: str
) -> None:
    path = None if block_size is None else recorded(tmp_path, block_size)
    with pytest.raises(ConfigError, match=words):
        choose_for_config(make_traffic_config(path))


def test_a_written_file_is_read_back_with_its_certificate_as_a_comment(tmp_path: Path) -> None:
    config = choose_for_config(make_traffic_config(recorded(tmp_path), num_buckets=4))
    plan = plan_buckets(config, 33)
    buckets = [*plan.catalog.prefill, *plan.catalog.decode]
    text = bucket_file_text([*buckets, decode(4, 32, 3)], config.hpu.chosen_lines)
    assert "# 4 decode buckets: 0.0 % padding" in text
    assert sorted(parse_buckets(text, "text")) == sorted(buckets)
    path = tmp_path / "buckets.txt"
    path.write_text(text)
    from_file = replace(config, hpu=replace(config.hpu, bucketing_file=str(path)))
    assert plan_buckets(from_file, 33).catalog.decode == plan.catalog.decode
