"""Count the cache blocks that decodes of a card move, with prefix caching on.

    python benchmarks/bench_block_spread.py [--rows 64] [--prompt 1000] [--output 300]

The scheduler runs a load without a model: requests come, decode, end, and leave their full blocks
to the prefix cache; some begin with a prompt that came before. Counted are blocks of keys and
values, relative to reading once the blocks of the requests that decode: as one slice up to the
highest, or gathered (three times each), with and without moving the blocks of running requests to
the low end. A moved block is read and written. Padding to buckets is not counted. Prints JSON on
standard output and a table on standard error.
"""

import argparse
import json
import random
import sys
import time

import numpy as np

from vllm.config import SchedulerConfig
from vllm.core.kv.kv_cache_manager import KVCacheManager
from vllm.core.scheduler import Scheduler
from vllm.messages import EngineRequest, ModelRunnerOutput, SchedulerOutput
from vllm.sampling_params import SamplingParams

_GATHER = 3
_WARM_UP_SHARE = 1 / 3
"""Number of steps that are not counted."""


class Simulation:
    """Simulates decodes of up to `rows` requests; other requests wait."""

    def __init__(self, args: argparse.Namespace, num_blocks: int, is_dense: bool) -> None:
        self._args = args
        self._rng = random.Random(args.seed)
        self._cache = KVCacheManager(num_blocks, args.block_size, True, is_dense=is_dense)
        longest = 20 * (args.prompt + args.output)
        config = SchedulerConfig(
            max_model_len=longest, max_num_seqs=args.rows, max_num_batched_tokens=longest
        )
        self._scheduler = Scheduler(config, self._cache)
        self._num_requests = 0
        self._prompts: list[list[int]] = []
        self.scheduler_s = 0.0

    def step(self) -> tuple[int, int, int, int]:
        """Run a step. Return the number of blocks that decodes refer to, the blocks of a slice, the
        further references to shared blocks, and the copied blocks.
        """
        while not self._scheduler.waiting:
            self._scheduler.add_request(self._draw())
        before = time.perf_counter()
        step = self._scheduler.schedule()
        self.scheduler_s += time.perf_counter() - before
        requests = self._scheduler.running.at(step.rows[step.num_scheduled_tokens == 1])
        ids = [block_id for request in requests for block_id in request.block_ids]
        moves = 0 if step.block_moves is None else len(step.block_moves.copied)
        self._scheduler.update(self._result(step))
        return len(ids), max(ids, default=-1) + 1, len(ids) - len(set(ids)), moves

    def _result(self, step: SchedulerOutput) -> ModelRunnerOutput:
        rows = self._scheduler._in_flight[0].rows
        return ModelRunnerOutput(step_id=step.step_id, rows=rows, token_ids=np.full_like(rows, 7))

    def _draw(self) -> EngineRequest:
        rng, args = self._rng, self._args
        self._num_requests += 1
        size = max(1, int(rng.lognormvariate(0, 0.6) * args.prompt))
        if self._prompts and rng.random() < args.repeats:
            prompt = [*rng.choice(self._prompts), self._num_requests]
        else:
            prompt = [self._num_requests] * size
            self._prompts = [*self._prompts[-200:], prompt]
        output = max(1, int(rng.lognormvariate(0, 0.5) * args.output))
        return EngineRequest(
            request_id=str(self._num_requests),
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(max_tokens=output),
            seed=0,
            eos_token_id=None,
            max_total_tokens=len(prompt) + output,
            arrival_time=0.0,
        )


def measure(args: argparse.Namespace, share: float, is_dense: bool) -> dict[str, float | bool]:
    """Return one line of the table."""
    used = args.rows * ((args.prompt * 1.2 + args.output / 2) / args.block_size + 0.5)
    simulation = Simulation(args, int(used / share), is_dense)
    steps = np.array([simulation.step() for _ in range(args.steps)])
    refs, span, shared, moved = steps[int(len(steps) * _WARM_UP_SHARE) :].T
    total = refs.sum()
    sliced = span + _GATHER * shared
    return {
        "is_dense": is_dense,
        "share_in_use": round(float((refs - shared).sum()) / len(refs) / int(used / share), 3),
        "slice": round(sliced.sum() / total, 3),
        "moves": round(2 * moved.sum() / total, 3),
        "gather": _GATHER,
        "cheaper": round(float((np.minimum(sliced, _GATHER * refs) + 2 * moved).sum() / total), 3),
        "scheduler_us": round(simulation.scheduler_s / len(steps) * 1e6),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("rows", 64), ("prompt", 1000), ("output", 300), ("steps", 2000)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--block-size", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--repeats", type=float, default=0.0, help="fraction of prompts that are repeated"
    )
    parser.add_argument("--shares", type=float, nargs="+", default=[0.25, 0.5, 0.75])
    args = parser.parse_args()
    rows = [measure(args, share, dense) for share in args.shares for dense in (False, True)]
    for row in rows:
        print("  ".join(f"{name} {value}" for name, value in row.items()), file=sys.stderr)
    print(json.dumps({"settings": vars(args), "rows": rows}))


if __name__ == "__main__":
    main()
