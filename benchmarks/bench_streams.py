"""Time the gaps between tokens of streams while prompts arrive, with and without --max-step-ms.

Two servers run on this machine, one with the given `--max-step-ms` and one with 0. Each load is
sent to one server and then to the other; the next round begins with the other:

    prompts   `--streams` requests generate all the time, and long prompts come one after the other
    burst     32 requests at once, of 32 to 256 prompt tokens and 16 to 64 output tokens
    trace     requests of a CSV file, with lengths and times scaled (`--trace FILE`)

Prompts are random token ids, and every request generates as many tokens as it asks for. Other flags
are passed to both servers. One JSON object on stdout; figures are medians of rounds, times in
milliseconds.

    python benchmarks/bench_streams.py --model FOLDER --dtype bfloat16
"""

import argparse
import json
import os
import random
import statistics
import sys
from pathlib import Path
from typing import Any

import uvloop
from bench_serving import START_TIMEOUT_S, over_http, server

from vllm.entrypoints.bench.backends import BenchRequest
from vllm.entrypoints.bench.http_client import HttpClient
from vllm.entrypoints.bench.load import LoadRun, Send, run_load
from vllm.entrypoints.bench.report import machine
from vllm.entrypoints.bench.server import find_model
from vllm.planning.request_lengths import read_lengths

Load = tuple[list[BenchRequest], list[float]]
"""Requests, and the times at which they are sent."""

FIRST_ID = 16


def request(rng: random.Random, num_inputs: int, num_outputs: int, vocab_size: int) -> BenchRequest:
    prompt = [rng.randrange(FIRST_ID, vocab_size) for _ in range(num_inputs)]
    return BenchRequest(prompt=prompt, max_tokens=num_outputs)


def prompts_load(args: argparse.Namespace, seed: int) -> Load:
    """Return streams that begin at once, and long prompts at even intervals."""
    rng = random.Random(seed)
    requests = [request(rng, 32, args.stream_len, args.vocab_size) for _ in range(args.streams)]
    times = [0.0] * args.streams
    for number in range(args.num_prompts):
        requests.append(request(rng, args.prompt_len, 16, args.vocab_size))
        times.append(2 + number * args.prompt_every)
    return requests, times


def burst_load(args: argparse.Namespace, seed: int) -> Load:
    rng = random.Random(seed)
    requests = [
        request(rng, rng.randint(32, 256), rng.randint(16, 64), args.vocab_size) for _ in range(32)
    ]
    return requests, [0.0] * len(requests)


def trace_load(args: argparse.Namespace, seed: int) -> Load:
    """Return the first requests of a file, with shorter lengths and longer pauses."""
    lengths = read_lengths(Path(args.trace)).part(slice(0, args.trace_requests))
    if lengths.times is None:
        sys.exit(f"--trace {args.trace}: the file has no times of requests")
    rng = random.Random(seed)

    def scaled(length: int) -> int:
        return max(1, int(length * args.trace_lengths))

    requests = [
        request(rng, scaled(n), scaled(m), args.vocab_size)
        for n, m in zip(lengths.num_inputs.tolist(), lengths.num_outputs.tolist(), strict=True)
    ]
    first = float(lengths.times[0])
    return requests, [(time - first) / args.trace_rate for time in lengths.times.tolist()]


LOADS = {"prompts": prompts_load, "burst": burst_load, "trace": trace_load}


def figures(run: LoadRun) -> dict[str, float]:
    """Return the figures of one round."""
    errors = {record.error for record in run.records} - {None}
    if errors:
        sys.exit(f"requests failed: {errors}")
    gaps = sorted(gap * 1e3 for record in run.records for gap in record.itl_s)
    firsts = sorted(record.ttft_s * 1e3 for record in run.records)
    per_token = sorted(t * 1e3 for record in run.records if (t := record.tpot_s) is not None)
    num_tokens = sum(record.num_output_tokens for record in run.records)
    found = {"output_tokens_per_s": num_tokens / run.duration_s, "seconds": run.duration_s}
    found["tokens_per_piece"] = num_tokens / run.num_pieces
    for name, values in (("gap", gaps), ("first", firsts), ("per_token", per_token)):
        found |= {f"{name}_p{p:g}_ms": at(values, p) for p in (50, 90, 99)}
        found[f"{name}_max_ms"] = values[-1]
        found[f"{name}_mean_ms"] = statistics.mean(values)
    return found


def at(ordered: list[float], percentile: float) -> float:
    return ordered[min(len(ordered) - 1, int(percentile / 100 * len(ordered)))]


async def measure(urls: dict[str, str], args: argparse.Namespace) -> dict[str, Any]:
    clients = {name: HttpClient(url) for name, url in urls.items()}
    sends: dict[str, Send] = {}
    for name, client in clients.items():
        served = await find_model(client, START_TIMEOUT_S)
        sends[name] = over_http(client, served.id, "/v1/completions")
    for send in sends.values():
        first, times = burst_load(args, 1)
        await run_load(LoadRun(), send, first[:4], times[:4])
    results: dict[str, Any] = {}
    for load in args.loads:
        rounds: dict[str, list[dict[str, float]]] = {name: [] for name in sends}
        for number in range(args.num_rounds):
            order = list(sends)[:: 1 if number % 2 == 0 else -1]
            for name in order:
                run = LoadRun()
                await run_load(run, sends[name], *LOADS[load](args, 100 + number))
                rounds[name].append(figures(run))
                print(load, name, json.dumps(rounds[name][-1]), file=sys.stderr)
        results[load] = {
            name: {key: median(found, key) for key in found[0]} for name, found in rounds.items()
        }
        bounded, free = (
            [each["output_tokens_per_s"] for each in rounds[name]] for name in ("bound", "off")
        )
        ratios = [round(a / b, 4) for a, b in zip(bounded, free, strict=True)]
        results[load]["throughput_ratio"] = statistics.median(ratios)
        results[load]["throughput_ratio_of_rounds"] = ratios
    for client in clients.values():
        await client.close()
    return results


def median(rounds: list[dict[str, float]], key: str) -> float:
    return round(statistics.median(found[key] for found in rounds), 3)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--max-step-ms", type=int, default=300, help="the bound of one of the servers")
    add("--loads", nargs="+", choices=LOADS, default=["prompts", "burst"])
    add("--num-rounds", type=int, default=3)
    add("--vocab-size", type=int, default=4096, help="token ids are drawn below this")
    add("--streams", type=int, default=8, help="of the load `prompts`")
    add("--stream-len", type=int, default=200, help="tokens that each of them generates")
    add("--num-prompts", type=int, default=4, help="long prompts of that load")
    add("--prompt-len", type=int, default=1500, help="tokens of each of them")
    add("--prompt-every", type=float, default=6.0, metavar="SECONDS")
    add("--trace", metavar="FILE", help="CSV of request lengths with times")
    add("--trace-requests", type=int, default=40)
    add("--trace-lengths", type=float, default=0.25, help="factor of prompt and output lengths")
    add("--trace-rate", type=float, default=0.1, help="times the rate of the trace")
    args, flags = parser.parse_known_args()
    if args.trace and "trace" not in args.loads:
        args.loads.append("trace")
    quiet = ["--disable-uvicorn-access-log", "--disable-log-requests"]
    with (
        server([*flags, "--max-step-ms", str(args.max_step_ms)], quiet) as (_, bounded),
        server([*flags, "--max-step-ms", "0"], quiet) as (_, free),
    ):
        results = uvloop.run(measure({"bound": bounded, "off": free}, args))
    report = {
        "benchmark": "streams",
        "machine": machine(),
        "settings": vars(args),
        "flags": flags,
        "load_average": os.getloadavg()[0],
        "results": results,
    }
    print(json.dumps(report))
    for load, found in results.items():
        for name in ("bound", "off"):
            each = found[name]
            gaps = "  ".join(f"{key} {each[f'gap_{key}_ms']:.0f}" for key in ("p50", "p99", "max"))
            print(
                f"{load:8} {name:6} gap ms: {gaps}  output tok/s {each['output_tokens_per_s']:.1f}"
                f"  first token ms: {each['first_mean_ms']:.0f}, p99 {each['first_p99_ms']:.0f}",
                file=sys.stderr,
            )
        print(f"{load:8} throughput ratio {found['throughput_ratio']}", file=sys.stderr)


if __name__ == "__main__":
    main()
