"""Time decodes and prompts of a Gated DeltaNet layer against the layer of transformers.

    python benchmarks/bench_delta_net.py [--dtype bfloat16] [--rows 1 8] [--prompt-len 1024]

Both have the same weights; by default they have the sizes of Qwen3-Next. Calls alternate, as a
shared machine changes its speed: the ratio is the median over pairs of neighbouring calls, with the
10th and 90th percentile. transformers runs its own torch code, without kernels of other packages.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from common import report
from transformers import AutoModelForCausalLM, DynamicCache, Qwen3NextConfig

from vllm import LLM
from vllm.attention import LaunchContext, RaggedMetadata, share_context
from vllm.attention.ragged_states import RaggedStates
from vllm.model_executor.layers.delta_net import GatedDeltaNet


def write_model(folder: Path, args: argparse.Namespace) -> Any:
    """Write a model with one layer, and return it as a model of transformers."""
    config = Qwen3NextConfig(
        vocab_size=512,
        hidden_size=args.hidden_size,
        intermediate_size=64,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
        mlp_only_layers=[0],
        linear_num_key_heads=args.key_heads,
        linear_num_value_heads=args.value_heads,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, args.dtype))
    model.save_pretrained(folder)
    return model.eval()


def contexts(num_rows: int, prompt_len: int) -> tuple[LaunchContext, LaunchContext]:
    """Return the context of a decode of each request, and of a prompt of the first request."""
    made = []
    for lengths, computed in (([1] * num_rows, prompt_len), ([prompt_len], 0)):
        rows = np.arange(len(lengths), dtype=np.int32)
        starts = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
        num_decodes = num_rows if computed else 0
        computed_tokens = np.full(len(rows), computed, dtype=np.int32)
        states = RaggedStates.build(rows, computed_tokens, starts, num_decodes, torch.device("cpu"))
        seq_lens = computed_tokens + np.array(lengths, dtype=np.int32)
        attention = RaggedMetadata(
            num_decodes=num_decodes,
            slot_mapping=torch.zeros(int(starts[-1]), dtype=torch.int64),
            block_tables=torch.zeros(len(rows), 1, dtype=torch.int32),
            seq_lens=torch.from_numpy(seq_lens),
            query_start_loc=starts,
            host_seq_lens=seq_lens,
        )
        positions = torch.zeros(1, int(starts[-1]), dtype=torch.int64)
        made.append(LaunchContext(attention, positions, states=states))
    return made[0], made[1]


def compare(
    name: str, ours: Callable[[], Any], theirs: Callable[[], Any], seconds: float
) -> dict[str, Any]:
    """Return times of alternating calls, and their ratio."""
    ours(), theirs()
    times: list[tuple[float, float]] = []
    end = time.perf_counter() + seconds
    while len(times) < 5 or time.perf_counter() < end:
        start = time.perf_counter()
        ours()
        middle = time.perf_counter()
        theirs()
        times.append((middle - start, time.perf_counter() - middle))
    ratios = sorted(b / a for a, b in times)
    best = [1e3 * min(column) for column in zip(*times, strict=True)]
    return {
        "case": name,
        "ours_ms": round(best[0], 3),
        "transformers_ms": round(best[1], 3),
        "ratio": round(ratios[len(ratios) // 2], 2),
        "p10": round(ratios[len(ratios) // 10], 2),
        "p90": round(ratios[len(ratios) * 9 // 10], 2),
        "calls": len(times),
    }


def measure(layer: GatedDeltaNet, theirs: Any, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure all cases, after a check that both layers give the same results."""
    results: list[dict[str, Any]] = []
    dtype = getattr(torch, args.dtype)
    prompt = torch.randn(args.prompt_len, args.hidden_size).to(dtype)
    holder, linear = share_context(layer), theirs.model.layers[0].linear_attn
    for num_rows in args.rows:
        decode, whole = contexts(num_rows, args.prompt_len)
        tokens = torch.randn(num_rows, args.hidden_size).to(dtype)
        cache = DynamicCache(config=theirs.config)
        given = prompt.expand(num_rows, -1, -1)
        want = linear(given, cache=cache)[0]

        def run(context: LaunchContext, x: torch.Tensor) -> torch.Tensor:
            with holder.running(context):
                return layer(context.positions[0], x)

        got = run(whole, prompt)
        limit = 0.05 if dtype == torch.bfloat16 else 1e-4
        assert (got - want).abs().max() <= limit * want.abs().max(), "results differ"
        for cached in layer.kv_caches:  # the state after the prompt, for each row
            cached[:num_rows] = cached[:1]
        got, want = run(decode, tokens), linear(tokens[:, None], cache=cache)[:, 0]
        assert (got - want).abs().max() <= limit * want.abs().max(), "results differ"
        if num_rows == args.rows[0]:
            one = prompt[None]
            results.append(
                compare(
                    f"prompt of {args.prompt_len}",
                    lambda whole=whole: run(whole, prompt),
                    lambda one=one: linear(one, cache=DynamicCache(config=theirs.config)),
                    args.seconds,
                )
            )
        results.append(
            compare(
                f"decode of {num_rows}",
                lambda decode=decode, tokens=tokens: run(decode, tokens),
                lambda tokens=tokens, cache=cache: linear(tokens[:, None], cache=cache),
                args.seconds,
            )
        )
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    add("--rows", type=int, nargs="+", default=[1, 8])
    add("--prompt-len", type=int, default=1024)
    add("--hidden-size", type=int, default=2048)
    add("--key-heads", type=int, default=16)
    add("--value-heads", type=int, default=32)
    add("--seconds", type=float, default=10.0, help="per case")
    add("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with TemporaryDirectory() as folder, torch.inference_mode():
        theirs = write_model(Path(folder), args)
        llm = LLM(
            folder,
            dtype=args.dtype,
            skip_tokenizer_init=True,
            max_model_len=2 * args.prompt_len,
            max_num_seqs=max(args.rows),
            kv_cache_memory_bytes=1 << 28,
        )
        runner = llm.llm_engine.engine_core.executor._worker.runner
        results = measure(runner.model.model.layers[0].self_attn, theirs, args)
    report("delta_net", vars(args), results)


if __name__ == "__main__":
    main()
