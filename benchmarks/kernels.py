"""Code that the benchmarks of kernels share: flags, the library, and timing calls."""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from vllm.ops.cpu.library import CPUKernels, load_cpu_kernels


def make_parser(description: str | None, *, seconds: float, per: str) -> argparse.ArgumentParser:
    """Return a parser with the flags that all of them have.

    Args:
        description: its first line is shown.
        seconds: default of `--seconds`.
        per: what takes this long, for the help.
    """
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    add = parser.add_argument
    add("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    add("--threads", type=int, default=torch.get_num_threads())
    add("--seconds", type=float, default=seconds, help=f"per {per}")
    add(
        "--isa",
        help="amx, avx512_bf16, avx512_vnni, avx512, avx_vnni, avx2 or base; default: the best",
    )
    return parser


def load_kernels(args: argparse.Namespace) -> CPUKernels:
    """Return the kernels that the flags name; set the number of threads and the seed. Exits if
    there are none.
    """
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    library = load_cpu_kernels()
    if library is None:
        sys.exit("the C++ kernels are not built: python setup.py build_ext --inplace")
    if args.isa is not None and not library.set_isa(args.isa):
        sys.exit(f"this machine or this build has no {args.isa} kernels")
    return library


def describe(args: argparse.Namespace, library: CPUKernels) -> dict[str, Any]:
    """Return the settings of a measurement."""
    return {
        "dtype": args.dtype,
        "threads": args.threads,
        "isa": library.isa,
    }


def best_in_turns_us(
    calls: Sequence[Callable[[], object]],
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """Return the fastest time of each function in microseconds, called alternately for `seconds`,
    at least five times.

    Calls alternate because a shared machine changes its speed from one second to the next.
    """
    for call in calls:
        call()
    best = [float("inf")] * len(calls)
    end, rounds = time.perf_counter() + seconds, 0
    while rounds < 5 or time.perf_counter() < end:
        rounds += 1
        for i, call in enumerate(calls):
            start = clock()
            call()
            best[i] = min(best[i], clock() - start)
    return [1e6 * time_s for time_s in best]
