"""Run `vllm bench latency`: repeat one batch of requests with fixed lengths."""

import argparse
import time
from typing import TYPE_CHECKING, Any

from vllm.entrypoints.bench import offline, report
from vllm.entrypoints.bench.dataset_args import DatasetArgs
from vllm.entrypoints.bench.datasets import random_requests
from vllm.utils.arguments import add_number, check_smallest

if TYPE_CHECKING:
    from vllm import LLM

_PERCENTILES = (10, 25, 50, 75, 90, 99)


def add_cli_args(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    group = parser.add_argument_group("batch")
    add_number(group, "--batch-size", "prompts", 8)
    add_number(group, "--input-len", "tokens of each prompt", 32)
    add_number(group, "--output-len", "tokens of each output", 128)
    add_number(group, "--num-iters", "measured runs of the batch", 30)
    add_number(group, "--num-iters-warmup", "warm-up runs before them, not measured", 10)
    offline.add_cli_args(parser)


def run(args: argparse.Namespace) -> None:
    """Run the benchmark. Print a table to stdout, and JSON if requested.

    Raises:
        RequestError: n and temperature contradict each other.
        ConfigError: a value is too small, or the engine cannot start.
    """
    check_smallest(args, batch_size=1, input_len=1, output_len=1, num_iters=1)
    offline.sampling(1, args)  # wrong arguments raise before the model is loaded
    report.check_writable(args.output_json)
    llm = offline.make_llm(args)
    for iteration in range(args.num_iters_warmup):
        _time_batch(llm, args, args.output_len, seed=-1 - iteration)
    # The time of a batch with one output token is prefill; the rest of a whole batch is decode.
    first_s = [_time_batch(llm, args, 1, seed=2 * i) for i in range(args.num_iters)]
    whole_s = [_time_batch(llm, args, args.output_len, 2 * i + 1) for i in range(args.num_iters)]
    result = _summarize(llm, args, first_s, whole_s)
    figures = (("batch", result["latency"]), ("first token", result["first_token"]))
    names = list(result["latency"])
    rows: list[tuple[object, ...]] = [("ms", *names)]
    rows += [(name, *(found[key] * 1e3 for key in names)) for name, found in figures]
    rows.append(("further token", result["decode_ms_per_step"]))
    report.emit(result, rows, args.output_json)


def _time_batch(llm: "LLM", args: argparse.Namespace, num_tokens: int, seed: int) -> float:
    """Return the seconds for one batch. Each seed gives different prompts, so that none is in the
    prefix cache.
    """
    vocab_size = llm.llm_engine.vllm_config.model.resolved_arch.vocab_size
    dataset = DatasetArgs(
        name="random", num_prompts=args.batch_size, input_len=args.input_len, seed=seed
    )
    # In most vocabularies the first ids are special tokens, so skip them.
    requests = random_requests(dataset, range(min(16, vocab_size - 1), vocab_size))
    prompts: Any = [{"prompt_token_ids": request.prompt} for request in requests]
    params = offline.sampling(num_tokens, args)
    start = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - start


def _summarize(
    llm: "LLM", args: argparse.Namespace, first_s: list[float], whole_s: list[float]
) -> dict[str, Any]:
    import numpy as np

    from vllm.entrypoints.bench.statistics import describe

    decode_s = float(np.median(whole_s) - np.median(first_s))
    return {
        "benchmark": "latency",
        "machine": report.machine() | offline.facts(llm),
        "batch_size": args.batch_size,
        "input_len": args.input_len,
        "output_len": args.output_len,
        "avg_latency": round(float(np.mean(whole_s)), 6),
        "latencies": [round(s, 6) for s in whole_s],
        "percentiles": {str(p): round(float(np.percentile(whole_s, p)), 6) for p in _PERCENTILES},
        "latency": describe(whole_s, _PERCENTILES[-2:], digits=6),
        "first_token": describe(first_s, _PERCENTILES[-2:], digits=6),
        "decode_ms_per_step": round(decode_s / max(1, args.output_len - 1) * 1e3, 3),
    }
