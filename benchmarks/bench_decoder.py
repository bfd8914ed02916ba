"""Time forward passes of decode steps: the fused decoder against the modules of the same model.

    python benchmarks/bench_decoder.py --model <folder> --dtype bfloat16 [--rows 1 16 64 256]

`--rows` are numbers of requests, each with `--input-len` tokens in the cache. The output head is
not included. A time is the time of the fastest of alternating calls, because other programs slow
down the others on a shared machine. `call_us` is the time of a call before and after the kernels.
"""

import argparse
from typing import Any

import numpy as np
import torch
from common import make_llm, make_parser, report
from kernels import best_in_turns_us

from vllm.attention import LaunchContext, RaggedMetadata
from vllm.worker.batch.launch import Launch
from vllm.worker.batch.model_input import ModelInput
from vllm.worker.cpu.model_runner import CPUModelRunner


def decodes(num_rows: int, seq_len: int, block_size: int, vocab_size: int) -> ModelInput:
    """Return the inputs of a decode with one token of every request, each with its own blocks."""
    max_blocks = -(-seq_len // block_size)
    tables = (torch.arange(num_rows * max_blocks) + 1).view(num_rows, max_blocks).int()
    last = seq_len - 1
    seq_lens = torch.full((num_rows,), seq_len, dtype=torch.int32)
    metadata = RaggedMetadata(
        num_decodes=num_rows,
        slot_mapping=tables[:, last // block_size].long() * block_size + last % block_size,
        block_tables=tables,
        seq_lens=seq_lens,
        query_start_loc=np.arange(num_rows + 1, dtype=np.int32),
        host_seq_lens=seq_lens.numpy(),
    )
    rows, ones = np.arange(num_rows, dtype=np.int32), np.ones(num_rows, np.int32)
    return ModelInput(
        Launch(rows, ones * np.int32(last), ones),
        sampled=rows,
        input_ids=torch.randint(vocab_size, (num_rows,)),
        context=LaunchContext(metadata, torch.full((1, num_rows), last)),
        logits_indices=None,
    )


def measure(runner: CPUModelRunner, num_rows: int, args: argparse.Namespace) -> dict[str, Any]:
    vocab_size = runner.model.arch.vocab_size
    model_input = decodes(num_rows, args.input_len, runner.block_size, vocab_size)
    nothing = decodes(0, args.input_len, runner.block_size, vocab_size)
    modules_us, fused_us, call_us = best_in_turns_us(
        [
            lambda: runner.launches.run_modules(model_input),
            lambda: runner.launches.run(model_input),
            lambda: runner.launches.run(nothing),
        ],
        args.seconds,
    )
    return {
        "rows": num_rows,
        "modules_us": round(modules_us, 1),
        "fused_us": round(fused_us, 1),
        "speedup": round(modules_us / fused_us, 2),
        "call_us": round(call_us, 1),
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--seconds", type=float, default=2.0, help="per number of tokens")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.max_num_seqs = max(args.rows)
    llm = make_llm(args)
    runner = llm.llm_engine.engine_core.executor._worker.runner
    with torch.inference_mode():
        results = [measure(runner, num_rows, args) for num_rows in args.rows]
    report("decoder", {"input_len": args.input_len, "model": args.model}, results)


if __name__ == "__main__":
    main()
