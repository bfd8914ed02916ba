"""Times paged attention, torch reference against C++ kernels, for prompts and for decodes.

    python benchmarks/bench_attention.py [--dtype bfloat16] [--cache-dtype float8_e4m3fn]
        [--threads N] [--seconds 2] [--only 1b]

Prints JSON on standard output and a table on standard error. The two sides take turns, because a
shared machine changes its speed from one second to the next; a time is that of the fastest call,
in microseconds, Python wrapper included. The ratio is what counts.
"""

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import numpy as np
import torch
from kernels import best_in_turns_us, describe, load_kernels, make_parser

from vllm.ops.attention_options import AttentionOptions
from vllm.ops.cpu.operators import CPUOps
from vllm.ops.interface import Ops
from vllm.ops.native.operators import NativeOps


@dataclass(frozen=True)
class Shape:
    name: str
    batch: int
    query_len: int
    """1: a decode."""
    seq_len: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    block_size: int = 128
    sliding_window: int | None = None

    @property
    def num_cached(self) -> int:
        """Numbers in the cache that are read at least once."""
        return 2 * self.batch * self.seq_len * self.num_kv_heads * self.head_size

    @property
    def flops(self) -> float:
        """Of the two products, over the keys that causality leaves."""
        context_len = self.seq_len - self.query_len
        keys = self.query_len * context_len + self.query_len * (self.query_len + 1) / 2
        return 4.0 * self.batch * self.num_heads * self.head_size * keys


@dataclass(frozen=True)
class Row:
    shape: str
    native_us: float
    cpu_us: float
    speedup: float
    cpu_gflop_per_s: float
    cpu_gb_per_s: float
    """Of the cache, read once."""


def shapes() -> Iterator[Shape]:
    yield Shape("one token: call overhead", 1, 2, 2, 1, 1, 64)
    yield Shape("tiny 64 x 32", 64, 32, 32, 4, 2, 64, block_size=16)
    for query_len in (128, 1024, 4096):
        yield Shape(f"1b prompt {query_len}", 1, query_len, query_len, 32, 8, 64)
    yield Shape("1b 16 prompts of 128", 16, 128, 128, 32, 8, 64)
    yield Shape("1b chunk 512 after 3584", 1, 512, 4096, 32, 8, 64)
    yield Shape("1b chunk 512 after 32256", 1, 512, 32768, 32, 8, 64)
    yield Shape("1b chunk 4 after 8188", 1, 4, 8192, 32, 8, 64)
    yield Shape("8b prompt 1024", 1, 1024, 1024, 32, 8, 128)
    yield Shape("8b prompt 1024, window 256", 1, 1024, 1024, 32, 8, 128, sliding_window=256)
    yield Shape("no groups, prompt 512", 1, 512, 512, 16, 16, 64)
    for seq_len in (64, 100):
        yield Shape(f"tiny 64 decodes after {seq_len}", 64, 1, seq_len, 8, 4, 32, block_size=16)
    for seq_len in (128, 1024, 8192, 32768):
        yield Shape(f"1b decode after {seq_len}", 1, 1, seq_len, 32, 8, 64)
    yield Shape("1b 64 decodes after 512", 64, 1, 512, 32, 8, 64)


def call_of(shape: Shape, dtype: torch.dtype, cache_dtype: torch.dtype) -> Callable[[Ops], object]:
    """One launch of this shape, with the caches it reads."""
    max_blocks = -(-shape.seq_len // shape.block_size)
    num_blocks = shape.batch * max_blocks
    cache_shape = (2, num_blocks, shape.block_size, shape.num_kv_heads, shape.head_size)
    keys, values = torch.randn(cache_shape).to(cache_dtype)
    tables = torch.randperm(num_blocks).view(shape.batch, max_blocks).int()
    num_tokens = shape.batch * shape.query_len
    packed = torch.randn(num_tokens, shape.num_heads + 2 * shape.num_kv_heads, shape.head_size)
    query = packed.to(dtype)[:, : shape.num_heads]
    options = AttentionOptions(sliding_window=shape.sliding_window)
    if shape.query_len == 1:
        lens = torch.full((shape.batch,), shape.seq_len, dtype=torch.int32)
        return lambda ops: ops.paged_attention_decode(query, keys, values, tables, lens, options)
    starts = np.arange(shape.batch + 1, dtype=np.int32) * shape.query_len
    host_lens = np.full(shape.batch, shape.seq_len, dtype=np.int32)
    return lambda ops: ops.paged_attention_prefill(
        query, keys, values, tables, starts, host_lens, options
    )


def main() -> None:
    parser = make_parser(__doc__, seconds=2.0, per="shape, both sides")
    parser.add_argument(
        "--cache-dtype",
        choices=["float8_e4m3fn", "float8_e5m2"],
        help="of keys and values, in place of --dtype",
    )
    parser.add_argument("--only", default="", help="shapes whose name has this text")
    args = parser.parse_args()
    library = load_kernels(args)

    dtype = getattr(torch, args.dtype)
    cache_dtype = getattr(torch, args.cache_dtype or args.dtype)
    native, cpu = NativeOps(), CPUOps()
    rows = []
    print(
        f"{'shape':30}{'native us':>12}{'cpu us':>12}{'x':>8}{'GFLOP/s':>9}{'GB/s':>7}",
        file=sys.stderr,
    )
    with torch.inference_mode():
        for shape in shapes():
            if args.only not in shape.name:
                continue
            call = call_of(shape, dtype, cache_dtype)
            native_us, cpu_us = best_in_turns_us(
                [lambda call=call: call(native), lambda call=call: call(cpu)],  # type: ignore[misc]
                args.seconds,
            )
            rows.append(
                Row(
                    shape.name,
                    native_us,
                    cpu_us,
                    native_us / cpu_us,
                    shape.flops / cpu_us / 1e3,
                    shape.num_cached * cache_dtype.itemsize / cpu_us / 1e3,
                )
            )
            print(
                f"{shape.name:30}{native_us:12.1f}{cpu_us:12.1f}{native_us / cpu_us:8.1f}"
                f"{rows[-1].cpu_gflop_per_s:9.1f}{rows[-1].cpu_gb_per_s:7.1f}",
                file=sys.stderr,
            )
    result = {
        **describe(args, library),
        "cache_dtype": args.cache_dtype or args.dtype,
        "rows": [asdict(row) for row in rows],
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
