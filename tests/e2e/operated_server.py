"""Run one server with the options of an operator for several modules: a key, JSON logs, traces, and
events of the KV cache.
"""

import importlib.util
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tests.e2e.server import Server, free_port, start_server

KEY = "sesame"
PROCESSORS = "tests.engine.processors_for_tests"
_EXTENSION = "tests.e2e.worker_extension.WorkerExtension"


class Collector(ThreadingHTTPServer):
    """A collector of traces that stores what it receives."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _CollectorHandler)
        self.received = b""


class _CollectorHandler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        self.server.received += self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        """Print nothing."""


@dataclass(frozen=True)
class OperatedServer:
    """A server, and what receives its traces and events.

    Attributes:
        server: the server, with the key `KEY`.
        collector: receives the spans of requests, if the client of OpenTelemetry is installed.
        traces: folder of the traces that the profiler writes.
        ports: ports for the events of the KV cache and for their replay.
    """

    server: Server
    collector: Collector
    traces: Path
    ports: tuple[int, int]


@contextmanager
def start_operated_server(traces: Path) -> Iterator[OperatedServer]:
    """Start the server, and stop it at the end of the block.

    Args:
        traces: folder for the traces of the profiler.
    """
    ports = free_port(), free_port()
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "topic": "kv-events",
        "endpoint": f"tcp://*:{ports[0]}",
        "replay_endpoint": f"tcp://*:{ports[1]}",
    }
    flags = ["--enable-request-id-headers", "--log-requests", "--max-log-len", "6"]
    flags += ["--max-request-bytes", "100000", "--max-n", "2", "--num-gpu-blocks-override", "2000"]
    flags += ["--logits-processor-pattern", PROCESSORS.replace(".", r"\.") + r"\..*"]
    flags += ["--enable-sleep-mode", "--worker-extension-cls", _EXTENSION]
    flags += ["--enable-prompt-embeds", "--kv-events-config", json.dumps(events)]
    variables = {"VLLM_LOGGING_FORMAT": "json", "VLLM_SERVER_DEV_MODE": "1", "VLLM_API_KEY": KEY}
    variables["VLLM_TORCH_PROFILER_DIR"] = str(traces)
    with Collector() as collector:
        threading.Thread(target=collector.serve_forever, args=(0.01,), daemon=True).start()
        if importlib.util.find_spec("opentelemetry") is not None:
            url = f"http://127.0.0.1:{collector.server_port}/v1/traces"
            flags += ["--otlp-traces-endpoint", url]
        with start_server(*flags, variables=variables) as server:
            yield OperatedServer(server, collector, traces, ports)
        collector.shutdown()
