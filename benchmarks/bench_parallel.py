"""Latency of an all-reduce between two processes: through shared memory, and with gloo.

Run it with: python benchmarks/bench_parallel.py [--num-bytes N ...]. Prints JSON: the median in
microseconds of float32 tensors of each size.
"""

import argparse
import json
import os
import statistics
import time

import torch

from vllm.config import ParallelConfig
from vllm.distributed import CheckedCollectives, Collectives, Meeting
from vllm.distributed.meeting import ARENA_BUFFER_BYTES, ARENA_HEADER_BYTES
from vllm.ops.cpu.collectives import SharedMemoryCollectives
from vllm.ops.cpu.library import require_cpu_kernels

NUM_WARM_UPS, NUM_CALLS = 20, 200


def median_us(collectives: Collectives, num_bytes: int) -> float:
    """Median time of one all-reduce, as this rank sees it."""
    x = torch.zeros(num_bytes // 4)
    times = []
    for _ in range(NUM_WARM_UPS + NUM_CALLS):
        started = time.perf_counter()
        collectives.all_reduce(x)
        times.append(time.perf_counter() - started)
    return statistics.median(times[NUM_WARM_UPS:]) * 1e6


def main() -> None:
    """Fork the second rank, measure on both, and print what the first has found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-bytes", type=int, nargs="+", default=[8192, 65536, 1 << 20])
    sizes = parser.parse_args().num_bytes
    torch.set_num_threads(1)
    parallel = ParallelConfig(tensor_parallel_size=2, distributed_timeout_s=60.0)
    meeting = Meeting.create(parallel)
    kernels = require_cpu_kernels("the benchmark needs")
    child = os.fork()
    rank = int(child == 0)
    mine = Meeting.of(parallel, rank, *meeting.descriptors)
    shared = SharedMemoryCollectives(
        kernels,
        mine.arena_fd,
        rank,
        2,
        header_bytes=ARENA_HEADER_BYTES,
        buffer_bytes=ARENA_BUFFER_BYTES,
        timeout_s=mine.timeout_s,
    )
    found = {"shared_memory_us": {size: round(median_us(shared, size), 1) for size in sizes}}
    mine.join("gloo")
    gloo = CheckedCollectives(rank, 2)
    found["gloo_us"] = {size: round(median_us(gloo, size), 1) for size in sizes}
    mine.close()
    if rank:
        os._exit(0)
    os.waitpid(child, 0)
    print(json.dumps({"ranks": 2, "threads_per_rank": 1, "num_calls": NUM_CALLS, **found}))


if __name__ == "__main__":
    main()
