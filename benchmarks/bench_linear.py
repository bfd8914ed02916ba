"""Time linear layers: torch's F.linear against packed weights, dense and quantized.

Quantized are int8 and int4, rounded here; and, as checkpoints have them: int4 of GPTQ with groups
of 128 inputs and zero points, fp8 with a scale per output feature or per block of 128 inputs,
MXFP4, and Q4_K and Q5_K of GGUF.

    python benchmarks/bench_linear.py [--dtype bfloat16] [--rows 1,16,1024] [--threads N]

The shapes are taken from a Llama with 1.24 B parameters. Every round calls each side once and reads
a large tensor, so that all see the same state of the machine; the weights are several copies, so
that they come from memory. Prints JSON on standard output and a table on standard error: medians in
milliseconds, the best of them, and at the best time GB/s of weights as they are stored and GFLOP/s.
With one thread, the clock counts the processor time of this thread, which other processes do not
stop.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from kernels import describe, load_kernels, make_parser

from vllm.ops.cpu.weights.linear import PackedWeight
from vllm.ops.cpu.weights.stored import pack_stored
from vllm.ops.cpu.weights.weight_format import WeightFormat
from vllm.ops.stored_weight import (
    Fp8Weight,
    GroupedWeight,
    GroupScales,
    MinimumWeight,
    Mxfp4Weight,
    StoredWeight,
    round_to_fp8,
)

SHAPES = {  # out_features, in_features
    "qkv_proj": (3072, 2048),
    "o_proj": (2048, 2048),
    "gate_up_proj": (16384, 2048),
    "down_proj": (2048, 8192),
    "wide": (8192, 2048),
    "tiny": (512, 256),
}
CACHE_BYTES = 128 << 20
"""Copies of a weight together are at least this large, at most 16 of them."""

GPTQ_GROUP = 128
FACTOR_GROUP = 256
"""Inputs of a block of Q4_K and Q5_K."""

Call = Callable[[torch.Tensor], torch.Tensor]


def random_gptq(num_out: int, num_in: int) -> GroupedWeight:
    """Return a random weight in GPTQ's format."""
    low, high = -(2**31), 2**31 - 1
    num_groups = num_in // GPTQ_GROUP
    return GroupedWeight(
        words=torch.randint(low, high, (num_in // 8, num_out), dtype=torch.int32),
        bits=4,
        scales=torch.rand(num_groups, num_out).half().float(),
        zeros=torch.randint(1, 17, (num_groups, num_out), dtype=torch.int16),
    )


def random_k(num_out: int, num_in: int, bits: int) -> MinimumWeight:
    """Return a random weight in the format Q4_K or Q5_K."""

    def scales() -> GroupScales:
        return GroupScales(
            factors=torch.rand(num_out, num_in // FACTOR_GROUP).half().float(),
            multipliers=torch.randint(0, 64, (num_out, num_in // 32), dtype=torch.int8),
        )

    codes = torch.randint(0, 1 << bits, (num_out, num_in), dtype=torch.uint8)
    return MinimumWeight(codes=codes, bits=bits, scales=scales(), minimums=scales())


def stored_weights(weight: torch.Tensor) -> dict[str, StoredWeight]:
    """Return name of a format -> the weight in this format, or random values of its shape."""
    num_out, num_in = weight.shape
    fp8 = round_to_fp8(weight)
    blocks = torch.randint(0, 256, (num_out, num_in // 32, 16), dtype=torch.uint8)
    exponents = torch.randint(118, 124, (num_out, num_in // 32), dtype=torch.uint8)
    return {
        "gptq": random_gptq(num_out, num_in),
        "fp8": fp8,
        "fp8_blocks": Fp8Weight(
            numbers=fp8.numbers, scales=torch.rand(num_out, num_in // 128), block_inputs=128
        ),
        "mxfp4": Mxfp4Weight(blocks=blocks, scales=exponents),
        "q4_k": random_k(num_out, num_in, 4),
        "q5_k": random_k(num_out, num_in, 5),
    }


def pack(weight: StoredWeight) -> PackedWeight:
    packed = pack_stored(weight)
    assert packed is not None
    return packed


def make_sides(
    num_out: int, num_in: int, dtype: torch.dtype
) -> tuple[dict[str, list[Call]], dict[str, int]]:
    """Return name -> one matmul for each copy of the weight, and the bytes of one copy."""
    weight = torch.randn(num_out, num_in, dtype=dtype)
    num_bytes = weight.numel() * weight.element_size()
    num_copies = min(16, -(-CACHE_BYTES // num_bytes))
    plain = [weight.clone() for _ in range(num_copies)]
    packed = {
        "packed": [PackedWeight.pack(weight.clone()) for _ in plain],
        "int8": [PackedWeight.quantize(weight, WeightFormat.INT8) for _ in plain],
        "int4": [PackedWeight.quantize(weight, WeightFormat.INT4) for _ in plain],
    }
    for name, stored in stored_weights(weight).items():
        packed[name] = [pack(stored) for _ in plain]
    sides: dict[str, list[Call]] = {"torch": [lambda x, w=w: F.linear(x, w) for w in plain]}
    sides.update({name: [w.linear for w in weights] for name, weights in packed.items()})
    sizes = {"torch": num_bytes}
    sizes.update({name: weights[0].num_bytes for name, weights in packed.items()})
    return sides, sizes


def run_rounds(
    sides: dict[str, list[Call]], x: torch.Tensor, seconds: float, clock: Callable[[], float]
) -> dict[str, list[float]]:
    """Return the seconds of each call, by side; `read` is one pass over 64 MiB."""
    large = torch.ones(16 << 20)
    times: dict[str, list[float]] = {name: [] for name in [*sides, "read"]}
    num_copies = len(sides["torch"])
    end, index = time.perf_counter() + seconds, 0
    while index < num_copies + 3 or time.perf_counter() < end:
        for name, calls in sides.items():
            call = calls[index % num_copies]
            start = clock()
            call(x)
            times[name].append(clock() - start)
        start = clock()
        large.sum()
        times["read"].append(clock() - start)
        index += 1
    return {name: values[1:] for name, values in times.items()}


def measure(shape: str, num_rows: int, dtype: torch.dtype, seconds: float) -> list[dict[str, Any]]:
    num_out, num_in = SHAPES[shape]
    sides, sizes = make_sides(num_out, num_in, dtype)
    x = torch.randn(num_rows, num_in, dtype=dtype)
    is_alone = torch.get_num_threads() == 1
    times = run_rounds(sides, x, seconds, time.thread_time if is_alone else time.perf_counter)
    rows = []
    for name in sides:
        median, best = statistics.median(times[name]), min(times[name])
        rows.append(
            {
                "shape": shape,
                "rows": num_rows,
                "side": name,
                "median_ms": round(median * 1e3, 4),
                "best_ms": round(best * 1e3, 4),
                "times_torch": round(statistics.median(times["torch"]) / median, 2),
                "gb_per_s": round(sizes[name] / best / 1e9, 1),
                "gflop_per_s": round(2 * num_rows * num_out * num_in / best / 1e9, 1),
                "read_gb_per_s": round((64 << 20) / min(times["read"]) / 1e9, 1),
                "rounds": len(times[name]),
            }
        )
    return rows


def main() -> None:
    parser = make_parser(__doc__, seconds=2.0, per="shape and number of rows")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--rows", default="1,4,16,64,1024")
    args = parser.parse_args()
    library = load_kernels(args)
    results = []
    with torch.inference_mode():
        for shape in args.shapes.split(","):
            for num_rows in map(int, args.rows.split(",")):
                rows = measure(shape, num_rows, getattr(torch, args.dtype), args.seconds)
                results += rows
                for row in rows:
                    print("  ".join(f"{k} {v}" for k, v in row.items()), file=sys.stderr)
    settings = describe(args, library)
    print(json.dumps({"benchmark": "linear", "settings": settings, "results": results}))


if __name__ == "__main__":
    main()
