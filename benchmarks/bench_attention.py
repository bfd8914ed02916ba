"""Time paged attention of prompts and decodes: C++ kernels against the torch reference.

    python benchmarks/bench_attention.py [--dtype bfloat16] [--cache-dtype float8_e4m3fn]
        [--threads N] [--seconds 2] [--only 1b] [--contexts 1024,4096,8192,32768]

Prints JSON on standard output and a table on standard error. The two sides run alternately, because
a shared machine changes its speed from one second to the next. A time is the time of the fastest
call in microseconds, including the Python wrapper. Compare the ratios.

With --contexts only the C++ kernels run, for each context length: prompts alternate with a packed
linear layer, and decodes with a loop that reads memory. `fraction` is their rate divided by the
rate of that limit, from the fastest call of each.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import numpy as np
import torch
from kernels import best_in_turns_us, describe, load_kernels, make_parser

from vllm.ops.attention_options import AttentionOptions
from vllm.ops.cpu.operators import CPUOps
from vllm.ops.cpu.weights.linear import PackedWeight
from vllm.ops.native.operators import NativeOps

Call = Callable[[NativeOps], object]
"""Runs one forward pass of attention."""


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
    latent_values: int | None = None
    """Values are so many elements of the keys (latent attention); None: of their own."""

    @property
    def num_cached(self) -> int:
        """Number of elements of the cache that are read at least once."""
        visible = min(self.seq_len, self.query_len + (self.sliding_window or self.seq_len) - 1)
        num_tensors = 2 if self.latent_values is None else 1
        return num_tensors * self.batch * visible * self.num_kv_heads * self.head_size

    @property
    def flops(self) -> float:
        """FLOPs of the two matmuls, over the keys that causality and the window leave."""
        window = self.sliding_window or self.seq_len
        context_len = self.seq_len - self.query_len
        keys = sum(min(window, context_len + i + 1) for i in range(self.query_len))
        sizes = self.head_size + (self.latent_values or self.head_size)
        return 2.0 * self.batch * self.num_heads * sizes * keys


@dataclass(frozen=True)
class Row:
    shape: str
    native_us: float
    cpu_us: float
    speedup: float
    cpu_gflop_per_s: float
    cpu_gb_per_s: float
    """Of the cache, read once."""


@dataclass(frozen=True)
class LimitRow:
    shape: str
    context: int
    rate: float
    """GFLOP/s of a prompt, GB/s of a decode."""
    limit: float
    fraction: float


LONGEST_PROMPT = 4096
"""A longer context gets a chunk of CHUNK tokens at its end."""
CHUNK = 512
READ_BYTES = 128 << 20
"""Read by the loop, and at least so much by copies of a decode's cache: more than caches hold."""


def shapes_of_context(length: int) -> Iterator[Shape]:
    """Yield prompts and decodes at a context length."""
    for is_decode in (False, True):
        query_len = 1 if is_decode else length if length <= LONGEST_PROMPT else CHUNK
        kind = "decode" if is_decode else f"prompt, {query_len} tokens"
        for size in (64, 128):
            yield Shape(f"{kind}, head size {size}", 1, query_len, length, 32, 8, size)
        window = min(1024, length)
        name = f"{kind}, window {window}, head size 128"
        yield Shape(name, 1, query_len, length, 32, 8, 128, sliding_window=window)
        name = f"{kind}, latent, 16 heads"
        yield Shape(name, 1, min(query_len, CHUNK), length, 16, 1, 576, latent_values=512)


def limit_of(shape: Shape, dtype: torch.dtype) -> tuple[Callable[[], object], float]:
    """Return the call that bounds a shape, and its floating-point operations or bytes."""
    if shape.query_len == 1:
        memory = torch.ones(READ_BYTES // 4)
        return memory.sum, READ_BYTES
    rows, num_in, num_out = 512, 2048, 4096
    weight = PackedWeight.pack(torch.randn(num_out, num_in, dtype=dtype))
    x = torch.randn(rows, num_in, dtype=dtype)
    return lambda: weight.linear(x), 2.0 * rows * num_in * num_out


def measure_limits(
    contexts: list[int], dtype: torch.dtype, cache_dtype: torch.dtype, seconds: float, only: str
) -> Iterator[LimitRow]:
    """Measure rates of the C++ kernels, alternately with their limits."""
    ops = CPUOps()
    # The CPU time of a thread does not grow while other programs use the core.
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    for length in contexts:
        for shape in shapes_of_context(length):
            if only not in shape.name:
                continue
            num_bytes = shape.num_cached * cache_dtype.itemsize
            is_decode = shape.query_len == 1
            num_copies = min(16, -(-READ_BYTES // num_bytes)) if is_decode else 1
            copies = [call_of(shape, dtype, cache_dtype) for _ in range(num_copies)]
            limit, work = limit_of(shape, dtype)

            def run_all(copies: list[Call] = copies) -> None:
                # Together: the loop that reads memory leaves no code in the caches, so the first
                # call takes 0.2 ms more.
                for call in copies:
                    call(ops)

            own_us, limit_us = best_in_turns_us([run_all, limit], seconds, clock)
            rate = num_copies * (num_bytes if is_decode else shape.flops) / own_us / 1e3
            rate_of_limit = work / limit_us / 1e3
            yield LimitRow(shape.name, length, rate, rate_of_limit, rate / rate_of_limit)


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


def call_of(shape: Shape, dtype: torch.dtype, cache_dtype: torch.dtype) -> Call:
    """Return a function that runs one forward pass of this shape, with the caches that it reads."""
    max_blocks = -(-shape.seq_len // shape.block_size)
    num_blocks = shape.batch * max_blocks
    cache_shape = (2, num_blocks, shape.block_size, shape.num_kv_heads, shape.head_size)
    keys, values = torch.randn(cache_shape).to(cache_dtype)
    if shape.latent_values is not None:
        values = keys[..., : shape.latent_values]
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
        help="of keys and values, instead of --dtype",
    )
    parser.add_argument("--only", default="", help="shapes whose name has this text")
    parser.add_argument("--contexts", help="context lengths; prints fractions of the limits")
    args = parser.parse_args()
    library = load_kernels(args)

    dtype = getattr(torch, args.dtype)
    cache_dtype = getattr(torch, args.cache_dtype or args.dtype)
    settings = {**describe(args, library), "cache_dtype": args.cache_dtype or args.dtype}
    if args.contexts is not None:
        contexts = [int(length) for length in args.contexts.split(",")]
        limits = []
        with torch.inference_mode():
            for row in measure_limits(contexts, dtype, cache_dtype, args.seconds, args.only):
                limits.append(asdict(row))
                print("  ".join(f"{k} {v}" for k, v in limits[-1].items()), file=sys.stderr)
        print(json.dumps({**settings, "contexts": limits}, indent=2))
        return
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
    print(json.dumps({**settings, "rows": [asdict(row) for row in rows]}, indent=2))


if __name__ == "__main__":
    main()
