"""What a decode of a card would read as one slice of the cache, with prefix caching on.

    python benchmarks/bench_block_spread.py [--rows 64] [--prompt 1000] [--output 300]

Requests hold blocks of the scheduler's `BlockPool`, decode, end, and leave their full blocks to the
prefix cache. Counted are the blocks up to the highest one in use, which a slice reads, relative to
the blocks in use; a gather moves three times those. No model runs. Prints JSON on standard output
and a table on standard error.
"""

import argparse
import json
import random
import sys
from dataclasses import dataclass

from vllm.core.block_pool import BlockPool

_GATHER = 3.0
_WARM_UP_SHARE = 1 / 3
"""Of the steps, those that are not counted."""


@dataclass
class Running:
    """One request."""

    num_tokens: int
    end: int
    block_ids: list[int]


class Simulation:
    """Decodes of up to `rows` requests; a new one begins when there is room for all its tokens."""

    def __init__(self, args: argparse.Namespace, num_blocks: int) -> None:
        self._args = args
        self._rng = random.Random(args.seed)
        self._pool = BlockPool(num_blocks)
        self._running: list[Running] = []
        self._num_hashes = 0
        self._next = self._draw()

    def step(self) -> tuple[int, int]:
        """Returns the blocks in use, and those of a slice."""
        args, pool = self._args, self._pool
        while len(self._running) < args.rows and self._has_room():
            prompt, end = self._next
            block_ids = pool.allocate(-(-prompt // args.block_size))
            self._running.append(Running(prompt, end, block_ids))
            self._next = self._draw()
        for request in self._running:
            request.num_tokens += 1
            if request.num_tokens > len(request.block_ids) * args.block_size:
                request.block_ids += pool.allocate(1)
        used = sum(len(request.block_ids) for request in self._running)
        span = max(max(request.block_ids) for request in self._running) + 1
        for request in [r for r in self._running if r.num_tokens >= r.end]:
            self._running.remove(request)
            self._end(request)
        return used, span

    def _draw(self) -> tuple[int, int]:
        """Tokens of a prompt, and with its output."""
        prompt = max(1, int(self._rng.lognormvariate(0, 0.6) * self._args.prompt))
        return prompt, prompt + max(1, int(self._rng.lognormvariate(0, 0.5) * self._args.output))

    def _has_room(self) -> bool:
        ends = [self._next[1], *(request.end for request in self._running)]
        return sum(-(-end // self._args.block_size) for end in ends) <= self._pool.num_usable_blocks

    def _end(self, request: Running) -> None:
        full = request.num_tokens // self._args.block_size
        names = range(self._num_hashes, self._num_hashes + full)
        self._pool.remember(request.block_ids[:full], [str(name).encode() for name in names])
        self._num_hashes += full
        self._pool.free(reversed(request.block_ids))


def measure(args: argparse.Namespace, share: float) -> dict[str, float]:
    """One row of the table."""
    used = args.rows * ((args.prompt * 1.2 + args.output / 2) / args.block_size + 0.5)
    simulation = Simulation(args, int(used / share))
    steps = [simulation.step() for _ in range(args.steps)]
    counted = steps[int(len(steps) * _WARM_UP_SHARE) :]
    total = sum(used for used, _ in counted)
    return {
        "share_in_use": round(total / len(counted) / int(used / share), 3),
        "slice": round(sum(span for _, span in counted) / total, 2),
        "gather": _GATHER,
        "cheaper": round(sum(min(span, _GATHER * used) for used, span in counted) / total, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("rows", 64), ("prompt", 1000), ("output", 300), ("steps", 2500)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--block-size", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.25, 0.5, 0.75])
    args = parser.parse_args()
    rows = [measure(args, share) for share in args.shares]
    for row in rows:
        print("  ".join(f"{name} {value}" for name, value in row.items()), file=sys.stderr)
    print(json.dumps({"settings": vars(args), "rows": rows}))


if __name__ == "__main__":
    main()
