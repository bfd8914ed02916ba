"""Code that the benchmarks share: engine flags, seeded random prompts, and printing a result."""

import argparse
import json
import os
import platform
import random
import sys
from collections.abc import Sequence
from typing import Any

import torch

from vllm import LLM, LLMEngine, SamplingParams, __version__
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import RequestOutputKind


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the engine's flags and the lengths that every benchmark has."""
    parser = argparse.ArgumentParser(description=description)
    EngineArgs.add_cli_args(parser)
    parser.add_argument("--input-len", type=int, default=32, help="prompt tokens per request")
    parser.add_argument("--output-len", type=int, default=64, help="output tokens per request")
    return parser


def make_llm(args: argparse.Namespace) -> LLM:
    """Return an engine for the parsed flags."""
    engine_args = EngineArgs.from_cli_args(args).without_streams()
    return LLM.from_engine(LLMEngine.from_engine_args(engine_args))


def fixed_length(num_tokens: int) -> SamplingParams:
    """Return greedy parameters for exactly this many tokens, with one output at the end."""
    return SamplingParams(
        temperature=0,
        max_tokens=num_tokens,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def random_prompts(
    count: int, num_tokens: int, vocab_size: int, seed: int = 0
) -> list[dict[str, Any]]:
    """Return prompts of uniformly drawn token ids. The first 16 ids are left out, because they are
    special tokens.
    """
    rng = random.Random(seed)
    return [
        {"prompt_token_ids": [rng.randrange(16, vocab_size) for _ in range(num_tokens)]}
        for _ in range(count)
    ]


def percentiles(values: Sequence[float], digits: int = 4) -> dict[str, float]:
    """Return mean, median, p90 and p99."""
    ordered = sorted(values)
    at = {
        f"p{p}": ordered[min(len(ordered) - 1, int(p / 100 * len(ordered)))] for p in (50, 90, 99)
    }
    return {k: round(v, digits) for k, v in {"mean": sum(values) / len(values), **at}.items()}


def report(name: str, settings: dict[str, Any], results: Any) -> None:
    """Print one JSON object on stdout and a table of the results on stderr."""
    machine = {
        "cpus": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "vllm": __version__,
    }
    print(
        json.dumps(
            {"benchmark": name, "machine": machine, "settings": settings, "results": results}
        )
    )
    rows = results if isinstance(results, list) else [results]
    for row in rows:
        print("  ".join(f"{key}={value}" for key, value in row.items()), file=sys.stderr)
