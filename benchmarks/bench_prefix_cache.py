"""Replay a day of requests on the prefix cache: hits, host time and memory.

The real scheduler and block pool replay a trace of requests on a made-up device, whose clock
advances by `--step-s` and `--token-s` for each step. Next to it, an ideal LRU of as many blocks is
told the same events: which request enters, which one leaves.

A trace is JSON Lines with the keys timestamp, input_length, output_length and hash_ids (one for
every 512 tokens of the prompt), or a CSV of lengths and times without contents. Then conversations
are reconstructed: all prompts begin with the same 512 tokens, and some requests continue an earlier
one, whose prompt and output they contain. How many, and after how long, is taken from a part of the
published trace of conversations of Mooncake (41 % of the requests, after 165 s in the median).

    python benchmarks/bench_prefix_cache.py --trace mooncake_conversation.csv

One JSON object on stdout.
"""

import argparse
import gc
import json
import random
import statistics
import sys
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from bench_scheduler import VOCAB_SIZE, Steps, make_request

from vllm.config import SchedulerConfig
from vllm.core.kv.kv_cache_manager import KVCacheManager
from vllm.core.scheduler import Scheduler
from vllm.messages import EngineRequest, ModelRunnerOutput
from vllm.planning.request_lengths import read_lengths
from vllm.request import Request

Tokens = npt.NDArray[np.int64]

SYSTEM_TOKENS = 512
"""Tokens of a hash of the trace, and of the prompt that all reconstructed requests begin with."""
CONTINUED, DELAY_S, DELAY_SIGMA = 0.41, 165.0, 1.2
"""Fraction of requests that continue another one, and the lognormal distribution of the delay."""
MAX_MODEL_LEN = 200_000
NEAREST = 10
"""A request continues the longest of so many conversations whose delay is nearest."""

_PREEMPTED = (
    "A request was preempted, which the ideal cache does not follow: the requests that run at the "
    "same time need more blocks than there are. Raise --num-blocks, or lower --step-s"
)


@dataclass(frozen=True)
class Turn:
    """A request of the trace."""

    time: float
    num_inputs: int
    num_outputs: int
    contents: tuple[int, ...]
    """Seeds of the tokens, each for 512; of the conversation where there is one."""
    conversation: int | None = None

    def tokens(self) -> Tokens:
        """Return the prompt and the output of a turn."""
        total = self.num_inputs + self.num_outputs
        if self.conversation is None:
            parts = [_random_tokens(seed, SYSTEM_TOKENS) for seed in self.contents]
            prompt = np.concatenate(parts)[: self.num_inputs]
            output = _random_tokens(hash(self.contents) & 0xFFFFFFFF, total - len(prompt))
            return np.concatenate([prompt, output])
        system = _random_tokens(0, SYSTEM_TOKENS)
        rest = _random_tokens(1 + self.conversation, max(0, total - SYSTEM_TOKENS))
        return np.concatenate([system, rest])[:total]


def _random_tokens(seed: int, count: int) -> Tokens:
    # A seed gives the same first tokens for every count.
    return np.random.default_rng(seed).integers(0, VOCAB_SIZE, count)


def read_trace(path: Path, count: int | None) -> list[Turn]:
    with path.open(encoding="utf-8") as file:
        has_contents = "hash_ids" in file.readline()
    if has_contents:
        with path.open(encoding="utf-8") as file:
            records = map(json.loads, islice(file, count))
            return [
                Turn(
                    record["timestamp"] / 1e3,
                    record["input_length"],
                    record["output_length"],
                    tuple(record["hash_ids"]),
                )
                for record in records
            ]
    return reconstructed(path, count)


def reconstructed(path: Path, count: int | None) -> list[Turn]:
    """Return conversations of which the requests of a file may be the turns."""
    lengths = read_lengths(path).part(slice(0, count))
    assert lengths.times is not None, f"{path} has no times"
    rng = random.Random(0)
    newest: list[Turn] = []
    """The last turn of each conversation."""
    turns = []
    requests = zip(
        lengths.times.tolist(),
        lengths.num_inputs.tolist(),
        lengths.num_outputs.tolist(),
        strict=True,
    )
    for moment, num_inputs, num_outputs in requests:
        found = None
        if rng.random() < CONTINUED:
            delay = DELAY_S * rng.lognormvariate(0, DELAY_SIGMA)
            fits = [
                (abs(moment - each.time - delay), -each.num_inputs, index)
                for index, each in enumerate(newest)
                if each.time < moment and each.num_inputs + each.num_outputs < num_inputs
            ]
            if fits:
                found = min(sorted(fits)[:NEAREST], key=lambda fit: fit[1])[2]
        index = len(newest) if found is None else found
        turn = Turn(moment, num_inputs, max(1, num_outputs), (), conversation=index)
        newest[index : index + 1] = [turn]
        turns.append(turn)
    return turns


# ---- the ideal cache ------------------------------------------------------------------------


class IdealLRU:
    """Stores blocks by content, and removes the least recently used; blocks in use remain.

    Args:
        capacity: number of blocks.
        num_finds: blocks that were found this often are removed after all others; None: by age
            only.
    """

    def __init__(self, capacity: int, num_finds: int | None = None) -> None:
        self._capacity = capacity
        self._num_finds = num_finds
        self._num_users: dict[bytes, int] = {}
        self._idle: OrderedDict[bytes, None] = OrderedDict()
        self._idle_shared: OrderedDict[bytes, None] = OrderedDict()
        self._found: dict[bytes, int] = {}
        self._held: dict[str, list[bytes]] = {}
        self._num_others = 0
        """Blocks in use that have no content of their own: not full, or a copy."""
        self._others: dict[str, int] = {}

    def enter(self, name: str, prompt: list[bytes], num_blocks: int) -> int:
        """Let a request take its blocks; return how many blocks of its prompt were found."""
        num_found = 0
        while num_found < len(prompt) and self._has(prompt[num_found]):
            num_found += 1
        for key in prompt[:num_found]:
            self._idle.pop(key, None)
            self._idle_shared.pop(key, None)
            self._found[key] = self._found.get(key, 0) + 1
            self._num_users[key] = self._num_users.get(key, 0) + 1
        self._num_others += num_blocks - num_found
        self._make_room()
        new = [key for key in prompt[num_found:] if not self._has(key)]
        self._held[name] = [*prompt[:num_found], *new]
        self._others[name] = num_blocks - num_found - len(new)
        self._num_others -= len(new)
        for key in new:
            self._num_users[key] = 1
        return num_found

    def grow(self, name: str) -> None:
        """Let a request take one more block, for its output."""
        self._others[name] += 1
        self._num_others += 1
        self._make_room()

    def leave(self, name: str, contents: list[bytes]) -> None:
        """Let a request give its blocks back; blocks with content remain until room is needed."""
        self._num_others -= self._others.pop(name)
        held = set(self._held[name])
        for key in reversed(contents):
            if key in held:
                self._num_users[key] -= 1
                if self._num_users[key]:
                    continue
                del self._num_users[key]
            elif self._has(key):
                continue
            is_shared = self._num_finds is not None and self._found.get(key, 0) >= self._num_finds
            (self._idle_shared if is_shared else self._idle)[key] = None
        del self._held[name]
        self._make_room()

    def _has(self, key: bytes) -> bool:
        return key in self._num_users or key in self._idle or key in self._idle_shared

    def _make_room(self) -> None:
        used = len(self._num_users) + self._num_others
        while used + len(self._idle) + len(self._idle_shared) > self._capacity:
            if not (self._idle or self._idle_shared):
                sys.exit(_PREEMPTED)
            key, _ = (self._idle or self._idle_shared).popitem(last=False)
            self._found.pop(key, None)


# ---- the replay -----------------------------------------------------------------------------


class Replay:
    """Runs the scheduler with a simulated device, and ideal caches for the same requests."""

    def __init__(self, args: argparse.Namespace, *, enable_caching: bool = True) -> None:
        config = SchedulerConfig(
            max_model_len=MAX_MODEL_LEN, max_num_seqs=256, max_num_batched_tokens=args.max_tokens
        )
        self.cache = KVCacheManager(args.num_blocks + 1, args.block_size, enable_caching)
        self.scheduler = Scheduler(config, self.cache)
        self.now = 0.0
        self.host_s = 0.0
        self.num_steps = self.num_hits = self.num_tokens = self.num_ideal = 0
        self._args = args
        self._outputs: dict[str, Tokens] = {}
        self._prompts: dict[str, int] = {}
        self._ideal = {
            "lru": IdealLRU(args.num_blocks),
            "keeps_found_once": IdealLRU(args.num_blocks, num_finds=1),
            "keeps_found_8_times": IdealLRU(args.num_blocks, num_finds=8),
            "endless": IdealLRU(1 << 60),
        }
        self.ideal_hits = dict.fromkeys(self._ideal, 0)
        self._seen: set[str] = set()

    def add(self, name: str, turn: Turn) -> None:
        tokens = turn.tokens()
        self._outputs[name], self._prompts[name] = tokens, turn.num_inputs
        prompt = tokens[: turn.num_inputs].tolist()
        self.scheduler.add_request(make_request(name, prompt, turn.num_outputs))

    def step(self) -> None:
        scheduler = self.scheduler
        began = time.perf_counter()
        step = scheduler.schedule()
        self.host_s += time.perf_counter() - began
        for request in scheduler.running.at(step.block_rows):
            for ideal in self._ideal.values():
                ideal.grow(request.request_id)
        for new in step.new_requests:
            self._enter(scheduler.running.at(np.array([new.row], np.int32))[0])
        num_tokens = int(step.num_scheduled_tokens.sum())
        self.now += self._args.step_s + num_tokens * self._args.token_s
        booked = scheduler._in_flight[-1]
        names, ends = booked.request_ids, (booked.num_tokens - 1).tolist()
        ids = [self._outputs[name][end] for name, end in zip(names, ends, strict=True)]
        output = ModelRunnerOutput(
            step_id=step.step_id, rows=booked.rows, token_ids=np.array(ids, np.int32)
        )
        ending = [
            request
            for request, end in zip(booked.requests, ends, strict=True)
            if end + 1 == request.spec.max_total_tokens
        ]
        began = time.perf_counter()
        scheduler.update(output)
        self.host_s += time.perf_counter() - began
        self.num_steps += 1
        for request in ending:
            self._leave(request)

    def _enter(self, request: Request) -> None:
        name = request.request_id
        if name in self._seen:
            sys.exit(_PREEMPTED)
        self._seen.add(name)
        self.num_tokens += len(request.token_ids)
        self.num_hits += request.num_cached_tokens
        size = self.cache.block_size
        # The last token has to be computed, so a block that ends with it cannot be used.
        usable = self.cache._hashes(request, (len(request.token_ids) - 1) // size)
        num_blocks = self.cache.num_blocks_for(len(request.token_ids))
        for kind, ideal in self._ideal.items():
            self.ideal_hits[kind] += ideal.enter(name, usable, num_blocks) * size

    def _leave(self, request: Request) -> None:
        for ideal in self._ideal.values():
            ideal.leave(request.request_id, list(request.block_hashes))
        del self._outputs[request.request_id]

    def run(self, turns: Iterable[Turn]) -> None:
        rest: Iterator[tuple[int, Turn]] = iter(enumerate(turns))
        upcoming = next(rest, None)
        while upcoming is not None or self.scheduler.num_unfinished_requests:
            if upcoming is not None and not self.scheduler.num_unfinished_requests:
                self.now = max(self.now, upcoming[1].time)
            while upcoming is not None and upcoming[1].time <= self.now:
                self.add(str(upcoming[0]), upcoming[1])
                upcoming = next(rest, None)
            self.step()


def replay(args: argparse.Namespace) -> tuple[Replay, dict[str, Any]]:
    turns = read_trace(Path(args.trace), args.requests)
    done = Replay(args)
    done.run(turns)
    total = done.num_tokens
    return done, {
        "requests": len(turns),
        "prompt_tokens": total,
        "steps": done.num_steps,
        "hit_rate": round(done.num_hits / total, 5),
        **{f"ideal_{kind}": round(hits / total, 5) for kind, hits in done.ideal_hits.items()},
        "host_us_per_step": round(done.host_s / done.num_steps * 1e6, 1),
    }


# ---- host time and memory -------------------------------------------------------------------


def make_prompt(name: int, num_tokens: int) -> EngineRequest:
    return make_request(str(name), _random_tokens(name, num_tokens).tolist(), 1024)


def decode_us(cache: KVCacheManager, num_running: int, num_steps: int) -> float:
    """Return the median time of `schedule()` and `update()` of decodes, in microseconds."""
    config = SchedulerConfig(
        max_model_len=MAX_MODEL_LEN, max_num_seqs=num_running, max_num_batched_tokens=1 << 20
    )
    scheduler = Scheduler(config, cache)
    for number in range(num_running):
        scheduler.add_request(make_prompt(10**6 + number, 128 + number % 16))
    steps = Steps(scheduler)
    steps.run(20)
    steps.forget()
    steps.run(num_steps)
    scheduler.abort_requests([str(10**6 + number) for number in range(num_running)])
    both = [a + b for a, b in zip(steps.schedule_us, steps.update_us, strict=True)]
    return round(statistics.median(both), 1)


def lookup_ms(cache: KVCacheManager, num_tokens: int) -> dict[str, float]:
    """Return the time to find a long cached prompt, in milliseconds: the first time, with its
    hashes, and again.
    """
    spec = make_prompt(5, num_tokens)
    scheduler = Scheduler(
        SchedulerConfig(
            max_model_len=MAX_MODEL_LEN, max_num_seqs=1, max_num_batched_tokens=1 << 20
        ),
        cache,
    )
    scheduler.add_request(spec)
    Steps(scheduler).run(1)
    scheduler.abort_requests([spec.request_id])
    first, again = [], []
    for _ in range(30):
        request = Request(spec, (0,))
        for times in (first, again):
            began = time.perf_counter()
            found = cache.find_prefix(request)
            times.append((time.perf_counter() - began) * 1e3)
        assert len(found) == (num_tokens - 1) // cache.block_size
    return {
        "first_median": round(statistics.median(first), 3),
        "first_min": round(min(first), 3),
        "again_median": round(statistics.median(again), 3),
    }


def index_bytes(cache: KVCacheManager) -> int:
    """Return the bytes of the lists, the dictionary and the hashes of the pool."""
    pool = cache.pool
    lists = (pool._next, pool._prev, pool._num_refs, pool._hash_of)
    numbers = 2 * 28 * pool.num_blocks  # of _next and _prev; other integers are small and shared
    hashes = sum(map(sys.getsizeof, pool._block_of))
    return sum(map(sys.getsizeof, lists)) + sys.getsizeof(pool._block_of) + hashes + numbers


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--trace", required=True, metavar="FILE")
    add("--requests", type=int, metavar="N", help="the first of the trace; not set: all")
    add("--num-blocks", type=int, default=100_000)
    add("--block-size", type=int, default=16)
    add("--max-tokens", type=int, default=8192, help="token budget of a step")
    add("--step-s", type=float, default=0.05, help="seconds of a step of the made-up device")
    add("--token-s", type=float, default=1e-5, help="seconds of each of its tokens")
    add("--running", type=int, default=64, help="requests of the timed decodes")
    args = parser.parse_args()
    done, result = replay(args)
    gc.collect()
    gc.freeze()
    gc.disable()
    fresh = KVCacheManager(4000, args.block_size, enable_caching=True)
    result["decode_us"] = {
        "full_cache": decode_us(done.cache, args.running, 300),
        "empty_cache": decode_us(fresh, args.running, 300),
    }
    result["lookup_32k_ms"] = lookup_ms(done.cache, 32_768)
    result["cached_blocks"] = len(done.cache.pool._block_of)
    result["index_bytes"] = index_bytes(done.cache)
    result["index_bytes_per_block"] = round(result["index_bytes"] / args.num_blocks, 1)
    print(json.dumps({"benchmark": "prefix cache", "settings": vars(args), "results": result}))


if __name__ == "__main__":
    main()
