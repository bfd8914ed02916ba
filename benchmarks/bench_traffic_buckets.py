"""Compare the padding of buckets that were chosen for a trace with the padding of strategies.

Buckets are chosen for the first half of a trace, and their padding is counted in the second half.

    prompts   one prompt in a forward pass; as many sizes as the exponential strategy has; padding
              in tokens
    decodes   the scheduler and the planner replay the requests with predicted times (8 billion
              parameters on a Gaudi 2); padding in device time

    python benchmarks/bench_traffic_buckets.py --trace azure_conv.csv:4096 --decodes 2000

Prints one line of JSON. Nothing here is measured on a card.
"""

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from vllm.bucketing import Phase, StepLimits
from vllm.bucketing.bucket import Bucket, prefill
from vllm.bucketing.catalog.bucket_plan import plan_buckets, step_limits
from vllm.bucketing.catalog.from_traffic import bucket_cost, choose_for_traffic
from vllm.bucketing.optimal import Ints, choose_buckets, cost_of
from vllm.bucketing.settings import BucketSettings
from vllm.bucketing.strategies.generate import Strategy, generate_buckets
from vllm.bucketing.traffic import Weights
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    HPUConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.planning.replay import Replay, replay
from vllm.planning.request_lengths import RequestLengths, read_lengths

BLOCK_SIZE = 128


def halves(requests: RequestLengths, count: int | None = None) -> list[RequestLengths]:
    """Return the first `count` requests of each half."""
    middle = len(requests) // 2
    count = middle if count is None else min(count, middle)
    parts = [requests.part(slice(0, count)), requests.part(slice(middle, middle + count))]
    return [p if p.times is None else replace(p, times=p.times - p.times[0]) for p in parts]


# ---- prompts --------------------------------------------------------------------------------


def tokens(phase: Ints, batch: Ints, query_len: Ints, blocks: Ints) -> Weights:
    return (batch * query_len).astype(np.float64)


def prompt_shapes(requests: RequestLengths, longest: int) -> tuple[Ints, Weights]:
    """Return the shapes of single prompts in whole blocks, and how often each occurs."""
    lengths = np.minimum(requests.num_inputs, longest)
    padded = -(-lengths // BLOCK_SIZE) * BLOCK_SIZE
    sizes, counts = np.unique(padded, return_counts=True)
    ones = np.ones_like(sizes)
    return np.stack([0 * ones, ones, sizes, 0 * ones], 1), counts.astype(np.float64)


def strategy_sizes(strategy: Strategy, longest: int) -> list[Bucket]:
    """Return the buckets of a strategy for one prompt without context."""
    limits = StepLimits(
        max_num_seqs=1,
        max_model_len=longest,
        max_num_batched_tokens=longest,
        block_size=BLOCK_SIZE,
        num_blocks=1 + 2 * longest // BLOCK_SIZE,
    )
    variables = {"VLLM_PROMPT_SEQ_BUCKET_MAX": longest}
    found = generate_buckets(strategy, limits, BucketSettings.resolve(limits, variables))
    lengths = {bucket.query_len for bucket in found.prefill if bucket.batch == 1}
    return [prefill(1, length) for length in sorted(lengths | {longest})]


def evenly(count: int, longest: int) -> list[Bucket]:
    """Return `count` buckets with evenly spaced lengths."""
    ends = np.linspace(0, longest, count + 1)[1:]
    return [prefill(1, int(-(-end // BLOCK_SIZE) * BLOCK_SIZE)) for end in ends]


def measure_prompts(requests: RequestLengths, longest: int) -> dict[str, Any]:
    first, second = (prompt_shapes(part, longest) for part in halves(requests))
    needed = np.minimum(halves(requests)[1].num_inputs, longest).sum()

    def padding(buckets: list[Bucket] | tuple[Bucket, ...]) -> float:
        return round(float(cost_of(buckets, *second, tokens) / needed - 1), 4)

    exponential = strategy_sizes("exponential", longest)
    count = len(exponential)
    chosen = choose_buckets(*first, None, [prefill(1, longest)], count=count, cost=tokens)
    hindsight = choose_buckets(*second, None, [prefill(1, longest)], count=count, cost=tokens)
    return {
        "longest": longest,
        "sizes": count,
        "exponential": padding(exponential),
        "linear_same_number": padding(evenly(count, longest)),
        "optimal": padding(chosen.buckets),
        "optimal_in_hindsight": padding(hindsight.buckets),
        "linear_every_block": padding(evenly(longest // BLOCK_SIZE, longest)),
    }


# ---- decodes --------------------------------------------------------------------------------


def make_config(args: argparse.Namespace, **hpu: Any) -> VllmConfig:
    return VllmConfig(
        model=ModelConfig(model="none"),
        device=DeviceConfig(device="hpu"),
        cache=CacheConfig(block_size=BLOCK_SIZE),
        scheduler=SchedulerConfig(
            max_model_len=args.max_model_len, max_num_seqs=128, max_num_batched_tokens=8192
        ),
        hpu=HPUConfig(contiguous_pa=True, **hpu),
    )


def describe(found: Replay) -> dict[str, Any]:
    return {
        **{f"{phase}_padding": round(t.padding, 4) for phase, t in found.by_phase.items()},
        "padding": round(found.padding, 4),
        "device_s": round(sum(t.padded_s for t in found.by_phase.values()), 2),
        "steps": found.num_steps,
        "preemptions": found.num_preemptions,
    }


def measure_decodes(
    requests: RequestLengths, args: argparse.Namespace, rate: float
) -> dict[str, Any]:
    first, second = halves(requests, args.decodes)
    cost, num_blocks = bucket_cost(BLOCK_SIZE), args.num_blocks
    results: dict[str, Any] = {"rate": rate, "requests": len(first), "sets": {}}
    recorded = None
    for strategy in args.strategies:
        config = make_config(args, bucketing_strategy=strategy)
        plan = plan_buckets(config, num_blocks)
        if recorded is None:
            recorded = replay(config, num_blocks, plan, first, cost, rate=rate)
            batches = recorded.table.sizes(Phase.DECODE)["batch"]
            total = sum(batches.values())
            results["mean_batch"] = round(sum(b * n for b, n in batches.items()) / total, 1)
        found = replay(config, num_blocks, plan, second, cost, rate=rate)
        results["sets"][strategy] = {
            "prefill_buckets": len(plan.catalog.prefill),
            "decode_buckets": len(plan.catalog.decode),
            **describe(found),
        }
    assert recorded is not None
    limits = step_limits(make_config(args), num_blocks)
    limits = replace(limits, max_block_refs=limits.usable_blocks)
    for count in args.buckets:
        began = time.perf_counter()
        chosen = choose_for_traffic(recorded.table, limits, count)
        seconds = time.perf_counter() - began
        buckets = tuple((int(b.phase), b.batch, b.query_len, b.blocks) for b in chosen.buckets)
        config = make_config(args, bucketing_strategy="optimal", chosen_buckets=buckets)
        plan = plan_buckets(config, num_blocks)
        found = replay(config, num_blocks, plan, second, cost, rate=rate)
        results["sets"][f"optimal {count}"] = {
            "prefill_buckets": len(plan.catalog.prefill),
            "decode_buckets": len(plan.catalog.decode),
            **describe(found),
            "chosen_in_s": round(seconds, 2),
            "certificates": [round(each.certificate, 4) for each in chosen.choices],
            "lines": chosen.lines,
        }
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--trace", nargs="+", required=True, metavar="FILE[:LONGEST]", help="lengths of requests")
    add("--decodes", type=int, default=0, metavar="N", help="requests of each half to replay")
    add("--rate", type=float, nargs="+", default=[1.0], help="times the rate of the trace")
    add("--buckets", type=int, nargs="+", default=[8, 16, 32])
    add("--strategies", nargs="+", default=["linear", "exponential"])
    add("--max-model-len", type=int, default=8192, help="of the replayed engine")
    add("--num-blocks", type=int, default=4103)
    args = parser.parse_args()
    results = []
    for trace in args.trace:
        name, _, longest = trace.partition(":")
        requests = read_lengths(Path(name))
        row: dict[str, Any] = {"trace": Path(name).stem, "requests": len(requests)}
        row["prompts"] = measure_prompts(requests, int(longest or args.max_model_len))
        if args.decodes:
            row["decodes"] = [measure_decodes(requests, args, rate) for rate in args.rate]
        results.append(row)
    print(json.dumps({"benchmark": "traffic buckets", "settings": vars(args), "results": results}))


if __name__ == "__main__":
    main()
