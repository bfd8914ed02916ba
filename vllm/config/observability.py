"""What the engine tells about itself while it runs."""

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class ObservabilityConfig:
    """Traces."""

    profiler_enabled: bool = field(default=False, metadata={"cli": False})
    """Write a trace that Perfetto opens (VLLM_PROFILER_ENABLED)."""
