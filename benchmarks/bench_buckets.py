"""Compare the costs of bucketing strategies for given lengths: buckets, warm-up, padding, misses.

Lengths are drawn (seeded) or read from a file with "input output" tokens on each line. Requests
wait in a queue that is never empty, run first come first served with chunked prefill, and hold
blocks for all their tokens from the start, so there is no preemption. A chunk is no longer than the
longest bucket of the strategy. A step is one decode launch and one prefill launch for each group of
prompts that is cheaper together than apart.

FLOPs: 2 * parameters for a token, 4 * hidden * layers for a query and a key; a padded prompt
attends to half of itself and to all blocks of context, a decode to all its blocks.

One JSON object on stdout, a table on stderr.
"""

import argparse
import json
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vllm.bucketing import Bucket, BucketSettings, MemoryClass, MemoryLedger, Phase, StepLimits
from vllm.bucketing.catalog.bucket_plan import decode_steps
from vllm.bucketing.catalog.capture_plan import Capture, capture_graphs
from vllm.bucketing.catalog.catalog import Catalog, padded_cost
from vllm.bucketing.catalog.closure import missing_buckets, unused_buckets
from vllm.bucketing.ledger import split_graph_memory
from vllm.bucketing.step_limits import ceil_div, trim_decodes
from vllm.bucketing.strategies.generate import GeneratedBuckets, buckets_from_file, generate_buckets

GIB, MIB = 1 << 30, 1 << 20

Lengths = list[tuple[int, int]]
Row = tuple[int, int]
"""Tokens before this step, tokens in it."""


@dataclass
class Running:
    """A running request of the simulation."""

    num_prompt: int
    num_total: int
    num_blocks: int
    num_computed: int = 0


@dataclass(frozen=True)
class Step:
    """The work that the scheduler gives to the device in one step."""

    decodes: list[int]
    """Length of each sequence, the new token included."""
    prefills: list[Row]


@dataclass
class Work:
    """Sums over the forward passes of one phase."""

    launches: int = 0
    tokens: int = 0
    padded_tokens: int = 0
    flops: float = 0.0
    padded_flops: float = 0.0

    def add(self, tokens: int, padded_tokens: int, flops: float, padded_flops: float) -> None:
        self.launches += 1
        self.tokens += tokens
        self.padded_tokens += padded_tokens
        self.flops += flops
        self.padded_flops += padded_flops

    def shares(self) -> dict[str, float]:
        """Return the fraction of padding in everything that is computed."""
        return {
            "tokens": round(1 - self.tokens / max(1, self.padded_tokens), 4),
            "flops": round(1 - self.flops / max(1.0, self.padded_flops), 4),
        }


@dataclass
class Model:
    """Computes the FLOPs of forward passes."""

    token: float
    pair: float
    block_size: int

    def prefill(self, context: int, query: int) -> float:
        return query * self.token + self.pair * query * (context + (query + 1) / 2)

    def decode(self, num_seqs: int, num_keys: int) -> float:
        return num_seqs * self.token + self.pair * num_keys


@dataclass
class Outcome:
    """The padding and the misses of one catalog."""

    work: dict[Phase, Work] = field(default_factory=lambda: {phase: Work() for phase in Phase})
    misses: int = 0


# ---- lengths ------------------------------------------------------------------------------


def draw_lengths(name: str, count: int, max_model_len: int, seed: int) -> Lengths:
    """Draw input and output tokens of `count` requests, together at most `max_model_len`."""
    rng = random.Random(f"{name} {seed}")

    def lognormal(median: float, sigma: float) -> int:
        return round(median * rng.lognormvariate(0, sigma))

    def one() -> tuple[int, int]:
        if name == "chat":
            return lognormal(350, 1.0), lognormal(220, 0.8)
        if name == "long":
            return lognormal(9000, 0.7), lognormal(300, 0.6)
        return rng.randint(1, max_model_len // 4), rng.randint(1, 1024)

    return [_clip(*one(), max_model_len) for _ in range(count)]


def read_lengths(path: Path, max_model_len: int) -> Lengths:
    """Read input and output tokens, one request per line."""
    lengths = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        parts = line.split()
        if len(parts) != 2 or not all(part.isdigit() for part in parts):
            sys.exit(f"{path}, line {number}: not 'input output' in tokens: {line!r}")
        lengths.append(_clip(int(parts[0]), int(parts[1]), max_model_len))
    if not lengths:
        sys.exit(f"{path} holds no lengths")
    return lengths


def _clip(num_input: int, num_output: int, max_model_len: int) -> tuple[int, int]:
    num_input = min(max(1, num_input), max_model_len - 1)
    return num_input, min(max(1, num_output), max_model_len - num_input)


# ---- steps --------------------------------------------------------------------------------


def simulate(lengths: Lengths, limits: StepLimits, hit_share: float = 0.0) -> list[Step]:
    """Return the steps of a scheduler that serves all requests as fast as the limits allow.

    A fraction `hit_share` of the requests finds a part of its prompt in the prefix cache: whole
    blocks, drawn uniformly.
    """
    rng = random.Random("prefix hits")
    waiting = list(reversed(lengths))
    running: list[Running] = []
    free = limits.usable_blocks
    steps = []
    while waiting or running:
        while waiting and len(running) < limits.max_num_seqs:
            num_prompt, num_output = waiting[-1]
            need = ceil_div(num_prompt + num_output, limits.block_size)
            if need > limits.usable_blocks:
                sys.exit(f"a request of {num_prompt + num_output} tokens never fits the cache")
            if need > free:
                break
            waiting.pop()
            free -= need
            hit = 0
            if rng.random() < hit_share:
                hit = rng.randint(0, (num_prompt - 1) // limits.block_size) * limits.block_size
            running.append(Running(num_prompt, num_prompt + num_output, need, hit))
        steps.append(_one_step(running, limits))
        for request in running:
            if request.num_computed >= request.num_total - 1:
                free += request.num_blocks
        running = [r for r in running if r.num_computed < r.num_total - 1]
    return steps


def _one_step(running: list[Running], limits: StepLimits) -> Step:
    decodes: list[int] = []
    prefills: list[Row] = []
    budget = limits.max_num_batched_tokens
    decoding = [r for r in running if r.num_computed >= r.num_prompt - 1]
    for request in decoding:
        request.num_computed += 1
        decodes.append(request.num_computed)
    budget -= len(decodes)
    is_decoding = set(map(id, decoding))
    for request in running:
        if id(request) in is_decoding or not budget:
            continue
        take = min(request.num_prompt - request.num_computed, budget, limits.max_query_len)
        prefills.append((request.num_computed, take))
        request.num_computed += take
        budget -= take
    return Step(decodes, prefills)


# ---- launches -----------------------------------------------------------------------------


def launch_all(steps: list[Step], catalog: Catalog, model: Model) -> Outcome:
    """Pad every forward pass to its bucket."""
    outcome = Outcome()
    for step in steps:
        if step.decodes:
            _launch_decode(step.decodes, catalog, model, outcome)
        for rows, bucket in _groups(step.prefills, catalog, model.block_size):
            if bucket is None:
                outcome.misses += 1
                continue
            padded = bucket.batch * model.prefill(
                bucket.blocks * model.block_size, bucket.query_len
            )
            useful = sum(model.prefill(context, query) for context, query in rows)
            num_tokens = sum(query for _, query in rows)
            outcome.work[Phase.PREFILL].add(num_tokens, bucket.num_tokens, useful, padded)
    return outcome


def _launch_decode(lengths: list[int], catalog: Catalog, model: Model, outcome: Outcome) -> None:
    refs = sum(ceil_div(length, model.block_size) for length in lengths)
    bucket = catalog.fit(Phase.DECODE, len(lengths), 1, refs)
    if bucket is None:
        outcome.misses += 1
        return
    outcome.work[Phase.DECODE].add(
        len(lengths),
        bucket.batch,
        model.decode(len(lengths), sum(lengths)),
        model.decode(bucket.batch, bucket.blocks * model.block_size),
    )


def _groups(
    rows: Sequence[Row], catalog: Catalog, block_size: int
) -> Iterator[tuple[list[Row], Bucket | None]]:
    """Yield groups of prompts; a prompt joins a group if this is cheaper than one more forward
    pass.
    """
    group: list[Row] = []
    bucket: Bucket | None = None
    for row in sorted(rows, key=lambda row: row[1]):
        alone = _fit([row], catalog, block_size)
        if group:
            together = _fit([*group, row], catalog, block_size)
            if (
                together
                and bucket
                and alone
                and padded_cost(together) <= padded_cost(bucket) + padded_cost(alone)
            ):
                group, bucket = [*group, row], together
                continue
            yield group, bucket
        group, bucket = [row], alone
    if group:
        yield group, bucket


def _fit(rows: list[Row], catalog: Catalog, block_size: int) -> Bucket | None:
    blocks = max(ceil_div(context, block_size) for context, _ in rows)
    return catalog.fit(Phase.PREFILL, len(rows), max(query for _, query in rows), blocks)


# ---- strategies ---------------------------------------------------------------------------


def make_strategies(limits: StepLimits, bucket_file: Path | None) -> dict[str, GeneratedBuckets]:
    """Return buckets by the name of their strategy.

    linear has the default ranges. linear-full has the recommended ranges: prompts up to the longest
    chunk, and decodes up to the whole cache.
    """
    default = BucketSettings.resolve(limits)
    full = BucketSettings.resolve(
        limits,
        {
            "VLLM_PROMPT_SEQ_BUCKET_MAX": limits.max_query_len,
            "VLLM_DECODE_BLOCK_BUCKET_MAX": max(128, limits.max_blocks),
        },
    )
    found = {
        "linear": generate_buckets("linear", limits, default),
        "linear-full": generate_buckets("linear", limits, full),
        "exponential": generate_buckets("exponential", limits, default),
        "sparse": generate_buckets("sparse", limits, default),
        "pad": generate_buckets("pad", limits, default),
    }
    if bucket_file is not None:
        found["file"] = buckets_from_file(bucket_file.read_text(), str(bucket_file), limits)
    return found


def count_graphs(catalog: Catalog, args: argparse.Namespace) -> int:
    """Count the graphs that fit into the graph memory, by bytes per prompt token and per decode
    graph.
    """
    total = int(args.graph_memory_gib * GIB)
    ledger = MemoryLedger(total)
    prompt, decode = split_graph_memory(total, args.graph_prompt_ratio)
    ledger.assign(MemoryClass.PREFILL_GRAPHS, prompt)
    ledger.assign(MemoryClass.DECODE_GRAPHS, decode)

    def size(bucket: Bucket) -> int:
        if bucket.phase is Phase.DECODE:
            return int(args.graph_mib_per_decode * MIB)
        return int(bucket.num_tokens * args.graph_mib_per_prompt_token * MIB)

    plan = capture_graphs(catalog.prefill, catalog.decode, ledger, estimate=size)
    answer = None
    while True:
        try:
            step = plan.send(answer)  # type: ignore[arg-type]  # a generator begins with None
        except StopIteration as end:
            return sum(len(graphs.captured) for graphs in end.value.values())
        refused = step.refusal is not None
        answer = Capture(None if refused else size(step.bucket), step.refusal)


def measure(
    lengths: Lengths, found: GeneratedBuckets, limits: StepLimits, args: argparse.Namespace
) -> dict[str, Any]:
    """Return one line of the result."""
    steps = simulate(lengths, limits, args.hit_share)
    model = Model(2e9 * args.params_b, 4.0 * args.hidden * args.layers, limits.block_size)
    raw = Catalog(found.prefill, trim_decodes(found.decode, limits))
    closed = raw.with_buckets(decode_steps(raw, limits))
    closed = closed.with_buckets(missing_buckets(closed, limits))
    closed = closed.without(unused_buckets(closed, limits))
    outcome = launch_all(steps, closed, model)
    prefill, decode = outcome.work[Phase.PREFILL], outcome.work[Phase.DECODE]
    assert outcome.misses == 0, "the proof was wrong"
    both = Work(
        tokens=prefill.tokens + decode.tokens,
        padded_tokens=prefill.padded_tokens + decode.padded_tokens,
        flops=prefill.flops + decode.flops,
        padded_flops=prefill.padded_flops + decode.padded_flops,
    )
    return {
        "prompt_buckets": len(closed.prefill),
        "decode_buckets": len(closed.decode),
        "added_by_closure": len(closed) - len(raw),
        "graphs": count_graphs(closed, args),
        "warmup_s": round(len(closed) * args.seconds_per_bucket, 1),
        "prefill_waste": prefill.shares(),
        "decode_waste": decode.shares(),
        "waste": both.shares(),
        "prefill_launches": prefill.launches,
        "decode_launches": decode.launches,
        "misses": outcome.misses,
        "misses_without_closure": launch_all(steps, raw, model).misses,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--traces", nargs="+", choices=["chat", "long", "uniform"], help="default: all three")
    add("--lengths", type=Path, help='file with "input output" on each line, instead of --traces')
    add("--num-requests", type=int, default=300)
    add("--seed", type=int, default=0)
    add("--hit-share", type=float, default=0.0, help="requests that hit the prefix cache")
    add("--bucket-file", type=Path, help="one more strategy: the buckets of this file")
    add("--max-num-seqs", type=int, default=128)
    add("--max-model-len", type=int, default=32768)
    add("--max-num-batched-tokens", type=int, default=8192)
    add("--block-size", type=int, default=128)
    add("--num-blocks", type=int, default=4107)
    add("--seconds-per-bucket", type=float, default=0.44, help="8B bf16; 405B FP8: about 45")
    add("--graph-memory-gib", type=float, default=7.13)
    add("--graph-prompt-ratio", type=float, default=0.3)
    add("--graph-mib-per-prompt-token", type=float, default=1.44)
    add("--graph-mib-per-decode", type=float, default=3.4)
    add("--params-b", type=float, default=8.0, help="billions of parameters a token goes through")
    add("--hidden", type=int, default=4096)
    add("--layers", type=int, default=32)
    args = parser.parse_args()
    limits = StepLimits(
        max_num_seqs=args.max_num_seqs,
        max_model_len=args.max_model_len,
        max_num_batched_tokens=args.max_num_batched_tokens,
        block_size=args.block_size,
        num_blocks=args.num_blocks,
        max_block_refs=args.num_blocks - 1,
    )
    if args.lengths is not None:
        traces = {str(args.lengths): read_lengths(args.lengths, limits.max_seq_len)}
    else:
        names = args.traces or ["chat", "long", "uniform"]
        traces = {
            name: draw_lengths(name, args.num_requests, limits.max_seq_len, args.seed)
            for name in names
        }
    strategies = make_strategies(limits, args.bucket_file)
    results = []
    for trace, lengths in traces.items():
        for strategy, found in strategies.items():
            longest = max((b.query_len for b in found.prefill), default=None)
            chunked = replace(limits, max_chunk_tokens=longest)
            row = {"trace": trace, "strategy": strategy, **measure(lengths, found, chunked, args)}
            results.append(row)
    settings = {key: str(v) if isinstance(v, Path) else v for key, v in vars(args).items()}
    print(json.dumps({"benchmark": "buckets", "settings": settings, "results": results}))
    print_table(results)


def print_table(results: list[dict[str, Any]]) -> None:
    """Print the figures side by side on stderr."""
    head = "trace     strategy     prompt decode added graphs warm-up s"
    head += "  padding: prefill decode   FLOPs  misses (unclosed)"
    print(head, file=sys.stderr)
    for row in results:
        print(
            f"{row['trace'][-9:]:<9} {row['strategy']:<12} {row['prompt_buckets']:>6} "
            f"{row['decode_buckets']:>6} {row['added_by_closure']:>5} {row['graphs']:>6} "
            f"{row['warmup_s']:>9}  {row['prefill_waste']['tokens']:>16.1%} "
            f"{row['decode_waste']['tokens']:>6.1%} {row['waste']['flops']:>7.1%} "
            f"{row['misses']:>7} ({row['misses_without_closure']})",
            file=sys.stderr,
        )


if __name__ == "__main__":
    main()
