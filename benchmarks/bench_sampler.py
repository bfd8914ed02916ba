"""Time sampling for n requests: the metadata of the batch, and from logits to tokens.

    python benchmarks/bench_sampler.py
    python benchmarks/bench_sampler.py --rows 64 --vocab-sizes 128256 --threads 1 --dtype bfloat16

Prints JSON on stdout: microseconds, the median and the least of the repetitions, for the C++
kernels and for torch, one after the other. Logits are normal numbers: top_p keeps thousands of
tokens, which is dear for both.
"""

import argparse
import itertools
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from vllm.messages import EngineRequest
from vllm.sample.cpu_sampler import make_sampler
from vllm.sample.sampler import Sampler
from vllm.sample.state import SamplingState
from vllm.sampling_params import SamplingParams

PROMPT_TOKENS = 512
OUTPUT_TOKENS = 128

CASES: dict[str, list[dict[str, Any]]] = {
    "greedy": [{"temperature": 0.0}],
    "temperature": [{"temperature": 0.7}],
    "top_k 50": [{"temperature": 0.7, "top_k": 50}],
    "top_p 0.9": [{"temperature": 0.7, "top_p": 0.9}],
    "top_k 50, top_p 0.9": [{"temperature": 0.7, "top_k": 50, "top_p": 0.9}],
    "min_p 0.05": [{"temperature": 0.7, "min_p": 0.05}],
    "penalties": [{"presence_penalty": 0.5, "repetition_penalty": 1.1}],
    "greedy, logprobs 5": [{"temperature": 0.0, "logprobs": 5}],
    "mixed": [{"temperature": 0.0}, {"temperature": 0.7}, {"top_k": 50}, {"top_p": 0.9}],
}


def make_torch_sampler(
    max_num_seqs: int, vocab_size: int, device: torch.device
) -> tuple[SamplingState, Sampler]:
    return SamplingState(max_num_seqs, vocab_size, device), Sampler()


PATHS = {"kernels": make_sampler, "torch": make_torch_sampler}


def fill(
    state: SamplingState, num_rows: int, vocab_size: int, params: list[dict[str, Any]]
) -> None:
    rng = np.random.default_rng(0)
    for row in range(num_rows):
        request = EngineRequest(
            request_id=str(row),
            prompt_token_ids=rng.integers(0, vocab_size, PROMPT_TOKENS).tolist(),
            sampling_params=SamplingParams(**params[row % len(params)]),
            seed=row,
            eos_token_id=None,
            max_total_tokens=PROMPT_TOKENS + 2 * OUTPUT_TOKENS,
            arrival_time=0.0,
        )
        state.add(row, request, rng.integers(0, vocab_size, OUTPUT_TOKENS).tolist())


def microseconds(function: Callable[[], Any], seconds: float) -> dict[str, float]:
    """Return the microseconds of one call, over at least 5 calls and about `seconds`.

    "cpu" is processor time over all threads, which is reliable on a busy machine.
    """
    function()
    walls: list[float] = []
    cpus: list[float] = []
    end = time.perf_counter() + seconds
    while len(walls) < 5 or time.perf_counter() < end:
        wall, cpu = time.perf_counter(), time.process_time()
        function()
        cpus.append((time.process_time() - cpu) * 1e6)
        walls.append((time.perf_counter() - wall) * 1e6)
    return {
        "median": round(statistics.median(walls), 1),
        "min": round(min(walls), 1),
        "cpu": round(min(cpus), 1),
    }


def measure(
    logits: torch.Tensor, params: list[dict[str, Any]], path: str, seconds: float
) -> dict[str, dict[str, float]]:
    num_rows, vocab_size = logits.shape
    state, sampler = PATHS[path](num_rows, vocab_size, torch.device("cpu"))
    fill(state, num_rows, vocab_size, params)
    rows = np.arange(num_rows, dtype=np.int32)
    num_output_tokens = np.full(num_rows, OUTPUT_TOKENS, np.int32)
    token_ids = np.zeros(num_rows, np.int32)
    metadata = state.metadata(rows, num_output_tokens)
    return {
        "metadata_us": microseconds(lambda: state.metadata(rows, num_output_tokens), seconds / 4),
        "sample_us": microseconds(lambda: sampler(logits, metadata), seconds),
        "record_us": microseconds(lambda: state.record(rows, token_ids), seconds / 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--vocab-sizes", type=int, nargs="+", default=[4096, 128256])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--paths", nargs="+", choices=PATHS, default=list(PATHS))
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=0.5, help="time for each figure")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    generator = torch.Generator().manual_seed(0)
    results = []
    for vocab_size in args.vocab_sizes:
        for num_rows in args.rows:
            logits = torch.randn(num_rows, vocab_size, generator=generator) * 3
            logits = logits.to(getattr(torch, args.dtype))
            for case, path in itertools.product(args.cases, args.paths):
                figures = measure(logits, CASES[case], path, args.seconds)
                about = {"vocab_size": vocab_size, "rows": num_rows, "case": case, "path": path}
                results.append({**about, **figures})
                print(json.dumps(results[-1]), file=sys.stderr)
    about = {
        "machine": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "threads": args.threads,
        "dtype": args.dtype,
    }
    print(json.dumps({"about": about, "results": results}, indent=1))


if __name__ == "__main__":
    main()
