"""How a server on this machine fares while requests do their worst to it.

`vllm serve` runs in its own processes. Requests that are as large as its limits allow, or larger,
come one after the other; some of them leave before they are answered. Meanwhile GET /health is
asked 50 times a second, and a small completion is made again and again: their latencies are the
result, with the time of the request itself and the memory of both processes after it.

One JSON object on stdout, a table on stderr. Flags that are not known here go to the server. The
bundled model needs none; --max-model-len 1024 is added for it unless given.
"""

import argparse
import contextlib
import http.client
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import psutil
from bench_serving import server

from vllm.entrypoints.bench.report import machine

PROBE_INTERVAL_S = 0.02
AFTER_S = 1.0
"""Measured after each request too: what goes on behind an answer counts."""
LEAVE_AFTER_S = 0.3
START_TIMEOUT_S = 300.0
REQUEST_TIMEOUT_S = 300.0

CHAT = "/v1/chat/completions"
COMPLETION = "/v1/completions"


def completion(**fields: Any) -> tuple[str, Any]:
    """A completion of one token with these fields."""
    return COMPLETION, {"prompt": [5], "max_tokens": 1, **fields}


def user(text: str) -> list[dict[str, str]]:
    """A conversation."""
    return [{"role": "user", "content": text}]


ATTACKS: dict[str, Callable[[], tuple[str, Any]]] = {
    "100,000 bad words": lambda: completion(bad_words=[f"bad{i}" for i in range(100_000)]),
    "4,096 bad words": lambda: completion(bad_words=[f"bad word {i}" for i in range(4096)]),
    "4,096 bad words, n=128": lambda: completion(
        bad_words=[f"bad word {i}" for i in range(4096)], n=128, max_tokens=16
    ),
    "1,000,000 stop tokens": lambda: completion(stop_token_ids=[*range(4000)] * 250),
    "262,144 allowed tokens, n=128": lambda: completion(
        allowed_token_ids=[i % 4096 for i in range(2**18)], n=128
    ),
    "100,000 names nobody knows": lambda: completion(user_data={str(i): 1 for i in range(10**5)}),
    "500,000 entries of logit_bias": lambda: completion(
        logit_bias={str(i): 1 for i in range(500_000)}
    ),
    "4,096 entries of logit_bias, n=128": lambda: completion(
        logit_bias={str(i): 1 for i in range(4096)}, n=128, max_tokens=16
    ),
    "64 stop strings of 256 characters": lambda: completion(
        stop=["a" * (255 - i) + "b" for i in range(64)], max_tokens=256, stream=True
    ),
    "4,096 choices": lambda: completion(guided_choice=[f"choice {i}" for i in range(4096)]),
    "1,024 prompts, n=128": lambda: completion(prompt=["a"] * 1024, n=128),
    "1,024 prompts, n=2": lambda: completion(prompt=["a"] * 1024, n=2, max_tokens=16),
    "1,024 prompts of 500 tokens": lambda: completion(prompt=[[5] * 500] * 1024),
    "10 MB prompt": lambda: completion(prompt="hello world " * 850_000),
    "10 MB prompt without white space": lambda: completion(prompt="x" * 10_000_000),
    "10 MB prompt, truncated": lambda: completion(
        prompt="hello world " * 850_000, truncate_prompt_tokens=8
    ),
    "10 MB message": lambda: (CHAT, {"messages": user("hello world " * 850_000), "max_tokens": 1}),
    "8,192 messages": lambda: (CHAT, {"messages": user("a") * 8192, "max_tokens": 1}),
    "300,000 parts of a message": lambda: (
        CHAT,
        {
            "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 300_000}],
            "max_tokens": 1,
        },
    ),
    "1,000,000 values nobody knows": lambda: completion(user_data=[1] * 1_000_000),
    "5,000,000 values": lambda: completion(user_data=[1] * 5_000_000),
    "15 MB to tokenise": lambda: ("/tokenize", {"prompt": "hello world " * 1_250_000}),
    "131,072 tokens to detokenise": lambda: ("/detokenize", {"tokens": [300] * 2**17}),
}


class Probe:
    """Asks small things again and again, in threads, and notes how long each took."""

    def __init__(self, host: str, port: int) -> None:
        self._address = (host, port)
        self._end = threading.Event()
        self.health_ms: list[float] = []
        self.completion_ms: list[float] = []

    def __enter__(self) -> "Probe":
        body = json.dumps({"prompt": [7], "max_tokens": 4, "ignore_eos": True}).encode()
        loops = [
            ("GET", "/health", None, self.health_ms),
            ("POST", COMPLETION, body, self.completion_ms),
        ]
        self._threads = [threading.Thread(target=self._ask, args=loop) for loop in loops]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, method: str, path: str, body: bytes | None, latencies: list[float]) -> None:
        while not self._end.is_set():
            began = time.perf_counter()
            ask(self._address, method, path, body)
            latencies.append((time.perf_counter() - began) * 1000)
            self._end.wait(PROBE_INTERVAL_S)


def ask(address: tuple[str, int], method: str, path: str, body: bytes | None) -> tuple[int, bytes]:
    """Status and body of an answer."""
    connection = http.client.HTTPConnection(*address, timeout=REQUEST_TIMEOUT_S)
    with contextlib.closing(connection):
        connection.request(method, path, body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read()


def send_and_leave(address: tuple[str, int], path: str, body: bytes) -> None:
    """Send a request, and close the connection while it is being prepared."""
    head = f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(address) as client:
        client.sendall(head.encode() + body)
        time.sleep(LEAVE_AFTER_S)


def measure(
    name: str, address: tuple[str, int], pid: int, path: str, body: bytes, *, is_leaving: bool
) -> dict[str, Any]:
    """One request, and how others fared meanwhile."""
    status, message = 0, ""
    with Probe(*address) as probe:
        began = time.perf_counter()
        if is_leaving:
            send_and_leave(address, path, body)
        else:
            status, answer = ask(address, "POST", path, body)
            message = answer[:300].decode("utf-8", "replace") if status != 200 else ""
        seconds = time.perf_counter() - began
        time.sleep(AFTER_S)
        cpu_before = cpu_seconds(pid)
        time.sleep(AFTER_S)
        busy = (cpu_seconds(pid) - cpu_before) / AFTER_S
    return {
        "request": name + (", client leaves" if is_leaving else ""),
        "body_bytes": len(body),
        "status": status,
        "message": message,
        "seconds": round(seconds, 3),
        "health_ms": percentiles(probe.health_ms),
        "completion_ms": percentiles(probe.completion_ms),
        "cpus_busy_afterwards": round(busy, 2),
        "rss_mib": {name: size >> 20 for name, size in memory(pid).items()},
    }


def percentiles(values: list[float]) -> dict[str, float]:
    """Median, p99 and maximum."""
    ordered = sorted(values)
    return {
        "p50": round(ordered[len(ordered) // 2], 1),
        "p99": round(ordered[int(len(ordered) * 0.99)], 1),
        "max": round(ordered[-1], 1),
    }


def processes(pid: int) -> Iterator[tuple[str, psutil.Process]]:
    """The API process and the engine core."""
    api = psutil.Process(pid)
    yield "api", api
    for child in api.children():
        if "vllm.engine.process.core_process" in " ".join(child.cmdline()):
            yield "core", child


def memory(pid: int) -> dict[str, int]:
    """Resident bytes by process."""
    return {name: process.memory_info().rss for name, process in processes(pid)}


def cpu_seconds(pid: int) -> float:
    """CPU time so far of the API process alone, which prepares requests."""
    return sum(psutil.Process(pid).cpu_times()[:2])


def wait_ready(address: tuple[str, int]) -> None:
    """Until the model answers."""
    end = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < end:
        with contextlib.suppress(OSError):
            if ask(address, "GET", "/readyz", None)[0] == 200:
                return
        time.sleep(0.2)
    sys.exit("the server did not become ready")


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="requests whose name holds this text")
    args, flags = parser.parse_known_args()
    if "--max-model-len" not in flags:
        flags += ["--max-model-len", "1024"]
    results = []
    with server(flags, ["--disable-uvicorn-access-log"]) as (process, url):
        parts = urlsplit(url)
        address = (str(parts.hostname), int(parts.port or 0))
        wait_ready(address)
        ask(address, "POST", COMPLETION, json.dumps(completion()[1]).encode())
        before = {name: size >> 20 for name, size in memory(process.pid).items()}
        for name, make in ATTACKS.items():
            if args.only not in name:
                continue
            path, fields = make()
            body = json.dumps(fields).encode()
            for is_leaving in (False, True):
                row = measure(name, address, process.pid, path, body, is_leaving=is_leaving)
                results.append(row)
                print(
                    f"{row['request']:55} {row['status']} {row['seconds']:8.2f} s  "
                    f"health {row['health_ms']}  completion {row['completion_ms']}  "
                    f"{row['rss_mib']}",
                    file=sys.stderr,
                )
    print(
        json.dumps(
            {
                "machine": {**machine(), "load_average": os.getloadavg()},
                "rss_mib_before": before,
                "results": results,
            }
        )
    )


if __name__ == "__main__":
    main()
