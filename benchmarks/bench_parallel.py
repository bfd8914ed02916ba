"""Time several ranks on one CPU machine: exchanges, and engines against one process of two threads.

The engines are two tensor ranks or two stages of one thread each, and two stages of two threads
each that run alternately.

Run it with: python benchmarks/bench_parallel.py [--model FOLDER] [--num-rounds N]. Engines of all
kinds run one after another, each in a separate process. Prints JSON, and a table on stderr. Times
in us are the tenth percentile and the median; others are the smallest of the runs, which other
programs disturb least. The last rows compare each kind of two ranks with one process: above 1 is
faster, of the start it is slower. The time of a decode is for one token of each request. Two stages
of one thread run 32 requests in steps of 16, so they read each weight as often as one process that
runs 16.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from typing import Any

import torch
from common import fixed_length, random_prompts, report

from vllm import LLM
from vllm.config import ParallelConfig
from vllm.distributed import CheckedCollectives, Collectives, Rendezvous
from vllm.distributed.rendezvous import ARENA_BUFFER_BYTES, ARENA_HEADER_BYTES
from vllm.executor.ranks.rank_group import RankGroup
from vllm.ops.cpu.collectives import SharedMemoryCollectives
from vllm.ops.cpu.library import require_cpu_kernels

NUM_WARM_UPS, NUM_CALLS = 20, 200
NUM_BYTES = (8192, 65536, 1 << 20)
BATCH_SIZES = (1, 16, 32)
PREFILL_TOKENS = 512
PROMPT_TOKENS = 8
"""Of each request whose decodes are timed."""
SIZES: dict[str, dict[str, int]] = {
    "one": {},
    "tp 2": {"tensor_parallel_size": 2},
    "pp 2": {"pipeline_parallel_size": 2, "pipeline_steps_in_flight": 2},
    "pp 2, turns": {"pipeline_parallel_size": 2, "pipeline_steps_in_flight": 1},
}
"""Of the groups of ranks of each engine."""
NUM_THREADS = {"one": 2, "tp 2": 1, "pp 2": 1, "pp 2, turns": 2}
"""Of each rank: two compute at any time."""


def quantiles_us(times: list[float]) -> str:
    """Return the tenth percentile, which other programs disturb little, and the median, in
    microseconds.
    """
    ordered = sorted(times)
    return " ".join(f"{1e6 * ordered[int(q * len(ordered))]:.1f}" for q in (0.1, 0.5))


def all_reduce_us(collectives: Collectives, num_bytes: int) -> str:
    """Return the time of one all-reduce of float32 values, as this rank sees it, in
    microseconds.
    """
    x = torch.zeros(num_bytes // 4)
    times = []
    for _ in range(NUM_WARM_UPS + NUM_CALLS):
        started = time.perf_counter()
        collectives.all_reduce(x)
        times.append(time.perf_counter() - started)
    return quantiles_us(times[NUM_WARM_UPS:])


def all_reduces() -> list[dict[str, Any]]:
    """Fork a second rank, exchange tensors with it, and return the times of this rank."""
    torch.set_num_threads(1)
    parallel = ParallelConfig(tensor_parallel_size=2, distributed_timeout_s=60.0)
    rendezvous = Rendezvous.create(parallel)
    kernels = require_cpu_kernels("the benchmark needs")
    child = os.fork()
    rank = int(child == 0)
    mine = (
        Rendezvous.of(parallel, 1, rendezvous.arena_fd, rendezvous.address[1])
        if rank
        else rendezvous
    )
    shared = SharedMemoryCollectives(
        kernels,
        mine.arena_fd,
        rank,
        2,
        header_bytes=ARENA_HEADER_BYTES,
        buffer_bytes=ARENA_BUFFER_BYTES,
        timeout_s=mine.timeout_s,
    )
    found: list[dict[str, Any]] = [
        {"all_reduce_bytes": n, "shared_memory_us": all_reduce_us(shared, n)} for n in NUM_BYTES
    ]
    mine.join("gloo")
    gloo = CheckedCollectives(rank, 2)
    for row in found:
        row["gloo_us"] = all_reduce_us(gloo, row["all_reduce_bytes"])
    mine.close()
    if rank:
        os._exit(0)
    os.waitpid(child, 0)
    return found


class TimedBroadcasts:
    """Records how long rank 0 takes to send each step."""

    def __init__(self) -> None:
        self.times: list[float] = []
        send = RankGroup.broadcast

        def timed(group: RankGroup, *args: Any) -> None:
            started = time.perf_counter()
            send(group, *args)
            self.times.append(time.perf_counter() - started)

        RankGroup.broadcast = timed  # type: ignore[method-assign]


def measure_engine(args: argparse.Namespace) -> dict[str, Any]:
    """Start an engine, and time its prefills and decodes."""
    output_len, num_runs = args.output_len, args.num_runs
    broadcasts = TimedBroadcasts()
    started = time.perf_counter()
    llm = LLM(
        args.model,
        load_format=args.load_format,
        skip_tokenizer_init=True,
        max_model_len=2048,
        enable_prefix_caching=False,
        num_gpu_blocks_override=1024,
        use_tqdm_on_load=False,
        **SIZES[args.engine],
    )
    found: dict[str, Any] = {"start_s": round(time.perf_counter() - started, 1)}
    vocab_size = llm.llm_engine.vllm_config.model.resolved_arch.vocab_size

    def run(batch_size: int, input_len: int, num_tokens: int, seed: int) -> float:
        prompts = random_prompts(batch_size, input_len, vocab_size, seed)
        began = time.perf_counter()
        llm.generate(prompts, fixed_length(num_tokens), use_tqdm=False)
        return time.perf_counter() - began

    run(2, 32, 4, seed=-1)
    prefill_s = min(run(1, PREFILL_TOKENS, 1, seed) for seed in range(num_runs))
    found["prefill_tokens_per_s"] = round(PREFILL_TOKENS / prefill_s)
    for batch_size in BATCH_SIZES:
        first_s = min(run(batch_size, PROMPT_TOKENS, 1, seed) for seed in range(num_runs))
        broadcasts.times.clear()
        whole_s = min(run(batch_size, PROMPT_TOKENS, output_len, seed) for seed in range(num_runs))
        decode_ms = (whole_s - first_s) / (output_len - 1) * 1e3
        found[f"decode_{batch_size}_ms"] = round(decode_ms, 3)
        if broadcasts.times:
            found[f"broadcast_{batch_size}_us"] = quantiles_us(broadcasts.times)
    llm.llm_engine.engine_core.shutdown()
    return found


def in_process(args: argparse.Namespace, engine: str) -> dict[str, Any]:
    """Measure an engine in a separate process."""
    arguments = ["--model", args.model, "--load-format", args.load_format, "--engine", engine]
    arguments += ["--output-len", str(args.output_len), "--num-runs", str(args.num_runs)]
    variables = {"OMP_NUM_THREADS": str(NUM_THREADS[engine]), "VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run(
        [sys.executable, __file__, *arguments],
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def ratios(engine: str, results: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the best of an engine's rounds divided by the best of one process."""

    def best(name: str, key: str) -> float:
        values = [float(row[key]) for row in results if row.get("engine") == name]
        return max(values) if key.endswith("_per_s") else min(values)

    found: dict[str, Any] = {"engine": f"{engine} / one"}
    for key in ("start_s", "prefill_tokens_per_s", *(f"decode_{n}_ms" for n in BATCH_SIZES)):
        ratio = best(engine, key) / best("one", key)
        found[key] = round(1 / ratio if key.startswith("decode") else ratio, 3)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="folder of a model; not given: exchanges only")
    parser.add_argument(
        "--load-format", default="auto", help="of the model; dummy: config.json is enough"
    )
    parser.add_argument("--num-rounds", type=int, default=2, help="runs of each engine")
    parser.add_argument("--num-runs", type=int, default=2, help="of each workload on an engine")
    parser.add_argument("--output-len", type=int, default=16, help="output tokens per request")
    parser.add_argument("--engine", choices=SIZES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engine is not None:
        print(json.dumps(measure_engine(args)))
        return
    results = all_reduces()
    if args.model:
        for number in range(args.num_rounds):
            for engine in SIZES:
                found = in_process(args, engine)
                results.append({"round": number, "engine": engine, **found})
                print(results[-1], file=sys.stderr)  # the rest may take minutes
        results += [ratios(engine, results) for engine in SIZES if SIZES[engine]]
    report("parallel", {"model": args.model, "output_len": args.output_len}, results)


if __name__ == "__main__":
    main()
