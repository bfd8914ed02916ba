"""Combine all configs of one engine, and define the device that runs the model."""

from dataclasses import dataclass, field, replace
from typing import Literal

from vllm.config.cache import CacheConfig
from vllm.config.families import family_of_architecture
from vllm.config.fields import check_one_of
from vllm.config.hpu import HPUConfig
from vllm.config.kv_transfer import ConnectorConfig, KVTransferConfig
from vllm.config.load import LoadConfig
from vllm.config.lora import LoRAConfig
from vllm.config.model import ModelConfig
from vllm.config.multimodal import MultiModalConfig
from vllm.config.observability import ObservabilityConfig
from vllm.config.parallel import ParallelConfig
from vllm.config.scheduler import SchedulerConfig
from vllm.config.speculative import SpeculativeConfig
from vllm.config.structured_output import StructuredOutputConfig

Device = Literal["auto", "cpu", "hpu"]


@dataclass(frozen=True, kw_only=True)
class DeviceConfig:
    """Settings of the device and its threads."""

    device: Device = "auto"
    """Device to run on. auto: hpu when a card is there, else cpu."""

    bound_cores: tuple[tuple[int, ...], ...] | None = field(default=None, metadata={"cli": False})
    """For each worker on the CPU, the cores to which its threads are bound, one thread each. None:
    any."""

    core_share: tuple[int, ...] | None = field(default=None, metadata={"cli": False})
    """Cores that the threads of this replica may use; each thread may run on any of them. None:
    all."""

    memory_share_bytes: int | None = field(default=None, metadata={"cli": False})
    """Memory of the machine for the weights and the KV cache of this replica. None: the free
    memory."""

    replica_cores: tuple[tuple[tuple[int, ...], ...], ...] = field(
        default=(), metadata={"cli": False}
    )
    """`bound_cores` of each replica; empty: the cores are divided equally."""

    counts_threads: bool = field(default=True, metadata={"cli": False})
    """Whether the CPU device chooses the number of its threads. False: OpenMP's settings do."""

    runs_with_server: bool = field(default=False, metadata={"cli": False})
    """Whether the engine runs in its own process, next to a server process on the same cores."""

    def __post_init__(self) -> None:
        check_one_of(self, "device", ("auto", "cpu", "hpu"))


@dataclass(frozen=True, kw_only=True)
class VllmConfig:
    """The complete and consistent config of one engine."""

    model: ModelConfig
    cache: CacheConfig
    scheduler: SchedulerConfig
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    load: LoadConfig = field(default_factory=LoadConfig)
    hpu: HPUConfig = field(default_factory=HPUConfig)
    structured_output: StructuredOutputConfig = field(default_factory=StructuredOutputConfig)
    speculative: SpeculativeConfig = field(default_factory=SpeculativeConfig)
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    multimodal: MultiModalConfig = field(default_factory=MultiModalConfig)
    connector: ConnectorConfig = field(default_factory=ConnectorConfig)
    observability: ObservabilityConfig = field(default_factory=ObservabilityConfig)

    @property
    def summary(self) -> str:
        """Model and limits on one line, for logs."""
        return (
            f"{(self.model.served_model_name or (self.model.model,))[0]}, "
            f"max_model_len {self.scheduler.max_model_len}, "
            f"at most {self.scheduler.max_num_seqs} requests and "
            f"{self.scheduler.max_num_batched_tokens} tokens per step"
        )

    # ---- names of vLLM's config, which programs read -----------------------------------------

    @property
    def model_config(self) -> ModelConfig:
        """The settings of the model."""
        return self.model

    @property
    def cache_config(self) -> CacheConfig:
        """The settings of the KV cache."""
        return self.cache

    @property
    def scheduler_config(self) -> SchedulerConfig:
        """The limits of a step."""
        return self.scheduler

    @property
    def parallel_config(self) -> ParallelConfig:
        """The settings of parallelism."""
        return self.parallel

    @property
    def device_config(self) -> DeviceConfig:
        """The settings of the device."""
        return self.device

    @property
    def load_config(self) -> LoadConfig:
        """The settings of loading."""
        return self.load

    @property
    def lora_config(self) -> LoRAConfig | None:
        """The settings of adapters; None if they are off."""
        return self.lora if self.lora.enable_lora else None

    @property
    def speculative_config(self) -> SpeculativeConfig | None:
        """The settings of speculative decoding; None if it is off."""
        return self.speculative if self.speculative.method is not None else None

    @property
    def decoding_config(self) -> StructuredOutputConfig:
        """The settings of structured output."""
        return self.structured_output

    @property
    def structured_outputs_config(self) -> StructuredOutputConfig:
        """The settings of structured output, under the newer name."""
        return self.structured_output

    @property
    def observability_config(self) -> ObservabilityConfig:
        """The settings of logs and metrics."""
        return self.observability

    @property
    def kv_transfer_config(self) -> KVTransferConfig | None:
        """The settings of KV blocks outside of the KV cache; None if they are off."""
        return self.connector.kv_transfer

    # ---- derived values -----------------------------------------------------------------------

    @property
    def has_dense_cache(self) -> bool:
        """Whether blocks of running requests are kept at the beginning of the cache.

        They are if decodes on a card read slices, cached blocks would be in between, and no
        connector or draft model stores block ids.
        """
        return (
            self.device.device == "hpu"
            and self.hpu.contiguous_pa
            and self.reads_blocks
            and self.cache.enable_prefix_caching
            and self.connector.kv_transfer is None
            and self.of_draft_model is None
        )

    @property
    def reads_blocks(self) -> bool:
        """Whether forward passes read KV blocks. False: neither a layer nor a draft model has a KV
        cache, as in Mamba models.
        """
        arch = self.model.arch
        has_attention = arch is None or family_of_architecture(arch.architecture).has_attention
        return has_attention or self.speculative.draft_model is not None

    @property
    def max_blocks_per_request(self) -> int:
        """Length of a block table: number of blocks of a request with `max_model_len` tokens."""
        return -(-self.scheduler.max_model_len // self.cache.block_size)

    @property
    def of_draft_model(self) -> "VllmConfig | None":
        """Config of the draft model; None if there is none."""
        draft = self.speculative.draft_model
        if draft is None:
            return None
        load = self.load
        if load.load_format == "sharded_state":
            load = replace(load, load_format="auto")
        return replace(
            self, model=draft, load=load, speculative=SpeculativeConfig(), lora=LoRAConfig()
        )
