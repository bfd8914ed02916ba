"""What the engine tells about itself while it runs."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm.config.kv_events import KVEventsConfig


@dataclass(frozen=True, kw_only=True)
class ObservabilityConfig:
    """Statistics and traces."""

    disable_log_stats: bool = False
    """Do not log throughput, queue and use of the KV cache every 10 seconds."""

    kv_events_config: Mapping[str, Any] = field(default_factory=dict)
    """Events of the KV cache (JSON): enable_kv_cache_events, publisher (null or zmq), endpoint,
    replay_endpoint, buffer_steps, hwm, max_queue_size, topic; see docs/kv_events.md. Everyone
    who can reach the endpoint sees the token ids of all prompts and outputs."""

    profiler_enabled: bool = field(default=False, metadata={"cli": False})
    """Write a trace that Perfetto opens (VLLM_PROFILER_ENABLED)."""

    torch_profiler_dir: str | None = field(default=None, metadata={"cli": False})
    """Folder for traces of torch's profiler (VLLM_TORCH_PROFILER_DIR); None: there are none."""

    def __post_init__(self) -> None:
        KVEventsConfig.from_mapping(self.kv_events_config)  # raises

    @property
    def kv_events(self) -> KVEventsConfig:
        """`kv_events_config` with its defaults."""
        return KVEventsConfig.from_mapping(self.kv_events_config)
