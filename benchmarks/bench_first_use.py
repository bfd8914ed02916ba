"""Measure how the first requests of a server delay a stream that runs from the start.

`vllm serve` runs in its own processes. As soon as GET /health answers 200, a long stream begins,
and with it the first request of every kind: structured output, tools, templates and others. Each is
sent --repeats times, one after the other. For each: how long it took, the longest time between two
tokens of the stream, and the CPU time of the processes meanwhile.

One JSON object on stdout, a table on stderr. --kinds names the kinds, in their order. Flags that
are not known here are passed to the server; the bundled model needs none. Elapsed times say little
on a busy machine; CPU times do.
"""

import argparse
import asyncio
import itertools
import json
import sys
import time
from collections.abc import Mapping
from typing import Any

import psutil
import uvloop
from bench_serving import START_TIMEOUT_S, server

from vllm.entrypoints.bench.http_client import HttpClient
from vllm.entrypoints.bench.report import machine, write_table

_POLL_S = 0.01
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
FORM = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}


def chat(**fields: Any) -> tuple[str, dict[str, Any]]:
    """Return a short chat request with these fields."""
    messages = [{"role": "user", "content": "Read a file line by line."}]
    return CHAT, {"messages": messages, "max_tokens": 16, **fields}


def completion(**fields: Any) -> tuple[str, dict[str, Any]]:
    """Return a short completion request with these fields."""
    return COMPLETION, {"prompt": "import os", "max_tokens": 16, **fields}


KINDS: dict[str, tuple[str, dict[str, Any] | None]] = {
    "json": chat(response_format=FORM),
    "regex": completion(guided_regex="[0-9]{3}-[a-z]{4}"),
    "choice": completion(guided_choice=["yes", "no"]),
    "grammar": completion(guided_grammar='root ::= "a" | "b" root'),
    "tools": chat(tools=[TOOL], tool_choice="required"),
    "chat": chat(),
    "template": chat(chat_template="{% for m in messages %}{{ m.content }}{% endfor %}"),
    "logprobs": chat(logprobs=True, top_logprobs=5),
    "prompt logprobs": completion(prompt_logprobs=3),
    "penalties": completion(repetition_penalty=1.2, temperature=0.7, top_p=0.9, seed=1),
    "beam search": completion(use_beam_search=True, n=2, temperature=0.0),
    "description": ("/openapi.json", None),
    "metrics": ("/metrics", None),
}


class CpuMeter:
    """Measures CPU seconds of the API process, of the engine core, and of all others together."""

    def __init__(self, pid: int) -> None:
        self._api = psutil.Process(pid)

    def read(self) -> dict[str, float]:
        """Return the CPU seconds so far; processes that have exited no longer count."""
        used = {"api": _cpu_s(self._api), "core": 0.0, "others": 0.0}
        for process in self._api.children(recursive=True):
            is_core = "vllm.engine.process.core_process" in process.cmdline()
            used["core" if is_core else "others"] += _cpu_s(process)
        return used


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


class Stream:
    """Runs one long stream after another until its task is cancelled.

    Args:
        client: client of the server.
        length: tokens of each.

    Attributes:
        times: arrival times of tokens, in seconds of `time.perf_counter()`.
    """

    def __init__(self, client: HttpClient, length: int) -> None:
        self._client = client
        self._body = {"prompt": [5] * 32, "max_tokens": length, "ignore_eos": True, "stream": True}
        self.times: list[float] = []

    async def run(self) -> None:
        """Stream until cancelled."""
        body = json.dumps({**self._body, "temperature": 0.0}).encode()
        while True:
            response = await self._client.request("POST", COMPLETION, body, self._on_body)
            assert response.status == 200, response.body

    def longest_gap_s(self, began: float) -> float:
        """Return the longest time between two arrivals since `began`; the last arrival before it
        counts as well.
        """
        later = [arrived for arrived in self.times if arrived >= began]
        earlier = [arrived for arrived in self.times if arrived < began][-1:]
        pairs = itertools.pairwise([*earlier, *later])
        return max((after - before for before, after in pairs), default=0.0)

    def _on_body(self, _: bytes, arrived: float) -> None:
        self.times.append(arrived)


async def wait_until(client: HttpClient, path: str) -> None:
    """Wait until GET `path` answers 200."""
    end = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < end:
        try:
            if (await client.request("GET", path)).status == 200:
                return
        except OSError:
            pass  # the server does not listen yet
        await asyncio.sleep(_POLL_S)
    sys.exit(f"the server was not ready within {START_TIMEOUT_S:.0f} s")


async def measure(url: str, pid: int, args: argparse.Namespace) -> dict[str, Any]:
    """Measure a server that is starting; return all figures."""
    began = time.perf_counter()
    client, meter = HttpClient(url), CpuMeter(pid)
    await wait_until(client, "/health")
    result: dict[str, Any] = {"ready_cpu_s": _rounded(meter.read(), 1, 2)}
    stream = Stream(client, args.stream_len)
    task = asyncio.create_task(stream.run())
    try:
        while not stream.times:
            await asyncio.sleep(0.001)
        result["first_token_s"] = round(stream.times[0] - began, 2)
        result["first_token_cpu_s"] = _rounded(meter.read(), 1, 2)
        result["requests"] = [
            await measure_kind(client, meter, stream, kind)
            for kind in args.kinds
            for _ in range(args.repeats)
        ]
    finally:
        task.cancel()
        await client.close()
    return result


async def measure_kind(
    client: HttpClient, meter: CpuMeter, stream: Stream, kind: str
) -> dict[str, Any]:
    """Send one request while the stream runs; return its figures."""
    path, body = KINDS[kind]
    before = meter.read()
    await asyncio.sleep(_POLL_S)  # let the stream read what has arrived
    began = time.perf_counter()
    method, data = ("GET", b"") if body is None else ("POST", json.dumps(body).encode())
    response = await client.request(method, path, data)
    took_s = time.perf_counter() - began
    await asyncio.sleep(5 * _POLL_S)  # count a gap that has begun
    assert response.status == 200, response.body
    after = meter.read()
    used = {name: after[name] - seconds for name, seconds in before.items()}
    return {
        "kind": kind,
        "took_ms": round(took_s * 1e3),
        "longest_gap_ms": round(stream.longest_gap_s(began) * 1e3),
        "cpu_ms": _rounded(used, 1e3, 0),
    }


def _rounded(values: Mapping[str, float], scale: float, digits: int) -> dict[str, float]:
    return {name: round(value * scale, digits) for name, value in values.items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS), help="in this order")
    add("--repeats", type=int, default=2, help="requests of each kind")
    add("--stream-len", type=int, default=900, help="tokens of one stream")
    args, flags = parser.parse_known_args()
    with server(flags, []) as (process, url):
        result = uvloop.run(measure(url, process.pid, args))
    sys.stdout.write(json.dumps({"benchmark": "first_use", "machine": machine(), **result}) + "\n")
    header = ("kind", "took_ms", "longest_gap_ms", "cpu_ms: api", "core", "others")
    rows = [(*list(row.values())[:3], *row["cpu_ms"].values()) for row in result["requests"]]
    write_table([header, *rows], sys.stderr)


if __name__ == "__main__":
    main()
