"""Test the counters that workers report, on the CPU and on the simulated card."""

from tests.hpu import FEW_BUCKETS, SMALL_ENGINE, captured_log, simulated_hpu
from tests.reach import executor_of
from vllm import LLM, SamplingParams
from vllm.messages import RunnerStats

GREEDY = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)


def stats_after_one_request(device: str) -> RunnerStats:
    """Return the counters after a prompt of 20 tokens and three output tokens, the last of which is
    sampled but not run.
    """
    llm = LLM(**SMALL_ENGINE, device=device)
    executor = executor_of(llm)
    assert executor.stats() == RunnerStats()
    llm.generate({"prompt_token_ids": [20] * 20}, GREEDY, use_tqdm=False)
    return executor.stats()


def test_a_device_that_takes_any_shape_pads_nothing():
    with captured_log():
        assert stats_after_one_request("cpu") == RunnerStats(num_steps=3, num_useful_tokens=22)


def test_padding_is_what_the_buckets_add():
    with simulated_hpu(has_profiling_run=False, PT_HPU_LAZY_MODE=1, **FEW_BUCKETS), captured_log():
        stats = stats_after_one_request("hpu")
        micros = stats.recent_launches[-1]  # a simulated time
        assert micros > 0
        assert stats == RunnerStats(
            num_steps=3,
            num_useful_tokens=22,
            num_padded_tokens=32 + 4 + 4 - 22,
            num_bucket_hits=3,
            num_decode_blocks=2 + 2,
            num_padded_blocks=32 + 32 - 4,
            recent_launches=(3, *(1, 1, 1, 2, 4, 1, 32, micros) * 2),
        )


def test_without_warm_up_shapes_are_missed_once_and_compile_while_requests_wait():
    variables = FEW_BUCKETS | {"VLLM_SKIP_WARMUP": 1, "PT_HPU_LAZY_MODE": 1}
    with simulated_hpu(has_profiling_run=False, **variables), captured_log():
        stats = stats_after_one_request("hpu")
    assert (stats.num_bucket_misses, stats.num_bucket_hits) == (2, 1)
    assert stats.num_late_compilations > 0
