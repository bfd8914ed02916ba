"""Define the configuration of the engine: frozen dataclasses, composed into `VllmConfig`.

Each setting is defined in one place: type, default and docstring of a field also define its
command-line flag (see `vllm.engine.arg_utils`). Nothing here imports torch or touches a device.
"""

from vllm.config.arch.model_arch import ModelArch, RopeConfig
from vllm.config.cache import CacheConfig
from vllm.config.hpu import HPUConfig
from vllm.config.kv_transfer import ConnectorConfig, KVTransferConfig
from vllm.config.load import LoadConfig
from vllm.config.lora import LoRAConfig
from vllm.config.model import ModelConfig
from vllm.config.multimodal import MultiModalConfig
from vllm.config.observability import KVEventsConfig, ObservabilityConfig
from vllm.config.parallel import ParallelConfig
from vllm.config.pooler import PoolerConfig
from vllm.config.quantization.inc import IncConfig
from vllm.config.scheduler import SchedulerConfig
from vllm.config.speculative import SpeculativeConfig
from vllm.config.structured_output import StructuredOutputConfig
from vllm.config.vllm import DeviceConfig, VllmConfig

__all__ = [
    "CacheConfig",
    "ConnectorConfig",
    "DeviceConfig",
    "HPUConfig",
    "IncConfig",
    "KVEventsConfig",
    "KVTransferConfig",
    "LoRAConfig",
    "LoadConfig",
    "ModelArch",
    "ModelConfig",
    "MultiModalConfig",
    "ObservabilityConfig",
    "ParallelConfig",
    "PoolerConfig",
    "RopeConfig",
    "SchedulerConfig",
    "SpeculativeConfig",
    "StructuredOutputConfig",
    "VllmConfig",
]
