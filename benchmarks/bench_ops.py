"""Time every operator at the shapes of one decode step: C++ kernels against the torch reference.

    python benchmarks/bench_ops.py [--dtype bfloat16] [--threads N] [--seconds 0.6] [--only decode]

Prints JSON on standard output and a table on standard error. The two sides run alternately. A time
is the time of the fastest call in microseconds, including the Python wrapper, because other
programs slow down the others on a shared machine. GB/s counts the bytes an operator must move once.
"""

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import torch
from kernels import best_in_turns_us, describe, load_kernels, make_parser

from vllm.ops.attention_options import AttentionOptions
from vllm.ops.cpu.operators import CPUOps
from vllm.ops.native.operators import NativeOps

HIDDEN, INTERMEDIATE, NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE = 4096, 14336, 32, 8, 128
MAX_POSITIONS, BLOCK_SIZE = 8192, 128


@dataclass(frozen=True)
class Case:
    op: str
    shape: str
    num_bytes: int
    """Read and written once."""
    call: Callable[[NativeOps], object]


@dataclass(frozen=True)
class Row:
    op: str
    shape: str
    native_us: float
    cpu_us: float
    speedup: float
    cpu_gb_per_s: float


def token_cases(num_tokens: int, dtype: torch.dtype) -> Iterator[Case]:
    """Yield operators whose cost is one pass over the tokens of a batch."""
    size = dtype.itemsize
    x = torch.randn(num_tokens, HIDDEN, dtype=dtype)
    residual, weight = torch.randn_like(x), torch.ones(HIDDEN, dtype=dtype)
    shape = f"T={num_tokens}"
    yield Case("rms_norm", shape, 2 * x.numel() * size, lambda ops: ops.rms_norm(x, weight, 1e-5))
    yield Case(
        "fused_add_rms_norm",
        shape,
        4 * x.numel() * size,
        # Changes x in place: a weight of one keeps its values in range after many runs.
        lambda ops: ops.fused_add_rms_norm(x, residual.zero_(), weight, 1e-5),
    )
    gate_up = torch.randn(num_tokens, 2 * INTERMEDIATE, dtype=dtype)
    yield Case(
        "silu_and_mul",
        shape,
        gate_up.numel() * size * 3 // 2,
        lambda ops: ops.silu_and_mul(gate_up),
    )
    qkv = torch.randn(num_tokens, NUM_HEADS + 2 * NUM_KV_HEADS, HEAD_SIZE, dtype=dtype)
    query, key, value = qkv.split([NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS], dim=1)
    positions = torch.arange(num_tokens)
    angles = torch.rand(MAX_POSITIONS, HEAD_SIZE // 2)
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
    rotated = query.numel() + key.numel()
    for is_neox in (True, False):
        yield Case(
            "rotary_embedding" if is_neox else "rotary_embedding (pairs)",
            shape,
            2 * rotated * size,
            lambda ops, is_neox=is_neox: ops.rotary_embedding(  # type: ignore[misc]
                positions, query, key, cos_sin, is_neox
            ),
        )
    cache = torch.zeros(2, MAX_POSITIONS // BLOCK_SIZE, BLOCK_SIZE, *key.shape[1:], dtype=dtype)
    slots = torch.randperm(MAX_POSITIONS)[:num_tokens]
    yield Case(
        "reshape_and_cache",
        shape,
        4 * key.numel() * size,
        lambda ops: ops.reshape_and_cache(key, value, cache[0], cache[1], slots),
    )


def decode_case(
    batch: int, seq_len: int, num_kv_heads: int, window: int | None, dtype: torch.dtype
) -> Case:
    max_blocks = -(-seq_len // BLOCK_SIZE)
    num_blocks = batch * max_blocks + 1
    cache = torch.randn(2, num_blocks, BLOCK_SIZE, num_kv_heads, HEAD_SIZE).to(dtype)
    tables = (torch.randperm(num_blocks - 1) + 1).view(batch, max_blocks).int()
    seq_lens = torch.full((batch,), seq_len, dtype=torch.int32)
    query = torch.randn(batch, NUM_HEADS, HEAD_SIZE, dtype=dtype)
    visible, options = min(seq_len, window or seq_len), AttentionOptions(sliding_window=window)
    return Case(
        "paged_attention_decode",
        f"B={batch} len={seq_len} G={num_kv_heads} W={window}",
        2 * batch * visible * num_kv_heads * HEAD_SIZE * dtype.itemsize,
        lambda ops: ops.paged_attention_decode(
            query, cache[0], cache[1], tables, seq_lens, options
        ),
    )


def cases(dtype: torch.dtype) -> Iterator[Case]:
    for num_tokens in (1, 16, 512):
        yield from token_cases(num_tokens, dtype)
    for batch, seq_len, num_kv_heads, window in (
        (1, 128, 8, None),
        (1, 1024, 8, None),
        (1, 16384, 8, None),
        (1, 16384, 8, 1024),
        (1, 16384, 1, None),
        (1, 4096, 32, None),
        (16, 1024, 8, None),
        (64, 512, 8, None),
    ):
        yield decode_case(batch, seq_len, num_kv_heads, window, dtype)


def main() -> None:
    parser = make_parser(__doc__, seconds=0.6, per="operator, both sides")
    parser.add_argument("--only", default="", help="operators whose name has this text")
    args = parser.parse_args()
    library = load_kernels(args)

    native, cpu = NativeOps(), CPUOps()
    rows = []
    print(f"{'operator':26}{'shape':32}{'native us':>12}{'cpu us':>11}{'x':>8}{'GB/s':>8}",
          file=sys.stderr)  # fmt: skip
    with torch.inference_mode():
        for case in cases(getattr(torch, args.dtype)):
            if args.only not in case.op:
                continue
            native_us, cpu_us = best_in_turns_us(
                [lambda case=case: case.call(native), lambda case=case: case.call(cpu)],  # type: ignore[misc]
                args.seconds,
            )
            gb_per_s = case.num_bytes / cpu_us / 1e3
            rows.append(Row(case.op, case.shape, native_us, cpu_us, native_us / cpu_us, gb_per_s))
            print(
                f"{case.op:26}{case.shape:32}{native_us:12.1f}{cpu_us:11.1f}"
                f"{native_us / cpu_us:8.1f}{gb_per_s:8.1f}",
                file=sys.stderr,
            )
    result = {**describe(args, library), "rows": [asdict(row) for row in rows]}
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
