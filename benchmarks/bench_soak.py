"""Measure whether the memory of a server grows under many mixed requests.

`vllm serve` runs in its own processes; this one sends chats, completions, streams that are cut,
beam search, structured output, tool calls, wrong bodies and more, drawn at random with a seed, some
at a time. Resident memory of the API process, the engine core and the others is read as the
requests continue. Growth is the increase of the mean over the last quarter, above the mean over the
quarter after the first tenth. Flags that are not known here are passed to the engine.

One JSON object on stdout, a table on stderr.
"""

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import psutil
from bench_serving import server

from vllm.entrypoints.bench.http_client import HttpClient
from vllm.entrypoints.bench.report import machine, write_table
from vllm.entrypoints.bench.server import find_model

START_TIMEOUT_S = 300.0
REQUEST_TIMEOUT_S = 300.0
MIB = 2**20

WORDS = ("import os", "def add", "return", "self", "class queue", "list", "for x in", "while y")
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "size": {"enum": [1, 2, 3]}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}

Request = tuple[str, dict[str, Any]]


class Mix:
    """Draws requests of all kinds."""

    def __init__(self, model: str, seed: int, only: list[str]) -> None:
        self._model = model
        self._rng = random.Random(seed)
        kinds: list[Callable[[], Request]] = [
            self._completion,
            self._completion,
            self._chat,
            self._chat,
            self._structured,
            self._tool_call,
            self._response,
            self._message,
            self._beams,
            self._tokenize,
            self._wrong,
        ]
        self._kinds = [kind for kind in kinds if not only or kind.__name__[1:] in only]

    def draw(self) -> tuple[str, Request, float | None]:
        """Draw a request: (kind, path and body, fraction of the answer after which the client
        leaves, or None).
        """
        kind = self._rng.choice(self._kinds)
        path, body = kind()
        body = {"model": self._model, **body}
        is_streamed = "stream" in body and body["stream"]
        cut = self._rng.random() if is_streamed and self._rng.random() < 0.2 else None
        return kind.__name__.strip("_"), (path, body), cut

    def _text(self, most: int = 100) -> str:
        return " ".join(self._rng.choices(WORDS, k=self._rng.randint(1, most)))

    def _sampling(self) -> dict[str, Any]:
        rng = self._rng
        found: dict[str, Any] = {
            "max_tokens": rng.randint(1, 48),
            "temperature": rng.choice([0, 0.7, 1.0]),
            "stream": rng.random() < 0.5,
        }
        if rng.random() < 0.3:
            found |= {"top_p": 0.9, "seed": rng.randint(0, 9)}
        if rng.random() < 0.2:
            found["stop"] = ["\n\n", "def"]
        if rng.random() < 0.2 and found["temperature"]:
            found["n"] = rng.randint(2, 4)
        if rng.random() < 0.1:
            found |= {"presence_penalty": 0.5, "logit_bias": {"17": 3}}
        return found

    def _completion(self) -> Request:
        body = {"prompt": self._text(), **self._sampling()}
        if self._rng.random() < 0.2:
            body["logprobs"] = 3
        if self._rng.random() < 0.1:
            body["prompt"] = [self._text(), self._text()]
        return "/v1/completions", body

    def _chat(self) -> Request:
        messages = [{"role": "user", "content": self._text()}]
        return "/v1/chat/completions", {"messages": messages, **self._sampling()}

    def _structured(self) -> Request:
        # Some schemas are new, so that compiled ones are thrown away as well.
        schema = SCHEMA | {"title": str(self._rng.randint(0, 2000))}
        form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
        path, body = self._chat()
        return path, body | {"response_format": form, "max_tokens": 64}

    def _tool_call(self) -> Request:
        path, body = self._chat()
        chosen = {"type": "function", "function": {"name": "look"}}
        return path, body | {"tools": [TOOL], "tool_choice": chosen, "max_tokens": 64}

    def _response(self) -> Request:
        body = {"input": self._text(), "max_output_tokens": 16, "store": self._rng.random() < 0.3}
        return "/v1/responses", body | {"stream": self._rng.random() < 0.5}

    def _message(self) -> Request:
        messages = [{"role": "user", "content": self._text()}]
        streamed = self._rng.random() < 0.5
        return "/v1/messages", {"messages": messages, "max_tokens": 16, "stream": streamed}

    def _beams(self) -> Request:
        body = {"prompt": self._text(20), "use_beam_search": True, "n": 3, "max_tokens": 6}
        return "/v1/completions", body

    def _tokenize(self) -> Request:
        return "/tokenize", {"prompt": self._text(2000)}

    def _wrong(self) -> Request:
        wrong: dict[str, Any] = self._rng.choice(
            [
                {"temperature": -1},
                {"max_tokens": 10**9},
                {"prompt": ["a"] * 50 + [-1]},
                {"guided_regex": "("},
                {"logit_bias": {"x": 1}},
                {"stop": "x" * 100_000},
            ]
        )
        return "/v1/completions", {"prompt": self._text(), **wrong}


class Memory:
    """Reads the resident memory of the server's processes."""

    def __init__(self, api_pid: int) -> None:
        self._api = psutil.Process(api_pid)

    def read(self) -> dict[str, float]:
        """Return MiB of the API process, the engine core, and all others together."""
        found = {"api": self._api.memory_info().rss / MIB, "core": 0.0, "others": 0.0}
        for child in self._api.children(recursive=True):
            try:
                name = "core" if "vllm.engine.process.core_process" in child.cmdline() else "others"
                found[name] += child.memory_info().rss / MIB
            except psutil.NoSuchProcess:
                continue
        return {name: round(value, 1) for name, value in found.items()}


async def send(client: HttpClient, request: Request, cut: float | None) -> int | str:
    """Send a request; return the status of the answer, or "left" if the client left before its
    end.
    """
    path, body = request
    num_pieces = 0
    leave_after = None if cut is None else 1 + int(cut * 10)

    def take(_data: bytes, _time: float) -> None:
        nonlocal num_pieces
        num_pieces += 1
        if leave_after is not None and num_pieces >= leave_after:
            leaving.set()

    leaving = asyncio.Event()
    answer = asyncio.ensure_future(client.request("POST", path, json.dumps(body).encode(), take))
    left = asyncio.ensure_future(leaving.wait())
    done, _ = await asyncio.wait(
        {answer, left}, timeout=REQUEST_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED
    )
    left.cancel()
    if answer in done:
        return answer.result().status
    answer.cancel()
    await asyncio.wait({answer})
    return "left" if left in done else "no answer"


async def run(url: str, process: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Send all requests; return their statuses, and the memory while they ran."""
    client = HttpClient(url)
    model = (await find_model(client, START_TIMEOUT_S)).id
    mix, memory = Mix(model, args.seed, args.only), Memory(process.pid)
    statuses: dict[str, Counter[str]] = {}
    samples = [{"requests": 0, **memory.read()}]
    num_sent = num_done = 0
    began = time.perf_counter()

    async def work() -> None:
        nonlocal num_sent, num_done
        while num_sent < args.num_requests:
            num_sent += 1
            kind, request, cut = mix.draw()
            try:
                status = str(await send(client, request, cut))
            except OSError as error:
                status = type(error).__name__
            statuses.setdefault(kind, Counter())[status] += 1
            num_done += 1
            if num_done % args.every == 0:
                samples.append({"requests": num_done, **memory.read()})
                print(samples[-1], file=sys.stderr, flush=True)

    await asyncio.gather(*(work() for _ in range(args.concurrency)))
    duration_s = time.perf_counter() - began
    await client.close()
    return {
        "requests_per_s": round(num_done / duration_s, 2),
        "statuses": {kind: dict(sorted(found.items())) for kind, found in sorted(statuses.items())},
        "growth_mib": {name: growth(samples, name) for name in ("api", "core", "others")},
        "samples": samples,
    }


def growth(samples: list[dict[str, float]], name: str) -> float:
    """Return the difference in MiB between the last quarter of the samples and the quarter after
    the first tenth.
    """
    values = [sample[name] for sample in samples]
    first, quarter = len(values) // 10, max(1, len(values) // 4)
    early, late = values[first : first + quarter] or values, values[-quarter:]
    return round(sum(late) / len(late) - sum(early) / len(early), 1)


def main() -> None:
    """Run the requests and print the memory at each reading."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-requests", type=int, default=10_000)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--every", type=int, default=250, help="requests between two readings")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", default=[], help="kinds of requests; none: all")
    args, engine_flags = parser.parse_known_args()
    server_flags = ["--disable-uvicorn-access-log", "--disable-log-stats"]
    server_flags += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    with server(engine_flags, server_flags) as (process, url):
        results = asyncio.run(run(url, process, args))
    settings = vars(args) | {"engine_flags": engine_flags}
    found = {"benchmark": "soak", "machine": machine(), "settings": settings, "results": results}
    print(json.dumps(found))
    write_table([("growth MiB", str(results["growth_mib"]))], sys.stderr)


if __name__ == "__main__":
    main()
