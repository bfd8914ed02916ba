"""Time linear layers on each instruction set of this processor, and torch's F.linear.

    python benchmarks/bench_instruction_sets.py [--threads N] [--rows 1,16,512] [--isa amx,avx2]

The weight is the gate_up_proj of a 1.24 B-parameter Llama: as bf16, int8, int4 in blocks of 32, and
int4 as GPTQ checkpoints have it, in groups of 128. Every round calls each set once, so that all see
the same state of the machine; the weights are several copies, so that they come from memory. Prints
JSON on standard output: for each set the best time, GFLOP/s (2 * rows * outputs * inputs), and GB/s
of weights as they are stored. `torch` is F.linear with the same bf16 weight.
"""

import itertools
import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from bench_linear import SHAPES, Call, make_sides
from kernels import best_in_turns_us, describe, load_kernels, make_parser

from vllm.ops.cpu.library import CPUKernels

FORMATS = {"packed": "bf16", "int8": "int8", "int4": "int4", "gptq": "int4, groups of 128"}
SETS = ("amx", "avx512_bf16", "avx512_vnni", "avx512", "avx_vnni", "avx2", "base")


def in_turn(
    calls: list[Call], x: torch.Tensor, library: CPUKernels, isa: str
) -> Callable[[], None]:
    """Return a function that multiplies with the next copy of a weight, on one instruction set."""
    copies = itertools.cycle(calls)

    def run() -> None:
        library.set_isa(isa)
        next(copies)(x)

    return run


def measure(
    sides: dict[str, list[Call]],
    sizes: dict[str, int],
    x: torch.Tensor,
    out_features: int,
    library: CPUKernels,
    sets: list[str],
    seconds: float,
) -> list[dict[str, Any]]:
    flop = 2 * x.shape[0] * x.shape[1] * out_features
    rows = []
    for side, name in FORMATS.items():
        runs = {"torch": in_turn(sides["torch"], x, library, sets[0])} if side == "packed" else {}
        runs.update({isa: in_turn(sides[side], x, library, isa) for isa in sets})
        for isa, best_us in zip(runs, best_in_turns_us(list(runs.values()), seconds), strict=True):
            row = {
                "format": name,
                "rows": x.shape[0],
                "isa": isa,
                "best_ms": round(best_us / 1e3, 4),
                "gflop_per_s": round(flop / best_us / 1e3, 1),
                "gb_per_s": round(sizes[side] / best_us / 1e3, 1),
            }
            print("  ".join(f"{k} {v}" for k, v in row.items()), file=sys.stderr)
            rows.append(row)
    return rows


def main() -> None:
    parser = make_parser(__doc__, seconds=2.0, per="format and number of rows")
    parser.add_argument("--rows", default="1,16,512")
    parser.set_defaults(isa=",".join(SETS))
    args = parser.parse_args()
    wanted, args.isa = args.isa.split(","), None
    library = load_kernels(args)
    best = library.isa
    sets = [isa for isa in wanted if library.set_isa(isa)]
    if not sets:
        sys.exit(f"--isa {','.join(wanted)}: this machine or this build has none of them")
    out_features, in_features = SHAPES["gate_up_proj"]
    results = []
    with torch.inference_mode():
        sides, sizes = make_sides(out_features, in_features, getattr(torch, args.dtype))
        for num_rows in map(int, args.rows.split(",")):
            x = torch.randn(num_rows, in_features, dtype=getattr(torch, args.dtype))
            results += measure(sides, sizes, x, out_features, library, sets, args.seconds)
    library.set_isa(best)
    settings = {**describe(args, library), "sets": sets, "torch": torch.__version__}
    print(json.dumps({"benchmark": "instruction_sets", "settings": settings, "results": results}))


if __name__ == "__main__":
    main()
