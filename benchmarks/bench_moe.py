"""Time a mixture of experts: the kernel on packed experts against torch, expert by expert.

    python benchmarks/bench_moe.py [--experts 32] [--top-k 4] [--tokens 1,16,512] [--threads N]

The sizes are taken from a layer of a small mixture (hidden 2,048, intermediate 768); experts are
drawn evenly. Every round calls each side once. Prints JSON on standard output and a table on
standard error: the best time in milliseconds, GB/s of the weights of the experts that were hit as
they are stored, and GFLOP/s. With one thread, the clock counts the processor time of this thread,
which other processes do not stop.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from kernels import describe, load_kernels, make_parser
from torch import Tensor

from vllm.ops.cpu.weights.moe import PackedExperts
from vllm.ops.cpu.weights.weight_format import WeightFormat

Side = Callable[[Tensor, Tensor, Tensor], Tensor]


def torch_side(gate_up: Tensor, down: Tensor) -> Side:
    """Return a function like a model in torch: it runs the tokens of each chosen expert, one expert
    after another.
    """

    def forward(x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        out = torch.zeros_like(x, dtype=torch.float32)
        for expert in topk_ids.unique().tolist():
            token, choice = (topk_ids == expert).nonzero(as_tuple=True)
            gate, up = F.linear(x[token], gate_up[expert]).chunk(2, dim=-1)
            result = F.linear(F.silu(gate) * up, down[expert])
            out.index_add_(0, token, topk_weights[token, choice, None] * result)
        return out.to(x.dtype)

    return forward


def make_sides(args: argparse.Namespace) -> tuple[dict[str, Side], dict[str, int]]:
    """Return name -> one call, and the bytes of all experts."""
    dtype = getattr(torch, args.dtype)
    gate_up = torch.randn(args.experts, 2 * args.intermediate, args.hidden).to(dtype)
    down = torch.randn(args.experts, args.hidden, args.intermediate).to(dtype)
    packed = {
        "packed": PackedExperts.pack(gate_up.clone(), down.clone()),
        "int8": PackedExperts.pack(gate_up, down, WeightFormat.INT8),
        "int4": PackedExperts.pack(gate_up, down, WeightFormat.INT4),
    }
    sides: dict[str, Side] = {"torch": torch_side(gate_up, down)}
    sides.update({name: experts.forward for name, experts in packed.items()})
    sizes = {"torch": (gate_up.numel() + down.numel()) * gate_up.element_size()}
    sizes.update({name: experts.num_bytes for name, experts in packed.items()})
    return sides, sizes


def measure(
    args: argparse.Namespace, sides: dict[str, Side], sizes: dict[str, int], num_tokens: int
) -> list[dict[str, Any]]:
    clock = time.thread_time if args.threads == 1 else time.perf_counter
    times: dict[str, list[float]] = {name: [] for name in sides}
    num_hit = 0
    end = time.perf_counter() + args.seconds
    while len(times["torch"]) < 4 or time.perf_counter() < end:
        x = torch.randn(num_tokens, args.hidden).to(getattr(torch, args.dtype))
        topk_ids = torch.rand(num_tokens, args.experts).topk(args.top_k).indices
        topk_weights = torch.rand(topk_ids.shape).softmax(-1)
        num_hit = max(num_hit, len(topk_ids.unique()))
        for name, side in sides.items():
            start = clock()
            side(x, topk_ids, topk_weights)
            times[name].append(clock() - start)
    flop = 6 * num_tokens * args.top_k * args.hidden * args.intermediate
    rows = []
    for name, values in times.items():
        best = min(values[1:])
        rows.append(
            {
                "tokens": num_tokens,
                "experts_hit": num_hit,
                "side": name,
                "best_ms": round(best * 1e3, 3),
                "times_torch": round(min(times["torch"][1:]) / best, 2),
                "gb_per_s": round(sizes[name] * num_hit / args.experts / best / 1e9, 1),
                "gflop_per_s": round(flop / best / 1e9, 1),
            }
        )
    return rows


def main() -> None:
    parser = make_parser(__doc__, seconds=2.0, per="number of tokens")
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--top-k", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--intermediate", type=int, default=768)
    parser.add_argument("--tokens", default="1,4,16,64,512")
    args = parser.parse_args()
    library = load_kernels(args)
    results = []
    with torch.inference_mode():
        sides, sizes = make_sides(args)
        for num_tokens in map(int, args.tokens.split(",")):
            rows = measure(args, sides, sizes, num_tokens)
            results += rows
            for row in rows:
                print("  ".join(f"{k} {v}" for k, v in row.items()), file=sys.stderr)
    settings = {**vars(args), **describe(args, library)}
    print(json.dumps({"benchmark": "moe", "settings": settings, "results": results}))


if __name__ == "__main__":
    main()
