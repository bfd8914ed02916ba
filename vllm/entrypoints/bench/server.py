"""Query a running server for its model, and for its counters before and after a load."""

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
"""Name in our results, and in `/metrics` after `vllm:` and before `_total`."""

_GAUGES = ("warm_buckets", "wanted_buckets")

_GAUGE_SAMPLE = re.compile(
    rf"^vllm:({'|'.join(_GAUGES)})(?:\{{[^\n]*\}})? ([-+.\deE]+)", re.MULTILINE
)
_SAMPLE = re.compile(r"^vllm:(\w+?)_total(?:\{[^\n]*\})? ([-+.\deE]+)", re.MULTILINE)


@dataclass(frozen=True)
class ServedModel:
    """The first entry of `/v1/models`."""

    id: str
    root: str | None = None
    """Folder or hub name."""
    max_model_len: int | None = None


async def find_model(client: HttpClient, timeout_s: float) -> ServedModel:
    """Wait until the server answers, and return the model that it serves.

    Args:
        client: client of the server.
        timeout_s: seconds to wait; 0: ask once.

    Raises:
        ConfigError: the server does not answer in time, refuses, or serves no model.
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


@dataclass(frozen=True)
class Readings:
    """Counters of a server of this package, and the state of its warm-up."""

    counters: dict[str, float]
    num_warm: int | None = None
    """Buckets that are warmed up; None: all were before the first request."""
    num_wanted: int = 0

    @property
    def is_warming(self) -> bool:
        """Whether buckets are still being warmed up; until then, forward passes have more
        padding.
        """
        return self.num_warm is not None and self.num_warm < self.num_wanted


async def read_server(client: HttpClient) -> Readings | None:
    """Return the counters from `/metrics`; None for servers of other software."""
    try:
        response = await client.request("GET", "/metrics")
    except OSError:
        return None
    if response.status != 200:
        return None
    text = response.body.decode("utf-8", "replace")
    found: dict[str, float] = {}
    for name, value in _SAMPLE.findall(text) + _GAUGE_SAMPLE.findall(text):
        found[name] = found.get(name, 0.0) + float(value)
    counters = {ours: found[theirs] for ours, theirs in _COUNTERS.items() if theirs in found}
    if not counters:
        return None
    if not all(name in found for name in _GAUGES):
        return Readings(counters)
    return Readings(counters, *(int(found[name]) for name in _GAUGES))


def difference(before: Readings | None, after: Readings | None) -> dict[str, float] | None:
    """Return the growth of the counters between two readings, and the number of warm buckets if not
    all were warm.
    """
    if before is None or after is None:
        return None
    old, new = before.counters, after.counters
    found = {name: new[name] - value for name, value in old.items() if name in new}
    if before.is_warming and before.num_warm is not None and after.num_warm is not None:
        found["warm_buckets_before"] = before.num_warm
        found["warm_buckets_after"] = after.num_warm
        found["wanted_buckets"] = after.num_wanted
    return found
