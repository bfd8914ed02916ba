"""Measure how fast KV blocks move between the KV cache, host memory and files, as JSON.

    python benchmarks/bench_kv_transfer.py [--layers N] [--folder PATH]

Blocks of a model of 1.24 B parameters (16 layers, 8 key/value heads of 64, bfloat16; 16 tokens per
block): read out of the cache, written back, and through files. For comparison, copying the same
amount of memory in one piece is measured alternately with them.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import torch

from vllm.distributed.kv_transfer.block_folder import BlockFolder
from vllm.worker.cpu.block_copies import BlockCopies

ROUNDS = 15
NUM_BLOCKS = 512
"""Of the cache. 256 of them are copied: 4096 tokens, 128 MiB."""


def gib_per_s(run: Callable[[], object], num_bytes: int) -> float:
    begin = time.perf_counter()
    run()
    return num_bytes / (time.perf_counter() - begin) / 2**30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--folder", help="for files; a temporary one if not given")
    args = parser.parse_args()
    caches = [
        torch.ones(NUM_BLOCKS, 16, 8, 64, dtype=torch.bfloat16) for _ in range(2 * args.layers)
    ]
    copies = BlockCopies([SimpleNamespace(kv_caches=caches)], NUM_BLOCKS)  # type: ignore[list-item]
    rng = np.random.default_rng(0)
    ids = rng.permutation(NUM_BLOCKS)[: NUM_BLOCKS // 2].tolist()
    num_bytes = len(ids) * copies.block_bytes
    source, target = np.ones(num_bytes, np.uint8), np.ones(num_bytes, np.uint8)
    blocks = copies.read(ids)
    keys = [index.to_bytes(32, "little") for index in range(len(ids))]
    speeds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(dir=args.folder) as path:
        folder = BlockFolder(path, 8 * num_bytes)

        def write_files() -> None:
            for key, block in zip(keys, blocks, strict=True):
                folder.write(key, [block])

        def read_files() -> None:
            assert all(folder.read(key) is not None for key in keys)

        for _ in range(ROUNDS):
            for name, run in (
                ("copy_of_memory", lambda: np.copyto(target, source)),
                ("cache_to_host", lambda: copies.read(ids)),
                ("host_to_cache", lambda: copies.write(ids, blocks)),
                ("host_to_files", write_files),
                ("files_to_host", read_files),
            ):
                speeds.setdefault(name, []).append(gib_per_s(run, num_bytes))
    medians = {name: round(statistics.median(values), 2) for name, values in speeds.items()}
    print(json.dumps({"block_bytes": copies.block_bytes, "blocks": len(ids), "gib_per_s": medians}))


if __name__ == "__main__":
    main()
