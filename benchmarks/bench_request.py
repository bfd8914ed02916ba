"""Measure the CPU time of a request in the API process, without sockets and without a model.

The application of `vllm serve` is called as ASGI, with its engine in front of a core that answers
at once with the same tokens. It measures reading, checking and tokenising a request, and
writing its response; not parsing HTTP, nor the core. Requests run one after the other.

One JSON object on stdout: microseconds of CPU per request, for the least of several rounds, and for
a stream also per token. `--profile` writes the functions that take the most time to stderr.
"""

import argparse
import asyncio
import cProfile
import json
import pstats
import sys
import time
from collections.abc import Callable
from typing import Any

import uvloop

from vllm.engine.arg_utils import EngineArgs
from vllm.engine.async_llm_engine import AsyncLLM
from vllm.engine.process import core_supervisor
from vllm.engine.process.wire import (
    AddRequests,
    CoreOutput,
    CoreReady,
    FromCore,
    ToCore,
    decode_from_core,
    encode,
)
from vllm.entrypoints.server.app import load_server
from vllm.entrypoints.shared.server_args import ServerArgs
from vllm.messages import EngineOutput, Finished, FinishReason, SchedulerStats
from vllm.utils.process.process_memory import keep_for_good

TOKEN = 300
"""The token of all outputs."""


class InstantCore:
    """Replaces `CoreClient`: answers every request in the next turn of the event loop."""

    pid = 1

    def configure(self, config: Any, models: Any) -> None:
        """Do nothing: no model is loaded."""

    def attach(self, on_message: Callable[[FromCore], None], on_death: Any) -> None:
        """Report at once that the core is ready."""
        self._on_message = on_message
        self._loop = asyncio.get_running_loop()
        self._loop.call_soon(on_message, CoreReady(stats=SchedulerStats()))

    def send(self, message: ToCore) -> None:
        """Encode a message as for another process, and answer requests."""
        encode(message)
        if isinstance(message, AddRequests):
            for request in message.requests:
                num_tokens = request.sampling_params.max_tokens or 1
                self._loop.call_soon(self._answer, request.request_id, num_tokens)

    def close(self) -> None:
        """Do nothing: there is no process."""

    def _answer(self, request_id: str, num_left: int) -> None:
        finished = {request_id: Finished(FinishReason.LENGTH)} if num_left == 1 else {}
        output = EngineOutput(request_ids=[request_id], token_ids=[TOKEN], finished=finished)
        data = encode(CoreOutput(output=output, stats=SchedulerStats()))
        self._on_message(decode_from_core(data))
        if num_left > 1:
            self._loop.call_soon(self._answer, request_id, num_left - 1)


def bodies(output_len: int) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return name -> path and body of a request."""
    common = {"max_tokens": output_len, "ignore_eos": True, "temperature": 0.0}
    ids = {"prompt": list(range(16, 48)), **common}
    chat = {"messages": [{"role": "user", "content": "Read a file line by line."}], **common}
    return {
        "completion": ("/v1/completions", ids),
        "completion_stream": ("/v1/completions", {**ids, "stream": True}),
        "chat": ("/v1/chat/completions", chat),
        "chat_stream": ("/v1/chat/completions", {**chat, "stream": True}),
    }


async def send_request(app: Any, path: str, body: bytes) -> bytes:
    """POST `body`; return the body of the response."""
    sent, parts = False, []

    async def receive() -> dict[str, Any]:
        nonlocal sent
        if sent:  # the client stays; waits forever, and may be cancelled
            await asyncio.get_running_loop().create_future()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            assert message["status"] == 200, message
        else:
            parts.append(message.get("body", b""))

    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST"}
    scope |= {"scheme": "http", "path": path, "raw_path": path.encode(), "query_string": b""}
    scope |= {"root_path": "", "headers": [(b"host", b"localhost"), *headers]}
    scope |= {"client": ("127.0.0.1", 1), "server": ("127.0.0.1", 8000), "state": {}}
    await app(scope, receive, send)
    return b"".join(parts)


async def cost(app: Any, path: str, body: dict[str, Any], count: int, rounds: int) -> float:
    """Return the CPU microseconds of one request: the smallest of several rounds."""
    data = json.dumps(body).encode()
    answer = await send_request(app, path, data)
    assert answer.endswith((b"}", b"data: [DONE]\n\n")), "the response is not complete"
    least = float("inf")
    for _ in range(rounds):
        began = time.thread_time()
        for _ in range(count):
            await send_request(app, path, data)
        least = min(least, (time.thread_time() - began) / count)
    return least * 1e6


async def measure(args: argparse.Namespace) -> dict[str, float]:
    """Return the costs of all kinds of requests."""
    core_supervisor.CoreClient = InstantCore  # type: ignore[assignment, misc]
    config = EngineArgs(model=args.model, disable_log_stats=True).create_engine_config()
    engine = AsyncLLM(config=config)
    _, app = load_server(engine, ServerArgs(disable_uvicorn_access_log=True))
    await engine.start()
    keep_for_good()
    profile = cProfile.Profile() if args.profile else None
    result = {}
    try:
        for name, (path, body) in bodies(1).items():
            if profile is not None and name == args.profile:
                await send_request(app, path, json.dumps(body).encode())
                profile.enable()
            result[name] = await cost(app, path, body, args.count, args.rounds)
            if profile is not None:
                profile.disable()
            if body.get("stream"):
                long = {**body, "max_tokens": 1 + args.output_len}
                more = await cost(app, path, long, args.count, args.rounds)
                result[f"{name}_per_token"] = (more - result[name]) / args.output_len
    finally:
        engine.shutdown()
    if profile is not None:
        pstats.Stats(profile, stream=sys.stderr).sort_stats("tottime").print_stats(60)
    return result


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=EngineArgs().model, help="whose tokenizer is used")
    parser.add_argument("--count", type=int, default=300, help="requests per round")
    parser.add_argument("--rounds", type=int, default=7, help="the best one counts")
    parser.add_argument("--output-len", type=int, default=32, help="tokens of a long stream")
    parser.add_argument("--profile", choices=bodies(1), help="kind of request to profile")
    result = uvloop.run(measure(parser.parse_args()))
    print(json.dumps({name: round(value, 1) for name, value in result.items()}))


if __name__ == "__main__":
    main()
