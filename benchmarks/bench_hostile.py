"""Measure how a server on this machine responds during very demanding requests.

`vllm serve` runs in its own processes. Requests that are as large as its limits allow, or larger,
come one after the other; some of them leave before they are answered. Meanwhile GET /health is
asked 50 times a second, and a small completion is made again and again: their latencies are the
result, with the time of the request itself and the memory of both processes after it.

One JSON object on stdout, a table on stderr. Flags that are not known here are passed to the
server. The bundled model needs none; --max-model-len 1024 is added for it unless given.

    python benchmarks/bench_hostile.py --media

sends pictures instead, to a small LLaVA with random weights that is written for it.
"""

import argparse
import base64
import contextlib
import http.client
import io
import json
import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import psutil
from bench_serving import server
from PIL import Image

from vllm.entrypoints.bench.report import machine

PROBE_INTERVAL_S = 0.02
AFTER_S = 1.0
"""Seconds of measuring after each request, because work that continues after an answer counts."""
LEAVE_AFTER_S = 0.3
START_TIMEOUT_S = 300.0
REQUEST_TIMEOUT_S = 300.0

CHAT = "/v1/chat/completions"
COMPLETION = "/v1/completions"


def completion(**fields: Any) -> tuple[str, Any]:
    """Return a request for a completion of one token, with these fields."""
    return COMPLETION, {"prompt": [5], "max_tokens": 1, **fields}


def user(text: str) -> list[dict[str, str]]:
    """Return a conversation with one message."""
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


def pictures(*files: bytes) -> tuple[str, Any]:
    """Return a conversation with pictures."""
    urls = [f"data:;base64,{base64.b64encode(file).decode()}" for file in files]
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return CHAT, {"messages": [{"role": "user", "content": parts}], "max_tokens": 1}


def picture(width: int, height: int, kind: str, *, is_noise: bool = False) -> bytes:
    """Return a file of an image, black or of random pixels."""
    pixels = np.zeros((height, width, 3), np.uint8)
    if is_noise:
        pixels = np.random.default_rng(0).integers(0, 256, pixels.shape, np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind, quality=90)
    return file.getvalue()


MEDIA: dict[str, Callable[[], tuple[str, Any]]] = {
    "10 MB picture": lambda: pictures(picture(4000, 3000, "JPEG", is_noise=True)),
    "16 pictures of 4 MB": lambda: pictures(*[picture(2500, 1900, "JPEG", is_noise=True)] * 16),
    "picture of 169 million pixels": lambda: pictures(picture(13_000, 13_000, "PNG")),
    "picture of 182 million pixels": lambda: pictures(picture(13_500, 13_500, "PNG")),
    "2,000 pictures of one pixel": lambda: pictures(*[picture(1, 1, "PNG")] * 2000),
    "half a picture": lambda: pictures(picture(4000, 3000, "JPEG", is_noise=True)[: 5 * 2**20]),
    "60 MB that are no picture": lambda: pictures(bytes(60 * 2**20)),
}
TOGETHER = "10 MB picture"
NUM_TOGETHER = 20
"""Requests with such pictures that arrive at the same time, in addition."""


def write_llava(folder: Path) -> list[str]:
    """Write a small model that reads images, without weights. Returns the flags of its server."""
    from benchmarks.bench_multimodal import write_model

    sizes = {"layers": 2, "hidden_size": 256, "vocab_size": 1024}
    write_model(folder, argparse.Namespace(**sizes, tower_layers=4, image_side=336))
    template = (
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for p in m.content %}{% if p.type == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}"
        "{% endif %}{% endfor %}"
    )
    (folder / "chat_template.jinja").write_text(template)
    return ["--model", str(folder), "--load-format", "dummy", "--dtype", "bfloat16"]


class Probe:
    """Sends small requests again and again, in threads, and records how long each takes."""

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
    """Send a request; return status and body of the answer."""
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
    name: str,
    address: tuple[str, int],
    pid: int,
    path: str,
    bodies: Sequence[bytes],
    *,
    is_leaving: bool,
) -> dict[str, Any]:
    """Send requests at the same time; return how long they and the small requests took."""
    status, message = 0, ""

    def send(body: bytes) -> tuple[int, bytes] | None:
        if is_leaving:
            return send_and_leave(address, path, body)
        return ask(address, "POST", path, body)

    with Probe(*address) as probe, ThreadPoolExecutor(len(bodies)) as threads:
        began = time.perf_counter()
        for answer in threads.map(send, bodies):
            if answer is not None:
                status = max(status, answer[0])
                message = answer[1][:300].decode("utf-8", "replace") if status != 200 else ""
        seconds = time.perf_counter() - began
        time.sleep(AFTER_S)
        cpu_before = cpu_seconds(pid)
        time.sleep(AFTER_S)
        busy = (cpu_seconds(pid) - cpu_before) / AFTER_S
    return {
        "request": name + (", client leaves" if is_leaving else ""),
        "body_bytes": sum(map(len, bodies)),
        "status": status,
        "message": message,
        "seconds": round(seconds, 3),
        "health_ms": percentiles(probe.health_ms),
        "completion_ms": percentiles(probe.completion_ms),
        "cpus_busy_afterwards": round(busy, 2),
        "rss_mib": {name: size >> 20 for name, size in memory(pid).items()},
    }


def percentiles(values: list[float]) -> dict[str, float]:
    """Return median, p99 and maximum."""
    ordered = sorted(values)
    return {
        "p50": round(ordered[len(ordered) // 2], 1),
        "p99": round(ordered[int(len(ordered) * 0.99)], 1),
        "max": round(ordered[-1], 1),
    }


def processes(pid: int) -> Iterator[tuple[str, psutil.Process]]:
    """Yield the API process and the engine core."""
    api = psutil.Process(pid)
    yield "api", api
    for child in api.children():
        if "vllm.engine.process.core_process" in " ".join(child.cmdline()):
            yield "core", child


def memory(pid: int) -> dict[str, int]:
    """Return the resident bytes of each process."""
    return {name: process.memory_info().rss for name, process in processes(pid)}


def cpu_seconds(pid: int) -> float:
    """Return the CPU time so far of only the API process, which prepares requests."""
    return sum(psutil.Process(pid).cpu_times()[:2])


def wait_ready(address: tuple[str, int]) -> None:
    """Wait until the model answers."""
    end = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < end:
        with contextlib.suppress(OSError):
            if ask(address, "GET", "/readyz", None)[0] == 200:
                return
        time.sleep(0.2)
    sys.exit("the server did not become ready")


def _encoded(path: str, fields: Any) -> tuple[str, bytes]:
    return path, json.dumps(fields).encode()


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="requests whose name holds this text")
    parser.add_argument("--media", action="store_true", help="send pictures")
    args, flags = parser.parse_known_args()
    if "--max-model-len" not in flags:
        flags += ["--max-model-len", "1024"]
    with tempfile.TemporaryDirectory() as folder:
        if args.media:
            flags += write_llava(Path(folder))
        run(MEDIA if args.media else ATTACKS, args.only, flags)


def run(attacks: dict[str, Callable[[], tuple[str, Any]]], only: str, flags: list[str]) -> None:
    """Send all requests to a server, and print the results."""
    results = []
    with server(flags, ["--disable-uvicorn-access-log"]) as (process, url):
        parts = urlsplit(url)
        address = (str(parts.hostname), int(parts.port or 0))
        wait_ready(address)
        ask(address, "POST", COMPLETION, json.dumps(completion()[1]).encode())
        before = {name: size >> 20 for name, size in memory(process.pid).items()}
        if attacks is MEDIA:  # the first picture starts the processes that read pictures
            ask(address, "POST", *_encoded(*pictures(picture(8, 8, "PNG"))))
        for name, make in attacks.items():
            if only not in name:
                continue
            path, body = _encoded(*make())
            cases = [(name, [body], False), (name, [body], True)]
            if attacks is MEDIA and name == TOGETHER:
                file = picture(4000, 3000, "JPEG", is_noise=True)
                # A byte after the end is not decoded, but makes it another picture for all caches.
                files = [file + bytes([n]) for n in range(NUM_TOGETHER)]
                together = [_encoded(*pictures(each))[1] for each in files]
                cases += [(f"{NUM_TOGETHER} x {name}", together, leave) for leave in (False, True)]
            for title, bodies, is_leaving in cases:
                row = measure(title, address, process.pid, path, bodies, is_leaving=is_leaving)
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
