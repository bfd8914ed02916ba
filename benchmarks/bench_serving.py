"""Run a server and a load on this machine: throughput, latencies, and the cost of HTTP.

`vllm serve` runs in its own processes (API and engine core); the load comes from this one. Three
loads in closed loops: many streams for throughput, and then a number of streams alternately over
HTTP and through `AsyncLLM` in this process. The difference of both is the cost of HTTP. Requests
are random token ids of fixed lengths; the lengths of the streams vary by half, so that requests do
not begin and end together. Flags that are not known here are passed to the engine.

One JSON object on stdout, a table on stderr. Load average of the machine is in the JSON: on a busy
one the figures say little.
"""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from typing import Any

import psutil
import uvloop

from vllm.engine.arg_utils import EngineArgs
from vllm.engine.async_llm_engine import AsyncLLM
from vllm.entrypoints.bench.backends import Backend, BenchRequest, RequestRecord
from vllm.entrypoints.bench.dataset_args import DatasetArgs
from vllm.entrypoints.bench.datasets import random_requests
from vllm.entrypoints.bench.http_client import HttpClient
from vllm.entrypoints.bench.load import LoadRun, Send, run_load
from vllm.entrypoints.bench.report import machine, write_table
from vllm.entrypoints.bench.server import find_model
from vllm.entrypoints.bench.statistics import describe, summarize
from vllm.sampling_params import RequestOutputKind, SamplingParams

START_TIMEOUT_S = 300.0
METRICS = ("ttft", "tpot", "itl", "e2el")


# ---- processes ----------------------------------------------------------------------------


class CpuMeter:
    """Measures CPU seconds of the server's processes and of this one."""

    def __init__(self, api_pid: int) -> None:
        api = psutil.Process(api_pid)
        self._processes = {"api": [api], "core": api.children(recursive=True)}
        self._processes["client"] = [psutil.Process()]

    def read(self) -> dict[str, float]:
        """Return the CPU seconds so far, by process."""
        return {
            name: sum(sum(process.cpu_times()[:2]) for process in processes)
            for name, processes in self._processes.items()
        }


@contextmanager
def server(flags: list[str], backend_flags: list[str]):
    """Run a server on a free port, and stop it afterwards. Yields (process, URL)."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve"]
    command += ["--host", "127.0.0.1", "--port", str(port), *backend_flags, *flags]
    process = subprocess.Popen(command, stdout=sys.stderr)
    try:
        yield process, f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)


# ---- loads --------------------------------------------------------------------------------


def make_requests(count: int, args: argparse.Namespace, ratio: float, seed: int):
    """Make random requests. Each load has a different seed, so that no prompt is cached."""
    dataset = DatasetArgs(
        name="random",
        num_prompts=count,
        input_len=args.input_len,
        output_len=args.output_len,
        range_ratio=ratio,
        seed=seed,
    )
    return random_requests(dataset, range(16, args.vocab_size))


async def closed_loop(send: Send, requests: list[BenchRequest], concurrency: int) -> LoadRun:
    """Run requests with a constant number in flight."""
    run = LoadRun()
    await run_load(run, send, requests, [0.0] * len(requests), max_concurrency=concurrency)
    errors = {record.error for record in run.records} - {None}
    if errors:
        sys.exit(f"requests failed: {errors}")
    return run


def over_http(client: HttpClient, model: str, path: str) -> Send:
    """Return a function that sends requests like the load generator."""
    fields = {"model": model, "temperature": 0.0, "ignore_eos": True}
    return Backend(client, path, is_chat=False, fields=fields).send


def in_process(engine: AsyncLLM) -> Send:
    """Return a function that sends requests to the engine of this process and reads what a stream
    reads.
    """
    count = iter(range(sys.maxsize))

    async def send(request: BenchRequest, record: RequestRecord) -> None:
        params = SamplingParams(
            temperature=0.0,
            max_tokens=request.max_tokens,
            ignore_eos=True,
            output_kind=RequestOutputKind.DELTA,
        )
        prompt = {"prompt_token_ids": request.prompt}
        async for output in engine.generate(prompt, params, str(next(count))):
            record.output_s.append(time.perf_counter())
            record.num_output_tokens += len(output.outputs[0].token_ids)

    return send


async def measure_throughput(send: Send, meter: CpuMeter, args: argparse.Namespace):
    """Measure many streams; return the median round, with the CPU use of its processes."""
    rounds = []
    for index in range(args.num_rounds):
        requests = make_requests(args.num_prompts, args, 0.0, 1000 + index)
        before = meter.read()
        run = await closed_loop(send, requests, args.concurrency)
        after = meter.read()
        result = summarize(run, metrics=METRICS, percentiles=(90, 99))
        tokens = result["total_output_tokens"]
        for name, seconds in before.items():
            used_s = after[name] - seconds
            result[f"cpu_share_{name}"] = round(used_s / run.duration_s, 3)
            result[f"cpu_us_per_token_{name}"] = round(used_s / tokens * 1e6, 1)
        result["load_average"] = os.getloadavg()[0]
        rounds.append(result)
    rounds.sort(key=lambda result: result["output_throughput"])
    best = [result["output_throughput"] for result in rounds]
    return rounds[len(rounds) // 2] | {"output_throughput_of_rounds": best}


async def measure_added_ttft(http: Send, direct: Send, args: argparse.Namespace):
    """Run the same load alternately in both ways; return the difference, which HTTP adds."""
    ttft_ms: dict[str, list[float]] = {"http": [], "direct": []}
    added: list[float] = []
    for index in range(args.num_rounds):
        medians = {}
        for name, send in (("http", http), ("direct", direct)):
            requests = make_requests(args.streams * 4, args, 0.5, 2000 + index)
            run = await closed_loop(send, requests, args.streams)
            # Leave out the first requests, which always begin at the same time.
            found = [record.ttft_s * 1e3 for record in run.records[args.streams :]]
            ttft_ms[name] += found
            medians[name] = describe(found, ())["median"]
        added.append(round(medians["http"] - medians["direct"], 3))
    figures = {name: describe(values, (90, 99)) for name, values in ttft_ms.items()}
    return {
        "streams": args.streams,
        "ttft_ms": figures,
        "added_median_ms": round(figures["http"]["median"] - figures["direct"]["median"], 3),
        "added_mean_ms": round(figures["http"]["mean"] - figures["direct"]["mean"], 3),
        "added_median_ms_of_rounds": added,
    }


async def measure(url: str, process: Any, args: argparse.Namespace, engine_args: EngineArgs):
    """Measure a server that is starting; return all figures."""
    client = HttpClient(url)
    engine = AsyncLLM(engine_args)
    try:
        served = await find_model(client, START_TIMEOUT_S)
        http = over_http(client, served.id, "/v1/completions")
        await closed_loop(http, make_requests(args.concurrency, args, 0.0, 1), args.concurrency)
        result = {"throughput": await measure_throughput(http, CpuMeter(process.pid), args)}
        if args.streams:
            await engine.start()
            direct = in_process(engine)
            await closed_loop(direct, make_requests(args.streams, args, 0.0, 2), args.streams)
            result["http"] = await measure_added_ttft(http, direct, args)
        return result
    finally:
        await client.close()
        engine.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--concurrency", type=int, default=64, help="streams of the load for throughput")
    add("--num-prompts", type=int, default=256, help="requests of that load")
    add("--streams", type=int, default=32, help="streams of the comparison; 0: none")
    add("--num-rounds", type=int, default=3, help="of every load; the median counts")
    add("--input-len", type=int, default=32)
    add("--output-len", type=int, default=128)
    add("--vocab-size", type=int, default=4096, help="token ids are drawn below this")
    args, engine_flags = parser.parse_known_args()

    engine_parser = EngineArgs.add_cli_args(argparse.ArgumentParser(allow_abbrev=False))
    engine_args = EngineArgs.from_cli_args(engine_parser.parse_args(engine_flags))
    with server(engine_flags, ["--disable-uvicorn-access-log"]) as (process, url):
        result = uvloop.run(measure(url, process, args, engine_args))
    settings = {key: value for key, value in vars(args).items() if key != "vocab_size"}
    settings["omp_num_threads"] = os.environ.get("OMP_NUM_THREADS")
    report = {"benchmark": "serving", "machine": machine(), "settings": settings, **result}
    sys.stdout.write(json.dumps(report) + "\n")
    write_table(table(result), sys.stderr)


def table(result: dict[str, Any]):
    """Yield the lines of a table for people."""
    found = result["throughput"]
    for key in ("request_throughput", "output_throughput", "median_ttft_ms", "p99_ttft_ms"):
        yield key, found[key]
    yield "median_tpot_ms", found["median_tpot_ms"]
    for name in ("api", "core", "client"):
        yield f"cpu_share_{name}", found[f"cpu_share_{name}"]
        yield f"cpu_us_per_token_{name}", found[f"cpu_us_per_token_{name}"]
    yield "load_average", found["load_average"]
    if "http" in result:
        for way, figures in result["http"]["ttft_ms"].items():
            yield f"ttft_median_ms_{way}", figures["median"]
        yield "added_median_ms", result["http"]["added_median_ms"]
        yield "added_mean_ms", result["http"]["added_mean_ms"]


if __name__ == "__main__":
    main()
