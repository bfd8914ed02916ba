"""What the engine tells about itself while it runs."""

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class ObservabilityConfig:
    """Statistics and traces."""

    disable_log_stats: bool = False
    """Do not log throughput, queue and use of the KV cache every 10 seconds."""

    profiler_enabled: bool = field(default=False, metadata={"cli": False})
    """Write a trace that Perfetto opens (VLLM_PROFILER_ENABLED)."""

    torch_profiler_dir: str | None = field(default=None, metadata={"cli": False})
    """Folder for traces of torch's profiler (VLLM_TORCH_PROFILER_DIR); None: there are none."""
