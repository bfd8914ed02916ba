"""Define settings for statistics, traces and events of the engine."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from vllm.config.fields import check_at_least, check_one_of
from vllm.errors import ConfigError

Publisher = Literal["null", "zmq"]
_TRANSPORTS = ("tcp://", "ipc://", "inproc://")


@dataclass(frozen=True, kw_only=True)
class KVEventsConfig:
    """Settings for publishing changes of the prefix cache."""

    enable_kv_cache_events: bool = False
    """Record which blocks the prefix cache stores and removes."""

    publisher: Publisher = "null"
    """null: events are not published; zmq: a ZMQ PUB socket publishes them."""

    endpoint: str = "tcp://*:5557"
    """Where the events are published. The socket binds to an address with * or ::, and to ipc and
    inproc addresses; it connects to any other address."""

    replay_endpoint: str | None = None
    """Address of a ROUTER socket that sends earlier events again. Default: none."""

    buffer_steps: int = 10_000
    """Number of batches to keep for replay."""

    hwm: int = 100_000
    """Maximum number of messages that wait for a slow subscriber; further ones are dropped for
    it."""

    max_queue_size: int = 100_000
    """Maximum number of batches that wait to be published; further ones are dropped, which leaves
    gaps in their numbers."""

    topic: str = ""
    """First frame of every message, by which subscribers filter."""

    def __post_init__(self) -> None:
        check_one_of(self, "publisher", ("null", "zmq"))
        check_at_least(self, 0, "buffer_steps", "hwm")
        check_at_least(self, 1, "max_queue_size")
        for name, kind in (("enable_kv_cache_events", bool), ("topic", str)):
            if not isinstance(getattr(self, name), kind):
                raise ConfigError(
                    f"{name} must be of the type {kind.__name__}, got {getattr(self, name)!r}"
                )
        for name in ("endpoint", "replay_endpoint"):
            value = getattr(self, name)
            if name == "replay_endpoint" and value is None:
                continue
            if not isinstance(value, str) or not value.startswith(_TRANSPORTS):
                raise ConfigError(
                    f"{name} must begin with {', '.join(_TRANSPORTS[:-1])} or {_TRANSPORTS[-1]}, "
                    f"got {value!r}"
                )

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> "KVEventsConfig":
        """Read the value of `kv_events_config`.

        Raises:
            ConfigError: a key is not known, or its value is wrong.
        """
        names = [f.name for f in fields(cls)]
        if unknown := [name for name in values if name not in names]:
            raise ConfigError(
                f"kv_events_config has the unknown key {', '.join(map(repr, unknown))}; accepted: "
                f"{', '.join(names)}"
            )
        try:
            return cls(**values)
        except ConfigError as error:
            raise ConfigError(f"kv_events_config: {error}") from None

    @property
    def is_published(self) -> bool:
        """Whether events are recorded and published."""
        return self.enable_kv_cache_events and self.publisher != "null"


@dataclass(frozen=True, kw_only=True)
class ObservabilityConfig:
    """Settings for statistics and traces."""

    disable_log_stats: bool = False
    """Do not log throughput, number of requests and use of the KV cache every 10 seconds."""

    kv_events_config: Mapping[str, Any] = field(default_factory=dict)
    """Events of the KV cache (JSON): enable_kv_cache_events, publisher (null or zmq), endpoint,
    replay_endpoint, buffer_steps, hwm, max_queue_size, topic; see docs/kv_events.md. Everyone
    who can reach the endpoint sees the token ids of all prompts and outputs."""

    record_traffic: str | None = None
    """File that records the size of each forward pass before padding, so that --traffic can choose
    buckets for these sizes. If the file exists, it is continued. It is written at most once a
    minute and at the end. It contains no text and no token ids. Only devices with buckets (Gaudi)
    record sizes."""

    profiler_enabled: bool = field(default=False, metadata={"cli": False})
    """Write a trace that Perfetto opens (VLLM_PROFILER_ENABLED)."""

    torch_profiler_dir: str | None = field(default=None, metadata={"cli": False})
    """Folder for traces of torch's profiler (VLLM_TORCH_PROFILER_DIR). None: no traces."""

    profiled_steps: tuple[int, int] | None = field(default=None, metadata={"cli": False})
    """First and last step of a trace that starts and stops automatically (VLLM_PROFILE_STEPS)."""

    def __post_init__(self) -> None:
        KVEventsConfig.from_mapping(self.kv_events_config)  # raises if it is invalid

    @property
    def kv_events(self) -> KVEventsConfig:
        """`kv_events_config` with its defaults."""
        return KVEventsConfig.from_mapping(self.kv_events_config)
