"""Asks a running server for its model, and for its counters before and after a load."""

import asyncio
import re
import sys
import time
from dataclasses import dataclass
from typing import Any

import msgspec

from vllm.entrypoints.bench.http_client import HttpClient, Response
from vllm.errors import ConfigError

_COUNTERS = {
    "compilations_after_warmup": "compilations_after_warmup",
    "bucket_misses": "bucket_misses",
    "preemptions": "num_preemptions",
    "prefix_cache_queries": "gpu_prefix_cache_queries",
    "prefix_cache_hits": "gpu_prefix_cache_hits",
    "useful_tokens": "useful_tokens",
    "padded_tokens": "padded_tokens",
}
"""Name in our results, and in `/metrics` behind `vllm:` and before `_total`."""

_SAMPLE = re.compile(r"^vllm:(\w+?)_total(?:\{[^\n]*\})? ([-+.\deE]+)", re.MULTILINE)


@dataclass(frozen=True)
class ServedModel:
    """The first entry of `/v1/models`."""

    id: str
    root: str | None = None
    """Folder or hub name."""
    max_model_len: int | None = None


async def find_model(client: HttpClient, timeout_s: float) -> ServedModel:
    """Wait until the server answers, and ask which model it serves.

    Args:
        client: of the server.
        timeout_s: 0 asks once.

    Raises:
        ConfigError: it does not answer in time, refuses, or serves no model.
    """
    deadline_s = time.monotonic() + timeout_s
    is_waiting = False
    while True:
        try:
            response: Response | None = await client.request("GET", "/v1/models")
            reason = "" if response is None else f"HTTP {response.status}"
        except OSError as error:
            response, reason = None, str(error) or type(error).__name__
        if response is not None and response.status == 200:
            return _first_model(client, response)
        if response is not None and response.status not in (429, 502, 503, 504):
            text = response.body[:200].decode("utf-8", "replace")
            raise ConfigError(f"{client.base_url}/v1/models: {reason}: {text}")
        if time.monotonic() >= deadline_s:
            waited = f" within {timeout_s:g} s" if timeout_s else ""
            raise ConfigError(
                f"{client.base_url} does not answer{waited}: {reason}. Start the server, or name "
                f"another one with --base-url; --ready-check-timeout-sec says how long to wait."
            )
        if not is_waiting:
            is_waiting = True
            sys.stderr.write(
                f"waiting for {client.base_url}, up to {timeout_s:g} s "
                f"(--ready-check-timeout-sec): {reason}\n"
            )
        await asyncio.sleep(0.5)


def _first_model(client: HttpClient, response: Response) -> ServedModel:
    try:
        models: Any = msgspec.json.decode(response.body)["data"]
        return msgspec.convert(models[0], ServedModel)
    except (msgspec.DecodeError, msgspec.ValidationError, KeyError, IndexError, TypeError) as error:
        raise ConfigError(f"{client.base_url}/v1/models lists no model: {error!r}") from None


async def read_counters(client: HttpClient) -> dict[str, float] | None:
    """Counters of a server of this package by name; None for other servers."""
    try:
        response = await client.request("GET", "/metrics")
    except OSError:
        return None
    if response.status != 200:
        return None
    found: dict[str, float] = {}
    for name, value in _SAMPLE.findall(response.body.decode("utf-8", "replace")):
        found[name] = found.get(name, 0.0) + float(value)
    return {ours: found[theirs] for ours, theirs in _COUNTERS.items() if theirs in found} or None


def difference(
    before: dict[str, float] | None, after: dict[str, float] | None
) -> dict[str, float] | None:
    """By how much counters have grown."""
    if before is None or after is None:
        return None
    return {name: after[name] - value for name, value in before.items() if name in after}
